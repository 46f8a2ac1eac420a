"""Operands of matmuls and convolutions in few bits, in the training of any module.

`StraightThrough` rounds a tensor as if rounding had the gradient of the identity, and `Operands` is
a context in which every matmul and convolution does so with its two operands.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .places import PlaceFormat

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


class StraightThrough(torch.autograd.Function):
    """Rounds a tensor in the forward pass, and its gradient in the backward pass.

    `StraightThrough.apply(x, function, of_gradient)` is `function(x)`, and `of_gradient` rounds the
    gradient. A function that is None leaves its tensor as it is.
    """

    @staticmethod
    def forward(ctx, x, function: Callable | None, of_gradient: Callable | None = None):
        ctx.of_gradient = of_gradient
        return x.view_as(x) if function is None else function(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.of_gradient is None else ctx.of_gradient(gradient), None, None


def rounded_whole(x: torch.Tensor, form: PlaceFormat) -> torch.Tensor:
    """A tensor rounded with one scale for all its numbers; unchanged if they are not real."""
    if not x.is_floating_point():
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
        self.of_operands = forward and functools.partial(rounded_whole, form=forward)
        self.of_gradients = backward and functools.partial(rounded_whole, form=backward)
        self.seen = 0  # number of products that were rounded

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = PRODUCTS.get(func, len(args))
        if len(args) < first + 2:
            return func(*args, **kwargs)
        self.seen += 1
        operands = [StraightThrough.apply(x, self.of_operands) for x in args[first : first + 2]]
        product = func(*args[:first], *operands, *args[first + 2 :], **kwargs)
        return StraightThrough.apply(product, None, self.of_gradients)

    def within(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a function whose products are rounded. Raises ValueError if it has none."""
        with self:
            result = function()
        if not self.seen:
            raise ValueError(
                "loss has no matmul that can be rounded: leave out forward and backward"
            )
        return result
