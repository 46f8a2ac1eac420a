"""Makes the environments of a config: carts, a task as tensors, or environments of Gymnasium."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..config import Config
from ..distribution import Gaussian
from ..env import Cart, TensorEnv
from .by_id import task_of
from .gymnasium_env import GymEnv, interface_of


def environment_of(config: Config, vectorization: str | None = None) -> str:
    """What the environments of a config are: "cart" (env.py), "task" (a task as tensors) or
    "gymnasium".

    They are those of Gymnasium if a `vectorization` is given, or if there is no form of the task as
    tensors.
    """
    if config.env_id is None:
        return "cart"
    if vectorization is not None or task_of(config.env_id) is None:
        return "gymnasium"
    return "task"


def normalizes_observations(config: Config) -> bool:
    """Whether the network standardizes observations.

    If the config leaves it open, it does so where this package has no tensor form of the task.
    """
    if config.normalize_obs is None:
        return environment_of(config) == "gymnasium"
    return config.normalize_obs


class Sizes(NamedTuple):
    """The sizes of what a policy sees and does.

    `features`     features of an observation
    `num_actions`  number of actions; dimensions of an action if it is continuous
    `action_size`  dimensions of a continuous action; 0 if actions are discrete
    `obs_type`     type of the observations
    """

    features: int
    num_actions: int
    action_size: int
    obs_type: torch.dtype


def sizes_of(config: Config, environment: str) -> Sizes:
    """The sizes of a config's environments."""
    if environment == "gymnasium":
        env = interface_of(config.env_id)
        is_continuous = not isinstance(env.actions, int)
    else:
        # One is made, because a task may set its sizes only then.
        env = env_maker(config, environment)(1, config.start_noise, "cpu", config.seed)
        is_continuous = env.distribution is Gaussian
    return Sizes(
        features=len(env.bounds[0]),
        num_actions=env.num_actions,
        action_size=env.num_actions if is_continuous else 0,
        obs_type=getattr(env, "obs_type", torch.float32),
    )


def env_maker(
    config: Config, environment: str, first_seed: int = 0, vectorization: str = "sync"
) -> Callable:
    """A function that makes environments of a config.

        make_env(num_envs, start_noise, device, seed, purpose="starts")

    Only the cart has a start noise, because other tasks have their own distribution of start
    states. Environment i of Gymnasium is seeded with `first_seed` + i and draws its own random
    numbers, so it has neither a seed nor a purpose.
    """
    if environment == "cart":
        return functools.partial(make_cart, config)
    if environment == "task":
        return functools.partial(make_task, config)

    def make_gymnasium(num_envs, start_noise, device, seed, purpose="starts"):
        return GymEnv(config.env_id, num_envs, device, first_seed, vectorization)

    return make_gymnasium


def make_cart(
    config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts"
) -> Cart:
    """Makes N carts with the options of a config."""
    options = (config.extra_features, config.hide_velocity, purpose)
    return Cart(num_envs, start_noise, device, seed, *options)


def make_task(
    config: Config, num_envs: int, start_noise: float, device, seed, purpose: str = "starts"
) -> TensorEnv:
    """Makes N environments of a task as tensors."""
    task = task_of(config.env_id)
    return task(num_envs, device=device, seed=seed, purpose=purpose)
