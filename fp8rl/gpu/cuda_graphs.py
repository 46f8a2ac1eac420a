"""CUDA graphs: launch a whole iteration as one, and read what it measured later.

An iteration of a small network is thousands of kernels of microseconds each, and most of the time
is spent by the CPU launching them one by one. A CUDA graph records the launches once and replays
them all with a single call. The price: a replay repeats exactly the same launches on exactly the
same addresses. So nothing inside may read a number on the host, results are overwritten by the next
replay, and what changes from one to the next must be in tensors on the device: counters of random
numbers, the ring's clock, the learning rate, the loss scale, Adam's step count. That is why Adam
must be `capturable`.

The agent's code counts in Python numbers and stores new tensors in its attributes. `GraphQueue`
puts tensors in their place (`Held`), so the agent does not know that it is captured.
"""

import contextlib
import gc
import time
import warnings
from collections.abc import Callable
from functools import cache

import torch

from ..replay import Clock
from ..rollout import Rollout

# Eager calls before the capture, on the same stream: they initialize libraries and lazily created
# state (Adam's, the scaler's).
WARMUP = 3
GRAPHED = ("cuda",)  # types of devices that have graphs
# Iterations that may wait before the older half is read. A run's first ones, among them the
# captured one, are read at once.
AHEAD = 16


def has_graphs(device: torch.device) -> bool:
    return device.type in GRAPHED


class Graphed:
    """Runs a function that updates its own state in place, on a device.

    It is run eagerly at its first calls, captured at the next and replayed from then on. Tensors
    that it returns are overwritten by the next call.
    """

    def __init__(self, device: torch.device):
        self.stream = stream_on(device)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result = None

    def __call__(self, function: Callable):
        self.calls += 1
        if self.calls <= WARMUP:
            outside = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(outside)
            with torch.cuda.stream(self.stream), warnings.catch_warnings():
                # These steps are not captured yet.
                warnings.filterwarnings("ignore", message=".*capturable=True.*")
                result = function()
            outside.wait_stream(self.stream)
            return result
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            on_device = torch.cuda.device(self.stream.device)
            capture = torch.cuda.graph(graph, stream=self.stream)
            with on_device, no_garbage_collection(), capture:
                self.result = function()
            self.graph = graph
        self.graph.replay()
        return self.result


@cache
def stream_on(device: torch.device) -> torch.cuda.Stream:
    """The stream of all graphs of a device.

    For each stream, cuBLAS keeps memory of its own until the process ends.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def no_garbage_collection():
    """No garbage is collected inside.

    An earlier run's graphs may be part of it, and to destroy one spoils a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DeviceClock(Clock):
    """A ring's Clock in tensors on a GPU, so that it advances in a replay.

    The host does not know how many rows there are. `size` is what it knows for sure.
    """

    def __init__(self, clock: Clock, device: torch.device):
        self.rows = clock.rows
        numbers = torch.tensor([clock.start, clock.count], dtype=torch.int64, device=device)
        self.start, self.count = numbers
        self.known_size = clock.size

    @property
    def size(self) -> int:
        return self.known_size

    def make_room(self, length: int) -> None:
        oldest = self.count + length + 1 - self.rows
        self.start.copy_(torch.maximum(self.start, oldest))

    def advance(self, length: int) -> None:
        self.count += length
        self.known_size = min(self.known_size + length, self.rows - 1)

    def write(self, field: torch.Tensor, values: torch.Tensor) -> None:
        length = values.shape[1]
        index = (self.count + torch.arange(length, device=field.device)) % self.rows
        field.index_copy_(1, index, values.to(field.dtype))

    def set(self, start: int, count: int) -> None:
        self.start.fill_(start)
        self.count.fill_(count)
        self.known_size = count - start


class Held:
    """Keeps what an iteration starts from in the same tensors.

    These are the environments' state, the counters of random numbers, and a recurrent state.
    `put_back` copies what an iteration has stored elsewhere to where it began.
    """

    def __init__(self, run):
        self.collector = run.collector
        env = self.collector.env
        # Copies, because a task's starts may share memory.
        self.tensors = {name: getattr(env, name).clone() for name in env.NAMES}
        self.collector.rollouts = self._counter(self.collector.rollouts, env.device)
        env.draws = self._counter(env.draws, env.device)
        run.iterations_run = self._counter(run.iterations_run, env.device)
        run.ring.clock = DeviceClock(run.ring.clock, run.ring.device)
        if self.collector.model.recurrent:
            size = (env.num_envs, self.collector.model.hidden_size)
            self.state = torch.zeros(size, dtype=torch.float32, device=env.device)
            if self.collector.state is not None:
                self.state.copy_(self.collector.state)
            self.collector.state = self.state
        self.put_back()

    @staticmethod
    def _counter(number: int, device: torch.device) -> torch.Tensor:
        return torch.tensor(number, dtype=torch.int64, device=device)

    def put_back(self) -> None:
        env = self.collector.env
        for name, tensor in self.tensors.items():
            setattr(env, name, tensor.copy_(getattr(env, name)))
        if self.collector.state is not None:
            self.collector.state = self.state.copy_(self.collector.state)


class GraphQueue:
    """Launches a run's iterations as graphs, several ahead of what the host has read.

    It has the methods of train.Immediate. While a GPU works on an iteration, the host launches the
    next ones. What they measured waits here, and is read in halves; errors are noticed then, up to
    AHEAD iterations later.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.graphed = Graphed(device)
        self.held: Held | None = None
        self.launched = 0
        self.queue: list[tuple] = []  # iterations to be read
        self.unchecked: list[tuple] = []  # iterations that were read, to be checked
        self.began = 0.0  # when the first of the queue was launched, or the last reading was

    def __deepcopy__(self, memo: dict) -> "GraphQueue":
        """Of a run's copy, which captures its own graph."""
        return GraphQueue(self.device)

    @property
    def unread(self) -> int:
        return len(self.queue)

    def run_iteration(self, run, row: dict) -> None:
        """Launches an iteration, whose `row` has what is known beforehand."""
        if self.held is None:
            self.held = Held(run)
        if not self.queue:
            self.began = time.perf_counter()
        rollout_extremes, measurements = self.graphed(lambda: self._iteration(run))
        # Copies, or a replay overwrites them.
        rollout_extremes = rollout_extremes.to("cpu", non_blocking=True, copy=True).numpy()
        numbers = measurements.numbers.to("cpu", non_blocking=True, copy=True).numpy()
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.current_stream(self.device).record_event()
        self.queue.append((row, measurements, numbers, rollout_extremes, arrived))
        self.launched += 1
        if self.launched <= AHEAD:
            self._read(run, keep=0)
        elif len(self.queue) == AHEAD:
            # The GPU has the other half to work on, while this half is read.
            self._read(run, keep=AHEAD // 2)

    def _iteration(self, run) -> tuple:
        """What is captured. The rollout cannot be checked yet: its extremes are a result."""
        results = []

        def remember_extremes(rollout: Rollout) -> None:
            results.append(run.rollout_extremes(rollout))

        measurements = run.iteration(check=remember_extremes)
        self.held.put_back()
        return results[0], measurements

    def finish(self, run) -> None:
        """Reads all iterations that were launched."""
        self._read(run, keep=0)

    def _read(self, run, keep: int) -> None:
        """Reads iterations but for the last `keep`, waiting for a GPU to finish them.

        Each has an equal share of the seconds since the first of them was launched, or the last
        reading.
        """
        count = len(self.queue) - keep
        if count <= 0:
            return
        for *_, arrived in self.queue[:count]:
            if arrived:
                arrived.synchronize()
        now = time.perf_counter()
        seconds_each = (now - self.began) / count
        self.began = now
        for _ in range(count):
            row, measurements, numbers, rollout_extremes, _ = self.queue.pop(0)
            run.record(row, measurements, numbers, seconds_each)
            self.unchecked.append((row["iteration"], measurements.updates, rollout_extremes))

    def check(self, run) -> None:
        """Raises for an iteration that was read and from which nothing can be learned."""
        while self.unchecked:
            iteration, updates, rollout_extremes = self.unchecked.pop(0)
            run.check_extremes(rollout_extremes)
            run.check_learning(iteration, updates)
