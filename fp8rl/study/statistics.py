"""Statistics for comparing runs, following Agarwal et al. (2021, "Deep RL at the Edge of the
Statistical Precipice", arXiv:2108.13264): the interquartile mean over seeds, because means follow
outliers and medians ignore half of the data, with a percentile bootstrap interval over seeds. Two
precisions are compared by the differences between runs with the same seed."""

import numpy as np

TENTH = 0.1  # the share of float32's gain from which a loss is a failure


def iqm(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean along an axis: the mean of what remains after cutting a quarter (rounded
    down) from each end."""
    scores = np.sort(np.asarray(scores, dtype=np.float64), axis)
    count = scores.shape[axis]
    return np.take(scores, range(count // 4, count - count // 4), axis).mean(axis)


def bootstrap_interval(
    scores: np.ndarray, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """95% percentile bootstrap interval of the interquartile mean of scores [runs]."""
    scores = np.asarray(scores, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(scores), size=(resamples, len(scores)))
    low, high = percentiles(iqm(scores[picks]), [2.5, 97.5])
    return float(low), float(high)


def percentiles(scores: np.ndarray, percents: list[float], axis: int = -1) -> np.ndarray:
    """Percentiles along an axis; the nearest scores if any is infinite, as that of a seed that
    failed is."""
    return np.percentile(
        scores, percents, axis, method="linear" if np.isfinite(scores).all() else "nearest"
    )


def share_lost(scores, reference, start) -> float:
    """What part of float32's gain is lost: the median difference between the `reference`, float32's
    final scores, and `scores`, divided by the median difference between the reference and `start`,
    the scores before training. All are numbers, or arrays [seeds] in the same order of seeds;
    higher scores are better. 0 is float32, and 1 has learned nothing. NaN if a score is."""
    scores, reference, start = (np.asarray(x, dtype=np.float64) for x in (scores, reference, start))
    return float(np.median(reference - scores) / np.median(reference - start))


def fails(scores, reference, start) -> bool:
    """Whether scores are a failure: a loss of more than a tenth of float32's gain (`share_lost`),
    or a score that is NaN. This is what the project calls a failure wherever it compares a
    precision or a format with float32."""
    return is_failure(share_lost(scores, reference, start))


def is_failure(share: float) -> bool:
    """Whether a share of float32's gain that is lost makes a failure."""
    return not share <= TENTH
