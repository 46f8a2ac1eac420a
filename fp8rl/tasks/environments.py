"""Makes the environments of a config: carts, a task as tensors, or environments of Gymnasium."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..config import Config
from ..distribution import Gaussian
from ..env import Cart, TensorEnv
from .by_id import task_of
from .gymnasium_env import GymEnv


def tensor_task(config: Config, vectorization: str | None = None) -> type[TensorEnv] | None:
    """The class of a config's environments as tensors; None if Gymnasium steps them.

    Gymnasium does if a `vectorization` is given, or if there is no form of the task as tensors.
    """
    if config.env_id is None:
        return Cart
    return None if vectorization else task_of(config.env_id)


def normalizes_observations(config: Config) -> bool:
    """Whether the network standardizes observations.

    If the config leaves it open, it does so where this package has no tensor form of the task.
    """
    if config.normalize_obs is None:
        return tensor_task(config) is None
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


def sizes_of(config: Config, task: type[TensorEnv] | None) -> Sizes:
    """The sizes of a config's environments, of which one is made to know them.

    Raises ValueError for more discrete actions than the ring can store.
    """
    make_env = env_maker(config, task)
    with contextlib.closing(make_env(1, config.start_noise, "cpu", config.seed)) as env:
        action_size = env.num_actions if env.distribution is Gaussian else 0
        if not action_size and env.num_actions > 256:
            raise ValueError(
                f"env_id is {config.env_id!r}, which has {env.num_actions} actions: give it at "
                "most 256, which the ring stores in a byte"
            )
        return Sizes(len(env.bounds[0]), env.num_actions, action_size, env.obs.dtype)


def env_maker(
    config: Config,
    task: type[TensorEnv] | None,
    first_seed: int = 0,
    vectorization: str | None = None,
) -> Callable:
    """A function that makes environments of a config, whose `tensor_task` is `task`.

        make_env(num_envs, start_noise, device, seed, purpose="starts")

    Only the cart has a start noise, because other tasks have their own distribution of start
    states. Environment i of Gymnasium is seeded with `first_seed` + i and draws its own random
    numbers, so it has neither a seed nor a purpose.
    """

    def make_env(num_envs: int, start_noise: float, device, seed, purpose: str = "starts"):
        if task is None:
            return GymEnv(config.env_id, num_envs, device, first_seed, vectorization or "sync")
        if task is Cart:
            return Cart(
                num_envs,
                start_noise,
                device,
                seed,
                config.extra_features,
                config.hide_velocity,
                purpose,
            )
        return task(num_envs, device=device, seed=seed, purpose=purpose)

    return make_env
