"""Does anything get lost when runs and studies are killed, when two want one folder, or when a
checkpoint is not what it seems?

Runs with default settings are ended at random moments (KILL, TERM and INT in turn), resumed, and
compared to the same run left to itself, bit for bit. So are studies, whose processes must be gone
two seconds after them. Two trainings, two resumptions, or a training and a study are started
together in one folder: one must win. Checkpoints are damaged (cut short, a bit flipped, a pickle
spliced in) or forged (pickles, modules to import, paths, sizes); each must be refused in one line
or equal the original, and none may run code or write anything. Folders of runs, studies and rings
are filled by a stranger: links, second names of other files, pipes, devices, garbage and forgeries
under the names that commands open; nothing outside them may change.

    python benchmarks/hostile.py benchmarks/results/hostile.md [--share 0.1]
"""

import argparse
import collections
import copy
import csv
import io
import json
import math
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch

from fp8rl.build import Machine, build
from fp8rl.cli import study as cli_study
from fp8rl.cli import train as cli_train
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.disk.run_folder import FILES, MARK, Folder, require_free
from fp8rl.env import Cart
from fp8rl.hardware import cores
from fp8rl.history import History
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.rollout import Collector
from fp8rl.study.comparison import Journal
from fp8rl.study.throughput import origin
from fp8rl.train import iterate, train

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
KILLS, STUDY_KILLS, TOGETHER, DAMAGES, FORGERIES, STRANGERS = 100, 20, 50, 10_000, 200, 10_000


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


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-code-ran",)


def content(path: Path) -> bytes:
    """What a checkpoint holds, as bytes to compare."""
    config, state = checkpoint.resume(path)
    written = io.BytesIO()
    torch.save((config, state), written)
    return written.getvalue()


def loaded(path: Path, original: bytes) -> str:
    try:
        return "equal to the original" if content(path) == original else "LOADED AS SOMETHING ELSE"
    except ValueError as error:
        return "refused" if "\n" not in str(error) else "REFUSED IN SEVERAL LINES"


def damage(path: Path, count: int) -> collections.Counter:
    """Outcomes of loading damaged copies: (kind, outcome) -> how many."""
    rng, outcomes = np.random.default_rng(0), collections.Counter()
    whole, original = path.read_bytes(), content(path)
    for i in range(count):
        damaged, kind = bytearray(whole), ("cut short", "bit flipped", "pickle spliced in")[i % 3]
        at = rng.integers(len(whole))
        if kind == "cut short":
            del damaged[at:]
        elif kind == "bit flipped":
            damaged[at] ^= 1 << rng.integers(8)
        else:
            splice = pickle.dumps(Hostile(), protocol=2)
            damaged[at : at + len(splice)] = splice
        path.write_bytes(damaged)
        outcomes[kind, loaded(path, original)] += 1
    path.write_bytes(whole)
    return outcomes


def forge(path: Path, count: int) -> collections.Counter:
    """Outcomes of building runs from forged copies: (kind, outcome) -> how many."""
    rng, outcomes = np.random.default_rng(1), collections.Counter()
    whole = torch.load(path, weights_only=True)
    Path("payload.py").write_text("import pathlib; pathlib.Path('hostile-code-ran').mkdir()")
    fields, parts = list(whole["config"]), list(whole["run"])
    big = torch.zeros(1).expand(2**42)
    for i in range(count):
        forged, kind = (
            {**whole, "config": dict(whole["config"]), "run": dict(whole["run"])},
            ("pickle", "module", "path", "size")[i % 4],
        )
        field, part = fields[rng.integers(len(fields))], parts[rng.integers(len(parts))]
        if kind == "pickle":
            forged["config" if i % 8 else "run"][field if i % 8 else part] = Hostile()
        elif kind == "module":
            forged["config"]["env_id"] = f"payload:Foo{i}-v0"
        elif kind == "path":
            forged["run"]["ring"] = {"folder": f"../outside{i}"}
        else:
            forged["run"][part] = big if i % 8 else {"state": big, "clock": big}
            forged["config"]["capacity"] = 2 ** int(rng.integers(50, 70))
        torch.save(forged, path)
        try:
            config, state = checkpoint.resume(path)
            build(config, Machine(), state).close()
            fate = "LOADED AS SOMETHING ELSE"
        except (ValueError, OSError, MemoryError) as error:
            fate = "refused" if "\n" not in str(error) else "REFUSED IN SEVERAL LINES"
        outcomes[kind, fate] += 1
    assert not list(Path("..").glob("outside*"))
    return outcomes


SIZES = {"rollout_length": 32, "slice_length": 32, "batch_size": 32, "replay_updates": 2}
TINY = Config(
    precision="fp16", steps=64, num_envs=2, capacity=100, eval_episodes=1, hidden_size=8, **SIZES
)
HISTORY = History()
HISTORY.add({"iteration": 0, "steps": 32, "seconds": 0.1, "eval_return": 7.0})
# What stands in the place of a string or number of a file.
FORGED = (
    "x\n$(touch PWNED)",
    "../PWNED",
    -1,
    2**70,
    10**400,
    math.nan,
    -math.inf,
    None,
    [],
    {},
    True,
)


def leaves(content, path: tuple = ()) -> list[tuple]:
    """Where the strings and numbers in nested containers are: keys and indices."""
    inner = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list | tuple)
        else None
    )
    if inner is not None:
        return [found for key, each in inner for found in leaves(each, (*path, key))]
    return [] if isinstance(content, torch.Tensor) else [path]


def forged(content, path: tuple, value):
    """A copy of nested containers with a value at a path."""
    if not path:
        return value
    copied = list(content) if isinstance(content, list | tuple) else copy.copy(content)
    copied[path[0]] = forged(content[path[0]], path[1:], value)
    return copied


def resume(out: Path) -> None:
    """What `train --resume` does with a folder but for the training."""
    with Folder.reopen(out, "train") as folder:
        config, state = cli_train.stopped_run(out, trust=False)
        run = build(config, Machine(), state)
        folder.remember("train", {})
        folder.write("config.json", config.to_json())
        if len(run.history):
            cli_train.write_metrics(folder, run.history, 0)
        cli_train.write_metrics(folder, HISTORY, 0)
        checkpoint.save(out / "checkpoint.pt", run)
        run.close()


def replace(out: Path) -> None:
    """What `train --overwrite` does."""
    require_free(out, "train", overwrite=True)
    with Folder.create(out, "train", {}, overwrite=True) as folder:
        for name in FILES["train"]:
            folder.write(name, "new")


def study(out: Path) -> None:
    """What `study` does, where it goes on and where it is new."""
    with cli_study.folder_of(out, {"workers": 1}, overwrite=False) as folder:
        Journal(out / "runs.jsonl").add("another arm", TINY, HISTORY)
        for name in FILES["study"][1:]:
            folder.write(name, "new")


def store(out: Path) -> None:
    """Goes on with a ring in a folder, or makes one."""
    env, model = Cart(2), ActorCritic(hidden_size=8)
    ring = MappedRing(out, 8, 2, env.bounds)
    ring.append(Collector(env, model, Precision("fp32"), length=4).collect(model))
    ring.close()


COMMANDS = {
    "train --resume": resume,
    "train --overwrite": replace,
    "study": study,
    "eval": lambda out: checkpoint.load(out / "checkpoint.pt"),
    "ring, to read": lambda out: MappedRing.open(out).close(),
    "ring, to write": store,
}


def fate_of(command, *arguments) -> str:
    """What becomes of a command."""
    try:
        command(*arguments)
    except (ValueError, OSError, MemoryError) as error:
        return (
            "refused"
            if "\n" not in str(error) and str(error)
            else f"REFUSED IN SEVERAL LINES: {error}"
        )
    except Exception as error:
        return f"TRACEBACK: {error!r}"
    return "used"


def originals(root: Path) -> dict[str, dict[str, bytes]]:
    """The files of folders that commands have made: by command, name -> content."""
    for name in ("run", "study", "ring"):
        (root / name).mkdir(parents=True)
    run = next(iterate(build(TINY)))
    checkpoint.save(root / "run/checkpoint.pt", run)
    with Folder(root / "run") as folder:
        folder.remember("train", {"checkpoint_every": 1})
        folder.write("config.json", TINY.to_json())
        cli_train.write_metrics(folder, run.history, 0)
    study(root / "study")
    store(root / "ring")
    found = {
        name: {path.name: path.read_bytes() for path in (root / name).iterdir()}
        for name in ("run", "study", "ring")
    }
    shutil.rmtree(root)
    return {
        name: found["study" if name == "study" else "ring" if "ring" in name else "run"]
        for name in COMMANDS
    }


def device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # as root: /dev/zero
    except PermissionError:
        path.symlink_to("/dev/zero")


# What a stranger can put under a name that is no file of the folder's own.
PLANTS = {
    "link": lambda path, outside: path.symlink_to(outside / "file"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "absent"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "link to itself": lambda path, outside: path.symlink_to(path),
    "second name": lambda path, outside: path.hardlink_to(outside / "file"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "folder": lambda path, outside: path.mkdir(),
    "device": device,
}


def spoil(path: Path, rng: np.random.Generator) -> None:
    """Writes garbage or a forgery in place of a file."""
    whole, kind = path.read_bytes() if path.exists() else b"x\ny", rng.integers(3)
    if kind == 0:
        path.write_bytes(
            (b"", b"[" * 10**5, b"null", b"\xff\x00", b"1" * 5000, rng.bytes(100))[rng.integers(6)]
        )
    elif kind == 1:
        path.write_bytes(whole[: rng.integers(len(whole) or 1)] + rng.bytes(8))
    else:
        forge_file(path, whole, rng)


def forge_file(path: Path, whole: bytes, rng: np.random.Generator) -> None:
    """Writes a file with one of its strings or numbers forged; one that is damaged already,
    backwards."""
    value = FORGED[rng.integers(len(FORGED))]
    try:
        archive = path.name == "checkpoint.pt"
        content = torch.load(io.BytesIO(whole), weights_only=True) if archive else json.loads(whole)
        places = leaves(content)
        content = forged(content, places[rng.integers(len(places))], value)
        torch.save(content, path) if archive else path.write_text(json.dumps(content) + "\n")
    except Exception:  # torch's for what it cannot read are of a dozen types
        path.write_bytes(whole[::-1])


def snapshot(root: Path) -> dict:
    """Everything in a folder: path -> mode, size, time of the last change, and content."""
    found = {path: path.lstat() for path in [root, *root.rglob("*")]}
    return {
        path: (
            s.st_mode,
            s.st_size,
            s.st_mtime_ns,
            path.read_bytes() if stat.S_ISREG(s.st_mode) else "",
        )
        for path, s in found.items()
    }


class Strangers:
    """Folders in `root` that a stranger fills, beside one whose files must stay as they are."""

    def __init__(self, root: Path):
        self.files = originals(root / "originals")
        self.out, self.outside = root / "evil", root / "outside"
        (self.outside / "folder").mkdir(parents=True)
        for name in ("file", "folder/file"):
            (self.outside / name).write_text("precious")
        self.before = snapshot(root)

    def fate(self, command: str, fill: Callable[[Path], object]) -> str:
        """What becomes of a command in the folder that it made, which `fill` has changed since."""

        def hangs(*_):
            raise RuntimeError("it hangs")

        self.out.mkdir()
        for name, whole in self.files[command].items():
            (self.out / name).write_bytes(whole)
        fill(self.out)
        old = signal.signal(signal.SIGALRM, hangs)
        signal.alarm(20)
        fate = fate_of(COMMANDS[command], self.out)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        shutil.rmtree(self.out)
        # Of which this has changed the time
        os.utime(self.out.parent, ns=(0, self.before[self.out.parent][2]))
        return fate if snapshot(self.out.parent) == self.before else "CHANGED WHAT IS OUTSIDE"

    def fates(self, count: int) -> collections.Counter:
        """Outcomes of commands in generated folders: (command, outcome) -> how many."""
        rng, outcomes = np.random.default_rng(2), collections.Counter()

        def fill(out: Path) -> None:
            own = sorted(self.files[command])
            known = sorted({MARK, *sum(FILES.values(), ()), *own})
            if rng.random() < 0.1:
                (out / "a\nb").touch()
            for _ in range(rng.integers(1, 4)):
                names = own if rng.random() < 0.7 else known
                path = out / (names[rng.integers(len(names))] + ".tmp" * int(rng.random() < 0.2))
                if path.is_dir() or (path.exists() and not path.is_file()):
                    continue  # planted already
                if (
                    rng.random() < 0.4
                    and not path.is_symlink()
                    and (not path.exists() or path.stat().st_nlink == 1)
                ):
                    spoil(path, rng)
                else:
                    path.unlink(missing_ok=True)
                    list(PLANTS.values())[rng.integers(len(PLANTS))](path, self.outside)

        for i in range(count):
            command = list(COMMANDS)[i % len(COMMANDS)]
            outcomes[command, self.fate(command, fill)] += 1
        return outcomes


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
        (folder / "inside").mkdir()
        os.chdir(folder / "inside")
        checkpoint.save(
            "checkpoint.pt",
            next(iterate(build(Config(steps=512, capacity=600, eval_episodes=1, **SIZES)))),
        )
        lines += table("checkpoint damaged", damage(Path("checkpoint.pt"), count(DAMAGES)))
        lines += table("checkpoint forged", forge(Path("checkpoint.pt"), count(FORGERIES)))
        lines += table(
            "folder of a stranger", Strangers(folder / "strangers").fates(count(STRANGERS))
        )
        assert not os.path.exists("hostile-code-ran")
        os.chdir(Path(__file__).parent.parent)
    command = f"python benchmarks/hostile.py {options.out}" + (
        f" --share {options.share:g}" if options.share != 1 else ""
    )
    out.write_text("\n".join(lines) + f"\n`{command}` on {origin()}.\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
