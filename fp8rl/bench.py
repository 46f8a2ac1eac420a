"""Benchmarks that need the package alone. `python -m fp8rl bench fp8`: from which width on does FP8 pay?

One square linear layer, forward and backward, in fp32, tf32, bf16 and fp8. FP8 here quantizes dynamically with plain tensor
operations, so its time includes finding maxima, casting and changing layouts; that overhead grows with the bytes, the matmul
with the bytes times the width. The width at which they balance is measured, per batch size, on hardware with FP8 tensor cores
only: elsewhere the float8 numbers are multiplied in float32 and a time would say nothing.
"""

import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from . import fp8
from .precision import Precision

PRECISIONS = ("fp32", "tf32", "bf16", "fp8")
WIDTHS = tuple(2**n for n in range(6, 14))
BATCHES = (1024, 4096, 16384, 65536)


def layer_steps(width: int, batch: int, precisions=PRECISIONS, device="cuda") -> dict:
    """For each precision a function that runs one layer forward and backward: name -> callable."""

    def step_of(name):
        precision = Precision(name, device)
        layer = precision.prepare(nn.Sequential(nn.Linear(width, width)))
        x = torch.randn(batch, width, device=device, requires_grad=True)
        grad = torch.randn(batch, width, device=device)

        def step():
            layer.zero_grad()
            x.grad = None
            with precision.autocast():  # the backward pass inside too, for its TF32 switch
                y = layer(x)
                y.backward(grad.to(y.dtype))

        return step

    return {name: step_of(name) for name in precisions}


def seconds_of(steps: dict, rounds: int = 7, round_seconds: float = 0.05, device="cuda") -> dict[str, float]:
    """Median seconds of each callable over rounds that alternate between them, each long enough for the clock."""

    def timed(step, repeats):
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    for step in steps.values():
        timed(step, 3)  # warm-up
    repeats = {name: max(1, int(round_seconds / timed(step, 1))) for name, step in steps.items()}
    rounds = [{name: timed(step, repeats[name]) for name, step in steps.items()} for _ in range(rounds)]
    return {name: statistics.median(times[name] for times in rounds) for name in steps}


def break_even(times: dict[int, dict[str, float]], against: str) -> int | None:
    """The smallest width from which fp8 is faster than another precision at every larger one: None if it is not at the largest.

    Args:
        times: width -> precision -> seconds.
        against: the other precision.
    """
    width = None
    for candidate in sorted(times, reverse=True):
        if times[candidate]["fp8"] >= times[candidate][against]:
            break
        width = candidate
    return width


def bench_fp8(out: Path, widths=WIDTHS, batches=BATCHES) -> Path | None:
    """Measures and writes `out`/fp8_layer_HARDWARE.json; without FP8 hardware says so and returns None."""
    if not torch.cuda.is_available() or fp8.arithmetic("cuda") != "hardware":
        print("bench fp8 skipped: it needs a CUDA device of compute capability 8.9 or higher, and there is none here")
        return None
    name = torch.cuda.get_device_name()
    path = out / f"fp8_layer_{name.replace(' ', '_')}.json"
    if path.exists():
        raise FileExistsError(f"out holds {path.name} already: name another folder or move it away")
    result = {"hardware": name, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    result |= {"seconds": {}, "break_even_width": {}}
    for batch in batches:
        times = {width: seconds_of(layer_steps(width, batch)) for width in widths}
        result["seconds"][batch] = times
        result["break_even_width"][batch] = {against: break_even(times, against) for against in PRECISIONS[:-1]}
        print(f"batch {batch}: fp8 is faster from width", result["break_even_width"][batch], flush=True)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
