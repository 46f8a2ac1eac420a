import copy
import dataclasses
import itertools
import sys

import gymnasium
import numpy as np
import pytest
import torch

from fp8rl import __main__ as cli
from fp8rl import checkpoint
from fp8rl.devices import (
    EnvironmentFailed,
    GymEnv,
    Placement,
    check_devices,
    interface_of,
    sync_weights,
)
from fp8rl.env import BatchedEnv, dynamics
from fp8rl.evaluate import play
from fp8rl.losses import DUMMY
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.train import Config, collect, iterate, train

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


class Continuous(Counter):
    action_space = gymnasium.spaces.Box(-1, 1, (1,))


class Keyed(Counter):
    observation_space = gymnasium.spaces.Dict({"count": gymnasium.spaces.Discrete(8)})


class Picture(Counter):
    observation_space = gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)


ENVS = (Counter, Raises, Poisoned, Dies, Scarce, OldSeeds, Continuous, Keyed, Picture)
for env in ENVS:
    gymnasium.register(f"fp8rl-tests/{env.__name__}-v0", env, disable_env_checker=True)


def weights(history) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(history.model.parameters())


def test_a_tensor_on_another_device_is_named():
    cpu = torch.device("cpu")
    check_devices("the batch", cpu, obs=torch.zeros(1), state=None)
    with pytest.raises(ValueError, match=r"^the batch: reward is on meta, expected cpu: move it with .to\('cpu'\)$"):
        check_devices("the batch", cpu, obs=torch.zeros(1), reward=torch.zeros(1, device="meta"))


def test_a_policy_or_an_environment_on_another_device_is_refused():
    env, generator = BatchedEnv(2), torch.Generator()
    with pytest.raises(ValueError, match=r"the acting policy: encoder\.0\.weight is on meta, expected cpu"):
        collect(ActorCritic().to("meta"), env, 2, Precision("fp32"), generator)

    class Elsewhere(BatchedEnv):
        def step(self, *args):
            obs, reward, *ends = super().step(*args)
            return obs, reward.to("meta"), *ends

    with pytest.raises(ValueError, match="the environment's rollout: reward is on meta, expected cpu"):
        collect(ActorCritic(), Elsewhere(2), 2, Precision("fp32"), generator)


def test_weights_are_copied_never_shared():
    source, target = ActorCritic(), ActorCritic()
    sync_weights(source, target)
    pairs = list(zip(source.parameters(), target.parameters(), strict=True))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)
    with torch.no_grad():
        pairs[0][0].add_(1)
    assert not torch.equal(*pairs[0])
    quantized = Precision("fp8").prepare(copy.deepcopy(target))  # other modules, the same names
    sync_weights(source, quantized)
    assert torch.equal(quantized.encoder[2].weight, source.encoder[2].weight)


def test_weights_that_cannot_be_copied_are_refused():
    source = ActorCritic()
    with pytest.raises(ValueError, match="differ in architecture"):
        sync_weights(source, ActorCritic(width=32))
    alias = copy.deepcopy(source)
    alias.actor.weight = source.actor.weight
    with pytest.raises(ValueError, match=r"source and target share actor\.weight"):
        sync_weights(source, alias)


def test_named_devices_train_the_same_agent():
    plain = train(Config(**SHORT), progress=False)
    named = train(Config(**SHORT, device="cpu", placement=Placement("cpu", "cpu", "cpu", "cpu")), progress=False)
    assert torch.equal(weights(plain), weights(named))


@pytest.mark.parametrize("part", ["learn", "collect", "store", "evaluate"])
def test_a_device_that_is_not_there_is_named_by_its_part(part):
    with pytest.raises(ValueError, match=rf"^placement\.{part} is 'cuda:99' and torch cannot use it here: choose from cpu"):
        Config(placement=Placement(**{part: "cuda:99"}))


def test_fields_that_exclude_each_other():
    ahead = Placement(async_collect=True)
    with pytest.raises(ValueError, match="graph is True: leave it out"):
        Config(graph=True, placement=ahead)
    with pytest.raises(ValueError, match="graph is True: leave it out"):
        Config(graph=True, env_id="CartPole-v1")
    with pytest.raises(ValueError, match="hide_velocity is True: leave it out, CartPole-v1 does not have it"):
        Config(env_id="CartPole-v1", hide_velocity=True)


@pytest.mark.parametrize("fields", [{}, {"encoder": "gru", "hide_velocity": True}], ids=str)
def test_collecting_ahead_is_stale_by_one_update_and_repeats_bit_for_bit(fields):
    config = Config(steps=4_096, eval_every=0, eval_episodes=1, learning_rate=3e-3, replay_updates=0, **fields)
    turns = train(config, progress=False)
    ahead = dataclasses.replace(config, placement=Placement(async_collect=True))
    first, again = train(ahead, progress=False), train(ahead, progress=False)
    assert torch.equal(weights(first), weights(again)) and not torch.equal(weights(first), weights(turns))
    fresh, stale = turns.column("ess"), first.column("ess")
    assert stale[0] == fresh[0] and stale[1:].max() < fresh.min() and fresh.min() > 1 - 1e-6 and stale.min() > 0.5


def test_a_run_that_collects_ahead_resumes_bit_for_bit(tmp_path):
    config = Config(**SHORT, placement=Placement(async_collect=True), collect_precision="bf16")
    whole = train(config, progress=False)
    for stop in (1, 3, 4):
        checkpoint.save(tmp_path / "checkpoint.pt", next(itertools.islice(iterate(config), stop - 1, None)))
        resumed, start = checkpoint.resume(tmp_path / "checkpoint.pt")
        assert torch.equal(weights(train(resumed, False, start)), weights(whole))


def test_a_run_that_collected_ahead_goes_on_in_turn_and_back(tmp_path):
    path, config = tmp_path / "checkpoint.pt", Config(**SHORT, placement=Placement(async_collect=True))
    for placement in (Placement(), Placement(async_collect=True)):
        _, start = checkpoint.resume(path) if path.exists() else (None, None)
        checkpoint.save(path, next(iterate(config, start=start)))
        config, _ = checkpoint.resume(path, placement=placement)
    config, start = checkpoint.resume(path, placement=Placement())
    history = next(iterate(config, start=start))
    assert history.snapshot()["generators"][1] is None  # acting and drawing share one stream again
    ring = history.ring
    batch = ring.sample(200, ring.size, torch.Generator().manual_seed(0))
    expected = dynamics(batch.obs[:-1], batch.action)[batch.valid]
    torch.testing.assert_close(expected, batch.obs[1:][batch.valid])  # no step leads from one place to another


def test_acting_and_drawing_never_share_numbers_by_chance(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, next(iterate(Config(**SHORT))))
    config, start = checkpoint.resume(path, placement=Placement(async_collect=True))
    acting, drawing = next(iterate(config, start=start)).snapshot()["generators"]
    assert not torch.equal(acting, drawing)


def test_collecting_ahead_learns():
    assert train(Config(steps=20_480, placement=Placement(async_collect=True)), progress=False).final_return >= 195


def test_interface_of_an_environment():
    cart = interface_of("CartPole-v1")
    assert (cart.num_actions, cart.first_action, cart.max_steps) == (2, 0, 500)
    assert cart.high[0] == pytest.approx(4.8) and cart.low == tuple(-x for x in cart.high)
    counter = interface_of("fp8rl-tests/Counter-v0")
    assert (counter.num_actions, counter.first_action, counter.max_steps) == (3, 5, 10_000)


@pytest.mark.parametrize(
    "env_id, reason",
    [
        ("Nothing-v0", "which Gymnasium cannot make"),
        ("no_such_package:Nothing-v0", "which Gymnasium cannot make"),
        ("fp8rl-tests/Continuous-v0", "whose actions are Box, not Discrete"),
        ("fp8rl-tests/Keyed-v0", r"whose observations are Dict\[\], not a flat Box: register it wrapped in .*FlattenObservation"),
        ("fp8rl-tests/Picture-v0", r"whose observations are Box\[8, 8\], not a flat Box"),
    ],
)
def test_environments_of_another_kind_are_refused_in_one_line(env_id, reason):
    with pytest.raises(ValueError, match=f"^env_id is '{env_id}', {reason}") as caught:
        Config(env_id=env_id)
    assert "\n" not in str(caught.value)


def test_a_codec_that_needs_bounds_refuses_an_environment_without():
    with pytest.raises(ValueError, match=r"codec is 'int8' and feature 0 has bounds \[-inf, inf\]: give finite"):
        next(iterate(Config(env_id="fp8rl-tests/Counter-v0", codec="int8", **SHORT)))


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
        env, generator = GymEnv("CartPole-v1", 2, seed=3, vectorization=vectorization), torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        rollouts.append(collect(ActorCritic(4), env, 40, Precision("fp32"), generator))
        env.close()
    for ours, theirs in zip(*rollouts, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert (rollouts[0].flags & DUMMY).any()


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_the_package_s_environment_behind_gymnasium_is_the_same(vectorization):
    env, plain = GymEnv("fp8rl:fp8rl/CustomEnv-v0", 4, vectorization=vectorization), BatchedEnv(4)
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
    assert play(lambda obs: torch.full((len(obs),), 1), 3, env_id="fp8rl-tests/Counter-v0").tolist() == [42] * 3


def test_evaluation_starts_unlike_training_and_always_the_same():
    seen = []

    def policy(obs):
        seen.append(obs)
        return torch.zeros(len(obs), dtype=torch.long)

    first, again = (play(policy, 4, env_id="CartPole-v1", vectorization=kind) for kind in ("sync", "async"))
    assert np.array_equal(first, again) and 5 < first.min() < first.max() < 15
    assert not torch.isin(GymEnv("CartPole-v1", 4).obs, seen[0]).any()


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_learns_to_hold_the_pole(precision):
    fields = {"env_id": "CartPole-v1", "vectorization": "vector_entry_point", "gamma": 0.98, "reward_scale": 0.02}
    history = train(Config(steps=40_960, eval_every=0, eval_episodes=20, precision=precision, **fields), progress=False)
    assert history.final_return >= 150  # actions at random hold it for 22 steps


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    "name, what", [("Raises", "ZeroDivisionError: the pole is not defined"), ("Dies", "a process of it died|SystemExit")]
)
def test_an_environment_that_fails_is_one_line(name, what, vectorization):
    if (name, vectorization) == ("Dies", "sync"):
        pytest.skip("it would end this process")
    env = GymEnv(f"fp8rl-tests/{name}-v0", 2, vectorization=vectorization)
    with pytest.raises(
        EnvironmentFailed,
        match=f"^environment fp8rl-tests/{name}-v0 failed .{what}.: mend it, and resume if there is a checkpoint$",
    ):
        for _ in range(7):
            env.step(torch.zeros(2, dtype=torch.long))
    env.close()


def test_a_lost_process_does_not_hang():
    env = GymEnv("fp8rl-tests/Counter-v0", 3, vectorization="async")
    env.envs.processes[1].kill()
    with pytest.raises(EnvironmentFailed, match="a process of it died"):
        for _ in range(3):
            env.step(torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("name, line", [("Raises", "fp8rl-tests/Raises-v0 failed"), ("Poisoned", "obs from the environment")])
def test_the_last_checkpoint_stands_when_the_environment_fails(name, line, tmp_path, monkeypatch, capsys):
    whole = gymnasium.spec(f"fp8rl-tests/{name}-v0").entry_point
    monkeypatch.setattr(whole, "step", Counter.step)
    fields = ["--env-id", f"fp8rl-tests/{name}-v0", "--steps", "4096", "--eval-episodes", "1", "--out", str(tmp_path / "a")]
    saved = []

    def save(path, history, ring, keep=checkpoint.save):
        keep(path, history, ring)
        saved.append(path.read_bytes())
        if len(saved) == 3:
            monkeypatch.undo()  # from now on it fails

    monkeypatch.setattr(cli.checkpoint, "save", save)
    monkeypatch.setattr(sys, "argv", ["fp8rl", "train", *fields, "--checkpoint-every", "1"])
    with pytest.raises(SystemExit):
        cli.main()
    (error,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("fp8rl: ")]
    assert line in error and (tmp_path / "a" / "checkpoint.pt").read_bytes() == saved[2]
    config, start = checkpoint.resume(tmp_path / "a" / "checkpoint.pt")
    assert start["iteration"] == 3
    # A Gymnasium environment begins new episodes, behind a dummy row that parts them from the old ones.
    monkeypatch.setattr(whole, "step", Counter.step)
    history = next(iterate(config, start=start))
    assert len(history) == 4 and history.ring.size == 4 * 32 + 1


def test_a_copy_that_cannot_be_made_is_one_line():
    with pytest.raises(
        EnvironmentFailed, match=r"^environment fp8rl-tests/Scarce-v0 failed \(OSError: no licence left\): mend it"
    ):
        GymEnv("fp8rl-tests/Scarce-v0", 3)


def test_seeds_fit_old_generators():
    assert play(lambda obs: torch.zeros(len(obs), dtype=torch.long), 2, env_id="fp8rl-tests/OldSeeds-v0").tolist() == [35, 35]


def test_a_batched_form_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="vectorization is 'vector_entry_point', which fp8rl-tests/Counter-v0 lacks"):
        GymEnv("fp8rl-tests/Counter-v0", 2, vectorization="vector_entry_point")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("places", list(itertools.product(("cpu", "cuda"), repeat=4)))
def test_every_placement_trains(places):
    for async_collect in (False, True):
        config = Config(steps=20_480, placement=Placement(*places, async_collect=async_collect))
        history = train(config, progress=False)
        assert history.final_return >= 195
        assert next(history.model.parameters()).device.type == places[0] and history.ring.device.type == places[2]
