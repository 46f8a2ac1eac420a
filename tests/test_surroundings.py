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

RUNS = {
    "fp32": Config(**SHORT),
    "bf16": Config(**SHORT, precision="bf16"),
    "fp16": Config(**SHORT, precision="fp16"),
    "fp8": Config(**SHORT, precision="fp8", codec="fp8"),
    "fp8+bf16": Config(**SHORT, precision="fp8+bf16", codec="int8"),
    "gru": Config(**SHORT, encoder="gru", hide_velocity=True),
    "gym": Config(**SHORT, env_id="CartPole-v1"),
    "normalized": Config(**SHORT, env_id="fp8rl/Lqr-v0", normalize_obs=True),
    "few bits": Config(**SHORT, formats="weights=e4m3:stochastic m=e4m3 root=e4m3"),
    "population": [Config(**SHORT, precision=name) for name in ("fp32", "fp16", "fp8")],
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
    found = RUNS[name]
    run = train(
        build_population(found) if isinstance(found, list) else build(found), progress=False
    )
    columns = [
        np.array(column).tobytes()
        for name, column in run.history.columns.items()
        if name != "seconds"
    ]
    return b"".join([weights(run).numpy().tobytes(), *columns])


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
    before, found = torch.get_rng_state(), {}
    jobs = [
        threading.Thread(target=lambda k=k, name=name: found.update({(k, name): trained(name)}))
        for k in (0, 1)
        for name in RUNS
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(found) == 2 * len(RUNS) and all(
        result == alone[name] for (_, name), result in found.items()
    )
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert (
        not torch.is_autocast_enabled("cpu") and torch.backends.cuda.matmul.fp32_precision == "none"
    )
