"""The best returns that the cart allows, by dynamic programming, so that a policy can be judged by
what it loses.

With k steps left, the value of a state x is that of the better push u (Bellman 1957, "Dynamic
programming"):

    V_k(x) = max over u of r(x') + V_{k-1}(x'),      x' = f(x, u),      V_0 = 0, and V = 0 off the track

The values are kept at the points of a grid, which lie close together near the origin, and are
interpolated between these (bilinear). Errors add up over the steps, so the returns that count are
those of the controller that is greedy in these values, in the physics themselves. They are real,
and no more than the best. On other grids, some of them twice as fine, means of a hundred starts
differ by less than 0.02 of 200. With 64 steps left or more the push hardly depends on their number,
so V_63 serves for all."""

import torch

from fp8rl.env import MAX_STEPS, STATE_BOUNDS, dynamics, outcome

AHEAD = 64


class Grid:
    """Points [width * height] over position and velocity, at the cubes of evenly spaced numbers;
    float64."""

    def __init__(self, width: int, height: int):
        ends = zip((width, height), STATE_BOUNDS[1], strict=True)
        self.axes = [
            end * torch.linspace(-1, 1, n, dtype=torch.float64, device="cpu").pow(3)
            for n, end in ends
        ]
        self.points = torch.cartesian_prod(*self.axes)
        self.height = height

    def corners(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The four points around states float64 [N, 2], int64 [4, N], and their weights, float64
        [4, N], all 0 off the track."""
        (i, a), (j, b) = map(between, self.axes, state.unbind(-1))
        first, weights = (
            i * self.height + j,
            torch.stack(((1 - a) * (1 - b), (1 - a) * b, a * (1 - b), a * b)),
        )
        return torch.stack(
            (first, first + 1, first + self.height, first + self.height + 1)
        ), weights * ~outcome(state)[1]


def between(axis: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The interval of an axis that each number lies in, and how far along it, 0 to 1."""
    i = torch.searchsorted(axis, x.contiguous()).clamp(1, len(axis) - 1) - 1
    return i, ((x - axis[i]) / (axis[i + 1] - axis[i])).clamp(0, 1)


class Moves:
    """What the two pushes lead to from states [N, 2]: `state` float64 [2, N, 2], `reward`, `out`
    [2, N], `corners` in a grid."""

    def __init__(self, state: torch.Tensor, grid: Grid):
        both = torch.stack((torch.zeros_like(state[:, 0]), torch.ones_like(state[:, 0])))
        self.state = dynamics(state.expand(2, -1, -1), both)
        self.reward, self.out = outcome(self.state)
        self.corners = [grid.corners(there) for there in self.state]

    def worth(self, values: torch.Tensor) -> torch.Tensor:
        """Reward plus value of the next state, float64 [2, N], of values at the grid's points."""
        total = self.reward.clone()
        for row, corners in zip(total, self.corners, strict=True):
            # One at a time, which takes less memory
            for place, weight in zip(*corners, strict=True):
                row.addcmul_(weight, values.index_select(0, place))
        return total


def optimal_returns(
    starts: torch.Tensor, steps: int = MAX_STEPS, width: int = 801, height: int = 401
) -> torch.Tensor:
    """Returns of episodes of some steps from states float32 [N, 2] under the best controller that a
    grid of `width` by `height` points finds, float64 [N]. The defaults take about 0.4 GB."""
    grid = Grid(width, height)
    moves, values = Moves(grid.points, grid), [torch.zeros(len(grid.points), dtype=torch.float64)]
    while len(values) < min(steps, AHEAD):
        values.append(moves.worth(values[-1]).amax(0))
    state, rows = starts.double().cpu(), torch.arange(len(starts))
    returns, live = (
        torch.zeros(len(starts), dtype=torch.float64),
        torch.ones(len(starts), dtype=torch.bool),
    )
    for left in range(steps, 0, -1):
        moves = Moves(state, grid)
        best = moves.worth(values[min(left, AHEAD) - 1]).argmax(0)
        state = moves.state[best, rows]
        returns += moves.reward[best, rows] * live
        live &= ~moves.out[best, rows]
    return returns
