"""The best returns of the cart, against every sequence of pushes and against finer grids."""

import itertools

import pytest
import tasks
import torch
from helpers import bang_bang
from hypothesis import given
from hypothesis import strategies as st
from tasks import Grid, optimal_returns

from fp8rl.env import Cart, dynamics, outcome
from fp8rl.evaluate import play

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


def test_neither_other_grids_nor_looking_farther_ahead_find_more(monkeypatch):
    usual = optimal_returns(STARTS, width=201, height=101).mean().item()
    assert abs(optimal_returns(STARTS, width=301, height=151).mean().item() - usual) < 0.1
    monkeypatch.setattr(tasks, "AHEAD", 100)
    assert abs(optimal_returns(STARTS, width=201, height=101).mean().item() - usual) < 5e-3


def test_it_beats_the_reference_controller_by_a_known_amount():
    played = torch.from_numpy(play(bang_bang, Cart(50, seed=1))).double()
    gained = optimal_returns(STARTS, width=201, height=101) - played
    assert gained.min() > -0.05 and 0.2 < gained.mean() < 0.8


@given(st.floats(-2, 2), st.floats(-1.9, 1.9))
def test_interpolation_reproduces_a_bilinear_function(position, velocity):
    grid = Grid(41, 21)
    bilinear = lambda x: 3 + 2 * x[..., 0] - x[..., 1] + 0.5 * x[..., 0] * x[..., 1]  # noqa: E731
    state = torch.tensor([[position, velocity]], dtype=torch.float64)
    places, weights = grid.corners(state)
    torch.testing.assert_close((weights * bilinear(grid.points)[places]).sum(0), bilinear(state))
    assert (weights >= 0).all()
    # There is nothing to earn off the track
    _, weights = grid.corners(torch.tensor([[2.1, 0.0], [-3.0, -1.0]], dtype=torch.float64))
    assert not weights.any()
