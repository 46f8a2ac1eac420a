"""A sample of the numbers of some tensors, and measurements on it over a window of updates."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors as flattened  # one call for all of them

JOINED_UP_TO = 2**18  # up to so many numbers, all tensors are joined to one, which is read at once
# How many numbers of a tensor are followed at least. If none of 64 moves, then with a confidence of
# 95% fewer than one in 20 of the tensor's numbers move (0.95^64 = 0.04), and it is called frozen.
LEAST_PER_TENSOR = 64


class Sample:
    """The numbers of T tensors that are followed, [T, P]: P numbers of each tensor.

    P is at least LEAST_PER_TENSOR. The numbers of a tensor are a random sample without replacement.
    A tensor with fewer than P numbers is followed whole, and some of its numbers fill the row more
    than once.

    `tensors`  the tensors that are sampled, on one device. They are not kept: who reads a sample
               gives them again.
    `size`     how many numbers are followed in all, at least, as far as the tensors have them
    `seed`     seed of the choice

    `sizes`     how many numbers each tensor has, [T]
    `followed`  how many different numbers of each tensor are followed, [T]
    `emphasis`  float32 [T, P]: the factor by which the mean over a row must multiply each entry, so
                that each different number counts alike. It is 1 where no number is repeated.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], size: int, seed: int):
        tensors = list(tensors)
        device = tensors[0].device
        self.sizes = [x.numel() for x in tensors]
        generator = torch.Generator(device="cpu").manual_seed(seed)
        wanted = math.ceil(size / len(tensors))
        self.numbers_per_tensor = max(LEAST_PER_TENSOR, min(wanted, max(self.sizes)))
        # On the CPU, whatever device the script has set as default
        picks = torch.arange(self.numbers_per_tensor, device="cpu")
        self.index = []
        for count in self.sizes:
            order = torch.randperm(count, generator=generator, device="cpu")
            self.index.append(order[picks % count].to(device))
        self.followed = np.minimum(self.sizes, self.numbers_per_tensor)
        counts = self.followed[:, None]  # [T, 1]
        entry = np.arange(self.numbers_per_tensor)
        times_whole, left = np.divmod(self.numbers_per_tensor, counts)
        repeats = times_whole + (entry % counts < left)  # [T, P]
        self.emphasis = (self.numbers_per_tensor / (counts * repeats)).astype(np.float32)
        self.joined = sum(self.sizes) <= JOINED_UP_TO
        self.index_joined: dict[int, torch.Tensor] = {}  # by how many lists are joined

    @torch.no_grad()
    def read(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The sampled numbers of the tensors as they are now, [T, P], on their device.

        `tensors` may be other tensors of the same shapes, or K such lists one after the other,
        which give [K T, P].
        """
        times = len(tensors) // len(self.index)
        if self.joined:
            if times not in self.index_joined:
                # Where each tensor begins
                ends = np.cumsum(self.sizes * times)
                begins = torch.tensor([0, *ends[:-1]], device=self.index[0].device).unsqueeze(1)
                self.index_joined[times] = (torch.stack(self.index * times) + begins).flatten()
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

    def squared_errors(self, x: np.ndarray, is_noisy: bool) -> np.ndarray:
        """How far the mean of `x` over each tensor may be off, squared, [T]; `x` is [T, P].

        It is the squared standard error of a random sample without replacement. It is 0 for a
        tensor that is followed whole, unless `is_noisy`: noise that each number has of its own
        makes all numbers of a tensor a sample, too.
        """
        deviations = x - (x * self.emphasis).mean(1, keepdims=True)
        squares = (np.square(deviations) * self.emphasis).mean(1)
        # Entries that repeat the only number of a tensor differ by their noise.
        squared_errors = squares / np.maximum(self.followed - 1, 1)
        if is_noisy:
            return squared_errors
        return squared_errors * (1 - self.followed / np.array(self.sizes))


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
    def of(
        cls,
        moved: np.ndarray,
        true: np.ndarray,
        lost: np.ndarray,
        emphasis: np.ndarray | float = 1.0,
    ) -> "WindowSums":
        """The measurements from d' (`moved`, [C, T, P]), d (`true`, which broadcasts to this
        shape), and whether a number is lost (bool [C, T, P]). `emphasis` is that of the sample."""
        true = np.broadcast_to(true, moved.shape)
        parts = true * true, moved * true, (moved - true) ** 2, lost
        return cls(*((part * emphasis).mean(2, dtype=np.float64) for part in parts))

    def of_row(self, row: int) -> "WindowSums":
        """The measurements of one format, [T]."""
        return WindowSums(*(part[row] for part in self))


class NumberSums:
    """Sums over windows for each number that is followed, from which standard errors follow.

    The same numbers are followed in every window. So how far a rate may be off shows in how much
    numbers differ, and not in how much windows differ.

    `parts`  consecutive parts of the training, each as long as the others but for the last one.
             A part is an array, float32 [2, C, T, P]: for each of C formats and each number, the
             sum of d d over the windows, then that of d' d. When there are twice FEWEST_PARTS, each
             two neighbours become one, so a long training needs no more memory.
    """

    FEWEST_PARTS = 4  # as soon as there are so many windows

    def __init__(self):
        self.parts: list[np.ndarray] = []
        self.length = 1  # windows in a part
        self.length_of_last = 1  # windows in the last part so far

    def add(self, moved: np.ndarray, true: np.ndarray) -> None:
        """Adds a window, from d' (`moved`, [C, T, P]) and d (`true`, which broadcasts to it)."""
        sums = np.stack((np.broadcast_to(true * true, moved.shape), moved * true))
        if self.length_of_last < self.length:
            self.parts[-1] += sums
            self.length_of_last += 1
            return
        if len(self.parts) == 2 * self.FEWEST_PARTS:
            pairs = zip(self.parts[::2], self.parts[1::2], strict=True)
            self.parts = [first + second for first, second in pairs]
            self.length *= 2
        self.parts.append(sums)
        self.length_of_last = 1

    def of_row(self, row: int) -> np.ndarray:
        """The sums of one format, float64 [parts, 2, T, P]."""
        return np.array([part[:, row] for part in self.parts], np.float64)


def add_up(windows: list[WindowSums]) -> WindowSums:
    """The means of the measurements over several windows."""
    if len(windows) == 1:
        return windows[0]
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


def sampling_errors_by_tensor(parts: np.ndarray, sample: Sample, is_noisy: bool) -> np.ndarray:
    """The standard error of each tensor's rate over all parts, because only some of its numbers are
    followed, [T]. It is NaN for a tensor that does not move.

    `parts`     sums by number, [parts, 2, T, P] (`NumberSums.of_row`)
    `is_noisy`  whether each number has noise of its own (`Sample.squared_errors`)

    A rate is a quotient of two means, A / B. Its error is that of the mean of A - rate B (Cochran,
    Sampling Techniques, on ratio estimates).
    """
    true, along = parts.sum(0)
    mean_true = (true * sample.emphasis).mean(1, keepdims=True)
    mean_along = (along * sample.emphasis).mean(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        residuals = (along - mean_along / mean_true * true) / mean_true
        return np.sqrt(sample.squared_errors(residuals, is_noisy))


def sampling_error(parts: np.ndarray, sample: Sample, is_noisy: bool) -> float:
    """The standard error of the mean over parts of `rate_of`, because only some numbers are
    followed. The arguments are those of `sampling_errors_by_tensor`."""
    weight = np.array(sample.sizes, float)
    means = (parts * sample.emphasis).mean(3)  # [parts, 2, T]
    true, along = (weight * means).sum(2).T  # [parts] each
    moves = true > 0
    if not moves.any():
        return math.nan
    rates = along[moves] / true[moves]
    residuals = parts[moves, 1] - rates[:, None, None] * parts[moves, 0]
    residuals = (residuals / true[moves, None, None]).mean(0)  # [T, P]
    squared_errors = sample.squared_errors(residuals, is_noisy)
    return float(np.sqrt((weight**2 * squared_errors).sum()))


def noise_errors_by_tensor(sums: WindowSums, counts: np.ndarray) -> np.ndarray:
    """How far the rate of each tensor may be from 1 by noise alone: its standard error, [T].

    `sums` are means over `counts` [T] numbers. The error is NaN for a tensor that does not move.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(sums.apart / sums.true / counts)


def noise_error(sums: WindowSums, counts: np.ndarray, weight: np.ndarray) -> float:
    """How far `rate_of` may be from 1 by noise alone, from the errors of the tensors."""
    shares = weight * sums.true
    moves = shares > 0
    if not moves.any():
        return math.nan
    errors = noise_errors_by_tensor(sums, counts)
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
