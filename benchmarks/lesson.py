"""Which part of the main notebook's correction mends replay? Each part alone, and together.

The arms train the notebook's own agent by the notebook's own code: every cell of
notebooks/fp8_actor_critic.ipynb that is tagged `definitions` is executed here, and nothing is
imitated. Replay draws single transitions, or slices of 16 steps; its update is A2C's, or the
corrected one (V-trace and PPO's clip), or has only one of these; and an arm may make one more update
on the new rollout. Two arms replay nothing: A2C, and five clipped updates on each new rollout, which
is PPO in essence.

A *fall* is how far the smoothed return drops below its best so far, of about 200. An agent has lost
what it learned where it falls by more than 60.

Expected, from eight earlier seeds in float32: of the arms with replay only "slices, corrected" holds,
with the new update or without. Its median fall is below 30, and at most 1 of 12 seeds loses it. Of
every other arm with replay at least 3 of 12 do. FP8 changes none of this. Nothing was known of
V-trace or the clip alone: expected is that neither holds. (Measured: all of this but the last. With
slices the clip alone holds, too, and learns more slowly.)

    python benchmarks/lesson.py measure benchmarks/results/lesson.csv    # goes on where it stopped
    python benchmarks/lesson.py table benchmarks/results/lesson.md       # and lesson.png beside it
"""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from fp8rl.machine.hardware import origin

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks/fp8_actor_critic.ipynb"
MEASURED = ROOT / "benchmarks/results/lesson.csv"
PRECISIONS = ("fp32", "fp8")
SEEDS = range(1000, 1012)  # nothing was chosen on them
STEPS = 40_960
LOST = 60  # a fall by more than this is a loss
COLUMNS = ("precision", "seed", "arm", "best", "fall", "last", "steps_to_180", "curve")
CURVE_EVERY = 4  # iterations; a curve is of the smoothed return, rounded to whole numbers

# Update, slice length, and whether one more update is made on the new rollout
REPLAY = {
    "single transitions": ("a2c", 1, False),
    "single transitions, new update": ("a2c", 1, True),
    "single transitions, corrected": ("corrected", 1, False),
    "single transitions, corrected, new update": ("corrected", 1, True),
    "slices": ("a2c", 16, False),
    "slices, new update": ("a2c", 16, True),
    "slices, V-trace alone": ("vtrace", 16, False),
    "slices, clip alone": ("clip", 16, False),
    "slices, corrected": ("corrected", 16, False),
    "slices, corrected, new update": ("corrected", 16, True),
}
NO_REPLAY = ("no replay: A2C", "no replay: five clipped updates")
ARMS = (*NO_REPLAY, *REPLAY)
# The four arms of the figure, as they lie on it
PANELS = (
    ("single transitions, new update", "slices, new update"),
    ("single transitions, corrected, new update", "slices, corrected, new update"),
)


def definitions(precision: str) -> dict:
    """What the notebook's parameters and its cells tagged `definitions` define, by name."""
    names = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        tags = cell["metadata"].get("tags", [])
        if "parameters" in tags or "definitions" in tags:
            exec("".join(x for x in cell["source"] if not x.startswith("%")), names)
        if "parameters" in tags:
            names["PRECISION"] = precision
    return names


def update_with(names: dict, vtrace: bool, clip: bool) -> Callable:
    """The notebook's corrected update with V-trace or the clip alone, out of its own functions."""

    def update(agent, batch):
        logits, value = agent(batch.obs)
        logp = torch.distributions.Categorical(logits=logits[:-1]).log_prob(batch.action).detach()
        log_ratio = torch.where(batch.valid, logp - batch.behavior_logp, 0)
        log_weight = log_ratio if vtrace else torch.zeros_like(log_ratio)
        unweighted, advantage = names["vtrace"](batch, value.detach(), log_weight)
        target = advantage + value[:-1].detach()
        weight = log_weight.exp().clamp(max=1) * names["standardized"](unweighted, batch.valid)
        if clip:
            weight = names["clipped"](weight, log_ratio)
        loss, entropy = names["loss_of"](logits, value, batch, weight, target)
        names["update"](agent, loss)
        return loss.item(), entropy.item()

    return update


def learner(names: dict, arm: str, seed: int) -> Callable:
    """What an arm does with each new rollout."""
    if arm == "no replay: A2C":
        return names["learn_a2c"]
    if arm == "no replay: five clipped updates":
        return names["learn_without_replay"]
    kind, slice_length, on_new = REPLAY[arm]
    update = {
        "a2c": names["a2c_update"],
        "corrected": names["corrected_update"],
        "vtrace": update_with(names, vtrace=True, clip=False),
        "clip": update_with(names, vtrace=False, clip=True),
    }[kind]
    return names["learner_with_replay"](update, slice_length, seed, on_new=on_new)


def measure_arm(names: dict, precision: str, arm: str, seed: int) -> dict:
    """Trains one agent. A row of the table of measurements."""
    agent = names["new_agent"](precision, seed)
    history = names["train"](agent, learner(names, arm, seed), STEPS, seed)
    _, returns = names["smooth"](history)
    return {
        "precision": precision,
        "seed": seed,
        "arm": arm,
        "best": round(float(returns.max()), 1),
        "fall": round(float(names["largest_fall"](history)), 1),
        "last": round(float(returns[-1]), 1),
        "steps_to_180": names["steps_to"](history),
        "curve": " ".join(f"{x:.0f}" for x in returns[::CURVE_EVERY]),
    }


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def measure(path: Path) -> None:
    """Trains what is missing in the file of measurements."""
    done = {(row["precision"], int(row["seed"]), row["arm"]) for row in read(path)}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for seed in SEEDS:
            for precision in PRECISIONS:
                names = definitions(precision)
                for arm in ARMS:
                    if (precision, seed, arm) not in done:
                        writer.writerow(measure_arm(names, precision, arm, seed))
                        file.flush()


def line(rows: list[dict]) -> list[str]:
    """The columns of a table for the seeds of one arm in one precision."""
    falls = np.array([float(row["fall"]) for row in rows])
    steps = [int(row["steps_to_180"]) if row["steps_to_180"] else np.inf for row in rows]
    middle = np.median(steps)
    return [
        f"{np.median(falls):.0f}",
        f"{(falls > LOST).sum()} of {len(falls)}",
        f"{np.median([float(row['last']) for row in rows]):.0f}",
        f"{middle:,.0f}" if np.isfinite(middle) else "-",
    ]


def table(rows: list[dict]) -> str:
    """The table, a line for each arm."""
    columns = ("median fall", "lose it", "median last return", "median steps to 180")
    head = [f"{precision}: {column}" for precision in PRECISIONS for column in columns]
    text = f"| arm | {' | '.join(head)} |\n|{' --- |' * (1 + len(head))}\n"
    for arm in ARMS:
        fields = [arm]
        for precision in PRECISIONS:
            fields += line([r for r in rows if (r["arm"], r["precision"]) == (arm, precision)])
        text += f"| {' | '.join(fields)} |\n"
    return text


def draw(rows: list[dict], path: Path, precision: str = "fp8") -> None:
    """Four panels, replay of single transitions and of slices, uncorrected and corrected."""
    fig, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True, sharey=True, layout="constrained")
    for axis_row, arms in zip(axes, PANELS, strict=True):
        for ax, arm in zip(axis_row, arms, strict=True):
            runs = [r for r in rows if (r["arm"], r["precision"]) == (arm, precision)]
            lost = 0
            for run in runs:
                curve = np.array(run["curve"].split(), float)
                steps = (16 + CURVE_EVERY * np.arange(len(curve))) * 256
                is_lost = float(run["fall"]) > LOST
                lost += is_lost
                ax.plot(
                    steps,
                    curve,
                    color="#D55E00" if is_lost else "#0072B2",
                    linewidth=0.9,
                    alpha=0.7,
                )
            title = f"{arm.removesuffix(', new update')}: {lost} of {len(runs)} lose it"
            ax.set_title(title, fontsize=10, color="#D55E00" if lost > 1 else "#0072B2")
            ax.set(xlim=(0, STEPS), ylim=(0, 212))
            ax.set_xticks(range(0, STEPS, 10_000))
            ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    for ax in axes[-1]:
        ax.set_xlabel("environment steps")
    for ax in axes[:, 0]:
        ax.set_ylabel("return")
    fig.suptitle("Only slices and the correction together keep what replay has learned")
    fig.savefig(path, dpi=110)


def main(action: str, path: Path) -> None:
    torch.set_num_threads(1)
    if action == "measure":
        measure(path)
        return
    rows = read(MEASURED)
    command = f"`python benchmarks/lesson.py table {path}`"
    path.write_text(f"{table(rows)}\n{command} on {origin()}.\n")
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
