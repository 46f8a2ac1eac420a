"""Which settings learn LunarLander, too, where the earlier defaults failed? And what do they cost
the tasks that were learned?

A ladder: each rung changes one setting of the rung before, from the earlier defaults to today's.
The seeds are below 1000: this is where settings are chosen, not where results are reported.
LunarLander-v3 trains in Gymnasium, one agent at a time, and needs Box2D; the other tasks train as
tensors, in populations. "Held" counts seeds of CartPole as in tasks.py. Samples a step are the rows
that updates learn from for each step of an environment, and say what an update costs.

    python benchmarks/ladder.py benchmarks/results/ladder.md

Finished seeds go to a .csv beside the table, so it can be stopped at any time and goes on with
those that are missing."""

import csv
import sys
from pathlib import Path

import numpy as np
import tasks
import torch

from fp8rl.config import Config
from fp8rl.machine.hardware import origin
from fp8rl.study import parallel

LANDER = "LunarLander-v3"
# Seeds, steps, and the environment's time limit.
TASKS = {
    LANDER: (range(3), 500_000, 1000),
    tasks.CART: (range(100, 116), 100_000, 200),
    tasks.CARTPOLE: (range(100, 116), 500_000, 500),
    "Acrobot-v1": (range(100, 108), 1_000_000, 500),
    "Pendulum-v1": (range(100, 108), 1_000_000, 200),
    tasks.LQR: (range(100, 108), 1_000_000, 50),
}
EVALUATIONS = 20  # of CartPole, which may be learned and lost; of the others only the last counts
EARLIER = {  # the defaults until this ladder was climbed, which some other benchmarks keep
    "rollout_length": 32,
    "slice_length": 32,
    "batch_size": 512,
    "replay_updates": 2,
    "capacity": 500_000,
    "gamma": 0.99,
    "entropy_coef": 0.01,
    "learning_rate": 2e-3,
    "halved_after": 40_000,
    "normalize_obs": False,
}
# The learning rate halves after a share of the training, and the horizon of the discount is half of
# the time limit.
RUNGS = {
    "the earlier defaults": EARLIER,
    "+ learning rate half after 40% of the steps": {"share": 0.4},
    "+ discount 1 - 2 / time limit": {"horizon": 0.5},
    "+ a ring of 20,000": {"capacity": 20_000},
    "+ 128 steps a rollout and a slice": {"rollout_length": 128, "slice_length": 128},
    "+ batches of 1,024, 8 replayed updates": {"batch_size": 1_024, "replay_updates": 8},
    "+ 16 replayed updates": {"replay_updates": 16},
    "+ learning rate from 0.001 linearly to 0": {"share": 0, "learning_rate": None},
    "+ discount 1 - 4 / time limit, from 0.98 to 0.995": {"horizon": None, "gamma": None},
    "+ no entropy bonus for continuous actions": {"entropy_coef": None},
    "+ normalized observations, in Gymnasium": {"normalize_obs": None},
}
COLUMNS = (
    "settings",
    "samples a step",
    *(f"{task}, median (lowest)" for task in TASKS),
    "CartPole held",
)
FIELDS = ("rung", "task", "seed", "returns")


def configs_of(rung: str, task: str) -> list[Config]:
    """A rung's configs for a task."""
    settings = {}
    for name, changes in RUNGS.items():
        settings |= changes
        if name == rung:
            break
    (seeds, steps, limit), fields = TASKS[task], dict(settings)
    if "share" in fields:
        fields["halved_after"] = int(fields.pop("share") * steps)
    if horizon := fields.pop("horizon", None):
        fields["gamma"] = 1 - 1 / (horizon * limit)
    fields |= {"env_id": None if task == tasks.CART else task, "steps": steps}
    fields["eval_every"] = steps // EVALUATIONS if task == tasks.CARTPOLE else 0
    return [Config(seed=seed, **fields) for seed in seeds]


def line(rung: str, found: dict) -> str:
    """A rung's line of the table."""
    one, cells, held = configs_of(rung, LANDER)[0], [], ""
    for task, (seeds, *_) in TASKS.items():
        scores = [
            np.array([tasks.score(task, x) for x in found[rung, task, seed]]) for seed in seeds
        ]
        last = np.array([each[-1] for each in scores])
        cells.append(f"{np.median(last):.2f} ({last.min():.2f})")
        if task == tasks.CARTPOLE:
            held = f"{sum(tasks.held(tasks.Seed(each, 0.0)) for each in scores)} of {len(seeds)}"
    samples = one.fresh_updates + one.replay_updates * one.batch_size / one.steps_per_iteration
    return f"| {' | '.join([rung, f'{samples:g}', *cells, held])} |"


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as the processes have, for the line under the table
    kept, found, places = out.with_suffix(".csv"), {}, {}
    for rung in RUNGS:
        for task in TASKS:
            for config in configs_of(rung, task):  # a rung may change nothing for a task
                places.setdefault(config, []).append((rung, task, config.seed))
    if not kept.exists():
        kept.write_text(",".join(FIELDS) + "\n")
    with kept.open() as file:
        for row in csv.DictReader(file):
            found[row["rung"], row["task"], int(row["seed"])] = [
                float(x) for x in row["returns"].split()
            ]
    done = {config for config, where in places.items() if found.keys() >= {*where}}
    for config, history in parallel.run_all(list(places), done=done):
        returns = history.evaluations()[1].tolist()
        with kept.open("a", newline="") as file:
            for where in places[config]:
                found[where] = returns
                csv.writer(file).writerow([*where, " ".join(f"{x:.6g}" for x in returns)])
    table = tasks.table(COLUMNS, [line(rung, found) for rung in RUNGS])
    out.write_text(f"{table}\n`python benchmarks/ladder.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
