"""Training many configs in parallel: what is split how, and which executors do it."""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import InThisProcess, cores
from helpers import PATIENCE, SMALL, refusal, refused, small
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.study import parallel
from fp8rl.train import train

TINY = {"steps": 1_024, "eval_every": 512, "eval_episodes": 2} | SMALL


def test_a_study_that_goes_on_gives_the_same_numbers_bit_for_bit(one_process):
    configs = [Config(name, seed=seed, **TINY) for name in ("fp32", "fp8") for seed in range(3)]
    whole = dict(parallel.run_all(configs, workers=2, progress=False))
    rest = dict(parallel.run_all(configs, workers=2, progress=False, done=configs[:3]))
    assert rest.keys() == set(configs[3:]) and not dict(parallel.run_all(configs, done=configs))
    for config in configs[3:]:
        assert rest[config].columns["loss"] == whole[config].columns["loss"]


def test_a_run_that_fails_is_recorded_and_ends_with_minus_infinity():
    history = parallel.run(Config(**TINY, value_coef=1e38))
    assert history.failure.startswith("gradient not finite at step 512")
    assert history.final_return == -np.inf


def test_a_worker_ends_when_the_process_of_its_study_has_ended(monkeypatch):
    ended = []
    monkeypatch.setattr(parallel.os, "_exit", ended.append)
    with subprocess.Popen(["sleep", "60"]) as process:
        thread = threading.Thread(target=parallel.end_with, args=(process.pid,))
        thread.start()
        time.sleep(2 * parallel.PAUSE)
        assert not ended
        process.kill()
        thread.join(20)  # while nobody has asked for what is left of the process
        assert ended == [1]
    parallel.end_with(process.pid)  # of which nothing is left
    assert ended == [1, 1]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=6), st.integers(1, 4))
@example([2, 130], 2)
def test_populations_are_dealt_out_whole_or_in_equal_parts(sizes, workers):
    configs = [
        small(seed=seed, capacity=16 * 500 * n)
        for n, size in enumerate(sizes, 1)
        for seed in range(size)
    ]
    tasks = [task for _, task in parallel.split(configs, workers, None)]
    assert Counter(itertools.chain(*tasks)) == Counter(configs)
    assert max(map(len, tasks)) <= parallel.AGENTS
    most = parallel.AGENTS * workers
    rests = {size % most for size in sizes if size > most}
    whole = Counter()
    for n, size in enumerate(sizes, 1):
        parts = [len(task) for task in tasks if task[0].capacity == 16 * 500 * n]
        assert max(parts) - min(parts) <= 1 or size > most
        whole[size] += parts == [size]
    for size, count in Counter(sizes).items():
        # The rest of a larger one counts as one of its size
        if 1 < size <= parallel.AGENTS and size not in rests:
            assert whole[size] == count // workers * workers


def test_a_longer_population_is_split():
    configs = [small(seed=seed, steps=steps) for steps in (51_200, 512_000) for seed in range(30)]
    assert [len(task) for _, task in parallel.split(configs, 2, None)] == [15, 15, 15, 15]


# Executors


def assert_same_numbers(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for config, history in one.items():
        assert history.columns.keys() == other[config].columns.keys()
        for name in history.columns.keys() - {"seconds"}:
            np.testing.assert_array_equal(history.column(name), other[config].column(name), name)


FIVE = [Config(name, seed=seed, **TINY) for name in ("fp32", "fp8") for seed in range(2)]
FIVE += [Config(seed=9, encoder="gru", **TINY)]


@pytest.fixture(scope="module")
def of_processes():
    with pytest.warns(UserWarning, match="encoder is gru"):
        return dict(parallel.run_all(FIVE, workers=2, progress=False))


def test_a_process_gives_the_numbers_of_this_one(of_processes):
    alone = FIVE[-1]
    ours = {alone: train(build(alone), progress=False).history}
    assert_same_numbers(ours, {alone: of_processes[alone]})
    assert list(parallel.run_all([])) == []


@pytest.mark.filterwarnings("ignore:encoder is gru")
@pytest.mark.parametrize("executor", [InThisProcess(), ThreadPoolExecutor(2)], ids=["here", "two"])
def test_another_executor_gives_the_same_numbers_and_stays_open(executor, of_processes, capsys):
    with executor:
        assert_same_numbers(dict(parallel.run_all(FIVE, executor, workers=2)), of_processes)
        assert executor.submit(pow, 2, 3).result() == 8
    said = capsys.readouterr().err
    assert "100%" in said and "5 agents" in said


def test_a_batch_computes_on_one_core_and_later_threads_as_before(monkeypatch):
    threads = []
    monkeypatch.setattr(parallel, "keep_freed_memory", lambda: threads.append("kept"))

    def count(config):
        threads.append(cores())
        return parallel.run(config)

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(3,)) as executor:
        list(parallel.run_all([small(steps=512)], executor, run=count, progress=False))
        assert executor.submit(cores).result() == (3, 3)
    torch.set_num_threads(1)  # which the executor's thread has set for later ones
    assert threads == ["kept", (1, 3)]


def test_who_stops_early_cancels_what_has_not_begun():
    begun = []
    stopped = threading.Event()

    def slow(config):
        begun.append(config)
        if config.seed:
            stopped.wait(PATIENCE)
        return config.seed

    configs = [small(seed=seed) for seed in range(9)]
    with ThreadPoolExecutor(1) as executor:
        with contextlib.closing(
            parallel.run_all(configs, executor, run=slow, progress=False)
        ) as found:
            assert next(found) == (configs[0], 0)
        stopped.set()
        assert executor.submit(pow, 2, 3).result() == 8  # the caller's executor is still open
    assert len(begun) <= 2


class Losing(InThisProcess):
    def submit(self, function, /, *arguments) -> Future:
        future = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


def test_a_batch_that_an_executor_loses_or_cancels_is_said_in_one_line():
    batches = parallel.run_all([small(steps=512)], Losing(), progress=False)
    refused("a batch was cancelled", list, batches, error=ChildProcessError)


def test_batches_that_finish_together_come_in_their_order():
    waiting = {}
    for number in range(50):
        future = Future()
        future.set_result([number])
        waiting[future] = number
    assert parallel.next_results(waiting) == [(number, [number]) for number in range(50)]
    assert not waiting


def test_a_cluster_without_its_package_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    words = ["study", "--scheduler", "tcp://127.0.0.1:8786", "--out", tmp_path / "a"]
    said = refusal(capsys, *words)
    assert said.startswith("scheduler is given, and the package distributed cannot be imported (")
    assert "pip install distributed" in said
    assert not list(tmp_path.iterdir())
