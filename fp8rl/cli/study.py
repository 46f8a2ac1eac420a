"""`python -m fp8rl study`: trains every precision on the same seeds and compares them."""

import contextlib
import dataclasses
import itertools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from ..config import Config
from ..disk.run_folder import Folder, read_mark, require_free
from ..env import Cart
from ..hardware import cores
from ..history import History
from ..requirements import shared
from ..study import comparison as study
from ..study import figures, parallel, throughput
from ..study.dask_cluster import Cluster, dask_cluster
from ..tasks.by_id import task_of


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


def compare(
    out: Path,
    comparison: tyro.conf.OmitArgPrefixes[study.Comparison] = study.Comparison(),  # noqa: B008
    sweep: tyro.conf.OmitArgPrefixes[Sweep] = Sweep(),  # noqa: B008
    one_by_one: bool = False,
    overwrite: bool = False,
    scheduler: str | None = None,
    workers: int | None = None,
) -> None:
    """Train every precision on the same seeds, in batches on every core, and compare them.

    Writes results.csv, table.md and curves.png. A study that was stopped goes on when called again.

    A number of Config may have several values (--learning-rate 1e-4 3e-4), crossed with all others.

    Args:
        out: folder for the results.
        sweep: numbers of the config.
        one_by_one: train every agent alone, which takes much longer.
        overwrite: replace a study that the folder holds.
        scheduler: address of a Dask scheduler, such as tcp://192.168.0.2:8786, whose workers train
            the agents, on this machine or on others. Start each with one thread, as in
            dask worker ADDRESS --nthreads 1 (docs/several_machines.md). Needs the package
            distributed.
        workers: how many workers the agents are split over. By default one a core of this machine
            or, with a scheduler, as many as its cluster has when the study begins. The last bits of
            the numbers depend on the split, so a study that continues keeps its own.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}: use 1 or more")
    if comparison.threshold is None:
        comparison = dataclasses.replace(
            comparison, threshold=study.threshold_of(comparison.env_id)
        )
    numbers, arms = dataclasses.asdict(sweep), {}
    for name, values in {"precisions": comparison.precisions, **numbers}.items():
        if not values:
            raise ValueError(f"{name} is empty: give at least one value")
        if len({*values}) < len(values):
            raise ValueError(f"{name} is {' '.join(map(str, values))}: give each value once")
    for values in itertools.product(*numbers.values()):
        fields = dict(zip(numbers, values, strict=True))
        suffix = "".join(
            f", {name} {in_words(value)}"
            for name, value in fields.items()
            if len(numbers[name]) > 1
        )
        arms |= comparison.arms(suffix, **fields)
    arm_of = {config: arm for arm, configs in arms.items() for config in configs}
    # None and the number that it stands for are one
    last_arm = {in_numbers(configs[0]): arm for arm, configs in arms.items()}
    for arm, configs in arms.items():
        other = last_arm[in_numbers(configs[0])]
        if other != arm:
            raise ValueError(f"{arm} is {other}: give each value once")
    each = parallel.run if one_by_one else None
    if not one_by_one and (shapes := len(set(map(shared, arm_of)))) > 1:
        print(f"{len(arm_of)} agents of {shapes} shapes, a batch for each")
    with contextlib.ExitStack() as stack:
        cluster = None if scheduler is None else stack.enter_context(dask_cluster(scheduler))
        if not overwrite:
            workers = workers or workers_of(out)
        workers = workers or (cluster.threads if cluster else cores())
        # What cannot be is refused before anything is written
        require(list(arm_of), each, workers, cluster)
        options = dataclasses.asdict(comparison) | numbers | {"workers": workers}
        options = json.loads(json.dumps(options))  # as they are read back
        folder = stack.enter_context(folder_of(out, options, overwrite))
        journal = study.Journal(out / "runs.jsonl")
        done = {config for config, arm in arm_of.items() if (arm, config) in journal.histories}
        finished = parallel.run_all(
            list(arm_of), cluster, workers, run=each, done=done, threshold=comparison.threshold
        )
        # Closed before the cluster is, whatever happens here
        for config, history in stack.enter_context(contextlib.closing(finished)):
            with folder.writing():
                journal.add(arm_of[config], config, history)
            if history.failure:
                print(
                    f"fp8rl: warning: {arm_of[config]}, seed {config.seed}: {history.failure}",
                    file=sys.stderr,
                )
        write_study(folder, journal.histories, arms, comparison, cluster)


def require(
    configs: list[Config], each: Callable | None, workers: int, cluster: Cluster | None
) -> None:
    """Raises what forbids a study of these configs on this machine, or on a cluster's."""
    if cluster is None:
        parallel.require(configs, each, workers)
        return
    for warning in cluster.warnings:
        print(f"fp8rl: warning: {warning}", file=sys.stderr)
    busiest = max(cluster.threads_by_host.values())
    cluster.submit(parallel.require, configs, each, workers, busiest).result()


def in_numbers(config: Config) -> Config:
    """A config with numbers where None leaves them to the width or to a task that is known without
    making it."""
    task = task_of(config.env_id) if config.env_id else Cart
    if task:
        return config.settled(task)
    if config.learning_rate is None:
        return dataclasses.replace(config, learning_rate=config.learning_rate_of_width)
    return config


def in_words(value: float | None) -> str:
    """A number in the name of an arm: six digits of it, or all where it has more."""
    return f"{value:g}" if value is not None and float(f"{value:g}") == value else str(value)


def folder_of(out: Path, options: dict, overwrite: bool) -> Folder:
    """The folder of a study with these options: a new one, or that of the same study, which was
    stopped."""
    if overwrite or read_mark(out).get("command") != "study":
        require_free(out, "study", overwrite)
        return Folder.create(out, "study", options, overwrite)
    folder = Folder.reopen(out, "study")
    # An older study has no number of workers, and goes on with any
    if {"workers": options["workers"]} | read_mark(out)["options"] != options:
        folder.close()
        raise FileExistsError(
            f"out is {out}, which holds another study: use a new folder, "
            "or add --overwrite to replace it"
        )
    return folder


def workers_of(out: Path) -> int | None:
    """How many workers the study in a folder is split over, or None."""
    found = read_mark(out).get("options", {}).get("workers")
    return found if type(found) is int and found > 0 else None


def write_study(
    folder: Folder,
    histories: dict[tuple[str, Config], History],
    arms: dict[str, list[Config]],
    comparison: study.Comparison,
    cluster: Cluster | None,
) -> None:
    """Writes results.csv, table.md and curves.png, with curves of all arms but the controls, and
    prints the table. The table names the processors of the cluster that trained the agents."""
    threshold = comparison.threshold
    runs = {arm: [histories[arm, config] for config in configs] for arm, configs in arms.items()}
    results = [
        study.summarize(*each, arm, threshold)
        for arm in arms
        for each in zip(arms[arm], runs[arm], strict=True)
    ]
    text = study.table(results, list(arms), threshold, comparison.margin)
    text += f"\n`python -m fp8rl {shlex.join(sys.argv[1:])}` on {throughput.origin()}.\n"
    if cluster:
        text += f"\nTrained by Dask workers on {'; '.join(cluster.processors)}.\n"
    folder.write("results.csv", study.results_csv(results))
    folder.write("table.md", text)
    shown = {arm: each for arm, each in runs.items() if not arm.startswith("control")}
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figures.study(
        figure,
        {arm: study.training_curve(each) for arm, each in shown.items()},
        {arm: study.stack(each, "eval_return") for arm, each in shown.items()},
        study.scores(results, "final_return"),
        threshold,
        marks=comparison.env_id is None,
    )
    folder.write("curves.png", figures.png(figure))
    print(text)
