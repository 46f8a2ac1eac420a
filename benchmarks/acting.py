"""Who may act in few bits? What it costs that a rounded copy of the policy writes the sequences.

Policies are trained in float32, and a copy of them in few bits writes the sequences. What the
learner loses depends on the format, on the length T of the sequences, and on what it does about the
ratios pi / mu of the two policies (fp8rl/sequences/corrections.py).

Before training, a float32 run tells the horizon H of a format: after H tokens, the weights of
sequences have lost a tenth of their effective sample size. The claim is that T / H foresees the
loss, for each correction. So the losses of the first experiment, drawn over T / H, predict those of
the others, which are another task, another network and other formats.

    first      the experiment from which each correction's curve is read; seeds below 1000
    predict    horizons, and the losses of the other experiments; committed before they are measured
    measure    the other experiments; seeds from 1000 up
    table      the outcome, beside rules that know less: the format alone, T alone, a token's
               effective sample size alone

    python benchmarks/acting.py first benchmarks/results/acting_first.csv
    python benchmarks/acting.py predict benchmarks/results/acting_predicted.csv
    python benchmarks/acting.py measure benchmarks/results/acting_measured.csv
    python benchmarks/acting.py table benchmarks/results/acting.md

`first` and `measure` go on where they were stopped. A loss is the share of the success that the
learner reaches where float32 writes the sequences: 0 is float32, 1 gets nothing right.
"""

import argparse
import math
import multiprocessing
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from files import Journal, last_line, rows_of, table_of

from fp8rl.machine.hardware import keep_freed_memory, origin
from fp8rl.sequences.laboratory import Arm, Laboratory, Setting, horizons, pretrained
from fp8rl.study import figures

RESULTS = Path(__file__).parent / "results"
WATCHED = [900, 901, 902, 903]  # seeds of the float32 run on which horizons are measured
REPAIRS = ("token_weights", "sequence_weights", "mask_tokens", "mask_sequences")
ALL = ("none", *REPAIRS, "clip", "one_precision")
ENDS = ("none", "clip")  # the least and the most that can happen


def arms_of(corrections: dict[str, tuple[str, ...]]) -> list[Arm]:
    """Float32, and each format with each of its corrections."""
    pairs = [(form, name) for form, names in corrections.items() for name in names]
    return [Arm(), *(Arm(form, name) for form, name in pairs)]


class Experiment(NamedTuple):
    """Arms by the length of sequences, trained in one setting with the same seeds."""

    setting: Setting
    seeds: range
    arms: dict[int, list[Arm]]


BITS = {form: ALL for form in ("e8m1", "e8m2", "e8m3")}
BITS |= {form: ENDS for form in ("e8m5", "e8m7")}
SIDES = ("clip_negative", "clip_positive")
WITH_SIDES = BITS | {form: (*ALL, *SIDES) for form in ("e8m1", "e8m2")}
LONG = {form: ENDS for form in ("e8m1", "e8m3", "e8m5")} | {"e8m2": (*ENDS, "mask_tokens")}
ENGINES = {"fp8": ALL, "fp16": ENDS}
ENTROPIC = {form: ALL for form in ("e8m1", "e8m2", "e8m3")}
ENTROPIC |= {form: ENDS for form in ("e8m5", "fp8")}
ATTENTION = {form: ALL for form in ("e8m2", "e8m3", "fp8")}
ATTENTION |= {form: ENDS for form in ("e8m1", "e8m5")}
SHARP = Setting()
HARMLESS = Setting(right_tokens=4)
# With the recurrent network's learning rate, attention unlearns in float32, too
TWO_LAYERS = Setting(network="attention", learning_rate=5e-4)

EXPERIMENTS = {
    "first": Experiment(
        SHARP,
        range(16),
        {
            8: arms_of(WITH_SIDES),
            32: arms_of(WITH_SIDES),
            128: arms_of(WITH_SIDES),
            512: arms_of(LONG),
        },
    ),
    "other formats": Experiment(
        SHARP,
        range(1000, 1016),
        {
            8: arms_of(ENGINES),
            32: arms_of(ENGINES),
            128: arms_of(ENGINES),
            512: arms_of({"fp8": ENDS}),
        },
    ),
    "entropic task": Experiment(
        HARMLESS,
        range(1000, 1016),
        {length: arms_of(ENTROPIC) for length in (8, 32, 128)},
    ),
    "attention": Experiment(
        TWO_LAYERS,
        range(1000, 1016),
        {length: arms_of(ATTENTION) for length in (8, 32)},
    ),
    "two updates": Experiment(
        Setting(updates_per_rollout=2),
        range(1000, 1016),
        {
            length: arms_of(
                {form: ("none", "token_weights", "clip") for form in ("e8m1", "e8m2", "e8m3")}
            )
            for length in (32, 128)
        },
    ),
}
FIELDS = ["experiment", "length", "format", "correction", "seed"]
FIELDS += ["learner", "actor", "dead", "start"]


class Job(NamedTuple):
    """Arms of one length and a few seeds, trained as one batch."""

    experiment: str
    length: int
    seeds: tuple[int, ...]


def jobs_of(names: list[str]) -> list[Job]:
    """The jobs of experiments, the longest first."""
    jobs = []
    for name in names:
        seeds = list(EXPERIMENTS[name].seeds)
        for length in EXPERIMENTS[name].arms:
            # A batch that fits into the cache takes half as long
            size = max(1, min(4, 64 // length))
            groups = [tuple(seeds[i : i + size]) for i in range(0, len(seeds), size)]
            jobs += [Job(name, length, group) for group in groups]
    return sorted(jobs, key=lambda job: -job.length * len(job.seeds))


def trained(job: Job) -> list[dict]:
    """One row for each arm and seed: successes at the end, the mean of four evaluations."""
    torch.set_num_threads(1)
    keep_freed_memory()
    experiment = EXPERIMENTS[job.experiment]
    setting = experiment.setting._replace(length=job.length)
    laboratory = Laboratory(setting, experiment.arms[job.length], list(job.seeds))
    rows = []
    for arm, seed, numbers in successes(laboratory):
        row = {"experiment": job.experiment, "length": job.length, "format": arm.format}
        rows.append(row | {"correction": arm.correction, "seed": seed} | numbers)
    return rows


def successes(laboratory: Laboratory) -> list[tuple[Arm, int, dict]]:
    """Trains all arms of a laboratory; their successes at the end, by arm and seed."""
    start = laboratory.learner_success()
    laboratory.train(laboratory.setting.updates - 20)
    rewards = []  # of each prompt, [arms, seeds, prompts]
    for _ in range(4):
        laboratory.train(5)
        rewards.append(laboratory.learner_rewards())
    learner = torch.stack(rewards).mean(0)
    actor = laboratory.actor_success()
    outcomes = []
    for i, arm in enumerate(laboratory.arms):
        for j, seed in enumerate(laboratory.seeds):
            numbers = {
                "learner": round(float(learner[i, j].mean()), 4),
                "actor": round(float(actor[i, j]), 4),
                "dead": int((learner[i, j] == 0).sum()),
                "start": round(float(start[i, j]), 4),
            }
            outcomes.append((arm, seed, numbers))
    return outcomes


def measure(names: list[str], out: Path, processes: int) -> None:
    """Trains all jobs of experiments whose rows are not in the file yet, and appends them."""
    journal = Journal(out, FIELDS)
    done = journal.done("experiment", "length", "seed")
    jobs = [
        job
        for job in jobs_of(names)
        if (job.experiment, str(job.length), str(job.seeds[0])) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=8) as pool:
        for i, rows in enumerate(pool.imap_unordered(trained, jobs)):
            journal.add(*rows)
            print(f"{i + 1}/{len(jobs)}: {rows[0]['experiment']}, {rows[0]['length']} tokens")


class Cell(NamedTuple):
    """What one format and correction lost at one length."""

    loss: float  # share of float32's success, by means over seeds
    low: float  # 95% bootstrap interval over seeds
    high: float
    learner: float  # mean success of the learner
    actor: float  # mean success of the acting copy
    dead: float  # share of prompts without any success


Key = tuple[str, int, str, str]  # experiment, length, format, correction


def cells_of(rows: list[dict]) -> dict[Key, Cell]:
    """The cells of measured rows, float32's own included."""
    columns: dict[Key, dict[str, dict]] = {}
    for row in rows:
        key = (row["experiment"], int(row["length"]), row["format"], row["correction"])
        columns.setdefault(key, {})[row["seed"]] = row
    prompts = Setting().prompts
    cells = {}
    for key, by_seed in columns.items():
        seeds = sorted(by_seed, key=int)
        reference_rows = columns[(*key[:2], "fp32", "none")]
        learner = np.array([float(by_seed[seed]["learner"]) for seed in seeds])
        reference = np.array([float(reference_rows[seed]["learner"]) for seed in seeds])
        picks = np.random.default_rng(0).integers(len(seeds), size=(10_000, len(seeds)))
        resampled = 1 - learner[picks].mean(1) / reference[picks].mean(1)
        low, high = np.percentile(resampled, [2.5, 97.5])
        cells[key] = Cell(
            loss=float(1 - learner.mean() / reference.mean()),
            low=float(low),
            high=float(high),
            learner=float(learner.mean()),
            actor=float(np.mean([float(by_seed[seed]["actor"]) for seed in seeds])),
            dead=float(np.mean([int(by_seed[seed]["dead"]) for seed in seeds]) / prompts),
        )
    return cells


def horizons_of(names: list[str]) -> dict[tuple[str, int, str], tuple[float, float]]:
    """Effective sample size of a token, and horizon, by experiment, length and format.

    Medians over the seeds of one pretrained float32 run.
    """
    result = {}
    for name in names:
        experiment = EXPERIMENTS[name]
        for length, arms in experiment.arms.items():
            setting = experiment.setting._replace(length=length)
            policies, _ = pretrained(setting, WATCHED)
            formats = [form for form in dict.fromkeys(arm.format for arm in arms) if form != "fp32"]
            for form, horizon in horizons(policies, setting, WATCHED, formats).items():
                size = horizon.sample_size.median().item()
                result[name, length, form] = size, horizon.tokens.median().item()
    return result


class Curve:
    """A rule that predicts losses from one number, which only rise with it.

    It is the isotonic regression of the losses that it was given, linear between them in the
    logarithm of the number, and constant beyond.
    """

    def __init__(self, numbers: list[float], losses: list[float]):
        order = np.argsort(numbers)
        self.logs = np.log(np.array(numbers)[order])
        blocks: list[list[float]] = []  # mean and size of each block of equal predictions
        for loss in np.array(losses)[order]:
            blocks.append([loss, 1])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                mean, size = blocks.pop()
                before, size_before = blocks.pop()
                total = size + size_before
                blocks.append([(mean * size + before * size_before) / total, total])
        self.losses = np.concatenate([np.full(int(size), mean) for mean, size in blocks])

    def __call__(self, number: float) -> float:
        return float(np.interp(math.log(number), self.logs, self.losses))


RULES = ("predicted", "format alone", "length alone", "sample size alone")
PREDICTED = ["experiment", "length", "format", "correction", "sample_size", "horizon", *RULES]
SAME_MANTISSA = {"fp8": "e8m3", "fp16": "e8m7"}  # the nearest format of the first experiment


def predict(out: Path) -> None:
    """Writes horizons, and what four rules predict from the first experiment."""
    first = cells_of(Journal(RESULTS / "acting_first.csv", FIELDS).rows())
    horizon_table = horizons_of(list(EXPERIMENTS))
    rows = []
    for (name, length, form), (size, horizon) in horizon_table.items():
        for arm in EXPERIMENTS[name].arms[length]:
            if arm.format != form:
                continue
            row = dict.fromkeys(PREDICTED, "")
            row |= {"experiment": name, "length": length, "format": form}
            row |= {"correction": arm.correction}
            row |= {"sample_size": f"{size:.9f}", "horizon": f"{horizon:.4g}"}
            if name != "first":
                known = {
                    key: cell
                    for key, cell in first.items()
                    if key[3] == arm.correction and key[2] != "fp32"
                }
                values = predictions(known, horizon_table, length, form, size, horizon)
                row |= {rule: f"{value:.4f}" for rule, value in values.items()}
            rows.append(row)
    Journal(out, PREDICTED).write(rows)
    with out.open("a") as file:
        file.write(f"# python benchmarks/acting.py predict {out} on {origin()}\n")


def predictions(known: dict[Key, Cell], horizon_table, length, form, size, horizon) -> dict:
    """What each rule predicts for a cell, from the known cells of the same correction."""
    losses = [cell.loss for cell in known.values()]
    over = [key[1] / horizon_table[key[:3]][1] for key in known]
    lost = [1 - horizon_table[key[:3]][0] for key in known]
    like = SAME_MANTISSA.get(form, form)
    same_format = [cell.loss for key, cell in known.items() if key[2] == like]
    nearest = min({key[1] for key in known}, key=lambda x: abs(math.log(x / length)))
    same_length = [cell.loss for key, cell in known.items() if key[1] == nearest]
    return {
        "predicted": Curve(over, losses)(length / horizon),
        "format alone": float(np.mean(same_format)),
        "length alone": float(np.mean(same_length)),
        "sample size alone": Curve(lost, losses)(1 - size),
    }


LABELS = {
    "none": "no correction",
    "token_weights": "weights of tokens",
    "sequence_weights": "weights of sequences",
    "mask_tokens": "tokens masked",
    "mask_sequences": "sequences masked",
    "clip": "clip by pi / mu",
    "clip_negative": "clip, A < 0 only",
    "clip_positive": "clip, A > 0 only",
    "one_precision": "one precision",
}
MANTISSA = {"fp8": 3, "fp16": 10}


def bits_of(form: str) -> int:
    """Bits of mantissa of a format."""
    return MANTISSA.get(form) or int(form.removeprefix("e8m"))


def spearman(x: list[float], y: list[float]) -> float:
    """Rank correlation; ties have their mean rank."""
    ranks = []
    for values in (np.array(x), np.array(y)):
        smaller = (values[:, None] > values).sum(1)
        equal = (values[:, None] == values).sum(1)
        ranks.append(smaller + (equal - 1) / 2)
    if min(np.ptp(rank) for rank in ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks)[0, 1])


def two_places(x: float) -> str:
    """A number with two places after the point, and 0 without a sign."""
    return f"{round(x, 2) + 0.0:.2f}"


def loss_table(name: str, cells: dict[Key, Cell], horizon_of: dict) -> str:
    """The losses of an experiment, a line for each format and length."""
    own = {key: cell for key, cell in cells.items() if key[0] == name and key[2] != "fp32"}
    corrections = [x for x in LABELS if x in {key[3] for key in own}]
    rows = []
    places = dict.fromkeys(key[1:3] for key in own)
    for length, form in sorted(places, key=lambda place: (bits_of(place[1]), place)):
        row = [f"{form}, {length}", f"{length / horizon_of[name, length, form]:.2g}"]
        for correction in corrections:
            cell = own.get((name, length, form, correction))
            loss, low, high = (two_places(x) for x in cell[:3]) if cell else ("", "", "")
            row.append(f"{loss} [{low}, {high}]" if cell else "")
        rows.append(row)
    return table_of(("format, T", "T / H", *(LABELS[x] for x in corrections)), rows)


def success_table(cells: dict[Key, Cell]) -> str:
    """Successes of learner and actor, and dead prompts, by experiment and length."""
    rows = []
    for (name, length, form, correction), cell in cells.items():
        if correction not in ("none", "clip", "sequence_weights", "one_precision"):
            continue
        if form not in ("fp32", "e8m1", "e8m2", "fp8") or length not in (32, 128):
            continue
        numbers = f"{cell.learner:.2f}", f"{cell.actor:.2f}", f"{cell.dead:.0%}"
        rows.append([f"{name}, {length}", form, LABELS[correction], *numbers])
    columns = ("experiment, T", "format", "correction", "learner", "actor", "dead prompts")
    return table_of(columns, rows)


def foresight_table(cells: dict[Key, Cell], predicted: list[dict]) -> str:
    """How far each rule's predictions are off, and how well each number orders the losses."""
    columns = ("experiment, correction", "cells", "losses", "mean error: T / H", "format alone")
    columns += ("T alone", "sample size alone", "nothing is lost", "Spearman: T / H", "bits", "T")
    groups: dict[tuple, list[dict]] = {}
    for row in predicted:
        if row["experiment"] != "first" and row["predicted"]:
            groups.setdefault((row["experiment"], row["correction"]), []).append(row)
    table = []
    for (name, correction), rows in groups.items():
        losses = np.array(
            [cells[name, int(row["length"]), row["format"], correction].loss for row in rows]
        )
        said = [[float(row[rule]) for row in rows] for rule in RULES] + [np.zeros(len(rows))]
        errors = [float(np.mean(np.abs(x - losses))) for x in said]
        numbers = [
            [int(row["length"]) / float(row["horizon"]) for row in rows],
            [-bits_of(row["format"]) for row in rows],
            [int(row["length"]) for row in rows],
            [1 - float(row["sample_size"]) for row in rows],
        ]
        orders = [spearman(number, losses) for number in numbers]
        table.append(
            [
                f"{name}, {LABELS[correction]}",
                len(rows),
                f"{two_places(min(losses))} to {two_places(max(losses))}",
                *(f"{x:.3f}" for x in errors),
                *(f"{x:.2f}" for x in orders),
            ]
        )
    return table_of((*columns, "sample size"), table)


MARKERS = {
    "first": ("o", "recurrent network, 1 to 7 bits of mantissa"),
    "other formats": ("s", "the same, in fp8 and fp16"),
    "two updates": ("v", "the same, two updates a rollout"),
    "entropic task": ("^", "the same, half of all tokens are right"),
    "attention": ("D", "attention, 1 to 5 bits, and fp8"),
}
EXAMPLE = ("attention", 32, "fp8")  # whose losses README.md names
WORST_REPAIRED = ("two updates", 128, "e8m1")  # where token TIS loses the most
NAMED_POINTS = {  # text, its position in horizons, and how far above the point it stands
    EXAMPLE: ("attention, FP8, 32 tokens", 1.5e-3, 0.1),
    WORST_REPAIRED: ("two updates a rollout", 0.2, 0.27),
}
PANELS = {
    "clip": "PPO's clip by π/μ",
    "none": "no correction",
    "token_weights": "token TIS: truncated weights π/μ",
}


def draw(cells: dict[Key, Cell], horizon_of: dict, out: Path) -> None:
    """Losses over T / H: with the clip, without a correction, and with truncated weights.

    A point is hollow if its experiment was not run with truncated weights.
    """
    fig, axes = plt.subplots(1, 3, figsize=(11.5, 4), sharey=True, layout="constrained")
    for ax, (correction, title) in zip(axes, PANELS.items(), strict=True):
        for (name, (marker, label)), style in zip(MARKERS.items(), figures.STYLES, strict=False):
            points = [
                (key[1] / horizon_of[key[:3]], cell.loss, (*key[:3], "token_weights") in cells)
                for key, cell in cells.items()
                if key[0] == name and key[3] == correction and key[2] != "fp32"
            ]
            if not points:
                continue
            over, loss, in_all_panels = np.array(sorted(points)).T
            color = style["color"]
            for is_full, fill in ((1, color), (0, "none")):
                chosen = in_all_panels == is_full
                ax.plot(
                    over[chosen],
                    loss[chosen],
                    marker,
                    color=color,
                    markerfacecolor=fill,
                    label=label if is_full else None,
                    alpha=0.8,
                )
            if name == "first":
                grid = np.geomspace(over.min(), over.max(), 200)
                curve = Curve(list(over), list(loss))
                ax.plot(grid, [curve(x) for x in grid], color=color, linewidth=1)
        for place, (text, x, rise) in NAMED_POINTS.items():
            cell = cells.get((*place, correction))
            if not cell or (correction, place) == ("clip", WORST_REPAIRED):
                continue
            ax.annotate(
                f"{text}:\n{cell.loss:.2f} [{two_places(cell.low)}, {two_places(cell.high)}]",
                (place[1] / horizon_of[place], cell.loss),
                (x, cell.loss + rise),
                fontsize=8,
                arrowprops={"arrowstyle": "-", "color": "#888888"},
            )
        ax.axhline(0, color="#888888", linewidth=0.8, zorder=0)
        ax.set(xscale="log", xlim=(1e-3, 1e3), title=title)
        ax.set_xlabel("length of a sequence, in horizons")
        ax.xaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("share of right sequences that is lost")
    axes[1].text(
        0.03, 0.95, "hollow: not run\nwith token TIS", va="top", transform=axes[1].transAxes
    )
    axes[2].legend(fontsize=8, loc="upper left")
    fig.suptitle("The clip by the rollout policy does harm long before few bits do")
    fig.savefig(out, dpi=110)
    plt.close(fig)


HALVES = {
    "none": ("no clip", "#000000"),
    "clip_positive": ("clip only where A > 0", "#56B4E9"),
    "clip_negative": ("clip only where A < 0", "#E69F00"),
    "clip": ("both halves: PPO's clip", "#D55E00"),
}
HALVES_FORMAT = "e8m1"


def draw_halves(cells: dict[Key, Cell], out: Path) -> None:
    """What each half of PPO's clip by pi / mu loses alone, in the first experiment."""
    lengths = sorted(
        key[1] for key in cells if key[0] == "first" and key[2:] == (HALVES_FORMAT, "clip_negative")
    )
    fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    width = 0.2
    for i, (correction, (label, color)) in enumerate(HALVES.items()):
        own = [cells["first", length, HALVES_FORMAT, correction] for length in lengths]
        x = np.arange(len(lengths)) + (i - 1.5) * width
        loss = np.array([cell.loss for cell in own])
        interval = [loss - [cell.low for cell in own], [cell.high for cell in own] - loss]
        ax.bar(x, loss, 0.9 * width, color=color, label=label)
        ax.errorbar(x, loss, np.clip(interval, 0, None), fmt="none", ecolor="#444444", capsize=2)
    ax.axhline(0, color="#888888", linewidth=0.8)
    ax.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    ax.set_xlabel("length of a sequence; the rollout policy μ has one bit of mantissa")
    ax.set_ylabel("share of right sequences lost")
    ax.legend(loc="upper left", frameon=False)
    ax.set_title("PPO's clip by π/μ does harm where the advantage A is negative")
    fig.savefig(out, dpi=110)
    plt.close(fig)


def table(out: Path) -> None:
    """Writes the table and the figure."""
    files = (RESULTS / f"acting_{name}.csv" for name in ("first", "measured"))
    cells = cells_of([row for file in files for row in Journal(file, FIELDS).rows()])
    predicted = Journal(RESULTS / "acting_predicted.csv", PREDICTED).rows()
    horizon_of = {
        (row["experiment"], int(row["length"]), row["format"]): float(row["horizon"])
        for row in predicted
    }
    parts = ["## How well the losses were foreseen", foresight_table(cells, predicted)]
    for name, experiment in EXPERIMENTS.items():
        seeds = experiment.seeds
        parts.append(f"## {name}: {describe(experiment.setting)}")
        parts.append(f"Seeds {seeds[0]} to {seeds[-1]}. Losses with 95% bootstrap intervals.")
        parts.append(loss_table(name, cells, horizon_of))
    parts += ["## Learner, actor, and prompts without any success", success_table(cells)]
    parts.append(f"`python benchmarks/acting.py table {out}` on {origin()}.")
    whole = "\n\n".join(parts) + "\n"
    out.write_text(whole)
    out.with_stem(f"{out.stem}_short").write_text(short(whole))
    draw(cells, horizon_of, out.with_suffix(".png"))
    draw_halves(cells, out.with_stem(f"{out.stem}_halves").with_suffix(".png"))


SHORT = {"first": "recurrent", "other formats": "recurrent", "attention": "attention"}


def short(whole: str) -> str:
    """The losses of both networks with sequences of 32 tokens, without their intervals."""
    rows = []
    for name, network in SHORT.items():
        for row in rows_of(whole.split(f"\n## {name}: ")[1]):
            form, length = row.pop("format, T").split(", ")
            horizons = f"{float(row.pop('T / H')):g}"
            if length != "32":
                continue
            losses = [row.get(LABELS[x], "").split(" [")[0] for x in ALL]
            rows.append([network, form, horizons, *losses])
    table = table_of(("network", "format", "T / H", *(LABELS[x] for x in ALL)), rows)
    return f"{table}\n\n{last_line(whole)}\n"


def describe(setting: Setting) -> str:
    return (
        f"{setting.network} network, {setting.right_tokens} of {setting.vocabulary} tokens right, "
        f"learning rate {setting.learning_rate:g}, {setting.updates_per_rollout} update"
        f"{'s' * (setting.updates_per_rollout > 1)} a rollout"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("first", "predict", "measure", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(words)
    if arguments.command == "first":
        measure(["first"], arguments.out, arguments.processes)
    elif arguments.command == "predict":
        predict(arguments.out)
    elif arguments.command == "measure":
        others = [name for name in EXPERIMENTS if name != "first"]
        measure(others, arguments.out, arguments.processes)
    else:
        table(arguments.out)


if __name__ == "__main__":
    main()
