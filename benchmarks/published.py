"""Why does the published loop fail (Config.published), and which setting mends it?

Three tables of the cart, thirty seeds a line: the published loop with one setting of ours; with one
more on every line, up to our loop; and ours with one setting of the published loop. All have the
same budget: as many environment steps, and an update for each 128 of them, which for ours are 16 an
iteration instead of the default 17. A batch is 64 transitions or, where a line says so, 1,024, so
samples are not the same. The steps of an update and of an evaluation are, so all are evaluated at
the same moments.

Two further tables ask why slices alone mend the published loop, but not the main notebook's
(lesson.py): both loops replay slices of 16 steps without any correction, and each is given the
settings of the other, one at a time and all together. Their seeds are fresh ones. Here a fall is
counted in the notebook's way, too: how far the return of training episodes, a mean over 4,096
steps, drops below its best so far.

    python benchmarks/published.py changes benchmarks/results/published.md
    python benchmarks/published.py between benchmarks/results/between_loops.md
"""

import sys
from pathlib import Path

import numpy as np
import tasks
import torch

from fp8rl.config import Config
from fp8rl.machine.hardware import origin
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
BRIDGE_SEEDS = range(11_000, 11_030)
NOTEBOOK_SLICES = {  # the arm "slices" of lesson.py, as the package's settings
    "num_envs": 16,
    "start_noise": 0.5,
    "rollout_length": 16,
    "capacity": 20_000,
    "slice_length": 16,
    "batch_size": 1_024,
    "fresh_updates": 0,
    "replay_updates": 4,
    "gamma": 0.98,
    "lam": 0.95,
    "importance_correction": False,
    "bootstrap_truncation": True,
    "normalize_advantage": True,
    "clip": None,
    "scale_rewards": True,
    "entropy_coef": 0.01,
    "learning_rate": 1e-3,
    "anneal": False,
}
# What differs between the two loops: name -> the notebook's setting, the published loop's
DIFFERENCES = {
    "environments": (
        {"num_envs": 16, "start_noise": 0.5, "rollout_length": 16},
        {"num_envs": 1, "start_noise": 0.0, "rollout_length": 256},
    ),
    "rows in a batch": ({"batch_size": 1_024}, {"batch_size": 64}),
    "updates in 256 steps": ({"replay_updates": 4}, {"replay_updates": 2}),
    "size of the ring": ({"capacity": 20_000}, {"capacity": 10_000}),
    "discount and lambda": ({"gamma": 0.98, "lam": 0.95}, {"gamma": 0.99, "lam": 0.98}),
    "bootstrap at time limits": (
        {"bootstrap_truncation": True},
        {"bootstrap_truncation": False},
    ),
    "scaled rewards": ({"scale_rewards": True}, {"scale_rewards": False}),
    "normalized advantages": ({"normalize_advantage": True}, {"normalize_advantage": False}),
    "entropy bonus": ({"entropy_coef": 0.01}, {"entropy_coef": 0}),
}
BRIDGE_COLUMNS = (
    "settings",
    "median fall of the training return",
    "fall by more than 60",
    "greedy: fall below 100 later",
    "greedy: end below 100",
)
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


def bridges() -> dict[str, dict[str, list[Config]]]:
    """The tables between the two loops: name -> a config for each seed."""
    all_published = {}
    for _, theirs in DIFFERENCES.values():
        all_published = all_published | theirs
    from_notebook = {"the notebook's slices": {}}
    from_published = {"the published loop with slices": all_published}
    for name, (ours, theirs) in DIFFERENCES.items():
        from_notebook[f"{name} of the published loop"] = theirs
        from_published[f"{name} of the notebook"] = all_published | ours
    heads = {
        "The notebook's slices without correction, with one setting of the published loop:": (
            from_notebook
        ),
        "The published loop with slices, with one setting of the notebook:": from_published,
    }
    return {
        head: {
            name: [
                Config(seed=seed, **BUDGET, **(NOTEBOOK_SLICES | changes)) for seed in BRIDGE_SEEDS
            ]
            for name, changes in lines.items()
        }
        for head, lines in heads.items()
    }


def falls_of(histories: list) -> np.ndarray:
    """How far each seed's training return, a mean over 4,096 steps, falls below its best."""
    steps = histories[0].column("steps")
    # Not a number where no episode ended in an iteration
    returns = np.array([history.column("train_return") for history in histories])
    width = round(4_096 / (steps[1] - steps[0]))
    windows = np.lib.stride_tricks.sliding_window_view(returns, width, axis=1)
    smooth = np.nanmean(windows, axis=-1)  # [seeds, iterations]
    return (np.fmax.accumulate(smooth, axis=1) - smooth).max(axis=1)


def bridge_line(name: str, histories: list) -> str:
    """A line of a table between the two loops."""
    falls = falls_of(histories)
    good = comparison.stack(histories, "eval_return")[1] >= LEVEL
    lost = (np.maximum.accumulate(good, axis=1) & ~good).any(axis=1)
    counts = [f"{sum(found)} of {len(falls)}" for found in (falls > 60, lost, ~good[:, -1])]
    return f"| {' | '.join([name, f'{np.median(falls):.0f}', *counts])} |"


def line(name: str, returns: np.ndarray) -> str:
    """A line of a table, of returns [seeds, evaluations]."""
    good, last = returns >= LEVEL, returns[:, -1]
    reached = good.any(axis=1)
    lost = (np.maximum.accumulate(good, axis=1) & ~good).any(axis=1)
    counts = (f"{sum(found)} of {len(returns)}" for found in (reached, lost, ~good[:, -1]))
    return f"| {' | '.join([name, *counts, f'{np.median(last):.1f}', f'{last.min():.1f}'])} |"


def main(action: str, out: Path) -> None:
    torch.set_num_threads(1)  # as the processes have, for the line under the tables
    tables = arms() if action == "changes" else bridges()
    columns = COLUMNS if action == "changes" else BRIDGE_COLUMNS
    configs = dict.fromkeys(
        config for lines in tables.values() for arm in lines.values() for config in arm
    )
    found = dict(parallel.run_all(list(configs)))
    text = ""
    for head, lines in tables.items():
        rows = []
        for name, arm in lines.items():
            histories = [found[config] for config in arm]
            if action == "changes":
                rows.append(line(name, comparison.stack(histories, "eval_return")[1]))
            else:
                rows.append(bridge_line(name, histories))
        text += f"{head}\n\n{tasks.table(columns, rows)}\n"
    out.write_text(f"{text}`python benchmarks/published.py {action} {out}` on {origin()}.\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
