"""From which width on is training faster in bfloat16, or in FP8?

Environment steps a second of training, replay included, by the units in a layer. With --cpu on one
core, by the processor's time, so that programs beside this one count little: single runs of the cart
with the defaults, and populations of 8 agents. With --cuda on a GPU, by the clock, each iteration as
one graph, with 1,024 environments and up to 8,192 units, in every precision that it has, and its peak
memory.

    python benchmarks/widths.py --cpu benchmarks/results/widths_speed.md
    python benchmarks/widths.py --cuda benchmarks/results/widths_cuda.md
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from files import table_of

from fp8rl.build import Machine, build, build_population
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.machine.gpu.cuda_graphs import WARMUP
from fp8rl.precision import available_precisions
from fp8rl.train import Run, iterate

WIDTHS = (16, 64, 256, 1024)
WIDTHS_ON_CUDA = tuple(2**n for n in range(6, 14))
ALONE = ("fp32", "bf16", "fp8")
TOGETHER = ("fp32", "fp8")
AGENTS = 8  # that are together
SECONDS = 5  # that a speed is measured over; on a GPU a tenth
ENDLESS = {"steps": 10**9, "eval_every": 0}
SHAPE_ON_CUDA = {
    "num_envs": 1024,
    "rollout_length": 32,
    "slice_length": 32,
    "batch_size": 16_384,
    "capacity": 330_000,
    "replay_updates": 2,
}


def speed(run: Run, clock: Callable[[], float], seconds: float, agents: int = 1) -> float:
    """Environment steps in a second of a clock, of all agents of a run together."""
    with contextlib.closing(iterate(run)) as iterations:
        for _ in range(WARMUP + 2):  # loads what training needs, and captures graphs
            next(iterations)
        began = clock()
        count = 0
        while count < 3 or clock() - began < seconds:
            next(iterations)
            count += 1
        run.launch.finish(run)
    return count * agents * run.config.steps_per_iteration / (clock() - began)


def table_on_cpu() -> Iterator[str]:
    """The table of speeds, after every row."""
    torch.set_num_threads(1)
    columns = ["width", *(f"{name} alone" for name in ALONE), "bf16 / fp32"]
    columns += [f"{AGENTS} agents in {name}" for name in TOGETHER]
    rows = []
    for width in WIDTHS:
        shape = {"hidden_size": width, **ENDLESS}
        alone = [speed(build(Config(name, **shape)), time.process_time, SECONDS) for name in ALONE]
        together = []
        for name in TOGETHER:
            run = build_population([Config(name, seed=k, **shape) for k in range(AGENTS)])
            together.append(speed(run, time.process_time, SECONDS, AGENTS))
        ratio = f"{alone[1] / alone[0]:.2f}"
        numbers = [f"{x:,.0f}" for x in (*alone, *together)]
        rows.append([f"{width:,}", *numbers[: len(ALONE)], ratio, *numbers[len(ALONE) :]])
        yield table_of(columns, rows)


def table_on_cuda() -> Iterator[str]:
    """The table of speeds and memory, after every row."""
    machine = Machine("cuda")
    names = available_precisions(machine.device)
    rows = []
    for width in WIDTHS_ON_CUDA:
        cells = [f"{width:,}"]
        for name in names:
            run = None  # frees the memory of the last one
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            run = build(Config(name, hidden_size=width, **ENDLESS, **SHAPE_ON_CUDA), machine)
            rate = speed(run, time.perf_counter, SECONDS / 10)
            peak = torch.cuda.max_memory_reserved()
            cells.append(f"{rate:,.0f}; {peak / 1e9:.2f} GB")
        rows.append(cells)
        yield table_of(("width", *names), rows)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--cpu", action="store_true")
    form.add_argument("--cuda", action="store_true")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(words)
    if options.cuda and not torch.cuda.is_available():
        parser.error("--cuda needs a CUDA device, and there is none")
    command = f"python benchmarks/widths.py --{'cuda' if options.cuda else 'cpu'} {options.out}"
    for table in table_on_cuda() if options.cuda else table_on_cpu():
        print(table.splitlines()[-1], flush=True)
        options.out.write_text(f"{table}\n\n`{command}` on {origin()}.\n")


if __name__ == "__main__":
    main()
