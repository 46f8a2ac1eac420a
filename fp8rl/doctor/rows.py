"""Shadows in few bits: the same step, with weights, moments or running averages in few bits.

For each format, a sample of numbers is followed as that format would keep them:

    weights     take float32's updates, and are rounded after each update: w' <- round(w' + update)
    m, v, root  are kept in few bits from the first update on:
                v' <- round(beta2 v' + (1 - beta2) g^2), with float32's gradients g; the update is
                Adam's (bits/adam.py) with the rounded moments
    average     a running average x' <- round((1 - tau) x' + tau new), such as a target network

Nothing is ever returned to float32's numbers. A weight that stands still at 1.0 in bfloat16 stands
still for the whole training, and that is what a training with few bits would do.

The training waits while a hook runs at every update. So a hook only records the update, and the
updates of a window are replayed at the window's end, for all formats at once.
"""

import math
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from ..bits import adam
from ..bits.notation import STATE, split_entry
from ..bits.places import SLACK, PlaceFormat
from . import first_line
from .findings import Finding, judge_all, with_cures
from .ruler import Ruler, Sample, WindowSums, is_stochastic
from .watcher import (
    GroupSettings,
    Shadow,
    Tape,
    Update,
    Watcher,
    alive,
    largest_of,
    modules_alive,
    parameters_of,
)

LENGTH = 32  # updates in a window
AVERAGES = ("bf16", "bf16:stochastic", "fp16:unscaled", "e4m3", "e4m3:stochastic")


class FormatRows:
    """Rounds samples [C, T, P] to C formats: each row [T, P] to its own format.

    A row has P numbers of each of T tensors.

    `texts`  what the rows are, as in "weights=bf16"; stochastic formats come last. None is in
             blocks (`check_formats`)

    Nothing is divided by scales. A scale is a power of two, so it only moves where a format's
    normal numbers begin.
    """

    # A float32 has a sign, 8 bits of exponent, whose bias is 127, and 23 of mantissa.
    ONE_DOUBLING = 1 << 23

    def __init__(self, texts: list[str]):
        def column(values: list, dtype=np.float32) -> np.ndarray:
            """A value for each of C rows, [C, 1, 1]."""
            return np.array(values, dtype).reshape(-1, 1, 1)

        forms = [PlaceFormat.of(split_entry(text)[1]) for text in texts]
        self.forms = forms
        self.nearest = sum(not form.stochastic for form in forms)  # rows that are not stochastic
        self.random = np.random.default_rng(0)
        # The distance of neighbouring numbers, as a share of the power of two below them.
        self.spacing = column([2.0**-form.format.mantissa for form in forms])
        # The largest number. With a scale there is no limit, because the scale makes all fit.
        self.limit = column([np.inf if form.scaled else form.format.largest for form in forms])
        # The following are bits of float32.
        self.largest = column([form.format.largest for form in forms]).view(np.int32)
        self.scale_mask = column([-self.ONE_DOUBLING * form.scaled for form in forms], np.int32)
        smallest_normal = [form.format.normal + 127 + form.scaled for form in forms]
        self.smallest_normal = self.ONE_DOUBLING * column(smallest_normal, np.int32)

    def round(
        self,
        x: np.ndarray,
        largest: np.ndarray,
        least: np.ndarray | None = None,
        most: np.ndarray | None = None,
    ) -> np.ndarray:
        """The rows `x`, float32 [C, T, P], each rounded to its format.

        `largest` [C, T, 1] is the largest magnitude of each whole tensor, of which `x` has a
        sample. It decides the scale. `least` and `most` [C, T, P] are bounds on how one of Adam's
        moments is rounded, in view of the other (`Places.moments`): a magnitude below `least` is
        not rounded down, and none is rounded up beyond `most`. Where there is no bound, `least` is
        NaN and `most` infinite.
        """
        step = self.steps(x, largest)
        out = x / step
        to_nearest = out[: self.nearest]
        np.rint(to_nearest, out=to_nearest)
        stochastic = out[self.nearest :]
        if len(stochastic):
            down = np.floor(stochastic)
            stochastic -= down
            up = self.random.random(down.shape, np.float32) < stochastic
            np.add(down, up, out=stochastic)
        if least is not None:
            self.hold_to_bounds(x, out, step, least, most)
        out *= step
        np.minimum(out, self.limit, out=out)
        return np.maximum(out, -self.limit, out=out)

    def hold_to_bounds(self, x, out, step, least, most) -> None:
        """Changes `out` where bounds ask for it. `out` has numbers `x`, rounded in units of `step`.

        A number that is below `least`, or has become 0, is rounded up. A number beyond `most` is
        rounded towards 0. All arrays are [C, T, P].
        """
        magnitude = np.abs(x)
        kept = np.abs(out) * step
        became_zero = (out == 0) & (x != 0) & ~np.isnan(least)
        too_small = (kept < magnitude) & ((magnitude < least) | became_zero)
        too_large = kept > np.maximum(magnitude, most)
        if too_small.any():
            out[too_small] = np.ceil(x[too_small] / step[too_small])
        if too_large.any():
            out[too_large] = np.trunc(x[too_large] / step[too_large])

    def steps(self, x: np.ndarray, largest: np.ndarray) -> np.ndarray:
        """The distance of the format's numbers around each number of `x`, float32 [C, T, P]."""
        bits = x.view(np.int32) & 0x7FFFFFFF  # without the sign
        top = np.maximum(bits.max(-1, keepdims=True), largest.view(np.int32))
        # The scale is the smallest power of two that brings `top` to at most the largest number. It
        # multiplies the smallest normal number, which in bits is an addition.
        scale = top - self.largest - 1 & self.scale_mask
        smallest_normal = np.maximum(scale + self.smallest_normal, self.ONE_DOUBLING)
        bits &= 0x7F800000  # the exponent: the power of two below x
        np.maximum(bits, smallest_normal, out=bits)
        step = bits.view(np.float32)
        step *= self.spacing
        return step

    def mean_noise(
        self, x: np.ndarray, largest: np.ndarray, moved: np.ndarray, emphasis: np.ndarray
    ) -> np.ndarray:
        """The mean of (d' - d)^2 over each tensor that stochastic rounding has on average, [C, T],
        for steps d (`moved`) of the numbers `x`.

        Few numbers may show it: a step d of numbers that lie s apart is s with probability d / s.
        """
        return (self.steps(x, largest) * np.abs(moved) * emphasis).mean(2, dtype=np.float64)


class RowShadow(Shadow):
    """An optimizer whose weights or moments are in few bits: a row of numbers for each format.

    `watcher`  the optimizer; if it is not Adam, only rows of weights are followed
    `texts`    places and formats, as in "weights=bf16"
    `length`   updates in a window

    `kept`, float32 [C, T, P], has a row for each of C formats. A row has P weights, moments or
    roots of each of T tensors, as they are kept after the last update that was replayed. The first
    two rows are float32's m and v, which are not measured. `kind` [C] says which place a row keeps,
    by its index in STATE.
    """

    def __init__(self, watcher: Watcher, texts: list[str], length: int):
        kinds = {text: STATE.index(split_entry(text)[0]) for text in texts}
        texts = [text for text in texts if watcher.is_adam or not kinds[text]]
        texts.sort(key=lambda text: (is_stochastic(text), kinds[text]))
        super().__init__(watcher, texts, length)
        rows = ["m=fp32", "v=fp32", *texts]
        self.rows = FormatRows(rows)
        self.kind = np.array([STATE.index(split_entry(text)[0]) for text in rows])
        self.rows_of_kind = [np.flatnonzero(self.kind == kind) for kind in range(len(STATE))]
        self.keeps_weights = (self.kind == 0).reshape(-1, 1, 1)
        is_bounded = np.array([not form.independent for form in self.rows.forms])
        self.bounded_of_kind = [rows[is_bounded[rows]] for rows in self.rows_of_kind]
        self.is_stochastic_weight = self.keeps_weights[:, 0] & [
            [x.stochastic] for x in self.rows.forms
        ]
        self.kept: np.ndarray | None = None
        self.tape = Tape(length)  # what was read before and after each update

    def before(self) -> None:
        """Begins the first window, with the moments that the optimizer has now."""
        if self.kept is not None:
            return
        watcher = self.watcher
        tensors = watcher.parameters, watcher.state("exp_avg"), watcher.state("exp_avg_sq")
        weights, m, v = (watcher.sample.read(x).cpu().numpy() for x in tensors)
        self.steps = float(watcher.count_steps().nan_to_num())
        # float32's weights and moments after the last update that was replayed, [K T, P]
        self.last = np.concatenate((weights, m, v) if watcher.is_adam else (weights,))
        self.kept = np.stack((weights, m, v, np.sqrt(v)))[self.kind]
        self.begin_window()
        self.kept = self.rows.round(self.kept, self.largest)
        self.start = self.kept
        # Rows without a bound stay as they are here
        self.least = np.full_like(self.kept, np.nan)
        self.most = np.full_like(self.kept, np.inf)

    def begin_window(self) -> None:
        watcher = self.watcher
        tensors = watcher.parameters, watcher.state("exp_avg"), watcher.state("exp_avg_sq")
        weights, m, v = torch.stack([largest_of(x) for x in tensors]).cpu().numpy()
        self.largest = np.stack((weights, m, v, np.sqrt(v)))[self.kind]
        self.start = self.kept
        self.displaced = np.zeros_like(self.kept)
        self.moved = np.zeros_like(self.kept)  # by Adam's steps with each row's moments
        self.true = np.zeros_like(self.kept[0])  # how far float32's weights moved
        self.count = 0  # updates that have been replayed
        self.recorded: list[tuple] = []  # updates since the last replay, without their tensors

    def after(self, update: Update) -> None:
        """Records an update, and ends the window when it is full."""
        self.tape.append(torch.cat((update.before, update.after)))
        self.recorded.append((update.steps, update.live, update.settings))
        if self.count + len(self.recorded) == self.length:
            self.replay()
        if self.count == self.length:
            self.end_window()
            if self.watcher.parameters:  # a script that has dropped them steps no more
                self.begin_window()

    def replay(self) -> None:
        """Applies the updates that were recorded since the last replay to every row."""
        steps, live, settings = zip(*self.recorded, strict=True)
        self.recorded = []
        steps = torch.stack(steps).cpu().numpy()
        before, after = np.split(self.tape.take().cpu().numpy(), [len(self.last)], axis=1)
        live = np.array(live)[..., None]
        settings = self.watcher.by_tensor(settings)
        count = len(self.watcher.references)
        weight = before[:, :count]
        g = after[:, count : 2 * count]
        after = np.delete(after, slice(count, 2 * count), axis=1)  # as `before`
        last = np.concatenate((self.last[None], after[:-1]))
        self.last = after[-1]
        # How far other code has moved the weights since the update before
        between = weight - last[:, :count]
        changed = before[:, count:] != last[:, count:]
        finite = np.isfinite(g).all((1, 2))
        moved = after[:, :count] - weight
        g = adam.with_coupled_decay(settings.sign * g, weight, settings.decay_of_gradient)
        for i in np.flatnonzero(finite):
            if between[i].any():
                self.displace(between[i])
            if changed[i].any():
                self.take_moments(before[i, count:], changed[i])
            if self.watcher.is_adam and not np.isnan(steps[i]):
                self.steps = float(steps[i])
            self.take_step(moved[i], g[i], live[i], GroupSettings(*(x[i] for x in settings)))

    def take_step(
        self, moved: np.ndarray, g: np.ndarray, live: np.ndarray, settings: GroupSettings
    ) -> None:
        """Follows the rows through an update.

        `moved` is how far the update moves float32's weights, and `g` its gradient, both [T, P];
        `live` [T, 1] says whether a tensor has a gradient. Settings are arrays [T, 1].
        """
        of_weights, of_m, of_v, of_root = self.rows_of_kind
        old = self.kept
        new = np.empty_like(old)
        new[of_weights] = old[of_weights] + moved
        new[of_m] = adam.first_moment(old[of_m], g, settings.beta1)
        new[of_v] = adam.second_moment(old[of_v], g, settings.beta2)
        square = np.square(old[of_root])
        new[of_root] = np.sqrt(adam.second_moment(square, g, settings.beta2))
        self.steps += 1
        count = np.full((1, 1), self.steps, np.float32)
        corrections = adam.bias_corrections(count, settings.beta1, settings.beta2)
        self.set_bounds(np.abs(new[0]), np.sqrt(new[1]), adam.full_step_quotient(*corrections))
        self.kept = self.rows.round(new, self.largest, self.least, self.most)
        if not live.all():  # an optimizer leaves tensors without gradient alone
            np.copyto(self.kept, old, where=~live)

        def step(m: np.ndarray, root: np.ndarray) -> np.ndarray:
            learning_rate = live * settings.learning_rate
            return adam.step(m, root, learning_rate, *corrections, settings.eps)

        m, v = self.kept[:2]
        self.moved[of_m] += step(self.kept[of_m], np.sqrt(v))
        self.moved[of_v] += step(m, np.sqrt(self.kept[of_v]))
        self.moved[of_root] += step(m, self.kept[of_root])
        self.true += moved
        self.count += 1

    def set_bounds(self, m: np.ndarray, root: np.ndarray, quotient: np.ndarray) -> None:
        """Bounds the rounding of moments, as Places.moments does, in view of float32's magnitude
        of m and its root of v, and of their quotient in a full step."""
        limit = SLACK * quotient
        _, of_m, of_v, of_root = self.bounded_of_kind
        self.most[of_m] = limit * root
        self.least[of_v] = (m / limit) ** 2
        self.least[of_root] = m / limit

    def displace(self, by: np.ndarray) -> None:
        """Moves the rows of weights as other code has moved float32's weights between two updates.

        That does not count as a movement of the window, because it is no step of the optimizer.
        """
        rounded = self.rows.round(self.kept + by, self.largest)
        kept = np.where(self.keeps_weights, rounded, self.kept)
        if self.count:
            self.displaced += kept - self.kept
        else:
            self.start = kept
        self.kept = kept

    def take_moments(self, moments: np.ndarray, changed: np.ndarray) -> None:
        """Takes over moments that other code has changed: has loaded, zeroed or dropped.

        `moments` [2 T, P] are float32's m and v, and `changed` says which numbers were changed. In
        few bits the other code would have rounded the same numbers.
        """
        m, v = np.split(moments, 2)
        changed_m, changed_v = np.split(changed, 2)
        exact = np.stack((m, m, v, np.sqrt(v)))[self.kind]
        is_changed = np.stack((np.zeros_like(changed_m), changed_m, changed_v, changed_v))
        rounded = self.rows.round(exact, self.largest)
        self.kept = np.where(is_changed[self.kind], rounded, self.kept)

    def end_window(self) -> None:
        """Ends a window, and measures it."""
        m, v = self.kept[:2]
        moved = np.where(self.keeps_weights, self.kept - self.start - self.displaced, self.moved)
        true = np.where(self.keeps_weights, self.true, self.moved[1])
        kept = np.where(self.keeps_weights, moved, self.kept)
        exact = np.stack((self.true, m, v, v))[self.kind]
        lost = (kept == 0) & (exact != 0)
        emphasis = self.watcher.sample.emphasis
        expected = self.rows.mean_noise(self.kept, self.largest, true, emphasis)
        expected *= self.is_stochastic_weight
        self.ruler.add(moved[2:], true[2:], lost[2:], expected[2:])


def share_of_way(old: np.ndarray, new: np.ndarray, source: np.ndarray) -> float | None:
    """The share of the way from `old` to `source` that explains a move from `old` to `new`, by
    least squares. NaN if it does not explain the move, and None if the move is too short to tell
    an average from something else."""
    old, new, source = (x.astype(np.float64).ravel() for x in (old, new, source))
    move = new - old
    way = source - old
    distance = np.maximum(np.linalg.norm(way, axis=-1), 1e-150)
    share = (move * way).sum() / distance**2
    residual = np.linalg.norm(move - share * way, axis=-1)
    # The plain ways to write the update differ by a fifth of this: they round up to three times
    rounding = 2.0**-23 * np.linalg.norm(np.abs(old) + np.abs(source), axis=-1)
    if not np.linalg.norm(move, axis=-1) > 8 * rounding:  # nor is a NaN a move
        return None
    return float(share) if residual <= rounding else math.nan


class AverageShadow(Shadow):
    """A running average x <- (1 - rate) x + rate new, as if it had been in few bits from the
    beginning. Target networks and exponential moving averages are such.

    `name`     its name in reports
    `tensors`  the average's tensors, which are held by weak references
    `tensor_names`  their names in reports
    `rate`     a number, or a function without arguments
    `texts`    what is judged, as in "average=bf16"
    `length`   updates in a window
    `size`     how many numbers are followed
    `sources`  the tensors that it averages, if the rate is to be fitted to each move; `rate` is
               then the first one

    An average in few bits that hardly moves falls behind, and the difference to the new values then
    pulls it all the more. That is why d is the step that float32 would take from where x' is.
    Measurements are means over a quarter of the windows, because in some windows the average hardly
    has to move. Once an average has arrived, only its own noise pulls it, so that within a window d
    answers to the noise. So stochastic rows are measured step by step: the noise of a step is not
    in the d of the same step.
    """

    def __init__(
        self,
        name: str,
        tensors: list[torch.Tensor],
        tensor_names: list[str],
        rate: float | Callable[[], float],
        texts: list[str],
        length: int,
        size: int,
        sources: Iterable[torch.Tensor] = (),
    ):
        self.name = name
        self.references = [weakref.ref(x) for x in tensors]
        self.sources = [weakref.ref(p) for p in sources]
        self.rate = rate
        self.length = length
        self.device = tensors[0].device
        self.sample = Sample(tensors, size, 0)
        texts = sorted(texts, key=is_stochastic)
        self.rows = FormatRows(texts)
        self.ruler = Ruler(self.sample, texts, tensor_names, steps=length, parts=4)
        self.x: np.ndarray | None = None  # float32's average, when it was read last
        self.rates: list[float] = []  # of each clear move towards the sources
        self.is_refuted = False  # whether it moved otherwise before it was known for an average
        self.tape = Tape(length)  # the average and what it averages, before each step
        self.recorded: list[float] = []  # the rates

    @property
    def is_average(self) -> bool:
        """Whether it is one by name, or three moves are explained by a share of the way to the
        sources. A share above 0.999 is a copy of them, which is no average."""
        is_explained = len(self.rates) >= 3 and self.rates[-1] < 0.999
        return not self.sources or (is_explained and not self.is_refuted)

    @torch.no_grad()
    def before(self) -> None:
        """Reads the average, and what it averages, before a step. A GPU is not waited for."""
        tensors = alive(self.references)
        sources = alive(self.sources)
        if self.is_refuted or not tensors or len(sources) < len(self.sources):
            return  # it is none, or the script has dropped them
        if sources and not all(is_plain(x, self.device) for x in [*tensors, *sources]):
            return  # the script has moved them, or freed their memory
        rate = self.rate() if callable(self.rate) else self.rate
        read = [self.sample.read(x) for x in (tensors, sources or tensors)]
        self.tape.append(torch.stack(read))
        self.recorded.append(rate)
        if len(self.recorded) == self.length:
            self.replay()

    def replay(self) -> None:
        """Follows the average through what was recorded."""
        if not self.recorded:
            return
        read = self.tape.take().cpu().numpy().copy()
        for (x, source), rate in zip(read, self.recorded, strict=True):
            share = None
            if self.x is not None and self.sources:
                share = share_of_way(self.x, x, source)
            if share is not None and math.isnan(share):
                self.is_refuted = self.is_refuted or not self.is_average
                self.x = None  # other code has changed it: begin again from there
            elif share is not None:
                self.rates.append(min(share, 1.0))
            self.follow(x, self.rates[-1] if self.rates else rate)
        self.recorded = []

    def follow(self, x: np.ndarray, rate: float) -> None:
        """Follows the average to its sample `x`, [T, P], which it has reached with `rate`."""
        before, self.x = self.x, x
        if before is None:
            self.kept = np.repeat(x[None], len(self.ruler.texts), 0)
            self.begin_window()
            self.kept = self.rows.round(self.kept, self.largest)
            self.start = self.kept
            return
        if np.array_equal(x, before):
            return
        old = self.kept
        pull = x - (1 - rate) * before - rate * old
        self.kept = self.rows.round(old + pull, self.largest)
        self.true += pull
        emphasis = self.sample.emphasis
        expected = self.rows.mean_noise(old + pull, self.largest, pull, emphasis)
        step = WindowSums.of(self.kept - old, pull, self.kept == old, emphasis, expected)
        self.steps.append(step.at(slice(self.rows.nearest, None)))
        if len(self.steps) == self.length:
            self.end_window()

    def begin_window(self) -> None:
        """Begins a window, with the averages as they are now."""
        self.start = self.kept
        self.true = np.zeros_like(self.kept)
        self.steps: list[WindowSums] = []  # of each step, those of stochastic rows
        if tensors := alive(self.references):
            self.largest = largest_of(tensors).cpu().numpy()

    def end_window(self) -> None:
        moved = self.kept - self.start
        steps = WindowSums(*map(np.array, zip(*self.steps, strict=True))).mean()
        steps = steps._replace(apart=steps.expected)
        lost = (moved == 0) & (self.true != 0)
        self.ruler.add(moved, self.true, lost, steps=steps)
        self.begin_window()

    def findings(self, tolerates: tuple[float, float], names: dict[str, int]) -> list[Finding]:
        """The findings so far. `names` counts the averages of each name in a report."""
        self.replay()
        count = names.get(str(self), 0) + 1
        names[str(self)] = count
        self.title = str(self) if count == 1 else f"{self} [{count}]"
        return with_cures(judge_all(self.title, self.ruler, tolerates, self.length))

    def __str__(self) -> str:
        if not self.rates:
            return self.name
        first, last = f"{self.rates[0]:.2g}", f"{self.rates[-1]:.2g}"
        return f"{self.name} (tau {first if first == last else f'{first} to {last}'})"


class AverageSearch(Shadow):
    """Looks for modules that are running averages of a trained module, and follows them.

    At the steps 32, 256, 2048, ... of an optimizer, modules are listed that have the class and the
    shapes of a module that it trains, and that no optimizer trains. Those whose moves are explained
    by one share of the way to the trained module, three times in a row, are averages. A copy of the
    weights is none. Averages that are no modules are named to `Doctor.follow`.

    A script may have modules of any kind. Those that are not in float32 on the optimizer's device
    are passed over, and a search that fails all the same ends, with `trouble` saying why.

    `watcher`     the optimizer
    `optimizers`  all optimizers of the process
    `length`      updates in a window
    """

    def __init__(self, watcher: Watcher, optimizers: Iterable, length: int):
        super().__init__(watcher, [], length)
        self.optimizers = optimizers
        self.next = 32  # the step of the next search
        self.known: set[int] = set()  # identities of tensors of modules that may be averages
        self.trouble = ""

    def before(self) -> None:
        if self.watcher.updates + 1 != self.next or self.trouble:
            return
        self.next *= 8
        try:
            self.search()
        except Exception as error:
            self.trouble = (
                f"the search for running averages failed after {self.watcher.updates} steps "
                f"({type(error).__name__}: {first_line(error)})"
            )

    def search(self) -> None:
        """Puts a shadow beside the optimizer for each module that may be an average."""
        trained = {id(p) for optimizer in [*self.optimizers] for p in parameters_of(optimizer)}
        sources: dict[tuple, list[nn.Module]] = {}
        others = []
        for module in modules_alive():
            parameters = [*module.parameters()]
            ids = {id(p) for p in parameters}
            if not all(is_plain(p, self.watcher.device) for p in parameters):
                continue
            kind = type(module), tuple(p.shape for p in parameters)
            if ids & self.watcher.keys:
                sources.setdefault(kind, []).append(module)
            elif ids and not ids & trained:
                others.append((ids, kind, module))
        # The largest modules first, so that a part of an average is not listed by itself
        for ids, kind, module in sorted(others, key=lambda other: -len(other[0])):
            if not ids & self.known:
                for source in sources.get(kind, ()):
                    self.known |= ids
                    average = AverageShadow(
                        f"average of {type(module).__name__}",
                        [*module.parameters()],
                        [name for name, _ in module.named_parameters()],
                        1.0,
                        [f"average={form}" for form in AVERAGES],
                        self.length,
                        self.watcher.sample.numbers_per_tensor * len(self.watcher.references),
                        source.parameters(),
                    )
                    self.watcher.shadows.append(average)


def is_plain(x: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor has its numbers in float32 on a device.

    Modules may have parameters on the device "meta", which have no numbers, in other types and
    layouts, of classes that keep their numbers elsewhere, without a shape before their first call,
    and those whose memory is freed while they are not needed.
    """
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and x.dtype == torch.float32
        and x.device == device
        and x.layout == torch.strided
        and x.untyped_storage().nbytes() >= 4 * x.numel()
    )
