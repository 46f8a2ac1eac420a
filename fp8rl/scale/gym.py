"""Any Gymnasium environment as tensors on a device, and data from environments that reset in the same step.

`GymEnv` gives a Gymnasium vector environment (NumPy, CPU) the attributes and methods of `TensorEnv` that training uses. Any
environment with flat Box observations and Discrete or flat, bounded Box actions will do.

Data from elsewhere often lacks final observations: the environment reset in the same step, and the row after an end is already
the next episode's. `same_step_rollout` converts such data to an ordinary rollout, with a dummy row after each end. The last
observation before the end stands in for the final one (as TorchRL's value estimators replace a NaN there), so targets are finite,
but wrong after a truncation by discount_t (V(x_t) - V(x_{t+1})). Alternatively the row is dropped, which is not wrong.
"""

import contextlib
import functools
import secrets
import signal
import threading
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space

from ..distribution import Categorical, Gaussian
from ..env import MAX_STEPS, Cart
from ..rollout import DUMMY, TERMINATED, TRUNCATED, Rollout
from ..tasks.by_id import TASKS
from ..tasks.cart import CustomEnv, spaces_of

VECTORIZATIONS = ("sync", "async", "vector_entry_point")


# What an environment's own code may raise. sys.exit() must not end the program silently; Ctrl-C is not the environment's.
RAISES = Exception, SystemExit
OLD_STEP = "expected 5, got 4"  # Python's error message inside Gymnasium


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


@functools.lru_cache
def interface_of(env_id: str) -> Interface:
    """Bounds of each feature of an observation, the actions and the time limit (10,000 steps if it has none, with a warning).

    Raises:
        ValueError: Gymnasium cannot make it, its observations are not a flat Box with features, or its actions are neither
            Discrete with 2 to 256 of them nor a flat Box of bounded floating-point numbers.
        EnvironmentFailed: it calls sys.exit.
    """
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
    return Interface(bounds, number, about, limit)


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
        self.discount = getattr(TASKS.get(env_id.rpartition(":")[2]), "discount", 1.0)  # without a module to import
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


def same_step_rollout(obs, action, reward, terminated, truncated, behavior_logp, missing_next: str = "nan") -> Rollout:
    """A Rollout from data without final observations (module docstring).

    Args:
        obs: float32 [T+1, B, F]. Row t+1 is the result of action t, or the next episode's first observation if t ended one.
        action, reward, terminated, truncated, behavior_logp: [T, B].
        missing_next: "nan" keeps truncated rows, with the stand-in; "drop" leaves them out.

    Returns:
        A Rollout of T + E rows, where E is the largest number of ends in a column; columns with fewer are padded with dummy rows.

    Raises:
        ValueError: another `missing_next`.
    """
    if missing_next not in ("nan", "drop"):
        raise ValueError(f"missing_next is {missing_next!r}: choose nan or drop")
    terminated, truncated = terminated.bool(), truncated.bool() & ~terminated.bool()
    ended = (terminated | truncated).long()
    length, columns = action.shape
    place = torch.arange(length).unsqueeze(-1) + ended.cumsum(0) - ended  # where each row goes, after the dummies before it
    rows = length + int(ended.sum(0).max())

    def spread(values, fill):
        return values.new_full((rows, columns), fill).scatter_(0, place, values)

    flags = TERMINATED * terminated + TRUNCATED * truncated + (DUMMY * truncated if missing_next == "drop" else 0)
    number = torch.arange(length).unsqueeze(-1).expand(-1, columns)
    source = torch.full((rows + 1, columns), length)  # which observation goes into each row
    source.scatter_(0, place + 1, torch.where(ended.bool(), number, length))  # after an end, the one before it again
    source.scatter_(0, place, number)
    full_obs = obs.gather(0, source.unsqueeze(-1).expand(-1, -1, obs.shape[-1]))
    rest = spread(action.long(), 0), spread(reward, 0), spread(flags.to(torch.uint8), DUMMY), spread(behavior_logp, 0)
    return Rollout(full_obs, *rest)


class CustomVectorEnv(gymnasium.vector.VectorEnv):
    """`Cart` on the CPU with Gymnasium's NumPy vector API; `gymnasium.make_vec` builds it.

    Observations float32 [N, F], actions integers [N], rewards float32 [N], terminations and truncations bool [N]. A step that
    leaves the bounds at the time limit is terminated and truncated, as in CustomEnv.

    Args:
        num_envs: N.
        max_episode_steps: maximum steps in an episode, up to 200; None is 200.
        start_noise, render_mode, extra_features, hide_velocity: as in CustomEnv; nothing is rendered.

    Raises:
        ValueError: `num_envs` below 1, `max_episode_steps` outside [1, 200], `start_noise` outside [0, 1], negative
            `extra_features`, or actions outside the space.
    """

    metadata = {**CustomEnv.metadata, "render_modes": [], "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        start_noise: float = 0.05,
        render_mode: None = None,
        extra_features: int = 0,
        hide_velocity: bool = False,
        max_episode_steps: int | None = None,
    ):
        self.max_episode_steps = MAX_STEPS if max_episode_steps is None else max_episode_steps
        if not 1 <= self.max_episode_steps <= MAX_STEPS:
            raise ValueError(f"max_episode_steps is {max_episode_steps}: use a number from 1 to {MAX_STEPS}")
        observed = {"extra_features": extra_features, "hide_velocity": hide_velocity}
        self.env = Cart(num_envs, start_noise, seed=secrets.randbits(32), **observed)  # until `reset` is given one
        self.own = {}  # own generators of environments, by index
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space, self.single_action_space = spaces_of(**observed)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None):
        """Resets every environment, or those where `options["reset_mask"]`, bool [N], is True; the others stay as they are.

        Args:
            seed: an integer is that of all starts and noise (rng.py). A list gives environment i its own generator for seed[i],
                with the same numbers as a CustomEnv of that seed, whatever the others do, until another seed is given; None keeps
                its generator. With a mask an integer means the list seed, seed + 1, ..., and seeds are ignored where the mask is
                False.

        Raises:
            ValueError: an invalid list of seeds, or a mask that is not bool [N] with at least one True.
        """
        everywhere = np.ones(self.num_envs, dtype=bool)
        mask = (options or {}).get("reset_mask", everywhere)
        if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != everywhere.shape or not mask.any():
            kind = f"{getattr(mask, 'dtype', type(mask).__name__)}{list(np.shape(mask))}"
            raise ValueError(f"reset_mask is {kind}: pass a NumPy array, bool[{self.num_envs}], with a True in it")
        if isinstance(seed, int | np.integer) and mask is everywhere:
            self.env.seed, self.env.draws = int(seed), 0
            self.own = {}
        elif seed is not None:
            seeds = list(seed) if isinstance(seed, Sequence | np.ndarray) else [seed + i for i in range(self.num_envs)]
            good = [one is None or (isinstance(one, int | np.integer) and one >= 0) for one in seeds]
            if len(seeds) != self.num_envs or not all(good):
                raise ValueError(
                    f"seed is {seed}: pass a non-negative integer or a list of {self.num_envs}, with None for no seed"
                )
            given = {i: np.random.default_rng(one) for i, one in enumerate(seeds) if mask[i] and one is not None}
            self.own = self.own | given
        before = self.env.tensors()
        self.env.reset(self._draw(begins=mask, rows=mask))
        for name, x in self.env.tensors().items():
            x[~mask] = before[name][~mask]
        return self.env.obs.numpy().copy(), {}

    def _draw(self, begins: np.ndarray, rows: np.ndarray) -> torch.Tensor:
        """`Cart.draw` for one step; environments with their own generator take starts from it where `begins`, and noise in
        `rows`, both bool [N]."""
        (start,) = self.env.draw(1)
        for i, generator in self.own.items():  # in the same order as CustomEnv
            if begins[i]:
                start[i, :2] = torch.from_numpy(generator.uniform(-self.env.start_noise, self.env.start_noise, 2))
            if self.env.channels and rows[i]:
                start[i, 2:] = torch.from_numpy(generator.uniform(-1, 1, self.env.channels))
        return start

    def step(self, actions):
        actions = np.asarray(actions)
        if actions.dtype.kind not in "iu" or not self.action_space.contains(actions.astype(np.int64)):
            raise ValueError(f"actions {actions} are outside {self.action_space}: pass {self.num_envs} integers, 0 or 1")
        start = self._draw(begins=self.env.done.numpy(), rows=np.ones(self.num_envs, dtype=bool))
        obs, reward, terminated, _ = self.env.step(torch.from_numpy(actions.astype(np.int64)), start)
        truncated = self.env.steps >= self.max_episode_steps
        self.env.done = terminated | truncated
        return obs.numpy().copy(), reward.numpy(), terminated.numpy(), truncated.numpy(), {}
