import pytest
import torch

from fp8rl.model import ActorCritic, ManyRows, relu_, relu_backward_
from fp8rl.precision import Precision


@pytest.mark.parametrize("shape", [(), (5,), (4, 5)])
def test_shapes_follow_the_leading_dimensions(shape):
    logits, values = ActorCritic()(torch.rand(*shape, 2))
    assert logits.shape == (*shape, 2) and values.shape == shape


def test_outputs_and_parameters_are_float32_under_autocast():
    model = ActorCritic(obs_size=3, num_actions=4)
    with torch.autocast("cpu", torch.bfloat16):
        logits, values = model(torch.rand(5, 3))
    assert logits.shape == (5, 4) and logits.dtype == values.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_first_policy_is_almost_uniform():
    logits, _ = ActorCritic()(torch.rand(100, 2) * 4 - 2)
    assert (logits.softmax(-1) - 0.5).abs().max() < 0.02


def test_actor_and_critic_share_the_encoder():
    model = ActorCritic()
    for output in model(torch.rand(5, 2)):
        (gradient,) = torch.autograd.grad(output.square().sum(), model.encoder[0].weight, retain_graph=True)
        assert gradient.abs().sum() > 0


def sequence(length=12, batch=5, obs_size=3, seed=0):
    """A GRU agent, observations [T, B, F], starts of episodes [T, B] and a first state [B, W]."""
    torch.manual_seed(seed)
    first = torch.rand(length, batch) < 0.2
    return ActorCritic(obs_size, encoder="gru"), torch.randn(length, batch, obs_size), first, torch.randn(batch, 64)


def test_a_sequence_equals_its_steps_one_by_one():
    model, obs, first, state = sequence()
    logits, values = model(obs, state, first)
    for t in range(len(obs)):
        state = torch.where(first[t].unsqueeze(-1), 0, state)
        step_logits, step_values, state = model.step(obs[t], state)
        torch.testing.assert_close(step_logits, logits[t])
        torch.testing.assert_close(step_values, values[t])


def test_memory_is_torch_s_gru():
    model, obs, _, state = sequence()
    twin = torch.nn.GRU(64, 64)
    with torch.no_grad():
        twin.weight_ih_l0.copy_(model.encoder[2].weight)
        twin.bias_ih_l0.copy_(model.encoder[2].bias.uniform_(-1, 1))
        twin.weight_hh_l0.copy_(model.memory.weight)
        twin.bias_hh_l0.copy_(model.memory.bias.uniform_(-1, 1))
    hidden, _ = twin(model.encoder[:2](obs), state.unsqueeze(0))
    for ours, theirs in zip(model(obs, state), (model.actor(hidden), model.critic(hidden).squeeze(-1)), strict=True):
        torch.testing.assert_close(ours, theirs)


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
    model = ActorCritic(encoder="gru")
    obs = torch.randn(8, 16, 2)
    exact, _ = model(obs)
    model = precision.prepare(model)
    with precision.autocast():
        logits, values = model(obs)
        _, _, state = model.step(obs[0])
    assert logits.dtype == values.dtype == state.dtype == torch.float32
    assert 0 < (logits - exact).abs().max() < 0.15 * exact.abs().max()


def test_unknown_encoder_is_refused():
    with pytest.raises(ValueError, match="encoder is 'lstm': choose from mlp, gru"):
        ActorCritic(encoder="lstm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_heads_at_once_give_what_each_gives(dtype):
    model, obs = ActorCritic(num_actions=3), torch.randn(2, 1024, 2)
    with torch.no_grad():
        model.actor.bias.uniform_()
        model.critic.bias.uniform_()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits, values = model(obs)
        hidden = model.encoder(obs)
        expected = model.actor(hidden).float(), model.critic(hidden).squeeze(-1).float()
        few = model(obs[:, :10])
    assert logits.shape == (2, 1024, 3) and values.shape == (2, 1024) and logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close((logits, values), expected, **tolerance)
    torch.testing.assert_close((logits[:, :10], values[:, :10]), few, **tolerance)
    weights = list(model.parameters())
    mine, theirs = (torch.autograd.grad(x.square().sum() + y.square().sum(), weights) for x, y in ((logits, values), expected))
    torch.testing.assert_close(mine, theirs, **{name: 10 * value for name, value in tolerance.items()})


def test_many_rows_in_bfloat16_give_what_the_layers_give(monkeypatch):
    calls = []
    apply = ManyRows.apply
    monkeypatch.setattr(ManyRows, "apply", lambda *inputs: calls.append(len(inputs[0])) or apply(*inputs))
    for shape, actions in (((1024, 2), 2), ((3, 512, 4), 3)):
        torch.manual_seed(actions)
        model, obs = ActorCritic(shape[-1], actions), torch.randn(shape)
        for layer in (model.encoder[0], model.encoder[2], model.actor, model.critic):
            torch.nn.init.uniform_(layer.bias, -1, 1)
        with torch.autocast("cpu", torch.bfloat16):
            outputs, (*stepped, state) = model(obs), model.step(obs)
            hidden = model.encoder(obs)
            plain = model.actor(hidden).float(), model.critic(hidden).squeeze(-1).float()
            model(obs.flatten(0, -2)[:100])
        assert state is None and torch.equal(outputs[0], stepped[0]) and torch.equal(outputs[1], stepped[1])
        grads = [torch.randn_like(x) for x in plain]
        mine, theirs = (torch.autograd.grad(x, list(model.parameters()), grads) for x in (outputs, plain))
        exact = torch.autograd.grad(model.float()(obs), list(model.parameters()), grads)  # in float32
        for x, y in zip(outputs, plain, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        for x, y, z in zip(mine, theirs, exact, strict=True):
            assert x.shape == y.shape and x.dtype == torch.float32
            assert (x - z).norm() < 1.2 * (y - z).norm() + 1e-3 * z.norm()  # no further from the truth than layer by layer
            assert (x - z).norm() < 0.1 * z.norm()
    assert calls == [1024, 1024, 1536, 1536]


@pytest.mark.parametrize("name", ["fp32", "fp8", "fp8+bf16"])
def test_other_precisions_go_layer_by_layer(name, monkeypatch):
    monkeypatch.setattr(ManyRows, "apply", None)  # calling it would raise
    precision = Precision(name)
    model = precision.prepare(ActorCritic())
    with precision.autocast():
        assert model(torch.randn(1024, 2))[0].isfinite().all()


def test_a_second_backward_pass_over_many_rows_is_refused():
    model = ActorCritic()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(torch.randn(1024, 2))
    logits.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_relu_by_bits_is_relu_for_every_bfloat16():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    numbers = every[~every.isnan()]
    output = relu_(numbers.clone())
    assert torch.equal(output, numbers.relu()) and len(output) > 65_000
    assert relu_(every[every.isnan()]).isnan().sum() == 127  # those with a clear sign bit
    grad = torch.randn(len(numbers), dtype=torch.bfloat16)
    expected = torch.where(numbers > 0, grad, 0)
    assert torch.equal(relu_backward_(grad, output), expected)
