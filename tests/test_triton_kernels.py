"""Kernels in place of plain code: the same results, on a GPU or in Triton's interpreter
(conftest.py)."""

import functools

import pytest
import torch
from helpers import TINY, refused, small, trained, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl import fp8, rng
from fp8rl.build import Machine, build, build_population
from fp8rl.config import Config
from fp8rl.fp8 import E4M3, E5M2, Float8Linear
from fp8rl.machine.gpu import install
from fp8rl.machine.gpu.install import as_population
from fp8rl.population.networks import Agents
from fp8rl.recurrence import recurrence
from fp8rl.rollout import unroll
from fp8rl.tasks.classic_control import CartPole
from fp8rl.train import Run

pytest.importorskip("triton", reason="triton is not installed")
triton_kernels = pytest.importorskip("fp8rl.machine.gpu.triton_kernels")
triton_quantize = pytest.importorskip("fp8rl.machine.gpu.triton_quantize")
acting_kernel = pytest.importorskip("fp8rl.machine.gpu.acting_kernel")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the interpreter's NumPy
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")]
pytestmark += [pytest.mark.cuda] * torch.cuda.is_available()
# The interpreter takes long
few = settings(max_examples=10)
fewer = settings(few, max_examples=5)
ONES = 0xFFFFFFFF
words = st.integers(0, ONES)


@fewer
@given(
    st.lists(words, min_size=1, max_size=3),
    words,
    st.sampled_from([1, 2, 7, 513]),
    st.sampled_from(rng.PURPOSES),
)
def test_words_are_those_of_plain_code(seeds, iteration, count, purpose):
    several, one = torch.tensor(seeds, device=DEVICE), torch.tensor(iteration, device=DEVICE)
    each = (one + torch.arange(len(seeds), device=DEVICE)) & ONES
    # A population's Adam counts its steps so
    steps = torch.full((len(seeds), 1), float(iteration % 2**24), device=DEVICE)
    strided = torch.stack((several, several + 1), 1)[:, 0]
    for seed, x in (
        (seeds[0], iteration),
        (several, one),
        (several, each.unsqueeze(1)),
        (several, steps),
        (strided, each),
    ):
        found = triton_kernels.words(seed, purpose, x, count, DEVICE)
        found = found if isinstance(seed, torch.Tensor) else found.unsqueeze(0)
        seed, x = (y.cpu() if isinstance(y, torch.Tensor) else y for y in (seed, x))
        expected = rng._words(seed, purpose, x, count, "cpu")
        assert found.dtype == torch.int32 and found.device.type == DEVICE
        assert found.tolist() == expected.tolist()


@few
@given(
    st.integers(0, 1000),
    st.integers(1, 12),
    st.sampled_from([(1,), (3, 11), (2, 40)]),
    st.booleans(),
    st.booleans(),
)
def test_a_recurrence_is_the_plain_loop(seed, length, shape, begins, reverse):
    torch.manual_seed(seed)
    added, kept = torch.randn(length, *shape), torch.rand(length, *shape)
    kept *= torch.rand(length, *shape) > 0.3
    begun = torch.randn(shape) if begins else None
    # The others are neither contiguous nor of one shape
    others = added.transpose(0, -1), kept[:1, ..., :1].transpose(0, -1), None
    for own in ((added, kept, begun), others):
        here = [x if x is None else x.to(DEVICE) for x in own]
        found = triton_kernels.recurrence(*here, reverse).cpu()
        expected = recurrence(own[0], own[1].expand(own[0].shape), own[2], reverse)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("agents", [1, 2])
def test_a_run_and_a_population_learn_with_them(monkeypatch, agents):
    fields = {"steps": 512, "eval_every": 0, "eval_episodes": 2}
    fields |= {"formats": "weights=bf16:stochastic targets=bf16:stochastic"} if agents > 1 else {}
    configs = [small(**fields, seed=seed) for seed in range(agents)]
    monkeypatch.setattr(acting_kernel, "kernel_loop", lambda *_: None)
    runs = []
    for run_here in (False, True):
        monkeypatch.setattr(install, "kernels_run", lambda device, here=run_here: here)
        if agents > 1:
            run = build_population(configs, DEVICE)
        else:
            run = build(configs[0], Machine(DEVICE))
        for part in (run.env, run.collector, run.ring):
            assert (part.words is triton_kernels.words) is run_here
        runs.append(weights(trained(run)))
    # Stochastic rounding may make a step of bfloat16 of a difference
    tolerance = 1e-2 if agents > 1 else 1e-3
    torch.testing.assert_close(runs[1], runs[0], rtol=tolerance, atol=0.1 * tolerance)


def test_kernels_that_do_not_run_here_are_not_used(monkeypatch):
    assert install.kernels_run("cpu") is False
    assert install.kernels_run(DEVICE) is (DEVICE == "cuda")
    assert triton_kernels.try_kernels(DEVICE)
    monkeypatch.setattr(triton_kernels, "recur", None)
    with pytest.warns(UserWarning, match="a kernel for many does not run here"):
        assert not triton_kernels.try_kernels(DEVICE)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_draws_other_words_in_every_replay():
    iteration, seed = torch.tensor(2**31 - 2, device=DEVICE), torch.tensor([5, ONES], device=DEVICE)
    triton_kernels.words(seed, rng.PURPOSES[1], iteration, 9, DEVICE)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_kernels.words(seed, rng.PURPOSES[1], iteration, 9, DEVICE)
        iteration += 1
    for i in range(4):
        graph.replay()
        expected = rng._words(seed.cpu(), rng.PURPOSES[1], 2**31 - 2 + i, 9, "cpu")
        assert found.tolist() == expected.tolist()


FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2])


# Quantizing


def assert_quantizes_alike(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Scale and bytes, in each layout."""
    expected = fp8.quantize(x, dtype)
    for wanted in ((True, True), (True, False), (False, True)):
        by_row, by_column = found = triton_quantize.in_layouts(x, dtype, *wanted)
        assert tuple(each is not None for each in found) == wanted
        for each in filter(None, found):
            assert each.data.dtype == dtype and torch.equal(each.scale, expected.scale)
            one, other = (y.data.contiguous().view(torch.uint8) for y in (each, expected))
            assert torch.equal(one, other)
        assert by_row is None or by_row.data.is_contiguous()
        assert by_column is None or by_column.data.t().is_contiguous()


@FORMATS
@settings(max_examples=10)  # the interpreter takes long
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    exponent=st.integers(-150, 127),
    source=st.sampled_from([torch.float32, torch.bfloat16]),
    special=st.sampled_from(
        [0.0, -0.0, 1e-45, -1e-40, torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max]
    ),
    seed=st.integers(0, 2**32 - 1),
)
@example(rows=1, columns=1, exponent=0, source=torch.float32, special=0.0, seed=0)
@example(rows=200, columns=96, exponent=-149, source=torch.float32, special=0.0, seed=0)
def test_a_matrix_is_quantized_as_in_plain_code_bit_for_bit(
    dtype, rows, columns, exponent, source, special, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) ** 5
    x = torch.ldexp(
        (x / x.abs().max()).double(), torch.tensor(exponent)
    ).float()  # float32's power of two would be 0
    x.view(-1)[torch.randint(x.numel(), (), generator=generator)] = special
    assert_quantizes_alike(x.to(DEVICE, source), dtype)


@FORMATS
def test_zeros_matrices_of_any_strides_and_what_is_not_finite(dtype):
    x = torch.randn(70, 40, device=DEVICE)
    for each in (torch.zeros(3, 5, device=DEVICE), x.t(), x[::2, 1:], x[:1].expand(20, -1)):
        assert_quantizes_alike(each, dtype)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[33, 7] = bad
        assert_quantizes_alike(x, dtype)
        found = triton_quantize.in_layouts(x, dtype)[0].dequantize()
        assert found.isnan().nonzero().tolist() == [[33, 7]]


def results(layer: Float8Linear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("rows, source", [(1, torch.float32), (150, torch.bfloat16)])
def test_a_layer_computes_with_it_what_it_computes_without(rows, source):
    layer = Float8Linear(32, 80).to(DEVICE)
    layer.in_layouts = triton_quantize.in_layouts
    x, grad = torch.randn(rows, 32, device=DEVICE).to(source), torch.randn(rows, 80, device=DEVICE)
    found = results(layer, x, grad)
    with torch.no_grad():
        assert torch.equal(layer(x), found[0])
    del layer.in_layouts
    assert all(map(torch.equal, found, results(layer, x, grad)))


# The rollout as one kernel

short = functools.partial(Config, **TINY)  # the interpreter takes long
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
