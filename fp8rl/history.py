"""History: one row of numbers per iteration of a run."""

import math

import numpy as np
import torch

# The loss and its terms. With several processes, each process has a part of each of these means.
LOSS_TERMS = ("loss", "policy_loss", "value_loss", "entropy")
# Other means over the rows of a batch, of which each process has a part as well.
ROW_MEANS = ("mean_ratio", "k3", "clip_fraction")


class History:
    """One row of numbers per iteration, stored as `columns` of floats:

    iteration, steps      number of the iteration, environment steps so far
    seconds               seconds of training so far; where a GPU runs ahead of the host, these
                          include work that the caller does between iterations
    learning_rate, loss_scale
    train_return          mean return of the episodes that ended; NaN if none did, or after an
                          infinite reward
    eval_return           mean greedy return; NaN where there was no evaluation
    clipped               number of values that the ring's codec has clipped so far
    outside               share of continuous actions beyond the bounds
    loss, policy_loss, value_loss, entropy, ess
                          means over the iteration's updates
    mean_ratio            mean over the updates of the mean importance ratio, rho = pi / mu
    k3                    mean over the updates of the mean of rho - 1 - log rho, an estimate of a
                          KL divergence in nats (losses.py)
    clip_fraction         mean over the updates of the share of valid rows that PPO's clip drops
    min_logp, min_ratio   the smallest of all updates
    max_ratio             the largest of all updates
    grad_norm             the largest finite gradient norm of all updates; 0 if none is finite
    nonfinite             number of updates whose gradient was not finite
    skipped               number of updates that the scaler skipped

    `failure` says why training ended early. It is None if it did not.
    """

    def __init__(self):
        self.columns: dict[str, list] = {}
        self.failure: str | None = None

    def add(self, row: dict) -> None:
        """Appends the numbers of an iteration.

        A column that `row` lacks gets NaN, and a new column gets NaN for earlier iterations.
        """
        for name in row:
            if name not in self.columns:
                self.columns[name] = [self.entry(math.nan)] * len(self)
        for name, values in self.columns.items():
            values.append(self.entry(row.get(name, math.nan)))

    def entry(self, number) -> float:
        """A number as columns hold it."""
        return np.asarray(number, np.float64).item()

    def __len__(self) -> int:
        return len(self.columns.get("iteration", ()))

    @property
    def last(self) -> dict[str, float]:
        """The newest row."""
        return {name: values[-1] for name, values in self.columns.items()}

    @property
    def progress(self) -> dict[str, float]:
        """The newest row, as a progress bar shows it."""
        return self.last

    @property
    def rows(self) -> list[dict[str, float]]:
        return self.since(0)

    def since(self, first: int) -> list[dict[str, float]]:
        """The rows from row number `first` on."""
        columns = [values[first:] for values in self.columns.values()]
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*columns, strict=True)]

    def column(self, name: str) -> np.ndarray:
        """A column, float64 [iterations]."""
        return np.array(self.columns.get(name, ()))

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """Environment steps and mean greedy returns of the evaluations."""
        evaluated = ~np.isnan(self.column("eval_return"))
        return self.column("steps")[evaluated], self.column("eval_return")[evaluated]

    @property
    def final_return(self) -> float:
        """Mean greedy return of the last evaluation; NaN before the first."""
        _, returns = self.evaluations()
        return float(returns[-1]) if len(returns) else math.nan

    def first_step_at(self, threshold: float) -> float:
        """Environment steps at the first evaluation that reached `threshold`; NaN if none did."""
        steps, returns = self.evaluations()
        reached = steps[returns >= threshold]
        return float(reached[0]) if len(reached) else math.nan

    def state_dict(self) -> dict:
        state = {name: torch.from_numpy(self.column(name)) for name in self.columns}
        return state | {"failures": [self.failure]}

    def load_state_dict(self, state: dict) -> None:
        self.columns = {name: x.tolist() for name, x in columns_of(state).items()}
        (self.failure,) = state.get("failures", [self.failure])


def columns_of(state: dict) -> dict[str, torch.Tensor]:
    """The columns in the state of a history."""
    return {name: x for name, x in state.items() if name != "failures"}


def summarize(updates: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Summarizes the statistics of an iteration's updates in one row.

    Each update has its statistics by name, as numbers or as arrays of one shape: loss, the
    statistics of `losses.actor_critic_loss`, grad_norm, skipped and loss_scale.
    """
    columns = {name: np.array([update[name] for update in updates]) for name in updates[0]}
    grad_norm = columns["grad_norm"]
    is_finite = np.isfinite(grad_norm)
    row = {name: columns[name].mean(axis=0) for name in (*LOSS_TERMS, "ess", *ROW_MEANS)}
    row["min_logp"] = columns["min_logp"].min(axis=0)
    row["min_ratio"] = columns["min_ratio"].min(axis=0)
    row["max_ratio"] = columns["max_ratio"].max(axis=0)
    row["grad_norm"] = np.where(is_finite, grad_norm, 0).max(axis=0)
    row["nonfinite"] = (~is_finite).sum(axis=0)
    row["skipped"] = columns["skipped"].sum(axis=0)
    row["loss_scale"] = columns["loss_scale"][-1]
    return row
