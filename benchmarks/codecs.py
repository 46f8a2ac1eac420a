"""Does an agent learn as well from observations that its replay ring has rounded?

Thirty seeds each, differences seed by seed. First the defaults, one update on the fresh rollout (exact), one on replayed slices,
with each codec of the compact layout and with a delta layout; one arm has everything in FP8, learner, actor and stored
observations. Since the fresh update could make up for a spoiled ring, the second group learns from the ring alone. There int8 is
made coarser too, by bounds wider than the space's: 16 times, steps of 0.5 in position, to see what is tolerated; and 128 times,
where all observations within 2 of the origin are stored as 0: the control, which must fail.

    python benchmarks/codecs.py benchmarks/results/codecs
"""

import functools
import sys
import unittest.mock
from pathlib import Path

from fp8rl import config, plot, study
from fp8rl.config import Config
from fp8rl.train import History

SEEDS = range(30)
GROUPS = {
    "Fresh and replayed": {
        "fp32": {},
        "fp16": {"codec": "fp16"},
        "bf16": {"codec": "bf16"},
        "int8": {"codec": "int8"},
        "fp8": {"codec": "fp8"},
        "int8, delta": {"layout": "delta", "codec": "int8"},
        "fp8, learner and actor too": {"codec": "fp8", "precision": "fp8"},
    },
    "From the ring alone": {
        "fp32, ring alone": {"fresh_updates": 0},
        "int8, ring alone": {"fresh_updates": 0, "codec": "int8"},
        "fp8, ring alone": {"fresh_updates": 0, "codec": "fp8"},
        "int8, 16 times coarser": {"fresh_updates": 0, "codec": "int8"},
        "control: int8, 128 times coarser": {"fresh_updates": 0, "codec": "int8"},
    },
}
COARSER = {"int8, 16 times coarser": 16, "control: int8, 128 times coarser": 128}


def run_coarser(factor: int, run: Config) -> History:
    """Trains with a codec whose bounds are `factor` times the observation space's."""

    def wide(bounds=config.obs_high, **observed):
        return tuple(factor * bound for bound in bounds(**observed))

    with unittest.mock.patch.object(config, "obs_high", wide):
        return study.run(run)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results, text = [], ""
    figure = plot.Figure(figsize=(11, 7), layout="constrained")
    for row, (group, arms) in zip(figure.subplots(2, 2), GROUPS.items(), strict=True):
        curves, found = {}, []
        for arm, fields in arms.items():
            configs = [Config(seed=seed, **fields) for seed in SEEDS]
            run = functools.partial(run_coarser, COARSER[arm]) if arm in COARSER else study.run
            histories = list(study.run_all(configs, run=run))
            found += [study.summarize(history, arm) for history in histories]
            curves[arm] = study.stack(histories, "eval_return")
        results += found
        text += f"{group}:\n\n{study.table(found, list(arms))}\n"
        plot.learning_curves(row[0], curves)
        row[0].set_title(f"{group.lower()}: interquartile mean and range of {len(SEEDS)} seeds", fontsize=9)
        plot.intervals(row[1], study.scores(found, "final_return"), "final greedy return, of 200")
        row[1].set_title("each seed, interquartile mean, 95% interval", fontsize=9)
    figure.savefig(out / "curves.png", dpi=120)
    study.write_results(out / "results.csv", results)
    text += f"`python benchmarks/codecs.py {out}` on {study.hardware()}.\n"
    (out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
