"""CartPole-v1 as tensors: a pole on a cart must not fall (Barto, Sutton & Anderson 1983, "Neuronlike adaptive elements").

State and observation: position x (m), velocity, angle theta of the pole from upright (rad), angular velocity, all starting within
0.05. Action 0 pushes left with 10 N, 1 right. Every step of 0.02 s gives the reward 1. The episode terminates when |x| > 2.4 or
|theta| > 12 degrees, and is truncated after 500 steps. The equations, constants and Euler's method are those of Gymnasium's
classic_control/cartpole.py, in float32.
"""

import math

import torch

from ..env import TensorEnv

GRAVITY, FORCE, STEP = 9.8, 10.0, 0.02
CART, POLE, LENGTH = 1.0, 0.1, 0.5  # masses in kg; half of the pole's length in m
LIMIT, ANGLE = 2.4, math.radians(12)


def dynamics(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The next state [..., 4] from a state and actions [...] (0 or 1, not checked)."""
    x, speed, theta, turn = state.unbind(-1)
    cos, sin, mass = theta.cos(), theta.sin(), CART + POLE
    push = (action.to(state.dtype) * (2 * FORCE) - FORCE + POLE * LENGTH * turn.square() * sin) / mass
    angular = (GRAVITY * sin - cos * push) / (LENGTH * (4 / 3 - POLE * cos.square() / mass))
    linear = push - POLE * LENGTH * angular * cos / mass
    return torch.stack((x + STEP * speed, speed + STEP * linear, theta + STEP * turn, turn + STEP * angular)).movedim(0, -1)


def is_out(state: torch.Tensor) -> torch.Tensor:
    """Whether a state [..., 4] ends the episode: bool [...]."""
    return (state[..., 0].abs() > LIMIT) | (state[..., 2].abs() > ANGLE)


class CartPole(TensorEnv):
    """N copies of CartPole-v1. Arguments as in TensorEnv."""

    num_actions, max_steps, state_size = 2, 500, 4
    bounds = (-2 * LIMIT, -math.inf, -2 * ANGLE, -math.inf), (2 * LIMIT, math.inf, 2 * ANGLE, math.inf)

    def start(self, numbers):
        """Like TensorEnv.start."""
        return 0.05 * numbers

    def advance(self, state, action):
        """Like TensorEnv.advance."""
        state = dynamics(state, action)
        return state, torch.ones_like(state[..., 0]), is_out(state)
