"""What only the loss can show: gradients that were computed in few bits.

In windows of 8 updates the gradient of the loss is taken once more for each format, with

    forward    inputs and weights of matmuls and convolutions rounded
    backward   the gradients of their results rounded
    others     whatever a caller computes in few bits: targets, observations

from float32's weights. Adam takes its first 8 steps with each of them, and how far these lead is
compared with float32's own.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..places import PlaceFormat
from .sample import WindowSums

OPERANDS = ("forward", "backward")
# Products, and where in their arguments the first of two operands is.
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
SAME_GRADIENT = 1e-2  # how much of the largest number a gradient may differ from the training's


class Through(torch.autograd.Function):
    """The same numbers, rounded, and their gradient, rounded."""

    @staticmethod
    def forward(ctx, x, form: PlaceFormat | None, gradient_form: PlaceFormat | None):
        ctx.gradient_form = gradient_form
        return Through.rounded(x, form)

    @staticmethod
    def backward(ctx, grad):
        return Through.rounded(grad, ctx.gradient_form), None, None

    @staticmethod
    def rounded(x: torch.Tensor, form: PlaceFormat | None) -> torch.Tensor:
        """A tensor, rounded as one row; as it is without a format."""
        if form is None:
            return x.view_as(x)
        return form(x.reshape(1, -1)).reshape(x.shape)


class Operands(TorchFunctionMode):
    """Where it is entered, matmuls and convolutions round their two operands, and the gradients of
    their results.

    `forward`   format of the operands, or None
    `backward`  format of the gradients, or None

    Recurrent layers, and attention with its projections, are left as they are, because torch
    computes them in calls of their own.
    """

    def __init__(self, forward: PlaceFormat | None = None, backward: PlaceFormat | None = None):
        super().__init__()
        self.forward_form = forward
        self.backward_form = backward
        self.seen = 0  # products

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
        """What a function returns where its products are rounded. Raises ValueError for none."""
        with self:
            result = function()
        if not self.seen:
            raise ValueError(
                "loss or policy has no matmul that can be rounded: leave out forward, "
                "backward and acting"
            )
        return result


def with_same_random_numbers(parameters: list[torch.Tensor], function: Callable):
    """What a function returns, which draws the same random numbers as another one.

    The generators stay as they are.
    """
    devices = [p.device for p in parameters[:1] if p.is_cuda]
    with torch.random.fork_rng(devices):
        return function()


class Looks:
    """The windows of a WatchedOptimizer in which Adam's steps are taken with other gradients.

    `names`    places and formats, such as "forward=e4m3", or of `others`
    `windows`  sums of each window, of all names

    The moments, [C, T, P], the training's own first, begin at 0: Adam's own would carry on the
    training's direction.
    """

    def __init__(self, watched):
        self.watched = watched
        self.next = FIRST  # the update at which the next window begins
        self.count = 0  # updates in this window
        self.losses_now: list[tuple[np.ndarray, float]] | None = None
        self.names: list[str] = []
        self.windows: list[WindowSums] = []

    def look(self, losses: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Takes the gradients of losses at the weights as they are; the first is the training's."""
        if not self.watched.is_adam:
            return
        if not (self.windows or self.count):
            self.names = list(losses)[1:]
        if self.watched.updates >= self.next:
            self.losses_now = [self.gradient(loss) for loss in losses.values()]

    def gradient(self, loss: Callable[[], torch.Tensor]) -> tuple[np.ndarray, float]:
        """The sample of a loss's gradient, and its whole norm."""
        parameters = self.watched.parameters
        learning = [p for p in parameters if p.requires_grad]
        with torch.enable_grad():
            gradients = with_same_random_numbers(
                parameters, lambda: torch.autograd.grad(loss(), learning, allow_unused=True)
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
        """Takes the steps of an update, if it was looked at.

        `gradient` is the training's and `weight` the weights before the update, both [T, P].
        Raises ValueError if the gradient of the loss is not the training's, up to a factor.
        """
        losses, self.losses_now = self.losses_now, None
        # Every update of a window is looked at, or the window is given up
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
        gradients = sign * gradients + decay * weight.cpu().numpy()
        if not self.count:
            self.first = np.zeros_like(gradients)
            self.second = np.zeros_like(gradients)
            self.moved = np.zeros_like(gradients)
        self.count += 1
        self.first = beta1 * self.first + (1 - beta1) * gradients
        self.second = beta2 * self.second + (1 - beta2) * gradients * gradients
        step_size = lr / (1 - beta1**self.count)
        divisor = np.sqrt(self.second) / np.sqrt(1 - beta2**self.count) + eps
        self.moved += step_size * self.first / divisor
        if self.count == LENGTH:
            lost = (gradients[1:] == 0) & (gradients[0] != 0)
            self.windows.append(WindowSums.of(self.moved[1:], self.moved[0], lost))
            self.count = 0
            self.next *= 2

    @staticmethod
    def as_the_training_scales(
        g: np.ndarray, losses: list[tuple[np.ndarray, float]]
    ) -> list[np.ndarray]:
        """The gradients of the other losses, scaled or clipped as the training has its own."""
        (own, norm), *others = losses
        factor = (g * own).sum(dtype=np.float64) / max((own * own).sum(dtype=np.float64), 1e-38)
        factor = float(factor)
        if np.abs(g - factor * own).max() > SAME_GRADIENT * np.abs(g).max():
            raise ValueError(
                "loss has another gradient than the training: "
                "let it return the loss of the update that follows"
            )
        if factor >= 1:
            return [factor * x for x, _ in others]
        # A factor below 1 is taken for a clipped norm, to which the others are clipped, too
        most = factor * norm
        return [x * min(1, most / max(size, math.ulp(0))) for x, size in others]
