"""Who may act in few bits? What it costs that a rounded copy of the policy writes the sequences.

Policies are trained in float32, and a copy of them in few bits writes the sequences. What the
learner loses depends on the format, on the length T of the sequences, and on what it does about the
ratios pi / mu of the two policies (fp8rl/sequences/corrections.py). A loss is the share of the
success that the learner reaches where float32 writes the sequences: 0 is float32, 1 gets nothing
right.

*acting* draws the loss over T / H. Before training, a float32 run tells the horizon H of a format:
after H tokens, the weights of sequences have lost a tenth of their effective sample size. The first
experiment predicted the others, which are another task, another network and other formats. Horizons
and predictions are in results/acting_predicted.csv, which acting.py of commit b35a53c made, and how
far they held is in results/acting_foreseen.md.

*stack_rules* asks what the rules cost that stacks for language models apply. Some of its arms
sample by top-p in the copy that acts. As in vLLM, its log-probabilities are then those among the
tokens that were kept, and the learner's are those among all tokens. What was expected is in
results/stack_rules_predicted.csv, with a reason each, and how far it held in
results/stack_rules_foreseen.md.

    python benchmarks/acting.py measure benchmarks/results/acting_first.csv
    python benchmarks/acting.py measure benchmarks/results/acting_measured.csv
    python benchmarks/acting.py table benchmarks/results/acting.md
    python benchmarks/acting.py measure benchmarks/results/stack_rules_measured.csv
    python benchmarks/acting.py table benchmarks/results/stack_rules.md

`measure` trains the experiments of a file (EXPERIMENTS), and goes on where it was stopped. Both
files of predictions were committed before the experiments were measured that they are about.
"""

import argparse
import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from results import RESULTS, Journal, table_of, write_tables

from fp8rl.machine.hardware import cores, keep_freed_memory
from fp8rl.sequences.laboratory import Arm, Laboratory, Setting
from fp8rl.study import figures

ALL = (
    "none",
    "token_weights",
    "sequence_weights",
    "mask_tokens",
    "mask_sequences",
    "clip",
    "one_precision",
)
ENDS = ("none", "clip")  # the least and the most that can happen
# What stacks do, by the correction of an arm
RULES = {
    "none": "no correction",
    "one_precision": "one precision",
    "masked_sequence_weights": "TRL, default",
    "token_weights": "verl, token",
    "sequence_weights": "verl, sequence",
    "gated_token_weights": "OpenRLHF, seq",
    "clip": "AReaL, default",
}
BEST = "token_weights"  # with which the other rules are compared
SAMPLED = ("none", "masked_sequence_weights", BEST)  # of formats that sample by top-p


def arms_of(corrections: dict[str, tuple[str, ...]], with_top_p: tuple[str, ...] = ()) -> list[Arm]:
    """Float32, each format with each of its corrections, and the formats that sample by top-p."""
    arms = [Arm(form, name) for form, names in corrections.items() for name in names]
    arms += [Arm(form, name, 0.95) for form in with_top_p for name in SAMPLED]
    return [Arm(), *arms]


class Experiment(NamedTuple):
    """Arms by the length of sequences, trained in one setting with the same seeds."""

    setting: Setting
    seeds: range
    arms: dict[int, list[Arm]]


WITH_SIDES = {
    **{form: (*ALL, "clip_negative", "clip_positive") for form in ("e8m1", "e8m2")},
    "e8m3": ALL,
    **{form: ENDS for form in ("e8m5", "e8m7")},
}
LONG = {form: ENDS for form in ("e8m1", "e8m3", "e8m5")} | {"e8m2": (*ENDS, "mask_tokens")}
ENTROPIC = {
    **{form: ALL for form in ("e8m1", "e8m2", "e8m3")},
    **{form: ENDS for form in ("e8m5", "fp8")},
}
ATTENTION = {
    **{form: ALL for form in ("e8m2", "e8m3", "fp8")},
    **{form: ENDS for form in ("e8m1", "e8m5")},
}
EVERY_RULE = arms_of({form: tuple(RULES) for form in ("fp8", "e8m2")}, ("fp32", "fp8"))
LONG_TOP_P = arms_of({}, ("fp32",))
IN_MINIBATCHES = arms_of({form: (*SAMPLED, "clip") for form in ("fp8", "e8m2")})
SHARP = Setting()
HARMLESS = Setting(right_tokens=4)
# With the recurrent network's learning rate, attention unlearns in float32, too
TWO_LAYERS = Setting(network="attention", learning_rate=5e-4)
# As many updates of as many sequences as in the others, but four on each rollout
FOUR = {"batch": 128, "minibatches": 4, "updates": 50}
NEW = range(1000, 1016)
RULES_SEEDS = range(2000, 2016)
FEWER = RULES_SEEDS[:8]
# By the file of their rows. The limits of predictions were set on seeds below 1000 alone.
EXPERIMENTS = {
    "acting_first": {
        "first": Experiment(
            SHARP,
            range(16),
            {length: arms_of(WITH_SIDES) for length in (8, 32, 128)} | {512: arms_of(LONG)},
        )
    },
    "acting_measured": {
        "other formats": Experiment(
            SHARP,
            NEW,
            {length: arms_of({"fp8": ALL, "fp16": ENDS}) for length in (8, 32, 128)}
            | {512: arms_of({"fp8": ENDS})},
        ),
        "entropic task": Experiment(
            HARMLESS, NEW, {length: arms_of(ENTROPIC) for length in (8, 32, 128)}
        ),
        "attention": Experiment(
            TWO_LAYERS, NEW, {length: arms_of(ATTENTION) for length in (8, 32)}
        ),
        "two updates": Experiment(
            Setting(updates_per_rollout=2),
            NEW,
            {
                length: arms_of({form: ("none", BEST, "clip") for form in ("e8m1", "e8m2", "e8m3")})
                for length in (32, 128)
            },
        ),
    },
    "stack_rules_measured": {
        "recurrent, 1 right": Experiment(SHARP, RULES_SEEDS, {32: EVERY_RULE, 128: LONG_TOP_P}),
        "recurrent, 4 right": Experiment(HARMLESS, RULES_SEEDS, {32: EVERY_RULE, 128: LONG_TOP_P}),
        "attention, 1 right": Experiment(TWO_LAYERS, RULES_SEEDS, {32: EVERY_RULE}),
        "attention, 4 right": Experiment(
            TWO_LAYERS._replace(right_tokens=4), RULES_SEEDS, {32: EVERY_RULE}
        ),
        "recurrent, 1 right, 4 minibatches": Experiment(
            SHARP._replace(**FOUR), FEWER, {32: IN_MINIBATCHES}
        ),
        "attention, 1 right, 4 minibatches": Experiment(
            TWO_LAYERS._replace(**FOUR), FEWER, {32: IN_MINIBATCHES}
        ),
    },
}
PLACE = ["experiment", "length", "format", "correction"]
SUCCESSES = ["seed", "learner", "actor", "dead", "start"]
PREDICTED = [
    *PLACE,
    "sample_size",
    "horizon",
    "predicted",
    "format alone",
    "length alone",
    "sample size alone",
]
FIELDS = {
    "acting_first": PLACE + SUCCESSES,
    "acting_measured": PLACE + SUCCESSES,
    "stack_rules_measured": ["experiment", "length", "format", "top_p", "correction", *SUCCESSES],
}


# Training


class Job(NamedTuple):
    """Arms of one length and a few seeds, trained as one batch."""

    experiment: str
    length: int
    seeds: tuple[int, ...]


def jobs_of(experiments: dict[str, Experiment]) -> list[Job]:
    """The jobs of experiments, the longest first."""
    jobs = []
    for name, experiment in experiments.items():
        seeds = list(experiment.seeds)
        for length in experiment.arms:
            # A batch that fits into the cache takes half as long
            size = max(1, min(4, 64 // length))
            groups = [tuple(seeds[i : i + size]) for i in range(0, len(seeds), size)]
            jobs += [Job(name, length, group) for group in groups]
    return sorted(jobs, key=lambda job: -job.length * len(job.seeds))


def trained(job: Job) -> list[dict]:
    """One row for each arm and seed: successes at the end, the mean of four evaluations."""
    torch.set_num_threads(1)
    keep_freed_memory()
    experiment = {name: x for file in EXPERIMENTS.values() for name, x in file.items()}[
        job.experiment
    ]
    setting = experiment.setting._replace(length=job.length)
    laboratory = Laboratory(setting, experiment.arms[job.length], list(job.seeds))
    start = laboratory.learner_success()
    laboratory.train(setting.updates - 20)
    rewards = []  # of each prompt, [arms, seeds, prompts]
    for _ in range(4):
        laboratory.train(5)
        rewards.append(laboratory.learner_rewards())
    learner = torch.stack(rewards).mean(0)
    actor = laboratory.actor_success()
    rows = []
    for i, arm in enumerate(laboratory.arms):
        for j, seed in enumerate(laboratory.seeds):
            rows.append(
                {
                    "experiment": job.experiment,
                    "length": job.length,
                    **arm._asdict(),
                    "seed": seed,
                    "learner": round(float(learner[i, j].mean()), 4),
                    "actor": round(float(actor[i, j]), 4),
                    "dead": int((learner[i, j] == 0).sum()),
                    "start": round(float(start[i, j]), 4),
                }
            )
    return rows


def measure(out: Path) -> None:
    """Trains all jobs of a file whose rows are not in it yet, and appends them."""
    journal = Journal(out, FIELDS[out.stem])
    done = journal.done("experiment", "length", "seed")
    jobs = [
        job
        for job in jobs_of(EXPERIMENTS[out.stem])
        if (job.experiment, str(job.length), str(job.seeds[0])) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(cores(), maxtasksperchild=8) as pool:
        for i, rows in enumerate(pool.imap_unordered(trained, jobs)):
            journal.add(*({name: row[name] for name in journal.columns} for row in rows))
            place = rows[0]
            print(f"{i + 1}/{len(jobs)}: {place['experiment']}, {place['length']} tokens")


# Losses

Key = tuple[str, int, str, str]  # experiment, length, format (with top-p), correction


class Cell(NamedTuple):
    """What one format and correction lost at one length."""

    loss: float  # share of float32's success, by means over seeds
    low: float  # 95% bootstrap interval over seeds
    high: float
    learner: float  # mean success of the learner
    actor: float  # mean success of the acting copy
    dead: float  # share of prompts without any success

    def __str__(self) -> str:
        loss, low, high = map(two_places, self[:3])
        return f"{loss} [{low}, {high}]"


def key_of(row: dict) -> Key:
    """The cell to which a row belongs."""
    top_p = row.get("top_p", 1)
    actor = row["format"] if float(top_p) == 1 else f"{row['format']}, top-p {top_p}"
    return row["experiment"], int(row["length"]), actor, row["correction"]


def by_cell(rows: Iterable[dict]) -> dict[Key, dict[str, dict]]:
    """The rows of each cell, by their seeds."""
    cells: dict[Key, dict[str, dict]] = {}
    for row in rows:
        cells.setdefault(key_of(row), {})[row["seed"]] = row
    return cells


def losses_of(cells: dict[Key, dict[str, dict]], key: Key, seeds: list[str]) -> np.ndarray:
    """The loss of a cell over some seeds, and after it those of 10,000 resamples of the seeds,
    which are the same ones for every cell."""
    picks = np.random.default_rng(0).integers(len(seeds), size=(10_000, len(seeds)))
    picks = np.vstack((np.arange(len(seeds)), picks))
    learner, reference = (
        np.array([float(cells[name][seed]["learner"]) for seed in seeds])
        for name in (key, (*key[:2], "fp32", "none"))
    )
    return 1 - learner[picks].mean(1) / reference[picks].mean(1)


def with_interval(losses: np.ndarray) -> tuple[float, float, float]:
    """A loss, or a difference of losses, with its 95% interval."""
    low, high = np.percentile(losses[1:], [2.5, 97.5])
    return float(losses[0]), float(low), float(high)


def cells_of(rows: list[dict]) -> dict[Key, Cell]:
    """The cells of measured rows, float32's own included."""
    grouped = by_cell(rows)
    cells = {}
    for key, by_seed in grouped.items():
        mean = {
            name: float(np.mean([float(row[name]) for row in by_seed.values()]))
            for name in ("learner", "actor", "dead")
        }
        loss = with_interval(losses_of(grouped, key, sorted(by_seed, key=int)))
        cells[key] = Cell(*loss, mean["learner"], mean["actor"], mean["dead"] / Setting().prompts)
    return cells


def two_places(x: float) -> str:
    """A number with two places after the point, and 0 without a sign."""
    return f"{round(x, 2) + 0.0:.2f}"


def more_lost(grouped: dict, key: Key, other: Key) -> str:
    """By how much a cell loses more than another, paired by the seeds that both have."""
    seeds = sorted(grouped[key].keys() & grouped[other].keys())
    losses = losses_of(grouped, key, seeds) - losses_of(grouped, other, seeds)
    return str(Cell(*with_interval(losses), 0, 0, 0))


# Tables


def isotonic(losses: np.ndarray) -> list[float]:
    """The isotonic regression of losses in the order of a number with which they only rise."""
    count = len(losses)
    # The largest of the smallest means over neighbours, from j up to i and from i on
    return [
        max(min(losses[j : k + 1].mean() for k in range(i, count)) for j in range(i + 1))
        for i in range(count)
    ]


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


def rows_of_file(name: str) -> list[dict]:
    """The rows of a measured file."""
    return Journal(RESULTS / f"{name}.csv", FIELDS[name]).rows()


def acting_table(out: Path) -> None:
    """Writes the losses of *acting*, those of sequences of 32 tokens alone, and the figures."""
    cells = cells_of(rows_of_file("acting_first") + rows_of_file("acting_measured"))
    predicted = Journal(RESULTS / "acting_predicted.csv", PREDICTED).rows()
    horizon_of = {key_of(row)[:3]: float(row["horizon"]) for row in predicted}
    parts = []
    for name, experiment in (EXPERIMENTS["acting_first"] | EXPERIMENTS["acting_measured"]).items():
        setting = experiment.setting
        parts += [
            f"## {name}: {setting.network} network, {setting.right_tokens} of "
            f"{setting.vocabulary} tokens right, learning rate {setting.learning_rate:g}, "
            f"{setting.updates_per_rollout} update{'s' * (setting.updates_per_rollout > 1)} "
            "a rollout",
            f"Seeds {experiment.seeds[0]} to {experiment.seeds[-1]}. Losses with 95% bootstrap "
            "intervals.",
            acting_losses(name, cells, horizon_of),
        ]
    parts += ["## Learner, actor, and prompts without any success", success_table(cells)]
    write_tables(out, *parts, short=short(cells, horizon_of))
    draw(cells, horizon_of, out.with_suffix(".png"))
    draw_halves(cells, out.with_stem(f"{out.stem}_halves").with_suffix(".png"))


def acting_losses(name: str, cells: dict[Key, Cell], horizon_of: dict) -> str:
    """The losses of an experiment, a line for each format and length."""
    own = {key for key in cells if key[0] == name and key[2] != "fp32"}
    corrections = [x for x in LABELS if x in {key[3] for key in own}]
    places = sorted({key[1:3] for key in own}, key=lambda place: (bits_of(place[1]), place))
    rows = [
        [
            f"{form}, {length}",
            f"{length / horizon_of[name, length, form]:.2g}",
            *(cells.get((name, length, form, correction), "") for correction in corrections),
        ]
        for length, form in places
    ]
    return table_of(("format, T", "T / H", *(LABELS[x] for x in corrections)), rows)


def success_table(cells: dict[Key, Cell]) -> str:
    """Successes of learner and actor, and dead prompts, by experiment and length."""
    corrections = ("none", "clip", "sequence_weights", "one_precision")
    formats = ("fp32", "e8m1", "e8m2", "fp8")
    rows = [
        [
            f"{name}, {length}",
            form,
            LABELS[correction],
            f"{cell.learner:.2f}",
            f"{cell.actor:.2f}",
            f"{cell.dead:.0%}",
        ]
        for (name, length, form, correction), cell in cells.items()
        if correction in corrections and form in formats and length in (32, 128)
    ]
    return table_of(
        ("experiment, T", "format", "correction", "learner", "actor", "dead prompts"), rows
    )


SHORT = {"first": "recurrent", "other formats": "recurrent", "attention": "attention"}


def short(cells: dict[Key, Cell], horizon_of: dict) -> str:
    """The losses of both networks with sequences of 32 tokens, without their intervals."""
    rows = []
    for name, network in SHORT.items():
        places = {key[:3] for key in cells if key[:2] == (name, 32) and key[2] != "fp32"}
        for place in sorted(places, key=lambda place: (bits_of(place[2]), place[2])):
            in_horizons = float(f"{32 / horizon_of[place]:.2g}")
            losses = [cells.get((*place, x)) for x in ALL]
            shown = [two_places(cell.loss) if cell else "" for cell in losses]
            rows.append([network, place[2], f"{in_horizons:g}", *shown])
    return table_of(("network", "format", "T / H", *(LABELS[x] for x in ALL)), rows)


MARKERS = {
    "first": ("o", "recurrent network, 1 to 7 bits of mantissa"),
    "other formats": ("s", "the same, in fp8 and fp16"),
    "two updates": ("v", "the same, two updates a rollout"),
    "entropic task": ("^", "the same, half of all tokens are right"),
    "attention": ("D", "attention, 1 to 5 bits, and fp8"),
}
NAMED_POINTS = {  # text, its position in horizons, how far above the point it stands, not in
    # The losses that README.md names
    ("attention", 32, "fp8"): ("attention, FP8, 32 tokens", 1.5e-3, 0.1, ""),
    # Where token TIS loses the most
    ("two updates", 128, "e8m1"): ("two updates a rollout", 0.2, 0.27, "clip"),
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
                (key[1] / horizon_of[key[:3]], cell.loss, (*key[:3], BEST) in cells)
                for key, cell in cells.items()
                if key[0] == name and key[3] == correction and key[2] != "fp32"
            ]
            color = style["color"]
            for x, loss, is_full in points:
                ax.plot(
                    x,
                    loss,
                    marker,
                    color=color,
                    markerfacecolor=color if is_full else "none",
                    alpha=0.8,
                )
            ax.plot([], [], marker, color=color, label=label, alpha=0.8)
            if name == "first" and points:
                over, losses, _ = np.array(sorted(points)).T
                grid = np.geomspace(over[0], over[-1], 200)
                rise = np.interp(np.log(grid), np.log(over), isotonic(losses))
                ax.plot(grid, rise, color=color, linewidth=1)
        for place, (text, x, rise, not_in) in NAMED_POINTS.items():
            cell = cells.get((*place, correction))
            if cell and correction != not_in:
                ax.annotate(
                    f"{text}:\n{cell}",
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
    for i, (correction, (label, color)) in enumerate(HALVES.items()):
        own = [cells["first", length, HALVES_FORMAT, correction] for length in lengths]
        x = np.arange(len(lengths)) + (i - 1.5) * 0.2
        loss = np.array([cell.loss for cell in own])
        interval = [loss - [cell.low for cell in own], [cell.high for cell in own] - loss]
        ax.bar(x, loss, 0.18, color=color, label=label)
        ax.errorbar(x, loss, np.clip(interval, 0, None), fmt="none", ecolor="#444444", capsize=2)
    ax.axhline(0, color="#888888", linewidth=0.8)
    ax.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
    ax.set_xlabel("length of a sequence; the rollout policy μ has one bit of mantissa")
    ax.set_ylabel("share of right sequences lost")
    ax.legend(loc="upper left", frameon=False)
    ax.set_title("PPO's clip by π/μ does harm where the advantage A is negative")
    fig.savefig(out, dpi=110)


def rules_table(out: Path) -> None:
    """Writes the tables of *stack_rules*, and the losses alone for the page."""
    rows = rows_of_file("stack_rules_measured")
    grouped = by_cell(rows)
    cells = cells_of(rows)
    experiments = list(EXPERIMENTS["stack_rules_measured"])
    places = sorted(
        dict.fromkeys(key[:3] for key in cells if key[2] != "fp32"),
        key=lambda x: (experiments.index(x[0]), x[1], "top-p" in x[2], x[2].startswith("e8m2")),
    )
    head = ("network, right tokens", "T", "who acts")
    losses = table_of(
        (*head, *RULES.values()),
        [[*place, *(cells.get((*place, rule), "") for rule in RULES)] for place in places],
    )
    others = [rule for rule in RULES if rule != BEST]
    differences = [
        [
            *place,
            *(
                more_lost(grouped, (*place, rule), (*place, BEST))
                if (*place, rule) in cells
                else ""
                for rule in others
            ),
        ]
        for place in places
        if "top-p" not in place[2]
    ]
    write_tables(
        out,
        "## Losses",
        losses,
        f"## How much more is lost than with {RULES[BEST]}, seed by seed",
        table_of((*head, *(RULES[rule] for rule in others)), differences),
        "## One minibatch and four",
        minibatch_table(grouped),
        short=losses,
    )


def minibatch_table(grouped: dict[Key, dict[str, dict]]) -> str:
    """Losses with one and with four minibatches a rollout, on the seeds that have both."""
    table = []
    for key in grouped:
        four = (f"{key[0]}, 4 minibatches", *key[1:])
        if four in grouped and key[2] != "fp32":
            seeds = sorted(grouped[four])
            losses = [two_places(losses_of(grouped, x, seeds)[0]) for x in (key, four)]
            table.append([key[0], key[2], RULES[key[3]], *losses, more_lost(grouped, four, key)])
    return table_of(
        ("network, right tokens", "who acts", "rule", "one", "four", "more is lost by"), table
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("out", type=Path)
    options = parser.parse_args(words)
    if options.command == "measure":
        measure(options.out)
    elif options.out.stem == "acting":
        acting_table(options.out)
    else:
        rules_table(options.out)


if __name__ == "__main__":
    main()
