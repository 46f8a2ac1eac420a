"""Evaluation: one episode in each of many environments, with greedy or sampled actions.

A return is the sum of an episode's rewards, which is at most 200 for the cart. It is undiscounted,
unless the task is defined with a discount.
"""

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from .constants import constant
from .precision import Precision
from .rollout import action_noise, inference

# Steps between two checks of whether all episodes have ended. Each check waits for a GPU.
BLOCK = 16
START_NOISE = 0.05  # evaluation episodes of the cart start within this distance of 0
_NO_NOISE = constant(0)


def play(policy: Callable, env) -> np.ndarray:
    """Plays one episode in each of N newly created environments; gives their returns, float32 [N].

    The policy maps observations float32 [N, F], in inference mode, to actions as in a Rollout.
    """
    returns = torch.zeros(env.num_envs, dtype=torch.float32, device=env.device)
    ended = torch.zeros_like(returns, dtype=torch.bool)
    nothing = returns.new_zeros(())
    with inference(env):
        for begin in range(0, env.max_steps, BLOCK):
            steps = range(begin, env.max_steps)
            for step, start in zip(steps, env.draw(BLOCK), strict=False):
                _, reward, _, _ = env.step(policy(env.obs), start)
                if env.discount != 1:
                    reward = env.discount**step * reward
                returns += torch.where(ended, nothing, reward)
                ended |= env.done
            if ended.all():
                break
    return returns.cpu().numpy()


def policy_of(model, env, greedy: bool = True, seed: int = 0) -> Callable:
    """A network as the policy of one episode in each environment, to be called once a step.

    The policy maps observations float32 [N, F] to actions, which are greedy, or sampled with the
    random numbers of `seed`. It computes in the precision that its caller has entered.
    """
    state = None
    steps = itertools.count()

    def policy(obs: torch.Tensor) -> torch.Tensor:
        nonlocal state
        outputs, state = model.policy(obs, state)
        noise = _NO_NOISE
        if not greedy:
            noise = action_noise(env, 1, seed, "evaluation actions", next(steps))[0]
        return env.distribution.sample(outputs, noise)

    return policy


def evaluate(
    model, env, precision: Precision | None = None, greedy: bool = True, seed: int = 0
) -> np.ndarray:
    """Plays one episode in each of N newly created environments with a network's policy.

    Gives the returns, float32 [N]. The arguments are those of `policy_of`; a `precision` of None is
    fp32 on the CPU.
    """
    precision = precision or Precision("fp32")
    with torch.no_grad(), precision.autocast():
        return play(policy_of(model.acting(), env, greedy, seed), env)


class Evaluator:
    """Evaluates a network with greedy episodes, which start from the same states every time.

    `episodes`  number of episodes of an evaluation
    `make_env`  makes environments (`tasks.environments.env_maker`)
    `model`     a copy of the network on the precision's device; None uses the learner's network
    """

    def __init__(
        self,
        episodes: int,
        precision: Precision,
        make_env: Callable,
        model: nn.Module | None = None,
    ):
        self.episodes = episodes
        self.precision = precision
        self.make_env = make_env
        self.model = model

    def evaluate(self, learned: nn.Module) -> float:
        """Mean return of the episodes with the weights of the network `learned`."""
        if self.model is not None:
            self.model.load_state_dict(learned.state_dict())
        env = self.make_env(
            self.episodes, START_NOISE, self.precision.device, 0, "evaluation starts"
        )
        with contextlib.closing(env):
            returns = evaluate(self.model or learned, env, self.precision)
        return float(returns.mean())
