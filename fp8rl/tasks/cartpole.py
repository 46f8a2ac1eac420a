"""CartPole-v1 as tensors: a pole on a cart must not fall (Barto, Sutton & Anderson 1983,
"Neuronlike adaptive elements").

State and observation are the position x (m), the velocity, the angle theta of the pole from upright
(rad), and the angular velocity. All start within 0.05 of 0. Action 0 pushes left with 10 N, action
1 pushes right. Every step of 0.02 s gives the reward 1. The episode terminates when |x| > 2.4 or
|theta| > 12 degrees, and is truncated after 500 steps. The equations, constants and Euler's method
are those of Gymnasium's classic_control/cartpole.py, in float32."""

import math

import torch

from ..env import TensorEnv

GRAVITY, FORCE, STEP = 9.8, 10.0, 0.02
CART, POLE, LENGTH = 1.0, 0.1, 0.5  # masses in kg; half of the pole's length in m
LIMIT, ANGLE = 2.4, math.radians(12)


class CartPole(TensorEnv):
    """N copies of CartPole-v1. The arguments are those of TensorEnv."""

    num_actions, max_steps, state_size = 2, 500, 4
    computes_with_actions = True
    bounds = (
        (-2 * LIMIT, -math.inf, -2 * ANGLE, -math.inf),
        (2 * LIMIT, math.inf, 2 * ANGLE, math.inf),
    )

    def start(self, numbers):
        return 0.05 * numbers

    def advance(self, state, action):
        x, speed, theta, turn = state.unbind(-1)
        cos, sin, mass = theta.cos(), theta.sin(), CART + POLE
        push = (
            action.to(state.dtype) * (2 * FORCE) - FORCE + POLE * LENGTH * turn.square() * sin
        ) / mass
        angular = (GRAVITY * sin - cos * push) / (LENGTH * (4 / 3 - POLE * cos.square() / mass))
        linear = push - POLE * LENGTH * angular * cos / mass
        x, theta = x + STEP * speed, theta + STEP * turn
        state = torch.stack((x, speed + STEP * linear, theta, turn + STEP * angular)).movedim(0, -1)
        return state, torch.ones_like(x), (x.abs() > LIMIT) | (theta.abs() > ANGLE)
