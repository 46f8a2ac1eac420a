"""What a doctor says of a format: the rate at which it learns, and a verdict in words."""

import json
import math
from typing import NamedTuple

import numpy as np

from ..places import STATE, PlaceFormat, split_entry
from .looks import OPERANDS
from .sample import (
    WindowSums,
    add_up,
    in_parts,
    noise_by_tensor,
    noise_of,
    rate_of,
    rates_by_tensor,
    share_lost,
)

TOLERATES = 0.5, 4.0  # factors of the learning rate, unless the user says others
FROZEN = 0.05  # a tensor that learns at less of its learning rate stands still
NOISY = 2.5  # times float32's way; noise below it hardly matters, because it averages out
# Of an acting policy: the share of their sample size that the weights of sequences keep over a
# horizon, and how many horizons long sequences may be, with a margin for the noise of the estimate
KEPT = 0.9
SHORT = 0.8
LONG = 1.5
NAMED = 4  # tensors that a line names
PARTS = 24  # of a training, by which rates are kept

AS_FLOAT32 = "as float32"
NOT_JUDGED = "not judged"


class Finding(NamedTuple):
    """What the doctor found of one place and format in one optimizer.

    `optimizer`  its name; "average" and "policy" for those
    `place`      weights, m, v, root, forward, backward, acting, one of the `others` of a look, or
                 the name of an average
    `format`     with the words after it
    `rate`       the factor by which few bits multiply the learning rate, every number counted
                 alike, over the whole training; NaN if nothing was measured. Of an acting policy:
                 the effective sample size of a token's ratio
    `first`      the same in the first quarter of the training
    `last`       in the last one
    `noise`      how far few bits lead beside float32's way, in units of it: the median window's
    `lost`       share of numbers that stay the same over a window, or become 0: the median
                 window's
    `tensors`    the rate of each tensor by name
    `tensor_rates`, `tensor_noise`
                 in each of up to 24 parts of the training, the rate of each tensor, and the
                 standard deviation of the noise that an update adds to a number, [parts, T]
    `verdict`    as float32, slower, faster, stalls, frozen tensors, too noisy, not judged
    `why`        in words
    `cure`       a format of the same place, or the root of v, that was watched and learns as
                 float32 does
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

    @property
    def text(self) -> str:
        """Place and format, as in "weights=bf16"."""
        return f"{self.place}={self.format}"

    @property
    def is_fine(self) -> bool:
        return self.verdict == AS_FLOAT32

    @property
    def horizon(self) -> float:
        """Of an acting policy, the tokens until the weights of sequences have lost a tenth of their
        sample size; else NaN."""
        return horizon_of(self.rate) if self.place == "acting" else math.nan

    def __str__(self) -> str:
        """In one line."""
        if self.verdict == NOT_JUDGED:
            return f"{self.text}: not judged: {self.why}"
        line = f"{self.text}: {self.verdict}"
        if self.why:
            line += f": {self.why}"
        if self.cure:
            line += f"; cure: {self.cure}"
        return line


COLUMNS = (
    "optimizer",
    "place",
    "format",
    "rate",
    "first",
    "last",
    "noise",
    "lost",
    "verdict",
    "why",
    "cure",
)


class Report(list[Finding]):
    """The findings, in the order of the doctor's formats.

    `notes` are lines about what could not be judged.
    """

    def __init__(self, findings=(), notes: list[str] | None = None):
        super().__init__(findings)
        self.notes = notes or []

    def __str__(self) -> str:
        """A line for each finding, by optimizer, then the notes."""
        lines = []
        for optimizer in dict.fromkeys(finding.optimizer for finding in self):
            lines.append(optimizer)
            lines += [f"  {found}" for found in self if found.optimizer == optimizer]
        return "\n".join([*lines, *self.notes])

    def to_markdown(self) -> str:
        """A table."""
        rows = [COLUMNS, ["---"] * len(COLUMNS)]
        for finding in self:
            row = [getattr(finding, name) for name in COLUMNS]
            rows.append([f"{x:.2f}" if isinstance(x, float) else x for x in row])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def to_json(self) -> str:
        """A list of objects; what is NaN or infinite is null."""
        return json.dumps([without_nan(finding._asdict()) for finding in self], indent=2)

    def require(self, *formats: str) -> None:
        """Raises ValueError unless each of these, such as "weights=bf16", learns as float32 does in
        every optimizer."""
        for text in formats:
            findings = [finding for finding in self if finding.text == text]
            if not findings:
                raise ValueError(
                    f"{text} was not watched: name it in the doctor's formats{remedy_for(text)}"
                )
            for found in findings:
                if not found.is_fine:
                    said = f"{found.verdict}: {found.why}"
                    cure = found.cure or "keep it in float32"
                    raise ValueError(f"{text} is not fine in {found.optimizer} ({said}): {cure}")


def without_nan(x):
    """The same for JSON, in which there is neither NaN nor infinity."""
    if isinstance(x, dict):
        return {name: without_nan(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [without_nan(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def remedy_for(text: str) -> str:
    """What else it takes to watch a place."""
    place, _ = split_entry(text)
    if place == "weights":
        return ""
    if place in STATE:
        return ", and use Adam"
    if place == "acting":
        return ", and call the doctor's act"
    if place in OPERANDS:
        return ", and let the doctor look at the loss of an Adam"
    return ", or let the doctor look at it or follow it"


def judge(
    optimizer: str,
    text: str,
    windows: list[WindowSums],
    sizes: list[int],
    names: list[str],
    tolerates: tuple[float, float],
    length: int,
    looked: bool = False,
) -> Finding:
    """The finding, without a cure, of a place and format from its windows [T] each.

    `sizes` and `names` are those of the tensors, `length` is the number of updates in a window, and
    `looked` says that it is one of Looks, whose windows are few.
    """
    place, form = split_entry(text)
    weight = np.asarray(sizes, float)
    if not windows or not np.isfinite([rate_of(sums, weight) for sums in windows]).any():
        why = "the training ended before a window was full, or moved nothing: train longer"
        nan = math.nan
        return Finding(optimizer, place, form, nan, nan, nan, nan, nan, {}, NOT_JUDGED, why)
    rates = [rate_of(sums, weight) for sums in windows]
    quarter = max(1, len(windows) // 4)
    whole = add_up(windows)
    parts = in_parts(windows, PARTS)
    by_tensor = rates_by_tensor(whole)
    found = Finding(
        optimizer,
        place,
        form,
        rate=float(np.nanmean(rates)),
        first=rate_of(add_up(windows[:quarter]), weight),
        last=rate_of(add_up(windows[-quarter:]), weight),
        noise=float(np.nanmedian([noise_of(sums, weight) for sums in windows])),
        lost=float(np.nanmedian([share_lost(sums, weight) for sums in windows])),
        tensors={name: float(rate) for name, rate in zip(names, by_tensor, strict=True)},
        verdict=AS_FLOAT32,
        why="",
        tensor_rates=tuple(tuple(map(float, rates_by_tensor(sums))) for sums in parts),
        tensor_noise=tuple(tuple(map(float, noise_by_tensor(sums, length))) for sums in parts),
    )
    verdict = verdict_of(found, tolerates)
    return found._replace(verdict=verdict, why=explain(found, verdict, tolerates, length, looked))


def verdict_of(found: Finding, tolerates: tuple[float, float]) -> str:
    """The word for a finding, by the factors of the learning rate that training tolerates."""
    low, high = tolerates
    if found.rate < low:
        stands_still = found.last < FROZEN or len(frozen_tensors(found)) == len(found.tensors)
        return "stalls" if stands_still else "slower"
    if found.rate > high or fast_tensors(found, high):
        return "faster"
    if frozen_tensors(found):
        return "frozen tensors"
    if found.last < low:
        return "stalls"
    if found.noise > NOISY:
        return "too noisy"
    return AS_FLOAT32


def frozen_tensors(found: Finding) -> list[str]:
    return [name for name, rate in found.tensors.items() if rate < FROZEN]


def fast_tensors(found: Finding, high: float) -> list[str]:
    return [name for name, rate in found.tensors.items() if rate > high]


def explain(
    found: Finding, verdict: str, tolerates: tuple[float, float], length: int, looked: bool
) -> str:
    """What a finding means, in words."""
    parts = [f"learns as at {times(found.rate)} the learning rate"]
    if abs(math.log(max(found.last, 1e-6) / max(found.first, 1e-6))) > math.log(1.5):
        parts[0] += f" ({found.first:.2f} at first, {found.last:.2f} at the end)"
    total = len(found.tensors)
    if frozen := frozen_tensors(found):
        if len(frozen) == total:
            parts.append("all tensors are frozen")
        else:
            verb = "is" if len(frozen) == 1 else "are"
            parts.append(f"{len(frozen)} of {total} tensors {verb} frozen: {listed(frozen)}")
    if verdict == "faster" and (fast := fast_tensors(found, tolerates[1])):
        fastest = max(found.tensors.values())
        parts.append(
            f"{len(fast)} of {total} tensors learn up to {times(fastest)} as fast: {listed(fast)}"
        )
    if verdict == "too noisy":
        parts.append(f"its noise is {found.noise:.1f} times the step")
    if verdict not in (AS_FLOAT32, "too noisy") and found.lost > 0.01:
        parts.append(mechanism_of(found, length, looked))
    return "; ".join(parts)


def mechanism_of(found: Finding, length: int, looked: bool) -> str:
    """How numbers are lost."""
    if found.place in STATE[1:]:
        kept = "roots of v" if found.place == "root" else found.place
        then = "" if found.place == "m" else ", and Adam then divides by eps alone"
        return f"{found.lost:.0%} of the {kept} are kept as 0{then}"
    if looked:
        return f"{found.lost:.0%} of the gradients become 0"
    return f"{found.lost:.0%} of the numbers stay the same over {length} updates"


def times(rate: float) -> str:
    """A factor in words."""
    if rate >= 100:
        return f"{rate:,.0f} times"
    return f"{rate:.2f} times" if rate >= 0.01 else f"{rate:.1g} times"


def listed(names: list[str]) -> str:
    """Names, of which a long list is cut."""
    more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    return ", ".join([*names[:NAMED], *more])


def amount(x: float) -> str:
    """A positive number, whole from 10 up."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


class ActingLook(NamedTuple):
    """An acting policy's ratios pi / mu, as they were at one time of the training.

    `size`        the effective sample size of a token's ratio, as a share
    `divergence`  KL(pi || mu) of a token, in nats
    `length`      mean number of tokens in a sequence
    """

    size: float
    divergence: float
    length: float

    @classmethod
    def of(cls, log_ratio: np.ndarray, length: float) -> "ActingLook":
        """From log pi / mu of tokens that pi took, float64. Ratios that are not finite are no
        policy, of size 0."""
        if not np.isfinite(log_ratio).all():
            return cls(0.0, math.nan, length)
        return cls(1 / (1 + spread_of(log_ratio)), float(log_ratio.mean()), length)


def spread_of(log_ratio: np.ndarray) -> float:
    """E_mu[(pi / mu - 1)^2], from log pi / mu of tokens that pi took.

    It is E_pi[pi / mu] - 1. Because E_pi[mu / pi] is 1, it is also E_pi[pi / mu + mu / pi - 2],
    whose terms are positive and whose mean is far less noisy. That misses what mu does where pi
    hardly ever acts. Then the first mean is larger by more than chance, and is taken.
    """
    with np.errstate(over="ignore"):
        plain = np.expm1(log_ratio)
        spread = np.square(2 * np.sinh(log_ratio / 2))
    error = plain.std() / len(plain) ** 0.5
    if plain.mean() > spread.mean() + 4 * error:
        return float(plain.mean())
    return float(spread.mean())


def horizon_of(size: float) -> float:
    """The number of tokens whose ratios together have a sample size of KEPT, if one has `size`."""
    if size <= 0:
        return 0.0
    return math.log(KEPT) / math.log(size) if size < 1 else math.inf


def judge_acting(text: str, looks: list[ActingLook]) -> Finding:
    """The finding of an acting policy: are the training's sequences shorter than its horizon?"""
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


def bits_of(found: Finding) -> int:
    """How many bits a number has in a finding's format."""
    form = PlaceFormat.of(found.format).format
    return 1 + form.exponent + form.mantissa


def with_cures(findings: list[Finding]) -> list[Finding]:
    """The findings of one optimizer, with cures among each other."""
    cured = []
    for found in findings:
        if not found.is_fine and found.verdict != NOT_JUDGED:
            found = found._replace(cure=cure_of(found, findings))
        cured.append(found)
    return cured


def cure_of(found: Finding, findings: list[Finding]) -> str:
    """A format that learns as float32 does, with its rate: the same with a scale or stochastic, for
    v its root, or else any of the same place that is no larger."""
    fine = {own.text: own for own in findings if own.is_fine}
    bare = found.format.split(":")[0]
    texts = [
        f"{found.place}={bare}",
        f"{found.place}={found.format}:stochastic",
        f"{found.place}={bare}:stochastic",
    ]
    if found.place == "v":
        texts += [f"root={found.format}", f"root={bare}", f"root={bare}:stochastic"]
    small_enough = [
        own for own in fine.values() if own.place == found.place and bits_of(own) <= bits_of(found)
    ]
    small_enough.sort(key=lambda own: abs(math.log(own.rate)))
    texts += [own.text for own in small_enough]
    for text in texts:
        if text in fine:
            return f"{text} ({fine[text].rate:.2f})"
    return "keep it in float32"
