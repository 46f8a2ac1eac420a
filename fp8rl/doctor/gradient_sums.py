"""Sums of gradients over micro-batches, in few bits.

A script that accumulates calls backward several times before a step, and each call adds a gradient
to the sum. In few bits the sum is s' <- round(s' + g), and once it is large, most of a gradient is
lost. The doctor reads each gradient when it is added, and follows s' beside float32's sum s. The
step is then the optimizer's, with s' in place of s.

Adam divides a gradient by its own size. If the whole sum is too small by the same factor, its steps
hardly change. For SGD they change in proportion.

Other code may change the sum: it is set to 0, unscaled, clipped, or replaced by the mean over
several processes. If s has become c s + rest, by least squares, s' becomes c s' + rest.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from ..bits import adam
from ..bits.places import PlaceFormat
from .findings import NOT_JUDGED, Finding
from .format_rows import FormatRows
from .sample import NumberSums, WindowSums
from .verdicts import judge

GRADIENT_SUMS = ("grad=bf16", "grad=bf16:stochastic")  # what `watch` judges if a script accumulates
WAITED = 16  # steps after which it is decided whether a script accumulates
SHORT = 8  # steps in a window of `watch`, which begin at step 16, 32, 64, ...
RECORDED = 32  # so many records are replayed at once


class Contribution(NamedTuple):
    """Gradients that were added to the sums of some tensors, at most one to each.

    All are by the number of the tensor. `before` and `after` are samples [P] of the sums. A sum
    that had not begun is None. `largest` has the largest magnitude of each whole sum, if a format
    has a scale.
    """

    before: dict[int, torch.Tensor | None]
    after: dict[int, torch.Tensor]
    largest: dict[int, torch.Tensor]


class Step(NamedTuple):
    """A step of the optimizer, as WatchedOptimizer has read it.

    `update`    the update: weights, gradient and, of Adam, moments before and after it
    `settings`  settings of each parameter group: GroupSettings of Adam, MomentumSettings of SGD
    """

    update: NamedTuple
    settings: list[tuple]


class MomentumSettings(NamedTuple):
    """The settings of a parameter group of SGD at one step: numbers, or arrays for all tensors."""

    learning_rate: float
    momentum: float
    dampening: float
    nesterov: float  # 1 or 0
    decay: float
    sign: float  # -1 with `maximize`, otherwise 1

    @classmethod
    def of(cls, group: dict) -> "MomentumSettings":
        return cls(
            float(group["lr"]),
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["nesterov"]),
            float(group["weight_decay"]),
            -1.0 if group["maximize"] else 1.0,
        )


class GradientSums:
    """The sums of gradients of a WatchedOptimizer, in several formats.

    `watched`  the optimizer, which is Adam, AdamW or SGD; sums of others are not judged
    `kind`     the class of the optimizer
    `formats`  text and format of each entry that is followed
    `samples`  whether nothing is judged unless the script accumulates, and then only in a few short
               windows. Otherwise every sum is followed, which takes a script that accumulates small
               batches up to half as long again.
    `seed`     seed of stochastic rounding

    Arrays have a row for each of C formats. Those that a step leads to, such as moments, have
    float32's before them, [1 + C, T, P].
    """

    def __init__(
        self,
        watched,
        kind: type,
        formats: list[tuple[str, PlaceFormat]],
        samples: bool = False,
        seed: int = 0,
    ):
        self.watched = watched
        formats = sorted(formats, key=lambda entry: entry[1].stochastic)
        self.names = [text for text, _ in formats]
        self.has_scale = any(form.scaled for _, form in formats)
        self.samples = samples
        self.waits = samples  # for the decision whether the script accumulates
        self.pauses = False  # between two windows
        self.next_window = WAITED
        self.length = SHORT if samples else watched.length
        self.trouble = ""
        if not (watched.is_adam or issubclass(kind, torch.optim.SGD)):
            self.trouble = "sums of gradients are followed of SGD, and of Adam without amsgrad"
        if self.trouble and samples:
            self.names = []
        count = len(watched.sample.sizes)
        shape = (len(self.names), count, watched.sample.numbers_per_tensor)
        self.rows = FormatRows([form for _, form in formats], seed)
        self.sum = np.zeros(shape[1:], np.float32)  # float32's, when it was read last
        self.kept = np.zeros(shape, np.float32)
        self.largest = np.zeros((count, 1), np.float32)
        self.added = np.zeros(count, int)  # gradients in the present sum
        self.has_new = np.zeros(count, bool)  # whether one was added since the last step
        self.records: list[Contribution | Step] = []
        self.before: dict[int, torch.Tensor | None] = {}  # of sums to which a gradient comes next
        self.begun: set[int] = set()  # while waiting, the tensors whose sums are not 0
        self.updates = 0  # steps so far
        self.steps_with_several = 0
        self.steps_recorded = 0  # in this window
        self.handles: list = []
        self.windows: list[WindowSums] = []
        self.numbers = NumberSums()  # of the windows
        self.contributions: list[float] = []  # in each step
        self.shares: list[np.ndarray] = []  # of each step, what is left of the sum, [C]
        self.moved: np.ndarray | None = None

    # Hooks

    def install(self, call: Callable = lambda function, *arguments: function(*arguments)) -> list:
        """Hooks that are called when a gradient is added. `call` calls them, with arguments."""
        if self.trouble:
            return []

        def hooks_of(t: int, p: torch.Tensor) -> Iterable:
            yield p.register_hook(lambda _: call(self.before_adding, t))
            yield p.register_post_accumulate_grad_hook(lambda p: call(self.after_adding, t, p))

        for t, p in enumerate(self.watched.parameters):
            self.handles += hooks_of(t, p)
        return self.handles

    def before_adding(self, t: int) -> None:
        """Reads a sum before a gradient may be added to it. (torch.autograd.grad adds none.)"""
        if self.pauses:
            return
        p = self.watched.references[t]()
        grad = None if p is None else p.grad
        if self.waits:
            if grad is not None and grad.any():
                self.begun.add(t)
        elif grad is None:
            self.before[t] = None
        else:
            self.before[t] = self.watched.sample.read_one(t, grad)

    def after_adding(self, t: int, p: torch.Tensor) -> None:
        """Records the sum after a gradient was added."""
        if self.pauses or p.grad is None:  # another hook of the script may have dropped it
            return
        if self.waits:
            self.added[t] = self.added[t] + 1 if t in self.begun else 1
            self.begun.discard(t)
            return
        last = self.records[-1] if self.records else None
        if not isinstance(last, Contribution) or t in last.after:
            if len(self.records) >= RECORDED:
                self.replay()
            last = Contribution({}, {}, {})
            self.records.append(last)
        last.before[t] = self.before.pop(t, None)
        last.after[t] = self.watched.sample.read_one(t, p.grad)
        if self.has_scale:
            last.largest[t] = torch.linalg.vector_norm(p.grad, torch.inf)

    def begin(self) -> None:
        """Begins with the moments that the optimizer has now.

        A short window begins with moments of 0, because the optimizer's own moments, which are made
        of float32's sums, would outlast it.
        """
        if self.trouble or self.waits or self.pauses:
            return
        self.replay()
        self.steps = float(self.watched.count_steps())
        self.state: np.ndarray | None = None  # Adam's moments after the last step
        rows = (1 + len(self.names), 1, 1)
        names = ("exp_avg", "exp_avg_sq") if self.watched.is_adam else ("momentum_buffer",)
        moments = [self.watched.sample.take(self.watched.moment(name)) for name in names]
        self.moments = [np.tile(x, rows) for x in moments]
        buffers = [state.get(names[0]) for state in self.watched.states()]
        self.has_buffer = np.array([x is not None for x in buffers]).reshape(-1, 1)
        self.moved = None
        if self.samples:
            self.steps = 0
            self.moments = [np.zeros_like(x) for x in self.moments]
            self.has_buffer[:] = False
            self.steps_recorded = 0
            self.sum[:] = 0
            self.kept[:] = 0

    def after_step(self, update) -> None:
        """Records a step of the optimizer (an Update of WatchedOptimizer)."""
        if self.trouble:
            return
        self.updates += 1
        if self.waits:
            self.decide(update.live)
            return
        if self.pauses:
            if self.updates >= self.next_window:
                self.pauses = False
                self.begin()
            return
        settings = self.watched.read_settings()
        if not self.watched.is_adam:
            groups = self.watched.groups[: len(settings)]
            settings = [MomentumSettings.of(group) for group in groups]
        self.records.append(Step(update, settings))
        self.steps_recorded += 1
        if self.samples and self.steps_recorded == self.length:
            self.replay()
            self.next_window *= 2
            self.pauses = True

    def decide(self, live: list[bool]) -> None:
        """Decides, after some steps, whether the script accumulates, and stops waiting."""
        self.steps_with_several += bool((self.added[live] > 1).any())
        self.added[:] = 0
        if self.updates < WAITED:
            return
        self.waits = False
        if 2 * self.steps_with_several < WAITED:
            self.names = []
            self.trouble = "a step has one gradient"
            for handle in self.handles:
                handle.remove()
            return
        self.begin()

    # What was recorded

    def replay(self) -> None:
        """Follows the sums through what was recorded."""
        records, self.records = self.records, []
        with np.errstate(all="ignore"):  # a sum may be infinite, and the step is then left out
            for record in records:
                if isinstance(record, Contribution):
                    self.add(record)
                else:
                    self.step(record)

    def add(self, contribution: Contribution) -> None:
        """Adds a gradient to the sums of some tensors."""
        tensors = list(contribution.after)
        nothing = torch.zeros_like(contribution.after[tensors[0]])
        befores = [nothing if (x := contribution.before[t]) is None else x for t in tensors]
        afters = [contribution.after[t] for t in tensors]
        before, after = (
            torch.stack((*befores, *afters)).float().cpu().numpy().reshape(2, len(tensors), -1)
        )
        if contribution.largest:
            largest = [contribution.largest[t] for t in tensors]
            self.largest[tensors] = torch.stack(largest).float().cpu().numpy().reshape(-1, 1)
        began = ~before.any(1)
        kept = self.carried(tensors, before)
        kept[:, began] = 0
        self.kept[:, tensors] = self.round(kept + (after - before), tensors)
        self.sum[tensors] = after
        self.added[tensors] = np.where(began, 1, self.added[tensors] + 1)
        self.has_new[tensors] = True

    def carried(self, tensors: list[int], now: np.ndarray) -> np.ndarray:
        """The sums in few bits of some tensors, [C, N, P], where float32's have become `now`.

        Other code has scaled float32's sums by a factor and added a rest.
        """
        last = self.sum[tensors]
        kept = self.kept[:, tensors]
        square = (last * last).sum(1, keepdims=True, dtype=np.float64)
        factor = (now * last).sum(1, keepdims=True, dtype=np.float64) / square
        factor = np.where(np.isfinite(factor), factor, 0).astype(np.float32)
        is_same = (now == last).all(1, keepdims=True)
        return np.where(is_same, kept, factor * kept + (now - factor * last))

    def round(self, x: np.ndarray, tensors: list[int]) -> np.ndarray:
        return self.rows.round(x, np.tile(self.largest[tensors], (len(x), 1, 1)))

    def step(self, step: Step) -> None:
        """Takes the optimizer's step with each of the sums."""
        update = step.update
        gradient = update.gradient.cpu().numpy()
        if not self.samples:
            self.take_state(update)
        if not np.isfinite(gradient).all():
            return
        weight = update.weight.cpu().numpy()
        live = np.array(update.live).reshape(-1, 1)
        everything = list(range(len(live)))
        kept = self.carried(everything, gradient)
        unseen = live[:, 0] & ~self.has_new  # such as a gradient that was there before the doctor
        if unseen.any():
            kept[:, unseen] = self.round(np.tile(gradient, (len(kept), 1, 1)), everything)[
                :, unseen
            ]
        self.note_share(gradient, kept, live & self.has_new[:, None])
        self.has_new[:] = False
        gradients = np.concatenate((gradient[None], kept))
        numbers = np.asarray(step.settings, np.float32)[self.watched.group]  # [T, settings]
        columns = numbers.T[..., None]  # [settings, T, 1]
        take = self.step_of_adam if self.watched.is_adam else self.step_of_sgd
        moved = np.where(live, take(columns, gradients, weight, live), 0)
        if self.moved is None:
            self.moved = np.zeros_like(gradients)
            self.steps_in_window = 0
        self.moved += moved
        self.steps_in_window += 1
        if self.steps_in_window == self.length:
            lost = (kept == 0) & (gradient != 0)
            moved, true = self.moved[1:], self.moved[0]
            emphasis = self.watched.sample.emphasis
            self.windows.append(WindowSums.of(moved, true, lost, emphasis))
            self.numbers.add(moved, true)
            self.moved = None

    def take_state(self, update) -> None:
        """Gives all rows the moments of the optimizer where other code has changed these."""
        before, after = (x[len(update.live) :].cpu().numpy() for x in (update.before, update.after))
        last = before if self.state is None else self.state
        self.state = after[len(update.live) :]
        changed = np.split(before != last, len(self.moments)) if self.watched.is_adam else []
        for i, is_changed in enumerate(changed):
            now = np.split(before, len(self.moments))[i]
            self.moments[i] = np.where(is_changed, now, self.moments[i])
        if any(is_changed.any() for is_changed in changed):
            self.steps = float(update.steps)

    def step_of_adam(self, columns, gradients, weight, live) -> np.ndarray:
        """Adam's steps, without their sign, [1 + C, T, P]."""
        lr, beta1, beta2, eps, decay, sign = columns
        g = adam.with_coupled_decay(sign * gradients, weight, decay)
        m, v = self.moments
        m = np.where(live, adam.first_moment(m, g, beta1), m)
        v = np.where(live, adam.second_moment(v, g, beta2), v)
        self.moments = [m, v]
        self.steps += 1
        corrections = adam.bias_corrections(np.float32(self.steps), beta1, beta2)
        return adam.step(m, np.sqrt(v), lr, *corrections, eps)

    def step_of_sgd(self, columns, gradients, weight, live) -> np.ndarray:
        """The steps of SGD with momentum, without their sign, [1 + C, T, P]."""
        lr, momentum, dampening, nesterov, decay, sign = columns
        g = sign * gradients + decay * weight
        (buffer,) = self.moments
        updated = momentum * buffer + (1 - dampening) * g
        updated = np.where(self.has_buffer, updated, g)  # as torch begins
        self.moments = [np.where(live, updated, buffer)]
        self.has_buffer |= live
        look_ahead = g + momentum * updated
        with_momentum = np.where(nesterov > 0, look_ahead, updated)
        return lr * np.where(momentum > 0, with_momentum, g)

    def note_share(self, gradient: np.ndarray, kept: np.ndarray, seen: np.ndarray) -> None:
        """Notes which share of the sum is left, and how many gradients it has."""
        if not seen.any():
            return
        sizes = np.array(self.watched.sample.sizes).reshape(-1, 1) * seen
        sizes = sizes * self.watched.sample.emphasis
        square = (sizes * gradient * gradient).sum(dtype=np.float64)
        self.shares.append((sizes * kept * gradient).sum((1, 2), dtype=np.float64) / square)
        self.contributions.append(float(np.median(self.added[seen[:, 0]])))

    # The report

    def findings(self, tolerates: tuple[float, float]) -> dict[str, Finding]:
        """The findings so far, by place and format."""
        watched = self.watched
        if self.trouble:
            return {
                text: Finding.without_rates(watched.name, text, NOT_JUDGED, self.trouble)
                for text in self.names
            }
        self.replay()
        findings = {}
        for i, text in enumerate([] if self.waits else self.names):
            finding = judge(
                watched.name,
                text,
                [sums.of_row(i) for sums in self.windows],
                watched.sample,
                watched.tensor_names,
                tolerates,
                self.length,
                looked=True,
                numbers=self.numbers.of_row(i),
            )
            if finding.verdict != NOT_JUDGED and self.shares:
                count = float(np.median(self.contributions))
                left = float(np.nanmean([shares[i] for shares in self.shares]))
                finding = finding._replace(
                    contributions=count,
                    share_left=left,
                    why=f"{finding.why}; {sum_in_words(count, left)}",
                )
            findings[text] = finding
        return findings


def sum_in_words(contributions: float, share_left: float) -> str:
    if contributions <= 1:
        return "a step has one gradient, which is rounded once"
    return f"a step adds up {contributions:,.0f} gradients, and {share_left:.2f} of the sum is left"
