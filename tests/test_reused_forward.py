import copy
import dataclasses
import math

import gymnasium
import pytest
import torch
from helpers import after, assert_same, resumed, reusing, same, small, trained

from fp8rl import fp8
from fp8rl.build import build
from fp8rl.config import EIGHT_BIT
from fp8rl.disk import checkpoint
from fp8rl.machine import plan
from fp8rl.machine.acting import as_population
from fp8rl.machine.plan import plan_run
from fp8rl.machine.reused_forward import FastActorCritic, Reuse
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.rollout import DUMMY
from fp8rl.train import Run, forward_pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_heads_at_once_give_what_each_gives(dtype):
    model, obs = FastActorCritic(num_actions=3), torch.randn(2, 1024, 2)
    with torch.no_grad():
        model.actor.bias.uniform_()
        model.critic.bias.uniform_()
    exact = dtype == torch.float32
    close = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 1e-2, "atol": 1e-2}
    with torch.autocast("cpu", dtype, enabled=not exact):
        logits, values = model(obs)
        hidden = model.encode(obs)
        expected = model.actor(hidden).float(), model.critic(hidden).squeeze(-1).float()
        few = model(obs[:, :10])
    assert logits.shape == (2, 1024, 3) and values.shape == (2, 1024)
    assert logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close((logits, values), expected, **close)
    torch.testing.assert_close((logits[:, :10], values[:, :10]), few, **close)
    parameters, both = list(model.parameters()), ((logits, values), expected)
    losses = (x.square().sum() + y.square().sum() for x, y in both)
    mine, theirs = (torch.autograd.grad(loss, parameters) for loss in losses)
    torch.testing.assert_close(mine, theirs, **{name: 10 * x for name, x in close.items()})


@pytest.mark.parametrize("layers", [1, 3])
def test_few_rows_go_as_in_the_plain_network_bit_for_bit(layers):
    models = [
        network(layers=layers, generator=torch.Generator().manual_seed(0))
        for network in (ActorCritic, FastActorCritic)
    ]
    obs = torch.rand(3, 16, 2)
    for precision in (Precision("fp32"), Precision("bf16")):
        with torch.no_grad(), precision.autocast():
            plain, ours = (
                (*m(obs), *m(obs[0]), *m.policy(obs[0]), *m.acting().policy(obs[0])) for m in models
            )
            assert all(map(torch.equal, models[1].step(obs[0])[:2], plain[2:4]))
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(plain, ours, strict=True))


FP8 = {"precision": "fp8+bf16"}, {"normalize_obs": True}, {"formats": EIGHT_BIT["formats"]}


def test_layers_with_hooks_without_a_bias_or_of_another_type_are_called():
    model, seen = FastActorCritic(hidden_size=16), []
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
    model.hidden[0] = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(16, 16))
    assert model.acting() is model
    model = FastActorCritic()
    for name in ("actor", "critic"):
        setattr(model, name, torch.nn.Linear(64, getattr(model, name).out_features, bias=False))
    obs = torch.rand(1024, 2)
    outputs, values = model(obs)
    hidden = model.encode(obs)
    assert torch.equal(outputs, model.actor(hidden))
    assert torch.equal(values, model.critic(hidden).squeeze(-1))
    assert model.acting() is model and as_population(model, "fp32") is None


@pytest.mark.parametrize("rows", [21, 1024])
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_are_called_whatever_the_number_of_rows(rows, kind):
    seen = []
    for head in ("actor", "critic"):
        model = FastActorCritic()
        getattr(getattr(model, head), f"register_{kind}_hook")(lambda *_: seen.append(1))
        outputs, values = model(torch.rand(rows, 2))
        (outputs.sum() + values.sum()).backward()
    assert seen == [1, 1]
    if kind != "forward":
        return
    register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda layer, *_: seen.append(layer))  # of all modules
    try:
        model(torch.rand(rows, 2))
        model.acting().policy(torch.rand(3, 2))
    finally:
        handle.remove()
    assert seen.count(model.actor) == 2 and seen.count(model.inputs) == 2 and model.critic in seen


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


@pytest.mark.parametrize("precision", ["fp8", "fp8+bf16"])
def test_a_head_in_fp8_is_so_whatever_the_number_of_rows(precision):
    precision = Precision(precision)
    model = precision.prepare(FastActorCritic(num_actions=16))
    obs = torch.rand(1024, 2)
    with precision.autocast():
        outputs, values = model(obs)
        hidden = model.encode(obs)
        expected = model.actor(hidden), model.critic(hidden).squeeze(-1).float()
    assert torch.equal(outputs, expected[0]) and torch.equal(values, expected[1])
    parameters = list(model.parameters())
    ours = torch.autograd.grad(outputs.square().sum() + values.sum(), parameters)
    theirs = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), parameters)
    assert all(map(torch.equal, ours, theirs))


def test_a_kernel_for_a_rollout_takes_only_layers_that_are_as_the_precision_says():
    for name in ("fp32", "fp8"):
        model = Precision(name).prepare(FastActorCritic())
        assert as_population(model, name)
        assert as_population(model, "fp8" if name == "fp32" else "fp32") is None
    model.hidden[0].forward_type = fp8.E5M2
    assert as_population(model, "fp8") is None


def test_a_copy_acts_with_weights_of_its_own():
    model, obs = FastActorCritic(), torch.rand(5, 2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.actor.bias.add_(torch.tensor([0.0, 1.0]))
    before = twin.policy(obs)[0]
    torch.testing.assert_close(before, twin(obs)[0])
    assert not torch.equal(before, model.policy(obs)[0])
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.policy(obs)[0], model.policy(obs)[0])


def collected(run: Run, rollouts: int = 3):
    """A run and the last of some rollouts, over which episodes end and into which a memory
    comes."""
    for _ in range(rollouts):
        rollout = run.collect()
        # Or float16's loss scale would be too large for the first gradient
        run.learner.watch(rollout)
    assert (rollout.flags & DUMMY).any()
    return run, rollout


# MountainCarContinuous-v0, which the package leaves to Gymnasium, in episodes of 200 steps, not 999
SHORT_CAR = "fp8rl-tests/ShortCar-v0"
CAR = "gymnasium.envs.classic_control:Continuous_MountainCarEnv"
gymnasium.register(SHORT_CAR, CAR, max_episode_steps=200)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"encoder": "gru"},
        {"env_id": "Pendulum-v1", "encoder": "gru"},
        {"env_id": SHORT_CAR},
    ],
    ids=str,
)
def test_the_forward_passes_that_acted_give_the_update_of_a_new_one(fields, precision):
    config, found = small(precision=precision, max_grad_norm=1e9, normalize_obs=False, **fields), []
    for run in (reusing(build(config)), build(config)):
        run, rollout = collected(run, 7)
        held = [x for x in (*rollout, *vars(run.env).values()) if isinstance(x, torch.Tensor)]
        assert not any(x.requires_grad for x in held)
        run.learner.update(rollout)
        found.append((rollout, torch.cat([p.grad.flatten() for p in run.model.parameters()])))
    (rollout, kept), (plain, new) = found
    assert same(rollout, plain)
    error = (kept - new).norm() / new.norm()
    assert error < (1e-5 if precision == "fp32" else 2e-2) and new.norm() > 0


def test_only_the_newest_rollout_is_learned_from_by_the_forward_passes_that_acted():
    run, rollout = collected(reusing(build(small())))
    calls = []
    run.model.register_forward_pre_hook(lambda *call: calls.append(call))
    run.ring.append(rollout)
    changed = rollout._replace(reward=rollout.reward + 1)
    for batch, forwards in ((rollout, 0), (run.sample(), 1), (changed, 2)):
        run.learner.update(batch)
        assert len(calls) == forwards


def test_forward_passes_are_reused_where_a_layer_of_a_step_is_large_and_the_actor_is_the_learner():
    for expected, num_envs, fields in (
        (True, 1024, {}),
        (True, 512, {"hidden_size": 128}),
        (True, 2048, {"precision": "bf16"}),
        (True, 4096, {"encoder": "gru"}),
        (False, 1023, {"hidden_size": 1024}),
        (False, 2047, {"precision": "bf16"}),
        (False, 4096, {"collect_precision": "fp8"}),
        (False, 4096, {"fresh_updates": 0}),
        (False, 4096, {"formats": "m=e4m3"}),
        (False, 4096, {"precision": "fp8"}),
    ):
        shape = {"num_envs": num_envs, "capacity": 33 * num_envs, "steps": 32 * num_envs}
        config = small(**shape, **fields)
        assert plan_run(config).reuses_forward == expected, config


def reuses(run) -> bool:
    return isinstance(run.collector.loop, Reuse) and run.learner.forward != forward_pass


def test_many_environments_learn_from_the_forward_passes_that_acted_by_themselves(
    monkeypatch, tmp_path
):
    config = small(
        num_envs=1024, capacity=33 * 1024, steps=2 * 32 * 1024, eval_every=0, eval_episodes=1
    )
    alone, path = trained(build(config)), tmp_path / "checkpoint.pt"
    checkpoint.save(path, after(1, build(config)))
    assert reuses(alone)
    assert_same(alone, trained(resumed(path)))
    normalized = trained(build(dataclasses.replace(config, normalize_obs=True)))
    assert reuses(normalized) and normalized.history.column("ess")[0] > 0.999
    monkeypatch.setattr(plan, "LARGE", math.inf)
    assert_same(alone, trained(reusing(build(config))))
