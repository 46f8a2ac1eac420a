"""History: one row of numbers per iteration of a run, and the returns of the episodes that ended in
it."""

import math
from collections.abc import Callable

import numpy as np
import torch

from . import kernels
from .rollout import Rollout

TERMS = (
    "loss",
    "policy_loss",
    "value_loss",
    "entropy",
)  # with several processes, each has a part of these


class History:
    """One row of numbers per iteration, kept as `columns`, or of S `agents` together, float64 [S]
    for each number:

    iteration, steps (environment steps so far), seconds (of training; while rows wait for a GPU,
    the caller's own work
        counts as well), learning_rate, loss_scale
    train_return: mean return of the episodes that ended; eval_return: mean greedy return; NaN where
    there are none, and in
        train_return after an infinite reward
    clipped: values clipped by the ring's codec so far; outside: share of continuous actions beyond
    the bounds loss, policy_loss, value_loss, entropy, ess: means over the iteration's updates;
    min_logp: the smallest grad_norm: the largest finite one, or 0; nonfinite: number of updates
    without one; skipped: by the scaler

    `failures` has for each agent why it takes no more steps, or None.
    """

    def __init__(self, agents: int | None = None):
        self.columns: dict[str, list] = {}
        self.agents, self.failures = agents, [None] * (agents or 1)

    def add(self, row: dict) -> None:
        """Appends an iteration's numbers. A column that `row` lacks gets NaN, and a new column NaN
        for earlier iterations."""
        self.columns |= {
            name: [self._of_all(math.nan)] * len(self) for name in row if name not in self.columns
        }
        for name, values in self.columns.items():
            values.append(self._of_all(row.get(name, math.nan)))

    def _of_all(self, number):
        if self.agents:
            return np.full(
                self.agents, number, np.float64
            )  # a copy: views of numbers read at once would keep them all
        return np.asarray(number, np.float64).item()

    def __len__(self) -> int:
        return len(self.columns.get("iteration", ()))

    @property
    def last(self) -> dict[str, float]:
        """The newest row, of agents the first one's."""
        return {
            name: values[-1][0] if self.agents else values[-1]
            for name, values in self.columns.items()
        }

    @property
    def each(self) -> list["History"]:
        """Copies of the agents' histories."""
        found, columns = (
            [],
            {name: np.array(rows).T.tolist() for name, rows in self.columns.items()},
        )
        for agent, reason in enumerate(self.failures):
            found.append(own := History())
            own.columns, own.failures = (
                {name: each[agent] for name, each in columns.items()},
                [reason],
            )
        return found

    @property
    def rows(self) -> list[dict[str, float]]:
        return self.since(0)

    def since(self, first: int) -> list[dict[str, float]]:
        """The rows from number `first` on."""
        columns = [values[first:] for values in self.columns.values()]
        return [
            dict(zip(self.columns, values, strict=True)) for values in zip(*columns, strict=True)
        ]

    def column(self, name: str) -> np.ndarray:
        """A column, float64 [iterations]."""
        return np.array(self.columns.get(name, ()))

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """Environment steps and mean greedy returns of the evaluations."""
        done = ~np.isnan(self.column("eval_return"))
        return self.column("steps")[done], self.column("eval_return")[done]

    @property
    def final_return(self) -> float:
        """Mean greedy return of the last evaluation; NaN before the first."""
        return next(reversed(self.evaluations()[1].tolist()), math.nan)

    def first_step_at(self, threshold: float) -> float:
        """Environment steps at the first evaluation that reached `threshold`; NaN if none did."""
        steps, returns = self.evaluations()
        return next(iter(steps[returns >= threshold].tolist()), math.nan)

    def state_dict(self) -> dict:
        return {name: torch.from_numpy(self.column(name)) for name in self.columns} | {
            "failures": [*self.failures]
        }

    def load_state_dict(self, state: dict) -> None:
        columns = {name: x.numpy() for name, x in state.items() if name != "failures"}
        self.columns = {name: [*x] if self.agents else x.tolist() for name, x in columns.items()}
        self.failures = [*state.get("failures", self.failures)]


class Saved:
    """What has as its state a few tensors, the attributes in NAMES."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            name: getattr(self, name).clone(memory_format=torch.contiguous_format)
            for name in self.NAMES
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name in self.NAMES:
            own = getattr(self, name)
            own.copy_(state[name].view_as(own))  # in place, because a captured step may read it


class RewardScale(Saved):
    """Divides rewards by the root mean square, over about the last 100 steps, of the discounted sum
    G_t of an episode's past rewards. `open` is G, float32 [N]; `square`, float32 [2, S, 1] for S
    agents, holds running means of G^2 and of 1, both from 0: their quotient is unbiased at the
    start, as in Adam."""

    NAMES, KEEPS = ("open", "square"), 0.99

    def __init__(self, num_envs: int, device="cpu", agents: int = 1):
        self.open = torch.zeros(num_envs, dtype=torch.float32, device=device)
        self.square = torch.zeros(2, agents, 1, dtype=torch.float32, device=device)

    @property
    def scale(self) -> torch.Tensor:
        """What rewards are multiplied by, float32 [S, 1]: 1 if there were none, or none but 0."""
        square, weight = self.square
        return (square / weight).rsqrt().nan_to_num(nan=1, posinf=1)

    def add(self, rollout: Rollout, gamma, all_reduce: Callable) -> None:
        """Takes the next rollout, with a discount that is a number or float32 [S, 1]. `all_reduce`
        sums over processes."""
        num_envs = rollout.reward[0].numel()
        if num_envs != len(self.open):
            beside = (
                f"num_envs is {num_envs} in the rollout and {len(self.open)} in the scale of "
                "rewards"
            )
            raise ValueError(f"{beside}: use one number")
        before = self.open.view(self.square.shape[1], -1)
        rewards = torch.where(rollout.valid, rollout.reward, 0).view(-1, *before.shape)
        keep = rollout.valid.float().view(-1, *before.shape) * gamma
        # G_t = r_t + gamma G_{t-1}, and 0 in the dummy row before a new episode. After an infinite
        # reward, at which an agent stops, it stays NaN.
        if recurrence := kernels.kernel("recurrence", rewards.device):
            G = recurrence(rewards, keep, before)
        else:
            G = torch.empty_like(rewards)
            for now, reward, kept in zip(G.unbind(), rewards.unbind(), keep.unbind(), strict=True):
                before = torch.mul(before, kept, out=now).add_(reward)
        self.open.copy_(G[-1].flatten())  # in place, because a captured step may read it
        squares = G.square().sum((0, 2)).unsqueeze(1)
        squares, count = all_reduce(
            [squares, torch.full_like(squares, rewards.numel() / len(squares))]
        )
        self.square.lerp_(torch.stack((squares, count)) / count, 1 - self.KEEPS ** len(G))


class EpisodeReturns(Saved):
    """Undiscounted returns of whole episodes, which may span several rollouts, of S agents with
    equal shares of N environments. `open` is the running sums, float64 [N]."""

    NAMES = ("open",)

    def __init__(self, num_envs: int, agents: int = 1, device="cpu"):
        self.open, self.agents = torch.zeros(num_envs, dtype=torch.float64, device=device), agents

    def add(self, rollout: Rollout) -> torch.Tensor:
        """Takes the next rollout. Returns each agent's sum of the returns of episodes that ended in
        it, and how many, float64 [2, S]."""
        ends, row = (
            rollout.ended,
            torch.arange(1, len(rollout.flags) + 1, device=self.open.device).unsqueeze(1),
        )
        until = row <= (ends * row).amax(
            0
        )  # up to the last end, where all rewards are of episodes that ended
        rewards = torch.where(rollout.valid, rollout.reward, 0)
        before, left = (
            torch.where(rows, rewards, 0).sum(0, dtype=torch.float64) for rows in (until, ~until)
        )
        found = torch.stack((torch.where(until[0], self.open + before, 0), ends.sum(0)))
        self.open.copy_(
            torch.where(until[0], left, self.open + left)
        )  # in place, because a captured step may read it
        return found.view(2, self.agents, -1).sum(2)


def summarize(
    stats: list[dict[str, torch.Tensor]], found: np.ndarray
) -> dict[str, float | np.ndarray]:
    """The statistics of an iteration's updates, whose numbers or arrays [S] are `found` in their
    order, in one row."""
    numbers = iter(found)
    stats = [{name: next(numbers) for name in s} for s in stats]
    column = {name: np.array([s[name] for s in stats]) for name in stats[0]}
    finite = np.isfinite(column["grad_norm"])
    return {
        **{name: column[name].mean(axis=0) for name in (*TERMS, "ess")},
        "min_logp": column["min_logp"].min(axis=0),
        "grad_norm": np.where(finite, column["grad_norm"], 0).max(axis=0),
        "nonfinite": (~finite).sum(axis=0),
        "skipped": column["skipped"].sum(axis=0),
        "loss_scale": column["loss_scale"][-1],
    }
