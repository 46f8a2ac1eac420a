"""`python -m fp8rl study`: trains every precision on the same seeds and compares them."""

import contextlib
import dataclasses
import itertools
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

from ..config import Config
from ..disk.run_folder import BATCHES, Folder, read_mark, require_free
from ..history import History
from ..machine.hardware import cores, origin
from ..population.batches import shared
from ..study import comparison as study
from ..study import parallel
from ..study.dask_cluster import Cluster, dask_cluster
from .arguments import Unchecked, checked


def swept(field: dataclasses.Field) -> tuple:
    """A number of Config as a field with any number of values."""
    shown = tyro.conf.arg(help=f"Values of `train`'s {field.name}.")
    return (
        field.name,
        Annotated[tuple[field.type, ...], shown],
        dataclasses.field(default=(field.default,)),
    )


NUMBERS = [
    field
    for field in dataclasses.fields(Config)
    if field.type in (int, float, float | None) and field.name != "seed"
]


Sweep = dataclasses.make_dataclass("Sweep", map(swept, NUMBERS), frozen=True)


class ComparisonOptions(Unchecked, study.Comparison):
    pass


def compare(
    out: Path,
    comparison: tyro.conf.OmitArgPrefixes[ComparisonOptions],
    sweep: tyro.conf.OmitArgPrefixes[Sweep],
    overwrite: bool = False,
    scheduler: str | None = None,
    workers: int | None = None,
) -> None:
    """Train every precision on the same seeds, in batches on every core, and compare them.

    Args:
        out: Folder for results.csv, table.md and curves.png.
            A study that was stopped goes on near where it was when it is called again with the
            same options: its batches are saved once a minute.
        comparison: What is compared.
        sweep: Numbers of the agents. Several values (--learning-rate 1e-4 3e-4) are crossed.
        overwrite: Replace a study that the folder holds.
        scheduler: Address of a Dask scheduler, whose workers train the agents.
            Start each with one thread, as in dask worker ADDRESS --nthreads 1
            (docs/several_machines.md).
        workers: How many workers the agents are split over. The last bits of numbers depend on it.
            By default one a core or, with a scheduler, as many as its cluster has. A study that
            continues must have the same number.
    """
    comparison = checked(comparison)
    if comparison.threshold is None:
        comparison = dataclasses.replace(
            comparison, threshold=study.threshold_of(comparison.env_id)
        )
    numbers = dataclasses.asdict(sweep)
    for name, values in numbers.items():
        if not values:
            raise ValueError(f"{name} is empty: give at least one value")
    arms = arms_of(comparison, numbers)
    arm_of = {config: arm for arm, configs in arms.items() for config in configs}
    with contextlib.ExitStack() as stack:
        cluster = None if scheduler is None else stack.enter_context(dask_cluster(scheduler))
        if workers is None:
            workers = cluster.threads if cluster else cores()
        if workers < 1:
            raise ValueError(f"workers is {workers}: use 1 or more")
        tasks = parallel.split(list(arm_of), workers, None)
        if (shapes := len(set(map(shared, arm_of)))) > 1:
            print(f"{len(arm_of)} agents of {shapes} shapes, a batch for each")
        # What cannot be is refused before anything is written
        if cluster is None:
            parallel.require(tasks, min(workers, cores()))
        else:
            busiest = max(cluster.threads_by_host.values())
            cluster.submit(parallel.require, tasks, min(workers, busiest)).result()
        options = dataclasses.asdict(comparison) | numbers | {"workers": workers}
        folder = stack.enter_context(folder_of(out, options, overwrite))
        journal = study.Journal(out / "runs.jsonl")
        train_all(tasks, workers, cluster, folder, journal, arm_of)
        write_study(folder, journal.histories, arms, comparison, cluster)


def train_all(
    tasks: list[parallel.Batch],
    workers: int,
    cluster: Cluster | None,
    folder: Folder,
    journal: study.Journal,
    arm_of: dict[Config, str],
) -> None:
    """Trains the batches of a study, and writes each agent that finishes into the journal.

    If it is interrupted, it tells what is kept, and exits.
    """
    finished = parallel.run_batches(
        tasks,
        cluster,
        workers,
        done=set(journal.histories),
        folder=folder.path.absolute(),
    )
    try:
        # Closed before the cluster is, whatever happens here
        with contextlib.closing(finished):
            for config, history in finished:
                with folder.writing():
                    journal.add(arm_of[config], config, history)
                if history.failure:
                    print(
                        f"fp8rl: warning: {arm_of[config]}, seed {config.seed}: {history.failure}",
                        file=sys.stderr,
                    )
    except (KeyboardInterrupt, SystemExit) as ended:  # the second at SIGTERM
        done = sum(config in journal.histories for config in arm_of)
        print(
            f"fp8rl: interrupted: {done} of {len(arm_of)} agents have finished, and the others go "
            "on from where they were last saved (once a minute), when study is called again with "
            "the same options",
            file=sys.stderr,
        )
        sys.exit(getattr(ended, "code", 128 + signal.SIGINT))


def arms_of(comparison: study.Comparison, numbers: dict[str, tuple]) -> dict[str, list[Config]]:
    """The arms of a study, name -> a config for each seed, for each combination of the numbers."""
    arms = {}
    for values in itertools.product(*numbers.values()):
        fields = dict(zip(numbers, values, strict=True))
        suffix = "".join(
            f", {name} {in_words(value)}"
            for name, value in fields.items()
            if len(numbers[name]) > 1
        )
        arms |= comparison.arms(suffix, **fields)
    return arms


def in_words(value: float | None) -> str:
    """A number in the name of an arm: six digits of it, or all where it has more."""
    return f"{value:g}" if value is not None and float(f"{value:g}") == value else str(value)


def folder_of(out: Path, options: dict, overwrite: bool) -> Folder:
    """The folder of a study with these options in its mark: a new one, or that of the same study,
    which was stopped.

    Raises FileExistsError for the folder of a study with other options.
    """
    if overwrite or read_mark(out).get("command") != "study":
        require_free(out, "study", overwrite)
        folder = Folder.create(out, "study", options, overwrite)
        folder.write("runs.jsonl", "")  # without it, the mark would not count
        return folder
    folder = Folder.reopen(out, "study")
    theirs = read_mark(out)["options"]
    ours = json.loads(json.dumps(options))  # as it is read back
    different = [
        f"{name} is {theirs.get(name)} there and {value} here"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if different:
        folder.close()
        raise FileExistsError(
            f"out is {out}, which holds another study ({', '.join(different)}): give its options, "
            "use a new folder, or add --overwrite to replace it"
        )
    return folder


def write_study(
    folder: Folder,
    histories: dict[Config, History],
    arms: dict[str, list[Config]],
    comparison: study.Comparison,
    cluster: Cluster | None,
) -> None:
    """Writes results.csv, table.md and curves.png, with curves of all arms but the controls, and
    prints the table. The table names the processors of the cluster that trained the agents.
    """
    from matplotlib.figure import Figure

    from ..study import figures

    threshold = comparison.threshold
    runs = {arm: [histories[config] for config in configs] for arm, configs in arms.items()}
    results = [
        study.summarize(config, history, arm, threshold)
        for arm in arms
        for config, history in zip(arms[arm], runs[arm], strict=True)
    ]
    text = study.table(results, list(arms), threshold)
    text += f"\n`python -m fp8rl {shlex.join(sys.argv[1:])}` on {origin()}.\n"
    if cluster:
        text += f"\nTrained by Dask workers on {'; '.join(cluster.processors)}.\n"
    folder.write("results.csv", study.results_csv(results))
    folder.write("table.md", text)
    shown = {arm: each for arm, each in runs.items() if not arm.startswith("control")}
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figures.study(
        figure,
        {arm: study.stack(each, "train_return", carry=True) for arm, each in shown.items()},
        {arm: study.stack(each, "eval_return") for arm, each in shown.items()},
        study.scores(results, "final_return"),
        threshold,
        marks=comparison.env_id is None,
    )
    folder.write("curves.png", figures.png(figure))
    folder.remove(BATCHES)  # files of batches, if one has ended with all agents known
    print(text)
