"""Why does the published loop fail (Config.published), and which setting mends it?

Three tables of the cart, thirty seeds a line: the published loop with one setting of ours; with one
more on every line, up to our loop; and ours with one setting of the published loop. All have the
same budget: as many environment steps, and an update for each 128 of them, which for ours are 16 an
iteration instead of the default 17. A batch is 64 transitions or, where a line says so, 1,024, so
samples are not the same. The steps of an update and of an evaluation are, so all are evaluated at
the same moments.

    python benchmarks/published.py benchmarks/results/published.md
"""

import sys
from pathlib import Path

import numpy as np
import tasks
import torch

from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.study import comparison, parallel

SEEDS = range(9000, 9030)  # the settings of the arms were tried on 100 to 115
BUDGET = {"steps": 40_960, "eval_every": 2_048}
LEVEL = 100  # half of what an episode can return
# 16 times the steps an iteration, and the updates
MANY = {
    "num_envs": 16,
    "start_noise": 0.5,
    "replay_updates": 16,
}
RATIO = {"importance_correction": True}
CLIP = {"clip": Config.clip}
ONE = {
    "+ importance ratio": RATIO,
    "+ PPO's clip": CLIP,
    "+ bootstrap at time limits": {"bootstrap_truncation": True},
    "+ scaled rewards, normalized advantages": {"scale_rewards": True, "normalize_advantage": True},
    "+ entropy bonus": {"entropy_coef": None},
    "+ learning rate falls to 0": {"anneal": True},
    "+ 16 environments, spread starts": MANY,
    "+ batches of 1,024": {"batch_size": 1_024},
    "+ a ring of 20,000, discount 0.98": {"capacity": 20_000, "gamma": None},
    "+ slices of 16 steps": {"slice_length": 16},
}
ALONE = ONE | {
    "+ importance ratio and clip": RATIO | CLIP,
    "+ slices of 4 steps": {"slice_length": 4},
    "+ slices of 16 steps, lambda 0": {"slice_length": 16, "lam": 0},
    "+ updates on the new rollout alone": {"fresh_updates": 1, "replay_updates": 0},
}
LADDER = ONE | {
    "+ slices of 128 steps": {"slice_length": 128},
    "+ one update in 16 on the new rollout, which makes it ours": {
        "fresh_updates": 1,
        "replay_updates": 15,
        "learning_rate": None,  # the same number, now from the width
    },
}
NO_RATIO = {"importance_correction": False}
NO_CLIP = {"clip": None}
SINGLE = {"slice_length": 1}
BACK = {
    "- importance ratio": NO_RATIO,
    "- PPO's clip": NO_CLIP,
    "- importance ratio and clip": NO_RATIO | NO_CLIP,
    "- bootstrap at time limits": {"bootstrap_truncation": False},
    "- scaled rewards, normalized advantages": {
        "scale_rewards": False,
        "normalize_advantage": False,
    },
    "- entropy bonus": {"entropy_coef": 0},
    "- falling learning rate": {"anneal": False},
    "- slices: single transitions": SINGLE,
    "- slices: single transitions, and no importance ratio": SINGLE | NO_RATIO,
    "- slices: single transitions, and no clip": SINGLE | NO_CLIP,
    "- slices: single transitions, no importance ratio and no clip": SINGLE | NO_RATIO | NO_CLIP,
}
COLUMNS = (
    "settings",
    "seeds that reach 100",
    "fall below 100 later",
    "end below 100",
    "median final return",
    "lowest",
)


def arms() -> dict[str, dict[str, list[Config]]]:
    """Each table's lines: name -> a config for each seed."""

    def published(**changes) -> list[Config]:
        return [Config.published(seed=seed, **BUDGET, **changes) for seed in SEEDS]

    ladder, settings = {}, {}
    for name, changes in LADDER.items():
        settings = settings | changes
        ladder[name] = published(**settings)
    first = {"the published loop": published()}
    alone = first | {name: published(**changes) for name, changes in ALONE.items()}
    back = {"our loop": published(**settings)} | {
        name: published(**settings | changes) for name, changes in BACK.items()
    }
    heads = (
        "The published loop with one change:",
        "With one more on every line:",
        "Our loop with one change:",
    )
    return dict(zip(heads, (alone, first | ladder, back), strict=True))


def line(name: str, returns: np.ndarray) -> str:
    """A line of a table, of returns [seeds, evaluations]."""
    good, last = returns >= LEVEL, returns[:, -1]
    reached = good.any(axis=1)
    lost = (np.maximum.accumulate(good, axis=1) & ~good).any(axis=1)
    counts = (f"{sum(found)} of {len(returns)}" for found in (reached, lost, ~good[:, -1]))
    return f"| {' | '.join([name, *counts, f'{np.median(last):.1f}', f'{last.min():.1f}'])} |"


def main(out: Path) -> None:
    torch.set_num_threads(1)  # as the processes have, for the line under the tables
    tables, text = arms(), ""
    configs = dict.fromkeys(
        config for lines in tables.values() for arm in lines.values() for config in arm
    )
    found = dict(parallel.run_all(list(configs)))
    for head, lines in tables.items():
        returns = {
            name: comparison.stack([found[config] for config in arm], "eval_return")[1]
            for name, arm in lines.items()
        }
        text += f"{head}\n\n{tasks.table(COLUMNS, [line(name, each) for name, each in returns.items()])}\n"
    out.write_text(f"{text}`python benchmarks/published.py {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
