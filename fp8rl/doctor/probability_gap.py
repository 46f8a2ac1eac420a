"""How far apart two programs' probabilities are, in the numbers that RL stacks log.

Each number has the definition of the stack that made it known, so that it can be compared with a
training's own log.
"""

import math
from typing import NamedTuple

import numpy as np

from .acting_look import KEPT, amount

FARTHEST = 1e-4  # share of tokens without which the horizon is measured again


class ProbabilityGap(NamedTuple):
    """Means and extremes over the tokens that count.

    `token_mult_prob_error`  mean of exp(|log ratio|), which NeMo-RL logs; infinite if a log ratio
                             is above 709
    `probs_diff_mean`, `probs_diff_max`
                             absolute difference of the probabilities, which verl logs
    `probs_correlation`      Pearson's correlation of the probabilities, which verl logs; NaN if
                             they do not vary
    `logp_diff_mean`, `logp_diff_max`
                             absolute difference of the log-probabilities, which TRL logs
    `horizon_without_farthest`
                             the horizon without the 0.01% of the tokens, at least one, whose ratios
                             are farthest from 1; NaN if there are no others
    """

    token_mult_prob_error: float
    probs_diff_mean: float
    probs_diff_max: float
    probs_correlation: float
    logp_diff_mean: float
    logp_diff_max: float
    horizon_without_farthest: float

    @classmethod
    def of(cls, learner: np.ndarray, actor: np.ndarray, excess: np.ndarray) -> "ProbabilityGap":
        """From log-probabilities and from ratio - 1 of each token that counts, [tokens]."""
        difference = np.abs(learner - actor)
        learner_probs = np.exp(learner)
        actor_probs = np.exp(actor)
        probs_difference = np.abs(learner_probs - actor_probs)
        with np.errstate(over="ignore"):
            error = np.exp(difference).mean()
        return cls(
            token_mult_prob_error=float(error),
            probs_diff_mean=float(probs_difference.mean()),
            probs_diff_max=float(probs_difference.max()),
            probs_correlation=pearson(learner_probs, actor_probs),
            logp_diff_mean=float(difference.mean()),
            logp_diff_max=float(difference.max()),
            horizon_without_farthest=horizon_without_farthest(excess),
        )


def lines_of(gap) -> list[str]:
    """Lines of a report that has the fields of `ProbabilityGap`."""
    return [
        f"horizon without the {FARTHEST:.2%} of the tokens whose ratios are farthest from 1: "
        f"{amount(gap.horizon_without_farthest)} tokens",
        f"token_mult_prob_error: {gap.token_mult_prob_error:.4f} (the mean of exp |log ratio|)",
        f"probabilities: differ by {gap.probs_diff_mean:.2g} (mean) and {gap.probs_diff_max:.2g} "
        f"(largest), Pearson correlation {gap.probs_correlation:.4f}",
        f"log-probabilities: differ by {gap.logp_diff_mean:.2g} (mean) and {gap.logp_diff_max:.2g} "
        "(largest)",
    ]


def horizon_of(spread: float) -> float:
    """The length at which a sequence has lost a tenth of its sample size.

    `spread` is the mean of (ratio - 1)^2.
    """
    return math.log(KEPT) / -math.log1p(spread) if spread > 0 else math.inf


def horizon_without_farthest(excess: np.ndarray) -> float:
    farthest = math.ceil(FARTHEST * len(excess))
    if farthest == len(excess):
        return math.nan
    squares = np.partition(np.square(excess), len(excess) - farthest)
    return horizon_of(float(squares[:-farthest].mean()))


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    x = x - x.mean()
    y = y - y.mean()
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size > 0 else math.nan
