"""The command line: python -m fp8rl train | eval | study | memory | bench. Each takes --help.

What is refused (a bad value, a folder in use, a file that is not there) is said in one line on stderr, with exit code 2.
"""

import contextlib
import csv
import dataclasses
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from . import bench, checkpoint, memory, plot, ranks, study
from .devices import EnvironmentFailed
from .evaluate import evaluate
from .precision import Precision
from .train import Config, History, check_share, iterate

OUTPUTS = ("config.json", "metrics.csv", "checkpoint.pt", "reward_curve.png", "results.csv", "table.md", "curves.png")


@dataclasses.dataclass(frozen=True)
class Fields(Config):
    """Config's fields before they are checked: tyro would print a refusal while it parses as a box, not as one line."""

    def __post_init__(self):
        pass


def require_free(out: Path, overwrite: bool) -> None:
    """Refuses an output folder that is in use.

    Raises:
        FileExistsError: it holds files and `overwrite` is off, or it is itself a file.
    """
    if out.is_file():
        raise FileExistsError(f"out is {out}, which is a file: name a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise FileExistsError(f"out is {out}, which holds another run: name a new folder, or add --overwrite to replace it")


def claim(out: Path) -> None:
    """Makes the output folder, without what an earlier run left."""
    out.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:  # so that a run which fails is not mistaken for the one it replaced
        (out / name).unlink(missing_ok=True)


def changed_places(fields: Fields) -> dict:
    """Where a resumed run is to run, if said.

    Raises:
        ValueError: another field is given, which a resumed run cannot change.
    """
    words = [word.split("=")[0] for word in sys.argv if word.startswith("--")]
    given = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
    for name in [f.name for f in dataclasses.fields(fields) if f.name in given - {"device"}]:
        raise ValueError(f"{name} is {getattr(fields, name)} beside resume, which takes the run's own: leave it out")
    if "overwrite" in given:
        raise ValueError("overwrite is True beside resume, which goes on in the folder: leave it out")
    places = {name: value for name, value in vars(fields.placement).items() if name in given}
    return ({"device": fields.device} if "device" in given else {}) | {"placement": places}


def train(
    fields: tyro.conf.OmitArgPrefixes[Fields],
    out: Path | None = None,
    resume: Path | None = None,
    checkpoint_every: int = 0,
    checkpoint_ring: bool = True,
    overwrite: bool = False,
) -> None:
    """Train one agent and write config.json, metrics.csv, checkpoint.pt and reward_curve.png. Under torchrun several processes
    train it together (ranks.py) and the first one writes.

    Args:
        fields: what to train.
        out: folder for the results.
        resume: folder of a run that was stopped: it goes on from its checkpoint, on the CPU bit for bit as if it had not been.
        checkpoint_every: iterations between checkpoints; 0 writes one at the end.
        checkpoint_ring: keep the replay ring's rows in checkpoints; without them a resumed run begins with an empty one.
        overwrite: replace a run that the folder holds.
    """
    if (out is None) == (resume is None):
        raise ValueError(f"out is {out} and resume {resume}: give one of them")
    if checkpoint_every < 0:
        raise ValueError(f"checkpoint_every is {checkpoint_every}: give 0 or more")
    config, start = fields, None
    if resume:
        config, start = checkpoint.resume(resume / "checkpoint.pt", **changed_places(fields))
        out = resume
    ranks.start(config)
    rank, size = ranks.share()
    first = rank == 0
    if not resume:
        config = Config(**vars(fields))  # not sooner, since it asks for "cuda"
        if first:
            require_free(out, overwrite)
    check_share(config, size)
    ring = config.ring(size)  # one that cannot be made is refused before anything is written or replaced
    if ring.count:
        print(f"going on with {ring.size} rows of {ring.num_envs} environments in {config.memmap}")
    ring.close()
    del ring  # the run makes its own, and the memory may not hold two
    if first:
        if not resume:
            claim(out)
        (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    writer = None
    with contextlib.ExitStack() as stack:
        for history in iterate(config, progress=True, start=start):
            rows = [history.last] if writer else history.rows  # with those from before a resumption
            if not writer:  # not before there are rows: those of a resumed run stand in the old file
                file = (out / "metrics.csv" if first else Path(os.devnull)).open("w", newline="")
                stack.enter_context(file)
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
            writer.writerows({name: int(x) if x.is_integer() else x for name, x in row.items()} for row in rows)
            file.flush()
            if checkpoint_every and len(history) % checkpoint_every == 0:
                checkpoint.save(out / "checkpoint.pt", history, checkpoint_ring)
    checkpoint.save(out / "checkpoint.pt", history, checkpoint_ring)
    clipped = ranks.total(history.ring.clipped).tolist()
    ranks.stop()
    if not first:
        return
    figure = plot.Figure(figsize=(7, 4), layout="constrained")
    steps, returns = history.evaluations()
    ax = figure.add_subplot(title=f"{config.env_id or 'CustomEnv'}, seed {config.seed}")
    plot.learning_curves(ax, {config.precision: (steps, returns)}, marks=config.env_id is None)
    figure.savefig(out / "reward_curve.png", dpi=120)
    print(Precision(config.precision, config.places.learn).describe(history.model))
    if history.last["clipped"]:
        counts = ", ".join(f"feature {i}: {n}" for i, n in enumerate(clipped) if n)
        print(f"warning: codec {config.codec} clipped observations ({counts}): choose bf16 or fp32", file=sys.stderr)
    most = "" if config.env_id else " of 200"
    print(f"final greedy return {history.final_return:.2f}{most}; results in {out}/")


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 100,
    greedy: bool = True,
    start_noise: float = 0.05,
    seed: int = 0,
    precision: str | None = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Evaluate a trained agent on the CPU.

    Args:
        run: folder that `train` wrote.
        episodes: how many to play.
        greedy: take the likeliest action; --no-greedy samples.
        start_noise: half-width of the range that episodes start in.
        seed: of the starts.
        precision: what to compute in, if not what it was trained in.
        json_output: print one JSON object.
    """
    if not 1 <= episodes <= 10**6:
        raise ValueError(f"episodes is {episodes}: give a number from 1 to a million")
    if not 0 <= seed < 2**62:
        raise ValueError(f"seed is {seed}: give a number from 0 to 2**62 - 1")
    changes = {"precision": precision, "collect_precision": None} if precision else {}
    model, config = checkpoint.load(run / "checkpoint.pt", **changes)
    if config.env_id and start_noise != 0.05:
        raise ValueError(f"start_noise is {start_noise}: leave it out, {config.env_id} does not have it")
    computes = Precision(config.precision)
    returns = evaluate(computes.prepare(model), episodes, greedy, start_noise, seed, computes, **config.observed)
    result = {
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "episodes": episodes,
        "greedy": greedy,
    }
    if json_output:
        print(json.dumps(result))
    else:
        print(f"mean return {result['mean_return']:.2f}, standard deviation {result['std_return']:.2f}, {episodes} episodes")


def compare(
    out: Path,
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8"),
    seeds: int = 30,
    first_seed: int = 0,
    steps: int = 100_000,
    collect_precision: str | None = None,
    controls: bool = False,
    workers: int = os.cpu_count() or 1,
    overwrite: bool = False,
) -> None:
    """Train every precision on the same seeds and write results.csv, table.md and curves.png.

    Args:
        out: folder for the results.
        precisions: what to compare; differences are taken to the first.
        seeds: runs of each.
        first_seed: seeds run upwards from here.
        steps: environment steps of a run.
        collect_precision: run each precision once more, with the acting policy in this one.
        controls: add two arms that test the comparison itself: the first precision on other seeds, which must pass, and an FP8
            that leaves the scales out of its products, which must fail.
        workers: processes at a time.
        overwrite: replace a study that the folder holds.
    """
    for name, value in {"seeds": seeds, "precisions": len(precisions), "workers": workers}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")

    def runs(first: int = first_seed, **fields) -> list[Config]:
        return [Config(seed=seed, steps=steps, **fields) for seed in range(first, first + seeds)]

    arms = {name: runs(precision=name) for name in precisions}
    if collect_precision:
        for name in [name for name in arms if name != collect_precision]:
            arms[f"{name} acting in {collect_precision}"] = runs(precision=name, collect_precision=collect_precision)
    unscaled = {}
    if controls:
        arms[f"control: {precisions[0]}, other seeds"] = runs(first_seed + seeds, precision=precisions[0])
        unscaled["control: fp8, products not scaled back"] = runs(precision="fp8")
    require_free(out, overwrite)
    claim(out)
    histories: dict[str, list[History]] = {arm: [] for arm in arms | unscaled}
    results = []
    for group, run in ((arms, study.run), (unscaled, study.run_unscaled)):
        arm_of = {config: arm for arm, configs in group.items() for config in configs}
        for history in study.run_all(sorted(arm_of, key=lambda config: config.seed), workers, run=run):
            arm = arm_of[history.config]
            histories[arm].append(history)
            results.append(study.summarize(history, arm))
            study.write_results(out / "results.csv", results)
    command = f"python -m fp8rl {shlex.join(sys.argv[1:])}"
    text = f"{study.table(results, list(histories))}\n`{command}` on {study.hardware()}.\n"
    (out / "table.md").write_text(text)
    figure = plot.Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot.learning_curves(left, {arm: study.stack(histories[arm], "eval_return") for arm in arms})
    left.set_title(f"interquartile mean and range of {seeds} seeds", fontsize=9)
    plot.intervals(right, study.scores(results, "final_return"), "final greedy return, of 200")
    right.set_xlim(study.THRESHOLD - 1, 200)
    right.set_title(f"each seed, interquartile mean, 95% interval, from {study.THRESHOLD - 1:g} up", fontsize=9)
    figure.savefig(out / "curves.png", dpi=120)
    print(text)


def measure(
    what: tyro.conf.Positional[Literal["loop", "fp8"]] = "loop",
    num_envs: int = 4096,
    rollout_length: int = 32,
    precision: str | None = None,
    device: str = "cpu",
    compile: bool = False,
    seconds: float = 5.0,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
    out: Path = Path("benchmarks/results"),
) -> None:
    """Measure speed on this machine.

    Args:
        what: loop, training without replay against its floor (under torchrun of all processes together); or fp8, one linear layer
            in every precision over widths and batches, which needs FP8 hardware and is written to `out`.
        num_envs: environments of the loop.
        rollout_length: steps that it collects from each in an iteration.
        precision: what it computes in, if not in what is fastest on this machine.
        device: where it runs; on CUDA as a graph.
        compile: compile the loop that collects and act in fp32: the fastest with few environments.
        seconds: how long to measure.
        json_output: print one JSON object.
        out: folder for the result of fp8.
    """
    if what == "fp8":
        path = bench.bench_fp8(out)
        if path:
            print(f"results in {path}")
        return
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}: give a positive number")
    ranks.start(Fields(device=device))
    config = bench.loop_config(num_envs, rollout_length, precision, compile, device=device, graph=device != "cpu")
    result = bench.bench_loop(config, seconds)
    first = ranks.share()[0] == 0
    ranks.stop()
    if first:
        shown = {name: f"{x:,.3f}" if isinstance(x, float) else x for name, x in result.items()}
        print(json.dumps(result) if json_output else "\n".join(f"{name:24} {x:>16}" for name, x in shown.items()))


def predict_and_measure(
    fields: tyro.conf.OmitArgPrefixes[Fields], json_output: Annotated[bool, tyro.conf.arg(name="json")] = False
) -> None:
    """Predict the bytes of a config's replay ring, allocate it and measure. In a memmap folder it is there to stay.

    Args:
        fields: what would be trained.
        json_output: print one JSON object.
    """
    config = Config(**vars(fields))
    predicted = config.ring_bytes
    before = memory.available("cpu" if config.memmap else config.places.store)
    result = {
        "predicted_bytes": predicted,
        "measured_bytes": config.ring().nbytes,
        "bytes_per_transition": predicted / (config.rows * config.num_envs),
        "transitions": config.rows * config.num_envs,
        "available_bytes": before,
    }
    print(json.dumps(result) if json_output else "\n".join(f"{name:20} {value:>20,}" for name, value in result.items()))


def main() -> None:
    """Runs the command line."""
    torch.set_num_threads(1)  # the network is too small to share, and so a run's numbers do not depend on the cores
    commands = {"train": train, "eval": evaluate_run, "study": compare, "memory": predict_and_measure, "bench": measure}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m fp8rl", description=__doc__)
    except (ValueError, OSError, MemoryError, FloatingPointError, EnvironmentFailed) as error:
        print(f"fp8rl: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fp8rl: interrupted", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        rank, size = ranks.share()
        if size == 1:
            raise
        reason = str(error).splitlines()[0]
        print(f"fp8rl: rank {rank} of {size} lost the others ({reason}): resume from the last checkpoint", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
