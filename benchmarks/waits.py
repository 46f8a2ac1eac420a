"""How long does one wait for what one does with this project, beside what one would use instead?

Whole processes are timed from their start to their end, imports included. The processes of a row
take turns, and the table has medians over the rounds. The time over that of the row's first line is
the median of the ratios within the rounds. Each round has a seed of its own.

    clone       make demo in a fresh clone, which installs the environment first; a second time there;
                and make test there. The installation depends on the package index and on caches.
    train       100,000 steps of the cart: `python -m fp8rl train`, with evaluations, checkpoint and
                figure; and scripts that only train, with this package and with others (speed/)
    train_long  the same scripts for 1,000,000 steps
    study       python -m fp8rl study with its defaults: 30 seeds in each of four precisions. Beside it
                are 120 agents in JAX under vmap, in float32, which learn as often from as many rows,
                without evaluations and files
    watch       CleanRL's ppo.py alone, and under python -m fp8rl.doctor watch
    watch_gpt   the same of nanoGPT

    python benchmarks/waits.py benchmarks/results/waits.md --only clone train study
    python benchmarks/waits.py benchmarks/results/from_start.md --only train train_long
    python benchmarks/waits.py benchmarks/results/watching.md --only watch watch_gpt --cleanrl DIR
    --nanogpt DIR

The last two rows need a clone of github.com/vwxyzjn/cleanrl or github.com/karpathy/nanoGPT (see
scripts.py).

The scripts train with 16 environments, rollouts of 32 steps and one torch thread, in float32. All but
the defaults of this package learn from new steps alone. JAX compiles at every start; "compiled
before" finds what an earlier process compiled in a cache on disk. What only the benchmark needs is
not counted: the evaluation after a training, and in JAX's processes the import of torch.

Every process that has ended is in a .csv beside the table, and the benchmark goes on with those that
are missing on this machine. What cannot be measured, because a library or a clone is missing, is
left out, and the script says so. The rows of trainings are drawn in a .png beside the table.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import scripts
from files import Journal, table_of

from fp8rl.machine.hardware import cores, hardware, origin

ROOT = Path(__file__).parent.parent
FIRST_SEED = 1000  # no setting was chosen on these seeds
ROUNDS = 5
SHORT, LONG = 100_000, 1_000_000  # steps of a training

# A study trains 48 iterations with 17 updates each: one on 2,048 new rows, 16 on 1,024 replayed
# ones. JAX's loop learns 9 times from each of 97 rollouts of 1,024 rows.
STUDY_SHAPE = {"num-envs": 16, "rollout-length": 64, "updates": 9, "steps": SHORT}
STUDY_AGENTS = 4 * 30
SCRIPTS = scripts.STUDIES["strangers"].scripts
WATCHED = {"watch": "ppo, CartPole", "watch_gpt": "nanoGPT at 0.001"}
COLUMNS = ("row", "contestant", "round", "seconds", "megabytes", "greedy_return", "machine")


class Command(NamedTuple):
    """A process to be timed: its words, its working directory, and variables that it has beside
    those of this process."""

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


def speed_script(name: str, environment: dict[str, str] | None = None, **options) -> Command:
    """A script of benchmarks/speed/, which prints JSON."""
    words = [sys.executable, str(ROOT / f"benchmarks/speed/{name}.py")]
    for option, value in options.items():
        words += [f"--{option}", str(value)]
    return Command(words, ROOT, {"PYTHONWARNINGS": "ignore"} | (environment or {}))


def command_line(work: Path, command: str, *options: str) -> list[Command]:
    """A command of `python -m fp8rl`, which writes into the folder `work`."""
    out = ["--out", str(work / command), "--overwrite"]
    return [Command([sys.executable, "-m", "fp8rl", command, *out, *options])]


def clone_contestants(work: Path) -> list[Contestant]:
    clone = work / "clone"

    def first_demo(seed: int) -> list[Command]:
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        return [Command(["make", "demo"], clone)]

    def after_it(target: str) -> Callable[[int], list[Command]]:
        def commands(seed: int) -> list[Command]:
            if not clone.exists():  # the first demo of this round is in the journal
                timed(first_demo(seed))
            return [Command(["make", target], clone)]

        return commands

    return [
        Contestant("`make demo` in a fresh clone", first_demo),
        Contestant("`make demo` again", after_it("demo")),
        Contestant("`make test`", after_it("test")),
    ]


def training_contestants(work: Path, steps: int) -> list[Contestant]:
    """Scripts that train the cart for so many steps."""

    def training(script: str, environment: dict[str, str] | None = None, **options):
        shape = {"num-envs": 16, "rollout-length": 32, "threads": 1, "learning-rate": 2e-3}
        shape |= {"steps": steps} | options
        return lambda seed: [speed_script(script, environment, **shape, seed=seed)]

    cache = work / f"compiled_for_{steps}_steps"
    from_cache = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def compiled_before(seed: int) -> list[Command]:
        commands = training("jax_loop", from_cache)(seed)
        if not cache.exists():
            timed(commands)  # fills the cache
        return commands

    # The settings of Stable-Baselines3's zoo for CartPole
    ppo = {"variant": "ppo", "num-envs": 8, "learning-rate": 1e-3}
    sb3 = ("stable_baselines3",)
    return [
        Contestant("fp8rl", training("ours", variant="on-policy")),
        Contestant("fp8rl, the defaults: 16 replayed updates", training("ours")),
        Contestant("JAX", training("jax_loop"), ("jax",)),
        Contestant("JAX, compiled before", compiled_before, ("jax",)),
        Contestant("CleanRL style", training("cleanrl_style")),
        Contestant("SB3, batched VecEnv", training("sb3", variant="batched"), sb3),
        Contestant("SB3, DummyVecEnv", training("sb3", variant="dummy"), sb3),
        Contestant("SB3's PPO, DummyVecEnv", training("sb3", **ppo), sb3),
    ]


def jax_agents(processes: int) -> list[Command]:
    """The agents of the study in JAX, split over so many processes, each on a core of its own."""
    shape = {"agents": STUDY_AGENTS // processes} | STUDY_SHAPE
    if processes == 1:
        return [speed_script("jax_population", **shape)]
    own_cores = sorted(os.sched_getaffinity(0))
    return [speed_script("jax_population", **shape, core=core) for core in own_cores]


def watching_contestants(name: str, clone: Path) -> list[Contestant]:
    """A script that others wrote, alone and watched."""
    script = SCRIPTS[name]
    if script.folder == "nanogpt":
        scripts.prepare_text(clone)

    def running(under: list[str]) -> Callable[[int], list[Command]]:
        words = scripts.command_of(script, clone, FIRST_SEED, under)
        return lambda seed: [Command(*words)]

    return [
        Contestant(name, running([])),
        Contestant(
            "the same under `python -m fp8rl.doctor watch`", running([*scripts.DOCTOR, "watch"])
        ),
    ]


def contestants_of_rows(work: Path, clones: dict[str, Path]) -> dict[str, list[Contestant]]:
    """All rows. Their commands write into the folder `work`."""
    rows = {
        "clone": clone_contestants(work),
        "train": [
            Contestant(
                "`python -m fp8rl train`",
                lambda seed: command_line(
                    work, "train", "--steps", str(SHORT), "--seed", str(seed)
                ),
            ),
            *training_contestants(work, SHORT),
        ],
        "train_long": training_contestants(work, LONG),
        "study": [
            Contestant(
                "`python -m fp8rl study`, 30 seeds in four precisions",
                lambda seed: command_line(work, "study", "--first-seed", str(seed)),
            ),
            Contestant("JAX under vmap, float32", lambda seed: jax_agents(1), ("jax",)),
            Contestant(
                "JAX under vmap, float32, a process on each core",
                lambda seed: jax_agents(cores()),
                ("jax",),
            ),
        ],
    }
    for row, name in WATCHED.items():
        if clone := clones.get(SCRIPTS[name].folder):
            rows[row] = watching_contestants(name, clone)
    return rows


class Failed(Exception):
    """A process that ended with an error. The message is the end of what it printed."""


def timed(commands: list[Command]) -> tuple[float, float, dict]:
    """Runs processes at the same time.

    Returns the seconds until the last has ended, the most memory of a process in MB, that of its
    children included only if they are larger, and the numbers that the first has printed.
    """
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        began = time.perf_counter()
        processes = [
            subprocess.Popen(
                command.words,
                cwd=command.folder,
                env=os.environ | command.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for command, output in zip(commands, outputs, strict=True)
        ]
        megabytes = 0.0
        try:
            for process in processes:
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                megabytes = max(megabytes, used.ru_maxrss / 1000)
        finally:
            for process in processes:
                process.kill()  # those that still run, if this program is interrupted
        seconds = time.perf_counter() - began
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    for process, text in zip(processes, texts, strict=True):
        if process.returncode:
            raise Failed(text[-2000:])
    return seconds, megabytes, numbers_of(texts[0])


def numbers_of(output: str) -> dict:
    """The JSON object in the last line of an output; what `fp8rl train` says; or nothing."""
    with contextlib.suppress(IndexError, ValueError):
        numbers = json.loads(output.splitlines()[-1])
        return numbers if isinstance(numbers, dict) else {}
    found = re.search(r"final greedy return (-?[\d.]+)", output)
    return {"greedy_return": float(found[1])} if found else {}


def not_waited_for(numbers: dict) -> float:
    """Seconds that only the benchmark needs."""
    return numbers.get("seconds_evaluating", 0) + numbers.get("seconds_importing_torch", 0)


def obstacle(contestant: Contestant) -> str | None:
    """Which package a contestant lacks, or None."""
    missing = [name for name in contestant.needs if not importlib.util.find_spec(name)]
    return f"it needs {', '.join(missing)}" if missing else None


def measure(journal: Journal, name: str, contestants: list[Contestant], rounds: int) -> None:
    """Measures what the journal does not have yet of a row on this machine."""
    machine = hardware()
    done = journal.done("row", "contestant", "round", "machine")
    left_out = set()
    for contestant in contestants:
        if reason := obstacle(contestant):
            print(f"{contestant.name} left out: {reason}", flush=True)
            left_out.add(contestant.name)
    for number in range(rounds):
        for contestant in contestants:
            key = (name, contestant.name, str(number), machine)
            if contestant.name in left_out or key in done:
                continue
            try:
                seconds, megabytes, numbers = timed(contestant.commands(FIRST_SEED + number))
            except Failed as error:
                print(f"{contestant.name} left out, it failed:\n{error}", flush=True)
                left_out.add(contestant.name)
                continue
            seconds -= not_waited_for(numbers)
            score = numbers.get("greedy_return", "")
            values = (*key[:3], round(seconds, 3), round(megabytes), score, machine)
            journal.add(dict(zip(COLUMNS, values, strict=True)))
            print(f"{time.strftime('%X')} {contestant.name}: {seconds:.2f} s", flush=True)


class Measured(NamedTuple):
    """What a contestant of a row took in the rounds, and how well it then acted."""

    row: str
    contestant: str
    seconds: dict[str, float]  # by round
    megabytes: list[float]
    greedy_returns: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds.values())

    def over(self, other: "Measured") -> float:
        """The median of the ratios within the rounds."""
        both = self.seconds.keys() & other.seconds.keys()
        return statistics.median(self.seconds[key] / other.seconds[key] for key in both)


def measured_here(journal: Journal) -> list[Measured]:
    """What the journal has of this machine."""
    found: dict[tuple[str, str], Measured] = {}
    for row in journal.rows():
        if row["machine"] != hardware():
            continue
        key = row["row"], row["contestant"]
        measured = found.setdefault(key, Measured(*key, {}, [], []))
        measured.seconds[row["round"]] = float(row["seconds"])
        measured.megabytes.append(float(row["megabytes"]))
        if row["greedy_return"]:
            measured.greedy_returns.append(float(row["greedy_return"]))
    return list(found.values())


def table(found: list[Measured]) -> str:
    """A line for each contestant, in the order in which they were measured."""
    columns = ("row", "what one waits for", "seconds", "times the row's first line")
    columns += ("most memory, MB", "greedy return then", "rounds")
    first: dict[str, Measured] = {}
    rows = []
    for measured in found:
        reference = first.setdefault(measured.row, measured)
        returns = measured.greedy_returns
        rows.append(
            [
                measured.row,
                measured.contestant,
                f"{measured.median:.1f}",
                f"{measured.over(reference):.2f}",
                f"{statistics.median(measured.megabytes):,.0f}",
                f"{statistics.median(returns):.1f}" if returns else "",
                len(measured.seconds),
            ]
        )
    return table_of(columns, rows)


def draw(out: Path, found: list[Measured]) -> None:
    """A bar for each contestant of the trainings, if any were measured."""
    panels = {"train": f"{SHORT:,} steps", "train_long": f"{LONG:,} steps"}
    panels = {row: title for row, title in panels.items() if row in {x.row for x in found}}
    if not panels:
        return
    figure, axes = plt.subplots(
        1, len(panels), figsize=(10, 3.4), squeeze=False, layout="constrained"
    )
    for ax, (row, title) in zip(axes[0], panels.items(), strict=True):
        own = [x for x in found if x.row == row]
        colors = ["#0072B2" if "fp8rl" in x.contestant else "#999999" for x in own]
        seconds = [x.median for x in own]
        bars = ax.barh([x.contestant.replace("`", "") for x in own], seconds, color=colors)
        ax.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=9)
        ax.set(title=title, xlabel="seconds", xlim=(0, 1.15 * max(seconds)))
        ax.spines[["top", "right"]].set_visible(False)
        ax.invert_yaxis()
    figure.suptitle("From the start of a process to a trained agent: shorter is better")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="table to write")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for name in ("cleanrl", "nanogpt"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="a clone, for watch")
    options = parser.parse_args(words)
    clones = {name: getattr(options, name) for name in ("cleanrl", "nanogpt")}
    clones = {name: clone.resolve() for name, clone in clones.items() if clone}
    with tempfile.TemporaryDirectory() as folder:
        rows = contestants_of_rows(Path(folder), clones)
        for name in options.only:
            if name not in rows:
                needed = "give it its clone, or " if name in WATCHED else ""
                parser.error(f"--only {name}: {needed}choose from {', '.join(rows)}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        journal = Journal(options.out.with_suffix(".csv"), COLUMNS)
        for name in options.only or rows:
            measure(journal, name, rows[name], options.rounds)
    found = measured_here(journal)
    note = (
        "Medians over the rounds, in which the processes of a row take turns. The time over that of "
        "the row's first line is the median of the ratios within the rounds."
    )
    only = f" --only {' '.join(options.only)}" if options.only else ""
    made = f"`python benchmarks/waits.py {options.out}{only}` on {origin()}."
    options.out.write_text("\n\n".join([table(found), note, made]) + "\n")
    draw(options.out.with_suffix(".png"), found)


if __name__ == "__main__":
    main()
