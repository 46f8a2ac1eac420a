"""How quickly does an agent get good, compared with the off-policy algorithms of Stable-Baselines3:
DQN, TD3 and SAC?

They learn from few steps and take long for each; ours takes many steps and little time. So ours
trains twice: for as many steps as they do, in whole iterations, and for as many as in tasks.md.
Three fresh seeds an arm, all with the defaults or the settings of the zoo (zoo.py), evaluated ten
to twenty-one times in the same 100 episodes. Seconds are CPU seconds of one thread, without imports
and evaluations. They are of an otherwise idle machine: beside other work, a core that shares its
hardware with a busy one took up to 1.7 times as many.

    python benchmarks/off_policy.py benchmarks/results/off_policy.md

Goals are those of tasks.py. Every finished seed goes to a .csv beside the table, and is not trained
again; delete it after a change of settings. The figure beside it shows return against seconds."""

import csv
import functools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import tasks
import torch
import zoo

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.study import comparison, figures, parallel
from fp8rl.study.throughput import origin
from fp8rl.train import iterate

SEEDS = range(9100, 9103)
# Steps of the others, and steps between evaluations in those runs.
THEIRS = {
    "CartPole-v1": (("DQN",), 50_000, 2_500),
    "Acrobot-v1": (("DQN",), 100_000, 5_000),
    "Pendulum-v1": (("TD3", "SAC"), 20_000, 1_000),
}
COLUMNS = (
    "task",
    "arm",
    "steps",
    "median return",
    "lowest",
    "CPU seconds",
    "goal",
    "seeds that reach it",
    "after steps, median",
)
COLUMNS += ("after CPU seconds, median",)


class Seed(NamedTuple):
    """A seed's evaluations, float64 [E] each."""

    steps: np.ndarray
    seconds: np.ndarray
    returns: np.ndarray


def arms_of(task: str) -> dict[str, tuple[str | None, list[Config]]]:
    """The arms of a task: name -> the algorithm of Stable-Baselines3, or None for ours, and a
    config for each seed."""
    algorithms, steps, every = THEIRS[task]
    most = tasks.TASKS[task][1]

    def configs(steps: int, every: int) -> list[Config]:
        return [Config(seed=seed, env_id=task, steps=steps, eval_every=every) for seed in SEEDS]

    few = -(-steps // Config().steps_per_iteration) * Config().steps_per_iteration
    arms = {
        "ours": (None, configs(most, most // 20)),
        "ours, few steps": (None, configs(few, every)),
    }
    return arms | {f"SB3 {name}": (name, configs(steps, every)) for name in algorithms}


def ours(config: Config) -> History:
    run = build(config)
    run.evaluator, began = tasks.Timed(run.evaluator, []), time.process_time()
    for _ in iterate(run):
        run.history.columns["seconds"][-1] = (
            time.process_time() - began - sum(run.evaluator.seconds)
        )
    return run.history


def measure(journal: Path) -> dict[tuple[str, str], list[Seed]]:
    """Trains the seeds that the journal does not have; returns all, by task and arm."""
    text = journal.read_text() if journal.exists() else "task,arm,seed,steps,seconds,returns\n"
    journal.write_text(text[: text.rfind("\n") + 1])  # a line that was being written is no seed
    done = {(row["task"], row["arm"], int(row["seed"])) for row in csv.DictReader(journal.open())}
    for task in THEIRS:
        for arm, (algorithm, configs) in arms_of(task).items():
            run = functools.partial(zoo.train, algorithm) if algorithm else ours
            missing = [config for config in configs if (task, arm, config.seed) not in done]
            for config, history in parallel.run_all(missing, run=run):
                _, returns = history.evaluations()
                rows = ~np.isnan(history.column("eval_return"))
                lists = (history.column("steps")[rows], history.column("seconds")[rows], returns)
                texts = (" ".join(f"{x:.6g}" for x in each) for each in lists)
                with journal.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow([task, arm, config.seed, *texts])
    found: dict[tuple[str, str], list[Seed]] = {}
    for row in (row for row in csv.DictReader(journal.open()) if int(row["seed"]) in SEEDS):
        lists = (
            np.array([float(x) for x in row[name].split()])
            for name in ("steps", "seconds", "returns")
        )
        found.setdefault((row["task"], row["arm"]), []).append(Seed(*lists))
    return found


def line(task: str, arm: str, seeds: list[Seed], goal: float) -> list[str]:
    """An arm's line of the table. A seed that never reaches the goal counts as the latest."""
    final = np.array([seed.returns[-1] for seed in seeds])
    firsts = [np.flatnonzero(seed.returns >= goal)[:1] for seed in seeds]
    after = [
        np.array(
            [
                getattr(seed, name)[first[0]] if len(first) else np.inf
                for seed, first in zip(seeds, firsts, strict=True)
            ]
        )
        for name in ("steps", "seconds")
    ]
    steps, took = f"{seeds[0].steps[-1]:,.0f}", np.median([seed.seconds[-1] for seed in seeds])
    cells = [
        task,
        arm,
        steps,
        f"{np.median(final):.1f}",
        f"{final.min():.1f}",
        f"{took:.0f}",
        f"{goal:,}",
    ]
    cells += [
        f"{np.isfinite(after[0]).sum()} of {len(seeds)}",
        comparison.median_of(after[0], ",.0f"),
    ]
    return [*cells, comparison.median_of(after[1], ".1f")]


def draw(path: Path, found: dict[tuple[str, str], list[Seed]]) -> None:
    """Return against seconds: the median of the seeds, and all of them as a band."""
    figure, axes = plt.subplots(1, len(THEIRS), figsize=(11, 3.6), layout="constrained")
    styles = {
        "ours": figures.STYLES[0],
        "DQN": figures.STYLES[1],
        "TD3": figures.STYLES[4],
        "SAC": figures.STYLES[5],
    }
    for ax, task in zip(axes, THEIRS, strict=True):
        for (of, arm), seeds in found.items():
            name = arm.removeprefix("SB3 ")
            if of == task and arm != "ours, few steps":
                seconds = np.median([seed.seconds for seed in seeds], axis=0)
                returns = np.array([seed.returns for seed in seeds])
                ax.plot(
                    seconds,
                    np.median(returns, axis=0),
                    label=arm,
                    **styles[name] | {"markersize": 3},
                )
                ax.fill_between(
                    seconds,
                    returns.min(0),
                    returns.max(0),
                    color=styles[name]["color"],
                    alpha=0.15,
                    linewidth=0,
                )
        ax.axhline(tasks.TASKS[task][3], color="#888888", linewidth=1, zorder=0)
        ax.set(xscale="log", title=task, xlabel="CPU seconds of training")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.annotate(
            "goal",
            (0.01, tasks.TASKS[task][3]),
            (0, 3),
            ("axes fraction", "data"),
            "offset points",
            color="#444444",
        )
    lines = {
        line.get_label(): line
        for ax in axes
        for line in ax.lines
        if not line.get_label().startswith("_")
    }
    figure.legend(
        lines.values(),
        lines,
        loc="outside upper center",
        ncols=len(lines),
        fontsize=11,
        frameon=False,
    )
    axes[0].set_ylabel("episode return")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    found = measure(out.with_suffix(".csv"))
    arms = [(task, arm) for task in THEIRS for arm in arms_of(task)]
    rows = [f"| {' | '.join(line(*key, found[key], tasks.TASKS[key[0]][3]))} |" for key in arms]
    draw(out.with_suffix(".png"), found)
    out.write_text(
        tasks.table(COLUMNS, rows) + f"\n`python benchmarks/off_policy.py {out}` on {origin()}.\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
