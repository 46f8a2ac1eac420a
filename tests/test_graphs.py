import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fp8rl import checkpoint, fp8
from fp8rl import train as train_module
from fp8rl.env import BatchedEnv
from fp8rl.precision import Precision, available_precisions
from fp8rl.train import Config, collect, iterate, train, update

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def weights(history) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(history.model.parameters())


def captured(config: Config, between=lambda rollout: None) -> dict[str, torch.Tensor]:
    """What a graph would capture, on fake tensors of the CPU: they have no values, so asking for one raises."""
    with FakeTensorMode():
        precision = Precision(config.precision)
        model = config.network()
        if precision.is_fp8:
            fp8.convert_linears(model)  # what prepare does, without moving to a device, which fake modules cannot
        env = BatchedEnv(config.num_envs, config.start_noise)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        held = env.tensors()
        rollout = collect(model, env, config.rollout_length, precision, None)
        between(rollout)
        env.settle(held)
        update(model, optimizer, precision, rollout, config)
        return update(model, optimizer, precision, rollout, config)  # now with a state and a scale that exist


@pytest.mark.parametrize("fields", [*({"precision": name} for name in available_precisions()), {"encoder": "gru"}], ids=str)
def test_nothing_in_a_graph_asks_the_host(fields):
    assert captured(Config(**fields))["loss"].shape == ()


def test_a_question_to_the_host_would_be_noticed():
    with pytest.raises(DataDependentOutputException):
        captured(Config(), between=train_module._check_finite)


@pytest.mark.parametrize("reuse_forward", [False, True])
def test_on_the_cpu_the_same_function_runs_without_a_graph(reuse_forward):
    config = Config(steps=4_096, eval_every=0, eval_episodes=5, encoder="gru", replay_updates=2, reuse_forward=reuse_forward)
    assert torch.equal(*(weights(train(dataclasses.replace(config, graph=graph), progress=False)) for graph in (False, True)))


class Replayed:
    """Stands in for Graphed on the CPU: runs the function, and gives its results in the very objects that it gave at first."""

    def __init__(self, function, generator):
        self.function, self.first = function, None

    def __call__(self, *batches):
        results = self.function(*batches)
        if self.first is None:
            self.first = results
        leaves = [torch.utils._pytree.tree_leaves(x) for x in (self.first, results)]
        for kept, new in zip(*leaves, strict=False):  # the first ones may have grown
            if isinstance(kept, torch.Tensor):
                kept.copy_(new)
        return self.first


def test_results_that_the_next_replay_overwrites_are_used_before(monkeypatch):
    config = Config(steps=5_120, eval_every=0, eval_episodes=5, replay_updates=2)
    plain = train(config, progress=False)
    monkeypatch.setattr(train_module, "GRAPHED", ("cpu",))
    monkeypatch.setattr(train_module, "Graphed", Replayed)
    replayed = train(dataclasses.replace(config, graph=True), progress=False)
    assert torch.equal(weights(plain), weights(replayed))
    for name, values in plain.columns.items():
        assert name == "seconds" or np.array_equal(values, replayed.columns[name], equal_nan=True), name


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize(
    "fields", [{}, {"replay_updates": 0, "reuse_forward": True}, {"replay_updates": 2}, {"encoder": "gru"}], ids=str
)
@pytest.mark.parametrize("precision", available_precisions("cuda") if torch.cuda.is_available() else ["fp32"])
def test_a_graph_trains_as_eager_launches_do(precision, fields):
    if precision.startswith("fp8") and fields.get("encoder") == "gru":
        pytest.skip("its matmuls want more environments")
    config = Config(steps=20_480, eval_every=0, eval_episodes=50, device="cuda", precision=precision, **fields)
    eager, graph = (train(dataclasses.replace(config, graph=graph), progress=False) for graph in (False, True))
    torch.testing.assert_close(weights(graph), weights(eager))
    for name in ("loss", "grad_norm", "loss_scale", "skipped", "train_return"):
        torch.testing.assert_close(graph.column(name), eager.column(name), equal_nan=True, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@CUDA
def test_the_scaler_works_inside_the_graph():
    config = Config(steps=102_400, eval_every=0, device="cuda", precision="fp16", graph=True)
    history = train(config, progress=False)
    scales = history.column("loss_scale")
    assert scales.max() > 2.0**16 and history.final_return >= 195  # it has grown


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("precision", available_precisions("cuda") if torch.cuda.is_available() else ["fp32"])
def test_a_checkpoint_goes_from_cpu_to_cuda_and_back(precision, tmp_path):
    if precision not in available_precisions():
        pytest.skip("the CPU cannot run it")
    path, config, start = tmp_path / "checkpoint.pt", Config(steps=20_480, eval_every=0, precision=precision), None
    for device, graph in (("cuda", True), ("cpu", False), ("cuda", False)):
        checkpoint.save(path, next(itertools.islice(iterate(config, start=start), 9, None)))  # ten iterations on
        config, start = checkpoint.resume(path, device=device, graph=graph)
    history = train(config, False, start)
    assert len(history) == 40 and history.final_return >= 190
