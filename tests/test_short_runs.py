"""A few short trainings end with the numbers that they have always ended with.

A change that is meant to leave numbers alone must leave these alone: how far all weights have moved
after two iterations, or a few rates. Processors differ in the order of sums, which hardly shows in
so short a training. A change that is meant to change numbers changes them in the same commit.
"""

import pytest
import torch
from torch import nn

from fp8rl.build import build, build_population
from fp8rl.config import EIGHT_BIT, Config
from fp8rl.doctor import Doctor, mismatch
from fp8rl.machine import Machine
from fp8rl.train import train

SETTINGS = {
    "rollout_length": 32,
    "slice_length": 16,
    "batch_size": 256,
    "replay_updates": 4,
    "capacity": 2_000,
    "gamma": 0.98,
    "lam": 0.95,
    "entropy_coef": 0.01,
    "learning_rate": 1e-2,
    "halved_after": 1024,
    "normalize_obs": False,
    "steps": 1024,
    "eval_every": 0,
    "eval_episodes": 1,
}


def config(**fields) -> Config:
    return Config(**SETTINGS | fields)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def movement(run) -> float:
    """Trains, and says how far all weights have moved, in the sum of absolute values."""
    before = weights_of(run.model)
    train(run, progress=False)
    return float((weights_of(run.model) - before).abs().sum())


RUNS = {
    "fp32": lambda: build(config()),
    "bf16": lambda: build(config(precision="bf16")),
    "fp16": lambda: build(config(precision="fp16")),
    "fp8": lambda: build(config(precision="fp8")),
    "acts in fp8": lambda: build(config(collect_precision="fp8")),
    "GRU": lambda: build(config(encoder="gru", hide_velocity=True)),
    "int8 replay": lambda: build(config(codec="int8")),
    "normalized": lambda: build(config(normalize_obs=True)),
    "Gymnasium": lambda: build(config(env_id="CartPole-v1"), Machine(vectorization="sync")),
    "Pendulum": lambda: build(config(env_id="Pendulum-v1")),
    "Acrobot": lambda: build(config(env_id="Acrobot-v1")),
    "known optimum": lambda: build(config(env_id="fp8rl/Lqr-v0")),
    "population": lambda: build_population([config(), config(precision="fp8", seed=1)]),
    "moments in few bits": lambda: build(config(formats="v=e5m2 m=bf16")),
    "eight bits": lambda: build_population([config(**EIGHT_BIT)]),
    "plain files": lambda: build(config(), Machine(fast_forward=False)),
}
EXPECTED = {
    "fp32": 121.53,
    "bf16": 121.724,
    "fp16": 121.52,
    "fp8": 121.983,
    "acts in fp8": 121.565,
    "GRU": 433.97,
    "int8 replay": 121.341,
    "normalized": 104.165,
    "Gymnasium": 137.531,
    "Pendulum": 121.197,
    "Acrobot": 137.821,
    "known optimum": 181.252,
    "population": 252.161,
    "moments in few bits": 121.89,
    "eight bits": 126.712,
    "plain files": 121.53,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_training_ends_with_the_same_weights(name):
    assert movement(RUNS[name]()) == pytest.approx(EXPECTED[name], rel=2e-5)


def test_the_doctor_finds_the_same_rates():
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 16, generator=noise).requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=1e-2)
    doctor = Doctor(optimizer, formats=("weights=bf16", "weights=e4m3", "m=e4m3", "v=e5m2"))
    for _ in range(128):
        x = torch.randn(32, 16, generator=noise)
        optimizer.zero_grad()
        error = nn.functional.linear(x, weight) - x.sum(1, keepdim=True)
        error.square().mean().backward()
        optimizer.step()
    rates = [finding.rate for finding in doctor.report()]
    assert rates == pytest.approx(RATES, rel=2e-5)


RATES = [0.985083, 0.0818609, 0.99777, 1.17699]


def test_the_report_on_a_dump_has_the_same_numbers():
    noise = torch.Generator().manual_seed(0)
    actor = -0.1 - 2 * torch.rand(64, 100, generator=noise)
    learner = actor + 0.01 * torch.randn(64, 100, generator=noise)
    report = mismatch(learner, actor)
    assert report.verdict == "rounding"
    assert [report.numbers.bits, report.numbers.horizon, report.numbers.kl_k3] == pytest.approx(
        REPORT, rel=2e-5
    )


REPORT = [4.97012, 1036.04, 5.08555e-05]  # bits, horizon, k3
