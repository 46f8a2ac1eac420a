"""Evaluation: one episode in each of many environments, with greedy or sampled actions. A return is the sum of an episode's
rewards, at most 200 for the cart; undiscounted, unless the task is defined with a discount."""

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from .precision import Precision
from .rollout import TERMINATED, TRUNCATED, inference, noise_of


def step_by_step(policy, env, starts):
    """Takes a step for each row of TensorEnv.draw. Yields rewards float32 [N], and whether episodes ended, bool [N]."""
    for start in starts:
        _, reward, _, _ = env.step(policy(env.obs), start)
        yield reward, env.done


def play(policy, env, steps=step_by_step) -> np.ndarray:
    """Returns float32 [N] of one episode in each of N newly created environments. The policy maps observations float32 [N, F], in
    inference mode, to actions as in a Rollout. `steps`: what takes steps, as `step_by_step` does."""
    total = torch.zeros(env.num_envs, dtype=torch.float32, device=env.device)
    ended = torch.zeros_like(total, dtype=torch.bool)
    with inference(env):
        for begin in range(0, env.max_steps, 16):
            taken = steps(policy, env, env.draw(16))
            for step, (reward, done) in zip(range(begin, env.max_steps), taken, strict=False):
                total += (env.discount**step * reward).masked_fill_(ended, 0)
                ended |= done
            if ended.all():  # not asked at every step, because it waits for a GPU
                break
    return total.cpu().numpy()


def evaluate(model, env, precision: Precision | None = None, greedy: bool = True, seed: int = 0, loop=None) -> np.ndarray:
    """The same for a model's policy, with the greedy action or actions sampled from `seed`, in a precision (None: fp32, CPU).
    `loop`: a faster form of rollout.unroll, which takes greedy actions."""
    precision = precision or Precision("fp32")
    if loop:

        def at_once(_, env, starts):
            noise = noise_of(env, len(starts), seed, "evaluation actions", 0).zero_()
            (_, _, rewards, flags, _), _ = loop(model, env, noise, starts, None)
            return zip(rewards, (flags & (TERMINATED | TRUNCATED)) != 0, strict=True)

        return play(None, env, at_once)
    state, steps = None, itertools.count()

    def policy(obs):
        nonlocal state
        with precision.autocast():
            outputs, state = model.policy(obs, state)
        noise = 0.0 if greedy else noise_of(env, 1, seed, "evaluation actions", next(steps))[0]
        return env.distribution.sample(outputs, noise)

    return play(policy, env)


class Judge:
    """Who judges: greedy episodes from the same starts every time, on the cart within 0.05 of 0. `make_env`: as train.make_cart.
    `model`: a copy of the network on the precision's device, or None to use the learner's own. `loop`: as in `evaluate`."""

    def __init__(self, config, precision: Precision, make_env: Callable, model: nn.Module | None = None, loop=None):
        self.config, self.precision, self.make_env, self.model, self.loop = config, precision, make_env, model, loop

    def evaluate(self, learned: nn.Module) -> float:
        """Mean return of `eval_episodes` episodes with the weights of the network `learned`."""
        if self.model is not None:
            self.model.load_state_dict(learned.state_dict())
        with contextlib.closing(self.new_env()) as env:
            return float(evaluate(self.model or learned, env, self.precision, loop=self.loop).mean())

    def new_env(self):
        """Environments for an evaluation, at its starts."""
        return self.make_env(self.config, self.config.eval_episodes, 0.05, self.precision.device, 0, "evaluation starts")
