"""Studies that are stopped and go on, and studies that grow: what is kept, and what is trained."""

import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import (
    PATIENCE,
    SIZED,
    assert_same_histories,
    refusal,
    run_cli,
    small,
    wait_until,
    without_seconds,
)

from fp8rl.config import Config
from fp8rl.study import batch_file, comparison, parallel
from fp8rl.study.batch_file import BatchFile

pytestmark = pytest.mark.usefixtures("without_pictures")

SHORT = {"steps": 5 * 512, "eval_every": 1_024, "eval_episodes": 2}


def agents(**changes) -> list[Config]:
    """A batch with all that a population keeps: loss scales, rounding, and a loss that diverges."""
    return [
        small("fp16", seed=2, **SHORT, **changes),
        small("fp8", seed=3, **SHORT, **changes, formats="weights=e4m3:stochastic m=e4m3"),
        small("fp32", seed=4, **SHORT, **changes, value_coef=1e38),
    ]


BATCHES = {
    "int8 in a ring that wraps around": agents(capacity=1_024, codec="int8"),
    "continuous actions, clipped by the learner": agents(
        env_id="Pendulum-v1", collect_precision="bf16"
    ),
    "alone with a memory": [small(**SHORT, seed=6, encoder="gru", hide_velocity=True)],
}


def each_of(configs: list[Config]):
    """What trains a batch: a run alone, or a population."""
    return parallel.run if len(configs) == 1 else None


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_killed_twice_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    configs = BATCHES[name]
    whole = parallel.train_batch(each_of(configs), configs, 0)
    save = BatchFile.save
    lengths = []

    def killed(file, run):
        save(file, run)
        lengths.append(len(run.history))
        if lengths[-1] in (2, 4):  # of five iterations
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(batch_file, "SECONDS", -1)  # so that each iteration is saved
        patch.setattr(BatchFile, "save", killed)
        for _ in range(2):
            with pytest.raises(SystemExit):
                parallel.train_batch(each_of(configs), configs, 0, tmp_path)
    assert lengths == [1, 2, 3, 4] and len(list(tmp_path.iterdir())) == 1
    assert_same_histories(parallel.train_batch(each_of(configs), configs, 0, tmp_path), whole)


# Studies that are stopped

STUDY = ["study", "--precisions", "fp32", "bf16", "--eval-episodes", 2, *SIZED, "--workers", 2]
# The shorter runs end long before the longer ones.
UNEVEN = [*STUDY, "--seeds", 1, "--steps", 512, 20_480]


def is_gone(process: psutil.Process) -> bool:
    """Whether a process is dead; one that nobody asks for stays as a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_study_that_is_killed_leaves_no_process_and_goes_on_to_the_same_results(
    tmp_path, one_process
):
    run_cli(*UNEVEN, "--out", tmp_path / "whole")
    out = tmp_path / "a"
    journal = out / "runs.jsonl"
    words = [sys.executable, "-m", "fp8rl", *map(str, UNEVEN), "--out", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (journal.exists() and journal.read_text().endswith("\n")):  # until a run has ended
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert len(children) >= 2
    wait_until(lambda: all(map(is_gone, children)))
    before = journal.read_text()
    run_cli(*UNEVEN, "--out", out)
    assert journal.read_text().startswith(before[: before.rfind("\n") + 1])
    ours, theirs = (without_seconds(folder / "results.csv") for folder in (out, tmp_path / "whole"))
    assert ours == theirs and not list(out.glob("batch-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_keeps_the_results_that_it_has_written(
    number, tmp_path, monkeypatch, capsys, one_process
):
    add = comparison.Journal.add

    def interrupted(journal, *arguments):
        add(journal, *arguments)
        if len(journal.histories) == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(comparison.Journal, "add", interrupted)
    with pytest.raises(SystemExit) as caught:
        run_cli(*STUDY, "--seeds", 3, "--steps", 512, "--out", tmp_path)
    assert caught.value.code == 128 + number
    assert "interrupted: 2 of 6 agents have finished" in capsys.readouterr().err
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2


# Studies of other options


QUICK = [*STUDY[:-2], "--steps", 512]


def test_a_study_goes_on_with_its_workers(tmp_path, monkeypatch, one_process):
    out = tmp_path / "a"
    run_cli(*QUICK, "--seeds", 3, "--workers", 3, "--out", out)
    results = without_seconds(out / "results.csv")
    journal = out / "runs.jsonl"
    line, *_ = journal.read_text().splitlines(keepends=True)
    journal.write_text(line)
    batches = []
    train_batch = parallel.train_batch

    def noted(each, configs, *others):
        batches.append(configs)
        return train_batch(each, configs, *others)

    monkeypatch.setattr(parallel, "train_batch", noted)
    run_cli(*QUICK, "--seeds", 3, "--workers", 3, "--out", out)
    assert [len(batch) for batch in batches] == [2] * 3
    assert without_seconds(out / "results.csv") == results
    assert len(journal.read_text().splitlines()) == 6  # what was there is not trained again


def test_a_study_of_other_options_is_refused(tmp_path, one_process, capsys):
    out = tmp_path / "a"
    run_cli(*QUICK, "--seeds", 2, "--workers", 1, "--out", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    same = ["--workers", 1]
    for said, *options in (
        ("precisions is ['fp32', 'bf16'] there and ['fp32'] here", "--precisions", "fp32", *same),
        ("workers is 1 there and 2 here", "--workers", 2),
    ):
        refusal_of = refusal(capsys, *QUICK, "--seeds", 2, "--out", out, *options)
        assert refusal_of.startswith(f"out is {out}, which holds another study ({said})")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
