"""Scripts that others wrote, unchanged: do the doctor's words hold?

Each script trains in float32 while the doctor watches, and under `python -m fp8rl.doctor keep` with
each of some formats, or real optimizers of other packages, in place of what it does by itself. What
it ends with stands beside what the doctor had said. Where there are *twins*, law.py also trains the
script in float32 at the learning rates that were measured.

    python benchmarks/scripts.py run benchmarks/results/strangers.csv --cleanrl DIR --nanogpt DIR
    python benchmarks/scripts.py table benchmarks/results/strangers.md
    python benchmarks/scripts.py run benchmarks/results/stacks_in_scripts.csv \\
        --cleanrl DIR --nanogpt DIR --mingpt DIR --examples DIR
    python benchmarks/scripts.py table benchmarks/results/stacks_in_scripts.md

The name of the file chooses one of STUDIES. DIR are clones of vwxyzjn/cleanrl, karpathy/nanoGPT,
karpathy/minGPT and pytorch/examples on GitHub. CleanRL needs gymnasium 0.29 and tensorboard;
FP8RL_STRANGERS is prepended to PYTHONPATH for them. The optimizers need torchao, bitsandbytes and
torch-optimi (benchmarks/requirements.txt). nanoGPT learns the characters of a text that Python
ships, and vae of pytorch/examples gets drawn strokes for MNIST (stand_ins/torchvision).

`run` goes on where it was stopped. It keeps what the doctor says in NAME_words.csv, and its reports
in the clones. Without a script's lines in NAME_words.csv it is watched anew. With a script of your own, `python -m fp8rl.doctor compare` asks the same.
"""

import argparse
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from characters import characters
from results import Journal, table_of, write_tables

from fp8rl.doctor.findings import NOT_JUDGED, WORDS


class Script(NamedTuple):
    """A training: what is run, and how its outcome is read from its output.

    `folder`     the option that names the clone it is in
    `arguments`  of Python, with {seed}
    `pattern`    of a number in a line of the output; the outcome is the mean of the `last` ones
    `higher`     whether more is better
    `start`      the outcome before training, for shares of what float32 gains
    `seeds`      of the trainings
    `chosen`     whether it was used to choose how a loss is told; the others report
    `stop`       pattern of a line at which the script, which has no end of its own, is stopped
    """

    folder: str
    arguments: str
    pattern: str
    last: int
    higher: bool
    start: float
    seeds: tuple[int, ...] = (1, 2)
    chosen: bool = False
    stop: str = ""


class Study(NamedTuple):
    """Scripts, and what is kept in each of them.

    `stacks`     formats or real optimizers, as `keep` takes them
    `has_twins`  whether a twin trains, too. Then the first seed alone is watched, and it foretells
                 all seeds of its script, of which the means count. Else each seed is a case.
    """

    stacks: tuple[str, ...]
    scripts: dict[str, Script]
    has_twins: bool


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


STUDIES = {
    "strangers": Study(
        (
            "weights=bf16",
            "weights=bf16:stochastic",
            "weights=e4m3",
            "m=e4m3:unscaled",
            "v=e5m2:independent",
            "root=e4m3:unscaled:independent",
        ),
        {
            "ppo, CartPole": PPO,
            "nanoGPT at 0.001": nano_gpt(600, 200, "1e-3", "1e-3", seeds=(1,)),
            "nanoGPT at 0.0001": nano_gpt(600, 200, "1e-4", "1e-4", seeds=(1,)),
            "dqn, CartPole": Script("cleanrl", DQN.format(60000), RETURN, 20, True, 20),
            "c51, CartPole": Script(
                "cleanrl",
                "cleanrl/c51.py --total-timesteps 40000 --learning-starts 1000 --seed {seed}",
                RETURN,
                20,
                True,
                20,
                seeds=(1,),
            ),
        },
        has_twins=True,
    ),
    "stacks_in_scripts": Study(
        (
            "model=bf16",
            "model=bf16:fused",
            "optimizer=optimi-kahan",
            "optimizer=torchao-stochastic",
            "optimizer=torchao-8bit",
            "optimizer=torchao-fp8",
            "optimizer=torchao-4bit",
            "optimizer=bnb-8bit",
        ),
        {
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
        },
        has_twins=False,
    ),
}
FOLDERS = ("cleanrl", "nanogpt", "mingpt", "examples")
FLOAT32 = "float32"
DOCTOR = ("-m", "fp8rl.doctor")
TWIN = (str(Path(__file__).with_name("law.py")),)
LOST = 0.25  # a share of what float32 gains that is more than seeds differ by
A_LOSS = ("slower", "stalls", "diverges")  # words that claim one
CLAIMS = ("as float32", *A_LOSS)
SEVERITY = (NOT_JUDGED, *WORDS)  # from the mildest to the worst
# A line's `stack` is what is kept, float32, or "twin" and what it is the twin of
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
    """The output of a script under other words of Python, such as DOCTOR or TWIN, or without any."""
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
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            words, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for line in process.stdout:
            lines.append(line)
            if script.stop and re.match(script.stop, line):
                process.send_signal(signal.SIGTERM)
        if process.wait() and not script.stop:
            errors.seek(0)
            print(errors.read()[-600:], file=sys.stderr)
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


def arms_of(study: Study, report: Path, is_watched: bool) -> dict[str, list[str]]:
    """The words of Python under which a script trains, float32 first."""
    formats = " ".join(study.stacks)
    watch = [*DOCTOR, "watch", "--formats", formats, "--json", str(report)]
    if study.has_twins:  # the report that twins need
        watch = [*TWIN, "watch", formats, str(report)]
    arms = {FLOAT32: watch if is_watched else []}
    for stack in study.stacks:
        arms[stack] = [*DOCTOR, "keep", stack]
        if study.has_twins:
            arms[f"twin {stack}"] = [*TWIN, "train", stack, str(report)]
    return arms


def run(out: Path, clones: dict[str, Path], only: list[str]) -> None:
    """Makes the trainings that are not in the file yet, of scripts whose clones are there."""
    study = STUDIES[out.stem]
    outcomes = Journal(out, OUTCOMES)
    said = Journal(words_of(out), SAID)
    done = outcomes.done("script", "seed", "stack")
    watched_before = said.done("script", "seed")
    for name, script in study.scripts.items():
        if script.folder not in clones or (only and name not in only):
            continue
        clone = clones[script.folder]
        if script.folder == "nanogpt":
            prepare_text(clone)
        for seed in script.seeds:
            watched = script.seeds[0] if study.has_twins else seed
            report = clone / f"{out.stem}-{re.sub(r'[^a-z0-9.]+', '-', name)}-{watched}.json"
            for arm, under in arms_of(study, report, seed == watched).items():
                is_done = (name, str(seed), arm) in done
                is_said = arm != FLOAT32 or not under or (name, str(seed)) in watched_before
                if is_done and is_said:
                    continue
                outcome = outcome_of(script, output_of(script, clone, seed, under))
                if arm == FLOAT32 and under:
                    findings = worst_findings(json.loads(report.read_text()))
                    for stack in study.stacks:
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
    """What became of a stack in one training, or in all of a script's, as a share of float32's gain.

    `lost`  of the script with the stack
    `twin`  of its twin; NaN if there is none
    """

    script: str
    stack: str
    seeds: list[str]
    word: str
    lost: float
    twin: float

    @property
    def breaks(self) -> bool:
        return not self.lost < LOST  # NaN is a loss, too

    @property
    def holds(self) -> bool | None:
        """Whether the word is right; None if it claims neither a loss nor none."""
        return self.breaks == (self.word in A_LOSS) if self.word in CLAIMS else None


def cases_of(study: Study, ends: dict, said: dict) -> list[Case]:
    """The cases of a study, from outcomes and words by script, seed and stack."""
    cases = []
    for name, script in study.scripts.items():
        for stack in study.stacks:
            seeds = [seed for seed in map(str, script.seeds) if (name, seed, stack) in ends]
            for group in [seeds] if study.has_twins else [[seed] for seed in seeds]:
                if not group or (name, group[0], stack) not in said:
                    continue
                exact, kept, twin = (
                    np.mean([ends.get((name, seed, arm), np.nan) for seed in group])
                    for arm in (FLOAT32, stack, f"twin {stack}")
                )
                gain = exact - script.start
                word = said[name, group[0], stack]["word"]
                losses = float((exact - kept) / gain), float((exact - twin) / gain)
                cases.append(Case(name, stack, group, word, *losses))
    return cases


def clipped(loss: float) -> float:
    return float(np.clip(loss, -1, 1.5))


def lookup(own: Case, cases: list[Case]) -> list[float]:
    """What the same stack loses in the other scripts."""
    return [clipped(x.lost) for x in cases if x.stack == own.stack and x.script != own.script]


def looked_up(own: Case, cases: list[Case], study: Study) -> bool:
    """Whether a lookup says that a stack breaks a script: by the mean of what it loses in the others
    or, where each seed is a case, by what it does in most of them."""
    others = lookup(own, cases)
    if study.has_twins:
        return float(np.mean(others)) >= LOST
    return bool(others) and float(np.mean([not x < LOST for x in others])) > 0.5


def score(cases: list[Case], everything: list[Case], study: Study) -> str:
    """How often words and simpler guesses hold."""
    judged = [x for x in cases if x.holds is not None]
    words = sum(x.holds for x in judged)
    by_lookup = sum(x.breaks == looked_up(x, everything, study) for x in judged)
    nothing = sum(not x.breaks for x in judged)
    cast = sum(x.breaks == x.stack.startswith("model=bf16") for x in judged)
    return (
        f"{words} of {len(judged)}; a lookup of what the same stack does in the other scripts "
        f'{by_lookup}; "nothing breaks" {nothing}; "model.bfloat16() breaks" {cast}'
    )


def table(out: Path) -> None:
    """What the doctor said, and what became of it, by script and stack."""
    study = STUDIES[out.stem]
    rows = Journal(out.with_suffix(".csv"), OUTCOMES).rows()
    ends = {(row["script"], row["seed"], row["stack"]): float(row["outcome"]) for row in rows}
    rows = Journal(words_of(out), SAID).rows()
    said = {(row["script"], row["seed"], row["stack"]): row for row in rows}
    cases = cases_of(study, ends, said)
    lines = []
    for name, stack in dict.fromkeys((x.script, x.stack) for x in cases):
        own = [x for x in cases if (x.script, x.stack) == (name, stack)]
        lines.append(line(study.scripts[name], own, ends, said))
    shown = [column for column in lines[0] if any(row[column] for row in lines)]
    note = (
        "Returns, or losses in nats. Lost is a share of what float32 gains over the untrained "
        f'network; below 0 is better than float32. "As float32" should lose less than {LOST:.0%}, '
        '"slower", "stalls" and "diverges" more; the other words make no such claim. The longest '
        "step is in learning rates."
    )
    groups = {
        "Words that hold where they were chosen": [
            x for x in cases if study.scripts[x.script].chosen
        ],
        "Words that hold in the scripts that report": [
            x for x in cases if not study.scripts[x.script].chosen
        ],
    }
    parts = [note]
    parts += [f"{x}: {score(group, cases, study)}." for x, group in groups.items() if group]
    if study.has_twins:
        twins = np.mean([abs(clipped(x.lost) - clipped(x.twin)) for x in cases])
        others = np.mean([abs(clipped(x.lost) - np.mean(lookup(x, cases))) for x in cases])
        parts.append(
            f"The twin is {twins:.2f} off on average, the lookup {others:.2f}, where losses beyond "
            "-1 and 1.5 count as these."
        )
    cells = [[row[column] for column in shown] for row in lines]
    write_tables(out, table_of(shown, cells), *parts)


def line(script: Script, own: list[Case], ends: dict, said: dict) -> dict[str, str]:
    """A line of the table, by its columns. A column without any cell is left out of it."""
    name, stack = own[0].script, own[0].stack
    digits = 0 if script.higher else 3

    def outcomes(arm: str) -> str:
        keys = [(name, seed, arm) for x in own for seed in x.seeds]
        return ", ".join(f"{ends[key]:.{digits}f}" for key in keys if key in ends)

    words = [said[name, x.seeds[0], stack] for x in own]
    longest = [float(row["longest"]) for row in words if row["longest"]]
    held = {True: "yes", False: "no", None: "no claim"}
    return {
        "script": name,
        "kept": f"`{stack}`",
        "the doctor: rate and word": "; ".join(
            f"{float(row['rate'] or 'nan'):.2f}, {row['word']}" for row in words
        ),
        "longest step": f"{max(longest):.3g}" if longest else "",
        "float32": outcomes(FLOAT32),
        "with it": outcomes(stack),
        "its twin": outcomes(f"twin {stack}"),
        "lost": ", ".join(f"{x.lost:.2f}" for x in own),
        "the twin lost": ", ".join(f"{x.twin:.2f}" for x in own if not np.isnan(x.twin)),
        "held": ", ".join(held[x.holds] for x in own),
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("out", type=Path)
    for folder in FOLDERS:
        parser.add_argument(f"--{folder}", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args(words)
    if options.command == "table":
        table(options.out)
        return
    clones = {name: getattr(options, name) for name in FOLDERS}
    clones = {name: path.resolve() for name, path in clones.items() if path}
    run(options.out, clones, options.only)


if __name__ == "__main__":
    main()
