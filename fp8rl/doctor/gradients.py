"""Shadows with other gradients: the same step, from gradients in few bits.

    forward    inputs and weights of matmuls and convolutions are rounded
    backward   the gradients of their results are rounded
    grad       the sum of gradients over micro-batches: s' <- round(s' + g)

The effect of the first two can only the loss show (`LookShadow`). In windows of 8 updates, the
gradient of the loss is computed once more for each format, at float32's weights, and Adam takes its
first 8 steps with each of these gradients.

A script that accumulates calls backward several times before a step, and each call adds a gradient
to the sum (`SumShadow`). Once the sum is large, most of a gradient is lost in few bits. Each
gradient is read when it is added, and s' is followed beside float32's sum s. Adam divides a
gradient by its own size: if the whole sum is too small by the same factor, its steps hardly change.
For SGD they change in proportion. Other code may change the sum: it is set to 0, unscaled, clipped,
or replaced by the mean over several processes. If s has become c s + rest, by least squares, s'
becomes c s' + rest.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import torch

from ..bits import adam
from ..bits.notation import split_entry
from ..bits.operands import Operands
from ..bits.places import PlaceFormat
from .findings import NOT_JUDGED, Finding
from .rows import FormatRows
from .ruler import WindowSums, is_stochastic
from .watcher import GroupSettings, Shadow, Update, Watcher, dense, largest_of


class GradientShadow(Shadow):
    """The steps of an optimizer with other gradients: of Adam without amsgrad, or of SGD.

    Arrays [1 + C, T, P] have the training's own gradients in their first row, and those of C other
    gradients after it.

    `watcher`  the optimizer
    `texts`    what the other gradients are, as in "forward=e4m3"
    `length`   updates in a window
    """

    def __init__(self, watcher: Watcher, texts: list[str], length: int):
        super().__init__(watcher, texts, length)
        self.count = 0  # updates in this window so far
        # m and v of Adam, or the momentum of SGD: [T, P] at first, and then [1 + C, T, P]
        self.moments: list[np.ndarray] | None = None

    def take_step(self, update: Update, gradients: np.ndarray, live: np.ndarray) -> None:
        """Takes the step of an update with each of the gradients [1 + C, T, P], and ends the window
        if it is full. `live` says whether a tensor has a gradient, bool [T, 1]."""
        weight = update.weight.cpu().numpy()
        settings = GroupSettings(*(x[0] for x in self.watcher.by_tensor([update.settings])))
        step = self.step_of_adam if self.watcher.is_adam else self.step_of_sgd
        moved = np.where(live, step(settings, gradients, weight, live), 0)
        self.moved = moved if self.count == 0 else self.moved + moved
        self.count += 1
        if self.count == self.length:
            lost = (gradients[1:] == 0) & (gradients[0] != 0)
            self.ruler.add(self.moved[1:], self.moved[0], lost)
            self.count = 0

    def step_of_adam(self, settings: GroupSettings, gradients, weight, live) -> np.ndarray:
        """Adam's steps, without their sign, [1 + C, T, P]."""
        g = adam.with_coupled_decay(settings.sign * gradients, weight, settings.decay_of_gradient)
        m, v = self.moments
        m = np.where(live, adam.first_moment(m, g, settings.beta1), m)
        v = np.where(live, adam.second_moment(v, g, settings.beta2), v)
        self.moments = [m, v]
        self.steps += 1
        count = np.float32(self.steps)
        corrections = adam.bias_corrections(count, settings.beta1, settings.beta2)
        return adam.step(m, np.sqrt(v), settings.learning_rate, *corrections, settings.eps)

    def step_of_sgd(self, settings: GroupSettings, gradients, weight, live) -> np.ndarray:
        """The steps of SGD with momentum, without their sign, [1 + C, T, P]."""
        g = settings.sign * gradients + settings.decay_of_gradient * weight
        (buffer,) = self.moments
        updated = settings.momentum * buffer + (1 - settings.dampening) * g
        updated = np.where(self.has_buffer, updated, g)  # as torch begins
        self.moments = [np.where(live, updated, buffer)]
        self.has_buffer |= live
        look_ahead = g + settings.momentum * updated
        with_momentum = np.where(settings.nesterov > 0, look_ahead, updated)
        return settings.learning_rate * np.where(settings.momentum > 0, with_momentum, g)


class LookShadow(GradientShadow):
    """An Adam whose gradients are computed in few bits, in windows of 8 updates.

    The moments begin at 0 in each window, because Adam's own moments would carry on the training's
    direction.
    """

    def __init__(self, watcher: Watcher, texts: list[str]):
        super().__init__(watcher, texts if watcher.is_adam else [], length=8)
        entries = [split_entry(text) for text in self.ruler.texts]
        self.modes = [Operands(**{place: PlaceFormat.of(form)}) for place, form in entries]
        self.next = 32  # the update at which the next window begins: 32, 64, 128, ...
        self.looked: list[tuple[np.ndarray, float]] | None = None
        self.is_used = False  # whether the loop has called `look`

    def look(self, loss: Callable[[], torch.Tensor]) -> None:
        """Computes the gradients of the training's loss at the present weights."""
        self.is_used = True
        if self.modes and self.watcher.updates >= self.next:
            losses = [loss, *(functools.partial(mode.within, loss) for mode in self.modes)]
            self.looked = [self.gradient(loss) for loss in losses]

    def gradient(self, loss: Callable[[], torch.Tensor]) -> tuple[np.ndarray, float]:
        """The sample of a loss's gradient, and the norm of the whole gradient."""
        parameters = self.watcher.parameters
        learning = [p for p in parameters if p.requires_grad]
        # Losses that are computed one after the other draw the same random numbers
        devices = [self.watcher.device] if self.watcher.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            gradients = torch.autograd.grad(loss(), learning, allow_unused=True)
        by_parameter = {id(p): g for p, g in zip(learning, gradients, strict=True)}
        whole = dense(parameters, [by_parameter.get(id(p)) for p in parameters])
        norm = float(torch.stack([g.norm() for g in whole]).norm())
        return self.watcher.sample.read(whole).cpu().numpy(), norm

    def after(self, update: Update) -> None:
        """Takes Adam's steps for an update before which `look` has computed gradients.

        Raises ValueError if the gradient of the loss is not the training's, up to a factor.
        """
        looked, self.looked = self.looked, None
        g = update.gradient.cpu().numpy() if looked is not None else None
        # A window needs gradients before each of its updates. Otherwise it is given up.
        if g is None or not np.isfinite(g).all():
            self.count = 0
            return
        if self.count == 0:
            nothing = np.zeros_like(g)
            self.moments = [nothing, nothing]
            self.steps = 0
        gradients = np.stack([g, *self.as_the_training_scales(g, looked)])
        self.take_step(update, gradients, np.array(True))
        if self.count == 0:
            self.next *= 2

    @staticmethod
    def as_the_training_scales(
        g: np.ndarray, looked: list[tuple[np.ndarray, float]]
    ) -> list[np.ndarray]:
        """The gradients of other losses, scaled or clipped as the training does with its own, `g`.

        `looked` has the gradient of the training's loss, then of the others, each with its norm.
        """
        (exact, norm), *others = looked
        square = max((exact * exact).sum(dtype=np.float64), 1e-38)
        factor = float((g * exact).sum(dtype=np.float64) / square)
        if np.abs(g - factor * exact).max() > 1e-2 * np.abs(g).max():
            raise ValueError(
                "loss has another gradient than the training: "
                "let it return the loss of the update that follows"
            )
        if factor >= 1:
            return [factor * x for x, _ in others]
        # A factor below 1 is taken for a clipped norm, so the others are clipped to it, too.
        max_norm = factor * norm
        return [x * min(1, max_norm / max(size, math.ulp(0))) for x, size in others]

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        return super().findings(tolerates) if self.is_used else []


class SumShadow(GradientShadow):
    """Sums of gradients in few bits, and the steps that they lead to.

    A script that accumulates small batches takes up to half as long again.
    """

    def __init__(self, watcher: Watcher, texts: list[str], length: int):
        texts = sorted(texts, key=is_stochastic)
        super().__init__(watcher, texts, length)
        self.trouble = ""
        if not (watcher.is_adam or watcher.is_sgd):
            self.trouble = "sums of gradients are followed of SGD, and of Adam without amsgrad"
        self.rows = FormatRows(texts)
        tensors = len(watcher.references)
        # float32's sums, when they were read last
        self.sum = np.zeros((tensors, watcher.sample.numbers_per_tensor), np.float32)
        self.kept = np.stack([self.sum] * len(texts))  # in each format, [C, T, P]
        self.added = np.zeros(tensors, int)  # gradients in the present sum
        self.has_new = np.zeros(tensors, bool)  # whether one was added since the last step
        self.contributions: list[float] = []  # in each step
        self.shares: list[np.ndarray] = []  # of each step, what is left of the sum, [C]

    def install(self, call: Callable) -> list:
        """Hooks that are called when a gradient is added. `call` calls them, with arguments."""
        hooks = []
        for t, p in enumerate([] if self.trouble else self.watcher.parameters):
            before = functools.partial(call, self.before_adding, t)
            after = functools.partial(call, self.after_adding, t)
            hooks.append(p.register_hook(lambda _, before=before: before()))
            hooks.append(p.register_post_accumulate_grad_hook(after))
        return hooks

    def before_adding(self, t: int) -> None:
        """Follows what other code has made of a sum, before a gradient is added to it."""
        p = self.watcher.references[t]()
        grad = None if p is None else p.grad
        if grad is None or not grad.any():  # a new sum begins
            self.sum[t] = 0
            self.kept[:, t] = 0
            self.added[t] = 0
        else:
            self.take_sum(t, self.watcher.sample.read_one(t, grad))

    def take_sum(self, t: int, now: torch.Tensor) -> None:
        """Carries the sums in few bits along, where float32's has become `now`, [P].

        Other code has scaled float32's sum by a factor and added a rest.
        """
        now = now.float().cpu().numpy()
        last, self.sum[t] = self.sum[t].copy(), now
        if np.array_equal(now, last):
            return
        square = (last * last).sum(dtype=np.float64)
        factor = (now * last).sum(dtype=np.float64) / square if square else 0.0
        factor = np.float32(factor if np.isfinite(factor) else 0)
        self.kept[:, t] = factor * self.kept[:, t] + (now - factor * last)

    def after_adding(self, t: int, p: torch.Tensor) -> None:
        """Rounds the sums in few bits after a gradient was added."""
        if p.grad is None:  # another hook of the script may have dropped it
            return
        after = self.watcher.sample.read_one(t, p.grad).float().cpu().numpy()
        self.kept[:, t] = self.rounded(t, self.kept[:, t] + (after - self.sum[t]), p.grad)
        self.sum[t] = after
        self.added[t] += 1
        self.has_new[t] = True

    def rounded(self, t: int, x: np.ndarray, grad: torch.Tensor) -> np.ndarray:
        """Sums of a tensor as each format keeps them; `x` broadcasts to [C, P]."""
        largest = np.full((len(self.kept), 1, 1), float(largest_of([grad])), np.float32)
        rows = np.broadcast_to(x, self.kept[:, t].shape)[:, None].astype(np.float32)
        with np.errstate(all="ignore"):  # a sum may be infinite, and the step is then left out
            return self.rows.round(rows, largest)[:, 0]

    def before(self) -> None:
        """Begins with the moments that the optimizer has now."""
        if self.moments is not None or self.trouble:
            return
        watcher = self.watcher
        names = ("exp_avg", "exp_avg_sq") if watcher.is_adam else ("momentum_buffer",)
        moments = [watcher.sample.read(watcher.state(name)) for name in names]
        self.moments = [x.cpu().numpy() for x in moments]
        self.steps = float(watcher.count_steps().nan_to_num())
        # Of SGD: whether there is a momentum, [T, 1]
        has_buffer = [state.get("momentum_buffer") is not None for state in watcher.states()]
        self.has_buffer = np.array(has_buffer)[:, None]

    def after(self, update: Update) -> None:
        """Takes the optimizer's step with each of the sums."""
        gradient = update.gradient.cpu().numpy()
        if self.trouble or not np.isfinite(gradient).all():
            return
        live = np.array(update.live).reshape(-1, 1)
        for t in np.flatnonzero(live[:, 0]):
            self.take_sum(t, update.gradient[t])
            if not self.has_new[t]:  # such as a gradient that was there before the doctor
                self.kept[:, t] = self.rounded(t, gradient[t], update.gradient[t])
        seen = live[:, 0] & self.has_new
        if seen.any():
            sums = WindowSums.of(self.kept, gradient, False, self.watcher.sample.emphasis)
            self.shares.append(sums.rate(self.ruler.weight * seen))
            self.contributions.append(float(np.median(self.added[seen])))
        self.has_new[:] = False
        gradients = np.concatenate((gradient[None], self.kept))
        self.take_step(update, gradients, live)

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        if self.trouble:
            return [
                Finding(self.watcher.name, *split_entry(text), NOT_JUDGED, self.trouble)
                for text in self.ruler.texts
            ]
        findings = super().findings(tolerates)
        if not self.shares:
            return findings
        count = np.median(self.contributions)
        shares = np.nanmean(self.shares, axis=0)
        words = ["a step has one gradient, which is rounded once"] * len(shares)
        if count > 1:
            words = [
                f"a step adds up {count:,.0f} gradients, and {share:.2f} of the sum is left"
                for share in shares
            ]
        return [
            finding._replace(why=f"{finding.why}; {text}")
            for finding, text in zip(findings, words, strict=True)
        ]
