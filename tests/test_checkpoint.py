import copy
import dataclasses
import io
import math
import os
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from helpers import SHORT, after, assert_same, refused, resumed, small, trained

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.disk import checkpoint, restore
from fp8rl.history import History
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


HOSTILE = pickle.dumps(Hostile(), protocol=2)  # torch's own; it warns of newer ones


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
    assert (
        config == run.config
        and equal(model.state_dict(), dict(weights))
        and equal(dict(weights), before["model"])
    )


def test_a_run_saved_before_the_clip_had_a_choice_goes_on_as_it_was(tmp_path):
    config = small(steps=1024, eval_every=0, eval_episodes=1, collect_precision="fp8")
    config = dataclasses.replace(config, clip_by="actor")
    whole = trained(config)
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, after(1, build(config)))
    content = torch.load(path, weights_only=True)
    del content["config"]["clip_by"]
    torch.save(content, path)
    run = resumed(path)
    assert run.config == config
    assert_same(trained(run), whole)


FIELDS = [
    {"encoder": "gru", "hide_velocity": True},
    {"env_id": "CartPole-v1"},
    {"layers": 3, "hidden_size": 32},
]
FIELDS += [{"formats": "weights=e4m3"}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_network_of_another_kind_is_read_without_its_environment(fields, tmp_path):
    run = after(1, build(small(steps=512, eval_episodes=1, **fields)))
    checkpoint.save(tmp_path / "checkpoint.pt", run)
    model, config = checkpoint.load(tmp_path / "checkpoint.pt")
    assert config == run.config and model.recurrent == run.model.recurrent
    obs = torch.rand(3, 5, len(run.env.bounds[0]))
    for x, y in zip(model(obs), run.model(obs), strict=True):
        torch.testing.assert_close(x, y)


def test_a_forged_history_is_refused():
    history = History()
    history.add(dict.fromkeys(restore.REQUIRED_COLUMNS, 1.0))
    state = history.state_dict()
    checkpoint.check_history(state)
    for name in ("$(touch PWNED)", "fp8.hidden.0.input.scale", "x", 1):
        refused(
            "history has the column .*, which does not exist",
            checkpoint.check_history,
            state | {name: state["steps"]},
        )
    for values in (
        torch.zeros(2).double(),
        torch.zeros(1),
        torch.zeros(1, 1).double(),
        torch.zeros(1, dtype=torch.int64),
    ):
        refused(
            "history has the column 'loss' in another",
            checkpoint.check_history,
            state | {"loss": values},
        )
        refused("history has the column", checkpoint.check_history, state | {"loss": values}, 1)
    refused("history lacks one of", checkpoint.check_history, {"steps": state["steps"]})
    for failures in ([], [1], [None, None]):
        refused("history has failures", checkpoint.check_history, state | {"failures": failures})


def test_a_checkpoint_of_a_population_is_resumed_and_not_loaded(tmp_path):
    configs = [Config(**SHORT, seed=seed) for seed in range(2)]
    population = after(2, build_population(configs))
    checkpoint.save(tmp_path / "checkpoint.pt", population)
    refused(
        "checkpoint .* is of a population: read it with resume",
        checkpoint.load,
        tmp_path / "checkpoint.pt",
    )
    found, state = checkpoint.resume(tmp_path / "checkpoint.pt")
    again = build_population(found)
    again.load_state_dict(state)
    trained(again), trained(population)
    assert found == configs and torch.equal(again.model.theta, population.model.theta)


def test_a_failed_save_leaves_the_old_checkpoint_and_says_so(path, run, monkeypatch):
    def fails(_, file=None):
        if file:
            file.write(b"half of i")
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    message = (
        r"checkpoint .*checkpoint\.pt cannot be written \(No space left on device\): make room"
    )
    for part, name in ((torch, "save"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, fails)
            refused(message, checkpoint.save, path, run, error=OSError)
        assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [
            "checkpoint.pt"
        ]


def rezip(path, change) -> None:
    """Writes the archive again, each entry as `change` gives it from its name and content."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, *change(entry.filename, old.read(entry)))


def pickled(data: bytes):
    """Puts `data` in the place of the pickled part."""
    return lambda path, _: rezip(
        path, lambda name, old: (data if name.endswith("data.pkl") else old,)
    )


def with_part(**changes):
    """Writes the checkpoint again with parts of its state changed."""
    return lambda path, content: torch.save({**content, "run": {**content["run"], **changes}}, path)


OTHER = ActorCritic(hidden_size=32).state_dict() | {"actor.weight": torch.zeros(2, 5)}
BROKEN = {
    "cut short": ("cannot be read", lambda path, _: path.write_bytes(path.read_bytes()[:1000])),
    "empty": ("cannot be read", lambda path, _: path.write_bytes(b"")),
    "hostile": ("cannot be read", lambda path, _: path.write_bytes(HOSTILE)),
    "hostile inside": (
        "cannot be read",
        lambda path, content: torch.save({**content, "config": Hostile()}, path),
    ),
    "hostile spliced in": ("cannot be read", pickled(HOSTILE)),
    "not torch's zip": ("cannot be read", pickled(b"")),
    "compressed": (
        "cannot be read",
        lambda path, _: rezip(path, lambda name, data: (data, zipfile.ZIP_DEFLATED)),
    ),
    "another program's": (
        "is not of format",
        lambda path, content: torch.save(content["run"]["model"], path),
    ),
    "no dict": ("is not of format", lambda path, _: torch.save([1, 2], path)),
    "an older format's": (
        "is not of format",
        lambda path, content: torch.save({**content, "format": "fp8rl-3"}, path),
    ),
    "another architecture's": ("does not fit", with_part(model=OTHER)),
    "a model left out": ("does not fit", with_part(model={})),
    "another version's": (
        ": config has",
        lambda path, content: torch.save({**content, "config": {"none": 1}}, path),
    ),
    "of a huge stride": ("cannot be read", with_part(state=torch.zeros(1).expand(2**40))),
    "of a stride of 0": (
        "cannot be read",
        with_part(state=[{"x": (torch.zeros(4).as_strided((2,), (0,)),)}]),
    ),
    "of a stride of 2": ("cannot be read", with_part(state=torch.zeros(4)[::2])),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_checkpoint_is_refused_in_one_line(kind, path):
    message, change = BROKEN[kind]
    change(path, torch.load(path, weights_only=True))
    refused(rf"checkpoint .*checkpoint\.pt ?{message}", checkpoint.load, path)
    assert not (path.parent / "hostile-code-ran").exists()


def test_what_does_not_fit_is_named(path):
    refused(
        r".*nothing\.pt does not exist",
        checkpoint.resume,
        path.parent / "nothing.pt",
        error=FileNotFoundError,
    )
    config, state = checkpoint.resume(path)
    message = "the state does not fit the config: resume with the run's own config"
    for part in ("model", "optimizer", "env", "returns", "ring"):
        for wrong in ({}, {"x": torch.zeros(3)}):
            refused(message, build, config, state={**state, part: wrong})
    content = torch.load(path, weights_only=True)
    torch.save({**content, "config": {**content["config"], "gamma": 7.0}}, path)
    refused(
        r"checkpoint .*checkpoint\.pt: gamma is 7\.0: use a number from 0 to 1",
        checkpoint.load,
        path,
    )
    assert checkpoint.load(path, gamma=0.5, precision="fp32")[1].precision == "fp32"


def test_moments_of_other_shapes_are_refused(path):
    config, state = checkpoint.resume(path)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        forged = copy.deepcopy(state)
        # Torch's fused step would write beyond its end
        forged["optimizer"]["state"][2][name] = torch.zeros(3)
        refused("the state does not fit the config", build, config, state=forged)


FORGED = [
    (("ring", "clock"), torch.tensor([-40, 32])),  # rows that were never written
    (("ring", "action"), 255),
    (("optimizer", "state", 0, "step"), math.inf),
    (("state",), torch.zeros(16, 1)),
    (("state",), torch.zeros(16, 64).long()),
]


@pytest.mark.parametrize(("place", "value"), FORGED, ids=str)
def test_a_forged_tensor_is_refused(place, value):
    fields = (
        {"formats": "weights=e4m3"}
        if "optimizer" in place
        else {"encoder": "gru"}
        if "state" in place
        else {}
    )
    run = after(1, build(small(steps=1_024, eval_episodes=1, **fields)))
    state = inner = copy.deepcopy(run.state_dict())
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = (
        value if isinstance(value, torch.Tensor) else torch.full_like(inner[place[-1]], value)
    )
    refused("the state does not fit the config", build, run.config, state=state)


def test_a_tensor_that_wants_a_gradient_and_weights_without_a_shape_are_refused(path):
    content = torch.load(path, weights_only=True)
    state = content["run"]
    state["model"]["inputs.weight"] = torch.zeros(())
    torch.save(content, path)
    refused("checkpoint .* does not fit this version's network: train again", checkpoint.load, path)
    state["history"]["steps"].requires_grad_()
    torch.save(content, path)
    refused("checkpoint .* cannot be read: it is damaged", checkpoint.resume, path)


def outcome(path, damaged: bytes, original) -> bool | None:
    """Whether what is read of damaged bytes is the original; None if they are refused in one
    line."""
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
    original, places = (
        checkpoint.resume(path),
        [found.start() for found in re.finditer(b"PK\\x01\\x02", saved[1])],
    )
    assert len(places) > 20
    for begin in places:
        damaged = bytearray(saved[1])
        damaged[begin + 38] ^= 0x10  # of the attributes in the zip's list of entries
        assert outcome(path, damaged, original) is None


def test_a_cut_or_spliced_file_is_refused_or_equal_and_runs_nothing(path, saved):
    original, rng, outcomes, size = (
        checkpoint.resume(path),
        np.random.default_rng(0),
        [],
        len(saved[1]),
    )
    for i in range(100):
        damaged = bytearray(saved[1])
        if i % 2:
            del damaged[rng.integers(size) :]
        else:
            start, length = rng.integers(size), rng.integers(1, 500)
            damaged[start : start + length] = HOSTILE
        outcomes.append(outcome(path, damaged, original))
    assert (
        False not in outcomes
        and outcomes.count(None) > 50
        and not (path.parent / "hostile-code-ran").exists()
    )


def test_a_saved_run_continues_bit_for_bit_and_the_file_serves_again(path, run):
    whole = trained(build(run.config))
    for _ in range(2):
        assert_same(trained(resumed(path)), whole)


def test_a_run_continues_without_its_rows(path, run):
    checkpoint.save(path.with_name("without.pt"), run, ring=False)
    assert path.with_name("without.pt").stat().st_size < path.stat().st_size
    again = after(1, resumed(path.with_name("without.pt")))
    assert len(again.history) == 2 and again.ring.size == 32
