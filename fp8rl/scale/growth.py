"""Memory: how much there is, how much a process uses, and whether growth is a buffer filling up or a leak.

A process's resident set also grows without a leak: pages of a new tensor are allocated when they are first written, so a replay
ring of 1 GB starts near 0 and grows until it is full. That growth is known to the byte (`filled_bytes`); what
remains after subtracting it is unexplained. Resident memory does not show what leaks, and a leak of Python objects can stay small
for long, so `GrowthWatch` also looks at causes at every reading:

    containers       lists, dicts, deques and sets that grow at every reading, three or more; their contents name the leak
                     (a dict of plain numbers is hidden from Python's collector, and shows only as resident memory)
    autograd graph   nodes that live tensors keep alive: a running sum of losses keeps every step's graph
    CUDA             allocated (live tensors) and reserved (blocks that the allocator keeps)

Take readings at the same point of a loop, between iterations, after the first ones (which import and warm up).
"""

import contextlib
import gc
import resource
import sys
import tracemalloc
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

MIB = 2**20


def available(device="cpu") -> int:
    """Bytes still free on a device: CUDA memory, or RAM within the limits of this process and its cgroup (v2)."""
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # blocks that torch would reuse
        return torch.cuda.mem_get_info(device)[0] + unused
    left = [psutil.virtual_memory().available]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or one without a limit ("max")
        free = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left.append(free + int(stat["inactive_file"]))  # file pages that the kernel drops when memory is needed
    if sys.platform == "linux":  # other kernels do not enforce these
        used = psutil.Process().memory_info()
        for limit, taken in ((resource.RLIMIT_DATA, used.data), (resource.RLIMIT_AS, used.vms)):
            if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
                left.append(resource.getrlimit(limit)[0] - taken)
    return max(0, min(left))


def filled_bytes(ring) -> int:
    """Bytes of memory taken by the rows written to a ring so far, ignoring page rounding; 0 if it is in files."""
    return 0 if getattr(ring, "_folder", None) else ring.nbytes // ring.rows * min(ring.count + 1, ring.rows)


def require_room(needed: int, device="cpu") -> None:
    """Checks that an allocation fits before it is made: RAM is handed out lazily, so too large a buffer would fail half-way.

    Raises:
        MemoryError: more than `available`.
    """
    free = available(device)
    if needed > free:
        remedy = "lower capacity, choose a one-byte codec, or store it in a memmap folder"
        raise MemoryError(f"replay needs {needed:,} bytes and {device} has {free:,} free: {remedy}")


class Reading(NamedTuple):
    """Bytes at one moment, and nodes.

    resident: the process's resident set, on Linux without file pages, which the kernel can drop. explained: bytes that the replay
    ring has filled. traced: allocated by Python, 0 unless `tracemalloc` traces. cuda_allocated, cuda_reserved: by torch's CUDA
    allocator, 0 without CUDA. graph_nodes: in the autograd graphs behind live tensors.
    """

    resident: int
    explained: int = 0
    traced: int = 0
    cuda_allocated: int = 0
    cuda_reserved: int = 0
    graph_nodes: int = 0


class GrowthWatch:
    """Reads memory during a loop and reports what grows.

    Attributes:
        readings: those taken so far.

    Args:
        tolerance: bytes of growth over all readings that are ignored.
    """

    def __init__(self, tolerance: int = MIB):
        self.tolerance = tolerance
        self.readings: list[Reading] = []
        self._lengths: dict[int, list[int]] = {}  # id of a container -> its length at each reading since it was first seen
        _graph_nodes(gc.get_objects())  # the walk itself allocates memory, which must not be reported later

    def read(self, ring=None) -> Reading:
        """Takes a reading (0.1 s: it walks all Python objects).

        Args:
            ring: a ReplayBuffer whose filling counts as explained.
        """
        gc.collect()
        used = psutil.Process().memory_info()
        objects = gc.get_objects()
        cuda = torch.cuda.is_available()
        reading = Reading(
            used.rss - getattr(used, "shared", 0),
            filled_bytes(ring) if ring is not None else 0,
            tracemalloc.get_traced_memory()[0],
            torch.cuda.memory_allocated() if cuda else 0,
            torch.cuda.memory_reserved() if cuda else 0,
            _graph_nodes(objects),
        )
        self.readings.append(reading)
        self._follow_containers(objects)
        return reading

    def findings(self) -> list[str]:
        """What grew over all readings, each with a remedy; empty if all growth is explained. Needs three readings."""
        if len(self.readings) < 3:
            raise ValueError(f"readings are {len(self.readings)}: take at least 3")
        found = [describe for describe in map(_describe_container, self._growing()) if describe]
        first, last = self.readings[0], self.readings[-1]
        columns = {name: np.diff([getattr(reading, name) for reading in self.readings]) for name in Reading._fields}
        if (columns["graph_nodes"] > 0).all():
            more = last.graph_nodes - first.graph_nodes
            found.append(f"autograd graph: {more:,} more nodes kept alive: use .item() or .detach() on what outlives a step")
        if last.cuda_allocated - first.cuda_allocated > self.tolerance and (columns["cuda_allocated"] >= 0).all():
            more = last.cuda_allocated - first.cuda_allocated
            found.append(f"CUDA tensors: {more:,} bytes more allocated: something keeps tensors, drop or move them")
        elif last.cuda_reserved - first.cuda_reserved > self.tolerance and (columns["cuda_reserved"] >= 0).all():
            more = last.cuda_reserved - first.cuda_reserved
            found.append(f"CUDA blocks: {more:,} bytes more reserved, not allocated: the cache grows, keep shapes fixed")
        # The median: a leak grows at every reading, while warming up and whole pages make single jumps.
        unexplained = int(np.median(columns["resident"] - columns["explained"])) * (len(self.readings) - 1)
        if unexplained > self.tolerance and not found:
            found.append(f"resident set: {unexplained:,} bytes more than the ring filled, in no Python container: native memory")
        return found

    def _follow_containers(self, objects: list) -> None:
        """Records the lengths of containers for as long as they grow at every reading; one that stops growing is dropped for
        good."""
        own = {id(self.readings), id(self._lengths), id(objects)}
        now = {id(obj): len(obj) for obj in objects if _can_hoard(obj) and id(obj) not in own}
        lengths = {key: self._lengths.get(key, [0]) for key in now}
        self._lengths = {key: [*old, now[key]] if old and now[key] > old[-1] else [] for key, old in lengths.items()}

    def _growing(self) -> list:
        grown = {key for key, lengths in self._lengths.items() if len(lengths) > 3}  # three readings, after a 0
        return [obj for obj in gc.get_objects() if id(obj) in grown and _can_hoard(obj)]


def _can_hoard(obj) -> bool:
    """Whether an object is an unbounded container with at least eight elements."""
    return issubclass(type(obj), (list, dict, deque, set)) and len(obj) >= 8 and getattr(obj, "maxlen", None) is None


def _graph_nodes(objects: list) -> int:
    """Number of nodes in the autograd graphs behind the tensors among some objects, each counted once."""
    tensors = [obj for obj in objects if issubclass(type(obj), torch.Tensor)]
    seen, todo = set(), [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions if following is not None)
    return len(seen)


def _describe_container(container) -> str | None:
    """What a growing container leaks, judged by its newest element; None if it is empty now."""
    newest = [*(container.values() if isinstance(container, dict) else container)][-1:]
    if not newest:
        return None  # emptied since the last reading
    newest = newest[0]
    what = f"{type(container).__name__} of {len(container):,}"
    if isinstance(newest, torch.Tensor):
        if newest.grad_fn is not None:
            return f"kept autograd graph: a {what} tensors with their graphs: append .item() or .detach()"
        held, own = newest.untyped_storage().nbytes(), newest.nbytes
        if held > own:
            return f"views: a {what} tensors of {own:,} bytes that keep {held:,} alive each: append .clone()"
        return f"tensors: a {what} on {newest.device}: bound it"
    if isinstance(newest, np.ndarray) and newest.base is not None:
        held = getattr(newest.base, "nbytes", newest.nbytes)
        return f"NumPy views: a {what} arrays of {newest.nbytes:,} bytes that keep {held:,} alive each: append .copy()"
    if isinstance(newest, dict):
        return f"dict hoard: a {what} dicts with {', '.join(map(repr, list(newest)[:3]))}: keep the numbers you need"
    return f"unbounded {type(container).__name__}: {len(container):,} of {type(newest).__name__}: bound it (deque(maxlen=...))"
