"""How does the cost of an update grow with its rows, and how fast is the loop beside an earlier one?

    rows    the milliseconds of an update of the defaults' network in float32 on 1,024 to 65,536
            replayed rows. Beside it are those of the products of matrices that it needs, alone: of
            each layer's results, of its weights' gradient and, but for the first layer, of its
            inputs' gradient
    before  the seconds of 100,000 steps of the cart in the loop (`History`'s, so without imports and
            evaluations, and the same with them), in float32, by this code and by that of a clone at
            another commit. Each training is a process of its own, and they take turns

    python benchmarks/update_cost.py rows benchmarks/results/update_rows.md
    python benchmarks/update_cost.py before benchmarks/results/loop_before.md --clone DIR

DIR is a clone of this project, at commit e545e5e for the table in benchmarks/results/.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from files import table_of

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.machine.hardware import origin
from fp8rl.train import Run

ROOT = Path(__file__).parent.parent
ROWS = (1024, 4096, 16384, 65536)
ROUNDS = 5
FIRST_SEED = 1000
# What a process prints: the seconds of its iterations, and of iterations and evaluations.
TRAINING = """
import json, sys, time, torch
torch.set_num_threads(1)
from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.train import train
run = build(Config(steps=100_000, seed=int(sys.argv[1])))
began = time.perf_counter()
train(run, progress=False)
seconds = time.perf_counter() - began
iterations = run.history.last["seconds"]
print(json.dumps([iterations, seconds, run.history.final_return]))
"""


def run_of(rows: int) -> Run:
    """A run whose updates are on so many replayed rows, with a ring of four times as many."""
    shape = {"num_envs": rows // 64, "batch_size": rows, "capacity": max(20_000, 4 * rows)}
    run = build(Config(steps=10**7, eval_every=0, replay_updates=1, **shape))
    run.advance(0)
    return run


def products_of(run: Run, rows: int) -> Callable[[], None]:
    """A function that computes the products of an update's matrices, and nothing else."""
    model = run.model
    weights = [layer.weight.detach() for layer in (model.inputs, *model.hidden)]
    weights.append(torch.cat((model.actor.weight, model.critic.weight)).detach())
    sizes = [weights[0].shape[1], *(len(weight) for weight in weights)]
    inputs = [torch.randn(rows, size) for size in sizes[:-1]]
    of_results = [torch.randn(rows, size) for size in sizes[1:]]

    def products() -> None:
        for weight, x, gradient in zip(weights, inputs, of_results, strict=True):
            x.mm(weight.t())
            gradient.t().mm(x)
            if weight is not weights[0]:
                gradient.mm(weight)

    return products


def milliseconds(functions: list[Callable], count: int) -> list[float]:
    """The medians of functions that take turns."""
    times = [[] for _ in functions]
    for _ in range(count):
        for function, own in zip(functions, times, strict=True):
            began = time.perf_counter()
            function()
            own.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(own) for own in times]


def table_of_rows() -> str:
    """A line for each number of rows."""
    torch.set_num_threads(1)
    lines = []
    for rows in ROWS:
        run = run_of(rows)
        update = functools.partial(run.learner.update, run.sample())
        products = products_of(run, rows)
        update()
        count = max(15, 300 * 1024 // rows)
        update, alone = milliseconds([update, products], count)
        lines.append([f"{rows:,}", f"{update:.2f}", f"{alone:.2f}", f"{update / alone:.2f}"])
    return table_of(("rows", "an update, ms", "its products alone, ms", "ratio"), lines)


def trained(code: Path, seed: int) -> list[float]:
    """Seconds of iterations, seconds with evaluations, and the return, of a training by `code`."""
    environment = os.environ | {"PYTHONPATH": str(code), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", TRAINING, str(seed)]
    output = subprocess.run(
        command, env=environment, cwd=code, check=True, capture_output=True, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def table_beside(clone: Path, rounds: int) -> str:
    """A line for the code of a clone, and one for this code."""
    codes = {"the clone": clone, "this code": ROOT}
    found: dict[str, list] = {name: [] for name in codes}
    for number in range(rounds):
        for name, code in codes.items():
            found[name].append(trained(code, FIRST_SEED + number))
            print(name, *(f"{x:.2f}" for x in found[name][-1]), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=clone, capture_output=True, text=True
    ).stdout.strip()
    lines = []
    for name, times in found.items():
        ratios = zip(times, found["the clone"], strict=True)
        ratios = [(a[0] / b[0], a[1] / b[1]) for a, b in ratios]
        of_iterations, of_all = (statistics.median(x) for x in zip(*ratios, strict=True))
        iterations, seconds, returns = (statistics.median(x) for x in zip(*times, strict=True))
        lines.append(
            [
                f"at {commit}" if name == "the clone" else name,
                f"{iterations:.2f}",
                f"{of_iterations:.2f}",
                f"{seconds:.2f}",
                f"{of_all:.2f}",
                f"{returns:.1f}",
                rounds,
            ]
        )
    columns = ("code", "iterations, s", "ratio", "with evaluations, s", "ratio", "greedy return")
    return table_of((*columns, "rounds"), lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("rows", "before"))
    parser.add_argument("out", type=Path, help="table to write")
    parser.add_argument("--clone", type=Path, metavar="DIR", help="the code of another commit")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(words)
    command = f"python benchmarks/update_cost.py {options.what} {options.out}"
    if options.what == "rows":
        text = table_of_rows()
    else:
        if options.clone is None:
            parser.error("--clone is missing: name a clone of this project at another commit")
        text = table_beside(options.clone.resolve(), options.rounds)
        text += "\n\nMedians over the rounds; ratios are those within the rounds."
        command += " --clone DIR"
    options.out.write_text(f"{text}\n\n`{command}` on {origin()}.\n")


if __name__ == "__main__":
    main()
