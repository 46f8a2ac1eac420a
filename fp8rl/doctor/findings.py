"""The doctor's findings: for each format, the rate at which training learns, and a verdict."""

import json
import math
from typing import NamedTuple

import numpy as np

from ..bits.notation import OPERANDS, STATE, split_entry
from ..bits.places import PlaceFormat
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
# Noise, relative to float32's step, above which it is reported. Less noise hardly matters, because
# it averages out.
NOISY = 2.5
# For a policy that acts in few bits: the share of their sample size that the weights of sequences
# keep over a horizon.
KEPT = 0.9
# Sequences of fewer horizons than SHORT are fine, and of more than LONG are too long. Between the
# two the estimate is too noisy to decide.
SHORT = 0.8
LONG = 1.5
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

AS_FLOAT32 = "as float32"
NOT_JUDGED = "not judged"
# From the mildest to the worst, for rows that disagree
SEVERITY = (AS_FLOAT32, "too noisy", "frozen tensors", "faster", "slower", "stalls")


class Finding(NamedTuple):
    """The result for one place and format in one optimizer.

    `optimizer`  name of the optimizer; "average" for a running average, "policy" for a policy that
                 acts in few bits
    `place`      weights, m, v, root, forward, backward, acting, one of the `others` of a look, or
                 the name of an average
    `format`     the format with the words after it
    `rate`       the factor by which few bits multiply the learning rate, over the whole training
                 and with every number counted alike; NaN if nothing was measured. For a policy that
                 acts, the effective sample size of a token's ratio.
    `first`      the rate in the first quarter of the training
    `last`       the rate in the last quarter
    `noise`      how far few bits lead away from float32's step, relative to this step, in the
                 median window
    `lost`       share of the numbers that stay the same over a window, or become 0, in the median
                 window
    `tensors`    the rate of each tensor by name
    `free_rate` the rate of weights that go on from where few bits leave them. `rate` is measured in
                 windows that begin at float32's weights each time, which hides a stall if the
                 weights move to where the format's numbers are closer together. Where the two
                 disagree, the verdict is the worse one. NaN for other places, and for stochastic
                 rounding, which does not stall.
    `tensor_rates`, `tensor_noise`
                 the rate of each tensor, and the standard deviation of the noise that an update
                 adds to a number, in each of up to 24 parts of the training, [parts, T]
    `verdict`    as float32, slower, faster, stalls, frozen tensors, too noisy, not judged
    `why`        the reason in words
    `cure`       another format of the same place (or of the root, for v) that was watched and
                 learns as float32 does
    """

    optimizer: str
    place: str
    format: str
    rate: float
    first: float
    last: float
    noise: float
    lost: float
    tensors: dict[str, float]
    verdict: str
    why: str
    cure: str = ""
    tensor_rates: tuple[tuple[float, ...], ...] = ()
    tensor_noise: tuple[tuple[float, ...], ...] = ()
    free_rate: float = math.nan

    @property
    def text(self) -> str:
        """Place and format, as in "weights=bf16"."""
        return f"{self.place}={self.format}"

    @property
    def is_fine(self) -> bool:
        return self.verdict == AS_FLOAT32

    @property
    def horizon(self) -> float:
        """For a policy that acts in few bits: the number of tokens after which the weights of
        sequences have lost a tenth of their sample size. NaN for other places."""
        return horizon_of(self.rate) if self.place == "acting" else math.nan

    def of_tensors(self, numbers: list[int]) -> "Finding":
        """The finding with the rates of some tensors alone, by their numbers."""
        names = list(self.tensors)
        return self._replace(
            tensors={names[t]: self.tensors[names[t]] for t in numbers if names},
            tensor_rates=tuple(tuple(part[t] for t in numbers) for part in self.tensor_rates),
            tensor_noise=tuple(tuple(part[t] for t in numbers) for part in self.tensor_noise),
        )

    def __str__(self) -> str:
        """The finding in one line."""
        if self.verdict == NOT_JUDGED:
            return f"{self.text}: not judged: {self.why}"
        line = f"{self.text}: {self.verdict}"
        if self.why:
            line += f": {self.why}"
        if self.cure:
            line += f"; cure: {self.cure}"
        return line


class Report(list[Finding]):
    """A list of findings, in the order of the doctor's formats.

    `notes` are lines that say what could not be judged.
    """

    def __init__(self, findings=(), notes: list[str] | None = None):
        super().__init__(findings)
        self.notes = notes or []

    def __str__(self) -> str:
        """A line for each finding, by optimizer, then the notes."""
        lines = []
        for optimizer in dict.fromkeys(finding.optimizer for finding in self):
            lines.append(optimizer)
            lines += [f"  {finding}" for finding in self if finding.optimizer == optimizer]
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> str:
        """The findings as a JSON list of objects. NaN and infinity become null."""
        return json.dumps([without_nan(finding._asdict()) for finding in self], indent=2)

    def require(self, *formats: str) -> None:
        """Raises ValueError unless each of these places and formats learns as float32 does, in
        every optimizer. An example is "weights=bf16"."""
        for text in formats:
            findings = [finding for finding in self if finding.text == text]
            if not findings:
                raise ValueError(
                    f"{text} was not watched: name it in the doctor's formats{remedy_for(text)}"
                )
            for finding in findings:
                if not finding.is_fine:
                    reason = f"{finding.verdict}: {finding.why}"
                    cure = finding.cure or "keep it in float32"
                    where = f"in {finding.optimizer} ({reason})"
                    raise ValueError(f"{text} is not fine {where}: {cure}")


def without_nan(x):
    """`x` with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(x, dict):
        return {name: without_nan(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [without_nan(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def remedy_for(text: str) -> str:
    """What else the user must do so that the doctor watches a place, as the end of a message."""
    place, _ = split_entry(text)
    if place == "weights":
        return ""
    if place in STATE:
        return ", and use Adam"
    if place == "acting":
        return ", and call the doctor's act"
    if place in OPERANDS:
        return ", and call the doctor's look with the loss of an Adam"
    return ", or call the doctor's look or follow for it"


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
    place, form = split_entry(text)
    weight = np.asarray(sample.sizes, float)
    if not windows or not np.isfinite([rate_of(sums, weight) for sums in windows]).any():
        why = "the training ended before a window was full, or moved nothing: train longer"
        nan = math.nan
        return Finding(optimizer, place, form, nan, nan, nan, nan, nan, {}, NOT_JUDGED, why)
    parts = in_parts(windows, PARTS)
    finding = Finding(
        optimizer,
        place,
        form,
        **rates_in(windows, weight, names),
        noise=float(np.nanmedian([noise_of(sums, weight) for sums in windows])),
        lost=float(np.nanmedian([share_lost(sums, weight) for sums in windows])),
        verdict=AS_FLOAT32,
        why="",
        tensor_rates=tuple(tuple(map(float, rates_by_tensor(sums))) for sums in parts),
        tensor_noise=tuple(tuple(map(float, noise_by_tensor(sums, length))) for sums in parts),
    )
    verdict = verdict_of(finding, tolerates)
    arguments = (tolerates, length, looked)
    if free:
        on_its_own = finding._replace(**rates_in(free, weight, names))
        finding = finding._replace(free_rate=on_its_own.rate)
        worse = where_it_is_worse(finding, on_its_own)
        worse_verdict = verdict_of(worse, tolerates)
        if SEVERITY.index(worse_verdict) > SEVERITY.index(verdict):
            why = explain(worse, worse_verdict, *arguments, anchored_rate=finding.rate)
            return finding._replace(verdict=worse_verdict, why=why)
    if verdict != AS_FLOAT32 and is_stochastic(form):
        favourable = within_errors(finding, windows, trials or windows, steps_per_trial, sample)
        milder = verdict_of(favourable, tolerates)
        if SEVERITY.index(milder) < SEVERITY.index(verdict):
            # Tensors that only seem to stand still are not named.
            why = explain(finding._replace(tensors=favourable.tensors), milder, *arguments)
            reason = "where float32 hardly moves, its noise is not judged"
            return finding._replace(verdict=milder, why=f"{why}; {reason}")
    return finding._replace(verdict=verdict, why=explain(finding, verdict, *arguments))


def rates_in(windows: list[WindowSums], weight: np.ndarray, names: list[str]) -> dict:
    """The rates of a Finding over all windows, in the first and last quarter, and by tensor."""
    quarter = max(1, len(windows) // 4)
    by_tensor = rates_by_tensor(add_up(windows))
    return {
        "rate": float(np.nanmean([rate_of(sums, weight) for sums in windows])),
        "first": rate_of(add_up(windows[:quarter]), weight),
        "last": rate_of(add_up(windows[-quarter:]), weight),
        "tensors": {name: float(rate) for name, rate in zip(names, by_tensor, strict=True)},
    }


def where_it_is_worse(finding: Finding, on_its_own: Finding) -> Finding:
    """A finding with the rates of its free row, where that row learns clearly less."""

    def lower(anchored: float, own: float) -> float:
        return own if anchored - own > DISAGREE else anchored

    tensors = {
        name: lower(rate, on_its_own.tensors[name]) for name, rate in finding.tensors.items()
    }
    return finding._replace(
        rate=lower(finding.rate, on_its_own.rate),
        last=lower(finding.last, on_its_own.last),
        lost=on_its_own.lost,
        tensors=tensors,
    )


def within_errors(
    finding: Finding,
    windows: list[WindowSums],
    trials: list[WindowSums],
    steps_per_trial: int,
    sample: Sample,
) -> Finding:
    """A stochastic row's finding with the most favourable rates that its noise allows.

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
    return finding._replace(
        rate=rate,
        last=favourable(late)[0] if late else rate,
        noise=float(np.median([noise_of(sums, weight) for sums in while_moving])),
        tensors={name: float(own) for name, own in zip(finding.tensors, by_tensor, strict=True)},
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


def verdict_of(finding: Finding, tolerates: tuple[float, float]) -> str:
    """The verdict on a finding, by the factors of the learning rate that the training tolerates."""
    low, high = tolerates
    if finding.rate < low:
        all_frozen = len(frozen_tensors(finding)) == len(finding.tensors)
        return "stalls" if finding.last < FROZEN or all_frozen else "slower"
    if finding.rate > high or fast_tensors(finding, high):
        return "faster"
    if frozen_tensors(finding):
        return "frozen tensors"
    if finding.last < low:
        return "stalls"
    if finding.noise > NOISY:
        return "too noisy"
    return AS_FLOAT32


def frozen_tensors(finding: Finding) -> list[str]:
    """Names of the tensors that stand still."""
    return [name for name, rate in finding.tensors.items() if rate < FROZEN]


def fast_tensors(finding: Finding, high: float) -> list[str]:
    """Names of the tensors whose rate is above `high`."""
    return [name for name, rate in finding.tensors.items() if rate > high]


def explain(
    finding: Finding,
    verdict: str,
    tolerates: tuple[float, float],
    length: int,
    looked: bool,
    anchored_rate: float | None = None,
) -> str:
    """The meaning of a finding, in words.

    `anchored_rate` is given for a finding that has the rates of a free row.
    """
    if anchored_rate is not None:
        parts = [
            f"{anchored_rate:.2f} in windows that begin at float32's weights, "
            f"{finding.rate:.2f} where it goes on from its own"
        ]
    else:
        parts = [f"learns as at {times(finding.rate)} the learning rate"]
    if anchored_rate is None and abs(
        math.log(max(finding.last, 1e-6) / max(finding.first, 1e-6))
    ) > math.log(1.5):
        parts[0] += f" ({finding.first:.2f} at first, {finding.last:.2f} at the end)"
    total = len(finding.tensors)
    if frozen := frozen_tensors(finding):
        if len(frozen) == total:
            parts.append("all tensors are frozen")
        else:
            verb = "is" if len(frozen) == 1 else "are"
            parts.append(f"{len(frozen)} of {total} tensors {verb} frozen: {listed(frozen)}")
    if verdict == "faster" and (fast := fast_tensors(finding, tolerates[1])):
        fastest = max(finding.tensors.values())
        parts.append(
            f"{len(fast)} of {total} tensors learn up to {times(fastest)} as fast: {listed(fast)}"
        )
    if verdict == "too noisy":
        parts.append(f"its noise is {finding.noise:.1f} times the step")
    if verdict not in (AS_FLOAT32, "too noisy") and finding.lost > 0.01:
        parts.append(mechanism_of(finding, length, looked))
    return "; ".join(parts)


def mechanism_of(finding: Finding, length: int, looked: bool) -> str:
    """How numbers are lost, in words."""
    share = f"{finding.lost:.0%}"
    if finding.place in STATE[1:]:
        numbers = "roots of v" if finding.place == "root" else finding.place
        consequence = "" if finding.place == "m" else ", and Adam then divides by eps alone"
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


def amount(x: float) -> str:
    """A positive number in a line, without decimals from 10 up."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


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
    place, form = split_entry(text)
    sizes = [look.size for look in looks]
    size = float(np.mean(sizes))
    quarter = max(1, len(sizes) // 4)
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
    return Finding(
        "policy",
        place,
        form,
        rate=size,
        first=float(np.mean(sizes[:quarter])),
        last=float(np.mean(sizes[-quarter:])),
        noise=divergence,
        lost=0.0,
        tensors={},
        verdict=verdict,
        why=why,
    )


def bits_of(finding: Finding) -> int:
    """How many bits a number has in a finding's format."""
    form = PlaceFormat.of(finding.format).format
    return 1 + form.exponent + form.mantissa


def with_cures(findings: list[Finding]) -> list[Finding]:
    """The findings of one optimizer, with the cures that are among them."""
    cured = []
    for finding in findings:
        if not finding.is_fine and finding.verdict != NOT_JUDGED:
            finding = finding._replace(cure=cure_of(finding, findings))
        cured.append(finding)
    return cured


def cure_of(finding: Finding, findings: list[Finding]) -> str:
    """A format that learns as float32 does, with its rate.

    The same format with a scale or with stochastic rounding is tried first, for v also its root,
    and then any format of the same place that has no more bits.
    """
    fine = {candidate.text: candidate for candidate in findings if candidate.is_fine}
    place = finding.place
    bare = finding.format.split(":")[0]
    texts = [
        f"{place}={bare}",
        f"{place}={finding.format}:stochastic",
        f"{place}={bare}:stochastic",
    ]
    if place == "v":
        texts += [f"root={finding.format}", f"root={bare}", f"root={bare}:stochastic"]
    small_enough = [
        candidate
        for candidate in fine.values()
        if candidate.place == place and bits_of(candidate) <= bits_of(finding)
    ]
    small_enough.sort(key=lambda candidate: abs(math.log(candidate.rate)))
    texts += [candidate.text for candidate in small_enough]
    for text in texts:
        if text in fine:
            return f"{text} ({fine[text].rate:.2f})"
    return "keep it in float32"
