"""How long does one wait for what one does with this project, from the shell?

Whole processes are timed from their start to their end, imports included. Beside some of them
stands what one would use instead for the same work. The processes of a row take turns, and the
table has medians over the rounds. A ratio is the median of the ratios within a round.

    demo, demo_again  make demo in a fresh clone, which installs the environment first, and a second
                      time there. The installation depends on the package index and on caches.
    test              make test in a fresh clone whose environment is ready
    train             python -m fp8rl train: 100,000 steps of the cart with the defaults, with
                      evaluations, checkpoint and figure. Beside it are a script in CleanRL's style
                      and Stable-Baselines3's A2C and PPO for as many steps, without evaluations
    study             python -m fp8rl study with its defaults: 30 seeds in each of four precisions.
                      Beside it are 120 agents in JAX under vmap, in float32, which learn as often
                      from as many rows, without evaluations and files
    watch             python -m fp8rl.doctor watch on CleanRL's ppo.py, beside the script alone. It
                      needs --cleanrl DIR, a clone of github.com/vwxyzjn/cleanrl (see strangers.py)
    import            python -c "from fp8rl.bits import Doctor", beside python -c "import torch"

    python benchmarks/waits.py benchmarks/results/waits.md
    python benchmarks/waits.py build/waits.md --only train import --rounds 1
    python benchmarks/waits.py build/waits.md --only train --avx2    # without newer instructions
    python benchmarks/waits.py build/waits.md --only train --profile # prints where the time goes

Every process that has ended goes to a .csv beside the table, and the benchmark goes on with those
that are missing on this machine. So the rows of one table may come from several machines. What
cannot be measured, because a library or a clone is missing, is left out, and the script says so.
"""

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import strangers

from fp8rl.cli.throughput import origin
from fp8rl.machine.hardware import cores, hardware

ROOT = Path(__file__).parent.parent
SPEED = ROOT / "benchmarks/speed"
FIRST_SEED = 1000  # no setting was chosen on these seeds
STEPS = 100_000

# A study trains 48 iterations with 17 updates each: one on 2,048 new rows, 16 on 1,024 replayed
# ones. JAX's loop learns 9 times from each of 97 rollouts of 1,024 rows.
STUDY_SHAPE = {"num-envs": 16, "rollout-length": 64, "updates": 9, "steps": STEPS}
STUDY_AGENTS = 4 * 30


class Command(NamedTuple):
    """A process to be timed.

    `words`        the program and its arguments
    `folder`       the working directory
    `environment`  variables that it has beside those of this process
    """

    words: list[str]
    folder: Path = ROOT
    environment: dict[str, str] = {}


class Contestant(NamedTuple):
    """One line of the table: processes that run at the same time, mostly a single one.

    `commands`  makes them for a seed; what it does itself is not timed
    `needs`     packages without which they cannot run
    """

    name: str
    commands: Callable[[int], list[Command]]
    needs: tuple[str, ...] = ()


class Goal(NamedTuple):
    """A limit for the first contestant of a row.

    `kind`  "seconds", or "times" or "more": as a multiple of the second contestant's seconds, or as
            seconds beyond them
    """

    limit: float
    kind: str = "seconds"


class Row(NamedTuple):
    """What is waited for. The first contestant is this package."""

    goal: Goal
    rounds: int
    contestants: list[Contestant]


class Measurement(NamedTuple):
    """One contestant in one round: a line of the journal.

    `seconds`    from the start to the end, without what only the benchmark needs (`not_waited_for`)
    `processor`  seconds that all its processes were computing; they tell how busy the machine was
    `outcome`    the greedy return after training, where there is one
    """

    row: str
    contestant: str
    round: int
    seconds: float
    processor: float
    outcome: str
    machine: str


class Clones:
    """Clones of this repository at its present commit, in a folder that is deleted at the end."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.count = 0
        self.ready = None  # the last clone whose environment was set up
        self.demonstrated = None  # the last clone in which the demo has run

    def fresh(self) -> Path:
        self.count += 1
        clone = self.folder / f"clone{self.count}"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        self.ready = clone
        return clone

    def with_environment(self) -> Path:
        if self.ready is None:
            make(self.fresh(), ".venv/.ready")
        return self.ready

    def first_demo(self) -> list[Command]:
        self.demonstrated = self.fresh()
        return [Command(["make", "demo"], self.demonstrated)]

    def second_demo(self) -> list[Command]:
        if self.demonstrated is None:
            self.demonstrated = self.with_environment()
            make(self.demonstrated, "demo")
        return [Command(["make", "demo"], self.demonstrated)]

    def tests(self) -> list[Command]:
        return [Command(["make", "test"], self.with_environment())]


def make(clone: Path, target: str) -> None:
    subprocess.run(["make", target], cwd=clone, check=True, capture_output=True)


def python(*words: str) -> Command:
    return Command([sys.executable, *words])


def speed_script(name: str, **options) -> Command:
    """A contestant of benchmarks/speed/, which prints JSON."""
    words = [sys.executable, str(SPEED / f"{name}.py")]
    for option, value in options.items():
        words.append(f"--{option}")
        if value is not True:
            words.append(str(value))
    return Command(words, ROOT, {"PYTHONWARNINGS": "ignore"})


def training(script: str, **options) -> Callable[[int], list[Command]]:
    """A training with a script of benchmarks/speed/, as long as that of `fp8rl train`."""
    flags = {"json": True, "learn": True, "full": True, "threads": 1, "steps": STEPS}
    return lambda seed: [speed_script(script, **flags, **options, seed=seed)]


def jax_agents(processes: int) -> list[Command]:
    """The agents of the study in JAX, split over so many processes, each on a core of its own."""
    agents = STUDY_AGENTS // processes
    if processes == 1:
        return [speed_script("jax_population", agents=agents, **STUDY_SHAPE)]
    return [
        speed_script("jax_population", agents=agents, core=core, **STUDY_SHAPE)
        for core in sorted(os.sched_getaffinity(0))
    ]


def cleanrl(clone: Path | None, doctor: list[str]) -> list[Command]:
    script = strangers.SCRIPTS["ppo, CartPole"]
    return [Command(*strangers.command_of(script, clone.resolve(), FIRST_SEED, doctor))]


def rows_of(work: Path, clone_of_cleanrl: Path | None) -> dict[str, Row]:
    """All rows. Their commands write into the folder `work`."""
    clones = Clones(work)
    a2c = {"num-envs": 16, "rollout-length": 32, "learning-rate": 2e-3}
    ppo = {"num-envs": 8, "rollout-length": 32, "learning-rate": 1e-3}

    def fp8rl(command: str, *options: str) -> list[Command]:
        out = str(work / command)
        return [python("-m", "fp8rl", command, "--out", out, "--overwrite", *options)]

    return {
        "demo": Row(
            Goal(180),
            1,
            [Contestant("`make demo` in a fresh clone", lambda seed: clones.first_demo())],
        ),
        "demo_again": Row(
            Goal(75), 1, [Contestant("`make demo` again", lambda seed: clones.second_demo())]
        ),
        "test": Row(Goal(240), 1, [Contestant("`make test`", lambda seed: clones.tests())]),
        "train": Row(
            Goal(6),
            5,
            [
                Contestant(
                    f"`python -m fp8rl train`, {STEPS:,} steps of the cart",
                    lambda seed: fp8rl("train", "--steps", str(STEPS), "--seed", str(seed)),
                ),
                Contestant("CleanRL style, A2C", training("cleanrl_style", **a2c)),
                Contestant(
                    "Stable-Baselines3's A2C, a batched VecEnv",
                    training("sb3", variant="batched", **a2c),
                    ("stable_baselines3",),
                ),
                Contestant(
                    "Stable-Baselines3's A2C, DummyVecEnv",
                    training("sb3", variant="dummy", **a2c),
                    ("stable_baselines3",),
                ),
                Contestant(
                    "Stable-Baselines3's PPO, DummyVecEnv",
                    training("sb3", variant="ppo", **ppo),
                    ("stable_baselines3",),
                ),
            ],
        ),
        "study": Row(
            Goal(90),
            1,
            [
                Contestant(
                    "`python -m fp8rl study`, 30 seeds in four precisions",
                    lambda seed: fp8rl("study", "--first-seed", str(seed)),
                ),
                Contestant("JAX under vmap, float32", lambda seed: jax_agents(1), ("jax",)),
                Contestant(
                    "JAX under vmap, float32, a process on each core",
                    lambda seed: jax_agents(cores()),
                    ("jax",),
                ),
            ],
        ),
        "watch": Row(
            Goal(1.10, "times"),
            4,
            [
                Contestant(
                    "`python -m fp8rl.doctor watch` on CleanRL's ppo.py",
                    lambda seed: cleanrl(clone_of_cleanrl, ["watch"]),
                ),
                Contestant("the script alone", lambda seed: cleanrl(clone_of_cleanrl, [])),
            ],
        ),
        "import": Row(
            Goal(0.2, "more"),
            11,
            [
                Contestant(
                    '`python -c "from fp8rl.bits import Doctor"`',
                    lambda seed: [python("-c", "from fp8rl.bits import Doctor")],
                ),
                Contestant(
                    '`python -c "import torch"`', lambda seed: [python("-c", "import torch")]
                ),
            ],
        ),
    }


class Failed(Exception):
    """A process that ended with an error. The message is the end of what it printed."""


def timed(commands: list[Command]) -> tuple[float, float, str]:
    """Runs processes at the same time. Returns the seconds until the last has ended, the seconds
    that all were computing, and the output of the first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        errors = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        began = time.perf_counter()
        processes = []
        try:
            for command, output, error in zip(commands, outputs, errors, strict=True):
                process = subprocess.Popen(
                    command.words,
                    cwd=command.folder,
                    env=os.environ | command.environment,
                    stdout=output,
                    stderr=error,
                )
                processes.append(process)
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        seconds = time.perf_counter() - began
        for process, output, error in zip(processes, outputs, errors, strict=True):
            if process.returncode:
                output.seek(0)
                error.seek(0)
                raise Failed(f"{output.read()}{error.read()}"[-2000:])
        outputs[0].seek(0)
        text = outputs[0].read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return seconds, user + system, text


def numbers_of(output: str) -> dict:
    """What a script of benchmarks/speed/ has printed last, or nothing."""
    with contextlib.suppress(IndexError, ValueError):
        numbers = json.loads(output.splitlines()[-1])
        return numbers if isinstance(numbers, dict) else {}
    return {}


def not_waited_for(output: str) -> float:
    """Seconds that only the benchmark needs: evaluations of the scripts in benchmarks/speed/, and
    in JAX's process the import of torch."""
    numbers = numbers_of(output)
    return numbers.get("seconds_evaluating", 0) + numbers.get("seconds_importing_torch", 0)


def outcome_of(output: str) -> str:
    """The greedy return after training that a process has printed, or nothing."""
    numbers = numbers_of(output)
    if "greedy_return" in numbers:
        return f"{numbers['greedy_return']:.1f}"
    found = re.search(r"final greedy return (-?[\d.]+)", output)
    return f"{float(found[1]):.1f}" if found else ""


def machine() -> str:
    """This machine in a few words. AVX2 stands there if newer instructions are not used."""
    name, count, capability, *_ = hardware().split(", ")
    name = re.sub(r"\((R|TM)\)| Processor", "", name)
    return ", ".join([name, count, capability.split(" with ")[0]])


def read(path: Path) -> list[Measurement]:
    """The measurements in a journal; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Measurement(
                row["row"],
                row["contestant"],
                int(row["round"]),
                float(row["seconds"]),
                float(row["processor"]),
                row["outcome"],
                row["machine"],
            )
            for row in csv.DictReader(file)
        ]


def add(path: Path, measurement: Measurement) -> None:
    """Appends a measurement to a journal."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(Measurement._fields)
        writer.writerow(measurement)


def obstacle(contestant: Contestant) -> str | None:
    """Which package a contestant lacks, or None."""
    missing = [name for name in contestant.needs if not importlib.util.find_spec(name)]
    return f"it needs {', '.join(missing)}" if missing else None


def measure(path: Path, names: list[str], rows: dict[str, Row], rounds: int | None) -> None:
    """Measures what the journal does not have yet of these rows on this machine."""
    here = machine()
    done = {(x.row, x.contestant, x.round) for x in read(path) if x.machine == here}
    for name in names:
        left_out = set()
        for contestant in rows[name].contestants:
            if reason := obstacle(contestant):
                print(f"{contestant.name} left out: {reason}", flush=True)
                left_out.add(contestant.name)
        for number in range(rounds or rows[name].rounds):
            for contestant in rows[name].contestants:
                if contestant.name in left_out or (name, contestant.name, number) in done:
                    continue
                try:
                    seconds, processor, output = timed(contestant.commands(FIRST_SEED + number))
                except Failed as error:
                    print(f"{contestant.name} left out, it failed:\n{error}", flush=True)
                    left_out.add(contestant.name)
                    continue
                seconds -= not_waited_for(output)
                found = Measurement(
                    name,
                    contestant.name,
                    number,
                    round(seconds, 3),
                    round(processor, 3),
                    outcome_of(output),
                    here,
                )
                add(path, found)
                print(f"{time.strftime('%X')} {contestant.name}: {seconds:.2f} s", flush=True)


def pairs(
    ours: list[Measurement], theirs: list[Measurement]
) -> Iterator[tuple[Measurement, Measurement]]:
    """Measurements of two contestants in the same rounds."""
    by_round = {x.round: x for x in theirs}
    for one in ours:
        if one.round in by_round:
            yield one, by_round[one.round]


def verdict(goal: Goal, ours: list[Measurement], theirs: list[Measurement]) -> str:
    """The goal, whether it was reached, and what was measured of it."""
    both = list(pairs(ours, theirs))
    if goal.kind == "seconds":
        limit = f"{goal.limit:g} s"
        seen = statistics.median(x.seconds for x in ours)
        shown = f"{seen:.1f} s"
    elif not both:
        return "not measured: there is nothing to compare with"
    elif goal.kind == "times":
        limit = f"{goal.limit:.2f} times the time below"
        seen = statistics.median(a.seconds / b.seconds for a, b in both)
        shown = f"{seen:.2f} times"
    else:
        limit = f"{goal.limit:g} s more than below"
        seen = statistics.median(a.seconds - b.seconds for a, b in both)
        shown = f"{seen:.2f} s more"
    if seen <= goal.limit:
        return f"{limit}: reached, {shown}"
    return f"{limit}: **missed**, {shown}"


def table(rows: dict[str, Row], found: list[Measurement]) -> str:
    """A line for each contestant that was measured, for each machine."""
    lines = [
        "| what one waits for | seconds | goal | fp8rl's time over this one | greedy return "
        "| processor seconds | rounds | machine |",
        "| --- " * 8 + "|",
    ]
    for name, row in rows.items():
        for where in dict.fromkeys(x.machine for x in found if x.row == name):
            here = defaultdict(list)
            for x in found:
                if x.row == name and x.machine == where:
                    here[x.contestant].append(x)
            first, *peers = (contestant.name for contestant in row.contestants)
            for contestant in (first, *peers):
                measured = here[contestant]
                if not measured:
                    continue
                goal = ""
                ratio = ""
                label = f"beside it: {contestant}"
                if contestant == first:
                    label = contestant
                    goal = verdict(row.goal, measured, here[peers[0]] if peers else [])
                elif both := list(pairs(here[first], measured)):
                    ratio = f"{statistics.median(a.seconds / b.seconds for a, b in both):.2f}"
                outcomes = [float(x.outcome) for x in measured if x.outcome]
                cells = [
                    label,
                    f"{statistics.median(x.seconds for x in measured):.1f}",
                    goal,
                    ratio,
                    f"{statistics.median(outcomes):.1f}" if outcomes else "",
                    f"{statistics.median(x.processor for x in measured):.1f}",
                    str(len(measured)),
                    where,
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Where the time goes


def import_seconds(text: str) -> dict[str, float]:
    """Seconds by top-level package of what `python -X importtime` has printed. torch._dynamo, which
    torch imports only when it is needed, is apart from torch."""
    seconds = defaultdict(float)
    for own, name in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", text):
        package = name.split(".")[0]
        if name.startswith(("torch._dynamo", "fp8rl.bits")):
            package = ".".join(name.split(".")[:2])
        seconds[package] += int(own) / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def print_imports(*words: str) -> None:
    """Prints which packages a Python process imports for longest."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True
    )
    print(f"imports of python {' '.join(words)}")
    for package, seconds in list(import_seconds(done.stderr).items())[:12]:
        print(f"  {seconds:6.2f} s  {package}")


# The functions of `fp8rl train` that --profile times, by their module.
PARTS = {
    "building": ("fp8rl.cli.train", "build"),
    "training": ("fp8rl.train", "Run.advance"),
    "evaluating": ("fp8rl.evaluate", "Evaluator.evaluate"),
    "saving checkpoints": ("fp8rl.cli.train", "checkpoint.save"),
    "drawing": ("fp8rl.cli.train", "report"),
}
# Runs `fp8rl train` in a new process, and prints the seconds of each of PARTS.
PHASES = """
import functools, importlib, json, sys, time
began = time.perf_counter()
import fp8rl.cli.main
seconds = {"importing": time.perf_counter() - began}
for part, (module, path) in json.loads(sys.argv.pop(1)).items():
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    def with_clock(function, part=part):
        def call(*arguments, **options):
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[part] = seconds.get(part, 0) + time.perf_counter() - start
        return call
    setattr(owner, name, with_clock(getattr(owner, name)))
fp8rl.cli.main.main()
seconds["all"] = time.perf_counter() - began
print(json.dumps(seconds))
"""


def print_phases(work: Path) -> None:
    """Prints how long the parts of `fp8rl train` take."""
    words = ["train", "--out", str(work / "phases"), "--steps", str(STEPS)]
    done = subprocess.run(
        [sys.executable, "-c", PHASES, json.dumps(PARTS), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    print(f"parts of python -m fp8rl train, {STEPS:,} steps")
    for part, seconds in numbers_of(done.stdout).items():
        print(f"  {seconds:6.2f} s  {part}")


def profile(names: list[str], work: Path) -> None:
    if "train" in names:
        print_phases(work)
        print_imports("-m", "fp8rl", "train", "--out", str(work / "imports"), "--steps", "2048")
    if "import" in names:
        print_imports("-c", "from fp8rl.bits import Doctor")


def main(options: argparse.Namespace) -> None:
    if options.avx2:
        sys.path.append(str(SPEED))
        from common import keep_to_avx2

        keep_to_avx2()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rows = rows_of(work, options.cleanrl)
        unknown = [name for name in options.only if name not in rows]
        if unknown:
            sys.exit(f"{', '.join(unknown)}: choose from {', '.join(rows)}")
        names = options.only or list(rows)
        if options.profile:
            profile(names, work)
            return
        if "watch" in names and not options.cleanrl:
            print("watch left out: it needs --cleanrl DIR")
            names = [name for name in names if name != "watch"]
        journal = options.out.with_suffix(".csv")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        measure(journal, names, rows, options.rounds)
        text = table(rows, read(journal))
    note = (
        "Medians over the rounds, in which the processes of a row take turns. The time over another "
        "one is the median of the ratios within the rounds, and so not the quotient of two medians. "
        "Processor seconds are those that the processes of a line were computing, the benchmark's "
        "own parts included; the workers of a study are not among them."
    )
    made = f"`python benchmarks/waits.py {options.out}` on {origin()}."
    options.out.write_text("\n\n".join([text, note, made]) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="table to write")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--rounds", type=int, help="of each row, instead of its own number")
    parser.add_argument("--cleanrl", type=Path, metavar="DIR", help="a clone of CleanRL")
    parser.add_argument("--avx2", action="store_true", help="use no newer instructions")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    main(parser.parse_args())
