import copy
import dataclasses
import io
import os
import pickle

import pytest
import torch
from helpers import SHORT, after, assert_same, refused, resumed, small, trained

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.model import ActorCritic


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


def test_a_run_saved_before_the_clip_had_a_choice_goes_on_as_it_was(tmp_path):
    config = small(steps=512, eval_every=0, eval_episodes=1, collect_precision="fp8")
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, build(config))
    content = torch.load(path, weights_only=True)
    del content["config"]["clip_by"]
    torch.save(content, path)
    assert checkpoint.resume(path)[0] == dataclasses.replace(config, clip_by="actor")


FIELDS = [
    {"encoder": "gru", "hide_velocity": True},
    {"env_id": "CartPole-v1", "layers": 3, "hidden_size": 32, "formats": "weights=e4m3"},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_network_of_another_kind_is_read_without_its_environment(fields, tmp_path):
    run = after(1, build(small(steps=512, eval_episodes=1, **fields)))
    checkpoint.save(tmp_path / "checkpoint.pt", run)
    model, config = checkpoint.load(tmp_path / "checkpoint.pt")
    assert config == run.config and model.recurrent == run.model.recurrent
    obs = torch.rand(3, 5, len(run.env.bounds[0]))
    for x, y in zip(model(obs), run.model(obs), strict=True):
        torch.testing.assert_close(x, y)


def test_a_checkpoint_of_a_population_is_resumed_and_not_loaded(tmp_path):
    configs = [Config(**SHORT, seed=seed) for seed in range(2)]
    population = after(2, build_population(configs))
    checkpoint.save(tmp_path / "checkpoint.pt", population)
    refused("checkpoint .* is of a population", checkpoint.load, tmp_path / "checkpoint.pt")
    found, state = checkpoint.resume(tmp_path / "checkpoint.pt")
    again = build_population(found)
    again.load_state_dict(state)
    trained(again), trained(population)
    assert found == configs and torch.equal(again.model.theta, population.model.theta)


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


def with_part(**changes):
    """Writes the checkpoint again with parts of its state changed."""
    return lambda path, content: torch.save({**content, "run": {**content["run"], **changes}}, path)


def with_config(**changes):
    """Writes the checkpoint again with fields of its config changed."""

    def change(path, content):
        torch.save({**content, "config": {**content["config"], **changes}}, path)

    return change


OTHER = ActorCritic(hidden_size=32).state_dict() | {"actor.weight": torch.zeros(2, 5)}
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
    "without a config": (
        lambda path, content: torch.save({"format": content["format"]}, path),
        "does not fit this version's config",
    ),
    "of an unknown field": (with_config(none=1), ": config has the field 'none'"),
    "of a wrong field": (with_config(gamma=7.0), ": gamma is 7.0"),
    "of a module": (with_config(env_id="payload:Foo-v0"), " has env_id 'payload:Foo-v0'"),
    "another network's": (with_part(model=OTHER), "does not fit this version's network"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_checkpoint_is_refused_and_runs_no_code(kind, path):
    change, message = REFUSED[kind]
    change(path, torch.load(path, weights_only=True))
    refused(rf"checkpoint .*checkpoint\.pt ?{message}", checkpoint.load, path)
    assert not (path.parent / "hostile-code-ran").exists()


def test_the_same_file_runs_code_where_torch_is_told_to_read_anything(path):
    with_config(seed=Hostile())(path, torch.load(path, weights_only=True))
    torch.load(path, weights_only=False)
    assert (path.parent / "hostile-code-ran").exists()


def test_a_file_that_does_not_exist_is_named(path):
    nothing = path.parent / "nothing.pt"
    refused(f"checkpoint {nothing}", checkpoint.resume, nothing, error=FileNotFoundError)


def test_fields_of_the_config_are_replaced_before_they_are_checked(path):
    with_config(gamma=7.0)(path, torch.load(path, weights_only=True))
    assert checkpoint.load(path, gamma=0.5, precision="fp32")[1].precision == "fp32"


def test_a_module_is_imported_where_the_file_is_trusted_or_it_is_imported_already(path):
    content = torch.load(path, weights_only=True)
    with_config(env_id="payload:Foo-v0", start_noise=0.5)(path, content)
    assert checkpoint.resume(path, trust=True)[0].env_id == "payload:Foo-v0"
    with_config(env_id="fp8rl.tasks:fp8rl/Lqr-v0")(path, content)
    assert checkpoint.resume(path)[0].env_id == "fp8rl.tasks:fp8rl/Lqr-v0"


def test_a_state_that_does_not_fit_is_refused(path):
    config, state = checkpoint.resume(path)
    for part in ("model", "optimizer", "env", "returns", "ring"):
        for wrong in ({}, {"x": torch.zeros(3)}):
            refused("the state does not fit", build, config, state={**state, part: wrong})


def test_a_saved_run_continues_bit_for_bit_and_the_file_serves_again(path, run):
    whole = trained(build(run.config))
    for _ in range(2):
        assert_same(trained(resumed(path)), whole)


def test_a_run_continues_without_its_rows(path, run):
    checkpoint.save(path.with_name("without.pt"), run, ring=False)
    assert path.with_name("without.pt").stat().st_size < path.stat().st_size
    again = after(1, resumed(path.with_name("without.pt")))
    assert len(again.history) == 2 and again.ring.size == 32
