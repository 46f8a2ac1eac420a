import os
import pickle

import pytest
import torch

from fp8rl import checkpoint
from fp8rl.model import ActorCritic
from fp8rl.train import Config, History


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
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:1000])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "hostile":
        path.write_bytes(pickle.dumps(Hostile(), protocol=2))  # torch's own; it warns of newer ones
    elif kind == "hostile inside":
        torch.save({**content, "config": Hostile()}, path)
    elif kind == "another program's":
        torch.save({"state_dict": content["model"]}, path)
    elif kind == "another architecture's":
        torch.save({**content, "model": ActorCritic(width=32).state_dict()}, path)
    elif kind == "another version's":
        torch.save({**content, "config": {**content["config"], "no_such_field": 1}}, path)


@pytest.mark.parametrize(
    "kind",
    ["cut short", "empty", "hostile", "hostile inside", "another program's", "another architecture's", "another version's"],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(kind, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    broken(kind, path)
    with pytest.raises(ValueError, match=r"checkpoint .*checkpoint\.pt (cannot be read|is not of format|does not fit)") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "hostile-code-ran").exists()


def test_a_precision_that_cannot_run_here_is_named_and_can_be_changed(path):
    content = torch.load(path, weights_only=True)
    torch.save({**content, "config": {**content["config"], "precision": "fp7"}}, path)
    with pytest.raises(ValueError, match=r"checkpoint .*checkpoint\.pt: precision is 'fp7'"):
        checkpoint.load(path)
    assert checkpoint.load(path, precision="fp32")[1].precision == "fp32"


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt does not exist"):
        checkpoint.load(tmp_path / "nothing.pt")
