"""Does one algorithm with one set of defaults learn every task, in every precision?

Trains the package's tasks with the config's defaults, on seeds that nobody had tuned on, in every
precision and with the state in eight bits (`train --eight-bit`): thirty seeds of the cart, thirty
of CartPole and of the linear-quadratic cart in float32 and in FP8, ten otherwise. They train as
tensors, in populations. Beside them stand ten seeds of Stable-Baselines3's A2C and PPO with the
settings of its zoo (zoo.py). All are evaluated in the same episodes, of the tasks as tensors.

Tasks that only Gymnasium has, with Box2D or MuJoCo, come last, one seed at a time: five in float32
and in FP8, ten of Hopper and HalfCheetah, whose seeds differ more. On HalfCheetah there are five
seeds of Stable-Baselines3's PPO, too. (On Hopper its PPO stood still with the zoo's settings, and
scored 986 from the first evaluation to the last, where the zoo reports 2,410 on another version of
the task. Nobody found out why, so it is no comparison and was left out.)

A further arm makes as many updates as the defaults do, all on the newest rollout: what does replay
add? It trained beside other work, so its seconds are left out.

Stable-Baselines3's seeds of the first five tasks are from 1000 up, or 2000 of the cart. They were
evaluated by an earlier version, in other episodes of the same kind. That flatters its percentages
of the linear-quadratic cart by about half a percent. There it has the settings of Pendulum, and on
the cart those of CartPole.

A seed's score is its last greedy evaluation, the mean of 100 episodes. On the linear-quadratic cart
the score is minus the cost above the optimum, in percent. "Held" counts seeds of CartPole whose
evaluations, every 10,000 steps, never fell below 400 again once one had reached 475. Both carts have
a paired interval against fp32 instead.

    python benchmarks/tasks.py benchmarks/results/tasks.md [--only CartPole-v1] [--arms fp32 fp8]

The evaluations of every finished seed go to a .csv beside the table, from which the table and a
.png of learning curves are made. So the benchmark can be stopped at any time, and goes on with the
seeds that are missing. A seed counts only as long as the settings of its arm are what they were.
"""

import argparse
import csv
import dataclasses
import functools
import importlib.util
import json
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
import zoo
from optimum import optimal_returns
from torch import nn

from fp8rl.build import Machine, build
from fp8rl.config import EIGHT_BIT, Config
from fp8rl.env import Cart
from fp8rl.evaluate import Evaluator
from fp8rl.history import History
from fp8rl.machine.hardware import cores, origin
from fp8rl.study import comparison, figures, parallel
from fp8rl.tasks import lqr
from fp8rl.tasks.by_id import task_of
from fp8rl.train import train

CART, CARTPOLE, LQR = "the cart", "CartPole-v1", "fp8rl/Lqr-v0"
# First seed, steps, steps between evaluations, and the score that a seed should reach; on Hopper
# and HalfCheetah what the zoo of Stable-Baselines3 reports of its PPO. Settings were changed
# several times after a look at seeds from 1000 and from 5000 up, so they are reported on others.
# Stable-Baselines3's settings were not, so its seeds have stayed the same (configs_of).
TASKS = {
    CART: (8000, 100_000, 10_000, 195),
    CARTPOLE: (8000, 500_000, 10_000, 475),
    LQR: (8000, 1_000_000, 50_000, -5),
    "Pendulum-v1": (8000, 1_000_000, 50_000, -250),
    "Acrobot-v1": (8000, 1_000_000, 50_000, -100),
    "LunarLander-v3": (8000, 1_000_000, 50_000, 200),
    "InvertedPendulum-v5": (8000, 200_000, 10_000, 1000),
    "Hopper-v5": (8000, 1_000_000, 50_000, 2400),
    # An evaluation takes as many steps as a tenth of the training
    "HalfCheetah-v5": (
        8000,
        1_000_000,
        200_000,
        5800,
    ),
}
PRECISIONS = {name: {"precision": name} for name in ("fp32", "bf16", "fp16", "fp8")} | {
    # With the root of v rounded to the nearest, as EIGHT_BIT was when the tables were made
    "eight-bit state": EIGHT_BIT | {"formats": "weights=e4m3:stochastic m=e4m3 root=e4m3"}
}
# As many updates as the defaults make, all on slices of the newest rollout: the ring holds no more
# (2,048 steps and the final observations). This is PPO without replay, and says where replay pays.
NO_REPLAY = "fp32 without replay"
PRECISIONS[NO_REPLAY] = {"precision": "fp32", "capacity": 2_064}
PEERS = {"SB3 A2C": "A2C", "SB3 PPO": "PPO"}
ARMS = (*PRECISIONS, *PEERS)
DRAWN = ("fp32", "fp8")
# Columns of the short table, and how a newcomer knows them
SHORT = {"fp32": "float32", "fp8": "FP8"} | {name: name for name in PEERS}
COLUMNS = (
    "task",
    "arm",
    "steps",
    "median score",
    "lowest",
    "seeds that reach the goal",
    "held",
    "minus fp32, IQM [95%]",
)
COLUMNS += ("seconds a seed",)


class Seed(NamedTuple):
    """What a seed has earned in its evaluations, float64 [E], and its seconds of training, in a
    population its share of them."""

    returns: np.ndarray
    seconds: float


Found = dict[tuple[str, str, int], Seed]  # by task, arm and seed


@functools.cache
def best_of(task: str) -> float:
    """The best return of an evaluation's 100 starts, on the carts."""
    if task == CART:
        return optimal_returns(Cart(100, purpose="evaluation starts").state).mean().item()
    return -lqr.optimal_cost(lqr.Lqr(100, purpose="evaluation starts").obs).mean().item()


def above_optimum(returns: np.ndarray) -> np.ndarray:
    """Percent by which the costs of the linear-quadratic cart exceed the smallest possible one."""
    return 100 * (returns / best_of(LQR) - 1)


def score(task: str, final_return: float) -> float:
    """Higher is better: a return, or minus the cost above the optimum in percent."""
    return -above_optimum(final_return) if task == LQR else final_return


def unit_of(task: str) -> str:
    return " %" if task == LQR else ""


def held(seed: Seed) -> bool:
    """Whether an evaluation reached 475 and none fell below 400 after it."""
    reached = np.maximum.accumulate(seed.returns >= 475)
    return bool(reached[-1]) and not (reached & (seed.returns < 400)).any()


class Timed(NamedTuple):
    """An evaluator whose seconds of the processor are collected in `seconds`."""

    evaluator: Evaluator
    seconds: list[float]

    def evaluate(self, learned: nn.Module) -> float:
        began = time.process_time()
        mean_return = self.evaluator.evaluate(learned)
        self.seconds.append(time.process_time() - began)
        return mean_return


def through_gymnasium(config: Config) -> History:
    """Trains a config in Gymnasium's own environments. Seconds are the processor's, without
    evaluations, as zoo.Evaluator's are."""
    run = build(config, Machine(vectorization="sync"))
    run.evaluator, began = Timed(run.evaluator, []), time.process_time()
    history = train(run, progress=False).history
    history.columns["seconds"][-1] = time.process_time() - began - sum(run.evaluator.seconds)
    return history


def is_tensor_task(task: str) -> bool:
    """Whether the package has a task as tensors, so that its agents train as populations."""
    return task in (CART, LQR) or bool(task_of(task))


def arms_of(task: str) -> list[str]:
    """The arms that there are for a task."""
    if is_tensor_task(task):
        return list(ARMS)
    return ["fp32", "fp8", NO_REPLAY] + [
        name for name, algorithm in PEERS.items() if (algorithm, task) in zoo.SETTINGS
    ]


def configs_of(task: str, arm: str) -> list[Config]:
    """A config for each seed of an arm."""
    first, steps, every, _ = TASKS[task]
    first = first if arm not in PEERS else 2000 if task == CART else 1000
    env_id = None if task == CART else task
    shape = {"env_id": env_id, "steps": steps, "eval_every": every} | PRECISIONS.get(arm, {})
    count = 10 if is_tensor_task(task) else 5
    if arm in ("fp32", "fp8") and task in ("Hopper-v5", "HalfCheetah-v5"):
        count = 10
    if arm == NO_REPLAY and task in ("LunarLander-v3", "Hopper-v5", "HalfCheetah-v5"):
        count = 3
    if arm in PRECISIONS and arm != NO_REPLAY and task == CART:
        count = 30
    if task in (CARTPOLE, LQR) and arm in ("fp32", "fp8"):
        count = 30
    return [Config(seed=first + seed, **shape) for seed in range(count)]


@functools.cache
def mark_of(task: str, arm: str) -> str:
    """Eight digits that change with an arm's settings."""
    config, settings = dataclasses.asdict(configs_of(task, arm)[0]), {}
    if arm in PEERS:  # for which only these fields of the config count
        settings = zoo.SETTINGS[PEERS[arm], config["env_id"]]
        config = {
            name: config[name]
            for name in ("env_id", "seed", "steps", "start_noise", "eval_every", "eval_episodes")
        }
    return f"{zlib.crc32(json.dumps([config, settings], sort_keys=True).encode()):08x}"


def train_missing(task: str, arms: list[str], journal: Path) -> None:
    """Trains the seeds of some arms that the journal does not have, and adds each as soon as it is
    done."""
    found, arm_of = read(journal), {config: arm for arm in arms for config in configs_of(task, arm)}
    run = None  # precisions of a task as tensors train together; any other arm comes alone
    if arms[0] in PEERS:
        run = functools.partial(zoo.train, PEERS[arms[0]])
    elif not is_tensor_task(task):
        run = through_gymnasium
    size = {
        config: len(each)
        for _, each in parallel.split(list(arm_of), cores(), run)
        for config in each
    }
    done = {config for config, arm in arm_of.items() if (task, arm, config.seed) in found}
    for config, history in parallel.run_all(list(arm_of), run=run, done=done):
        arm, (_, returns) = arm_of[config], history.evaluations()
        row = [
            task,
            arm,
            config.seed,
            mark_of(task, arm),
            f"{history.last['seconds'] / size[config]:.4f}",
        ]
        with journal.open("a") as file:
            file.write(",".join(map(str, [*row, " ".join(f"{x:.6g}" for x in returns)])) + "\n")


def read(journal: Path) -> Found:
    """The finished seeds."""
    head = "task,arm,seed,settings,seconds,returns\n"
    text = journal.read_text() if journal.exists() else head
    # A line that was being written when the benchmark was killed is no seed
    journal.write_text(text[: text.rfind("\n") + 1])
    found = {}
    for row in csv.DictReader(journal.read_text().splitlines()):
        task, arm = row["task"], row["arm"]
        if row["settings"] == mark_of(task, arm):
            returns = np.array([float(x) for x in row["returns"].split()])
            found[task, arm, int(row["seed"])] = Seed(returns, float(row["seconds"]))
    return found


def line(task: str, arm: str, found: Found) -> str:
    """An arm's line of the table."""
    _, steps, _, goal = TASKS[task]
    mine = {seed: each for (name, of, seed), each in found.items() if (name, of) == (task, arm)}
    scores = np.array([score(task, each.returns[-1]) for each in mine.values()])
    holds = f"{sum(map(held, mine.values()))} of {len(mine)}" if task == CARTPOLE else "-"
    difference, plain = "-", [found.get((task, "fp32", seed)) for seed in mine]
    if task in (CART, LQR) and arm in PRECISIONS and arm != "fp32" and all(plain):
        difference = comparison.with_interval(
            scores - [score(task, each.returns[-1]) for each in plain], signed=True
        )
    cells = [
        task,
        arm,
        f"{steps:,}",
        *(f"{x:.2f}{unit_of(task)}" for x in (np.median(scores), scores.min())),
    ]
    cells += [f"{(scores >= goal).sum()} of {len(mine)}", holds, difference]
    seconds = f"{np.mean([each.seconds for each in mine.values()]):.1f}"
    cells.append("-" if arm == NO_REPLAY else seconds)
    return f"| {' | '.join(cells)} |"


def of_added_seeds(found: Found) -> str:
    """What FP8 loses on the linear-quadratic cart on the twenty seeds that were added after ten had
    shown no clear difference: a sentence, or nothing while some are missing."""
    seeds = range(TASKS[LQR][0] + 10, TASKS[LQR][0] + 30)
    arms = ("fp8", "fp32")
    if not all((LQR, arm, seed) in found for arm in arms for seed in seeds):
        return ""
    fp8, fp32 = (
        np.array([score(LQR, found[LQR, arm, seed].returns[-1]) for seed in seeds]) for arm in arms
    )
    difference = comparison.with_interval(fp8 - fp32, signed=True)
    return f"On {LQR}, seeds {seeds[0]} to {seeds[-1]} alone: fp8 minus fp32 {difference} %. "


def write(out: Path, found: Found) -> None:
    """Makes the table of the seeds found, in which other lines stay as they are, a short one with a
    line for each task, and one of what replay adds."""
    names, arms = (
        [(task, arm) for task in TASKS for arm in ARMS],
        {(task, arm) for task, arm, _ in found},
    )
    before = out.read_text().splitlines() if out.exists() else []
    lines = {
        name: old for name in names for old in before if old.startswith(f"| {' | '.join(name)} |")
    }
    lines |= {name: line(*name, found) for name in names if name in arms}
    made = f"`python benchmarks/tasks.py {out}` on {origin()}.\n"
    goals = ", ".join(f"{task} {goal}" for task, (*_, goal) in TASKS.items())
    note = (
        f"Goals: {goals} (minus the percent of cost above the optimum). The cart's best "
        f"return is {best_of(CART):.2f}. "
    )
    note += (
        "Seconds are of training, on one core while the other trains, too: "
        "as tensors a seed's share of its population's, "
    )
    note += f"one at a time the processor's alone. {of_added_seeds(found)}{made}"
    out.write_text(table(COLUMNS, [lines[name] for name in names if name in lines]) + "\n" + note)

    rows = []
    replayed = []  # what replay adds
    for task, (_, steps, _, goal) in TASKS.items():
        if (task, NO_REPLAY) in lines:
            pair = [short(lines[task, arm]) for arm in ("fp32", NO_REPLAY) if (task, arm) in lines]
            replayed.append(f"| {task} | {' | '.join(pair)} |")
        cells = [short(lines[task, arm]) if (task, arm) in lines else "-" for arm in SHORT]
        if set(cells) != {"-"}:
            name = "linear-quadratic cart" if task == LQR else task
            wanted = f"at most {-goal}% above the optimum" if task == LQR else f"{goal:,}"
            rows.append(f"| {' | '.join([name, f'{steps:,}', wanted, *cells])} |")
    out.with_stem(out.stem + "_short").write_text(
        table(("task", "training steps", "goal", *SHORT.values()), rows) + "\n" + made
    )
    columns = ("task", "16 of 17 updates on replayed slices", "17 updates on the new rollout")
    out.with_stem(out.stem + "_replay").write_text(table(columns, replayed) + "\n" + made)


def table(columns: tuple[str, ...], lines: list[str]) -> str:
    """A Markdown table."""
    return "\n".join([f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *lines]) + "\n"


def short(line: str) -> str:
    """A line of the table as one cell: the median, and how many seeds reach the goal. The
    linear-quadratic cart has its cost above the optimum."""
    _, task, _, _, median, _, reached, *_ = line.replace(" |", "|").replace("| ", "|").split("|")
    if task == LQR:
        return f"{-float(median.removesuffix(unit_of(task))):.2f}% above ({reached})"
    return f"{float(median):.1f} ({reached})"


def draw(path: Path, found: Found) -> None:
    """Learning curves of some arms, a panel for each task that has any, with its goal. In each of
    them up is better."""
    shown = [
        task for task in TASKS if any((task, arm) == each[:2] for each in found for arm in DRAWN)
    ]
    rows = -(-len(shown) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(9, 2.6 * rows + 0.5), layout="constrained", squeeze=False
    )
    for ax, task in zip(axes.flat, shown, strict=False):
        _, steps, every, goal = TASKS[task]
        curves, count = {}, steps // every
        for arm in DRAWN:
            seeds = [
                each.returns[:count]
                for (name, of, _), each in found.items()
                if (name, of) == (task, arm)
            ]
            # So that the other arms keep their colours
            returns = np.array(seeds or [np.full(count, np.nan)])
            lost = {CART: best_of(CART) - returns, LQR: above_optimum(returns)}
            curves[arm] = every * np.arange(1, count + 1), lost.get(task, returns)
        figures.learning_curves(ax, curves, marks=False).get_legend().remove()
        for line in ax.lines:
            line.set_markersize(3)
        at = goal
        title = task
        label = "greedy return"
        if task == CART:
            at = best_of(CART) - goal
            title = f"the cart: shortfall from {best_of(CART):.0f}"
            label = f"{best_of(CART):.2f} minus the return"
        if task == LQR:
            at = -goal
            title = "linear-quadratic cart"
            label = "cost above the optimum (%)"
        if task in (CART, LQR):
            ax.set_yscale("log")
            ax.invert_yaxis()
        ax.axhline(at, color="#888888", linewidth=1, zorder=0)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
        place = {
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "color": "#444444",
            "bbox": box,
        }
        # Left, above the curves
        free = np.nanmedian(curves["fp32"][1], axis=0)[-1] < goal and task not in (
            CART,
            LQR,
        )
        side = {"ha": "left", "va": "bottom"} if free else {"ha": "right", "va": "top"}
        at = (0.02, at) if free else (0.98, at)
        ax.annotate(
            f"goal {abs(goal) if task == LQR else goal:,}{unit_of(task)}",
            at,
            (0, 3 if free else -3),
            **place,
            **side,
        )
        figures.steps_axis(ax, ticks=3).set(title=title, ylabel=label)
    for ax in axes.flat[: max(0, len(shown) - 3)]:  # another is below
        ax.set_xlabel("")
    for ax in axes.flat[len(shown) :]:
        ax.axis("off")
    handles = axes[0, 0].get_legend_handles_labels()
    note = (
        "FP8 learns as float32 does, up to a small loss on the linear-quadratic cart.\n"
        "Up is better in every panel. Lines: interquartile means. Bands: "
        "10th to 90th percentile of the seeds."
    )
    figure.legend(
        *handles,
        loc="outside upper center",
        ncols=len(handles[0]),
        title=note,
        title_fontsize=12,
        fontsize=11,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(out: Path, only: list[str], arms: list[str], again: bool) -> None:
    torch.set_num_threads(1)  # as every run has
    journal = out.with_suffix(".csv")
    if again:
        journal.unlink(missing_ok=True)
    if not importlib.util.find_spec("stable_baselines3") and set(arms) & PEERS.keys():
        sys.exit(
            "stable_baselines3 is missing: pip install --no-deps -r "
            "benchmarks/requirements.txt, or choose --arms without it"
        )
    for task in only or TASKS:
        wanted = [arm for arm in arms if arm in arms_of(task)]
        together = [arm for arm in wanted if arm in PRECISIONS]
        for group in ([together] if together else []) + [
            [arm] for arm in wanted if arm not in PRECISIONS
        ]:
            try:
                train_missing(task, group, journal)
            finally:
                found = read(journal)
                write(out, found)
                draw(out.with_suffix(".png"), found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=TASKS)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--again", action="store_true")
    main(*vars(parser.parse_args()).values())
