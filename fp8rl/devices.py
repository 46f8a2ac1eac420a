"""What runs where, and any Gymnasium environment as tensors on a device.

A run has four parts, each on a device of its own if its `Placement` says so:

    collect    the environments and the acting policy, a copy of the learner's weights   -> rollouts
    store      the replay ring                                                            -> slices
    learn      the parameters, the optimizer and the loss                                 -> weights
    evaluate   a copy of the weights and environments of its own                          -> returns

Between them go rollouts, slices and weights, nothing else. PyTorch refuses most mixtures of devices by itself, but from deep
inside and without a name, and takes some silently (a zero-dimensional tensor from the CPU, an index, a copy into a slice). So
where tensors cross, `check_devices` asserts the contract, and weights are copied, never shared: a policy that acts while the
learner updates must not change under way. (The scheme of rlstructures: a device each for learner, batcher and evaluation, and a
wrapper that checks.)

`GymEnv` puts a Gymnasium vector environment (NumPy, CPU) behind the same four attributes and one method that training uses of
`BatchedEnv`. Any environment with a flat Box of observations and Discrete actions will do.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch import nn

from .env import BatchedEnv

VECTORIZATIONS = ("sync", "async", "vector_entry_point")


@dataclass(frozen=True)
class Placement:
    """Devices of a run's parts (cpu, cuda, cuda:1). None is the config's `device`."""

    learn: str | None = None
    """Device of parameters, optimizer and loss."""
    collect: str | None = None
    """Device of environments and acting policy."""
    store: str | None = None
    """Device of the replay ring; cpu keeps it in RAM."""
    evaluate: str | None = None
    """Device that evaluates."""
    async_collect: bool = False
    """Collect in a thread of its own, one iteration ahead of the learner, with weights one update older. The importance ratios
    take care of that as of any other staleness."""


def torch_device(name: str, field: str = "device") -> torch.device:
    """A CPU or CUDA device that exists, or a ValueError that says which do, about the config's `field`."""
    try:
        device = torch.empty(0, device=name).device  # with its index, as tensors on it will say
        if device.type in ("cpu", "cuda"):
            return device
    except (RuntimeError, AssertionError):
        pass  # torch knows no such device, or was built without it
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    raise ValueError(f"{field} is {name!r} and torch cannot use it here: choose from {', '.join(devices)}")


def check_devices(where: str, expected: torch.device, **tensors: torch.Tensor | None) -> None:
    """Asserts that named tensors (None is skipped) are on one device.

    Raises:
        ValueError: one is not; the message names it, the device expected and the one found.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != expected:
            raise ValueError(f"{where}: {name} is on {tensor.device}, expected {expected}: move it with .to({str(expected)!r})")


@torch.no_grad()
def sync_weights(source: nn.Module, target: nn.Module) -> None:
    """Copies parameters and buffers into another module of the same architecture.

    The target's tensors stay its own, never the source's. Between unequal devices the copy goes through the CPU, which every
    machine can do; two GPUs need not see each other's memory.

    Raises:
        ValueError: other names or shapes, or tensors that both modules share.
    """
    ours, theirs = source.state_dict(), target.state_dict()
    if {name: x.shape for name, x in ours.items()} != {name: x.shape for name, x in theirs.items()}:
        raise ValueError("source and target differ in architecture: make both from one config")
    for name, tensor in theirs.items():
        if tensor.data_ptr() == ours[name].data_ptr() and tensor.numel():
            raise ValueError(f"source and target share {name}: give the target parameters of its own")
        same = tensor.device == ours[name].device
        tensor.copy_(ours[name] if same else ours[name].cpu())


def on_own_stream(job: Callable[[], tuple], device: torch.device) -> Callable[[], tuple]:
    """A job for another thread, on a CUDA stream of its own: on the default stream, which all threads share, the job's kernels
    would wait for the caller's. It begins behind what the caller has launched, and its result is finished when it returns. On a
    CPU it is the job itself."""
    if device.type != "cuda":
        return job
    caller, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(caller)

    def run():
        with torch.cuda.stream(own):
            result = job()
        own.synchronize()
        for x in result:
            if x is not None:
                x.record_stream(caller)  # its memory is not used again before the caller's kernels have read it
        return result

    return run


class EnvironmentFailed(RuntimeError):
    """An environment raised, or the process that it ran in died."""


class Interface(NamedTuple):
    """What a Gymnasium environment takes and gives."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    num_actions: int
    first_action: int
    max_steps: int


@functools.lru_cache
def interface_of(env_id: str) -> Interface:
    """Bounds of each feature of an observation, the actions and the time limit (10,000 steps if it has none).

    Raises:
        ValueError: Gymnasium cannot make it, its observations are no flat Box, or its actions are not Discrete.
    """
    try:
        env = gymnasium.make(env_id)
    except Exception as error:  # an unknown id, a missing package, or whatever the environment's own code raises
        reason = " ".join(str(error).split())
        raise ValueError(f"env_id is {env_id!r}, which Gymnasium cannot make ({reason}): register or install it") from error
    observations, actions = env.observation_space, env.action_space
    env.close()
    if not isinstance(observations, gymnasium.spaces.Box) or len(observations.shape) != 1:
        kind = f"{type(observations).__name__}{list(observations.shape or ())}"
        mend = "register it wrapped in gymnasium.wrappers.FlattenObservation"
        raise ValueError(f"env_id is {env_id!r}, whose observations are {kind}, not a flat Box: {mend}")
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise ValueError(f"env_id is {env_id!r}, whose actions are {type(actions).__name__}, not Discrete: choose another")
    low, high = (tuple(bound.astype(float).tolist()) for bound in (observations.low, observations.high))
    limit = env.spec.max_episode_steps or 10_000
    return Interface(low, high, int(actions.n), int(actions.start), limit)


class GymEnv:
    """N copies of a Gymnasium environment as tensors on a device, with NEXT_STEP autoreset.

    Attributes:
        obs: float32 [N, F], the current observations.
        done: bool [N], whether the last step ended the episode, so that the next one resets and ignores its action.
        max_steps: steps in an episode at most.

    Args:
        env_id: as for gymnasium.make.
        num_envs: N.
        device: where the tensors live. The environments themselves run on the CPU.
        seed: environment i starts from seed + i.
        vectorization: sync, one after the other in this process; async, each in a process of its own; or vector_entry_point, the
            environment's own batched form, if it has one.
        share: see BatchedEnv; here environment i of the whole keeps its seed.

    Raises:
        ValueError: an environment of another kind, or a vectorization that it does not offer.
        EnvironmentFailed: it raises when it starts or steps, or one of its processes died.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        device="cpu",
        seed: int = 0,
        vectorization: str = "sync",
        share: tuple[int, int] = (0, 1),
    ):
        *_, self.first_action, self.max_steps = interface_of(env_id)
        self.env_id, self.share = env_id, share
        self.device = torch.device(device)
        self.num_envs = num_envs // share[1]
        self._async = vectorization == "async"
        kwargs = {}
        if vectorization != "vector_entry_point":
            kwargs["vector_kwargs"] = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.envs = None
        try:
            self.envs = gymnasium.make_vec(env_id, self.num_envs, vectorization_mode=vectorization, **kwargs)
        except Exception as error:
            if not (vectorization == "vector_entry_point" and isinstance(error, gymnasium.error.Error)):
                raise self._failure(error) from error
        if not self.envs or self.envs.metadata.get("autoreset_mode") != gymnasium.vector.AutoresetMode.NEXT_STEP:
            self.close()
            mend = "choose sync or async"
            raise ValueError(f"vectorization is {vectorization!r}, which {env_id} lacks with NEXT_STEP autoreset: {mend}")
        obs, _ = self._call(self.envs.reset, seed=seed + share[0] * self.num_envs)
        self.obs = self._tensor(obs, torch.float32)
        self.done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def draw(self, length: int) -> list[None]:
        """Nothing for each step: the environment draws for itself."""
        return [None] * length

    def step(self, action: torch.Tensor, drawn: None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As BatchedEnv.step: takes actions [N], from 0; gives obs float32 [N, F], reward float32 [N], terminated and truncated
        bool [N]."""
        actions = action.cpu().numpy() + self.first_action
        obs, reward, terminated, truncated, _ = self._call(self.envs.step, actions)
        live = ~self.done  # a step that resets gives no reward and ends nothing, whatever the environment says
        self.obs = self._tensor(obs, torch.float32)
        terminated, truncated = (self._tensor(flag, torch.bool) & live for flag in (terminated, truncated))
        self.done = terminated | truncated
        return self.obs, self._tensor(reward, torch.float32) * live, terminated, truncated

    def close(self) -> None:
        """Ends the environments and their processes."""
        with contextlib.suppress(EOFError, ConnectionError):  # of processes that ended by themselves
            if self.envs:
                self.envs.close()

    def tensors(self) -> None:
        """None: what the next step depends on is the environment's own."""

    def state_dict(self) -> None:
        """None: Gymnasium has no way to save an environment. Who goes on begins new episodes."""

    def _tensor(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(array, dtype=dtype, device=self.device)  # a copy: the environment may use its array again

    def _call(self, method, *args, **kwargs):
        try:
            with warnings.catch_warnings() if self._async else contextlib.nullcontext():
                if self._async:
                    warnings.simplefilter("ignore")  # Gymnasium's, which repeat a worker's error in several lines
                return method(*args, **kwargs)
        except Exception as error:  # whatever the environment's own code raises
            failure = self._failure(error)
            for process in getattr(self.envs, "processes", ()):
                process.terminate()  # Gymnasium's close would wait for an answer from the dead
                self.envs.closed = True
            with contextlib.suppress(Exception):
                self.envs.close()
            raise failure from error

    def _failure(self, error: Exception) -> EnvironmentFailed:
        died = isinstance(error, EOFError | ConnectionError)
        what = "a process of it died" if died else f"{type(error).__name__}: {' '.join(str(error).split())}"
        return EnvironmentFailed(f"environment {self.env_id} failed ({what}): mend it, and resume if there is a checkpoint")


def make_env(
    num_envs: int,
    start_noise: float = 0.05,
    device="cpu",
    generator: torch.Generator | None = None,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
    env_id: str | None = None,
    vectorization: str = "sync",
    **observed,
) -> BatchedEnv | GymEnv:
    """The package's own environment, which takes its noise from `generator` and the options `observed`, or the one named by
    `env_id`, which takes `seed` and `vectorization`."""
    if env_id is None:
        return BatchedEnv(num_envs, start_noise, device, generator, share=share, **observed)
    return GymEnv(env_id, num_envs, device, seed, vectorization, share)
