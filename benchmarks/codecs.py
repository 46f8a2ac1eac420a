"""Does an agent learn as well from observations that its replay ring has rounded?

Thirty seeds each, differences seed by seed. First the defaults, one update on the fresh rollout
(exact), one on replayed slices, with each codec; one arm has everything in FP8, learner, actor and
stored observations. Since the fresh update could make up for a spoiled ring, the second group
learns from the ring alone. There int8 is made coarser too, by bounds wider than the space's: 16
times, steps of 0.5 in position, to see what is tolerated; and 128 times, where all observations
within 2 of the origin are stored as 0: the control, which must fail. A seed fails if it loses more
than a tenth of float32's gain, which is float32's final return on this seed minus the median return
before training (fp8rl/study/statistics.py).

    python benchmarks/codecs.py benchmarks/results/codecs
"""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.machine.hardware import origin
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
    found = dict(parallel.run_all(configs))
    return float(np.median([found[config].final_return for config in configs]))


def failures(final: dict[str, np.ndarray], start: float) -> str:
    """What stands below a group's table: the seeds that fail, with their returns, and whether the
    control fails as it must. `final` has the returns [seeds] by arm, float32's first; `start` is
    the return before training."""
    plain, lines, told = next(iter(final.values())), [], ""
    for name, returns in final.items():
        failed = [fails(x, reference, start) for x, reference in zip(returns, plain, strict=True)]
        ends = [f"{seed} at {x:.2f}" for seed, x in zip(SEEDS, returns, strict=True)]
        bad, good = (
            [end for end, fail in zip(ends, failed, strict=True) if fail is wanted]
            for wanted in (True, False)
        )
        if len(bad) > len(SEEDS) / 2:
            rest = f" but {', '.join(good)}; the others end" if good else ", which end"
            lines.append(
                f"{name}: all{rest} at {returns[failed].min():.2f} to {returns[failed].max():.2f}"
            )
        elif bad:
            lines.append(f"{name}: {', '.join(bad)}")
        if name == CONTROL:
            answer = "it does" if fails(returns, plain, start) else "it does not"
            told = (
                " The control is expected to fail in the median over its seeds, "
                f"and {answer}: {len(bad)} of {len(SEEDS)} fail."
            )
    text = (
        "A seed fails if it loses more than a tenth of float32's gain, "
        "which is float32's return on this seed minus the "
    )
    text += (
        f"median return before training, {start:.2f}. Seeds that fail: "
        f"{'; '.join(lines) or 'none'}."
    )
    return text + told


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as every run has
    out.mkdir(parents=True, exist_ok=True)
    results, text, start = [], "", before_training()
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
        text += f"{group}:\n\n{comparison.table(found, list(arms))}\n"
        text += failures(comparison.scores(found, "final_return"), start) + "\n\n"
        figures.learning_curves(row[0], curves)
        row[0].set_title(
            f"{group.lower()}: interquartile mean, 10th to 90th percentile of {len(SEEDS)} seeds",
            fontsize=9,
        )
        figures.intervals(row[1], comparison.scores(found, "final_return"), "final greedy return")
        row[1].set_title("each seed, interquartile mean, 95% interval", fontsize=9)
    figure.savefig(out / "curves.png", dpi=120)
    (out / "results.csv").write_text(comparison.results_csv(results))
    text += f"`python benchmarks/codecs.py {out}` on {origin()}.\n"
    (out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
