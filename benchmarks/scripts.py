"""Scripts that others wrote, unchanged: do the doctor's words hold?

Each script trains in float32 while the doctor watches, and under `python -m fp8rl.doctor keep` with
each of some real optimizers, in place of what it does by itself. What it ends with stands beside
what the doctor had said.

    python benchmarks/scripts.py run benchmarks/results/stacks_in_scripts.csv \\
        --cleanrl DIR --nanogpt DIR --mingpt DIR --examples DIR
    python benchmarks/scripts.py table benchmarks/results/stacks_in_scripts.md
    python benchmarks/scripts.py sample benchmarks/results/sampled.md --cleanrl DIR --nanogpt DIR

`sample` asks whether real optimizers on some blocks of each tensor say what they say on whole
tensors: both stand beside the same trainings, those whose cost speed/arms.py measures.

DIR are clones of vwxyzjn/cleanrl, karpathy/nanoGPT, karpathy/minGPT and pytorch/examples on GitHub.
CleanRL needs gymnasium 0.29 and tensorboard; FP8RL_STRANGERS is prepended to PYTHONPATH for them.
The optimizers need torchao, bitsandbytes and torch-optimi (benchmarks/requirements.txt). nanoGPT
learns the characters of a text that Python ships, and vae of pytorch/examples gets drawn strokes for
MNIST (stand_ins/torchvision).

`run` goes on where it was stopped. It keeps what the doctor says in NAME_words.csv, and its reports
in the clones. Without a script's lines in NAME_words.csv it is watched anew. With a script of your
own, `python -m fp8rl.doctor compare` asks the same.
"""

import argparse
import itertools
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from characters import characters
from results import Journal, table_of, write_tables

from fp8rl.bits.notation import TOLERATES
from fp8rl.doctor import Doctor
from fp8rl.doctor.copies import CopyShadow
from fp8rl.doctor.findings import NOT_JUDGED, WORDS


class Script(NamedTuple):
    """A training: what is run, and how its outcome is read from its output.

    `folder`     the option that names the clone it is in
    `arguments`  of Python, with {seed}
    `pattern`    of a number in a line of the output; the outcome is the mean of the `last` ones
    `higher`     whether more is better
    `start`      the outcome before training, for shares of what float32 gains
    `chosen`     whether it was used to choose how a loss is told; the others report
    `stop`       pattern of a line at which the script, which has no end of its own, is stopped
    """

    folder: str
    arguments: str
    pattern: str
    last: int
    higher: bool
    start: float
    chosen: bool = False
    stop: str = ""


RETURN = r"episodic_return=\[?\s*(-?[\d.]+)"
PPO = Script(
    "cleanrl", "cleanrl/ppo.py --total-timesteps 60000 --seed {seed}", RETURN, 20, True, 20
)
DQN = "cleanrl/dqn.py --total-timesteps {} --learning-starts 1000 --seed {{seed}}"


def nano_gpt(
    steps: int,
    every: int,
    rate: str,
    least: str,
    layers: int = 2,
    width: int = 64,
    length: int = 64,
    batch: int = 12,
    evaluations: int = 20,
    **fields,
) -> Script:
    """nanoGPT on a CPU, which has no option for a seed."""
    arguments = (
        f"train.py --dataset=pydoc --device=cpu --compile=False --eval_interval={every} "
        f"--eval_iters={evaluations} --log_interval=100 --block_size={length} "
        f"--batch_size={batch} --n_layer={layers} --n_head=4 --n_embd={width} --max_iters={steps} "
        f"--lr_decay_iters={steps} --warmup_iters=50 --dropout=0.0 "
        "--always_save_checkpoint=False --out_dir=out{seed} --gradient_accumulation_steps=1 "
        f"--learning_rate={rate} --min_lr={least}"
    )
    return Script("nanogpt", arguments, r"val loss ([\d.]+)", 1, False, 4.6, **fields)


# What is kept, as `keep` takes it
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
SCRIPTS = {
    "ppo, CartPole": PPO._replace(chosen=True),
    "nanoGPT at 0.001": nano_gpt(400, 100, "1e-3", "1e-4", chosen=True),
    "nanoGPT at 0.0001": nano_gpt(400, 100, "1e-4", "1e-5", chosen=True),
    "dqn, CartPole": Script("cleanrl", DQN.format(40000), RETURN, 20, True, 20),
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
BESIDE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import scripts; "
    "scripts.beside(*sys.argv[1:])"
)


def decoder(steps: int) -> Script:
    """nanoGPT with 14 million parameters."""
    return nano_gpt(steps, 1000, "3e-4", "3e-4", 8, 384, 128, 8, 1)


# What watching is measured on
WATCHED = {
    "decoder": decoder(16),
    "nanoGPT": nano_gpt(400, 1000, "3e-4", "3e-4", 4, 128, evaluations=1),  # its page's for a CPU
    "ppo": PPO,
    "td3": SCRIPTS["td3, Pendulum"],
}
SAMPLED = WATCHED | {"decoder": decoder(64)}  # two windows
WATCHING = "model=bf16 optimizer=torchao-8bit:eager optimizer=bnb-8bit optimizer=optimi-kahan"
FOLDERS = ("cleanrl", "nanogpt", "mingpt", "examples")
FLOAT32 = "float32"
DOCTOR = ("-m", "fp8rl.doctor")
LOST = 0.25  # a share of what float32 gains that is more than seeds differ by
A_LOSS = ("slower", "stalls", "diverges")  # words that claim one
CLAIMS = ("as float32", *A_LOSS)
SEVERITY = (NOT_JUDGED, *WORDS)  # from the mildest to the worst
# A line's `stack` is what is kept, or float32
OUTCOMES = ("script", "seed", "stack", "outcome")
SAID = ("script", "seed", "stack", "word", "rate", "last", "longest", "bytes")


# Trainings


def prepare_text(clone: Path) -> None:
    """Writes the characters of Python's own help as nanoGPT's dataset `pydoc`."""
    folder = clone / "data" / "pydoc"
    if (folder / "val.bin").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    learn, test, alphabet = characters()
    learn.numpy().astype(np.uint16).tofile(folder / "train.bin")
    test.numpy().astype(np.uint16).tofile(folder / "val.bin")
    meta = {"vocab_size": len(alphabet), "itos": [*alphabet], "stoi": {}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def output_of(script: Script, clone: Path, seed: int, under: list[str]) -> str:
    """The output of a script under other words of Python, such as DOCTOR."""
    paths = [os.environ.get("FP8RL_STRANGERS", ""), str(clone), os.environ.get("PYTHONPATH", "")]
    if script.folder == "examples":
        paths.insert(0, str(Path(__file__).parent / "stand_ins"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }
    words = [sys.executable, *under, *script.arguments.format(seed=seed).split()]
    lines = []
    with subprocess.Popen(
        words, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if script.stop and re.match(script.stop, line):
                process.terminate()
    return "".join(lines)


def outcome_of(script: Script, output: str) -> float:
    """What the script ended with; NaN if it did not get there."""
    numbers = [float(x) for x in re.findall(script.pattern, output)]
    return float(np.mean(numbers[-script.last :])) if numbers else float("nan")


def worst_findings(report: dict) -> dict[str, dict]:
    """The finding of each stack in the optimizer for which the word is worst."""
    findings = [x for optimizer in report["optimizers"] for x in optimizer["findings"]]
    by_severity = sorted(reversed(findings), key=lambda x: SEVERITY.index(x["verdict"]))
    # The last one of a stack, which is the worst, is left
    return {f"{x['place']}={x['format']}": x for x in by_severity}


def run(out: Path, clones: dict[str, Path]) -> None:
    """Makes the trainings that are not in the file yet, of scripts whose clones are there."""
    outcomes = Journal(out, OUTCOMES)
    said = Journal(words_of(out), SAID)
    done = outcomes.done("script", "seed", "stack")
    watched_before = said.done("script", "seed")
    if "nanogpt" in clones:
        prepare_text(clones["nanogpt"])
    there = [(name, script) for name, script in SCRIPTS.items() if script.folder in clones]
    for (name, script), seed in itertools.product(there, SEEDS):
        clone = clones[script.folder]
        report = clone / f"{out.stem}-{re.sub(r'[^a-z0-9.]+', '-', name)}-{seed}.json"
        watch = [*DOCTOR, "watch", "--formats", " ".join(STACKS), "--json", str(report)]
        arms = {FLOAT32: watch} | {stack: [*DOCTOR, "keep", stack] for stack in STACKS}
        for arm, under in arms.items():
            is_done = (name, str(seed), arm) in done
            is_said = arm != FLOAT32 or (name, str(seed)) in watched_before
            if is_done and is_said:
                continue
            outcome = outcome_of(script, output_of(script, clone, seed, under))
            if arm == FLOAT32:
                findings = worst_findings(json.loads(report.read_text()))
                for stack in STACKS:
                    add(said, name, seed, stack, *words_in(findings[stack]))
            if not is_done:
                add(outcomes, name, seed, arm, f"{outcome:.6g}")


def words_in(finding: dict) -> list[str]:
    """The word and the numbers of a finding, for SAID."""
    numbers = ("rate", "last", "longest_step", "bytes_per_parameter")
    cells = ["" if finding.get(x) is None else f"{finding[x]:.4g}" for x in numbers]
    return [finding["verdict"], *cells]


def add(journal: Journal, *cells) -> None:
    """Notes a line, and prints it."""
    journal.add(dict(zip(journal.columns, cells, strict=True)))
    print(*cells, flush=True)


def words_of(out: Path) -> Path:
    """The journal of what the doctor says, beside that of the outcomes."""
    return out.with_name(f"{out.stem}_words.csv")


# Did the words hold?


class Case(NamedTuple):
    """What became of a stack in one training.

    `end`    the outcome, and that of float32
    `lost`   what was lost, as a share of float32's gain
    `said`   a line of SAID
    """

    script: str
    stack: str
    end: float
    exact: float
    lost: float
    said: dict[str, str]

    @property
    def breaks(self) -> bool:
        return not self.lost < LOST  # NaN is a loss, too

    @property
    def holds(self) -> bool | None:
        """Whether the word is right; None if it claims neither a loss nor none."""
        word = self.said["word"]
        return self.breaks == (word in A_LOSS) if word in CLAIMS else None


def cases_of(out: Path) -> list[Case]:
    """The cases of which there are an outcome and words."""
    rows = Journal(out.with_suffix(".csv"), OUTCOMES).rows()
    ends = {(row["script"], row["seed"], row["stack"]): float(row["outcome"]) for row in rows}
    rows = Journal(words_of(out), SAID).rows()
    said = {(row["script"], row["seed"], row["stack"]): row for row in rows}
    cases = []
    for name, stack, seed in itertools.product(SCRIPTS, STACKS, map(str, SEEDS)):
        key = (name, seed, stack)
        if key in ends and key in said:
            exact = ends[name, seed, FLOAT32]
            lost = (exact - ends[key]) / (exact - SCRIPTS[name].start)
            cases.append(Case(name, stack, ends[key], exact, lost, said[key]))
    return cases


def breaks_others(case: Case, cases: list[Case]) -> bool:
    """What a lookup says: whether the same stack breaks most trainings of other scripts."""
    others = [x.breaks for x in cases if x.stack == case.stack and x.script != case.script]
    return sum(others) > len(others) / 2


def score(cases: list[Case], everything: list[Case]) -> str:
    """How often words and simpler guesses hold."""
    judged = [x for x in cases if x.holds is not None]
    words = sum(x.holds for x in judged)
    by_lookup = sum(x.breaks == breaks_others(x, everything) for x in judged)
    nothing = sum(not x.breaks for x in judged)
    cast = sum(x.breaks == x.stack.startswith("model=bf16") for x in judged)
    return (
        f"{words} of {len(judged)}; a lookup of what the same stack does in the other scripts "
        f'{by_lookup}; "nothing breaks" {nothing}; "model.bfloat16() breaks" {cast}'
    )


def table(out: Path) -> None:
    """What the doctor said, and what became of it, by script and stack."""
    cases = cases_of(out)
    by_line: dict[tuple, list[Case]] = {}
    for case in cases:
        by_line.setdefault((case.script, case.stack), []).append(case)
    lines = [line(*key, of_line) for key, of_line in by_line.items()]
    note = (
        "Returns, or losses in nats. Lost is a share of what float32 gains over the untrained "
        f'network; below 0 is better than float32. "As float32" should lose less than {LOST:.0%}, '
        '"slower", "stalls" and "diverges" more; the other words make no such claim. The longest '
        "step is in learning rates."
    )
    parts = [note]
    for words, chosen in {
        "where they were chosen": True,
        "in the scripts that report": False,
    }.items():
        group = [x for x in cases if SCRIPTS[x.script].chosen == chosen]
        parts.append(f"Words that hold {words}: {score(group, cases)}.")
    write_tables(out, table_of(lines[0], [x.values() for x in lines]), *parts)


def line(script: str, stack: str, cases: list[Case]) -> dict[str, str]:
    """A line of the table, by its columns, with all seeds."""
    digits = 0 if SCRIPTS[script].higher else 3
    longest = [float(x.said["longest"]) for x in cases if x.said["longest"]]
    held = {True: "yes", False: "no", None: "no claim"}
    words = [f"{float(x.said['rate'] or 'nan'):.2f}, {x.said['word']}" for x in cases]
    return {
        "script": script,
        "kept": f"`{stack}`",
        "the doctor: rate and word": "; ".join(words),
        "longest step": f"{max(longest):.3g}" if longest else "",
        "float32": ", ".join(f"{x.exact:.{digits}f}" for x in cases),
        "with it": ", ".join(f"{x.end:.{digits}f}" for x in cases),
        "lost": ", ".join(f"{x.lost:.2f}" for x in cases),
        "held": ", ".join(held[x.holds] for x in cases),
    }


# Is a sample of blocks as good as whole tensors?


def beside(script: str, *words: str) -> None:
    """Runs a script beside real optimizers on blocks and on whole tensors. The last line of its
    output has what both have found (`found_by`)."""
    doctors = [Doctor(formats=WATCHING.split(), whole=whole) for whole in (False, True)]
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).parent)
    with doctors[0].installed(), doctors[1].installed():
        runpy.run_path(script, run_name="__main__")
    print(json.dumps([*map(found_by, doctors)]))


def found_by(doctor: Doctor) -> list[dict[str, tuple]]:
    """Of each optimizer, by stack: the word, whether another one is possible, and of each tensor
    the rate with its error."""
    doctor.replay()

    def found(shadow: CopyShadow) -> tuple:
        (finding,) = shadow.findings(TOLERATES)
        return finding.verdict, "perhaps" in finding.why, shadow.ruler.reading(0).tensors

    return [
        {x.entry.text: found(x) for x in patient.watcher.shadows if isinstance(x, CopyShadow)}
        for patient in doctor.patients
    ]


def agree(one: list[float], other: list[float]) -> bool:
    """Whether two rates, each with its standard error, differ by no more than two errors."""
    (rate, error), (other_rate, other_error) = np.nan_to_num([one, other])
    return abs(rate - other_rate) <= 2 * np.hypot(error, other_error) + 1e-6


def sample(out: Path, clones: dict[str, Path]) -> None:
    """Makes the trainings, and the table of how often rates and words agree."""
    prepare_text(clones["nanogpt"])
    lines = []
    for (name, script), seed in itertools.product(SAMPLED.items(), SEEDS):
        output = output_of(script, clones[script.folder], seed, ["-c", BESIDE])
        for sampled, whole in zip(*json.loads(output.splitlines()[-1]), strict=True):
            for stack, (word, perhaps, tensors) in sampled.items():
                word_of_whole, _, of_whole = whole[stack]
                agreeing = sum(agree(tensors[x], of_whole[x]) for x in tensors)
                cells = len(tensors), agreeing, word, word_of_whole, "yes" if perhaps else ""
                lines.append((name, seed, stack, *cells))
                print(*lines[-1], flush=True)
    heads = ("script", "seed", "stack", "tensors", "agree", "word", "word of whole", "perhaps")
    tensors, agreeing = (sum(x[i] for x in lines) for i in (3, 4))
    sure = [x for x in lines if not x[-1]]
    note = (
        f"Rates of {agreeing} of {tensors} tensors ({agreeing / tensors:.1%}) differ by no more "
        f"than two standard errors. Words are the same in {sum(x[5] == x[6] for x in sure)} of "
        f'{len(sure)} lines without "perhaps".'
    )
    write_tables(out, table_of(heads, lines), note, short=note)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["run", "table", "sample"])
    parser.add_argument("out", type=Path)
    for folder in FOLDERS:
        parser.add_argument(f"--{folder}", type=Path)
    options = parser.parse_args(words)
    if options.command == "table":
        table(options.out)
        return
    clones = {name: getattr(options, name) for name in FOLDERS}
    clones = {name: path.resolve() for name, path in clones.items() if path}
    {"run": run, "sample": sample}[options.command](options.out, clones)


if __name__ == "__main__":
    main()
