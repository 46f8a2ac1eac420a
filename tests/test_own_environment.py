"""An environment of one's own, as a student has it: a Gymnasium class in a file of its own."""

import importlib
import re
import sys

import gymnasium
import pytest
from helpers import TINY, after, refused, run_cli, trained

from fp8rl.build import Machine, build
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.population.batches import obstacle
from fp8rl.study.comparison import threshold_of
from fp8rl.tasks.gymnasium_env import (
    EnvironmentFailed,
    GymEnv,
    gymnasium_id,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*without a time limit")

MODULE = """
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from fp8rl.env import TensorEnv

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10, 10, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.position = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.position, {}

    def step(self, action):
        self.steps += 1
        self.position = self.position + np.float32(0.1 if action == 1 else -0.1)
        return self.position, 1 - abs(float(self.position[0])), False, self.steps == 20, {}

gymnasium.register("Registered-v0", Walk, max_episode_steps=15)

class Limited(Walk):
    spec = EnvSpec("Limited-v0", max_episode_steps=10, reward_threshold=5)

class CartPole(Walk): pass

class NeedsSize(Walk):
    def __init__(self, size): pass

class RaisesWhenMade(Walk):
    def __init__(self): 1 / 0

class RaisesInReset(Walk):
    def reset(self, *, seed=None, options=None): return {}["x"], {}

class RaisesInStep(Walk):
    def step(self, action): raise ValueError("two\\nlines")

class WrongShape(Walk):
    def reset(self, *, seed=None, options=None): return np.zeros(3, np.float32), {}

class WithoutSpaces(gymnasium.Env): pass

class Picture(Walk):
    observation_space = gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)

class Room(TensorEnv):
    bounds, max_steps, state_size, num_actions = ((-1,), (1,)), 9, 1, 2
    def start(self, numbers): return numbers
    def advance(self, state, action): return state, state[:, 0], state[:, 0] > 1

class Stranger: pass
"""


@pytest.fixture(autouse=True)
def own_env(tmp_path, monkeypatch):
    """The module own_env, in the current folder."""
    (tmp_path / "own_env.py").write_text(MODULE)
    (tmp_path / "broken_env.py").write_text("import no_such_package")
    before = dict(gymnasium.registry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("own_env", None)
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def config_of(env_id: str, **fields) -> Config:
    return Config(env_id=env_id, steps=128, eval_every=0, eval_episodes=2, **TINY, **fields)


@pytest.mark.parametrize(
    ("env_id", "max_steps"),
    [
        ("own_env:Registered-v0", 15),
        ("own_env:Walk", 10_000),  # says no time limit
        ("own_env:Limited", 10),  # says it in its spec
        ("own_env:CartPole", 10_000),  # not Gymnasium's
        ("own_env:Room", 9),
    ],
)
def test_an_environment_is_found_by_its_name(env_id, max_steps):
    assert build(config_of(env_id)).env.max_steps == max_steps


def test_a_class_that_is_not_registered_trains_in_every_way(tmp_path):
    """In processes, and again from a checkpoint."""
    config = config_of("own_env:Limited")
    run = trained(build(config))
    assert isinstance(run.env, GymEnv)
    there = trained(build(config, Machine(vectorization="async")))
    assert there.history.final_return == run.history.final_return
    there.close()

    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, after(1, build(config)))
    again, state = checkpoint.resume(path)
    assert len(trained(build(again, state=state)).history) == 2
    module = sys.modules.pop("own_env")
    refused("checkpoint .* add --trust", checkpoint.resume, path)
    sys.modules["own_env"] = module

    assert "train it alone" in obstacle(config)
    assert threshold_of("own_env:Limited") == 5


def test_a_class_of_a_notebook_is_found_anew_when_its_cell_is_run_again(monkeypatch):
    for actions in (2, 5):
        walk = importlib.import_module("own_env").Walk
        here = type("Here", (walk,), {"action_space": gymnasium.spaces.Discrete(actions)})
        monkeypatch.setattr(sys.modules["__main__"], "Here", here, raising=False)
        assert gymnasium_id("__main__:Here") == "__main__.Here"
        assert GymEnv("__main__:Here", 1).num_actions == actions


IMPORTED = "cannot be imported .*: name a module, not a file, that is in this folder or installed"
WRONG = {
    "no_such_module:Walk": IMPORTED,
    "broken_env:Walk-v0": "cannot be imported .*no_such_package.*: name a module",
    "own_env.py:Walk": IMPORTED,
    "own_env.Walk": "Gymnasium cannot make .*: register it first, .* as in my_module:MyEnv",
    "own_env:Wlak": "Gymnasium cannot make .*: register it first",
    "own_env:Registered-v7": "Gymnasium cannot make .*v7.* It provides .*v0",
    "own_env:Picture": "observations are Box.*: register it wrapped in .*FlattenObservation",
}


@pytest.mark.parametrize("env_id", WRONG)
def test_a_name_that_is_wrong_is_refused_with_the_fix(env_id):
    refused(f"env_id is {env_id!r}, .*{WRONG[env_id]}", build, config_of(env_id))


NOT_MADE = {
    "Stranger": "must inherit from the gymnasium.Env class",
    "NeedsSize": "'size'.* __init__ must not need arguments",
    "RaisesWhenMade": "ZeroDivisionError: division by zero",
    "WithoutSpaces": "action space",
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_a_class_that_cannot_be_made_is_told_with_what_it_raises(name):
    message = rf"environment own_env:{name} cannot be made .*{NOT_MADE[name]}"
    refused(message, build, config_of(f"own_env:{name}"), error=EnvironmentFailed)


FAILING = {
    "RaisesInReset": "KeyError: 'x'",
    "RaisesInStep": "ValueError: two lines",
    "WrongShape": "ValueError: .*shape",
}


@pytest.mark.filterwarnings("ignore:.*not within the observation space")
@pytest.mark.parametrize("name", FAILING)
def test_an_environment_that_raises_is_told_with_what_it_raises(name):
    message = rf"environment own_env:{name} failed \({FAILING[name]}.*\): fix it"
    config = config_of(f"own_env:{name}")
    refused(message, lambda: trained(build(config)), error=EnvironmentFailed)


def test_a_command_shows_the_line_of_an_environment_that_raises(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_cli("train", "--env-id", "own_env:RaisesInReset", "--out", "a")
    said = capsys.readouterr().err
    assert re.search(r'File ".*own_env.py", line \d+, in reset\n', said)
    assert said.splitlines()[-1].startswith("fp8rl: environment own_env:RaisesInReset failed")
