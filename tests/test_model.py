import pytest
import torch

from fp8rl.model import ActorCritic


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_shapes_follow_the_leading_dimensions_and_the_layers(layers):
    model = ActorCritic(hidden_size=8, layers=layers)
    assert [tuple(layer.weight.shape) for layer in model.hidden] == [(8, 8)] * (layers - 1)
    for shape in ((), (5,), (4, 5)):
        logits, values = model(torch.rand(*shape, 2))
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
        (gradient,) = torch.autograd.grad(
            output.square().sum(), model.inputs.weight, retain_graph=True
        )
        assert gradient.abs().sum() > 0


def test_to_act_takes_the_same_logits_without_the_values():
    model, obs = ActorCritic(), torch.rand(5, 2)
    (logits, none), (again, _) = model.policy(obs), model(obs)
    assert none is None and not model.recurrent
    torch.testing.assert_close(logits, again)
