"""The ruler: how far a shadow's steps lie beside float32's, and how sure that is.

Over a window of updates, let d be how far the weights move in float32, and d' how far a shadow
moves them, which takes the same steps otherwise. Split d' into the part along d and the rest:

    d' = rate d + noise        rate = <d', d> / <d, d>        noise = |d' - d| / |d|

All this is measured on a sample of each tensor's numbers. The same numbers are followed in every
window. So how far a rate may be off shows in how much numbers differ, and not in how much windows
differ.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors as flattened  # one call for all of them

from ..bits.notation import split_entry

JOINED_UP_TO = 2**18  # up to so many numbers, all tensors are joined to one, which is read at once
# How many numbers of a tensor are followed at least. If none of 64 moves, then with a confidence of
# 95% fewer than one in 20 of the tensor's numbers move (0.95^64 = 0.04), and it is called frozen.
LEAST_PER_TENSOR = 64
FROZEN = 0.05  # a tensor with a rate below this stands still
ERRORS = 2  # how many standard errors a rate may be off


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
        self.sizes = np.array([x.numel() for x in tensors])
        generator = torch.Generator(device="cpu").manual_seed(seed)
        wanted = math.ceil(size / len(tensors))
        self.numbers_per_tensor = max(LEAST_PER_TENSOR, min(wanted, int(self.sizes.max())))
        # On the CPU, whatever device the script has set as default
        picks = torch.arange(self.numbers_per_tensor, device="cpu")
        self.index = []
        for count in self.sizes.tolist():
            order = torch.randperm(count, generator=generator, device="cpu")
            self.index.append(order[picks % count].to(device))
        self.followed = np.minimum(self.sizes, self.numbers_per_tensor)
        counts = self.followed[:, None]  # [T, 1]
        entry = np.arange(self.numbers_per_tensor)
        times_whole, left = np.divmod(self.numbers_per_tensor, counts)
        repeats = times_whole + (entry % counts < left)  # [T, P]
        self.emphasis = (self.numbers_per_tensor / (counts * repeats)).astype(np.float32)
        self.is_joined = self.sizes.sum() <= JOINED_UP_TO
        self.index_joined: dict[int, torch.Tensor] = {}  # by how many lists are joined

    @torch.no_grad()
    def read(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The sampled numbers of the tensors as they are now, [T, P], on their device.

        `tensors` may be other tensors of the same shapes, or K such lists one after the other,
        which give [K T, P].
        """
        times = len(tensors) // len(self.index)
        if self.is_joined:
            if times not in self.index_joined:
                # Where each tensor begins
                ends = np.cumsum(np.tile(self.sizes, times))
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

    def mean(self, x: np.ndarray) -> np.ndarray:
        """The mean of `x` [..., T, P] over each tensor, [..., T]. Each number counts once."""
        return (x * self.emphasis).mean(-1)

    def squared_errors(self, x: np.ndarray, is_noisy: bool) -> np.ndarray:
        """How far the mean of `x` over each tensor may be off, squared, [T]; `x` is [T, P].

        It is the squared standard error of a random sample without replacement. It is 0 for a
        tensor that is followed whole, unless `is_noisy`: noise that each number has of its own
        makes all numbers of a tensor a sample, too.
        """
        deviations = x - self.mean(x)[:, None]
        # Entries that repeat the only number of a tensor differ by their noise.
        squared_errors = self.mean(np.square(deviations)) / np.maximum(self.followed - 1, 1)
        if is_noisy:
            return squared_errors
        return squared_errors * (1 - self.followed / self.sizes)


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
    """Measurements of shadows over a window of updates, float64 [..., T], by tensor.

    d is how far a number moves in float32, and d' is how far it moves with the shadow. Means are
    over the sampled numbers of a tensor:

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
        cls, moved: np.ndarray, true: np.ndarray, lost: np.ndarray, emphasis: np.ndarray
    ) -> "WindowSums":
        """The measurements from d' (`moved`, [C, T, P]), d (`true`, which broadcasts to this
        shape), and whether a number is lost (bool [C, T, P]). `emphasis` is that of the sample."""
        true = np.broadcast_to(true, moved.shape)
        parts = true * true, moved * true, (moved - true) ** 2, lost
        return cls(*((part * emphasis).mean(2, dtype=np.float64) for part in parts))

    def of_row(self, row: int) -> "WindowSums":
        """The measurements of one shadow, [T]."""
        return WindowSums(*(part[row] for part in self))

    @property
    def rates(self) -> np.ndarray:
        """The rate of each tensor by itself; NaN if it does not move."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.along / self.true

    def rate(self, weight: np.ndarray) -> float:
        """The factor by which a shadow multiplies the learning rate, <d', d> / <d, d>; NaN if
        nothing moves. `weight` [T] is how much the mean over each tensor counts."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((weight * self.along).sum() / (weight * self.true).sum())

    def noise(self, weight: np.ndarray) -> float:
        """How far a shadow leads away from float32, relative to its step, |d' - d| / |d|."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.sqrt((weight * self.apart).sum() / (weight * self.true).sum()))

    def share_lost(self, weight: np.ndarray) -> float:
        """The share of numbers that are lost, over all tensors."""
        return float((weight * self.lost).sum() / weight.sum())


def add_up(windows: list[WindowSums]) -> WindowSums:
    """The means of the measurements over several windows."""
    if len(windows) == 1:
        return windows[0]
    return WindowSums(*(np.mean(part, axis=0) for part in zip(*windows, strict=True)))


def in_parts(windows: list[WindowSums], parts: int) -> list[WindowSums]:
    """The means over each of `parts` consecutive parts of the windows, or over each window if there
    are fewer."""
    split = np.array_split(np.arange(len(windows)), min(parts, len(windows)))
    return [add_up([windows[i] for i in part]) for part in split]


class NumberSums:
    """Sums over windows for each number that is followed, from which standard errors follow.

    `parts`  consecutive parts of the training, each as long as the others but for the last one.
             A part is an array, float32 [2, C, T, P]: for each of C shadows and each number, the
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
        """The sums of one shadow, float64 [parts, 2, T, P]."""
        return np.array([part[:, row] for part in self.parts], np.float64)


def sampling_error(parts: np.ndarray, sample: Sample, is_noisy: bool) -> float:
    """The standard error of the mean over parts of the rate, because only some numbers are
    followed.

    `parts`     sums by number, [parts, 2, T, P] (`NumberSums.of_row`)
    `is_noisy`  whether each number has noise of its own (`Sample.squared_errors`)

    A rate is a quotient of two means, A / B. Its error is that of the mean of A - rate B (Cochran,
    Sampling Techniques, on ratio estimates).
    """
    weight = sample.sizes.astype(float)
    true, along = (weight * sample.mean(parts)).sum(2).T  # [parts] each
    moves = true > 0
    if not moves.any():
        return math.nan
    rates = along[moves] / true[moves]
    residuals = parts[moves, 1] - rates[:, None, None] * parts[moves, 0]
    residuals = (residuals / true[moves, None, None]).mean(0)  # [T, P]
    squared_errors = sample.squared_errors(residuals, is_noisy)
    return float(np.sqrt((weight**2 * squared_errors).sum()))


def sampling_errors_by_tensor(parts: np.ndarray, sample: Sample, is_noisy: bool) -> np.ndarray:
    """The standard error of each tensor's rate over all parts, [T]; NaN for a tensor that does not
    move. The arguments are those of `sampling_error`."""
    true, along = parts.sum(0)
    mean_true = sample.mean(true)[:, None]
    mean_along = sample.mean(along)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        residuals = (along - mean_along / mean_true * true) / mean_true
        return np.sqrt(sample.squared_errors(residuals, is_noisy))


def noise_errors_by_tensor(sums: WindowSums, counts: np.ndarray) -> np.ndarray:
    """How far the rate of each tensor may be from 1 by noise alone: its standard error, [T].

    `sums` are means over `counts` [T] numbers. The error is NaN for a tensor that does not move.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt(sums.apart / sums.true / counts)


def noise_error(sums: WindowSums, counts: np.ndarray, weight: np.ndarray) -> float:
    """How far `WindowSums.rate` may be from 1 by noise alone, from the errors of the tensors."""
    shares = weight * sums.true
    moves = shares > 0
    if not moves.any():
        return math.nan
    errors = noise_errors_by_tensor(sums, counts)
    return float(np.linalg.norm(shares[moves] * errors[moves]) / shares.sum())


class Reading(NamedTuple):
    """What is measured of one shadow, over a whole training.

    `rate`     the rate of learning, with its standard error `error`
    `first`    the rate in the first quarter of the training
    `last`     the rate in the last quarter, with its standard error `last_error`
    `noise`    how far the shadow leads away from float32's step, relative to this step
    `lost`     share of the numbers that stay the same over a window, or become 0
    `tensors`  rate and standard error of each tensor by name

    An error is NaN where it is not known.
    """

    rate: float
    error: float
    first: float
    last: float
    last_error: float
    noise: float
    lost: float
    tensors: dict[str, tuple[float, float]]

    @property
    def frozen(self) -> list[str]:
        """Names of the tensors that stand still."""
        return [name for name, rate in self.tensors.items() if is_below(*rate, FROZEN)]

    def fast(self, high: float) -> list[str]:
        """Names of the tensors whose rate is above `high`."""
        return [name for name, rate in self.tensors.items() if is_above(*rate, high)]

    def shifted(self, errors: float) -> "Reading":
        """The reading with the rates of the whole training moved by so many standard errors, and
        then without errors. Tensors keep theirs."""
        return self._replace(
            rate=self.rate + errors * np.nan_to_num(self.error),
            last=self.last + errors * np.nan_to_num(self.last_error),
            error=0.0,
            last_error=0.0,
        )


def is_below(rate: float, error: float, limit: float) -> bool:
    """Whether a rate is below a limit by more than two standard errors. An error may be NaN, which
    counts as 0."""
    return rate + ERRORS * np.nan_to_num(error) < limit


def is_above(rate: float, error: float, limit: float) -> bool:
    """Whether a rate is above a limit by more than two standard errors, as `is_below`."""
    return rate - ERRORS * np.nan_to_num(error) > limit


class Ruler:
    """Measures C shadows, window by window.

    `sample`        the sample of the T tensors that is measured
    `texts`         what each shadow is, as in "weights=bf16:stochastic"
    `tensor_names`  names of the tensors
    `steps`         how many independent steps a window of a stochastic shadow has
    `parts`         if not 0, measurements are means over so many parts of the training

    A shadow that rounds to the nearest has the mean rate of its windows. Of one that rounds
    stochastically, windows count by how far float32 moves in them, because where it hardly moves, a
    rate is the shadow's own noise divided by next to nothing.
    """

    def __init__(
        self,
        sample: Sample,
        texts: list[str],
        tensor_names: list[str],
        steps: int = 1,
        parts: int = 0,
    ):
        self.sample = sample
        self.weight = sample.sizes.astype(float)
        self.texts = texts
        self.tensor_names = tensor_names
        self.is_noisy = [is_stochastic(text) for text in texts]
        self.steps = steps
        self.parts = parts
        self.windows: list[WindowSums] = []  # [C, T]
        # `apart` of each window, but at least what is to be expected of stochastic rounding
        self.expected: list[np.ndarray] = []
        self.numbers = NumberSums()

    def add(
        self,
        moved: np.ndarray,
        true: np.ndarray,
        lost: np.ndarray,
        expected: np.ndarray | float = 0.0,
    ) -> None:
        """Adds a window.

        `moved`     d' of each shadow, [C, T, P]
        `true`      d, which broadcasts to that
        `lost`      whether a number is lost, bool [C, T, P]
        `expected`  the mean of (d' - d)^2 that stochastic rounding has on average, although few
                    numbers may show it, [C, T]
        """
        sums = WindowSums.of(moved, true, lost, self.sample.emphasis)
        self.add_sums(sums, moved, true, expected)

    def add_sums(self, sums: WindowSums, moved, true, expected: np.ndarray | float = 0.0) -> None:
        """Adds a window of which the sums are known, as `add`."""
        self.windows.append(sums)
        self.expected.append(np.maximum(sums.apart, expected))
        self.numbers.add(moved, true)

    def readings(self) -> dict[str, Reading | None]:
        """What is measured of each shadow; None if no window is full, or nothing moved."""
        return {text: self.reading(row) for row, text in enumerate(self.texts)}

    def reading(self, row: int) -> Reading | None:
        is_noisy = self.is_noisy[row]
        every = [sums.of_row(row) for sums in self.windows]
        windows = in_parts(every, self.parts) if self.parts and every else every
        rates = [sums.rate(self.weight) for sums in windows]
        if not np.isfinite(rates).any():
            return None
        quarter = max(1, len(windows) // 4)
        whole = add_up(windows)
        # By number, for standard errors
        numbers = self.numbers.of_row(row)
        last_numbers = numbers[-math.ceil(len(numbers) / 4) :].sum(0, keepdims=True)
        last_error = sampling_error(last_numbers, self.sample, is_noisy)
        tensor_errors = sampling_errors_by_tensor(numbers, self.sample, is_noisy)
        if is_noisy:
            noisy = [
                sums._replace(apart=apart[row])
                for sums, apart in zip(every, self.expected, strict=True)
            ]
            counts = self.sample.followed * self.steps
            late = noisy[-max(1, len(noisy) // 4) :]
            rate = whole.rate(self.weight)
            noise = whole.noise(self.weight)
            error = np.fmax(
                sampling_error(numbers.sum(0, keepdims=True), self.sample, is_noisy),
                noise_error(add_up(noisy), counts * len(noisy), self.weight),
            )
            error_of_noise = noise_error(add_up(late), counts * len(late), self.weight)
            last_error = np.fmax(last_error, error_of_noise)
            of_noise = noise_errors_by_tensor(add_up(noisy), counts * len(noisy))
            tensor_errors = np.fmax(tensor_errors, of_noise)
        else:
            rate = np.nanmean(rates)
            noise = np.nanmedian([sums.noise(self.weight) for sums in windows])
            error = sampling_error(numbers, self.sample, is_noisy)
        pairs = zip(whole.rates.tolist(), tensor_errors.tolist(), strict=True)
        return Reading(
            rate=float(rate),
            error=float(error),
            first=add_up(windows[:quarter]).rate(self.weight),
            last=add_up(windows[-quarter:]).rate(self.weight),
            last_error=float(last_error),
            noise=float(noise),
            lost=float(np.nanmedian([sums.share_lost(self.weight) for sums in windows])),
            tensors=dict(zip(self.tensor_names, pairs, strict=True)),
        )

    def rates_in_parts(self, text: str, parts: int) -> list[np.ndarray]:
        """The rates of the tensors in consecutive parts of the training, [T] each."""
        row = self.texts.index(text)
        if not self.windows:
            return []
        return [sums.of_row(row).rates for sums in in_parts(self.windows, parts)]


def is_stochastic(text: str) -> bool:
    """Whether an entry such as "v=e4m3:stochastic" is rounded at random."""
    _, form = split_entry(text)
    return "stochastic" in form.split(":")[1:]
