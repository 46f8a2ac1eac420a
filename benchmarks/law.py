"""Does the doctor (fp8rl/bits/doctor.py) foresee which formats break learning?

It watches one float32 agent, on a seed that no cell trains, and predicts for each place and format
whether learning breaks. The places and formats are those of the breakage map: what the optimizer
keeps (the weights, to the nearest and stochastically, Adam's m, v and the root of v), what only the
loss shows (operands of the matmuls, gradients, replayed observations, advantages and value
targets), and the acting policy, whose p is an effective sample size. Beside a prediction stands
what was measured:

    chosen      the two carts at two learning rates each, from breakage_map.csv: on these cells the
                doctor's line was chosen. A
                cell is bad if the map says that it fails
    held out    CartPole-v1, Pendulum-v1 and Acrobot-v1 at up to three learning rates, and networks
                of 16 and 256 units, on which
                nothing was chosen: four agents for each cell; and, in two settings that take long,
                two agents for each of 25
                cells of what the optimizer keeps: LunarLander-v3, which has no tensor form, and
                CartPole-v1 with 1,024 units

A cell is bad if it fails: in the median over the same seeds its agents lose more than a tenth of
float32's gain, which is float32's final score minus the score before training
(fp8rl/study/statistics.py).

    python benchmarks/law.py predict benchmarks/results/law_predicted.csv
    python benchmarks/law.py measure benchmarks/results/law_measured.csv [--only CartPole-v1]
    python benchmarks/law.py table benchmarks/results/law.md

The predictions are committed before anything is measured. `predict` and `measure` go on where they
were stopped. AUC is the area under the curve of found against false alarms, of |log2 p| or, as the
control, of the noise q. The figure beside the table shows what is lost against p and against q,
another one the breakage map with what was foreseen."""

import argparse
import csv
import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import breakage_map
import matplotlib.pyplot as plt
import numpy as np
import torch
from breakage_map import CART, RATES
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fp8rl.bits import doctor
from fp8rl.bits.places import STATE
from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.study import comparison, figures
from fp8rl.study.statistics import TENTH, is_failure, share_lost
from fp8rl.study.throughput import origin
from fp8rl.study.watched_run import SHOWN, watched
from fp8rl.train import iterate

RESULTS = Path(__file__).parent / "results"
WATCHED, SEEDS, UNTRAINED = 900, range(7000, 7004), "untrained"
STEPS = {
    "CartPole-v1": 61_440,
    "Pendulum-v1": 122_880,
    "Acrobot-v1": 245_760,
    "LunarLander-v3": 307_200,
}
ALONE, FEW = "LunarLander-v3", ("e8m7", "e8m3", "e8m0", "e4m3", "e4m3:unscaled")
# Places that are seen through the loss, and the acting policy
LOOKED, ACTING = (
    (*doctor.OPERANDS, *SHOWN),
    "acting",
)
EDGES = (-np.inf, 0.125, 0.25, 0.5, 2, 4, 32, np.inf)
COLUMNS = (
    "cells",
    "number",
    "AUC of p",
    "AUC of q",
    "bad cells said to break",
    "false alarms",
    "unknown",
)


class Setting(NamedTuple):
    """What an agent learns with."""

    task: str
    learning_rate: float
    hidden_size: int = 64

    def __str__(self) -> str:
        return f"{self.task}, rate {self.learning_rate:g}, {self.hidden_size} units"

    @staticmethod
    def of(row: dict[str, str]) -> "Setting":
        """That of a line of one of the files."""
        return Setting(row["task"], float(row["learning_rate"]), int(row.get("hidden_size", 64)))


SLOW = [Setting(ALONE, 1e-3), Setting("CartPole-v1", 5e-4, 1024)]  # fewer cells and agents
CHOSEN = [Setting(task, rate) for task, rates in RATES.items() for rate in rates]
HELD_OUT = [Setting(task, rate) for task in STEPS if task != ALONE for rate in (2e-3, 5e-3)]
HELD_OUT += [Setting("CartPole-v1", 5e-4), Setting("Pendulum-v1", 5e-4)]
HELD_OUT += [Setting("CartPole-v1", 2e-3, 16), Setting("CartPole-v1", 1e-3, 256)]
HELD_OUT += SLOW
# Where those places are judged, too
THROUGH_LOSS = [
    *CHOSEN,
    *(setting for setting in HELD_OUT if setting[1:] == (2e-3, 64)),
]
PREDICTED = (*Setting._fields, "cell", "progress", "noise", "lost", "verdict")
MEASURED = (*Setting._fields, "cell", "returns")


def cells(setting: Setting) -> dict[str, str]:
    """The cells judged in a setting: name in the doctor's language -> value of Config's field
    `formats`."""
    found = {}
    for (place, form), text in breakage_map.cells().items():
        place = place.split()[0]
        if setting in SLOW and form not in FEW:
            continue
        if place in STATE or (place in (*LOOKED, ACTING) and setting in THROUGH_LOSS):
            found[text.replace(":stored", "")] = text
    return found


def config_of(setting: Setting, seed: int, formats: str = "") -> Config:
    task, rate, width = setting
    if task in STEPS:
        shape = {"env_id": task, "steps": STEPS[task], "hidden_size": width}
    else:
        shape = breakage_map.SETTINGS | {
            "env_id": None if task == CART else task,
            "steps": breakage_map.STEPS,
        }
    return Config(seed=seed, formats=formats, **shape | {"learning_rate": rate, "eval_every": 0})


def predict(out: Path) -> None:
    """Adds the predictions of the settings that the file does not have."""
    if not out.exists():
        out.write_text(",".join(PREDICTED) + "\n")
    done = {key_of(row) for row in csv.DictReader(out.open())}
    for setting in (*CHOSEN, *HELD_OUT):
        wanted = cells(setting)
        if all((setting, cell) in done for cell in wanted):
            continue
        run = build(config_of(setting, WATCHED))
        watching = watched(run, tuple(wanted))
        for _ in iterate(run):
            pass
        with out.open("a", newline="") as file:
            for found in watching.report():
                cell, numbers = (
                    f"{found.place}={found.format}",
                    (f"{x:.4g}" for x in (found.progress, found.noise, found.lost)),
                )
                if (setting, cell) not in done:
                    csv.writer(file, lineterminator="\n").writerow(
                        (*setting, cell, *numbers, found.verdict)
                    )


def measure(out: Path, only: list[str]) -> None:
    if not out.exists():
        out.write_text(",".join(MEASURED) + "\n")
    done = {key_of(row) for row in csv.DictReader(out.open())}
    for setting in HELD_OUT:
        arms = {"float32": "", UNTRAINED: "", **cells(setting)}
        missing = [
            name for name in arms if (setting, name) not in done and setting.task in (only or STEPS)
        ]
        for names in (missing[i : i + 24] for i in range(0, len(missing), 24)):
            seeds = SEEDS[:2] if setting in SLOW else SEEDS
            configs = {
                name: [config_of(setting, seed, arms[name]) for seed in seeds] for name in names
            }
            if UNTRAINED in names:  # learns nothing
                changes = {"steps": 2_048, "learning_rate": 1e-12}
                configs[UNTRAINED] = [
                    dataclasses.replace(config, **changes) for config in configs[UNTRAINED]
                ]
            found = dict(comparison.run_all([config for arm in configs.values() for config in arm]))
            with out.open("a") as file:
                for name, own in configs.items():
                    returns = " ".join(f"{found[config].final_return:.6g}" for config in own)
                    file.write(",".join(map(str, (*setting, name, returns))) + "\n")


def auc(scores: np.ndarray, bad: np.ndarray) -> float:
    above, equal = (
        np.mean(op(scores[bad][:, None], scores[~bad][None])) for op in (np.greater, np.equal)
    )
    return float(above + equal / 2)


def losses(path: Path = RESULTS / "law_measured.csv") -> dict[tuple[Setting, str], float]:
    """Measured cells: what the median agent loses, as a share of float32's gain (`share_lost`)."""
    found, returns = {}, {}
    for row in csv.DictReader(path.open()) if path.exists() else ():
        returns[Setting.of(row), row["cell"]] = np.array([float(x) for x in row["returns"].split()])
    for (setting, cell), own in returns.items():
        if cell not in ("float32", UNTRAINED) and {
            (setting, arm) for arm in ("float32", UNTRAINED)
        } <= {*returns}:
            exact, before = returns[setting, "float32"], returns[setting, UNTRAINED]
            found[setting, cell] = share_lost(own, exact, before)
    return found


def map_rows() -> list[dict[str, str]]:
    """The cells of the breakage map, as measured."""
    return list(csv.DictReader((RESULTS / "breakage_map.csv").open()))


def bad_cells() -> dict[tuple[Setting, str], bool]:
    """What was measured: by setting and cell whether it is bad."""
    names = {key: text.replace(":stored", "") for key, text in breakage_map.cells().items()}
    found = {key: is_failure(loss) for key, loss in losses().items()}
    for row in map_rows():
        if (row["place"], row["format"]) in names:
            found[Setting.of(row), names[row["place"], row["format"]]] = row["verdict"] == "fails"
    return found


def draw(out: Path, rows: list[dict]) -> None:
    """Held-out cells: what is lost against progress and, as the control, against noise."""
    lost, names = (
        losses(),
        dict(zip(STATE, ("weights", "Adam's m", "Adam's v", "root of v"), strict=True)),
    )
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for ax, number in zip(axes, ("progress", "noise"), strict=True):
        for (place, name), style in zip(names.items(), figures.STYLES[1:], strict=False):
            own = {key_of(row): float(row[number]) for row in rows if place_of(row) == place}
            x, y = np.array([(x, 100 * lost[key]) for key, x in own.items() if key in lost]).T
            ax.plot(
                x.clip(2.0**-8, 2.0**10),
                y.clip(-10, 110),
                label=name,
                **{**style, "linestyle": ""},
                alpha=0.7,
            )
        ax.set_xscale("log", base=2)
        ax.axhline(100 * TENTH, color="#888888", linewidth=0.8)
    axes[0].axvspan(1 / doctor.BREAKS, doctor.BREAKS, color="#DDDDDD", zorder=0)
    axes[0].annotate(
        "fails: above this line",
        (0.01, 12),
        xycoords=("axes fraction", "data"),
        fontsize=8,
        color="#444444",
    )
    axes[0].set(
        xlabel="progress p (points at an edge are beyond it)",
        ylabel="return lost (% of what float32 gains)",
    )
    axes[0].set_title(
        "progress tells what breaks (grey: the doctor says fine or unknown)", fontsize=11
    )
    axes[1].set_xlabel("noise q")
    axes[1].set_title("noise tells less", fontsize=11)
    axes[1].legend()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def draw_map(out: Path, rows: list[dict]) -> None:
    """The breakage map of both carts: colours as measured, dots as predicted, in each cell the
    worse of two learning rates."""
    order = ("equal", "between", "fails")
    shade = {"equals float32": "#F3E9C6", "in between": "#E69F00", "fails": "#1B2A5C"}
    counted = np.zeros((3, 2), int)  # cells by what was measured, and those foreseen to break
    marks = {
        "breaks": {
            "marker": "o",
            "markersize": 8,
            "markerfacecolor": "black",
            "markeredgecolor": "white",
        }
    }
    marks["unknown"] = {"marker": "$?$", "markersize": 7, "color": "black"}
    cells, places = breakage_map.cells(), list(breakage_map.PLACES)
    groups = list(breakage_map.FORMATS.values())
    columns = {
        form: 0.4 * i + sum(map(len, groups[:i])) + k
        for i, group in enumerate(groups)
        for k, form in enumerate(group)
    }
    measured = {
        (Setting.of(row), cells.get((row["place"], row["format"]))): row["verdict"]
        for row in map_rows()
    }
    predicted = {key_of(row): row["verdict"] for row in rows}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for ax, (task, rates) in zip(axes, RATES.items(), strict=True):
        for (place, form), text in cells.items():
            x, y, settings = (
                columns[form],
                places.index(place),
                [Setting(task, rate) for rate in rates],
            )
            found = max(order.index(measured[setting, text]) for setting in settings)
            ax.add_patch(
                Rectangle(
                    (x, y),
                    1,
                    1,
                    facecolor=list(shade.values())[found],
                    edgecolor="white",
                    linewidth=2,
                )
            )
            said = {predicted.get((setting, text.replace(":stored", ""))) for setting in settings}
            counted[found] += 1, "breaks" in said
            for verdict in [name for name in marks if name in said][:1]:
                ax.plot(x + 0.5, y + 0.5, **marks[verdict])
        ax.set_title("the cart" if task == CART else "linear-quadratic cart", fontsize=11)
        ax.set(xlim=(0, max(columns.values()) + 1), ylim=(len(places), 0))
        ax.set_yticks(np.arange(len(places)) + 0.5, breakage_map.PLACES.values())
        ax.set_xticks(
            [x + 0.5 for x in columns.values()],
            [form.split(":")[0] for form in columns],
            fontsize=7,
            rotation=45,
        )
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        for form, group in (
            ("e8m3", "no scale needed"),
            ("e4m3", "a scale for each tensor"),
            ("e4m3:unscaled", "no scale"),
        ):
            ax.text(
                columns[form] + 0.5, len(places) + 1.4, group, ha="center", va="center", fontsize=8
            )
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=color, label=f"measured: {name}")
        for name, color in shade.items()
    ]
    handles += [
        Line2D([], [], linestyle="", **mark, label=f"foreseen: {verdict}")
        for verdict, mark in marks.items()
    ]
    (equal, alarms), _, (failed, found) = counted
    title = (
        f"{found} of {failed} cells that fail were foreseen to break, "
        f"and {alarms} of {equal} that equal float32"
    )
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=5,
        fontsize=9,
        frameon=False,
        title=title,
        title_fontsize=12,
    )
    figure.savefig(out, dpi=110)
    plt.close(figure)


def place_of(row: dict[str, str]) -> str:
    return row["cell"].split("=")[0]


def key_of(row: dict[str, str]) -> tuple[Setting, str]:
    return Setting.of(row), row["cell"]


def away(row: dict[str, str]) -> float:
    """|log2 p|."""
    return abs(np.log2(np.clip(float(row["progress"]), 2.0**-20, 2.0**20)))


def intervals_and_misses(rows: list[dict], bad: dict, lost: dict) -> list[str]:
    """Lines below a table: bootstrap intervals over cells, and the cells called fine or broken that
    are not."""
    truth, areas = np.array([bad[key_of(row)] for row in rows]), []
    draws = np.random.default_rng(0).integers(len(rows), size=(1000, len(rows)))
    for scores in (
        np.array([away(row) for row in rows]),
        np.array([float(row["noise"]) for row in rows]),
    ):
        found = [
            auc(scores[draw], truth[draw]) for draw in draws if 0 < truth[draw].sum() < len(rows)
        ]
        areas.append("{:.3f} to {:.3f}".format(*np.quantile(found, (0.025, 0.975))))
    lines = ["", f"95% bootstrap intervals over cells: AUC of p {areas[0]}, of q {areas[1]}."]
    for verdict, wrong in (("fine", True), ("breaks", False)):
        own = [row for row in rows if row["verdict"] == verdict and bad[key_of(row)] == wrong]
        said = (
            "called fine, though they lose more than a tenth"
            if wrong
            else "said to break, though they do not"
        )
        lines += [
            "",
            f"{len(own)} of {len(rows)} cells are {said}{':' if own else '.'}",
            *[""] * bool(own),
        ]
        for row in sorted(own, key=lambda row: -lost[key_of(row)]):
            where = f" in {row['optimizer']}" if row.get("optimizer") else ""
            numbers = f"p = {float(row['progress']):.2g}{where}, q = {float(row['noise']):.2g}"
            share = (
                f"{lost[key_of(row)]:.0%}"
                if np.isfinite(lost[key_of(row)])
                else "everything: it became NaN"
            )
            name = Setting.of(row) if "hidden_size" in row else row["task"]
            lines.append(f"- {name}: {row['cell']} ({numbers}), lost {share}")
    return lines


def line(name: str, rows: list[dict], bad: dict) -> str:
    """A line of the table, of the predictions that were measured."""
    rows = [row for row in rows if key_of(row) in bad]
    truth, verdicts = (
        np.array([bad[key_of(row)] for row in rows]),
        np.array([row["verdict"] for row in rows]),
    )
    scores = np.array([away(row) for row in rows]), np.array([float(row["noise"]) for row in rows])
    areas = [f"{auc(x, truth):.3f}" if truth.any() and not truth.all() else "-" for x in scores]
    counts = [
        f"{(verdicts[truth] == 'breaks').sum()} of {truth.sum()}",
        f"{(verdicts[~truth] == 'breaks').sum()} of {(~truth).sum()}",
    ]
    counts += [
        f"{(verdicts == 'unknown').sum()}, {(truth & (verdicts == 'unknown')).sum()} of them bad"
    ]
    return f"| {' | '.join([name, str(len(rows)), *areas, *counts])} |"


def by_progress(rows: list[dict], bad: dict) -> list[str]:
    """A table of how many cells are bad in each range of progress."""
    lines, progress = (
        ["", "| held out: progress p | number | bad |", "| --- | --- | --- |"],
        [float(row["progress"]) for row in rows],
    )
    for low, high in itertools.pairwise(EDGES):
        own = [bad[key_of(row)] for row, x in zip(rows, progress, strict=True) if low <= x < high]
        name = (
            f"{low:g} to {high:g}"
            if low >= 0 and high < np.inf
            else f"from {low:g}"
            if low >= 0
            else f"below {high:g}"
        )
        lines.append(f"| {name} | {len(own)} | {sum(own)} |")
    return lines


def table(out: Path) -> None:
    every, bad = list(csv.DictReader((RESULTS / "law_predicted.csv").open())), bad_cells()
    rows = [row for row in every if place_of(row) != ACTING]
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    tested = [row for row in rows if Setting.of(row) in HELD_OUT and key_of(row) in bad]
    groups = {"what the optimizer keeps": STATE, "what only the loss shows": LOOKED}
    for name, places in groups.items():
        own = [row for row in rows if Setting.of(row) in CHOSEN and place_of(row) in places]
        lines.append(line(f"chosen on, both carts: {name}", own, bad))
    lines.append(line("held out, all of it", tested, bad))
    lines.append(
        line(
            f"held out, without {ALONE}",
            [row for row in tested if Setting.of(row).task != ALONE],
            bad,
        )
    )
    for name, places in groups.items():
        own = [row for row in tested if place_of(row) in places]
        lines += [line(f"held out: {name}", own, bad)] if own else []
        for setting in HELD_OUT:
            part = [row for row in own if Setting.of(row) == setting]
            lines += [line(str(setting), part, bad)] if part else []
        for place in places:
            part = [row for row in own if place_of(row) == place]
            lines += [line(f"all of them: {place}", part, bad)] if part else []
    acting = [row for row in every if place_of(row) == ACTING and key_of(row) in bad]
    for name, settings in (("chosen on, both carts", CHOSEN), ("held out", HELD_OUT)):
        own = [row for row in acting if Setting.of(row) in settings]
        lines += [line(f"{name}: the acting policy", own, bad)] if own else []
    if losses():
        draw(out.with_suffix(".png"), tested)
    lines += by_progress(tested, bad)
    lines += intervals_and_misses(tested, bad, losses())
    draw_map(out.with_stem(out.stem + "_map").with_suffix(".png"), every)
    note = (
        "A cell is bad if it loses more than a tenth of float32's gain, "
        "which is float32's final score minus the score before "
    )
    note += (
        "training. Breaks: progress below a quarter of float32's, "
        "or above four times. Unknown: beyond a third or three "
    )
    note += (
        f"times, or noise above 2.5. The acting policy: breaks below {doctor.FEW}, "
        f"unknown up to {doctor.ENOUGH}."
    )
    out.write_text(
        "\n".join(lines) + f"\n\n{note} `python benchmarks/law.py table {out}` on {origin()}.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("predict", "measure", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)  # as every run has
    if given.what == "measure":
        measure(given.out, given.only)
    else:
        {"predict": predict, "table": table}[given.what](given.out)
