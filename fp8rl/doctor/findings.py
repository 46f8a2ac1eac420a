"""What a doctor says: for each shadow one word, one sentence, and a cure.

A shadow takes the steps of a training otherwise. The ruler measures the rate at which it then
learns (ruler.py), and here the word follows from the rate: does this training learn as well at
`rate` times its learning rate?
"""

import math
from typing import NamedTuple

from ..bits.catalogue import PLACES as REAL_PLACES
from ..bits.notation import split_entry
from ..bits.places import PlaceFormat
from .ruler import ERRORS, Reading, Ruler, is_above, is_below, is_stochastic

AS_FLOAT32 = "as float32"
NOT_JUDGED = "not judged"
# From the mildest to the worst
WORDS = (AS_FLOAT32, "frozen tensors", "faster", "leaps", "slower", "stalls", "diverges")
SAME = "it is the same as the script's own"  # a real optimizer, which then saves nothing


class Finding(NamedTuple):
    """The result for one shadow of one optimizer.

    `optimizer`  name of the optimizer, or of a running average
    `place`      weights, m, v, root, grad, forward, backward; model or optimizer for a real one; or
                 the name of an average
    `format`     the format with the words after it, or which real optimizer
    `verdict`    as float32, slower, faster, stalls, frozen tensors, leaps, diverges, not judged
    `why`        the reason in words
    `cure`       another format of the same place (or of the root, for v) that was watched and
                 learns as float32 does
    `rate`       the factor by which few bits multiply the learning rate, over the whole training
                 and with every number counted alike; NaN if nothing was measured
    `error`      the standard error of `rate`: how far it may be off because only a sample of the
                 numbers is followed, and because stochastic rounding is noisy. NaN if not known.
    `first`      the rate in the first quarter of the training
    `last`       the rate in the last quarter
    `noise`      how far few bits lead away from float32's step, relative to this step
    `lost`       share of the numbers that stay the same over a window, or become 0, in the median
                 window
    `longest_step`         of a real optimizer: the farthest that a number moved in one update, in
                           learning rates
    `bytes_per_parameter`  of a real optimizer: what is kept of a parameter between updates
    `tensors`    the rate of each tensor by name
    """

    optimizer: str
    place: str
    format: str
    verdict: str
    why: str
    cure: str = ""
    rate: float = math.nan
    error: float = math.nan
    first: float = math.nan
    last: float = math.nan
    noise: float = math.nan
    lost: float = math.nan
    longest_step: float = math.nan
    bytes_per_parameter: float = math.nan
    tensors: dict[str, float] = {}  # a default that nobody changes

    @property
    def text(self) -> str:
        """Place and format, as in "weights=bf16"."""
        return f"{self.place}={self.format}"

    @property
    def is_fine(self) -> bool:
        return self.verdict == AS_FLOAT32

    @property
    def bits(self) -> float:
        """How many bits a number has in the format, or is kept of a parameter by a real
        optimizer."""
        if self.place in REAL_PLACES:
            return 8 * self.bytes_per_parameter
        form = PlaceFormat.of(self.format).format
        return 1 + form.exponent + form.mantissa

    def worsened(self, word: str, reason: str) -> "Finding":
        """The finding with a further reason, which leads if its word is the worse one."""
        if self.verdict == NOT_JUDGED:
            return self
        verdict = max(self.verdict, word, key=WORDS.index)
        parts = (self.why, reason) if verdict == self.verdict != word else (reason, self.why)
        return self._replace(verdict=verdict, why="; ".join(parts))

    def __str__(self) -> str:
        """The finding in one line."""
        line = f"{self.text}: {self.verdict}: {self.why}"
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

    def require(self, *formats: str) -> None:
        """Raises ValueError unless each of these places and formats learns as float32 does, in
        every optimizer. An example is "weights=bf16"."""
        for text in formats:
            findings = [finding for finding in self if finding.text == text]
            if not findings:
                raise ValueError(
                    f"{text} was not watched: name it in the doctor's formats (moments need Adam, "
                    "grad Adam or SGD, forward and backward `look`, an average `follow`)"
                )
            for finding in findings:
                if not finding.is_fine:
                    raise ValueError(
                        f"{text} is not fine in {finding.optimizer} "
                        f"({finding.verdict}: {finding.why}): "
                        f"{finding.cure or 'keep it in float32'}"
                    )


def judge(
    optimizer: str,
    text: str,
    reading: Reading | None,
    tolerates: tuple[float, float],
    loses: str = "{share} of the numbers stay the same",
) -> Finding:
    """The finding for a shadow, without a cure.

    `reading`    what the ruler has measured
    `tolerates`  lowest and highest factor of the learning rate that the training tolerates
    `loses`      in words, how a share of the numbers is lost

    The word follows from the rates as they were measured: if a rate is below a limit but could be
    above it, "as float32" would be no better founded than "slower". Stochastic rounding is right in
    the mean, so its rates must be beyond a limit by more than their errors. Single tensors are
    many, and some are off by chance. So they must be, too.
    """
    if reading is None:
        why = "the training ended before a window was full, or moved nothing: train longer"
        return Finding(optimizer, *split_entry(text), NOT_JUDGED, why)
    exact = reading.shifted(0)
    is_noisy = is_stochastic(text)
    verdict = word_for(reading if is_noisy else exact, tolerates)
    why = explain(reading, verdict, tolerates, loses)
    # What rates within two standard errors would be called
    others = [exact] if is_noisy else [reading.shifted(ERRORS), reading.shifted(-ERRORS)]
    words = [word_for(other, tolerates) for other in others]
    if doubts := [f'"{word}"' for word in dict.fromkeys(words) if word != verdict]:
        why += f"; perhaps {' or '.join(doubts)}, which a larger sample would tell"
    return Finding(
        optimizer,
        *split_entry(text),
        verdict,
        why,
        rate=reading.rate,
        error=reading.error,
        first=reading.first,
        last=reading.last,
        noise=reading.noise,
        lost=reading.lost,
        tensors={name: rate for name, (rate, _) in reading.tensors.items()},
    )


def judge_all(
    optimizer: str, ruler: Ruler, tolerates: tuple[float, float], length: int
) -> list[Finding]:
    """The findings for all shadows of a ruler, without cures. `length` is how many updates a window
    has."""
    stay = f"{{share}} of the numbers stay the same over {length} updates"
    lost = {
        **dict.fromkeys(("grad", "forward", "backward"), "{share} of the gradients become 0"),
        "m": "{share} of the m are kept as 0",
        "v": "{share} of the v are kept as 0, and Adam then divides by eps alone",
        "root": "{share} of the roots of v are kept as 0, and Adam then divides by eps alone",
    }
    return [
        judge(optimizer, text, ruler.reading(row), tolerates, lost.get(split_entry(text)[0], stay))
        for row, text in enumerate(ruler.texts)
    ]


def word_for(reading: Reading, tolerates: tuple[float, float]) -> str:
    """The word, by the factors of the learning rate that the training tolerates.

    A rate is beyond a limit only if it is so by more than two standard errors.
    """
    low, high = tolerates
    all_frozen = len(reading.frozen) == len(reading.tensors)
    # A training that ends with a rate below 0.1 has nearly stopped
    has_stopped = is_below(reading.last, reading.last_error, 0.1)
    slow = "stalls" if has_stopped or all_frozen else "slower"
    if is_below(reading.rate, reading.error, low):
        return slow
    if is_above(reading.rate, reading.error, high) or reading.fast(high):
        return "faster"
    if reading.frozen:
        return "frozen tensors"
    if is_below(reading.last, reading.last_error, low):
        return slow
    return AS_FLOAT32


def explain(reading: Reading, verdict: str, tolerates: tuple[float, float], loses: str) -> str:
    """The meaning of a reading, in words."""
    text = f"learns as at {times(reading.rate, reading.error)} the learning rate"
    change = math.log(max(reading.last, 1e-6) / max(reading.first, 1e-6))
    if abs(change) > math.log(1.5):
        text += f" ({reading.first:.2f} at first, {reading.last:.2f} at the end)"
    parts = [text]
    total = len(reading.tensors)
    if frozen := reading.frozen:
        verb = "is" if len(frozen) == 1 else "are"
        some = f"{len(frozen)} of {total} tensors {verb} frozen: {listed(frozen)}"
        parts.append("all tensors are frozen" if len(frozen) == total else some)
    if verdict == "faster" and (fast := reading.fast(tolerates[1])):
        fastest = max(reading.tensors[name][0] for name in fast)
        parts.append(
            f"{len(fast)} of {total} tensors learn up to {times(fastest)} as fast: {listed(fast)}"
        )
    if reading.noise > 2.5:
        parts.append(f"its noise is {reading.noise:.1f} times the step")
    if verdict != AS_FLOAT32 and reading.lost > 0.01:
        parts.append(loses.format(share=f"{reading.lost:.0%}"))
    return "; ".join(parts)


def times(rate: float, error: float = 0.0) -> str:
    """A factor in words, with its standard error if that is larger than 0.01."""
    if rate >= 100:
        text = f"{rate:,.0f}"
    else:
        text = f"{rate:.2f}" if rate >= 0.01 else f"{rate:.1g}"
    if error > 0.01:
        text += f" ± {error:.0f}" if error >= 10 else f" ± {error:.2f}"
    return f"{text} times"


def listed(names: list[str]) -> str:
    """Names in a line. Of a long list, only the first four."""
    more = [f"and {len(names) - 4} more"] if len(names) > 4 else []
    return ", ".join([*names[:4], *more])


def with_cures(findings: list[Finding]) -> list[Finding]:
    """The findings of one optimizer, with the cures that are among them."""
    fine = {
        finding.text: finding
        for finding in findings
        if finding.is_fine and not finding.why.startswith(SAME)
    }
    return [
        finding
        if finding.is_fine or finding.verdict == NOT_JUDGED
        else finding._replace(cure=cure_of(finding, fine))
        for finding in findings
    ]


def cure_of(finding: Finding, fine: dict[str, Finding]) -> str:
    """A format that learns as float32 does, with its rate. `fine` are those that do, by text.

    The same format with a scale or with stochastic rounding is tried first, for v also its root,
    and then any format of the same place that has no more bits.
    """
    place = finding.place
    bare = finding.format.split(":")[0]
    texts = [
        f"{place}={bare}",
        f"{place}={finding.format}:stochastic",
        f"{place}={bare}:stochastic",
    ]
    if place == "v":
        texts += [f"root={finding.format}", f"root={bare}", f"root={bare}:stochastic"]
    alike = REAL_PLACES if place in REAL_PLACES else (place,)
    small_enough = [
        candidate
        for candidate in fine.values()
        if candidate.place in alike and candidate.bits <= finding.bits
    ]
    small_enough.sort(key=lambda candidate: abs(math.log(candidate.rate)))
    for text in [*texts, *(candidate.text for candidate in small_enough)]:
        if text in fine:
            return f"{text} ({fine[text].rate:.2f})"
    return "keep it in float32"
