import pytest
import torch

from fp8rl.model import ActorCritic


@pytest.mark.parametrize("layers", [1, 4])
def test_shapes_follow_the_leading_dimensions_and_the_layers(layers):
    model = ActorCritic(obs_size=3, num_actions=4, hidden_size=8, layers=layers)
    assert [tuple(layer.weight.shape) for layer in model.hidden] == [(8, 8)] * (layers - 1)
    for shape in ((), (5,), (4, 5)):
        obs = torch.rand(*shape, 3)
        with torch.autocast("cpu", torch.bfloat16):
            outputs, values = model(obs)
            acted, none = model.policy(obs)
        assert outputs.shape == (*shape, 4) and values.shape == shape
        assert outputs.dtype == values.dtype == acted.dtype == torch.float32
        torch.testing.assert_close(acted, outputs)
        assert none is None and not model.recurrent
    # The first policy is almost uniform
    assert (ActorCritic()(torch.rand(100, 2) * 4 - 2)[0].softmax(-1) - 0.5).abs().max() < 0.02


def test_actor_and_critic_share_the_encoder():
    model = ActorCritic()
    for output in model(torch.rand(5, 2)):
        (gradient,) = torch.autograd.grad(
            output.square().sum(), model.inputs.weight, retain_graph=True
        )
        assert gradient.abs().sum() > 0
