"""The floor: the matmuls of one iteration alone, and the bytes of its activations alone.

Matmuls: for each of T time steps the forward pass of N rows and the backward pass, as `python -m
fp8rl bench` has them: both heads are one layer of three, outputs are preallocated, nothing stands
between, and where a run reuses them (`reuses_forward` in build.py) the forward passes that act
serve the update. Bytes: the activations of T + 1 rows of N (2, 64, 64 and 3 numbers a row) are read
once and written once, from one buffer to another. Each comes as environment steps per second, were
an iteration nothing else; `both` is the sum of the two times. The best of the rounds counts.

    python benchmarks/speed/floor.py --num-envs 1024 --rollout-length 16 --precision fp32 --json
"""

import json
import platform
import time

import common
import torch

from fp8rl.build import HERE
from fp8rl.precision import PRECISIONS
from fp8rl.study import throughput

WIDTHS = 2 + 64 + 64 + 3


def best_seconds(function, seconds: float) -> float:
    """The shortest of many calls of a function."""
    end = time.perf_counter() + seconds
    best = float("inf")
    while time.perf_counter() < end:
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def floor_of(num_envs: int, length: int, precision: str, seconds: float) -> dict:
    dtype, rows = PRECISIONS[precision].autocast or torch.float32, (length + 1) * num_envs
    matmuls = throughput.floor_of(throughput.Loop(num_envs, length, precision).config(), HERE)
    source = torch.randn(rows, WIDTHS).to(dtype)
    target = torch.empty_like(source)
    times = {
        "matmuls": best_seconds(matmuls, seconds),
        "bytes": best_seconds(lambda: target.copy_(source), seconds),
    }
    times["both"] = sum(times.values())
    return {f"{name}_steps_per_second": num_envs * length / value for name, value in times.items()}


def main() -> None:
    options = common.parser(("default",), ("fp32", "bf16", "fp16"), 1024, 16).parse_args()
    torch.set_num_threads(options.threads)
    for num_envs in options.num_envs:
        row = {
            "contestant": "floor",
            "setting": f"{options.threads} torch threads",
            "num_envs": num_envs,
            "rollout_length": options.rollout_length,
            "precision": options.precision,
            **floor_of(num_envs, options.rollout_length, options.precision, options.seconds),
            "peak_rss_mb": common.peak_rss_mb(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        print(json.dumps(row, indent=None if options.json else 1), flush=True)


if __name__ == "__main__":
    main()
