"""Any Gymnasium environment as tensors on a device.

`GymEnv` gives a Gymnasium vector environment (NumPy, CPU) the attributes and methods of `TensorEnv`
that training uses. Observations may be a flat Box, Discrete, or a Tuple or Dict of these. Actions
may be Discrete, or a flat Box with bounds.

An environment of your own is named as in `gymnasium.make`: "my_module:MyEnv-v0" if my_module
registers it. A class that is not registered is named "my_module:MyEnv" (`gymnasium_id`)."""

import contextlib
import signal
import warnings

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box

from ..distribution import Categorical, Gaussian
from ..state import TensorState
from .by_id import import_module_of, split_id, task_of


def one_line(thing) -> str:
    """An error's message or a space, which may have several lines, in one."""
    return " ".join(str(thing).split())


class EnvironmentFailed(RuntimeError):
    """An environment raised, or its process died."""


def flat(env: gymnasium.Env) -> gymnasium.Env:
    """Wraps an environment, so that its observations are flat features where they can be.

    A Discrete space becomes one feature for each value, which is 1 for the present value and 0 for
    the others. A Tuple or a Dict becomes the features of its parts. A Box stays as it is, because
    the network is not one for images.
    """
    space = env.observation_space
    if not isinstance(space, Box) and space.is_np_flattenable:
        return gymnasium.wrappers.FlattenObservation(env)
    return env


@contextlib.contextmanager
def children_ignore_interrupts():
    """A context in which processes that are started ignore Ctrl-C.

    Ctrl-C goes to every process of a terminal. The parent then ends these processes.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def gymnasium_id(env_id: str) -> str:
    """The name by which Gymnasium makes an environment, without the module that registers it.

    The module of a name "module:name" is imported. If that is the name of a class there, the class
    is registered, with the time limit of its attribute `spec`, if it has one. Raises ValueError if
    the module cannot be imported.
    """
    module, name = split_id(env_id)
    imported = import_module_of(env_id)
    named = getattr(imported, name, None) if imported else None
    if named is None or name in gymnasium.registry:
        return name
    own_id = f"{module}.{name}"
    spec = getattr(named, "spec", None)
    # An earlier class of this name, from a notebook's cell that was run again.
    gymnasium.registry.pop(own_id, None)
    gymnasium.register(
        own_id,
        named,
        max_episode_steps=getattr(spec, "max_episode_steps", None),
        reward_threshold=getattr(spec, "reward_threshold", None),
    )
    return own_id


def bounds_of(env_id: str, space: gymnasium.Space) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The lowest and highest values of each feature of an observation.

    Raises ValueError for a space that is no flat Box with features.
    """
    if not isinstance(space, Box) or len(space.shape) != 1 or not space.shape[0]:
        raise ValueError(
            f"env_id is {env_id!r}, whose observations are {one_line(space)}, not a flat "
            "Box of features: register it wrapped in FlattenObservation or TransformObservation "
            "of gymnasium.wrappers"
        )
    return tuple(space.low.astype(float).tolist()), tuple(space.high.astype(float).tolist())


def actions_of(
    env_id: str, space: gymnasium.Space
) -> tuple[int, int | tuple[np.ndarray, np.ndarray]]:
    """The attributes `num_actions` and `actions` of a GymEnv.

    Raises ValueError for a space that a policy cannot act in.
    """
    if isinstance(space, gymnasium.spaces.Discrete) and 2 <= space.n <= 256:
        return int(space.n), int(space.start)
    if isinstance(space, Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        with np.errstate(all="ignore"):
            is_finite = np.isfinite(space.high - space.low).all()
        if is_finite and space.shape[0]:
            return space.shape[0], (space.low, space.high)
    raise ValueError(
        f"env_id is {env_id!r}, whose actions are {one_line(space)}: register it wrapped in "
        "gymnasium.wrappers.TransformAction, with a Discrete of 2 to 256 actions, which the ring "
        "stores in a byte, or a flat Box of floats with finite bounds"
    )


class GymEnv(TensorState):
    """N copies of a Gymnasium environment on the CPU, with tensors on `device`.

    It takes the place of a TensorEnv. Environment i is seeded with `seed` + i. Without a time limit
    it gets one of 10,000 steps, with a warning.

    `vectorization`  sync: one after the other in this process; async: each in its own process

    Beside the attributes of a TensorEnv it has `actions`, the first of its discrete actions, or the
    lowest and highest values of its continuous actions, [A] each in the space's type; and
    `obs_type`, the type of its observations: float32 if that holds them.

    Raises ValueError for an environment that Gymnasium cannot make or that the agent cannot learn
    in. Observations must be a flat Box with features, or become one (`flat`). Actions must be
    Discrete, with 2 to 256 actions, or a flat Box of bounded floating-point numbers. The class and
    its methods raise EnvironmentFailed if the environment raises, or if one of its processes died.
    """

    # There is no state, because Gymnasium cannot save an environment. A resumed run starts new
    # episodes.
    NAMES = ()

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        device="cpu",
        seed: int = 0,
        vectorization: str = "sync",
    ):
        name = gymnasium_id(env_id)
        self.discount = getattr(task_of(name), "discount", 1.0)
        self.env_id = env_id
        self.num_envs = num_envs
        self.device = torch.device(device)
        is_async = vectorization == "async"
        try:
            with children_ignore_interrupts() if is_async else contextlib.nullcontext():
                self.envs = gymnasium.make_vec(
                    name,
                    num_envs,
                    vectorization_mode=vectorization,
                    vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP},
                    wrappers=[flat],
                )
        except gymnasium.error.Error as error:
            raise ValueError(
                f"env_id is {env_id!r}, which Gymnasium cannot make ({one_line(error).rstrip('.')})"
                ": register it first, or name the module that does, as in my_module:MyEnv-v0 or "
                "my_module:MyEnv"
            ) from error
        except Exception as error:  # whatever the environment's own code raises
            raise EnvironmentFailed(
                f"environment {env_id} cannot be made ({type(error).__name__}: {one_line(error)}): "
                "fix its class, whose __init__ must not need arguments"
            ) from error
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            observations = self.envs.single_observation_space
            self.bounds = bounds_of(env_id, observations)
            self.num_actions, self.actions = actions_of(env_id, self.envs.single_action_space)
            with self._guarded():
                obs, _ = self.envs.reset(seed=seed)
            on_error.pop_all()
        self.distribution = Categorical if isinstance(self.actions, int) else Gaussian
        # float32 holds whole numbers up to 2^24.
        is_held = np.can_cast(observations.dtype, np.float32) or (
            observations.dtype.kind in "iu" and np.abs(self.bounds).max() <= 2**24
        )
        self.obs_type = torch.float32 if is_held else torch.float64
        self.max_steps = self.envs.spec.max_episode_steps or 10_000
        if not self.envs.spec.max_episode_steps:
            warnings.warn(
                f"env_id is {env_id!r}, without a time limit, so an evaluation takes up to "
                f"{self.max_steps:,} steps: register it with max_episode_steps",
                stacklevel=2,
            )
        self.obs = self._tensor(obs, self.obs_type)
        self.done = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def draw(self, length: int) -> list[None]:
        """None for each step: the environment draws its own random numbers."""
        return [None] * length

    def step(
        self, action: torch.Tensor, start: None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Like TensorEnv.step.

        Discrete actions are [N], from 0. Continuous actions are [N, A]; they are clipped to [-1, 1]
        and scaled to the bounds of the space, in its type. Raises FloatingPointError for an action
        that is not a number.
        """
        actions = action.cpu().numpy()
        if isinstance(self.actions, int):
            actions = actions + self.actions
        elif np.isnan(actions).any():
            raise FloatingPointError(
                "action is not a number, because the policy's weights are not: lower learning_rate"
            )
        else:
            low, high = self.actions
            actions = (
                (low + (actions.clip(-1, 1) + 1) / 2 * (high - low))
                .astype(low.dtype)
                .clip(low, high)
            )
        with self._guarded():
            obs, reward, terminated, truncated, _ = self.envs.step(actions)
        # A step that resets has no reward and no end, whatever the environment returns.
        live = ~self.done
        self.obs = self._tensor(obs, self.obs_type)
        terminated, truncated = (
            self._tensor(flag, torch.bool) & live for flag in (terminated, truncated)
        )
        truncated &= ~terminated  # Gymnasium's time limit can set both
        self.done = terminated | truncated
        return (
            self.obs,
            self._tensor(reward, torch.float32).masked_fill_(~live, 0),
            terminated,
            truncated,
        )

    def close(self) -> None:
        """Closes the environments and their processes."""
        # Processes that have already ended raise.
        with contextlib.suppress(EOFError, ConnectionError):
            self.envs.close()

    def _tensor(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        # A copy, because the environment may reuse its array.
        return torch.tensor(array, dtype=dtype, device=self.device)

    @contextlib.contextmanager
    def _guarded(self):
        """A context in which an error of the environment becomes EnvironmentFailed.

        The environment's processes are then ended.
        """
        try:
            # The environment may use torch in its own way.
            with torch.inference_mode(False), torch.no_grad():
                yield
        except Exception as error:
            for process in getattr(self.envs, "processes", ()):
                # Gymnasium's close would wait for an answer from dead processes
                process.terminate()
                self.envs.closed = True
            with contextlib.suppress(Exception):
                self.envs.close()
            reason = f"{type(error).__name__}: {one_line(error)}"
            if isinstance(error, EOFError | ConnectionError):
                reason = "one of its processes died"
            raise EnvironmentFailed(
                f"environment {self.env_id} failed ({reason}): "
                "fix it, and resume if there is a checkpoint"
            ) from error
