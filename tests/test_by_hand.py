"""Acting and gradients by hand against the plain network and autograd."""

import copy

import pytest
import torch
from helpers import same, small

from fp8rl import fp8
from fp8rl.build import build, build_population
from fp8rl.config import EIGHT_BIT, Config
from fp8rl.distribution import Categorical, Gaussian
from fp8rl.losses import actor_critic_loss, loss_gradients, statistics_of
from fp8rl.machine import by_hand
from fp8rl.machine.by_hand import ActorCriticByHand, can_be_written_out, gradients_by_hand
from fp8rl.machine.gpu.install import as_population
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision, joint_gradient
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
PLAIN = [
    name
    for name, changes in SETTINGS.items()
    if not {"precision", "encoder", "formats"} & {*changes}
]


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


def test_many_rows_are_computed_in_blocks(monkeypatch):
    run = build(Config(**SHORT))
    run.advance(0)
    batch = run.sample()
    expected, _ = gradients(run.learner, batch, gradients_by_hand)
    for rows in (1, 7, 16, 30, 67):
        monkeypatch.setattr(by_hand, "ROWS", rows)
        found, _ = gradients(run.learner, batch, gradients_by_hand)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_they_are_those_of_autograd_for_agents_of_all_precisions():
    precisions = ["fp32", "bf16", "fp16", "fp8"]
    configs = [Config(**SHORT | dict(precision=p, seed=i)) for i, p in enumerate(precisions)]
    run = build_population(configs)
    for iteration in range(2):
        run.advance(iteration)
    assert not can_be_written_out(run.learner)
    require_equal(run.learner, run.sample())


def test_agents_whose_losses_differ():
    changes = (dict(clip=None, gamma=0.9), dict(entropy_coef=0.5), dict(value_coef=2.0, lam=0.5))
    run = build_population([Config(**SHORT | changed) for changed in changes])
    run.advance(0)
    require_equal(run.learner, run.sample())


@pytest.mark.parametrize("kind", [Categorical, Gaussian])
def test_the_gradient_of_a_distribution_is_that_of_autograd(kind):
    outputs = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    action = torch.randint(4, (5, 3)) if kind is Categorical else torch.randn(5, 3, 2).double()
    of_logp, of_entropy = torch.randn(2, 5, 3, dtype=torch.float64)
    policy = kind(outputs)
    total = (policy.log_prob(action) * of_logp + policy.entropy() * of_entropy).sum()
    (expected,) = torch.autograd.grad(total, outputs)
    with torch.no_grad():
        found = kind(outputs).gradient(action, of_logp, of_entropy)
    torch.testing.assert_close(found, expected)


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
    runs[0].learner.update(runs[1].sample())
    runs[0].model.inputs.bias.requires_grad_(False)
    runs[0].learner.update(runs[1].sample())


def test_layers_that_are_frozen_or_shared_and_methods_of_ones_own():
    run = build(Config(**SHORT, layers=3))
    run.advance(0)
    learner, batch, model = run.learner, run.sample(), run.model

    model.hidden[1].weight = model.hidden[0].weight
    assert not can_be_written_out(learner)
    require_equal(learner, batch)
    model.hidden[1].weight = torch.nn.Parameter(model.hidden[0].weight.detach().clone())
    assert can_be_written_out(learner)

    encode = model.encode
    model.encode = lambda obs: 2 * encode(obs)
    assert not can_be_written_out(learner)
    require_equal(learner, batch)
    del model.encode

    for layer in (model.inputs, *model.hidden, model.actor):
        layer.requires_grad_(False)
    for p in model.parameters():
        p.grad = None
    gradients_by_autograd(learner, batch)
    expected = model.critic.weight.grad.clone()
    gradients_by_hand(learner, batch)
    torch.testing.assert_close(model.critic.weight.grad, expected)
    assert model.inputs.weight.grad is None


def test_what_computes_otherwise_is_left_to_autograd(monkeypatch):
    """Hooks, frozen parameters, and losses of one's own are seen."""
    run = build(Config(**SHORT))
    run.advance(0)
    learner, batch = run.learner, run.sample()
    assert can_be_written_out(learner)

    seen = []
    weight = learner.model.inputs.weight
    for hook in (
        lambda: learner.model.register_forward_pre_hook(lambda *_: seen.append("model")),
        lambda: learner.model.actor.register_forward_hook(lambda *_: seen.append("forward")),
        lambda: learner.model.critic.register_full_backward_hook(
            lambda *_: seen.append("backward")
        ),
        lambda: weight.register_hook(lambda gradient: seen.append("gradient")),
        lambda: weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated")),
    ):
        hooked = hook()
        assert not can_be_written_out(learner)
        learner.update(batch)
        hooked.remove()
        assert can_be_written_out(learner)
    assert seen == ["model", "forward", "backward", "gradient", "accumulated"]

    weight.requires_grad_(False)
    assert not can_be_written_out(learner)
    weight.requires_grad_(True)
    monkeypatch.setattr(by_hand, "loss_gradients", None)
    own_loss = learner.loss
    learner.loss = lambda batch: own_loss(batch)
    learner.update(batch)


def test_gradients_that_are_parts_of_one_tensor_are_clipped_together():
    run = build(Config(**SHORT, max_grad_norm=1e-3))
    run.advance(0)
    parameters = list(run.model.parameters())
    batch = run.sample()
    twin = copy.deepcopy(run.learner)
    twin.gradients = gradients_by_autograd
    one, other = run.learner.update(batch).step, twin.update(batch).step
    assert joint_gradient(parameters) is not None
    assert joint_gradient([*twin.model.parameters()]) is None
    torch.testing.assert_close(one.grad_norm, other.grad_norm)
    joined = torch.cat([p.grad.flatten() for p in parameters])
    torch.testing.assert_close(joined.norm(), torch.tensor(1e-3))
    assert joint_gradient(parameters[1:]) is None


def test_the_loss_has_the_gradients_that_are_written_out():
    run = build(Config(**SHORT | dict(clip=1e-3)))
    run.advance(0)
    batch = run.learner.prepared(run.sample())
    with torch.no_grad():
        outputs, values = run.model(batch.obs)
    of_outputs, of_values, _ = loss_gradients(outputs, values, batch, run.learner.coefficients)
    assert of_outputs.shape == (16, 4, 2) and of_values.shape == (16, 4)
    outputs.requires_grad_()
    values.requires_grad_()
    loss, _ = actor_critic_loss(outputs, values, batch, run.learner.coefficients)
    expected = torch.autograd.grad(loss, (outputs, values))
    torch.testing.assert_close(of_outputs, expected[0][:-1])
    torch.testing.assert_close(of_values, expected[1][:-1])
    assert not expected[0][-1].any() and not expected[1][-1].any()


@pytest.mark.parametrize("layers", [1, 3])
def test_it_acts_as_the_plain_network_bit_for_bit(layers):
    plain, by_hand = (
        network(layers=layers, generator=torch.Generator().manual_seed(0))
        for network in (ActorCritic, ActorCriticByHand)
    )
    obs = torch.rand(16, 2)
    for precision in (Precision("fp32"), Precision("bf16")):
        with torch.no_grad(), precision.autocast():
            assert torch.equal(by_hand.acting().policy(obs)[0], plain.policy(obs)[0])


def test_layers_with_hooks_without_a_bias_or_of_another_type_are_called():
    model, seen = ActorCriticByHand(hidden_size=16), []
    hook = model.actor.register_forward_hook(lambda *_: seen.append("actor"))
    model.acting().policy(torch.rand(3, 2))
    assert seen == ["actor"]
    hook.remove()
    assert model.acting() is not model
    fp8.convert_linears(model)
    before = model.hidden[0].register_forward_pre_hook(lambda *_: seen.append("hidden"))
    model.acting().policy(torch.rand(3, 2))
    assert seen == ["actor", "hidden"]
    before.remove()
    register = torch.nn.modules.module.register_module_forward_hook
    of_all_modules = register(lambda layer, *_: seen.append(layer))
    model.acting().policy(torch.rand(3, 2))
    of_all_modules.remove()
    assert model.actor in seen and model.acting() is not model
    model.hidden[0] = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16))
    assert model.acting() is model
    model = ActorCriticByHand()
    model.actor = torch.nn.Linear(64, 2, bias=False)
    assert model.acting() is model and as_population(model, "fp32") is None


FP8 = {"precision": "fp8+bf16"}, {"normalize_obs": True}, {"formats": EIGHT_BIT["formats"]}


@pytest.mark.parametrize("fields", FP8, ids=str)
def test_a_rollout_in_fp8_is_that_of_the_modules(monkeypatch, fields):
    runs = [build(small(**{"precision": "fp8", **fields})) for _ in range(2)]
    for _ in range(2):
        one = runs[0].collect()
        with monkeypatch.context() as patch:
            patch.setattr(type(runs[1].model), "acting", ActorCritic.acting)
            other = runs[1].collect()
        assert same(one, other)
        for run in runs:
            run.learner.update(one)  # and the next is with new weights


def test_a_kernel_for_a_rollout_takes_only_layers_that_are_as_the_precision_says():
    for name in ("fp32", "fp8"):
        model = Precision(name).prepare(ActorCriticByHand())
        assert as_population(model, name)
        assert as_population(model, "fp8" if name == "fp32" else "fp32") is None
    model.hidden[0].forward_type = fp8.E5M2
    assert as_population(model, "fp8") is None


def test_a_copy_acts_with_weights_of_its_own():
    model, obs = ActorCriticByHand(), torch.rand(5, 2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.actor.bias.add_(torch.tensor([0.0, 1.0]))
    before = twin.acting().policy(obs)[0]
    torch.testing.assert_close(before, twin(obs)[0])
    assert not torch.equal(before, model.acting().policy(obs)[0])
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.acting().policy(obs)[0], model.acting().policy(obs)[0])
