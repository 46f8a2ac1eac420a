"""`python -m fp8rl train`: trains one agent into a folder, or continues a run that was stopped."""

import contextlib
import dataclasses
import signal
import sys
import time
from pathlib import Path

import torch
import tyro

from ..bits.low_bit_adam import LowBitAdam
from ..build import build
from ..config import EIGHT_BIT, Config
from ..disk import checkpoint
from ..disk.run_folder import Folder, require_free
from ..machine import hardware, processes
from ..train import Run, iterate
from .arguments import ConfigOptions, MachineOptions, checked, given
from .metrics_file import MetricsFile


def train(
    config: tyro.conf.OmitArgPrefixes[ConfigOptions],
    machine: tyro.conf.OmitArgPrefixes[MachineOptions],
    out: Path | None = None,
    resume: Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
    eight_bit: bool = False,
    checkpoint_every: int | None = None,
    checkpoint_ring: bool = True,
) -> None:
    """Train one agent into a folder, or continue a run that was stopped (Ctrl-C).

    Args:
        config: What is learned. A resumed run keeps its own, so only --steps goes with --resume.
        machine: Where the run computes, and how fast. A resumed run takes what is given now, also
            of the last two options.
        out: Folder for config.json, metrics.csv, checkpoint.pt and reward_curve.png.
        resume: Folder of a run that was stopped, to continue from its checkpoint.
            With --steps N it goes on to N steps in all. On the CPU it gives the numbers of a run
            that was never stopped, bit for bit.
        overwrite: Replace a run that the folder holds.
        trust: Let a checkpoint name a module that is then imported (env_id module:Name-v0).
        eight_bit: FP8 products; eight bits for weights, Adam's moments and replayed observations.
        checkpoint_every: Iterations between checkpoints; 0 writes only one at the beginning and one
            at the end. None: one is written every minute.
        checkpoint_ring: Keep the replay ring's rows in checkpoints. Without them, a resumed run
            begins with an empty ring.
    """
    if out is None and resume is None:
        raise ValueError(
            "out is missing: name a new folder for the results, as in train --out runs/a"
        )
    if out is not None and resume is not None:
        raise ValueError(f"out is {out} and resume is {resume}: give one of the two")
    if checkpoint_every is not None and checkpoint_every < 0:
        raise ValueError(f"checkpoint_every is {checkpoint_every}: use 0 or more")
    machine = checked(machine)
    steps = config.steps if resume and "steps" in given() else None
    config = chosen(config, bool(resume), eight_bit)
    begun = config
    state = None
    processes.start(machine.devices)
    rank, _ = processes.rank_and_size()
    first = rank == 0
    with contextlib.ExitStack() as owned:
        if resume:
            out = resume
            if first:
                folder = owned.enter_context(Folder.reopen(out, "train"))
            begun, state = checkpoint.resume(out / "checkpoint.pt", trust)
            if isinstance(begun, list):
                raise ValueError(f"resume is {out}, a population: train continues only single runs")
            if first:  # which may write the file again before another rank has read it
                require_unchanged(out / "config.json", begun)
            config = with_steps(begun, steps, state)
        elif first:
            require_free(out, "train", overwrite)
        # A run that cannot be built raises here, before anything is written or replaced.
        run = build(config, machine, state)
        if machine.memmap and run.ring.count:
            print(
                f"continuing with {run.ring.size} rows of {run.ring.num_envs} environments in "
                f"{machine.memmap}"
            )
        if first and config.steps != begun.steps:
            print(f"the run goes on to {config.steps:,} steps, not {begun.steps:,}")
        if first and not resume:
            folder = owned.enter_context(Folder.create(out, "train", {}, overwrite))
        if not resume or config != begun:
            # Before config.json, which must not differ from the checkpoint if the run is killed.
            checkpoint.save(out / "checkpoint.pt", run, checkpoint_ring)
        if first:
            folder.write("config.json", config.to_json())
        write_while_training(run, out, folder if first else None, checkpoint_every, checkpoint_ring)
        clipped = processes.all_reduce([run.ring.clipped])[0].tolist()
        processes.stop()
        if first:
            report(run, clipped, folder)


def chosen(config: ConfigOptions, resume: bool, eight_bit: bool) -> Config | None:
    """The config of the options, in eight bits if wanted; None if a run is resumed.

    Raises ValueError for an option that is given together with --resume or --eight-bit, if one of
    these decides it.
    """
    if resume:
        for name in (*Config.__dataclass_fields__, "overwrite", "eight_bit"):
            if name in given() and name != "steps":
                raise ValueError(
                    f"{name} is given with resume, which keeps the run's own: leave it out"
                )
        return None
    for name, value in EIGHT_BIT.items() if eight_bit else ():
        if name in given() and getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)} with eight_bit, "
                f"which sets it to {value!r}: leave one out"
            )
    config = checked(config)
    return dataclasses.replace(config, **EIGHT_BIT) if eight_bit else config


def with_steps(config: Config, steps: int | None, state: dict) -> Config:
    """A stopped run's config with another number of steps, or with its own for None.

    Raises ValueError for fewer than the run has done.
    """
    if steps is None:
        return config
    changed = dataclasses.replace(config, steps=steps)
    done = len(state["history"].get("iteration", ()))
    if changed.iterations <= done:
        done_steps = done * config.steps_per_iteration
        raise ValueError(
            f"steps is {steps:,}, and the run has done {done_steps:,}: "
            f"use at least {done_steps + config.steps_per_iteration:,}, one iteration more"
        )
    return changed


def require_unchanged(path: Path, config: Config) -> None:
    """Raises ValueError if the config.json of a stopped run is not the run's own config.

    A resumed run goes on with its own config and writes the file again, so that an edit would be
    lost without having had an effect.
    """
    if not path.exists():
        return
    try:
        theirs = dataclasses.asdict(Config.of(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    edits = [
        f"{name} is {theirs[name]!r} there and {value!r} in the run"
        for name, value in dataclasses.asdict(config).items()
        if theirs[name] != value
    ]
    if edits:
        raise ValueError(
            f"{path} was changed ({', '.join(edits)}): write the run's own back, and give another "
            "length by --steps, or begin a new run with --out FOLDER"
        )


def write_while_training(
    run: Run,
    out: Path,
    folder: Folder | None,
    checkpoint_every: int | None,
    checkpoint_ring: bool,
) -> None:
    """Trains a run to its end, and writes its files while it trains.

    Rank 0, which owns the folder, writes metrics.csv and checkpoint.pt. After SIGINT or SIGTERM the
    program exits as soon as the iteration is finished and saved. A second signal ends a single
    process at once.
    """
    rank, size = processes.rank_and_size()
    signals: list[int] = []

    def remember(number, _):
        if signals and size == 1:
            raise KeyboardInterrupt
        signals.append(number)

    saved_at = time.monotonic()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, remember))
        if folder:
            metrics = MetricsFile(folder)
            metrics.write(run.history)  # the rows from before the run was resumed
        iterations = stack.enter_context(contextlib.closing(iterate(run, progress=rank == 0)))
        for _ in iterations:
            due = checkpoint_every is None and rank == 0 and time.monotonic() - saved_at > 60
            # All ranks must agree. The clock of rank 0 decides, and a signal to any rank.
            (sums,) = processes.all_reduce([torch.tensor([due, sum(signals)], dtype=torch.float64)])
            due, stop = sums.tolist()
            if checkpoint_every:
                due = run.iterations_launched % checkpoint_every == 0
            if due or stop:
                checkpoint.save(out / "checkpoint.pt", run, checkpoint_ring)
                saved_at = time.monotonic()
            if folder:
                metrics.write(run.recorded)  # with a graph, not all rows are read yet
            if stop:
                break
    if len(run.history) < run.config.iterations:
        if rank == 0:
            print(
                f"fp8rl: interrupted at step {run.history.last['steps']:,.0f} "
                f"of {run.config.steps:,}: continue with train --resume {out}",
                file=sys.stderr,
            )
        sys.exit(128 + (signals[0] if signals else signal.SIGTERM))
    if rank == 0:
        most = "" if run.config.env_id else " of 200"
        # Printed before the checkpoint is saved, so that it is known even if saving fails.
        print(f"final greedy return {run.history.final_return:.2f}{most}")
    checkpoint.save(out / "checkpoint.pt", run, checkpoint_ring)


def report(run: Run, clipped: list[int], folder: Folder) -> None:
    """Draws reward_curve.png, and prints how the run computed and where its results are."""
    from matplotlib.figure import Figure

    from ..study import figures

    config, history = run.config, run.history
    title = f"{config.env_id or 'CustomEnv'} in {config.precision}, seed {config.seed}"
    figure = Figure(figsize=(8, 5.5))
    figures.training(figure, history, title, marks=config.env_id is None)
    folder.write("reward_curve.png", figures.png(figure))
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
