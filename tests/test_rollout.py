import copy
import math

import pytest
import torch
from helpers import log_probabilities, refused
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.distribution import Categorical
from fp8rl.env import Cart, dynamics
from fp8rl.evaluate import play
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.rng import uniform
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Collector, Rollout, check_extremes, extremes

FP32 = Precision("fp32")


def collector_of(num_envs: int, length: int, precision: Precision = FP32, model=None) -> Collector:
    return Collector(Cart(num_envs, 0.5), model or ActorCritic(), precision, length)


def test_what_was_collected_and_the_environment_can_be_learned_from_and_written_to():
    """Although collection and evaluation run in torch's inference mode, whose tensors cannot be."""
    collector = collector_of(4, 3)
    env, model = collector.env, collector.model
    rollout = collector.collect(model)

    def stop(obs):
        if env.elapsed[0] == 5:
            raise KeyboardInterrupt
        return torch.zeros(len(obs)).long()

    with pytest.raises(KeyboardInterrupt):
        play(stop, env)
    for x in (*rollout[:5], *env.state_dict().values()):
        assert not x.is_inference()
    model(env.obs)[1].sum().backward()
    env.elapsed.add_(1)


def test_a_rollout_is_what_happened():
    collector = collector_of(4, 50)
    rollout = collector.collect(collector.model)
    assert torch.equal(rollout.obs[-1], collector.env.obs)
    dummy = (rollout.flags & DUMMY) != 0
    ended = (rollout.flags & (TERMINATED | TRUNCATED)) != 0
    assert ended.any() and torch.equal(dummy[1:], ended[:-1]) and not dummy[0].any()
    assert (
        torch.equal(rollout.valid, ~dummy)
        and torch.equal(rollout.first[1:], dummy)
        and not rollout.first[0].any()
    )
    assert (rollout.reward[dummy] == 0).all()
    torch.testing.assert_close(
        dynamics(rollout.obs[:-1], rollout.action)[~dummy], rollout.obs[1:][~dummy]
    )
    assert (rollout.obs[1:][dummy].abs() <= 0.5).all()  # what follows a dummy row is a start
    torch.testing.assert_close(
        rollout.behavior_logp, log_probabilities(collector.model, FP32, rollout)
    )


def test_a_rollout_goes_on_where_the_last_one_ended():
    collector = collector_of(50, 5)
    one, other = (collector.collect(collector.model) for _ in range(2))
    assert torch.equal(one.obs[-1], other.obs[0])
    ended = (one.flags[-1] & (TERMINATED | TRUNCATED)) != 0
    assert ended.any() and torch.equal((other.flags[0] & DUMMY) != 0, ended)


def test_actions_follow_the_policy():
    model = ActorCritic()
    with torch.no_grad():
        model.actor.weight.zero_()
        model.actor.bias.copy_(torch.tensor([0.0, 1.0]))
    rollout = collector_of(100, 100, model=model).collect(model)
    share, expected = rollout.action.float().mean().item(), torch.tensor(1.0).sigmoid().item()
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 10_000)


@pytest.mark.parametrize("logits", [[0.0, 1.0], [0.0, 1.0, -2.0]])
def test_noise_draws_from_the_softmax(logits):
    logits, draws = torch.tensor(logits), 100_000
    noise = Categorical.noise(uniform(0, "actions", 0, (draws, Categorical.numbers(len(logits)))))
    share = (
        Categorical.sample(logits.expand(draws, -1), noise).bincount(minlength=len(logits)) / draws
    )
    probability = logits.softmax(-1)
    assert (
        (share - probability).abs() < 4 * (probability * (1 - probability) / draws).sqrt()
    ).all()


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 70), st.integers(2, 6))
def test_log_probabilities_in_another_layout_are_the_plain_ones(seed, steps, rows, actions):
    generator = torch.Generator().manual_seed(seed)
    logits = 10 * torch.randn(steps, rows, actions, generator=generator)
    action = torch.randint(actions, (steps, rows), generator=generator)
    policy = Categorical(logits)
    torch.testing.assert_close(policy.log_policy, logits.log_softmax(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(
        policy.log_prob(action), policy.log_policy.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    )


@pytest.mark.parametrize("learner, actor", [("fp32", "fp8"), ("fp8", "fp32"), ("bf16", "fp16")])
def test_log_probabilities_are_those_of_the_policy_that_acted_in_its_precision(learner, actor):
    torch.manual_seed(0)
    base, acts = ActorCritic(), Precision(actor)
    acting = collector_of(16, 32, acts, acts.prepare(copy.deepcopy(base)))
    rollout = acting.collect(acting.model)
    for name in (learner, actor):
        precision = Precision(name)
        logp = log_probabilities(precision.prepare(copy.deepcopy(base)), precision, rollout)
        assert torch.allclose(logp, rollout.behavior_logp, atol=1e-7, rtol=1e-6) == (name == actor)


def check_finite(rollout: Rollout) -> None:
    check_extremes(extremes(rollout)[0].tolist())


def test_what_is_not_finite_or_too_large_is_named():
    for name, good, bad in (("obs", 1e8, 2e8), ("reward", 1e15, 2e15)):
        for sign in (1, -1):
            rollout = (acting := collector_of(4, 10)).collect(acting.model)
            getattr(rollout, name)[7, 3] = sign * good * 0.99
            check_finite(rollout)
            for number, message in (
                (bad, "reaches 2e.*, over 1e.*: register it wrapped in"),
                (math.inf, "is not finite: fix"),
            ):
                getattr(rollout, name)[7, 3] = sign * number
                refused(f"{name} from the environment {message}", check_finite, rollout)
        getattr(rollout, name)[7, 3] = math.nan
        refused(f"{name} from the environment is not finite: fix", check_finite, rollout)
