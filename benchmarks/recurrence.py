"""What a memory is worth where the velocity is hidden.

Six seeds of 100,000 steps each, with the defaults: a memoryless policy that sees the velocity, one
that does not, and a GRU that does not, in fp32 and in FP8. Mean greedy returns of 100 episodes that
start within 0.05 of the origin (the usual evaluation: there even pushing against the position alone
keeps the cart close), within 0.5 (where training starts) and within 1.0 (where it never was).

    python benchmarks/recurrence.py benchmarks/results/recurrence.md
"""

import sys
from pathlib import Path

import numpy as np
import torch

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.env import Cart
from fp8rl.evaluate import evaluate
from fp8rl.study import comparison, parallel
from fp8rl.study.throughput import origin
from fp8rl.train import train

SEEDS = range(5000, 5006)
STARTS = (0.05, 0.5, 1.0)
ARMS = {
    "velocity seen, mlp": {},
    "velocity hidden, mlp": {"hide_velocity": True},
    "velocity hidden, gru": {"hide_velocity": True, "encoder": "gru"},
    "velocity hidden, gru, fp8": {"hide_velocity": True, "encoder": "gru", "precision": "fp8"},
}


def run(config: Config) -> list[float]:
    """Trains and gives the mean return from each range of starts."""
    trained, returns = train(build(config), progress=False), []
    for start in STARTS:
        env = Cart(100, start, hide_velocity=config.hide_velocity, purpose="evaluation starts")
        returns.append(float(evaluate(trained.model, env, trained.learner.precision).mean()))
    return returns


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    heads = [
        f"{name} from within {start:g}"
        for start in STARTS
        for name in ("return, IQM [95%],", "lowest seed")
    ]
    lines = [f"| arm | {' | '.join(heads)} |", "| --- " * (1 + len(heads)) + "|"]
    for arm, fields in ARMS.items():
        configs = [Config(seed=seed, eval_every=0, **fields) for seed in SEEDS]
        finished = dict(parallel.run_all(configs, run=run))
        returns = np.array([finished[config] for config in configs])
        cells = [
            cell
            for column in returns.T
            for cell in (comparison.with_interval(column), f"{column.min():.2f}")
        ]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    out.write_text(
        "\n".join(lines) + f"\n\n`python benchmarks/recurrence.py {out}` on {origin()}.\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
