import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import bang_bang, refused

from fp8rl.env import MAX_STEPS, Cart, dynamics, outcome
from fp8rl.evaluate import play
from fp8rl.tasks.custom_env import CustomEnv, picture_of_cart
from fp8rl.tasks.gymnasium_env import GymEnv

NAME = "fp8rl.tasks:fp8rl/CustomEnv-v0"


def test_physics_is_the_published_one():
    position = velocity = 0.0
    state = torch.zeros(2)
    for push in torch.randint(2, (200,)):
        velocity += 0.1 if push == 1 else -0.1
        position += velocity
        velocity *= 0.95
        state = dynamics(state, push)
        np.testing.assert_allclose(state, [position, velocity], rtol=0, atol=1e-4)
        reward, out = outcome(state)
        assert reward.item() == pytest.approx(1 - 0.1 * abs(position), abs=1e-5)
        assert out.item() == (abs(position) > 2)


def test_reference_returns():
    right = lambda obs: torch.ones(len(obs), dtype=torch.long)  # noqa: E731
    assert play(right, Cart(1, 0.0)) == pytest.approx(6.22, abs=0.01)
    assert play(bang_bang, Cart(1, 0.0)).item() >= 198.9
    generator = torch.Generator().manual_seed(0)
    random = play(lambda obs: torch.randint(2, (len(obs),), generator=generator), Cart(5_000, 0.0))
    assert abs(random.mean() - 18.5) < 4 * random.std() / np.sqrt(len(random))


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_check_env_has_nothing_to_say(render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(NAME, render_mode=render_mode).unwrapped)


def test_a_picture_shows_where_the_cart_is():
    columns = [(picture_of_cart(x) == 0).all(2).any(0).nonzero()[0] for x in (-9, 0, 1)]
    assert [(int(x.min()), int(x.max())) for x in columns] == [(0, 19), (230, 249), (320, 339)]


@pytest.mark.parametrize("limit", [6, 7])
def test_leaving_at_the_time_limit_is_both_in_gymnasium(limit, monkeypatch):
    """A constant push from the origin leaves at the seventh step."""
    monkeypatch.setattr(Cart, "max_steps", limit)
    single = CustomEnv(start_noise=0.0)
    single.reset()
    ours = [single.step(1)[2:4] for _ in range(limit)]
    env = gymnasium.make_vec(NAME, 1, start_noise=0.0, max_episode_steps=limit)
    env.reset()
    theirs = [tuple(end.item() for end in env.step(np.array([1]))[2:4]) for _ in range(limit)]
    assert ours == theirs == [(False, False)] * (limit - 1) + [(limit == 7, True)]


def test_the_time_limit_is_known_to_gymnasium():
    spec = gymnasium.spec(NAME.split(":")[1])
    assert spec.max_episode_steps == MAX_STEPS == GymEnv(NAME, 1).max_steps
    env = Cart(1)  # which leaves at the last step: termination alone
    env.state, env.elapsed = torch.tensor([[1.9, 1.0]]), torch.tensor([MAX_STEPS - 1])
    assert [end.tolist() for end in env.step(torch.tensor([1]))[2:]] == [[True], [False]]


@pytest.mark.parametrize("policy", ["random", "bang-bang"])
def test_batched_equals_gymnasiums_vector_of_single_environments(policy):
    """Bit for bit through ends and NEXT_STEP resets, which ignore their action; without noise both
    start at the origin."""
    single = gymnasium.make_vec(NAME, num_envs=3, vectorization_mode="sync", start_noise=0.0)
    batched = Cart(3, start_noise=0.0)
    rng, ends = np.random.default_rng(0), np.zeros(2, dtype=int)
    np.testing.assert_array_equal(single.reset()[0], batched.obs)
    for _ in range(450):
        push = rng.integers(2, size=3) if policy == "random" else bang_bang(batched.obs).numpy()
        *expected, _ = single.step(push)
        ours = batched.step(torch.from_numpy(push))
        for a, b in zip(expected, ours, strict=True):
            np.testing.assert_array_equal(np.asarray(a, dtype=b.numpy().dtype), b)
        ends += [ours[2].sum().item(), ours[3].sum().item()]
    assert ends[0] > 20 if policy == "random" else ends.tolist() == [0, 6]


def test_what_is_outside_its_range_is_refused():
    refused("num_envs is ", Cart, 0)
    env = CustomEnv()
    env.reset()
    for action in (2, -1, 0.5, None):
        refused("action ", env.step, action)


OBSERVED = [
    {"extra_features": 3},
    {"hide_velocity": True},
    {"extra_features": 2, "hide_velocity": True},
]


@pytest.mark.parametrize("observed", OBSERVED, ids=str)
def test_options_change_what_is_seen_and_not_what_happens(observed):
    plain, other = Cart(4, 0.0), Cart(4, 0.0, **observed)
    seen = 1 if "hide_velocity" in observed else 2
    noise = []
    for push in torch.randint(2, (300, 4)):
        (obs, *expected), (wide, *results) = plain.step(push), other.step(push)
        assert torch.equal(wide[:, :seen], obs[:, :seen])
        assert all(torch.equal(x, y) for x, y in zip(expected, results, strict=True))
        noise.append(wide[:, seen:])
    noise = torch.stack(noise)
    assert noise.shape[-1] == observed.get("extra_features", 0)
    # Of 2^16 different numbers: 3600 independent ones would have 99 equal pairs.
    assert noise.unique().numel() >= 0.96 * noise.numel() and (noise.abs() <= 1).all()
    check_env(gymnasium.make(NAME, **observed).unwrapped)
