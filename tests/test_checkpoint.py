import copy
import io
import os
import pickle

import pytest
import torch
from helpers import SHORT, after, refused

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk import checkpoint


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
def path(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(saved[1])
    return tmp_path / "checkpoint.pt"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-code-ran",)


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


def test_a_checkpoint_is_a_run_s_config_and_state_which_saving_does_not_change(path, run):
    before = copy.deepcopy(run.state_dict())
    checkpoint.save(path, run)
    assert equal(before, run.state_dict()) and equal(checkpoint.resume(path)[1], before)
    model, config = checkpoint.load(path)
    weights = torch.load(path, weights_only=True)["run"]["model"]  # which need no class of ours
    assert config == run.config
    assert equal(model.state_dict(), dict(weights)) and equal(dict(weights), before["model"])


def cannot_write(file) -> None:
    file.write(b"half of i")
    raise OSError(28, "No space left on device")


def cannot_write_as_torch_says_it(content, file) -> None:
    try:
        cannot_write(file)
    except OSError as error:
        raise RuntimeError("unexpected pos 768 vs 662") from error


FAILURES = {
    "while torch writes": (torch, "save", cannot_write_as_torch_says_it),
    "at the end": (os, "fsync", lambda _: cannot_write(io.BytesIO())),
}


@pytest.mark.parametrize("when", FAILURES)
def test_a_failed_save_leaves_the_old_checkpoint_and_says_so(when, path, run, monkeypatch):
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(*FAILURES[when])
        message = rf"checkpoint {path} cannot be written \(No space left on device\)"
        refused(message, checkpoint.save, path, run, error=OSError)
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


def with_config(**changes):
    """Writes the checkpoint again with fields of its config changed."""

    def change(path, content):
        torch.save({**content, "config": {**content["config"], **changes}}, path)

    return change


REFUSED = {  # what becomes of the file, and what the error names
    "cut short": (lambda path, _: os.truncate(path, 1000), "cannot be read"),
    "a pickle": (lambda path, _: path.write_bytes(pickle.dumps(Hostile(), 2)), "cannot be read"),
    "a pickle inside": (with_config(seed=Hostile()), "cannot be read"),
    "another program's": (
        lambda path, content: torch.save(content["run"]["model"], path),
        "is of format None, and this version of fp8rl reads 'fp8rl-10'",
    ),
    "an older version's": (
        lambda path, content: torch.save({**content, "format": "fp8rl-3"}, path),
        "is of format 'fp8rl-3', and this version of fp8rl reads 'fp8rl-10'",
    ),
    "of an unknown field": (with_config(none=1), ": config has the field 'none'"),
    "of a wrong field": (with_config(gamma=7.0), ": gamma is 7.0"),
    "of a module": (with_config(env_id="payload:Foo-v0"), " has env_id 'payload:Foo-v0'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_checkpoint_is_refused_and_runs_no_code(kind, path):
    change, message = REFUSED[kind]
    change(path, torch.load(path, weights_only=True))
    refused(rf"checkpoint .*checkpoint\.pt ?{message}", checkpoint.load, path)
    assert not (path.parent / "hostile-code-ran").exists()


def test_fields_of_the_config_are_replaced_before_they_are_checked(path):
    with_config(gamma=7.0)(path, torch.load(path, weights_only=True))
    assert checkpoint.load(path, gamma=0.5, precision="fp32")[1].precision == "fp32"


def test_a_module_is_imported_where_the_file_is_trusted_or_it_is_imported_already(path):
    content = torch.load(path, weights_only=True)
    with_config(env_id="payload:Foo-v0", start_noise=0.5)(path, content)
    assert checkpoint.resume(path, trust=True)[0].env_id == "payload:Foo-v0"
    with_config(env_id="fp8rl.tasks:fp8rl/Lqr-v0")(path, content)
    assert checkpoint.resume(path)[0].env_id == "fp8rl.tasks:fp8rl/Lqr-v0"
