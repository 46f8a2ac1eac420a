import copy
import dataclasses
import sys

import numpy as np
import pytest
import torch
import torch._dynamo
from helpers import (
    SHORT,
    TINY,
    after,
    assert_same,
    change_rollouts,
    log_probabilities,
    noise,
    refused,
    small,
    trained,
    weights,
)

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk.restore import restore
from fp8rl.env import Cart
from fp8rl.losses import LossCoefficients
from fp8rl.machine.adam import Adam
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.replay import ReplayBuffer
from fp8rl.replay.layouts import transitions_of
from fp8rl.returns import RewardScale
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED
from fp8rl.train import Learner, iterate


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp8"])
def test_same_config_same_numbers_bit_for_bit(precision):
    config = Config(precision=precision, seed=7, **SHORT)
    state = torch.get_rng_state()
    first = trained(config)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is not ours
    torch.rand(3)
    assert_same(first, trained(config))
    other = after(1, build(dataclasses.replace(config, seed=8)))
    assert not torch.equal(weights(first), weights(other))


def test_learns_to_stay_at_the_origin():
    assert trained(small(steps=20_480, precision="fp8")).history.final_return >= 195


def test_iterate_yields_the_run_and_learns_from_each_rollout_once_and_then_from_the_ring():
    config = Config(**SHORT)
    run, seen, rollouts, batches = build(config), [], [], []
    change_rollouts(run, lambda rollout: rollouts.append(rollout) or rollout)
    update = run.learner.update
    run.learner.update = lambda batch: batches.append(batch) or update(batch)
    for same_run in iterate(run):
        assert same_run is run
        seen.append((len(run.history), run.ring.size))
    assert seen == [(1, 32), (2, 64), (3, 96), (4, 128)]
    assert list(iterate(run)) == []  # it has ended
    assert len(rollouts) == 4 and len(batches) == 12
    for k, batch in enumerate(batches):
        assert batch.reward.shape == (32, 16)
        assert (batch is rollouts[k // 3]) == (k % 3 == 0)


@pytest.mark.parametrize("bad", [torch.inf])
@pytest.mark.parametrize("which", ["obs", "reward"])
def test_what_is_not_finite_never_reaches_weights_or_ring(which, bad):
    def spoil(rollout):
        if len(run.history) == 2:
            getattr(rollout, which)[5, 1] = bad
        return rollout

    run, seen = build(Config(**SHORT)), []
    change_rollouts(run, spoil)
    with pytest.raises(ValueError, match=f"^{which} from the environment is not finite: fix"):
        seen.extend(weights(each) for each in iterate(run))
    assert len(run.history) == len(seen) == 2 and run.ring.size == 64
    assert torch.equal(weights(run), seen[-1])


def learner(precision: str = "fp32", rate=1e-3) -> Learner:
    model = ActorCritic(generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(
        model.parameters(), rate, capturable=isinstance(rate, torch.Tensor)
    )
    coefficients = LossCoefficients.of(small().settled(Cart))
    return Learner(coefficients, model, Precision(precision), optimizer, RewardScale(3))


def test_adam_is_torch_s_without_its_slow_import(monkeypatch):
    found = []
    for kind, module in ((torch.optim.Adam, torch._dynamo), (Adam, None)):
        monkeypatch.setitem(sys.modules, "torch._dynamo", module)  # None: to import it raises
        model = ActorCritic(generator=torch.Generator().manual_seed(0))
        optimizer = kind(model.parameters(), 1e-2, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


def test_an_end_without_a_dummy_row_after_it_is_refused():
    """As from environments that reset in the step that ends an episode. Whatever takes the next row
    for what followed names the row that should be a dummy."""
    one, ring, rollout = learner(), ReplayBuffer(20, 3), noise(0, 6, 3)
    rollout.flags[3, 1] = TRUNCATED
    for take in (ring.append, transitions_of, one.watch):
        message = "flags of row 4 of environment 1 have no DUMMY, .*: reset one step later"
        refused(message, take, rollout)
    rollout.flags[4, 1] = DUMMY
    rollout.flags[5, 2] = TERMINATED
    for take in (ring.append, transitions_of, one.watch):
        take(rollout)
    refused("flags of row 0 of environment 2 have no DUMMY", ring.append, rollout)


@pytest.mark.parametrize("learner, actor", [("fp32", "fp8"), ("fp8", "fp32"), ("bf16", "fp16")])
def test_a_policy_may_act_in_another_precision_with_the_learner_s_weights(learner, actor):
    run = build(small(precision=learner, collect_precision=actor))
    for _ in range(2):
        run.learner.update(run.collect())
    pairs = list(zip(run.model.parameters(), run.collector.model.parameters(), strict=True))
    # Copied, never shared
    assert all(a.data_ptr() != b.data_ptr() for a, b in pairs)
    assert not any(torch.equal(a, b) for a, b in pairs)  # one update behind
    rollout = run.collect()
    assert all(torch.equal(a, b) for a, b in pairs)
    twin = build(small(precision=actor))
    twin.model.load_state_dict(run.model.state_dict())
    expected = log_probabilities(twin.model, twin.learner.precision, rollout)
    torch.testing.assert_close(expected, rollout.behavior_logp, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "fp8", "collect_precision": "bf16"},
        {"encoder": "gru", "hide_velocity": True},
        {"normalize_obs": True},
        {"env_id": "Pendulum-v1"},
    ],
    ids=str,
)
def test_the_first_update_on_a_rollout_drops_nothing_however_the_policy_acts(fields):
    """Its ratios to the learner's policy are exactly 1, so even a tiny clip keeps all rows."""
    once = {"replay_updates": 0, "clip": 1e-7, "collect_precision": "fp8", "eval_every": 0}
    history = after(2, build(Config(**SHORT | once | fields))).history
    assert (history.column("clip_fraction") == 0).all()
    assert (history.column("max_ratio") > 1.00001).all()  # to the policy that acted


def test_the_learning_rate_falls_with_the_steps_to_the_last_one_or_stays():
    for fields, factors in (
        ({"halved_after": 1_024, "anneal": False}, (1, 2 / 3, 1 / 2, 2 / 5)),
        ({"halved_after": 1_024}, (1, 0.75 * 2 / 3, 0.5 / 2, 0.25 * 2 / 5)),
        ({"halved_after": 0, "anneal": False}, (1, 1, 1, 1)),
    ):
        run = trained(Config(**SHORT | {"eval_every": 0} | fields))
        rates = run.history.column("learning_rate")
        np.testing.assert_allclose(rates, 1e-3 * np.array(factors), err_msg=str(fields))


@pytest.mark.parametrize("precision, step", [("fp32", 64), ("fp16", 1_280), ("fp8", 1_280)])
def test_gradients_that_are_not_finite_stop_a_run_at_once_or_after_many_skipped_steps(
    precision, step
):
    config = Config(precision=precision, value_coef=1e38, eval_every=0, **TINY)
    message = f"gradient not finite at step {step} in {precision}: lower learning_rate"
    refused(message, trained, config, error=FloatingPointError)


def test_what_a_run_starts_from_stays_as_it_is():
    config = Config(**SHORT)
    state = after(1, build(config)).state_dict()
    elsewhere = copy.deepcopy(state)
    # A GPU's: how it runs is not loaded
    elsewhere["optimizer"]["param_groups"][0].update(fused=True, capturable=True)
    runs = []
    for start in (state, state, elsewhere):
        runs.append(build(config))
        runs[-1].load_state_dict(start)
        assert not runs[-1].learner.optimizer.param_groups[0]["capturable"]
        trained(runs[-1])
    assert_same(*runs[:2])
    assert_same(*runs[1:])
    # Without its rows a run continues with none
    again = build(config)
    again.load_state_dict(after(3, build(config)).state_dict(ring=False))
    assert again.ring.size == 0 and after(1, again).ring.size == 32


def test_a_state_of_another_config_is_refused():
    config = Config(**SHORT)
    state = after(3, build(config)).state_dict()
    # torch's copy_ would broadcast one environment to several, and without rows of a ring nothing
    # else notices.
    one = build(dataclasses.replace(config, num_envs=1)).state_dict(ring=False)
    cases = [(config, one)]
    for change in ({"num_envs": 8}, {"capacity": 600}, {"layers": 3}, {"formats": "m=e4m3"}):
        cases.append((dataclasses.replace(config, **change), state))
    for name in state.keys() - {"ring"}:
        cases.append((config, {key: x for key, x in state.items() if key != name}))
    for own, found in cases:
        refused("the state does not fit the config", restore, build(own), found)


def test_a_scale_of_rewards_is_one_of_as_many_environments():
    rollout = build(small(steps=1_024)).collect()
    refused("num_envs is 16 in", RewardScale(1).add, rollout, 0.9, lambda tensors: tensors)
