"""Does the doctor foresee what breaks learning in somebody else's code? Stable-Baselines3's PPO,
A2C, DQN, SAC and TD3.

As in law.py, whose definitions these are: the doctor watches one float32 agent of each algorithm,
on a seed that no cell trains, and what it predicts is committed before anything is measured.
Settings are near those of Stable-Baselines3 or its zoo, take about as few steps as float32 needs,
and were chosen on seeds below 1000. A2C has Adam in place of RMSprop.

    python benchmarks/law_sb3.py predict benchmarks/results/law_sb3_predicted.csv
    python benchmarks/law_sb3.py measure benchmarks/results/law_sb3_measured.csv [--only SAC TD3]
    python benchmarks/law_sb3.py cost benchmarks/results/law_sb3_cost.csv
    python benchmarks/law_sb3.py table benchmarks/results/law_sb3.md

A cell keeps one place of every optimizer of the algorithm in few bits: the policy's, or the
actor's, the critics' and that of SAC's temperature. The doctor judges each optimizer on its own.
The rule for the cell, fixed before anything was measured: its verdict is the worst of them, its p
the one farthest from 1, its q the largest. Other cells keep the target networks in few bits. They
test the doctor's rule for averages, which was chosen on the loops of planted.py; their predictions
came last."""

import argparse
import copy
import csv
import time
from pathlib import Path

import law
import numpy as np
import stable_baselines3 as sb3
import torch
from law import RESULTS, UNTRAINED
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from zoo import SETTINGS, decays

from fp8rl.bits import doctor
from fp8rl.bits.low_bit_adam import LowBitAdam
from fp8rl.bits.places import places_of
from fp8rl.study.statistics import is_failure
from fp8rl.study.throughput import origin

WATCHED, EPISODES = 900, 50
# Two seeds for a cell, and three for A2C: float32, measured first, failed in one of its first two.
# PPO had two, too: with ten, five cells that had lost more than a tenth lose less. So had DQN, all
# of whose cells had: with six, four lose less.
SEEDS = {"PPO": 10, "A2C": 3, "DQN": 6, "SAC": 2, "TD3": 2}
FIRST_SEED = 9000
# Task, steps and settings. "linear x": from x to 0 over the training.
ALGORITHMS = {
    "PPO": ("CartPole-v1", 30_720, SETTINGS["PPO", "CartPole-v1"]),
    "A2C": (
        "CartPole-v1",
        100_000,
        {
            "n_envs": 8,
            "n_steps": 16,
            "gae_lambda": 0.9,
            "learning_rate": "linear 4e-3",
            "use_rms_prop": False,
        },
    ),
    "DQN": (
        "CartPole-v1",
        25_000,
        {
            "learning_rate": "linear 1e-3",
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "target_update_interval": 1,
            "tau": 0.01,
            "train_freq": 1,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [64, 64]},
        },
    ),
    "SAC": ("Pendulum-v1", 5_000, {"learning_rate": 1e-3, "policy_kwargs": {"net_arch": [64, 64]}}),
    "TD3": (
        "Pendulum-v1",
        7_000,
        {
            "learning_rate": 1e-3,
            "gamma": 0.98,
            "learning_starts": 1_000,
            "train_freq": 1,
            "action_noise": NormalActionNoise(np.zeros(1), np.full(1, 0.1)),
            "policy_kwargs": {"net_arch": [64, 64]},
        },
    ),
}
CELLS = (
    "weights=bf16",
    "weights=bf16:stochastic",
    "weights=e4m3",
    "weights=e4m3:stochastic",
    "m=e4m3",
    "m=e4m3:unscaled",
)
CELLS += ("v=bf16", "v=e5m2", "v=e4m3", "v=e4m3:unscaled", "root=e4m3", "root=e4m3:unscaled")
TARGETS = ("target=bf16", "target=bf16:stochastic")
CONTROL = "control"  # float32 on other seeds: what the choice of seeds alone loses
KEY = ("task", "learning_rate", "cell")
PREDICTED = ("task", "learning_rate", "optimizer", "cell", "progress", "noise", "lost", "verdict")


def rate_of(algorithm: str) -> float:
    """The learning rate at the beginning."""
    return float(str(ALGORITHMS[algorithm][-1]["learning_rate"]).removeprefix("linear "))


def model_of(algorithm: str, seed: int) -> BaseAlgorithm:
    task, _, settings = ALGORITHMS[algorithm]
    settings = {
        name: decays(x) if str(x).startswith("linear ") else copy.deepcopy(x)
        for name, x in settings.items()
    }
    env = make_vec_env(task, settings.pop("n_envs", 1), seed)
    return getattr(sb3, algorithm)("MlpPolicy", env, seed=seed, device="cpu", **settings)


def keep(model: BaseAlgorithm, formats: str) -> list[LowBitAdam]:
    """Puts a LowBitAdam of these formats in place of each Adam that the model holds in itself or in
    its attributes. Parameters hold the numbers that are stored: after each step they are
    rounded."""
    found = []
    for holder in (model, *vars(model).values()):
        for name, own in list(getattr(holder, "__dict__", {}).items()):
            if isinstance(own, torch.optim.Adam):
                (group,) = own.param_groups
                options = {option: group[option] for option in ("lr", "betas", "eps")}
                options |= dict(entry.split("=") for entry in formats.split())
                found.append(LowBitAdam(group["params"], seed=model.seed, **options))
                setattr(holder, name, found[-1])
    return found


def targets_of(model: BaseAlgorithm) -> list[torch.Tensor]:
    """The parameters of the target networks; none for PPO and A2C."""
    return [
        p
        for name in ("critic_target", "actor_target", "q_net_target")
        for p in parameters_of(getattr(model, name, None))
    ]


def parameters_of(network: torch.nn.Module | None) -> list[torch.Tensor]:
    return [] if network is None else list(network.parameters())


def rounds_targets(model: BaseAlgorithm, form: str):
    """A callback that rounds the target networks: it is called at every step, before the update
    that follows."""
    kept, draw = places_of(f"weights={form}")["weights"], torch.Generator().manual_seed(model.seed)

    def callback(_locals: dict, _globals: dict) -> bool:
        with torch.no_grad():
            for p in targets_of(model):
                row = p.reshape(1, -1)
                p.copy_(
                    kept(
                        row,
                        torch.rand(row.shape, generator=draw)
                        if "stochastic" in kept.words
                        else None,
                    ).view_as(p)
                )
        return True

    return callback


def is_kept(optimizer: LowBitAdam) -> bool:
    """Whether the weights in use are numbers of their format."""
    rows = [p.detach().reshape(1, -1) for p in optimizer.parameters]
    return all(
        torch.equal(optimizer.places.weights(x, [x.numel()]), x) for x in rows if x.isfinite().all()
    )


def mean_return(algorithm: str, seed: int, arm: str) -> float:
    """What the deterministic policy earns after training, a mean of the same episodes for all; -inf
    if it has become NaN."""
    task, steps, _ = ALGORITHMS[algorithm]
    model = model_of(algorithm, seed)
    if arm != UNTRAINED:
        formats = (
            ""
            if arm in ("float32", CONTROL, *TARGETS)
            else arm + ":stored" * (not arm.startswith("weights"))
        )
        optimizers = keep(model, formats)
        try:
            model.learn(steps, rounds_targets(model, arm.split("=")[1]) if arm in TARGETS else None)
        except ValueError as error:  # from torch's distributions, of a policy that is NaN
            if "nan" not in str(error):
                raise
            return -np.inf
        assert optimizers and all(map(is_kept, optimizers))
    found, _ = evaluate_policy(model, make_vec_env(task, EPISODES, 10**6), EPISODES)
    return found if np.isfinite(found) else -np.inf


def predict(out: Path) -> None:
    """Adds the predictions that the file does not have."""
    if not out.exists():
        out.write_text(",".join(PREDICTED) + "\n")
    done = {(row["task"], row["cell"]) for row in csv.DictReader(out.open())}
    for algorithm, (_, steps, _) in ALGORITHMS.items():
        model = model_of(algorithm, WATCHED)
        targets = targets_of(model)
        if all((algorithm, cell) in done for cell in (*CELLS, *(TARGETS if targets else ()))):
            continue
        watching = doctor.Doctor.of(model, formats=CELLS)
        if targets:
            watching.follow("target", targets, model.tau, [cell.split("=")[1] for cell in TARGETS])
        model.learn(steps)
        with out.open("a", newline="") as file:
            for found in watching.report():
                numbers, cell = (
                    (f"{x:.4g}" for x in (found.progress, found.noise, found.lost)),
                    f"{found.place}={found.format}",
                )
                if (algorithm, cell) not in done:
                    row = (
                        algorithm,
                        rate_of(algorithm),
                        found.optimizer,
                        cell,
                        *numbers,
                        found.verdict,
                    )
                    csv.writer(file, lineterminator="\n").writerow(row)


def measure(out: Path, only: list[str]) -> None:
    if not out.exists():
        out.write_text(",".join((*KEY, "returns")) + "\n")
    rows = {(row["task"], row["cell"]): row for row in csv.DictReader(out.open())}
    for arm in (UNTRAINED, "float32", CONTROL, *TARGETS, *CELLS):
        for algorithm in only or ALGORITHMS:
            if arm in TARGETS and algorithm in ("PPO", "A2C"):  # which have none
                continue
            row = rows.setdefault(
                (algorithm, arm), dict(zip(KEY, (algorithm, rate_of(algorithm), arm), strict=True))
            )
            found, first = (
                row.get("returns", "").split(),
                FIRST_SEED + SEEDS[algorithm] * (arm == CONTROL),
            )
            for seed in range(first + len(found), first + SEEDS[algorithm]):
                row["returns"] = " ".join([*found, f"{mean_return(algorithm, seed, arm):.6g}"])
                found = row["returns"].split()
                with out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, (*KEY, "returns"), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(row for row in rows.values() if "returns" in row)


def cost(out: Path) -> None:
    """Processor time of PPO alone and watched by a doctor, in turns. Raises AssertionError if the
    trained weights differ."""
    rows, weights = [], []
    for watched in (False, True) * 7:
        model = model_of("PPO", WATCHED)
        watching = doctor.Doctor.of(model) if watched else None
        began = time.process_time()
        model.learn(50_000)
        rows.append((int(watched), f"{time.process_time() - began:.3f}"))
        assert watching is None or watching.report()
        weights.append(torch.nn.utils.parameters_to_vector(model.policy.parameters()))
        assert torch.equal(weights[0], weights[-1])
    with out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("watched", "seconds"), *rows])


def combined() -> list[dict]:
    """The prediction for each cell, from those for its optimizers: by the rule of the module's
    docstring."""
    found: dict[tuple, list] = {}
    for row in csv.DictReader((RESULTS / "law_sb3_predicted.csv").open()):
        found.setdefault(tuple(row[name] for name in KEY), []).append(row)
    rows = []
    for key, own in found.items():
        far = max(own, key=lambda row: doctor.away(float(row["progress"])))
        noise = max((row["noise"] for row in own), key=float)
        verdict = max((row["verdict"] for row in own), key=("fine", "unknown", "breaks").index)
        optimizer = far["optimizer"] if len(own) > 1 else ""
        rows.append(
            dict(zip(KEY, key, strict=True))
            | {**far, "optimizer": optimizer, "noise": noise, "verdict": verdict}
        )
    return rows


def table(out: Path) -> None:
    lost = law.losses(RESULTS / "law_sb3_measured.csv")
    bad = {key: is_failure(loss) for key, loss in lost.items()}
    rows = [row for row in combined() if law.key_of(row) in bad]
    lines = [
        f"| {' | '.join(law.COLUMNS)} |",
        "| --- " * len(law.COLUMNS) + "|",
        law.line("all", rows, bad),
    ]
    for algorithm, (task, steps, _) in ALGORITHMS.items():
        own = [row for row in rows if row["task"] == algorithm]
        if own:
            lines.append(
                law.line(
                    f"{algorithm}, {task}, {steps:,} steps, {SEEDS[algorithm]} seeds", own, bad
                )
            )
    lines += law.intervals_and_misses(rows, bad, lost)
    returns = {
        (row["task"], row["cell"]): row["returns"]
        for row in csv.DictReader((RESULTS / "law_sb3_measured.csv").open())
    }
    pairs = [
        f"{name} {returns[name, 'float32']} and {returns[name, CONTROL]}, "
        f"which is a loss of {loss:.0%}"
        for name in ALGORITHMS
        if (loss := lost.get((law.Setting(name, rate_of(name)), CONTROL))) is not None
    ]
    lines += [
        "",
        "A cell is bad if it loses more than a tenth of float32's gain: "
        "its final score minus that before training.",
    ]
    lines += [
        "",
        f"Returns of float32 on the cells' seeds and on as many others: {'; '.join(pairs)}.",
    ]
    costs = list(csv.DictReader((RESULTS / "law_sb3_cost.csv").open()))
    alone, watched = (
        np.median([float(row["seconds"]) for row in costs if row["watched"] == flag])
        for flag in "01"
    )
    paid = (
        f"The doctor's cost: PPO on 50,000 steps takes {watched / alone:.2f} times the "
        "processor time with it (medians of "
    )
    paid += (
        f"{len(costs) // 2} runs each, {watched:.1f} s and {alone:.1f} s), "
        "and the trained weights are the same bit for bit."
    )
    out.write_text(
        "\n".join([*lines, "", paid])
        + f"\n\n`python benchmarks/law_sb3.py table {out}` on {origin()}.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("predict", "measure", "cost", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=ALGORITHMS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "measure":
        measure(given.out, given.only)
    else:
        {"predict": predict, "cost": cost, "table": table}[given.what](given.out)
