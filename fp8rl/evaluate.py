"""Evaluation: one episode in each of many environments, with greedy or sampled actions. A return is
the sum of an episode's rewards, at most 200 for the cart; undiscounted, unless the task is defined
with a discount."""

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from .precision import Precision
from .rollout import inference, noise_of


def play(policy, env) -> np.ndarray:
    """Returns float32 [N] of one episode in each of N newly created environments. The policy maps
    observations float32 [N, F], in inference mode, to actions as in a Rollout."""
    total = torch.zeros(env.num_envs, dtype=torch.float32, device=env.device)
    ended = torch.zeros_like(total, dtype=torch.bool)
    with inference(env):
        for begin in range(0, env.max_steps, 16):
            for step, start in zip(range(begin, env.max_steps), env.draw(16), strict=False):
                _, reward, _, _ = env.step(policy(env.obs), start)
                total += (env.discount**step * reward).masked_fill_(ended, 0)
                ended |= env.done
            if ended.all():  # not asked at every step, because it waits for a GPU
                break
    return total.cpu().numpy()


def evaluate(
    model, env, precision: Precision | None = None, greedy: bool = True, seed: int = 0
) -> np.ndarray:
    """The same for a model's policy, with the greedy action or actions sampled from `seed`, in a
    precision (None: fp32, CPU)."""
    precision = precision or Precision("fp32")
    state, steps = None, itertools.count()

    def policy(obs):
        nonlocal state
        with precision.autocast():
            outputs, state = model.policy(obs, state)
        noise = 0.0 if greedy else noise_of(env, 1, seed, "evaluation actions", next(steps))[0]
        return env.distribution.sample(outputs, noise)

    return play(policy, env)


class Judge:
    """Who judges: greedy episodes from the same starts every time, on the cart within 0.05 of 0.
    `make_env`: as train.make_cart. `model`: a copy of the network on the precision's device, or
    None to use the learner's own."""

    def __init__(
        self, config, precision: Precision, make_env: Callable, model: nn.Module | None = None
    ):
        self.config, self.precision, self.make_env, self.model = config, precision, make_env, model

    def evaluate(self, learned: nn.Module) -> float:
        """Mean return of `eval_episodes` episodes with the weights of the network `learned`."""
        if self.model is not None:
            self.model.load_state_dict(learned.state_dict())
        starts = self.config.eval_episodes, 0.05, self.precision.device, 0, "evaluation starts"
        with contextlib.closing(self.make_env(self.config, *starts)) as env:
            return float(evaluate(self.model or learned, env, self.precision).mean())
