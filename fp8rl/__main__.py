"""The command line: python -m fp8rl train | eval | study. Each takes --help.

Refusals (a bad value, a folder in use, a file that is not there) are one line on stderr and exit code 2.
"""

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from . import checkpoint, plot, study
from .evaluate import evaluate
from .precision import Precision
from .train import Config, iterate


@dataclasses.dataclass(frozen=True)
class Fields(Config):
    """Config's fields before they are checked: tyro would print a refusal while it parses as a box, not as one line."""

    def __post_init__(self):
        pass


def claim(out: Path, overwrite: bool) -> None:
    """Makes the output folder.

    Raises:
        FileExistsError: it holds files and `overwrite` is off, or it is itself a file.
    """
    if out.is_file():
        raise FileExistsError(f"out is {out}, which is a file: name a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise FileExistsError(f"out is {out}, which holds another run: name a new folder, or add --overwrite to replace it")
    out.mkdir(parents=True, exist_ok=True)


def train(fields: tyro.conf.OmitArgPrefixes[Fields], out: Path, overwrite: bool = False) -> None:
    """Train one agent and write config.json, metrics.csv, checkpoint.pt and reward_curve.png.

    Args:
        fields: what to train.
        out: folder for the results.
        overwrite: replace a run that the folder holds.
    """
    config = Config(**dataclasses.asdict(fields))
    claim(out, overwrite)
    (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    with (out / "metrics.csv").open("w", newline="") as file:
        for history in iterate(config, progress=True):
            row = history.rows[-1]
            writer = csv.DictWriter(file, row)
            if len(history.rows) == 1:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
    checkpoint.save(out / "checkpoint.pt", history)
    figure = Figure(figsize=(7, 4), layout="constrained")
    steps, returns = history.evaluations()
    plot.learning_curves(figure.add_subplot(title=f"seed {config.seed}"), {config.precision: (steps, returns)})
    figure.savefig(out / "reward_curve.png", dpi=120)
    print(f"final greedy return {history.final_return:.2f} of 200; results in {out}/")


def evaluate_run(
    run: tyro.conf.Positional[Path],
    episodes: int = 100,
    greedy: bool = True,
    start_noise: float = 0.05,
    seed: int = 0,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Evaluate a trained agent on the CPU, in the precision it was trained in.

    Args:
        run: folder that `train` wrote.
        episodes: how many to play.
        greedy: take the likeliest action; --no-greedy samples.
        start_noise: half-width of the range that episodes start in.
        seed: of the starts.
        json_output: print one JSON object.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}: give at least 1")
    model, config = checkpoint.load(run / "checkpoint.pt")
    precision = Precision(config.precision)
    returns = evaluate(precision.prepare(model), episodes, greedy, start_noise, seed, precision)
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
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16"),
    seeds: int = 30,
    first_seed: int = 0,
    steps: int = 100_000,
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Train every precision on the same seeds and write results.csv, table.md and curves.png.

    Args:
        out: folder for the results.
        precisions: what to compare; differences are taken to the first.
        seeds: runs of each.
        first_seed: seeds run upwards from here.
        steps: environment steps of a run.
        workers: processes at a time; None is one a core.
        overwrite: replace a study that the folder holds.
    """
    for name, value in {"seeds": seeds, "precisions": len(precisions)}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}: give at least 1")
    names = list(dict.fromkeys(precisions))
    # Seeds outermost: a study that is stopped early has complete pairs.
    configs = [Config(precision=name, seed=first_seed + i, steps=steps) for i in range(seeds) for name in names]
    claim(out, overwrite)
    histories, results = [], []
    for history in study.run_all(configs, workers):
        histories.append(history)
        results.append(study.summarize(history))
        study.write_results(out / "results.csv", results)
    command = f"python -m fp8rl study --precisions {' '.join(names)} --seeds {seeds} --first-seed {first_seed} --steps {steps}"
    text = f"{study.table(results, names)}\n`{command}` on {study.hardware()}.\n"
    (out / "table.md").write_text(text)
    curves = {name: study.stack([h for h in histories if h.config.precision == name], "eval_return") for name in names}
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot.learning_curves(left, curves)
    left.set_title(f"interquartile mean and range of {seeds} seeds", fontsize=9)
    plot.intervals(right, study.scores(results, "final_return"), "final greedy return, of 200")
    right.set_title("each seed, interquartile mean, 95% interval", fontsize=9)
    figure.savefig(out / "curves.png", dpi=120)
    print(text)


def main() -> None:
    """Runs the command line."""
    commands = {"train": train, "eval": evaluate_run, "study": compare}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="python -m fp8rl", description=__doc__)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"fp8rl: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
