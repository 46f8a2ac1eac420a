"""What does it cost that the acting policy has fewer bits than the learner, and which importance
ratios make up for it?

The acting policy has 7 to 0 bits of mantissa (weights and inputs of all matmuls), the learner
float32. Each population of 32 agents, on seeds from 1000 up, trains in one of four ways:

    actor     V-trace weighs by pi / mu, the learner's probability of an action divided by the
              acting policy's, and PPO's clip measures from the acting policy, too
    learner   the same weights, but the clip measures from the learner's own policy when the action
              was taken (`Config.clip_by`, fp8rl/losses.py)
    wrong     the learner's probability is taken for the acting policy's, as if both were one
    none      neither ratios nor clip, only in float32 and with 0 bits

On the linear-quadratic cart the score is minus the cost above the optimum in percent, on
CartPole-v1 the final return. Scores are medians over the seeds with the quartiles. The difference
is learner minus actor, paired by seed: an interquartile mean with its 95% bootstrap interval.

The other columns are medians over the agents that clip by the learner, except that the share of
rows that the clip drops is of both:

    divergence    KL divergence of the acting policy from the learner, in nats, on a new rollout
    horizon       H = ln 0.9 / ln p steps, where p is the effective sample size of a new rollout's
                  ratios as a share: after H steps, the product of the ratios has lost a tenth of its
                  effective sample size
    sample size   of replayed slices, in the last quarter of training
    clipped       share of the rows that the clip drops, in the last quarter of training, with the
                  clip by the actor and by the learner

    python benchmarks/mismatch.py benchmarks/results/mismatch.md

The numbers of every finished population go to a .csv beside the table, and the benchmark goes on
with those that are missing. `--again` begins with an empty .csv.
"""

import argparse
import csv
import itertools
import math
import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import short_tables
import torch
from breakage_map import SETTINGS
from tasks import LQR, score

from fp8rl.build import build_population
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.machine.hardware import cores
from fp8rl.population.population import Population, by_agent
from fp8rl.rollout import Collector, Rollout
from fp8rl.study.statistics import bootstrap_interval, iqm
from fp8rl.train import train

FIRST_SEED = 1000
SEEDS = 32
TASKS = {
    LQR: {**SETTINGS, "steps": 51_200, "learning_rate": 2e-3},
    "CartPole-v1": {**SETTINGS, "steps": 102_400, "learning_rate": 1e-3},
}
BITS = ("float32", "7", "5", "3", "2", "1", "0")  # of the acting policy's mantissa
RATIOS = {
    "actor": {"clip_by": "actor"},
    "learner": {"clip_by": "learner"},
    "wrong": {"clip_by": "actor"},
    "none": {"importance_correction": False, "clip": None},
}
WITHOUT_RATIOS = ("float32", "0")  # the only ones that also train with none
TENTH_LOST = math.log(0.9)


class Cell(NamedTuple):
    """What a population trains with: task, bits of the acting policy, and ratios."""

    task: str
    bits: str
    ratios: str


class Result(NamedTuple):
    """One agent of a population, after training."""

    task: str
    bits: str
    ratios: str
    seed: int
    score: float
    divergence: float  # nats
    sample_size: float  # of a new rollout
    replayed_sample_size: float
    clipped_share: float


class Mistaken:
    """A population's collector that takes the learner's probabilities of the actions for those of
    the acting policy. All else is the collector's own."""

    def __init__(self, collector: Collector, population: Population):
        self.collector = collector
        self.population = population

    def __getattr__(self, name: str):
        return getattr(self.collector, name)

    def collect(self, learned) -> Rollout:
        rollout = self.collector.collect(learned)
        return rollout._replace(behavior_logp=self.population.learner.log_prob(rollout))


def formats_of(bits: str) -> str:
    """The `formats` of a config whose acting policy has so many bits of mantissa."""
    return "" if bits == "float32" else f"acting=e8m{bits}"


def mismatch(population: Population) -> tuple[np.ndarray, np.ndarray]:
    """How far the acting policies are from the learners, on a new rollout: for each agent the KL
    divergence of the acting policy from the learner in nats, by the mean of rho - 1 - log rho, and
    the effective sample size of the ratios rho as a share."""
    rollout = population.collector.collect(population.model)
    learner_logp = by_agent(
        rollout._replace(behavior_logp=population.learner.log_prob(rollout)), population.agents
    ).behavior_logp
    batch = by_agent(rollout, population.agents)
    log_ratio = (learner_logp - batch.behavior_logp).double()
    log_ratio = torch.where(batch.valid, log_ratio, 0)
    ratio = log_ratio.exp() * batch.valid
    rows = batch.valid.sum((0, 2))
    divergence = (log_ratio.expm1() - log_ratio).sum((0, 2)) / rows
    sample_size = ratio.sum((0, 2)).square() / (rows * ratio.square().sum((0, 2)))
    return divergence.numpy(), sample_size.numpy()


def trained(
    task: str, bits: str, ratios: str, seeds: list[int], steps: int | None = None
) -> list[Result]:
    """The agents of a population after training, for so many steps instead of the task's."""
    torch.set_num_threads(1)
    fields = {"env_id": task, "eval_every": 0, "formats": formats_of(bits), **TASKS[task]}
    fields |= RATIOS[ratios]
    if steps:
        fields["steps"] = steps
    population = build_population([Config(seed=seed, **fields) for seed in seeds])
    if ratios == "wrong":
        population.collector = Mistaken(population.collector, population)
    train(population, progress=False)
    if ratios == "wrong":
        population.collector = population.collector.collector
    divergences, sample_sizes = mismatch(population)
    results = []
    for agent, history in enumerate(population.history.of_agents):
        last = slice(-max(1, len(history) // 4), None)
        results.append(
            Result(
                task,
                bits,
                ratios,
                seeds[agent],
                score(task, history.final_return),
                divergences[agent],
                sample_sizes[agent],
                history.column("ess")[last].mean(),
                history.column("clip_fraction")[last].mean(),
            )
        )
    return results


def read(path: Path) -> list[Result]:
    """The results in a .csv; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Result(*row[:3], int(row[3]), *map(float, row[4:]))
            for row in itertools.islice(csv.reader(file), 1, None)
        ]


def write(path: Path, results: list[Result]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Result._fields)
        writer.writerows(results)


def column(results: list[Result], cell: Cell, name: str) -> np.ndarray:
    """A number of each agent of a cell, in the order of seeds."""
    agents = [result for result in results if result[:3] == cell]
    return np.array([getattr(agent, name) for agent in sorted(agents, key=lambda x: x.seed)])


def with_quartiles(scores: np.ndarray) -> str:
    if not len(scores):
        return ""
    low, middle, high = np.percentile(scores, [25, 50, 75])
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


def with_interval(difference: np.ndarray) -> str:
    low, high = bootstrap_interval(difference)
    return f"{iqm(difference):+.1f} [{low:+.1f}, {high:+.1f}]"


def horizon(sample_size: np.ndarray) -> str:
    """The median of H = ln 0.9 / ln p, in steps."""
    log_p = np.minimum(np.log(sample_size), -1e-12)  # where both policies are the same, it is 0
    steps = np.median(TENTH_LOST / log_p)
    return f"{steps:,.1f}" if steps < 1e6 else "over a million"


def row_of(results: list[Result], task: str, bits: str) -> str:
    """A line of the table."""

    def values(ratios: str, name: str) -> np.ndarray:
        return column(results, Cell(task, bits, ratios), name)

    divergence = np.median(values("learner", "divergence"))
    clipped = [f"{np.median(values(x, 'clipped_share')):.3f}" for x in ("actor", "learner")]
    difference = values("learner", "score") - values("actor", "score")
    cells = [
        task,
        bits,
        f"{divergence:.1e}",
        horizon(values("learner", "sample_size")),
        f"{np.median(values('learner', 'replayed_sample_size')):.3f}",
        ", ".join(clipped),
        *(with_quartiles(values(ratios, "score")) for ratios in RATIOS),
        with_interval(difference),
    ]
    return f"| {' | '.join(cells)} |"


def table(results: list[Result]) -> list[str]:
    """The table, with a line for each task and acting policy that has both clips."""
    heads = "task | bits of the acting policy | divergence, nats | horizon, steps | sample size "
    heads += (
        "| clipped: actor, learner | actor | learner | wrong | none | learner minus actor [95%]"
    )
    lines = [f"| {heads} |", "| --- " * 11 + "|"]
    there = {result[:3] for result in results}
    for task, bits in itertools.product(TASKS, BITS):
        if {(task, bits, "actor"), (task, bits, "learner")} <= there:
            lines.append(row_of(results, task, bits))
    return lines


def short(whole: str) -> str:
    """The columns of the table that compare the two clips."""
    columns = {
        "task": "task",
        "bits of the acting policy": "bits of the acting policy",
        "horizon, steps": "horizon, steps",
        "actor": "score, clip by the actor",
        "learner": "score, clip by the learner",
        "learner minus actor [95%]": "learner minus actor [95%]",
    }
    return f"{short_tables.chosen(whole, columns)}\n\n{short_tables.last_line(whole)}\n"


def cells(bits: Iterable[str], ratios: Iterable[str]) -> list[Cell]:
    """What is trained: without ratios only some acting policies."""
    return [
        Cell(*names)
        for names in itertools.product(TASKS, bits, ratios)
        if names[2] != "none" or names[1] in WITHOUT_RATIOS
    ]


def work(arguments: tuple) -> list[Result]:
    return trained(*arguments)


def main(options: argparse.Namespace) -> None:
    numbers = options.out.with_suffix(".csv")
    results = [] if options.again else read(numbers)
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    there = {cell for cell in cells(BITS, RATIOS) if list(column(results, cell, "seed")) == seeds}
    results = [result for result in results if result[:3] in there]
    missing = [cell for cell in cells(options.bits, options.ratios) if cell not in there]
    tasks = [(*cell, seeds, options.steps) for cell in missing]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for agents in pool.imap_unordered(work, tasks):
            results += agents
            write(numbers, sorted(results))
            print(*agents[0][:3], with_quartiles(np.array([x.score for x in agents])), flush=True)
        pool.close()
        pool.join()  # or a process would be killed as it ends, and leave a semaphore behind
    made = f"`python benchmarks/mismatch.py {options.out}` on {origin()}."
    whole = "\n".join([*table(results), "", made, ""])
    options.out.write_text(whole)
    options.out.with_stem(f"{options.out.stem}_short").write_text(short(whole))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--again", action="store_true", help="begin with an empty .csv")
    parser.add_argument("--bits", nargs="+", default=BITS, choices=BITS)
    parser.add_argument("--ratios", nargs="+", default=list(RATIOS), choices=RATIOS)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, help="for a try; None is the task's")
    parser.add_argument("--processes", type=int, default=cores())
    main(parser.parse_args())
