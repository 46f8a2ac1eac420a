"""Does an agent learn as well from observations that its replay ring has rounded?

Thirty seeds of the defaults with each codec of the compact layout, and with the delta layout; everything but the ring is fp32.
A last pair does it with everything in FP8: learner, actor and stored observations. Differences are taken seed by seed to exact
storage. A control shows what the comparison finds harmful: int8 over bounds 16 times too wide, so steps 16 times as large.

    python benchmarks/codecs.py benchmarks/results/codecs
"""

import sys
import unittest.mock
from pathlib import Path

from fp8rl import plot, study, train
from fp8rl.train import Config, History

SEEDS = range(30)
COARSE = "int8, steps 16 times as large"
ARMS = {
    "fp32": {},
    "fp16": {"codec": "fp16"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "fp8": {"codec": "fp8"},
    "fp32, delta": {"layout": "delta"},
    "int8, delta": {"layout": "delta", "codec": "int8"},
    "fp8, learner and actor too": {"codec": "fp8", "precision": "fp8"},
    COARSE: {"codec": "int8"},
}


def run_coarse(config: Config) -> History:
    """Trains with an int8 codec whose bounds are 16 times the observation space's."""

    def wide(**observed):
        return tuple(16 * bound for bound in bounds(**observed))

    bounds = train.obs_high
    with unittest.mock.patch.object(train, "obs_high", wide):
        return study.run(config)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results, curves = [], {}
    for arm, fields in ARMS.items():
        configs = [Config(seed=seed, **fields) for seed in SEEDS]
        histories = list(study.run_all(configs, run=run_coarse if arm == COARSE else study.run))
        results += [study.summarize(history, arm) for history in histories]
        curves[arm] = study.stack(histories, "eval_return")
    study.write_results(out / "results.csv", results)
    text = f"{study.table(results, list(ARMS))}\n`python benchmarks/codecs.py {out}` on {study.hardware()}.\n"
    (out / "table.md").write_text(text)
    figure = plot.Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot.learning_curves(left, curves)
    left.set_title(f"interquartile mean and range of {len(SEEDS)} seeds", fontsize=9)
    plot.intervals(right, study.scores(results, "final_return"), "final greedy return, of 200")
    right.set_xlim(study.THRESHOLD - 1, 200)
    right.set_title(f"each seed, interquartile mean, 95% interval, from {study.THRESHOLD - 1:g} up", fontsize=9)
    figure.savefig(out / "curves.png", dpi=120)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
