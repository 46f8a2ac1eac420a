"""Does it matter whether advantages are standardized before or after they are weighted?

Two things happen to an advantage before it trains the policy (fp8rl/losses.py). V-trace weights it
by min(1, rho), so that a step counts little if today's policy would hardly take its action. And the
batch's advantages are standardized: their mean is subtracted, and they are divided by their
standard deviation + FLOOR. Two orders are compared:

    weighted, then standardized   what the package does. Subtracting the mean gives steps whose
                                  weight is near 0 an advantage that is not 0
    standardized, then weighted   a step whose weight is near 0 keeps an advantage near 0

The critic's targets are the same in both. PPO's clip comes last and sees the sign of what results.
In the first order it therefore drops the steps whose weight is near 0 where the mean is positive,
because their advantage is then negative and their ratio is already low. It does not drop them where
the mean is negative.

Both orders train ten seeds of three tasks in float32 with the defaults. The agents of a line train
as one population. The final score is that of tasks.py: the mean return of 100 greedy episodes, or
on the linear-quadratic cart minus the cost above the optimum in percent. The training return of a
seed is the mean over all iterations of what the episodes that ended in an iteration have earned;
their actions are sampled. Differences are second order minus first, paired by seed: interquartile
means with 95% bootstrap intervals.

    python benchmarks/order.py benchmarks/results/order.md
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tasks
import torch

from fp8rl.build import build_population
from fp8rl.config import Config
from fp8rl.losses import FLOOR, Targets, vtrace_fast
from fp8rl.study import comparison
from fp8rl.study.throughput import origin
from fp8rl.train import train

SEEDS = range(9500, 9510)  # on which nothing was chosen
STEPS = {
    tasks.CART: 100_000,
    tasks.CARTPOLE: 200_000,
    tasks.LQR: 300_000,
}
WEIGHTED_FIRST = "weighted, then standardized"
STANDARDIZED_FIRST = "standardized, then weighted"
COLUMNS = (
    "task",
    "steps",
    "order",
    "final score, median",
    "lowest",
    "training return, median",
    "final score, second minus first, IQM [95%]",
    "training return, second minus first, IQM [95%]",
)


class Result(NamedTuple):
    """What the seeds of a line have earned, float64 [seeds] each."""

    scores: np.ndarray
    training_returns: np.ndarray


def unweighted_advantage(values, rewards, discounts, valid, lam, advantage) -> torch.Tensor:
    """The advantages before V-trace weights them, float32 [T, B]; 0 on dummy rows.

    They are B_t in A_t = min(1, rho_t) B_t, where A_t is V-trace's `advantage`. The other arguments
    are those of `losses.vtrace`. B_t is not A_t divided by its weight, because that may be 0.
    """
    next_advantage = torch.cat([advantage[1:], torch.zeros_like(advantage[:1])])
    bootstrap = torch.where(discounts != 0, discounts * values[1:], 0)
    delta = rewards + bootstrap - values[:-1]
    return torch.where(valid, delta + discounts * lam * next_advantage, 0)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over time and batch. The agents of a population have a dimension between these."""
    return x.sum(dim=(0, -1), keepdim=True)


def standardized(advantage: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Standardizes advantages over the valid rows, as `losses.actor_critic_loss` does."""
    count = total(valid.float()).clamp(min=1)
    centered = torch.where(valid, advantage - total(advantage) / count, 0)
    deviation = (total(centered.square()) / count).sqrt()
    return centered / (deviation + FLOOR)


def standardized_then_weighted(values, rewards, discounts, log_ratios, valid, lam) -> Targets:
    """V-trace whose advantages are standardized before they are weighted.

    It takes the place of `losses.vtrace_fast` in a loss with normalize_advantage=False, which
    leaves these advantages as they are.
    """
    targets = vtrace_fast(values, rewards, discounts, log_ratios, valid, lam)
    unweighted = unweighted_advantage(values, rewards, discounts, valid, lam, targets.advantage)
    weight = targets.ratio.clamp(max=1)
    return targets._replace(advantage=weight * standardized(unweighted, valid))


def trained(task: str, order: str) -> Result:
    """What the seeds earn in a task with an order."""
    configs = [
        Config(
            seed=seed,
            env_id=None if task == tasks.CART else task,
            steps=STEPS[task],
            eval_every=0,
            normalize_advantage=order == WEIGHTED_FIRST,
        )
        for seed in SEEDS
    ]
    population = build_population(configs)
    if order == STANDARDIZED_FIRST:
        population.learner.compute_targets = standardized_then_weighted
    histories = train(population, progress=False).histories(configs)
    scores = [tasks.score(task, history.final_return) for history in histories]
    training_returns = [comparison.mean_train_return(history) for history in histories]
    return Result(np.array(scores), np.array(training_returns))


def line(task: str, order: str, result: Result, first: Result) -> str:
    """A line of the table. `first` is the result of the package's order."""
    unit = tasks.unit_of(task)
    differences = ["-", "-"]
    if order != WEIGHTED_FIRST:
        of_scores = result.scores - first.scores
        of_returns = result.training_returns - first.training_returns
        differences = [
            comparison.with_interval(of_scores, signed=True) + unit,
            comparison.with_interval(of_returns, signed=True),
        ]
    cells = [
        task,
        f"{STEPS[task]:,}",
        order,
        f"{np.median(result.scores):.2f}{unit}",
        f"{result.scores.min():.2f}{unit}",
        f"{np.median(result.training_returns):.2f}",
        *differences,
    ]
    return f"| {' | '.join(cells)} |"


def main(out: Path) -> None:
    torch.set_num_threads(1)
    lines = []
    for task in STEPS:
        first = trained(task, WEIGHTED_FIRST)
        second = trained(task, STANDARDIZED_FIRST)
        lines.append(line(task, WEIGHTED_FIRST, first, first))
        lines.append(line(task, STANDARDIZED_FIRST, second, first))
        print("\n".join(lines[-2:]), flush=True)
    made = f"`python benchmarks/order.py {out}` on {origin()}.\n"
    out.write_text(f"{tasks.table(COLUMNS, lines)}\n{made}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
