"""What the matmuls compute in. One training loop serves every precision through three touch points:

    model = precision.prepare(model)
    with precision.autocast():
        logits, values = model(obs)
    report = precision.step(loss, optimizer, max_grad_norm)

    name       matmuls                   loss scaling           where
    fp32       float32, TF32 off         none                   everywhere
    tf32       TensorFloat-32            none                   CUDA, compute capability 8.0 up
    bf16       autocast bfloat16         none                   everywhere
    fp16       autocast float16          torch.amp.GradScaler   everywhere
    fp8        e4m3 forward, e5m2        none, bad steps are    everywhere; in hardware on CUDA, compute capability
               gradients (fp8.py)        skipped all the same   8.9 up, emulated elsewhere with the same numerics
    fp8+bf16   fp8, and bfloat16 for     as fp8                 as fp8
               the layers that it leaves

What a machine lacks instructions for it emulates, bfloat16 and float16 on many CPUs among them: the same numbers, but many times
slower than float32 (`is_emulated`).

Parameters, optimizer and losses are float32 in every row. bfloat16 has float32's range, so its gradients need no scaling.
float16 ends at 65,504 and flushes below 6e-8: GradScaler multiplies the loss so that gradients stay above, unscales them before
clipping, skips the step when one is not finite and halves the scale then, and doubles it after a run of good steps. FP8 scales
each tensor by itself and needs no loss scale: its scaler stays at 1, and is there to skip the steps in which a
tensor was not finite. A disabled autocast or scaler is a no-op, so the loop has no branches.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from . import fp8

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp8+bf16")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8+bf16": torch.bfloat16}
# GradScaler's default doubles the scale every 2000 steps; a run here takes a few hundred, so it would never be seen to move.
SCALE_GROWTH_INTERVAL = 100


def available_precisions(device="cpu") -> list[str]:
    """Names of the precisions that `device` can run."""
    return [name for name in PRECISIONS if _obstacle(name, torch.device(device)) is None]


def _obstacle(name: str, device: torch.device) -> str | None:
    """Why a precision cannot run on a device, or None."""
    if name not in PRECISIONS:
        return "it is unknown"
    if name == "tf32" and not (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)):
        return "it needs CUDA, compute capability 8.0 up"
    if name.startswith("fp8") and not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm, torch 2.11 has"
    return None


@functools.cache
def is_emulated(name: str, device="cpu") -> bool:
    """Whether this machine multiplies a precision's numbers in another type, which is slow. A CPU does not tell, and libraries
    differ in what they use, so its 16-bit products are timed once, on one thread: emulated ones take some fifty times as long as
    float32's, native ones no more than three times for so small a matrix.

    Args:
        name: a precision that can run there.
        device: where.
    """
    device = torch.device(device)
    if name.startswith("fp8"):
        return fp8.arithmetic(device) == "emulated"
    if name not in AUTOCAST or device.type != "cpu":
        return name == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)

    def shortest(dtype: torch.dtype) -> float:
        a, b, times = torch.ones(256, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype), []
        for _ in range(20):
            began = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - began)
        return min(times)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on several, one that has to wait for a busy core would be what is timed
    try:
        return shortest(AUTOCAST[name]) > 10 * shortest(torch.float32)
    finally:
        torch.set_num_threads(threads)


class StepReport(NamedTuple):
    """What one optimizer step did, scalar tensors on the device: the gradient's L2 norm before clipping, the loss scale from now
    on (1 in all but fp16) and whether the scaler skipped the step (bool)."""

    grad_norm: torch.Tensor
    loss_scale: torch.Tensor
    skipped: torch.Tensor


class Precision:
    """One row of the table in the module's docstring.

    Args:
        name: a name of the table.
        device: where the model runs.

    Raises:
        ValueError: an unknown name, or one that the device cannot run; the message names those it can. There is no fallback.
    """

    def __init__(self, name: str, device="cpu"):
        self.name = name
        self.device = torch.device(device)
        obstacle = _obstacle(name, self.device)
        if obstacle:
            raise ValueError(f"precision is {name!r} and {obstacle}: choose from {', '.join(available_precisions(device))}")
        self.is_fp8 = name.startswith("fp8")
        start, growth = (1.0, 2**31 - 1) if self.is_fp8 else (2.0**16, SCALE_GROWTH_INTERVAL)
        enabled = self.is_fp8 or name == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=start, growth_interval=growth, enabled=enabled)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device and, for FP8, swaps its eligible linear layers in place. Parameters stay float32 and
        keep their names.

        Raises:
            ValueError: FP8 was asked for and no layer qualifies.
        """
        model = model.to(self.device)
        if self.is_fp8:
            conversion = fp8.convert_linears(model)
            if not conversion.converted:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in conversion.left.items())
                raise ValueError(f"precision is {self.name!r} and no layer can run in FP8 ({reasons}): widen one or choose bf16")
        return model

    def describe(self, model: nn.Module) -> str:
        """One line on what a prepared model computes in: whether it is emulated, and for FP8 the layers converted and left."""
        where = f"{self.name} on {self.device}"
        if not self.is_fp8:
            return f"{where}, emulated" if is_emulated(self.name, self.device) else where
        linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        converted = [name for name, layer in linears.items() if isinstance(layer, fp8.Float8Linear)]
        left = [name for name in linears if name not in converted]
        return f"{where}, {fp8.arithmetic(self.device)}: FP8 in {', '.join(converted)}, not in {', '.join(left)}"

    @contextlib.contextmanager
    def autocast(self):
        """The region in which a forward pass runs in this precision."""
        dtype = AUTOCAST.get(self.name)
        # Where a gradient is taken, a weight that was cast once for many steps would add up their gradients in the low precision.
        cached = not torch.is_grad_enabled()
        cast = torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=cached)
        with self.matmul_mode(), cast:
            yield

    def step(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> StepReport:
        """Backward, unscale, clip, step: in that order, since a norm is meaningless while the scale is still in it. On CUDA, with
        a fused and capturable optimizer, nothing here waits for the device.

        Args:
            loss: float32 scalar.
            optimizer: holds the parameters; their gradients are replaced.
            max_grad_norm: gradients are scaled down to this L2 norm.
            total: sums a tensor over the processes that hold the other parts of the loss.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        one = torch.ones((), device=self.device)
        scale = self.scaler.scale(one)
        optimizer.zero_grad(set_to_none=True)
        with self.matmul_mode():
            self.scaler.scale(loss).backward()
        if total:
            grads = [p.grad for p in parameters]  # in one message, which costs more than its bytes
            nn.utils.vector_to_parameters(total(nn.utils.parameters_to_vector(grads)), grads)
        self.scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        new_scale = self.scaler.scale(one)
        skipped = new_scale < scale
        if self.is_fp8:  # there is no loss scale to mend, and halved again and again it would end at 0
            self.scaler.update(one)
            new_scale = one
        return StepReport(grad_norm, new_scale, skipped)

    @contextlib.contextmanager
    def matmul_mode(self):
        """Sets torch's process-wide TF32 switch for this precision and puts it back."""
        matmul = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if self.name == "tf32" else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before
