"""A sample of the numbers of some tensors, and what is measured on it over a window of updates."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors as flattened  # one call for all of them

JOINED_UP_TO = 2**18  # numbers that are joined to one tensor, which is then read at once


class Sample:
    """The numbers of T tensors that are followed, [T, P]: P numbers of each.

    `tensors`  that are sampled, on one device
    `size`     numbers in all; a tensor of fewer numbers than its part has its own several times
    """

    def __init__(self, tensors: Iterable[torch.Tensor], size: int, seed: int):
        self.tensors = list(tensors)
        device = self.tensors[0].device
        self.sizes = [x.numel() for x in self.tensors]
        generator = torch.Generator().manual_seed(seed)
        self.each = max(1, size // len(self.tensors))
        picks = torch.arange(self.each)
        self.index = []
        for count in self.sizes:
            order = torch.randperm(count, generator=generator)
            self.index.append(order[picks % count].to(device))
        self.joined = sum(self.sizes) <= JOINED_UP_TO
        # Where each tensor begins when the list is joined once, and twice
        begins = torch.tensor([0, *self.sizes, *self.sizes[:-1]], device=device).cumsum(0)
        begins = begins.unsqueeze(1)
        self.index_joined = {
            times: (torch.stack(self.index * times) + begins[: times * len(self.sizes)]).flatten()
            for times in (1, 2)
        }

    @torch.no_grad()
    def read(self, tensors: list[torch.Tensor] | None = None) -> torch.Tensor:
        """The sampled numbers as they are now, [T, P], on the tensors' device.

        `tensors` are others of the same shapes, or two such lists one after the other, [2 T, P].
        """
        tensors = tensors or self.tensors
        times = len(tensors) // len(self.index)
        if self.joined:
            index = self.index_joined[times]
            return flattened(tensors).index_select(0, index).view(len(tensors), -1)
        pairs = zip(tensors, self.index * times, strict=True)
        return torch.stack([x.reshape(-1)[index] for x, index in pairs])

    def take(self, tensors: list[torch.Tensor] | None = None) -> np.ndarray:
        """The same in NumPy, float32. Waits for a GPU."""
        return self.read(tensors).float().cpu().numpy()


class WindowSums(NamedTuple):
    """What is measured of C formats over a window of updates, float64 [C, T], by tensor.

    d is how far a number moves in float32, and d' how far with the place in few bits. The means are
    over the sampled numbers of a tensor:

    `true`   of d d
    `along`  of d' d
    `apart`  of (d' - d)^2
    `lost`   share of the numbers that stay the same, or become 0
    """

    true: np.ndarray
    along: np.ndarray
    apart: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(cls, moved: np.ndarray, true: np.ndarray, lost: np.ndarray) -> "WindowSums":
        """From d' [C, T, P], d that can be broadcast to it, and what is lost, bool [C, T, P]."""
        true = np.broadcast_to(true, moved.shape)
        parts = true * true, moved * true, (moved - true) ** 2, lost
        return cls(*(part.mean(2, dtype=np.float64) for part in parts))

    def of_row(self, row: int) -> "WindowSums":
        """Those of one format, [T]."""
        return WindowSums(*(part[row] for part in self))


def add_up(windows: list[WindowSums]) -> WindowSums:
    """The means over several windows."""
    return WindowSums(*(np.mean(part, axis=0) for part in zip(*windows, strict=True)))


def in_parts(windows: list[WindowSums], parts: int) -> list[WindowSums]:
    """The means over each of so many parts of the windows, or over each window if there are
    fewer."""
    count = min(parts, len(windows))
    if not count:
        return []
    numbers = np.array_split(np.arange(len(windows)), count)
    return [add_up([windows[i] for i in part]) for part in numbers]


def rate_of(sums: WindowSums, weight: np.ndarray) -> float:
    """The factor by which few bits multiply the learning rate, <d', d> / <d, d>.

    `weight` [T] is how much a number of each tensor counts. NaN where nothing moves.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return float((weight * sums.along).sum() / (weight * sums.true).sum())


def rates_by_tensor(sums: WindowSums) -> np.ndarray:
    """The same for each tensor by itself, [T]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.along / sums.true


def noise_by_tensor(sums: WindowSums, length: int) -> np.ndarray:
    """The standard deviation of the noise that one update adds to a number of each tensor, [T].

    It is what is beside the way that the rate explains, spread over the updates of a window.
    """
    rate = np.nan_to_num(rates_by_tensor(sums), nan=1.0)
    beside = sums.apart - (rate - 1) ** 2 * sums.true
    return np.sqrt(np.maximum(beside, 0) / length)


def noise_of(sums: WindowSums, weight: np.ndarray) -> float:
    """How far few bits lead beside float32's way, |d' - d| / |d|."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.sqrt((weight * sums.apart).sum() / (weight * sums.true).sum()))


def share_lost(sums: WindowSums, weight: np.ndarray) -> float:
    """The share of numbers that are lost."""
    return float((weight * sums.lost).sum() / weight.sum())
