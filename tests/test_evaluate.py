import math

import numpy as np
import pytest
import torch

from fp8rl.env import Cart
from fp8rl.evaluate import evaluate, play, policy_of
from fp8rl.machine.by_hand import NETWORKS_BY_HAND
from fp8rl.model import ActorCritic
from fp8rl.normalization import NETWORKS
from fp8rl.precision import Precision
from fp8rl.recurrent import RecurrentActorCritic


def right(obs):
    return torch.ones(len(obs), dtype=torch.long)


def test_an_episode_counts_nothing_after_its_end():
    class Spoiled(Cart):
        later = torch.zeros(50, dtype=torch.bool)

        def step(self, action, start=None):
            self.later = self.later | self.done
            obs, reward, *flags = super().step(action, start)
            return obs, reward.masked_fill(self.later, math.nan), *flags

    returns = play(right, Cart(50))
    assert returns.shape == (50,) and (returns > 4).all() and (returns < 8).all()
    assert np.array_equal(play(right, Spoiled(50)), returns)
    Spoiled.later = torch.arange(50) == 7  # within the episode
    assert np.flatnonzero(np.isnan(play(right, Spoiled(50)))).tolist() == [7]


def test_greedy_takes_the_likeliest_action_and_sampling_does_not_always():
    model = ActorCritic()
    with torch.no_grad():
        model.actor.bias.copy_(torch.tensor([0.0, 1.0]))  # prefers right everywhere
    greedy = evaluate(model, Cart(50))
    assert np.array_equal(greedy, play(right, Cart(50)))
    sampled, again, other = (evaluate(model, Cart(50), greedy=False, seed=s) for s in (0, 0, 1))
    assert np.array_equal(sampled, again)
    assert not np.array_equal(sampled, greedy) and not np.array_equal(sampled, other)
    policy, obs = policy_of(model, Cart(50), greedy=False), torch.zeros(50, 2)
    assert not torch.equal(policy(obs), policy(obs))  # each step draws numbers of its own


def test_a_memory_is_kept_from_step_to_step():
    states = []

    class Watched(RecurrentActorCritic):
        def policy(self, obs, state=None):
            states.append(state)
            return super().policy(obs, state)

    evaluate(Watched(1), Cart(5, hide_velocity=True))
    assert states[0] is None and not torch.equal(states[1], states[2])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_an_evaluation_plays_the_policy_bit_for_bit(kind, greedy, name):
    torch.manual_seed(1)
    precision = Precision(name)
    model = precision.prepare((NETWORKS | NETWORKS_BY_HAND)[kind]())
    env, other = Cart(20, seed=2), Cart(20, seed=2)
    with torch.no_grad():
        model.actor.weight.mul_(100)  # a policy that prefers one action
        model.add_observations(torch.randn(50, 2), lambda tensors: tensors)
        model.update_statistics()
    with precision.autocast():
        expected = play(policy_of(model, other, greedy, seed=5), other)
    assert np.array_equal(evaluate(model, env, precision, greedy, seed=5), expected)
    assert len(set(expected)) > 1 and not env.obs.is_inference()
