"""The command line: python -m fp8rl train | eval | study | doctor | memory | bench. Each takes
--help.

Invalid input (a bad value, a folder in use, a missing file) is reported in one line on stderr, with
exit code 2."""

import signal

if __name__ == "__main__":  # Ctrl-C during the imports ends the program without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure

from . import hardware, processes
from .bits import doctor
from .bits.low_bit_adam import LowBitAdam
from .build import HERE, Machine, build, env_maker
from .config import EIGHT_BIT, Config
from .disk import checkpoint
from .disk.mapped_ring import free_on_disk
from .disk.run_folder import Folder, read_mark, require_free
from .disk.safe_files import opened, read_json
from .env import Cart
from .evaluate import evaluate
from .history import History
from .precision import Precision
from .requirements import ring_rows, shared
from .study import comparison as study
from .study import figures, throughput
from .study.fingerprint import fingerprint as code_fingerprint
from .study.replay_layouts import LAYOUTS, STORES, layout_bytes
from .study.statistics import iqm
from .study.watched_run import SHOWN, watched
from .tasks.by_id import task_of
from .tasks.gymnasium_env import EnvironmentFailed
from .train import Immediate, Run, iterate

Json = Annotated[bool, tyro.conf.arg(name="json", help="print one JSON object.")]


@dataclasses.dataclass(frozen=True)
class Saving:
    """What checkpoints a run writes. A resumed run keeps this."""

    # Iterations between checkpoints, 0 for one at the end; by default one is written every minute.
    checkpoint_every: int | None = None
    # Keep the replay ring's rows in checkpoints; without them a resumed run begins with an empty
    # one.
    checkpoint_ring: bool = True

    def __post_init__(self):
        if self.checkpoint_every is not None and (
            type(self.checkpoint_every) is not int or self.checkpoint_every < 0
        ):
            raise ValueError(f"checkpoint_every is {self.checkpoint_every!r}: use 0 or more")
        if type(self.checkpoint_ring) is not bool:
            raise ValueError(f"checkpoint_ring is {self.checkpoint_ring!r}: use True or False")


def train(
    config: tyro.conf.OmitArgPrefixes[Config],
    machine: tyro.conf.OmitArgPrefixes[Machine],
    out: Path | None = None,
    resume: Path | None = None,
    saving: tyro.conf.OmitArgPrefixes[Saving] = Saving(),
    overwrite: bool = False,
    trust: bool = False,
    eight_bit: bool = False,
) -> None:
    """Train one agent and write config.json, metrics.csv, checkpoint.pt and reward_curve.png.
    Ctrl-C leaves a checkpoint. Under torchrun several processes train the agent together; only rank
    0 writes.

    Args:
        config: what is learned: a resumed run takes its own.
        machine: where it runs and how fast: a resumed run takes what is given now.
        out: folder for the results.
        resume: folder of a run that was stopped: it continues from its checkpoint, on the CPU bit
        for bit as if it had not been,
            or from the beginning if it has none yet.
        overwrite: replace a run that the folder holds.
        trust: a checkpoint may name a module to import (env_id module:Name-v0).
        eight_bit: keep weights, Adam's moments and replayed observations in one byte a number, and
        multiply in FP8.
    """
    if (out is None) == (resume is None):
        raise ValueError(f"out is {out} and resume {resume}: use one of them")
    config = chosen(config, bool(resume), eight_bit)
    processes.start(machine.devices)
    first, state = processes.rank_and_size()[0] == 0, None
    options = dataclasses.asdict(saving)
    with contextlib.ExitStack() as owned:
        if resume:
            out = resume
            if first:
                folder = owned.enter_context(Folder.reopen(out, "train"))
            config, state = stopped_run(out, trust)
            kept = read_mark(out).get("options", {})
            options |= {
                name: kept[name] for name in options if name in kept and name not in given()
            }
            Saving(**options)  # the mark may hold anything
            # All have read the mark before rank 0 writes it again
            processes.all_reduce([torch.zeros(1)])
        elif first:
            require_free(out, "train", overwrite)
        # What cannot be is refused before anything is written or replaced
        run = build(config, machine, state)
        if machine.memmap and run.ring.count:
            print(
                f"continuing with {run.ring.size} rows of {run.ring.num_envs} environments in "
                f"{machine.memmap}"
            )
        if first and not resume:
            folder = owned.enter_context(Folder.create(out, "train", options, overwrite))
        if first:
            folder.remember("train", options)
            folder.write("config.json", config.to_json())
        write_while_training(run, out, folder if first else None, **options)
        clipped = processes.all_reduce([run.ring.clipped])[0].tolist()
        processes.stop()
        if first:
            report(run, clipped, folder)


def chosen(config: Config, resume: bool, eight_bit: bool) -> Config:
    """The config, in eight bits if wanted. Raises ValueError for an option that is given beside one
    which decides it."""
    for name in (*Config.__dataclass_fields__, "overwrite", "eight_bit") if resume else ():
        if name in given():
            raise ValueError(
                f"{name} is given beside resume, which takes the run's own: leave it out"
            )
    for name, value in EIGHT_BIT.items() if eight_bit else ():
        if name in given() and getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)} beside eight_bit, "
                f"which makes it {value!r}: leave one out"
            )
    return dataclasses.replace(config, **EIGHT_BIT) if eight_bit else config


def given() -> set[str]:
    """Names of the options on the command line, those with their default value too."""
    words = [
        word.split("=")[0].removeprefix("--").removeprefix("no-")
        for word in sys.argv
        if word.startswith("--")
    ]
    return {word.replace("-", "_") for word in words}


def stopped_run(out: Path, trust: bool) -> tuple[Config, dict | None]:
    """A run's config and state; no state if it was stopped before its first checkpoint."""
    if (out / "checkpoint.pt").exists() or not (out / "config.json").exists():
        config, state = checkpoint.resume(out / "checkpoint.pt", trust)
        if isinstance(config, list):
            raise ValueError(
                f"checkpoint {out / 'checkpoint.pt'} is of a population: "
                "train goes on with single runs alone"
            )
        return config, state
    try:
        config = Config.of(read_json(out / "config.json"))
    except ValueError as error:
        raise ValueError(f"{out / 'config.json'}: {error}") from error
    checkpoint.require_trust(out / "config.json", config.env_id, trust)
    return config, None


def write_while_training(
    run: Run, out: Path, folder: Folder | None, checkpoint_every: int | None, checkpoint_ring: bool
) -> None:
    """Trains a run to its end. Rank 0, which owns the folder, writes metrics.csv and checkpoint.pt
    as it goes. After SIGINT or SIGTERM the program exits when the iteration is finished and saved;
    a second signal ends a single process at once."""
    signals: list[int] = []

    def remember(number, _):
        if signals and processes.rank_and_size()[1] == 1:
            raise KeyboardInterrupt
        signals.append(number)

    def keep(
        kind: type | None, *_
    ) -> None:  # if the environment fails, what was learned until then
        # With a graph it has learned from it since
        good = kind is EnvironmentFailed or (
            kind is ValueError and isinstance(run.launch, Immediate)
        )
        if good and len(run.history) and processes.rank_and_size()[1] == 1:
            checkpoint.save(out / "checkpoint.pt", run, checkpoint_ring)

    if folder and len(run.history):
        write_metrics(folder, run.history, 0)  # the rows from before a resumption
    # All rows are written again with the first new one, which may have other columns
    written, saved = (
        0,
        time.monotonic(),
    )
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, remember))
        stack.push(keep)
        for _ in stack.enter_context(
            contextlib.closing(iterate(run, progress=processes.rank_and_size()[0] == 0))
        ):
            due = (
                checkpoint_every is None
                and processes.rank_and_size()[0] == 0
                and time.monotonic() - saved > 60
            )
            # All ranks must agree: rank 0's clock counts, and a signal to any of them.
            (sums,) = processes.all_reduce([torch.tensor([due, sum(signals)], dtype=torch.float64)])
            due, stop = sums.tolist()
            if due or stop or (checkpoint_every and run.iterations % checkpoint_every == 0):
                checkpoint.save(out / "checkpoint.pt", run, checkpoint_ring)
                saved = time.monotonic()
            if folder and len(run.recorded) > written:  # of a graph, only what has been read
                write_metrics(folder, run.recorded, written)
                written = len(run.recorded)
            if stop:
                break
    if len(run.history) < run.config.iterations:
        if processes.rank_and_size()[0] == 0:
            at = f"step {run.history.last['steps']:,.0f} of {run.config.steps:,}"
            print(
                f"fp8rl: interrupted at {at}: continue with train --resume {out}", file=sys.stderr
            )
        sys.exit(128 + (signals[0] if signals else signal.SIGTERM))
    if processes.rank_and_size()[0] == 0:
        most = "" if run.config.env_id else " of 200"
        # Known even if it cannot be written
        print(f"final greedy return {run.history.final_return:.2f}{most}")
    checkpoint.save(out / "checkpoint.pt", run, checkpoint_ring)


def write_metrics(folder: Folder, history: History, written: int) -> None:
    """Appends the rows that come after those `written` to metrics.csv; without any it is written
    anew, with a header."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if not written:
        writer.writerow([*history.last])
    writer.writerows(
        [int(x) if x.is_integer() else x for x in row.values()] for row in history.since(written)
    )
    if not written:
        return folder.write("metrics.csv", text.getvalue())
    with folder.writing(), opened(folder.path / "metrics.csv", "a", newline="") as file:
        file.write(text.getvalue())


def report(run: Run, clipped: list[int], folder: Folder) -> None:
    """Draws reward_curve.png and prints what else is to be known."""
    config, history = run.config, run.history
    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.add_subplot(title=f"{config.env_id or 'CustomEnv'}, seed {config.seed}")
    figures.learning_curves(
        ax, {config.precision: history.evaluations()}, marks=config.env_id is None
    )
    folder.write("reward_curve.png", png(figure))
    print(hardware.describe(run.learner.precision, run.model))
    if isinstance(run.learner.optimizer, LowBitAdam):
        print(run.learner.optimizer.describe())
    if any(clipped):
        counts = ", ".join(f"feature {i}: {n}" for i, n in enumerate(clipped) if n)
        print(
            f"warning: codec {config.codec} clipped observations ({counts}): choose bf16 or fp32",
            file=sys.stderr,
        )
    print(f"results in {folder.path}/")


def png(figure: Figure) -> bytes:
    """A figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 100,
    greedy: bool = True,
    start_noise: float = 0.05,
    seed: int = 0,
    precision: str | None = None,
    trust: bool = False,
    json_output: Json = False,
) -> None:
    """Evaluate a trained agent on the CPU.

    Args:
        run: folder that `train` wrote.
        episodes: how many to play.
        greedy: take the greedy action; --no-greedy samples.
        start_noise: half-width of the range that episodes start in.
        seed: of the starts.
        precision: what to compute in, if not what it was trained in.
        trust: the checkpoint may name a module to import (env_id module:Name-v0).
    """
    if not 1 <= episodes <= 10**6:
        raise ValueError(f"episodes is {episodes}: use a number from 1 to a million")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}: use a number from 0 to 2**32 - 1")
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        model, config = checkpoint.load(
            run / "checkpoint.pt", trust, **({"precision": precision} if precision else {})
        )
        if config.env_id and start_noise != 0.05:
            raise ValueError(
                f"start_noise is {start_noise}: leave it out, {config.env_id} does not have it"
            )
        make_env = env_maker(config, HERE, seed + 2**31)  # other starts than in training
        computes = Precision(config.precision)
        with contextlib.closing(
            make_env(config, episodes, start_noise, "cpu", seed, "evaluation starts")
        ) as env:
            returns = evaluate(computes.prepare(model), env, computes, greedy, seed).astype(float)
    if not np.isfinite(returns).all():
        raise FloatingPointError(
            f"evaluation is not finite in {config.precision}: fix the environment's rewards, "
            "or train again"
        )
    result = {
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "episodes": episodes,
        "greedy": greedy,
    }
    words = (
        f"mean return {result['mean_return']:.2f}, "
        f"standard deviation {result['std_return']:.2f}, {episodes} episodes"
    )
    print(json.dumps(result) if json_output else words)


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
) -> None:
    """Train every precision on the same seeds, many agents as one batch on every core, and write
    results.csv, table.md and curves.png. Any number of Config may have several values
    (--learning-rate 1e-4 3e-4): each is crossed with all others. A study that was stopped continues
    when it is called again.

    Args:
        out: folder for the results.
        sweep: numbers of the config.
        one_by_one: train every agent alone, which takes much longer.
        overwrite: replace a study that the folder holds.
    """
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
    each = study.run if one_by_one else None
    if not one_by_one and (shapes := len(set(map(shared, arm_of)))) > 1:
        print(f"{len(arm_of)} agents of {shapes} shapes, a batch for each")
    study.require(list(arm_of), each)  # what cannot be is refused before anything is written
    # As they are read back
    options = json.loads(json.dumps(dataclasses.asdict(comparison) | numbers))
    with folder_of(out, options, overwrite) as folder:
        journal = study.Journal(out / "runs.jsonl")
        done = {config for config, arm in arm_of.items() if (arm, config) in journal.histories}
        for config, history in study.run_all(
            list(arm_of), run=each, done=done, threshold=comparison.threshold
        ):
            with folder.writing():
                journal.add(arm_of[config], config, history)
            if history.failure:
                print(
                    f"fp8rl: warning: {arm_of[config]}, seed {config.seed}: {history.failure}",
                    file=sys.stderr,
                )
        write_study(folder, journal.histories, arms, comparison)


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
    if read_mark(out).get("options") != options:
        folder.close()
        raise FileExistsError(
            f"out is {out}, which holds another study: use a new folder, "
            "or add --overwrite to replace it"
        )
    return folder


def write_study(
    folder: Folder,
    histories: dict[tuple[str, Config], History],
    arms: dict[str, list[Config]],
    comparison: study.Comparison,
) -> None:
    """Writes results.csv, table.md and curves.png, with learning curves of all arms but the
    controls, and prints the table."""
    threshold = comparison.threshold
    runs = {arm: [histories[arm, config] for config in configs] for arm, configs in arms.items()}
    results = [
        study.summarize(*each, arm, threshold)
        for arm in arms
        for each in zip(arms[arm], runs[arm], strict=True)
    ]
    text = study.table(results, list(arms), threshold, comparison.margin)
    text += f"\n`python -m fp8rl {shlex.join(sys.argv[1:])}` on {throughput.origin()}.\n"
    folder.write("results.csv", study.results_csv(results))
    folder.write("table.md", text)
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {
        arm: study.stack(each, "eval_return")
        for arm, each in runs.items()
        if not arm.startswith("control")
    }
    figures.learning_curves(left, curves, marks=comparison.env_id is None)
    left.set_title(
        f"interquartile mean, 10th to 90th percentile of {comparison.seeds} seeds", fontsize=9
    )
    figures.intervals(right, final := study.scores(results, "final_return"), "final greedy return")
    right.set_title("each seed, interquartile mean, 95% interval", fontsize=9)
    best = max(values.max() for values in final.values())
    # An arm far below would leave the others no room
    if iqm(final[next(iter(arms))]) >= threshold < best:
        low = threshold - (best - threshold) / 4
        right.set_xlim(low, best + (best - threshold) / 4)
        right.set_xlabel(f"{right.get_xlabel()}, from {low:.0f} up")
        for row, average in (
            (row, iqm(values)) for row, values in enumerate(final.values()) if iqm(values) < low
        ):
            right.annotate(
                f"← {average:.1f}", (low, row), (3, 0), textcoords="offset points", va="center"
            )
    folder.write("curves.png", png(figure))
    print(text)


def measure(
    loop: tyro.conf.OmitArgPrefixes[throughput.Loop] = throughput.Loop(),  # noqa: B008
    machine: tyro.conf.OmitArgPrefixes[Machine] = Machine(),  # noqa: B008
    seconds: float = 5.0,
    fingerprint: bool = False,
    json_output: Json = False,
) -> None:
    """Measure how fast this machine trains without replay, against a floor; under torchrun, all
    processes together.

    Args:
        loop: what is trained.
        machine: where and how fast.
        seconds: how long to measure.
        fingerprint: only print hashes of the weights after a few updates, which show on one machine
        whether numbers are the same.
        json_output: print one JSON object.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}: use a positive number")
    if fingerprint:
        print(code_fingerprint())
        return
    if not loop.hidden_size:
        raise ValueError("hidden_size is empty: give at least one value")
    processes.start(machine.devices)
    sizes = [dataclasses.replace(loop, hidden_size=(size,)) for size in loop.hidden_size]
    results = [
        throughput.bench_loop(one.fastest(machine), machine, seconds, agents=loop.agents)
        for one in sizes
    ]
    first = processes.rank_and_size()[0] == 0
    processes.stop()
    if first and json_output:
        print(json.dumps(results if len(results) > 1 else results[0]))
    for result in results if first and not json_output else ():
        shown = {name: f"{x:,.3f}" if isinstance(x, float) else x for name, x in result.items()}
        print(
            "\n".join(f"{name:24} {x:>16}" for name, x in shown.items()),
            end="\n\n" if len(results) > 1 else "\n",
        )


def examine(
    config: tyro.conf.OmitArgPrefixes[Config],
    judge: tuple[str, ...] = (*doctor.FORMATS, *(f"{place}=e4m3" for place in SHOWN)),
    require: tuple[str, ...] = (),
    out: Path | None = None,
    overwrite: bool = False,
    json_output: Json = False,
) -> None:
    """Train one agent in float32, and print which formats of its places would break its training.

    Args:
        config: what is learned.
        judge: places and formats (v=e4m3:unscaled); Adam takes its step from moments as they are
        kept.
        require: those that must be fine, or else the exit code is 2.
        out: folder to write report.md, report.json and report.png to.
        overwrite: replace a report that the folder holds.
    """
    for field in ("precision", "formats"):
        if getattr(config, field) != getattr(Config, field):
            raise ValueError(
                f"{field} is {getattr(config, field)!r}: leave it out, "
                "the doctor watches a training in float32"
            )
    if out:
        require_free(out, "doctor", overwrite)
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        run = build(config)
        watching = watched(run, tuple(dict.fromkeys((*judge, *require))))
        for _ in iterate(run, progress=True):
            pass
    report = watching.report()
    print(report.to_json() if json_output else report)
    if out:
        figure = Figure(figsize=(7, 1.2 + 0.2 * len(report)), layout="constrained")
        figures.findings(
            figure.add_subplot(title=f"{config.env_id or 'CustomEnv'}, seed {config.seed}"), report
        )
        with Folder.create(out, "doctor", dataclasses.asdict(config), overwrite) as folder:
            for ending, content in {
                "json": report.to_json(),
                "md": f"{report}\n",
                "png": png(figure),
            }.items():
                folder.write(f"report.{ending}", content)
    report.require(*require)


def predict_and_measure(
    config: tyro.conf.OmitArgPrefixes[Config],
    machine: tyro.conf.OmitArgPrefixes[Machine],
    layout: str = "compact",
    json_output: Json = False,
) -> None:
    """Predict the bytes of a config's replay ring, allocate it and measure. A ring in a memmap
    folder has the whole capacity, and stays there.

    Args:
        config: what would be trained.
        machine: where.
        layout: how the next observation is stored: compact, as the next row, which is what training
        uses; or, to compare (no
            training uses them), full, beside the observation, or delta, as its rounded difference
            to the observation.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: choose from {', '.join(LAYOUTS)}")
    if layout != "compact" and machine.memmap is not None:
        raise ValueError(
            f"memmap is {machine.memmap} and layout {layout!r}: leave memmap out, "
            "or use the compact layout"
        )
    available = (
        free_on_disk(machine.memmap) if machine.memmap else hardware.available(machine.on("store"))
    )
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        run = build(config, machine)
        run.close()
    ring = run.ring
    transitions = ring_rows(config, machine) * config.num_envs
    predicted = layout_bytes(layout, transitions, ring.obs_size, config.codec, ring.action_size)
    measured = ring.nbytes
    if layout != "compact":
        settings = transitions, ring.bounds, config.codec, ring.device, ring.action_size
        del run, ring  # so that the two stores need not fit side by side
        measured = STORES[layout](*settings).nbytes
    result = {
        "layout": layout,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "bytes_per_transition": predicted / transitions,
        "transitions": transitions,
        "available_bytes": available,
    }
    print(
        json.dumps(result)
        if json_output
        else "\n".join(
            f"{name:20} {value if name == 'layout' else f'{value:,}':>20}"
            for name, value in result.items()
        )
    )


WHOLE = tyro.constructors.ConstructorRegistry()


@WHOLE.primitive_rule
def whole_numbers(
    kind: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Reads 1e6 as an int, as Config does."""

    def read(words: list[str]) -> int:
        with contextlib.suppress(ValueError):
            if float(words[0]) % 1 == 0:  # a float would round one of many digits
                return int(words[0]) if words[0].lstrip("+-").isdecimal() else int(float(words[0]))
        raise ValueError(f"use a whole number, not {words[0]!r}")

    spec = tyro.constructors.PrimitiveConstructorSpec(
        1, "INT", read, lambda x: isinstance(x, int), lambda x: [str(x)]
    )
    return spec if kind.type is int else None


def parse(commands: dict[str, Callable]) -> Callable[[], None]:
    """The command that argv names, with its arguments. Raises ValueError if argv cannot be read, in
    one line instead of tyro's box."""

    def deferred(command):
        return functools.wraps(command)(
            lambda *args, **kwargs: functools.partial(command, *args, **kwargs)
        )

    jobs, box = {name: deferred(command) for name, command in commands.items()}, io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.extras.subcommand_cli_from_dict(
                jobs, prog="python -m fp8rl", description=__doc__, registry=WHOLE
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        # Under a title
        text = " ".join(line.strip("│ ") for line in box.getvalue().splitlines()[1:])
        # Above the next rule
        said = next(filter(None, (part.strip() for part in re.split("[─-]{9,}", text))))
        said = re.sub(r"^Error parsing __tyro\S*: ", "", said)
        raise ValueError(
            f"{said} (see --help)"
            if said.startswith(("Error", "Unrec", "Expected", "Missing"))
            else said
        ) from None


def main() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # So that a study ends its workers first
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    warnings.formatwarning = lambda text, *_, **__: re.sub(
        r"\x1b\[\d+m", "", f"fp8rl: warning: {text}\n"
    )
    hardware.keep_freed_memory()
    # The network is too small for more, and so a run's numbers do not depend on the cores
    torch.set_num_threads(1)
    commands = {
        "train": train,
        "eval": evaluate_run,
        "study": compare,
        "doctor": examine,
        "memory": predict_and_measure,
    }
    commands["bench"] = measure
    code = 2
    try:
        parse(commands)()
        return
    except (ValueError, OSError, MemoryError, FloatingPointError, EnvironmentFailed) as error:
        # Python's own has no words
        said = str(error) or "out of memory: use a smaller config, or a folder whose files fit"
    except KeyboardInterrupt:
        said, code = "interrupted", 130
    except RuntimeError as error:
        rank, size = processes.rank_and_size()
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            said = (
                f"{str(error).splitlines()[0].split('. ')[0]}: "
                "use fewer environments or agents, or a lower capacity"
            )
        elif size == 1:
            raise
        else:
            said = (
                f"rank {rank} of {size} lost the others ({str(error).splitlines()[0]}): "
                "resume from the last checkpoint"
            )
    # Names in a folder may have any characters
    said = "".join(x if x.isprintable() else repr(x)[1:-1] for x in said)
    print(f"fp8rl: {said}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
