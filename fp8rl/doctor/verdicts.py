"""How a verdict on a place and format follows from what a doctor has measured."""

import math
from typing import NamedTuple

import numpy as np

from ..bits.notation import STATE, split_entry
from .findings import AS_FLOAT32, NOT_JUDGED, Finding
from .sample import (
    Sample,
    WindowSums,
    add_up,
    in_parts,
    noise_by_tensor,
    noise_error,
    noise_errors_by_tensor,
    noise_of,
    rate_of,
    rates_by_tensor,
    sampling_error,
    sampling_errors_by_tensor,
    share_lost,
)

FROZEN = 0.05  # a tensor with a rate below this stands still
STALLED = 0.1  # a training that ends with a rate below this has nearly stopped
# Noise, relative to float32's step, above which it is reported. Less noise hardly matters, because
# it averages out.
NOISY = 2.5
# A free row of weights disagrees with the anchored one if its rate is lower by more than this. In
# trainings without a hidden stall the two were at most 0.07 apart (Adam, AdamW and SGD at learning
# rates from 1e-5 to 0.3, constant or falling).
DISAGREE = 0.15
# A window in which float32 moves by less than this share of its longest movement has converged. A
# schedule that lowers the learning rate to a hundredth does not pass for that.
CONVERGED = 0.01
SHOWN_ERROR = 0.01  # a standard error above this is part of the line
NAMED = 4  # how many tensors a line of the report names at most
PARTS = 24  # into how many parts of the training the rates of tensors are split

ERRORS = 2  # how many standard errors a rate may be off
# From the mildest to the worst, for rows that disagree
SEVERITY = (
    AS_FLOAT32,
    "too noisy",
    "frozen tensors",
    "drifts",
    "faster",
    "leaps",
    "slower",
    "stalls",
    "diverges",
)


class Errors(NamedTuple):
    """Standard errors of the rates of one row, because only a sample of the numbers is followed,
    and because stochastic rounding is noisy. They are 0 or NaN where nothing is known.

    `mean`     of the mean over the parts of the training
    `last`     of the rate in about the last quarter of the training
    `whole`    of the rate over the whole training, in which a window counts by float32's movement
    `tensors`  of the rate of each tensor, [T]
    """

    mean: float
    last: float
    whole: float
    tensors: np.ndarray

    @classmethod
    def of_sample(cls, parts: np.ndarray | None, sample: Sample, is_noisy: bool) -> "Errors":
        """The errors by how much the followed numbers differ; `parts` is NumberSums.of_row."""
        if parts is None:
            return cls(math.nan, math.nan, math.nan, np.full(len(sample.sizes), math.nan))
        last = parts[-math.ceil(len(parts) / 4) :]
        return cls(
            mean=sampling_error(parts, sample, is_noisy),
            last=sampling_error(last.sum(0, keepdims=True), sample, is_noisy),
            whole=sampling_error(parts.sum(0, keepdims=True), sample, is_noisy),
            tensors=sampling_errors_by_tensor(parts, sample, is_noisy),
        )

    @classmethod
    def of_noise(
        cls, trials: list[WindowSums], steps_per_trial: int, windows: int, sample: Sample
    ) -> "Errors":
        """The errors that noise must make, although few numbers may show it yet.

        `trials` and `steps_per_trial` are those of `judge`, and `windows` is the number of windows.
        """
        weight = np.array(sample.sizes, float)
        counts = sample.followed * steps_per_trial

        def error(chosen: list[WindowSums]) -> float:
            return noise_error(add_up(chosen), counts * len(chosen), weight)

        by_part = np.array_split(np.arange(len(trials)), windows)
        of_parts = np.array([error([trials[i] for i in part]) for part in by_part])
        of_parts = of_parts[np.isfinite(of_parts)]
        quarter = max(1, len(trials) // 4)
        return cls(
            mean=float(np.linalg.norm(of_parts) / max(len(of_parts), 1)),
            last=error(trials[-quarter:]),
            whole=error(trials),
            tensors=noise_errors_by_tensor(add_up(trials), counts * len(trials)),
        )

    def or_larger(self, other: "Errors") -> "Errors":
        """The larger of two errors, each."""
        return Errors(*(np.fmax(one, two) for one, two in zip(self, other, strict=True)))


class Evidence(NamedTuple):
    """The numbers that a verdict is made from.

    They are what was measured over the whole training; or the worse of this and of a free row
    (`worse_of`); or, of a stochastic row, what was measured while float32 moved (`while_moving`).

    `overall`  the rate of learning
    `first`    the rate at the beginning of the training
    `last`     the rate at its end
    `noise`    how far few bits lead away from float32's step, relative to this step
    `lost`     share of the numbers that stay the same over a window, or become 0
    `tensors`  the rate of each tensor by name

    `error`, `last_error` and `tensor_errors` are the standard errors of `overall`, `last` and
    `tensors`; NaN where they are not known.
    """

    overall: float
    first: float
    last: float
    noise: float
    lost: float
    tensors: dict[str, float]
    error: float
    last_error: float
    tensor_errors: dict[str, float]

    @classmethod
    def measured(
        cls, windows: list[WindowSums], weight: np.ndarray, names: list[str], errors: Errors
    ) -> "Evidence":
        """What was measured over all windows, in their first and last quarter, and by tensor."""
        quarter = max(1, len(windows) // 4)
        by_tensor = rates_by_tensor(add_up(windows))
        return cls(
            overall=float(np.nanmean([rate_of(sums, weight) for sums in windows])),
            first=rate_of(add_up(windows[:quarter]), weight),
            last=rate_of(add_up(windows[-quarter:]), weight),
            noise=float(np.nanmedian([noise_of(sums, weight) for sums in windows])),
            lost=float(np.nanmedian([share_lost(sums, weight) for sums in windows])),
            tensors=dict(zip(names, by_tensor.tolist(), strict=True)),
            error=float(errors.mean),
            last_error=float(errors.last),
            tensor_errors=dict(zip(names, errors.tensors.tolist(), strict=True)),
        )

    @property
    def frozen(self) -> list[str]:
        """Names of the tensors that stand still."""
        return [
            name
            for name, rate in self.tensors.items()
            if is_below(rate, self.tensor_errors[name], FROZEN)
        ]

    def fast(self, high: float) -> list[str]:
        """Names of the tensors whose rate is above `high`."""
        return [
            name
            for name, rate in self.tensors.items()
            if is_above(rate, self.tensor_errors[name], high)
        ]

    def shifted(self, errors: float) -> "Evidence":
        """The evidence with the rates of the whole training moved by so many standard errors, and
        then without errors. Tensors keep theirs."""
        overall_by = errors * np.nan_to_num(self.error)
        last_by = errors * np.nan_to_num(self.last_error)
        return self._replace(
            overall=self.overall + overall_by,
            last=self.last + last_by,
            error=0.0,
            last_error=0.0,
        )

    def verdict(self, tolerates: tuple[float, float]) -> str:
        """The verdict, by the factors of the learning rate that the training tolerates.

        A rate is beyond a limit only if it is so by more than two standard errors.
        """
        low, high = tolerates
        all_frozen = len(self.frozen) == len(self.tensors)
        has_stopped = is_below(self.last, self.last_error, STALLED)
        slow = "stalls" if has_stopped or all_frozen else "slower"
        if is_below(self.overall, self.error, low):
            return slow
        if is_above(self.overall, self.error, high) or self.fast(high):
            return "faster"
        if self.frozen:
            return "frozen tensors"
        if is_below(self.last, self.last_error, low):
            return slow
        return AS_FLOAT32


def is_below(rate: float, error: float, limit: float) -> bool:
    """Whether a rate is below a limit by more than two standard errors. An error may be NaN, which
    counts as 0."""
    return rate + (0.0 if math.isnan(error) else ERRORS * error) < limit


def is_above(rate: float, error: float, limit: float) -> bool:
    """Whether a rate is above a limit by more than two standard errors, as `is_below`."""
    return rate - (0.0 if math.isnan(error) else ERRORS * error) > limit


def judge(
    optimizer: str,
    text: str,
    windows: list[WindowSums],
    sample: Sample,
    names: list[str],
    tolerates: tuple[float, float],
    length: int,
    looked: bool = False,
    trials: list[WindowSums] = (),
    steps_per_trial: int = 1,
    numbers: np.ndarray | None = None,
) -> Finding:
    """The finding for a place and format, without a cure.

    `windows`    measurements [T] of each window
    `sample`     the sample of the T tensors that was measured
    `names`      names of the tensors
    `tolerates`  lowest and highest factor of the learning rate that the training tolerates
    `length`     updates in a window
    `looked`     whether the windows are those of Looks
    `free`       measurements of each window of the free row, if the format has one
    `trials`     of stochastic rounding: independent measurements with the noise that is to be
                 expected, each of `steps_per_trial` steps; the default is `windows`
    `numbers`    the sums of each followed number (NumberSums.of_row), for standard errors. Without
                 them, the errors of the sample are not known, and count as 0.
    `free_numbers`  those of the free row
    """
    weight = np.asarray(sample.sizes, float)
    if not windows or not np.isfinite([rate_of(sums, weight) for sums in windows]).any():
        why = "the training ended before a window was full, or moved nothing: train longer"
        return Finding.without_rates(optimizer, text, NOT_JUDGED, why)
    place, form = split_entry(text)
    is_noisy = is_stochastic(form)
    errors = Errors.of_sample(numbers, sample, is_noisy)
    if is_noisy:
        trials = trials or windows
        noise = Errors.of_noise(trials, steps_per_trial, len(windows), sample)
        errors = errors.or_larger(noise)
    measured = Evidence.measured(windows, weight, names, errors)
    if is_noisy:  # windows weigh by float32's movement
        sums = add_up(windows)
        measured = measured._replace(
            overall=rate_of(sums, weight), error=float(errors.whole), noise=noise_of(sums, weight)
        )
    verdict = verdict_of(measured, tolerates, is_noisy)
    mechanism = mechanism_of(place, measured.lost, length, looked)
    why = explain(rates_in_words(measured), measured, verdict, tolerates, mechanism)
    if others := doubts(measured, verdict, tolerates, is_noisy):
        quoted = " or ".join(f'"{other}"' for other in others)
        why += f"; perhaps {quoted}, which a larger sample would tell"
    parts = in_parts(windows, PARTS)
    return Finding(
        optimizer,
        place,
        form,
        rate=measured.overall,
        first=measured.first,
        last=measured.last,
        noise=measured.noise,
        lost=measured.lost,
        tensors=measured.tensors,
        verdict=verdict,
        why=why,
        tensor_rates=tuple(tuple(map(float, rates_by_tensor(sums))) for sums in parts),
        tensor_noise=tuple(tuple(map(float, noise_by_tensor(sums, length))) for sums in parts),
        error=measured.error,
        tensor_errors=measured.tensor_errors,
    )


def verdict_of(measured: Evidence, tolerates: tuple[float, float], is_noisy: bool) -> str:
    """The verdict on a row.

    It follows from the rates of the whole training as they were measured: if a rate is below a
    limit but could be above it, "as float32" would be no better founded than "slower". Stochastic
    rounding is right in the mean, so its rates must be beyond a limit by more than their errors.
    Single tensors are many, and some are off by chance. So they must be, too.
    """
    return (measured if is_noisy else measured.shifted(0)).verdict(tolerates)


def doubts(
    measured: Evidence, verdict: str, tolerates: tuple[float, float], is_noisy: bool
) -> list[str]:
    """Other verdicts that rates within two standard errors of those measured would have. Of a
    stochastic row, whose verdict allows for the errors, the one of the rates as they are."""
    shifts = (0,) if is_noisy else (ERRORS, -ERRORS)
    others = [measured.shifted(errors).verdict(tolerates) for errors in shifts]
    return [other for other in dict.fromkeys(others) if other != verdict]


def is_stochastic(form: str) -> bool:
    return "stochastic" in form.split(":")[1:]


def rates_in_words(measured: Evidence) -> str:
    """The rate, with those at first and at the end if they differ."""
    text = f"learns as at {times(measured.overall, measured.error)} the learning rate"
    change = math.log(max(measured.last, 1e-6) / max(measured.first, 1e-6))
    if abs(change) > math.log(1.5):
        text += f" ({measured.first:.2f} at first, {measured.last:.2f} at the end)"
    return text


def explain(
    rates: str, evidence: Evidence, verdict: str, tolerates: tuple[float, float], mechanism: str
) -> str:
    """The meaning of the evidence, in words.

    `rates` has the rate in words, and `mechanism` how numbers are lost.
    """
    parts = [rates]
    total = len(evidence.tensors)
    if frozen := evidence.frozen:
        if len(frozen) == total:
            parts.append("all tensors are frozen")
        else:
            verb = "is" if len(frozen) == 1 else "are"
            parts.append(f"{len(frozen)} of {total} tensors {verb} frozen: {listed(frozen)}")
    if verdict == "faster" and (fast := evidence.fast(tolerates[1])):
        fastest = max(evidence.tensors[name] for name in fast)
        parts.append(
            f"{len(fast)} of {total} tensors learn up to {times(fastest)} as fast: {listed(fast)}"
        )
    if verdict == "too noisy":
        parts.append(f"its noise is {evidence.noise:.1f} times the step")
    if verdict not in (AS_FLOAT32, "too noisy") and evidence.lost > 0.01:
        parts.append(mechanism)
    return "; ".join(parts)


def mechanism_of(place: str, lost: float, length: int, looked: bool) -> str:
    """How a share of the numbers is lost, in words."""
    share = f"{lost:.0%}"
    if place in STATE[1:]:
        numbers = "roots of v" if place == "root" else place
        consequence = "" if place == "m" else ", and Adam then divides by eps alone"
        return f"{share} of the {numbers} are kept as 0{consequence}"
    if looked:
        return f"{share} of the gradients become 0"
    return f"{share} of the numbers stay the same over {length} updates"


def times(rate: float, error: float = 0.0) -> str:
    """A factor in words, with its standard error if that is larger than 0.01."""
    if rate >= 100:
        text = f"{rate:,.0f}"
    else:
        text = f"{rate:.2f}" if rate >= 0.01 else f"{rate:.1g}"
    if error > SHOWN_ERROR:
        text += f" ± {error:.0f}" if error >= 10 else f" ± {error:.2f}"
    return f"{text} times"


def listed(names: list[str]) -> str:
    """Names in a line. Of a long list, only the first few."""
    more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])
