"""CUDA graphs: launch a whole iteration with one call, and read its measurements later.

An iteration of a small network is thousands of kernels of microseconds each. Most of the time, the
CPU is busy launching them one by one. A CUDA graph records the launches once and replays them all
with a single call.

But a replay repeats exactly the same launches on exactly the same addresses. So nothing inside may
read a number on the host, and results are overwritten by the next replay. Numbers that change from
one replay to the next must be in tensors on the device: counters of random numbers, the ring's
clock, the learning rate, the loss scale, Adam's step count. That is why Adam must be `capturable`.

The agent's code counts in Python numbers and stores new tensors in its attributes. `GraphQueue`
puts tensors in place of these (`Held`), so the agent's code does not know that it is captured.
"""

import gc
import time
import warnings
from collections.abc import Callable
from functools import cache

import torch

from ...replay.ring import Clock
from ...train import Immediate, Measurements

# Number of eager calls before the capture, on the same stream. They initialize libraries, and state
# that is created lazily (Adam's, the scaler's).
WARMUP = 3
AHEAD = 16  # how many iterations may wait before the older half is read


def has_graphs(device: torch.device) -> bool:
    """Whether iterations can be launched as graphs on a device."""
    return device.type == "cuda"


class Graphed:
    """Runs a function as a graph on a device. The function must update its state in place.

    At the first calls the function runs eagerly, at the next call it is captured, and from then on
    it is replayed. Tensors that it returns are overwritten by the next call.
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
            # Garbage may hold graphs of an earlier run, and to destroy one spoils a capture.
            gc.collect()
            with torch.cuda.device(self.stream.device), torch.cuda.graph(graph, stream=self.stream):
                self.result = function()
            self.graph = graph
        self.graph.replay()
        return self.result


@cache
def stream_on(device: torch.device) -> torch.cuda.Stream:
    """The stream of all graphs of a device.

    There is only one, because cuBLAS keeps memory for each stream until the process ends.
    """
    return torch.cuda.Stream(device)


class DeviceClock:
    """What a ring's Clock does, in tensors on a GPU, so that it advances in a replay.

    The host does not know how many rows are complete. `size` is a number that it knows for sure.
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
    """Keeps the state from which an iteration starts in the same tensors.

    This state consists of the environments' state, the counters of random numbers, and a recurrent
    state. An iteration stores the new state in new tensors, and `put_back` copies it back.
    """

    def __init__(self, run):
        self.collector = run.collector
        env = self.collector.env
        # Copies, because a task's starts may share memory.
        self.tensors = {name: getattr(env, name).clone() for name in env.NAMES}
        for part, name in ((self.collector, "rollouts"), (env, "draws"), (run, "iterations_run")):
            counter = torch.tensor(getattr(part, name), dtype=torch.int64, device=env.device)
            setattr(part, name, counter)
        run.ring.clock = DeviceClock(run.ring.clock, run.ring.device)
        self.state = self.collector.state
        self.put_back()

    def put_back(self) -> None:
        env = self.collector.env
        for name, tensor in self.tensors.items():
            setattr(env, name, tensor.copy_(getattr(env, name)))
        if self.state is not None:
            self.collector.state = self.state.copy_(self.collector.state)


class GraphQueue(Immediate):
    """Launches a run's iterations as graphs, several ahead of those that the host has read.

    While a GPU works on an iteration, the host launches the
    next ones. Their measurements wait in a queue, of which half is read at a time. Errors are
    noticed then, up to AHEAD iterations later.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.graphed = Graphed(device)
        self.held: Held | None = None
        self.queue: list[tuple] = []  # iterations that were launched and not read yet
        # When the first iteration of the queue was launched, or when the queue was last read.
        self.began = 0.0

    @property
    def unread(self) -> int:
        return len(self.queue)

    def run_iteration(self, run, row: dict) -> None:
        """Launches an iteration. Its `row` has the numbers that are known beforehand."""
        if self.held is None:
            self.held = Held(run)
        if not self.queue:
            self.began = time.perf_counter()
        measurements = self.graphed(lambda: self._iteration(run))
        # Copies, because the next replay overwrites the tensors.
        copies = [x.to("cpu", non_blocking=True, copy=True).numpy() for x in measurements]
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.current_stream(self.device).record_event()
        self.queue.append((row, Measurements(*copies), arrived))
        if len(self.queue) == AHEAD:
            # The GPU has the other half to work on, while this half is read.
            self.finish(run, keep=AHEAD // 2)

    def _iteration(self, run):
        """The iteration that is captured. It cannot check the rollout on the host."""
        measurements = run.iteration(checks=False)
        self.held.put_back()
        return measurements

    def finish(self, run, keep: int = 0) -> None:
        """Reads all iterations but the last `keep`. Waits until a GPU has finished them.

        The seconds since the first of them was launched, or since the last reading, are split
        equally between them.
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
            row, measurements, _ = self.queue.pop(0)
            run.record(row, measurements, seconds_each)
            self.unchecked.append((row["iteration"], measurements))
