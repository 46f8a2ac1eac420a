"""How far apart two programs' probabilities are, in the numbers that RL stacks log.

Each number has the definition of the stack that made it known, so that it can be compared with a
training's own log.
"""

import math
from typing import NamedTuple

import numpy as np

from .mismatch_gap import LARGEST, ratio_in_line


class ProbabilityGap(NamedTuple):
    """Means and extremes over the tokens that count.

    `token_mult_prob_error`  mean of exp(|log ratio|), which NeMo-RL logs
    `probs_diff_mean`, `probs_diff_max`
                             absolute difference of the probabilities, which verl logs
    `probs_correlation`      Pearson's correlation of the probabilities, which verl logs; NaN if
                             they do not vary
    `logp_diff_mean`, `logp_diff_max`
                             absolute difference of the log-probabilities, which TRL logs
    """

    token_mult_prob_error: float
    probs_diff_mean: float
    probs_diff_max: float
    probs_correlation: float
    logp_diff_mean: float
    logp_diff_max: float

    @classmethod
    def of(cls, learner: np.ndarray, actor: np.ndarray) -> "ProbabilityGap":
        """From the log-probabilities of the tokens that count, [tokens]."""
        difference = np.abs(learner - actor)
        learner_probs = np.exp(learner)
        actor_probs = np.exp(actor)
        probs_difference = np.abs(learner_probs - actor_probs)
        error = np.exp(np.minimum(difference, LARGEST)).mean()
        return cls(
            token_mult_prob_error=float(error),
            probs_diff_mean=float(probs_difference.mean()),
            probs_diff_max=float(probs_difference.max()),
            probs_correlation=pearson(learner_probs, actor_probs),
            logp_diff_mean=float(difference.mean()),
            logp_diff_max=float(difference.max()),
        )


def lines_of(gap) -> list[str]:
    """Lines of a report that has the fields of `ProbabilityGap`, and `farthest`."""
    return [
        f"token_mult_prob_error: {ratio_in_line(gap.token_mult_prob_error)} "
        "(the mean of exp |log ratio|)",
        f"probabilities: differ by {gap.probs_diff_mean:.2g} (mean) and {gap.probs_diff_max:.2g} "
        f"(largest), Pearson correlation {gap.probs_correlation:.4f}",
        f"log-probabilities: differ by {gap.logp_diff_mean:.2g} (mean) and {gap.logp_diff_max:.2g} "
        f"(largest, at {list(gap.farthest)})",
    ]


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    x = x - x.mean()
    y = y - y.mean()
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size > 0 else math.nan
