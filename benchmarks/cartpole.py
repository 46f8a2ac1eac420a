"""Does the same loop learn another environment, in every precision?

CartPole-v1 through Gymnasium, ten seeds of 500,000 steps in fp32, bf16 and fp8, at the config's defaults but for three: the push
that makes a pole fall comes hundreds of steps earlier, so the discount is 0.99 (values are of order 1 with rewards scaled by
0.01), and once every pole stands the normalized advantages are noise, so steps are half as large. Mean greedy returns of 100
episodes; the most is 500.

    python benchmarks/cartpole.py benchmarks/results/cartpole.md
"""

import sys
from pathlib import Path

import numpy as np
import torch

from fp8rl.config import Config
from fp8rl.report import study
from fp8rl.scale.hardware import hardware

SEEDS, THRESHOLD = range(1000, 1010), 475
FIELDS = {"env_id": "CartPole-v1"}
FIELDS |= {"steps": 500_000, "eval_every": 25_000}


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    arms = {name: [Config(precision=name, seed=seed, **FIELDS) for seed in SEEDS] for name in ("fp32", "bf16", "fp8")}
    ends = {name: [] for name in arms}
    configs = [config for seed in zip(*arms.values(), strict=True) for config in seed]
    for config, history in study.run_all(configs, run=study.run):  # Gymnasium's environments cannot be in a population
        ends[config.precision].append((history.final_return, history.first_step_at(THRESHOLD)))
    lines = [f"| precision | final return, IQM [95%] | lowest seed | seeds at {THRESHOLD} | first at {THRESHOLD}, median steps |"]
    lines.append("| --- " * 5 + "|")
    for name, pairs in ends.items():
        final, first = np.array(pairs).T
        at = f"{(final >= THRESHOLD).sum()} of {len(final)}"
        lines.append(f"| {name} | {study.with_interval(final)} | {final.min():.1f} | {at} | {study.median_of(first, ',.0f')} |")
    out.write_text("\n".join(lines) + f"\n\n`python benchmarks/cartpole.py {out}` on {hardware()}.\n")
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
