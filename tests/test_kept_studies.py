"""Studies that are stopped and go on, and studies that grow: what is kept, and what is trained."""

import contextlib
import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import PATIENCE, SIZED, refusal, refused, run_cli, small

from fp8rl.config import Config
from fp8rl.disk.run_folder import read_mark
from fp8rl.history import History
from fp8rl.machine import hardware
from fp8rl.study import batch_file, comparison, parallel
from fp8rl.study.batch_file import BatchFile, Keeping, Stopped, train_until

SHORT = {"steps": 5 * 512, "eval_every": 1_024, "eval_episodes": 2}


def agents(**changes) -> list[Config]:
    """A batch with all that a population keeps: loss scales, rounding, and a loss that diverges."""
    return [
        small("fp32", seed=1, **SHORT, **changes),
        small("fp16", seed=2, **SHORT, **changes),
        small("fp8", seed=3, **SHORT, **changes, formats="weights=e4m3:stochastic m=e4m3"),
        small("fp32", seed=4, **SHORT, **changes, value_coef=1e38),
    ]


BATCHES = {
    "cart": agents(),
    "ring that wraps around": agents(capacity=1_024),
    "replay in int8": agents(codec="int8"),
    "on-policy": agents(replay_updates=0),
    "cart pole": agents(env_id="CartPole-v1"),
    "continuous actions": agents(env_id="Pendulum-v1"),
    "clipped by the learner": agents(collect_precision="bf16"),
    "alone": [small(**SHORT, seed=5)],
    "alone with a memory": [small(**SHORT, seed=6, encoder="gru", hide_velocity=True)],
}


def each_of(name: str):
    """What trains a batch: a run alone, or a population."""
    return parallel.run if "alone" in name else None


def assert_same(ours: list[History], theirs: list[History]) -> None:
    """Histories bit for bit, but for their seconds."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.columns.keys() == other.columns.keys() and one.failure == other.failure
        for name in one.columns.keys() - {"seconds"}:
            np.testing.assert_array_equal(one.column(name), other.column(name), name)


def after(iterations: int):
    """A function that is False when it is called so many times, and True from then on."""
    calls = itertools.count()
    return lambda: next(calls) >= iterations


def stop_after(iterations: int, folder: Path, name: str) -> Stopped | None:
    """Trains a batch until it is told to stop after so many iterations."""
    file = BatchFile(folder, BATCHES[name])
    run = file.built("alone" in name)
    return train_until(run, after(iterations), file, lambda: None)


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_stopped_goes_on_bit_for_bit(name, tmp_path):
    configs = BATCHES[name]
    whole = parallel.train_batch(each_of(name), configs, 0, 195)
    # After the first, after three of the five, and in the last
    for iterations in (1, 2, 2):
        assert stop_after(iterations, tmp_path, name) == Stopped(kept=True)
        assert len(list(tmp_path.iterdir())) == 1
    keeping = Keeping("goes on", tmp_path)
    assert_same(parallel.train_batch(each_of(name), configs, 0, 195, keeping), whole)


@pytest.mark.parametrize("name", ["cart", "alone"])
def test_the_state_of_a_batch_elsewhere_travels(name, tmp_path, monkeypatch):
    configs = BATCHES[name]
    whole = parallel.train_batch(each_of(name), configs, 0, 195)
    state = None
    for study in ("first", "second"):
        monkeypatch.setattr(parallel, "_told_to_stop", set())
        monkeypatch.setattr(BatchFile, "is_due", lambda self, x=study: parallel.stop_batches(x))
        keeping = Keeping(study, None, state)
        kept, state = parallel.train_batch(each_of(name), configs, 0, 195, keeping)
        assert kept and state
        # Told before it begins, it only gives back what it got
        assert parallel.train_batch(each_of(name), configs, 0, 195, keeping) == Stopped(
            True, keeping.state
        )
    monkeypatch.setattr(BatchFile, "is_due", lambda self: False)
    keeping = Keeping("third", None, state)
    assert_same(parallel.train_batch(each_of(name), configs, 0, 195, keeping), whole)


class Killed(BaseException):
    pass


def test_a_batch_that_is_killed_goes_on_from_where_it_was_saved_last(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_file, "SECONDS", 0)
    monkeypatch.setattr(batch_file, "SHARE", 1e9)  # so that each iteration is saved
    configs = BATCHES["cart"]
    file = BatchFile(tmp_path, configs)
    calls = itertools.count()

    def count():
        if next(calls) == 4:
            raise Killed

    with pytest.raises(Killed):
        train_until(file.built(alone=False), lambda: False, file, count)
    again = BatchFile(tmp_path, configs)
    assert len(again.built(alone=False).history) == 3
    whole = parallel.train_batch(None, configs, 0, 195)
    assert_same(parallel.train_batch(None, configs, 0, 195, Keeping("a", tmp_path)), whole)


def test_large_files_are_written_less_often(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(batch_file.time, "monotonic", lambda: now[0])
    file = BatchFile(tmp_path, BATCHES["cart"])
    run = file.built(alone=False)

    def save(*_):
        now[0] += 10

    monkeypatch.setattr(batch_file.checkpoint, "save", save)
    for seconds, due in ((59, False), (2, True)):
        now[0] += seconds
        assert file.is_due() == due
    file.save(run)
    for seconds, due in ((499, False), (2, True)):
        now[0] += seconds
        assert file.is_due() == due


def test_a_ring_that_memory_has_no_room_to_copy_is_not_saved(tmp_path, monkeypatch):
    file = BatchFile(tmp_path, BATCHES["cart"])
    run = file.built(alone=False)
    monkeypatch.setattr(hardware, "available", lambda device="cpu": run.ring.nbytes - 1)
    assert train_until(run, after(1), file, lambda: None) == Stopped(kept=False)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_of_the_batch_is_refused_in_one_line(tmp_path):
    file = BatchFile(tmp_path, BATCHES["cart"])
    other = BatchFile(tmp_path, BATCHES["replay in int8"])
    other.save(other.built(alone=False))
    other.path.rename(file.path)
    message = rf"{file.path.name} cannot be continued \(checkpoint .* is of other agents\): delete"
    refused(message, file.built, alone=False)
    file.path.write_bytes(b"damaged")
    refused(rf"{file.path.name} cannot be continued \(.* cannot be read", file.built, alone=False)


# Studies

STUDY = ["study", "--precisions", "fp32", "bf16", "--eval-episodes", 2, *SIZED, "--workers", 2]
LONG = [*STUDY, "--seeds", 3, "--steps", 60 * 1_024]


def results(folder: Path) -> list[dict[str, str]]:
    """The rows of results.csv without the columns of seconds."""
    with (folder / "results.csv").open() as file:
        return [
            {name: text for name, text in row.items() if "seconds" not in name}
            for row in csv.DictReader(file)
        ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a study that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "a"
    run_cli(*LONG, "--out", out)
    return out


@contextlib.contextmanager
def begun(out: Path):
    """A study in a group of processes of its own, of which a part is done."""
    words = [sys.executable, "-m", "fp8rl", *map(str, LONG), "--out", str(out)]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **options) as process:
        said = ""
        while not re.search(r"\b[1-9]\d?%\|", said[-200:]):
            letter = process.stderr.read(1)
            assert letter, said
            said += letter
        yield process


@pytest.mark.xdist_group("whole study")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_is_stopped_goes_on_to_the_same_results(
    number, tmp_path, whole, one_process, capsys
):
    out = tmp_path / "a"
    with begun(out) as process:
        os.killpg(process.pid, number)  # as a terminal does, and a scheduler
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    said = err.splitlines()[-1]
    done = int(re.search(r"interrupted: (\d+) of 6 agents have finished", said)[1])
    assert said.endswith(
        f", and {6 - done} go on from where they are, when study is called again with the same options"
    )
    assert "Traceback" not in err and "leaked" not in err
    files = [file.name for file in out.glob("batch-*")]
    assert len(files) == (6 - done) / 3
    before = {
        file: len(BatchFile(out, batch).built(alone=False).history)
        for batch in batches_of(out)
        if (file := BatchFile(out, batch).path.name) in files
    }
    assert all(iterations > 0 for iterations in before.values())
    run_cli(*LONG, "--out", out)
    assert results(out) == results(whole) and not list(out.glob("batch-*"))
    assert "100%" in capsys.readouterr().err


# The shorter runs end long before the longer ones.
UNEVEN = ["study", "--precisions", "fp32", "bf16", "--seeds", "1", "--steps", "512", "20480"]
UNEVEN += [*SIZED, "--eval-episodes", "2"]


def start_and_wait_for_a_run(out: Path) -> subprocess.Popen:
    """A study in a process of its own, one of whose runs has finished."""
    words = [sys.executable, "-m", "fp8rl", *UNEVEN, "--out", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = out / "runs.jsonl"
    while not (journal.exists() and journal.read_text().endswith("\n")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    return process


def is_gone(process: psutil.Process) -> bool:
    """Whether a process is dead; one that nobody asks for stays as a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_study_that_is_killed_leaves_no_process_and_goes_on(tmp_path, capsys, one_process):
    out = tmp_path / "a"
    process = start_and_wait_for_a_run(out)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert len(children) >= 2
    for _ in range(100 * PATIENCE):
        if all(map(is_gone, children)):
            break
        time.sleep(0.01)
    assert all(map(is_gone, children))
    before = (out / "runs.jsonl").read_text()
    run_cli(*UNEVEN, "--out", out)
    after_it = (out / "runs.jsonl").read_text()
    assert after_it.startswith(before[: before.rfind("\n") + 1])
    assert len(after_it.splitlines()) == 4 and "| bf16, steps 20480 |" in capsys.readouterr().out


def test_a_study_whose_worker_is_killed_says_so_in_one_line(tmp_path):
    process = start_and_wait_for_a_run(tmp_path / "a")
    workers = [
        worker
        for child in psutil.Process(process.pid).children()
        if "forkserver" in " ".join(child.cmdline())
        for worker in child.children()
    ]
    workers[0].kill()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and err.splitlines()[-1].startswith("fp8rl: a process of the")
    assert "Traceback" not in err and "leaked" not in err


def batches_of(out: Path) -> list[list[Config]]:
    """The batches of a study, from its mark."""
    from fp8rl.cli import study

    return [batch for _, batch in study.tasks_of(study.rounds_in(out))]


def test_a_second_signal_does_not_wait(tmp_path, monkeypatch, capsys, one_process):
    tells = []

    def never_ends(function, *arguments):
        return parallel.Future()

    def tell(study):
        tells.append(study)
        signal.raise_signal(signal.SIGINT)

    executor = parallel.ProcessPoolExecutor(1)
    executor.submit = never_ends
    executor.stop_batches = tell
    executor.is_elsewhere = True
    executor.has_workers = lambda: True
    monkeypatch.setattr(parallel, "LocalProcesses", lambda *_: executor)
    monkeypatch.setattr(parallel, "next_results", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as caught:
        run_cli(*STUDY, "--seeds", 1, "--steps", 512, "--out", tmp_path / "a")
    assert caught.value.code == 130 and len(tells) == 1
    assert "2 go on from where they were last saved or begin again, and 0 go on" in (
        capsys.readouterr().err
    )


def test_results_that_arrive_while_a_study_is_interrupted_are_kept(
    tmp_path, monkeypatch, capsys, one_process
):
    out = tmp_path / "a"
    words = [*STUDY, "--seeds", 3, "--steps", 512, "--out", out]
    add = comparison.Journal.add

    def interrupted(journal, *arguments):
        add(journal, *arguments)
        if len(journal.histories) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(comparison.Journal, "add", interrupted)
    with pytest.raises(SystemExit) as caught:
        run_cli(*words)
    assert caught.value.code == 130
    assert "interrupted: 6 of 6 agents have finished" in capsys.readouterr().err
    assert len((out / "runs.jsonl").read_text().splitlines()) == 6
    run_cli(*words)
    assert len((out / "runs.jsonl").read_text().splitlines()) == 6


# Studies that grow


@pytest.fixture
def trained(monkeypatch, one_process) -> list[list[Config]]:
    """The batches that are trained, as they are."""
    batches = []
    train_batch = parallel.train_batch

    def noted(each, configs, *others):
        batches.append(configs)
        return train_batch(each, configs, *others)

    monkeypatch.setattr(parallel, "train_batch", noted)
    return batches


QUICK = [*STUDY[:-2], "--steps", 512]


def named(batches: list[list[Config]]) -> list[list[tuple]]:
    return [[(config.precision, config.seed) for config in batch] for batch in batches]


def test_more_seeds_are_added_in_batches_of_their_own(tmp_path, trained, capsys):
    out = tmp_path / "a"
    run_cli(*QUICK, "--seeds", 2, "--workers", 2, "--out", out)
    first = results(out)
    trained.clear()
    run_cli(*QUICK, "--seeds", 5, "--out", out)
    assert (
        f"adds agents to the study in {out}: 6 of 10 are to be trained" in capsys.readouterr().out
    )
    assert sorted(map(sorted, named(trained))) == [
        [("bf16", 2), ("bf16", 4), ("fp32", 3)],
        [("bf16", 3), ("fp32", 2), ("fp32", 4)],
    ]
    grown = results(out)
    assert len(grown) == 10 and [row for row in grown if int(row["seed"]) < 2] == first
    assert [row["batch_agents"] for row in grown] == ["2", "2", "3", "3", "3"] * 2
    trained.clear()
    for words in (QUICK, [*QUICK, "--workers", 2]):  # the split is the study's own
        run_cli(*words, "--seeds", 5, "--out", out)
        assert not trained
    rounds = [read_mark(out)["options"]["earlier"][0], read_mark(out)["options"]]
    assert [options["seeds"] for options in rounds] == [2, 5]


def test_a_study_that_grows_before_it_has_finished_keeps_its_batches(tmp_path, trained):
    whole = tmp_path / "whole"
    run_cli(*QUICK, "--seeds", 3, "--workers", 2, "--out", whole)
    run_cli(*QUICK, "--seeds", 4, "--out", whole)
    out = tmp_path / "a"
    run_cli(*QUICK, "--seeds", 3, "--workers", 2, "--out", out)
    first, *_ = (out / "runs.jsonl").read_text().splitlines(keepends=True)
    (out / "runs.jsonl").write_text(first)
    trained.clear()
    run_cli(*QUICK, "--seeds", 4, "--out", out)
    assert [len(batch) for batch in trained] == [3, 3, 1, 1]
    assert results(out) == results(whole)


def test_precisions_numbers_and_controls_are_added_too(tmp_path, trained):
    out = tmp_path / "a"
    words = [*QUICK, "--seeds", 1, "--out", out]
    run_cli(*words)
    for options, count in (
        (["--precisions", "fp16", "fp32", "bf16"], 1),  # in any order
        (["--precisions", "fp16", "fp32", "bf16", "--gamma", "None", 0.9], 3),
        (["--precisions", "fp32", "fp16", "bf16", "--gamma", "None", 0.9, "--controls"], 4),
    ):
        trained.clear()
        run_cli(*words, *options)
        assert len([*itertools.chain(*trained)]) == count
    assert len(results(out)) == 2 + 1 + 3 + 4
    assert {row["arm"] for row in results(out)} >= {"fp32, gamma None", "fp32, gamma 0.9"}


def test_a_control_that_is_an_agent_of_the_larger_study_is_not_trained_again(tmp_path, trained):
    out = tmp_path / "a"
    words = [*QUICK[:2], "fp32", *QUICK[4:], "--controls", "--out", out]
    run_cli(*words, "--seeds", 2)  # and the control's, 2 and 3
    trained.clear()
    run_cli(*words, "--seeds", 3)
    # Of the control on other seeds, which are 3 to 5 now, and of the control that must fail
    assert sorted(config.seed for config in itertools.chain(*trained)) == [2, 4, 5]
    assert len(results(out)) == 9


def test_a_study_of_less_or_of_another_goal_is_refused(tmp_path, trained, capsys):
    out = tmp_path / "a"
    run_cli(*QUICK, "--seeds", 2, "--out", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for said, *options in (
        ("seeds is 2 there and 1 here", "--seeds", 1),
        ("precisions is ['fp32', 'bf16'] there and ['fp32'] here", "--precisions", "fp32"),
        ("steps is [512] there and [1024] here", "--steps", 1024),
        ("seeds is 2 there and 4 here, threshold is 195.0 there", "--seeds", 4, "--threshold", 9),
    ):
        refusal_of = refusal(capsys, *QUICK, "--seeds", 2, "--out", out, *options)
        assert refusal_of.startswith(f"out is {out}, which holds another study ({said}")
        assert refusal_of.endswith(
            "): ask for at least what it holds, use a new folder, or add --overwrite to replace it"
        )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_forged_mark_of_a_study_is_refused(tmp_path, trained, capsys):
    out = tmp_path / "a"
    run_cli(*QUICK, "--seeds", 1, "--out", out)
    options = read_mark(out)["options"]
    for forged in (
        {"earlier": 1},
        {"earlier": [1]},
        {"earlier": [{"workers": -1}]},
        {"earlier": [{"workers": 2}]},
        {"workers": "x"},
    ):
        mark = {"command": "study", "options": options | forged}
        (out / ".fp8rl").write_text(json.dumps(mark))
        for seeds in (1, 2):
            refusal(capsys, *QUICK, "--seeds", seeds, "--out", out)
