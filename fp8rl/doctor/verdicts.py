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
    error_of,
    errors_by_tensor,
    in_parts,
    noise_by_tensor,
    noise_of,
    rate_of,
    rates_by_tensor,
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
NAMED = 4  # how many tensors a line of the report names at most
PARTS = 24  # into how many parts of the training the rates of tensors are split

ERRORS = 2  # how many standard errors a stochastic row's rate may be off
# From the mildest to the worst, for rows that disagree
SEVERITY = (AS_FLOAT32, "too noisy", "frozen tensors", "faster", "slower", "stalls")


class Evidence(NamedTuple):
    """The numbers that a verdict is made from.

    They are what was measured over the whole training; or the worse of this and of a free row
    (`worse_of`); or the most favourable that noise allows (`within_errors`).

    `overall`  the rate of learning
    `first`    the rate at the beginning of the training
    `last`     the rate at its end
    `noise`    how far few bits lead away from float32's step, relative to this step
    `lost`     share of the numbers that stay the same over a window, or become 0
    `tensors`  the rate of each tensor by name
    """

    overall: float
    first: float
    last: float
    noise: float
    lost: float
    tensors: dict[str, float]

    @classmethod
    def measured(
        cls, windows: list[WindowSums], weight: np.ndarray, names: list[str]
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
            tensors={name: float(rate) for name, rate in zip(names, by_tensor, strict=True)},
        )

    @property
    def frozen(self) -> list[str]:
        """Names of the tensors that stand still."""
        return [name for name, rate in self.tensors.items() if rate < FROZEN]

    def fast(self, high: float) -> list[str]:
        """Names of the tensors whose rate is above `high`."""
        return [name for name, rate in self.tensors.items() if rate > high]

    def verdict(self, tolerates: tuple[float, float]) -> str:
        """The verdict, by the factors of the learning rate that the training tolerates."""
        low, high = tolerates
        all_frozen = len(self.frozen) == len(self.tensors)
        slow = "stalls" if self.last < STALLED or all_frozen else "slower"
        if self.overall < low:
            return slow
        if self.overall > high or self.fast(high):
            return "faster"
        if self.frozen:
            return "frozen tensors"
        if self.last < low:
            return slow
        if self.noise > NOISY:
            return "too noisy"
        return AS_FLOAT32


def judge(
    optimizer: str,
    text: str,
    windows: list[WindowSums],
    sample: Sample,
    names: list[str],
    tolerates: tuple[float, float],
    length: int,
    looked: bool = False,
    free: list[WindowSums] = (),
    trials: list[WindowSums] = (),
    steps_per_trial: int = 1,
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
    """
    weight = np.asarray(sample.sizes, float)
    if not windows or not np.isfinite([rate_of(sums, weight) for sums in windows]).any():
        why = "the training ended before a window was full, or moved nothing: train longer"
        return Finding.without_rates(optimizer, text, NOT_JUDGED, why)
    place, form = split_entry(text)
    measured = Evidence.measured(windows, weight, names)
    verdict = measured.verdict(tolerates)
    why = ""
    mechanism = mechanism_of(place, measured.lost, length, looked)
    free_rate = math.nan
    free_parts = in_parts(free, PARTS)
    if free:
        on_its_own = Evidence.measured(free, weight, names)
        free_rate = on_its_own.overall
        worse = worse_of(measured, on_its_own)
        worse_verdict = worse.verdict(tolerates)
        if SEVERITY.index(worse_verdict) > SEVERITY.index(verdict):
            verdict = worse_verdict
            rates = (
                f"{measured.overall:.2f} in windows that begin at float32's weights, "
                f"{worse.overall:.2f} where it goes on from its own"
            )
            why = explain(rates, worse, verdict, tolerates, mechanism)
    if not why and verdict != AS_FLOAT32 and is_stochastic(form):
        favourable = within_errors(measured, windows, trials or windows, steps_per_trial, sample)
        milder = favourable.verdict(tolerates)
        if SEVERITY.index(milder) < SEVERITY.index(verdict):
            verdict = milder
            # Tensors that only seem to stand still are not named.
            named = measured._replace(tensors=favourable.tensors)
            why = explain(rates_in_words(measured), named, verdict, tolerates, mechanism)
            why += "; where float32 hardly moves, its noise is not judged"
    if not why:
        why = explain(rates_in_words(measured), measured, verdict, tolerates, mechanism)
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
        free_rate=free_rate,
        free_tensor_rates=tuple(tuple(map(float, rates_by_tensor(sums))) for sums in free_parts),
    )


def worse_of(anchored: Evidence, free: Evidence) -> Evidence:
    """The evidence of an anchored row, with the rates of its free row where that learns clearly
    less."""

    def lower(anchored_rate: float, free_rate: float) -> float:
        return free_rate if anchored_rate - free_rate > DISAGREE else anchored_rate

    return anchored._replace(
        overall=lower(anchored.overall, free.overall),
        last=lower(anchored.last, free.last),
        tensors={name: lower(rate, free.tensors[name]) for name, rate in anchored.tensors.items()},
    )


def within_errors(
    measured: Evidence,
    windows: list[WindowSums],
    trials: list[WindowSums],
    steps_per_trial: int,
    sample: Sample,
) -> Evidence:
    """A stochastic row's evidence with the most favourable rates that its noise allows.

    A training that has converged, or an average that has arrived, has windows in which float32
    hardly moves. Their rates are the row's noise divided by next to nothing. So here those windows
    are left out, the others count by how far float32 moves in them, and each rate may be two
    standard errors nearer to 1. If float32 does not move in the last quarter, it is not judged.

    `trials` and `steps_per_trial` are those of `judge`.
    """
    weight = np.asarray(sample.sizes, float)
    numbers = np.minimum(weight, sample.numbers_per_tensor) * steps_per_trial

    def favourable(chosen: list[WindowSums]) -> tuple[float, np.ndarray]:
        """The rate over some trials, and those of the tensors."""
        sums = add_up(chosen)
        counts = numbers * len(chosen)
        error, errors = error_of(sums, counts, weight), errors_by_tensor(sums, counts)
        rate = towards_one(rate_of(sums, weight), ERRORS * error)
        return rate, towards_one(rates_by_tensor(sums), ERRORS * errors)

    moves = is_moving(trials, weight)
    rate, by_tensor = favourable([trials[i] for i in np.flatnonzero(moves)])
    first_late = len(trials) - max(1, len(trials) // 4)
    late = [trials[i] for i in np.flatnonzero(moves) if i >= first_late]
    while_moving = [windows[i] for i in np.flatnonzero(is_moving(windows, weight))]
    return measured._replace(
        overall=rate,
        last=favourable(late)[0] if late else rate,
        noise=float(np.median([noise_of(sums, weight) for sums in while_moving])),
        tensors={name: float(own) for name, own in zip(measured.tensors, by_tensor, strict=True)},
    )


def is_moving(windows: list[WindowSums], weight: np.ndarray) -> np.ndarray:
    """Whether float32 has not converged in each window, bool [windows]."""
    movements = np.sqrt([(weight * sums.true).sum() for sums in windows])
    return (movements > 0) & (movements >= CONVERGED * np.nanmax(movements))


def towards_one(rate, by):
    """A rate, or an array of them, moved towards 1 by no more than `by`."""
    return rate + np.clip(1 - rate, -by, by)


def is_stochastic(form: str) -> bool:
    return "stochastic" in form.split(":")[1:]


def rates_in_words(measured: Evidence) -> str:
    """The rate, with those at first and at the end if they differ."""
    text = f"learns as at {times(measured.overall)} the learning rate"
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
        fastest = max(evidence.tensors.values())
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


def times(rate: float) -> str:
    """A factor in words."""
    if rate >= 100:
        return f"{rate:,.0f} times"
    return f"{rate:.2f} times" if rate >= 0.01 else f"{rate:.1g} times"


def listed(names: list[str]) -> str:
    """Names in a line. Of a long list, only the first few."""
    more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])
