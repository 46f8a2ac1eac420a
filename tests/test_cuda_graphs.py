import itertools

import numpy as np
import pytest
import torch
from helpers import (
    TINY,
    after,
    assert_same,
    change_rollouts,
    drawn_on_tensors,
    resumed,
    small,
    trained,
    weights,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8rl import build as machine_module
from fp8rl.build import HERE, Machine, build, build_population
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.env import TensorEnv
from fp8rl.machine.adam import adam
from fp8rl.machine.gpu import cuda_graphs
from fp8rl.precision import available_precisions
from fp8rl.train import Run, iterate

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_CUDA = pytest.mark.parametrize(
    "precision", available_precisions("cuda") if torch.cuda.is_available() else ["fp32"]
)


@pytest.fixture
def graphed(monkeypatch):
    """Runs make graphs on the CPU, too, of a given kind, with an Adam that a CPU has."""

    def kind(graph: type) -> None:
        monkeypatch.setattr(machine_module, "has_graphs", lambda device: True)
        monkeypatch.setattr(cuda_graphs, "Graphed", graph)
        monkeypatch.setattr(
            machine_module, "adam", lambda network, rate, capturable: adam(network, rate)
        )

    return kind


class Unrecorded:
    """Stands in for Graphed: runs the function."""

    def __init__(self, device):
        pass

    def __call__(self, function):
        return function()


class Captured(TorchDispatchMode):
    """Raises where the host reads a number of a tensor, and where a number of Python becomes a
    tensor, which on CUDA would be a copy: a graph can capture neither."""

    REFUSED = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in self.REFUSED, f"a graph cannot capture {function}"
        return function(*args, **(kwargs or {}))


class Watched(Unrecorded):
    """Stands in for Graphed."""

    def __call__(self, function):
        with Captured():
            return function()


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16", "encoder": "gru"},
        {"precision": "fp8"},
        {"precision": "bf16", "env_id": "fp8rl/Lqr-v0"},
        {"collect_precision": "bf16"},
        {"formats": "weights=e4m3:stochastic v=e4m3:stochastic targets=bf16:stochastic"},
    ],
    ids=str,
)
def test_nothing_in_a_graph_asks_the_host_or_comes_from_it(fields, graphed):
    graphed(Watched)
    config = Config(steps=128, eval_every=0, eval_episodes=1, **TINY | fields)
    runs = [build_population([config])] if "encoder" not in fields else []
    for run in runs + ([build(config)] if "formats" not in fields else []):
        with drawn_on_tensors():
            assert trained(run).history.last["nonfinite"] == 0


def test_a_question_to_the_host_or_a_number_from_it_would_be_noticed():
    for call in (lambda: torch.tensor(1), torch.ones(1).item):
        with pytest.raises(AssertionError, match="a graph cannot capture"):
            Watched("cpu")(call)


def test_where_a_graph_cannot_be_launches_are_eager(graphed):
    graphed(Unrecorded)
    assert has_graph(build(small())) and has_graph(build_population([small()]))
    for fields, machine in (
        ({"normalize_obs": True}, {}),
        ({"formats": "m=e4m3"}, {}),
        ({"env_id": "CartPole-v1"}, {"vectorization": "sync"}),
        ({}, {"graph": False}),
    ):
        assert not has_graph(build(small(**fields), Machine(**machine)))


def has_graph(run: Run) -> bool:
    return isinstance(run.launch, cuda_graphs.GraphQueue)


class Still(TensorEnv):
    """Its starts are one number for all, in one place in memory."""

    bounds, max_steps, state_size, num_actions = ((-1.0, -1.0), (1.0, 1.0)), 20, 2, 2

    def start(self, numbers):
        return torch.zeros(1).expand_as(numbers)

    def advance(self, state, action):
        return state + 0.1 * (2 * action.unsqueeze(-1) - 1), state[:, 0], state[:, 0] > 1


STILL = {"env_id": "test_cuda_graphs:Still"}


class Replayed:
    """Stands in for Graphed on the CPU: runs the function, and gives its results in the very
    objects that it gave at first."""

    def __init__(self, device):
        self.first = None

    def __call__(self, function):
        results = function()
        if self.first is None:
            self.first = results
        leaves = [tree_leaves(x) for x in (self.first, results)]
        for kept, new in zip(*leaves, strict=False):  # the first ones may have grown
            if isinstance(kept, torch.Tensor):
                kept.copy_(new)
        return self.first


@pytest.mark.parametrize(
    "fields", [{"replay_updates": 2}, {"encoder": "gru", "precision": "fp8"}, STILL], ids=str
)
def test_results_that_the_next_replay_overwrites_are_used_before(fields, graphed, tmp_path):
    config = small(steps=1_536, eval_every=0, eval_episodes=2, **fields)
    path = tmp_path / "checkpoint.pt"
    plain = trained(build(config))
    graphed(Replayed)
    replayed = build(config)
    checkpoint.save(path, after(2, replayed))
    assert_same(trained(replayed), plain)
    assert_same(trained(resumed(path)), plain)


# A run long enough for rows to wait, in iterations that take as little as they can
LONG = {"steps": 40 * 64, "eval_every": 0, "eval_episodes": 1, **TINY}


def spoiled(run, at: int):
    """The run, in whose rollout number `at` there is something far too large, and once."""
    calls = itertools.count(1)

    def change(rollout):
        if next(calls) == at:
            rollout.obs[3, 0] = 1e9
        return rollout

    change_rollouts(run, change)
    return run


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_graph_has_done_is_checked_soon_whoever_reads_the_history(reads, graphed):
    graphed(Replayed)
    run, seen = spoiled(build(Config(**LONG)), at=21), 0
    with pytest.raises(ValueError, match=r"obs from the environment reaches 1e\+09"):
        for seen, _ in enumerate(iterate(run), 1):
            assert not reads or len(run.history) == run.iterations_launched == seen
    assert seen == (21 if reads else 31)
    steps = [64.0 * i for i in range(1, len(run.history) + 1)]
    assert run.history.column("steps").tolist() == steps
    with pytest.raises(ValueError, match="obs from"):  # nothing of it is saved
        after(20, spoiled(build(Config(**LONG)), at=18)).state_dict()


def test_rows_that_wait_share_their_time_and_are_those_of_launches_one_by_one(graphed):
    config = Config(**LONG, env_id="Pendulum-v1")
    plain = trained(build(config, Machine(graph=False)))
    graphed(Replayed)
    run = build(config)
    waiting = [run.launch.unread for _ in iterate(run)]
    assert waiting == [*range(1, 16), *[*range(8, 16)] * 3, 0]
    assert_same(run, plain)
    assert (np.diff(run.history.column("seconds")) > 0).all()


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"replay_updates": 0},
        {"encoder": "gru"},
        {"collect_precision": "fp8"},
    ],
    ids=str,
)
@ON_CUDA
def test_a_graph_trains_as_eager_launches_do(precision, fields):
    config = small(steps=20_480, eval_every=0, eval_episodes=50, precision=precision, **fields)
    machines = (Machine(device="cuda", graph=graph) for graph in (False, True))
    eager, graph = (trained(build(config, machine)) for machine in machines)
    torch.testing.assert_close(weights(graph), weights(eager))
    for name in ("loss", "grad_norm", "loss_scale", "skipped", "train_return"):
        ours, theirs = (run.history.column(name) for run in (graph, eager))
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"env_id": "Pendulum-v1"},
        {"formats": "weights=e4m3:stochastic v=e5m2"},
        {"collect_precision": "bf16"},
    ],
    ids=str,
)
def test_a_population_s_graphs_train_as_eager_launches_do(fields):
    names = ["fp32"] if "formats" in fields else ["fp32", "bf16", "fp16", "fp8"]
    shape = {"steps": 10_240, "eval_every": 0, "eval_episodes": 20, **fields}
    configs = [small(seed=seed, precision=name, **shape) for seed, name in enumerate(2 * names)]
    runs = (build_population(configs, "cuda", graph=graph) for graph in (False, True))
    eager, graph = map(trained, runs)
    torch.testing.assert_close(graph.model.theta, eager.model.theta)
    close = {"equal_nan": True, "rtol": 1e-3, "atol": 1e-4}
    for ours, theirs in zip(graph.histories(configs), eager.histories(configs), strict=True):
        for name in ("loss", "grad_norm", "loss_scale", "skipped", "train_return", "eval_return"):
            torch.testing.assert_close(ours.column(name), theirs.column(name), **close)


@pytest.mark.cuda
@CUDA
@ON_CUDA
def test_a_checkpoint_goes_from_cpu_to_cuda_and_back(precision, tmp_path):
    if precision not in available_precisions():
        pytest.skip("the CPU cannot run it")
    path = tmp_path / "checkpoint.pt"
    run = build(small(steps=20_480, eval_every=0, precision=precision))
    for machine in (Machine(device="cuda"), HERE, Machine(device="cuda", graph=False)):
        checkpoint.save(path, after(10, run))
        run = resumed(path, machine)
    history = trained(run).history
    assert len(history) == 40 and history.final_return >= 190
