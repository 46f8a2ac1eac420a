"""Runs made of parts: parts that stand alone, that go around others, and that a user replaces."""

import copy
import doctest
import importlib
import math
import resource
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import (
    PATIENCE,
    SHORT,
    Wrapper,
    after,
    assert_same,
    forked,
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
from fp8rl.distribution import LOG_STD, Categorical, Gaussian
from fp8rl.env import TensorEnv
from fp8rl.evaluate import Evaluator
from fp8rl.precision import PRECISIONS, Rules
from fp8rl.study import comparison, parallel
from fp8rl.tasks.by_id import task_of
from fp8rl.tasks.classic_control import CartPole
from fp8rl.tasks.lqr import Lqr
from fp8rl.train import Run, train

EXAMPLES = (
    "rng",
    "fp8",
    "losses",
    "rollout",
    "replay.ring",
    "bits.low_bit_adam",
    "doctor.watch",
    "dumps.mismatch",
    "sequences.laboratory",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_docstrings_do_what_they_say(name):
    tried = doctest.testmod(importlib.import_module(f"fp8rl.{name}"))
    assert tried.attempted >= 2 and not tried.failed


class Epochs(Run):
    """Three epochs over each rollout and no replay, as PPO's."""

    def improve(self, rollout):
        return [self.learner.update(rollout) for _ in range(3)]


def test_another_schedule_is_a_short_subclass():
    config = Config(**SHORT | {"replay_updates": 0})
    run = trained(build(config, kind=Epochs))
    assert isinstance(run, Epochs) and run.ring.count == 0
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


class Positions(CartPole):
    """Observes no velocities, which it says when it is made."""

    def __init__(self, *args, **options):
        self.bounds = tuple(bound[::2] for bound in CartPole.bounds)
        super().__init__(*args, **options)

    def observe(self, state):
        return state[:, ::2]


def test_a_task_may_set_its_bounds_when_it_is_made():
    config = small(env_id="test_parts:Positions")
    for run in (build(config), build_population([config])):
        assert after(1, run).env.obs.shape == (config.num_envs, 2)


class OneAction(Lqr):
    distribution = Categorical


REFUSED = {
    "env_id is 'no_such": {"env_id": "no_such_module:Task"},
    "env_id is .*NoSuchTask": {"env_id": "fp8rl.tasks.lqr:NoSuchTask"},
    "env_id is .*Single": {"env_id": "fp8rl.tasks.custom_env:Single"},
    "env_id is .*TensorEnv": {"env_id": "fp8rl.env:TensorEnv"},
    "env_id is .*OneAction": {"env_id": f"{__name__}:OneAction"},
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
        {
            "hidden_size": 16,
            "layers": 3,
            "precision": "fp8",
            "codec": "fp8",
            "formats": "weights=e4m3:stochastic m=e4m3 root=e4m3",
        },
    ],
    ids=("one layer", "pendulum", "few bits"),
)
def test_any_shape_trains_saves_and_is_a_population_s_agent(fields, tmp_path):
    config = Config(**{**SHORT, "learning_rate": 5e-4, **fields})
    run = after(2, build(config))
    together = after(2, build_population([config]))
    checkpoint.save(tmp_path / "a.pt", run)
    model, loaded = checkpoint.load(tmp_path / "a.pt")
    assert loaded == config
    assert len(model.hidden) == config.layers - 1
    assert model.critic.in_features == config.hidden_size
    with torch.no_grad():
        # Not in FP8
        torch.testing.assert_close(model(run.env.obs), run.model(run.env.obs), rtol=0.1, atol=0.05)
    losses = together.histories([config])[0].column("loss")[:2]
    np.testing.assert_allclose(losses, run.history.column("loss"), rtol=0.02, atol=2e-3)
    assert_same(trained(resumed(tmp_path / "a.pt")), trained(build(config)))


def test_gru_policies_have_any_number_of_layers():
    run = trained(Config(**SHORT, encoder="gru", layers=3, hidden_size=32))
    assert len(run.model.hidden) == 2 and np.isfinite(run.history.final_return)


class Slow(Wrapper):
    calls = 0

    def collect(self, learned):
        self.calls += 1
        return self.inner.collect(learned)


def test_a_part_around_a_part_is_seen_by_nobody():
    plain, around = (build(Config(**SHORT)) for _ in range(2))
    around.collector = Slow(Slow(around.collector))
    assert_same(trained(around), trained(plain))
    assert around.collector.calls == around.collector.inner.calls == around.config.iterations


def test_a_copy_of_a_run_is_whole():
    run = after(2, build(Config(**SHORT)))
    twin = copy.deepcopy(run)
    with torch.no_grad():
        twin.model.actor.bias += torch.tensor([100.0, 0.0])
    assert twin.evaluate() < 10 < run.evaluate()  # always to the left


def test_layers_that_are_replaced_act_and_are_refused_if_the_optimizer_does_not_have_them():
    not_all = "optimizer does not have all of the model's parameters: build the run again"
    plain = build(Config(**SHORT))
    in_fp8 = build(Config("fp8", **SHORT))
    in_few_bits = build(Config(formats="weights=e4m3:stochastic", **SHORT))
    for run in (plain, in_fp8, in_few_bits):
        run.model.hidden[0] = nn.Linear(64, 64)
        refused(not_all, train, run, progress=False)
    obs = plain.env.obs
    torch.testing.assert_close(plain.model.acting().policy(obs)[0], plain.model(obs)[0])
    agents = build_population([Config(**SHORT)])
    agents.model.theta = nn.Parameter(agents.model.theta.detach().clone())
    refused(not_all, train, agents, progress=False)
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


def test_a_deviation_beyond_its_bound_can_come_back():
    for value, grad in ((2.0, 1.0), (-3.0, -1.0)):
        spread = torch.tensor([value], requires_grad=True)
        outputs = Gaussian.outputs(torch.zeros(3, 1), spread)
        assert outputs[0, 1] == LOG_STD[value > 0]
        (grad * outputs[:, 1].sum()).backward()
        assert spread.grad == 4 * 3 * grad


def test_a_first_layer_in_fp8_takes_two_matmuls():
    layer, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(16, 32)
    fp8.convert_linears(layer)
    with mock.patch.object(fp8, "scaled_matmul", side_effect=fp8.scaled_matmul) as called:
        layer(x).sum().backward()
        assert called.call_count == 2 and layer[0].weight.grad.any()
        layer(x.requires_grad_()).sum().backward()
        assert called.call_count == 5 and x.grad.any()


def test_a_gpu_without_memory_is_not_another_config():
    run = build(Config(**SHORT))
    full = mock.patch.object(
        run.model, "load_state_dict", side_effect=torch.OutOfMemoryError("CUDA out of memory")
    )
    with full, pytest.raises(torch.OutOfMemoryError):
        run.load_state_dict(build(Config(**SHORT)).state_dict())


def test_a_population_is_saved_and_read_again(tmp_path):
    configs = [Config(precision, **SHORT) for precision in ("fp32", "fp8")]
    run = build_population(configs)
    run.stop(1, "a reason")
    checkpoint.save(tmp_path / "a.pt", after(2, run))
    again = resumed_population(tmp_path / "a.pt")
    whole = build_population(configs)
    whole.stop(1, "a reason")
    trained(again), trained(whole)
    assert torch.equal(again.model.theta, whole.model.theta)
    assert again.history.failures == [None, "a reason"]
    refused(".*is of a population: read it with resume", checkpoint.load, tmp_path / "a.pt")


def resumed_population(path):
    configs, state = checkpoint.resume(path)
    run = build_population(configs)
    run.load_state_dict(state)
    return run


def write_peak(path) -> None:
    """Writes down a ring's bytes and by how much saving it raises the process's peak of resident
    memory."""
    run = build(small(steps=2_000_000, capacity=2_000_000))
    for field in run.ring.fields.values():
        field.fill_(1)
    run.ring.clock.set(0, run.ring.rows - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint.save(path.with_suffix(".pt"), run)
    path.write_text(
        f"{run.ring.nbytes} {1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)}"
    )


@pytest.mark.xdist_group("forked")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count in other units")
def test_a_checkpoint_holds_the_ring_once_more_and_not_four_times(tmp_path):
    forked(write_peak, tmp_path / "peak").join(PATIENCE)
    size, more = map(int, (tmp_path / "peak").read_text().split())
    assert size > 3e7 and more < 2.5 * size  # the copy, and pages of the file that is read again


class NotFinite(Evaluator):
    def returns(self, model):
        return np.array([self.found, 1.0])


class SomeAreNotFinite(Evaluator):
    def evaluate(self, learned):
        return np.array([1.0, math.nan, 2.0, math.inf])


def test_an_evaluation_that_is_not_finite_is_a_failure():
    for found in (math.nan, -math.inf):
        run = build(Config(**SHORT))
        run.evaluator = NotFinite(run.config, run.learner.precision, None)
        run.evaluator.found = found
        refused(
            "evaluation is not finite in fp32: fix the environment's rewards",
            train,
            run,
            progress=False,
        )
    together = build_population([Config(seed=seed, **SHORT) for seed in range(4)])
    together.evaluator = SomeAreNotFinite(together.config, None, None)
    train(together, progress=False)
    _, failed, fine, infinite = together.history.of_agents
    for each in (failed, infinite):
        assert (
            each.failure.startswith("evaluation is not finite") and each.final_return == -math.inf
        )
    assert fine.failure is None and fine.final_return == 2.0


def test_a_seed_that_diverges_is_recorded():
    history = parallel.run(Config(learning_rate=1e30, **SHORT))
    assert "lower learning_rate" in history.failure and history.final_return == -math.inf
    fine = parallel.run(Config(**SHORT))
    results = [
        comparison.summarize(small(seed=seed), h)
        for seed, h in enumerate([history, fine, fine, fine, fine])
    ]
    (line,) = comparison.table(results, ["fp32"], threshold=0.0).splitlines()[2:]
    assert "4 of 5, 1 failed" in line and "| fail |" in line


def test_an_overflow_builds_no_histories():
    run = build_population([Config("fp16", seed=seed, **SHORT) for seed in range(4)])
    run.learner.precision.scale.fill_(2.0**40)
    with mock.patch.object(
        type(run.history), "of_agents", mock.PropertyMock(side_effect=AssertionError)
    ):
        train(run, progress=False)
    assert run.history.columns["skipped"][0].sum() > 0
