"""Pendulum-v1 as tensors: a pendulum must be swung up by a torque that is too weak to lift it, and
held there.

The state is the angle theta from upright (rad), which starts anywhere, and the angular velocity,
which starts within 1 of 0. The observation is cos and sin of the angle, and the velocity. The
action is in [-1, 1], in units of a torque of 2 N m. With dt = 0.05 s,

    velocity <- velocity + (15 sin(theta) + 3 torque) dt, within 8;   theta <- theta + velocity dt
    reward = -(theta^2 + 0.1 velocity^2 + 0.001 torque^2)             (of the state before, theta in
                                                                      [-pi, pi))

An episode is truncated after 200 steps. The equations are those of Gymnasium's
classic_control/pendulum.py, in float32."""

import math

import torch

from ..distribution import Gaussian
from ..env import TensorEnv
from .acrobot import wrapped

STEP, TORQUE, SPEED = 0.05, 2.0, 8.0


class Pendulum(TensorEnv):
    """N copies of Pendulum-v1. The arguments are those of TensorEnv."""

    num_actions, distribution, max_steps, state_size = 1, Gaussian, 200, 2
    bounds = (-1.0, -1.0, -SPEED), (1.0, 1.0, SPEED)

    def start(self, numbers):
        theta, speed = numbers.unbind(-1)
        return torch.stack((theta * math.pi, speed)).movedim(0, -1)

    def observe(self, state):
        theta, speed = state.unbind(-1)
        return torch.stack((theta.cos(), theta.sin(), speed)).movedim(0, -1)

    def advance(self, state, action):
        theta, speed = state.unbind(-1)
        torque = TORQUE * action.squeeze(-1).clamp(-1, 1)
        reward = -(wrapped(theta).square() + 0.1 * speed.square() + 0.001 * torque.square())
        speed = (speed + (15 * theta.sin() + 3 * torque) * STEP).clamp(-SPEED, SPEED)
        return (
            torch.stack((theta + speed * STEP, speed)).movedim(0, -1),
            reward,
            torch.zeros_like(theta, dtype=torch.bool),
        )
