"""Networks and what they give: shapes, the memory of a GRU, and the distributions of actions."""

from types import SimpleNamespace

import pytest
import torch
from helpers import log_probabilities
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.distribution import LOG_STD, Categorical, Gaussian
from fp8rl.env import Cart
from fp8rl.machine.gpu.cuda_graphs import Held
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.recurrent import RecurrentActorCritic
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rng import uniform
from fp8rl.rollout import DUMMY, Collector


@pytest.mark.parametrize("layers", [1, 4])
def test_shapes_follow_the_leading_dimensions_and_the_layers(layers):
    model = ActorCritic(obs_size=3, num_actions=4, hidden_size=8, layers=layers)
    assert [tuple(layer.weight.shape) for layer in model.hidden] == [(8, 8)] * (layers - 1)
    for shape in ((), (5,), (4, 5)):
        obs = torch.rand(*shape, 3)
        with torch.autocast("cpu", torch.bfloat16):
            outputs, values = model(obs)
            acted, _ = model.policy(obs)
        assert outputs.shape == (*shape, 4) and values.shape == shape
        assert outputs.dtype == values.dtype == torch.float32
        torch.testing.assert_close(acted, outputs)
    assert outputs.abs().max() < 0.1  # the first policy is almost uniform


def sequence(length=12, batch=5, obs_size=3, seed=0, layers=2):
    """A GRU agent, observations [T, B, F], starts of episodes [T, B] and a first state [B, W]."""
    torch.manual_seed(seed)
    first = torch.rand(length, batch) < 0.2
    return (
        RecurrentActorCritic(obs_size, layers=layers),
        torch.randn(length, batch, obs_size),
        first,
        torch.randn(batch, 64),
    )


@pytest.mark.parametrize("layers", [2, 3])
def test_a_sequence_equals_its_steps_one_by_one(layers):
    model, obs, first, state = sequence(layers=layers)
    logits, values = model(obs, state, first)
    zeros = torch.zeros_like(state)
    assert all(map(torch.equal, model(obs, None, first), model(obs, zeros, first)))
    for t in range(len(obs)):
        state = torch.where(first[t].unsqueeze(-1), 0, state)
        step_logits, state = model.policy(obs[t], state)
        _, step_values = model.heads(state)
        torch.testing.assert_close(step_logits, logits[t])
        torch.testing.assert_close(step_values, values[t])


def test_memory_is_torch_s_gru():
    model, obs, _, state = sequence()
    weights = {}
    for name, layer in {"ih": model.hidden[0], "hh": model.gates}.items():
        layer.bias.data.uniform_(-1, 1)
        weights |= {f"weight_{name}_l0": layer.weight, f"bias_{name}_l0": layer.bias}
    hidden, _ = torch.func.functional_call(
        torch.nn.GRU(64, 64), weights, (model.inputs(obs).relu(), state.unsqueeze(0))
    )
    expected = model.actor(hidden), model.critic(hidden).squeeze(-1)
    torch.testing.assert_close(model(obs, state), expected)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8"])
def test_a_memory_s_rollout_can_be_gone_through_again_as_it_was_acted(name):
    precision = Precision(name)
    torch.manual_seed(0)
    model = precision.prepare(RecurrentActorCritic(1))
    collector = Collector(Cart(16, 0.5, hide_velocity=True), model, precision, 32)
    for _ in range(4):  # across rollouts and episodes
        before, rollout = collector.state, collector.collect(model)
        assert torch.equal(rollout.state, before)
        if name != "fp8":  # whose scale is that of all rows at once
            found = log_probabilities(model, precision, rollout)
            torch.testing.assert_close(found, rollout.behavior_logp, rtol=1e-4, atol=1e-5)
    assert (rollout.flags & DUMMY).any() and rollout.behavior_logp.dtype == torch.float32


def test_a_rollout_keeps_the_state_before_it_when_the_next_state_is_written_in_place():
    torch.manual_seed(0)
    model = RecurrentActorCritic(1)
    collector = Collector(Cart(16, 0.5, hide_velocity=True), model, Precision("fp32"), 32)
    held = Held(SimpleNamespace(collector=collector, ring=ReplayBuffer(64, 16), iterations_run=0))
    collector.collect(model)
    held.put_back()
    before = collector.state.clone()
    rollout = collector.collect(model)
    held.put_back()
    assert torch.equal(rollout.state, before) and not torch.equal(collector.state, before)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_float32_under_autocast_and_the_deviation_keeps_within_its_bounds(dtype):
    """It begins at exp(-0.5), and its logarithm moves four times as far as its parameter."""
    model = ActorCritic(3, 2, distribution=Gaussian)
    for spread, log_std in ((-0.125, [-0.5] * 2), (-0.0625, [-0.25] * 2), (-50.0, LOG_STD[:1] * 2)):
        assert spread != -0.125 or (model.spread == spread).all()
        model.spread.data.fill_(spread)
        with torch.autocast("cpu", dtype):
            outputs, values = model(torch.randn(4, 5, 3))
        assert outputs.dtype == values.dtype == torch.float32 and outputs.shape == (4, 5, 4)
        assert outputs[0, 0, 2:].tolist() == list(log_std)
