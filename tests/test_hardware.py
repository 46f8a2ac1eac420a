import dataclasses
import os
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from conftest import cores
from helpers import PATIENCE, forked, refused, small, trained

from fp8rl.build import Machine, build
from fp8rl.machine import cgroups, hardware
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision

# A processor without 16-bit arithmetic
PRETENDED = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
ASK = """
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.machine import hardware
print([hardware.is_emulated(name) for name in ("fp32", "bf16", "fp16", "fp8")])
print(hardware.describe(Precision("bf16"), ActorCritic()))
print(hardware.hardware())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these variables are read on x86 alone")
def test_emulation_is_noticed_and_named():
    answer = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | PRETENDED,
        capture_output=True,
        text=True,
        check=True,
    )
    emulated, described, machine = answer.stdout.splitlines()
    assert emulated == "[False, True, True, True]" and described == "bf16 on cpu, emulated"
    assert "AVX2 with emulated bf16, threads: " in machine


def test_products_are_timed_on_one_core_and_later_threads_compute_as_before(monkeypatch):
    timed = []

    def clock() -> float:
        timed.append(cores())
        return 0.0

    monkeypatch.setattr(time, "perf_counter", clock)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(3,)) as executor:
        executor.submit(hardware.is_emulated.__wrapped__, "bf16").result()
        assert executor.submit(cores).result() == (3, 3)
    torch.set_num_threads(1)  # which the executor's thread has set for later ones
    assert {*timed} == {(1, 3)}


@pytest.mark.parametrize(("capability", "is_emulated"), [((7, 5), True), ((8, 0), False)])
def test_a_cuda_device_emulates_bf16_below_capability_8(capability, is_emulated, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hardware.is_emulated.cache_clear()
    assert hardware.is_emulated("bf16", "cuda") is is_emulated
    assert not hardware.is_emulated("fp16", "cuda")
    hardware.is_emulated.cache_clear()


def test_hardware_names_the_instruction_set_the_cores_and_the_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of a test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    said = hardware.hardware()
    for part in (
        torch.backends.cpu.get_cpu_capability(),
        ", 2 cores, ",
        f"threads: {torch.get_num_threads()};",
        "; GPU of a test of compute capability 8.9; ",
    ):
        assert part in said
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert hardware.cores() == 64


def test_description_says_what_computes_where():
    assert hardware.describe(Precision("fp32"), ActorCritic()) == "fp32 on cpu"
    precision = Precision("fp8")
    described = hardware.describe(precision, precision.prepare(ActorCritic()))
    assert described == "fp8 on cpu, emulated: FP8 in hidden.0, not in inputs, actor, critic"


def test_room():
    assert 0 < hardware.available() < 2**50
    hardware.require_room("replay", hardware.available() // 2, "lower capacity")
    message = r"replay needs [\d,]+ bytes and cpu has [\d,]+ free: lower capacity"
    refused(message, hardware.require_room, "replay", 2**60, "lower capacity", error=MemoryError)


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
        for controller, (folder, *names) in cgroups.CONTROLLERS.items()
    }
    monkeypatch.setattr(cgroups, "CONTROLLERS", moved)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    room = hardware.available()
    assert room == expected if expected is not None else room > before / 2


def train_below_a_limit(folder) -> None:
    torch.set_num_threads(1)
    limit = psutil.Process().memory_info().data + 256 * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    config = small(capacity=25_000_000, steps=30_000_000, eval_episodes=1)  # 450 MB
    refused(r"replay needs 450,000,000 bytes and cpu has ", build, config, error=MemoryError)
    run = trained(build(dataclasses.replace(config, steps=1024), Machine(memmap=folder)))
    assert (run.ring.nbytes, run.ring.size) == (450_000_000, 64)


@pytest.mark.xdist_group("forked")
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux holds private memory to RLIMIT_DATA"
)
def test_a_ring_beyond_a_set_limit_is_refused_in_ram_and_works_in_a_folder(tmp_path):
    process = forked(train_below_a_limit, tmp_path / "ring")
    process.join(PATIENCE)
    assert process.exitcode == 0


def test_cuda_blocks_that_torch_would_use_again_are_available(monkeypatch):
    numbers = {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 30}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert hardware.available("cuda") == 140
