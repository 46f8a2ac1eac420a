import collections
import gc
import re
import resource
import sys
import tracemalloc

import numpy as np
import psutil
import pytest
import torch
from helpers import forked

from fp8rl.config import Config
from fp8rl.model import ActorCritic
from fp8rl.scale import growth
from fp8rl.scale.growth import GrowthWatch, Reading, filled_bytes
from fp8rl.scale.machine import Machine, build
from fp8rl.scale.storage import StoredRing
from fp8rl.train import iterate, train

MIB = 2**20


@pytest.fixture(autouse=True)
def few_objects():
    """Hides what the other tests have left from Python's collector: walking it all takes longer than the tests."""
    gc.collect()
    gc.freeze()


def watched(step, readings=5, between=40) -> list[str]:
    watch = GrowthWatch()
    for _ in range(between):
        step()
    for _ in range(readings):
        for _ in range(between):
            step()
        watch.read()
    return watch.findings()


# The leak zoo: each returns a step that leaks.


def kept_losses():
    losses, model = [], ActorCritic()

    def step():
        losses.append(model(torch.rand(4, 2))[1].sum())  # without .item()

    return step


def running_sum():
    model, total = ActorCritic(), torch.zeros(())

    def step():
        nonlocal total
        total = total + model(torch.rand(4, 2))[1].sum()

    return step


def episode_list(kind):
    returns = kind()

    def step():
        returns.append(float(np.random.rand()))

    return step


def episode_dict():
    returns = {}

    def step():
        returns[len(returns)] = [1.5]

    return step


def seen_set():
    seen = set()

    def step():
        seen.add(str(len(seen)))

    return step


def info_hoard():
    infos = []

    def step():
        infos.append({"episode": {"r": 1.0}, "TimeLimit.truncated": False})

    return step


def numpy_views():
    frames = []

    def step():
        frames.append(np.zeros(10_000)[:4])  # without .copy()

    return step


def tensor_views():
    frames = []

    def step():
        frames.append(torch.zeros(10_000)[:4])

    return step


def device_cache():
    cache = {}

    def step():
        cache[len(cache)] = torch.zeros(100)

    return step


@pytest.mark.parametrize(
    "leak, message",
    [
        (kept_losses, "kept autograd graph: a list of .* tensors with their graphs: append .item"),
        (running_sum, "autograd graph: .* more nodes kept alive: use .item"),
        (lambda: episode_list(list), "unbounded list: .* of float: bound it"),
        (lambda: episode_list(collections.deque), "unbounded deque: .* of float"),
        (episode_dict, "unbounded dict: .* of list"),
        (seen_set, "unbounded set: .* of str"),
        (info_hoard, "dict hoard: a list of .* dicts with 'episode', 'TimeLimit.truncated'"),
        (numpy_views, "NumPy views: a list of .* arrays of 32 bytes that keep 80,000 alive each: append .copy"),
        (tensor_views, "views: a list of .* tensors of 16 bytes that keep 40,000 alive each: append .clone"),
        (device_cache, "tensors: a dict of .* on cpu: bound it"),
    ],
)
def test_each_leak_is_named(leak, message):
    findings = watched(leak())
    assert len(findings) <= 2 and any(re.search(message, finding) for finding in findings), findings


def test_a_bounded_or_emptied_container_is_no_leak():
    recent, emptied = collections.deque(maxlen=10_000), []
    assert watched(lambda: recent.append(1.0)) == []
    watch = GrowthWatch()
    for _ in range(4):
        emptied.extend([1.0] * 50)
        watch.read()
    emptied.clear()
    assert watch.findings() == []


def test_a_container_made_later_and_its_subclasses_are_followed():
    kept = {}

    def step():
        kept.setdefault("frames", collections.OrderedDict())[len(kept["frames"]) if kept else 0] = [1.0]

    assert any(finding.startswith("unbounded OrderedDict") for finding in watched(step))


def test_reading_a_mapped_ring_is_no_leak(tmp_path):
    config = Config(capacity=2_000_000, steps=2_048, eval_episodes=1)
    next(iterate(build(config, Machine(memmap=tmp_path / "ring")))).ring.close()
    ring, watch = StoredRing.open(tmp_path / "ring"), GrowthWatch()
    for name in ("obs", "reward", "behavior_logp"):
        watch.read(ring)
        ring.fields[name].sum()  # touches all of its pages
    watch.read(ring)
    assert watch.findings() == []


def test_native_memory_is_named_by_what_is_left():
    handles = torch.empty(96 * MIB, dtype=torch.uint8)  # stands for a library that holds pages no container shows
    step = iter(handles.chunk(6))

    def touch():
        next(step).fill_(1)

    watch = GrowthWatch()
    for _ in range(4):
        touch()
        watch.read()
    assert any(finding.startswith("resident set: ") for finding in watch.findings())


@pytest.mark.parametrize("precision, encoder", [("fp32", "mlp"), ("fp8", "mlp"), ("bf16", "gru")])
def test_a_clean_run_is_left_alone(precision, encoder):
    config = Config(steps=30_720, precision=precision, encoder=encoder, eval_every=5_000, eval_episodes=5)
    watch = GrowthWatch(2 * MIB)
    for run in iterate(build(config)):
        if len(run.history) >= 20 and len(run.history) % 8 == 4:
            watch.read(run.ring)
    assert len(watch.readings) >= 5 and watch.findings() == []


def test_filling_a_ring_is_explained():
    watch, ring = GrowthWatch(), StoredRing(30_000, 16, ([-1.0] * 62, [1.0] * 62))
    rollout = next(iterate(build(Config(steps=512, extra_features=60, eval_episodes=1)))).ring.sample(16, 32)
    for i in range(900):
        ring.append(rollout)
        if i >= 300 and i % 100 == 0:
            watch.read(ring)
    first, last = watch.readings[0], watch.readings[-1]
    grown, explained = last.resident - first.resident, last.explained - first.explained
    assert watch.findings() == [] and grown > 20 * MIB
    assert 0.8 < grown / explained < 1.2
    blind = GrowthWatch()
    blind.readings = [reading._replace(explained=0) for reading in watch.readings]
    blind._lengths = {}
    assert blind.findings()[0].startswith("resident set: ")


def readings(**columns):
    watch = GrowthWatch()
    length = len(next(iter(columns.values())))
    rows = [{name: values[i] for name, values in columns.items()} for i in range(length)]
    watch.readings, watch._lengths = [Reading(**{"resident": 0} | row) for row in rows], {}
    return watch.findings()


def test_cuda_growth_is_told_apart():
    flat = [8 * MIB] * 4
    grows = [n * MIB for n in (8, 10, 12, 14)]
    assert readings(cuda_allocated=flat, cuda_reserved=flat) == []
    (finding,) = readings(cuda_allocated=grows, cuda_reserved=grows)
    assert finding.startswith("CUDA tensors: 6,291,456 bytes more allocated")
    (finding,) = readings(cuda_allocated=flat, cuda_reserved=grows)
    assert finding.startswith("CUDA blocks: 6,291,456 bytes more reserved")
    assert readings(cuda_allocated=[8 * MIB, 12 * MIB, 8 * MIB, 12 * MIB], cuda_reserved=flat) == []  # goes up and down


@pytest.mark.cuda
def test_cuda_caches_are_named():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kept = []
    assert watched(lambda: kept.append(torch.zeros(2**18, device="cuda")), between=5)
    kept.clear()
    gc.collect()
    assert not watched(lambda: torch.zeros(2**18, device="cuda"), between=5)


def test_growth_needs_three_readings():
    watch = GrowthWatch()
    watch.read()
    with pytest.raises(ValueError, match="readings are 1: take at least 3"):
        watch.findings()


def test_traced_memory_is_read_while_tracing():
    watch = GrowthWatch()
    assert watch.read().traced == 0
    tracemalloc.start()
    try:
        kept = bytearray(5 * MIB)
        assert watch.read().traced >= len(kept)
    finally:
        tracemalloc.stop()


def test_room():
    assert 0 < growth.available() < 2**50
    growth.require_room(growth.available() // 2)
    with pytest.raises(MemoryError, match=r"replay needs [\d,]+ bytes and cpu has [\d,]+ free: lower capacity, .*memmap"):
        growth.require_room(2**60)


def test_a_container_s_limit_is_room_too(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "Path", lambda _: tmp_path)
    before = growth.available()
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert growth.available() > before / 2
    (tmp_path / "memory.max").write_text("5000\n")
    assert growth.available() == 4300
    (tmp_path / "memory.max").write_text("600\n")
    assert growth.available() == 0


def train_below_a_limit(folder) -> None:
    torch.set_num_threads(1)
    limit = psutil.Process().memory_info().data + 256 * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    config = Config(capacity=25_000_000, steps=1024, eval_episodes=1)  # 450 MB
    with pytest.raises(MemoryError, match=r"^replay needs 450,000,000 bytes and cpu has "):
        build(config)
    run = train(build(config, Machine(memmap=folder)), progress=False)
    assert (run.ring.nbytes, run.ring.size) == (450_000_000, 64)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds private memory to RLIMIT_DATA")
def test_a_ring_beyond_a_set_limit_is_refused_in_ram_and_works_in_a_folder(tmp_path):
    process = forked(train_below_a_limit, tmp_path / "ring")
    process.join(60)
    assert process.exitcode == 0


def test_cuda_blocks_that_torch_would_use_again_are_available(monkeypatch):
    numbers = {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 30}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert growth.available("cuda") == 140


def test_the_plain_ring_can_be_watched():
    run = train(Config(steps=512, eval_every=0, eval_episodes=1), progress=False)
    GrowthWatch().read(run.ring)
    assert 0 < filled_bytes(run.ring) < run.ring.nbytes
