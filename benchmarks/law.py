"""Few bits are another learning rate: how well does that foresee what a format costs?

Over 32 updates of a float32 agent let d be how far the weights move, and d' how far they would move
with one place kept in few bits. Split d' into a part along d and the rest, d' = rate * d + noise.
The law says that training with few bits does what float32 does at `rate` times the learning rate.
So a *twin* is trained for each cell: float32, its learning rate multiplied by the rate that was
measured on one other agent, which changes over time. What the twin loses is the prediction.

    predict   what twins lose in each setting; committed before the settings are measured
    measure   the settings: agents with the place really kept in few bits
    table     the outcome, beside the lookup by format and other rules that know less

    python benchmarks/law.py predict benchmarks/results/rates_predicted.csv
    python benchmarks/law.py measure benchmarks/results/rates_measured.csv
    python benchmarks/law.py table benchmarks/results/rates.md

`predict` and `measure` go on where they were stopped. The form of the twin (a rate for each tensor,
and the measured noise where weights are rounded stochastically) was chosen on three other settings,
whose outcomes were known: results/rates_chosen.csv, made by `rates.py choose` at commit 5e2576a. A
loss is a share of float32's gain: 0 is float32, 1 has learned nothing, and less than 0 is better than
float32.
"""

import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from results import RESULTS, Journal, table_of, write_tables

from fp8rl.build import build, build_population
from fp8rl.config import Config
from fp8rl.doctor import Doctor
from fp8rl.doctor.findings import Finding
from fp8rl.doctor.ruler import Ruler, WindowSums
from fp8rl.model import parameters_in_order
from fp8rl.study import figures
from fp8rl.study.statistics import is_failure, share_lost
from fp8rl.train import train

TWINS = range(500, 508)  # seeds of the twins, and of the float32 agents beside them
MEASURED_SEEDS = range(8000, 8008)  # seeds of the agents that keep a place in few bits
WINDOW = 32  # updates in one of the doctor's windows
PARTS = 24  # of a training, in each of which the rate is constant
SLOWEST, FASTEST = 2.0**-10, 2.0**12  # rates beyond these are taken for these

STEPS = {
    "CartPole-v1": 61_440,
    "Pendulum-v1": 122_880,
    "Acrobot-v1": 245_760,
    "fp8rl/Lqr-v0": 61_440,
}


class Setting(NamedTuple):
    """What an agent learns with."""

    task: str
    learning_rate: float
    hidden_size: int = 64
    batch_size: int = 1024
    gamma: float | None = None  # None: the task's own

    def __str__(self) -> str:
        words = {"hidden_size": "{} units", "batch_size": "batches of {}", "gamma": "discount {:g}"}
        differences = [
            text.format(getattr(self, name))
            for name, text in words.items()
            if getattr(self, name) != self._field_defaults[name]
        ]
        return ", ".join([self.task, f"rate {self.learning_rate:g}", *differences])


SETTINGS = [
    # Learning rates over two orders of magnitude
    *(Setting("CartPole-v1", rate) for rate in (1e-4, 3e-4, 1e-3, 1e-2)),
    *(Setting("Pendulum-v1", rate) for rate in (2e-4, 1e-3, 1e-2)),
    *(Setting("fp8rl/Lqr-v0", rate) for rate in (2e-4, 1e-3, 1e-2)),
    # Widths, batches, discounts
    Setting("CartPole-v1", 1e-3, hidden_size=16),
    Setting("CartPole-v1", 1e-3, batch_size=256),
    Setting("CartPole-v1", 1e-3, batch_size=4096),
    Setting("Pendulum-v1", 1e-3, gamma=0.9),
]
CELLS = (
    "weights=e8m7",
    "weights=e8m5",
    "weights=e8m3",
    "weights=e5m2",
    "weights=e4m3",
    "weights=e3m3",
    "weights=e8m3:stochastic",
    "weights=e8m1:stochastic",
    "weights=e4m3:stochastic",
    "m=e8m0",
    "m=e4m3:unscaled",
    "m=e4m3:independent",
    "m=e3m3:independent",
    "v=e8m1",
    "v=e3m3:independent",
    "v=e4m3:independent",
    "v=e4m3:unscaled:independent",
    "root=e3m3:independent",
    "root=e4m3:unscaled:independent",
    "root=e8m0",
)


def config_of(setting: Setting, seed: int, formats: str = "") -> Config:
    fields = {name: value for name, value in setting._asdict().items() if value is not None}
    task = fields.pop("task")
    return Config(
        seed=seed, formats=formats, env_id=task, steps=STEPS[task], eval_every=0, **fields
    )


# Rates


class Rates(NamedTuple):
    """What a doctor measured of a cell on an agent with T tensors, in each part of its training.

    `alike`      rate [PARTS], in which every tensor counts alike
    `numbers`    rate [PARTS], in which every number counts alike
    `by_tensor`  rate [PARTS, T]
    `noise`      standard deviation of the noise of a number in one update, [PARTS, T]
    """

    alike: np.ndarray
    numbers: np.ndarray
    by_tensor: np.ndarray
    noise: np.ndarray


def watch(setting: Setting, cells: tuple[str, ...]) -> tuple[dict[str, Rates], dict[str, Finding]]:
    """Trains one float32 agent. Returns the rates of these cells, their tensors in the order of the
    network's parameters in a population, and for each cell what the doctor says."""
    run = build(config_of(setting, seed=900))  # which nothing else has
    doctor = Doctor(run.learner.optimizer, formats=cells, model=run.model)
    train(run, progress=False)
    numbers = {id(p): number for number, p in enumerate(run.model.parameters())}
    in_order = [numbers[id(p)] for p in parameters_in_order(run.model).values()]
    shadows = doctor.patients[0].watcher.shadows
    rulers = {cell: shadow.ruler for shadow in shadows for cell in shadow.ruler.texts}
    rates = {cell: rates_of(rulers[cell], cell, in_order) for cell in cells}
    return rates, {found.text: found for found in doctor.report()}


def rates_of(ruler: Ruler, cell: str, in_order: list[int]) -> Rates:
    """The rates of a cell, its tensors in an order."""

    def bounded(rates: np.ndarray) -> np.ndarray:
        return np.clip(np.nan_to_num(rates), SLOWEST, FASTEST)  # NaN where nothing moves

    sums = ruler.in_parts(ruler.texts.index(cell), PARTS)
    sums = WindowSums(*(part[:, in_order] for part in sums))
    by_tensor = bounded(sums.rates)
    across = np.maximum(sums.apart - (by_tensor - 1) ** 2 * sums.true, 0)
    return Rates(
        bounded(sums.rate(ruler.sample.followed[in_order])),
        bounded(sums.rate(ruler.sample.sizes[in_order])),
        by_tensor,
        np.sqrt(across / WINDOW),
    )


# Twins of agents


def twins(setting: Setting, arms: list[tuple], seeds) -> np.ndarray:
    """Final returns [arms, seeds] of float32 agents whose learning rate is multiplied.

    Each arm has its rates [PARTS, 1 or T], and its noise [PARTS, T] or None.
    """
    run = build_population([config_of(setting, seed) for _ in arms for seed in seeds])
    optimizer = run.learner.optimizer
    agents, numbers = optimizer.theta.shape
    sizes = torch.tensor(optimizer.sizes)
    optimizer.rate = torch.zeros(agents, numbers)
    iterations = run.config.iterations
    set_rate, step = optimizer.set_rate, optimizer.step
    generator = torch.Generator().manual_seed(0)
    now = {"iteration": 0, "part": None}

    def spread(values: np.ndarray, part: int) -> torch.Tensor:
        """Of each tensor, or of all, to each number of each agent of an arm."""
        x = torch.as_tensor(values[part * len(values) // PARTS], dtype=torch.float32)
        x = x.repeat_interleave(sizes) if len(x) > 1 else x.expand(numbers)
        return x.expand(len(seeds), numbers)

    def set_multiplied_rate(rate) -> None:
        part = now["iteration"] * PARTS // iterations
        if part != now["part"]:
            now["part"] = part
            now["factor"] = torch.cat([spread(rates, part) for rates, _ in arms])
            noises = enumerate(noise for _, noise in arms)
            now["noise"] = {i: spread(noise, part) for i, noise in noises if noise is not None}
        set_rate(rate)
        optimizer.rate *= now["factor"]
        now["iteration"] += 1

    @torch.no_grad()
    def step_with_noise(*arguments, **options) -> None:
        step(*arguments, **options)
        for i, deviation in now["noise"].items():
            own = optimizer.theta.data[i * len(seeds) : (i + 1) * len(seeds)]
            own += deviation * torch.randn(own.shape, generator=generator)

    optimizer.set_rate, optimizer.step = set_multiplied_rate, step_with_noise
    train(run, progress=False)
    returns = [history.final_return for history in run.history.of_agents]
    return np.array(returns).reshape(len(arms), len(seeds))


def untrained(setting: Setting, seeds) -> np.ndarray:
    """Returns [seeds] before training."""
    configs = [
        dataclasses.replace(config_of(setting, seed), steps=2_048, learning_rate=1e-12)
        for seed in seeds
    ]
    run = train(build_population(configs), progress=False)
    return np.array([history.final_return for history in run.history.of_agents])


# What is written of a cell before it is measured: `twin` is the loss of its twins, which have a rate
# for each tensor and, where weights are rounded stochastically, the measured noise. The other
# numbers are those of rules that know less.
PREDICTED = (*Setting._fields, "cell", "twin", "alike", "numbers", "noise", "verdict")
MEASURED = (*Setting._fields, "cell", "returns")


def key_of(row: dict[str, str]) -> tuple[Setting, str]:
    """The setting and cell of a line of a file."""
    numbers = float(row["learning_rate"]), int(row["hidden_size"]), int(row["batch_size"])
    gamma = float(row["gamma"]) if row["gamma"] else None
    return Setting(row["task"], *numbers, gamma), row["cell"]


def predict(out: Path) -> None:
    """Adds the predictions of settings that the file does not have."""
    journal = Journal(out, PREDICTED)
    done = {key_of(row)[0] for row in journal.rows()}
    for setting in SETTINGS:
        if setting in done:
            continue
        rates, findings = watch(setting, CELLS)
        arms = [(np.ones((1, 1)), None)]
        for cell in CELLS:
            noise = rates[cell].noise if "stochastic" in cell else None
            arms.append((rates[cell].by_tensor, noise))
        exact, *returns = twins(setting, arms, TWINS)
        start = untrained(setting, TWINS)
        for i, cell in enumerate(CELLS):
            loss = share_lost(returns[i], exact, start)
            means = rates[cell].alike.mean(), rates[cell].numbers.mean()
            numbers = [f"{x:.4g}" for x in (loss, *means, findings[cell].noise)]
            values = (*setting, cell, *numbers, findings[cell].verdict)
            journal.add(dict(zip(PREDICTED, values, strict=True)))
        print(setting, flush=True)


def measure(out: Path) -> None:
    """Adds the final returns of cells that the file does not have."""
    journal = Journal(out, MEASURED)

    def add(setting: Setting, cell: str, returns: np.ndarray) -> None:
        text = " ".join(f"{x:.6g}" for x in returns)
        journal.add(dict(zip(MEASURED, (*setting, cell, text), strict=True)))

    done = {key_of(row) for row in journal.rows()}
    for setting in SETTINGS:
        if (setting, "untrained") not in done:
            add(setting, "untrained", untrained(setting, MEASURED_SEEDS))
        missing = [cell for cell in ("float32", *CELLS) if (setting, cell) not in done]
        if not missing:
            continue
        configs = [
            config_of(setting, seed, formats_of(cell))
            for cell in missing
            for seed in MEASURED_SEEDS
        ]
        run = train(build_population(configs), progress=False)
        returns = [history.final_return for history in run.histories(configs)]
        for cell, own in zip(missing, np.reshape(returns, (len(missing), -1)), strict=True):
            add(setting, cell, own)
        print(setting, flush=True)


def formats_of(cell: str) -> str:
    """A cell as Config's field `formats` has it: Adam takes its step from what is stored."""
    if cell == "float32":
        return ""
    return cell if cell.startswith("weights") else f"{cell}:stored"


# What rules foresee

CLEAR = 0.2  # losses that are this far apart make a pair
LIMITS = -0.3, 1.2  # losses beyond these count as these: few agents end below the untrained ones


class Cell(NamedTuple):
    """A cell that was predicted and measured. Losses are shares of float32's gain."""

    setting: Setting
    name: str
    twin: float
    measured: float
    lookup: float  # the mean loss of this format in the other settings
    own_lookup: float  # and in all of them, this one included, which knows a little of the answer
    neighbour: float  # its loss in the setting that is most like this one
    away: float  # |log2 of the rate with all tensors alike|, by which the first edition sorted
    noise: float

    @property
    def place(self) -> str:
        place = self.name.split("=")[0]
        if place != "weights":
            return {"root": "v and its root", "v": "v and its root"}.get(place, place)
        return "weights, stochastic" if "stochastic" in self.name else "weights, nearest"


def clipped(loss: float) -> float:
    """A loss within LIMITS; one that is not a number has lost everything."""
    return LIMITS[1] if np.isnan(loss) else float(np.clip(loss, *LIMITS))


def unlike(one: Setting, other: Setting) -> float:
    """How much two settings differ: first of all in the task, then in decades of the learning rate
    or in any other number."""
    differences = sum(
        getattr(one, name) != getattr(other, name)
        for name in ("hidden_size", "batch_size", "gamma")
    )
    decades = abs(np.log10(one.learning_rate / other.learning_rate))
    return 100 * (one.task != other.task) + decades + differences


def measured_returns() -> dict[tuple[Setting, str], np.ndarray]:
    """Final returns by setting and cell."""
    return {
        key_of(row): np.array([float(x) for x in row["returns"].split()])
        for row in Journal(RESULTS / "rates_measured.csv", MEASURED).rows()
    }


def measured_cells() -> list[Cell]:
    """All cells that were predicted and measured, with what the other rules say of them."""
    returns = measured_returns()
    losses = {
        (setting, cell): clipped(
            share_lost(own, returns[setting, "float32"], returns[setting, "untrained"])
        )
        for (setting, cell), own in returns.items()
        if cell not in ("float32", "untrained")
    }
    cells = []
    for row in Journal(RESULTS / "rates_predicted.csv", PREDICTED).rows():
        setting, name = key_of(row)
        if (setting, name) not in losses:
            continue
        everywhere = {s: loss for (s, n), loss in losses.items() if n == name}
        others = {s: loss for s, loss in everywhere.items() if s != setting}
        away = abs(np.log2(np.clip(float(row["alike"]), 2.0**-20, 2.0**20)))
        cells.append(
            Cell(
                setting,
                name,
                twin=clipped(float(row["twin"])),
                measured=losses[setting, name],
                lookup=float(np.mean(list(others.values()))) if others else 0.0,
                own_lookup=float(np.mean(list(everywhere.values()))),
                neighbour=others[min(others, key=lambda other: unlike(other, setting))],
                away=float(away),
                noise=float(row["noise"]),
            )
        )
    return cells


def auc(scores: np.ndarray, bad: np.ndarray) -> float:
    """The area under the curve of found against false alarms; NaN without both kinds."""
    if bad.all() or not bad.any():
        return float("nan")
    above = (scores[bad][:, None] > scores[~bad]).mean()
    equal = (scores[bad][:, None] == scores[~bad]).mean()
    return float(above + equal / 2)


def pairs_in_order(cells: list[Cell], score) -> tuple[float, int]:
    """Of the pairs of one format in two settings, whose losses are clearly apart, the share that a
    score puts in order; and how many there are."""
    pairs = [
        (score(a), score(b))
        for a in cells
        for b in cells
        if a.name == b.name and a.measured - b.measured >= CLEAR
    ]
    right = sum((a > b) + (a == b) / 2 for a, b in pairs)
    return right / max(len(pairs), 1), len(pairs)


# What each rule says of a cell: the loss that it expects, or a number that should rise with it.
EXPECTED = {
    "error of the twin": lambda cell: cell.twin,
    "of the lookup": lambda cell: cell.lookup,
    "of one that knows the cell": lambda cell: cell.own_lookup,
    "of the nearest setting": lambda cell: cell.neighbour,
    "of nothing is lost": lambda cell: 0.0,
}
ORDERS = {
    "twin": lambda cell: cell.twin,
    # Without a cell's own outcome a lookup would put two of one format in the wrong order, always
    "lookup": lambda cell: cell.own_lookup,
    "nearest setting": lambda cell: cell.neighbour,
    "\\|log p\\|": lambda cell: cell.away,
    "noise": lambda cell: cell.noise,
}


def row_of(name: str, cells: list[Cell]) -> dict:
    """A line of the table, by column: each rule's error, and how it sorts."""
    row = {
        "cells": name,
        "number": len(cells),
        "bad": sum(is_failure(cell.measured) for cell in cells),
    }
    for rule, expected in EXPECTED.items():
        row[rule] = f"{np.mean([abs(expected(cell) - cell.measured) for cell in cells]):.3f}"
    for rule, score in ORDERS.items():
        share, pairs = pairs_in_order(cells, score)
        row[f"pairs in order: {rule}"] = f"{share:.0%}" if pairs else "-"
    row["pairs"] = pairs
    # Formats that are bad in some settings and good in others
    verdicts = {name: {is_failure(c.measured) for c in cells if c.name == name} for name in CELLS}
    contested = [cell for cell in cells if len(verdicts[cell.name]) == 2]
    bad = np.array([is_failure(cell.measured) for cell in contested], bool)
    for rule, score in ORDERS.items():
        area = auc(np.array([score(cell) for cell in contested]), bad)
        row[f"AUC, contested: {rule}"] = "-" if np.isnan(area) else f"{area:.3f}"
    return row | {"contested": len(contested)}


def intervals(cells: list[Cell]) -> str:
    """95% bootstrap intervals over settings of the mean errors, and of their difference."""
    errors: dict[str, list] = {}
    for cell in cells:
        distances = abs(cell.twin - cell.measured), abs(cell.lookup - cell.measured)
        errors.setdefault(str(cell.setting), []).append(distances)
    by_setting = np.array([np.mean(errors[setting], axis=0) for setting in sorted(errors)])
    draws = np.random.default_rng(0).integers(len(errors), size=(10_000, len(errors)))
    twin, lookup = by_setting[draws].mean(1).T
    parts = {"twin": twin, "lookup": lookup, "twin / lookup": twin / lookup}
    return ", ".join(
        "{} {:.3f} to {:.3f}".format(name, *np.quantile(x, (0.025, 0.975)))
        for name, x in parts.items()
    )


def seeds_apart() -> float:
    """How far apart the losses of float32's own agents are: those of four seeds, the other four
    taken for float32. Mean over the settings."""
    apart = []
    returns = measured_returns()
    for (setting, cell), own in returns.items():
        if cell == "float32":
            half = len(own) // 2
            start = returns[setting, "untrained"][:half]
            apart.append(abs(clipped(share_lost(own[:half], own[half:], start))))
    return float(np.mean(apart))


def table(out: Path) -> None:
    cells = measured_cells()
    groups = {"all": cells}
    for cell in cells:
        groups.setdefault(cell.place, []).append(cell)
    for cell in cells:
        groups.setdefault(str(cell.setting), []).append(cell)
    rows = [row_of(name, own) for name, own in groups.items()]
    worst = sorted(cells, key=lambda cell: -abs(cell.twin - cell.measured))[:12]
    farthest = "\n".join(
        f"- {cell.setting}: {cell.name}, measured {cell.measured:.2f}, twin {cell.twin:.2f}, "
        f"lookup {cell.lookup:.2f}"
        for cell in worst
    )
    note = (
        "A loss is a share of float32's gain, in the median of eight seeds; errors are mean "
        "distances from it. A cell is bad if it loses more than a tenth. Pairs are of one format in "
        f"two settings, at least {CLEAR} apart. Contested formats are bad in some settings and good "
        "in others. The lookup is the format's mean loss in the other settings; for orders and areas, and in "
        "one column of errors, it knows the cell's own loss, too, as one of the mean. The nearest setting is one of the same task, at the learning rate that is "
        "nearest, where there is one. Losses beyond -0.3 and 1.2 count as these. Two halves of "
        f"float32's own seeds are {seeds_apart():.3f} of the gain apart on average. 95% intervals over "
        f"settings: {intervals(cells)}. The twelve cells on which the twin is farthest off:"
    )
    lines = table_of(rows[0], [row.values() for row in rows])
    write_tables(out, lines, note, farthest, short=short(rows))
    draw(out.with_suffix(".png"), cells)


def short(rows: list[dict]) -> str:
    """The columns of the table that say how far predictions are off, for all cells and by place."""
    columns = {
        "cells": "cells",
        "number": "number of cells",
        "bad": "lose more than a tenth",
        "error of the twin": "mean error: twin",
        "of the lookup": "mean error: lookup by format",
        "of the nearest setting": "mean error: nearest setting",
        "of nothing is lost": 'mean error: "nothing is lost"',
        "pairs in order: twin": "pairs in order: twin",
        "pairs in order: lookup": "pairs in order: lookup",
        "pairs": "number of pairs",
    }
    # A single setting has no pairs
    lines = [[row[column] for column in columns] for row in rows if row["pairs"]]
    return table_of(columns.values(), lines)


def draw(out: Path, cells: list[Cell]) -> None:
    """Predicted against measured losses, every dot a cell: of twins, and of both lookups."""
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 4.6), sharey=True, layout="constrained")
    titles = {
        "twin": "twins: mean error {:.3f}",
        "neighbour": "lookup, nearest setting: {:.3f}",
        "lookup": "lookup, all other settings: {:.3f}",
    }
    places = list(dict.fromkeys(cell.place for cell in cells))
    for ax, (rule, title) in zip(axes, titles.items(), strict=True):
        ax.plot(LIMITS, LIMITS, color="#BBBBBB", linewidth=1, zorder=0)
        for place, style in zip(places, figures.STYLES, strict=False):
            own = [cell for cell in cells if cell.place == place]
            x = [getattr(cell, rule) for cell in own]
            y = [cell.measured for cell in own]
            ax.plot(x, y, label=place, **{**style, "linestyle": ""}, alpha=0.65)
        error = np.mean([abs(getattr(cell, rule) - cell.measured) for cell in cells])
        ax.set_title(title.format(error), fontsize=12)
        ax.set_xlabel("predicted loss, as a share of float32's gain", fontsize=9)
    axes[0].set_ylabel("measured loss ({:g} and {:g}: or beyond)".format(*LIMITS))
    axes[0].legend(fontsize=8, loc="lower right")
    figure.suptitle("Twins foresee what a format costs in a setting, and lookups do not")
    figure.savefig(out, dpi=110)


def main(words: list[str]) -> None:
    command, out = words
    torch.set_num_threads(1)
    {"predict": predict, "measure": measure, "table": table}[command](Path(out))


if __name__ == "__main__":
    main(sys.argv[1:])
