import atexit
import contextlib
import csv
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from helpers import (
    PATIENCE,
    SIZED,
    after,
    cli_into,
    forked,
    numbers,
    refusal,
    refused,
    resumed,
    run_cli,
    small,
    trained,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.run_folder import FILES, MARK, Folder
from fp8rl.env import Cart
from fp8rl.history import ROW_MEANS
from fp8rl.losses import STATISTICS, actor_critic_loss, no_all_reduce, statistics_of
from fp8rl.machine import processes
from fp8rl.model import ActorCritic
from fp8rl.normalization import NETWORKS
from fp8rl.precision import Precision
from fp8rl.rollout import DUMMY, Rollout
from fp8rl.train import Learner, Run, iterate

# Tests of what two ranks found go to one worker, so that ranks are started once.
together = pytest.mark.xdist_group("forked")
QUICK = {"steps": 4 * 512, "eval_every": 0, "eval_episodes": 1, "seed": 1}
RUNS = {
    "replay": small(steps=7_680, eval_every=0, eval_episodes=50),
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


def columns_of(rollout: Rollout, keep) -> Rollout:
    return Rollout(*(None if x is None else x[:, keep] for x in rollout))


def learned(
    name: str, rollouts: list[Rollout], all_reduce=no_all_reduce
) -> tuple[torch.Tensor, list[float]]:
    """The weights, and the first losses, after updates on given rollouts."""
    torch.manual_seed(0)
    model = NETWORKS[GIVEN[name].encoder, False]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    learner = Learner(
        GIVEN[name].settled(Cart), model, Precision("fp32"), optimizer, all_reduce=all_reduce
    )
    losses = [learner.update(rollout).loss.loss.item() for rollout in rollouts]
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def own_normalization(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sums over ranks but for the advantages, which each rank normalizes by itself: count and sum,
    sum of squares, gradients."""
    size = processes.rank_and_size()[1]
    if len(tensors) == 2:
        return [*processes.all_reduce(tensors[:1]), size * tensors[1]]
    return [size * tensors[0]] if len(tensors) == 1 else processes.all_reduce(tensors)


def state_of(run: Run) -> dict:
    """The state of this rank's part of a run, and the weights."""
    return {**run.state_dict(), "model": weights(run)}


def drawn(run: Run) -> tuple[int, int, int]:
    """What the next random numbers are a function of."""
    return run.collector.seed, run.collector.rollouts, run.env.draws


@contextlib.contextmanager
def machine_with_a_gpu():
    """What torch's sources ask before processes join. By itself torch would join them for the GPU's
    tensors alone."""
    with (
        mock.patch.object(torch._C, "_get_accelerator", lambda: torch.device("cuda")),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        # Since nccl may not be built in
        mock.patch.dict(distributed.Backend.default_device_backend_map, cuda="gloo"),
    ):
        yield


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
    with machine_with_a_gpu():
        processes.start()
    group = weakref.ref(distributed.group.WORLD)
    found = {}
    for name, config in RUNS.items():
        run = trained(build(config))
        found[name] = weights(run), numbers(run)
    whole = torch.load(folder / "rollouts.pt", weights_only=False)
    each = whole[0].action.shape[1] // size
    parts = [columns_of(rollout, slice(rank * each, (rank + 1) * each)) for rollout in whole]
    for name in GIVEN:
        found["given", name] = learned(name, parts, processes.all_reduce)
    found["control"] = learned("normalized", parts, own_normalization)
    run = after(STOPPED, build(MORE))
    found["parts"] = {**state_of(run), "slices": run.sample().action.shape[1]}
    checkpoint.save(folder / "by-two.pt", run)
    found["whole"] = weights(trained(run)), numbers(run)
    for name in ("by-two", "by-one"):
        run = resumed(folder / f"{name}.pt")
        found[name, "state"], found[name, "numbers"] = state_of(run), drawn(run)
        found[name] = weights(trained(run)), numbers(run)
    found["gathered"] = processes.gather(torch.tensor([[rank, 2]], dtype=torch.bfloat16))
    found["sums"] = processes.all_reduce([torch.tensor(rank + 1), torch.full((2, 2), rank)])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        # Joined already; it leaves
        run_cli("train", "--steps", 1024, *SIZED, "--eval-episodes", 2, "--out", folder / "command")
    found["said"], found["left"] = said.getvalue(), group() is None
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
    checkpoint.save(folder / "by-one.pt", after(STOPPED, build(MORE)))
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
    own = {"ess", "min_logp", "min_ratio", "max_ratio", "eval_return"}  # of a rank's part
    for column in columns.keys() - own:
        np.testing.assert_array_equal(columns[column], others[column], column)
    steps = [config.steps_per_iteration * (i + 1) for i in range(config.iterations)]
    assert columns["steps"].tolist() == steps
    assert np.isfinite(columns["loss"]).all() and columns["nonfinite"].sum() == 0
    # Rank 0 evaluates
    assert np.isfinite(columns["eval_return"][-1]) and np.isnan(others["eval_return"]).all()
    assert name != "replay" or columns["eval_return"][-1] >= 195


@together
@pytest.mark.parametrize("name", GIVEN)
def test_two_ranks_learn_from_given_rollouts_what_one_process_does(name, two, rollouts):
    (first, losses), (second, others) = (found["given", name] for found in two)
    expected, whole = learned(name, rollouts)
    assert torch.equal(first, second)
    assert float((first - expected).abs().max()) < TOLERANCE
    np.testing.assert_allclose(np.add(losses, others), whole, rtol=1e-3, atol=1e-5)


@together
def test_normalizing_by_each_rank_s_own_deviation_would_be_noticed(two, rollouts):
    expected, _ = learned("normalized", rollouts)
    assert float((two[0]["control"][0] - expected).abs().max()) > 5 * TOLERANCE


@together
def test_sums_and_parts_of_every_dtype_are_joined(two):
    for found in two:
        assert found["gathered"].tolist() == [[0, 2], [1, 2]]
        assert [x.tolist() for x in found["sums"]] == [3, [[1, 1], [1, 1]]]


@together
def test_the_command_writes_one_run(two, folder):
    assert ["final greedy return" in found["said"] for found in two] == [True, False]
    out = folder / "command"
    assert {path.name for path in out.iterdir()} == {MARK, *FILES["train"]}
    with (out / "metrics.csv").open() as file:
        assert [row["steps"] for row in csv.DictReader(file)] == ["512", "1024"]
    assert json.loads((out / "config.json").read_text())["steps"] == 1024
    # The group is gone when the command leaves it. Whatever still refers to it would keep gloo's
    # threads while Python ends.
    assert all(found["left"] for found in two)


def shapes(content):
    """A checkpoint's structure: of a tensor its shape and type, of any other value its type."""
    if isinstance(content, torch.Tensor):
        return tuple(content.shape), content.dtype
    if isinstance(content, dict):
        return {name: shapes(value) for name, value in content.items()}
    return (
        [shapes(value) for value in content] if isinstance(content, list | tuple) else type(content)
    )


def test_ranks_and_seeds_draw_numbers_of_their_own(monkeypatch):
    found = []
    for seed in (0, 1):
        for rank in range(3):
            monkeypatch.setattr(processes, "rank_and_size", lambda rank=rank: (rank, 3))
            run = build(small(num_envs=15, batch_size=96, seed=seed))
            found += [run.collector.seed, *run.env.state.flatten().tolist()]
            assert run.collector.seed == seed or rank
    assert len(set(found)) == len(found)


def assert_whole(whole: dict, parts: list[dict]) -> None:
    """The states of ranks are parts of that of the whole run."""
    for name in ("env", "returns", "rewards", "ring"):
        for key, x in whole.get(name, {}).items():
            values = [part[name][key] for part in parts]
            if key == "clipped":
                joined = sum(values)
            else:
                joined = values[0] if key in ("clock", "square") else torch.cat(values)
            assert torch.equal(x, joined), (name, key)
    if whole["state"] is not None:
        assert torch.equal(whole["state"], torch.cat([part["state"] for part in parts]))


@together
def test_a_checkpoint_of_two_ranks_holds_the_whole(two, folder):
    names = ("one", "two")
    by_one, by_two = (torch.load(folder / f"by-{name}.pt", weights_only=True) for name in names)
    parts = [found["parts"] for found in two]
    assert by_one["config"] == by_two["config"] and shapes(by_one["run"]) == shapes(by_two["run"])
    assert int(by_two["run"]["ring"]["clock"][1]) == STOPPED * 32
    assert [part["slices"] for part in parts] == [8, 8]  # of 16 in a batch
    assert_whole(by_two["run"], parts)
    # They draw numbers of their own
    assert not torch.equal(parts[0]["env"]["state"], parts[1]["env"]["state"])


@together
def test_a_checkpoint_continues_with_as_many_ranks_bit_for_bit(two):
    for found in two:
        (expected, columns), (result, others) = found["whole"], found["by-two"]
        assert torch.equal(result, expected)
        for name, values in columns.items():  # the rows before are those that rank 0 saw
            np.testing.assert_array_equal(others[name][STOPPED:], values[STOPPED:], name)


@together
def test_a_checkpoint_continues_with_another_number_of_ranks(two, folder):
    names = ("by-one", "by-two")
    saved = [torch.load(folder / f"{name}.pt", weights_only=True)["run"] for name in names]
    alone_again = resumed(folder / "by-two.pt")
    assert_whole(saved[0], [found["by-one", "state"] for found in two])
    assert_whole(saved[1], [alone_again.state_dict()])
    assert drawn(alone_again) == (MORE.seed, STOPPED, STOPPED + 1)
    (seed, *those), (other, *others) = (found["by-one", "numbers"] for found in two)
    # As if they had always been two
    assert seed == MORE.seed != other and those == others == [STOPPED, STOPPED + 1]
    trained(alone_again)
    alone = weights(alone_again), numbers(alone_again)
    for result, columns in (*(found["by-one"] for found in two), alone):
        assert result.isfinite().all() and columns["steps"].tolist() == [512, 1024, 1536, 2048]


def test_the_parts_of_a_state_make_up_the_whole():
    shape = {"num_envs": 12, "rollout_length": 16, "slice_length": 16, "steps": 4 * 192}
    config = small(
        collect_precision="bf16", clip_by="learner", eval_every=0, eval_episodes=1, **shape
    )
    whole = after(2, build(config)).state_dict()
    whole["ring"]["clipped"] += 5  # as if a codec had
    for size in (2, 3):
        parts = []
        for rank in range(size):
            with mock.patch.object(processes, "rank_and_size", lambda own=(rank, size): own):
                parts.append(processes.part_of(whole))
        assert_whole(whole, parts)
        assert all(part["model"] is whole["model"] for part in parts)
        assert all(part["history"] is whole["history"] for part in parts)


def rollout_of(length: int, num_envs: int, seed: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    shape = (length, num_envs)
    kinds = torch.tensor([0, 0, 1, 2, DUMMY]).to(torch.uint8)
    return Rollout(
        torch.rand(length + 1, num_envs, 2, generator=generator),
        torch.randint(2, shape, generator=generator),
        torch.rand(shape, generator=generator),
        kinds[torch.randint(5, shape, generator=generator)],
        -torch.rand(shape, generator=generator),
    )


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=3),
    length=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradients_of_parts_add_up_to_the_whole_s(sizes, length, seed):
    whole = rollout_of(length, sum(sizes), seed)
    columns = zip(*(x.split(sizes, 1) for x in whole[:5]), strict=True)
    parts = [Rollout(*each) for each in columns]
    torch.manual_seed(seed)
    model = ActorCritic()
    # The deviation of a few nearly equal advantages is rounding itself
    normalized = bool(whole.valid.sum() >= 16)
    expected = loss_of(model, whole, normalized)
    # Sums over ranks happen in step: one at a time is answered with what the others give, found by
    # running all parts again and again.
    sums = []
    while True:
        asked = [[] for _ in parts]
        results = [
            loss_of(model, part, normalized, answering(sums, asks))
            for part, asks in zip(parts, asked, strict=True)
        ]
        if len(sums) == len(asked[0]):
            break
        asks = [each[len(sums)] for each in asked]
        sums.append([sum(tensors) for tensors in zip(*asks, strict=True)])
    # The mean of the advantages comes before their deviation from it
    assert len(sums) == (2 if normalized else 1)
    for whole_s, of_parts in zip(expected, zip(*results, strict=True), strict=True):
        torch.testing.assert_close(sum(of_parts), whole_s, rtol=1e-4, atol=1e-5)


def answering(sums: list, asks: list):
    """An `all_reduce` that notes what it is asked, and answers with the sums known so far."""

    def all_reduce(tensors):
        asks.append([x.detach() for x in tensors])
        return sums[len(asks) - 1] if len(asks) <= len(sums) else tensors

    return all_reduce


def loss_of(model, batch: Rollout, normalized: bool = True, all_reduce=no_all_reduce):
    """The loss, its gradient, and the statistics that add up."""
    logits, values = model(batch.obs)
    config = Config(gamma=0.99, entropy_coef=0.01, normalize_advantage=normalized)
    loss, measured = actor_critic_loss(logits, values, batch, config, all_reduce)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    names = ("policy_loss", "value_loss", "entropy", *ROW_MEANS)
    vector = torch.cat([x.flatten() for x in gradient])
    statistics = statistics_of(measured)
    return loss.detach(), vector, statistics[[STATISTICS.index(name) for name in names]]


def test_what_ranks_cannot_share_is_refused_before_a_run_is_replaced(tmp_path, monkeypatch, capsys):
    with Folder.create(tmp_path, "train", {}) as folder:
        folder.write("config.json", "precious")
    monkeypatch.setattr(processes, "rank_and_size", lambda: (0, 2))
    message = refusal(capsys, "train", "--num-envs=15", "--out", tmp_path, "--overwrite")
    assert message.startswith("num_envs is 15") and "multiple of 2" in message
    assert {path.name for path in tmp_path.iterdir()} == {MARK, "config.json"}
    assert (tmp_path / "config.json").read_text() == "precious"


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
    for device, gpus, remedy in (
        ("cuda", 1, "start at most 1 .--nproc-per-node"),
        ("cuda:1", 2, "use 'cuda'"),
    ):
        message = f"device is '{device}' and 2 processes share .*{remedy}"
        refused(message, joined, {"device": device}, gpus, monkeypatch)


# A training so long that it is always ended before
LONG = ["--steps", str(2000 * 512), *SIZED, "--eval-every", "0", "--eval-episodes", "1"]


def wait_for(condition: Callable[[], bool], is_alive: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not condition():
        assert is_alive() and time.monotonic() < began + PATIENCE
        time.sleep(0.05)


def ranks_of(process):
    """The processes that torchrun has started, by rank."""
    children = psutil.Process(process.pid).children(recursive=True)
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def test_a_killed_rank_ends_the_command_and_its_last_checkpoint_continues(tmp_path):
    out = tmp_path / "a"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "fp8rl", "train"]
    command += [*LONG, "--out", str(out), "--checkpoint-every", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for((out / "checkpoint.pt").exists, lambda: process.poll() is None)
        ranks = ranks_of(process)
        ranks[1].send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode not in (0, None)
    assert "fp8rl: rank 0 of 2 lost the others" in errors and "resume from" in errors
    for child in ranks.values():
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    names = {MARK, "checkpoint.pt", "config.json", "metrics.csv"}
    assert {path.name for path in out.iterdir() if path.suffix != ".tmp"} == names
    run = resumed(out / "checkpoint.pt")
    done = len(run.history)
    assert run.env.num_envs == 16 and 0 < done < run.config.iterations
    run = next(iterate(run))
    assert run.history.last["iteration"] == done and np.isfinite(run.history.last["loss"])


def train_as_rank(rank: int, port: int, said: Path, *arguments) -> None:
    set_rank(rank, 2, port)
    cli_into(said, "train", *arguments)


@together
def test_a_signal_to_one_rank_ends_all_and_leaves_one_checkpoint(tmp_path):
    """Without torchrun, whose own handling of signals is not under test."""
    out = tmp_path / "a"
    metrics = out / "metrics.csv"

    def has_begun() -> bool:
        return metrics.exists() and len(metrics.read_text().splitlines()) >= 10

    port = free_port()
    said = [tmp_path / f"rank-{rank}" for rank in range(2)]
    ranks = [
        forked(train_as_rank, rank, port, path, *LONG, "--out", out)
        for rank, path in enumerate(said)
    ]
    wait_for(has_begun, lambda: all(rank.is_alive() for rank in ranks))
    ranks[1].terminate()
    for rank in ranks:
        rank.join(PATIENCE)
    assert [rank.exitcode for rank in ranks] == [128 + signal.SIGTERM] * 2
    assert f"continue with train --resume {out}" in said[0].read_text()
    run = resumed(out / "checkpoint.pt")
    assert 0 < len(run.history) < 2000 and run.env.num_envs == 16
