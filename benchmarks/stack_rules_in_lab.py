"""What do the rules that stacks apply by default cost small policies that act in few bits?

Stacks for language models account for the gap between engine and trainer by rules of their own
(fp8rl/sequences/corrections.py). Here each rule trains the laboratory's policies, in both tasks and
both networks, where the copy that acts is in FP8 or has two bits of mantissa. Some arms sample by
top-p in that copy, which is then in float32 or FP8. As in vLLM, its log-probabilities are those
among the tokens that were kept, and the learner's are those among all tokens.

    measure    trains all arms on seeds from 2000 up, and goes on where it was stopped
    table      the losses, and what the weights were, beside what was predicted

    python benchmarks/stack_rules_in_lab.py measure benchmarks/results/stack_rules_measured.csv
    python benchmarks/stack_rules_in_lab.py table benchmarks/results/stack_rules.md

The predictions are in results/stack_rules_predicted.csv, with a reason each. They were committed
before a policy was trained on these seeds. A loss is the share of the success that the learner
reaches where float32 writes the sequences from all tokens: 0 is float32, 1 gets nothing right.
"""

import argparse
import multiprocessing
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from acting import RESULTS, Cell, Experiment, Job, Key, cells_of, successes, two_places
from files import Journal, table_of

from fp8rl.machine.hardware import keep_freed_memory, origin
from fp8rl.sequences.corrections import mismatch_weight
from fp8rl.sequences.laboratory import Arm, Laboratory, Setting

SEEDS = range(2000, 2016)
FEWER_SEEDS = SEEDS[:8]  # of rollouts in minibatches
SEEDS_OF_JOB = 2  # a batch that fits into the cache takes half as long
TOP_P = 0.95
# By the correction of an arm, in the order of the table
RULES = {
    "none": "no correction",
    "one_precision": "one precision",
    "masked_sequence_weights": "TRL, default",
    "token_weights": "verl, token",
    "sequence_weights": "verl, sequence",
    "gated_token_weights": "OpenRLHF, seq",
    "clip": "AReaL, default",
}
BEST = "token_weights"  # with which the other rules are compared
WITH_TOP_P = ("none", "masked_sequence_weights", "token_weights")


def arms_of(plain: tuple[str, ...], with_top_p: tuple[str, ...]) -> list[Arm]:
    """Float32, each of the `plain` formats with each rule, and the formats that sample by top-p."""
    arms = [Arm(form, rule) for form in plain for rule in RULES]
    arms += [Arm(form, rule, TOP_P) for form in with_top_p for rule in WITH_TOP_P]
    return [Arm(), *arms]


EVERY_RULE = arms_of(("fp8", "e8m2"), ("fp32", "fp8"))
LONG = arms_of((), ("fp32",))
CLIPS = ("none", "masked_sequence_weights", "token_weights", "clip")
IN_MINIBATCHES = [Arm(), *(Arm(form, rule) for form in ("fp8", "e8m2") for rule in CLIPS)]
SHARP = Setting()
HARMLESS = Setting(right_tokens=4)
# With the recurrent network's learning rate, attention unlearns in float32, too
TWO_LAYERS = Setting(network="attention", learning_rate=5e-4)
EXPERIMENTS = {
    "recurrent, 1 right": Experiment(SHARP, SEEDS, {32: EVERY_RULE, 128: LONG}),
    "recurrent, 4 right": Experiment(HARMLESS, SEEDS, {32: EVERY_RULE, 128: LONG}),
    "attention, 1 right": Experiment(TWO_LAYERS, SEEDS, {32: EVERY_RULE}),
    "attention, 4 right": Experiment(TWO_LAYERS._replace(right_tokens=4), SEEDS, {32: EVERY_RULE}),
    # As many updates of as many sequences as in the others, but four on each rollout
    "recurrent, 1 right, 4 minibatches": Experiment(
        SHARP._replace(batch=128, minibatches=4, updates=50), FEWER_SEEDS, {32: IN_MINIBATCHES}
    ),
    "attention, 1 right, 4 minibatches": Experiment(
        TWO_LAYERS._replace(batch=128, minibatches=4, updates=50),
        FEWER_SEEDS,
        {32: IN_MINIBATCHES},
    ),
}
FIELDS = ["experiment", "length", "format", "top_p", "correction", "seed"]
FIELDS += ["learner", "actor", "dead", "start", "weight", "sample_size", "silent"]
PREDICTED = ["experiment", "length", "format", "top_p", "correction", "predicted", "why"]


def jobs() -> list[Job]:
    """All jobs. Those of the first seeds come first, in every experiment."""
    jobs = []
    for name, experiment in EXPERIMENTS.items():
        seeds = list(experiment.seeds)
        groups = [tuple(seeds[i : i + SEEDS_OF_JOB]) for i in range(0, len(seeds), SEEDS_OF_JOB)]
        jobs += [Job(name, length, group) for group in groups for length in experiment.arms]
    return sorted(jobs, key=lambda job: job.seeds)


def trained(job: Job) -> list[dict]:
    """One row for each arm and seed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    experiment = EXPERIMENTS[job.experiment]
    setting = experiment.setting._replace(length=job.length)
    laboratory = FirstRollout(setting, experiment.arms[job.length], list(job.seeds))
    rows = []
    for arm, seed, numbers in successes(laboratory):
        i = laboratory.arms.index(arm)
        j = job.seeds.index(seed)
        # Where all sequences of a prompt have the same reward, there is nothing to learn from
        rewards = torch.stack([reward[i, j] for reward in laboratory.actor_rewards])
        silent = ((rewards == 0) | (rewards == 1)).float().mean()
        row = {"experiment": job.experiment, "length": job.length, "format": arm.format}
        row |= {"top_p": arm.top_p, "correction": arm.correction, "seed": seed}
        row |= numbers
        row |= {
            "weight": f"{laboratory.weight[i, j]:.4g}",
            "sample_size": f"{laboratory.sample_size[i, j]:.4f}",
            "silent": f"{silent:.4f}",
        }
        rows.append(row)
    return rows


class FirstRollout(Laboratory):
    """A laboratory that keeps what its corrections made of the first rollout.

    `weight`       mean weight of the tokens, [arms, seeds]
    `sample_size`  Kish's effective sample size of the weights, as a share of all tokens
    """

    def update(self) -> None:
        super().update()
        if self.iteration > 1:
            return
        shape = (len(self.arms), len(self.seeds))
        log_ratio = self.rollout_log_ratio.unflatten(1, shape)  # [T, arms, seeds, B]
        self.weight = torch.empty(shape)
        self.sample_size = torch.empty(shape)
        for i, arm in enumerate(self.arms):
            # The rules here do not depend on the advantage
            advantage = torch.zeros_like(log_ratio[0, i])
            weight = mismatch_weight(arm.correction, log_ratio[:, i], advantage)
            mean = weight.mean((0, 2))
            self.weight[i] = mean
            self.sample_size[i] = mean**2 / weight.square().mean((0, 2))


def measure(out: Path, processes: int) -> None:
    """Trains all jobs whose rows are not in the file yet, and appends them."""
    journal = Journal(out, FIELDS)
    done = journal.done("experiment", "length", "seed")
    left = [
        job for job in jobs() if (job.experiment, str(job.length), str(job.seeds[0])) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=8) as pool:
        for i, rows in enumerate(pool.imap_unordered(trained, left)):
            journal.add(*rows)
            place = rows[0]
            print(f"{i + 1}/{len(left)}: {place['experiment']}, {place['seed']}", flush=True)


def actor_of(row: dict) -> str:
    """How the copy acts, in words."""
    return row["format"] if float(row["top_p"]) == 1 else f"{row['format']}, top-p {row['top_p']}"


def key_of(row: dict) -> Key:
    """The key of the cell to which a measured or predicted row belongs."""
    return row["experiment"], int(row["length"]), actor_of(row), row["correction"]


def places_of(cells: Iterable[tuple]) -> list[tuple[str, int, str]]:
    """Experiments, lengths and actors of cells, in the order in which they are shown."""
    experiments = list(EXPERIMENTS)

    def position(place: tuple[str, int, str]) -> tuple[int, int, bool, bool]:
        experiment, length, actor = place
        fewer_bits = actor.startswith("e8m2")
        return experiments.index(experiment), length, "top-p" in actor, fewer_bits

    return sorted(dict.fromkeys(key[:3] for key in cells if key[2] != "fp32"), key=position)


def loss_table(cells: dict[Key, Cell]) -> str:
    """The losses, a line for each experiment, length and actor."""
    rows = []
    for experiment, length, actor in places_of(cells):
        row = [experiment, length, actor]
        for rule in RULES:
            cell = cells.get((experiment, length, actor, rule))
            loss, low, high = (two_places(x) for x in cell[:3]) if cell else ("", "", "")
            row.append(f"{loss} [{low}, {high}]" if cell else "")
        rows.append(row)
    return table_of(("network, right tokens", "T", "who acts", *RULES.values()), rows)


def difference_table(rows: list[dict]) -> str:
    """How much more each rule loses than token weights truncated at 2, paired by seed."""
    success: dict[Key, dict[str, float]] = {}
    for row in rows:
        success.setdefault(key_of(row), {})[row["seed"]] = float(row["learner"])
    lines: dict[tuple[str, int, str], dict[str, str]] = {}
    for key, by_seed in success.items():
        place, rule = key[:3], key[3]
        if place[2] == "fp32" or "top-p" in place[2] or rule == BEST:
            continue
        seeds = sorted(by_seed)
        best = success[(*place, BEST)]
        reference = success[(*place[:2], "fp32", "none")]
        more = np.array([best[seed] - by_seed[seed] for seed in seeds])
        float32 = np.array([reference[seed] for seed in seeds])
        picks = np.random.default_rng(0).integers(len(seeds), size=(10_000, len(seeds)))
        resampled = more[picks].mean(1) / float32[picks].mean(1)
        numbers = [more.mean() / float32.mean(), *np.percentile(resampled, [2.5, 97.5])]
        loss, low, high = (two_places(float(x)) for x in numbers)
        lines.setdefault(place, {})[rule] = f"{loss} [{low}, {high}]"
    others = [rule for rule in RULES if rule != BEST]
    table = [
        [*place, *(lines[place].get(rule, "") for rule in others)] for place in places_of(lines)
    ]
    columns = ("network, right tokens", "T", "who acts", *(RULES[rule] for rule in others))
    return table_of(columns, table)


def minibatch_table(rows: list[dict]) -> str:
    """Losses with one and with four minibatches a rollout, on the seeds that have both."""
    suffix = ", 4 minibatches"
    in_four = {row["seed"] for row in rows if row["experiment"].endswith(suffix)}
    success: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row["seed"] in in_four:
            success.setdefault(key_of(row), {})[row["seed"]] = float(row["learner"])
    seeds = sorted(in_four)
    picks = np.random.default_rng(0).integers(len(seeds), size=(10_000, len(seeds)))
    everything = np.arange(len(seeds))[None]

    def losses(key: Key, picks: np.ndarray) -> np.ndarray:
        learner = np.array([success[key][seed] for seed in seeds])
        float32 = success[(*key[:2], "fp32", "none")]
        reference = np.array([float32[seed] for seed in seeds])
        return 1 - learner[picks].mean(1) / reference[picks].mean(1)

    table = []
    for key in success:
        four = (key[0] + suffix, *key[1:])
        if four not in success or key[2] == "fp32":
            continue
        numbers = [losses(key, everything)[0], losses(four, everything)[0]]
        low, high = np.percentile(losses(four, picks) - losses(key, picks), [2.5, 97.5])
        one, in_parts, more, low, high = map(
            two_places, (*numbers, numbers[1] - numbers[0], low, high)
        )
        table.append([key[0], key[2], RULES[key[3]], one, in_parts, f"{more} [{low}, {high}]"])
    columns = ("network, right tokens", "who acts", "rule", "one", "four", "more is lost by")
    return table_of(columns, table)


def rollout_table(cells: dict[Key, Cell], rows: list[dict]) -> str:
    """What top-p makes of rollouts and weights, beside the same in float32 from all tokens."""
    numbers: dict[Key, list[list[float]]] = {}
    for row in rows:
        measured = [float(row[name]) for name in ("weight", "sample_size", "silent", "start")]
        numbers.setdefault(key_of(row), []).append(measured)
    with_top_p = {key[:2] for key in numbers if "top-p" in key[2]}
    table = []
    for key, measured in numbers.items():
        experiment, length, actor, rule = key
        if not actor.startswith("fp32") or key[:2] not in with_top_p:
            continue
        weight, sample_size, silent, start = np.mean(measured, 0)
        cell = cells[key]
        table.append(
            [
                f"{experiment}, {length}",
                actor,
                RULES[rule],
                f"{weight:.2f}",
                f"{sample_size:.2f}",
                f"{silent:.0%}",
                f"{start:.2f}",
                f"{cell.learner:.2f}",
                f"{cell.actor:.2f}",
            ]
        )
    order = [f"{name}, {length}" for name, x in EXPERIMENTS.items() for length in x.arms]
    table.sort(key=lambda row: order.index(row[0]))
    columns = ("network, right tokens, T", "who acts", "rule", "mean weight", "sample size")
    columns += ("silent prompts", "learner before", "learner after", "actor after")
    return table_of(columns, table)


def foresight_table(cells: dict[Key, Cell], rows: list[dict], predicted: list[dict]) -> str:
    """How far the predictions are off, by rule, beside two guesses.

    One guess is that nothing is lost. The other is that nothing is learned: that the learner ends
    with the success with which it began.
    """
    starts: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        starts.setdefault((row["experiment"], int(row["length"])), []).append(float(row["start"]))
    standstill = {
        place: 1 - float(np.mean(values)) / cells[(*place, "fp32", "none")].learner
        for place, values in starts.items()
    }
    groups: dict[str, list[Key]] = {}
    said = {key_of(row): float(row["predicted"]) for row in predicted}
    for key in said:
        groups.setdefault(f"top-p {TOP_P}" if "top-p" in key[2] else RULES[key[3]], []).append(key)
    groups["all"] = list(said)
    table = []
    for name, keys in groups.items():
        losses = np.array([cells[key].loss for key in keys])
        errors = [
            np.mean([abs(said[key] - cells[key].loss) for key in keys]),
            np.mean(np.abs(losses)),
            np.mean([abs(standstill[key[:2]] - cells[key].loss) for key in keys]),
        ]
        inside = sum(cells[key].low <= said[key] <= cells[key].high for key in keys)
        table.append(
            [
                name,
                len(keys),
                f"{two_places(losses.min())} to {two_places(losses.max())}",
                *(f"{error:.3f}" for error in errors),
                f"{inside} of {len(keys)}",
            ]
        )
    columns = ("rule", "cells", "losses", "mean error: predicted", "nothing is lost")
    columns += ("nothing is learned", "predicted within the interval")
    return table_of(columns, table)


def table(out: Path) -> None:
    """Writes all tables, and the losses alone for the page."""
    rows = Journal(RESULTS / "stack_rules_measured.csv", FIELDS).rows()
    cells = cells_of([row | {"format": actor_of(row)} for row in rows])
    predicted = Journal(RESULTS / "stack_rules_predicted.csv", PREDICTED).rows()
    losses = loss_table(cells)
    made_by = f"`python benchmarks/stack_rules_in_lab.py table {out}` on {origin()}."
    parts = [
        "## Losses",
        losses,
        f"## How much more is lost than with {RULES[BEST]}, seed by seed",
        difference_table(rows),
        "## One minibatch and four",
        minibatch_table(rows),
        f"## Float32 with and without top-p {TOP_P}",
        rollout_table(cells, rows),
        "## How well the losses were foreseen",
        foresight_table(cells, rows, predicted),
        made_by,
    ]
    out.write_text("\n\n".join(parts) + "\n")
    out.with_stem(f"{out.stem}_short").write_text(f"{losses}\n\n{made_by}\n")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(words)
    if arguments.command == "measure":
        measure(arguments.out, arguments.processes)
    else:
        table(arguments.out)


if __name__ == "__main__":
    main()
