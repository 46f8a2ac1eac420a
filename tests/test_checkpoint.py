import copy
import io
import os
import pickle
import re
import time
import zipfile

import numpy as np
import pytest
import torch
from helpers import SHORT, after, assert_same, cli_into, forked, resumed, run_cli, weights

from fp8rl import checkpoint
from fp8rl.config import Config
from fp8rl.model import ActorCritic
from fp8rl.scale.machine import NETWORKS, build
from fp8rl.train import train


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that has begun, and the bytes of its checkpoint."""
    path = tmp_path_factory.mktemp("a") / "checkpoint.pt"
    run = after(1, build(Config(**SHORT, precision="fp8", seed=3, capacity=600)))
    checkpoint.save(path, run)
    return run, path.read_bytes()


@pytest.fixture
def run(saved):
    return saved[0]


@pytest.fixture
def path(tmp_path, saved):
    (tmp_path / "checkpoint.pt").write_bytes(saved[1])
    return tmp_path / "checkpoint.pt"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-code-ran",)


def test_round_trip(path, run):
    model, config = checkpoint.load(path)
    assert config == run.config
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("fields", [{"encoder": "gru", "hide_velocity": True}, {"env_id": "CartPole-v1"}], ids=str)
def test_a_network_of_another_shape_is_read_without_its_environment(fields, tmp_path):
    run = after(1, build(Config(steps=512, eval_episodes=1, **fields)))
    checkpoint.save(tmp_path / "checkpoint.pt", run)
    model, config = checkpoint.load(tmp_path / "checkpoint.pt", NETWORKS)
    assert config == run.config and model.recurrent == run.model.recurrent
    obs = torch.rand(3, 5, len(run.env.bounds[0]))
    for x, y in zip(model(obs), run.model(obs), strict=True):
        torch.testing.assert_close(x, y)
    if model.recurrent:
        with pytest.raises(ValueError, match=r"pass networks=scale\.machine\.NETWORKS$"):
            checkpoint.load(tmp_path / "checkpoint.pt")


def test_model_is_a_plain_state_dict(path, run):
    assert torch.load(path, weights_only=True)["run"]["model"].keys() == run.model.state_dict().keys()


def test_a_failed_save_leaves_the_old_checkpoint(path, run, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", lambda content, file: file.write(b"half of i") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save(path, run)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(path, run, monkeypatch):
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"checkpoint .*checkpoint\.pt cannot be written \(No space left on device\): make room"):
        checkpoint.save(path, run)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["checkpoint.pt"]


def replaced(content: dict, **changes) -> dict:
    return {**content, "run": {**content["run"], **changes}}


def rezip(path, change) -> None:
    """Writes the archive again, each entry as `change` gives it from its name and content."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, *change(entry.filename, old.read(entry)))


def broken(kind: str, path) -> None:
    content = torch.load(path, weights_only=True)
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:1000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hostile":
        path.write_bytes(pickle.dumps(Hostile(), protocol=2))  # torch's own; it warns of newer ones
    elif kind == "hostile inside":
        torch.save({**content, "config": Hostile()}, path)
    elif kind == "hostile spliced in":
        rezip(path, lambda name, data: (pickle.dumps(Hostile(), protocol=2) if name.endswith("data.pkl") else data,))
    elif kind == "another program's":
        torch.save({"state_dict": content["run"]["model"]}, path)
    elif kind == "no dict":
        torch.save([1, 2], path)
    elif kind == "another architecture's":
        torch.save(replaced(content, model=ActorCritic(width=32).state_dict() | {"actor.weight": torch.zeros(2, 5)}), path)
    elif kind == "a model left out":
        torch.save(replaced(content, model={}), path)
    elif kind == "another version's":
        torch.save({**content, "config": {**content["config"], "no_such_field": 1}}, path)
    elif kind == "an older format's":
        torch.save({**content, "format": "fp8rl-3"}, path)
    elif kind == "compressed":
        rezip(path, lambda name, data: (data, zipfile.ZIP_DEFLATED))
    elif kind == "not torch's zip":
        rezip(path, lambda name, data: (data,) if "data.pkl" not in name else (b"",))


KINDS = ["cut short", "empty", "hostile", "hostile inside", "hostile spliced in", "another program's", "no dict"]
KINDS += ["another architecture's", "a model left out", "another version's", "an older format's", "compressed", "not torch's zip"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_checkpoint_is_refused_in_one_line(kind, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    broken(kind, path)
    with pytest.raises(
        ValueError, match=r"checkpoint .*checkpoint\.pt(: config has| cannot be read| is not of format| does not fit)"
    ) as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "hostile-code-ran").exists()


def test_a_field_that_is_out_of_range_is_named_and_can_be_changed(path):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "config": {**content["config"], "gamma": 7.0}}, path)
    with pytest.raises(ValueError, match=r"checkpoint .*checkpoint\.pt: gamma is 7\.0: use a number from 0 to 1"):
        checkpoint.load(path)
    assert checkpoint.load(path, gamma=0.5, precision="fp32")[1].precision == "fp32"


def test_a_missing_checkpoint_is_named(tmp_path):
    for read in (checkpoint.load, checkpoint.resume):
        with pytest.raises(FileNotFoundError, match=r"nothing\.pt does not exist"):
            read(tmp_path / "nothing.pt")


def equal(one, other) -> bool:
    """Whether two nested contents are the same, types included."""
    if isinstance(one, torch.Tensor):
        bits = [x.contiguous().view(torch.uint8) if x.dim() else x for x in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def outcome(path, damaged: bytes, original) -> bool | None:
    """Whether what is read of damaged bytes is the original; None if they are refused in one line."""
    path.write_bytes(damaged)
    try:
        config, state = checkpoint.resume(path)
    except ValueError as error:
        assert "\n" not in str(error)
        return None
    return config == original[0] and equal(state, original[1])


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(path, saved):
    original, rng, outcomes = checkpoint.resume(path), np.random.default_rng(0), []
    tail = len(saved[1]) - 20_000  # where the zip keeps its own records: every tenth place is there
    for i in range(300):
        damaged = bytearray(saved[1])
        damaged[rng.integers(tail if i % 10 == 0 else 0, len(damaged))] ^= 1 << rng.integers(8)
        outcomes.append(outcome(path, damaged, original))
    assert False not in outcomes and outcomes.count(True) > 10 and outcomes.count(None) > 100


def test_an_entry_marked_as_a_folder_is_refused(path, saved):
    """torch would not read it, and give what happens to be in memory."""
    original, places = checkpoint.resume(path), [found.start() for found in re.finditer(b"PK\\x01\\x02", saved[1])]
    assert len(places) > 20
    for begin in places:
        damaged = bytearray(saved[1])
        damaged[begin + 38] ^= 0x10  # of the attributes in the zip's list of entries
        assert outcome(path, damaged, original) is None


def test_a_cut_or_spliced_file_is_refused_or_equal_and_runs_nothing(path, saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    original, rng, outcomes, size = checkpoint.resume(path), np.random.default_rng(0), [], len(saved[1])
    for i in range(100):
        damaged = bytearray(saved[1])
        if i % 2:
            del damaged[rng.integers(size) :]
        else:
            start, length = rng.integers(size), rng.integers(1, 500)
            damaged[start : start + length] = pickle.dumps(Hostile(), protocol=2)
        outcomes.append(outcome(path, damaged, original))
    assert False not in outcomes and outcomes.count(None) > 50 and not (tmp_path / "hostile-code-ran").exists()


@pytest.mark.parametrize("tensor", [torch.zeros(1).expand(2**40), torch.zeros(4).as_strided((2,), (0,)), torch.zeros(4)[::2]])
@pytest.mark.parametrize("place", ["a part", "a list"])
def test_forged_strides_are_refused(path, tensor, place):
    content = torch.load(path, weights_only=True)
    torch.save(replaced(content, state=tensor if place == "a part" else [{"x": (tensor,)}]), path)
    with pytest.raises(ValueError, match="cannot be read: it is damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize("part", ["model", "optimizer", "env", "returns", "ring"])
def test_parts_of_the_wrong_form_are_refused_in_one_line(part, path):
    config, state = checkpoint.resume(path)
    for wrong in ({}, {"x": torch.zeros(3)}):
        with pytest.raises(ValueError, match="the state does not fit the config: resume with the run's own config") as caught:
            build(config, state={**state, part: wrong})
        assert "\n" not in str(caught.value)


def test_a_saved_run_continues_bit_for_bit_and_the_file_serves_again(path, run):
    whole = train(build(run.config), progress=False)
    for _ in range(2):
        assert_same(train(resumed(path), progress=False), whole)


def test_a_run_continues_without_its_rows(tmp_path):
    run = after(3, build(Config(**SHORT)))
    checkpoint.save(tmp_path / "with.pt", run)
    checkpoint.save(tmp_path / "without.pt", run, ring=False)
    assert (tmp_path / "without.pt").stat().st_size < (tmp_path / "with.pt").stat().st_size
    again = after(1, resumed(tmp_path / "without.pt"))
    assert len(again.history) == 4 and again.ring.size == 32


def test_saving_changes_nothing(run, tmp_path):
    before = copy.deepcopy(run.state_dict())
    checkpoint.save(tmp_path / "checkpoint.pt", run)
    assert equal(before, run.state_dict()) and equal(checkpoint.resume(tmp_path / "checkpoint.pt")[1], before)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    fields = ("--steps", 5120, "--capacity", 2000, "--eval-episodes", 2, "--checkpoint-every", 1)
    whole = train(Config(steps=5_120, capacity=2_000, eval_episodes=2), progress=False)
    process = forked(cli_into, tmp_path / "said", "train", *fields, "--out", tmp_path / "a")
    while not (tmp_path / "a" / "checkpoint.pt").exists():
        assert process.is_alive(), (tmp_path / "said").read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    run_cli("train", "--resume", tmp_path / "a")
    model, _ = checkpoint.load(tmp_path / "a" / "checkpoint.pt")
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), weights(whole))
    assert len((tmp_path / "a" / "metrics.csv").read_text().splitlines()) == 11
