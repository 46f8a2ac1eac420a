"""What users do to it: kills, two writers, foreign files, other code beside it."""

import contextlib
import csv
import importlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers import PATIENCE, SIZED, TINY, cli_into, forked, refused, run_cli, weights

from fp8rl.build import build, build_population
from fp8rl.cli import study as cli_study
from fp8rl.cli import train as cli_train
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.run_folder import FILES, MARK, Folder, read_mark, require_free
from fp8rl.history import History
from fp8rl.train import train

SHORT = {"steps": 2 * 64, "eval_every": 0, "eval_episodes": 2} | TINY
RUNS = {
    "fp32": Config(**SHORT),
    "bf16": Config(**SHORT, precision="bf16"),
    "fp16": Config(**SHORT, precision="fp16"),
    "fp8": Config(**SHORT, precision="fp8", codec="fp8"),
    "fp8+bf16": Config(**SHORT, precision="fp8+bf16", codec="int8"),
    "gru": Config(**SHORT, encoder="gru", hide_velocity=True),
    "gym": Config(**SHORT, env_id="CartPole-v1"),
    "normalized": Config(**SHORT, env_id="fp8rl/Lqr-v0", normalize_obs=True),
    "few bits": Config(**SHORT, formats="weights=e4m3:stochastic m=e4m3 root=e4m3"),
    "population": [Config(**SHORT, precision=name) for name in ("fp32", "fp16", "fp8")],
}


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def trained(name: str) -> bytes:
    """Weights and history of a run."""
    found = RUNS[name]
    run = train(
        build_population(found) if isinstance(found, list) else build(found), progress=False
    )
    columns = [
        np.array(column).tobytes()
        for name, column in run.history.columns.items()
        if name != "seconds"
    ]
    return b"".join([weights(run).numpy().tobytes(), *columns])


@pytest.fixture(scope="module")
def alone():
    """What each run gives by itself."""
    return {name: trained(name) for name in RUNS}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_settings_of_the_caller_change_nothing(surrounding, alone):
    for name, expected in alone.items():
        with SURROUNDINGS[surrounding]():
            found = trained(name)
        assert found == expected, name


def test_threads_beside_each_other_train_as_alone_and_leave_the_caller_as_it_was(alone):
    torch.manual_seed(7)
    before, found = torch.get_rng_state(), {}
    jobs = [
        threading.Thread(target=lambda k=k, name=name: found.update({(k, name): trained(name)}))
        for k in (0, 1)
        for name in RUNS
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(found) == 2 * len(RUNS) and all(
        result == alone[name] for (_, name), result in found.items()
    )
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert (
        not torch.is_autocast_enabled("cpu") and torch.backends.cuda.matmul.fp32_precision == "none"
    )


TRAIN = ["train", "--steps", "10240", *SIZED, "--eval-episodes", "2"]


def start(*arguments, program: str = "fp8rl", **kwargs) -> subprocess.Popen:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", program, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def until(condition, alive, said) -> None:
    """Waits for something that a process does."""
    while not condition():
        assert alive(), said()
        time.sleep(0.005)


def rows_of(path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def begun(said, out, rows: int, *arguments):
    """A process that trains and has written so many rows more."""
    rows += rows_of(out / "metrics.csv")
    process = forked(cli_into, said, *arguments)
    until(lambda: rows_of(out / "metrics.csv") >= rows, process.is_alive, said.read_text)
    return process


def ended(process, number: int) -> int | None:
    """Its exit code after a signal."""
    os.kill(process.pid, number)
    process.join(PATIENCE)
    return process.exitcode


# Tests that fork go to one worker, because the server that forks takes long to start.
forking = pytest.mark.xdist_group("forked")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "a"
    run_cli(*TRAIN, "--out", out)
    return out


def timeless(out) -> list[dict[str, str]]:
    """The rows of metrics.csv without their seconds."""
    with (out / "metrics.csv").open() as file:
        return [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in csv.DictReader(file)
        ]


def assert_goes_on_to(whole, out) -> None:
    run_cli("train", "--resume", out)
    ours, theirs = (
        checkpoint.load(folder / "checkpoint.pt")[0].state_dict() for folder in (out, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert timeless(out) == timeless(whole) and rows_of(out / "metrics.csv") == 1 + 20


@forking
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(number, tmp_path, whole):
    out, said = tmp_path / "a", tmp_path / "said"
    code = ended(begun(said, out, random.randint(5, 12), *TRAIN, "--out", out), number)
    if number == signal.SIGKILL:
        assert code == -number
    else:
        err = said.read_text()
        assert code == 128 + number and "Traceback" not in err
        assert f"of 10,240: continue with train --resume {out}" in err.splitlines()[-1]
        # Nothing was lost
        assert len(checkpoint.resume(out / "checkpoint.pt")[1]["history"]["steps"]) >= 4
    assert_goes_on_to(whole, out)


@forking
def test_a_resumed_run_goes_on_saving(tmp_path, whole):
    out, said = tmp_path / "a", tmp_path / "said"
    for arguments in ((*TRAIN, "--checkpoint-every", 1, "--out", out), ("train", "--resume", out)):
        before = rows_of(out / "metrics.csv")
        ended(begun(said, out, 6, *arguments), signal.SIGKILL)
        saved = len(checkpoint.resume(out / "checkpoint.pt")[1]["history"]["steps"])
        # A header, and at most one row is not in the checkpoint
        assert saved >= rows_of(out / "metrics.csv") - 2 > before
    assert_goes_on_to(whole, out)


@pytest.mark.parametrize(
    ("program", "arguments", "module"),
    [
        ("fp8rl", ("train", "--out", "/nowhere"), "gymnasium"),
        ("fp8rl.doctor", ("mismatch", "a"), "numpy"),
    ],
)
def test_ctrl_c_during_the_imports_is_no_traceback(program, arguments, module):
    # Names modules on stderr
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    process = start(*arguments, program=program, env=environment)
    assert any(line.endswith(f" {module}\n") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT and "Traceback" not in err, err


@forking
def test_one_of_two_writers_wins_and_the_other_says_so(tmp_path):
    out, said = tmp_path / "a", [tmp_path / name for name in ("0", "1")]
    both = [
        forked(cli_into, path, *TRAIN[:1], "--steps", 5120, *SIZED, "--out", out) for path in said
    ]
    for process in both:
        process.join(PATIENCE)
    assert sorted(process.exitcode for process in both) == [0, 2], [
        path.read_text() for path in said
    ]
    (loser,) = (
        path.read_text() for process, path in zip(both, said, strict=True) if process.exitcode
    )
    assert loser.startswith(f"fp8rl: out is {out}, ") and loser.count("\n") == 1
    assert {path.name for path in out.iterdir()} == {MARK, *FILES["train"]}


@forking
def test_a_run_that_still_runs_is_not_resumed(tmp_path, capsys):
    out = tmp_path / "a"
    process = begun(tmp_path / "said", out, 3, "train", "--steps", "2048000", *SIZED, "--out", out)
    with pytest.raises(SystemExit, match="2"):
        run_cli("train", "--resume", out)
    said = capsys.readouterr().err
    assert (
        said
        == f"fp8rl: out is {out}, where another process is writing: wait for it or use another\n"
    )
    process.kill()


def test_overwrite_touches_nothing_that_no_run_wrote(tmp_path):
    for name, command in (("table.md", "train"), ("config.json", "train"), ("notes.txt", "study")):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text("precious")
        refused(
            "out is .*, which holds other files",
            require_free,
            out,
            command,
            overwrite=True,
            error=FileExistsError,
        )
    with Folder.create(tmp_path / "a", "train", {}) as folder:
        folder.write("config.json", "{}")
        (folder.path / "notes.txt").write_text("precious")
        (folder.path / "table.md").write_text("precious")
    message = r"out is .*, whose table\.md no run wrote"
    refused(message, require_free, tmp_path / "a", "study", overwrite=True, error=FileExistsError)
    Folder.create(tmp_path / "a", "train", {}, overwrite=True).close()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {MARK, "notes.txt", "table.md"}


def train_on_a_full_disk(said, out) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does when it starts
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    cli_into(said, *TRAIN, "--out", out)


@forking
def test_a_full_disk_is_named_with_its_path(tmp_path):
    process = forked(train_on_a_full_disk, tmp_path / "said", tmp_path / "a")
    process.join(PATIENCE)
    last = (tmp_path / "said").read_text().splitlines()[-1]
    assert (
        process.exitcode == 2
        and f"{tmp_path}/a" in last
        and "cannot be written (File too large): make room" in last
    )


# The shorter runs end long before the longer ones.
STUDY = [
    "study",
    "--precisions",
    "fp32",
    "bf16",
    "--seeds",
    "1",
    "--steps",
    "512",
    "20480",
    *SIZED,
]
STUDY += ["--eval-episodes", "2"]


def gone(process: psutil.Process) -> bool:
    """Whether a process is dead; one that nobody asks for stays as a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_study_that_is_killed_leaves_no_process_and_goes_on(tmp_path, capsys, one_process):
    out = tmp_path / "a"
    process = start(*STUDY, "--out", out)
    until(
        lambda: rows_of(out / "runs.jsonl") >= 1,
        lambda: process.poll() is None,
        process.communicate,
    )
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(PATIENCE)
    assert len(children) >= 2
    for _ in range(100 * PATIENCE):
        if all(map(gone, children)):
            break
        time.sleep(0.01)
    assert all(map(gone, children))
    before = (out / "runs.jsonl").read_text()
    run_cli(*STUDY, "--out", out)
    assert (out / "runs.jsonl").read_text().startswith(before[: before.rfind("\n") + 1])
    assert rows_of(out / "runs.jsonl") == 4 and "| bf16, steps 20480 |" in capsys.readouterr().out
    message = "out is .*, which holds another study: use a new folder, or add --overwrite"
    for options in ({"seeds": 9, "workers": 2}, read_mark(out)["options"] | {"workers": 99}):
        refused(message, cli_study.folder_of, out, options, overwrite=False, error=FileExistsError)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The workers of a study, which its server has forked."""
    children = psutil.Process(process.pid).children()
    return [
        worker
        for child in children
        if "forkserver" in " ".join(child.cmdline())
        for worker in child.children()
    ]


def test_a_study_that_ends_early_says_one_line_or_none(tmp_path):
    both = [start(*STUDY, "--out", tmp_path / name) for name in ("killed worker", "terminated")]
    for process, name in zip(both, ("killed worker", "terminated"), strict=True):
        until(
            lambda out=tmp_path / name: rows_of(out / "runs.jsonl"),
            lambda p=process: p.poll() is None,
            process.communicate,
        )
        process.terminate() if name == "terminated" else workers_of(process)[0].kill()
    (_, err), (_, terminated) = (process.communicate(timeout=PATIENCE) for process in both)
    assert [process.returncode for process in both] == [2, 128 + signal.SIGTERM]
    # The last
    assert err.endswith(
        "\nfp8rl: a process of the study died (killed, or out of memory): run the command again\n"
    )
    for said in (err, terminated):
        assert "Traceback" not in said and "leaked" not in said


@pytest.fixture
def hostile():
    """The benchmark, which has the stranger."""
    return importlib.import_module("hostile")


@pytest.fixture
def strangers(hostile, tmp_path):
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    ) as name:  # thousands of files
        yield hostile.Strangers(Path(name) / "all")


IN_PLACE = {
    "ring, to write": {"lock", "ring.json", "obs.bin", "clock.bin"},
    "ring, to read": {"lock", "ring.json", "obs.bin"},
}
IN_PLACE |= {
    "study": {MARK, "runs.jsonl"},
    "train --resume": {MARK},
    "train --overwrite": {MARK},
    "eval": set(),
}


def test_what_is_no_plain_file_of_the_folder_s_own_is_not_opened(hostile, strangers):
    for command, files in strangers.files.items():
        for name in files:
            for kind in ("link", "second name", "pipe", "device"):
                for place in (name, f"{name}.tmp"):

                    def fill(out, kind=kind, place=place):
                        (out / place).unlink(missing_ok=True)
                        hostile.PLANTS[kind](out / place, strangers.outside)

                    fate = strangers.fate(command, fill)
                    must = ("refused",) if place in IN_PLACE[command] else ("refused", "used")
                    assert fate in must, (command, kind, place, fate)


def test_generated_folders_change_nothing_outside_them(strangers):
    fates = strangers.fates(300)
    assert {fate for _, fate in fates} == {"used", "refused"}, fates
    assert all(
        fates[command, fate] > 3 for command in strangers.files for fate in ("used", "refused")
    ), fates


def test_every_string_and_number_of_a_file_may_be_forged(hostile, strangers):
    content = torch.load(
        io.BytesIO(strangers.files["train --resume"]["checkpoint.pt"]), weights_only=True
    )
    journal = json.loads(strangers.files["study"]["runs.jsonl"])
    places = hostile.leaves(content)
    assert len(places) > 50
    for i, place in enumerate(places):
        for value in hostile.FORGED[i % 3 :: 3]:
            forged = hostile.forged(content, place, value)
            fate = strangers.fate(
                "train --resume",
                lambda out, forged=forged: torch.save(forged, out / "checkpoint.pt"),
            )
            assert fate in ("refused", "used"), (place, value, fate)
    for place in hostile.leaves(journal):
        for value in hostile.FORGED:
            text = json.dumps(hostile.forged(journal, place, value)) + "\n"
            fate = strangers.fate(
                "study", lambda out, text=text: (out / "runs.jsonl").write_text(text)
            )
            assert fate in ("refused", "used"), (place, value, fate)


def test_metrics_are_not_appended_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("")
    history = History()
    history.add({"iteration": 0.0, "steps": 32.0, "seconds": 0.1, "eval_return": 7.0})
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.csv").symlink_to(tmp_path / "precious")
    with Folder(tmp_path / "a") as folder:
        refused(
            ".*metrics.csv is a link", cli_train.write_metrics, folder, history, 1, error=OSError
        )
    assert not (tmp_path / "precious").read_text()


def test_a_forged_mark_is_refused(tmp_path, capsys):
    for options in ({"checkpoint_every": "x"}, {"checkpoint_every": True}, {"checkpoint_ring": 1}):
        with Folder(tmp_path) as folder:
            folder.remember("train", options)
            folder.write("config.json", Config(**SHORT).to_json())
        with pytest.raises(SystemExit):
            run_cli("train", "--resume", tmp_path)
        ((name, value),) = options.items()
        assert capsys.readouterr().err.startswith(f"fp8rl: {name} is {value!r}: use ")


def test_a_name_with_a_newline_is_one_line(tmp_path, capsys):
    out = tmp_path / "a\n\x1b[2J"
    out.mkdir()
    (out / "checkpoint.pt").touch()
    for arguments in (
        ["eval", out],
        ["train", "--resume", out],
        ["train", "--out", out],
    ):
        with pytest.raises(SystemExit):
            run_cli(*arguments)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith("fp8rl: ") and "\x1b" not in said


def test_a_checkpoint_imports_nothing_that_it_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "payload.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = train(build(Config(**SHORT)), progress=False)
    checkpoint.save("checkpoint.pt", run)
    content = torch.load("checkpoint.pt", weights_only=True)
    content["config"] |= {"env_id": "payload:Foo-v0", "start_noise": 0.5}
    torch.save(content, "checkpoint.pt")
    for arguments in (["eval", "."], ["train", "--resume", "."]):
        with pytest.raises(SystemExit, match="2"):
            run_cli(*arguments)
        assert (
            "has env_id 'payload:Foo-v0': import payload first, or add --trust if you trust it"
            in capsys.readouterr().err
        )
    with Folder.create(Path("stopped"), "train", {}) as folder:  # before its first checkpoint
        folder.write("config.json", json.dumps({"env_id": "payload:Foo-v0"}))
    with pytest.raises(SystemExit, match="2"):
        run_cli("train", "--resume", "stopped")
    assert (
        "config.json has env_id 'payload:Foo-v0': import payload first" in capsys.readouterr().err
    )
    assert not os.path.exists("ran")
    assert checkpoint.resume("checkpoint.pt", trust=True)[0].env_id == "payload:Foo-v0"
