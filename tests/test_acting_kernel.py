"""The rollout as one kernel against the plain loop, on a GPU or in Triton's interpreter
(conftest.py)."""

import functools

import pytest
import torch
from helpers import TINY, refused, trained, weights

from fp8rl.build import Machine, build, build_population
from fp8rl.config import Config
from fp8rl.machine.gpu import install
from fp8rl.machine.gpu.install import as_population
from fp8rl.population.networks import Agents
from fp8rl.rollout import unroll
from fp8rl.tasks.classic_control import CartPole
from fp8rl.train import Run

triton = pytest.importorskip("triton", reason="triton is not installed")
acting_kernel = pytest.importorskip("fp8rl.machine.gpu.acting_kernel")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
short = functools.partial(Config, **TINY)  # the interpreter takes long
# Of the interpreter's NumPy
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
pytestmark += [pytest.mark.cuda] * torch.cuda.is_available()
TASKS = None, "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "fp8rl/Lqr-v0"


def pair(configs, max_steps=None) -> list[Run]:
    """A population, or a run of a single config, that acts in the plain loop and the same with the
    kernel, perhaps with shorter episodes."""
    many = isinstance(configs, list)
    found = [
        build_population(configs, DEVICE) if many else build(configs, Machine(DEVICE))
        for _ in range(2)
    ]
    for run in found:
        if max_steps:
            run.env.max_steps = max_steps
            run.env._max_steps = torch.tensor(max_steps, dtype=torch.int32)
    plain, kernel = (run.collector for run in found)
    act = Agents.acting
    if not many:
        act = functools.partial(as_population, precision=kernel.precision.name)
    plain.loop, kernel.loop = unroll, acting_kernel.Fused(kernel.env, kernel.model, act)
    return found


def assert_same_rollouts(plain: Run, other: Run, rollouts: int, tolerance: float) -> set[int]:
    """Rollouts that follow each other, equal but for the order of sums. Returns the flags seen."""
    seen = set()
    close = {"rtol": tolerance, "atol": tolerance}
    for _ in range(rollouts):
        expected, found = (run.collect() for run in (plain, other))
        for name in expected._fields[:-1]:
            one, two = getattr(expected, name), getattr(found, name)
            assert name not in ("action", "flags") or one.dtype == two.dtype, name
            exact = name in ("action", "flags") and not one.is_floating_point()
            torch.testing.assert_close(two, one, msg=name, **({} if exact else close))
        assert torch.equal(plain.env.elapsed, other.env.elapsed)
        assert torch.equal(plain.env.done, other.env.done)
        seen |= set(found.flags.unique().tolist())
    return seen


@pytest.mark.parametrize("task", TASKS)
def test_the_kernel_acts_as_the_plain_loop_does_in_every_task(task):
    configs = [short(env_id=task, seed=seed, precision="fp32", num_envs=16) for seed in range(2)]
    seen = assert_same_rollouts(*pair(configs, max_steps=6), rollouts=2, tolerance=1e-3)
    assert {0, 2, 4} <= seen  # ends and resets included


@pytest.mark.parametrize("layers, options", [(1, {}), (3, {"extra_features": 3})])
def test_the_kernel_rounds_as_the_networks_do(layers, options):
    """Agents of all precisions, with a number of environments that is no power of two."""
    # A network of one has none to convert
    precisions = ["fp32", "bf16", "fp16"] + ["fp8"] * (layers > 1)
    own = {"layers": layers, "num_envs": 20, **options}
    configs = [short(seed=seed, precision=name, **own) for seed, name in enumerate(precisions)]
    assert 1 in assert_same_rollouts(*pair(configs), rollouts=2, tolerance=1e-4)


ALONE = [
    {"precision": "fp8", "env_id": "Pendulum-v1"},
    {"precision": "bf16", "collect_precision": "fp8", "layers": 3},
    {"layers": 1, "num_envs": 1, "hidden_size": 128},
]


@pytest.mark.parametrize("options", ALONE, ids=str)
def test_a_run_acts_with_it_as_in_the_plain_loop(options):
    runs = pair(short(**{"precision": "fp32"} | options), max_steps=4)
    assert {0, 2, 4} <= assert_same_rollouts(*runs, rollouts=2, tolerance=1e-3)


@pytest.mark.parametrize("agents", [0, 2])
def test_what_acts_with_it_learns(agents):
    """Each rollout is by the weights that the updates before it left."""
    fields = {"steps": 256, "eval_every": 0, "eval_episodes": 2, "learning_rate": 0.01}
    fields |= {"collect_precision": "bf16"}
    configs = [short(precision="fp32", **fields, seed=seed) for seed in range(agents or 1)]
    plain, other = pair(configs if agents else configs[0])
    before = weights(plain)
    learned, expected = weights(trained(other)), weights(trained(plain))
    torch.testing.assert_close(learned, expected, rtol=1e-2, atol=1e-3)
    assert (expected - before).abs().max() > 0.02 and plain.collector.rollouts > 3


class Changed(CartPole):
    """CartPole in which `how` decides what becomes of the rewards."""

    last = None

    def advance(self, state, action):
        state, reward, out = super().advance(state, action)
        return state, self.how(state, action, reward), out


def how(function):
    """Fields with a task whose rewards a function makes."""
    name = f"Task{len(HOWS)}"
    own = {"how": lambda self, *args: function(self, *args)}
    HOWS[name] = globals()[name] = type(name, (Changed,), own)
    return {"env_id": f"{__name__}:{name}"}


HOWS: dict[str, type] = {}


class Stepped(CartPole):
    def step(self, action, start=None):
        return super().step(action, start)


def keeps_the_action(self, state, action, reward):
    self.last = action
    return reward


REFUSED = {
    "operation": (how(lambda self, state, action, reward: reward.cumsum(0)), "advance.*cumsum"),
    "branch": (
        how(lambda self, state, action, reward: reward if state[0, 0] > 0 else -reward),
        "advance cannot",
    ),
    "memory": (how(keeps_the_action), "advance .* is no part of the state"),
    "step": ({"env_id": f"{__name__}:Stepped"}, "the task has a step of its own"),
    "width": ({"hidden_size": 48}, "no kernel for .* 48"),
    "format": ({"formats": "acting=e3m2"}, "no kernel for these roundings"),
}


def test_what_has_no_kernel_is_refused():
    for options, reason in REFUSED.values():
        run = build_population([short(**options)])
        own = run.env, run.model, Agents.acting
        refused(reason, acting_kernel.Fused, *own, error=NotImplementedError)
        assert acting_kernel.kernel_loop(*own) is None


PLAIN = [
    {"encoder": "gru"},
    {"normalize_obs": True},
    {"formats": "m=e4m3"},
    *(REFUSED[name][0] for name in ("operation", "width")),
    *[{"precision": "tf32"}] * torch.cuda.is_available(),
]


def test_a_run_that_has_no_kernel_acts_step_by_step(monkeypatch):
    monkeypatch.setattr(install, "kernels_run", lambda device: True)  # as on a GPU
    for options in ({}, {"precision": "fp8", "collect_precision": "bf16"}, *PLAIN):
        loop = build(short(**options), Machine(DEVICE)).collector.loop
        assert (loop is unroll) is (options in PLAIN), options
        assert options in PLAIN or isinstance(loop, acting_kernel.Fused), options
    gymnasium = Machine(DEVICE, vectorization="sync")
    assert build(short(env_id="CartPole-v1"), gymnasium).collector.loop is unroll


def test_a_kernel_that_does_not_run_here_is_not_used(monkeypatch):
    run = build_population([short()], DEVICE)
    before = run.env.state_dict()
    own = run.env, run.model, Agents.acting
    assert isinstance(acting_kernel.kernel_loop(*own), acting_kernel.Fused)
    # It was a copy that was stepped
    assert all(map(torch.equal, before.values(), run.env.state_dict().values()))
    assert (run.collector.loop is unroll) is (DEVICE == "cpu")
    monkeypatch.setattr(acting_kernel, "play", None)
    with pytest.warns(UserWarning, match="agents act step by step"):
        assert acting_kernel.kernel_loop(*own) is None


class Many(CartPole):
    """Operations that the package's own tasks do not use."""

    def advance(self, state, action):
        x, y, z, w = state.unbind(-1)
        near = ~(x.abs() > 1) & (y <= 2) | (z == 0)
        x = (
            torch.where(near, 1 - x / 3, 2 * x.exp().log().clamp(max=5))
            - (w % 0.7)
            + action.float().sqrt()
        )
        y = torch.minimum(y, x).clamp(min=-3) + torch.maximum(z, -w).clamp(-1, 1) * near
        state = torch.stack((x.clamp(-2, 2), y, 0.9 * z + 0.1, x.sin() * y.cos() - w**2), dim=-1)
        return state, x + y.square(), torch.logical_not(near) & (state[:, 3] < -4)


def test_other_operations_are_written_as_they_are():
    configs = [short(env_id=f"{__name__}:Many", seed=seed) for seed in (1, 2)]
    assert 1 in assert_same_rollouts(*pair(configs), 4, 1e-3)
