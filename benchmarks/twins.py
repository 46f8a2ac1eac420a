"""Does an agent learn the same in a population as alone? A hundred seeds of every precision, together and one by one, in pairs.

python benchmarks/twins.py benchmarks/results/twins.md
"""

import sys
from pathlib import Path

import numpy as np
import torch

from fp8rl.config import Config
from fp8rl.report import study
from fp8rl.report.bench import origin
from fp8rl.report.statistics import bootstrap_interval

SEEDS, MARGIN = range(1000, 1100), 0.5


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    lines = ["| precision | together, IQM [95%] | one by one | together minus one by one | within ±0.5 | equal to 0.01 |"]
    lines.append("| --- " * 6 + "|")
    for precision in ("fp32", "bf16", "fp16", "fp8"):
        configs = [Config(precision, seed=seed, eval_every=0) for seed in SEEDS]
        together, alone = ({c.seed: h.final_return for c, h in study.run_all(configs, run=run)} for run in (None, study.run))
        together, alone = (np.array([returns[seed] for seed in SEEDS]) for returns in (together, alone))
        apart = together - alone
        verdict = "yes" if np.abs(bootstrap_interval(apart)).max() <= MARGIN else "no"
        cells = (study.with_interval(together), study.with_interval(alone), study.with_interval(apart, signed=True), verdict)
        lines.append(f"| {precision} | {' | '.join(cells)} | {(np.abs(apart) < 0.01).sum()} of {len(SEEDS)} |")
        print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + f"\n\n`python benchmarks/twins.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
