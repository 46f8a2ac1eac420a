import functools
import math
import os
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from helpers import after, resumed

from fp8rl import __main__ as cli
from fp8rl import checkpoint
from fp8rl.config import Config
from fp8rl.distribution import Gaussian
from fp8rl.env import Cart
from fp8rl.evaluate import play
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.rollout import DUMMY, collect
from fp8rl.scale.gym import EnvironmentFailed, GymEnv, interface_of
from fp8rl.scale.machine import Machine, build
from fp8rl.train import train

pytestmark = pytest.mark.filterwarnings("ignore:.*registered without a time limit")  # which Counter is
SHORT = {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 5}


class Counter(gymnasium.Env):
    """Counts its steps; ends at the seventh. What else it does is said by its class."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        return np.array([self.count, action], np.float64), float(action), self.count == 7, False, {}


class Raises(Counter):
    def step(self, action):
        if self.count == 5:
            raise ZeroDivisionError("the pole\nis not defined")
        return super().step(action)


class Poisoned(Counter):
    def step(self, action):
        obs, *rest = super().step(action)
        return obs / (self.count != 5), *rest


class Dies(Counter):
    def step(self, action):
        if self.count == 5:
            sys.exit(1)  # of the process that it runs in
        return super().step(action)


class Scarce(Counter):
    """Of which there can be but two at a time, one of them to ask for its spaces."""

    made = 0

    def __init__(self):
        type(self).made += 1
        if self.made > 2:
            raise OSError("no licence left")


class OldSeeds(Counter):
    def reset(self, *, seed=None, options=None):
        np.random.RandomState(seed)  # takes 32 bits
        return super().reset(seed=seed, options=options)


class Unbounded(Counter):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))


class Grid(Counter):
    action_space = gymnasium.spaces.Box(-1, 1, (2, 3))


class Whole(Counter):
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.int64)


class Several(Counter):
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])


class Wide(Counter):
    """Its observations end with the action that it got."""

    observation_space = gymnasium.spaces.Box(-100, 100, (3,))
    action_space = gymnasium.spaces.Box(np.array([-3, 10], dtype=np.float32), np.array([1, 30], dtype=np.float32))

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        return np.array([1, *action], dtype=np.float32), 0.0, False, False, {}


class Many(Counter):
    action_space = gymnasium.spaces.Discrete(257)


class Single(Counter):
    action_space = gymnasium.spaces.Discrete(1)


class Blind(Counter):
    observation_space = gymnasium.spaces.Box(0, 1, (0,))


class Quits(Counter):
    """Calls sys.exit(0) in the method that `when` names."""

    def __init__(self, when):
        self.when = when
        self.quit("init")

    def quit(self, where):
        if where == self.when:
            sys.exit(0)

    def reset(self, **kwargs):
        self.quit("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.quit("step")
        return super().step(action)


class QuitsElsewhere(Quits):
    """When it is made, but not in this process."""

    here = os.getpid()

    def __init__(self):
        super().__init__("" if os.getpid() == self.here else "init")


class Odd(Counter):
    """Every observation is what `see` makes of it."""

    def __init__(self, see):
        self.see = see

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return self.see(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.see(obs), *rest


class Old(Counter):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class Interrupted(Counter):
    def step(self, action):
        raise KeyboardInterrupt


class Large(Counter):
    """Its sixth observation and reward are larger by these factors."""

    def __init__(self, obs, reward):
        self.factors = obs, reward

    def step(self, action):
        obs, reward, *rest = super().step(action)
        large = self.factors if self.count == 6 else (1, 1)
        return obs * large[0], reward * large[1], *rest


class OddVector(gymnasium.vector.VectorEnv):
    """A batched form whose answers are what `change` makes of them."""

    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs, change):
        self.num_envs, self.change = num_envs, change

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 2)), {}

    def step(self, actions):
        flags = np.zeros(self.num_envs, dtype=bool)
        return self.change(np.zeros((self.num_envs, 2)), np.zeros(self.num_envs), flags, flags, {})


class Keyed(Counter):
    observation_space = gymnasium.spaces.Dict({"count": gymnasium.spaces.Discrete(8)})


class Picture(Counter):
    observation_space = gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)


ENVS = (Counter, Raises, Poisoned, Dies, Scarce, OldSeeds, Many, Single, Blind, Keyed, Picture)
ENVS += (Unbounded, Grid, Whole, Several, Wide)
for env in (*ENVS, QuitsElsewhere, Old, Interrupted):
    gymnasium.register(f"fp8rl-tests/{env.__name__}-v0", env, disable_env_checker=True)
gymnasium.register("fp8rl-tests/Limited-v0", Counter, disable_env_checker=True, max_episode_steps=7)
for when in ("init", "reset", "step"):
    gymnasium.register(f"fp8rl-tests/Quits-{when}-v0", Quits, disable_env_checker=True, kwargs={"when": when})
for name, see in {
    "short": lambda obs: obs[:1],
    "row": lambda obs: obs[None],
    "object": lambda obs: obs.astype(object),
    "words": lambda obs: obs.astype(str),
    "ragged": lambda obs: [obs, 0],
}.items():
    gymnasium.register(f"fp8rl-tests/Odd-{name}-v0", Odd, disable_env_checker=True, kwargs={"see": see})
for name, change in {
    "obs": lambda obs, *rest: (obs[:, :1], *rest),
    "object": lambda obs, *rest: (obs.astype(object), *rest),
    "reward": lambda obs, reward, *rest: (obs, reward[:, None], *rest),
    "flags": lambda obs, reward, terminated, *rest: (obs, reward, terminated[:1], *rest),
    "four": lambda obs, reward, terminated, truncated, info: (obs, reward, terminated, info),
}.items():
    form = functools.partial(OddVector, change=change)
    gymnasium.register(f"fp8rl-tests/OddVector-{name}-v0", Counter, vector_entry_point=form, disable_env_checker=True)
for name, factors in {"obs": {"obs": 1e30, "reward": 1}, "reward": {"obs": 1, "reward": 1e30}}.items():
    gymnasium.register(f"fp8rl-tests/Large-{name}-v0", Large, disable_env_checker=True, kwargs=factors)


def test_interface_of_an_environment():
    cart = interface_of("CartPole-v1")
    assert (cart.num_actions, cart.actions, cart.max_steps) == (2, 0, 500)
    low, high = cart.bounds
    assert high[0] == pytest.approx(4.8) and low == tuple(-x for x in high)
    counter = interface_of("fp8rl-tests/Counter-v0")
    assert (counter.num_actions, counter.actions, counter.max_steps) == (3, 5, 10_000)
    number, (low, high), steps = interface_of("Pendulum-v1")[1:]
    assert (number, low.tolist(), high.tolist(), steps) == (1, [-2.0], [2.0], 200)


def test_a_name_that_is_registered_again_has_another_interface():
    for env, expected in ((Counter, 3), (Wide, 2)):
        gymnasium.registry.pop("fp8rl-tests/Again-v0", None)
        gymnasium.register("fp8rl-tests/Again-v0", env)
        assert interface_of("fp8rl-tests/Again-v0").num_actions == expected


@pytest.mark.parametrize(
    "env_id, reason",
    [
        ("Nothing-v0", "which Gymnasium cannot make"),
        ("no_such_package:Nothing-v0", "which Gymnasium cannot make"),
        ("fp8rl-tests/Many-v0", r"whose actions are Discrete\(257\): choose one with 2 to 256 actions"),
        ("fp8rl-tests/Single-v0", r"whose actions are Discrete\(1\): choose one with 2 to 256 actions"),
        ("fp8rl-tests/Blind-v0", r"whose observations are Box\[0\], without features: choose another"),
        (
            "fp8rl-tests/Unbounded-v0",
            r"whose actions are Box\[2\] of float32 without finite bounds: register .*TransformAction",
        ),
        (
            "fp8rl-tests/Grid-v0",
            r"whose actions are Box\[2, 3\] of float32: register it wrapped in .*, with a flat Box",
        ),
        ("fp8rl-tests/Whole-v0", r"whose actions are Box\[2\] of int64: register it wrapped in .*, with a flat Box of floats"),
        ("fp8rl-tests/Several-v0", r"whose actions are MultiDiscrete\(\[2 3\]\): register it wrapped in .*, with a Discrete or"),
        ("fp8rl-tests/Keyed-v0", r"whose observations are Dict\[\], not a flat Box: register it wrapped in .*FlattenObservation"),
        ("fp8rl-tests/Picture-v0", r"whose observations are Box\[8, 8\], not a flat Box"),
    ],
)
def test_environments_of_another_kind_are_refused_in_one_line(env_id, reason):
    with pytest.raises(ValueError, match=f"^env_id is '{env_id}',? {reason}") as caught:
        build(Config(env_id=env_id))
    assert "\n" not in str(caught.value)


def test_a_codec_that_needs_bounds_refuses_an_environment_without():
    with pytest.raises(ValueError, match=r"codec is 'int8' and feature 0 has bounds \[-inf, inf\]: use finite"):
        build(Config(env_id="fp8rl-tests/Counter-v0", codec="int8"))


def test_steps_are_gymnasium_s_own():
    actions = torch.randint(2, (60, 3), generator=torch.Generator().manual_seed(0))
    plain = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    env = GymEnv("CartPole-v1", 3, seed=7)
    assert env.obs.dtype == torch.float32 and np.array_equal(env.obs.numpy(), plain.reset(seed=7)[0])
    ended = 0
    for action in actions:
        resets = env.done.clone()
        obs, reward, terminated, truncated = env.step(action)
        expected = plain.step(action.numpy())
        for ours, theirs in zip((obs, reward, terminated, truncated), expected, strict=False):
            assert np.array_equal(ours.numpy(), theirs)
        assert (reward[resets] == 0).all() and not env.done[resets].any() and (obs[resets].abs() <= 0.05).all()
        ended += int(terminated.sum())
    assert ended > 3


def test_processes_and_one_process_give_the_same_rollout():
    rollouts = []
    for vectorization in ("sync", "async"):
        env = GymEnv("CartPole-v1", 2, seed=3, vectorization=vectorization)
        torch.manual_seed(0)
        rollouts.append(collect(ActorCritic(4), env, 40, Precision("fp32")))
        env.close()
    for ours, theirs in zip(*rollouts, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert (rollouts[0].flags & DUMMY).any()


def test_the_package_s_environment_behind_gymnasium_is_the_same():
    env, plain = GymEnv("fp8rl:fp8rl/CustomEnv-v0", 4), Cart(4)
    plain.state = plain.obs = env.obs.clone()
    right = torch.ones(4, dtype=torch.long)
    for _ in range(9):  # a constant push leaves the bounds after eight
        ours, theirs = env.step(right), plain.step(right)
        for x, y in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(x, y)
        if env.done.any():
            break
        torch.testing.assert_close(ours[0], theirs[0])
    assert env.done.any()


def test_actions_that_do_not_start_at_zero():
    env = GymEnv("fp8rl-tests/Counter-v0", 2)
    obs, reward, _, _ = env.step(torch.tensor([0, 2]))
    assert obs.tolist() == [[1, 5], [1, 7]] and reward.tolist() == [5, 7]
    assert play(lambda obs: torch.full((len(obs),), 1), GymEnv("fp8rl-tests/Counter-v0", 3)).tolist() == [42] * 3


def evaluated(seed: int, vectorization: str, monkeypatch) -> tuple[torch.Tensor, float]:
    """The starts and the result of a new run's evaluation."""
    run = build(Config(env_id="CartPole-v1", eval_episodes=4, seed=seed), Machine(vectorization=vectorization))
    starts, policy = [], run.model.policy
    monkeypatch.setattr(run.model, "policy", lambda obs, state: starts.append(obs) or policy(obs, state))
    result = run.evaluate()
    assert result == run.evaluate() and not torch.isin(run.env.obs, starts[0]).any()
    run.close()
    return starts[0], result


def test_evaluation_starts_unlike_training_and_always_the_same(monkeypatch):
    (starts, result), (again, same), (others, _) = (
        evaluated(*case, monkeypatch) for case in ((0, "sync"), (0, "async"), (1, "sync"))
    )
    assert torch.equal(starts, again) and torch.equal(starts, others) and result == same > 5


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_learns_to_hold_the_pole(precision):
    fields = {"env_id": "CartPole-v1"}
    config = Config(steps=40_960, eval_every=0, eval_episodes=20, precision=precision, **fields)
    history = train(build(config, Machine(vectorization="vector_entry_point")), progress=False).history
    assert history.final_return >= 150  # actions at random hold it for 22 steps


OLD = "its step returns 4 values as in old gym, not obs, reward, terminated, truncated, info"
FAILING = {
    "Raises": "ZeroDivisionError: the pole is not defined",
    "Dies": "SystemExit: 1|one of its processes died",
    "Quits-init": "SystemExit: 0",
    "Quits-reset": "SystemExit: 0|one of its processes died",
    "Quits-step": "SystemExit: 0|one of its processes died",
    "Odd-short": r"ValueError: obs is float64\[1\], not float64\[2\]",
    "Odd-row": r"ValueError: obs is float64\[1, 2\], not float64\[2\]",
    "Odd-object": r"ValueError: obs is object\[2\], not float64\[2\]",
    "Odd-words": r"ValueError: obs is <U32\[2\], not float64\[2\]",
    "Odd-ragged": "ValueError: setting an array element with a sequence.*",
    "Old": OLD,
}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("name", FAILING)
def test_an_environment_that_fails_is_one_line(name, vectorization):
    line = f"^environment fp8rl-tests/{name}-v0 failed .({FAILING[name]}).: fix it, and resume if there is a checkpoint$"
    with pytest.raises(EnvironmentFailed, match=line) as caught:
        env = GymEnv(f"fp8rl-tests/{name}-v0", 2, vectorization=vectorization)
        for _ in range(7):
            env.step(torch.zeros(2, dtype=torch.long))
    assert "\n" not in str(caught.value)


def test_a_process_that_ends_while_its_environment_is_made_is_one_line():
    with pytest.raises(
        EnvironmentFailed, match=r"^environment fp8rl-tests/QuitsElsewhere-v0 failed .one of its processes died.: fix"
    ):
        GymEnv("fp8rl-tests/QuitsElsewhere-v0", 2, vectorization="async")


@pytest.mark.parametrize(
    "name, what",
    [
        ("obs", r"ValueError: obs is float64\[3, 1\], not float64\[3, 2\]"),
        ("object", r"ValueError: obs is object\[3, 2\], not float64\[3, 2\]"),
        ("reward", r"ValueError: reward is float64\[3, 1\], not float64\[3\]"),
        ("flags", r"ValueError: terminated is bool\[1\], not float64\[3\]"),
        ("four", OLD),
    ],
)
def test_a_batched_form_that_answers_in_another_form_is_one_line(name, what):
    env = GymEnv(f"fp8rl-tests/OddVector-{name}-v0", 3, vectorization="vector_entry_point")
    with pytest.raises(EnvironmentFailed, match=f"^environment fp8rl-tests/OddVector-{name}-v0 failed .{what}.: fix it"):
        env.step(torch.zeros(3, dtype=torch.long))


def test_a_program_that_its_environment_ends_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fp8rl", "train", "--env-id", "fp8rl-tests/Quits-step-v0", "--out", str(tmp_path / "a")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "fp8rl: environment fp8rl-tests/Quits-step-v0 failed (SystemExit: 0): fix it" in capsys.readouterr().err


def test_an_interrupt_passes_through():
    env = GymEnv("fp8rl-tests/Interrupted-v0", 2)
    with pytest.raises(KeyboardInterrupt):
        env.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("name, wrapper", [("obs", "NormalizeObservation"), ("reward", "NormalizeReward")])
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_numbers_that_are_too_large_are_not_blamed_on_the_learning_rate(name, wrapper, precision):
    run = build(Config(env_id=f"fp8rl-tests/Large-{name}-v0", precision=precision, **SHORT))
    line = (
        f"^{name} from the environment reaches [5-9]e.30, over .*, too large to compute with: register it wrapped in .*{wrapper}$"
    )
    with pytest.raises(ValueError, match=line):
        train(run, progress=False)


def test_a_time_limit_that_says_both_ends_is_termination_alone():
    env = GymEnv("fp8rl-tests/Limited-v0", 2)
    *_, last = (env.step(torch.zeros(2, dtype=torch.long)) for _ in range(7))  # where both come
    assert [end.tolist() for end in last[2:]] == [[True, True], [False, False]]


def test_an_environment_without_a_time_limit_is_told_once():
    gymnasium.register("fp8rl-tests/Told-v0", Counter)
    line = "^env_id is 'fp8rl-tests/Told-v0', registered without a time limit, .* 10,000 steps: register it with max_episode"
    with pytest.warns(UserWarning, match=line):
        GymEnv("fp8rl-tests/Told-v0", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GymEnv("fp8rl-tests/Told-v0", 2)
        GymEnv("fp8rl-tests/Limited-v0", 2)


def test_a_lost_process_does_not_hang():
    env = GymEnv("fp8rl-tests/Counter-v0", 3, vectorization="async")
    env.envs.processes[1].kill()
    with pytest.raises(EnvironmentFailed, match="one of its processes died"):
        for _ in range(3):
            env.step(torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("name, line", [("Raises", "fp8rl-tests/Raises-v0 failed"), ("Poisoned", "obs from the environment")])
def test_the_last_checkpoint_stands_when_the_environment_fails(name, line, tmp_path, monkeypatch, capsys):
    whole = gymnasium.spec(f"fp8rl-tests/{name}-v0").entry_point
    monkeypatch.setattr(whole, "step", Counter.step)
    fields = ["--env-id", f"fp8rl-tests/{name}-v0", "--steps", "4096", "--eval-episodes", "1", "--out", str(tmp_path / "a")]
    saved = []

    def save(path, run, ring, keep=checkpoint.save):
        keep(path, run, ring)
        saved.append(path.read_bytes())
        if len(saved) == 3:
            monkeypatch.undo()  # from now on it fails

    monkeypatch.setattr(cli.checkpoint, "save", save)
    monkeypatch.setattr(sys, "argv", ["fp8rl", "train", *fields, "--checkpoint-every", "1"])
    with pytest.raises(SystemExit):
        cli.main()
    (error,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("fp8rl: ")]
    assert line in error and (tmp_path / "a" / "checkpoint.pt").read_bytes() == saved[2]
    _, state = checkpoint.resume(tmp_path / "a" / "checkpoint.pt")
    assert len(state["history"]["iteration"]) == 3
    # A Gymnasium environment begins new episodes, behind a dummy row that parts them from the old ones.
    monkeypatch.setattr(whole, "step", Counter.step)
    run = after(1, resumed(tmp_path / "a" / "checkpoint.pt"))
    assert len(run.history) == 4 and run.ring.size == 4 * 32 + 1
    assert ((run.ring.fields["flags"][:, 96] & DUMMY) != 0).all()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_resumed_run_s_ring_parts_its_new_episodes_from_the_old_ones(ahead, tmp_path):
    machine, path = Machine(collect_ahead=ahead), tmp_path / "checkpoint.pt"
    config = Config(env_id="fp8rl-tests/Counter-v0", steps=4_096, eval_every=0, rollout_length=10, slice_length=5, batch_size=50)
    checkpoint.save(path, after(2, build(config, machine)))
    run = after(3, resumed(path, machine))
    batch = run.ring.sample(100, run.ring.size)
    count = batch.obs[:, :, 0]
    assert torch.equal(count[1:][batch.valid], count[:-1][batch.valid] + 1) and (count[1:][~batch.valid] == 0).all()
    assert run.history.column("train_return")[1:].min() >= 35  # of whole episodes, seven steps of 5 or more


def test_a_copy_that_cannot_be_made_is_one_line():
    with pytest.raises(
        EnvironmentFailed, match=r"^environment fp8rl-tests/Scarce-v0 failed \(OSError: no licence left\): fix it"
    ):
        GymEnv("fp8rl-tests/Scarce-v0", 3)


def test_seeds_fit_old_generators():
    run = build(Config(env_id="fp8rl-tests/OldSeeds-v0", eval_episodes=2))
    assert 35 <= run.evaluate() <= 49


def test_a_batched_form_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="vectorization is 'vector_entry_point', which fp8rl-tests/Counter-v0 does not support"):
        GymEnv("fp8rl-tests/Counter-v0", 2, vectorization="vector_entry_point")


def test_a_vectorization_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="vectorization is 'threads': choose from sync, async, vector_entry_point"):
        GymEnv("CartPole-v1", 2, vectorization="threads")


def test_a_task_has_its_discount_under_both_of_its_names():
    assert [GymEnv(name, 1).discount for name in ("fp8rl/Lqr-v0", "fp8rl:fp8rl/Lqr-v0", "CartPole-v1")] == [0.95, 0.95, 1.0]


def test_actions_are_scaled_to_the_bounds_and_clipped_to_them():
    env = GymEnv("fp8rl-tests/Wide-v0", 3)
    assert env.num_actions == 2 and env.distribution is Gaussian
    obs, *_ = env.step(torch.tensor([[0.0, 0.0], [-1.0, 0.5], [-7.0, 9.0]]))
    np.testing.assert_allclose(obs[:, 1:], [[-1, 20], [-3, 25], [-3, 30]])
    with pytest.raises(FloatingPointError, match="action is not a number, because the policy's weights are not"):
        env.step(torch.full((3, 2), math.nan))
