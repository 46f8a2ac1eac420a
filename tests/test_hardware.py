import pytest

from fp8rl.machine import hardware
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision

# A processor without 16-bit arithmetic


def test_description_says_what_computes_where():
    assert hardware.describe(Precision("fp32"), ActorCritic()) == "fp32 on cpu"
    precision = Precision("fp8")
    described = hardware.describe(precision, precision.prepare(ActorCritic()))
    assert described == "fp8 on cpu, emulated: FP8 in hidden.0, not in inputs, actor, critic"


USED = {"memory.current": 1000, "memory.stat": "anon 1\ninactive_file 300"}
USED_1 = {"memory.usage_in_bytes": 1000, "memory.stat": "inactive_file 9\ntotal_inactive_file 300"}
NO_LIMIT_1 = {"memory.limit_in_bytes": 9223372036854771712}
# What /proc/self/cgroup says, the files of each cgroup, and the room that they leave.
CGROUPS = {
    "a container's own": ("0::/", {"": {"memory.max": 5000, **USED}}, 4300),
    "less than is used": ("0::/", {"": {"memory.max": 600, **USED}}, 0),
    "without a limit": ("0::/a", {"": {}, "a": {"memory.max": "max", **USED}}, None),
    "a job above": (
        "0::/s/job/step",
        {"s": {"memory.max": 9000}, "s/job": {"memory.max": 5000}, "s/job/step": USED},
        5000,
    ),
    "a path of the host": ("0::/s/docker-7.scope", {"": {"memory.max": 5000, **USED}}, 4300),
    "version 1": (
        "5:cpu:/x\n4:cpuset,memory:/a/b\n1:name=systemd:/y\n0::/",
        {
            "memory/a": {"memory.limit_in_bytes": 6000, **USED_1},
            "memory/a/b": NO_LIMIT_1 | USED_1,
            "memory/x": {"memory.limit_in_bytes": 10},  # of other processes
        },
        5300,
    ),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_the_tightest_limit_above_this_process_is_room_too(name, tmp_path, monkeypatch):
    own, files, expected = CGROUPS[name]
    before = hardware.available()
    (tmp_path / "own").write_text(own + "\n")
    for folder, texts in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (tmp_path / folder / file).write_text(f"{text}\n")
    moved = {
        controller: (tmp_path / folder.relative_to("/sys/fs/cgroup"), *names)
        for controller, (folder, *names) in hardware.CONTROLLERS.items()
    }
    monkeypatch.setattr(hardware, "CONTROLLERS", moved)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
    room = hardware.available()
    assert room == expected if expected is not None else room > before / 2
