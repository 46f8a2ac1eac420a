"""FP8 numerics: quantize, scaled matmul, and a linear layer whose three matmuls multiply float8 tensors.

Formats (Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433). A float8 number has one sign bit and
    e4m3   4 exponent, 3 mantissa bits: +-448, smallest 2^-9, no infinity.   Forward: activations and weights want digits.
    e5m2   5 exponent, 2 mantissa bits: +-57344, smallest 2^-16, has inf.    Gradients: they want range.
So each tensor is divided by a scale first and the product multiplied by it after. The scale is dynamic (from this very tensor's
largest magnitude) and the smallest power of two that lets the tensor fit: multiplying by it is exact, so the only error is the
rounding to float8, and it does not matter whether a machine applies the scales before or after the sum.

The three matmuls of a linear layer y = x W^T + b with x [B, I], W [O, I] and the gradient g [B, O] of y:
    output            y  = x   @ W^T     e4m3 x e4m3     contracts I
    input gradient    dx = g   @ W       e5m2 x e4m3     contracts O
    weight gradient   dW = g^T @ x       e5m2 x e4m3     contracts B
Products are summed in float32. Master weights, the bias and its gradient stay in float32.

Layout: CUDA's kernel takes the first matrix row-major and the second column-major, dimensions in multiples of 16 (16 bytes is
what a tensor core reads at once), never e5m2 times e5m2. So W is handed over transposed in the first product for free, and is
copied to the other layout in the second; the third copies both. The CPU accepts anything; the rules are enforced there too, so
that what passes here passes there.

A number that is not finite is never saturated away: it makes the scale NaN, so everything computed from the tensor is NaN, and
the optimizer step is skipped as a loss scaler would (precision.py).

Quantizing x [B, I] costs a few passes over its B I numbers, the matmul 2 B I O operations. So FP8 pays only where O is large,
on hardware that multiplies float8: `python -m fp8rl bench fp8` measures from which width on. Left out on purpose: delayed
scaling, which saves one pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Both maxima are 0.875 times a power of two; these are the powers.
_TOP_EXPONENT = {E4M3: 9, E5M2: 16}
MULTIPLE = 16


class Quantized(NamedTuple):
    """A float8 tensor and what to multiply it by: value = data * scale.

    data float8 [M, N]; scale float32 scalar, a power of two, NaN if the tensor held a number that is not finite.
    """

    data: torch.Tensor
    scale: torch.Tensor

    def t(self) -> "Quantized":
        """The transpose, without copying: a row-major matrix becomes column-major."""
        return Quantized(self.data.t(), self.scale)

    def flip_layout(self) -> "Quantized":
        """The same matrix with rows and columns swapped in memory (a copy)."""
        return Quantized(self.data.t().contiguous().t(), self.scale)

    def dequantize(self) -> torch.Tensor:
        """data * scale in float32."""
        return self.data.float() * self.scale


def quantize(x: torch.Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    """Rounds a tensor [M, N] to float8 (`E4M3` or `E5M2`) under a power-of-two scale taken from its own largest magnitude.

    Raises:
        TypeError: `x` is not float32 or bfloat16. float16 has overflowed or flushed already what FP8 would have scaled.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x is {x.dtype}: quantize takes float32 or bfloat16, cast before values leave float16's range")
    x = x.float().contiguous()  # row-major, whatever strides came in
    scale = power_of_two_scale(x.abs().amax(), dtype)
    return Quantized(cast(x / scale, dtype), scale)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds to the nearest float8, ties to even, after a clamp to the format's range: beyond it, e4m3 saturates from torch 2.12
    on and gives NaN before, and e5m2 gives infinity. NaN stays NaN."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def power_of_two_scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest power of two s (a normal float32) with largest / s within the format; NaN where `largest` is not finite."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = (exponent - _TOP_EXPONENT[dtype] + (mantissa > 0.875)).clamp(min=-126)
    return torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), torch.nan)


def scaled_matmul(a: Quantized, b: Quantized, emulate: bool | None = None) -> torch.Tensor:
    """a @ b for float8 matrices, summed in float32: float32 [M, N] from [M, K] and [K, N].

    Args:
        a: row-major.
        b: column-major.
        emulate: multiply in float32 what the float8 numbers stand for (the slow twin: products of float8 numbers are exact in
            float32, so only the order of the sum can differ). None uses torch's kernel where there is one.

    Raises:
        ValueError: the matrices break a rule of the GPU's kernel (module docstring), on whatever device.
    """
    _check_rules(a, b)
    if emulate is None:
        emulate = not has_kernel(a.data.device)
    with torch.autocast(a.data.device.type, enabled=False):  # or a surrounding bfloat16 region would round the result
        if emulate:
            # Row-major, as the CPU's kernel lays the second matrix out, so that both add in the same order, bit for bit.
            return (a.data.float() @ b.data.float().contiguous()) * (a.scale * b.scale)
        whole = F.ScalingType.TensorWise
        return F.scaled_mm(a.data, b.data, a.scale, whole, b.scale, whole, output_dtype=torch.float32)


def has_kernel(device: torch.device | str) -> bool:
    """Whether torch multiplies float8 matrices on this device with float32 results: CUDA of compute capability 8.9 up, or the CPU
    from torch 2.13."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return device.type == "cpu" and TorchVersion(torch.__version__) >= (2, 13)


def arithmetic(device: torch.device | str) -> str:
    """ "hardware" where FP8 tensor cores multiply, "emulated" where float32 does on the same float8 numbers."""
    return "hardware" if torch.device(device).type == "cuda" and has_kernel(device) else "emulated"


def _check_rules(a: Quantized, b: Quantized) -> None:
    (rows, inner), (inner_b, columns) = a.data.shape, b.data.shape
    if inner != inner_b:
        raise ValueError(f"shapes are [{rows}, {inner}] and [{inner_b}, {columns}]: the inner dimensions must agree")
    for name, size in {"inner dimension": inner, "column count": columns}.items():
        if size % MULTIPLE:
            raise ValueError(f"{name} is {size}: FP8 kernels need a multiple of {MULTIPLE}, pad it or keep float32")
    if a.data.dtype == b.data.dtype == E5M2:
        raise ValueError("both matrices are e5m2: FP8 kernels multiply e4m3 with e4m3 or e5m2, quantize one as e4m3")
    if not a.data.is_contiguous() or not b.data.t().is_contiguous():
        raise ValueError("layout is not row-major times column-major: FP8 kernels take no other, use flip_layout()")


class _Float8Matmuls(torch.autograd.Function):
    """The three matmuls of the module's docstring."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        x8, w8 = quantize(x), quantize(weight)
        layer.watch("input", x, x8)
        layer.watch("weight", weight, w8)
        ctx.save_for_backward(*x8, *w8)
        ctx.layer, ctx.input_dtype = layer, x.dtype
        return scaled_matmul(x8, w8.t(), layer.emulate)  # [B, I] @ [I, O]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        x8, w8, g8 = Quantized(x_data, x_scale), Quantized(w_data, w_scale), quantize(grad, E5M2)
        ctx.layer.watch("gradient", grad, g8)
        grad_x = scaled_matmul(g8, w8.flip_layout(), ctx.layer.emulate)  # [B, O] @ [O, I]
        grad_w = scaled_matmul(g8.flip_layout().t(), x8.flip_layout(), ctx.layer.emulate)  # [O, B] @ [B, I]
        return grad_x.to(ctx.input_dtype), grad_w, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8 and keeps its parameters in float32, under the same names as nn.Linear.

    Forward takes float32 or bfloat16 [..., I] and returns float32 [..., O]. Both I and O must be multiples of 16, or the matmul
    raises ValueError. Rows are padded with zeros to a multiple of 16, which adds nothing to any sum.

    Attributes:
        emulate: see `scaled_matmul`.
        watch: called with the name ("input", "weight", "gradient") of every tensor that is quantized, the tensor and the result.
    """

    emulate: bool | None = None
    watch: Callable[[str, torch.Tensor, Quantized], None] = staticmethod(lambda name, x, quantized: None)

    @classmethod
    def share(cls, linear: nn.Linear) -> "Float8Linear":
        """A Float8Linear on the very parameters of a linear layer."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.in_features)
        rows = len(flat)
        if rows % MULTIPLE:
            flat = F.pad(flat, (0, 0, 0, -rows % MULTIPLE))
        y = _Float8Matmuls.apply(flat, self.weight, self)[:rows]
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)


def convert_linears(model: nn.Module) -> dict[str, str | None]:
    """Swaps the linear layers of a model that qualify for Float8Linear, in place, on the same parameters.

    Returns:
        For each linear layer by name None if it was converted, else why it was left.
    """
    modules = model.named_modules(remove_duplicate=False)  # a tied layer stands under each of its names
    linears = {name: layer for name, layer in modules if type(layer) is nn.Linear}
    reasons = {name: _disqualifies(name, layer) for name, layer in linears.items()}
    for name, reason in reasons.items():
        if reason is None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Float8Linear.share(linears[name]))
    return reasons


def _disqualifies(name: str, layer: nn.Linear) -> str | None:
    if not name:
        return "it is the whole model and cannot be swapped in place, wrap it in nn.Sequential"
    if layer.weight.dtype != torch.float32:
        return f"its weights are {layer.weight.dtype}"
    for side, size in {"inputs": layer.in_features, "outputs": layer.out_features}.items():
        if size % MULTIPLE:
            return f"its {size} {side} are no multiple of {MULTIPLE}"
    return None
