import dataclasses
import functools
import itertools
import math
import unittest.mock

import numpy as np
import pytest
import torch
from helpers import SHORT, after, refused, ring_of, small, trained

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.distribution import Gaussian
from fp8rl.env import STATE_BOUNDS, Cart
from fp8rl.losses import actor_critic_loss
from fp8rl.machine import hardware
from fp8rl.model import parameters_in_order
from fp8rl.population import networks
from fp8rl.population.batches import batches
from fp8rl.population.population import Population, PopulationRing, by_agent
from fp8rl.rollout import Rollout
from fp8rl.train import iterate

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp8+bf16")
MIXED = {"gamma": 0.9, "lam": 0.5, "learning_rate": 3e-3, "entropy_coef": 0.0, "value_coef": 1.0}
MIXED |= {"max_grad_norm": 0.1, "clip": 0.1, "start_noise": 0.1}


def several(**changes) -> list[Config]:
    """Agents of all precisions, every third with other hyperparameters."""
    fields = [MIXED if k % 3 == 2 else {} for k in range(10)]
    return [
        Config(PRECISIONS[k % 5], seed=k, **{**SHORT, **fields[k], **changes}) for k in range(10)
    ]


def place(run: Population, config: Config) -> int:
    return run.configs.index(config)


def theta(run: Population, config: Config) -> torch.Tensor:
    return run.model.theta[place(run, config)].detach().clone()


# Several tests compare with the same agents, which are trained once
together = pytest.mark.xdist_group("several agents")


@functools.cache
def whole(*configs: Config) -> Population:
    return trained(build_population(list(configs)))


def of_all(network) -> torch.Tensor:
    """The parameters of a network as a population has them."""
    return torch.cat([p.detach().flatten() for p in parameters_in_order(network).values()])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_agent_learns_what_a_run_of_its_own_learns(precision):
    """The same actions and returns, as long as rounding does not change an action; the weights
    differ by the order of sums, which in a rounded product is the last bit of a few numbers. At a
    low learning rate that has no time to grow. A gradient near 0 is the difference of large sums,
    so single weights may be off by some hundredths of a step of Adam (more on one processor than on
    another), and all of a small bias by one."""
    fields = {"steps": 2_560, "eval_every": 1_280, "eval_episodes": 5, "replay_updates": 1}
    fields |= {"lam": 0.95, "learning_rate": 5e-4, "halved_after": 0}
    configs = [small(precision, seed=seed, **fields) for seed in (1, 3)]
    alone, among = build(configs[1]), build_population(configs)
    far = {"fp32": 5e-5, "fp16": 2e-3}.get(precision, 5e-2)
    near_zero = 0.01 * configs[1].settled(Cart).learning_rate
    for _ in zip(iterate(alone), iterate(among), strict=True):
        network = among.model.network(place(among, configs[1]))
        ours, theirs = (dict(model.named_parameters()) for model in (network, alone.model))
        for name, weight in theirs.items():
            bias = near_zero * weight.numel() ** 0.5 if name.endswith("bias") else 0
            assert (ours[name] - weight).norm() <= far * weight.norm() + bias
    history = among.histories(configs)[1]
    assert set(history.columns) == set(alone.history.columns)
    counted = "train_return eval_return steps learning_rate clipped nonfinite skipped loss_scale"
    measured = "loss entropy grad_norm ess min_logp value_loss"
    for names, close in ((counted, {"rtol": 0.05}), (measured, {"rtol": 0.1, "atol": 3e-3})):
        for name in names.split():
            columns = history.column(name), alone.history.column(name)
            np.testing.assert_allclose(*columns, err_msg=name, **close)


class Levels(Cart):
    """The cart with more than two actions, of which the lower half pushes to the left."""

    bounds, num_actions = STATE_BOUNDS, 16

    def __init__(self, num_envs, device="cpu", seed=0, purpose="starts"):
        super().__init__(num_envs, 0.5, device, seed, purpose=purpose)

    def advance(self, state, action):
        return super().advance(state, (2 * action >= self.num_actions).long())


class Fifteen(Levels):
    num_actions = 15


class SixteenPushes(Levels):
    """With continuous actions, whose deviations follow the heads in an agent's parameters."""

    distribution = Gaussian

    def advance(self, state, action):
        return super().advance(state, (action.sum(-1) > 0).long() * self.num_actions)


@pytest.mark.parametrize(
    "precision, task, layers",
    [
        ("fp32", Levels, 1),
        ("bf16", SixteenPushes, 1),
        ("fp16", Levels, 2),
        ("fp8", Fifteen, 2),
        ("fp8", SixteenPushes, 1),
        ("fp8+bf16", Levels, 2),
    ],
)
def test_heads_are_rounded_as_in_a_run_of_its_own(precision, task, layers):
    """Outputs, values, what the agent acts by, and gradients. In FP8, an actor with 16 outputs
    multiplies in it and the critic does not; with 15, neither does, though both together have
    16."""
    config = small(precision, env_id=f"test_population:{task.__name__}", layers=layers)
    alone, among = build(config), build_population([config])
    model = alone.model
    with torch.no_grad():  # an actor starts with so small weights that its errors would not be seen
        for parameter in (model.actor.weight, model.actor.bias, model.critic.bias):
            parameter.uniform_(-0.1, 0.1)
        among.model.theta[0] = of_all(model)
    obs = torch.rand(4, 16, 2) - 0.5
    close = {"fp32": 1e-6, "fp8": 1e-6, "fp16": 2e-3}.get(precision, 2e-2)
    far = 1e-5 if precision in ("fp32", "fp8") else 2e-2
    with alone.learner.precision.autocast():
        outputs, values = model(obs)
    found, found_values = among.model(obs.unsqueeze(1))
    acted, _ = among.model.acting().policy(obs[0])
    for ours, theirs in ((found, outputs), (found_values, values), (acted, outputs[0])):
        torch.testing.assert_close(ours.view_as(theirs), theirs, rtol=close, atol=close)
    weight = torch.randn(outputs.shape)
    weight[-1] = 0  # the last step is only bootstrapped from
    ((outputs * weight).sum() + values[:-1].square().sum()).backward()
    ((found.squeeze(1) * weight).sum() + found_values[:-1].square().sum()).backward()
    gradients = among.model.theta.grad[0].split(among.model.sizes)
    for parameter, gradient in zip(parameters_in_order(model).values(), gradients, strict=True):
        error = (gradient.view_as(parameter) - parameter.grad).norm()
        assert error <= far * parameter.grad.norm()


PUBLISHED = {
    name: x
    for name, x in vars(Config.published(steps=1_024)).items()
    if x != getattr(Config, name) and name != "seed"
}


@pytest.mark.parametrize(
    "fields",
    [
        {"slice_length": 1, "importance_correction": False, "anneal": False},
        {"codec": "int8", "extra_features": 2, "layers": 3, "hidden_size": 32},
        {"hide_velocity": True, "normalize_advantage": False, "collect_precision": "bf16"},
        {"collect_precision": "fp8", "clip": 0.01, "max_grad_norm": 0.1},
        {"layers": 1, "env_id": "fp8rl/Lqr-v0"},
        PUBLISHED,
    ],
    ids=str,
)
def test_settings_mean_the_same_as_in_a_run_of_its_own(fields):
    configs = [Config(seed=seed, **{**SHORT, **fields}) for seed in (4, 5)]
    alone, among = trained(build(configs[1])), trained(build_population(configs))
    ours, theirs = among.histories(configs)[1], alone.history
    assert ours.columns.keys() == theirs.columns.keys()
    for name in theirs.columns.keys() - {"seconds"}:
        columns = ours.column(name), theirs.column(name)
        np.testing.assert_allclose(*columns, rtol=1e-3, atol=1e-5, err_msg=name)


def assert_same_agents(one: Population, other: Population, configs: list[Config]) -> None:
    """Weights and histories of these agents bit for bit."""
    histories = one.histories(configs), other.histories(configs)
    for config, ours, theirs in zip(configs, *histories, strict=True):
        assert torch.equal(theta(one, config), theta(other, config))
        assert not ours.failure and not theirs.failure
        for name in ours.columns.keys() - {"seconds"}:
            np.testing.assert_array_equal(ours.column(name), theirs.column(name), name)


def test_an_agent_clips_by_its_own_rule_beside_agents_with_another():
    """An agent whose acting policy is its learner is bit for bit the same whether or not the ring
    stores the learner's log-probabilities for others."""
    others = [Config(seed=seed, clip=1e-3, **SHORT) for seed in (0, 1)]
    last = Config(seed=3, clip=1e-3, **SHORT)
    by_learner = dataclasses.replace(last, collect_precision="fp8")
    without = trained(build_population([*others, last]))
    beside = trained(build_population([*others, by_learner]))
    assert beside.ring.proximal and not without.ring.proximal
    assert_same_agents(without, beside, others)
    assert not torch.equal(theta(without, last), theta(beside, by_learner))
    # Here the learner's log-probabilities differ in the last bits, as all rows are computed at once
    alike = Config("fp8", env_id="fp8rl/Lqr-v0", **SHORT)
    configs = [alike, dataclasses.replace(alike, collect_precision="bf16")]
    batch = by_agent(trained(build_population(configs)).collect(), 2)
    same = (batch.proximal_logp == batch.behavior_logp).all((0, 2))
    assert same.tolist() == [True, False]


@together
@pytest.mark.parametrize("fed", ["observation", "weights"])
def test_infinities_of_one_agent_leave_the_others_bit_for_bit(fed):
    configs = several()
    run, one = build_population(configs), configs[5]
    k, iterations = place(run, one), iterate(run)
    next(iterations)
    if fed == "observation":
        run.env.state[k * 16] = math.inf
    else:
        run.model.theta.data[k] = math.inf
    before = theta(run, one)
    list(iterations)
    assert torch.equal(theta(run, one), before) or not before.isfinite().all()
    assert run.histories([one])[0].failure
    assert_same_agents(whole(*configs), run, [config for config in configs if config != one])


def test_a_loss_scale_is_each_agent_s_own_and_goes_as_grad_scaler_s():
    configs = [Config(name, seed=1, **SHORT) for name in ("fp16", "fp32", "fp16")]
    run = build_population(configs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
    scales, parameter = run.learner.precision, torch.nn.Parameter(torch.ones(1))
    adam, seen = torch.optim.Adam([parameter], lr=1e-9), set()
    for step in range(230):
        bad = step in (3, 4, 120)
        factor = torch.tensor([math.inf if bad else 1.0, 1.0, 1.0])
        report = scales.step((run.model.theta.sum(1) * factor), run.learner.optimizer, 0.5)
        scaler.scale(parameter.sum() * factor[0]).backward()
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        assert report.loss_scale[0] == scaler.get_scale() and report.loss_scale[1] == 1
        assert report.skipped.tolist() == [bad, False, False]
        seen.add(scaler.get_scale())
    assert len(seen) >= 3


def test_gradients_are_those_of_autograd():
    """The written-out backward pass against autograd on S plain networks."""
    agents = networks.CHUNK + 2
    configs = [Config(seed=seed, **SHORT) for seed in range(agents)]
    run = build_population(configs)
    rollout = by_agent(run.collect(), agents)
    loss, _ = actor_critic_loss(*run.model(rollout.obs), rollout, run.settled)
    run.model(rollout.obs)  # another pass leaves the results of this one alone
    loss.sum().backward()
    for k in (0, agents - 1):
        model = run.model.network(k)
        own = Rollout(*(x if x is None else x[:, k] for x in rollout))
        loss, _ = actor_critic_loss(*model(own.obs), own, run.settled)
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in parameters_in_order(model).values()])
        torch.testing.assert_close(run.model.theta.grad[k], grads, rtol=1e-4, atol=1e-7)


def test_every_agent_replays_its_own():
    configs = [Config(seed=seed, **SHORT) for seed in range(3)]
    run = build_population(configs)
    narrow = (-0.1, -0.1), (0.1, 0.1)
    together = PopulationRing([{}] * 3, 40, 48, narrow, "int8")
    alone = [ring_of(40, 16, narrow, "int8") for _ in configs]
    for _ in range(3):
        rollout = run.collect()
        together.append(rollout)
        own = by_agent(rollout, 3)
        for k in range(3):
            alone[k].append(Rollout(*(x[:, k] for x in own[:5])))
    batch = by_agent(together.sample(16, 16, torch.arange(3), 2), 3)
    for k, ring in enumerate(alone):
        expected = ring.sample(16, 16, seed=k, iteration=2)
        assert all(torch.equal(x[:, k], y) for x, y in zip(batch[:5], expected[:5], strict=True))
    # Values that the codec clips are counted for each agent
    assert torch.equal(together.clipped, torch.stack([ring.clipped for ring in alone]))
    assert together.clipped.all()


@together
def test_a_population_continues_from_its_checkpoint(tmp_path):
    configs = several()
    checkpoint.save(tmp_path / "checkpoint.pt", after(2, build_population(configs)))
    found, state = checkpoint.resume(tmp_path / "checkpoint.pt")
    again = build_population(found)
    again.load_state_dict(state)
    assert set(found) == set(configs) and len(again.history) == 2
    assert_same_agents(whole(*configs), trained(again), configs)
    again.stop(1, "it is stopped")
    other = build_population(found)
    other.load_state_dict(again.state_dict())
    assert other.learner.precision.stopped.flatten().nonzero().tolist() == [[1]]


def test_configs_are_split_where_shapes_differ():
    configs = [
        small(seed=s, num_envs=n, precision=p)
        for n in (16, 8)
        for s in range(3)
        for p in ("fp8", "fp32")
    ]
    found = batches(configs, 4)
    assert [len(batch) for batch in found] == [4, 2, 4, 2]
    assert sorted(map(str, itertools.chain(*found))) == sorted(map(str, configs))
    assert all(len({config.num_envs for config in batch}) == 1 for batch in found)
    assert [config.precision for config in found[0]] == ["fp32", "fp32", "fp8", "fp8"]


def test_what_cannot_be_in_it_is_refused_before_anything_runs():
    refused("configs is empty: give at least one", build_population, [])
    for fields, message in (
        ({"env_id": "MountainCar-v0", "start_noise": 0.5}, "env_id is MountainCar-v0: .*alone"),
        ({"encoder": "gru"}, "encoder is gru: train it alone"),
        ({"normalize_obs": True}, "normalize_obs is True: train it alone"),
        ({"precision": "tf32"}, "precision is tf32: train it alone"),
        ({"collect_precision": "tf32"}, "collect_precision is tf32: train it alone"),
        ({"precision": "fp4"}, "precision is 'fp4'"),
        ({"collect_precision": "fp4"}, "collect_precision is 'fp4'"),
        ({"env_id": "CartPole-v1", "start_noise": 0.5}, "env_id is CartPole-v1 beside None"),
        ({"num_envs": 8}, "num_envs is 8 beside 16"),
        ({"anneal": False}, "anneal is False beside True"),
        ({"precision": "bf16", "formats": "forward=e4m3"}, "formats rounds matmuls.*use fp32"),
    ):
        refused(message, build_population, [Config(**SHORT), Config(seed=1, **SHORT, **fields)])
    for field, other in (
        ("precision", {"hidden_size": 24}),
        ("precision", {"layers": 1, "env_id": "test_population:Fifteen"}),
        ("collect_precision", {"layers": 1}),
    ):
        message = f"{field} is 'fp8' and no layer can run in FP8: use a hidden_size"
        refused(message, build_population, [Config(**SHORT, **{field: "fp8"}, **other)])
    with unittest.mock.patch.object(hardware, "available", return_value=10**7):
        message = r"population of 30 agents needs .* use at most \d+ agents, or lower"
        thirty = [Config(seed=seed, **SHORT) for seed in range(30)]
        refused(message, build_population, thirty, error=MemoryError)
