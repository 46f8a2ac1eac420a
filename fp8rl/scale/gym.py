"""Any Gymnasium environment as tensors on a device.

`GymEnv` gives a Gymnasium vector environment (NumPy, CPU) the attributes and methods of `TensorEnv` that training uses. Any
environment with flat Box observations and Discrete or flat, bounded Box actions will do.
"""

import contextlib
import signal
import threading
import warnings
from typing import NamedTuple

import gymnasium
import numpy as np
import torch

from ..distribution import Categorical, Gaussian
from ..tasks.by_id import task_of

VECTORIZATIONS = ("sync", "async", "vector_entry_point")


# What an environment's own code may raise. sys.exit() must not end the program silently; Ctrl-C is not the environment's.
RAISES = Exception, SystemExit
OLD_STEP = "expected 5, got 4"  # Python's error message inside Gymnasium
KNOWN: dict[str, tuple] = {}  # interfaces by name, with the registration that each is of: a name may be registered again


class EnvironmentFailed(RuntimeError):
    """An environment raised, exited or did not follow Gymnasium's API, or its process died."""


def failure(env_id: str, error: BaseException) -> EnvironmentFailed:
    """The exception for an environment that raised `error`, with a one-line message."""
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, EOFError | ConnectionError):
        what = "one of its processes died"
    elif isinstance(error, ValueError) and OLD_STEP in str(error):
        what = "its step returns 4 values as in old gym, not obs, reward, terminated, truncated, info"
    return EnvironmentFailed(f"environment {env_id} failed ({what}): fix it, and resume if there is a checkpoint")


def require(name: str, array, shape: tuple[int, ...], dtype=float) -> None:
    """Raises ValueError if an array does not have this shape, or a type that can be cast to this one."""
    array = np.asarray(array)
    if array.shape != shape or (array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind")):
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, not {np.dtype(dtype)}{list(shape)}")


class Strict(gymnasium.Wrapper):
    """Rejects observations whose shape or type differs from their space's; some of Gymnasium's vector forms stretch and cast
    them."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.form = env.observation_space.shape, env.observation_space.dtype

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        require("obs", obs, *self.form)
        return obs, info

    def step(self, action):
        obs, *rest = self.env.step(action)
        require("obs", obs, *self.form)
        return obs, *rest


@contextlib.contextmanager
def children_ignore_interrupts():
    """Processes started inside ignore Ctrl-C, which goes to every process of a terminal: the parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signal handlers can be set only there
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Interface(NamedTuple):
    """The interface of a Gymnasium environment. `actions` is the first of its discrete actions, or the lowest and highest values
    of continuous ones, float32 [A] each."""

    bounds: tuple[tuple[float, ...], tuple[float, ...]]
    num_actions: int
    actions: int | tuple[np.ndarray, np.ndarray]
    max_steps: int


def interface_of(env_id: str) -> Interface:
    """Bounds of each feature of an observation, the actions and the time limit (10,000 steps if it has none, with a warning).

    Raises:
        ValueError: Gymnasium cannot make it, its observations are not a flat Box with features, or its actions are neither
            Discrete with 2 to 256 of them nor a flat Box of bounded floating-point numbers.
        EnvironmentFailed: it calls sys.exit.
    """
    name = env_id.rpartition(":")[2]  # without a module to import
    spec, known = KNOWN.get(name, (None, None))
    if spec and spec is gymnasium.registry.get(name):
        return known
    try:
        env = gymnasium.make(env_id)
    except SystemExit as error:
        raise failure(env_id, error) from error
    except Exception as error:  # an unknown id, a missing package, or whatever the environment's own code raises
        reason = " ".join(str(error).split())
        raise ValueError(f"env_id is {env_id!r}, which Gymnasium cannot make ({reason}): register or install it") from error
    observations, actions = env.observation_space, env.action_space
    env.close()
    if not isinstance(observations, gymnasium.spaces.Box) or len(observations.shape) != 1:
        kind = f"{type(observations).__name__}{list(observations.shape or ())}"
        remedy = "register it wrapped in gymnasium.wrappers.FlattenObservation"
        raise ValueError(f"env_id is {env_id!r}, whose observations are {kind}, not a flat Box: {remedy}")
    if observations.shape == (0,):
        raise ValueError(f"env_id is {env_id!r}, whose observations are Box[0], without features: choose another")
    number, about = actions_of(env_id, actions)
    bounds = tuple(tuple(bound.astype(float).tolist()) for bound in (observations.low, observations.high))
    limit = env.spec.max_episode_steps
    if limit is None:
        limit = 10_000
        what = f"registered without a time limit, so an evaluation takes up to {limit:,} steps"
        warnings.warn(f"env_id is {env_id!r}, {what}: register it with max_episode_steps", stacklevel=2)
    known = Interface(bounds, number, about, limit)
    KNOWN[name] = gymnasium.registry.get(name), known
    return known


def actions_of(env_id: str, space: gymnasium.Space) -> tuple[int, int | tuple[np.ndarray, np.ndarray]]:
    """`num_actions` and `actions` of an Interface. Raises ValueError for a space that a policy cannot act in."""
    kind, remedy = repr(space), None
    if isinstance(space, gymnasium.spaces.Discrete):
        if 2 <= space.n <= 256:
            return int(space.n), int(space.start)
        remedy = "choose one with 2 to 256 actions, the ring stores them in a byte"
    elif isinstance(space, gymnasium.spaces.Box):
        kind = f"Box{list(space.shape)} of {space.dtype}"
        if len(space.shape) == 1 and space.shape[0] and space.dtype.kind == "f" and space.is_bounded():
            return space.shape[0], (space.low.astype(np.float32), space.high.astype(np.float32))
        if len(space.shape) == 1 and not space.is_bounded():
            kind += " without finite bounds"
        remedy = "register it wrapped in gymnasium.wrappers.TransformAction, with a flat Box of floats with finite bounds"
    else:
        remedy = "register it wrapped in gymnasium.wrappers.TransformAction, with a Discrete or a flat Box of the same actions"
    raise ValueError(f"env_id is {env_id!r}, whose actions are {kind}: {remedy}")


class GymEnv:
    """N copies of a Gymnasium environment as tensors on a device, with NEXT_STEP autoreset.

    Attributes:
        bounds: lowest and highest value of each feature of an observation.
        num_actions, distribution, max_steps, discount: as in TensorEnv.
        obs: float32 [N, F], the current observations.
        done: bool [N], whether the last step ended the episode, so that the next one resets and ignores its action.

    Args:
        env_id: as for gymnasium.make.
        num_envs: N.
        device: where the tensors are. The environments themselves run on the CPU.
        seed: environment i starts from seed + i.
        vectorization: sync, one after the other in this process; async, each in its own process; or vector_entry_point, the
            environment's own batched form, if it has one.

    Raises:
        ValueError: an environment of another kind, or an unknown vectorization or one that it does not support.
        EnvironmentFailed: it raises or exits when it starts or steps, does not follow the API, or one of its processes died.
    """

    def __init__(self, env_id: str, num_envs: int, device="cpu", seed: int = 0, vectorization: str = "sync"):
        if vectorization not in VECTORIZATIONS:
            raise ValueError(f"vectorization is {vectorization!r}: choose from {', '.join(VECTORIZATIONS)}")
        self.bounds, self.num_actions, self.actions, self.max_steps = interface_of(env_id)
        self.distribution = Categorical if isinstance(self.actions, int) else Gaussian
        self.discount = getattr(task_of(env_id.rpartition(":")[2]), "discount", 1.0)  # without a module to import
        self.env_id, self.num_envs = env_id, num_envs
        self.device = torch.device(device)
        self._async = vectorization == "async"
        kwargs = {}
        if vectorization != "vector_entry_point":
            kwargs["vector_kwargs"] = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
            kwargs["wrappers"] = [Strict]
        self.envs = None
        try:
            with children_ignore_interrupts() if self._async else contextlib.nullcontext():
                self.envs = gymnasium.make_vec(env_id, self.num_envs, vectorization_mode=vectorization, **kwargs)
        except RAISES as error:
            if not (vectorization == "vector_entry_point" and isinstance(error, gymnasium.error.Error)):
                raise failure(env_id, error) from error
        if not self.envs or self.envs.metadata.get("autoreset_mode") != gymnasium.vector.AutoresetMode.NEXT_STEP:
            self.close()
            remedy = "choose sync or async"
            raise ValueError(
                f"vectorization is {vectorization!r}, which {env_id} does not support with NEXT_STEP autoreset: {remedy}"
            )
        self.obs = self._tensor(self._call(self._reset, seed), torch.float32)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def draw(self, length: int) -> list[None]:
        """None for each step: the environment draws its own random numbers."""
        return [None] * length

    def step(self, action: torch.Tensor, start: None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Like TensorEnv.step: takes actions [N], from 0, or [N, A], in units of the bounds and clipped to them; returns obs
        float32 [N, F], reward float32 [N], terminated and truncated bool [N]. Raises FloatingPointError for an action that is not
        a number."""
        actions = action.cpu().numpy()
        if isinstance(self.actions, int):
            actions = actions + self.actions
        elif np.isnan(actions).any():
            raise FloatingPointError("action is not a number, because the policy's weights are not: lower learning_rate")
        else:
            low, high = self.actions
            actions = low + (actions.clip(-1, 1) + 1) / 2 * (high - low)
        obs, reward, terminated, truncated = self._call(self._step, actions)
        live = ~self.done  # a step that resets has no reward and no end, whatever the environment returns
        self.obs = self._tensor(obs, torch.float32)
        terminated, truncated = (self._tensor(flag, torch.bool) & live for flag in (terminated, truncated))
        truncated &= ~terminated  # Gymnasium's time limit can set both
        self.done = terminated | truncated
        return self.obs, self._tensor(reward, torch.float32) * live, terminated, truncated

    def close(self) -> None:
        """Closes the environments and their processes."""
        with contextlib.suppress(EOFError, ConnectionError):  # from processes that have already ended
            if self.envs:
                self.envs.close()

    def state_dict(self) -> dict:
        """Empty: Gymnasium has no way to save an environment. A resumed run starts new episodes."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Does nothing."""

    def _tensor(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype, device=self.device)  # a copy: the environment may reuse its array

    def _reset(self, seed: int) -> np.ndarray:
        obs, _ = self.envs.reset(seed=seed)
        require("obs", obs, (self.num_envs, len(self.bounds[0])))
        return obs

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        obs, reward, terminated, truncated, _ = self.envs.step(actions)
        require("obs", obs, (self.num_envs, len(self.bounds[0])))
        for name, array in {"reward": reward, "terminated": terminated, "truncated": truncated}.items():
            require(name, array, (self.num_envs,))
        return obs, reward, terminated, truncated

    def _call(self, method, argument):
        try:
            with warnings.catch_warnings() if self._async else contextlib.nullcontext():
                if self._async:
                    warnings.simplefilter("ignore")  # Gymnasium's repeat a worker's error in several lines
                with torch.inference_mode(False), torch.no_grad():  # the environment may use torch in its own way
                    return method(argument)
        except RAISES as error:
            for process in getattr(self.envs, "processes", ()):
                process.terminate()  # Gymnasium's close would wait for an answer from dead processes
                self.envs.closed = True
            with contextlib.suppress(*RAISES):
                self.envs.close()
            raise failure(self.env_id, error) from error
