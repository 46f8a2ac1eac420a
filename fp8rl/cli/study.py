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
from ..disk.run_folder import Folder, read_mark, require_free
from ..env import Cart
from ..history import History
from ..machine.hardware import cores
from ..population.batches import shared
from ..study import comparison as study
from ..study import parallel
from ..study.dask_cluster import Cluster, dask_cluster
from ..tasks.by_id import task_of
from . import throughput
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
            A study that was stopped goes on near where it was when it is called again: its batches
            are saved once a minute. Called with more seeds, precisions or values of a number, it
            trains the agents that are new, in batches of their own.
        comparison: What is compared.
        sweep: Numbers of the agents. Several values (--learning-rate 1e-4 3e-4) are crossed.
        overwrite: Replace a study that the folder holds.
        scheduler: Address of a Dask scheduler, whose workers train the agents.
            Start each with one thread, as in dask worker ADDRESS --nthreads 1
            (docs/several_machines.md).
        workers: How many workers the agents are split over. The last bits of numbers depend on it.
            By default one a core or, with a scheduler, as many as its cluster has when the study
            begins. A study that continues keeps its number.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}: use 1 or more")
    comparison = checked(comparison)
    if comparison.threshold is None:
        comparison = dataclasses.replace(
            comparison, threshold=study.threshold_of(comparison.env_id)
        )
    numbers = dataclasses.asdict(sweep)
    arms = arms_of(comparison, numbers)
    require_different(arms, comparison, numbers)
    arm_of = {config: arm for arm, configs in arms.items() for config in configs}
    with contextlib.ExitStack() as stack:
        cluster = None if scheduler is None else stack.enter_context(dask_cluster(scheduler))
        default_workers = cluster.threads if cluster else cores()
        asked = dataclasses.asdict(comparison) | numbers | {"workers": workers}
        asked = json.loads(json.dumps(asked))  # as it is read back
        earlier = [] if overwrite else rounds_in(out)
        rounds = with_earlier_rounds(out, earlier, asked, default_workers)
        tasks = tasks_of(rounds)
        if (shapes := len(set(map(shared, arm_of)))) > 1:
            print(f"{len(arm_of)} agents of {shapes} shapes, a batch for each")
        # What cannot be is refused before anything is written
        require(tasks, rounds[-1]["workers"], cluster)
        folder = stack.enter_context(folder_of(out, mark_of(rounds), overwrite))
        journal = study.Journal(out / "runs.jsonl")
        if earlier and len(rounds) > len(earlier):
            new = sum(config not in journal.histories for config in arm_of)
            print(f"adds agents to the study in {out}: {new} of {len(arm_of)} are to be trained")
        train_all(tasks, rounds[-1]["workers"], cluster, folder, journal, arm_of, comparison)
        write_study(folder, journal.histories, arms, comparison, cluster, tasks)


def train_all(
    tasks: list[parallel.Batch],
    workers: int,
    cluster: Cluster | None,
    folder: Folder,
    journal: study.Journal,
    arm_of: dict[Config, str],
    comparison: study.Comparison,
) -> None:
    """Trains the batches of a study, and writes each agent that finishes into the journal.

    If it is interrupted, it tells what is kept, and exits.
    """
    finished = parallel.run_batches(
        tasks,
        cluster,
        workers,
        done=set(journal.histories),
        threshold=comparison.threshold,
        folder=folder.path,
    )
    try:
        # Closed before the cluster is, whatever happens here
        with contextlib.closing(finished):
            for config, history in finished:
                # A signal must not come between this and what the study knows of it.
                with parallel.held_signals(), folder.writing():
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


def require_different(
    arms: dict[str, list[Config]], comparison: study.Comparison, numbers: dict[str, tuple]
) -> None:
    """Raises ValueError for options without a value, and for two arms that are one."""
    for name, values in {"precisions": comparison.precisions, **numbers}.items():
        if not values:
            raise ValueError(f"{name} is empty: give at least one value")
        if len({*values}) < len(values):
            raise ValueError(f"{name} is {' '.join(map(str, values))}: give each value once")
    # None and the number that it stands for are one
    last_arm = {in_numbers(configs[0]): arm for arm, configs in arms.items()}
    for arm, configs in arms.items():
        other = last_arm[in_numbers(configs[0])]
        if other != arm:
            raise ValueError(f"{arm} is {other}: give each value once")


# Rounds of a study. Each call that adds agents is a round. It is the dict of that call's options,
# which the folder's mark remembers, because the batches of a round depend on its options alone.


def rounds_in(out: Path) -> list[dict]:
    """The rounds of the study in a folder, in order; none if there is no study."""
    mark = read_mark(out)
    return rounds_of(mark["options"]) if mark.get("command") == "study" else []


def rounds_of(options: dict) -> list[dict]:
    """The rounds of a study from the options in its mark. Raises ValueError for forged options."""
    last = dict(options)
    earlier = last.pop("earlier", [])
    rounds = [*earlier, last] if isinstance(earlier, list) else [None]
    for options_of_round in rounds:
        workers = isinstance(options_of_round, dict) and options_of_round.get("workers", 1)
        if type(workers) is not int or workers < 1:
            raise ValueError("the mark .fp8rl is not that of a study: use a new folder")
        # In earlier versions the margin of the verdicts was an option, too.
        options_of_round.pop("margin", None)
    return rounds


def mark_of(rounds: list[dict]) -> dict:
    """The options in the mark of a study with these rounds."""
    *earlier, last = rounds
    return last | {"earlier": earlier} if earlier else last


def configs_of(options: dict) -> list[Config]:
    """The configs of a round, in the order of its arms. Raises ValueError for forged options."""
    try:
        fields = {name: options[name] for name in study.Comparison.__dataclass_fields__}
        numbers = {field.name: tuple(options[field.name]) for field in NUMBERS}
        comparison = study.Comparison(**fields | {"precisions": tuple(fields["precisions"])})
        arms = arms_of(comparison, numbers)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("these are not the options of a study") from error
    return [config for configs in arms.values() for config in configs]


def with_earlier_rounds(
    out: Path, earlier: list[dict], asked: dict, default_workers: int
) -> list[dict]:
    """The rounds of a study that is called with the options `asked`, after the earlier ones.

    A call with the options of the last round adds none. `asked["workers"]` may be None. Raises
    FileExistsError for a call that does not contain all agents of the study in the folder, or that
    measures them by another goal.
    """
    if not earlier:
        return [asked | {"workers": asked["workers"] or default_workers}]
    # A study of an older version has no number of workers, and goes on with any.
    *before, last = [{"workers": default_workers} | options for options in earlier]
    workers = asked["workers"] or last["workers"]
    if asked | {"workers": workers} == last:
        return [*before, last]
    names = [name for name in asked if name != "workers" and asked[name] != last.get(name)]
    try:
        missing = set(itertools.chain(*map(configs_of, earlier))) - set(configs_of(asked))
    except ValueError:
        missing = True
    if missing or not names or "threshold" in names:
        names = names or ["workers"]
        both = (f"{name} is {last.get(name)} there and {asked[name]} here" for name in names)
        theirs = ", ".join(both)
        raise FileExistsError(
            f"out is {out}, which holds another study ({theirs}): ask for at least what it holds, "
            "use a new folder, or add --overwrite to replace it"
        )
    return [*before, last, asked | {"workers": workers}]


def tasks_of(rounds: list[dict]) -> list[parallel.Batch]:
    """The batches of a study: those of each round, of the agents that no earlier round has."""
    tasks = []
    known: set[Config] = set()
    for options in rounds:
        configs = [config for config in configs_of(options) if config not in known]
        known.update(configs)
        tasks += parallel.split(configs, options["workers"], None) if configs else []
    return tasks


def require(tasks: list[parallel.Batch], workers: int, cluster: Cluster | None) -> None:
    """Raises what forbids a study of these batches on this machine, or on a cluster's."""
    if cluster is None:
        parallel.require(tasks, workers)
        return
    for warning in cluster.warnings:
        print(f"fp8rl: warning: {warning}", file=sys.stderr)
    busiest = max(cluster.threads_by_host.values())
    future = cluster.submit(parallel.require, tasks, workers, busiest)
    parallel.result_of(future, cluster)


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
    """The folder of a study with these options in its mark: a new one, or that of the same study,
    which was stopped or gets another round."""
    if overwrite or read_mark(out).get("command") != "study":
        require_free(out, "study", overwrite)
        folder = Folder.create(out, "study", options, overwrite)
        folder.write("runs.jsonl", "")  # without it, the mark would not count
        return folder
    folder = Folder.reopen(out, "study")
    # Looked at again, because another process may have changed it before this one had the lock.
    rounds = rounds_of(options)
    known = rounds_in(out)
    known[-1:] = [{"workers": options["workers"]} | known[-1]]
    if rounds[: len(known)] != known:
        folder.close()
        raise FileExistsError(
            f"out is {out}, which holds another study: use a new folder, "
            "or add --overwrite to replace it"
        )
    if len(rounds) > len(known):
        folder.remember("study", options)
    return folder


def write_study(
    folder: Folder,
    histories: dict[Config, History],
    arms: dict[str, list[Config]],
    comparison: study.Comparison,
    cluster: Cluster | None,
    tasks: list[parallel.Batch],
) -> None:
    """Writes results.csv, table.md and curves.png, with curves of all arms but the controls, and
    prints the table. The table names the processors of the cluster that trained the agents.

    The results have the column `batch_agents`: how many agents an agent's batch has. The last bits
    of its numbers depend on it. Agents that were added to a study have batches of their own.
    """
    from matplotlib.figure import Figure

    from ..study import figures

    threshold = comparison.threshold
    runs = {arm: [histories[config] for config in configs] for arm, configs in arms.items()}
    batch_agents = {config: len(batch) for _, batch in tasks for config in batch}
    results = [
        study.summarize(config, history, arm, threshold) | {"batch_agents": batch_agents[config]}
        for arm in arms
        for config, history in zip(arms[arm], runs[arm], strict=True)
    ]
    text = study.table(results, list(arms), threshold)
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
    folder.remove_matching("study")  # files of batches, if one has ended with all agents known
    print(text)
