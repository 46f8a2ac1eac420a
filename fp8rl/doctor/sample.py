"""A sample of the numbers of some tensors, and measurements on it over a window of updates."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors as flattened  # one call for all of them

JOINED_UP_TO = 2**18  # up to so many numbers, all tensors are joined to one, which is read at once


class Sample:
    """The numbers of T tensors that are followed, [T, P]: P numbers of each tensor.

    `tensors`  the tensors that are sampled, on one device. They are not kept: who reads a sample
               gives them again.
    `size`     how many numbers are followed in all. A tensor with fewer than P numbers is
               represented by the same numbers several times.
    `seed`     seed of the choice
    """

    def __init__(self, tensors: Iterable[torch.Tensor], size: int, seed: int):
        tensors = list(tensors)
        device = tensors[0].device
        self.sizes = [x.numel() for x in tensors]
        generator = torch.Generator(device="cpu").manual_seed(seed)
        self.numbers_per_tensor = max(1, size // len(tensors))
        # On the CPU, whatever device the script has set as default
        picks = torch.arange(self.numbers_per_tensor, device="cpu")
        self.index = []
        for count in self.sizes:
            order = torch.randperm(count, generator=generator, device="cpu")
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
    def read(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The sampled numbers of the tensors as they are now, [T, P], on their device.

        `tensors` may be other tensors of the same shapes, or two such lists one after the other,
        which give [2 T, P].
        """
        times = len(tensors) // len(self.index)
        if self.joined:
            index = self.index_joined[times]
            return flattened(tensors).index_select(0, index).view(len(tensors), -1)
        pairs = zip(tensors, self.index * times, strict=True)
        return torch.stack([x.reshape(-1)[index] for x, index in pairs])

    @torch.no_grad()
    def read_one(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """The sampled numbers [P] of one of the T tensors, by its number."""
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        return tensor.reshape(-1).index_select(0, self.index[number])

    def take(self, tensors: list[torch.Tensor]) -> np.ndarray:
        """The same numbers as `read` returns, as a NumPy array, float32. Waits for a GPU."""
        return self.read(tensors).float().cpu().numpy()


def tensor_names(tensors: list[torch.Tensor], modules: Iterable[nn.Module]) -> list[str]:
    """A name for each tensor: that of a module's parameter, or its number and shape."""
    known = {}
    for module in modules:
        for name, p in module.named_parameters():
            known.setdefault(id(p), name)
    names = []
    for i, x in enumerate(tensors):
        name = known.get(id(x), f"tensor {i} {list(x.shape)}")
        names.append(name if name not in names else f"{name} ({i})")
    return names


class WindowSums(NamedTuple):
    """Measurements of C formats over a window of updates, float64 [C, T], by tensor.

    d is how far a number moves in float32, and d' is how far it moves with the place in few bits.
    Means are over the sampled numbers of a tensor:

    `true`   mean of d d
    `along`  mean of d' d
    `apart`  mean of (d' - d)^2
    `lost`   share of the numbers that stay the same, or become 0
    """

    true: np.ndarray
    along: np.ndarray
    apart: np.ndarray
    lost: np.ndarray

    @classmethod
    def of(cls, moved: np.ndarray, true: np.ndarray, lost: np.ndarray) -> "WindowSums":
        """The measurements from d' (`moved`, [C, T, P]), d (`true`, which broadcasts to this
        shape), and whether a number is lost (bool [C, T, P])."""
        true = np.broadcast_to(true, moved.shape)
        parts = true * true, moved * true, (moved - true) ** 2, lost
        return cls(*(part.mean(2, dtype=np.float64) for part in parts))

    def of_row(self, row: int) -> "WindowSums":
        """The measurements of one format, [T]."""
        return WindowSums(*(part[row] for part in self))


def add_up(windows: list[WindowSums]) -> WindowSums:
    """The means of the measurements over several windows."""
    return WindowSums(*(np.mean(part, axis=0) for part in zip(*windows, strict=True)))


def in_parts(windows: list[WindowSums], parts: int) -> list[WindowSums]:
    """The means over each of `parts` consecutive parts of the windows, or over each window if there
    are fewer."""
    count = min(parts, len(windows))
    if not count:
        return []
    numbers = np.array_split(np.arange(len(windows)), count)
    return [add_up([windows[i] for i in part]) for part in numbers]


def rate_of(sums: WindowSums, weight: np.ndarray) -> float:
    """The rate: the factor by which few bits multiply the learning rate, <d', d> / <d, d>.

    `weight` [T] is how much the mean over each tensor counts. The rate is NaN if nothing moves.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return float((weight * sums.along).sum() / (weight * sums.true).sum())


def rates_by_tensor(sums: WindowSums) -> np.ndarray:
    """The rate of each tensor by itself, [T]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.along / sums.true


def errors_by_tensor(sums: WindowSums, counts: np.ndarray) -> np.ndarray:
    """How far the rate of each tensor may be from 1 by noise alone: its standard error, [T].

    `sums` are means over `counts` [T] numbers. The error is NaN for a tensor that does not move.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(sums.apart / sums.true / counts)


def error_of(sums: WindowSums, counts: np.ndarray, weight: np.ndarray) -> float:
    """How far `rate_of` may be from 1 by noise alone, from the errors of the tensors."""
    shares = weight * sums.true
    moves = shares > 0
    errors = errors_by_tensor(sums, counts)
    return float(np.linalg.norm(shares[moves] * errors[moves]) / shares.sum())


def noise_by_tensor(sums: WindowSums, length: int) -> np.ndarray:
    """The standard deviation of the noise that one update adds to a number of each tensor, [T].

    The noise is the part of d' that the rate does not explain. Its variance over a window is
    divided by the number of updates in it.
    """
    rate = np.nan_to_num(rates_by_tensor(sums), nan=1.0)
    variance = sums.apart - (rate - 1) ** 2 * sums.true
    return np.sqrt(np.maximum(variance, 0) / length)


def noise_of(sums: WindowSums, weight: np.ndarray) -> float:
    """The noise: how far few bits lead away from float32, relative to its step, |d' - d| / |d|."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.sqrt((weight * sums.apart).sum() / (weight * sums.true).sum()))


def share_lost(sums: WindowSums, weight: np.ndarray) -> float:
    """The share of numbers that are lost, over all tensors."""
    return float((weight * sums.lost).sum() / weight.sum())
