"""Is LowBitAdam in bfloat16 what torch's own Adam does with bfloat16 parameters?

`LowBitAdam(weights="bf16", m="bf16:independent", v="bf16:nearest:independent")` computes a step in
float32 and rounds weights and moments once, at its end. torch has several forms of the same step
for bfloat16 parameters, which round at different places:

    fused     one kernel, as LowBitAdam
    loop      an operation after the other, each of which rounds its result; the default on a CPU
    foreach   the loop's operations on all tensors at once; beta2 and 1 - lr * weight_decay are
              rounded to bfloat16, too
    compiled  the loop in one kernel, which torch.compile makes; left out without a C++ compiler

All of them get the same gradients, which are bfloat16 numbers. The shares are of numbers that are
equal to LowBitAdam's bit for bit after the last step. v is relative to the mean v of torch's Adam
in float32, with the same gradients. The movement is the mean distance of the weights from their
start, relative to float32's.

LowBitAdam computes the corrections of the moments' bias in float32, as torch's compiled step does.
The fused step computes them in float64. "in float64" is the share of weights that are equal if
LowBitAdam does so, too.

    python benchmarks/emulation.py benchmarks/results/emulation.md
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from files import table_of

from fp8rl.bits import LowBitAdam, adam
from fp8rl.bits.packed_tensors import unpack
from fp8rl.machine.hardware import origin

SIZE = 4096  # numbers of the one tensor
STEPS = 1_000
LEARNING_RATE = 1e-3
START = 0.05  # standard deviation of the weights before the first step
IN_FLOAT32 = adam.bias_corrections
FORMATS = {"weights": "bf16", "m": "bf16:independent", "v": "bf16:nearest:independent"}
FORMS = {
    "fused": {"foreach": False, "fused": True},
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "compiled": {"foreach": False, "fused": False},
}


class Case(NamedTuple):
    """Gradients, and the weight decay. `first` and `last` are the standard deviations of the
    gradients in the first and in the last step; it falls exponentially between them."""

    name: str
    first: float = 1.0
    last: float = 1.0
    is_constant: bool = False  # all gradients are `first`
    weight_decay: float = 0.0  # decoupled
    beta2: float = 0.999


CASES = (
    Case("Gaussian"),
    Case("always 1", is_constant=True),
    Case("Gaussian, from 1 to 0.001", last=1e-3),
    Case("Gaussian, weight decay 0.1", weight_decay=0.1),
    Case("Gaussian, beta2 0.95", beta2=0.95),
)


class State(NamedTuple):
    """What there is after the last step, float32 [SIZE] each."""

    weights: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def start() -> torch.Tensor:
    """The weights before the first step: bfloat16 numbers, float32 [SIZE]."""
    weights = START * torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return weights.bfloat16().float()


def gradients(case: Case) -> Iterator[torch.Tensor]:
    """The gradients of all steps: bfloat16 numbers, float32 [SIZE]."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        scale = case.first * (case.last / case.first) ** (step / (STEPS - 1))
        gradient = torch.ones(SIZE)
        if not case.is_constant:
            gradient = torch.randn(SIZE, generator=generator)
        yield (scale * gradient).bfloat16().float()


def corrections_in_float64(t: torch.Tensor, beta1: float, beta2: float) -> tuple:
    """`adam.bias_corrections`, in float64."""
    return IN_FLOAT32(t.double(), beta1, beta2)


def train_low_bit(case: Case) -> State:
    """The training with LowBitAdam."""
    p = start().requires_grad_()
    options = {"betas": (0.9, case.beta2), "weight_decay": case.weight_decay}
    optimizer = LowBitAdam([p], LEARNING_RATE, **options, **FORMATS)
    for gradient in gradients(case):
        p.grad = gradient
        optimizer.step()
    return State(p.detach(), *(unpack(*optimizer.stored(p, name)) for name in ("m", "v")))


def train_torch(case: Case, dtype: torch.dtype, form: str) -> State:
    """The training with torch's Adam, or its AdamW if there is weight decay."""
    p = start().to(dtype).requires_grad_()
    options = {"lr": LEARNING_RATE, "betas": (0.9, case.beta2), **FORMS[form]}
    if case.weight_decay:
        optimizer = torch.optim.AdamW([p], weight_decay=case.weight_decay, **options)
    else:
        optimizer = torch.optim.Adam([p], **options)
    step = torch.compile(optimizer.step) if form == "compiled" else optimizer.step
    for gradient in gradients(case):
        p.grad = gradient.to(dtype)
        step()
    state = optimizer.state[p]
    return State(p.detach().float(), state["exp_avg"].float(), state["exp_avg_sq"].float())


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> str:
    """The share of numbers that are equal bit for bit. 100% and 0% are exact."""
    equal = (a.view(torch.int32) == b.view(torch.int32)).float().mean().item()
    if equal in (0, 1):
        return f"{equal:.0%}"
    return f"{min(max(100 * equal, 0.01), 99.99):.2f}%"


def rows_of(case: Case) -> list[list[str]]:
    """The rows of a case: LowBitAdam, then each form of torch's step."""
    exact = train_torch(case, torch.float32, "loop")
    low_bit = train_low_bit(case)
    with mock.patch.object(adam, "bias_corrections", corrections_in_float64):
        in_float64 = train_low_bit(case)

    def row(name: str, state: State, shares: list[str]) -> list[str]:
        movement = (state.weights - start()).abs().mean() / (exact.weights - start()).abs().mean()
        v = state.v.mean() / exact.v.mean()
        return [case.name, name, *shares, f"{v.item():.3f}", f"{movement.item():.3f}"]

    rows = [row("LowBitAdam", low_bit, [""] * 4)]
    for form in FORMS:
        if form == "compiled" and not (shutil.which("c++") or shutil.which("cl")):
            continue
        state = train_torch(case, torch.bfloat16, form)
        shares = [equal_bits(a, b) for a, b in zip(state, low_bit, strict=True)]
        shares.append(equal_bits(state.weights, in_float64.weights))
        rows.append(row(f"torch, {form}", state, shares))
    return rows


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rows = [row for case in CASES for row in rows_of(case)]
    shares = ("weights equal", "m equal", "v equal", "in float64")
    columns = ("gradients", "Adam", *shares, "v", "movement")
    command = f"`python benchmarks/emulation.py {out}` on {origin()}."
    out.write_text(f"{table_of(columns, rows)}\n\n{command}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
