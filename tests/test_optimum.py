"""The best returns of the cart, against every sequence of pushes and against finer grids."""

import itertools

import pytest
import torch
from tasks import optimal_returns

from fp8rl.env import Cart, dynamics, outcome

STARTS = Cart(50, seed=1).state


def by_trying(start: torch.Tensor, steps: int) -> float:
    """The best return of all 2^steps sequences of pushes."""
    pushes = torch.tensor(list(itertools.product([0, 1], repeat=steps)))
    state, total = (
        start.double().expand(len(pushes), -1),
        torch.zeros(len(pushes), dtype=torch.float64),
    )
    live = torch.ones(len(pushes), dtype=torch.bool)
    for push in pushes.T:
        state = dynamics(state, push)
        reward, out = outcome(state)
        total += reward * live
        live &= ~out
    return total.max().item()


@pytest.mark.parametrize("start", [(0.5, 0.3), (-1.9, -0.4), (1.99, 0.5)])
def test_it_is_the_best_of_all_sequences(start):
    start = torch.tensor(start)
    best = by_trying(start, 11)
    assert best - 2e-3 < optimal_returns(start.unsqueeze(0), 11, 401, 201).item() <= best + 1e-9
