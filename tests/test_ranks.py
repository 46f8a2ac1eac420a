import atexit
import contextlib
import csv
import dataclasses
import io
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from fp8rl import __main__ as cli
from fp8rl import checkpoint, ranks
from fp8rl import config as config_module
from fp8rl import train as train_module
from fp8rl.losses import DUMMY, Rollout, actor_critic_loss
from fp8rl.model import ActorCritic
from fp8rl.replay import LAYOUTS, ReplayBuffer
from fp8rl.train import Config, History, check_share, iterate, train

# Of the weights after 40 updates. Sums in another order move them by 1e-7; a ReLU that stands within that of its kink can move a
# gradient by 1e-5, and the weights by up to 2e-4 after 100 updates. Advantages normalized by each rank's own standard deviation,
# the mistake that is easily made, move them by 8e-4 to 2e-2 in eight seeds, the one below most.
TOLERANCE = 2e-4
QUICK = {"eval_every": 0, "eval_episodes": 1, "seed": 1}
RUNS = {
    "replay": Config(steps=20 * 512, **QUICK),
    "on-policy": Config(steps=10 * 512, replay_updates=0, **QUICK),
    "gru": Config(steps=4 * 512, codec="int8", encoder="gru", **QUICK),
    "ahead": Config(steps=4 * 512, hide_velocity=True, placement=config_module.Placement(async_collect=True), **QUICK),
    "few slices": Config(steps=6 * 512, batch_size=32, fresh_updates=0, **QUICK),
    "fp8": Config(steps=4 * 512, num_envs=32, precision="fp8", **QUICK),
    "gym": Config(steps=4 * 512, env_id="CartPole-v1", **QUICK),
}
STOPPED = 2


def weights(history: History) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(history.model.parameters()).detach()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def own_normalization(size: int):
    """The loss with advantages that each of `size` ranks normalizes by itself."""

    def loss(*arguments, total, **settings):
        return actor_critic_loss(*arguments, total=lambda x: torch.cat((total(x[:1]), size * x[1:])), **settings)

    return loss


def trained(path) -> dict[str, History]:
    """What the runs leave; one of them writes its checkpoint half way."""
    found = {}
    for name, config in RUNS.items():
        for history in iterate(config):
            if name == "gru" and len(history) == STOPPED:
                checkpoint.save(path, history)
        found[name] = history
    return found


def resumed(path) -> torch.Tensor:
    config, start = checkpoint.resume(path)
    return weights(train(config, progress=False, start=start))


@contextlib.contextmanager
def machine_with_a_gpu():
    """What torch's sources ask before processes join. By itself torch would join them for the GPU's tensors alone."""
    with (
        mock.patch.object(torch._C, "_get_accelerator", lambda: torch.device("cuda")),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.dict(distributed.Backend.default_device_backend_map, cuda="gloo"),  # since nccl may not be built in
    ):
        yield


def work(rank: int, size: int, port: int, folder) -> None:
    """What one of two ranks does for all tests here: starting them takes longest."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with machine_with_a_gpu():
        ranks.start(RUNS["replay"])
    group = weakref.ref(distributed.group.WORLD)
    found = {name: (weights(history), history.columns) for name, history in trained(folder / "by-two.pt").items()}
    found["by two, on two"], found["by one, on two"] = resumed(folder / "by-two.pt"), resumed(folder / "by-one.pt")
    train_module.actor_critic_loss = own_normalization(size)
    found["control"] = weights(train(RUNS["replay"], progress=False))
    train_module.actor_critic_loss = actor_critic_loss
    found["gathered"] = ranks.gather(torch.tensor([[rank, 2]], dtype=torch.bfloat16), dim=1)
    found["total"] = ranks.total(torch.tensor(rank + 1))
    sys.argv = ["fp8rl", "train", "--steps", "1024", "--eval-episodes", "2", "--out", str(folder / "command")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.main()  # joined already; it leaves
    found["said"], found["left"] = said.getvalue(), group() is None
    torch.save(found, folder / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def one(folder):
    """What one process makes of the runs."""
    return trained(folder / "by-one.pt")


@pytest.fixture(scope="module")
def two(one, folder):
    """What each of two ranks found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, 2, port, folder), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "fp8"])
def test_two_ranks_compute_what_one_process_does(one, two, name):
    (first, columns), (second, _) = (found[name] for found in two)
    assert torch.equal(first, second)
    assert distance(first, weights(one[name])) < TOLERANCE
    for column in ("train_return", "loss", "policy_loss", "value_loss", "entropy", "grad_norm", "learning_rate", "steps"):
        np.testing.assert_allclose(columns[column], one[name].columns[column], rtol=1e-3, atol=1e-4)
    assert np.isfinite(columns["ess"]).mean() > 0.3  # of a share's rows, if it has any


def test_other_normalizations_and_seeds_are_told_apart(one, two):
    assert distance(two[0]["control"], weights(one["replay"])) > 5 * TOLERANCE
    other = train(dataclasses.replace(RUNS["replay"], seed=2), progress=False)
    assert distance(weights(other), weights(one["replay"])) > 5 * TOLERANCE


def test_fp8_trains_on_two_ranks_alike(two):
    """Their scales are those of the shares, so the numbers are others than one process's, but the same on both."""
    (first, columns), (second, _) = (found["fp8"] for found in two)
    assert torch.equal(first, second) and first.isfinite().all() and sum(columns["nonfinite"]) == 0


def test_sums_and_parts_of_every_dtype_are_joined(two):
    for found in two:
        assert found["total"] == 3 and found["gathered"].tolist() == [[0, 2, 1, 2]]


def test_the_command_writes_one_run(two, folder):
    assert ["final greedy return" in found["said"] for found in two] == [True, False]
    out = folder / "command"
    assert sorted(path.name for path in out.iterdir()) == sorted(cli.OUTPUTS[:4])
    with (out / "metrics.csv").open() as file:
        assert [row["steps"] for row in csv.DictReader(file)] == ["512", "1024"]
    assert json.loads((out / "config.json").read_text())["steps"] == 1024


def test_no_thread_of_the_group_is_left_to_abort_the_process(two):
    """It is gone when the command leaves it. Whatever still refers to it would keep gloo's threads while Python ends."""
    assert all(found["left"] for found in two)


def shapes(content):
    """A checkpoint's structure: of a tensor its shape and type, of any other value its type."""
    if isinstance(content, torch.Tensor):
        return tuple(content.shape), content.dtype
    if isinstance(content, dict):
        return {name: shapes(value) for name, value in content.items()}
    return [shapes(value) for value in content] if isinstance(content, list | tuple) else type(content)


def test_a_checkpoint_of_two_ranks_holds_the_whole(two, folder):
    by_one, by_two = (torch.load(folder / f"by-{name}.pt", weights_only=True) for name in ("one", "two"))
    assert shapes(by_one) == shapes(by_two)
    one, two = by_one["run"], by_two["run"]
    assert int(one["ring"]["clock"][1]) == STOPPED * 32
    for run in (one, two):  # the open row holds no more than its observation
        run["ring"] |= {name: run["ring"][name][:, :-1] for name in ("action", "reward", "flags", "behavior_logp")}
    for name in ("env", "memory", "open_returns", "ring", "generators"):
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=TOLERANCE)


def test_a_checkpoint_goes_on_with_any_number_of_ranks(one, two, folder):
    expected = weights(one["gru"])
    results = [found[name] for found in two for name in ("by two, on two", "by one, on two")]
    for result in [*results, resumed(folder / "by-two.pt")]:
        assert distance(result, expected) < TOLERANCE
    assert torch.equal(two[0]["by two, on two"], two[0]["gru"][0])  # as if it had never stopped


def rollout_of(length: int, num_envs: int, seed: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    shape = (length, num_envs)
    flags = torch.tensor([0, 0, 1, 2, DUMMY]).to(torch.uint8)[torch.randint(5, shape, generator=generator)]
    obs = torch.rand(length + 1, num_envs, 2, generator=generator)
    action = torch.randint(2, shape, generator=generator)
    return Rollout(obs, action, torch.rand(shape, generator=generator), flags, -torch.rand(shape, generator=generator))


def columns_of(rollout: Rollout, keep) -> Rollout:
    return Rollout(*(None if x is None else x[:, keep] for x in rollout))


@given(
    parts=st.integers(1, 4),
    each=st.integers(1, 3),
    slices=st.integers(1, 40),
    length=st.integers(1, 6),
    appends=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
)
def test_the_rings_of_all_ranks_draw_what_one_ring_would(parts, each, slices, length, appends, layout, seed):
    whole = ReplayBuffer(16, parts * each, layout=layout)
    rings = [ReplayBuffer(16, each, layout=layout) for _ in range(parts)]
    for i in range(appends):
        rollout = rollout_of(7, parts * each, seed + i)
        whole.append(rollout)
        for k, ring in enumerate(rings):
            ring.append(columns_of(rollout, slice(k * each, (k + 1) * each)))
    generators = [torch.Generator().manual_seed(seed) for _ in range(parts + 1)]
    expected = whole.sample(slices, length, generators[-1])
    drawn = [ring.sample(slices, length, generators[k], (k, parts)) for k, ring in enumerate(rings)]
    assert all(torch.equal(generator.get_state(), generators[-1].get_state()) for generator in generators)
    # Which rank holds a drawn slice, told again from the same random numbers.
    again = torch.Generator().manual_seed(seed)
    torch.randint(whole.size - length + 1, (slices,), generator=again)
    holder = torch.randint(parts * each, (slices,), generator=again) // each
    for k, batch in enumerate(drawn):
        own = (holder == k).nonzero().squeeze(-1)
        for x, y in zip(columns_of(batch, slice(len(own)))[:5], columns_of(expected, own)[:5], strict=True):
            assert torch.equal(x, y)
        if parts > 1:
            assert not batch.valid[:, len(own) :].any()
            assert batch.action.shape[1] % 16 == 0 and 0 < batch.action.shape[1] < len(own) + 17

    # The loss and its gradient on the parts add up to those on the whole. Sums over ranks happen in step: one at a time is
    # answered with what the others give, found by running all parts again and again.
    torch.manual_seed(seed)
    model = ActorCritic()
    normalized = bool(expected.valid.sum() >= 16)  # the deviation of a few nearly equal advantages is rounding itself
    loss, gradient, stats = loss_of(model, expected, normalized)
    sums, asked = [], [[] for _ in drawn]
    while True:
        asked = [[] for _ in drawn]
        results = [loss_of(model, batch, normalized, answering(sums, asks)) for batch, asks in zip(drawn, asked, strict=True)]
        if len(sums) == len(asked[0]):
            break
        sums.append(sum(asks[len(sums)] for asks in asked))
    assert len(sums) == 1  # one message: the rows, and what the mean and variance of the advantages are made of
    torch.testing.assert_close(sum(result[0] for result in results), loss)
    torch.testing.assert_close(sum(result[1] for result in results), gradient, rtol=1e-4, atol=1e-5)
    for name in ("policy_loss", "value_loss", "entropy"):
        torch.testing.assert_close(sum(result[2][name] for result in results), stats[name], rtol=1e-4, atol=1e-5)


def answering(sums: list, asks: list):
    """A `total` that notes what it is asked, and answers with the sums known so far."""

    def total(x):
        asks.append(x.detach())
        return sums[len(asks) - 1] if len(asks) <= len(sums) else x

    return total


def loss_of(model, batch: Rollout, normalized: bool = True, total=lambda x: x):
    logits, values = model(batch.obs)
    settings = {"gamma": 0.95, "lam": 0.95, "value_coef": 0.5, "entropy_coef": 0.01, "total": total}
    settings["normalize_advantage"] = normalized
    loss, stats = actor_critic_loss(logits, values, batch, **settings)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([x.flatten() for x in gradient]), stats


@pytest.mark.parametrize(
    "fields, size, message",
    [
        ({"num_envs": 15}, 2, "num_envs is 15 and 2 processes share the work: give a multiple of 2"),
        ({"num_envs": 1}, 3, "num_envs is 1 and 3 processes share the work: give a multiple of 3"),
        ({"memmap": "ring"}, 2, "memmap is ring and 2 processes share the work: leave it out"),
        ({"graph": True}, 2, "graph is True and 2 processes share the work: leave it out"),
        ({"precision": "fp8"}, 2, "num_envs is 16 and 2 processes share the work: give a multiple of 32 for fp8"),
    ],
)
def test_what_ranks_cannot_share_is_refused_in_one_line(fields, size, message, tmp_path, monkeypatch, capsys):
    config = Config(**fields)
    check_share(config, 1)
    with pytest.raises(ValueError) as caught:
        check_share(config, size)
    assert str(caught.value) == message
    # The command refuses it before it replaces a run or makes a ring.
    (tmp_path / "metrics.csv").write_text("precious")
    monkeypatch.setattr(ranks, "share", lambda: (0, size))
    monkeypatch.chdir(tmp_path)
    options = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in fields.items()]
    monkeypatch.setattr(sys, "argv", ["fp8rl", "train", *options, "--out", str(tmp_path), "--overwrite"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == f"fp8rl: {message}\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("metrics.csv", "precious")]


GPU = {"device": "cuda"}
LEARN = {"placement": config_module.Placement(learn="cuda")}


def joined(config, gpus: int, processes: int, monkeypatch) -> list:
    """What the second of some processes of a machine would do to join the others."""
    did = []
    for name, value in {"WORLD_SIZE": 2 * processes, "LOCAL_WORLD_SIZE": processes, "RANK": 1, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", did.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(atexit, "register", did.append)
    monkeypatch.setattr(distributed, "init_process_group", did.append)
    ranks.start(config)
    return did


@pytest.mark.parametrize(
    "fields, gpus, did",
    [
        ({}, 0, [ranks.stop, "gloo"]),
        ({}, 1, [ranks.stop, "gloo"]),  # more processes than GPUs, which none of them uses
        (GPU, 2, [1, ranks.stop, "cpu:gloo,cuda:nccl"]),
        (LEARN, 2, [1, ranks.stop, "cpu:gloo,cuda:nccl"]),
        (GPU, 0, [ranks.stop, "gloo"]),  # Config refuses it
    ],
)
def test_processes_join_over_what_their_tensors_need(fields, gpus, did, monkeypatch):
    assert joined(cli.Fields(**fields), gpus, 2, monkeypatch) == did


@pytest.mark.parametrize(
    "fields, gpus, processes, message",
    [
        (GPU, 1, 2, "device is 'cuda' and 2 processes share 1 GPU: start at most 1 (--nproc-per-node) or use the CPU"),
        (
            LEARN,
            2,
            3,
            "placement.learn is 'cuda' and 3 processes share 2 GPUs: start at most 2 (--nproc-per-node) or use the CPU",
        ),
        (
            {"device": "cuda:1"},
            2,
            2,
            "device is 'cuda:1' and 2 processes share 2 GPUs: give 'cuda', a GPU of its own for each",
        ),
    ],
)
def test_processes_without_a_gpu_each_are_refused_in_one_line(fields, gpus, processes, message, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError) as caught:
        joined(cli.Fields(**fields), gpus, processes, monkeypatch)
    assert str(caught.value) == message
    options = ["--device", fields["device"]] if "device" in fields else ["--learn", "cuda"]
    monkeypatch.setattr(sys, "argv", ["fp8rl", "train", *options, "--out", str(tmp_path / "a")])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == f"fp8rl: {message}\n" and not (tmp_path / "a").exists()


def test_a_share_without_a_row_has_no_effective_size():
    few = {name: torch.tensor(0.0) for name in ("loss", "policy_loss", "value_loss", "entropy", "min_logp", "grad_norm")}
    few |= {"skipped": torch.tensor(False), "loss_scale": torch.tensor(1.0)}
    stats = [few | {"ess": torch.tensor(ess)} for ess in (0.5, torch.nan)]
    assert train_module._summarize(stats)["ess"] == 0.5
    assert np.isnan(train_module._summarize(stats[1:])["ess"])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fp8rl", "train"]


def test_a_killed_rank_ends_the_command_and_its_last_checkpoint_goes_on(tmp_path):
    out = tmp_path / "a"
    options = ["--steps", str(2000 * 512), "--eval-every", "0", "--eval-episodes", "1", "--checkpoint-every", "1"]
    command = [*TORCHRUN, *options, "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        began = time.monotonic()
        while not (out / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < began + 60:
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        second = [child for child in children if child.environ().get("RANK") == "1"]
        assert len(second) == 1
        second[0].send_signal(signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "fp8rl: rank 0 of 2 lost the others (" in errors and "): resume from the last checkpoint" in errors
    assert "terminate called" not in errors
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".tmp") == ["checkpoint.pt", "config.json", "metrics.csv"]
    config, start = checkpoint.resume(out / "checkpoint.pt")
    assert config.num_envs == 16 and len(start["open_returns"]) == 16 and 0 < start["iteration"] < config.iterations
    history = next(iterate(config, start=start))
    assert history.last["iteration"] == start["iteration"] and np.isfinite(history.last["loss"])
