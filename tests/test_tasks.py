import math
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers import SHORT, Changed, after, assert_same, refused, small, trained, weights

from fp8rl.build import Machine, build, build_population
from fp8rl.config import Config
from fp8rl.distribution import Gaussian
from fp8rl.evaluate import play
from fp8rl.returns import RewardScale
from fp8rl.rollout import DUMMY, TERMINATED, Rollout, action_noise
from fp8rl.tasks import classic_control, lqr
from fp8rl.tasks.by_id import TASKS, task_of
from fp8rl.tasks.custom_env import Single
from fp8rl.tasks.gymnasium_env import GymEnv

LQR = "fp8rl/Lqr-v0"


def state_of(single: gymnasium.Env) -> torch.Tensor:
    """A single environment's state as a row, a copy."""
    return torch.tensor(np.asarray(single.unwrapped.state), dtype=torch.float32).view(1, -1)


@torch.inference_mode()
@pytest.mark.parametrize("env_id", TASKS)
def test_every_step_is_gymnasium_s(env_id):
    """2,000 random steps or more, with five ends and resets, from the same float32 states. Gymnasium
    computes in float64; one step in float32 may differ by some 1e-7 of the largest number in it,
    which for Acrobot is an acceleration of about 100 times 0.2 s."""
    single = gymnasium.make(f"fp8rl.tasks:{env_id}" if env_id == LQR else env_id)
    rng = np.random.default_rng(0)
    env, taken, steps, ends = None, None, 0, 0
    close = 1e-4 if env_id == "Acrobot-v1" else 1e-5
    single.action_space.seed(0)
    while steps < 2_000 or ends < 5:
        seen = [single.reset(seed=int(rng.integers(2**31)))[0]]
        states, actions, expected, over = [], [], [], False
        if env is not None:
            obs, reward, *flags = env.step(taken, state_of(single).expand_as(env.state))
            obs, reward, flags = obs[-1], reward[-1], [flag[-1] for flag in flags]
            np.testing.assert_allclose(obs, seen[0], rtol=0, atol=1e-6)
            assert reward == 0 and not any(flags) and env.elapsed[-1] == 0
            ends += 1
        while not over:
            states.append(state_of(single))
            actions.append(single.action_space.sample())
            obs, reward, terminated, truncated, _ = single.step(actions[-1])
            expected.append((reward, terminated, truncated and not terminated))
            seen.append(obs)
            over, steps = terminated or truncated, steps + 1
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
        assert env.elapsed.tolist() == list(range(1, len(actions) + 1))
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


def test_wrapped_angles_are_the_same_angles():
    angle = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    found = classic_control.wrapped(angle)
    assert (found >= -math.pi).all() and (found < math.pi).all()
    torch.testing.assert_close(found.sin(), angle.sin(), atol=1e-12, rtol=0)


def test_riccati_s_equation_holds_and_its_cost_is_what_the_best_controller_pays():
    gain, p = lqr.riccati()
    inner = np.linalg.inv(lqr.R + lqr.DISCOUNT * lqr.B.T @ p @ lqr.B)
    right = (
        lqr.Q
        + lqr.DISCOUNT * lqr.A.T @ (p - lqr.DISCOUNT * p @ lqr.B @ inner @ lqr.B.T @ p) @ lqr.A
    )
    assert np.abs(right - p).max() < 1e-10
    env = lqr.Lqr(500)
    start = env.obs
    pushes = lqr.optimal(start)
    cost = -play(lqr.optimal, env)
    np.testing.assert_allclose(cost, lqr.optimal_cost(start), rtol=1e-4)
    assert (pushes.abs() < 1).all() and gain.shape == (2,)
    for change in (0.9, 1.1):  # no other gain is better
        env.reset(start)
        assert -play(lambda obs, change=change: change * lqr.optimal(obs), env).mean() > cost.mean()


def test_leaving_the_track_is_never_worth_it():
    for push in (-1.0, 1.0):
        env = lqr.Lqr(100, seed=1)
        optimum = lqr.optimal_cost(env.obs)
        cost = torch.from_numpy(-play(lambda obs, push=push: torch.full((100, 1), push), env))
        assert (cost > 10 * optimum).all()


@pytest.mark.filterwarnings("ignore:.*Overriding environment OneTask-v0")
@pytest.mark.parametrize("env_id", TASKS)
def test_any_task_has_the_gymnasium_api(env_id):
    """The same numbers as the batched form, from the same starts, to the first end."""
    with warnings.catch_warnings():
        # CartPole's own
        warnings.filterwarnings(
            "ignore", message=".*Box observation space m.*imum value is.*infinity"
        )
        gymnasium.register("OneTask-v0", "fp8rl.tasks.custom_env:Single", kwargs={"task": env_id})
        env = gymnasium.make("OneTask-v0").unwrapped
        check_env(env, skip_render_check=True)
    first, _ = env.reset(seed=3)
    assert np.array_equal(first, env.reset(seed=3)[0])
    batched, ends = task_of(env_id)(1), [False, False]
    batched.reset(env.state)
    while not any(ends):
        action = env.action_space.sample()
        obs, reward, *ends, _ = env.step(action)
        theirs = batched.step(torch.as_tensor(action).unsqueeze(0))
        assert np.array_equal(obs, theirs[0][0])
        assert (reward, ends[0]) == (theirs[1].item(), theirs[2].item())
    assert env.elapsed == batched.elapsed and ends[1] == (env.elapsed == batched.max_steps)


def test_what_no_single_environment_has_is_refused():
    for task in ("LunarLander-v3", "fp8rl.tasks.lqr:riccati", None):
        refused(f"task is {task!r}, which is no TensorEnv", Single, task)
    env = gymnasium.make("fp8rl.tasks:fp8rl/Lqr-v0")
    env.reset()
    for action in (np.array([math.nan], dtype=np.float32), np.zeros(2, dtype=np.float32)):
        refused("action .* does not fit Box", env.unwrapped.step, action)


def test_a_task_of_one_s_own_is_found_by_its_module():
    assert task_of("fp8rl.tasks.lqr:Lqr") is lqr.Lqr
    assert task_of("CartPole-v1") is TASKS["CartPole-v1"]
    for env_id in ("fp8rl.tasks.lqr:riccati", "fp8rl.tasks:fp8rl/Lqr-v0", None):
        assert task_of(env_id) is None
    refused("env_id is 'no_such_module:Lqr'", task_of, "no_such_module:Lqr")


@pytest.mark.parametrize("env_id", ["Acrobot-v1", LQR])
def test_an_agent_of_a_population_is_a_run_of_its_own(env_id):
    # A low learning rate, so that differences in rounding do not grow
    fields = SHORT | {"steps": 1_024, "eval_every": 0, "learning_rate": 5e-4}
    configs = [small(seed=seed, env_id=env_id, **fields) for seed in (1, 2)]
    alone, among = trained(build(configs[1])), trained(build_population(configs))
    ours, theirs = among.histories(configs)[1], alone.history
    assert ours.columns.keys() == theirs.columns.keys()
    for name in theirs.columns.keys() - {"seconds"}:
        np.testing.assert_allclose(
            ours.column(name), theirs.column(name), rtol=2e-2, atol=2e-3, err_msg=name
        )
    model = among.model.network(among.configs.index(configs[1]))
    for name, weight in alone.model.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_in_tensors_resumes_bit_for_bit(env_id):
    config = small(env_id=env_id, steps=3 * 512, eval_every=0, eval_episodes=2)
    part = after(2, build(config))
    assert_same(trained(build(config, state=part.state_dict())), trained(build(config)))


def test_through_gymnasium_the_same_task_is_learned_from():
    config = Config(env_id=LQR, **SHORT | {"steps": 512, "eval_every": 0})
    run = trained(build(config, Machine(vectorization="sync")))
    assert isinstance(run.env, GymEnv) and run.env.discount == TASKS[LQR].discount
    assert run.history.final_return < 0 and 0 < run.history.last["outside"] < 1


def counting(rewards, flags) -> Rollout:
    reward = torch.tensor(rewards).unsqueeze(1)
    flags = torch.tensor(flags, dtype=torch.uint8).unsqueeze(1)
    length = len(reward)
    zeros = torch.zeros(length, 1)
    return Rollout(torch.zeros(length + 1, 1, 2), zeros, reward, flags, zeros)


def test_rewards_are_divided_by_the_size_of_discounted_returns():
    scale = RewardScale(1)
    assert scale.scale == 1
    scale.add(
        counting([1.0, 1.0, 0.0, 4.0], [0, TERMINATED, DUMMY, 0]), 0.5, lambda tensors: tensors
    )
    assert scale.scale.item() == pytest.approx(((1 + 1.5**2 + 4**2) / 4) ** -0.5)
    scale.add(counting([0.0], [0]), 0.5, lambda tensors: tensors)  # goes on from 4
    new, old = 0.01, 0.99 * (1 - 0.99**4)
    mean = (new * 2.0**2 + old * (1 + 1.5**2 + 4**2) / 4) / (new + old)
    assert scale.scale.item() == pytest.approx(mean**-0.5, rel=1e-5)


def test_the_size_of_rewards_changes_nothing():
    """Bit for bit, by a power of two."""
    config = Config(**SHORT | {"steps": 1_024})
    plain, scaled = build(config), build(config)
    scaled.collector = Changed(
        scaled.collector, lambda rollout: rollout._replace(reward=2.0**20 * rollout.reward)
    )
    assert torch.equal(weights(trained(plain)), weights(trained(scaled)))
