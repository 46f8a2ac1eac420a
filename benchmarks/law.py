"""Does the doctor (fp8rl/lab/doctor.py) foresee which formats break learning?

It watches one float32 agent, on a seed that no cell trains, and predicts for each place and format whether learning breaks. The
places are the weights, to the nearest and stochastically, and Adam's m, v and the root of v; the formats are those of the
breakage map. Beside a prediction stands what was measured:

    chosen      the two carts at two learning rates each, from breakage_map.csv: on these cells the doctor's line was chosen. A
                cell is bad if the map does not call it equal to float32
    held out    CartPole-v1, Pendulum-v1 and Acrobot-v1 at two learning rates, on which nothing was chosen: four agents for each
                cell. A cell is bad if the median agent loses more than a tenth of what float32 gains over an untrained agent, on
                the same seeds

    python benchmarks/law.py predict benchmarks/results/law_predicted.csv
    python benchmarks/law.py measure benchmarks/results/law_measured.csv [--only CartPole-v1]
    python benchmarks/law.py table benchmarks/results/law.md

The predictions are committed before anything is measured. `measure` goes on where it was stopped, cell by cell. AUC is the area
under the curve of found against false alarms, of |log2 p| or, as the control, of the noise q. The figure beside the table shows
what is lost against p and against q.
"""

import argparse
import csv
from pathlib import Path

import breakage_map
import matplotlib.pyplot as plt
import numpy as np
import torch
from breakage_map import CART, LQR, RATES

from fp8rl.config import Config
from fp8rl.lab import doctor
from fp8rl.lab.places import STATE
from fp8rl.report import plot, study
from fp8rl.report.bench import origin
from fp8rl.scale.machine import build
from fp8rl.train import iterate

RESULTS = Path(__file__).parent / "results"
WATCHED, SEEDS = 900, range(7000, 7004)
STEPS = {"CartPole-v1": 61_440, "Pendulum-v1": 122_880, "Acrobot-v1": 245_760}
HELD_OUT = [(task, rate) for task in STEPS for rate in (2e-3, 5e-3)]
PREDICTED = ("task", "learning_rate", "cell", "progress", "noise", "lost", "verdict")
MEASURED = ("task", "learning_rate", "cell", "returns")
UNTRAINED = "untrained"


def cells() -> dict[str, str]:
    """Cells of the map that an optimizer keeps: name in the doctor's language -> value of Config's field `formats`."""
    found = {}
    for (place, _), text in breakage_map.cells().items():
        if place.split()[0] in STATE:
            found[text.replace(":stored", "")] = text
    return found


def config_of(task: str, rate: float, seed: int, formats: str = "") -> Config:
    if (task, rate) in HELD_OUT:
        return Config(seed=seed, env_id=task, steps=STEPS[task], learning_rate=rate, eval_every=0, formats=formats)
    shape = breakage_map.SETTINGS | {"env_id": None if task == CART else task, "steps": breakage_map.STEPS, "eval_every": 0}
    return Config(seed=seed, formats=formats, **shape | {"learning_rate": rate})


def predict(out: Path) -> None:
    rows = []
    for task, rate in [*((task, rate) for task, rates in RATES.items() for rate in rates), *HELD_OUT]:
        run = build(config_of(task, rate, WATCHED))
        watching = doctor.Doctor(run.learner.optimizer, formats=cells())
        for _ in iterate(run):
            pass
        for found in watching.report():
            numbers = (f"{x:.4g}" for x in (found.progress, found.noise, found.lost))
            rows.append((task, rate, f"{found.place}={found.format}", *numbers, found.verdict))
    with out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([PREDICTED, *rows])


def measure(out: Path, only: list[str]) -> None:
    if not out.exists():
        out.write_text(",".join(MEASURED) + "\n")
    done = {(row["task"], float(row["learning_rate"]), row["cell"]) for row in csv.DictReader(out.open())}
    for task, rate in HELD_OUT:
        arms = {"float32": "", UNTRAINED: "", **cells()}
        missing = [name for name in arms if (task, rate, name) not in done and task in (only or STEPS)]
        for names in (missing[i : i + 24] for i in range(0, len(missing), 24)):
            configs = {name: [config_of(task, rate, seed, arms[name]) for seed in SEEDS] for name in names}
            if UNTRAINED in names:  # learns nothing
                configs[UNTRAINED] = [
                    Config(seed=seed, env_id=task, steps=2_048, learning_rate=1e-12, eval_every=0) for seed in SEEDS
                ]
            found = dict(study.run_all([config for arm in configs.values() for config in arm]))
            with out.open("a") as file:
                for name, own in configs.items():
                    returns = " ".join(f"{found[config].final_return:.6g}" for config in own)
                    file.write(f"{task},{rate},{name},{returns}\n")


def auc(scores: np.ndarray, bad: np.ndarray) -> float:
    above, equal = (np.mean(op(scores[bad][:, None], scores[~bad][None])) for op in (np.greater, np.equal))
    return float(above + equal / 2)


def losses() -> dict[tuple[str, float, str], float]:
    """Held-out cells: what the median agent loses, as a share of what float32 gains over an untrained agent."""
    found, returns, path = {}, {}, RESULTS / "law_measured.csv"
    for row in csv.DictReader(path.open()) if path.exists() else ():
        returns[row["task"], float(row["learning_rate"]), row["cell"]] = np.array([float(x) for x in row["returns"].split()])
    for (task, rate, cell), own in returns.items():
        if cell in cells() and (task, rate, UNTRAINED) in returns:
            exact, before = returns[task, rate, "float32"], returns[task, rate, UNTRAINED]
            found[task, rate, cell] = float(np.median(exact - own) / np.median(exact - before))
    return found


def bad_cells() -> dict[tuple[str, float, str], bool]:
    """What was measured: by task, learning rate and cell whether it is bad."""
    names = {key: text.replace(":stored", "") for key, text in breakage_map.cells().items()}
    found = {key: loss > 0.1 for key, loss in losses().items()}
    for row in csv.DictReader((RESULTS / "breakage_map.csv").open()):
        if (row["place"], row["format"]) in names:
            key = row["task"], float(row["learning_rate"]), names[row["place"], row["format"]]
            found[key] = row["verdict"] != "equal"
    return found


def draw(out: Path, rows: list[dict]) -> None:
    """Held-out cells: what is lost against progress and, as the control, against noise."""
    lost, names = losses(), dict(zip(STATE, ("weights", "Adam's m", "Adam's v", "root of v"), strict=True))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for ax, number in zip(axes, ("progress", "noise"), strict=True):
        for (place, name), style in zip(names.items(), plot.STYLES[1:], strict=False):
            own = [row for row in rows if row["cell"].split("=")[0] == place]
            own = {(row["task"], float(row["learning_rate"]), row["cell"]): float(row[number]) for row in own}
            x, y = np.array([(x, 100 * lost[key]) for key, x in own.items() if key in lost]).T
            ax.plot(x.clip(2.0**-8, 2.0**10), y.clip(-10, 110), label=name, **{**style, "linestyle": ""}, alpha=0.7)
        ax.set_xscale("log", base=2)
        ax.axhline(10, color="#888888", linewidth=0.8)
    axes[0].axvspan(1 / doctor.BREAKS, doctor.BREAKS, color="#DDDDDD", zorder=0)
    axes[0].set(xlabel="progress p", ylabel="return lost (% of what float32 gains)")
    axes[0].set_title("progress tells what breaks (grey: within a factor of 4)", fontsize=11)
    axes[1].set_xlabel("noise q")
    axes[1].set_title("noise does not", fontsize=11)
    axes[1].legend()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def line(name: str, rows: list[dict], bad: dict) -> str:
    """A line of the table, of the predictions that were measured."""
    rows = [row for row in rows if (row["task"], float(row["learning_rate"]), row["cell"]) in bad]
    truth = np.array([bad[row["task"], float(row["learning_rate"]), row["cell"]] for row in rows])
    p, q = (np.array([float(row[column]) for row in rows]) for column in ("progress", "noise"))
    away = np.abs(np.log2(np.clip(p, 2.0**-20, 2.0**20)))
    verdicts = np.array([row["verdict"] for row in rows])
    areas = [f"{auc(x, truth):.3f}" if truth.any() and not truth.all() else "-" for x in (away, q)]
    counts = [
        f"{(verdicts[truth] == 'breaks').sum()} of {truth.sum()}",
        f"{(verdicts[~truth] == 'breaks').sum()} of {(~truth).sum()}",
    ]
    counts += [f"{(verdicts == 'unknown').sum()}, {(truth & (verdicts == 'unknown')).sum()} of them bad"]
    return f"| {' | '.join([name, str(len(rows)), *areas, *counts])} |"


def table(out: Path) -> None:
    rows, bad = list(csv.DictReader((RESULTS / "law_predicted.csv").open())), bad_cells()
    columns = ("cells", "number", "AUC of p", "AUC of q", "bad cells said to break", "false alarms", "unknown")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    chosen = [row for row in rows if row["task"] in (CART, LQR)]
    tested = [row for row in rows if row["task"] not in (CART, LQR)]
    lines.append(line("chosen on: both carts", chosen, bad))
    measured = {(task, rate) for task, rate, _ in bad}
    if any(key in measured for key in HELD_OUT):
        lines.append(line("held out, all", tested, bad))
    for task, rate in HELD_OUT:
        if (task, rate) in measured:
            own = [row for row in tested if (row["task"], float(row["learning_rate"])) == (task, rate)]
            lines.append(line(f"held out: {task}, learning rate {rate:g}", own, bad))
    for place in STATE if len(measured) > 4 else ():
        lines.append(line(f"held out: {place}", [row for row in tested if row["cell"].split("=")[0] == place], bad))
    if losses():
        draw(out.with_suffix(".png"), tested)
    note = "Breaks: progress below a quarter of float32's, or above four times. Unknown: beyond a third or three times, or noise "
    note += "above 2.5."
    out.write_text("\n".join(lines) + f"\n\n{note} `python benchmarks/law.py table {out}` on {origin()}.\n")


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
