"""What FP8 quantization does to the tensors of a model."""

import contextlib
import functools

import torch
from torch import nn

from .. import fp8
from ..rollout import Rollout
from .around import Around

LOOKED_AT = 2**20  # numbers of a larger matrix, its first rows, or looking would take longer than rounding


def measure(x: torch.Tensor, quantized: fp8.Quantized) -> dict[str, torch.Tensor]:
    """Effects of quantizing a matrix, float32 scalars, from at most LOOKED_AT of its numbers: the fraction of finite elements
    beyond the format's largest number (`saturated`) and of nonzero ones that became 0 (`flushed`), the largest `scale`, the
    signal-to-noise ratio 10 log10(sum x^2 / sum error^2) (`snr_db`), and the number of elements that were not finite
    (`nonfinite`)."""
    rows = max(1, LOOKED_AT // x.shape[-1])
    scale = quantized.scale if quantized.shared else quantized.scale[:rows]
    x, quantized = x[:rows].float(), fp8.Quantized(quantized.data[:rows], scale)
    error = x - quantized.dequantize()
    nonzero = (x != 0).sum().clamp(min=1)
    limit = fp8.LARGEST[quantized.data.dtype]
    return {
        "saturated": (((x / scale).abs() > limit) & x.isfinite()).float().mean(),
        "flushed": ((quantized.data.float() == 0) & (x != 0)).sum() / nonzero,
        "scale": scale.amax(),
        "snr_db": 10 * (x.square().sum() / error.square().sum()).log10(),
        "nonfinite": (~x.isfinite()).sum().float(),
    }


@contextlib.contextmanager
def recorded(model: nn.Module):
    """Yields a dict that it fills with `measure` of every FP8 tensor in the passes inside, the last pass's numbers (scalar
    tensors), under "fp8.LAYER.TENSOR.STATISTIC" (tensors: input, weight, gradient). Costs a few passes over the data."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, fp8.Float8Linear)}
    found: dict[str, torch.Tensor] = {}

    def watch(layer, name, x, quantized):
        found.update({f"fp8.{layer}.{name}.{key}": value for key, value in measure(x, quantized).items()})

    for name, layer in layers.items():
        layer.watcher = functools.partial(watch, name)
    try:
        yield found
    finally:
        for layer in layers.values():
            layer.watcher = None


class Recorded(Around):
    """A learner whose updates, where asked to, record what quantization does."""

    def update(self, batch: Rollout, record: bool = False, computed=None) -> dict[str, torch.Tensor]:
        with recorded(self.inner.model) if record else contextlib.nullcontext({}) as found:
            return self.inner.update(batch, record, computed) | found
