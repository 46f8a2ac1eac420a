"""Training many configs in parallel: what is split how, and which executors do it."""

import contextlib
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import cores
from helpers import PATIENCE, SMALL, assert_same_histories, small

from fp8rl.build import build
from fp8rl.config import Config
from fp8rl.study import parallel
from fp8rl.train import train

TINY = {"steps": 1_024, "eval_every": 512, "eval_episodes": 2} | SMALL


def test_a_study_that_goes_on_gives_the_same_numbers_bit_for_bit(one_process):
    configs = [Config(name, seed=seed, **TINY) for name in ("fp32", "fp8") for seed in range(3)]
    whole = dict(parallel.run_all(configs, workers=2, progress=False))
    rest = dict(parallel.run_all(configs, workers=2, progress=False, done=configs[:3]))
    assert rest.keys() == set(configs[3:]) and not dict(
        parallel.run_all(configs, object(), done=configs)
    )
    for config in configs[3:]:
        assert rest[config].columns["loss"] == whole[config].columns["loss"]


def test_a_run_that_fails_is_recorded_and_ends_with_minus_infinity():
    history = parallel.run(Config(**TINY, value_coef=1e38))
    assert history.failure.startswith("gradient not finite at step 512")
    assert history.final_return == -np.inf


# Agents of each population, their steps, and workers: the sizes of the batches
SPLITS = {
    "one worker": ([30], [512], 1, [30]),
    "as many as workers stay whole": ([30, 30], [512, 512], 2, [30, 30]),
    "the longer one is split": ([30, 30], [51_200, 512_000], 2, [15, 15, 15, 15]),
    "the third is split": ([9, 9, 9], [512] * 3, 2, [9, 9, 5, 4]),
    "more than a population may have": ([2, 130], [512] * 2, 2, [2, 2, 64, 64]),
    "fewer agents than workers": ([3], [512], 4, [1, 1, 1]),
}


@pytest.mark.parametrize("case", SPLITS)
def test_populations_are_dealt_out_whole_or_in_equal_parts(case):
    sizes, steps, workers, expected = SPLITS[case]
    configs = [
        small(seed=seed, capacity=16 * 500 * n, steps=length)
        for n, (size, length) in enumerate(zip(sizes, steps, strict=True), 1)
        for seed in range(size)
    ]
    batches = [batch for _, batch in parallel.split(configs, workers, None)]
    assert Counter(itertools.chain(*batches)) == Counter(configs)
    assert sorted(map(len, batches)) == sorted(expected)


# Executors


FIVE = [Config(name, seed=seed, **TINY) for name in ("fp32", "fp8") for seed in range(2)]
FIVE += [Config(seed=9, encoder="gru", **TINY)]


@pytest.fixture(scope="module")
def of_processes():
    with pytest.warns(UserWarning, match="encoder is gru"):
        found = dict(parallel.run_all(FIVE, workers=2, progress=False))
    return [found[config] for config in FIVE]


def test_a_process_gives_the_numbers_of_this_one(of_processes):
    history = train(build(FIVE[-1]), progress=False).history
    assert_same_histories([history], of_processes[-1:])
    assert list(parallel.run_all([])) == []


@pytest.mark.filterwarnings("ignore:encoder is gru")
def test_another_executor_gives_the_same_numbers_and_stays_open(of_processes, capsys):
    with ThreadPoolExecutor(2) as executor:
        found = dict(parallel.run_all(FIVE, executor, workers=2))
        assert_same_histories([found[config] for config in FIVE], of_processes)
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
