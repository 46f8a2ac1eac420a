"""CUDA graphs: launch collection, or an update, as one.

A small network's update is a few hundred kernels of microseconds each, and most of the time is spent by the CPU launching them
one by one. A CUDA graph records the launches once and replays them all with a single call. The price: a replay repeats exactly
the same launches on exactly the same addresses. So nothing inside may read a number on the host, inputs must be in tensors that
stay in place, the results of a replay are overwritten by the next, and what changes between replays (random numbers, the learning
rate, the loss scale, Adam's step count) must be in tensors on the device. That is why Adam must be `capturable`.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..rollout import Collector, Rollout
from ..train import Learner
from .around import Around

# Eager calls before the capture, on the same stream: they initialize libraries and lazily created state (Adam's, the scaler's).
WARMUP = 3
GRAPHED = ("cuda",)  # types of devices that have graphs


class Graphed:
    """A function of CUDA tensors, in tuples or Rollouts, that updates its own state in place: run eagerly for its first calls,
    captured at the next and replayed from then on. What it returns is overwritten by the next call."""

    def __init__(self, function: Callable, device: torch.device):
        self.function, self.stream, self.calls, self.graph = function, torch.cuda.Stream(device), 0, None

    def __call__(self, *batches):
        self.calls += 1
        if self.calls <= WARMUP:
            outside = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(outside)
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*capturable=True.*")  # these steps are not captured yet
                result = self.function(*batches)
            outside.wait_stream(self.stream)
            return result
        if self.graph is None:
            self.inputs = tree_map(lambda x: x if x is None else x.clone(), batches)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.stream.device), uncollected(), torch.cuda.graph(graph, stream=self.stream):
                self.result = self.function(*self.inputs)
            self.graph = graph
        for mine, new in zip(tree_leaves(self.inputs), tree_leaves(batches), strict=True):
            if mine is not None:
                mine.copy_(new)
        self.graph.replay()
        return self.result


@contextlib.contextmanager
def uncollected():
    """No garbage is collected inside: an earlier run's graphs may be part of it, and to destroy one spoils a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphedCollector(Around):
    """A collector that replays its steps. The environments' tensors and a recurrent state stay at the same addresses."""

    def __init__(self, inner: Collector):
        super().__init__(inner)
        env, self.graph = inner.env, Graphed(self.play, inner.env.device)
        for name in env.NAMES:  # a task's starts may share memory
            setattr(env, name, getattr(env, name).clone())
        self.held = {name: getattr(env, name) for name in env.NAMES}
        if inner.model.recurrent:
            inner.state = torch.zeros(env.num_envs, inner.model.hidden_size, dtype=torch.float32, device=env.device)
        self.state = inner.state

    def collect(self, learned: torch.nn.Module) -> Rollout:
        self.inner.sync(learned)
        return self.graph(*self.inner.draw())

    def play(self, noise: torch.Tensor, starts: tuple) -> Rollout:
        rollout = self.inner.play(noise, starts)
        self.put_back()
        return rollout

    def put_back(self) -> None:
        """Copies what the next rollout starts from to where the last one found it."""
        for name, held in self.held.items():
            setattr(self.inner.env, name, held.copy_(getattr(self.inner.env, name)))
        if self.inner.state is not None:
            self.inner.state = self.state.copy_(self.inner.state)

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        self.inner.load_state_dict(state, rollouts)
        self.put_back()


class GraphedLearner(Around):
    """A learner that replays its updates, whose Adam must be capturable."""

    def __init__(self, inner: Learner):
        super().__init__(inner)
        self.graphs: dict[tuple, Graphed] = {}  # for each form of a batch, and one more that records

    def update(self, batch: Rollout, record: bool = False) -> dict[str, torch.Tensor]:
        batch = batch.to(self.inner.device)
        key = record, *(None if x is None else x.shape for x in batch)  # a replayed one may have the same shapes but no state
        if key not in self.graphs:
            self.graphs[key] = Graphed(functools.partial(self.inner.update, record=record), self.inner.device)
        return {name: x.clone() for name, x in self.graphs[key](batch).items()}
