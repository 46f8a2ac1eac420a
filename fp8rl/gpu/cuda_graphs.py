"""CUDA graphs: launch a whole iteration as one.

An iteration of a small network is thousands of kernels of microseconds each, and most of the time
is spent by the CPU launching them one by one. A CUDA graph records the launches once and replays
them all with a single call. The price: a replay repeats exactly the same launches on exactly the
same addresses. So nothing inside may read a number on the host, results are overwritten by the next
replay, and what changes from one to the next (counters of random numbers, the ring's clock, the
learning rate, the loss scale, Adam's step count) must be in tensors on the device. That is why Adam
must be `capturable`."""

import contextlib
import copy
import functools
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable

import torch

from ..around import Around
from ..rollout import Collector, Rollout

# Eager calls before the capture, on the same stream: they initialize libraries and lazily created
# state (Adam's, the scaler's).
WARMUP = 3
GRAPHED = ("cuda",)  # types of devices that have graphs


class Graphed:
    """A function that updates its own state in place, on a device: run eagerly at its first calls,
    captured at the next and replayed from then on. The tensors that it returns are overwritten by
    the next call."""

    def __init__(self, function: Callable, device: torch.device):
        # A method weakly, because its run holds this graph: of a circle, memory is free only when
        # garbage is collected.
        self.reference = (
            weakref.WeakMethod(function) if inspect.ismethod(function) else lambda: function
        )
        self.stream, self.calls, self.graph = stream_on(device), 0, None

    def __deepcopy__(self, memo: dict) -> "Graphed":
        """Of a run's copy, which captures its own."""
        function = self.reference()
        return Graphed(
            getattr(copy.deepcopy(function.__self__, memo), function.__name__), self.stream.device
        )

    def __call__(self):
        self.calls += 1
        function = self.reference()
        if self.calls <= WARMUP:
            outside = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(outside)
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".*capturable=True.*"
                )  # these steps are not captured yet
                result = function()
            outside.wait_stream(self.stream)
            return result
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(self.stream.device),
                uncollected(),
                torch.cuda.graph(graph, stream=self.stream),
            ):
                self.result = function()
            self.graph = graph
        self.graph.replay()
        return self.result


@functools.cache
def stream_on(device: torch.device) -> torch.cuda.Stream:
    """The stream of all graphs of a device: for each stream, cuBLAS keeps memory of its own until
    the process ends."""
    return torch.cuda.Stream(device)


def launcher(graph: bool, device: torch.device) -> Callable | None:
    """What makes a `Graphed` of a function, if one is wanted and the device has graphs."""
    return functools.partial(Graphed, device=device) if graph and device.type in GRAPHED else None


@contextlib.contextmanager
def uncollected():
    """No garbage is collected inside: an earlier run's graphs may be part of it, and to destroy one
    spoils a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class InPlace(Around):
    """A collector for graphs: what its next rollout starts from, environments, counters and a
    recurrent state, stays in the same tensors."""

    def __init__(self, inner: Collector):
        super().__init__(inner)
        env = inner.env
        self.held = {
            name: getattr(env, name).clone() for name in env.NAMES
        }  # a task's starts may share memory
        self.counters = torch.zeros(2, dtype=torch.int64, device=env.device)
        if inner.model.recurrent:
            inner.state = torch.zeros(
                env.num_envs, inner.model.hidden_size, dtype=torch.float32, device=env.device
            )
        self.state = inner.state
        self.put_back()

    def collect(self, learned: torch.nn.Module) -> Rollout:
        rollout = self.inner.collect(learned)
        self.put_back()
        return rollout

    def put_back(self) -> None:
        """Copies what the next rollout starts from to where the last one found it."""
        env, (rollouts, draws) = self.inner.env, self.counters
        for name, held in self.held.items():
            setattr(env, name, held.copy_(getattr(env, name)))
        if not isinstance(self.inner.rollouts, torch.Tensor):  # new, or loaded
            self.inner.rollouts, env.draws = (
                rollouts.fill_(self.inner.rollouts),
                draws.fill_(env.draws),
            )
        if self.inner.state is not None:
            self.inner.state = self.state.copy_(self.inner.state)

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        self.inner.load_state_dict(state, rollouts)
        self.put_back()
