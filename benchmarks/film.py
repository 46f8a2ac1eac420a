"""What training does, for the first screen of the README: a film of an agent in FP8 before and after it, and how the return of
training episodes grows in each precision.

Both agents of the film sample their actions, as in training, and begin at the same place. The curves are of the study's first ten
seeds with the defaults: the mean over seeds of episodes that ended in an iteration, and over three iterations. These episodes
begin up to 0.5 from the origin and sample their actions, so their returns are below those of evaluations.

    python benchmarks/film.py benchmarks/results
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from fp8rl.config import Config
from fp8rl.report import plot, study
from fp8rl.train import Run, train

SEEDS = range(5000, 5010)


def sampled(model: nn.Module) -> Callable:
    """A network's policy, with actions drawn from seed 0."""
    generator = torch.Generator().manual_seed(0)

    def policy(state: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits, _ = model(state.unsqueeze(0))
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    return policy


def film() -> bytes:
    run = Run(Config("fp8"))
    policies = {"before training": sampled(copy.deepcopy(run.model))}
    train(run, progress=False)
    policies[f"after {run.config.steps:,} steps"] = sampled(run.model)
    return plot.film(policies, start=(1.0, 0.0))


def draw(curves: dict, path: Path) -> None:
    figure = Figure(figsize=(5, 5), layout="constrained")
    ax = figure.add_subplot()
    plot.series(ax, curves, "return of a training episode, at most 200", window=3).set(xlim=(0, Config.steps), ylim=(0, 205))
    ax.set_title(f"four precisions learn alike: mean of {len(SEEDS)} seeds", fontsize=11)
    plot.end_labels(ax, size=11)
    figure.savefig(path, dpi=160)


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    (out / "film.gif").write_bytes(film())
    configs = {name: [Config(name, seed=seed, eval_every=0) for seed in SEEDS] for name in plot.PRECISIONS}
    found = dict(study.run_all([config for arm in configs.values() for config in arm]))
    curves = {name: study.stack([found[config] for config in arm], "train_return") for name, arm in configs.items()}
    draw(curves, out / "curves.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
