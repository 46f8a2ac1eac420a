"""Does one algorithm with one set of defaults learn every task, in every precision?

Trains the package's tasks with the config's defaults, on seeds that nobody had tuned on, in every
precision and with the state in eight bits (`train --eight-bit`): thirty seeds of the cart, thirty
of CartPole and of the linear-quadratic cart in float32 and in FP8, ten otherwise. They train as
tensors, in populations. Beside them stand ten seeds of Stable-Baselines3's A2C and PPO with the
settings of its zoo. All are evaluated in the same episodes, of the tasks as tensors.

Tasks that only Gymnasium has, with Box2D or MuJoCo, come last, one seed at a time: five in float32
and in FP8, ten of Hopper and HalfCheetah, whose seeds differ more. On HalfCheetah there are five
seeds of Stable-Baselines3's PPO, too. (On Hopper its PPO stood still with the zoo's settings, and
scored 986 from the first evaluation to the last, where the zoo reports 2,410 on another version of
the task. Nobody found out why, so it is no comparison and was left out.)

A further arm makes as many updates as the defaults do, all on the newest rollout: what does replay
add? It trained beside other work, so its seconds are left out.

Stable-Baselines3's seeds of the first five tasks are from 1000 up, or 2000 of the cart. They were
evaluated by an earlier version, in other episodes of the same kind. That flatters its percentages
of the linear-quadratic cart by about half a percent. There it has the settings of Pendulum, and on
the cart those of CartPole.

A seed's score is its last greedy evaluation, the mean of 100 episodes. On the linear-quadratic cart
the score is minus the cost above the optimum, in percent. "Held" counts seeds of CartPole whose
evaluations, every 10,000 steps, never fell below 400 again once one had reached 475. Both carts have
a paired interval against fp32 instead.

    python benchmarks/tasks.py benchmarks/results/tasks.md [--only CartPole-v1] [--arms fp32 fp8]

The evaluations of every finished seed go to a .csv beside the table, from which the table and a
.png of learning curves are made. So the benchmark can be stopped at any time, and goes on with the
seeds that are missing. A seed counts only as long as the settings of its arm are what they were.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from results import Journal, table_of, write_tables

from fp8rl.build import FIRST_EVALUATION_SEED, Machine, build
from fp8rl.config import EIGHT_BIT, Config
from fp8rl.evaluate import START_NOISE, play
from fp8rl.history import History
from fp8rl.machine.hardware import cores
from fp8rl.study import comparison, figures, parallel
from fp8rl.tasks import lqr
from fp8rl.tasks.by_id import task_of
from fp8rl.tasks.environments import env_maker, tensor_task
from fp8rl.train import train

CART, CARTPOLE, LQR = "the cart", "CartPole-v1", "fp8rl/Lqr-v0"
# First seed, steps, steps between evaluations, and the score that a seed should reach; on Hopper
# and HalfCheetah what the zoo of Stable-Baselines3 reports of its PPO. Settings were changed
# several times after a look at seeds from 1000 and from 5000 up, so they are reported on others.
# Stable-Baselines3's settings were not, so its seeds have stayed the same (configs_of).
TASKS = {
    CART: (8000, 100_000, 10_000, 195),
    CARTPOLE: (8000, 500_000, 10_000, 475),
    LQR: (8000, 1_000_000, 50_000, -5),
    "Pendulum-v1": (8000, 1_000_000, 50_000, -250),
    "Acrobot-v1": (8000, 1_000_000, 50_000, -100),
    "LunarLander-v3": (8000, 1_000_000, 50_000, 200),
    "InvertedPendulum-v5": (8000, 200_000, 10_000, 1000),
    "Hopper-v5": (8000, 1_000_000, 50_000, 2400),
    # An evaluation takes as many steps as a tenth of the training
    "HalfCheetah-v5": (8000, 1_000_000, 200_000, 5800),
}
NO_REPLAY = "fp32 without replay"
PRECISIONS = {
    **{name: {"precision": name} for name in ("fp32", "bf16", "fp16", "fp8")},
    # With the root of v rounded to the nearest, as EIGHT_BIT was when the tables were made
    "eight-bit state": EIGHT_BIT | {"formats": "weights=e4m3:stochastic m=e4m3 root=e4m3"},
    # As many updates as the defaults make, all on slices of the newest rollout: the ring holds no
    # more (2,048 steps and the final observations). This is PPO without replay, and says where
    # replay pays.
    NO_REPLAY: {"precision": "fp32", "capacity": 2_064},
}
PEERS = {"SB3 A2C": "A2C", "SB3 PPO": "PPO"}
ARMS = (*PRECISIONS, *PEERS)
DRAWN = ("fp32", "fp8")
# Seeds of an arm, where they are not ten, or five of tasks that only Gymnasium has
SEEDS = {
    **{(CART, arm): 30 for arm in PRECISIONS if arm != NO_REPLAY},
    **{(task, arm): 30 for task in (CARTPOLE, LQR) for arm in DRAWN},
    **{(task, arm): 10 for task in ("Hopper-v5", "HalfCheetah-v5") for arm in DRAWN},
    **{(task, NO_REPLAY): 3 for task in ("LunarLander-v3", "Hopper-v5", "HalfCheetah-v5")},
}
# Columns of the short table, and how a newcomer knows them
SHORT = {"fp32": "float32", "fp8": "FP8"} | {name: name for name in PEERS}
COLUMNS = (
    "task",
    "arm",
    "steps",
    "median score",
    "lowest",
    "seeds that reach the goal",
    "held",
    "minus fp32, IQM [95%]",
    "seconds a seed",
)


# What is trained


def is_tensor_task(task: str) -> bool:
    """Whether the package has a task as tensors, so that its agents train as populations."""
    return task in (CART, LQR) or bool(task_of(task))


def arms_of(task: str) -> list[str]:
    """The arms that there are for a task."""
    own = [*PRECISIONS] if is_tensor_task(task) else ["fp32", "fp8", NO_REPLAY]
    return own + [name for name, algorithm in PEERS.items() if (algorithm, task) in ZOO]


def configs_of(task: str, arm: str) -> list[Config]:
    """A config for each seed of an arm."""
    first, steps, every, _ = TASKS[task]
    if arm in PEERS:
        first = 2000 if task == CART else 1000
    env_id = None if task == CART else task
    shape = {"env_id": env_id, "steps": steps, "eval_every": every} | PRECISIONS.get(arm, {})
    count = SEEDS.get((task, arm), 10 if is_tensor_task(task) else 5)
    return [Config(seed=first + seed, **shape) for seed in range(count)]


@functools.cache
def mark_of(task: str, arm: str) -> str:
    """Eight digits that change with an arm's settings."""
    config, settings = dataclasses.asdict(configs_of(task, arm)[0]), {}
    if arm in PEERS:  # for which only these fields of the config count
        settings = ZOO[PEERS[arm], task]
        names = ("env_id", "seed", "steps", "start_noise", "eval_every", "eval_episodes")
        config = {name: config[name] for name in names}
    return f"{zlib.crc32(json.dumps([config, settings], sort_keys=True).encode()):08x}"


def through_gymnasium(config: Config) -> History:
    """Trains a config in Gymnasium's own environments."""
    return train(build(config, Machine(vectorization="sync")), progress=False).history


class Seed(NamedTuple):
    """What a seed has earned in its evaluations, float64 [E], and its seconds of training, in a
    population its share of them."""

    returns: np.ndarray
    seconds: float


Found = dict[tuple[str, str, int], Seed]  # by task, arm and seed


def journal_of(path: Path) -> Journal:
    return Journal(path, ("task", "arm", "seed", "settings", "seconds", "returns"))


def read(path: Path) -> Found:
    """The finished seeds."""
    found = {}
    for row in journal_of(path).rows():
        task, arm = row["task"], row["arm"]
        if row["settings"] == mark_of(task, arm):
            returns = np.array([float(x) for x in row["returns"].split()])
            found[task, arm, int(row["seed"])] = Seed(returns, float(row["seconds"]))
    return found


def train_missing(task: str, arms: list[str], path: Path) -> None:
    """Trains the seeds of some arms that the journal does not have, and adds each as soon as it is
    done."""
    found, journal = read(path), journal_of(path)
    arm_of = {config: arm for arm in arms for config in configs_of(task, arm)}
    run = None  # precisions of a task as tensors train together; any other arm comes alone
    if arms[0] in PEERS:
        run = functools.partial(train_peer, PEERS[arms[0]])
    elif not is_tensor_task(task):
        run = through_gymnasium
    batches = parallel.split(list(arm_of), cores(), run)
    size = {config: len(batch) for _, batch in batches for config in batch}
    done = {config for config, arm in arm_of.items() if (task, arm, config.seed) in found}
    for config, history in parallel.run_all(list(arm_of), run=run, done=done):
        arm, (_, returns) = arm_of[config], history.evaluations()
        journal.add(
            {
                "task": task,
                "arm": arm,
                "seed": config.seed,
                "settings": mark_of(task, arm),
                "seconds": f"{history.last['seconds'] / size[config]:.4f}",
                "returns": " ".join(f"{x:.6g}" for x in returns),
            }
        )


# Stable-Baselines3, with the settings of RL Baselines3 Zoo (its hyperparams/ at commit 22e3ff2).
# DummyVecEnv steps Gymnasium's environments, as in the zoo, and their numbers are the zoo's. A2C and
# PPO take this package's steps: for PPO on CartPole five times the zoo's, for PPO on Pendulum ten
# times, for A2C on Acrobot twice. The zoo knows neither of the two carts.

ZOO = {
    ("A2C", "CartPole-v1"): {"n_envs": 8},
    ("A2C", "Acrobot-v1"): {"n_envs": 16, "normalize": True},
    ("A2C", "Pendulum-v1"): {
        "n_envs": 8,
        "normalize": True,
        "n_steps": 8,
        "gae_lambda": 0.9,
        "vf_coef": 0.4,
        "gamma": 0.9,
        "learning_rate": "linear 7e-4",
        "use_sde": True,
        "policy_kwargs": {"log_std_init": -2, "ortho_init": False},
    },
    ("PPO", "CartPole-v1"): {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": "linear 1e-3",
        "clip_range": "linear 0.2",
    },
    ("PPO", "Acrobot-v1"): {
        "n_envs": 16,
        "normalize": True,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "n_epochs": 4,
    },
    ("PPO", "Pendulum-v1"): {
        "n_envs": 4,
        "n_steps": 1024,
        "gamma": 0.9,
        "learning_rate": 1e-3,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    ("PPO", "HalfCheetah-v5"): {
        "normalize": True,
        "n_envs": 1,
        "n_steps": 512,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": "ReLU",
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
    },
}
for algorithm in ("A2C", "PPO"):
    ZOO[algorithm, CART] = ZOO[algorithm, CARTPOLE]
    ZOO[algorithm, LQR] = ZOO[algorithm, "Pendulum-v1"]


class PeerEvaluator:
    """Evaluates at every multiple of `eval_every`; Stable-Baselines3 calls it after every step.

    `seconds` is the processor's time for all else. Where a multiple of `eval_every` is the last
    step, the update that follows it is not evaluated.
    """

    def __init__(self, config: Config):
        self.config = config
        self.history = History()
        self.seconds = 0.0
        self.resumed = time.process_time()

    def __call__(self, found: dict, _globals: dict) -> bool:
        """Looks at the local variables of Stable-Baselines3's collection loop."""
        model, every = found["self"], self.config.eval_every
        before = model.num_timesteps - model.n_envs
        if model.num_timesteps // every > before // every:
            self.evaluate(model)
        return True

    def evaluate(self, model) -> None:
        """Adds a row of steps, seconds and mean return of the greedy policy, unless it is there."""
        if self.history.last.get("steps") == model.num_timesteps:
            return
        self.seconds += time.process_time() - self.resumed
        normalizer = model.get_vec_normalize_env()
        make_env = env_maker(self.config, tensor_task(self.config), FIRST_EVALUATION_SEED)
        starts = (START_NOISE, "cpu", 0, "evaluation starts")
        env = make_env(self.config.eval_episodes, *starts)
        # Of a push; there is none of a choice
        largest = getattr(model.action_space, "high", None)

        def policy(obs: torch.Tensor) -> torch.Tensor:
            seen = normalizer.normalize_obs(obs.numpy()) if normalizer else obs.numpy()
            action, _ = model.predict(seen, deterministic=True)
            # Tensor tasks take [-1, 1]
            return torch.as_tensor(action if largest is None else action / largest)

        with contextlib.closing(env):
            mean_return = float(np.mean(play(policy, env)))
        row = {"iteration": len(self.history), "steps": model.num_timesteps}
        self.history.add(row | {"seconds": self.seconds, "eval_return": mean_return})
        self.resumed = time.process_time()


def decays(setting: str) -> Callable[[float], float]:
    """The schedule that a setting like "linear 0.2" names: from 0.2 to 0 over the training."""
    start = float(setting.removeprefix("linear "))
    return lambda remaining: start * remaining


def train_peer(algorithm: str, config: Config) -> History:
    """Trains Stable-Baselines3's algorithm on a config's task, seed and steps; of the config's other
    fields only those of evaluations count."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    settings = {
        name: decays(x) if str(x).startswith("linear ") else x
        for name, x in ZOO[algorithm, config.env_id or CART].items()
    }
    single = {"env_kwargs": {"start_noise": config.start_noise}} if config.env_id is None else {}
    env_id = config.env_id or "fp8rl/CustomEnv-v0"
    env = make_vec_env(env_id, settings.pop("n_envs", 1), config.seed, **single)
    if settings.pop("normalize", False):
        env = sb3.common.vec_env.VecNormalize(env, gamma=settings.get("gamma", 0.99))
    # Imports what it needs for a second, which is no training
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    evaluator = PeerEvaluator(config)
    policy = settings.get("policy_kwargs", {})
    if "activation_fn" in policy:
        function = getattr(torch.nn, policy["activation_fn"])
        settings["policy_kwargs"] = policy | {"activation_fn": function}
    model = getattr(sb3, algorithm)("MlpPolicy", env, seed=config.seed, device="cpu", **settings)
    model.learn(config.steps, callback=evaluator)
    env.close()
    evaluator.evaluate(model)
    return evaluator.history


# Scores

# What the controller earns that dynamic programming finds on a grid of 801 by 401 points, in the
# physics themselves: `optimal_returns` of this file at commit fcd042c. Other grids differ by less
# than 0.02.
BEST_ON_CART = 198.99948498203545


@functools.cache
def best_of(task: str) -> float:
    """The best mean return of an evaluation's 100 starts, on the carts."""
    if task == CART:
        return BEST_ON_CART
    return -lqr.optimal_cost(lqr.Lqr(100, purpose="evaluation starts").obs).mean().item()


def above_optimum(returns: np.ndarray) -> np.ndarray:
    """Percent by which the costs of the linear-quadratic cart exceed the smallest possible one."""
    return 100 * (returns / best_of(LQR) - 1)


def score(task: str, final_return: float) -> float:
    """Higher is better: a return, or minus the cost above the optimum in percent."""
    return -above_optimum(final_return) if task == LQR else final_return


def unit_of(task: str) -> str:
    return " %" if task == LQR else ""


def held(seed: Seed) -> bool:
    """Whether an evaluation reached 475 and none fell below 400 after it."""
    reached = np.maximum.accumulate(seed.returns >= 475)
    return bool(reached[-1]) and not (reached & (seed.returns < 400)).any()


def scores_of(task: str, arm: str, seeds: list[int], found: Found) -> np.ndarray:
    """The final scores of some seeds of an arm."""
    return np.array([score(task, found[task, arm, seed].returns[-1]) for seed in seeds])


def less_than_float32(task: str, arm: str, seeds: list[int], found: Found) -> str:
    """What an arm's scores are above float32's, paired by seed; "-" while some are missing."""
    if not all((task, name, seed) in found for name in (arm, "fp32") for seed in seeds):
        return "-"
    own, exact = (scores_of(task, name, seeds, found) for name in (arm, "fp32"))
    return comparison.with_interval(own - exact, signed=True)


def line(task: str, arm: str, found: Found) -> list[str]:
    """An arm's line of the table."""
    _, steps, _, goal = TASKS[task]
    own = {seed: x for (name, of, seed), x in found.items() if (name, of) == (task, arm)}
    scores = scores_of(task, arm, list(own), found)
    is_compared = task in (CART, LQR) and arm in PRECISIONS and arm != "fp32"
    return [
        task,
        arm,
        f"{steps:,}",
        *(f"{x:.2f}{unit_of(task)}" for x in (np.median(scores), scores.min())),
        f"{(scores >= goal).sum()} of {len(own)}",
        f"{sum(map(held, own.values()))} of {len(own)}" if task == CARTPOLE else "-",
        less_than_float32(task, arm, list(own), found) if is_compared else "-",
        "-" if arm == NO_REPLAY else f"{np.mean([x.seconds for x in own.values()]):.1f}",
    ]


def short(cells: list[str]) -> str:
    """A line of the table as one cell: the median, and how many seeds reach the goal. The
    linear-quadratic cart has its cost above the optimum."""
    task, _, _, median, _, reached, *_ = cells
    number = float(median.removesuffix(unit_of(task)))
    return f"{-number:.2f}% above ({reached})" if task == LQR else f"{number:.1f} ({reached})"


def write(out: Path, found: Found) -> None:
    """Makes the table of the seeds found, a short one with a line for each task, and one of what
    replay adds."""
    lines = {
        (task, arm): line(task, arm, found)
        for task in TASKS
        for arm in ARMS
        if any((task, arm) == key[:2] for key in found)
    }
    goals = ", ".join(f"{task} {goal}" for task, (*_, goal) in TASKS.items())
    # Added after ten seeds had shown no clear difference
    added = range(TASKS[LQR][0] + 10, TASKS[LQR][0] + 30)
    difference = less_than_float32(LQR, "fp8", list(added), found)
    note = (
        f"Goals: {goals} (minus the percent of cost above the optimum). The cart's best "
        f"return is {best_of(CART):.2f}. Seconds are of training, on one core while the other "
        "trains, too: as tensors a seed's share of its population's. "
        f"On {LQR}, seeds {added[0]} to {added[-1]} alone: fp8 minus fp32 {difference} %."
    )
    rows = []
    replayed = []  # what replay adds
    for task, (_, steps, _, goal) in TASKS.items():
        cells = {arm: short(lines[task, arm]) for arm in ARMS if (task, arm) in lines}
        if NO_REPLAY in cells:
            replayed.append([task, *(cells[arm] for arm in ("fp32", NO_REPLAY) if arm in cells)])
        if cells.keys() & SHORT.keys():
            name = "linear-quadratic cart" if task == LQR else task
            wanted = f"at most {-goal}% above the optimum" if task == LQR else f"{goal:,}"
            rows.append([name, f"{steps:,}", wanted, *(cells.get(arm, "-") for arm in SHORT)])
    write_tables(
        out,
        table_of(COLUMNS, lines.values()),
        note,
        short=table_of(("task", "training steps", "goal", *SHORT.values()), rows),
        replay=table_of(
            ("task", "16 of 17 updates on replayed slices", "17 updates on the new rollout"),
            replayed,
        ),
    )


def panel(ax: plt.Axes, task: str, found: Found) -> None:
    """The learning curves of one task, with its goal. Up is better."""
    _, steps, every, goal = TASKS[task]
    count = steps // every
    lost = {CART: lambda returns: best_of(CART) - returns, LQR: above_optimum}
    curves = {}
    for arm in DRAWN:
        seeds = [x.returns[:count] for key, x in found.items() if key[:2] == (task, arm)]
        # So that the other arm keeps its colour
        returns = np.array(seeds or [np.full(count, np.nan)])
        drawn = lost[task](returns) if task in lost else returns
        curves[arm] = every * np.arange(1, count + 1), drawn
    figures.learning_curves(ax, curves, marks=False).get_legend().remove()
    for drawn in ax.lines:
        drawn.set_markersize(3)
    title, label, height = {
        CART: (
            f"the cart: shortfall from {best_of(CART):.0f}",
            f"{best_of(CART):.2f} minus the return",
            best_of(CART) - goal,
        ),
        LQR: ("linear-quadratic cart", "cost above the optimum (%)", -goal),
    }.get(task, (task, "greedy return", goal))
    if task in lost:
        ax.set_yscale("log")
        ax.invert_yaxis()
    ax.axhline(height, color="#888888", linewidth=1, zorder=0)
    # On the left, above the curves, where they do not reach it
    is_above = task not in lost and np.nanmedian(curves["fp32"][1], axis=0)[-1] < goal
    ax.annotate(
        f"goal {abs(goal) if task == LQR else goal:,}{unit_of(task)}",
        (0.02 if is_above else 0.98, height),
        (0, 3 if is_above else -3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color="#444444",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
        ha="left" if is_above else "right",
        va="bottom" if is_above else "top",
    )
    figures.steps_axis(ax, ticks=3).set(title=title, ylabel=label)


def draw(path: Path, found: Found) -> None:
    """Learning curves of some arms, a panel for each task that has any."""
    shown = [task for task in TASKS if any((task, arm) == x[:2] for x in found for arm in DRAWN)]
    rows = -(-len(shown) // 3)
    figure, axes = plt.subplots(
        rows, 3, figsize=(9, 2.6 * rows + 0.5), layout="constrained", squeeze=False
    )
    for ax, task in zip(axes.flat, shown, strict=False):
        panel(ax, task, found)
    for ax in axes.flat[: max(0, len(shown) - 3)]:  # another is below
        ax.set_xlabel("")
    for ax in axes.flat[len(shown) :]:
        ax.axis("off")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(DRAWN),
        title="FP8 learns as float32 does, up to a small loss on the linear-quadratic cart.\n"
        "Up is better in every panel. Lines: interquartile means. Bands: "
        "10th to 90th percentile of the seeds.",
        title_fontsize=12,
        fontsize=11,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=TASKS)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # as every run has
    journal = options.out.with_suffix(".csv")
    if not importlib.util.find_spec("stable_baselines3") and set(options.arms) & PEERS.keys():
        sys.exit(
            "stable_baselines3 is missing: pip install --no-deps -r "
            "benchmarks/requirements.txt, or choose --arms without it"
        )
    for task in options.only or TASKS:
        wanted = [arm for arm in options.arms if arm in arms_of(task)]
        together = [arm for arm in wanted if arm in PRECISIONS]
        alone = [[arm] for arm in wanted if arm in PEERS]
        for group in filter(None, (together, *alone)):
            try:
                train_missing(task, group, journal)
            finally:
                found = read(journal)
                write(options.out, found)
                draw(options.out.with_suffix(".png"), found)


if __name__ == "__main__":
    main()
