"""Films of agents, and the pictures of tasks that they are made of."""

import io
import json

import gymnasium
import numpy as np
import pytest
import torch
from helpers import refusal, refused, run_cli, small
from PIL import Image

from fp8rl.build import build
from fp8rl.cli.evaluate import gymnasium_stage
from fp8rl.disk import checkpoint
from fp8rl.env import Cart
from fp8rl.evaluate import evaluate, play, policy_of
from fp8rl.study.film import film_episode


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


for kind in (Screen, Blind):
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


@pytest.mark.parametrize(("greedy", "encoder"), [(True, "mlp"), (False, "gru")])
def test_a_film_shows_the_episode_that_an_evaluation_plays(greedy, encoder, monkeypatch):
    monkeypatch.setattr(Cart, "max_steps", 12)  # it is drawn step by step
    model = build(small(encoder=encoder, seed=3)).model
    wanted = evaluate(model, Cart(1, seed=5), greedy=greedy, seed=5)
    env = Cart(1, seed=5)
    film = film_episode(policy_of(model, env, greedy=greedy, seed=5), env, 25)
    assert film.episode_return == pytest.approx(wanted.item(), rel=1e-5)
    assert film.steps <= 12 and image_of(film.gif).n_frames == film.steps + 1


def test_a_film_shows_every_second_step_and_stays_at_the_end(monkeypatch):
    monkeypatch.setattr("fp8rl.study.film.MOST_FRAMES", 100)
    env = Cart(1, 0.0)
    film = film_episode(lambda obs: torch.ones(1, dtype=torch.int64), env, 25)
    assert film.episode_return == pytest.approx(play(lambda obs: torch.ones(1).long(), Cart(1, 0)))
    assert film.steps == 7
    found = image_of(film.gif)
    assert found.n_frames == 5 and found.info["loop"] == 0 and found.info["duration"] == 80
    found.seek(4)
    assert found.info["duration"] == 2000


def test_gymnasium_s_environments_are_filmed_below_a_title():
    env_id = "fp8rl-films/Screen-v0"
    env = gymnasium_stage(env_id, 0)
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
    ],
)
def test_what_gymnasium_cannot_render_is_refused_with_its_reason(name, reason):
    env_id = f"fp8rl-films/{name}-v0"
    refused(rf"env_id is '{env_id}', .*rendered \({reason}\)", gymnasium_stage, env_id, 0)


def test_eval_writes_a_film_and_does_not_replace_one_unasked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Cart, "max_steps", 12)
    run = saved(tmp_path)
    name = tmp_path / "films" / "agent.gif"
    run_cli("eval", run, "--film", name, "--episodes", 2)
    said = capsys.readouterr().out
    steps = image_of(name.read_bytes()).n_frames - 1
    assert f"\n{name} shows an episode of {steps} steps" in said
    before = name.read_bytes()
    assert "which exists" in refusal(capsys, "eval", run, "--film", name)
    assert name.read_bytes() == before
    run_cli("eval", run, "--film", name, "--episodes", 2, "--overwrite", "--seed", 1, "--json")
    assert json.loads(capsys.readouterr().out)["film"] == str(name)
    assert name.read_bytes() != before


def test_names_that_cannot_be_a_film_are_refused(tmp_path, capsys):
    run = saved(tmp_path)
    (tmp_path / "link.gif").symlink_to(tmp_path / "nowhere")
    for name, said in {
        "film.mp4": "use a name that ends in .gif",
        "link.gif": "which exists: use another name, or add --overwrite",
    }.items():
        assert said in refusal(capsys, "eval", run, "--film", tmp_path / name)
    assert not (tmp_path / "nowhere").exists()
