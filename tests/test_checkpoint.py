import copy
import dataclasses
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fp8rl import __main__ as cli
from fp8rl import checkpoint
from fp8rl.model import ActorCritic
from fp8rl.train import Config, History, iterate, train


@pytest.fixture
def history():
    return History(Config(precision="fp8", seed=3), ActorCritic())


@pytest.fixture
def path(tmp_path, history):
    checkpoint.save(tmp_path / "checkpoint.pt", history)
    return tmp_path / "checkpoint.pt"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-code-ran",)


def test_round_trip(path, history):
    model, config = checkpoint.load(path)
    assert config == history.config
    for name, tensor in history.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_model_is_a_plain_state_dict(path, history):
    assert torch.load(path, weights_only=True)["model"].keys() == history.model.state_dict().keys()


def test_a_failed_save_leaves_the_old_checkpoint(path, history, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", lambda content, file: file.write(b"half of i") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save(path, history)
    assert path.read_bytes() == before


def broken(kind: str, path) -> None:
    content = torch.load(path, weights_only=True)
    del content["digest"]
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:1000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hostile":
        path.write_bytes(pickle.dumps(Hostile(), protocol=2))  # torch's own; it warns of newer ones
    elif kind == "hostile inside":
        torch.save({**content, "config": Hostile()}, path)
    elif kind == "another program's":
        checkpoint._write(path, {"state_dict": content["model"]})
    elif kind == "another architecture's":
        checkpoint._write(path, {**content, "model": ActorCritic(width=32).state_dict()})
    elif kind == "another version's":
        checkpoint._write(path, {**content, "config": {**content["config"], "no_such_field": 1}})
    elif kind == "edited":
        torch.save({**content, "digest": "0" * 64}, path)


@pytest.mark.parametrize(
    "kind",
    [
        "cut short",
        "empty",
        "hostile",
        "hostile inside",
        "another program's",
        "another architecture's",
        "another version's",
        "edited",
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(kind, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    broken(kind, path)
    with pytest.raises(ValueError, match=r"checkpoint .*checkpoint\.pt (cannot be read|is not of format|does not fit)") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "hostile-code-ran").exists()


def test_a_precision_that_cannot_run_here_is_named_and_can_be_changed(path):
    content = torch.load(path, weights_only=True)
    del content["digest"]
    checkpoint._write(path, {**content, "config": {**content["config"], "precision": "fp7"}})
    with pytest.raises(ValueError, match=r"checkpoint .*checkpoint\.pt: precision is 'fp7'"):
        checkpoint.load(path)
    assert checkpoint.load(path, precision="fp32")[1].precision == "fp32"


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt does not exist"):
        checkpoint.load(tmp_path / "nothing.pt")


SHORT = {"steps": 4_096, "eval_every": 1_024, "eval_episodes": 3, "seed": 5}


def numbers(history) -> dict[str, list]:
    return {name: list(values) for name, values in history.columns.items() if name != "seconds"}


def same(one: History, other: History) -> bool:
    weights = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return (
        numbers(one).keys() == numbers(other).keys()
        and all(torch.equal(x, y) for x, y in weights)
        and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(numbers(one).values(), numbers(other).values(), strict=True))
    )


@pytest.mark.parametrize(
    "fields",
    [
        *({"precision": name} for name in ("fp32", "bf16", "fp16", "fp8")),
        {"precision": "fp8", "collect_precision": "bf16", "encoder": "gru", "hide_velocity": True},
        {"codec": "int8", "layout": "delta", "capacity": 1_000, "extra_features": 2},  # the ring wraps around
        {"importance": "learner", "collect_precision": "fp8", "fresh_updates": 0, "replay_updates": 2},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(fields, tmp_path):
    config = Config(**SHORT, **fields)
    whole = train(config, progress=False)
    for stop in (1, 6):
        history = next(itertools.islice(iterate(config), stop - 1, None))
        checkpoint.save(tmp_path / "checkpoint.pt", history)
        assert same(whole, train(*_resumed(tmp_path / "checkpoint.pt")))


def _resumed(path):
    config, start = checkpoint.resume(path)
    return config, False, start


def test_a_run_resumes_without_its_rows_and_from_a_folder_s(tmp_path):
    for name, fields in {"rows left out": {}, "in a folder": {"memmap": str(tmp_path / "ring")}}.items():
        config = Config(**SHORT, **fields)
        history = next(itertools.islice(iterate(config), 3, None))
        checkpoint.save(tmp_path / "checkpoint.pt", history, ring=False)
        rows = history.ring.size
        history.ring.close()
        go_on = next(iterate(*_resumed(tmp_path / "checkpoint.pt")))
        assert len(go_on) == 5 and go_on.ring.size == (32 if name == "rows left out" else rows + 1 + 32), name
        go_on.ring.close()


def test_a_model_alone_cannot_be_resumed(path):
    with pytest.raises(ValueError, match="holds a model alone: it can be evaluated, not resumed"):
        checkpoint.resume(path)


@pytest.mark.parametrize("change", [{"encoder": "gru"}, {"num_envs": 8}, {"capacity": 600}, {"codec": "int8"}])
def test_a_state_of_another_config_is_refused(change, tmp_path):
    config = Config(**SHORT)
    checkpoint.save(tmp_path / "checkpoint.pt", next(itertools.islice(iterate(config), 5, None)))
    _, start = checkpoint.resume(tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="start does not fit the config: resume with the run's own"):
        next(iterate(dataclasses.replace(config, **change), start=start))


def test_the_optimizer_keeps_how_it_runs_here(tmp_path):
    config = Config(**SHORT)
    checkpoint.save(tmp_path / "checkpoint.pt", next(iterate(config)))
    _, start = checkpoint.resume(tmp_path / "checkpoint.pt")
    changed = copy.deepcopy(start)
    changed["optimizer"]["param_groups"][0].update(fused=True, capturable=True)  # as a GPU's would be
    assert same(train(config, False, changed), train(config, False, start))


def test_what_a_run_starts_from_stays_as_it_is(tmp_path):
    config = Config(**SHORT)
    checkpoint.save(tmp_path / "checkpoint.pt", next(iterate(config)))
    _, start = checkpoint.resume(tmp_path / "checkpoint.pt")
    assert same(train(config, False, start), train(config, False, start))


def test_two_hundred_damaged_files_are_refused_or_equal(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, next(iterate(Config(**SHORT, capacity=600))))
    whole, rng, outcomes = path.read_bytes(), np.random.default_rng(0), []
    original = checkpoint._digest(checkpoint.resume(path)[1])
    for i in range(200):
        damaged = bytearray(whole)
        if i % 4 == 0:
            del damaged[rng.integers(len(whole)) :]
        elif i % 4 == 1:
            start, length = rng.integers(len(whole)), rng.integers(1, 500)
            damaged[start : start + length] = pickle.dumps(Hostile(), protocol=2)
        else:
            damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            outcomes.append(checkpoint._digest(checkpoint.resume(path)[1]) == original)
        except ValueError as error:
            assert "\n" not in str(error)
            outcomes.append(None)
    assert False not in outcomes and outcomes.count(None) > 100 and not os.path.exists("hostile-code-ran")


@pytest.mark.parametrize("tensor", [torch.zeros(1).expand(2**40), torch.zeros(1).as_strided((1,), (0,)), torch.zeros(4)[::2]])
def test_impossible_tensors_are_refused(path, tensor):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "run": {"iteration": tensor}}, path)
    with pytest.raises(ValueError, match="cannot be read: it is damaged"):
        checkpoint.load(path)


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(path, history, monkeypatch):
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"checkpoint .*checkpoint\.pt cannot be written \(No space left on device\): make room"):
        checkpoint.save(path, history)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["checkpoint.pt"]


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, monkeypatch):
    fields = ["--steps", "5120", "--capacity", "2000", "--eval-episodes", "2", "--checkpoint-every", "1"]
    whole = train(Config(steps=5_120, capacity=2_000, eval_episodes=2), progress=False)
    command = [sys.executable, "-m", "fp8rl", "train", *fields, "--out", str(tmp_path / "a")]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (tmp_path / "a" / "checkpoint.pt").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    monkeypatch.setattr(sys, "argv", ["fp8rl", "train", "--resume", str(tmp_path / "a")])
    cli.main()
    model, _ = checkpoint.load(tmp_path / "a" / "checkpoint.pt")
    for ours, theirs in zip(whole.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len((tmp_path / "a" / "metrics.csv").read_text().splitlines()) == 11
