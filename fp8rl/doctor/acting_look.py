"""The finding for a policy that acts in few bits (doctor.py says how it is judged)."""

import math
from typing import NamedTuple

import numpy as np

from .findings import AS_FLOAT32, NOT_JUDGED, Finding

# The share of their sample size that the weights of sequences keep over a horizon.
KEPT = 0.9
# Sequences of fewer horizons than SHORT are fine, and of more than LONG are too long. Between the
# two the estimate is too noisy to decide.
SHORT = 0.8
LONG = 1.5
MANY = 1e9  # numbers from here on have an exponent in a line


class ActingLook(NamedTuple):
    """The ratios pi / mu of a policy that acts in few bits, at one time of the training.

    `size`        the effective sample size of a token's ratio, as a share
    `divergence`  KL(pi || mu) of a token, in nats
    `length`      mean number of tokens in a sequence
    """

    size: float
    divergence: float
    length: float

    @classmethod
    def of(cls, log_ratio: np.ndarray, length: float) -> "ActingLook":
        """From log(pi / mu) of tokens that pi took, float64.

        If a ratio is not finite, mu is not a policy, and the sample size is 0.
        """
        if not np.isfinite(log_ratio).all():
            return cls(0.0, math.nan, length)
        return cls(1 / (1 + spread_of(log_ratio)), float(log_ratio.mean()), length)


def spread_of(log_ratio: np.ndarray) -> float:
    """The spread of the ratios, E_mu[(pi / mu - 1)^2], from log(pi / mu) of tokens that pi took.

    It equals E_pi[pi / mu] - 1. Because E_pi[mu / pi] is 1, it also equals
    E_pi[pi / mu + mu / pi - 2], whose terms are positive and whose mean is far less noisy. But the
    second form misses what mu does where pi hardly ever acts. Then the first mean is larger by more
    than chance, and is used.
    """
    with np.errstate(over="ignore"):
        plain = np.expm1(log_ratio)
        spread = np.square(2 * np.sinh(log_ratio / 2))
    error = plain.std() / len(plain) ** 0.5
    if plain.mean() > spread.mean() + 4 * error:
        return float(plain.mean())
    return float(spread.mean())


def horizon_of(size: float) -> float:
    """The horizon: the number of tokens whose ratios together have a sample size of KEPT, if the
    ratio of one token has `size`."""
    if size <= 0:
        return 0.0
    return math.log(KEPT) / math.log(size) if size < 1 else math.inf


def judge_acting(text: str, looks: list[ActingLook]) -> Finding:
    """The finding for a policy that acts in few bits: are sequences shorter than its horizon?"""
    size = float(np.mean([look.size for look in looks]))
    divergences = [look.divergence for look in looks if math.isfinite(look.divergence)]
    divergence = float(np.median(divergences)) if divergences else math.nan
    length = float(np.mean([look.length for look in looks]))
    horizon = horizon_of(size)
    horizons = length / horizon if horizon > 0 else math.inf
    if horizons <= SHORT:
        verdict = AS_FLOAT32
    elif horizons > LONG:
        verdict = "too noisy"
    else:
        verdict = NOT_JUDGED
    if horizon == math.inf:
        why = "its ratios are all 1"
    elif horizon == 0:
        why = "horizon of 0 tokens: its probabilities are no numbers"
    else:
        why = (
            f"horizon of about {amount(horizon)} tokens; "
            f"sequences of {amount(length)} are {amount(horizons)} times as long"
        )
    return Finding.without_rates(
        "policy", text, verdict, why, sample_size=size, divergence=divergence, horizon=horizon
    )


def amount(x: float) -> str:
    """A positive number in a line, without decimals from 10 up."""
    return f"{x:,.0f}" if 10 <= x < MANY else f"{x:.2g}"
