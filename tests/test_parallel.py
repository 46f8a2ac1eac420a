"""Training many configs in parallel: what is split how, and which executors do it."""

import contextlib
import itertools
import signal
import sys
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import InThisProcess
from helpers import SERVER, SIZED, SMALL, refusal, refused, run_cli, small
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.disk.run_folder import read_mark
from fp8rl.study import parallel
from fp8rl.train import train

TINY = {"steps": 1_024, "eval_every": 512, "eval_episodes": 2} | SMALL


def test_processes_give_the_numbers_of_this_one():
    configs = [Config(seed=seed, **TINY) for seed in range(2)]
    histories = dict(parallel.run_all(configs, workers=2, progress=False, run=parallel.run))
    assert histories.keys() == set(configs) and list(parallel.run_all([])) == []
    for config in configs:
        ours = train(build(config), progress=False).history
        assert histories[config].columns.keys() == ours.columns.keys()
        for name in ours.columns.keys() - {"seconds"}:
            np.testing.assert_array_equal(histories[config].column(name), ours.column(name), name)


def test_what_cannot_be_in_a_population_trains_alone_and_says_so(one_process):
    configs = [Config(seed=1, **TINY), Config(seed=2, encoder="gru", **TINY)]
    with pytest.warns(
        UserWarning, match="encoder is gru: trained alone, a population does not have it"
    ):
        assert dict(parallel.run_all(configs, progress=False)).keys() == set(configs)


def test_a_study_that_goes_on_gives_the_same_numbers_bit_for_bit(one_process):
    configs = [Config(name, seed=seed, **TINY) for name in ("fp32", "fp8") for seed in range(3)]
    whole = dict(parallel.run_all(configs, workers=2, progress=False))
    rest = dict(parallel.run_all(configs, workers=2, progress=False, done=configs[:3]))
    assert rest.keys() == set(configs[3:]) and not dict(parallel.run_all(configs, done=configs))
    for config in configs[3:]:
        assert rest[config].columns["loss"] == whole[config].columns["loss"]


def test_progress_shows_agents_and_how_many_are_at_195(capsys, one_process):
    list(parallel.run_all([Config(seed=seed, **TINY) for seed in range(3)]))
    said = capsys.readouterr().err
    assert "3 agents" in said and "step/s" in said and "100%" in said


def test_a_run_that_fails_is_recorded_and_ends_with_minus_infinity():
    history = parallel.run(Config(**TINY, value_coef=1e38))
    assert (
        history.failure.startswith("gradient not finite at step 512")
        and history.final_return == -np.inf
    )


def test_a_signal_waits_until_no_lock_of_a_future_is_held(one_process, monkeypatch):
    def stop(*_):
        raise InterruptedError

    def interrupted(*args):
        signal.raise_signal(signal.SIGTERM)
        waited.append(wait(*args))
        return waited[0]

    wait, waited = parallel.wait, []
    monkeypatch.setattr(parallel, "wait", interrupted)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(InterruptedError):
            list(parallel.run_all([Config(**TINY)], progress=False))
        assert waited and signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)


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
    assert (
        Counter(itertools.chain(*tasks)) == Counter(configs)
        and max(map(len, tasks)) <= parallel.AGENTS
    )
    whole, rests = (
        Counter(),
        {size % (parallel.AGENTS * workers) for size in sizes if size > parallel.AGENTS * workers},
    )
    for n, size in enumerate(sizes, 1):
        parts = [len(task) for task in tasks if task[0].capacity == 16 * 500 * n]
        assert max(parts) - min(parts) <= 1 or size > parallel.AGENTS * workers
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


EXECUTORS = {
    "at once and here": InThisProcess,
    "threads": lambda: ThreadPoolExecutor(2),
    "one process, whatever the split": lambda: ProcessPoolExecutor(1, SERVER),
}


@pytest.mark.filterwarnings("ignore:encoder is gru")
@pytest.mark.parametrize("name", EXECUTORS)
def test_another_executor_gives_the_same_numbers_and_stays_open(name, of_processes, capsys):
    before = torch.get_num_threads()
    with EXECUTORS[name]() as executor:
        assert_same_numbers(dict(parallel.run_all(FIVE, executor, workers=2)), of_processes)
        assert executor.submit(pow, 2, 3).result() == 8
    said = capsys.readouterr().err
    assert "100%" in said and "5 agents" in said
    assert torch.get_num_threads() == before


def test_a_batch_computes_on_one_thread_wherever_it_is(monkeypatch):
    threads = []
    monkeypatch.setattr(parallel, "keep_freed_memory", lambda: threads.append("kept"))

    def count(config):
        threads.append(torch.get_num_threads())
        return parallel.run(config)

    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(3,)) as executor:
        list(parallel.run_all([small(steps=512)], executor, run=count, progress=False))
        assert executor.submit(torch.get_num_threads).result() == 3
    assert threads == ["kept", 1]


def test_who_stops_early_cancels_what_has_not_begun():
    begun = []

    def slow(config):
        begun.append(config)
        time.sleep(0.1)
        return config.seed

    configs = [small(seed=seed) for seed in range(9)]
    with ThreadPoolExecutor(1) as executor:
        with contextlib.closing(
            parallel.run_all(configs, executor, run=slow, progress=False)
        ) as found:
            assert next(found) == (configs[0], 0)
        assert executor.submit(pow, 2, 3).result() == 8  # the caller's executor is still open
    assert len(begun) < len(configs)


def test_a_batch_that_an_executor_loses_or_cancels_is_said_in_one_line():
    class Losing(InThisProcess):
        def submit(self, function, /, *arguments) -> Future:
            future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    def trained(executor, run=None):
        return list(parallel.run_all([small(steps=512)], executor, run=run, progress=False))

    refused("a batch was cancelled", trained, Losing(), error=ChildProcessError)
    with ProcessPoolExecutor(1, SERVER) as executor:
        message = "a process of the study died"
        refused(message, trained, executor, killed, error=ChildProcessError)


def killed(config):
    signal.raise_signal(signal.SIGKILL)


def test_batches_that_finish_together_come_in_their_order():
    waiting = {}
    for number in range(50):
        future = Future()
        future.set_result([number])
        waiting[future] = number
    assert parallel.next_results(waiting) == [(number, [number]) for number in range(50)]
    assert not waiting


STUDY = ["study", "--precisions", "fp32", "--seeds", 5, "--steps", 512, *SIZED]
STUDY += ["--eval-episodes", 2]


def test_a_study_goes_on_with_the_split_that_it_began_with(
    tmp_path, one_process, monkeypatch, capsys
):
    sizes = []
    train_batch = parallel.train_batch

    def noted(each, configs, *others):
        sizes.append(len(configs))
        return train_batch(each, configs, *others)

    monkeypatch.setattr(parallel, "train_batch", noted)
    out = tmp_path / "a"
    run_cli(*STUDY, "--workers", 3, "--out", out)
    assert sizes == [2, 2, 1] and read_mark(out)["options"]["workers"] == 3
    results = [line.split(",")[:6] for line in (out / "results.csv").read_text().splitlines()]
    first, *_ = (out / "runs.jsonl").read_text().splitlines(keepends=True)
    (out / "runs.jsonl").write_text(first)
    run_cli(*STUDY, "--out", out)
    assert sizes[3:] == [2, 2, 1]
    assert results == [
        line.split(",")[:6] for line in (out / "results.csv").read_text().splitlines()
    ]
    assert "holds another study (workers is 3 there and 2 here)" in refusal(
        capsys, *STUDY, "--workers", 2, "--out", out
    )
    run_cli(*STUDY, "--workers", 2, "--out", out, "--overwrite")
    assert sizes[6:] == [3, 2]
    assert refusal(capsys, *STUDY, "--workers", 0, "--out", out) == "workers is 0: use 1 or more"


def test_a_cluster_without_its_package_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    words = [*STUDY, "--scheduler", "tcp://127.0.0.1:8786", "--out", tmp_path / "a"]
    said = refusal(capsys, *words)
    assert said.startswith("scheduler is given, and the package distributed cannot be imported (")
    assert said.endswith("): pip install distributed, or leave the scheduler out")
    assert not list(tmp_path.iterdir())
