"""FP8 numerics: quantize, scaled matmul, and a linear layer whose three matmuls multiply float8 tensors.

Formats (Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433). A float8 number has one sign bit and
    e4m3   4 exponent, 3 mantissa bits: +-448, smallest 2^-9, no infinity.   Forward: activations and weights need precision.
    e5m2   5 exponent, 2 mantissa bits: +-57344, smallest 2^-16, has inf.    Gradients: they need range.
Each tensor is divided by its scale first, and the product multiplied by both scales. A scale is computed anew for every tensor
("dynamic", not "delayed"): the smallest power of two with which its largest magnitude fits. Scaling by it is exact, so the only
error is the rounding to float8, and it does not matter whether a machine applies the scales before or after the sum.

The three matmuls of a linear layer y = x W^T + b with x [B, I], W [O, I] and the gradient g [B, O] of y:
    output            y  = x   @ W^T     e4m3 x e4m3     contracts I
    input gradient    dx = g   @ W       e5m2 x e4m3     contracts O
    weight gradient   dW = g^T @ x       e5m2 x e4m3     contracts B
Products are summed in float32. Master weights, the bias and its gradient stay in float32.

Layout: CUDA's kernel multiplies a row-major [M, K] by a column-major [K, N] matrix, with K and N multiples of 16, and never e5m2
by e5m2. So the first product takes a free transpose of W, the second a copy of W in the other layout, and the third copies of
both matrices. The CPU has no such rules, but they are enforced there too.

A number that is not finite makes the scale NaN, and so all that is computed from the tensor; the optimizer step is then skipped.
Quantizing is several passes over a tensor, and a copy in the other layout one more. A kernel (faster.py) reads the tensor twice
and writes both layouts. `torch.compile` makes few passes of the plain form, in a Float8Linear too, on a CPU with the same bits.
FP8 pays off only in wide layers on hardware that multiplies float8: benchmarks/fp8_layer.py measures it.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion

from . import faster

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TAKEN = torch.float32, torch.bfloat16  # types that are quantized
MULTIPLE = 16


class Quantized(NamedTuple):
    """Matrices with the values data * scale."""

    data: torch.Tensor  # float8 [..., M, N]
    scale: torch.Tensor  # float32 [...], powers of two, or NaN for a matrix with a number that is not finite

    def t(self) -> "Quantized":
        """The transpose, not copied: a row-major matrix becomes column-major."""
        return Quantized(self.data.t(), self.scale)

    def column_major(self) -> "Quantized":
        """The same matrix, column-major: a copy, unless it is already."""
        return Quantized(self.data.t().contiguous().t(), self.scale)

    def dequantize(self) -> torch.Tensor:
        return self.data.float() * self.scale[..., None, None]


def quantize(x: torch.Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    """Rounds matrices [..., M, N] to float8 (`E4M3` or `E5M2`), each with a scale of its own. Raises ValueError for another shape
    or `dtype`, and TypeError if `x` is not float32 or bfloat16: float16 may already have lost what FP8 would have scaled."""
    if x.dtype not in TAKEN:
        raise TypeError(f"x is {x.dtype}: quantize takes float32 or bfloat16, cast before values leave float16's range")
    if x.dim() < 2 or dtype not in LARGEST:
        raise ValueError(f"x has shape {list(x.shape)} and dtype is {dtype}: use matrices [..., M, N], and E4M3 or E5M2")
    x = x.float().contiguous()  # row-major, whatever the input's strides
    largest = x.abs().amax((-2, -1)) if x.numel() else x.new_zeros(x.shape[:-2])
    scale = power_of_two_scale(largest, LARGEST[dtype])
    return Quantized(cast(x / scale[..., None, None], dtype), scale)


def in_layouts(
    x: torch.Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True
) -> tuple[Quantized | None, Quantized | None]:
    """`quantize` of a matrix [M, N]: as it is, and for its `column_major()`. A kernel makes both at once, or None in place of one
    that is not wanted. Without one both are the same matrix, which `column_major` copies when it is called."""
    kernel = None if torch.compiler.is_compiling() else faster.kernel("quantize", x.device)
    if kernel is None or x.dtype not in TAKEN or not x.numel():
        return 2 * (quantize(x, dtype),)
    return kernel(x, dtype, rows, columns)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to the nearest float8, ties to even. Without the clamp, e4m3 gives NaN before torch 2.12, and e5m2 infinity."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def power_of_two_scale(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """The smallest power of two s, from 2^-126 up, with largest / s <= limit (for 0 the same as for 0.5), but none with which
    limit * s would not be finite: float32's very largest numbers saturate. NaN if `largest` is not finite."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    limit_mantissa, limit_exponent = math.frexp(limit)
    exponent = (exponent - limit_exponent + (mantissa > limit_mantissa)).clamp(-126, 128 - limit_exponent)
    return torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), torch.nan)


def scaled_matmul(a: Quantized, b: Quantized, emulate: bool | None = None) -> torch.Tensor:
    """a @ b for float8 matrices, row-major [M, K] and column-major [K, N]: float32 [M, N]. `emulate` works in float32, exactly
    but for the order of the sum; None uses torch's kernel where there is one. Raises ValueError for what a GPU's cannot take."""
    left, right = a.data.shape, b.data.shape
    if len(left) != 2 or len(right) != 2 or left[1] != right[0]:
        raise ValueError(f"shapes are {list(left)} and {list(right)}: use matrices [M, K] and [K, N] of one inner dimension K")
    for name, size in {"inner dimension": right[0], "column count": right[1]}.items():
        if size % MULTIPLE:
            raise ValueError(f"{name} is {size}: FP8 kernels need a multiple of {MULTIPLE}, pad it or stay in float32")
    if a.data.dtype == b.data.dtype == E5M2:
        raise ValueError("both matrices are e5m2: FP8 kernels multiply e4m3 with e4m3 or e5m2, quantize one as e4m3")
    if not a.data.is_contiguous() or not b.data.t().is_contiguous():
        raise ValueError("layout is not row-major times column-major: make the first contiguous, the second column_major()")
    device = a.data.device
    with torch.autocast(device.type, enabled=False):  # a surrounding bfloat16 autocast would round the result
        if emulate or (emulate is None and not has_kernel(device)):
            # Row-major, like the second matrix in the CPU's kernel, so that both sum in the same order, bit for bit.
            return (a.data.float() @ b.data.float().contiguous()) * (a.scale * b.scale)
        whole = F.ScalingType.TensorWise
        return F.scaled_mm(a.data, b.data, a.scale, whole, b.scale, whole, output_dtype=torch.float32)


def has_kernel(device: torch.device | str) -> bool:
    """Whether torch multiplies float8 matrices to float32: on CUDA from compute capability 8.9, on CPUs from torch 2.13."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "cpu" and TorchVersion(torch.__version__) >= (2, 13)


class _Float8Matmuls(torch.autograd.Function):
    """The three matmuls in the module's docstring, of `weight` or of what it was quantized to before, `w8`."""

    @staticmethod
    def forward(ctx, x, weight, layer, w8):
        of_x, of_weight = ctx.needs_input_grad[:2]
        x8, later_x8 = in_layouts(x, layer.forward_type, columns=of_weight)
        w8, later_w8 = (w8, w8) if w8 else in_layouts(weight, layer.forward_type, columns=of_x)
        ctx.save_for_backward(*(later_x8 if of_weight else (None, None)), *(later_w8 if of_x else (None, None)))
        ctx.layer, ctx.input_dtype = layer, x.dtype
        return scaled_matmul(x8, w8.t(), layer.emulate)  # [B, I] @ [I, O]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]  # the first not in a first layer, whose input is data
        g8, later_g8 = in_layouts(grad, ctx.layer.backward_type, rows=of_x, columns=of_weight)
        grad_x = grad_w = None
        if of_x:
            w8 = Quantized(w_data, w_scale).column_major()
            grad_x = scaled_matmul(g8, w8, ctx.layer.emulate).to(ctx.input_dtype)  # [B, O] @ [O, I]
        if of_weight:
            x8 = Quantized(x_data, x_scale).column_major()
            grad_w = scaled_matmul(later_g8.column_major().t(), x8, ctx.layer.emulate)  # [O, B] @ [B, I]
        return grad_x, grad_w, None, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8 and keeps its parameters in float32, under the same names as nn.Linear. Forward
    takes float32 or bfloat16 [..., I] and returns float32 [..., O], with I and O multiples of 16.

        >>> import torch
        >>> from fp8rl.fp8 import convert_linears
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        >>> convert_linears(model)
        {'0': None, '2': 'its 10 outputs are not a multiple of 16'}
        >>> model(torch.randn(5, 32)).square().sum().backward()  # trains like any other model
    """

    forward_type, backward_type = E4M3, E5M2  # of inputs and weights, and of gradients
    emulate: bool | None = None  # as in scaled_matmul

    def forward(self, x: torch.Tensor, w8: Quantized | None = None) -> torch.Tensor:
        """`w8`: the weight, if it has been quantized already."""
        flat = x.reshape(-1, self.in_features)
        rows = len(flat)
        missing = -rows % MULTIPLE if rows else MULTIPLE
        if missing:  # the weight gradient contracts rows, and kernels need some
            flat = F.pad(flat, (0, 0, 0, missing))
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()  # or it would be prepared for a backward pass
        y = _Float8Matmuls.apply(flat, weight, self, w8)
        y = y[:rows] if missing else y  # a slice of all of it would cost a copy in the backward pass
        if self.bias is not None:
            y = y + self.bias if missing else y.add_(self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)

    def held(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`forward` for as long as the weight stays as it is now: it is quantized only once. Hooks are not called."""
        return functools.partial(self.forward, w8=in_layouts(self.weight.detach(), self.forward_type, columns=False)[0])


def convert_linears(model: nn.Module, forward: torch.dtype = E4M3, backward: torch.dtype = E5M2) -> dict[str, str | None]:
    """Makes linear layers Float8Linear, in place: parameters, hooks and all else stay. Returns for each, by name, None if it was
    converted, else the reason why not."""
    modules = model.named_modules(remove_duplicate=False)  # a tied layer appears under each of its names
    linears = {name: layer for name, layer in modules if isinstance(layer, nn.Linear)}
    reasons = {name: misfit(layer.in_features, layer.out_features) for name, layer in linears.items()}
    for name, layer in linears.items():
        if type(layer) not in (nn.Linear, Float8Linear):
            reasons[name] = f"it is a {type(layer).__name__}, not a plain nn.Linear"
        elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
            reasons[name] = "a TransformerEncoderLayer in eval mode reads its weights and does not call it"
        elif layer.weight.dtype != torch.float32:
            reasons[name] = f"its weights are {layer.weight.dtype}"
        elif not reasons[name]:
            layer.__class__ = Float8Linear
            layer.forward_type, layer.backward_type = forward, backward
    return reasons


def misfit(inputs: int, outputs: int) -> str | None:
    """Why a linear layer of this size cannot multiply in float8, or None."""
    for side, size in {"inputs": inputs, "outputs": outputs}.items():
        if size % MULTIPLE:
            return f"its {size} {side} are not a multiple of {MULTIPLE}"
    return None
