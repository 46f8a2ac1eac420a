"""What users do to it: kills, two writers, foreign files, other code beside it."""

import contextlib
import pickle
import threading

import pytest
import torch
from helpers import numbers, weights

from fp8rl.config import Config
from fp8rl.scale.machine import build
from fp8rl.train import train

SHORT = {"steps": 2 * 512, "eval_every": 0, "eval_episodes": 2}
RUNS = {
    "fp32": Config(**SHORT),
    "bf16": Config(**SHORT, precision="bf16"),
    "fp16": Config(**SHORT, precision="fp16"),
    "fp8": Config(**SHORT, precision="fp8", codec="fp8"),
    "fp8+bf16": Config(**SHORT, precision="fp8+bf16", codec="int8"),
    "gru": Config(**SHORT, encoder="gru", hide_velocity=True, layout="delta"),
    "gym": Config(**SHORT, env_id="CartPole-v1"),
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
    run = train(build(RUNS[name]), progress=False)
    return b"".join([weights(run).numpy().tobytes(), *(column.tobytes() for column in numbers(run).values())])


@pytest.fixture(scope="module")
def alone():
    """What each run gives by itself."""
    return {name: trained(name) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_settings_of_the_caller_change_nothing(surrounding, name, alone):
    with SURROUNDINGS[surrounding]():
        found = trained(name)
    assert found == alone[name]


def test_threads_beside_each_other_train_as_alone_and_leave_the_caller_as_it_was(alone):
    torch.manual_seed(7)
    before, found = torch.get_rng_state(), {}
    jobs = [
        threading.Thread(target=lambda k=k, name=name: found.update({(k, name): trained(name)})) for k in (0, 1) for name in RUNS
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(found) == 2 * len(RUNS) and all(result == alone[name] for (_, name), result in found.items())
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu") and torch.backends.cuda.matmul.fp32_precision == "none"


def test_a_history_can_be_pickled():
    run = train(Config(**SHORT), progress=False)
    copied = pickle.loads(pickle.dumps(run.history))
    assert [column.tobytes() for column in copied.columns.values()] == [x.tobytes() for x in run.history.columns.values()]
