"""What does the kernel that acts bring? machine/gpu/acting_kernel.py computes all steps of a rollout in
one kernel; without it each operation of each step is a launch, in a CUDA graph as well.

Training steps per second of the default config on a GPU, as CUDA graphs, with the kernel and with
`rollout.unroll` in its place, for a single run and for populations. Rounds alternate; medians. Needs
CUDA: without it the script says so and writes nothing.

    python benchmarks/acting_kernel.py benchmarks/results/acting_kernel.md
"""

import contextlib
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import torch

from fp8rl.build import Machine, build, build_population
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.rollout import unroll
from fp8rl.train import Run, iterate

ROUNDS = 3
WARM = 20  # iterations, of which the first ones capture the graph
ITERATIONS = 60
DEFAULT = Config(steps=10**9, eval_every=0)
WITHOUT_REPLAY = {"replay_updates": 0, "rollout_length": 32, "slice_length": 1}
CASES = {
    "a run of 16 environments": (None, {}),
    "32 agents of 16": (32, {}),
    "128 agents of 16": (128, {}),
    "a run of 4,096, without replay": (
        None,
        {"num_envs": 4096, "capacity": 33 * 4096, **WITHOUT_REPLAY},
    ),
    "128 agents of 16, without replay": (128, WITHOUT_REPLAY),
    "1,024 agents of 16, without replay": (1024, WITHOUT_REPLAY),
}


def run_of(agents: int | None, fields: dict) -> Run:
    config = dataclasses.replace(DEFAULT, **fields)
    if agents is None:
        return build(config, Machine("cuda"))
    configs = [dataclasses.replace(config, seed=seed) for seed in range(agents)]
    return build_population(configs, "cuda")


def steps_per_second(agents: int | None, fields: dict, with_kernel: bool) -> float:
    run = run_of(agents, fields)
    if not with_kernel:
        run.collector.loop = unroll
    elif run.collector.loop is unroll:
        raise RuntimeError("the kernel does not run here: install Triton and a C compiler")
    with contextlib.closing(iterate(run)) as iterations:
        for _ in range(WARM):
            next(iterations)
        run.launch.finish(run)
        began = time.perf_counter()
        for _ in range(ITERATIONS):
            next(iterations)
        run.launch.finish(run)
        seconds = time.perf_counter() - began
    return ITERATIONS * run.config.steps_per_iteration * (agents or 1) / seconds


def main(out: Path) -> None:
    if not torch.cuda.is_available():
        print("acting_kernel skipped: it needs a CUDA device, and there is none here")
        return
    lines = [
        "| what trains | steps/s, step by step | steps/s, one kernel | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, (agents, fields) in CASES.items():
        speeds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for with_kernel in speeds:
                speeds[with_kernel].append(steps_per_second(agents, fields, with_kernel))
        plain, kernel = (statistics.median(speeds[key]) for key in (False, True))
        lines.append(f"| {name} | {plain:,.0f} | {kernel:,.0f} | {kernel / plain:.2f} |")
        print(lines[-1], flush=True)
    made = f"`python benchmarks/acting_kernel.py {out}` on {origin()}, CUDA {torch.version.cuda}."
    out.write_text("\n".join(lines) + f"\n\n{made}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
