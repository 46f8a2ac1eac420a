import dataclasses
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fp8rl.report import bench
from fp8rl.scale.machine import Machine


@pytest.mark.parametrize(
    "fp8, expected", [([9, 9, 9], None), ([9, 9, 1], 256), ([9, 1, 1], 128), ([1, 9, 1], 256), ([1, 1, 1], 64), ([1, 1, 9], None)]
)
def test_break_even_is_the_width_from_which_fp8_stays_faster(fp8, expected):
    times = {width: {"fp8": seconds, "bf16": 5} for width, seconds in zip((64, 128, 256), fp8, strict=True)}
    assert bench.break_even(times, "bf16") == expected


@pytest.mark.parametrize("machine", [Machine(), Machine(reuse_forward=True), Machine(reuse_forward=True, compile=True)], ids=str)
def test_what_is_left_open_is_taken_as_it_is_fastest(machine, monkeypatch):
    speeds, asked = {("fp32", False): 1, ("fp32", True): 2, ("bf16", False): 4, ("bf16", True): 3}, []

    def measured(config, machine, *_):
        asked.append((config.precision, machine.reuse_forward))
        return {"train_steps_per_second": speeds[asked[-1]]}

    monkeypatch.setattr(bench, "bench_loop", measured)
    monkeypatch.setattr(bench, "available_precisions", lambda device: ["fp32", "bf16", "fp16"])
    monkeypatch.setattr(bench, "is_emulated", lambda name, device: name == "fp16")
    config, found = bench.Loop(16, 4).fastest(machine)
    reuse = machine.reuse_forward and not machine.compile
    assert set(asked) == {pair for pair in speeds if reuse or not pair[1]}
    assert config.precision == "bf16" and found == dataclasses.replace(machine, reuse_forward=False)
    asked.clear()
    config, found = bench.Loop(16, 4, "fp32").fastest(machine)
    assert config.precision == "fp32" and found.reuse_forward is reuse and bool(asked) is reuse


def test_every_precision_is_timed_on_the_same_work():
    steps = bench.layer_steps(16, 32, ("fp32", "bf16", "fp8"), device="cpu")
    times = bench.seconds_of(steps, rounds=2, round_seconds=0.001, device="cpu")
    assert list(times) == ["fp32", "bf16", "fp8"] and all(seconds > 0 for seconds in times.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_loop_is_measured_against_its_matmuls(precision):
    machine = Machine(reuse_forward=precision == "bf16")
    result = bench.bench_loop(bench.Loop(16, 4, precision).config(machine), machine, seconds=0.05, rounds=2)
    assert (result["num_envs"], result["rollout_length"], result["precision"]) == (16, 4, precision)
    assert result["train_steps_per_second"] > 0 and 0 < result["floor_share"] < 1
    assert 0 < result["collect_share"] < 1 and 0 < result["update_share"] < 1
    assert result["collect_share"] + result["update_share"] <= 1


def test_the_floor_multiplies_what_the_loop_must():
    forward = 2 * 16 * (2 * 64 + 64 * 64 + 64 * 3)
    backward = 2 * forward - 2 * 16 * 2 * 64  # no gradient is wanted of the observations
    for reused, agents in itertools.product((True, False), (None, 3)):
        floor = bench.floor_of(bench.Loop(16, 4, "fp32").config(), Machine(), reused, agents)
        with FlopCounterMode(display=False) as counted:
            floor()
        assert counted.get_total_flops() == (agents or 1) * ((5 if reused else 9) * forward + 4 * backward)


def test_the_loop_learns_from_every_step_once_and_keeps_none():
    config = bench.Loop(16, 4, "fp32").config()
    assert (config.num_envs, config.rollout_length, config.precision, config.collect_precision) == (16, 4, "fp32", None)
    assert (config.fresh_updates, config.replay_updates, config.eval_every) == (1, 0, 0)
    assert bench.Loop(16, 4, "bf16").config(Machine(compile=True)).collect_precision == "fp32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_fp8_hardware_it_says_why_and_writes_nothing(tmp_path, capsys):
    assert bench.bench_fp8(tmp_path) is None and not list(tmp_path.iterdir())
    assert "needs a CUDA device of compute capability 8.9" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_fp8_hardware_it_writes_the_break_even_width(tmp_path):
    path = bench.bench_fp8(tmp_path, widths=(64, 128), batches=(1024,))
    if path is None:
        pytest.skip("this GPU has no FP8")
    assert torch.cuda.get_device_name().replace(" ", "_") in path.name and "break_even_width" in path.read_text()


def test_the_floor_takes_the_layout_that_is_fastest(monkeypatch):
    found = []

    def seconds(steps, *_):
        found.append(len(steps))
        return {flips: 1.0 - all(flips) for flips in steps}

    monkeypatch.setattr(bench, "seconds_of", seconds)
    a, b, out = bench.fastest_product(32, 64, 3, torch.float32, "cpu")
    assert found == [8] and [x.shape for x in (a, b, out)] == [(32, 64), (64, 3), (32, 3)]
    assert all(x.t().is_contiguous() for x in (a, b, out))
