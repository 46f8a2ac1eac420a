"""What does rounding the stored observations of a replay buffer change?

    python benchmarks/replay.py benchmarks/results/codecs/table.md

Thirty seeds each, differences seed by seed. First the defaults, one update on the fresh
rollout (exact), one on replayed slices, with each codec; one arm has everything in FP8, learner,
actor and stored observations. Since the fresh update could make up for a spoiled ring, the second
group learns from the ring alone. There int8 is made coarser too, by bounds wider than the space's: 16
times, steps of 0.5 in position, to see what is tolerated; and 128 times, where all observations
within 2 of the origin are stored as 0: the control, which must fail. A seed fails if it loses more
than a tenth of float32's gain, which is float32's final return on this seed minus the median return
before training (fp8rl/study/statistics.py).
"""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from results import write_tables

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.study import comparison, figures, parallel
from fp8rl.study.statistics import fails
from fp8rl.train import train

SEEDS = range(5000, 5030)
CONTROL = "control: int8, 128 times coarser"
GROUPS = {
    "Fresh and replayed": {
        "fp32": {},
        "fp16": {"codec": "fp16"},
        "bf16": {"codec": "bf16"},
        "int8": {"codec": "int8"},
        "fp8": {"codec": "fp8"},
        "fp8, learner and actor too": {"codec": "fp8", "precision": "fp8"},
    },
    "From the ring alone": {
        "fp32, ring alone": {"fresh_updates": 0},
        "int8, ring alone": {"fresh_updates": 0, "codec": "int8"},
        "fp8, ring alone": {"fresh_updates": 0, "codec": "fp8"},
        "int8, 16 times coarser": {"fresh_updates": 0, "codec": "int8"},
        CONTROL: {"fresh_updates": 0, "codec": "int8"},
    },
}
COARSER = {"int8, 16 times coarser": 16, CONTROL: 128}


def run_coarser(factor: int, config: Config) -> History:
    """Trains with a codec whose bounds are `factor` times the observation space's."""
    run = build(config)
    wider = tuple(tuple(factor * x for x in bound) for bound in run.env.bounds)
    run.ring = ReplayBuffer(config.rows, config.num_envs, wider, config.codec)
    return train(run, progress=False).history


def before_training() -> float:
    """The median return of agents that have learned nothing."""
    configs = [Config(seed=seed, steps=2_048, learning_rate=1e-12, eval_every=0) for seed in SEEDS]
    return float(np.median([history.final_return for _, history in parallel.run_all(configs)]))


def failures(final: dict[str, np.ndarray], start: float) -> str:
    """How many seeds of each arm fail. `final` has the returns [seeds] by arm, float32's first;
    `start` is the return before training."""
    exact = next(iter(final.values()))
    bad = []
    for name, returns in final.items():
        count = sum(fails(x, reference, start) for x, reference in zip(returns, exact, strict=True))
        if count:
            bad.append(f"{name}: {count} of {len(SEEDS)}")
    return (
        "A seed fails if it loses more than a tenth of float32's gain, which is float32's return on "
        f"this seed minus the median return before training, {start:.2f}. Seeds that fail: "
        f"{'; '.join(bad) or 'none'}."
    )


def codecs(out: Path) -> None:
    results, parts, start = [], [], before_training()
    figure = Figure(figsize=(11, 7), layout="constrained")
    for row, (group, arms) in zip(figure.subplots(2, 2), GROUPS.items(), strict=True):
        curves, found = {}, []
        for arm, fields in arms.items():
            configs = [Config(seed=seed, **fields) for seed in SEEDS]
            run = functools.partial(run_coarser, COARSER[arm]) if arm in COARSER else None
            finished = list(parallel.run_all(configs, run=run))
            found += [comparison.summarize(config, history, arm) for config, history in finished]
            curves[arm] = comparison.stack([history for _, history in finished], "eval_return")
        results += found
        final = comparison.scores(found, "final_return")
        table = comparison.table(found, list(arms)).strip()
        parts += [f"{group}:", table, failures(final, start)]
        figures.learning_curves(row[0], curves)
        what = f"interquartile mean, 10th to 90th percentile of {len(SEEDS)} seeds"
        row[0].set_title(f"{group.lower()}: {what}", fontsize=9)
        figures.intervals(row[1], final, "final greedy return")
        row[1].set_title("each seed, interquartile mean, 95% interval", fontsize=9)
    figure.savefig(out.with_name("curves.png"), dpi=120)
    out.with_name("results.csv").write_text(comparison.results_csv(results))
    write_tables(out, *parts)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as every run has
    codecs(Path(sys.argv[1]))
