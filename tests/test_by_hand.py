"""Acting and gradients by hand against the plain network and autograd."""

import pytest
import torch
from helpers import same, small

from fp8rl.build import build
from fp8rl.config import EIGHT_BIT, Config
from fp8rl.losses import statistics_of
from fp8rl.machine import by_hand
from fp8rl.machine.by_hand import ActorCriticByHand, can_be_written_out, gradients_by_hand
from fp8rl.machine.gpu.install import as_population
from fp8rl.model import ActorCritic
from fp8rl.train import gradients_by_autograd

SHORT = dict(num_envs=4, rollout_length=16, slice_length=16, batch_size=64, steps=1000)
SETTINGS = {
    "defaults": {},
    "one layer": dict(layers=1),
    "three layers": dict(layers=3, hidden_size=24),
    "standardized observations": dict(normalize_obs=True),
    "continuous": dict(env_id="fp8rl/Lqr-v0", entropy_coef=0.01),
    "three actions": dict(env_id="Acrobot-v1"),
    "no clip": dict(clip=None, normalize_advantage=False),
    "a clip that drops many rows": dict(clip=1e-4),
    "a clip by the learner": dict(collect_precision="bf16", clip=1e-4),
    "time limits end": dict(bootstrap_truncation=False, importance_correction=False),
    "bf16": dict(precision="bf16"),
    "fp16": dict(precision="fp16"),
    "fp8": dict(precision="fp8"),
    "a policy with memory": dict(encoder="gru"),
    "weights in few bits": dict(formats="weights=bf16"),
}
PLAIN = [name for name, changes in SETTINGS.items() if not {"precision", "encoder"} & {*changes}]


def gradients(learner, batch, compute) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The gradients of all parameters, and the statistics of the loss."""
    for p in learner.model.parameters():
        p.grad = None
    measured = compute(learner, batch)
    found = {name: p.grad.clone() for name, p in learner.model.named_parameters()}
    return found, statistics_of(measured)


def require_equal(learner, batch) -> None:
    expected, statistics = gradients(learner, batch, gradients_by_autograd)
    found, statistics_by_hand = gradients(learner, batch, gradients_by_hand)
    torch.testing.assert_close(statistics_by_hand, statistics, rtol=1e-5, atol=1e-6)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-5 * scale + 1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_they_are_those_of_autograd(name):
    run = build(Config(**SHORT | SETTINGS[name]))
    for iteration in range(3):
        run.advance(iteration)
    learner = run.learner
    assert can_be_written_out(learner) == (name in PLAIN)
    require_equal(learner, run.collect())
    batch = run.sample()
    # The policy has moved, so that the ratios and the clip matter.
    with torch.no_grad():
        for p in learner.model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    require_equal(learner, batch)
    if not batch.action.is_floating_point():
        return
    batch.action[~batch.valid] = torch.nan  # what a dummy row holds is ignored
    require_equal(learner, batch)


@pytest.mark.parametrize("rows", [1, 16, 30])
def test_many_rows_are_computed_in_blocks(monkeypatch, rows):
    run = build(Config(**SHORT))
    run.advance(0)
    monkeypatch.setattr(by_hand, "ROWS", rows)
    require_equal(run.learner, run.sample())


def summed_alone(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What `processes.all_reduce` gives if the other processes add 0: parts of one tensor."""
    joint = torch.cat([x.flatten() for x in tensors])
    parts = joint.split([x.numel() for x in tensors])
    return [part.view_as(x) for part, x in zip(parts, tensors, strict=True)]


@pytest.mark.parametrize("name", ["defaults", "continuous"])
def test_gradients_that_were_summed_over_processes_are_replaced(name):
    runs = [build(Config(**SHORT | SETTINGS[name])) for _ in range(2)]
    runs[0].learner.all_reduce = summed_alone
    for iteration in range(3):
        for run in runs:
            run.advance(iteration)
    for one, other in zip(*(run.model.parameters() for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    require_equal(runs[0].learner, runs[1].sample())


def test_layers_that_are_frozen_or_shared_and_methods_of_ones_own():
    run = build(Config(**SHORT, layers=3))
    run.advance(0)
    learner, batch, model = run.learner, run.sample(), run.model
    model.hidden[1].weight = model.hidden[0].weight
    assert not can_be_written_out(learner)
    require_equal(learner, batch)
    model.hidden[1].weight = torch.nn.Parameter(model.hidden[0].weight.detach().clone())

    encode = model.encode
    model.encode = lambda obs: 2 * encode(obs)
    assert not can_be_written_out(learner)
    require_equal(learner, batch)
    del model.encode
    assert can_be_written_out(learner)

    model.inputs.requires_grad_(False)
    for p in model.parameters():
        p.grad = None
    gradients_by_hand(learner, batch)
    assert model.inputs.weight.grad is None and model.critic.weight.grad.any()


def test_what_computes_otherwise_is_left_to_autograd(monkeypatch):
    """Hooks, and losses of one's own, are seen."""
    run = build(Config(**SHORT))
    run.advance(0)
    learner, batch, seen = run.learner, run.sample(), []
    model, weight = learner.model, learner.model.inputs.weight
    for register in (
        model.register_forward_pre_hook,
        model.actor.register_forward_hook,
        model.critic.register_full_backward_hook,
        weight.register_hook,
        weight.register_post_accumulate_grad_hook,
    ):
        hook = register(lambda *_, name=register.__name__: seen.append(name))
        assert not can_be_written_out(learner)
        learner.update(batch)
        hook.remove()
        assert can_be_written_out(learner)
    assert len(seen) == 5
    monkeypatch.setattr(by_hand, "loss_gradients", None)
    own_loss = learner.loss
    learner.loss = lambda batch: own_loss(batch)
    learner.update(batch)


def test_layers_with_hooks_without_a_bias_or_of_another_type_are_called():
    model, seen = ActorCriticByHand(hidden_size=16), []
    register = torch.nn.modules.module.register_module_forward_hook
    for hook in (
        lambda: model.actor.register_forward_hook(lambda *_: seen.append("actor")),
        lambda: model.hidden[0].register_forward_pre_hook(lambda *_: seen.append("hidden")),
        lambda: register(lambda layer, *_: seen.append("every")),
    ):
        hooked = hook()
        model.acting().policy(torch.rand(3, 2))
        hooked.remove()
        assert model.acting() is not model
    assert {"actor", "hidden", "every"} == set(seen)
    model.hidden[0] = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16))
    assert model.acting() is model
    model = ActorCriticByHand()
    model.actor = torch.nn.Linear(64, 2, bias=False)
    assert model.acting() is model and as_population(model, "fp32") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp32"},
        {"precision": "bf16", "layers": 3},
        {"precision": "fp8+bf16"},
        {"normalize_obs": True},
        {"formats": EIGHT_BIT["formats"]},
    ],
    ids=str,
)
def test_a_rollout_is_that_of_the_modules_bit_for_bit(monkeypatch, fields):
    runs = [build(small(**{"precision": "fp8", **fields})) for _ in range(2)]
    for _ in range(2):
        one = runs[0].collect()
        with monkeypatch.context() as patch:
            patch.setattr(type(runs[1].model), "acting", ActorCritic.acting)
            other = runs[1].collect()
        assert same(one, other)
        for run in runs:
            run.learner.update(one)  # and the next is with new weights
