"""`python -m fp8rl.doctor compare`: do the words of `watch` hold for a script?

For each seed the script trains once in float32 under `watch`, and once with each format under
`keep`. Each training is a process of its own, whose output is kept in a log. compare_table.py reads
the logs and puts what `watch` said beside what happened. compare_figure.py draws it.

Nothing here imports torch: only the processes of the script do.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from ..bits.notation import TOLERATES
from .compare_table import FLOAT32, Reading, Results, last_lines, trace_of
from .report_file import fcntl, read_report
from .run_script import Refusal, Target, before_termination, print_out, reason, say

PAUSE = 0.05  # seconds between two looks at the processes
PATIENCE = 10  # seconds that a process has to end after SIGTERM


class Run(NamedTuple):
    """One training of the script.

    `arm`     0 for float32, and the formats from 1 on
    `format`  what is kept in few bits; FLOAT32 if nothing is
    `seed`    None for a comparison without seeds
    """

    arm: int
    format: str
    seed: int | None

    @property
    def name(self) -> str:
        return self.format if self.seed is None else f"{self.format}, seed {self.seed}"

    @property
    def stem(self) -> str:
        """The name of its files, without an ending: no blanks, and no colons for Windows."""
        letters = [c if c.isalnum() or c in "=._" else "-" for c in self.name.replace(",", "")]
        return f"{self.arm}-{''.join(letters)}"


class Comparison(NamedTuple):
    """What is compared.

    `formats`        the arms; each is one or several places and formats, as `keep` takes them
    `target`         the script or module, and its arguments
    `reading`        how outcomes are read from the script's output, and the seeds
    `seed_argument`  the script's argument for a seed: "--seed" gives two words, "--seed 1", and
                     "seed=" gives one, "seed=1". Empty for a comparison without seeds.
    `tolerates`      the two factors of `watch --tolerates`
    """

    formats: tuple[str, ...]
    target: Target
    reading: Reading
    seed_argument: str = ""
    tolerates: tuple[float, float] = TOLERATES

    @property
    def watched(self) -> list[str]:
        """Each place and format that is in an arm, once."""
        return list(dict.fromkeys(part for text in self.formats for part in text.split()))

    def runs(self) -> list[Run]:
        """All trainings. Those of a seed follow each other, float32 first."""
        arms = list(enumerate((FLOAT32, *self.formats)))
        seeds = self.reading.seeds or (None,)
        return [Run(arm, text, seed) for seed in seeds for arm, text in arms]

    def command(self, run: Run, report: Path) -> list[str]:
        """The command of a training. `report` is the file for the report of `watch`."""
        if run.format == FLOAT32:
            low, high = map(str, self.tolerates)
            doctor = ["watch", "--quiet", "--json", str(report), "--tolerates", low, high]
            doctor += ["--formats", " ".join(self.watched)]
        else:
            doctor = ["keep", run.format]
        script = ["-m", self.target.name] if self.target.is_module else [self.target.name]
        script += self.target.arguments
        if run.seed is not None and self.seed_argument.endswith("="):
            script += [f"{self.seed_argument}{run.seed}"]
        elif run.seed is not None:
            script += [self.seed_argument, str(run.seed)]
        # Unbuffered (-u), or else a log has the script's stdout after its stderr
        return [sys.executable, "-u", "-m", __package__, *doctor, *script]

    def of_runs(self) -> dict[str, object]:
        """What a finished training depends on, as JSON has it."""
        script = Path(self.target.name)
        is_file = not self.target.is_module and script.is_file()
        return {
            "script": self.target.name,
            "arguments": self.target.arguments,
            "formats": list(self.formats),
            "seed-argument": self.seed_argument,
            "tolerates": list(self.tolerates),
            "working directory": os.getcwd(),
            "checksum of the script": zlib.crc32(script.read_bytes()) if is_file else None,
        }


class Folder:
    """The folder of a comparison: a log of each training, the reports of `watch`, and the results.

    A training that has ended whole has a file STEM.log. The log of another one is STEM.log.part,
    and is replaced when the training begins anew.
    """

    def __init__(self, path: Path):
        self.path = path

    @contextlib.contextmanager
    def held_for(self, comparison: Comparison) -> Iterator[None]:
        """A context in which no other comparison can have the folder.

        Raises Refusal for a folder that another comparison has, and for one that holds something
        else.
        """
        path = self.path
        command = path / "command.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()) and not command.exists():
                raise Refusal(f"folder is {path}, which holds no comparison: name a new folder")
            file = command.open("a+")
        except OSError as error:
            raise Refusal(f"folder is {path}, which cannot be used: {reason(error)}") from error
        with file:  # closing it gives up the lock
            self.lock(file)
            file.seek(0)
            there = file.read()
            here = json.dumps(
                {"runs": comparison.of_runs(), "reading": comparison.reading.as_json()}, indent=1
            )
            if there != here:
                if any(path.glob("*.log")):
                    self.check(there, comparison)
                file.truncate(0)
                file.write(here)
                file.flush()
            yield

    def lock(self, file: TextIO) -> None:
        """Raises Refusal if another process has the folder."""
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(
                f"folder is {self.path}, in which another comparison runs: name another folder"
            ) from error
        except OSError:
            pass  # a file system without locks

    def check(self, content: str, comparison: Comparison) -> None:
        """Raises Refusal if a folder's trainings, or its results, are those of another command.

        A folder without results may be read in another way, as with a metric that is spelled right
        at last.
        """
        try:
            command = json.loads(content)
            runs, reading = command["runs"], command["reading"]
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(
                f"folder is {self.path}, whose command.json nobody can read: name a new folder"
            ) from error
        self.refuse_other(runs, comparison.of_runs(), "name another folder")
        if self.results.exists():
            remedy = f"name another folder, or delete {self.results} to read the logs anew"
            self.refuse_other(reading, comparison.reading.as_json(), remedy)

    def refuse_other(self, there: dict, here: dict, remedy: str) -> None:
        for name, value in here.items():
            if there.get(name) != value:
                raise Refusal(
                    f"folder is {self.path}, which holds a comparison whose {name} is "
                    f"{as_text(there.get(name))}, not {as_text(value)}: {remedy}"
                )

    @property
    def results(self) -> Path:
        return self.path / "results.csv"

    def log(self, run: Run) -> Path:
        return self.path / f"{run.stem}.log"

    def unfinished_log(self, run: Run) -> Path:
        return self.path / f"{run.stem}.log.part"

    def report(self, run: Run) -> Path:
        return self.path / f"{run.stem}.json"

    def unfinished_report(self, run: Run) -> Path:
        return self.path / f"{run.stem}.json.part"

    def begin(self, run: Run) -> None:
        """Removes what an earlier process has left of a training."""
        self.unfinished_log(run).unlink(missing_ok=True)
        self.unfinished_report(run).unlink(missing_ok=True)

    def finish(self, run: Run) -> None:
        """Gives the files of a training that has ended whole their names."""
        if run.format == FLOAT32:
            self.unfinished_report(run).replace(self.report(run))
        self.unfinished_log(run).replace(self.log(run))


def as_text(value: object) -> str:
    """A field of a command in words, as in "weights=bf16, v=bf16" for a list."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "empty"
    return "not given" if value is None or value == "" else str(value)


class Process(NamedTuple):
    """A training that runs."""

    run: Run
    popen: subprocess.Popen
    started: float


class Progress:
    """Prints a line on stderr for each finished training.

    `total`  trainings of the comparison
    `left`   those that had not ended when this process began
    """

    def __init__(self, total: int, left: int):
        self.total = total
        self.before = total - left  # trainings that an earlier process has finished
        self.done = self.before
        self.started = time.monotonic()
        if self.before:
            say(f"{self.before} of {total} runs have been made before")

    def finished(self, name: str, what: str) -> None:
        self.done += 1
        elapsed = time.monotonic() - self.started
        expected = elapsed / (self.done - self.before) * (self.total - self.done)
        times = f"{clock(elapsed)} elapsed"
        if self.done < self.total:
            times += f", about {clock(expected)} to go"
        say(f"{name}: {what} (run {self.done} of {self.total}, {times})")


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, as in 1:05, or hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Trainings:
    """Makes the trainings of a comparison, several at once.

    `failures` has, for each training with few bits that has failed, why. The others go on. A
    training in float32 that fails raises Refusal, because there is nothing to compare with then.
    """

    def __init__(self, comparison: Comparison, folder: Folder):
        self.comparison = comparison
        self.folder = folder
        self.failures: dict[Run, str] = {}
        self.processes: list[Process] = []

    def make(self, jobs: int) -> None:
        """Makes all trainings that have not ended whole before."""
        runs = self.comparison.runs()
        for run in runs:
            if run.format == FLOAT32 and self.folder.log(run).exists():
                self.outcome_of(run)  # or else a metric that is never found would cost trainings
        waiting = collections.deque(run for run in runs if not self.folder.log(run).exists())
        progress = Progress(len(runs), len(waiting))
        try:
            with before_termination(self.stop):
                while waiting or self.processes:
                    while waiting and len(self.processes) < jobs:
                        self.start(waiting.popleft())
                    for process in [p for p in self.processes if p.popen.poll() is not None]:
                        self.processes.remove(process)
                        progress.finished(process.run.name, self.end(process))
                    time.sleep(PAUSE)
        finally:
            self.stop()

    def start(self, run: Run) -> None:
        self.folder.begin(run)
        command = self.comparison.command(run, self.folder.unfinished_report(run))
        with self.folder.unfinished_log(run).open("wb") as log:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(Process(run, popen, time.monotonic()))

    def end(self, process: Process) -> str:
        """Takes a training that has ended, and says what became of it."""
        run = process.run
        if code := process.popen.returncode:
            log = self.folder.unfinished_log(run)
            failure = f"exit code {code}: {last_lines(log, 1) or 'no output'}"
            if run.format == FLOAT32:
                raise Refusal(f"the script failed in float32 with {failure} (all of it: {log})")
            self.failures[run] = failure
            return f"failed with {failure}"
        if run.format == FLOAT32:
            self.require_report(run)
        self.folder.finish(run)
        seconds = time.monotonic() - process.started
        return f"{self.outcome_of(run)}, {seconds:.0f} s"

    def require_report(self, run: Run) -> None:
        """Raises Refusal unless `watch` has written its report."""
        try:
            read_report(self.folder.unfinished_report(run))
        except Refusal as error:
            log = self.folder.unfinished_log(run)
            raise Refusal(
                "the script ended without a report of watch, as scripts do that call os._exit "
                f"(its output: {log})"
            ) from error

    def outcome_of(self, run: Run) -> str:
        """The outcome of a finished training in words. Raises Refusal if one in float32 has
        none."""
        log = self.folder.log(run)
        trace = trace_of(log, self.comparison.reading)
        if not trace.numbers and run.format == FLOAT32:
            raise Refusal(
                f"metric is {self.comparison.reading.metric!r}, which the script never prints: "
                f"its output ends with {last_lines(log, 3)!r} (all of it: {log})"
            )
        return f"{trace.outcome:.6g}"

    def stop(self) -> None:
        """Ends the processes that run."""
        for process in self.processes:
            process.popen.terminate()
        for process in self.processes:
            try:
                process.popen.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
        self.processes.clear()


def compare(comparison: Comparison, path: Path, jobs: int = 1) -> int:
    """Makes a comparison in a folder, and prints its table. A comparison that was stopped goes on.

    Returns the exit code: 0, or 1 if a training with few bits has failed. Raises Refusal for a
    folder of another comparison, and if the script fails in float32 or never prints the metric.
    """
    folder = Folder(path)
    with folder.held_for(comparison):
        return compare_in(folder, comparison, jobs)


def compare_in(folder: Folder, comparison: Comparison, jobs: int) -> int:
    """Makes a comparison in a folder that is held. Returns the exit code (`compare`)."""
    trainings = Trainings(comparison, folder)
    try:
        trainings.make(jobs)
    except KeyboardInterrupt:
        runs = comparison.runs()
        finished = sum(folder.log(run).exists() for run in runs)
        say(
            f"fp8rl.doctor: interrupted: {finished} of {len(runs)} runs are finished; "
            "the same command goes on with the rest"
        )
        return 130
    results = Results(comparison.reading)
    for run in comparison.runs():
        if run in trainings.failures:
            results.add_failure(run.format, run.seed, trainings.failures[run])
            continue
        report = read_report(folder.report(run)) if run.format == FLOAT32 else None
        trace = trace_of(folder.log(run), comparison.reading)
        results.add(run.format, run.seed, trace, report)
    table = results.table()
    (folder.path / "table.md").write_text(table, encoding="utf-8")
    results.write_csv(folder.results)
    draw(results, folder.path / "curves.png")
    print_out(table.rstrip())
    return 1 if results.failures else 0


def draw(results: Results, path: Path) -> None:
    """Draws the picture, where matplotlib is installed."""
    try:
        from .compare_figure import figure_of

        figure_of(results).savefig(path, dpi=150)
    except ImportError:
        say(f"fp8rl.doctor: for {path}: pip install matplotlib")
