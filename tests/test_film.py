"""Films of agents, and the pictures of tasks that they are made of."""

import io
import json
import sys

import gymnasium
import numpy as np
import pytest
import torch
from helpers import bang_bang, refusal, refused, run_cli, small
from PIL import Image

from fp8rl.build import build
from fp8rl.disk import checkpoint
from fp8rl.env import Cart
from fp8rl.evaluate import evaluate, play, policy_of
from fp8rl.study.film import film_episode
from fp8rl.tasks.custom_env import Single
from fp8rl.tasks.drawing import picture_of_cart
from fp8rl.tasks.gymnasium_env import GymEnv, require_renderable


class Screen(gymnasium.Env):
    """A Gymnasium environment that shows how long it has been running."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    width = 700

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 0.5, self.steps == 7, False, {}

    def render(self):
        return np.full((200, self.width, 3), 20 * self.steps, np.uint8)


class Blind(Screen):
    metadata = {"render_modes": ["human"]}


class NeedsPackage(Screen):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled("no screen, run `pip install screen`")


class Flat(Screen):
    def render(self):
        return np.zeros(3)


for kind in (Screen, Blind, NeedsPackage, Flat):
    gymnasium.register(f"fp8rl-films/{kind.__name__}-v0", kind, max_episode_steps=20)


def image_of(gif: bytes) -> Image.Image:
    found = Image.open(io.BytesIO(gif))
    assert found.format == "GIF"
    return found


def frames_of(gif: bytes) -> list[np.ndarray]:
    found = image_of(gif)
    frames = []
    for k in range(found.n_frames):
        found.seek(k)
        frames.append(np.asarray(found.convert("RGB")))
    return frames


def saved(folder, **fields):
    """The folder of an agent that has not learned anything."""
    checkpoint.save(folder / "checkpoint.pt", build(small(**fields)))
    return folder


def test_a_picture_shows_the_state_below_a_title():
    before = picture_of_cart(torch.zeros(2), "step 0")
    assert before.dtype == np.uint8 and before.shape == (240, 480, 3)
    after = picture_of_cart(torch.full((2,), 0.3), "step 0")
    assert (before != after).any(-1).mean() > 0.002
    other_title = picture_of_cart(torch.zeros(2), "step 1")
    differs = np.flatnonzero((before != other_title).any((1, 2)))
    assert differs.size and differs.max() < 0.15 * 240  # the title alone


def test_gymnasium_renders_carts_alone():
    env = Single("fp8rl/Lqr-v0", render_mode="rgb_array")
    env.reset(seed=0)
    before = env.render()
    env.step(env.action_space.sample())
    assert before.dtype == np.uint8 and (before != env.render()).any()
    silent = Single("CartPole-v1")
    silent.reset(seed=0)
    assert silent.render() is None
    refused(".*CartPole cannot be drawn", Single, "CartPole-v1", render_mode="rgb_array")


@pytest.mark.parametrize(("greedy", "encoder"), [(True, "mlp"), (False, "gru")])
def test_a_film_shows_the_episode_that_an_evaluation_plays(greedy, encoder, monkeypatch):
    monkeypatch.setattr(Cart, "max_steps", 12)  # it is drawn step by step
    model = build(small(encoder=encoder, seed=3)).model
    wanted = evaluate(model, Cart(1, seed=5), greedy=greedy, seed=5)
    env = Cart(1, seed=5)
    film = film_episode(policy_of(model, env, greedy=greedy, seed=5), env, 25)
    assert film.episode_return == pytest.approx(wanted.item(), rel=1e-5)
    assert film.steps <= 12 and image_of(film.gif).n_frames == film.steps + 1


def test_a_film_ends_with_the_episode_and_stays_there():
    env = Cart(1, 0.0)
    film = film_episode(lambda obs: torch.ones(1, dtype=torch.int64), env, 25)
    assert film.episode_return == pytest.approx(play(lambda obs: torch.ones(1).long(), Cart(1, 0)))
    assert film.steps == 7
    found = image_of(film.gif)
    assert found.n_frames == 8 and found.info["loop"] == 0
    durations = []
    for k in range(8):
        found.seek(k)
        durations.append(found.info["duration"])
    assert durations == [40] * 7 + [2000]


def test_a_long_episode_shows_every_second_step(monkeypatch):
    monkeypatch.setattr("fp8rl.study.film.MOST_FRAMES", 15)
    monkeypatch.setattr(Cart, "max_steps", 30)
    film = film_episode(bang_bang, Cart(1, 0.0), 25)
    found = image_of(film.gif)
    assert film.steps == 30 and found.n_frames == 16 and found.info["duration"] == 80


def test_gymnasium_s_environments_are_filmed_below_a_title():
    env_id = "fp8rl-films/Screen-v0"
    assert require_renderable(env_id) == 10
    env = GymEnv(env_id, 1, render_mode="rgb_array")
    film = film_episode(lambda obs: torch.zeros(1, 1), env, 10)
    env.close()
    assert (film.steps, film.episode_return) == (7, 3.5)
    frames = frames_of(film.gif)
    assert [frame.shape for frame in frames] == [(30 + 137, 480, 3)] * 8  # 700 pixels made 480
    assert [int(frame[100, 100, 0]) for frame in frames] == [20 * k for k in range(8)]
    assert all((frame[:30] < 100).any() and (frame[0] == 255).all() for frame in frames)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("Blind", ".* unsupported render mode.*"),
        ("NeedsPackage", "no screen, run `pip install screen`"),
        ("Flat", r"its picture is float64\[3\]"),
    ],
)
def test_what_gymnasium_cannot_render_is_refused_with_its_reason(name, reason):
    env_id = f"fp8rl-films/{name}-v0"
    refused(rf"env_id is '{env_id}', .*rendered \({reason}\)", require_renderable, env_id)


def test_a_task_that_gymnasium_does_not_have_is_refused(tmp_path, capsys):
    run = saved(tmp_path, env_id="test_cli:Narrow")
    said = refusal(capsys, "eval", run, "--film", tmp_path / "a.gif", "--trust")
    assert said.startswith("env_id is 'test_cli:Narrow', which Gymnasium cannot make")
    assert not (tmp_path / "a.gif").exists()


def test_eval_writes_a_film_and_does_not_replace_one_unasked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Cart, "max_steps", 12)
    run = saved(tmp_path)
    name = tmp_path / "films" / "agent.gif"
    run_cli("eval", run, "--film", name, "--episodes", 2)
    said = capsys.readouterr().out
    film = image_of(name.read_bytes())
    assert said.startswith("mean return ") and f"\n{name} shows an episode of " in said
    assert f"{film.n_frames - 1} steps" in said
    before = name.read_bytes()
    assert "which exists" in refusal(capsys, "eval", run, "--film", name)
    assert name.read_bytes() == before
    run_cli("eval", run, "--film", name, "--episodes", 2, "--overwrite", "--seed", 1, "--json")
    assert json.loads(capsys.readouterr().out)["film"] == str(name)
    assert name.read_bytes() != before
    assert [path.name for path in name.parent.iterdir()] == ["agent.gif"]


def test_names_that_cannot_be_a_film_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Cart, "max_steps", 12)
    run = saved(tmp_path)
    (tmp_path / "folder.gif").mkdir()
    (tmp_path / "link.gif").symlink_to(tmp_path / "nowhere")
    for name, said in {
        "film.mp4": "use a name that ends in .gif",
        "link.gif": "which exists: use another name, or add --overwrite",
    }.items():
        assert said in refusal(capsys, "eval", run, "--film", tmp_path / name)
    run_cli("eval", run, "--film", tmp_path / "link.gif", "--overwrite", "--episodes", 2)
    assert not (tmp_path / "nowhere").exists()  # the link is replaced, not followed
    under_a_file = run / "checkpoint.pt" / "a.gif"
    said = refusal(capsys, "eval", run, "--film", under_a_file, "--episodes", 1)
    assert said.startswith(f"film is {under_a_file} and cannot be written (")


@pytest.mark.parametrize("env_id", ["CartPole-v1", "fp8rl/Lqr-v0"])
def test_tasks_of_the_package_are_drawn_by_gymnasium(env_id, tmp_path, capsys, monkeypatch):
    if env_id == "CartPole-v1":
        pytest.importorskip("pygame")
    monkeypatch.setattr("fp8rl.study.film.MOST_FRAMES", 10)
    run = saved(tmp_path, env_id=env_id)
    run_cli("eval", run, "--film", tmp_path / "a.gif", "--episodes", 2)
    assert "a.gif shows an episode of " in capsys.readouterr().out
    assert len(frames_of((tmp_path / "a.gif").read_bytes())) > 1


def test_a_package_that_gymnasium_needs_to_draw_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    refused("env_id is 'CartPole-v1', .*gymnasium.classic", require_renderable, "CartPole-v1")
