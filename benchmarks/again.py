"""Does the present code train the agents of an earlier table again, digit by digit?

A table that took hours need not be made anew after every change of the code. This draws some
trainings of its journal, repeats them, and compares all returns as they are written there. If all
are equal, `results.py` goes on from that journal as if the present code had begun it, and a line
above the table says how many trainings were repeated. If one differs, nothing is changed.

    python benchmarks/again.py ladder --batches 5
    python benchmarks/again.py tasks --only Hopper-v5 HalfCheetah-v5   # one of each precision
    python benchmarks/results.py ladder tasks

Returns are equal only on the kind of processor that made the table, and with as many workers, since
these split the agents into batches (fp8rl/study/parallel.py)."""

import argparse
import csv
import dataclasses
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ladder
import results
import tasks
import torch

from fp8rl.build import build_population
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.study import parallel
from fp8rl.study.fingerprint import fingerprint
from fp8rl.train import train


class Training(NamedTuple):
    """Agents that train together, or one alone, and their returns in the journal, as texts."""

    name: str
    configs: list[Config]
    returns: list[str]


def text_of(history: History) -> str:
    """All evaluations of an agent, as journals have them."""
    return " ".join(f"{x:.6g}" for x in history.evaluations()[1])


def ladder_trainings(journal: Path, workers: int) -> list[Training]:
    """The batches of the ladder."""
    with journal.open() as file:
        kept = {(row["rung"], row["task"], int(row["seed"])): row for row in csv.DictReader(file)}
    names = {}  # a config may be on several rungs
    for rung in ladder.RUNGS:
        for task in ladder.TASKS:
            for config in ladder.configs_of(rung, task):
                names.setdefault(config, (rung, task, config.seed))
    return [
        Training(
            " ".join(map(str, names[batch[0]])),
            batch,
            [kept[names[config]]["returns"] for config in batch],
        )
        for _, batch in parallel.split(list(names), workers, None)
    ]


def is_chosen(row: dict[str, str], only: list[str]) -> bool:
    """Whether a row of tasks.py is of this package and of one of these tasks."""
    return row["arm"] in tasks.PRECISIONS and row["task"] in only


def tasks_trainings(journal: Path, only: list[str]) -> list[Training]:
    """The agents of tasks.py on some of the tasks that Gymnasium steps. Their settings may have
    another mark, because fields of the config are new."""
    with journal.open() as file:
        rows = [row for row in csv.DictReader(file) if is_chosen(row, only)]
    found = []
    for row in rows:
        first = tasks.configs_of(row["task"], row["arm"])[0]
        config = dataclasses.replace(first, seed=int(row["seed"]))
        name = f"{row['task']} {row['arm']} {row['seed']}"
        found.append(Training(name, [config], [row["returns"]]))
    return found


def drawn(trainings: list[Training], count: int | None) -> list[Training]:
    """So many trainings at random, or one of each task and precision."""
    shuffled = random.Random(0).sample(trainings, len(trainings))
    if count:
        return shuffled[:count]
    first = {}
    for training in shuffled:
        config = training.configs[0]
        first.setdefault((config.env_id, config.precision), training)
    return list(first.values())


def repeated(name: str, configs: list[Config]) -> list[str]:
    """The returns of a training by the present code."""
    if name == "tasks":
        return [text_of(tasks.through_gymnasium(configs[0]))]
    if len(configs) == 1:
        return [text_of(parallel.run(configs[0]))]
    population = train(build_population(configs), progress=False)
    return [text_of(history) for history in population.histories(configs)]


def differing(name: str, trainings: list[Training]) -> Iterator[str]:
    """Repeats trainings, and gives the names of those with other returns."""
    for number, (label, configs, returns) in enumerate(trainings, 1):
        same = repeated(name, configs) == returns
        said = "equal" if same else "DIFFERENT"
        print(f"{number} of {len(trainings)}: {label}, {len(configs)} agents: {said}", flush=True)
        if not same:
            yield label


def renew_marks(journal: Path, only: list[str]) -> None:
    """Gives rows of some tasks the present marks of their settings."""
    with journal.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if is_chosen(row, only):
            row["settings"] = tasks.mark_of(row["task"], row["arm"])
    with journal.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(name: str, count: int | None, workers: int, only: list[str]) -> None:
    torch.set_num_threads(1)  # as every run has
    journal = results.RESULTS / f"{name}.csv"
    if name == "tasks":
        every = tasks_trainings(journal, only)
    else:
        every = ladder_trainings(journal, workers)
    chosen = drawn(every, count)
    if wrong := list(differing(name, chosen)):
        sys.exit(f"{len(wrong)} of {len(chosen)} differ, so {name} stays as it is")
    if name == "tasks":
        renew_marks(journal, only)
    before = results.made().get(name, {})
    note = f"{len(chosen)} of {len(every)} trainings were repeated"
    entry = before | {"unfinished": fingerprint(), "again": note}
    if name == "tasks":
        entry["part"] = " and ".join(only)
    results.record(name, entry)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("ladder", "tasks"))
    parser.add_argument("--batches", type=int, help="how many trainings to repeat")
    parser.add_argument("--workers", type=int, default=1, help="that the table was made with")
    in_gymnasium = [task for task in tasks.TASKS if not tasks.is_tensor_task(task)]
    parser.add_argument("--only", nargs="+", default=in_gymnasium, choices=in_gymnasium)
    options = parser.parse_args()
    main(options.table, options.batches, options.workers, options.only)
