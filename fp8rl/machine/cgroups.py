"""How much memory the cgroups of this process leave: what SLURM, systemd or a container allow it.

A limit holds for a cgroup and for all those below it. So the tightest of the limits between this
process and the root counts. Linux has two versions of cgroups, with files of different names.
"""

import math
from pathlib import Path

OWN = Path("/proc/self/cgroup")
# By the name of the controller in OWN, which is empty in version 2: where its cgroups are, the
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


def room_in_cgroups() -> float:
    """Bytes that the tightest limit leaves, at least 0; infinity where there is no limit."""
    rooms = [math.inf]
    for line in read(OWN).splitlines():
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
    limit = read(folder / limit_name)
    if not limit.isdigit():  # there is none, or it is "max"
        return math.inf
    usage = int(read(folder / usage_name) or 0)
    statistics = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    return int(limit) - usage + int(statistics.get(cache_name, 0))


def read(path: Path) -> str:
    """The text of a file, or an empty one if there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
