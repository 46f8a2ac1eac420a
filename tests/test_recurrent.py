from types import SimpleNamespace

import pytest
import torch
from helpers import log_probabilities, small, trained

from fp8rl.build import build
from fp8rl.env import Cart
from fp8rl.machine.gpu.cuda_graphs import Held
from fp8rl.precision import Precision
from fp8rl.recurrent import RecurrentActorCritic
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rollout import DUMMY, Collector


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
    twin = torch.nn.GRU(64, 64)
    with torch.no_grad():
        twin.weight_ih_l0.copy_(model.hidden[0].weight)
        twin.bias_ih_l0.copy_(model.hidden[0].bias.uniform_(-1, 1))
        twin.weight_hh_l0.copy_(model.gates.weight)
        twin.bias_hh_l0.copy_(model.gates.bias.uniform_(-1, 1))
    hidden, _ = twin(model.inputs(obs).relu(), state.unsqueeze(0))
    expected = model.actor(hidden), model.critic(hidden).squeeze(-1)
    torch.testing.assert_close(model(obs, state), expected)


def test_episodes_in_a_sequence_do_not_see_each_other():
    model, obs, _, state = sequence()
    first = torch.zeros(12, 5, dtype=torch.bool)
    first[7] = True
    whole, _ = model(obs, state, first)
    torch.testing.assert_close(whole[:7], model(obs[:7], state)[0])
    torch.testing.assert_close(whole[7:], model(obs[7:])[0])
    obs.requires_grad_()
    (gradient,) = torch.autograd.grad(model(obs, state, first)[0][7:].square().sum(), obs)
    assert (gradient[:7] == 0).all() and (gradient[7:] != 0).any(-1).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_memory_runs_in_every_precision(precision):
    precision = Precision(precision)
    torch.manual_seed(0)
    model = RecurrentActorCritic()
    obs = torch.randn(8, 16, 2)
    exact, _ = model(obs)
    model = precision.prepare(model)
    with precision.autocast():
        logits, values = model(obs)
        _, state = model.policy(obs[0])
    assert logits.dtype == values.dtype == state.dtype == torch.float32
    assert 0 < (logits - exact).abs().max() < 0.15 * exact.abs().max()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_memory_s_rollout_can_be_gone_through_again_as_it_was_acted(name):
    precision = Precision(name)
    torch.manual_seed(0)
    model = precision.prepare(RecurrentActorCritic(1))
    collector = Collector(Cart(16, 0.5, hide_velocity=True), model, precision, 32)
    for _ in range(4):  # across rollouts and episodes
        before, rollout = collector.state, collector.collect(model)
        assert torch.equal(rollout.state, torch.zeros(16, 64) if before is None else before)
        torch.testing.assert_close(
            log_probabilities(model, precision, rollout), rollout.behavior_logp
        )
    assert (rollout.flags & DUMMY).any()


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


def test_a_memory_needs_no_velocity():
    config = small(encoder="gru", hide_velocity=True, steps=40_960, eval_every=0)
    assert trained(build(config)).history.final_return >= 190
