"""By which rates does a twin foresee a training whose weights are rounded to the nearest?

The doctor measures two rates of such weights, for each tensor and each part of a training. The
anchored rate is measured in windows that begin at float32's weights, the free one on weights that
go on from their own rounding. `python -m fp8rl.doctor twin` multiplies the steps of float32 by one
of them. Here small trainings are watched in float32, really kept in few bits, and trained as twins
by each of these rules:

    anchored         the anchored rates
    free             the free rates
    free if apart    for each tensor, the free rates if the means of both over the training are more
                     than 0.15 apart, otherwise the anchored ones
    free if lower    for each tensor, the free rates if their mean is lower by more than 0.15
    parts apart      for each tensor and each part of the training, the free rate if the two are
                     more than 0.15 apart
    anchored, held   the anchored rates; where float32 does not move a tensor, its last rate
    free, held       the free rates; where float32 does not move a tensor, its last rate

In a part of the training in which float32 does not move a tensor, because it has converged, there is
no rate. The twin then trains at 1 times the learning rate, except by the last two rules.

The loss of a cell is a share of float32's gain: what the training ends with, beyond what float32
ends with, over what float32 gains from its start; clipped to -1 and 1.5. The error of a rule is the
distance of the twin's loss from that of the training in few bits. Two rules need no twin: "nothing
is lost" foresees 0, and "it stands still" foresees 1. Cells in which float32 gains less than a
hundredth of its loss at the start are left out.

    python benchmarks/free_rows.py choose benchmarks/results/free_rows_chosen.csv
    python benchmarks/free_rows.py measure benchmarks/results/free_rows.csv
    python benchmarks/free_rows.py table benchmarks/results/free_rows.md

`choose` runs what the rule was chosen on, `measure` another seed and, beside these tasks, others.
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from files import Journal, table_of
from torch import nn

from fp8rl.cli.throughput import origin
from fp8rl.doctor.keep import Keep
from fp8rl.doctor.twin import Twin, held_rates
from fp8rl.doctor.watch import Watch

FORMATS = ("weights=bf16", "weights=fp16", "weights=e4m3")
LEARNING_RATES = (1e-4, 1e-3, 1e-2)
SCHEDULES = ("constant", "falling")  # falling linearly to 0
STEPS = 800
BATCH = 32
EVALUATED = 512  # examples
APART = 0.15  # as in fp8rl/doctor/verdicts.py
LEAST_GAIN = 0.01  # of the loss at the start
CHOSEN_ON = (0, 1)  # seeds
FRESH = (1000,)


class Task(NamedTuple):
    """A model, its inputs and its targets.

    `model`   trains those of its parameters that require a gradient
    `inputs`  draws inputs of a batch size with a generator
    `loss`    of outputs and inputs
    """

    model: nn.Module
    inputs: Callable[[int, torch.Generator], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def normal(features: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    """Draws normal inputs [size, features]."""
    return lambda size, generator: torch.randn(size, features, generator=generator)


def regression_from_one(least: float = 0.2, most: float = 1.0) -> Task:
    """Weights begin at 1.0 and must fall, to numbers from `least` to `most`."""
    model = nn.Linear(16, 1, bias=False)
    nn.init.ones_(model.weight)
    best = least + (most - least) * torch.rand(16, 1)
    return Task(model, normal(16), lambda y, x: (y - x @ best).square().mean())


def regression_far_from_one() -> Task:
    """The numbers of a format are closer together where the weights must arrive."""
    return regression_from_one(0.1, 0.3)


def mlp() -> Task:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    direction = torch.randn(8, 1) / 2
    return Task(model, normal(8), lambda y, x: (y - (x @ direction).sin()).square().mean())


def layer_norm_gains() -> Task:
    """Only the gains and biases of a LayerNorm learn. They begin at 1.0 and 0."""
    norm = nn.LayerNorm(32)
    first = nn.Linear(8, 32).requires_grad_(False)
    last = nn.Linear(32, 4).requires_grad_(False)
    gains = 0.3 + 1.4 * torch.rand(32)
    biases = 0.2 * torch.randn(32)

    def loss(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.layer_norm(first(x), (32,), gains, biases)
        return (y - last(hidden.tanh())).square().mean()

    return Task(nn.Sequential(first, norm, nn.Tanh(), last), normal(8), loss)


def classification() -> Task:
    """Four classes. Weights begin at 1.0."""
    model = nn.Linear(12, 4)
    nn.init.ones_(model.weight)
    best = 1 + 0.5 * torch.randn(12, 4)
    return Task(
        model,
        normal(12),
        lambda y, x: nn.functional.cross_entropy(y, (x @ best).argmax(1)),
    )


def deep() -> Task:
    model = nn.Sequential(
        nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)
    )
    return Task(
        model, normal(8), lambda y, x: (y - x.norm(dim=1, keepdim=True) / 3).square().mean()
    )


def embedding() -> Task:
    """The sum of numbers of four tokens, from an embedding that begins at 0.5."""
    model = nn.EmbeddingBag(20, 4, mode="sum")
    nn.init.constant_(model.weight, 0.5)
    best = torch.rand(20, 4)

    def tokens(size: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(20, (size, 4), generator=generator)

    return Task(model, tokens, lambda y, x: (y - best[x].sum(1)).square().mean())


CHOSEN_TASKS = (regression_from_one, regression_far_from_one, mlp, layer_norm_gains)
FRESH_TASKS = (classification, deep, embedding)


class Setting(NamedTuple):
    """A training."""

    task: Callable[[], Task]
    learning_rate: float
    schedule: str
    seed: int


def train(setting: Setting, hooks=None) -> tuple[float, float]:
    """Trains with Adam, within hooks of the doctor. Returns the losses before and after."""
    torch.manual_seed(setting.seed)
    task = setting.task()
    generator = torch.Generator().manual_seed(setting.seed)
    evaluated = task.inputs(EVALUATED, generator)

    @torch.no_grad()
    def evaluate() -> float:
        return task.loss(task.model(evaluated), evaluated).item()

    before = evaluate()
    learns = [p for p in task.model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learns, setting.learning_rate, fused=True)  # the fastest form
    with hooks.installed() if hooks else nullcontext():
        for step in range(STEPS):
            if setting.schedule == "falling":
                optimizer.param_groups[0]["lr"] = setting.learning_rate * (1 - step / STEPS)
            x = task.inputs(BATCH, generator)
            optimizer.zero_grad()
            task.loss(task.model(x), x).backward()
            optimizer.step()
    return before, evaluate()


def rules_of(anchored: np.ndarray, free: np.ndarray) -> dict[str, np.ndarray]:
    """The rates [parts, T] by which each rule trains a twin, from both rates [parts, T].

    Those are NaN where float32 does not move a tensor.
    """
    held = {"anchored, held": held_rates(anchored), "free, held": held_rates(free)}
    anchored = np.nan_to_num(anchored, nan=1.0)
    free = np.nan_to_num(free, nan=1.0)
    lower = anchored.mean(0) - free.mean(0)
    return {
        "anchored": anchored,
        "free": free,
        "free if apart": np.where(np.abs(lower) > APART, free, anchored),
        "free if lower": np.where(lower > APART, free, anchored),
        "parts apart": np.where(np.abs(anchored - free) > APART, free, anchored),
        **held,
    }


RULES = (
    "anchored",
    "free",
    "free if apart",
    "free if lower",
    "parts apart",
    "anchored, held",
    "free, held",
)
NAMES = ("task", "learning_rate", "schedule", "seed", "format")
OUTCOMES = ("rate", "free_rate", "start", "float32", "kept", *RULES)


def same_rates(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two rules have the same rates, so that one twin stands for both."""
    return np.allclose(a, b, rtol=0, atol=1e-3)


def cells_of(setting: Setting) -> list[dict]:
    """A row for each format: the rates, and the losses that each training ends with."""
    watch = Watch(FORMATS, (0.5, 4.0))
    start, exact = train(setting, watch)
    report = json.loads(watch.to_json(watch.report()))
    rows = []
    for finding in report["optimizers"][0]["findings"]:
        text = f"{finding['place']}={finding['format']}"
        _, kept = train(setting, Keep(text))
        anchored = np.array(finding["tensor_rates"], float)
        free = np.array(finding["free_tensor_rates"], float)
        trained: list[tuple[np.ndarray, float]] = []  # rates of twins, and the losses they end with
        row = [setting.task.__name__, *map(str, setting[1:]), text]
        row += [finding["rate"], finding["free_rate"], start, exact, kept]
        for rates in rules_of(anchored, free).values():
            alike = [end for known, end in trained if same_rates(known, rates)]
            if not alike:
                # Whatever rule Twin has, both are the rates of this one
                listed = rates.tolist()
                finding |= {"tensor_rates": listed, "free_tensor_rates": listed}
                twin = Twin(text, report, Path("report.json"))
                _, end = train(setting, twin)
                trained.append((rates, end))
                alike = [end]
            row.append(alike[0])
        rows.append(dict(zip((*NAMES, *OUTCOMES), row, strict=True)))
    return rows


def measure(out: Path, tasks: tuple, seeds: tuple[int, ...]) -> None:
    """Measures all cells that are not in the journal yet."""
    torch.set_num_threads(1)
    journal = Journal(out, (*NAMES, *OUTCOMES))
    done = journal.done(*NAMES[:4])
    for seed in seeds:
        for task in tasks:
            for schedule in SCHEDULES:
                for learning_rate in LEARNING_RATES:
                    setting = Setting(task, learning_rate, schedule, seed)
                    if (task.__name__, str(learning_rate), schedule, str(seed)) not in done:
                        journal.add(*cells_of(setting))


def losses_of(row: dict[str, str]) -> dict[str, float] | None:
    """What is lost by the kept training and foreseen by each rule, as shares of float32's gain;
    None if there is hardly a gain."""
    start, exact = float(row["start"]), float(row["float32"])
    gain = start - exact
    if gain < LEAST_GAIN * start:
        return None
    losses = {
        name: float(np.clip((float(row[name]) - exact) / gain, -1, 1.5))
        for name in ("kept", *RULES)
    }
    return losses | {"nothing is lost": 0.0, "it stands still": 1.0}


def lines_of(rows: list[dict[str, str]]) -> list[list[str]]:
    """Lines of the table: the mean error of each rule in groups of cells."""
    chosen = {task.__name__ for task in CHOSEN_TASKS}
    groups = {
        "all": lambda row: True,
        "tasks of the choice": lambda row: row["task"] in chosen,
        "other tasks": lambda row: row["task"] not in chosen,
        **{text: lambda row, text=text: row["format"] == text for text in FORMATS},
        "rates apart": lambda row: (
            abs(float(row["rate"]) - float(row["free_rate"])) > APART  # of the whole training
        ),
        "rates not apart": lambda row: abs(float(row["rate"]) - float(row["free_rate"])) <= APART,
    }
    lines = []
    for name, is_in in groups.items():
        found = [losses for row in rows if is_in(row) and (losses := losses_of(row))]
        if not found:
            continue
        errors = [
            np.mean([abs(losses[rule] - losses["kept"]) for losses in found])
            for rule in (*RULES, "nothing is lost", "it stands still")
        ]
        kept = np.mean([losses["kept"] for losses in found])
        lines.append([name, str(len(found)), f"{kept:.2f}", *(f"{error:.3f}" for error in errors)])
    return lines


def table(out: Path) -> None:
    """The errors of the rules: on fresh seeds, and on those that the rule was chosen on."""
    columns = ("cells", "number of cells", "lost", *RULES, "nothing is lost", "it stands still")
    parts = []
    for heading, suffix in (
        ("Fresh seeds:", ""),
        ("The cells that the rule was chosen on:", "_chosen"),
    ):
        rows = Journal(out.with_name(f"{out.stem}{suffix}.csv"), (*NAMES, *OUTCOMES)).rows()
        parts += [heading, table_of(columns, lines_of(rows))]
    command = f"`python benchmarks/free_rows.py table {out}` on {origin()}."
    out.write_text("\n\n".join([*parts, command]) + "\n")


def main(words: list[str]) -> None:
    command, out = words
    if command == "table":
        table(Path(out))
    elif command == "choose":
        measure(Path(out), CHOSEN_TASKS, CHOSEN_ON)
    else:
        # The first task is much like the second.
        measure(Path(out), CHOSEN_TASKS[1:] + FRESH_TASKS, FRESH)


if __name__ == "__main__":
    main(sys.argv[1:])
