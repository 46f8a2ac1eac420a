"""Do the sums break that the breakage map leaves out? And did the doctor (fp8rl/bits/doctor.py)
foresee it?

Each cell keeps one of these in few bits and everything else in float32, on the two carts with the
map's settings, one agent at a time. The map's verdict is used (breakage_map.py), with five seeds
instead of 32, against float32 on the same seeds.

    values           the critic's values, as V-trace takes them
    recursion        V-trace's sum over time, after each step back
    advantages       when the sum is done
    value targets    when the sum is done
    log-probabilities  of the actions, the behaviour policy's as they are kept and the learner's,
                       whose difference is the ratio
    reward scale     the running mean of squared returns, by whose root rewards are divided
    normalizer       the running mean and variance of the observations

    python benchmarks/sums.py predict benchmarks/results/sums_predicted.csv
    python benchmarks/sums.py measure benchmarks/results/sums.csv
    python benchmarks/sums.py table benchmarks/results/sums.md

The predictions come from one float32 agent of another seed, and are committed before anything is
measured. `measure` goes on where it was stopped, cell by cell."""

import argparse
import csv
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from breakage_map import CART, LQR, RATES, STEPS, before_training, measure, verdict
from breakage_map import SETTINGS as SHAPE

from fp8rl.bits.doctor import Doctor, Through
from fp8rl.bits.places import PlaceFormat, places_of
from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.losses import Targets, vtrace_fast
from fp8rl.rollout import Rollout
from fp8rl.study import comparison
from fp8rl.study.throughput import origin
from fp8rl.study.watched_run import WatchedLearner
from fp8rl.train import Learner, Run, iterate, train

# Seen through the loss
SUMS = (
    "values",
    "recursion",
    "advantages",
    "value targets",
    "log-probabilities",
)
MEANS = ("reward scale", "normalizer")  # that follow others
FORMATS = ("bf16", "fp16:unscaled", "e8m3", "e8m1", "e8m0", "e5m2", "e4m3", "e4m3:unscaled")
RESULTS = Path(__file__).parent / "results"
WATCHED = 900  # the seed of the agent that the doctor watches


class Setting(NamedTuple):
    """A task of the breakage map, and a learning rate."""

    task: str
    learning_rate: float


SETTINGS = [Setting(task, 2e-3) for task, rates in RATES.items() if 2e-3 in rates]
SEEDS = range(9300, 9305)


def form_of(text: str) -> PlaceFormat:
    return places_of(f"targets={text}")["targets"]


class Summed(Learner):
    """A learner with one of SUMS in few bits."""

    def __init__(self, place: str, form: PlaceFormat, like: Learner):
        super().__init__(
            like.coefficients,
            like.model,
            like.precision,
            like.optimizer,
            like.reward_scale,
            like.all_reduce,
            compute_targets=self.low_targets,
        )
        self.place, self.form = place, form

    def low(self, place: str, x: torch.Tensor) -> torch.Tensor:
        return Through.rounded(x, self.form) if place == self.place else x

    def loss(self, batch: Rollout):
        self.kept = self.low("log-probabilities", batch.behavior_logp)
        return super().loss(batch._replace(behavior_logp=self.kept))

    def low_targets(self, values, rewards, discounts, log_ratios, valid, lam) -> Targets:
        if self.place == "log-probabilities":  # the learner's, too
            log_ratios = (
                self.form(log_ratios.add(self.kept).flatten(1)).view_as(log_ratios) - self.kept
            )
        values = self.low("values", values)
        if self.place != "recursion":
            found = vtrace_fast(values, rewards, discounts, log_ratios, valid, lam)
            return found._replace(
                value=self.low("value targets", found.value),
                advantage=self.low("advantages", found.advantage),
            )
        ratio = log_ratios.exp()
        weight = ratio.clamp(max=1) * valid
        delta = weight * (rewards + discounts * values[1:] - values[:-1])
        advantage = torch.zeros_like(delta)
        for t in reversed(range(len(delta))):
            later = advantage[t + 1] if t + 1 < len(delta) else 0
            advantage[t] = self.low("recursion", delta[t] + discounts[t] * lam * weight[t] * later)
        return Targets(values[:-1] + advantage, advantage, ratio)


def means_of(place: str, learner: Learner) -> list[torch.Tensor]:
    """The running means that a place has."""
    return (
        [learner.reward_scale.square]
        if place == "reward scale"
        else [learner.model.mean, learner.model.variance]
    )


class Kept(Learner):
    """A learner, in another one's place, with one of MEANS in few bits."""

    def __init__(self, place: str, form: PlaceFormat, like: Learner):
        vars(self).update(vars(like))
        self.place, self.form = place, form

    def watch(self, rollout: Rollout) -> None:
        super().watch(rollout)
        for x in means_of(self.place, self):
            x.copy_(Through.rounded(x, self.form))


def config_in(setting: Setting, place: str, seed: int) -> Config:
    """The map's config; with normalization where it is judged."""
    shape = SHAPE | {"env_id": None if setting.task == CART else setting.task, "steps": STEPS}
    return Config(
        seed=seed,
        normalize_obs=place == "normalizer",
        **shape | {"learning_rate": setting.learning_rate, "eval_every": 0},
    )


def run_of(config: Config, place: str = "", form: str = "") -> Run:
    run = build(config)
    if place:
        run.learner = (Kept if place in MEANS else Summed)(place, form_of(form), run.learner)
    return run


def finished(place: str, form: str, config: Config) -> History:
    torch.set_num_threads(1)
    return train(run_of(config, place, form), progress=False).history


def predict(out: Path) -> None:
    lines = ["task,cell,rate,noise,lost,verdict"]
    for setting in SETTINGS:
        for mean in MEANS:
            run = run_of(config_in(setting, mean, WATCHED))
            config, learner, watching = (
                run.config,
                run.learner,
                Doctor(run.learner.optimizer, formats=()),
            )
            rate = 1 - learner.reward_scale.DECAY**config.rollout_length
            if mean == "normalizer":

                def rate(
                    seen=learner.model.seen, new=config.num_envs * config.rollout_length
                ) -> float:
                    return min(1.0, new / max(seen.item(), 1))

            else:
                low = {
                    f"{place}={form}": Summed(place, form_of(form), learner)
                    for place in SUMS
                    for form in FORMATS
                }
                run.learner = WatchedLearner(learner, watching, low)
            watching.follow(mean, means_of(mean, learner), rate, FORMATS)
            for _ in iterate(run, progress=False):
                pass
            for f in watching.report():
                lines.append(
                    f"{setting.task},{f.place}={f.format},{f.rate:.4g},{f.noise:.4g},{f.lost:.4g},{said_of(f)}"
                )
    out.write_text("\n".join(lines) + "\n")


def said_of(found) -> str:
    """The doctor's verdict in one of three words."""
    if found.verdict == "not judged":
        return "unknown"
    return "fine" if found.is_fine else "breaks"


def measure_missing(out: Path) -> None:
    if not out.exists():
        out.write_text("task,cell,returns\n")
    done = {(row["task"], row["cell"]) for row in csv.DictReader(out.open())}
    cells = [(place, form) for place in (*SUMS, *MEANS) for form in FORMATS]
    for setting in SETTINGS:
        for place, form in [("", "float32"), ("", "float32 normalized"), *cells]:
            name = f"{place}={form}" if place else form
            if (setting.task, name) not in done:
                configs = [
                    config_in(
                        setting, "normalizer" if form == "float32 normalized" else place, seed
                    )
                    for seed in SEEDS
                ]
                found = dict(
                    comparison.run_all(configs, run=functools.partial(finished, place, form))
                )
                with out.open("a") as file:
                    file.write(
                        f"{setting.task},{name},{' '.join(f'{found[c].final_return:.6g}' for c in configs)}\n"
                    )


def table(out: Path) -> None:
    returns = {}
    for row in csv.DictReader((RESULTS / "sums.csv").open()):
        returns[row["task"], row["cell"]] = [
            measure(row["task"], float(x)) for x in row["returns"].split()
        ]
    before = before_training(list(csv.DictReader((RESULTS / "breakage_map.csv").open())))
    foreseen = {
        (row["task"], row["cell"]): row
        for row in csv.DictReader((RESULTS / "sums_predicted.csv").open())
    }
    columns = ("sum", "task", *FORMATS)
    lines, counts = (
        [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"],
        dict.fromkeys(("breaks", "unknown", "fine"), 0),
    )
    bad_said = dict(counts)
    for place in (*SUMS, *MEANS):
        for task in [setting.task for setting in SETTINGS]:
            cells = []
            for form in FORMATS:
                plain = np.array(
                    returns[task, "float32 normalized" if place == "normalizer" else "float32"]
                )
                scores, said = (
                    np.array(returns[task, f"{place}={form}"]),
                    foreseen[task, f"{place}={form}"],
                )
                difference = scores - plain
                shown = np.exp if task == LQR else np.asarray  # a cost instead of its logarithm
                medians = (float(np.median(shown(x))) for x in (scores, plain))
                interval = (float(shown(x)) for x in comparison.bootstrap_interval(difference))
                found = verdict(task, *medians, before[task], *interval)
                score = (
                    f"{np.exp(np.median(difference)):.2f}"
                    if task == LQR
                    else f"{np.median(difference):.1f}"
                )
                cells.append(f"{score} {found}; rate {float(said['rate']):.2g} {said['verdict']}")
                counts[said["verdict"]] += 1
                bad_said[said["verdict"]] += found == "fails"
            lines.append(f"| {' | '.join([place, task, *cells])} |")
    said = {"breaks": "said to break", "unknown": "called unknown", "fine": "called fine"}
    words = "; ".join(
        f"of {counts[name]} cells {said[name]} {bad_said[name]} fail" for name in counts
    )
    note = (
        "A cell: the median of the returns minus float32's, "
        "on the linear-quadratic cart the cost divided by float32's, and the "
    )
    note += (
        "verdict; then the rate and what the doctor said. A cell fails if it loses more than "
        "a tenth of float32's gain, which "
    )
    note += f"is float32's final score minus the score before training. In all, {words}."
    out.write_text(
        "\n".join(lines) + f"\n\n{note} `python benchmarks/sums.py table {out}` on {origin()}.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("predict", "measure", "table"))
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # as every run has
    {"predict": predict, "measure": measure_missing, "table": table}[given.what](given.out)
