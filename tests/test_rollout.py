import math

import pytest
import torch
from helpers import log_probabilities, refused

from fp8rl.env import Cart, dynamics
from fp8rl.evaluate import play
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
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
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(stop, env)
    for x in (*rollout[:5], *env.state_dict().values()):
        assert not x.is_inference()
    model(env.obs)[1].sum().backward()
    env.elapsed.add_(1)


class Brief(Cart):
    max_steps = 12


def test_a_rollout_is_what_happened():
    collector = Collector(Brief(16, 0.5), ActorCritic(), FP32, 50)
    rollout = collector.collect(collector.model)
    assert torch.equal(rollout.obs[-1], collector.env.obs)
    dummy = (rollout.flags & DUMMY) != 0
    ended = (rollout.flags & (TERMINATED | TRUNCATED)) != 0
    assert {0, TERMINATED, TRUNCATED, DUMMY} == set(rollout.flags.unique().tolist())
    assert torch.equal(dummy[1:], ended[:-1]) and not dummy[0].any()
    assert torch.equal(rollout.valid, ~dummy) and torch.equal(rollout.first[1:], dummy)
    assert not rollout.first[0].any() and (rollout.reward[dummy] == 0).all()
    following = dynamics(rollout.obs[:-1], rollout.action)
    torch.testing.assert_close(following[~dummy], rollout.obs[1:][~dummy])
    assert (rollout.obs[1:][dummy].abs() <= 0.5).all()  # what follows a dummy row is a start
    logp = log_probabilities(collector.model, FP32, rollout)
    torch.testing.assert_close(rollout.behavior_logp, logp)
    # The next one goes on where this one ended
    collector = collector_of(50, 5)
    one, other = (collector.collect(collector.model) for _ in range(2))
    assert torch.equal(one.obs[-1], other.obs[0])
    ended = (one.flags[-1] & (TERMINATED | TRUNCATED)) != 0
    assert ended.any() and torch.equal((other.flags[0] & DUMMY) != 0, ended)


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
