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
    mean = torch.randn(5, 3, size, generator=generator)
    log_std = torch.empty(5, 3, size).uniform_(*LOG_STD, generator=generator)
    outputs = torch.cat((mean, log_std), dim=-1)
    noise = Gaussian.noise(uniform(seed, "actions", 0, (5, 3, size)))
    action = Gaussian.sample(outputs, noise)
    ours, theirs = Gaussian(outputs), torch.distributions.Normal(mean, log_std.exp())
    found, expected = ours.log_prob(action), theirs.log_prob(action).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(Gaussian.sample(outputs), mean)
    assert distribution_of(action) is Gaussian


@given(seeds, st.integers(2, 6))
def test_the_categorical_is_torch_s(seed, actions):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(4, 7, actions, generator=generator)
    shape = 4, 7, Categorical.numbers(actions)
    action = Categorical.sample(logits, Categorical.noise(uniform(seed, "actions", 0, shape)))
    ours, theirs = Categorical(logits), torch.distributions.Categorical(logits=logits)
    found, expected = ours.log_prob(action), theirs.log_prob(action)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy(), theirs.entropy(), rtol=1e-4, atol=1e-5)
    assert torch.equal(Categorical.sample(logits), logits.argmax(-1))
    assert distribution_of(action) is Categorical


@pytest.mark.parametrize("distribution, size", [(Categorical, 2), (Categorical, 3), (Gaussian, 4)])
def test_numbers_that_are_sampled_are_the_actions(distribution, size):
    torch.manual_seed(0)
    outputs = torch.randn(100, size)
    outputs[::7] = torch.nan
    actions = size if distribution is Categorical else size // 2
    noise = distribution.noise(uniform(0, "actions", 0, (100, distribution.numbers(actions))))
    expected = distribution.sample(outputs, noise)
    numbers = distribution.sample_numbers(outputs, noise)
    assert numbers.dtype == (torch.int64 if size == 3 else torch.float32)
    found = distribution.actions(numbers)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_samples_have_the_mean_and_the_deviation():
    outputs = torch.tensor([0.3, math.log(0.5)]).expand(100_000, 2)
    x = Gaussian.sample(outputs, Gaussian.noise(uniform(0, "actions", 0, (100_000, 1))))
    assert abs(x.mean() - 0.3) < 5 * 0.5 / math.sqrt(100_000) and abs(x.std() - 0.5) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_float32_under_autocast_and_the_deviation_keeps_within_its_bounds(dtype):
    """It begins at exp(-0.5), and its logarithm moves four times as far as its parameter."""
    model = ActorCritic(3, 2, distribution=Gaussian)
    assert torch.equal(model(torch.zeros(3))[0][2:], torch.full((2,), -0.5))
    model.spread.data += 0.0625
    assert torch.equal(model(torch.zeros(3))[0][2:], torch.full((2,), -0.25))
    model.spread.data = torch.tensor([-50.0, 50.0])
    with torch.autocast("cpu", dtype):
        outputs, values = model(torch.randn(4, 5, 3))
        acted, _ = model.policy(torch.randn(5, 3))
    assert outputs.dtype == values.dtype == acted.dtype == torch.float32
    assert outputs.shape == (4, 5, 4) and acted.shape == (5, 4)
    assert torch.equal(outputs[0, 0, 2:], torch.tensor(LOG_STD))
