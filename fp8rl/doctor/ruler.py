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

from ..bits.notation import split_entry

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

    # How many numbers of a tensor are followed at least. If none of 64 moves, then with a
    # confidence of 95% fewer than one in 20 of the tensor's numbers move (0.95^64 = 0.04), and it
    # is called frozen.
    LEAST_PER_TENSOR = 64
    FEW = 2**16  # numbers of tensors that are read at once

    def __init__(self, tensors: Iterable[torch.Tensor], size: int, seed: int):
        tensors = list(tensors)
        device = tensors[0].device
        self.sizes = np.array([x.numel() for x in tensors])
        generator = torch.Generator(device="cpu").manual_seed(seed)
        wanted = math.ceil(size / len(tensors))
        self.numbers_per_tensor = max(self.LEAST_PER_TENSOR, min(wanted, int(self.sizes.max())))
        # On the CPU, whatever device the script has set as default
        picks = torch.arange(self.numbers_per_tensor, device="cpu")
        self.index = []
        for count in self.sizes.tolist():
            order = torch.randperm(count, generator=generator, device="cpu")
            self.index.append(order[picks % count].to(device))
        begins = [0, *self.sizes.cumsum()[:-1].tolist()]
        self.joint_index = torch.cat([x + n for x, n in zip(self.index, begins, strict=True)])
        self.followed = np.minimum(self.sizes, self.numbers_per_tensor)
        counts = self.followed[:, None]  # [T, 1]
        entry = np.arange(self.numbers_per_tensor)
        times_whole, left = np.divmod(self.numbers_per_tensor, counts)
        repeats = times_whole + (entry % counts < left)  # [T, P]
        self.emphasis = (self.numbers_per_tensor / (counts * repeats)).astype(np.float32)
        # Of which block each number is, [P], by the tensors that are followed in some blocks alone
        self.blocks: dict[int, np.ndarray] = {}

    @torch.no_grad()
    def read(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The sampled numbers of the tensors as they are now, [T, P], on their device.

        `tensors` may be other tensors of the same shapes, or K such lists one after the other,
        which give [K T, P].
        """
        times = len(tensors) // len(self.index)
        if self.sizes.sum() <= self.FEW:  # each call takes longer than to copy the numbers
            numbers = torch.cat([x.reshape(-1) for x in tensors]).view(times, -1)
            return numbers.index_select(1, self.joint_index).view(len(tensors), -1)
        pairs = zip(tensors, self.index * times, strict=True)
        return torch.stack([x.reshape(-1).index_select(0, index) for x, index in pairs])

    @torch.no_grad()
    def read_one(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """The sampled numbers [P] of one of the T tensors, by its number."""
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        return tensor.reshape(-1).index_select(0, self.index[number])

    def mean(self, x: np.ndarray) -> np.ndarray:
        """The mean of `x` [..., T, P] over each tensor, [..., T]. Each number counts once."""
        return (x * self.emphasis).mean(-1)

    def squared_errors(self, x: np.ndarray, is_noisy: bool) -> np.ndarray:
        """How far the mean of `x` over each tensor may be off, squared, [T]; `x` is [T, P].

        It is the squared standard error of a random sample without replacement. It is 0 for a
        tensor that is followed whole, unless `is_noisy`: noise that each number has of its own
        makes all numbers of a tensor a sample, too. Numbers of one block may be alike. So where a
        tensor is followed in some blocks, these are the sample (Cochran on cluster sampling).
        """
        deviations = x - self.mean(x)[:, None]
        # Entries that repeat the only number of a tensor differ by their noise.
        squared_errors = self.mean(np.square(deviations)) / np.maximum(self.followed - 1, 1)
        for t, blocks in self.blocks.items():
            sums = np.bincount(blocks, deviations[t])
            count = len(np.unique(blocks))
            squared_errors[t] = np.square(sums).sum() / len(blocks) ** 2 * count / (count - 1)
        if is_noisy:
            return squared_errors
        return squared_errors * (1 - self.followed / self.sizes)


def tensor_names(tensors: list[torch.Tensor], modules: Iterable[nn.Module]) -> list[str]:
    """A name for each tensor: that of a module's parameter, or its number and shape."""
    # A parameter of several modules has its name in the first one, which comes last here
    known = {
        id(p): name for module in reversed([*modules]) for name, p in module.named_parameters()
    }
    names = []
    for i, x in enumerate(tensors):
        name = known.get(id(x), f"tensor {i} {list(x.shape)}")
        names.append(name if name not in names else f"{name} ({i})")
    return names


class WindowSums(NamedTuple):
    """Measurements over a window of updates, float64 [..., T], by tensor: [C, T] of C shadows, or
    [N, T] of one shadow over N windows.

    d is how far a number moves in float32, and d' is how far it moves with the shadow. Means are
    over the sampled numbers of a tensor:

    `true`      mean of d d
    `along`     mean of d' d
    `apart`     mean of (d' - d)^2
    `lost`      share of the numbers that stay the same, or become 0
    `expected`  `apart`, but at least what stochastic rounding has on average, although few numbers
                may show it
    """

    true: np.ndarray
    along: np.ndarray
    apart: np.ndarray
    lost: np.ndarray
    expected: np.ndarray

    @classmethod
    def of(
        cls,
        moved: np.ndarray,
        true: np.ndarray,
        lost: np.ndarray | bool,
        emphasis: np.ndarray,
        expected: np.ndarray | float = 0.0,
    ) -> "WindowSums":
        """The measurements from d' (`moved`, [C, T, P]), d (`true`, which broadcasts to this
        shape), and whether a number is lost (bool [C, T, P]). `emphasis` is that of the sample, and
        `expected` [C, T] what stochastic rounding has on average."""
        true = np.broadcast_to(true, moved.shape)
        parts = true * true, moved * true, (moved - true) ** 2, lost
        means = [(part * emphasis).mean(-1, dtype=np.float64) for part in parts]
        return cls(*means, np.maximum(means[2], expected))

    def at(self, index: int | slice) -> "WindowSums":
        """The measurements of one shadow, by its row, or of some windows."""
        return WindowSums(*(part[index] for part in self))

    def mean(self) -> "WindowSums":
        """The means of measurements [N, T] over N windows."""
        return WindowSums(*(part.mean(0) for part in self))

    @property
    @np.errstate(invalid="ignore", divide="ignore")
    def rates(self) -> np.ndarray:
        """The rate of each tensor by itself; NaN if it does not move."""
        return self.along / self.true

    @np.errstate(invalid="ignore", divide="ignore")
    def rate(self, weight: np.ndarray) -> np.ndarray:
        """The factor by which a shadow multiplies the learning rate, <d', d> / <d, d>; NaN if
        nothing moves. `weight` [T] is how much the mean over each tensor counts."""
        return (weight * self.along).sum(-1) / (weight * self.true).sum(-1)

    @np.errstate(invalid="ignore", divide="ignore")
    def noise(self, weight: np.ndarray) -> np.ndarray:
        """How far a shadow leads away from float32, relative to its step, |d' - d| / |d|."""
        return np.sqrt((weight * self.apart).sum(-1) / (weight * self.true).sum(-1))


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
        """Names of the tensors that stand still, at a rate below 0.05."""
        return [name for name, rate in self.tensors.items() if is_below(*rate, 0.05)]

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
    `parts`         measurements are means over so many parts of the training

    A shadow that rounds to the nearest has the mean rate of its windows. Of one that rounds
    stochastically, windows count by how far float32 moves in them, because where it hardly moves, a
    rate is the shadow's own noise divided by next to nothing.

    `measured`  of each window the measurements, float64 [windows, 5, C, T], and room for more
    `numbers`  sums over windows for each number that is followed, from which standard errors
               follow, in consecutive parts of the training, each as long as the others but for the
               last one. A part is an array, float32 [2, C, T, P]: for each shadow and each number,
               the sum of d d over the windows, then that of d' d. When there are 8 parts, each two
               neighbours become one, so a long training needs no more memory.
    """

    def __init__(
        self,
        sample: Sample,
        texts: list[str],
        tensor_names: list[str],
        steps: int = 1,
        parts: float = math.inf,
    ):
        self.sample = sample
        self.weight = sample.sizes.astype(float)
        self.texts = texts
        self.tensor_names = tensor_names
        self.steps = steps
        self.parts = parts
        self.measured = np.empty((8, len(WindowSums._fields), len(texts), len(tensor_names)))
        self.count = 0  # windows
        self.numbers: list[np.ndarray] = []
        self.windows_of_part = 1  # windows in a part of `numbers`

    def add(
        self,
        moved: np.ndarray,
        true: np.ndarray,
        lost: np.ndarray,
        expected: np.ndarray | float = 0.0,
        steps: WindowSums | None = None,
    ) -> None:
        """Adds a window.

        `moved`     d' of each shadow, [C, T, P]
        `true`      d, which broadcasts to that
        `lost`      whether a number is lost, bool [C, T, P]
        `expected`  the mean of (d' - d)^2 that stochastic rounding has on average, [C, T]
        `steps`     of shadows that are measured step by step, which come last: the means over the
                    steps, in place of those over the window
        """
        sums = WindowSums.of(moved, true, lost, self.sample.emphasis, expected)
        if steps is not None:
            for part, of_steps in zip(sums, steps._replace(lost=sums.lost), strict=True):
                part[len(part) - len(of_steps) :] = of_steps
        by_number = np.stack((np.broadcast_to(true * true, moved.shape), moved * true))
        if self.count % self.windows_of_part:
            self.numbers[-1] += by_number
        else:
            if len(self.numbers) == 8:
                pairs = zip(self.numbers[::2], self.numbers[1::2], strict=True)
                self.numbers = [first + second for first, second in pairs]
                self.windows_of_part *= 2
            self.numbers.append(by_number)
        # Arrays of each window would lie between those of the script, and hold its memory apart
        if self.count == len(self.measured):
            self.measured = np.concatenate((self.measured, np.empty_like(self.measured)))
        self.measured[self.count] = sums
        self.count += 1

    def reading(self, row: int) -> Reading | None:
        """What is measured of a shadow; None if no window is full, or nothing moved."""
        is_noisy = is_stochastic(self.texts[row])
        if not self.count:
            return None
        windows = self.in_parts(row, self.parts)
        rates = windows.rate(self.weight)
        if not np.isfinite(rates).any():
            return None
        whole = windows.mean()
        quarter = max(1, len(rates) // 4)
        every = self.in_parts(row, math.inf)
        late = every.at(slice(-max(1, self.count // 4), None))
        numbers = np.array([part[:, row] for part in self.numbers], np.float64)
        late_numbers = numbers[-math.ceil(len(numbers) / 4) :].sum(0, keepdims=True)
        if is_noisy:
            rate = whole.rate(self.weight)
            noise = whole.noise(self.weight)
            numbers = numbers.sum(0, keepdims=True)
        else:
            rate = np.nanmean(rates)
            noise = np.nanmedian(windows.noise(self.weight))
        error, tensor_errors = self.errors(numbers, every, is_noisy)
        last_error, _ = self.errors(late_numbers, late, is_noisy)
        pairs = zip(whole.rates.tolist(), tensor_errors.tolist(), strict=True)
        return Reading(
            rate=float(rate),
            error=float(error),
            first=float(windows.at(slice(quarter)).mean().rate(self.weight)),
            last=float(windows.at(slice(-quarter, None)).mean().rate(self.weight)),
            last_error=float(last_error),
            noise=float(noise),
            lost=float(np.nanmedian(np.average(windows.lost, axis=1, weights=self.weight))),
            tensors=dict(zip(self.tensor_names, pairs, strict=True)),
        )

    def in_parts(self, row: int, parts: float) -> WindowSums:
        """The means of one shadow's measurements over each of so many consecutive parts of the
        training, or over each window if there are fewer; [parts, T]."""
        parts = min(parts, self.count)
        every = self.measured[: self.count, :, row].swapaxes(0, 1).copy()
        means = [[x.mean(0) for x in np.array_split(field, parts)] for field in every]
        return WindowSums(*np.array(means))

    @np.errstate(invalid="ignore", divide="ignore")
    def errors(
        self, numbers: np.ndarray, windows: WindowSums, is_noisy: bool
    ) -> tuple[float, np.ndarray]:
        """The standard errors of the mean over parts of the rate, and of each tensor's rate over
        all parts, [T]. An error is NaN for what does not move.

        `numbers`   sums by number in each part, [parts, 2, T, P]
        `windows`   the measurements of the windows in these parts, [N, T]
        `is_noisy`  whether each number has noise of its own (`Sample.squared_errors`)

        Only some numbers are followed. A rate is a quotient of two means, A / B, so its error is
        that of the mean of A - rate B (Cochran, Sampling Techniques, on ratio estimates). With
        stochastic rounding, the error is at least how far a rate may be from 1 by noise alone.
        """
        sample = self.sample
        means = sample.mean(numbers) * self.weight
        moves = means[:, 0].sum(1) > 0
        error = np.float64(math.nan)
        if moves.any():
            whole = means[moves].sum(2)[..., None, None]
            squared_errors = sample.squared_errors(mean_residuals(numbers[moves], whole), is_noisy)
            error = np.sqrt((self.weight**2 * squared_errors).sum())
        total = numbers.sum(0, keepdims=True)
        residuals = mean_residuals(total, sample.mean(total)[..., None])
        tensor_errors = np.sqrt(sample.squared_errors(residuals, is_noisy))
        if is_noisy:
            sums = windows.mean()
            counts = sample.followed * self.steps * len(windows.true)
            of_noise = np.sqrt(sums.expected / sums.true / counts)
            shares = self.weight * sums.true
            moved = shares > 0
            error = np.fmax(error, np.linalg.norm((shares * of_noise)[moved]) / shares.sum())
            tensor_errors = np.fmax(tensor_errors, of_noise)
        return error, tensor_errors


def mean_residuals(parts: np.ndarray, means: np.ndarray) -> np.ndarray:
    """What a rate leaves of each number, relative to the mean of d d, in the mean over parts.

    `parts`  the sums of d d and of d' d by number, [parts, 2, T, P]
    `means`  their means over those numbers whose rate it is, [parts, 2, 1 or T, 1]
    """
    true, along = means[:, 0], means[:, 1]
    return ((parts[:, 1] - along / true * parts[:, 0]) / true).mean(0)


def is_stochastic(text: str) -> bool:
    """Whether an entry such as "v=e4m3:stochastic" is rounded at random."""
    _, form = split_entry(text)
    return "stochastic" in form.split(":")[1:]
