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

import collections
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..bits import adam
from ..bits.notation import STATE, split_entry
from ..bits.places import SLACK, PlaceFormat
from .findings import Finding, judge, with_cures
from .output import first_line
from .ruler import Ruler, Sample, WindowSums
from .watcher import GroupSettings, Update, Watcher, alive, largest_of

LENGTH = 32  # updates in a window
WEIGHTS, M, V, ROOT = range(4)  # indices into STATE
MOVES = 3  # how many moves must be explained until a module is known for an average
COPY = 0.999  # a larger share is a copy of the weights
AVERAGES = ("bf16", "bf16:stochastic", "fp16:unscaled", "e4m3", "e4m3:stochastic")

# The bits of a float32: a sign, 8 of exponent, 23 of mantissa.
MAGNITUDE_BITS = 0x7FFFFFFF
EXPONENT_BITS = 0x7F800000
ONE_DOUBLING = 1 << 23
EXPONENT_BIAS = 127


class MomentBounds(NamedTuple):
    """Bounds on how one of Adam's moments is rounded, in view of the other (`Places.moments`).

    `least`  [C, T, P]: a magnitude below `least` is not rounded down; NaN where there is no bound
    `most`   [C, T, P]: a magnitude is not rounded up beyond `most`; infinite where there is no
             bound
    """

    least: np.ndarray
    most: np.ndarray


class FormatRows:
    """Rounds samples [C, T, P] to C formats: each row [T, P] to its own format.

    A row has P numbers of each of T tensors.

    `forms`  formats of the rows, without blocks; stochastic formats come last
    `seed`   seed of stochastic rounding

    Nothing is divided by scales. A scale is a power of two, so it only moves where a format's
    normal numbers begin. Raises ValueError for a format in blocks.
    """

    def __init__(self, forms: list[PlaceFormat], seed: int):
        for form in forms:
            if form.block:
                word = "mx" if form.mx else "block"
                remedy = "leave it out, the doctor follows a sample of each tensor"
                raise ValueError(f"formats has {word}: {remedy}")
        self.nearest = sum(not form.stochastic for form in forms)  # rows that are not stochastic
        self.random = np.random.default_rng(seed)
        # The distance of neighbouring numbers, as a share of the power of two below them.
        self.spacing = column([2.0**-form.format.mantissa for form in forms])
        # The largest number. With a scale there is no limit, because the scale makes all fit.
        self.limit = column([np.inf if form.scaled else form.format.largest for form in forms])
        # The following are bits of float32.
        self.largest = column([form.format.largest for form in forms]).view(np.int32)
        self.scale_mask = column([-ONE_DOUBLING * form.scaled for form in forms], np.int32)
        smallest_normal = [
            (form.format.normal + EXPONENT_BIAS + form.scaled) * ONE_DOUBLING for form in forms
        ]
        self.smallest_normal = column(smallest_normal, np.int32)

    def round(
        self,
        x: np.ndarray,
        largest: np.ndarray,
        out: np.ndarray | None = None,
        bounds: MomentBounds | None = None,
    ) -> np.ndarray:
        """Rounds the rows `x`, float32 [C, T, P], into `out` or a new array.

        `largest` [C, T, 1] is the largest magnitude of each whole tensor, of which `x` has a
        sample. It decides the scale.
        """
        step = self.steps(x, largest)
        out = np.divide(x, step, out=out)
        to_nearest = out[: self.nearest]
        np.rint(to_nearest, out=to_nearest)
        stochastic = out[self.nearest :]
        if len(stochastic):
            down = np.floor(stochastic)
            stochastic -= down
            up = self.random.random(down.shape, np.float32) < stochastic
            np.add(down, up, out=stochastic)
        if bounds is not None:
            hold_to_bounds(x, out, step, bounds)
        out *= step
        np.minimum(out, self.limit, out=out)
        return np.maximum(out, -self.limit, out=out)

    def steps(self, x: np.ndarray, largest: np.ndarray) -> np.ndarray:
        """The distance of the format's numbers around each number of `x`, float32 [C, T, P]."""
        bits = x.view(np.int32) & MAGNITUDE_BITS
        top = np.maximum(bits.max(-1, keepdims=True), largest.view(np.int32))
        # The scale is the smallest power of two that brings `top` to at most the largest number. It
        # multiplies the smallest normal number, which in bits is an addition.
        scale = top - self.largest - 1 & self.scale_mask
        smallest_normal = np.maximum(scale + self.smallest_normal, ONE_DOUBLING)
        bits &= EXPONENT_BITS  # the power of two below x
        np.maximum(bits, smallest_normal, out=bits)
        step = bits.view(np.float32)
        step *= self.spacing
        return step


def column(values: list, dtype=np.float32) -> np.ndarray:
    """A value for each of C rows, [C, 1, 1]."""
    return np.array(values, dtype).reshape(-1, 1, 1)


def hold_to_bounds(x: np.ndarray, out: np.ndarray, step: np.ndarray, bounds: MomentBounds) -> None:
    """Changes `out` where bounds ask for it. `out` has numbers `x`, rounded in units of `step`.

    A number that is below `least`, or has become 0, is rounded up. A number beyond `most` is
    rounded towards 0. All arrays are [C, T, P].
    """
    magnitude = np.abs(x)
    kept = np.abs(out) * step
    bounded = ~np.isnan(bounds.least)
    became_zero = (out == 0) & (x != 0) & bounded
    too_small = (kept < magnitude) & ((magnitude < bounds.least) | became_zero)
    too_large = kept > np.maximum(magnitude, bounds.most)
    if too_small.any():
        out[too_small] = np.ceil(x[too_small] / step[too_small])
    if too_large.any():
        out[too_large] = np.trunc(x[too_large] / step[too_large])


class Replayed(NamedTuple):
    """An update of the window that has been replayed."""

    moved: np.ndarray  # [T, P], how far float32's weights moved
    live: np.ndarray  # bool [T, 1], whether a tensor has a gradient
    count: float  # Adam's count of steps, with this one
    settings: list[GroupSettings]


class RowShadow:
    """An optimizer whose weights or moments are in few bits: a row of numbers for each format.

    `watcher`  the optimizer; if it is not Adam, only rows of weights are followed
    `texts`    places and formats, as in "weights=bf16"
    `length`   updates in a window
    `seed`     seed of stochastic rounding

    `kept`, float32 [length + 1, C, T, P], has a row for each of C formats. A row has P weights,
    moments or roots of each of T tensors, as they are kept at the beginning of a window and after
    each update in it. The first two rows are float32's m and v, which are not measured. `kind` [C]
    says which place a row keeps, by its index in STATE.

    Raises ValueError for a format in blocks.
    """

    def __init__(self, watcher: Watcher, texts: list[str], length: int, seed: int):
        self.watcher = watcher
        self.length = length
        entries = [(*split_entry(text), text) for text in texts]
        entries = [entry for entry in entries if watcher.is_adam or entry[0] == "weights"]
        forms = {text: PlaceFormat.of(form) for _, form, text in entries}
        entries.sort(key=lambda entry: (forms[entry[2]].stochastic, STATE.index(entry[0])))
        texts = [text for *_, text in entries]
        places = ["m", "v", *(place for place, *_ in entries)]
        forms = [PlaceFormat.of("fp32")] * 2 + [forms[text] for text in texts]
        self.kind = np.array([STATE.index(place) for place in places])
        self.keeps_weights = (self.kind == WEIGHTS).reshape(-1, 1, 1)
        self.rows_of_kind = [np.flatnonzero(self.kind == kind) for kind in range(len(STATE))]
        self.bounded = np.array([not form.independent for form in forms])
        self.rows = FormatRows(forms, seed)
        is_stochastic = np.array([[form.stochastic] for form in forms])
        self.is_stochastic_weight = self.keeps_weights[:, 0] & is_stochastic  # [C, 1]
        self.ruler = Ruler(watcher.sample, texts, watcher.tensor_names)
        self.kept: np.ndarray | None = None

    def before(self) -> None:
        """Begins the first window, with the moments that the optimizer has now."""
        if self.kept is not None:
            return
        watcher = self.watcher
        sample = watcher.sample
        weights = sample.take(watcher.parameters)
        m = sample.take(watcher.state("exp_avg"))
        v = sample.take(watcher.state("exp_avg_sq"))
        self.steps = float(watcher.count_steps().nan_to_num())
        self.kept = np.empty((self.length + 1, len(self.kind), *m.shape), np.float32)
        # Rows without a bound stay as they are here
        shape = self.kept.shape[1:]
        least = np.full(shape, np.nan, np.float32)
        most = np.full(shape, np.inf, np.float32)
        self.bounds = MomentBounds(least, most)
        # float32's weights and moments after the last update that was replayed, [K T, P]
        self.last = np.concatenate((weights, m, v) if watcher.is_adam else (weights,))
        self.begin_window(np.stack((weights, m, v, np.sqrt(v)))[self.kind])
        self.rows.round(self.kept[0], self.largest, out=self.kept[0])

    def begin_window(self, rows: np.ndarray) -> None:
        """Begins a window, in which `rows` go on."""
        watcher = self.watcher
        tensors = watcher.parameters, watcher.state("exp_avg"), watcher.state("exp_avg_sq")
        weights, m, v = torch.stack([largest_of(x) for x in tensors]).cpu().numpy()
        self.largest = np.stack((weights, m, v, np.sqrt(v)))[self.kind]
        self.kept[0] = rows
        self.displaced = np.zeros_like(self.kept[0])
        self.window: list[Replayed] = []
        self.recorded: list[Update] = []  # updates since the last replay

    def after(self, update: Update) -> None:
        """Records an update, and ends the window when it is full."""
        self.recorded.append(update)
        if len(self.window) + len(self.recorded) == self.length:
            self.replay()
        if len(self.window) == self.length:
            self.end_window()
            if self.watcher.parameters:  # a script that has dropped them steps no more
                self.begin_window(self.kept[-1])

    def replay(self) -> None:
        """Applies the updates that were recorded since the last replay to every row."""
        updates, self.recorded = self.recorded, []
        before = torch.stack([update.before for update in updates]).cpu().numpy()
        after = torch.stack([update.after for update in updates]).cpu().numpy()
        steps = torch.stack([update.steps for update in updates]).cpu().numpy()
        tensors = len(self.watcher.references)
        weight = before[:, :tensors]
        g = after[:, tensors : 2 * tensors]
        after = np.delete(after, slice(tensors, 2 * tensors), axis=1)  # as `before`
        last = np.concatenate((self.last[None], after[:-1]))
        self.last = after[-1]
        finite = np.isfinite(g).all((1, 2))
        settings = self.watcher.by_tensor([update.settings for update in updates])
        beta1, beta2 = settings.beta1, settings.beta2
        live = np.array([update.live for update in updates])[..., None]
        moved = after[:, :tensors] - weight
        # How far other code has moved the weights since the update before
        between = weight - last[:, :tensors]
        g = adam.with_coupled_decay(settings.sign * g, weight, settings.decay_of_gradient)
        for i in np.flatnonzero(finite):
            if between[i].any():
                self.displace(between[i])
            old = self.kept[len(self.window)]
            if (changed := before[i, tensors:] != last[i, tensors:]).any():
                old = self.with_moments(old, before[i, tensors:], changed)
            if self.watcher.is_adam and not np.isnan(steps[i]):
                self.steps = float(steps[i])
            new = self.kept[len(self.window) + 1]
            rows = self.updated(old, moved[i], g[i], beta1[i], beta2[i])
            self.rows.round(rows, self.largest, new, self.moment_bounds(rows, beta1[i], beta2[i]))
            if not live[i].all():  # an optimizer leaves tensors without gradient alone
                np.copyto(new, old, where=~live[i])
            self.steps += 1
            self.window.append(Replayed(moved[i], live[i], self.steps, updates[i].settings))

    def updated(self, rows: np.ndarray, moved: np.ndarray, g: np.ndarray, beta1, beta2):
        """The rows [C, T, P] after an update, not rounded yet.

        `moved` is how far the update moves float32's weights, and `g` its gradient, both [T, P].
        """
        of_weights, of_m, of_v, of_root = self.rows_of_kind
        after = np.empty_like(rows)
        after[of_weights] = rows[of_weights] + moved
        after[of_m] = adam.first_moment(rows[of_m], g, beta1)
        after[of_v] = adam.second_moment(rows[of_v], g, beta2)
        after[of_root] = np.sqrt(adam.second_moment(np.square(rows[of_root]), g, beta2))
        return after

    def displace(self, by: np.ndarray) -> None:
        """Moves the rows of weights as other code has moved float32's weights between two updates.

        That does not count as a movement of the window, because it is no step of the optimizer.
        """
        now = self.kept[len(self.window)]
        moved = np.where(self.keeps_weights, self.rows.round(now + by, self.largest), now)
        if self.window:
            self.displaced += moved - now
        now[:] = moved

    def with_moments(self, rows: np.ndarray, moments: np.ndarray, changed: np.ndarray):
        """The rows [C, T, P], with those of moments as other code has left them.

        `moments` [2 T, P] are float32's m and v, and `changed` says where other code has changed
        them: has loaded, zeroed or dropped them. In few bits it would have rounded the same
        numbers.
        """
        m, v = np.split(moments, 2)
        changed_m, changed_v = np.split(changed, 2)
        exact = np.stack((m, m, v, np.sqrt(v)))[self.kind]
        is_changed = np.stack((np.zeros_like(changed_m), changed_m, changed_v, changed_v))
        rounded = self.rows.round(exact, self.largest)
        return np.where(is_changed[self.kind], rounded, rows)

    def moment_bounds(self, rows: np.ndarray, beta1, beta2) -> MomentBounds:
        """Bounds for rounding moments in view of float32's moments.

        These are the first two of the rows [C, T, P].
        """
        corrections = adam.bias_corrections(self.steps + 1, beta1, beta2)
        limit = SLACK * adam.full_step_quotient(*corrections)  # as in Places.moments
        m = np.abs(rows[0])
        root = np.sqrt(rows[1])
        self.bounds.least[self.bounded & (self.kind == V)] = (m / limit) ** 2
        self.bounds.least[self.bounded & (self.kind == ROOT)] = m / limit
        self.bounds.most[self.bounded & (self.kind == M)] = limit * root
        return self.bounds

    def end_window(self) -> None:
        """Ends a window, and measures it."""
        moved = self.moved()
        update = sum(replayed.moved for replayed in self.window)
        m, v = self.kept[-1, :2]
        true = np.where(self.keeps_weights, update, moved[1])
        kept = np.where(self.keeps_weights, moved, self.kept[-1])
        exact = np.stack((update, m, v, v))[self.kind]
        lost = (kept == 0) & (exact != 0)
        # Weights that are rounded stochastically have at least this noise on average, although
        # few numbers may show it: a step d of numbers that lie s apart is s with probability d / s.
        spacing = self.rows.steps(self.kept[-1], self.largest)
        expected = spacing * np.abs(true) * self.watcher.sample.emphasis
        expected = expected.mean(2, dtype=np.float64) * self.is_stochastic_weight
        self.ruler.add(moved[2:], true[2:], lost[2:], expected[2:])

    def moved(self) -> np.ndarray:
        """How far the weights have moved in the window with each row, float32 [C, T, P].

        With a row of moments, these are Adam's steps with the rounded moments, without their sign.
        """
        live = np.array([replayed.live for replayed in self.window])
        settings = self.watcher.by_tensor([replayed.settings for replayed in self.window])
        steps = np.array([replayed.count for replayed in self.window], np.float32)
        steps = steps.reshape(-1, 1, 1)
        learning_rate = live * settings.learning_rate
        corrections = adam.bias_corrections(steps, settings.beta1, settings.beta2)
        kept = self.kept[1 : len(live) + 1]
        exact_m = kept[:, 0]
        exact_root = np.sqrt(kept[:, 1])
        moved = kept[-1] - self.kept[0] - self.displaced
        for row in np.flatnonzero(self.kind != WEIGHTS):
            kind = self.kind[row]
            m = kept[:, row] if kind == M else exact_m
            root = exact_root
            if kind in (V, ROOT):
                root = np.sqrt(kept[:, row]) if kind == V else kept[:, row]
            moved[row] = adam.step(m, root, learning_rate, *corrections, settings.eps).sum(0)
        return moved

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        return [
            judge(self.watcher.name, text, reading, tolerates, self.loses(split_entry(text)[0]))
            for text, reading in self.ruler.readings().items()
        ]

    def loses(self, place: str) -> str:
        """How a share of the numbers of a place is lost, in words."""
        if place == "weights":
            return f"{{share}} of the numbers stay the same over {self.length} updates"
        numbers = "roots of v" if place == "root" else place
        consequence = "" if place == "m" else ", and Adam then divides by eps alone"
        return f"{{share}} of the {numbers} are kept as 0{consequence}"


class Moves(NamedTuple):
    """How well moves of N samples are explained by a share of the way to others, [N] each.

    `share`     the share that explains most of a move, by least squares
    `length`    norm of the move
    `residual`  norm of what the share does not explain
    `rounding`  norm of what rounding may do
    """

    share: np.ndarray
    length: np.ndarray
    residual: np.ndarray
    rounding: np.ndarray

    @classmethod
    def of(cls, old: np.ndarray, new: np.ndarray, source: np.ndarray) -> "Moves":
        """The moves from `old` to `new`, towards `source`: [N, P] each."""
        old, new, source = (np.asarray(x, np.float64) for x in (old, new, source))
        move = new - old
        way = source - old
        distance = np.maximum(np.linalg.norm(way, axis=-1), 1e-150)
        share = (move * way).sum(-1) / distance**2
        residual = np.linalg.norm(move - share[..., None] * way, axis=-1)
        # The plain ways to write the update differ by a fifth of this: they round up to three times
        rounding = 2.0**-23 * np.linalg.norm(np.abs(old) + np.abs(source), axis=-1)
        return cls(share, np.linalg.norm(move, axis=-1), residual, rounding)

    @property
    def is_explained(self) -> np.ndarray:
        return self.residual <= self.rounding

    @property
    def is_clear(self) -> np.ndarray:
        """Whether a move is long enough to tell an average from something else."""
        return self.length > 8 * self.rounding


class AverageShadow:
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
        forms = {text: PlaceFormat.of(split_entry(text)[1]) for text in texts}
        texts = sorted(texts, key=lambda text: forms[text].stochastic)
        self.rows = FormatRows([forms[text] for text in texts], 0)
        self.stochastic_rows = FormatRows([forms[t] for t in texts if forms[t].stochastic], 0)
        self.ruler = Ruler(self.sample, texts, tensor_names, steps=length, parts=4)
        self.x: np.ndarray | None = None  # float32's average, when it was read last
        self.rates: list[float] = []  # of each clear move towards the sources
        self.is_refuted = False  # whether it moved otherwise before it was known for an average
        self.recorded: list[tuple] = []

    @property
    def is_average(self) -> bool:
        """Whether enough moves are explained by a share of the way to the sources. A copy of them
        is no average."""
        return len(self.rates) >= MOVES and self.rates[-1] < COPY

    @torch.no_grad()
    def before(self) -> None:
        """Reads the average, and what it averages, before a step. A GPU is not waited for."""
        tensors = alive(self.references)
        sources = alive(self.sources)
        if not tensors or len(sources) < len(self.sources):
            return  # the script has dropped them
        if not all(is_plain(x, self.device) for x in [*tensors, *sources]):
            return  # the script has moved them, or freed their memory
        rate = self.rate() if callable(self.rate) else self.rate
        source = self.sample.read(sources) if sources else None
        self.recorded.append((self.sample.read(tensors), source, rate))
        if len(self.recorded) == self.length:
            self.replay()

    def after(self, update: Update) -> None:
        pass

    def replay(self) -> None:
        """Follows the average through what was recorded."""
        for x, source, rate in self.recorded:
            x = x.cpu().numpy()
            if self.x is not None and source is not None:
                flat = (part.reshape(1, -1) for part in (self.x, x, source.cpu().numpy()))
                moves = Moves.of(*flat)
                if moves.is_clear and moves.is_explained:
                    self.rates.append(min(float(moves.share[0]), 1.0))
                elif moves.is_clear:
                    self.is_refuted = self.is_refuted or not self.is_average
                    self.x = None  # other code has changed it: begin again from there
                rate = self.rates[-1] if self.rates else rate
            self.follow(x, rate)
        self.recorded = []

    def follow(self, x: np.ndarray, rate: float) -> None:
        """Follows the average to its sample `x`, [T, P], which it has reached with `rate`."""
        before, self.x = self.x, x
        if before is None:
            self.begin_window(np.repeat(x[None], len(self.ruler.texts), 0))
            self.kept = self.rows.round(self.kept, self.largest)
            self.start = self.kept
            return
        if np.array_equal(x, before):
            return
        pull = x - (1 - rate) * before - rate * self.kept
        kept = self.rows.round(self.kept + pull, self.largest)
        self.true += pull
        stochastic = slice(self.rows.nearest, None)
        old, new, pull = (part[stochastic] for part in (self.kept, kept, pull))
        # The noise that stochastic rounding has on average, although few numbers may show it
        spacing = self.stochastic_rows.steps(old + pull, self.largest)
        expected = (spacing * np.abs(pull) * self.sample.emphasis).mean(2, dtype=np.float64)
        step = WindowSums.of(new - old, pull, new == old, self.sample.emphasis, expected)
        self.steps.append(step._replace(apart=step.expected))
        self.kept = kept
        if len(self.steps) == self.length:
            self.end_window()

    def begin_window(self, kept: np.ndarray) -> None:
        """Begins a window, with the averages `kept` as they are now."""
        self.kept = kept
        self.start = kept
        self.true = np.zeros_like(kept)
        self.steps: list[WindowSums] = []
        if tensors := alive(self.references):
            self.largest = largest_of(tensors).cpu().numpy()

    def end_window(self) -> None:
        moved = self.kept - self.start
        lost = (moved == 0) & (self.true != 0)
        # Steps in place of windows for the stochastic rows
        steps = WindowSums(*map(np.array, zip(*self.steps, strict=True))).mean()
        self.ruler.add(moved, self.true, lost, steps=steps)
        self.begin_window(self.kept)

    def findings(self, tolerates: tuple[float, float], names: collections.Counter) -> list[Finding]:
        """The findings so far. `names` counts the averages of each name in a report."""
        self.replay()
        names[str(self)] += 1
        count = names[str(self)]
        self.title = str(self) if count == 1 else f"{self} [{count}]"
        loses = f"{{share}} of the numbers stay the same over {self.length} updates"
        readings = self.ruler.readings().items()
        return with_cures(
            [judge(self.title, text, reading, tolerates, loses) for text, reading in readings]
        )

    def __str__(self) -> str:
        if not self.rates:
            return self.name
        first, last = f"{self.rates[0]:.2g}", f"{self.rates[-1]:.2g}"
        return f"{self.name} (tau {first if first == last else f'{first} to {last}'})"


class AverageSearch:
    """Looks for modules that are running averages of a trained module, and follows them.

    At the steps 32, 256, 2048, ... of an optimizer, modules are listed that have the class and the
    shapes of a module that it trains, and that no optimizer trains. Those whose moves are explained
    by one share of the way to the trained module, three times in a row, are averages. A copy of the
    weights is none. Averages that are no modules are named to `Doctor.follow`.

    A script may have modules of any kind. Those that are not in float32 on the optimizer's device
    are passed over, and a search that fails all the same ends, with `trouble` saying why.

    `watcher`  the optimizer
    `trained`  returns the identities of all parameters that optimizers train
    `length`   updates in a window
    """

    FIRST = 32
    APART = 8  # each search comes at so many times the steps of the one before

    def __init__(self, watcher: Watcher, trained: Callable[[], set[int]], length: int):
        self.watcher = watcher
        self.trained = trained
        self.length = length
        self.steps = 0
        self.next = self.FIRST
        self.candidates: list[AverageShadow] = []
        self.known: set[int] = set()  # identities of tensors that are candidates
        self.trouble = ""

    @property
    def found(self) -> list[AverageShadow]:
        return [candidate for candidate in self.candidates if candidate.is_average]

    def before(self) -> None:
        if self.trouble:
            return
        self.steps += 1
        try:
            self.look()
        except Exception as error:
            self.candidates = []
            self.trouble = (
                f"the search for running averages failed after {self.steps - 1} steps "
                f"({type(error).__name__}: {first_line(error)})"
            )

    def look(self) -> None:
        """Searches when it is time for it, and reads the candidates."""
        if self.steps == self.next:
            self.next *= self.APART
            self.search()
        for candidate in self.candidates:
            candidate.before()
        self.candidates = [x for x in self.candidates if not x.is_refuted]

    def after(self, update: Update) -> None:
        pass

    def search(self) -> None:
        """Lists modules that may be averages of modules that are trained."""
        trained = self.trained()
        sources: dict[tuple, list[nn.Module]] = {}
        others = []
        for module in (x for x in gc.get_objects() if issubclass(type(x), nn.Module)):
            ids = {id(p) for p in module.parameters()}
            if not all(is_plain(p, self.watcher.device) for p in module.parameters()):
                continue
            if ids & self.watcher.keys:
                sources.setdefault(kind_of(module), []).append(module)
            elif ids and not ids & trained:
                others.append((ids, module))
        # The largest modules first, so that a part of an average is not listed by itself
        for ids, module in sorted(others, key=lambda pair: -len(pair[0])):
            if not ids & self.known:
                for source in sources.get(kind_of(module), ()):
                    self.known |= ids
                    self.candidates.append(self.candidate(module, source))

    def candidate(self, module: nn.Module, source: nn.Module) -> AverageShadow:
        return AverageShadow(
            f"average of {type(module).__name__}",
            [*module.parameters()],
            [name for name, _ in module.named_parameters()],
            1.0,
            [f"average={form}" for form in AVERAGES],
            self.length,
            self.watcher.sample.numbers_per_tensor * len(self.watcher.references),
            source.parameters(),
        )


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


def kind_of(module: nn.Module) -> tuple:
    """The class of a module, with the shapes of its parameters."""
    return type(module), tuple(p.shape for p in module.parameters())
