"""Running averages in few bits, such as target networks.

An average in few bits would be updated as x' <- round((1 - rate) x' + rate new). The doctor reads
float32's average before every step of an optimizer, and follows x' from that.
"""

from collections.abc import Callable

import numpy as np
import torch

from ..places import PlaceFormat
from .format_rows import FormatRows
from .sample import Sample, WindowSums, in_parts
from .watched_optimizer import largest_of

PARTS = 4  # the training is split into so many parts, and measurements are means over each part


class Average:
    """An average as it would be if it had been kept in few bits from the beginning.

    `rate`     rate of the average, a number or a function without arguments
    `formats`  text and format of each entry that is judged
    `length`   updates in a window
    `sample`   sample of the average's tensors

    An average in few bits that hardly moves falls behind, and the difference to the new values then
    pulls it all the more. That is why d is the step that float32 would take from where x' is.
    Measurements are means over a quarter of the windows, because in some windows the average hardly
    has to move.
    """

    def __init__(
        self,
        rate: float | Callable[[], float],
        formats: list[tuple[str, PlaceFormat]],
        length: int,
        sample: Sample,
    ):
        self.rate = rate
        self.length = length
        self.sample = sample
        formats = sorted(formats, key=lambda entry: entry[1].stochastic)
        self.names = [text for text, _ in formats]
        self.rows = FormatRows([form for _, form in formats], 0)
        self.x: np.ndarray | None = None  # float32's average, when it was read last
        self.all_windows: list[WindowSums] = []

    @torch.no_grad()
    def look(self, *_) -> None:
        """Reads the average as it is now. It is a hook of an optimizer."""
        before, self.x = self.x, self.sample.take()
        if before is None:
            self.begin_window(np.repeat(self.x[None], len(self.names), 0))
            self.kept = self.rows.round(self.kept, self.largest)
            self.start = self.kept
            return
        if np.array_equal(self.x, before):
            return
        rate = self.rate() if callable(self.rate) else self.rate
        pull = self.x - (1 - rate) * before - rate * self.kept
        self.true += pull
        self.kept = self.rows.round(self.kept + pull, self.largest)
        self.count += 1
        if self.count == self.length:
            moved = self.kept - self.start
            lost = (moved == 0) & (self.true != 0)
            self.all_windows.append(WindowSums.of(moved, self.true, lost))
            self.begin_window(self.kept)

    def begin_window(self, kept: np.ndarray) -> None:
        """Begins a window, with the averages `kept` as they are now."""
        self.kept = kept
        self.start = kept
        self.true = np.zeros_like(kept)
        self.count = 0
        self.largest = largest_of(self.sample.tensors).cpu().numpy()

    @property
    def windows(self) -> list[WindowSums]:
        """The measurements of each part of the training."""
        return in_parts(self.all_windows, PARTS)
