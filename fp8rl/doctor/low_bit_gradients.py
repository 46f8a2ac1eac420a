"""Gradients that are computed in few bits, whose effect only the loss can show.

In windows of 8 updates, the gradient of the loss is computed once more for each format, at
float32's weights:

    forward    inputs and weights of matmuls and convolutions are rounded
    backward   the gradients of their results are rounded
    others     a caller computes something else in few bits, such as targets or observations

Adam takes its first 8 steps with each of these gradients. How far the steps lead is compared with
float32's steps.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..bits import adam
from ..bits.places import PlaceFormat
from .sample import NumberSums, WindowSums

# torch's functions that multiply two operands, and the index of the first operand in their
# arguments.
PRODUCTS = dict.fromkeys(
    (
        F.linear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.mv,
        torch.linalg.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.mv,
    ),
    0,
)
PRODUCTS |= dict.fromkeys(
    (torch.addmm, torch.baddbmm, torch.Tensor.addmm, torch.Tensor.baddbmm, torch.einsum), 1
)
FIRST = 32  # windows begin at update 32, 64, 128, ...
LENGTH = 8  # updates in such a window
# How much a gradient may differ from the training's, relative to its largest number.
SAME_GRADIENT = 1e-2


class Through(torch.autograd.Function):
    """Rounds a tensor in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx, x, form: PlaceFormat | None, gradient_form: PlaceFormat | None):
        ctx.gradient_form = gradient_form
        return Through.rounded(x, form)

    @staticmethod
    def backward(ctx, grad):
        return Through.rounded(grad, ctx.gradient_form), None, None

    @staticmethod
    def rounded(x: torch.Tensor, form: PlaceFormat | None) -> torch.Tensor:
        """A tensor rounded with one scale for all its numbers; unchanged if there is no format, or
        if its numbers are not real."""
        if form is None or not x.is_floating_point():
            return x.view_as(x)
        return form(x.reshape(1, -1).float()).reshape(x.shape).to(x.dtype)


class Operands(TorchFunctionMode):
    """A context in which matmuls and convolutions round their two operands, and the gradients of
    their results.

    `forward`   format of the operands, or None
    `backward`  format of the gradients, or None

    Recurrent layers, and attention with its projections, are not rounded, because torch computes
    them in functions of their own.
    """

    def __init__(self, forward: PlaceFormat | None = None, backward: PlaceFormat | None = None):
        super().__init__()
        self.forward_form = forward
        self.backward_form = backward
        self.seen = 0  # number of products that were rounded

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = PRODUCTS.get(func, len(args))
        if len(args) < first + 2:
            return func(*args, **kwargs)
        self.seen += 1
        operands = [Through.apply(x, self.forward_form, None) for x in args[first : first + 2]]
        product = func(*args[:first], *operands, *args[first + 2 :], **kwargs)
        return Through.apply(product, None, self.backward_form)

    def within(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a function whose products are rounded. Raises ValueError if it has none."""
        with self:
            result = function()
        if not self.seen:
            raise ValueError(
                "loss has no matmul that can be rounded: leave out forward and backward"
            )
        return result


def with_same_random_numbers(device: torch.device, function: Callable):
    """The result of a function, called so that torch's random generators stay as they are.

    `device` is that of the parameters.

    So functions that are called one after the other draw the same random numbers.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return function()


class Looks:
    """The windows of a WatchedOptimizer in which Adam's steps are taken with other gradients.

    `names`    places and formats, such as "forward=e4m3", also those of `others`
    `windows`  measurements of each window, for all names
    `numbers`  the same by number, over all windows

    The moments `first` and `second`, [C, T, P], have the training's gradients in their first row.
    They begin at 0 in each window, because Adam's own moments would carry on the training's
    direction.
    """

    def __init__(self, watched):
        self.watched = watched
        self.next = FIRST  # the update at which the next window begins
        self.count = 0  # updates in this window so far
        self.losses_now: list[tuple[np.ndarray, float]] | None = None
        self.names: list[str] = []
        self.windows: list[WindowSums] = []
        self.numbers = NumberSums()

    def look(self, losses: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Computes the gradients of losses at the present weights. The first loss is the
        training's."""
        if not self.watched.is_adam:
            return
        if not (self.windows or self.count):
            self.names = list(losses)[1:]
        if self.watched.updates >= self.next:
            self.losses_now = [self.gradient(loss) for loss in losses.values()]

    def gradient(self, loss: Callable[[], torch.Tensor]) -> tuple[np.ndarray, float]:
        """The sample of a loss's gradient, and the norm of the whole gradient."""
        parameters = self.watched.parameters
        learning = [p for p in parameters if p.requires_grad]
        with torch.enable_grad():
            gradients = with_same_random_numbers(
                self.watched.device,
                lambda: torch.autograd.grad(loss(), learning, allow_unused=True),
            )
        by_parameter = {id(p): g for p, g in zip(learning, gradients, strict=True)}
        all_gradients = []
        for p in parameters:
            g = by_parameter.get(id(p))
            if g is None:
                g = torch.zeros_like(p)
            all_gradients.append(g.to_dense() if g.is_sparse else g)
        norm = float(torch.stack([g.norm() for g in all_gradients]).norm())
        return self.watched.sample.take(all_gradients), norm

    def after_step(self, gradient: torch.Tensor, weight: torch.Tensor) -> None:
        """Takes Adam's steps for an update before which `look` has computed gradients.

        `gradient` is the training's gradient and `weight` the weights before the update, both
        [T, P]. Raises ValueError if the gradient of the loss is not the training's, up to a factor.
        """
        losses, self.losses_now = self.losses_now, None
        # A window needs gradients before each of its updates. Otherwise it is given up.
        if losses is None:
            self.count = 0
            return
        g = gradient.cpu().numpy()
        if not np.isfinite(g).all():
            self.count = 0
            return
        gradients = np.stack([g, *self.as_the_training_scales(g, losses)])
        settings = self.watched.by_tensor([self.watched.read_settings()])
        lr, beta1, beta2, eps, decay, sign = (x[0] for x in settings)
        gradients = adam.with_coupled_decay(sign * gradients, weight.cpu().numpy(), decay)
        if not self.count:
            self.first = np.zeros_like(gradients)
            self.second = np.zeros_like(gradients)
            self.moved = np.zeros_like(gradients)
        self.count += 1
        self.first = adam.first_moment(self.first, gradients, beta1)
        self.second = adam.second_moment(self.second, gradients, beta2)
        corrections = adam.bias_corrections(self.count, beta1, beta2)
        self.moved += adam.step(self.first, np.sqrt(self.second), lr, *corrections, eps)
        if self.count == LENGTH:
            lost = (gradients[1:] == 0) & (gradients[0] != 0)
            emphasis = self.watched.sample.emphasis
            self.windows.append(WindowSums.of(self.moved[1:], self.moved[0], lost, emphasis))
            self.numbers.add(self.moved[1:], self.moved[0])
            self.count = 0
            self.next *= 2

    @staticmethod
    def as_the_training_scales(
        g: np.ndarray, losses: list[tuple[np.ndarray, float]]
    ) -> list[np.ndarray]:
        """The gradients of the other losses, scaled or clipped as the training does with its
        gradient `g`."""
        (exact, norm), *others = losses
        square = max((exact * exact).sum(dtype=np.float64), 1e-38)
        factor = float((g * exact).sum(dtype=np.float64) / square)
        if np.abs(g - factor * exact).max() > SAME_GRADIENT * np.abs(g).max():
            raise ValueError(
                "loss has another gradient than the training: "
                "let it return the loss of the update that follows"
            )
        if factor >= 1:
            return [factor * x for x, _ in others]
        # A factor below 1 is taken for a clipped norm, so the others are clipped to this norm, too.
        max_norm = factor * norm
        return [x * min(1, max_norm / max(size, math.ulp(0))) for x, size in others]
