"""CUDA graphs: launch collection, or an update, as one.

A small network's update is a few hundred kernels of microseconds each, and most of the time is spent by the CPU launching them
one by one. A CUDA graph records the launches once and replays them all with a single call. The price: a replay repeats exactly
the same launches on exactly the same addresses. So nothing inside may read a number on the host, inputs must be in tensors that
stay in place, the results of a replay are overwritten by the next, and what changes between replays (random numbers, the learning
rate, the loss scale, Adam's step count) must be in tensors on the device. That is why Adam must be `capturable`.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..rollout import Rollout
from ..train import Run, adam

# Eager calls before the capture, on the same stream: they initialize libraries and lazily created state (Adam's, the scaler's).
WARMUP = 3
GRAPHED = ("cuda",)  # types of devices that have graphs


class Graphed:
    """A function of tensors, in tuples or Rollouts, run eagerly for its first calls, captured at the next and replayed from then
    on. What it returns is overwritten by the next call.

    Args:
        function: works on CUDA tensors without reading them on the host. It must update its own state in place.
        device: of the tensors.
    """

    def __init__(self, function: Callable, device: torch.device):
        self.function = function
        self.stream = torch.cuda.Stream(device)
        self.calls = 0
        self.graph = None

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
            self.inputs = [tree_map(lambda x: x if x is None else x.clone(), batch) for batch in batches]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self.stream.device), uncollected(), torch.cuda.graph(graph, stream=self.stream):
                self.result = self.function(*self.inputs)
            self.graph = graph
        for mine, new in zip(tree_leaves(self.inputs), tree_leaves(list(batches)), strict=True):
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


def in_place(run: Run) -> Callable:
    """`run.play`, but with the environments' tensors and the recurrent state kept at the same addresses, as a replay requires."""
    play, held = run.play, run.env.tensors()
    if run.model.recurrent:
        run.state = torch.zeros(run.env.num_envs, run.model.width, dtype=torch.float32, device=run.env.device)
    before = run.state

    def play_in_place(noise, starts) -> Rollout:
        rollout = play(noise, starts)
        for name, now in run.env.tensors().items():
            setattr(run.env, name, held[name].copy_(now))
        if before is not None:
            run.state = before.copy_(run.state)
        return rollout

    return play_in_place


def capture(run: Run) -> None:
    """Lets a run or a population collect and update by graphs; on a device without graphs nothing changes."""
    if run.device.type not in GRAPHED:
        return
    if isinstance(run.optimizer, torch.optim.Adam):  # a population's own is always capturable
        run.optimizer = adam(run.model, run.config.learning_rate, capturable=True)
    run.play = Graphed(in_place(run), run.device)
    update, graphed = run.update, {}  # a graph for each form of a batch, and one more that measures FP8

    def update_by_graph(batch: Rollout, record: bool = False) -> dict[str, torch.Tensor]:
        batch = batch.to(run.device)
        key = record, *(None if x is None else x.shape for x in batch)  # a replayed one may have the same shapes but no state
        if key not in graphed:
            graphed[key] = Graphed(lambda given: update(given, record), run.device)
        return {name: x.clone() for name, x in graphed[key](batch).items()}

    run.update = update_by_graph
