"""Where does learning break when numbers are kept in few bits?

Each cell of the map is a place (fp8rl/bits/places.py) and a format: 32 agents that keep this
place's numbers in it and everything else in float32, on seeds 1000 and up, on which nothing was
chosen. Adam takes its steps from the moments as stored. v is rounded in view of m, as in
LowBitAdam, and in one line "by itself", as most low-bit optimizers do. On the cart a cell's score is its return
minus float32's, on the linear-quadratic cart its cost divided by float32's, both seed by seed. The
learning rate falls linearly to 0, and the settings stay the same when defaults change. A cell

    fails               if its median agent loses more than a tenth of float32's gain, which is
                        float32's final score minus the
                        score before training (fp8rl/study/statistics.py)
    equals float32      if the 95% interval of the score lies above -0.5; below 1.2 (being better is
                        no fault)
    lies in between     otherwise

The score before training is that of 32 agents that learn nothing, in the lines "untrained".

    python benchmarks/breakage_map.py benchmarks/results/breakage_map.md

The discount, 0.985 instead of 0.99, was chosen after a look at the cart's cells."""

import dataclasses
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from results import Journal, table_of, write_tables
from tasks import CART, LQR, above_optimum

from fp8rl.config import Config
from fp8rl.study import comparison, parallel
from fp8rl.study.statistics import fails

STEPS, SEEDS = 51_200, 32
SETTINGS = {
    "rollout_length": 32,
    "slice_length": 32,
    "batch_size": 512,
    "replay_updates": 2,
    "capacity": 100_000,
    "gamma": 0.985,
    "lam": 0.95,
    "entropy_coef": 0.01,
    "halved_after": 0,
    "normalize_obs": False,
}
RATES = {CART: 5e-4, LQR: 5e-3}
PLACES = {
    "forward": "forward operands",
    "backward": "gradients",
    "acting": "acting policy",
    "observations": "replayed observations",
    "targets": "advantages, value targets",
    "m": "Adam's m",
    "v": "Adam's v",
    "v independent": "Adam's v, by itself",
    "root": "root of v",
    "weights": "weights, to nearest",
    "weights stochastic": "weights, stochastic",
}
FORMATS = {
    "bits of mantissa (8 of exponent)": ["e8m10", "e8m7", "e8m5", "e8m3", "e8m2", "e8m1", "e8m0"],
    "bits of exponent\n(3 of mantissa), scaled": ["e5m3", "e4m3", "e3m3", "e2m3"],
    "the same,\nunscaled": ["e5m3:unscaled", "e4m3:unscaled", "e3m3:unscaled"],
}
COLUMNS = (
    "task",
    "learning_rate",
    "place",
    "format",
    "median",
    "score",
    "low",
    "high",
    "seeds_at_195",
    "verdict",
)
BASELINE, UNTRAINED = ("float32", "float32"), ("untrained", "untrained")
VERDICTS = {"equal": "equals float32", "between": "in between", "fails": "fails"}


def cells() -> dict[tuple[str, str], str]:
    """The map's cells: (place, format) -> the config's field `formats`."""
    found = {}
    for place in PLACES:
        name, *words = place.split()
        for form in (form for group in FORMATS.values() for form in group):
            found[place, form] = f"{name}={':'.join([form, *words])}" + ":stored" * (
                name in ("m", "v", "root")
            )
    return found


def measure(task: str, final_return: float) -> float:
    """The cart's return; the logarithm of the other's cost relative to the optimum."""
    return float(np.log1p(above_optimum(final_return) / 100)) if task == LQR else final_return


def verdict(task: str, median: float, plain: float, before: float, low: float, high: float) -> str:
    """What the module's docstring says of a cell: from medians over the agents of the cell, of
    float32's and of agents `before` training, and from the interval of the score. On the
    linear-quadratic cart these are costs relative to the optimum and their ratio, elsewhere returns
    and their difference."""
    sign = -1 if task == LQR else 1  # a cost is a negative return
    if fails(sign * median, sign * plain, sign * before):
        return "fails"
    good = high < 1.2 if task == LQR else low > -0.5
    return "equal" if good else "between"


def run(task: str, rate: float, arms: dict, seeds: int) -> list[dict]:
    """Trains arms (name -> fields of Config) and returns a row of COLUMNS for each."""
    shape = SETTINGS | {
        "env_id": None if task == CART else task,
        "steps": STEPS,
        "eval_every": 0,
        "learning_rate": rate,
    }
    configs = {
        name: [Config(seed=1000 + seed, **shape, **fields) for seed in range(seeds)]
        for name, fields in {BASELINE: {}, **arms}.items()
    }
    configs[UNTRAINED] = [
        dataclasses.replace(config, steps=2_048, learning_rate=1e-12)  # learns nothing
        for config in configs[BASELINE]
    ]
    found = dict(parallel.run_all([config for arm in configs.values() for config in arm]))
    every = {
        name: np.array([measure(task, found[config].final_return) for config in arm])
        for name, arm in configs.items()
    }
    shown = np.exp if task == LQR else np.asarray
    plain, before = (float(np.median(shown(every[name]))) for name in (BASELINE, UNTRAINED))
    rows = []
    for (place, form), scores in every.items():
        difference = scores - every[BASELINE]
        median = float(np.median(shown(scores)))
        numbers = comparison.iqm(difference), *comparison.bootstrap_interval(difference)
        score, low, high = (float(shown(x)) for x in numbers)
        digits = ".4g" if task == LQR else ".2f"
        texts = [format(x, digits) for x in (median, score, low, high)]
        reached = int((scores >= comparison.THRESHOLD).sum()) if task == CART else ""
        told = verdict(task, median, plain, before, low, high)
        row = (task, f"{rate:g}", place, form, *texts, reached, told)
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    journal = Journal(out.with_suffix(".csv"), COLUMNS)
    arms = {cell: {"formats": formats} for cell, formats in cells().items()}
    rows = []
    for task, rate in RATES.items():
        rows += run(task, rate, arms, SEEDS)
        journal.write(rows)
    write_tables(out, counts(rows))
    draw(out.with_suffix(".png"), rows)


def draw(out: Path, rows: list[dict]) -> None:
    """The map of both carts, as measured."""
    shade = dict(zip(VERDICTS, ("#F3E9C6", "#E69F00", "#1B2A5C"), strict=True))
    places, groups = list(PLACES), list(FORMATS.values())
    columns = {
        form: 0.4 * i + sum(map(len, groups[:i])) + k
        for i, group in enumerate(groups)
        for k, form in enumerate(group)
    }
    measured = {(row["task"], row["place"], row["format"]): row["verdict"] for row in rows}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for ax, task in zip(axes, RATES, strict=True):
        for place, form in cells():
            color = shade[measured[task, place, form]]
            corner = columns[form], places.index(place)
            ax.add_patch(Rectangle(corner, 1, 1, facecolor=color, edgecolor="white", linewidth=2))
        ax.set_title("the cart" if task == CART else "linear-quadratic cart", fontsize=11)
        ax.set(xlim=(0, max(columns.values()) + 1), ylim=(len(places), 0))
        ax.set_yticks(np.arange(len(places)) + 0.5, PLACES.values())
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
                columns[form] + 0.5,
                len(places) + 1.4,
                group,
                ha="center",
                va="center",
                fontsize=8,
            )
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=color, label=VERDICTS[name])
        for name, color in shade.items()
    ]
    title = "Weights rounded to the nearest lose; v rounded by itself, without a scale, fails"
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=3,
        fontsize=9,
        frameon=False,
        title=title,
        title_fontsize=12,
    )
    figure.savefig(out, dpi=110)


def counts(rows: list[dict]) -> str:
    """How many cells of each task and learning rate have which verdict."""
    found: dict[tuple, list[str]] = {}
    for row in rows:
        if row["place"] not in (BASELINE[0], UNTRAINED[0]):
            found.setdefault((row["task"], row["learning_rate"]), []).append(row["verdict"])
    lines = [
        [*setting, len(verdicts), *(verdicts.count(verdict) for verdict in VERDICTS)]
        for setting, verdicts in found.items()
    ]
    return table_of(("task", "learning rate", "cells", *VERDICTS), lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
