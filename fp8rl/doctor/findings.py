"""The doctor's findings: for each format, the rate at which training learns, and a verdict.

verdicts.py says how a verdict follows from measurements.
"""

import json
import math
from typing import NamedTuple

from ..bits.notation import OPERANDS, STATE, SUMS, split_entry
from ..bits.places import PlaceFormat
from .real_optimizers import PLACES as REAL_PLACES

AS_FLOAT32 = "as float32"
NOT_JUDGED = "not judged"
SAME = "it is the same as the script's own"  # a real optimizer, which then saves nothing
# A real optimizer drifts if it moves a larger share of the numbers although float32 does not.
DRIFTING = 0.01


class Finding(NamedTuple):
    """The result for one place and format in one optimizer.

    `optimizer`  name of the optimizer; "average" for a running average
    `place`      weights, m, v, root, grad, forward, backward, one of the `others` of a
                 look, or the name of an average
    `format`     the format with the words after it
    `rate`       the factor by which few bits multiply the learning rate, over the whole training
                 and with every number counted alike; NaN if nothing was measured
    `first`      the rate in the first quarter of the training
    `last`       the rate in the last quarter
    `noise`      how far few bits lead away from float32's step, relative to this step, in the
                 median window
    `lost`       share of the numbers that stay the same over a window, or become 0, in the median
                 window
    `tensors`    the rate of each tensor by name
    `verdict`    as float32, slower, faster, stalls, frozen tensors, too noisy, drifts, leaps,
                 diverges, not judged
    `why`        the reason in words
    `cure`       another format of the same place (or of the root, for v) that was watched and
                 learns as float32 does
    `tensor_rates`, `tensor_noise`
                 the rate of each tensor, and the standard deviation of the noise that an update
                 adds to a number, in each of up to 24 parts of the training, [parts, T]
    `free_rate`  the rate of weights that go on from where few bits leave them. `rate` is measured
                 in windows that begin at float32's weights each time, which hides a stall if the
                 weights move to where the format's numbers are closer together. Where the two
                 disagree, the verdict is the worse one. NaN for other places, and for stochastic
                 rounding, which does not stall.
    `free_tensor_rates`
                 the same for each tensor, in each of the parts of `tensor_rates`, [parts, T]
    `longest_step`, `longest_step_float32`, `drifted`, `decay_rate`, `bytes_per_parameter`,
    `left_in_float32`, `tensor_longest_steps`, `tensor_bytes`
                 of a real optimizer: the farthest that a number moved in one update, in learning
                 rates, and the same of the script's own optimizer; the share of the numbers that
                 move over a window although float32's do not, in the mean window; which share of
                 the weight decay arrives; the bytes that are kept of a parameter between updates;
                 the names of the tensors that are kept wholly in float32; longest step and bytes
                 by tensor
    `contributions`, `share_left`
                 of a sum of gradients: how many gradients a step adds up, and which share of
                 float32's sum is left in few bits. NaN for other places.
    `error`      the standard error of `rate`: how far it may be off because only a sample of the
                 numbers is followed, and because stochastic rounding is noisy. NaN if not known.
    `tensor_errors`
                 the standard error of each rate in `tensors`, by name. A tensor that is followed
                 whole has 0, unless it is rounded stochastically.
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
    free_tensor_rates: tuple[tuple[float, ...], ...] = ()
    longest_step: float = math.nan
    longest_step_float32: float = math.nan
    drifted: float = math.nan
    decay_rate: float = math.nan
    bytes_per_parameter: float = math.nan
    left_in_float32: tuple[str, ...] = ()
    tensor_longest_steps: dict[str, float] = {}
    tensor_bytes: dict[str, float] = {}
    contributions: float = math.nan
    share_left: float = math.nan
    error: float = math.nan
    tensor_errors: dict[str, float] = {}  # a default that nobody changes

    @classmethod
    def without_rates(cls, optimizer: str, text: str, verdict: str, why: str):
        """The finding for a place and format of which no rate is known."""
        place, form = split_entry(text)
        nan = math.nan
        return cls(optimizer, place, form, nan, nan, nan, nan, nan, {}, verdict, why)

    @property
    def text(self) -> str:
        """Place and format, as in "weights=bf16"."""
        return f"{self.place}={self.format}"

    @property
    def is_fine(self) -> bool:
        return self.verdict == AS_FLOAT32

    def of_real_optimizer(self) -> str:
        """What was measured of a real optimizer besides its rate; empty for other places."""
        if math.isnan(self.longest_step):
            return ""
        parts = [
            f"longest step {self.longest_step:,.3g} learning rates "
            f"(float32 {self.longest_step_float32:,.3g})"
        ]
        if self.drifted > DRIFTING:
            parts.append(f"{self.drifted:.0%} of the numbers move although float32's stand still")
        is_off = math.isfinite(self.decay_rate) and abs(self.decay_rate - 1) > 0.1
        if is_off and "weight decay" not in self.why:
            parts.append(f"{self.decay_rate:.2f} of the weight decay arrives")
        parts.append(f"{self.bytes_per_parameter:.3g} bytes a parameter")
        if self.left_in_float32:
            left = len(self.left_in_float32)
            parts.append(f"{left} of {len(self.tensors)} tensors stay in float32")
        return ", ".join(parts)

    def __str__(self) -> str:
        """The finding in one line."""
        if self.verdict == NOT_JUDGED:
            return f"{self.text}: not judged: {self.why}"
        line = f"{self.text}: {self.verdict}"
        if self.why:
            line += f": {self.why}"
        if details := self.of_real_optimizer():
            line += f"; {details}"
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
    if place in SUMS:
        return ", and use Adam or SGD"
    if place in OPERANDS:
        return ", and call the doctor's look with the loss of an Adam"
    return ", or call the doctor's look or follow for it"


def bits_in(finding: Finding) -> float:
    """How many bits a number has in a finding's format, or is kept of a parameter by a real
    optimizer."""
    if finding.place in REAL_PLACES:
        return 8 * finding.bytes_per_parameter
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
    fine = {
        candidate.text: candidate
        for candidate in findings
        if candidate.is_fine and not candidate.why.startswith(SAME)
    }
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
        if candidate.place in alike and bits_in(candidate) <= bits_in(finding)
    ]
    small_enough.sort(key=lambda candidate: abs(math.log(candidate.rate)))
    texts += [candidate.text for candidate in small_enough]
    for text in texts:
        if text in fine:
            return f"{text} ({fine[text].rate:.2f})"
    return "keep it in float32"
