"""Acrobot-v1 as tensors: two links hang from a hinge, and a torque between them must swing the tip
up (Sutton 1996, "Generalization in reinforcement learning").

The state has the angles theta1 (0 hangs down) and theta2 (between the links), and their velocities.
All start within 0.1 of 0. The observation is cos and sin of each angle, and the velocities. Actions
0, 1, 2 are torques of -1, 0, 1 N m. A step takes 0.2 s. An episode terminates when the tip is a
link's length above the hinge: -cos(theta1) - cos(theta1 + theta2) > 1. It is truncated after 500
steps. The reward of each step is -1, and that of the step that terminates is 0. Links are 1 m and
1 kg, with their centres in the middle and moments of inertia of 1 kg m^2. The equations ("book"),
the bounds and one step of Runge-Kutta are those of Gymnasium's classic_control/acrobot.py, in
float32."""

import math

import torch

from ..env import TensorEnv

GRAVITY, STEP = 9.8, 0.2
SPEEDS = 4 * math.pi, 9 * math.pi  # the largest angular velocities


def derivative(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """The rate of change of states [4, ...] under torques [...]."""
    theta1, theta2, speed1, speed2 = state
    cos, sin = theta2.cos(), theta2.sin()
    d1, d2 = 3.5 + cos, 1.25 + 0.5 * cos
    phi2 = 0.5 * GRAVITY * (theta1 + theta2 - math.pi / 2).cos()
    phi1 = (
        -0.5 * speed2.square() * sin
        - speed2 * speed1 * sin
        + 1.5 * GRAVITY * (theta1 - math.pi / 2).cos()
        + phi2
    )
    turn2 = (torque + d2 / d1 * phi1 - 0.5 * speed1.square() * sin - phi2) / (
        1.25 - d2.square() / d1
    )
    return torch.stack((speed1, speed2, -(d2 * turn2 + phi1) / d1, turn2))


def wrapped(angle: torch.Tensor) -> torch.Tensor:
    """The same angle in [-pi, pi)."""
    return (angle + math.pi).remainder(2 * math.pi) - math.pi


class Acrobot(TensorEnv):
    """N copies of Acrobot-v1. The arguments are those of TensorEnv."""

    num_actions, max_steps, state_size = 3, 500, 4
    bounds = (-1.0,) * 4 + (-SPEEDS[0], -SPEEDS[1]), (1.0,) * 4 + SPEEDS

    def start(self, numbers):
        return 0.1 * numbers

    def observe(self, state):
        theta1, theta2, *speeds = state.unbind(-1)
        return torch.stack(
            (theta1.cos(), theta1.sin(), theta2.cos(), theta2.sin(), *speeds)
        ).movedim(0, -1)

    def advance(self, state, action):
        begin, torque = state.movedim(-1, 0), action.to(state.dtype) - 1
        a = derivative(begin, torque)
        b = derivative(begin + STEP / 2 * a, torque)
        c = derivative(begin + STEP / 2 * b, torque)
        d = derivative(begin + STEP * c, torque)
        theta1, theta2, *speeds = begin + STEP / 6 * (a + 2 * b + 2 * c + d)
        theta1, theta2 = wrapped(theta1), wrapped(theta2)
        speeds = (x.clamp(-bound, bound) for x, bound in zip(speeds, SPEEDS, strict=True))
        up = -theta1.cos() - (theta1 + theta2).cos() > 1
        return torch.stack((theta1, theta2, *speeds)).movedim(0, -1), up.float() - 1, up
