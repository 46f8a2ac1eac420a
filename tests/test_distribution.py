import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.distribution import LOG_STD, Categorical, Gaussian, distribution_of
from fp8rl.model import ActorCritic
from fp8rl.rng import uniform

seeds = st.integers(0, 2**31)


@given(seeds, st.integers(1, 4))
def test_the_gaussian_is_torch_s(seed, size):
    generator = torch.Generator().manual_seed(seed)
    mean, log_std = (
        torch.randn(5, 3, size, generator=generator),
        torch.empty(5, 3, size).uniform_(*LOG_STD, generator=generator),
    )
    outputs = torch.cat((mean, log_std), dim=-1).requires_grad_()
    action = Gaussian.sample(
        outputs, Gaussian.noise(uniform(seed, "actions", 0, (5, 3, size)))
    ).detach()
    ours, theirs = Gaussian(outputs), torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(
        ours.log_prob(action), theirs.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(Gaussian.sample(outputs), mean)


@given(seeds)
def test_the_categorical_is_torch_s(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(4, 7, 3, generator=generator)
    action = Categorical.sample(
        logits, Categorical.noise(uniform(seed, "actions", 0, logits.shape))
    )
    theirs = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(
        Categorical(logits).log_prob(action), theirs.log_prob(action), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        Categorical(logits).entropy(), theirs.entropy(), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(Categorical.sample(logits), logits.argmax(-1))


def test_samples_have_the_mean_and_the_deviation():
    outputs = torch.tensor([0.3, math.log(0.5)]).expand(100_000, 2)
    x = Gaussian.sample(outputs, Gaussian.noise(uniform(0, "actions", 0, (100_000, 1))))
    assert abs(x.mean() - 0.3) < 5 * 0.5 / math.sqrt(100_000) and abs(x.std() - 0.5) < 0.01


def test_the_action_tells_the_distribution():
    assert (
        distribution_of(torch.zeros(2, 3)) is Gaussian
        and distribution_of(torch.zeros(2).long()) is Categorical
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_float32_under_autocast_and_the_deviation_keeps_within_its_bounds(dtype):
    model = ActorCritic(3, 2, distribution=Gaussian)
    model.spread.data = torch.tensor([-50.0, 50.0])
    with torch.autocast("cpu", dtype):
        outputs, values = model(torch.randn(4, 5, 3))
        acted, _ = model.policy(torch.randn(5, 3))
    assert outputs.dtype == values.dtype == acted.dtype == torch.float32
    assert outputs.shape == (4, 5, 4) and acted.shape == (5, 4)
    assert torch.equal(outputs[0, 0, 2:], torch.tensor(LOG_STD))


def test_the_logarithm_of_a_deviation_begins_at_a_half_below_0_and_moves_four_times_as_far_as_its_parameter():
    model, obs = ActorCritic(3, 2, distribution=Gaussian), torch.zeros(3)
    assert torch.equal(model(obs)[0][2:], torch.full((2,), -0.5))
    model.spread.data += 0.0625
    assert torch.equal(model(obs)[0][2:], torch.full((2,), -0.25))
