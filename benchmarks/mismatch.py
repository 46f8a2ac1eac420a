"""What does it cost that the acting policy has fewer bits than the learner, and do importance
ratios make up for it?

Acting policies of 7 to 0 bits of mantissa (weights and inputs of all matmuls), a learner in
float32, 32 seeds from 1000 up. Each population trains in three ways: with the right ratios (divided
by the probability that the acting policy gave its action), with wrong ones (by the probability that
the learner's float32 policy would have given it, as if both were one), and with none. On the
linear-quadratic cart the score is minus the cost above the optimum in percent, on CartPole-v1 the
final return; both are medians with the quartiles. Divergence and effective sample size are of the
right ratios; the latter is of a rollout that the policy has just collected, and of replayed slices
in the last quarter of training.

    python benchmarks/mismatch.py benchmarks/results/mismatch.md
"""

import argparse
import multiprocessing
from pathlib import Path

import numpy as np
import torch
from breakage_map import SETTINGS
from tasks import LQR, score

from fp8rl.build import build_population
from fp8rl.config import Config
from fp8rl.distribution import distribution_of
from fp8rl.population.networks import Agents
from fp8rl.population.population import Population, by_agent
from fp8rl.rollout import Collector, Rollout
from fp8rl.study.throughput import origin
from fp8rl.train import train

SEEDS = 32
TASKS = {LQR: {**SETTINGS, "steps": 51_200, "learning_rate": 2e-3}}
TASKS |= {"CartPole-v1": {**SETTINGS, "steps": 102_400, "learning_rate": 1e-3}}
ACTORS = {
    "float32": "",
    **{
        f"{bits} bit{'s' * (bits != 1)} of mantissa": f"acting=e8m{bits}"
        for bits in (7, 3, 2, 1, 0)
    },
}
RATIOS = ("right", "wrong", "none")


class Mistaken:
    """A population's collector that takes the learner's probabilities of the actions for those of
    the acting policy. All else is the collector's own."""

    def __init__(self, collector: Collector):
        self.collector = collector

    def __getattr__(self, name: str):
        return getattr(self.collector, name)

    def collect(self, learned: Agents) -> Rollout:
        rollout = self.collector.collect(learned)
        batch = by_agent(rollout, len(self.collector.seed))
        return rollout._replace(behavior_logp=learner_logp(learned, batch).flatten(1))


@torch.no_grad()
def learner_logp(learned: Agents, batch: Rollout) -> torch.Tensor:
    """Log-probabilities of actions, [T, S, N], under the learner's policies, float32."""
    return distribution_of(batch.action)(learned(batch.obs)[0][:-1]).log_prob(batch.action)


def mismatch(run: Population) -> tuple[float, float]:
    """Divergence KL(acting policy || learner) in nats, by the mean of rho - 1 - log rho, which is
    never negative, and the effective sample size of the ratios rho, on a new rollout: medians over
    the agents."""
    batch = by_agent(run.collect(), run.agents)
    valid, log_ratio = batch.valid, (learner_logp(run.model, batch) - batch.behavior_logp).double()
    log_ratio = torch.where(valid, log_ratio, 0)
    ratio, rows = log_ratio.exp() * valid, valid.sum((0, 2))
    divergence = (valid * (log_ratio.exp() - 1 - log_ratio)).sum((0, 2)) / rows
    return divergence.median().item(), (
        ratio.sum((0, 2)).square() / (rows * ratio.square().sum((0, 2)))
    ).median().item()


def trained(task: str, formats: str, ratios: str) -> tuple[np.ndarray, float, float, float]:
    """Scores [SEEDS], divergence, and effective sample sizes of a new rollout and of replayed
    slices."""
    torch.set_num_threads(1)
    corrects = ratios != "none"
    shape = {
        "env_id": task,
        "eval_every": 0,
        "formats": formats,
        "importance_correction": corrects,
        **TASKS[task],
    }
    shape["clip"] = Config.clip if corrects else None  # which needs the ratios, too
    run = build_population([Config(seed=1000 + seed, **shape) for seed in range(SEEDS)])
    if ratios == "wrong":
        run.collector = Mistaken(run.collector)
    train(run, progress=False)
    histories = run.history.of_agents
    replayed = np.median(
        [np.mean(history.columns["ess"][-len(history) // 4 :]) for history in histories]
    )
    return (
        np.array([score(task, history.final_return) for history in histories]),
        *mismatch(run),
        float(replayed),
    )


def main(out: Path) -> None:
    lines = [
        "| task | acting policy | divergence, nats | sample size, "
        "new | replayed | right ratios | wrong ratios | no ratios |"
    ]
    lines.append("| --- " * 8 + "|")
    arms = [
        (task, formats, ratios)
        for task in TASKS
        for formats in ACTORS.values()
        for ratios in RATIOS
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        found = dict(zip(arms, pool.starmap(trained, arms, chunksize=1), strict=True))
    for task in TASKS:
        for name, formats in ACTORS.items():
            _, divergence, new, replayed = found[task, formats, "right"]
            quartiles = [
                np.percentile(found[task, formats, ratios][0], [50, 25, 75]) for ratios in RATIOS
            ]
            scores = " | ".join(
                f"{middle:.1f} [{low:.1f}, {high:.1f}]" for middle, low, high in quartiles
            )
            lines.append(
                f"| {task} | {name} | {divergence:.1e} | {new:.4f} | {replayed:.3f} | {scores} |"
            )
    out.write_text("\n".join(lines) + f"\n\n`python benchmarks/mismatch.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
