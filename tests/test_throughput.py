import pytest
from torch.utils.flop_counter import FlopCounterMode

from fp8rl.build import Machine
from fp8rl.cli import throughput


def test_what_is_left_open_is_taken_as_it_is_fastest(monkeypatch):
    speeds, asked = {"fp32": 1, "bf16": 2}, []

    def measured(config, build, *_):
        asked.append(config.precision)
        return {"train_steps_per_second": speeds[config.precision]}

    monkeypatch.setattr(throughput, "bench_loop", measured)
    monkeypatch.setattr(throughput, "available_precisions", lambda device: ["fp32", "bf16", "fp16"])
    monkeypatch.setattr(throughput, "is_emulated", lambda name, device: name == "fp16")
    assert throughput.Loop(16, 4).fastest(Machine()).precision == "bf16"
    assert asked == ["fp32", "bf16"]
    assert throughput.Loop(16, 4, "fp32").fastest(Machine()).precision == "fp32" and len(asked) == 2


def test_the_loop_is_measured_against_its_matmuls(monkeypatch):
    monkeypatch.setattr(throughput, "seconds_of", lambda steps, *_: dict.fromkeys(steps, 1e-6))
    config = throughput.Loop(16, 4, "bf16").config()
    result = throughput.bench_loop(config, Machine(), seconds=0.05, rounds=2)
    assert (result["num_envs"], result["rollout_length"], result["precision"]) == (16, 4, "bf16")
    iterations_per_second = result["train_steps_per_second"] / config.steps_per_iteration
    assert iterations_per_second > 0
    assert result["floor_share"] == pytest.approx(1e-6 * iterations_per_second)


def test_the_floor_multiplies_what_the_loop_must():
    for agents, size, layers in ((3, 16, 1), (None, 32, 3), (3, 64, 2)):
        forward = 2 * 16 * (2 * size + (layers - 1) * size**2 + size * 3)
        backward = 2 * forward - 2 * 16 * 2 * size  # no gradient is wanted of the observations
        loop = throughput.Loop(16, 4, "fp32", hidden_size=(size,), layers=layers)
        floor = throughput.floor_of(loop.config(), Machine(), agents)
        with FlopCounterMode(display=False) as counted:
            floor()
        assert counted.get_total_flops() == (agents or 1) * (9 * forward + 4 * backward)
