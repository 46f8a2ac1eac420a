"""Precisions of the matmuls. One training loop serves all of them through three calls:

    model = precision.prepare(model)
    with precision.autocast():
        outputs, values = model(obs)
    report = precision.step(loss, optimizer, max_grad_norm)

    name       matmuls                            loss scaling           where
    fp32       float32                            none                   everywhere
    tf32       TensorFloat-32                     none                   CUDA, capability 8.0 up
    bf16       autocast bfloat16                  none                   everywhere
    fp16       autocast float16                   torch.amp.GradScaler   everywhere
    fp8        e4m3 forward, e5m2 gradients       only skips bad steps   everywhere, in hardware
               from (fp8.py)                                                  capability 8.9
    fp8+bf16   fp8, and bf16 for other layers     as fp8                 as fp8

A machine without instructions for a type emulates it: it rounds the operands in the same way, but
sums the products otherwise (docs/precisions.md). Many CPUs emulate bfloat16 and float16.

torch has process-wide flags that let float32 matmuls round their operands to TF32 or bfloat16,
such as torch.set_float32_matmul_precision. `float32_matmuls` turns them off while the package
multiplies, and then puts them back, so that "fp32" means float32 whatever a script has set.

Parameters, optimizer and losses are float32. bfloat16 has float32's range and needs no scaling.
float16 ends at 65504 and flushes to 0 below 6e-8, so GradScaler multiplies the loss, and unscales
the gradients before they are clipped. When a gradient is not finite, it skips the step and halves
the scale. It doubles the scale after SCALE_GROWTH_INTERVAL good steps in a row. FP8 scales each
tensor. Its GradScaler stays at 1 and only skips steps."""

import contextlib
from typing import NamedTuple

import torch
from torch import nn

from . import fp8

# GradScaler's default, 2000, is more steps than a run of the cart takes, so the scale would never
# grow.
SCALE_GROWTH_INTERVAL = 100


class Rules(NamedTuple):
    """What a precision does differently from float32; with the defaults, nothing.

    A new precision is one more entry of PRECISIONS.
    """

    autocast: torch.dtype | None = None  # torch.autocast's type for matmuls
    # float8 type of inputs and weights, in the layers that FP8 can take
    forward: torch.dtype | None = None
    # float8 type of the gradients of the outputs, in the same layers
    backward: torch.dtype | None = None
    # Scale of the loss in the first step. If it is set, a step whose gradient is not finite is
    # skipped.
    loss_scale: float | None = None
    # Whether the scale of the loss grows and shrinks as GradScaler's does; otherwise it stays.
    scale_grows: bool = False
    tf32: bool = False  # whether CUDA rounds float32 operands to TF32
    # The CUDA compute capability that the precision needs; None runs everywhere.
    capability: tuple[int, int] | None = None


PRECISIONS = {
    "fp32": Rules(),
    "tf32": Rules(tf32=True, capability=(8, 0)),
    "bf16": Rules(torch.bfloat16),
    "fp16": Rules(torch.float16, loss_scale=2.0**16, scale_grows=True),
    "fp8": Rules(None, fp8.E4M3, fp8.E5M2, loss_scale=1.0),
    "fp8+bf16": Rules(torch.bfloat16, fp8.E4M3, fp8.E5M2, loss_scale=1.0),
}


def available_precisions(device="cpu") -> list[str]:
    """Names of the precisions that `device` can run."""
    capability = (
        torch.cuda.get_device_capability(device) if torch.device(device).type == "cuda" else (0, 0)
    )
    return [
        name for name, rules in PRECISIONS.items() if capability >= (rules.capability or (0, 0))
    ]


# torch's flags for float32 matmuls, by type of device.
MATMULS = {"cpu": torch.backends.mkldnn.matmul, "cuda": torch.backends.cuda.matmul}


@contextlib.contextmanager
def float32_matmuls(device="cpu", tf32: bool = False):
    """Within a `with` block, float32 matmuls on a device compute in float32 or, on CUDA with
    `tf32`, in TF32, whatever the process has set.

    torch's flag is then set back to the value that it had. It belongs to the process, so other
    threads see the change, too. If a script has set the flag for all backends at once, the flag of
    matmuls has a value of its own afterwards.
    """
    matmuls = MATMULS.get(torch.device(device).type)
    wanted = ("tf32",) if tf32 else ("ieee", "none")  # torch's default, "none", is float32, too
    if matmuls is None or matmuls.fp32_precision in wanted:
        yield
        return
    before = matmuls.fp32_precision
    matmuls.fp32_precision = wanted[0]
    try:
        yield
    finally:
        matmuls.fp32_precision = before


def clip_gradients(parameters: list[nn.Parameter], max_norm) -> torch.Tensor:
    """Scales the gradients of parameters on one device so that their L2 norm together is at most
    `max_norm`, a number or a tensor.

    Returns the norm before. It computes the same as `nn.utils.clip_grad_norm_`, with fewer calls,
    and asks a GPU nothing.
    """
    joint = joint_gradient(parameters)
    if joint is None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    else:
        gradients = [joint]
        norm = torch.linalg.vector_norm(joint)
    torch._foreach_mul_(gradients, (max_norm * (norm + 1e-6).reciprocal()).clamp(max=1))
    return norm


def joint_gradient(parameters: list[nn.Parameter]) -> torch.Tensor | None:
    """The tensor that is made up of the gradients of all parameters, in any order, or None if they
    are not parts of one tensor."""
    gradients = [p.grad for p in parameters]
    joint = None if gradients[0] is None else gradients[0]._base
    if joint is None or any(g is None or g._base is not joint for g in gradients):
        return None
    return joint if joint.numel() == sum(g.numel() for g in gradients) else None


class StepReport(NamedTuple):
    """The result of one optimizer step, scalar tensors on the device."""

    grad_norm: torch.Tensor  # the gradient's L2 norm before clipping
    loss_scale: torch.Tensor  # scale of the loss after this step; 1 in all precisions but fp16
    skipped: torch.Tensor  # bool, whether the scaler skipped the step


# What to do where no layer of a network can multiply in FP8.
REMEDY = (
    f"use a hidden_size that is a multiple of {fp8.MULTIPLE} and two layers or more, or choose bf16"
)


class Precision:
    """A precision of the module's table on a device: it prepares a model, casts its forward passes
    and takes its optimizer steps.

    Raises ValueError for a `name` that is unknown or that the device cannot run. The error lists
    the precisions that the device can run. `field` is the config's field that has the name, for the
    error. There is no silent fallback.
    """

    def __init__(self, name: str, device="cpu", field: str = "precision"):
        self.name = name
        self.field = field
        self.device = torch.device(device)
        names = available_precisions(device)
        if name not in names:
            reason = "it is unknown"
            if name in PRECISIONS:
                major, minor = PRECISIONS[name].capability
                reason = f"it needs CUDA, compute capability {major}.{minor} or higher"
            raise ValueError(f"{field} is {name!r} and {reason}: choose from {', '.join(names)}")
        self.rules = PRECISIONS[name]
        self.one = torch.ones((), dtype=torch.float32, device=self.device)
        self.no = torch.zeros((), dtype=torch.bool, device=self.device)
        never = 2**31 - 1
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=self.rules.loss_scale or 1.0,
            growth_interval=SCALE_GROWTH_INTERVAL if self.rules.scale_grows else never,
            enabled=self.rules.loss_scale is not None,
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device and, for FP8, converts its eligible linear layers.

        Raises ValueError if FP8 can take none of them.
        """
        model = model.to(self.device)
        if not self.rules.forward:
            return model
        reasons = fp8.convert_linears(model, self.rules.forward, self.rules.backward)
        if all(reasons.values()):
            details = "; ".join(f"{name or 'the model'}: {why}" for name, why in reasons.items())
            raise ValueError(
                f"{self.field} is {self.name!r} and no layer can run in FP8 ({details}): {REMEDY}"
            )
        return model

    @contextlib.contextmanager
    def autocast(self):
        """Runs a forward pass in this precision."""
        dtype = self.rules.autocast
        # Several uses of a weight's cached copy would add up their gradients in low precision.
        cached = not torch.is_grad_enabled()
        cast = torch.autocast(
            self.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=cached
        )
        with self.matmul_mode(), cast:
            yield
        # Within a caller's own autocast region, cached copies would outlive the next update.
        torch.clear_autocast_cache()

    def step(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        all_reduce=None,
    ) -> StepReport:
        """One optimizer step: backward, unscale, clip to an L2 norm, step.

        The gradients are unscaled before they are clipped, because the norm of scaled gradients is
        meaningless. `all_reduce` sums a list of gradients over processes that share the loss.
        Nothing here waits for a GPU.
        """
        self.backward([loss], [torch.ones_like(loss)], optimizer)
        return self.apply_gradients(optimizer, max_grad_norm, all_reduce)

    def backward(
        self,
        results: list[torch.Tensor],
        gradients: list[torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Puts gradients, times the scaler's scale, into the parameters.

        `results` are the loss, or results of the network, and `gradients` are the gradients of the
        loss with respect to them.
        """
        optimizer.zero_grad(set_to_none=True)
        # Autocast is off, because a surrounding region would cast FP8's matmuls.
        with self.matmul_mode(), torch.autocast(self.device.type, enabled=False):
            torch.autograd.backward(results, self.scaler.scale(gradients))

    def apply_gradients(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float, all_reduce=None
    ) -> StepReport:
        """The rest of `step`, with the gradients that `backward` has put into the parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all_reduce:
            learned = [p for p in parameters if p.grad is not None]
            gradients = all_reduce([p.grad for p in learned])
            for p, gradient in zip(learned, gradients, strict=True):
                p.grad = gradient
        if not self.rules.loss_scale:
            grad_norm = clip_gradients(parameters, max_grad_norm)
            optimizer.step()
            return StepReport(grad_norm, self.one, self.no)
        scale_before = self.scaler.scale(self.one)  # get_scale() would wait for a GPU
        self.scaler.unscale_(optimizer)
        grad_norm = clip_gradients(parameters, max_grad_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        skipped = self.scaler.scale(self.one) < scale_before  # only a skip makes the scale smaller
        if not self.rules.scale_grows:
            # Set the scale back to where it was; otherwise many skips would bring it to 0.
            self.scaler.update(self.one * self.rules.loss_scale)
        return StepReport(grad_norm, self.scaler.scale(self.one), skipped)

    def matmul_mode(self):
        """A context in which float32 matmuls on the device are those of this precision.

        `autocast` and `step` enter it by themselves.
        """
        return float32_matmuls(self.device, self.rules.tf32)
