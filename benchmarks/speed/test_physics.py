"""Every contestant's own physics against fp8rl.env. `pytest benchmarks/speed`, where the
contestants are installed."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8rl.config import Config
from fp8rl.env import MAX_STEPS, dynamics, outcome

sys.path.insert(0, str(Path(__file__).parent))
common = pytest.importorskip("common")


@pytest.fixture
def given():
    """States over the whole space, some of which the next step takes out, and actions."""
    generator = torch.Generator().manual_seed(0)
    state = (2 * torch.rand(4096, 2, generator=generator) - 1) * torch.tensor([2.1, 1.9])
    return state, torch.randint(2, (4096,), generator=generator)


def test_jax(given):
    jax_loop = pytest.importorskip("jax_loop")
    state, action = given
    ages = np.where(np.arange(len(state)) % 3, 5, MAX_STEPS - 1)
    done = np.arange(len(state)) % 5 == 0
    noise = np.full((len(state), 2), 0.5, np.float32)
    before = jax_loop.State(state.numpy(), ages, done)
    (obs, age, ended), (reward, terminated, valid) = jax_loop.jax.vmap(jax_loop.env_step)(
        before, action.numpy(), noise
    )
    expected = dynamics(state, action)
    earned, out = (x.numpy() for x in outcome(expected))
    live = ~done
    np.testing.assert_allclose(np.asarray(obs)[live], expected.numpy()[live], rtol=0, atol=3e-7)
    np.testing.assert_allclose(np.asarray(obs)[done], 0.5 * Config.start_noise)
    np.testing.assert_allclose(np.asarray(reward)[live], earned[live], atol=1e-6)
    np.testing.assert_array_equal(terminated, out & live)
    np.testing.assert_array_equal(valid, live)
    np.testing.assert_array_equal(ended, (out | (ages == MAX_STEPS - 1)) & live)
    np.testing.assert_array_equal(age, np.where(done, 0, ages + 1))


def test_sb3(given):
    sb3 = pytest.importorskip("sb3")
    state, action = given
    envs = sb3.BatchedVecEnv(len(state))
    envs.reset()
    envs.state, envs.ages = (
        state.numpy().copy(),
        np.where(np.arange(len(state)) % 3, 5, MAX_STEPS - 1),
    )
    obs, reward, dones, infos = envs.step(action.numpy())
    expected = dynamics(state, action)
    (earned, out), late = (x.numpy() for x in outcome(expected)), envs.ages == 0
    np.testing.assert_array_equal(dones, out | (np.arange(len(state)) % 3 == 0))
    np.testing.assert_array_equal(late, dones)
    reached = np.stack(
        [info.get("terminal_observation", x) for info, x in zip(infos, obs, strict=True)]
    )
    np.testing.assert_allclose(reached, expected.numpy(), rtol=0, atol=3e-7)
    np.testing.assert_allclose(reward, common.REWARD_SCALE * earned, atol=1e-6)
    assert (np.abs(obs[dones]) <= Config.start_noise).all()
    assert [info["TimeLimit.truncated"] for info in infos if info] == (~out[dones]).tolist()
