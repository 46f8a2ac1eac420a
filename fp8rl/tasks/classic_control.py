"""Three tasks of Gymnasium as tensors: CartPole-v1, Acrobot-v1 and Pendulum-v1.

Equations, constants, bounds and methods of integration are those of Gymnasium's files of the same
names in envs/classic_control, in float32.
"""

import math

import torch

from ..distribution import Gaussian
from ..env import TensorEnv

GRAVITY = 9.8  # of CartPole and Acrobot, in m / s^2


def wrapped(angle: torch.Tensor) -> torch.Tensor:
    """The same angle in [-pi, pi)."""
    return (angle + math.pi).remainder(2 * math.pi) - math.pi


class CartPole(TensorEnv):
    """N copies of CartPole-v1: a pole on a cart must not fall (Barto, Sutton & Anderson 1983,
    "Neuronlike adaptive elements"). The arguments are those of TensorEnv.

    State and observation are the position x (m), the velocity, the angle theta of the pole from
    upright (rad), and the angular velocity. All start within 0.05 of 0. Action 0 pushes left with
    10 N, action 1 pushes right. Every step of 0.02 s gives the reward 1. The episode terminates
    when |x| > 2.4 or |theta| > 12 degrees, and is truncated after 500 steps. The cart has 1 kg, the
    pole 0.1 kg, and half of the pole's length is 0.5 m.
    """

    num_actions = 2
    max_steps = 500
    state_size = 4
    limit = 2.4
    angle = math.radians(12)
    bounds = (
        (-2 * limit, -math.inf, -2 * angle, -math.inf),
        (2 * limit, math.inf, 2 * angle, math.inf),
    )

    def start(self, numbers):
        return 0.05 * numbers

    def advance(self, state, action):
        x, speed, theta, turn = state.unbind(-1)
        cos = theta.cos()
        sin = theta.sin()
        force = action.to(state.dtype) * 20.0 - 10.0
        push = (force + 0.1 * 0.5 * turn.square() * sin) / 1.1
        angular = (GRAVITY * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        linear = push - 0.1 * 0.5 * angular * cos / 1.1
        x = x + 0.02 * speed
        theta = theta + 0.02 * turn
        state = torch.stack((x, speed + 0.02 * linear, theta, turn + 0.02 * angular)).movedim(0, -1)
        return state, torch.ones_like(x), (x.abs() > self.limit) | (theta.abs() > self.angle)


class Acrobot(TensorEnv):
    """N copies of Acrobot-v1: two links hang from a hinge, and a torque between them must swing the
    tip up (Sutton 1996, "Generalization in reinforcement learning"). The arguments are those of
    TensorEnv.

    The state has the angles theta1 (0 hangs down) and theta2 (between the links), and their
    velocities. All start within 0.1 of 0. The observation is cos and sin of each angle, and the
    velocities. Actions 0, 1, 2 are torques of -1, 0, 1 N m. A step takes 0.2 s. An episode
    terminates when the tip is a link's length above the hinge: -cos(theta1) - cos(theta1 + theta2)
    > 1. It is truncated after 500 steps. The reward of each step is -1, and that of the step that
    terminates is 0. Links are 1 m and 1 kg, with their centres in the middle and moments of inertia
    of 1 kg m^2. The equations are Gymnasium's "book" ones, with one step of Runge-Kutta.
    """

    num_actions = 3
    max_steps = 500
    state_size = 4
    speeds = (4 * math.pi, 9 * math.pi)  # the largest angular velocities
    bounds = ((-1.0,) * 4 + (-4 * math.pi, -9 * math.pi), (1.0,) * 4 + speeds)

    def start(self, numbers):
        return 0.1 * numbers

    def observe(self, state):
        theta1, theta2, *speeds = state.unbind(-1)
        return torch.stack(
            (theta1.cos(), theta1.sin(), theta2.cos(), theta2.sin(), *speeds)
        ).movedim(0, -1)

    @staticmethod
    def derivative(state: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
        """The rate of change of states [4, ...] under torques [...]."""
        theta1, theta2, speed1, speed2 = state
        cos = theta2.cos()
        sin = theta2.sin()
        d1 = 3.5 + cos
        d2 = 1.25 + 0.5 * cos
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

    def advance(self, state, action):
        begin = state.movedim(-1, 0)
        torque = action.to(state.dtype) - 1
        a = self.derivative(begin, torque)
        b = self.derivative(begin + 0.2 / 2 * a, torque)
        c = self.derivative(begin + 0.2 / 2 * b, torque)
        d = self.derivative(begin + 0.2 * c, torque)
        theta1, theta2, *speeds = begin + 0.2 / 6 * (a + 2 * b + 2 * c + d)
        theta1 = wrapped(theta1)
        theta2 = wrapped(theta2)
        speeds = (x.clamp(-bound, bound) for x, bound in zip(speeds, self.speeds, strict=True))
        up = -theta1.cos() - (theta1 + theta2).cos() > 1
        return torch.stack((theta1, theta2, *speeds)).movedim(0, -1), up.float() - 1, up


class Pendulum(TensorEnv):
    """N copies of Pendulum-v1: a pendulum must be swung up by a torque that is too weak to lift it,
    and held there. The arguments are those of TensorEnv.

    The state is the angle theta from upright (rad), which starts anywhere, and the angular
    velocity, which starts within 1 of 0. The observation is cos and sin of the angle, and the
    velocity. The action is in [-1, 1], in units of a torque of 2 N m. With dt = 0.05 s,

        velocity <- velocity + (15 sin(theta) + 3 torque) dt, within 8
        theta    <- theta + velocity dt
        reward = -(theta^2 + 0.1 velocity^2 + 0.001 torque^2)    (of the state before, theta in
                                                                 [-pi, pi))

    An episode is truncated after 200 steps.
    """

    num_actions = 1
    distribution = Gaussian
    max_steps = 200
    state_size = 2
    bounds = ((-1.0, -1.0, -8.0), (1.0, 1.0, 8.0))

    def start(self, numbers):
        theta, speed = numbers.unbind(-1)
        return torch.stack((theta * math.pi, speed)).movedim(0, -1)

    def observe(self, state):
        theta, speed = state.unbind(-1)
        return torch.stack((theta.cos(), theta.sin(), speed)).movedim(0, -1)

    def advance(self, state, action):
        theta, speed = state.unbind(-1)
        torque = 2.0 * action.squeeze(-1).clamp(-1, 1)
        reward = -(wrapped(theta).square() + 0.1 * speed.square() + 0.001 * torque.square())
        speed = (speed + (15 * theta.sin() + 3 * torque) * 0.05).clamp(-8.0, 8.0)
        state = torch.stack((theta + speed * 0.05, speed)).movedim(0, -1)
        return state, reward, torch.zeros_like(theta, dtype=torch.bool)
