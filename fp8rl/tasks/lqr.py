"""The cart with a continuous push and a quadratic cost: a linear-quadratic problem, whose optimum
is known exactly.

    v <- v + u,  p <- p + v,  v <- 0.95 v            with the push u in [-1, 1], the policy's action
    reward = -(p^2 + 0.02 u^2)                       (of the p before)
    terminated when |p| > 2, with a reward 80 lower, truncated after 50 steps

Episodes start with |p| < 0.8 and |v| < 0.1. The score of an agent is the sum of its rewards,
discounted by 0.95. Let x = (p, v). The best controller is u = -K x, and its cost from x is x' P x.
P solves Riccati's equation (Bertsekas, "Dynamic programming and optimal control", volume 1, section
3.1, with discount g)

    P = Q + g A' P A - g A' P B (R + g B' P B)^-1 g B' P A,      K = (R + g B' P B)^-1 g B' P A.

The best controller needs no push outside the bounds, and stays on the track. Leaving the track
costs as much as staying at its end for ever, 2^2 / (1 - 0.95), so nothing is gained by leaving it.
The optimum is therefore that of the unbounded problem. The cost above the optimum, in percent, is a
score that cannot saturate."""

import functools

import numpy as np
import torch

from ..distribution import Gaussian
from ..env import DAMPING, LIMIT, TensorEnv

DISCOUNT = 0.95
PUSH_COST = 0.02
MAX_STEPS = 50
OUT_COST = LIMIT**2 / (1 - DISCOUNT)
STARTS = 0.8, 0.1  # bounds of position and velocity
A = np.array([[1.0, 1.0], [0.0, DAMPING]])  # x <- A x + B u
B = np.array([[1.0], [DAMPING]])
Q = np.diag([1.0, 0.0])
R = np.array([[PUSH_COST]])


@functools.cache
def riccati() -> tuple[np.ndarray, np.ndarray]:
    """The optimal gain K, float64 [2], and the matrix P, float64 [2, 2].

    Riccati's equation is iterated to its fixed point.
    """
    p = Q
    for _ in range(1000):
        gain = np.linalg.solve(R + DISCOUNT * B.T @ p @ B, DISCOUNT * B.T @ p @ A)
        p = Q + DISCOUNT * A.T @ p @ (A - B @ gain)
    return gain[0], p


def optimal_cost(state: torch.Tensor) -> torch.Tensor:
    """The smallest discounted cost from states [..., 2], float64 [...]."""
    x, p = state.double(), torch.from_numpy(riccati()[1])
    return ((x @ p) * x).sum(-1)


def optimal(state: torch.Tensor) -> torch.Tensor:
    """The best pushes [..., 1] in states [..., 2]."""
    return -(state @ torch.from_numpy(riccati()[0]).to(state.dtype)).unsqueeze(-1)


class Lqr(TensorEnv):
    """N of these carts. The arguments are those of TensorEnv."""

    num_actions = 1
    distribution = Gaussian
    max_steps = MAX_STEPS
    state_size = 2
    discount = DISCOUNT
    # A step that stays on the track has |v + u| < 4, so a step that leaves it has at most 5.
    bounds = (
        (-4 * LIMIT, -5.0),
        (4 * LIMIT, 5.0),
    )

    def start(self, numbers):
        position, velocity = numbers.unbind(-1)
        return torch.stack((position * STARTS[0], velocity * STARTS[1])).movedim(0, -1)

    def advance(self, state, action):
        (position, velocity), push = state.unbind(-1), action.squeeze(-1).clamp(-1, 1)
        cost = position.square() + PUSH_COST * push.square()
        velocity = velocity + push
        position = position + velocity
        out = position.abs() > LIMIT
        return (
            torch.stack((position, velocity * DAMPING)).movedim(0, -1),
            -cost - OUT_COST * out.to(cost.dtype),
            out,
        )
