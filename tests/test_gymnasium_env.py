import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Tuple
from helpers import after, refused, resumed, small, trained

from fp8rl.build import build
from fp8rl.disk import checkpoint
from fp8rl.distribution import Gaussian
from fp8rl.evaluate import play
from fp8rl.tasks.gymnasium_env import EnvironmentFailed, GymEnv

# Which Counter is
pytestmark = pytest.mark.filterwarnings("ignore:.*without a time limit")


class Counter(gymnasium.Env):
    """Counts its steps; ends at the seventh. `see`: what it makes of its observations. `sixth`:
    what it makes of the results of its sixth step."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Discrete(3, start=5)
    see = staticmethod(lambda obs: obs)
    sixth = staticmethod(lambda *results: results)

    def __init__(self, **changes):
        vars(self).update(changes)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.see(np.zeros(2)), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        results = (
            self.see(np.array([self.count, action], np.float64)),
            float(action),
            self.count == 7,
            False,
            {},
        )
        return results if self.count != 6 else self.sixth(*results)


class Wide(Counter):
    """Its observations end with the action that it got."""

    observation_space = Box(-100, 100, (3,))
    action_space = Box(np.array([-3, 10], dtype=np.float32), np.array([1, 30], dtype=np.float32))

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        return np.array([1, *action], dtype=np.float32), 0.0, False, False, {}


def register(name: str, env=Counter, kwargs=None, **options) -> None:
    gymnasium.register(
        f"fp8rl-tests/{name}-v0", env, disable_env_checker=True, kwargs=kwargs or {}, **options
    )


# Environments that are refused, by what the agent cannot learn from.
REFUSED = {
    "Nothing": None,  # not registered
    "Many": {"action_space": Discrete(257)},
    "Unbounded": {"action_space": Box(-np.inf, np.inf, (2,))},
    "Huge": {"action_space": Box(-3e38, 3e38, (2,))},  # high - low is infinite
    "Grid": {"action_space": Box(-1, 1, (2, 3))},
    "Blind": {"observation_space": Box(0, 1, (0,))},
    "Listed": {"observation_space": Sequence(Discrete(8))},
    "Picture": {"observation_space": Box(0, 255, (8, 8), np.uint8)},
}
for env in (Counter, Wide):
    register(env.__name__, env)
for name, kwargs in REFUSED.items():
    if kwargs is not None:
        register(name, kwargs=kwargs)
register("Limited", max_episode_steps=7)
register("Poisoned", kwargs={"sixth": lambda obs, *rest: (obs * np.nan, *rest)})


def test_interface_of_an_environment():
    cart = GymEnv("CartPole-v1", 1)
    assert (cart.num_actions, cart.actions, cart.max_steps) == (2, 0, 500)
    assert cart.bounds[1][0] == pytest.approx(4.8)
    with pytest.warns(UserWarning, match="without a time limit, .* 10,000 steps: register it"):
        counter = GymEnv("fp8rl-tests/Counter-v0", 1)
    assert (counter.num_actions, counter.actions, counter.max_steps) == (3, 5, 10_000)
    pendulum = GymEnv("Pendulum-v1", 1)
    low, high = pendulum.actions
    assert (pendulum.num_actions, pendulum.max_steps) == (1, 200)
    assert (low.tolist(), high.tolist()) == ([-2.0], [2.0])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learned_from_is_refused(name):
    env_id = f"fp8rl-tests/{name}-v0"
    refused(f"env_id is '{env_id}'", build, small(env_id=env_id))


def test_steps_are_gymnasium_s_own():
    plain = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    env = GymEnv("CartPole-v1", 3, seed=7)
    np.testing.assert_array_equal(env.obs, plain.reset(seed=7)[0])
    ended = 0
    for action in torch.randint(2, (60, 3)):
        resets = env.done.clone()
        ours = env.step(action)
        for one, other in zip(ours, plain.step(action.numpy()), strict=False):
            np.testing.assert_array_equal(one, other)
        assert not ours[1][resets].any() and not env.done[resets].any()
        ended += int(ours[2].sum())
    assert ended > 3 and env.obs.dtype == torch.float32


# Observations of other spaces than a Box, from a count and an action, and the features that they
# become.
COUNT, NUMBER = Discrete(8), Box(0, 9, (1,), np.float64)
SPACES = {
    "Digit": (COUNT, lambda obs: int(obs[0]), [0, 1, 0, 0, 0, 0, 0, 0]),
    "Keyed": (
        Dict(a=NUMBER, b=Tuple((COUNT,))),
        lambda obs: {"a": obs[1:], "b": (int(obs[0]),)},
        [6, 0, 1, 0, 0, 0, 0, 0, 0],
    ),
}
for name, (space, see, _) in SPACES.items():
    register(name, kwargs={"observation_space": space, "see": see})


@pytest.mark.parametrize(("name", "vectorization"), [("Digit", "sync"), ("Keyed", "async")])
def test_observations_of_other_spaces_become_features(name, vectorization):
    features = SPACES[name][2]
    env = GymEnv(f"fp8rl-tests/{name}-v0", 2, vectorization=vectorization)
    assert len(env.bounds[0]) == len(features) == env.obs.shape[1]
    obs, *_ = env.step(torch.ones(2, dtype=torch.long))  # the second of three actions from 5 up
    assert obs.tolist() == 2 * [features]
    env.close()


def test_actions_that_do_not_start_at_zero():
    env = GymEnv("fp8rl-tests/Counter-v0", 2)
    obs, reward, _, _ = env.step(torch.tensor([0, 2]))
    assert obs.tolist() == [[1, 5], [1, 7]] and reward.tolist() == [5, 7]
    assert (
        play(lambda obs: torch.full((len(obs),), 1), GymEnv("fp8rl-tests/Counter-v0", 3)).tolist()
        == [42] * 3
    )


def test_a_lost_process_does_not_hang():
    env = GymEnv("fp8rl-tests/Counter-v0", 3, vectorization="async")
    env.envs.processes[1].kill()
    with pytest.raises(EnvironmentFailed, match="one of its processes died"):
        for _ in range(3):
            env.step(torch.zeros(3, dtype=torch.long))


def test_a_time_limit_that_says_both_ends_is_termination_alone():
    env = GymEnv("fp8rl-tests/Limited-v0", 2)
    *_, last = (env.step(torch.zeros(2, dtype=torch.long)) for _ in range(7))  # where both come
    assert [end.tolist() for end in last[2:]] == [[True, True], [False, False]]


def test_observations_that_are_no_numbers_are_refused():
    refused("obs from", trained, small(env_id="fp8rl-tests/Poisoned-v0", steps=4096))


def test_a_resumed_run_s_ring_parts_its_new_episodes_from_the_old_ones(tmp_path):
    path = tmp_path / "checkpoint.pt"
    config = small(
        env_id="fp8rl-tests/Counter-v0",
        steps=4_096,
        eval_every=0,
        rollout_length=10,
        slice_length=5,
        batch_size=50,
    )
    checkpoint.save(path, after(2, build(config)))
    run = after(3, resumed(path))
    batch = run.ring.sample(100, run.ring.size)
    count = batch.obs[:, :, 0]
    assert (
        torch.equal(count[1:][batch.valid], count[:-1][batch.valid] + 1)
        and (count[1:][~batch.valid] == 0).all()
    )
    # Of whole episodes, seven steps of 5 or more
    assert run.history.column("train_return")[1:].min() >= 35


def test_actions_are_scaled_to_the_bounds_and_clipped_to_them():
    env = GymEnv("fp8rl-tests/Wide-v0", 3)
    assert env.num_actions == 2 and env.distribution is Gaussian
    obs, *_ = env.step(torch.tensor([[0.0, 0.0], [-1.0, 0.5], [-7.0, 9.0]]))
    np.testing.assert_allclose(obs[:, 1:], [[-1, 20], [-3, 25], [-3, 30]])
    with pytest.raises(
        FloatingPointError, match="action is not a number, because the policy's weights are not"
    ):
        env.step(torch.full((3, 2), math.nan))
