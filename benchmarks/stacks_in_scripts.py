"""Scripts that others wrote, with real optimizers of other packages: do the doctor's words hold?

`train` runs each script in float32, and under `python -m fp8rl.doctor keep` with each of eight real
optimizers in place of its own. `watch` runs it in float32 with all eight beside it, and notes the
doctor's rate and word. `table` puts them side by side.

    python benchmarks/stacks_in_scripts.py train benchmarks/results/stacks_in_scripts.csv \\
        --cleanrl DIR --nanogpt DIR --mingpt DIR --examples DIR
    python benchmarks/stacks_in_scripts.py watch benchmarks/results/stacks_in_scripts.csv ...
    python benchmarks/stacks_in_scripts.py table benchmarks/results/stacks_in_scripts.md

DIR are clones of vwxyzjn/cleanrl, karpathy/nanoGPT, karpathy/minGPT and pytorch/examples on GitHub.
CleanRL needs gymnasium 0.29 and tensorboard; the optimizers need torchao, bitsandbytes and
torch-optimi (benchmarks/requirements.txt); vae of pytorch/examples gets drawn strokes for MNIST
(stand_ins/torchvision). Both go on where they were stopped.

How a loss is told was chosen on CleanRL's ppo and on nanoGPT. The other scripts report.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from files import Journal, table_of
from strangers import RETURN, VALIDATION, prepare_text

from fp8rl.doctor.findings import NOT_JUDGED, WORDS
from fp8rl.machine.hardware import origin

STACKS = (
    "model=bf16",
    "model=bf16:fused",
    "optimizer=optimi-kahan",
    "optimizer=torchao-stochastic",
    "optimizer=torchao-8bit",
    "optimizer=torchao-fp8",
    "optimizer=torchao-4bit",
    "optimizer=bnb-8bit",
)
LOST = 0.25  # a share of what float32 gains that is more than seeds differ by
NO_LOSS = ("as float32",)
A_LOSS = ("slower", "stalls", "diverges")
SEVERITY = (NOT_JUDGED, *WORDS)  # from the mildest to the worst
OUTCOMES = ("script", "seed", "stack", "outcome")
WORDS_COLUMNS = ("script", "seed", "stack", "word", "rate", "last", "longest", "bytes")


class Script(NamedTuple):
    """A training: what is run, and how its outcome is read from its output.

    `folder`     the option that names the clone it is in
    `arguments`  of Python, with {seed}
    `pattern`    of a number in the output; the outcome is the mean of the `last` ones
    `higher`     whether more is better
    `start`      the outcome before training, for shares of what float32 gains
    `chosen`     whether it was used to choose how a loss is told
    `stop`       pattern of the output at which the script, which has no end of its own, is stopped
    """

    folder: str
    arguments: str
    pattern: str
    last: int
    higher: bool
    start: float
    chosen: bool = False
    stop: str = ""


GPT = (
    "train.py --dataset=pydoc --device=cpu --compile=False --eval_interval=100 --eval_iters=20 "
    "--log_interval=100 --block_size=64 --batch_size=12 --n_layer=2 --n_head=4 --n_embd=64 "
    "--max_iters=400 --lr_decay_iters=400 --warmup_iters=50 --dropout=0.0 "
    "--always_save_checkpoint=False --out_dir=out{seed} --gradient_accumulation_steps=1 "
)
SCRIPTS = {
    "ppo, CartPole": Script(
        "cleanrl",
        "cleanrl/ppo.py --total-timesteps 60000 --seed {seed}",
        RETURN,
        20,
        True,
        20,
        chosen=True,
    ),
    "nanoGPT at 0.001": Script(
        "nanogpt",
        GPT + "--learning_rate=1e-3 --min_lr=1e-4",
        VALIDATION,
        1,
        False,
        4.6,
        chosen=True,
    ),
    "nanoGPT at 0.0001": Script(
        "nanogpt",
        GPT + "--learning_rate=1e-4 --min_lr=1e-5",
        VALIDATION,
        1,
        False,
        4.6,
        chosen=True,
    ),
    "dqn, CartPole": Script(
        "cleanrl",
        "cleanrl/dqn.py --total-timesteps 40000 --learning-starts 1000 --seed {seed}",
        RETURN,
        20,
        True,
        20,
    ),
    "td3, Pendulum": Script(
        "cleanrl",
        "cleanrl/td3_continuous_action.py --env-id Pendulum-v1 --total-timesteps 7000 "
        "--learning-starts 1000 --seed {seed}",
        RETURN,
        10,
        True,
        -1400,
    ),
    "minGPT's adder": Script(
        "mingpt",
        "projects/adder/adder.py --trainer.max_iters=1000 --trainer.num_workers=0 "
        "--system.seed={seed} --system.work_dir=out{seed}",
        r"train loss ([\d.]+)",
        10,
        False,
        2.4,
    ),
    "torch's vae": Script(
        "examples",
        "vae/main.py --no-accel --epochs 8 --log-interval 1000 --seed {seed}",
        r"Test set loss: ([\d.]+)",
        1,
        False,
        543,  # 784 pixels at log 2
    ),
    "torch's actor_critic": Script(
        "examples",
        "reinforcement_learning/actor_critic.py --seed {seed}",
        r"Average reward: ([\d.]+)",
        1,
        True,
        10,
        stop=r"Episode 300\t",
    ),
}
SEEDS = (1, 2)


def output_of(script: Script, clone: Path, seed: int, doctor: list[str]) -> str:
    """The output of a script under the doctor's command."""
    words = [sys.executable, "-u", *(["-m", "fp8rl.doctor"] if doctor else []), *doctor]
    words += script.arguments.format(seed=seed).split()
    paths = [os.environ.get("FP8RL_STRANGERS", ""), str(clone), os.environ.get("PYTHONPATH", "")]
    if script.folder == "examples":
        paths.insert(0, str(Path(__file__).parent / "stand_ins"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    lines = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for line in process.stdout:
            lines.append(line)
            if script.stop and re.match(script.stop, line):
                process.send_signal(signal.SIGTERM)
        code = process.wait()
        if code and not script.stop:
            errors.seek(0)
            print(errors.read()[-600:], file=sys.stderr)
    return "".join(lines)


def outcome_of(script: Script, output: str) -> float:
    """What the script ended with; NaN if it did not get there."""
    numbers = [float(x) for x in re.findall(script.pattern, output)]
    return float(np.mean(numbers[-script.last :])) if numbers else float("nan")


def worst_findings(report: dict) -> dict[str, dict]:
    """The finding of each stack in the optimizer for which the word is worst."""
    by_stack: dict[str, dict] = {}
    for optimizer in report["optimizers"]:
        for finding in optimizer["findings"]:
            text = f"{finding['place']}={finding['format']}"
            known = by_stack.setdefault(text, finding)
            by_stack[text] = max(known, finding, key=lambda own: SEVERITY.index(own["verdict"]))
    return by_stack


def train(out: Path, clones: dict[str, Path], only: list[str]) -> None:
    """Trains each script in float32, and with each stack in place of its own optimizer."""
    journal = Journal(out, OUTCOMES)
    for name, seed, script, clone in trainings(clones, only):
        done = journal.done("script", "seed", "stack")
        for stack in ("float32", *STACKS):
            if (name, str(seed), stack) in done:
                continue
            doctor = [] if stack == "float32" else ["keep", stack]
            outcome = outcome_of(script, output_of(script, clone, seed, doctor))
            add(journal, name, seed, stack, f"{outcome:.6g}")


def watch(out: Path, clones: dict[str, Path], only: list[str]) -> None:
    """Watches each script in float32 with all stacks beside it, and notes what the doctor says."""
    journal = Journal(out, WORDS_COLUMNS)
    done = journal.done("script", "seed")
    for name, seed, script, clone in trainings(clones, only):
        if (name, str(seed)) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            output_of(
                script,
                clone,
                seed,
                ["watch", "--formats", " ".join(STACKS), "--json", str(report)],
            )
            findings = worst_findings(json.loads(report.read_text()))
        for stack in STACKS:
            finding = findings[stack]
            numbers = ("rate", "last", "longest_step", "bytes_per_parameter")
            cells = ["" if finding[x] is None else f"{finding[x]:.4g}" for x in numbers]
            add(journal, name, seed, stack, finding["verdict"], *cells)


def trainings(clones: dict[str, Path], only: list[str]) -> Iterator[tuple[str, int, Script, Path]]:
    """Name, seed, script and folder of every training whose clone is there."""
    for name, script in SCRIPTS.items():
        if (only and name not in only) or script.folder not in clones:
            continue
        clone = clones[script.folder]
        if script.folder == "nanogpt":
            prepare_text(clone)
        for seed in SEEDS:
            yield name, seed, script, clone


def add(journal: Journal, *cells) -> None:
    """Notes a finished training."""
    journal.add(dict(zip(journal.columns, cells, strict=True)))
    print(*cells, flush=True)


class Outcome(NamedTuple):
    """What became of a stack in one training, as a share of float32's gain that is lost."""

    script: str
    seed: str
    stack: str
    word: str
    lost: float

    @property
    def claims(self) -> bool:
        return self.word in (*NO_LOSS, *A_LOSS)

    @property
    def breaks(self) -> bool:
        return not self.lost < LOST  # NaN is a loss, too

    @property
    def holds(self) -> bool:
        return self.breaks == (self.word in A_LOSS)


def outcomes_of(ends: dict, words: dict) -> list[Outcome]:
    """What became of each stack in each training, from the outcomes and the words by script, seed
    and stack."""
    outcomes = []
    for (name, seed, stack), said in words.items():
        if (name, seed, stack) not in ends:
            continue
        exact = ends[name, seed, "float32"]
        lost = (exact - ends[name, seed, stack]) / (exact - SCRIPTS[name].start)
        outcomes.append(Outcome(name, seed, stack, said["word"], lost))
    return outcomes


def lookup(own: Outcome, outcomes: list[Outcome]) -> bool:
    """Whether the same stack loses in most of the other scripts."""
    others = [x.breaks for x in outcomes if x.stack == own.stack and x.script != own.script]
    return bool(others) and float(np.mean(others)) > 0.5


def score(outcomes: list[Outcome], everything: list[Outcome]) -> str:
    """How often words and baselines hold."""
    judged = [own for own in outcomes if own.claims]
    count = len(judged)
    words = sum(own.holds for own in judged)
    by_lookup = sum(own.breaks == lookup(own, everything) for own in judged)
    nothing = sum(not own.breaks for own in judged)
    nearest = sum(own.breaks == own.stack.startswith("model=bf16") for own in judged)
    return (
        f"{words} of {count}; a lookup of what the same optimizer does in the other scripts "
        f'{by_lookup}; "nothing breaks" {nothing}; "model.bfloat16() breaks" {nearest}'
    )


def table(out: Path) -> None:
    """What the doctor said, and what became of it, by script and stack."""
    ends = {
        (row["script"], row["seed"], row["stack"]): float(row["outcome"])
        for row in Journal(out.with_suffix(".csv"), OUTCOMES).rows()
    }
    words = {
        (row["script"], row["seed"], row["stack"]): row
        for row in Journal(words_of(out), WORDS_COLUMNS).rows()
    }
    outcomes = outcomes_of(ends, words)
    lines = []
    for name, script in SCRIPTS.items():
        digits = 0 if script.higher else 3
        for stack in STACKS:
            own = [x for x in outcomes if x.script == name and x.stack == stack]
            if not own:
                continue
            said = [words[name, x.seed, stack] for x in own]
            exact = ", ".join(f"{ends[name, x.seed, 'float32']:.{digits}f}" for x in own)
            kept = ", ".join(f"{ends[name, x.seed, stack]:.{digits}f}" for x in own)
            rates = "; ".join(f"{float(row['rate'] or 'nan'):.2f}, {row['word']}" for row in said)
            longest = max(float(row["longest"] or "nan") for row in said)
            lost = ", ".join(f"{x.lost:.2f}" for x in own)
            held = ", ".join(("yes" if x.holds else "no") if x.claims else "no claim" for x in own)
            lines.append([name, f"`{stack}`", rates, f"{longest:.3g}", exact, kept, lost, held])
    columns = (
        "script",
        "real optimizer",
        "the doctor: rate and word, by seed",
        "longest step",
        "float32",
        "with it",
        "lost",
        "held",
    )
    chosen = [x for x in outcomes if SCRIPTS[x.script].chosen]
    reported = [x for x in outcomes if not SCRIPTS[x.script].chosen]
    note = (
        "Returns, or losses in nats. Lost is a share of what float32 gains over the untrained "
        f'network; below 0 is better than float32. "As float32" should lose less than {LOST:.0%}, '
        '"slower", "stalls" and "diverges" more; the other words make no such claim. The longest '
        "step is in learning rates.\n\n"
        f"Words that hold where they were chosen (ppo, nanoGPT): {score(chosen, outcomes)}.\n\n"
        f"Words that hold in the scripts that report: {score(reported, outcomes)}."
    )
    command = f"`python benchmarks/stacks_in_scripts.py table {out}` on {origin()}."
    out.write_text(f"{table_of(columns, lines)}\n\n{note}\n\n{command}\n")


def words_of(out: Path) -> Path:
    """The journal of what the doctor says, beside that of the outcomes."""
    return out.with_name(f"{out.stem}_words.csv")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["train", "watch", "table"])
    parser.add_argument("out", type=Path)
    folders = ("cleanrl", "nanogpt", "mingpt", "examples")
    for folder in folders:
        parser.add_argument(f"--{folder}", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args(words)
    if arguments.command == "table":
        table(arguments.out)
        return
    clones = {name: getattr(arguments, name) for name in folders}
    clones = {name: path.resolve() for name, path in clones.items() if path}
    if arguments.command == "train":
        train(arguments.out, clones, arguments.only)
    else:
        watch(words_of(arguments.out), clones, arguments.only)


if __name__ == "__main__":
    main()
