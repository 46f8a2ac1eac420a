"""Folders of runs: stopped runs go on, one process writes, and other files are not touched."""

import os
import random
import signal
import time

import pytest
import torch
from helpers import PATIENCE, SIZED, cli_into, forked, refusal, run_cli, without_seconds

from fp8rl.disk import checkpoint
from fp8rl.disk.run_folder import Folder
from fp8rl.disk.safe_files import write_whole

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


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "a.tmp").symlink_to(precious)
    write_whole(tmp_path / "a", lambda file: file.write(b"whole"))
    assert precious.read_text() == "precious" and (tmp_path / "a").read_bytes() == b"whole"


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
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(number, tmp_path, whole):
    out, said = tmp_path / "a", tmp_path / "said"
    process = begun(said, out, random.randint(5, 12), *TRAIN, "--checkpoint-every", 1, "--out", out)
    code = ended(process, number)
    if number == signal.SIGKILL:
        assert code == -number
    else:
        err = said.read_text()
        assert code == 128 + number and "Traceback" not in err
        assert f"of 10,240: continue with train --resume {out}" in err.splitlines()[-1]
    # A header, and at most one row is not in the checkpoint
    saved = len(checkpoint.resume(out / "checkpoint.pt")[1]["history"]["steps"])
    assert saved >= rows_of(out / "metrics.csv") - 2
    assert_goes_on_to(whole, out)


def test_a_run_that_still_runs_is_neither_resumed_nor_replaced(tmp_path, capsys):
    with Folder.create(tmp_path, "train", {}) as folder:
        folder.write("checkpoint.pt", "")
        for options in (["--resume", tmp_path], ["--out", tmp_path, "--overwrite", *SIZED]):
            said = refusal(capsys, "train", *options)
            assert said.startswith(f"out is {tmp_path}, where another process is writing")


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    write_whole(path, lambda file: file.write(b"whole"))

    def fails(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fails)
    assert path.read_bytes() == b"whole" and [*tmp_path.iterdir()] == [path]


def test_a_full_disk_is_named_with_its_path(tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp8rl.disk.run_folder.write_whole", full)
    with pytest.raises(SystemExit):
        run_cli(*TRAIN, "--out", tmp_path / "a")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path}/a and cannot be written (No space left on device): make room" in last
