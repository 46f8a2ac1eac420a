import dataclasses
import math

import numpy as np
import pytest

from fp8rl.config import Config
from fp8rl.train import train


@pytest.mark.parametrize(
    "field, value, remedy",
    [
        *(
            (name, 0, "use at least")
            for name in ("steps", "num_envs", "rollout_length", "capacity", "slice_length", "batch_size")
        ),
        ("steps", 511, "512 steps"),
        ("eval_episodes", -1, "at least 1"),
        *((name, -1, "0 or more") for name in ("seed", "replay_updates", "eval_every", "entropy_coef", "value_coef")),
        ("halved_after", -1, "0 or more"),
        ("entropy_coef", math.nan, "0 or more"),
        *((name, 0.0, "positive") for name in ("learning_rate", "max_grad_norm", "clip")),
        ("learning_rate", math.nan, "positive"),
        ("gamma", 1.1, "from 0 to 1"),
        ("lam", math.nan, "from 0 to 1"),
        ("start_noise", -0.1, "from 0 to 1"),
        ("slice_length", 64, "at most rollout_length, 32"),
        ("seed", 2**63, "less than 2"),
        ("capacity", 500, "at least 528, 33 rows of 16"),
        ("batch_size", 500, "multiple of slice_length, 32"),
        ("fresh_updates", 2, "0 or 1"),
        ("encoder", "lstm", "choose from mlp, gru"),
        ("layout", "loose", "choose from compact, full, delta"),
        ("extra_features", -1, "0 or more"),
        ("extra_features", 10**9, "at most a million"),
        ("eval_episodes", 10**9, "at most a million"),
    ],
)
def test_bad_fields_are_named_with_the_remedy_in_one_line(field, value, remedy):
    with pytest.raises(ValueError, match=remedy) as caught:
        Config(**{field: value})
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{field} is ") and str(value) in message


@pytest.mark.parametrize(
    "field, value, remedy",
    [
        *(("num_envs", value, "a whole number") for value in (16.5, "16", True, math.inf, math.nan, None)),
        *(("gamma", value, "a number") for value in ("0.9", False, None)),
        *(("anneal", value, "True or False") for value in (1, "yes", None)),
        *(("precision", value, "a string") for value in (8, None)),
        ("env_id", 4, "a string"),
        *((name, math.inf, "a finite number") for name in ("entropy_coef", "value_coef")),
    ],
)
def test_values_of_another_type_are_named(field, value, remedy):
    with pytest.raises(ValueError, match=f"^{field} is {value!r}: use {remedy}$"):
        Config(**{field: value})


def test_numbers_become_pythons_own_whatever_they_come_from():
    config = Config(learning_rate=np.float32(0.5), steps=1e4, seed=np.int64(3), gamma=1, anneal=np.bool_(False))
    assert config == Config(learning_rate=0.5, steps=10_000, seed=3, gamma=1.0, anneal=False)
    kinds = [type(getattr(config, name)) for name in ("learning_rate", "steps", "seed", "gamma", "anneal")]
    assert kinds == [float, int, int, float, bool]


def test_json_gives_the_config_back():
    for config in (Config(), Config(learning_rate=np.float64(1 / 3), env_id="CartPole-v1", collect_precision="fp8")):
        assert Config.of(config.to_json()) == config
    for text in ("{", "[1]", '"seed"', "7", '{"stepz": 1}', '{"steps": "many"}'):
        with pytest.raises(ValueError) as caught:
            Config.of(text)
        assert "\n" not in str(caught.value)


def test_fields_that_fit_only_together():
    with pytest.raises(ValueError, match="replay_updates is 0: use at least 1 without fresh_updates"):
        Config(fresh_updates=0, replay_updates=0)
    for field, value in (("hide_velocity", True), ("extra_features", 2), ("start_noise", 0.1)):
        with pytest.raises(ValueError, match=f"{field} is {value}: leave it out, CartPole-v1 does not have it"):
            Config(env_id="CartPole-v1", **{field: value})
    Config(rollout_length=8, replay_updates=0, capacity=144)  # nothing is replayed, so slices may be longer
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1


def test_spaces_around_a_name_do_not_count():
    assert Config(formats=" ").formats == "" and Config(precision=" bf16\n") == Config(precision="bf16")


def test_published_is_the_published_loop():
    config = Config.published(seed=3)
    assert (config.num_envs, config.rollout_length, config.slice_length, config.batch_size) == (1, 128, 1, 64)
    assert (config.fresh_updates, config.replay_updates, config.importance_correction, config.entropy_coef) == (0, 1, False, 0)
    assert not (config.bootstrap_truncation or config.normalize_advantage) and config.seed == 3
    assert not (config.halved_after or config.anneal)
    assert (config.gamma, config.scale_rewards, config.start_noise) == (0.99, False, 0.0)
    assert Config.published(gamma=0.5, num_envs=2).gamma == 0.5  # a change wins over the published value
    run = train(dataclasses.replace(config, steps=512, eval_episodes=2), progress=False)
    assert len(run.history) == 4
