"""Evaluation: one episode in each of many environments, with greedy or sampled actions.

A return is the sum of an episode's rewards, at most 200 for the cart; undiscounted, unless the task
is defined with a discount.
"""

import contextlib
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from .precision import Precision
from .rollout import action_noise, inference

BLOCK = 16  # steps between two looks at whether all episodes have ended, which wait for a GPU
START_NOISE = 0.05  # evaluation episodes of the cart start within this distance of 0


def play(policy: Callable, env) -> np.ndarray:
    """Returns float32 [N] of one episode in each of N newly created environments.

    The policy maps observations float32 [N, F], in inference mode, to actions as in a Rollout.
    """
    returns = torch.zeros(env.num_envs, dtype=torch.float32, device=env.device)
    ended = torch.zeros_like(returns, dtype=torch.bool)
    with inference(env):
        for begin in range(0, env.max_steps, BLOCK):
            steps = range(begin, env.max_steps)
            for step, start in zip(steps, env.draw(BLOCK), strict=False):
                _, reward, _, _ = env.step(policy(env.obs), start)
                reward = env.discount**step * reward
                returns += reward.masked_fill_(ended, 0)
                ended |= env.done
            if ended.all():
                break
    return returns.cpu().numpy()


def policy_of(
    model, env, precision: Precision | None = None, greedy: bool = True, seed: int = 0
) -> Callable:
    """A network as the policy of one episode in each environment, called once a step.

    It maps observations float32 [N, F] to actions, greedy or sampled from `seed`. `precision` is
    fp32 on the CPU if it is None.
    """
    precision = precision or Precision("fp32")
    state = None
    steps = itertools.count()

    def policy(obs: torch.Tensor) -> torch.Tensor:
        nonlocal state
        with precision.autocast():
            outputs, state = model.policy(obs, state)
        noise = 0.0
        if not greedy:
            noise = action_noise(env, 1, seed, "evaluation actions", next(steps))[0]
        return env.distribution.sample(outputs, noise)

    return policy


def evaluate(
    model, env, precision: Precision | None = None, greedy: bool = True, seed: int = 0
) -> np.ndarray:
    """Returns float32 [N] of a network's policy, as `play`. Arguments as in `policy_of`."""
    return play(policy_of(model, env, precision, greedy, seed), env)


class Evaluator:
    """Greedy episodes from the same starts every time.

    `make_env`  makes environments, as `train.make_cart`
    `model`     a copy of the network on the precision's device; None uses the learner's own
    `in_use`    a context that is entered while the network acts
    """

    def __init__(
        self,
        config,
        precision: Precision,
        make_env: Callable,
        model: nn.Module | None = None,
        in_use=contextlib.nullcontext,
    ):
        self.config = config
        self.precision = precision
        self.make_env = make_env
        self.model = model
        self.in_use = in_use

    def evaluate(self, learned: nn.Module) -> float:
        """Mean return of `eval_episodes` episodes with the weights of the network `learned`.

        Raises ValueError if it is not finite.
        """
        with self.in_use():
            if self.model is not None:
                self.model.load_state_dict(learned.state_dict())
            mean_return = float(self.returns(self.model or learned).mean())
        if not math.isfinite(mean_return):
            where = f"in {self.config.precision}"
            raise ValueError(f"evaluation is not finite {where}: fix the environment's rewards")
        return mean_return

    def returns(self, model: nn.Module) -> np.ndarray:
        """The return of each episode of a network on the precision's device, float32 [N]."""
        starts = (START_NOISE, self.precision.device, 0, "evaluation starts")
        env = self.make_env(self.config, self.config.eval_episodes, *starts)
        with contextlib.closing(env):
            return evaluate(model, env, self.precision)
