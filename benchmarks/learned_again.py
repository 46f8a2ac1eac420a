"""Does this code still learn as an earlier one, whose sums were in another order?

Trains ten seeds of a task in float32 and in FP8, on seeds that no setting was chosen on, and
compares their last greedy evaluations with those of commit 9f3ffcd, in learned_before.csv: the
median, the lowest and the highest, and how many reach the task's goal. Training is not deterministic across
versions, because sums in another order differ by rounding. So what can be equal is the spread over
seeds.

    python benchmarks/learned_again.py train LunarLander-v3 benchmarks/results/learned_again.csv
    python benchmarks/learned_again.py table benchmarks/results/learned_again.md

Tasks as tensors train in populations, the others one seed at a time, on all cores. Every seed that
has ended is in the .csv, and training goes on with those that are missing.
"""

import argparse
import csv
import functools
import statistics
from pathlib import Path

import tasks
from files import Journal, table_of

from fp8rl.build import Machine, build
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.machine.hardware import origin
from fp8rl.study import parallel
from fp8rl.train import train

SEEDS = 10
ARMS = ("fp32", "fp8")
COLUMNS = ("task", "arm", "seed", "return")
BEFORE = Path(__file__).parent / "results" / "learned_before.csv"


def configs_of(task: str) -> dict[Config, str]:
    """The configs of a task, with the arm of each. They are evaluated once, at their end."""
    first, steps, _, _ = tasks.TASKS[task]
    shape = {"env_id": None if task == tasks.CART else task, "steps": steps, "eval_every": steps}
    return {
        Config(seed=first + seed, precision=arm, **shape): arm
        for arm in ARMS
        for seed in range(SEEDS)
    }


def alone(config: Config) -> History:
    """Trains a config in Gymnasium's own environments."""
    return train(build(config, Machine(vectorization="sync")), progress=False).history


def train_missing(task: str, journal: Journal) -> None:
    """Trains the seeds that the journal does not have."""
    arms = configs_of(task)
    found = journal.done("task", "arm", "seed")
    done = {config for config, arm in arms.items() if (task, arm, str(config.seed)) in found}
    run = None if tasks.is_tensor_task(task) else alone
    for config, history in parallel.run_all(list(arms), run=run, done=done):
        values = (task, arms[config], config.seed, f"{history.final_return:.6g}")
        journal.add(dict(zip(COLUMNS, values, strict=True)))


@functools.cache
def returns_before() -> dict[tuple[str, str], list[float]]:
    """The last evaluations by the earlier code, by task and arm."""
    found: dict[tuple[str, str], list[float]] = {}
    with BEFORE.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["task"], row["arm"]
            found.setdefault(key, []).append(float(row["return"]))
    return found


def spread(task: str, returns: list[float]) -> str:
    """The median of the scores, their range, and how many reach the goal."""
    scores = [tasks.score(task, x) for x in returns]
    goal = tasks.TASKS[task][-1]
    reached = sum(score >= goal for score in scores)
    unit = tasks.unit_of(task)
    numbers = f"{statistics.median(scores):.2f}{unit} ({min(scores):.2f} to {max(scores):.2f})"
    return f"{numbers}, {reached} of {len(scores)}"


def table(journal: Journal) -> str:
    """A line for each task and arm."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in journal.rows():
        found.setdefault((row["task"], row["arm"]), []).append(float(row["return"]))
    lines = []
    for task in tasks.TASKS:
        for arm in ARMS:
            if (task, arm) in found:
                before = spread(task, returns_before()[task, arm])
                lines.append([task, arm, before, spread(task, found[task, arm])])
    columns = ("task", "precision", "at commit 9f3ffcd", "this code")
    return table_of(columns, lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train the seeds of a task that are missing")
    training.add_argument("task", choices=tasks.TASKS)
    training.add_argument("journal", type=Path)
    commands.add_parser("table", help="make the table").add_argument("out", type=Path)
    options = parser.parse_args(words)
    if options.command == "train":
        train_missing(options.task, Journal(options.journal, COLUMNS))
        return
    out = options.out
    text = table(Journal(out.with_suffix(".csv"), COLUMNS))
    note = "Median of the last evaluations, lowest to highest, and how many seeds reach the goal."
    command = f"python benchmarks/learned_again.py table {out}"
    out.write_text(f"{text}\n\n{note}\n\n`{command}` on {origin()}.\n")


if __name__ == "__main__":
    main()
