import dataclasses
import math
from types import SimpleNamespace

import numpy as np
from helpers import refused

from fp8rl.config import Config
from fp8rl.distribution import Gaussian
from fp8rl.env import Cart
from fp8rl.tasks.classic_control import CartPole, Pendulum

RANGES = {  # remedy -> what it is for
    "use at least 1": "steps num_envs rollout_length capacity slice_length batch_size eval_episodes hidden_size layers",
    "use 0 or more": "replay_updates eval_every halved_after extra_features entropy_coef value_coef seed",
    "use a positive number": "learning_rate max_grad_norm clip",
    "use a number from 0 to 1": "gamma lam start_noise",
}


REFUSED = [
    *(
        (name, 1.1 if "to 1" in remedy else 0 if "positive" in remedy else -1)
        for remedy, names in RANGES.items()
        for name in names.split()
    ),
    ("hidden_size", 10_001),
    ("seed", 2**32),
    ("steps", 2_047),
    ("slice_length", 256),
    ("capacity", 2_000),
    ("batch_size", 500),
    ("fresh_updates", 2),
    ("encoder", "lstm"),
    ("extra_features", 10**9),
    ("eval_episodes", 10**9),
    ("entropy_coef", math.inf),
    ("value_coef", math.inf),
    *((name, math.nan) for name in ("entropy_coef", "learning_rate", "lam")),
    *(("num_envs", value) for value in (16.5, "16", True, math.inf, math.nan, None)),
    *(("lam", value) for value in ("0.9", False, None)),
    *(("anneal", value) for value in (1, "yes", None)),
    *(("precision", value) for value in (8, None)),
    ("env_id", 4),
    ("gamma", "high"),
    ("normalize_obs", 1),
]


def test_values_out_of_range_or_of_another_type_are_refused():
    for name, value in REFUSED:
        refused(rf"{name} is .*: (use|choose)", Config, **{name: value})
    for field, fields in (
        ("replay_updates", {"fresh_updates": 0, "replay_updates": 0}),
        ("layers", {"encoder": "gru", "layers": 1}),
        ("hide_velocity", {"env_id": "CartPole-v1", "hide_velocity": True}),
        ("extra_features", {"env_id": "CartPole-v1", "extra_features": 2}),
        ("start_noise", {"env_id": "CartPole-v1", "start_noise": 0.1}),
    ):
        refused(f"{field} is ", Config, **fields)


def test_numbers_become_pythons_own_whatever_they_come_from():
    numbers = {"learning_rate": np.float32(0.5), "steps": 1e4, "seed": np.int64(3), "gamma": 1}
    config = Config(**numbers, anneal=np.bool_(False))
    assert config == Config(learning_rate=0.5, steps=10_000, seed=3, gamma=1.0, anneal=False)
    kinds = [type(getattr(config, name)) for name in (*numbers, "anneal")]
    assert kinds == [float, int, int, float, bool]
    assert Config(formats=" ").formats == ""
    assert Config(precision=" bf16\n") == Config(precision="bf16")


def test_json_gives_the_config_back():
    acting = Config(learning_rate=np.float64(1 / 3), env_id="CartPole-v1", collect_precision="fp8")
    for config in (Config(), acting):
        assert Config.of(config.to_json()) == config
    for text in ("{", "[1]", '"seed"', "7", '{"stepz": 1}', '{"steps": "many"}'):
        refused("", Config.of, text)
    refused("config is ", Config.of, [1])


def test_what_follows_from_the_width_or_the_task():
    """A field that is None stays None in the config, also of one that was read back."""
    for task, gamma, entropy_coef in (
        (Cart, 0.98, 0.01),
        (CartPole, 0.992, 0.01),
        (Pendulum, 0.98, 0.0),
        (SimpleNamespace(max_steps=1_000, distribution=Gaussian), 0.995, 0.0),
    ):
        config = Config().settled(task)
        assert (config.gamma, config.entropy_coef) == (gamma, entropy_coef)
    for size, rate in ((16, 2e-3), (64, 1e-3), (256, 5e-4), (1024, 2.5e-4)):
        for config in (Config(), Config.of(Config().to_json())):
            wide = dataclasses.replace(config, hidden_size=size).settled(Cart)
            assert wide.learning_rate == rate
    chosen = Config(gamma=0.5, entropy_coef=0.3, learning_rate=0.1)
    assert chosen.settled(Cart) == chosen


def test_evaluations_come_when_asked_and_the_ring_is_no_larger_than_what_a_run_can_fill():
    for fields, steps in (
        ({"eval_every": 6_000, "steps": 16_384}, [6_144, 12_288, 16_384]),
        ({"eval_every": 0, "steps": 4_096}, [4_096]),
    ):
        config = Config(**fields)
        evaluated = [i for i in range(config.iterations) if config.evaluates_at(i)]
        assert [2_048 * (i + 1) for i in evaluated] == steps
    assert Config(steps=5_000).rows == 2 * 128 + 1
    assert Config(steps=10**6, capacity=3_000).rows == 3_000 // 16


def test_published_is_the_published_loop():
    config = Config.published(seed=3)
    expected = {"num_envs": 1, "rollout_length": 128, "slice_length": 1, "batch_size": 64}
    expected |= {"fresh_updates": 0, "replay_updates": 1, "importance_correction": False}
    expected |= {"bootstrap_truncation": False, "normalize_advantage": False, "seed": 3}
    expected |= {"halved_after": 0, "anneal": False, "scale_rewards": False, "start_noise": 0.0}
    expected |= {"gamma": 0.99, "entropy_coef": 0}
    assert {name: getattr(config, name) for name in expected} == expected
    # A change wins over the published value
    assert Config.published(gamma=0.5, num_envs=2).gamma == 0.5
