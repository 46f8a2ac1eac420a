"""Statistics for comparing runs, following Agarwal et al. (2021, "Deep RL at the Edge of the Statistical Precipice",
arXiv:2108.13264): the interquartile mean over seeds, because means follow outliers and medians ignore half of the data, with a
percentile bootstrap interval over seeds. Two precisions are compared by the differences between runs with the same seed."""

import numpy as np


def iqm(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean along an axis: the mean of what remains after cutting a quarter (rounded down) from each end."""
    scores = np.sort(np.asarray(scores, dtype=np.float64), axis)
    count = scores.shape[axis]
    return np.take(scores, range(count // 4, count - count // 4), axis).mean(axis)


def bootstrap_interval(scores: np.ndarray, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the interquartile mean of scores [runs]."""
    scores = np.asarray(scores, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(scores), size=(resamples, len(scores)))
    low, high = percentiles(iqm(scores[picks]), [2.5, 97.5])
    return float(low), float(high)


def percentiles(scores: np.ndarray, percents: list[float], axis: int = -1) -> np.ndarray:
    """Percentiles along an axis; the nearest scores if any is infinite, as that of a seed that failed is."""
    return np.percentile(scores, percents, axis, method="linear" if np.isfinite(scores).all() else "nearest")
