import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import SHORT, after, assert_same, numbers, weights

from fp8rl import checkpoint
from fp8rl.config import Config
from fp8rl.env import Cart
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.rollout import collect
from fp8rl.scale.machine import build
from fp8rl.scale.storage import StoredRing
from fp8rl.train import Run, iterate, make_cart, train, update


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_same_config_same_numbers_bit_for_bit(precision):
    config = Config(precision=precision, seed=7, **SHORT)
    state = torch.get_rng_state()
    first = train(config, progress=False)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is not ours
    torch.rand(3)
    assert_same(first, train(config, progress=False))
    other = train(dataclasses.replace(config, seed=8), progress=False)
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_learns_to_stay_at_the_origin(precision):
    history = train(Config(steps=20_480, precision=precision), progress=False).history
    assert history.final_return >= 195
    assert history.first_step_at(195) <= 20_480 and math.isnan(history.first_step_at(201))


def test_fp8_takes_any_number_of_environments_and_rows():
    config = Config(precision="fp8", num_envs=5, rollout_length=31, slice_length=7, batch_size=119, steps=20 * 155)
    run = train(dataclasses.replace(config, eval_every=0, eval_episodes=3), progress=False)
    assert np.isfinite(run.history.column("loss")).all() and run.history.column("nonfinite").sum() == 0
    assert not torch.equal(weights(run), weights(Run(config)))


def test_a_wide_observation_is_learned_from():
    assert train(Config(extra_features=6, steps=51_200, eval_every=0), progress=False).history.final_return >= 190


def test_iterate_yields_the_run_after_every_iteration():
    config = Config(**SHORT)
    run, seen = Run(config), []
    for same_run in iterate(run):
        assert same_run is run
        seen.append((len(run.history), run.ring.size, weights(run)))
    assert [x[:2] for x in seen] == [(1, 32), (2, 64), (3, 96), (4, 128)]
    assert all(not torch.equal(one[2], other[2]) for one, other in itertools.pairwise(seen))
    assert_same(run, train(config, progress=False))
    assert list(iterate(run)) == []  # it has ended


class Broken(Cart):
    """Returns a number that is not finite from its 70th step on."""

    bad, which, steps_taken = torch.nan, "obs", 0

    def step(self, *args):
        obs, reward, *ends = super().step(*args)
        self.steps_taken += 1
        if self.steps_taken > 70:
            {"obs": obs, "reward": reward}[self.which][1, ...] = self.bad
        return obs, reward, *ends


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", ["obs", "reward"])
def test_what_is_not_finite_never_reaches_weights_or_ring(which, bad):
    def make_env(config, *settings):
        env = Broken(*settings[:4])  # with the starts of training for evaluations, too
        env.bad, env.which = bad, which
        return env

    run, seen = Run(Config(**SHORT), make_env=make_env), []
    with pytest.raises(ValueError, match=f"^{which} from the environment is not finite: fix the environment"):
        for _ in iterate(run):
            seen.append(weights(run))
    assert len(seen) == 2 and torch.equal(weights(run), seen[-1]) and run.ring.size == 64 and len(run.history) == 2


def test_repeated_updates_lower_the_loss_of_a_batch():
    model, precision, config = ActorCritic(), Precision("fp32"), Config()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = collect(model, Cart(16, 0.5), 32, precision)
    losses = [update(model, optimizer, precision, batch, config)["value_loss"].item() for _ in range(50)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("learner, actor", [("fp32", "fp8"), ("fp8", "fp32"), ("bf16", "fp16")])
def test_a_policy_may_act_in_another_precision_with_the_learner_s_weights(learner, actor):
    run = Run(Config(precision=learner, collect_precision=actor))
    for _ in range(2):
        run.update(run.collect())
    pairs = list(zip(run.model.parameters(), run.actor.parameters(), strict=True))
    assert run.acting.name == actor and all(a.data_ptr() != b.data_ptr() for a, b in pairs)  # copied, never shared
    assert not any(torch.equal(a, b) for a, b in pairs)  # one update behind
    rollout = run.collect()
    assert all(torch.equal(a, b) for a, b in pairs)
    twin = Run(Config(precision=actor))
    twin.model.load_state_dict(run.model.state_dict())
    with torch.no_grad(), twin.precision.autocast():
        logits, _ = twin.model(rollout.obs[:-1])
    torch.testing.assert_close(
        torch.distributions.Categorical(logits=logits).log_prob(rollout.action), rollout.behavior_logp, atol=1e-7, rtol=1e-6
    )


def test_without_the_correction_replay_trains_another_agent():
    corrected, plain = (train(Config(**SHORT, importance_correction=on), progress=False) for on in (True, False))
    assert not torch.equal(weights(corrected), weights(plain))
    assert corrected.history.column("ess")[1:].max() < 1


@pytest.mark.parametrize(
    "fields, factors",
    [
        ({"halved_after": 1_024, "anneal": False}, (1, 2 / 3, 1 / 2, 2 / 5)),
        ({"halved_after": 0}, (1, 0.75, 0.5, 0.25)),
        ({"halved_after": 1_024}, (1, 0.75 * 2 / 3, 0.5 / 2, 0.25 * 2 / 5)),
        ({"halved_after": 0, "anneal": False}, (1, 1, 1, 1)),
    ],
    ids=str,
)
def test_the_learning_rate_falls_with_the_steps_to_the_last_one_or_stays(fields, factors):
    rates = train(Config(**SHORT, **fields), progress=False).history.column("learning_rate")
    np.testing.assert_allclose(rates, Config.learning_rate * np.array(factors))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_stops_a_run_without_a_scaler(precision):
    with pytest.raises(FloatingPointError, match=f"gradient not finite at step 512 in {precision}: lower learning_rate"):
        train(Config(precision=precision, steps=512, value_coef=1e38), progress=False)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_a_run_that_only_skips_stops_too(precision):
    with pytest.raises(FloatingPointError, match=f"gradient not finite at step 10240 in {precision}"):
        train(Config(precision=precision, value_coef=1e38), progress=False)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"precision": "fp7"}, "precision is 'fp7' and it is unknown: choose from fp32"),
        ({"precision": "tf32"}, "precision is 'tf32' and .*choose from fp32"),
        ({"collect_precision": "tf32"}, "precision is 'tf32' and .*choose from fp32"),
        ({"codec": "int8"}, r"codec is .*int8.*: make .* with fp8rl\.scale\.machine\.build"),
        ({"env_id": "CartPole-v1"}, r"env_id is .*CartPole-v1.*: make .* with fp8rl\.scale\.machine\.build"),
        ({"layout": "full"}, r"layout is .*full.*: make .* with fp8rl\.scale\.machine\.build"),
        ({"encoder": "gru"}, r"encoder is .*gru.*: make .* with fp8rl\.scale\.machine\.build"),
    ],
    ids=str,
)
def test_what_a_run_cannot_be_made_of_is_refused_in_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        Run(Config(**fields))
    assert "\n" not in str(caught.value)


def test_a_ring_that_cannot_be_allocated_is_refused_in_one_line():
    with pytest.raises(MemoryError, match="replay cannot be allocated on cpu: lower capacity") as caught:
        Run(Config(capacity=10**16))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [{"codec": "int8"}, {"codec": "fp8"}])
def test_rounded_storage_trains_another_agent_as_well(kind):
    plain, other = (train(build(Config(steps=20_480, eval_every=0, **fields)), progress=False) for fields in ({}, kind))
    assert other.ring.nbytes < plain.ring.nbytes
    assert not torch.equal(weights(plain), weights(other)) and other.history.final_return >= 195
    assert other.history.last["clipped"] == 0


def test_values_that_the_codec_clips_are_counted():
    def make_ring(rows, num_envs, bounds, device, action_size):
        return StoredRing(rows, num_envs, ((-0.01, -1.9), (0.01, 1.9)), "int8")

    clipped = numbers(train(Run(Config(**SHORT, codec="int8"), make_ring=make_ring), progress=False))["clipped"]
    assert (np.diff(clipped) > 0).all() and clipped[0] > 0


def test_without_replay_the_ring_stays_empty():
    assert train(Config(**SHORT, replay_updates=0), progress=False).ring.size == 0


@pytest.mark.parametrize(
    "fields",
    [
        *({"precision": name} for name in ("fp32", "bf16", "fp16", "fp8")),
        {"capacity": 1_000, "extra_features": 2},  # the ring wraps around
        {"collect_precision": "fp8", "fresh_updates": 0, "replay_updates": 2},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fields):
    config, states = Config(**SHORT, **fields), []
    run = Run(config)
    for _ in iterate(run):
        states.append(copy.deepcopy(run.state_dict()))
    for stop in (1, 3):
        again = Run(config)
        again.load_state_dict(states[stop - 1])
        assert len(again.history) == stop
        assert_same(train(again, progress=False), run)


def test_what_a_run_starts_from_stays_as_it_is():
    config, runs = Config(**SHORT), []
    state = after(1, Run(config)).state_dict()
    for _ in range(2):
        again = Run(config)
        again.load_state_dict(state)
        runs.append(train(again, progress=False))
    assert_same(*runs)


def test_a_run_continues_without_its_rows():
    config = Config(**SHORT)
    state = after(3, Run(config)).state_dict(ring=False)
    again = Run(config)
    again.load_state_dict(state)
    assert state["ring"] is None and again.ring.size == 0
    assert after(1, again).ring.size == 32 and len(again.history) == 4


@pytest.mark.parametrize("change", [{"extra_features": 1}, {"num_envs": 8}, {"capacity": 600}], ids=str)
def test_a_state_of_another_config_is_refused_in_one_line(change):
    config = Config(**SHORT)
    state = after(3, Run(config)).state_dict()
    with pytest.raises(ValueError, match="the state does not fit the config: resume with the run's own config") as caught:
        Run(dataclasses.replace(config, **change)).load_state_dict(state)
    assert "\n" not in str(caught.value)


def test_a_state_of_one_environment_does_not_become_several():
    """torch's copy_ would broadcast it, and without rows of a ring nothing else notices."""
    config = Config(**SHORT)
    one = dataclasses.replace(config, num_envs=1)
    with pytest.raises(ValueError, match="the state does not fit the config"):
        Run(config).load_state_dict(Run(one).state_dict(ring=False))


def test_the_optimizer_keeps_how_it_runs_here():
    config, runs = Config(**SHORT), []
    state = after(1, Run(config)).state_dict()
    changed = copy.deepcopy(state)
    changed["optimizer"]["param_groups"][0].update(fused=True, capturable=True)  # as a GPU's would be
    for start in (state, changed):
        again = Run(config)
        again.load_state_dict(start)
        runs.append(train(again, progress=False))
    assert_same(*runs)


def test_the_learning_rate_is_set_where_the_optimizer_keeps_it():
    run = Run(Config())
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=torch.tensor(1.0), capturable=True)
    kept = run.optimizer.param_groups[0]["lr"]
    assert run.set_learning_rate(0.5) == 0.5 and kept == 0.5 and run.optimizer.param_groups[0]["lr"] is kept


def test_the_bar_shows_how_far_it_is(capsys):
    train(Run(Config(steps=1_024, eval_episodes=2)), progress=True)
    said = capsys.readouterr().err
    assert "2/2" in said and "steps/s" in said and "eval_return" in said
    list(iterate(Run(Config(steps=1_024, eval_episodes=2))))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("seed", [0, 1])
def test_training_starts_tell_nothing_of_those_of_evaluations(seed):
    starts = []

    def make_env(*settings):
        env = make_cart(*settings)
        starts.append(env.state.flatten())
        return env

    run = Run(Config(seed=seed, num_envs=64, eval_episodes=64), make_env=make_env)
    run.evaluate()
    assert abs(np.corrcoef(*starts)[0, 1]) < 0.4  # of 128 independent numbers: a deviation of 0.09


def test_a_checkpoint_is_a_run_s_state(tmp_path):
    run = after(2, Run(Config(**SHORT)))
    checkpoint.save(tmp_path / "checkpoint.pt", run)
    _, state = checkpoint.resume(tmp_path / "checkpoint.pt")
    assert {"ring", "state", *Run.PARTS} == state.keys()
    again = Run(run.config)
    again.load_state_dict(state)
    assert_same(train(again, progress=False), train(run, progress=False))
