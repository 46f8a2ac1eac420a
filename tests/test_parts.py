"""Runs made of parts: parts that stand alone, that go around others, and that a user replaces."""

import doctest
import importlib
import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import (
    SHORT,
    after,
    assert_same,
    refused,
    resumed,
    small,
    trained,
)
from torch import nn

from fp8rl import fp8
from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.distribution import Categorical
from fp8rl.env import TensorEnv
from fp8rl.evaluate import Evaluator
from fp8rl.precision import PRECISIONS, Rules
from fp8rl.study import comparison
from fp8rl.tasks.by_id import task_of
from fp8rl.tasks.lqr import Lqr
from fp8rl.train import train

EXAMPLES = (
    "rng",
    "fp8",
    "losses",
    "rollout",
    "replay.ring",
    "bits.low_bit_adam",
    "doctor.watch",
    "dumps",
    "sequences.laboratory",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_docstrings_do_what_they_say(name):
    tried = doctest.testmod(importlib.import_module(f"fp8rl.{name}"))
    assert tried.attempted >= 2 and not tried.failed


def test_another_schedule_is_a_short_function():
    """Three epochs over each rollout and no replay, as PPO's."""
    config = Config(**SHORT | {"replay_updates": 0})
    run = build(config)
    run.improve = lambda rollout: [run.learner.update(rollout) for _ in range(3)]
    assert trained(run).ring.count == 0
    state = run.learner.optimizer.state[run.model.actor.weight]
    assert state["step"] == 3 * config.iterations


def test_a_precision_is_one_entry(monkeypatch):
    """Gradients in e4m3, too: single runs and populations round alike."""
    monkeypatch.setitem(PRECISIONS, "e4m3", Rules(None, fp8.E4M3, fp8.E4M3, loss_scale=1.0))
    config = Config("e4m3", seed=1, learning_rate=5e-4, **SHORT)
    alone, together = trained(build(config)), trained(build_population([config]))
    assert alone.model.hidden[0].backward_type == fp8.E4M3
    history = together.histories([config])[0]
    for name in ("loss", "grad_norm", "eval_return"):
        ours, theirs = history.column(name), alone.history.column(name)
        np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=1e-3)


TASK = """
import torch
from fp8rl.env import TensorEnv


class Bandit(TensorEnv):
    num_actions, max_steps, state_size, bounds, reward_threshold = 3, 8, 1, ((-1.0,), (1.0,)), 7.5

    def start(self, numbers):
        return numbers

    def advance(self, state, action):
        return state, (action == 2).float(), torch.zeros_like(action, dtype=torch.bool)
"""


def test_a_task_is_one_class(tmp_path, monkeypatch):
    (tmp_path / "my_tasks_of_test.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    config = small(env_id="my_tasks_of_test:Bandit", steps=20_480, eval_every=0)
    run = trained(build_population([config]))
    assert np.mean(run.history.last["eval_return"]) == 8
    assert issubclass(task_of(config.env_id), TensorEnv)
    assert comparison.threshold_of(config.env_id) == 7.5
    checkpoint.save(tmp_path / "a.pt", after(1, build(config)))
    del sys.modules["my_tasks_of_test"]
    refused(".*import my_tasks_of_test first, or add --trust", checkpoint.resume, tmp_path / "a.pt")
    assert checkpoint.resume(tmp_path / "a.pt", trust=True)[0] == config


class ManyActions(Lqr):
    distribution = Categorical
    num_actions = 257


REFUSED = {
    "env_id is 'no_such": {"env_id": "no_such_module:Task"},
    "env_id is .*NoSuchTask": {"env_id": "fp8rl.tasks.lqr:NoSuchTask"},
    "env_id is .*ManyActions', .* 257 actions": {"env_id": f"{__name__}:ManyActions"},
    ".*no layer can run in FP8": {"precision": "fp8", "layers": 1},
    ".*no layer can run in FP8.*": {"precision": "fp8", "hidden_size": 40},
    "layers is 1: use at least 2 with encoder gru": {"encoder": "gru", "layers": 1},
    "layers is 0": {"layers": 0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_task_or_network_is_refused_in_one_line(message):
    refused(message, lambda: build(small(**REFUSED[message])))


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 16, "layers": 1},
        {"hidden_size": 48, "layers": 2, "precision": "bf16", "env_id": "Pendulum-v1"},
        {"hidden_size": 32, "layers": 3, "encoder": "gru"},
        {
            "hidden_size": 16,
            "layers": 3,
            "precision": "fp8",
            "codec": "fp8",
            "formats": "weights=e4m3:stochastic m=e4m3 root=e4m3",
        },
    ],
    ids=("one layer", "pendulum", "gru", "few bits"),
)
def test_any_shape_trains_and_is_saved(fields, tmp_path):
    config = Config(**{**SHORT, **fields})
    checkpoint.save(tmp_path / "a.pt", after(2, build(config)))
    model, loaded = checkpoint.load(tmp_path / "a.pt")
    assert loaded == config
    assert len(model.hidden) == config.layers - 1
    assert model.critic.in_features == config.hidden_size
    assert_same(trained(resumed(tmp_path / "a.pt")), trained(build(config)))


def test_layers_that_the_optimizer_does_not_have_are_refused():
    not_all = "optimizer does not have all of the model's parameters: build the run again"
    for fields in ({}, {"precision": "fp8"}, {"formats": "weights=e4m3:stochastic"}):
        run = build(Config(**SHORT, **fields))
        run.model.hidden[0] = nn.Linear(64, 64)
        refused(not_all, train, run, progress=False)
    frozen = build(Config(**SHORT))
    frozen.model.hidden[0] = nn.Linear(64, 64).requires_grad_(False)
    trained(frozen)


def test_a_run_takes_the_rows_that_it_can_fill():
    config = small(steps=5_120)
    assert build(config).ring.rows == build_population([config]).ring.rows == 10 * 32 + 1
    assert build(small(capacity=800)).ring.rows == 50
    # 32 full rings would take 288 MB
    with mock.patch("fp8rl.machine.hardware.available", return_value=10**8):
        assert build_population([small(seed=seed, steps=5_120) for seed in range(32)]).agents == 32


def test_a_population_is_saved_and_read_again(tmp_path):
    configs = [Config(precision, **SHORT) for precision in ("fp32", "fp8")]
    run, whole = build_population(configs), build_population(configs)
    for each in (run, whole):
        each.stop(1, "a reason")
    checkpoint.save(tmp_path / "a.pt", after(2, run))
    read, state = checkpoint.resume(tmp_path / "a.pt")
    again = build_population(read)
    again.load_state_dict(state)
    assert torch.equal(trained(again).model.theta, trained(whole).model.theta)
    assert again.history.failures == [None, "a reason"]
    refused(".*is of a population: read it with resume", checkpoint.load, tmp_path / "a.pt")


class SomeAreNotFinite(Evaluator):
    def evaluate(self, learned):
        return np.array([1.0, math.nan, 2.0, math.inf])


def test_an_evaluation_that_is_not_finite_is_a_failure():
    run = build(Config(**SHORT))
    message = "evaluation is not finite in fp32: fix the environment's rewards"
    with mock.patch("fp8rl.evaluate.evaluate", return_value=np.array([math.nan, 1.0])):
        refused(message, train, run, progress=False)
    together = build_population([Config(seed=seed, **SHORT) for seed in range(4)])
    together.evaluator = SomeAreNotFinite(together.config, None, None)
    train(together, progress=False)
    returns = [history.final_return for history in together.history.of_agents]
    assert returns == [1.0, -math.inf, 2.0, -math.inf]
