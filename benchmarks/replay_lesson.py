"""Why does a simple replay loop lose what it has learned, and which settings mend it?

    lesson         the parts of the main notebook's correction, one at a time and together, by the
                   notebook's own code: every cell of notebooks/fp8_actor_critic.ipynb that is tagged
                   `definitions` is executed here
    published      the published loop (Config.published) with one setting of ours; with one more on
                   every line, up to our loop; and ours with one setting of the published loop
    between_loops  why slices alone mend the published loop, but not the main notebook's: both replay
                   slices of 16 steps without any correction, and each is given the settings of the
                   other, one at a time and all together

    python benchmarks/replay_lesson.py lesson benchmarks/results/lesson.md

lesson keeps what it has trained in a .csv beside the table, and goes on from it.

*lesson.* An arm replays single transitions, or slices of 16 steps; it corrects with V-trace, with
PPO's clip, with both or with neither; and it makes one more update on the new rollout, as the notebook
does, or it learns from the ring alone. Three arms replay nothing: A2C, five of its updates on each new
rollout, and five clipped ones, which is PPO in essence. A *fall* is how far the smoothed return drops below its best so
far, of about 200. An agent has lost what it learned where it falls by more than 60. Expected, from four
seeds below 1000 in bfloat16 (twelve more of single transitions) and from an earlier version of the
notebook, whose ring drew other steps: of the arms with the new update, "slices, corrected" and "slices,
clip alone" hold, at most 1 of 12 seeds loses it; of single transitions, uncorrected, at least 6 of 12
do, and of uncorrected slices at least 3. The clip alone takes at least 1.3 times as many steps to a
return of 180 as the whole correction. FP8 changes none of this. (Measured: all of this, but that in FP8
the clip alone takes 1.21 times as many steps. Nothing was expected of V-trace alone, which nearly holds.)
Five updates without a clip were added afterwards. Expected of them: at least 2 of 12 seeds lose it, and
the median reaches 180 in fewer steps than with the clip. (Measured: neither. 1 and 0 of 12 lose it, and
it takes 1.1 times as many steps.)

*published, between_loops.* Thirty seeds a line, of the cart. All have the same budget: as many
environment steps, and an update for each 128 of them, which for ours are 16 an iteration instead of
the default 17. A batch is 64 transitions or, where a line says so, 1,024, so samples are not the
same. The steps of an update and of an evaluation are, so all are evaluated at the same moments.
Between the loops a fall is counted in the notebook's way, too: how far the return of training
episodes, a mean over 4,096 steps, drops below its best so far.
"""

import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from results import ROOT, Journal, table_of, write_tables

from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.study import comparison, parallel

# The notebook's own code

NOTEBOOK = ROOT / "notebooks/fp8_actor_critic.ipynb"
PRECISIONS = ("fp32", "fp8")
LESSON_SEEDS = range(2000, 2012)  # nothing was chosen on them
LESSON_STEPS = 40_960
LOST = 60  # a fall by more than this is a loss
LESSON = ("precision", "seed", "arm", "best", "fall", "last", "steps_to_180", "curve")
CURVE_EVERY = 4  # iterations; a curve is of the smoothed return, rounded to whole numbers

RATIO_AND_CLIP = {
    "": {"ratio": False, "clip": None},
    ", V-trace alone": {"clip": None},
    ", clip alone": {"ratio": False},
    ", corrected": {},
}
SLICES = {"single transitions": 1, "slices": 16}
CURES = {"single transitions": ("", ", corrected"), "slices": tuple(RATIO_AND_CLIP)}
FROM_RING = ", no update on new steps"
# Name -> correction, steps in a slice (0: nothing is replayed), updates on the new rollout
LESSON_ARMS = {
    "no replay: A2C": ("", 0, 1),
    "no replay: five updates": ("", 0, 5),
    "no replay: five clipped updates": (", corrected", 0, 5),
    **{
        slices + cure + updates: (cure, SLICES[slices], int(not updates))
        for slices, cures in CURES.items()
        for cure, updates in itertools.product(cures, ("", FROM_RING))
    },
}
PANELS = (  # of the figure
    "single transitions",
    "single transitions, corrected",
    "no replay: five clipped updates",
    "slices",
    "slices, clip alone",
    "slices, corrected",
)


def definitions() -> dict:
    """What the notebook's parameters and its cells tagged `definitions` define, by name."""
    names = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if {"parameters", "definitions"} & {*cell["metadata"].get("tags", [])}:
            exec("".join(cell["source"]), names)
    return names


def learner(names: dict, arm: str) -> Callable:
    """What an arm does with each new rollout."""
    cure, slice_length, new_updates = LESSON_ARMS[arm]
    update = functools.partial(names["corrected_update"], **RATIO_AND_CLIP[cure])
    if slice_length and new_updates:
        return names["replay"](update, slice_length)
    ring = names["Ring"]()

    def learn(agent, rollout):
        ring.append(rollout)
        batch = rollout
        for _ in range(new_updates or names["REPLAYED"]):
            if slice_length:
                batch = ring.sample(names["BATCH"] // slice_length, slice_length)
            row = update(agent, batch)
        return row

    return learn


def train_lesson(names: dict, precision: str, seed: int, arm: str) -> dict:
    """Trains one agent. A row of the journal."""
    agent = names["new_agent"](precision, seed)
    history = names["train"](agent, learner(names, arm), LESSON_STEPS, seed)
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


def lesson_cells(rows: list[dict]) -> list[str]:
    """The cells of one arm in one precision."""
    falls = np.array([float(row["fall"]) for row in rows])
    steps = [int(row["steps_to_180"]) if row["steps_to_180"] else np.inf for row in rows]
    middle = np.median(steps)
    return [
        f"{np.median(falls):.0f}",
        f"{(falls > LOST).sum()} of {len(falls)}",
        f"{np.median([float(row['last']) for row in rows]):.0f}",
        f"{middle:,.0f}" if np.isfinite(middle) else "-",
    ]


def lesson(out: Path) -> None:
    journal = Journal(out.with_suffix(".csv"), LESSON)
    done = journal.done("precision", "seed", "arm")
    names = definitions()
    for seed, precision, arm in itertools.product(LESSON_SEEDS, PRECISIONS, LESSON_ARMS):
        if (precision, str(seed), arm) not in done:
            journal.add(train_lesson(names, precision, seed, arm))
    found: dict[tuple[str, str], list[dict]] = {}
    for row in journal.rows():
        found.setdefault((row["arm"], row["precision"]), []).append(row)
    columns = ("median fall", "lose it", "median last return", "median steps to 180")
    heads = [f"{precision}: {column}" for precision in PRECISIONS for column in columns]
    lines = [
        [arm, *(cell for name in PRECISIONS for cell in lesson_cells(found[arm, name]))]
        for arm in LESSON_ARMS
    ]
    write_tables(out, table_of(["arm", *heads], lines))
    draw_lesson(
        out.with_suffix(".png"), {arm: rows for (arm, name), rows in found.items() if name == "fp8"}
    )


def draw_lesson(path: Path, found: dict[str, list[dict]]) -> None:
    """A panel for each arm that the notebook has."""
    fig, axes = plt.subplots(2, 3, figsize=(11, 5), sharex=True, sharey=True, layout="constrained")
    for ax, arm in zip(axes.flat, PANELS, strict=True):
        runs = found.get(arm, [])
        lost = sum(float(run["fall"]) > LOST for run in runs)
        for run in runs:
            curve = np.array(run["curve"].split(), float)
            steps = (16 + CURVE_EVERY * np.arange(len(curve))) * 256
            color = "#D55E00" if float(run["fall"]) > LOST else "#0072B2"
            ax.plot(steps, curve, color=color, linewidth=0.9, alpha=0.7)
        title = f"{arm}: {lost} of {len(runs)} lose it"
        ax.set_title(title, fontsize=10, color="#D55E00" if lost > 1 else "#0072B2")
        ax.set(xlim=(0, LESSON_STEPS), ylim=(0, 212))
        ax.set_xticks(range(0, LESSON_STEPS, 10_000))
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    for ax in axes[-1]:
        ax.set_xlabel("environment steps")
    for ax in axes[:, 0]:
        ax.set_ylabel("return")
    fig.suptitle(
        "The main notebook's loop in FP8, twelve seeds each: with slices, PPO's clip holds"
    )
    fig.savefig(path, dpi=110)


# From the published loop to ours, and between it and the notebook's

SEEDS = range(9000, 9030)  # the settings of the arms were tried on 100 to 115
BRIDGE_SEEDS = range(11_000, 11_030)
BUDGET = {"steps": 40_960, "eval_every": 2_048}
LEVEL = 100  # half of what an episode can return
# 16 times the steps an iteration, and the updates
MANY = {"num_envs": 16, "start_noise": 0.5, "replay_updates": 16}
RATIO = {"importance_correction": True}
CLIP = {"clip": Config.clip}
ONE = {
    "+ importance ratio": RATIO,
    "+ PPO's clip": CLIP,
    "+ bootstrap at time limits": {"bootstrap_truncation": True},
    "+ scaled rewards, normalized advantages": {"scale_rewards": True, "normalize_advantage": True},
    "+ entropy bonus": {"entropy_coef": None},
    "+ learning rate falls to 0": {"anneal": True},
    "+ 16 environments, spread starts": MANY,
    "+ batches of 1,024": {"batch_size": 1_024},
    "+ a ring of 20,000, discount 0.98": {"capacity": 20_000, "gamma": None},
    "+ slices of 16 steps": {"slice_length": 16},
}
ALONE = ONE | {
    "+ importance ratio and clip": RATIO | CLIP,
    "+ slices of 4 steps": {"slice_length": 4},
    "+ slices of 16 steps, lambda 0": {"slice_length": 16, "lam": 0},
    "+ updates on the new rollout alone": {"fresh_updates": 1, "replay_updates": 0},
}
STEPWISE = ONE | {
    "+ slices of 128 steps": {"slice_length": 128},
    "+ one update in 16 on the new rollout, which makes it ours": {
        "fresh_updates": 1,
        "replay_updates": 15,
        "learning_rate": None,  # the same number, now from the width
    },
}
NO_RATIO = {"importance_correction": False}
NO_CLIP = {"clip": None}
SINGLE = {"slice_length": 1}
BACK = {
    "- importance ratio": NO_RATIO,
    "- PPO's clip": NO_CLIP,
    "- importance ratio and clip": NO_RATIO | NO_CLIP,
    "- bootstrap at time limits": {"bootstrap_truncation": False},
    "- scaled rewards, normalized advantages": {
        "scale_rewards": False,
        "normalize_advantage": False,
    },
    "- entropy bonus": {"entropy_coef": 0},
    "- falling learning rate": {"anneal": False},
    "- slices: single transitions": SINGLE,
    "- slices: single transitions, and no importance ratio": SINGLE | NO_RATIO,
    "- slices: single transitions, and no clip": SINGLE | NO_CLIP,
    "- slices: single transitions, no importance ratio and no clip": SINGLE | NO_RATIO | NO_CLIP,
}
NOTEBOOK_SLICES = {  # the arm "slices" of the lesson, as the package's settings
    "num_envs": 16,
    "start_noise": 0.5,
    "rollout_length": 16,
    "capacity": 20_000,
    "slice_length": 16,
    "batch_size": 1_024,
    "fresh_updates": 0,
    "replay_updates": 4,
    "gamma": 0.98,
    "lam": 0.95,
    "importance_correction": False,
    "bootstrap_truncation": True,
    "normalize_advantage": True,
    "clip": None,
    "scale_rewards": True,
    "entropy_coef": 0.01,
    "learning_rate": 1e-3,
    "anneal": False,
}
# What differs between the two loops: name -> the published loop's setting; NOTEBOOK_SLICES has the
# notebook's
DIFFERENCES = {
    "environments": {"num_envs": 1, "start_noise": 0.0, "rollout_length": 256},
    "rows in a batch": {"batch_size": 64},
    "updates in 256 steps": {"replay_updates": 2},
    "size of the ring": {"capacity": 10_000},
    "discount and lambda": {"gamma": 0.99, "lam": 0.98},
    "bootstrap at time limits": {"bootstrap_truncation": False},
    "scaled rewards": {"scale_rewards": False},
    "normalized advantages": {"normalize_advantage": False},
    "entropy bonus": {"entropy_coef": 0},
}
Arms = dict[str, list[Config]]  # name of a line -> a config for each seed


def changes_of_published() -> dict[str, Arms]:
    """The tables from the published loop to ours, by what stands above them."""

    def published(changes: dict) -> list[Config]:
        return [Config.published(seed=seed, **BUDGET, **changes) for seed in SEEDS]

    settings = {}
    stepwise = {}
    for name, changes in STEPWISE.items():
        settings = settings | changes
        stepwise[name] = published(settings)
    first = {"the published loop": published({})}
    back = {name: published(settings | changes) for name, changes in BACK.items()}
    return {
        "The published loop with one change:": first
        | {name: published(changes) for name, changes in ALONE.items()},
        "With one more on every line:": first | stepwise,
        "Our loop with one change:": {"our loop": published(settings)} | back,
    }


def changes_between_loops() -> dict[str, Arms]:
    """The tables between the published loop and the notebook's."""

    def loop(changes: dict) -> list[Config]:
        settings = NOTEBOOK_SLICES | changes
        return [Config(seed=seed, **BUDGET, **settings) for seed in BRIDGE_SEEDS]

    published = {}
    for changes in DIFFERENCES.values():
        published = published | changes
    from_notebook = {"the notebook's slices": loop({})}
    from_published = {"the published loop with slices": loop(published)}
    for name, theirs in DIFFERENCES.items():
        of_notebook = {field: NOTEBOOK_SLICES[field] for field in theirs}
        from_notebook[f"{name} of the published loop"] = loop(theirs)
        from_published[f"{name} of the notebook"] = loop(published | of_notebook)
    return {
        "The notebook's slices without correction, with one setting of the published loop:": (
            from_notebook
        ),
        "The published loop with slices, with one setting of the notebook:": from_published,
    }


def lost(good: np.ndarray) -> np.ndarray:
    """Which seeds were good and are not later, of evaluations bool [seeds, evaluations]."""
    return (np.maximum.accumulate(good, axis=1) & ~good).any(axis=1)


def falls_of(histories: list[History]) -> np.ndarray:
    """How far each seed's training return, a mean over 4,096 steps, falls below its best."""
    steps = histories[0].column("steps")
    # Not a number where no episode ended in an iteration
    returns = np.array([history.column("train_return") for history in histories])
    width = round(4_096 / (steps[1] - steps[0]))
    windows = np.lib.stride_tricks.sliding_window_view(returns, width, axis=1)
    smooth = np.nanmean(windows, axis=-1)  # [seeds, iterations]
    return (np.fmax.accumulate(smooth, axis=1) - smooth).max(axis=1)


def count(seeds: np.ndarray) -> str:
    return f"{sum(seeds)} of {len(seeds)}"


def outcome(histories: list[History]) -> dict[str, str]:
    """What became of seeds, in greedy evaluations, by column."""
    returns = comparison.stack(histories, "eval_return")[1]  # [seeds, evaluations]
    good = returns >= LEVEL
    last = returns[:, -1]
    return {
        "seeds that reach 100": count(good.any(axis=1)),
        "fall below 100 later": count(lost(good)),
        "end below 100": count(~good[:, -1]),
        "median final return": f"{np.median(last):.1f}",
        "lowest": f"{last.min():.1f}",
    }


def outcome_with_falls(histories: list[History]) -> dict[str, str]:
    """The same with falls of the training return, by column."""
    falls = falls_of(histories)
    greedy = outcome(histories)
    return {
        "median fall of the training return": f"{np.median(falls):.0f}",
        "fall by more than 60": count(falls > LOST),
        "greedy: fall below 100 later": greedy["fall below 100 later"],
        "greedy: end below 100": greedy["end below 100"],
    }


def compare_loops(out: Path, tables: dict[str, Arms], outcome: Callable) -> None:
    """Trains the arms of tables, and writes them."""
    configs = dict.fromkeys(
        itertools.chain(*(x for arms in tables.values() for x in arms.values()))
    )
    found = dict(parallel.run_all(list(configs)))
    parts = []
    for head, arms in tables.items():
        lines = {name: outcome([found[config] for config in arm]) for name, arm in arms.items()}
        columns = ["settings", *next(iter(lines.values()))]
        parts += [head, table_of(columns, [[name, *x.values()] for name, x in lines.items()])]
    write_tables(out, *parts)


def published(out: Path) -> None:
    compare_loops(out, changes_of_published(), outcome)


def between_loops(out: Path) -> None:
    compare_loops(out, changes_between_loops(), outcome_with_falls)


TABLES = {make.__name__: make for make in (lesson, published, between_loops)}

if __name__ == "__main__":
    torch.set_num_threads(1)  # as the processes have, for the line under the tables
    TABLES[sys.argv[1]](Path(sys.argv[2]))
