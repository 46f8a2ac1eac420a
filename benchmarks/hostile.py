"""Does anything get lost when runs and studies are killed, or when two want one folder?

Runs with default settings are ended at random moments (KILL, TERM and INT in turn), resumed, and
compared to the same run left to itself, bit for bit. So are studies, whose processes must be gone
two seconds after them. Two trainings, two resumptions, or a training and a study are started
together in one folder: one must win.

    python benchmarks/hostile.py benchmarks/results/hostile.md [--share 0.1]
"""

import argparse
import collections
import csv
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.hardware import cores
from fp8rl.study.throughput import origin
from fp8rl.train import train

RUN = [sys.executable, "-m", "fp8rl"]
# Two batches
STUDY = [
    "study",
    "--precisions",
    "fp32",
    "bf16",
    "--seeds",
    "4",
    "--steps",
    "40960",
    "--num-envs",
    "16",
    "8",
]
SHORT = ["train", "--steps", "10240", "--eval-episodes", "2"]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLS, STUDY_KILLS, TOGETHER = 100, 20, 50


def start(*arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [*RUN, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def weights(out: Path) -> list[torch.Tensor]:
    return list(checkpoint.load(out / "checkpoint.pt")[0].state_dict().values())


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def killed(i: int, folder: Path, seconds: float, whole: list[torch.Tensor]) -> tuple[str, str]:
    """Ends a default run at a random moment of its `seconds` of training, or in every fourth trial
    of the start before them, resumes it (or starts it again, if it had not begun), and says what
    came of it."""
    out, rng = folder / str(i), np.random.default_rng(i)
    number = SIGNALS[i % 3]
    process = start("train", "--out", out)
    while i % 4 and process.poll() is None and not (out / "config.json").exists():
        time.sleep(0.01)
    try:
        process.wait(rng.uniform(0, seconds if i % 4 else 4))
    except subprocess.TimeoutExpired:
        process.send_signal(number)
        process.wait()
    begun = (out / "config.json").exists()
    stage = "after it began" if begun else "before it began"
    again = start("train", *(("--resume", out) if begun else ("--out", out)))
    err = again.communicate()[1]
    good = (
        again.returncode == 0
        and same(weights(out), whole)
        and len((out / "metrics.csv").read_text().splitlines()) == 1 + Config().iterations
    )
    shutil.rmtree(out)
    return f"{number.name}, {stage}", "equal, bit for bit" if good else f"NOT EQUAL: {err[-200:]}"


def killed_study(i: int, folder: Path, seconds: float, whole: list[dict]) -> tuple[str, str]:
    """Ends a study at a random moment, looks for its processes, calls it again and compares its
    results."""
    out, rng = folder / f"study{i}", np.random.default_rng(i)
    number = SIGNALS[i % 3]
    process = start(*STUDY, "--out", out)
    time.sleep(rng.uniform(0.2, 1) * seconds)
    children = (
        psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    )
    process.send_signal(number)
    process.wait()
    alive = [
        child
        for child in psutil.wait_procs(children, timeout=2)[1]
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    again = start(*STUDY, "--out", out)
    err = again.communicate()[1]
    good = again.returncode == 0 and results(out) == whole
    shutil.rmtree(out)
    fate = "equal" if good else f"NOT EQUAL: {err[-200:]}"
    return (
        number.name,
        f"{fate}, no process left" if not alive else f"{fate}, {len(alive)} PROCESSES LEFT",
    )


def results(out: Path) -> list[dict]:
    """A study's results but for the seconds."""
    with (out / "results.csv").open() as file:
        return [
            {name: x for name, x in row.items() if "seconds" not in name}
            for row in csv.DictReader(file)
        ]


def together(i: int, folder: Path, whole: list[torch.Tensor]) -> tuple[str, str]:
    """Starts two commands in one folder."""
    out = folder / f"both{i}"
    name = ("two trainings", "two resumptions", "a training and a study")[i % 3]
    first = second = [*SHORT, "--out", out]
    if name == "two resumptions":
        process = start(*SHORT, "--out", out)
        while not (out / "config.json").exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
        first = second = ["train", "--resume", out]
    elif name == "a training and a study":
        second = ["study", "--precisions", "fp32", "--seeds", "2", "--steps", "10240", "--out", out]
    both = [start(*first), start(*second)]
    said = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    lines = [err.count("\n") for err, code in zip(said, codes, strict=True) if code == 2]
    if sorted(codes) == [0, 2] and lines == [1]:
        trained = codes[0] == 0 or second[0] == "train"
        good = same(weights(out), whole) if trained else len(results(out)) == 2
        fate = "one won, its files are whole" if good else "THE WINNER'S FILES ARE NOT WHOLE"
    elif codes == [0, 0] and name == "two resumptions" and same(weights(out), whole):
        fate = "the second came after the first had ended"
    else:
        fate = f"EXIT CODES {codes}"
    shutil.rmtree(out)
    return name, fate


def table(head: str, outcomes: collections.Counter) -> list[str]:
    rows = [
        f"| {kind} | {outcome} | {count:,} |" for (kind, outcome), count in sorted(outcomes.items())
    ]
    return [f"| {head} | outcome | times |", "| --- | --- | --- |", *rows, ""]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="of the number of trials")
    options = parser.parse_args()
    out = options.out.absolute()
    torch.set_num_threads(1)
    lines, workers = [], cores()

    def count(trials: int) -> int:
        return max(1, int(trials * options.share))

    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        folder = Path(name)
        whole = list(train(build(Config()), progress=False).model.state_dict().values())
        # As many as will run side by side
        for job in [start("train", "--out", folder / f"whole{i}") for i in range(workers)]:
            job.communicate()
        seconds = time.time() - (folder / "whole0/config.json").stat().st_mtime
        assert same(weights(folder / "whole0"), whole)
        fates = pool.map(lambda i: killed(i, folder, seconds, whole), range(count(KILLS)))
        lines += table("default run ended by", collections.Counter(fates))
        begun = time.monotonic()
        start(*STUDY, "--out", folder / "study").communicate()
        study, seconds = results(folder / "study"), time.monotonic() - begun
        fates = [killed_study(i, folder, seconds, study) for i in range(count(STUDY_KILLS))]
        lines += table("study ended by", collections.Counter(fates))
        short = list(
            train(build(Config(steps=10_240, eval_episodes=2)), progress=False)
            .model.state_dict()
            .values()
        )
        fates = pool.map(lambda i: together(i, folder, short), range(3 * count(TOGETHER)))
        lines += table("started together in one folder", collections.Counter(fates))
    command = f"python benchmarks/hostile.py {options.out}" + (
        f" --share {options.share:g}" if options.share != 1 else ""
    )
    out.write_text("\n".join(lines) + f"\n`{command}` on {origin()}.\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
