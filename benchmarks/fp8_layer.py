"""From which width on is FP8 faster? One square linear layer, forward and backward, in fp32, tf32,
bf16 and fp8.

FP8 here quantizes dynamically, so its time includes finding maxima, casting and changing layouts:
two readings of each tensor by a kernel where Triton is installed (machine/gpu/triton_quantize.py),
otherwise several passes. That overhead grows with the bytes, the matmul with the bytes times the
width. The width at which they balance is measured per batch size, and only on hardware with FP8
tensor cores: elsewhere the float8 numbers are multiplied in float32 and a time would be
meaningless, so the script says so and writes nothing. Otherwise it writes fp8_layer_HARDWARE.json,
with all medians, and a table of them, fp8_layer.md. A step is a CUDA graph, as in training, so that launching costs nothing.

    python benchmarks/fp8_layer.py [OUT]     # benchmarks/results by default
"""

import functools
import json
import platform
import sys
from pathlib import Path

import torch
from torch import nn

from fp8rl.cli.throughput import commit, seconds_of
from fp8rl.machine.gpu.cuda_graphs import Graphed
from fp8rl.machine.gpu.install import quantize_by_kernel
from fp8rl.machine.hardware import arithmetic
from fp8rl.precision import Precision

PRECISIONS = ("fp32", "tf32", "bf16", "fp8")
WIDTHS = tuple(2**n for n in range(6, 14))
BATCHES = (1024, 4096, 16384, 65536)


def layer_steps(width: int, batch: int, precisions=PRECISIONS, device="cuda") -> dict:
    """For each precision a function that runs one layer forward and backward, on CUDA as a graph:
    name -> callable. All share one input and one output gradient, which take most of the memory."""
    x = torch.randn(batch, width, device=device, requires_grad=True)
    grad = torch.randn(batch, width, device=device)

    def step_of(name):
        precision = Precision(name, device)
        layer = precision.prepare(nn.Sequential(nn.Linear(width, width)))
        quantize_by_kernel(layer)

        def step():
            layer.zero_grad()
            x.grad = None
            with precision.autocast():  # includes the backward pass, for the TF32 switch
                y = layer(x)
                y.backward(grad.to(y.dtype))

        return functools.partial(Graphed(x.device), step) if x.is_cuda else step

    return {name: step_of(name) for name in precisions}


def break_even(times: dict[int, dict[str, float]], against: str) -> int | None:
    """The smallest width from which fp8 is faster than another precision at every larger width;
    None if it is slower at the largest.

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


def table_of(result: dict) -> str:
    """From which width FP8 is faster, and the medians, of what the .json has."""
    others = PRECISIONS[:3]
    lines = ["FP8 is faster from this number of units on, with so many rows in a batch:", ""]
    lines.append(f"| rows | {' | '.join(f'than {name}' for name in others)} |")
    lines.append("| --- " * (1 + len(others)) + "|")
    for batch, widths in result["break_even_width"].items():
        cells = [f"{widths[name]:,}" if widths[name] else "never" for name in others]
        lines.append(f"| {int(batch):,} | {' | '.join(cells)} |")
    lines += ["", "Microseconds of a step, forward and backward:", ""]
    lines.append(f"| rows | units | {' | '.join(PRECISIONS)} |")
    lines.append("| --- " * (2 + len(PRECISIONS)) + "|")
    for batch, times in result["seconds"].items():
        for width, seconds in times.items():
            cells = [f"{1e6 * seconds[name]:,.0f}" for name in PRECISIONS]
            lines.append(f"| {int(batch):,} | {int(width):,} | {' | '.join(cells)} |")
    command = "`python benchmarks/fp8_layer.py benchmarks/results`"
    versions = f"torch {result['torch']}, CUDA {result['cuda']}; commit {result['commit']}"
    made = f"{command} on {result['hardware']}; {versions}."
    return "\n".join([*lines, "", f"Medians of five rounds. {made}", ""])


def main(out: Path, widths=WIDTHS, batches=BATCHES) -> None:
    if not torch.cuda.is_available() or arithmetic("cuda") != "hardware":
        print(
            "fp8_layer skipped: it needs a CUDA device of compute capability 8.9 or higher, "
            "and there is none here"
        )
        return
    name = torch.cuda.get_device_name()
    path = out / f"fp8_layer_{name.replace(' ', '_')}.json"
    part = path.with_suffix(".part")
    result = {
        "hardware": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
    }
    result |= {"seconds": {}, "break_even_width": {}}
    out.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        times = result["seconds"][batch] = {}
        for width in widths:
            times[width] = seconds_of(layer_steps(width, batch), rounds=5, round_seconds=0.02)
            # A later, larger one may run out of memory
            part.write_text(json.dumps(result, indent=1) + "\n")
        result["break_even_width"][batch] = {
            against: break_even(times, against) for against in PRECISIONS[:3]
        }
        print(
            f"batch {batch}: fp8 is faster from width",
            result["break_even_width"][batch],
            flush=True,
        )
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
    (out / "fp8_layer.md").write_text(table_of(result))
    print(f"results in {path}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or ["benchmarks/results"]))
