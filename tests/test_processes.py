import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from helpers import (
    PATIENCE,
    SIZED,
    after,
    forked,
    refused,
    resumed,
    small,
    trained,
    weights,
)
from torch import distributed

from fp8rl.build import build
from fp8rl.disk import checkpoint
from fp8rl.env import Cart
from fp8rl.losses import LossCoefficients, no_all_reduce
from fp8rl.machine import processes
from fp8rl.normalization import NETWORKS
from fp8rl.precision import Precision
from fp8rl.returns import RewardScale
from fp8rl.rollout import Rollout
from fp8rl.train import Learner, Run

# Tests of what two ranks found go to one worker, so that ranks are started once.
together = pytest.mark.xdist_group("forked")
QUICK = {"steps": 4 * 512, "eval_every": 0, "eval_episodes": 1, "seed": 1}
RUNS = {
    "replay": small(**QUICK),
    "gru": small(**QUICK, encoder="gru", hide_velocity=True),
    "fp8": small(**QUICK, precision="fp8", batch_size=64, fresh_updates=0),
    "fp16": small(**QUICK, precision="fp16", replay_updates=0),
}
STOPPED, MORE = 2, small(**QUICK, codec="int8", encoder="gru")
# Updates on given rollouts. Sums in another order move the weights by 1e-7; where a ReLU stands
# within that of its kink, by somewhat more. Advantages normalized by each rank's own mean and
# deviation, the mistake that is easily made, move them by 1e-3.
TOLERANCE = 1e-4
GIVEN = {
    "plain": small(normalize_advantage=False),
    "normalized": small(),
    "gru": small(encoder="gru"),
}


def numbers(run: Run) -> dict[str, np.ndarray]:
    return {name: run.history.column(name) for name in run.history.columns if name != "seconds"}


def columns_of(rollout: Rollout, keep) -> Rollout:
    return Rollout(*(None if x is None else x[:, keep] for x in rollout))


def learned(
    name: str, rollouts: list[Rollout], all_reduce=no_all_reduce
) -> tuple[torch.Tensor, list[float]]:
    """The weights, and the first losses, after updates on given rollouts."""
    torch.manual_seed(0)
    model = NETWORKS[GIVEN[name].encoder, False]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    settings = LossCoefficients.of(GIVEN[name].settled(Cart)), model, Precision("fp32"), optimizer
    scale = RewardScale(rollouts[0].reward.shape[1])
    learner = Learner(*settings, scale, all_reduce=all_reduce)
    losses = [learner.update(rollout).loss.loss.item() for rollout in rollouts]
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def set_rank(rank: int, size: int, port: int) -> None:
    """Tells this process what torchrun tells those that it starts."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def work(rank: int, size: int, port: int, folder) -> None:
    """What one of two ranks does for most tests here: starting them takes longest."""
    set_rank(rank, size, port)
    processes.start()
    found = {}
    for name, config in RUNS.items():
        run = trained(build(config))
        found[name] = weights(run), numbers(run)
    whole = torch.load(folder / "rollouts.pt", weights_only=False)
    each = whole[0].action.shape[1] // size
    parts = [columns_of(rollout, slice(rank * each, (rank + 1) * each)) for rollout in whole]
    for name in GIVEN:
        found["given", name] = learned(name, parts, processes.all_reduce)
    run = after(STOPPED, build(MORE))
    found["slices"] = run.sample().action.shape[1]
    checkpoint.save(folder / "by-two.pt", run)
    found["whole"] = weights(trained(run)), numbers(run)
    run = resumed(folder / "by-two.pt")
    found["by-two"] = weights(trained(run)), numbers(run)
    torch.save(found, folder / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def rollouts():
    """What rollouts of a run that learns were."""
    run, found = build(small()), []
    for _ in range(12):
        found.append(run.collect())
        run.learner.update(found[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, rollouts):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(rollouts, folder / "rollouts.pt")
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """What each of two ranks found."""
    port = free_port()
    processes = [forked(work, rank, 2, port, folder) for rank in range(2)]
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@together
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_one_agent(name, two):
    (first, columns), (second, others) = (found[name] for found in two)
    config = RUNS[name]
    assert torch.equal(first, second) and first.isfinite().all()
    assert not torch.equal(first, weights(build(config)))
    own = {"ess", "min_logp", "min_ratio", "max_ratio"}  # of a rank's part
    for column in columns.keys() - own:
        np.testing.assert_array_equal(columns[column], others[column], column)
    assert columns["steps"].tolist() == [512, 1024, 1536, 2048]
    assert np.isfinite(columns["loss"]).all() and columns["nonfinite"].sum() == 0
    assert np.isfinite(columns["eval_return"][-1])


@together
@pytest.mark.parametrize("name", GIVEN)
def test_two_ranks_learn_from_given_rollouts_what_one_process_does(name, two, rollouts):
    (first, losses), (second, others) = (found["given", name] for found in two)
    expected, whole = learned(name, rollouts)
    assert torch.equal(first, second)
    assert float((first - expected).abs().max()) < TOLERANCE
    np.testing.assert_allclose(np.add(losses, others), whole, rtol=1e-3, atol=1e-5)


@together
def test_a_checkpoint_continues_with_as_many_ranks_bit_for_bit(two):
    assert [found["slices"] for found in two] == [8, 8]  # of 16 in a batch
    for found in two:
        (expected, columns), (result, others) = found["whole"], found["by-two"]
        assert torch.equal(result, expected)
        for name, values in columns.items():  # the rows before are those that rank 0 saw
            np.testing.assert_array_equal(others[name][STOPPED:], values[STOPPED:], name)


@together
def test_a_checkpoint_continues_only_with_as_many_ranks(two, folder):
    refused("resume is of 2 processes and not of 1: start as many", resumed, folder / "by-two.pt")
    alone = after(1, build(small())).state_dict()
    with mock.patch.object(processes, "rank_and_size", lambda: (0, 2)):
        refused("resume is of 1 processes", processes.state_of_rank, alone)


def joined(devices: dict[str, str], gpus: int, monkeypatch) -> list:
    """What the second of two processes of a machine would do to join the others."""
    did = []
    for name, value in {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(atexit, "register", did.append)
    monkeypatch.setattr(distributed, "init_process_group", did.append)
    processes.start(devices)
    return did


def test_processes_join_over_what_their_tensors_need(monkeypatch):
    both = [1, processes.stop, "cpu:gloo,cuda:nccl"]
    for devices, gpus, did in (
        ({"device": "cpu"}, 0, [processes.stop, "gloo"]),
        ({"device": "cpu"}, 1, [processes.stop, "gloo"]),  # a GPU that neither uses
        ({"device": "cuda"}, 2, both),
        ({"device": "cpu", "evaluate_device": "cuda"}, 2, both),
    ):
        assert joined(devices, gpus, monkeypatch) == did
    for device, gpus in (("cuda", 1), ("cuda:1", 2)):
        message = f"device is '{device}' and 2 processes share .*use 'cuda' .*at most {gpus} "
        refused(message, joined, {"device": device}, gpus, monkeypatch)


# A training so long that it is always ended before


def ranks_of(process):
    """The processes that torchrun has started, by rank."""
    children = psutil.Process(process.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def test_a_killed_rank_ends_the_command_and_leaves_its_last_checkpoint(tmp_path):
    out = tmp_path / "a"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "fp8rl", "train", "--out", str(out)]
    # A training so long that it is always ended before
    command += ["--steps", str(2000 * 512), *SIZED, "--eval-every", "0", "--eval-episodes", "1"]
    with subprocess.Popen(
        [*command, "--checkpoint-every", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        began = time.monotonic()
        while not (out / "metrics.csv").exists():
            assert process.poll() is None and time.monotonic() < began + PATIENCE
            time.sleep(0.05)
        ranks = ranks_of(process)
        ranks[1].send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode not in (0, None)
    assert b"fp8rl: rank 0 of 2 lost the others" in errors and b"resume from" in errors
    for child in ranks.values():
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    config, state = checkpoint.resume(out / "checkpoint.pt")
    assert len(state["ranks"]) == 2 and 0 < len(state["history"]["loss"]) < config.iterations
