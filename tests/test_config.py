import dataclasses
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import refused, trained

from fp8rl.config import Config
from fp8rl.distribution import Gaussian
from fp8rl.env import Cart
from fp8rl.tasks.cartpole import CartPole
from fp8rl.tasks.lqr import Lqr
from fp8rl.tasks.pendulum import Pendulum

RANGES = {  # remedy -> what it is for
    "use at least 1": "steps num_envs rollout_length capacity slice_length batch_size eval_episodes hidden_size layers",
    "use 0 or more": "replay_updates eval_every halved_after extra_features entropy_coef value_coef seed",
    "use a positive number": "learning_rate max_grad_norm clip",
    "use a number from 0 to 1": "gamma lam start_noise",
}
OTHERS = [
    ("hidden_size", 10_001, "use at most ten thousand"),
    ("seed", 2**32, "use a number less than 2"),
    ("steps", 2_047, "use at least one iteration, 2048 steps"),
    ("slice_length", 256, "use at most rollout_length, 128"),
    ("capacity", 2_000, "use at least 2064, 129 rows of 16"),
    ("batch_size", 500, "use a multiple of slice_length, 128"),
    ("fresh_updates", 2, "use 0 or 1"),
    ("encoder", "lstm", "choose from mlp, gru"),
    ("extra_features", 10**9, "use at most a million"),
    ("eval_episodes", 10**9, "use at most a million"),
    ("entropy_coef", math.inf, "use a finite number"),
    ("value_coef", math.inf, "use a finite number"),
    *((name, math.nan, "use ") for name in ("entropy_coef", "learning_rate", "lam")),
]
TYPES = {
    "a whole number": ("num_envs", (16.5, "16", True, math.inf, math.nan, None)),
    "a number": ("lam", ("0.9", False, None)),
    "True or False": ("anneal", (1, "yes", None)),
    "a string": ("precision", (8, None)),
}


def test_values_out_of_range_or_of_another_type_are_named_with_the_remedy():
    for remedy, names in RANGES.items():
        for name in names.split():
            value = 1.1 if "to 1" in remedy else 0 if "positive" in remedy else -1
            refused(rf"{name} is {value}(\.0)?: {remedy}", Config, **{name: value})
    for name, value, remedy in OTHERS:
        refused(f"{name} is {value!r}: {remedy}", Config, **{name: value})
    for kind, (name, values) in TYPES.items():
        for value in values:
            refused(f"{name} is {value!r}: use {kind}$", Config, **{name: value})
    refused("env_id is 4: use a string", Config, env_id=4)
    refused("gamma is 'high': use a number", Config, gamma="high")
    refused("normalize_obs is 1: use True or False", Config, normalize_obs=1)


def test_fields_that_fit_only_together():
    refused(
        "replay_updates is 0: use at least 1 without fresh_updates",
        Config,
        fresh_updates=0,
        replay_updates=0,
    )
    refused(
        "layers is 1: use at least 2 with encoder gru, the last one is the GRU",
        Config,
        encoder="gru",
        layers=1,
    )
    for field, value in (("hide_velocity", True), ("extra_features", 2), ("start_noise", 0.1)):
        of_another = functools.partial(Config, env_id="CartPole-v1", **{field: value})
        refused(f"{field} is {value}: leave it out, CartPole-v1 does not have it", of_another)
    # Nothing is replayed, so slices may be longer
    Config(rollout_length=8, replay_updates=0, capacity=144)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1


def test_numbers_become_pythons_own_whatever_they_come_from():
    config = Config(
        learning_rate=np.float32(0.5), steps=1e4, seed=np.int64(3), gamma=1, anneal=np.bool_(False)
    )
    assert config == Config(learning_rate=0.5, steps=10_000, seed=3, gamma=1.0, anneal=False)
    kinds = [
        type(getattr(config, name))
        for name in ("learning_rate", "steps", "seed", "gamma", "anneal")
    ]
    assert kinds == [float, int, int, float, bool]
    assert Config(formats=" ").formats == "" and Config(precision=" bf16\n") == Config(
        precision="bf16"
    )


def test_the_clip_is_by_the_actor_or_the_learner():
    assert Config().clip_by == "learner"
    for clip_by in ("actor", "learner"):
        assert Config(clip_by=clip_by).clip_by == clip_by
    for clip_by in ("", "both", "Learner"):
        refused("clip_by is .*: choose from actor, learner", Config, clip_by=clip_by)
    refused("clip_by is None: use a string", Config, clip_by=None)


def test_json_gives_the_config_back():
    for config in (
        Config(),
        Config(learning_rate=np.float64(1 / 3), env_id="CartPole-v1", collect_precision="fp8"),
    ):
        assert Config.of(config.to_json()) == config
    for text in ("{", "[1]", '"seed"', "7", '{"stepz": 1}', '{"steps": "many"}'):
        refused("", Config.of, text)


def test_the_ring_is_no_larger_than_what_a_run_can_fill():
    assert (
        Config(steps=5_000).rows == 2 * 128 + 1
        and Config(steps=10**6, capacity=3_000).rows == 3_000 // 16
    )


def test_discount_and_entropy_bonus_follow_from_the_task():
    for task, gamma, entropy_coef in (
        (Cart, 0.98, 0.01),
        (CartPole, 0.992, 0.01),
        (Pendulum, 0.98, 0.0),
        (Lqr, 0.98, 0.0),
    ):
        config = Config().settled(task)
        assert (config.gamma, config.entropy_coef) == (gamma, entropy_coef)
    assert Config().settled(SimpleNamespace(max_steps=1_000, distribution=Gaussian)).gamma == 0.995
    chosen = Config(gamma=0.5, entropy_coef=0.3, learning_rate=0.1)
    assert chosen.settled(Cart) == chosen


def test_the_learning_rate_follows_from_the_width():
    def learning_rate(config: Config) -> float:
        return config.settled(Cart).learning_rate

    assert [learning_rate(Config(hidden_size=size)) for size in (16, 64, 256, 1024)] == [
        2e-3,
        1e-3,
        5e-4,
        2.5e-4,
    ]
    assert learning_rate(Config(hidden_size=16, learning_rate=0.5)) == 0.5


def test_what_follows_from_the_width_or_the_task_follows_a_change_of_it():
    """A field that is None stays None in the config, also of one that was read back."""
    for config in (Config(), Config.of(Config().to_json())):
        wide = dataclasses.replace(config, hidden_size=1024).settled(Cart)
        assert wide == Config(hidden_size=1024).settled(Cart) and wide.learning_rate == 2.5e-4
        other = dataclasses.replace(config, env_id="Pendulum-v1").settled(Pendulum)
        assert other == Config(env_id="Pendulum-v1").settled(Pendulum)
    derived = [name for name, value in vars(Config()).items() if value is None]
    assert set(derived) == {
        "collect_precision",
        "env_id",
        "normalize_obs",
        "gamma",
        "entropy_coef",
        "learning_rate",
    }


def test_evaluations_come_when_asked():
    for fields, steps in (
        ({"eval_every": 6_000, "steps": 16_384}, [6_144, 12_288, 16_384]),
        ({"eval_every": 0, "steps": 4_096}, [4_096]),
    ):
        config = Config(**fields)
        assert [
            2_048 * (i + 1) for i in range(config.iterations) if config.evaluates_at(i)
        ] == steps


def test_published_is_the_published_loop():
    config = Config.published(seed=3)
    assert (config.num_envs, config.rollout_length, config.slice_length, config.batch_size) == (
        1,
        128,
        1,
        64,
    )
    assert (
        config.fresh_updates,
        config.replay_updates,
        config.importance_correction,
        config.entropy_coef,
    ) == (0, 1, False, 0)
    assert not (config.bootstrap_truncation or config.normalize_advantage) and config.seed == 3
    assert not (config.halved_after or config.anneal)
    assert (config.gamma, config.scale_rewards, config.start_noise) == (0.99, False, 0.0)
    # A change wins over the published value
    assert Config.published(gamma=0.5, num_envs=2).gamma == 0.5
    assert len(trained(dataclasses.replace(config, steps=512, eval_episodes=2)).history) == 4


def test_a_config_of_an_older_file_does_what_its_run_did():
    assert Config.of_file({"seed": 3}) == Config(seed=3, clip_by="actor")
    assert Config.of_file({"clip_by": "learner"}) == Config() == Config.of({})
    refused(r"config is \[1\]: use a JSON object of fields", Config.of_file, [1])
