"""Running averages in few bits, such as target networks.

An average in few bits would be updated as x' <- round((1 - rate) x' + rate new). The doctor reads
float32's average before every step of an optimizer, and follows x' from that.
"""

import weakref
from collections.abc import Callable

import numpy as np
import torch

from ..bits.places import PlaceFormat
from .findings import Finding, with_cures
from .format_rows import FormatRows
from .sample import NumberSums, Sample, WindowSums, add_up, in_parts
from .verdicts import judge
from .watched_optimizer import largest_of

AVERAGES = ("bf16", "bf16:stochastic", "fp16:unscaled", "e4m3", "e4m3:stochastic")
PARTS = 4  # the training is split into so many parts, and measurements are means over each part


class Average:
    """An average as it would be if it had been kept in few bits from the beginning.

    `rate`     rate of the average, a number or a function without arguments
    `tensors`  the average's tensors, which are held by weak references
    `tensor_names`  their names in reports
    `formats`  text and format of each entry that is judged
    `length`   updates in a window
    `size`     how many numbers are followed

    An average in few bits that hardly moves falls behind, and the difference to the new values then
    pulls it all the more. That is why d is the step that float32 would take from where x' is.
    Measurements are means over a quarter of the windows, because in some windows the average hardly
    has to move.

    Once an average has arrived, only its own noise pulls it, so that within a window d answers to
    the noise and the rate of a window is below 1 for no other reason. `all_steps` has the sums of
    each window step by step, for the stochastic rows. The noise of a step is not in the d of the
    same step, so these rates are free of that.
    """

    def __init__(
        self,
        rate: float | Callable[[], float],
        tensors: list[torch.Tensor],
        tensor_names: list[str],
        formats: list[tuple[str, PlaceFormat]],
        length: int,
        size: int,
    ):
        self.rate = rate
        self.length = length
        self.references = [weakref.ref(x) for x in tensors]
        self.tensor_names = tensor_names
        self.sample = Sample(tensors, size, 0)
        formats = sorted(formats, key=lambda entry: entry[1].stochastic)
        self.names = [text for text, _ in formats]
        self.rows = FormatRows([form for _, form in formats], 0)
        self.first_stochastic = self.rows.nearest  # the rows from here on are stochastic
        self.stochastic_rows = FormatRows([form for _, form in formats if form.stochastic], 0)
        self.x: np.ndarray | None = None  # float32's average, when it was read last
        self.all_windows: list[WindowSums] = []
        self.numbers = NumberSums()  # of the windows

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The average's tensors; none once the script has dropped one of them."""
        tensors = [reference() for reference in self.references]
        return [] if any(x is None for x in tensors) else tensors

    @torch.no_grad()
    def look(self, *_) -> None:
        """Reads the average as it is now. It is a hook of an optimizer."""
        if tensors := self.tensors:
            rate = self.rate() if callable(self.rate) else self.rate
            self.follow(self.sample.take(tensors), rate)

    def follow(self, x: np.ndarray, rate: float) -> None:
        """Follows the average to its sample `x`, [T, P], which it has reached with `rate`."""
        before, self.x = self.x, x
        if before is None:
            self.begin_window(np.repeat(x[None], len(self.names), 0))
            self.kept = self.rows.round(self.kept, self.largest)
            self.start = self.kept
            return
        if np.array_equal(x, before):
            return
        pull = x - (1 - rate) * before - rate * self.kept
        kept = self.rows.round(self.kept + pull, self.largest)
        self.true += pull
        old, new, pull = (x[self.first_stochastic :] for x in (self.kept, kept, pull))
        emphasis = self.sample.emphasis
        step = WindowSums.of(new - old, pull, new == old, emphasis)
        # The noise that stochastic rounding has on average, although few numbers may show it
        spacing = self.stochastic_rows.steps(old + pull, self.largest)
        expected = (spacing * np.abs(pull) * emphasis).mean(2, dtype=np.float64)
        self.steps.append(step._replace(apart=np.maximum(step.apart, expected)))
        self.kept = kept
        if len(self.steps) == self.length:
            moved = self.kept - self.start
            lost = (moved == 0) & (self.true != 0)
            sums = WindowSums.of(moved, self.true, lost, emphasis)
            # Steps in place of windows for the stochastic rows
            for part, of_steps in zip(sums[:3], add_up(self.steps), strict=False):
                part[self.first_stochastic :] = of_steps
            self.all_windows.append(sums)
            self.numbers.add(moved, self.true)
            self.begin_window(self.kept)

    def begin_window(self, kept: np.ndarray) -> None:
        """Begins a window, with the averages `kept` as they are now."""
        self.kept = kept
        self.start = kept
        self.true = np.zeros_like(kept)
        self.steps: list[WindowSums] = []
        if tensors := self.tensors:
            self.largest = largest_of(tensors).cpu().numpy()

    @property
    def windows(self) -> list[WindowSums]:
        """The measurements of each part of the training."""
        return in_parts(self.all_windows, PARTS)

    def findings(self, optimizer: str, tolerates: tuple[float, float]) -> list[Finding]:
        """The findings so far. `optimizer` is what they are listed under in reports."""
        windows = self.windows
        findings = []
        for i, text in enumerate(self.names):
            trials = [sums.of_row(i) for sums in self.all_windows]
            finding = judge(
                optimizer,
                text,
                [sums.of_row(i) for sums in windows],
                self.sample,
                self.tensor_names,
                tolerates,
                self.length,
                trials=trials,
                numbers=self.numbers.of_row(i),
                steps_per_trial=self.length,
            )
            findings.append(finding)
        return with_cures(findings)
