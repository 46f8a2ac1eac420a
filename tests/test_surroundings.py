"""What the caller has set for its process, and other threads, change nothing in a training."""

import contextlib
import threading

import numpy as np
import pytest
import torch
from helpers import SHORT, weights

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.train import train

TWO_ITERATIONS = SHORT | {"steps": 1_024}
RUNS = {
    "gru": Config(**TWO_ITERATIONS, encoder="gru", hide_velocity=True, codec="int8"),
    "normalized": Config(
        **TWO_ITERATIONS, precision="bf16", env_id="fp8rl/Lqr-v0", normalize_obs=True
    ),
    "few bits": Config(**TWO_ITERATIONS, formats="weights=e4m3:stochastic m=e4m3 root=e4m3"),
    "population": [Config(**TWO_ITERATIONS, precision=name) for name in ("fp32", "fp16", "fp8")],
}


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def trained(name: str) -> bytes:
    """Weights and history of a run."""
    config = RUNS[name]
    run = build_population(config) if isinstance(config, list) else build(config)
    train(run, progress=False)
    columns = {name: column for name, column in run.history.columns.items() if name != "seconds"}
    parts = [weights(run).numpy(), *map(np.array, columns.values())]
    return b"".join(part.tobytes() for part in parts)


@pytest.fixture(scope="module")
def alone():
    """What each run gives by itself."""
    return {name: trained(name) for name in RUNS}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_settings_of_the_caller_change_nothing(surrounding, alone):
    for name, expected in alone.items():
        with SURROUNDINGS[surrounding]():
            found = trained(name)
        assert found == expected, name


def test_threads_beside_each_other_train_as_alone_and_leave_the_caller_as_it_was(alone):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    results = {}

    def train_beside(name: str) -> None:
        results[name] = trained(name)

    threads = [threading.Thread(target=train_beside, args=[name]) for name in RUNS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == alone
    assert torch.equal(torch.get_rng_state(), before)
