"""What this machine can compute, what it emulates, and how much memory is free."""

import contextlib
import ctypes
import functools
import math
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import nn

from .. import fp8
from ..precision import PRECISIONS, Precision

# How much memory the cgroups of this process leave: what SLURM, systemd or a container allow it. A
# limit holds for a cgroup and for all those below it, so the tightest between this process and the
# root counts. Linux has two versions of cgroups, with files of different names.
OWN_CGROUPS = Path("/proc/self/cgroup")
# By the name of the controller there, which is empty in version 2: where its cgroups are, the
# files with a limit and with what is used, and the name in memory.stat of the file pages among
# that, which the kernel drops when memory is needed.
CONTROLLERS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    "memory": (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}
threads_lock = threading.Lock()


def set_own_threads(count: int) -> int:
    """Sets on how many cores torch computes what the calling thread asks for. Returns the number
    before.

    `torch.set_num_threads` also sets it for every thread that starts later, and on another number
    of cores a sum has other last bits. So a new thread puts that back at once.
    """
    with threads_lock, ThreadPoolExecutor(1) as new_thread:
        before = torch.get_num_threads()
        of_later_threads = new_thread.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        new_thread.submit(torch.set_num_threads, of_later_threads).result()
    return before


@contextlib.contextmanager
def one_core():
    """Within a `with` block, the calling thread computes on one core, and other threads as they
    did."""
    before = set_own_threads(1)
    try:
        yield
    finally:
        set_own_threads(before)


@functools.cache
def is_emulated(name: str, device="cpu") -> bool:
    """Whether a device emulates a precision, which is slow: it multiplies numbers in another type.

    Emulated FP8 matmuls run in float32 on the same float8 numbers, and are summed more exactly
    (docs/precisions.md). A CPU does not report whether it emulates, and libraries differ in what
    they use. So 16-bit products are timed once on a CPU, on one thread. Emulated products take
    about fifty times as long as float32's. Native products take at most three times as long for
    such a small matrix.
    """
    device = torch.device(device)
    rules = PRECISIONS[name]
    if rules.forward:
        return not fp8.has_kernel(device)
    if not rules.autocast or device.type != "cpu":
        return (
            name == "bf16"
            and device.type == "cuda"
            and torch.cuda.get_device_capability(device) < (8, 0)
        )

    def shortest(dtype: torch.dtype) -> float:
        a = torch.ones(256, 64, dtype=dtype)
        b = torch.ones(64, 64, dtype=dtype)
        return min(timeit.repeat(lambda: torch.mm(a, b), number=1, repeat=20))

    with one_core():  # on several, waits for a busy one would be timed, too
        return shortest(rules.autocast) > 10 * shortest(torch.float32)


def cores() -> int:
    """How many cores this process may use. The machine may have more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Lets this process keep the memory that it frees.

    The GNU C library would give large blocks back to the kernel, and every update would have to
    fetch their pages again. With another C library this function does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its largest value
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def room_in_cgroups() -> float:
    """Bytes that the tightest limit leaves, at least 0; infinity where there is no limit."""
    rooms = [math.inf]
    for line in read_text(OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in CONTROLLERS.keys() & controllers.split(","):
            mount, *names = CONTROLLERS[controller]
            # In a container, this may be a path of the host that does not exist here. The root is
            # then the container's own cgroup.
            own = mount / path.lstrip("/")
            rooms += [room_in(folder, *names) for folder in (own, *own.parents)]
    return max(0, min(rooms))


def room_in(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> float:
    """Bytes that the limit of a single cgroup leaves."""
    limit = read_text(folder / limit_name)
    if not limit.isdigit():  # there is none, or it is "max"
        return math.inf
    usage = int(read_text(folder / usage_name) or 0)
    statistics = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
    return int(limit) - usage + int(statistics.get(cache_name, 0))


def read_text(path: Path) -> str:
    """The text of a file, or an empty one if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def available(device="cpu") -> int:
    """Bytes that are free on a device.

    On a GPU this is CUDA memory, on a CPU it is RAM within the limits of this process and its
    cgroups.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # Memory that torch has reserved and would reuse.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    left = [psutil.virtual_memory().available, room_in_cgroups()]
    if sys.platform == "linux":  # other kernels do not enforce these
        used = psutil.Process().memory_info()
        for limit, taken in ((resource.RLIMIT_DATA, used.data), (resource.RLIMIT_AS, used.vms)):
            if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY:
                left.append(resource.getrlimit(limit)[0] - taken)
    return max(0, min(left))


def require_room(what: str, needed: int, remedy: str, device="cpu") -> None:
    """Raises MemoryError if an allocation needs more than the `available` bytes.

    Call it before the allocation. RAM is handed out lazily, so a buffer that is too large would
    fail only half-way.
    """
    free = available(device)
    if needed > free:
        raise MemoryError(f"{what} needs {needed:,} bytes and {device} has {free:,} free: {remedy}")


def describe(precision: Precision, model: nn.Module) -> str:
    """One line that says how a prepared model runs.

    It says whether the precision is emulated and, for FP8, which layers are converted.
    """
    where = f"{precision.name} on {precision.device}"
    if is_emulated(precision.name, precision.device):
        where += ", emulated"
    if not precision.rules.forward:
        return where
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    converted = [name for name, layer in linears.items() if isinstance(layer, fp8.Float8Linear)]
    left = [name for name in linears if name not in converted]
    not_converted = f", not in {', '.join(left)}" if left else " (all linear layers)"
    return f"{where}: FP8 in {', '.join(converted) or 'no layer'}{not_converted}"


def processor() -> str:
    """The name of this machine's processor."""
    details = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*\S)", details.read_text() if details.exists() else "")
    return named[1] if named else platform.processor() or platform.machine()


def hardware() -> str:
    """One line about the machine: its processors, what they can do, and versions of packages."""
    bf16 = "emulated" if is_emulated("bf16") else "native"
    capability = f"{torch.backends.cpu.get_cpu_capability()} with {bf16} bf16"
    parts = [f"{processor()}, {cores()} cores, {capability}, threads: {torch.get_num_threads()}"]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        parts.append(f"{torch.cuda.get_device_name()} of compute capability {major}.{minor}")
    parts.append(
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    )
    return "; ".join(parts)


def origin() -> str:
    """One line on how a result was made: the machine, versions, and the commit of the code."""
    return f"{hardware()}; commit {commit()}"


@functools.cache  # the code of a process does not change
def commit() -> str:
    """The short hash of this code's commit, with a + if files have changed since then.

    It is "unknown" outside a clone, as for an installed package.
    """
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root), "--git-dir", ".git"]  # not that of a folder around it
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.returncode)
