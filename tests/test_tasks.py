import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import SHORT, after, assert_same, change_rollouts, refused, small, trained, weights

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.distribution import Gaussian
from fp8rl.evaluate import play
from fp8rl.rollout import action_noise
from fp8rl.tasks import lqr
from fp8rl.tasks.by_id import TASKS
from fp8rl.tasks.custom_env import Single

LQR = "fp8rl/Lqr-v0"


def state_of(single: gymnasium.Env) -> torch.Tensor:
    """A single environment's state as a row, a copy."""
    return torch.tensor(np.asarray(single.unwrapped.state), dtype=torch.float32).view(1, -1)


@torch.inference_mode()
@pytest.mark.parametrize("env_id", TASKS)
def test_every_step_is_gymnasium_s(env_id):
    """2,000 random steps or more, from the same float32 states. Gymnasium computes in float64; one
    step in float32 may differ by some 1e-7 of the largest number in it, which for Acrobot is an
    acceleration of about 100 times 0.2 s."""
    single = gymnasium.make(f"fp8rl.tasks:{env_id}" if env_id == LQR else env_id)
    single.action_space.seed(0)
    close = 1e-4 if env_id == "Acrobot-v1" else 1e-5
    steps = 0
    while steps < 2_000:
        seen = [single.reset(seed=steps)[0]]
        states, actions, expected, over = [], [], [], False
        while not over:
            states.append(state_of(single))
            actions.append(single.action_space.sample())
            obs, reward, terminated, truncated, _ = single.step(actions[-1])
            expected.append((reward, terminated, truncated and not terminated))
            seen.append(obs)
            over = terminated or truncated
        steps += len(actions)
        # Each step in an environment of its own, so that rounding does not add up; in the last one
        # the episode ends.
        env = TASKS[env_id](len(actions))
        np.testing.assert_allclose(env.reset(torch.cat(states)), seen[:-1], rtol=1e-5, atol=close)
        env.elapsed = torch.arange(len(actions), dtype=torch.int32)
        taken = torch.from_numpy(np.array(actions))
        if env.distribution is Gaussian:
            taken = (taken / single.action_space.high[0]).float()
        ours, got, *flags = env.step(taken)
        reward, *ended = map(np.array, zip(*expected, strict=True))
        np.testing.assert_allclose(ours, seen[1:], rtol=1e-5, atol=close)
        np.testing.assert_allclose(got, reward, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(torch.stack(flags), ended)
    assert single.spec.max_episode_steps == env.max_steps


@pytest.mark.parametrize("env_id", TASKS)
def test_observations_stay_inside_the_bounds_and_starts_inside_theirs(env_id):
    env = TASKS[env_id](64)
    low, high = torch.tensor(env.bounds)
    single = gymnasium.make(f"fp8rl.tasks:{env_id}" if env_id == LQR else env_id)
    np.testing.assert_allclose(single.observation_space.low, low, rtol=1e-6)
    np.testing.assert_allclose(single.observation_space.high, high, rtol=1e-6)
    outputs = torch.zeros(64, env.num_actions * (1 + (env.distribution is Gaussian)))
    for noise in action_noise(env, 300, 0, "actions", 0):
        assert (env.obs >= low - 1e-6).all() and (env.obs <= high + 1e-6).all()
        env.step(env.distribution.sample(outputs, noise))
    starts = TASKS[env_id](1000).draw(2).flatten(0, 1)
    theirs = [state_of(single)[0].tolist() for seed in range(200) if single.reset(seed=seed)]
    largest = np.abs(theirs).max(0)
    span = starts.abs().amax(0).numpy()
    assert (largest <= 1.02 * span).all() and (largest >= 0.9 * span).all()


def test_the_cost_of_riccati_s_equation_is_what_the_best_controller_pays():
    env = lqr.Lqr(500)
    start = env.obs
    cost = -play(lqr.optimal, env)
    np.testing.assert_allclose(cost, lqr.optimal_cost(start), rtol=1e-4)
    assert (lqr.optimal(start).abs() < 1).all()
    for change in (0.9, 1.1):  # no other gain is better
        env.reset(start)
        assert -play(lambda obs, change=change: change * lqr.optimal(obs), env).mean() > cost.mean()


@pytest.mark.filterwarnings(
    "ignore:.*Box observation space m.*imum value is.*infinity"
)  # CartPole's
@pytest.mark.parametrize("env_id", TASKS)
def test_any_task_has_the_gymnasium_api(env_id):
    env = Single(env_id)
    check_env(env, skip_render_check=True)
    first, _ = env.reset(seed=3)
    assert np.array_equal(first, env.reset(seed=3)[0])
    ends = [env.step(env.action_space.sample())[2:4] for _ in range(env.env.max_steps)]
    assert ends[-1][1] and not any(truncated for _, truncated in ends[:-1])


# A task, its states, actions and what each step gives, where random steps do not lead
FAR = {
    "the tip of Acrobot is up": ("Acrobot-v1", [3.1, 0.0, 0.0, 0.0], 1, (0.0, True)),
    "Acrobot turns fast": ("Acrobot-v1", [0.0, 0.0, 99.0, 0.0], 1, (-1.0, False)),
    "a push beyond the bounds": (LQR, [1.0, 0.0], [7.0], (-1.02, False)),
    "off the track": (LQR, [1.9, 1.0], [1.0], (-83.63, True)),
    "a torque beyond the bounds": ("Pendulum-v1", [0.0, 0.0], [3.0], (-0.004, False)),
}


@pytest.mark.parametrize("case", FAR)
def test_a_step_where_random_steps_do_not_lead(case):
    env_id, state, action, (reward, is_end) = FAR[case]
    env = TASKS[env_id](1)
    env.reset(torch.tensor([state]))
    obs, *found = env.step(torch.tensor([action]))
    assert found[0].item() == pytest.approx(reward, abs=1e-5) and found[1].item() == is_end
    assert (obs <= torch.tensor(env.bounds[1]) + 1e-6).all()


def test_what_no_single_environment_has_is_refused():
    for task in ("LunarLander-v3", "fp8rl.tasks.lqr:riccati", None):
        refused(f"task is {task!r}, which is no TensorEnv", Single, task)
    env = gymnasium.make("fp8rl.tasks:fp8rl/Lqr-v0")
    env.reset()
    for action in (np.array([math.nan], dtype=np.float32), np.zeros(2, dtype=np.float32)):
        refused("action .* does not fit Box", env.unwrapped.step, action)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_in_tensors_resumes_bit_for_bit(env_id):
    config = small(env_id=env_id, steps=3 * 512, eval_every=0, eval_episodes=2)
    part = after(2, build(config))
    assert_same(trained(build(config, state=part.state_dict())), trained(build(config)))


def test_the_size_of_rewards_changes_nothing():
    """Bit for bit, by a power of two."""
    config = Config(**SHORT | {"steps": 1_024})
    plain, scaled = build(config), build(config)
    change_rollouts(scaled, lambda rollout: rollout._replace(reward=2.0**20 * rollout.reward))
    assert torch.equal(weights(trained(plain)), weights(trained(scaled)))
