"""Averages that follow others, such as target networks and running means, in few bits.

x' <- round((1 - rate) x' + rate new), seen before every step of an optimizer.
"""

from collections.abc import Callable

import numpy as np
import torch

from ..places import PlaceFormat
from .format_rows import FormatRows
from .sample import Sample, WindowSums, in_parts
from .watched_optimizer import largest_of

PARTS = 4  # of the training, over each of which sums are taken


class Average:
    """An average as it would be in few bits from the beginning.

    `rate`     at which it follows, a number or a function of nothing
    `formats`  text and format of each that is judged
    `length`   updates in a window
    `sample`   of its tensors

    It forgets, so one that hardly moves falls behind and is pulled the harder. That is why d is
    what float32 would do from where x' is. Sums are taken over a quarter of the windows, because in
    some it hardly has to move.
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
        self.x: np.ndarray | None = None  # float32's, when it was seen last
        self.all_windows: list[WindowSums] = []

    @torch.no_grad()
    def look(self, *_) -> None:
        """Sees the average as it is now: an optimizer's hook."""
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
        """Begins a window where the averages are."""
        self.kept = kept
        self.start = kept
        self.true = np.zeros_like(kept)
        self.count = 0
        self.largest = largest_of(self.sample.tensors).cpu().numpy()

    @property
    def windows(self) -> list[WindowSums]:
        """Sums of each part of the training."""
        return in_parts(self.all_windows, PARTS)
