"""The kernels that stand in for many launches against plain code, on a GPU or in Triton's
interpreter (conftest.py)."""

import pytest
import torch
from helpers import random_rollout, small, trained, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl import rng
from fp8rl.build import Machine, build, build_population
from fp8rl.losses import discounts_of, no_all_reduce, vtrace
from fp8rl.machine.gpu import install
from fp8rl.population.population import by_agent
from fp8rl.returns import RewardScale
from fp8rl.rollout import TERMINATED, TRUNCATED, Rollout

pytest.importorskip("triton", reason="triton is not installed")
triton_kernels = pytest.importorskip("fp8rl.machine.gpu.triton_kernels")
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
    st.sampled_from([1, 2, 7, 512, 513, 1201]),
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
        (seeds[0], one.view(1)),
        (several, one),
        (several, rng._int32_column(iteration, DEVICE)[0]),
        (several, each.unsqueeze(1)),
        (several, steps),
        (strided, each),
    ):
        found = triton_kernels.words(seed, purpose, x, count, DEVICE)
        found = found if isinstance(seed, torch.Tensor) else found.unsqueeze(0)
        seed, x = (y.cpu() if isinstance(y, torch.Tensor) else y for y in (seed, x))
        expected = rng._words(seed, purpose, x, count, "cpu").view("int32")
        assert found.dtype == torch.int32 and found.device.type == DEVICE
        assert found.tolist() == expected.tolist()


def test_random_numbers_are_drawn_with_the_kernel():
    several, iteration = torch.tensor([0, 7, ONES], device=DEVICE), torch.tensor(3, device=DEVICE)
    for seed in (7, several):
        plain = rng.uniform(seed, "starts", 3, (5, 3), DEVICE)
        by_kernel = rng.uniform(
            seed, "starts", iteration, (5, 3), DEVICE, words=triton_kernels.words
        )
        assert plain.shape == by_kernel.shape and torch.equal(plain, by_kernel)
    with pytest.raises(RuntimeError):
        triton_kernels.words(several, "starts", several[:2], 3, DEVICE)


def plain(added, kept, begun, reverse):
    x, found = begun, []
    for row in range(len(added))[:: -1 if reverse else 1]:
        x = added[row] + kept[row] * x
        found.append(x)
    return torch.stack(found[:: -1 if reverse else 1])


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
    begun = torch.randn(shape) if begins else torch.zeros(shape)
    here = [x.to(DEVICE) for x in (added, kept, begun)]
    found = triton_kernels.recurrence(*here[:2], here[2] if begins else None, reverse).cpu()
    torch.testing.assert_close(found, plain(added, kept, begun, reverse), rtol=1e-5, atol=1e-6)
    # Neither contiguous nor of one shape
    added, kept = added.transpose(0, -1), kept[:1, ..., :1].transpose(0, -1)
    found = triton_kernels.recurrence(added.to(DEVICE), kept.to(DEVICE), reverse=reverse).cpu()
    expected = plain(added, kept.expand(added.shape), torch.zeros(added.shape[1:]), reverse)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_not_finite_is_kept_as_the_plain_loop_keeps_it(reverse):
    added, kept = torch.ones(9, 3), torch.full((9, 3), 0.5)
    added[4, 0], added[4, 1], added[3, 2], kept[2:6] = torch.inf, torch.nan, -torch.inf, 0.0
    found = triton_kernels.recurrence(added.to(DEVICE), kept.to(DEVICE), reverse=reverse)
    torch.testing.assert_close(
        found.cpu(), plain(added, kept, torch.zeros(3), reverse), equal_nan=True
    )
    assert found.isnan().any(0).all()  # 0 times infinity, too


@few
@given(seed=st.integers(0, 1000), length=st.integers(1, 12), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_vtrace_is_that_of_plain_code(seed, length, lam):
    values, log_ratios, rollout = random_rollout(seed, length)
    numbers = values.float(), rollout.reward.float(), discounts_of(rollout.flags, 0.9)
    arguments = [x.to(DEVICE) for x in (*numbers, log_ratios.float(), rollout.valid)]
    found = vtrace(*arguments, lam, recurrence=triton_kernels.recurrence)
    torch.testing.assert_close(found, vtrace(*arguments, lam), rtol=1e-5, atol=1e-6)


def test_the_scale_of_rewards_is_that_of_plain_code():
    numbers = torch.Generator().manual_seed(0)
    scales = [RewardScale((2, 3), DEVICE) for _ in range(2)]
    scales[1].recurrence = triton_kernels.recurrence
    gamma = torch.tensor([[0.9], [0.5]], device=DEVICE)
    kinds = torch.tensor([0, 0, 0, TERMINATED, TRUNCATED]).byte()
    for length, last in ((7, 0.0), (1, 0.0), (4, 0.0), (4, torch.inf)):
        flags = kinds[torch.randint(5, (length, 6), generator=numbers)].to(DEVICE)
        rewards = torch.randn(length, 6, generator=numbers).to(DEVICE)
        rewards[-1, 4] += last
        rollout = by_agent(Rollout(None, None, rewards, flags, None), 2)
        for scale in scales:
            scale.add(rollout, gamma, no_all_reduce)
        torch.testing.assert_close(*(scale.state_dict() for scale in scales), equal_nan=True)


@pytest.mark.parametrize("agents", [1, 2])
def test_a_run_and_a_population_learn_with_them(monkeypatch, agents):
    fields = {"steps": 512, "eval_every": 0, "eval_episodes": 2}
    fields |= {"formats": "weights=bf16:stochastic targets=bf16:stochastic"} if agents > 1 else {}
    configs = [small(**fields, seed=seed) for seed in range(agents)]
    runs = []
    for run_here in (False, True):
        monkeypatch.setattr(install, "kernels_run", lambda device, here=run_here: here)
        monkeypatch.setattr(acting_kernel, "kernel_loop", lambda *_: None)
        if agents > 1:
            run = build_population(configs, DEVICE)
            parts = (run.learner.optimizer, run.learner.compute_targets)
        else:
            run = build(configs[0], Machine(DEVICE))
            parts = ()
        for part in (run.env, run.collector, run.ring, *parts):
            assert (part.words is triton_kernels.words) is run_here
        recurrence = run.learner.reward_scale.recurrence
        assert (recurrence is triton_kernels.recurrence) is run_here
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
        expected = rng._words(seed.cpu(), rng.PURPOSES[1], 2**31 - 2 + i, 9, "cpu").view("int32")
        assert found.tolist() == expected.tolist()
