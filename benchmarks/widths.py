"""Do the defaults learn with networks of any width and depth, and what does a width cost in time?

The cart and CartPole-v1 with the steps and goals of tasks.py, with 16 and with 256 units and, with
64, with one and with three layers, on seeds on which nothing was chosen (tasks.py has the default,
two layers of 64). The rule for the learning rate, 0.001 times the root of 64 / units, came after a
look at seeds from 8200 up, where at 0.001 three of sixty runs with 16 units ended just below 195;
so other widths have seeds from 8300 up. The agents of a line train as populations of up to 10, each
population in a process of its own with one thread. "Held" is that of tasks.py. In one layer there
is nothing that FP8 can multiply.

With --speed it times single runs and populations of the cart instead, replay included: from which
width does bfloat16 pay here? Steps a second are of the processor's time, of one core, so that
programs beside this one count little. With --cuda the same on a GPU, by the clock, each iteration
as one graph, with 1,024 environments and up to 8,192 units, in every precision that it has, and its
peak memory.

    python benchmarks/widths.py benchmarks/results/widths.md [--only CartPole-v1] [--widths 16 64]
    [--arms fp32] [--seeds 10]
    python benchmarks/widths.py benchmarks/results/widths_speed.md --speed
    python benchmarks/widths.py benchmarks/results/widths_cuda.md --cuda

Finished seeds go to a .csv beside the table, so it can be stopped at any time and goes on with
those that are missing."""

import argparse
import contextlib
import csv
import itertools
import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import tasks
import torch

from fp8rl.build import HERE, Machine, build, build_population
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.machine.cuda_graphs import WARMUP
from fp8rl.machine.hardware import keep_freed_memory
from fp8rl.precision import available_precisions
from fp8rl.train import Run, iterate, train

# First seeds. The learning rate of widths other than 64 was changed after a look at seeds from 8200
# up, so they have others.
FIRST, WIDTHS = {64: 8200}, (16, 64, 256, 1024)
ARMS = ("fp32", "bf16", "fp8", "eight-bit state")
# Width and layers: seeds
SHAPES = {(16, 2): 10, (64, 1): 10, (64, 3): 10, (256, 2): 5}
# What --speed times, and how many agents are together
ALONE, TOGETHER, AGENTS = (
    ("fp32", "bf16", "fp8"),
    ("fp32", "fp8"),
    8,
)
ON_CUDA, CUDA = (
    tuple(2**n for n in range(6, 14)),
    Machine("cuda") if torch.cuda.is_available() else HERE,
)
COLUMNS = (
    "task",
    "width",
    "layers",
    "arm",
    "median score",
    "lowest",
    "seeds that reach the goal",
    "held",
)
FIELDS = ("task", "width", "layers", "arm", "seed", "settings", "returns")


def configs_of(task: str, width: int, layers: int, arm: str) -> list[Config]:
    """A config for each seed of a line."""
    _, steps, every, _ = tasks.TASKS[task]
    env_id = None if task == tasks.CART else task
    shape = {
        "env_id": env_id,
        "steps": steps,
        "eval_every": every,
        "hidden_size": width,
        "layers": layers,
    }
    count = 0 if layers == 1 and "fp8" in tasks.PRECISIONS[arm].values() else SHAPES[width, layers]
    return [
        Config(seed=FIRST.get(width, 8300) + k, **shape | tasks.PRECISIONS[arm])
        for k in range(count)
    ]


def mark_of(config: Config) -> str:
    """Eight digits that change with any setting."""
    return f"{zlib.crc32(config.to_json().encode()):08x}"


def rows_of(configs: list[Config]) -> list[dict]:
    """What the journal keeps of each seed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    population = train(build_population(configs), progress=False)
    returns = [
        " ".join(f"{x:.6g}" for x in history.evaluations()[1])
        for history in population.histories(configs)
    ]
    return [
        {"settings": mark_of(c), "returns": each} for c, each in zip(configs, returns, strict=True)
    ]


def alone(function: Callable, *args):
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def read(journal: Path) -> dict[str, dict]:
    """The finished seeds, by their settings."""
    if not journal.exists():
        journal.write_text(",".join(FIELDS) + "\n")
    return {row["settings"]: row for row in csv.DictReader(journal.read_text().splitlines())}


def line(task: str, width: int, layers: int, arm: str, found: dict[str, dict]) -> str:
    """A line of the table, of the seeds that are found, or nothing."""
    configs = configs_of(task, width, layers, arm)
    rows = [found[mark] for mark in map(mark_of, configs) if mark in found]
    if not rows:
        return ""
    seeds = [tasks.Seed(np.array([float(x) for x in row["returns"].split()]), 0.0) for row in rows]
    scores, count = np.array([seed.returns[-1] for seed in seeds]), len(rows)
    cells = [task, f"{width:,}", layers, arm, f"{np.median(scores):.2f}", f"{scores.min():.2f}"]
    cells.append(f"{(scores >= tasks.TASKS[task][3]).sum()} of {count}")
    cells.append(f"{sum(map(tasks.held, seeds))} of {count}" if task == tasks.CARTPOLE else "-")
    return f"| {' | '.join(map(str, cells))} |"


def speed(
    run: Run,
    clock: Callable[[], float] = time.process_time,
    seconds: float = 5,
    agents: int = 1,
) -> float:
    """Environment steps in a second of a clock, of all agents of a run together.

    The clock is by default the processor's time. It is read over so many seconds.
    """
    with contextlib.closing(iterate(run)) as iterations:
        for _ in range(WARMUP + 2):  # loads what training needs, and captures graphs
            next(iterations)
        began, count = clock(), 0
        while count < 3 or clock() - began < seconds:
            next(iterations)
            count += 1
        run.launch.finish(run)
    return count * agents * run.config.steps_per_iteration / (clock() - began)


def speeds() -> str:
    """The table of speeds."""
    lines = []
    for width in WIDTHS:
        shape = {"hidden_size": width, "steps": 10**9, "eval_every": 0}
        found = [speed(build(Config(name, **shape))) for name in ALONE]
        together = [
            speed(
                build_population([Config(name, seed=k, **shape) for k in range(AGENTS)]),
                agents=AGENTS,
            )
            for name in TOGETHER
        ]
        cells = [
            f"{width:,}",
            *(f"{x:,.0f}" for x in found),
            f"{found[1] / found[0]:.2f}",
            *(f"{x:,.0f}" for x in together),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    names = (
        "width",
        *(f"{name} alone" for name in ALONE),
        "bf16 / fp32",
        *(f"{AGENTS} agents in {name}" for name in TOGETHER),
    )
    return tasks.table(names, lines)


def speeds_on_cuda(widths: tuple[int, ...] = ON_CUDA) -> Iterator[str]:
    """The table of speeds and memory by width on a GPU, after every row."""
    names, lines = available_precisions(CUDA.device), []
    shape = {
        "num_envs": 1024,
        "rollout_length": 32,
        "slice_length": 32,
        "batch_size": 16_384,
        "capacity": 330_000,
    }
    for width in widths:
        cells = [f"{width:,}"]
        for name in names:
            run = None
            torch.cuda.empty_cache()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            run = build(
                Config(
                    name, hidden_size=width, replay_updates=2, steps=10**9, eval_every=0, **shape
                ),
                CUDA,
            )
            each = speed(run, time.perf_counter, seconds=0.5)
            peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
            cells.append(f"{each:,.0f}; {peak / 1e9:.2f} GB")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        yield tasks.table(("width", *names), lines)


def learning(journal: Path, only: list[str], widths: list[int], arms: list[str], seeds: int) -> str:
    """The table of what is learned, after the training of what the journal does not have."""
    found, wanted = read(journal), (tasks.CART, tasks.CARTPOLE)
    for (width, layers), task, arm in itertools.product(SHAPES, wanted, ARMS):
        # Wider ones in smaller steps
        names, most = (
            (task, width, layers, arm),
            min(10, 2560 // width),
        )
        configs = (
            configs_of(*names)[:seeds] if task in only and width in widths and arm in arms else []
        )
        for group in (configs[i : i + most] for i in range(0, len(configs), most)):
            if all(mark_of(config) in found for config in group):
                continue
            with journal.open("a", newline="") as file:
                for config, row in zip(group, alone(rows_of, group), strict=True):
                    row |= dict(zip(FIELDS, (*names, config.seed), strict=False))
                    found[row["settings"]] = row
                    csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)
            print(line(*names, found), flush=True)
    lines = [
        line(task, *shape, arm, found)
        for task, shape, arm in itertools.product(wanted, SHAPES, ARMS)
    ]
    return tasks.table(COLUMNS, list(filter(None, lines)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[tasks.CART, tasks.CARTPOLE])
    parser.add_argument("--widths", nargs="*", type=int, default=WIDTHS)
    parser.add_argument("--arms", nargs="*", default=ARMS, choices=ARMS)
    parser.add_argument("--seeds", type=int, default=10)
    forms = {"speed": speeds, "cuda": speeds_on_cuda}
    for name in forms:
        parser.add_argument(f"--{name}", dest="form", action="store_const", const=name)
    out, *chosen, form = vars(parser.parse_args()).values()
    if form == "cuda" and not torch.cuda.is_available():
        parser.error("--cuda needs a CUDA device, and there is none")
    if form != "cuda":  # where only the first weights are computed on the CPU
        torch.set_num_threads(1)  # as the processes have
    made = f"`python benchmarks/widths.py {out}{f' --{form}' if form else ''}` on {origin()}.\n"
    table = forms[form]() if form else learning(out.with_suffix(".csv"), *chosen)
    for each in [table] if isinstance(table, str) else table:
        out.write_text(f"{each}\n{made}")
