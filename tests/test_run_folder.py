"""Folders of runs: stopped runs go on, one process writes, and other files are not touched."""

import os
import random
import resource
import signal
import time

import pytest
import torch
from helpers import PATIENCE, SIZED, cli_into, forked, refusal, refused, run_cli, without_seconds

from fp8rl.cli.metrics_file import MetricsFile
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.run_folder import FILES, MARK, Folder, require_free
from fp8rl.disk.safe_files import write_whole
from fp8rl.history import History

pytestmark = pytest.mark.usefixtures("without_pictures")

TRAIN = ["train", "--steps", "10240", *SIZED, "--eval-episodes", "2"]


def rows_of(path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def begun(said, out, rows: int, *arguments):
    """A process that trains and has written so many rows more."""
    rows += rows_of(out / "metrics.csv")
    process = forked(cli_into, said, *arguments)
    while rows_of(out / "metrics.csv") < rows:
        assert process.is_alive(), said.read_text()
        time.sleep(0.005)
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


def assert_goes_on_to(whole, out) -> None:
    run_cli("train", "--resume", out)
    ours, theirs = (
        checkpoint.load(folder / "checkpoint.pt")[0].state_dict() for folder in (out, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert without_seconds(out / "metrics.csv") == without_seconds(whole / "metrics.csv")
    assert rows_of(out / "metrics.csv") == 1 + 20


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
    said = refusal(capsys, "train", "--resume", out)
    assert said.startswith(f"out is {out}, where another process is writing")
    process.kill()


def test_overwrite_touches_nothing_that_no_run_wrote(tmp_path):
    out = tmp_path / "a"
    with Folder.create(out, "train", {}) as folder:
        folder.write("config.json", "{}")
        (out / "notes.txt").write_text("precious")
        (out / "table.md").write_text("precious")
    refused("out is ", require_free, out, "train", error=FileExistsError)
    # A study would write a file of this name
    refused("out is ", require_free, out, "study", overwrite=True, error=FileExistsError)
    Folder.create(out, "train", {}, overwrite=True).close()
    assert {path.name for path in out.iterdir()} == {MARK, "notes.txt", "table.md"}


def test_no_link_is_followed_out_of_the_folder(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    out = tmp_path / "a"
    out.mkdir()
    for name in (MARK, "metrics.csv", "config.json"):
        (out / name).symlink_to(precious)
    refused(".* is a symbolic link", Folder, out, error=OSError)
    (out / MARK).unlink()
    history = History()
    for _ in range(2):
        history.add({"iteration": 0.0, "steps": 32.0, "seconds": 0.1, "eval_return": 7.0})
    with Folder(out) as folder:
        metrics = MetricsFile(folder)
        metrics.rows = 1  # as after an earlier row
        refused(".* is a symbolic link", metrics.write, history, error=OSError)
        folder.write("config.json", "ours")
    assert not (out / "config.json").is_symlink() and precious.read_text() == "precious"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    write_whole(path, lambda file: file.write(b"whole"))

    def fails(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fails)
    assert path.read_bytes() == b"whole" and [*tmp_path.iterdir()] == [path]


OPTIONS = [("checkpoint_every", "x"), ("checkpoint_every", True)]


@pytest.mark.parametrize(("name", "value"), OPTIONS)
def test_options_of_a_mark_are_checked(name, value, tmp_path, capsys):
    with Folder(tmp_path) as folder:
        folder.remember("train", {name: value})
        folder.write("config.json", Config().to_json())
    assert refusal(capsys, "train", "--resume", tmp_path).startswith(f"{name} is {value!r}")


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
