"""Statistics for comparing runs: interquartile means, bootstrap intervals, and lost shares.

They follow Agarwal et al. (2021, "Deep RL at the Edge of the Statistical Precipice",
arXiv:2108.13264). Scores are summarized by their interquartile mean over seeds, because means
follow outliers and medians ignore half of the data. Intervals are percentile bootstrap intervals
over seeds. Two precisions are compared by the differences between runs with the same seed."""

import numpy as np

TENTH = 0.1  # a loss of more than this share of float32's gain is a failure


def iqm(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """The interquartile mean along an axis.

    It is the mean of the scores that remain when a quarter (rounded down) is cut from each end.
    """
    scores = np.sort(np.asarray(scores, dtype=np.float64), axis)
    count = scores.shape[axis]
    return np.take(scores, range(count // 4, count - count // 4), axis).mean(axis)


def bootstrap_interval(scores: np.ndarray, resamples: int = 10_000) -> tuple[float, float]:
    """The 95% percentile bootstrap interval of the interquartile mean of scores [runs]."""
    scores = np.asarray(scores, dtype=np.float64)
    picks = np.random.default_rng(0).integers(len(scores), size=(resamples, len(scores)))
    low, high = percentiles(iqm(scores[picks]), [2.5, 97.5])
    return float(low), float(high)


def percentiles(scores: np.ndarray, percents: list[float], axis: int = -1) -> np.ndarray:
    """Percentiles along an axis.

    If a score is infinite, as that of a seed that failed, the nearest scores are taken instead of
    interpolated ones.
    """
    return np.percentile(
        scores, percents, axis, method="linear" if np.isfinite(scores).all() else "nearest"
    )


def share_lost(scores, reference, start) -> float:
    """The share of float32's gain that is lost. 0 is as good as float32, 1 has learned nothing.

    `reference` has float32's final scores, and `start` the scores before training. The loss is the
    median difference between `reference` and `scores`, and the gain is the median difference
    between `reference` and `start`. All are numbers, or arrays [seeds] in the same order of seeds.
    Higher scores are better. The share is NaN if a score is NaN.
    """
    scores, reference, start = (np.asarray(x, dtype=np.float64) for x in (scores, reference, start))
    return float(np.median(reference - scores) / np.median(reference - start))


def fails(scores, reference, start) -> bool:
    """Whether scores are a failure: they lose more than a tenth of float32's gain (`share_lost`).

    A score that is NaN is a failure, too. This is the project's definition wherever it compares a
    precision or a format with float32.
    """
    return is_failure(share_lost(scores, reference, start))


def is_failure(share: float) -> bool:
    """Whether a lost share of float32's gain is a failure. NaN is one, too."""
    return not share <= TENTH
