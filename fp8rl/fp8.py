"""FP8 numerics: quantize, scaled matmul, and a linear layer whose three matmuls multiply float8
tensors.

Formats (Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433). A float8
number has one sign bit and
    e4m3   4 exponent, 3 mantissa bits: +-448, smallest 2^-9, no infinity.
           Forward: activations and weights need precision.
    e5m2   5 exponent, 2 mantissa bits: +-57344, smallest 2^-16, has inf.
           Gradients: they need range.
Each tensor is divided by its scale first, and the product multiplied by both scales. A scale is
computed anew for every tensor ("dynamic", not "delayed"): the smallest power of two with which its
largest magnitude fits. So no number is clipped, and scaling is exact. It does not matter whether a
machine applies the scales before or after the sum, as long as they do not leave float32's range.

The three matmuls of a linear layer y = x W^T + b with x [B, I], W [O, I] and the gradient g [B, O]
of y:
    output            y  = x   @ W^T     e4m3 x e4m3     contracts I
    input gradient    dx = g   @ W       e5m2 x e4m3     contracts O
    weight gradient   dW = g^T @ x       e5m2 x e4m3     contracts B
The emulation sums products in float32. Tensor cores do not: an H100 adds 32 products at a time to
the running sum, and cuts off all of them 13 bits below the largest exponent among them. The sums
then differ by about 1e-4 of their norm, where rounding the operands costs 4e-2 (docs/precisions.md
has a table). Master weights, the bias and its gradient stay in float32.

Layout: CUDA's kernel multiplies a row-major [M, K] by a column-major [K, N] matrix, with K and N
multiples of 16, and never e5m2 by e5m2. So the first product takes a free transpose of W, the
second a copy of W in the other layout, and the third copies of both matrices. The CPU has no such
rules, but they are enforced there too.

A number that is not finite becomes NaN, and does not affect the scale, which is that of the finite
numbers. So a NaN or an infinity in a row of x makes the same row of y NaN, and one in a row of g
the same row of dx. The other rows stay as they are. The weight gradient contracts rows, so it has
NaN as well, and the optimizer step is skipped.

A finite outlier does harm other rows: if one row is a million times as large as the others, they
share its scale and lose their digits.

In plain PyTorch, quantizing takes several passes over a tensor, and a copy in the other layout
takes one more. On a GPU a kernel (machine/gpu/triton_quantize.py) takes the place of `in_layouts`.
`torch.compile` fuses the plain form into few passes, in a Float8Linear too; on a CPU the results
have the same bits. FP8 pays off only in wide layers on hardware that multiplies float8, as
benchmarks/speed/arms.py measures."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .bits.formats import E4M3, E5M2, power_of_two_scale

LARGEST_FLOAT8 = {E4M3: 448.0, E5M2: 57344.0}
INPUT_TYPES = torch.float32, torch.bfloat16  # types that can be quantized
MULTIPLE = 16  # dimensions of matrices must be multiples of this


class Quantized(NamedTuple):
    """Matrices in float8 with their scales; the values are data * scale."""

    data: torch.Tensor  # float8 [..., M, N]
    scale: torch.Tensor  # float32 [...], a power of two for each matrix

    def t(self) -> "Quantized":
        """The transpose, without a copy: a row-major matrix becomes column-major."""
        return Quantized(self.data.t(), self.scale)

    def column_major(self) -> "Quantized":
        """The same matrix in column-major layout: a copy, unless it has this layout already."""
        return Quantized(self.data.t().contiguous().t(), self.scale)

    def dequantize(self) -> torch.Tensor:
        return self.data.float() * self.scale[..., None, None]


def quantize(x: torch.Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    """Rounds matrices [..., M, N] to float8 (`E4M3` or `E5M2`), each with a scale of its own.

    Numbers that are not finite become NaN. Raises TypeError if `x` is not float32 or bfloat16. A
    float16 tensor may already have lost numbers that FP8 would have scaled.
    """
    if x.dtype not in INPUT_TYPES:
        raise TypeError(
            f"x is {x.dtype}: quantize takes float32 or bfloat16, "
            "cast before values leave float16's range"
        )
    x = x.float().contiguous()  # row-major, whatever the input's strides
    largest = x.nan_to_num(0.0, 0.0, 0.0).abs().amax((-2, -1))  # of the finite numbers
    scale = power_of_two_scale(largest, LARGEST_FLOAT8[dtype])
    # Infinities become NaN here, because `cast` would make them the largest number.
    x = x.nan_to_num(torch.nan, torch.nan, torch.nan)
    return Quantized(cast(x / scale[..., None, None], dtype), scale)


def in_layouts(
    x: torch.Tensor, dtype: torch.dtype, row_major: bool = True, column_major: bool = True
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes a matrix [M, N] for the two products that it takes part in.

    Returns the quantized matrix twice: row-major, and to be multiplied in column-major layout (by
    its method `column_major`). Here both are the same row-major matrix, of which `column_major`
    makes a copy when it is called. A kernel in place of this function makes both layouts at once,
    and returns None in place of one that is not wanted.
    """
    quantized = quantize(x, dtype)
    return quantized, quantized


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to the nearest float8 number, ties to even.

    A number beyond the largest float8 number becomes that number, and so does an infinity. So an
    overflow must be noticed before the cast, as `quantize` does. Without the clamp the result would
    depend on torch: in e4m3, 2.13 also gives the largest number, and earlier versions (2.11.0,
    2.12.0 and 2.12.1 were tried) NaN. In e5m2 all of them give infinity.
    """
    return x.clamp(-LARGEST_FLOAT8[dtype], LARGEST_FLOAT8[dtype]).to(dtype)


def scaled_matmul(a: Quantized, b: Quantized, emulate: bool | None = None) -> torch.Tensor:
    """a @ b for float8 matrices, row-major [M, K] and column-major [K, N]: float32 [M, N].

    With `emulate` the product is computed in float32: products of two float8 numbers are exact, and
    so are their sums but for float32's rounding. If `emulate` is None, a GPU that multiplies float8
    does so, which gives other sums (see above). torch's kernel for a CPU, since 2.13, gives the
    same bits in the same time as the emulation. Raises ValueError for matrices that a GPU's kernel
    cannot multiply, on every device.
    """
    if b.data.shape[0] % MULTIPLE or b.data.shape[1] % MULTIPLE:
        raise ValueError(
            f"the second matrix is {list(b.data.shape)}: FP8 kernels need multiples of {MULTIPLE}, "
            "pad it or stay in float32"
        )
    if a.data.dtype == b.data.dtype == E5M2:
        raise ValueError(
            "both matrices are e5m2: FP8 kernels multiply e4m3 with e4m3 or e5m2, "
            "quantize one as e4m3"
        )
    if not a.data.is_contiguous() or not b.data.t().is_contiguous():
        raise ValueError(
            "layout is not row-major times column-major: make the first contiguous, "
            "the second column_major()"
        )
    device = a.data.device
    # A surrounding bfloat16 autocast would round the result.
    with torch.autocast(device.type, enabled=False):
        if emulate or (emulate is None and not has_kernel(device)):
            # The second matrix is made row-major, as in the CPU's kernel, so that both sum in the
            # same order, bit for bit.
            product = a.data.float() @ b.data.float().contiguous()
            return times_scales(product, a.scale, b.scale)
        # CUDA's kernel multiplies both scales first, unlike `times_scales`. So numbers near 2^-70
        # give 0 there, and near 2^75 a row of zeros gives NaN. A pass of our own over the product
        # would cure that, but would cost time in every layer.
        whole = F.ScalingType.TensorWise
        return F.scaled_mm(
            a.data, b.data, a.scale, whole, b.scale, whole, output_dtype=torch.float32
        )


def times_scales(
    product: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """`product` times both scales, in place, rounded at most once.

    The product of two scales can leave float32's range where the result does not: for matrices of
    numbers near 2^-70 it would be 0, and for numbers near 2^75 infinity, which makes NaN of a row
    of zeros. So the part of it that is in range comes last, and the rest, which is otherwise 1,
    first. The scales are powers of two.
    """
    smallest = torch.finfo(torch.float32).smallest_normal
    in_range = (a_scale * b_scale).clamp(smallest, 2.0**127)
    rest = a_scale / in_range * b_scale
    return product.mul_(rest).mul_(in_range)


def has_kernel(device: torch.device | str) -> bool:
    """Whether a device multiplies float8 matrices: CUDA from compute capability 8.9 on."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class _Float8Matmuls(torch.autograd.Function):
    """The three matmuls in the module's docstring. They have no second derivative.

    `w8` is the quantized weight, or None if it is still to be quantized.
    """

    @staticmethod
    def forward(ctx, x, weight, layer, w8):
        # The gradient of the weight needs x by columns, and that of x the weight by columns.
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x8, x8_columns = layer.in_layouts(x, layer.forward_type, column_major=needs_weight)
        w8_columns = w8
        if w8 is None:
            w8, w8_columns = layer.in_layouts(weight, layer.forward_type, column_major=needs_x)
        ctx.layer = layer
        ctx.input_dtype = x.dtype
        nothing = None, None  # in place of data and scale that no gradient needs
        x8_columns = x8_columns if needs_weight else nothing
        w8_columns = w8_columns if needs_x else nothing
        ctx.save_for_backward(*x8_columns, *w8_columns)
        return scaled_matmul(x8, w8.t(), layer.emulate)  # [B, I] @ [I, O]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        layer = ctx.layer
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        g8, g8_columns = layer.in_layouts(grad, layer.backward_type, needs_x, needs_weight)
        grad_x = grad_w = None
        if needs_x:
            w8_columns = Quantized(w_data, w_scale).column_major()
            grad_x = scaled_matmul(g8, w8_columns, layer.emulate)  # [B, O] @ [O, I]
            grad_x = grad_x.to(ctx.input_dtype)
        if needs_weight:
            x8_columns = Quantized(x_data, x_scale).column_major()
            g8_transposed = g8_columns.column_major().t()
            grad_w = scaled_matmul(g8_transposed, x8_columns, layer.emulate)  # [O, B] @ [B, I]
        return grad_x, grad_w, None, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8.

    Its parameters stay float32 and have the same names as those of nn.Linear. The forward pass
    takes float32 or bfloat16 [..., I] and returns float32 [..., O], with I and O multiples of 16.

        >>> import torch
        >>> from fp8rl.fp8 import convert_linears
        >>> layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        >>> model = torch.nn.Sequential(*layers)
        >>> convert_linears(model)
        {'0': None, '2': 'its 10 outputs are not a multiple of 16'}
        >>> model(torch.randn(5, 32)).square().sum().backward()  # trains like any other model
    """

    forward_type = E4M3  # float8 type of inputs and weights
    backward_type = E5M2  # float8 type of gradients
    emulate: bool | None = None  # as in scaled_matmul
    in_layouts = staticmethod(in_layouts)  # or a kernel in its place

    def forward(self, x: torch.Tensor, w8: Quantized | None = None) -> torch.Tensor:
        """The layer's output. `w8` is the quantized weight, if the caller has it already."""
        batch = x.reshape(-1, self.in_features)
        size = len(batch)
        # The weight gradient contracts the batch, so the batch is padded to a multiple of 16 rows,
        # and is never empty.
        padding = -size % MULTIPLE if size else MULTIPLE
        if padding:
            batch = F.pad(batch, (0, 0, 0, padding))
        weight = self.weight
        if not torch.is_grad_enabled():
            weight = weight.detach()  # otherwise it would be prepared for a backward pass
        y = _Float8Matmuls.apply(batch, weight, self, w8)
        if padding:  # only then, because a slice costs a copy in the backward pass
            y = y[:size]
        if self.bias is not None:
            y = y + self.bias if padding else y.add_(self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)

    def held(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`forward` as a function that has quantized the weight once, now.

        It is right for as long as the weight does not change. Hooks are not called.
        """
        w8, _ = self.in_layouts(self.weight.detach(), self.forward_type, column_major=False)
        return functools.partial(self.forward, w8=w8)


def convert_linears(
    model: nn.Module, forward: torch.dtype = E4M3, backward: torch.dtype = E5M2
) -> dict[str, str | None]:
    """Converts the linear layers of a model to Float8Linear, in place.

    Parameters, hooks and everything else of a layer stay. Returns a dict with an entry for each
    linear layer by name: None if it was converted, otherwise the reason why not. `forward` and
    `backward` are the float8 types of the layers.
    """
    reasons = {}
    # A tied layer appears under each of its names.
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, nn.Linear):
            parent = model.get_submodule(name.rpartition(".")[0])
            reasons[name] = why_not_float8(layer, parent)
            if reasons[name] is None:
                layer.__class__ = Float8Linear
                layer.forward_type = forward
                layer.backward_type = backward
    return reasons


def why_not_float8(layer: nn.Linear, parent: nn.Module) -> str | None:
    """Why a linear layer, in its parent module, cannot be a Float8Linear, or None."""
    if type(layer) not in (nn.Linear, Float8Linear):
        return f"it is a {type(layer).__name__}, not a plain nn.Linear"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "a TransformerEncoderLayer in eval mode reads its weights and does not call it"
    if layer.weight.dtype != torch.float32:
        return f"its weights are {layer.weight.dtype}"
    return misfit(layer.in_features, layer.out_features)


def misfit(inputs: int, outputs: int) -> str | None:
    """Why a linear layer of this size cannot multiply in float8, or None."""
    for side, size in {"inputs": inputs, "outputs": outputs}.items():
        if size % MULTIPLE:
            return f"its {size} {side} are not a multiple of {MULTIPLE}"
    return None
