"""Training of many configs in parallel, on this machine or on the workers of any executor.

Configs train together in batches: as populations (population/population.py), or alone where a
population cannot have them. Batches exchange nothing. `run_all` hands each batch to a
`concurrent.futures.Executor`. By default that is a pool of processes on this machine
(`LocalProcesses`). The workers of another executor may be on other machines, as those of a Dask
cluster are (dask_cluster.py). Configs travel to a worker, and histories travel back.

The numbers of an agent depend on how many agents its batch has, because a matrix product may add up
in another order. On an EPYC with AVX-512, for example, an agent alone in its batch differs in the
last bits from the same agent among others, and after some iterations in its returns. So the split
into batches is a function of the configs and of the argument `workers`, and of nothing else: not of
the executor, of how many workers it really has, or of which of them die. With the same `workers`,
each executor gives the same numbers bit for bit on one kind of processor.

A study keeps the states of its batches in files (batch_file.py). A batch that was stopped goes on
from its file and gives the same numbers.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Container, Iterator, MutableSequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..build import build, build_population
from ..config import Config
from ..history import History
from ..machine.hardware import cores, keep_freed_memory, one_core
from ..machine.plan import plan_run
from ..population.batches import batches, obstacle, require_one_population
from ..tasks.gymnasium_env import EnvironmentFailed, children_ignore_interrupts
from ..train import iterate
from .batch_file import BatchFile, SharedFile, opened
from .comparison import THRESHOLD

AGENTS = 64  # in a population, at most: with more, results come later and take more memory

# A batch of agents, and the function that trains each of them alone; None trains a population.
Batch = tuple[Callable[[Config], History] | None, list[Config]]


def run(config: Config) -> History:
    """Trains one config alone, without a progress bar. A run that fails ends with minus infinity,
    and its history tells why."""
    (history,) = _train(True, [config], number=0, threshold=math.inf)
    return history


def run_all(
    configs: list[Config],
    executor: Executor | None = None,
    workers: int | None = None,
    progress: bool = True,
    run: Callable[[Config], History] | None = None,
    done: Container[Config] = (),
) -> Iterator[tuple[Config, History]]:
    """Trains configs in parallel, yielding each with its history as they finish (in any order).

    `workers`: the populations are split so that this many workers finish together. None is one a
    core of this machine. The numbers of an agent depend on it (see above).
    `run`: what a worker does with each config alone; None trains them together, as populations,
    where that can be. Another executor than this machine's must be able to pickle it.
    `executor`, `progress` and `done` are those of `run_batches`, and so is what it raises.
    """
    if run is None:
        for reason in dict.fromkeys(filter(None, map(obstacle, configs))):
            warnings.warn(reason.replace("train it alone", "trained alone"), stacklevel=2)
    workers = workers or cores()
    tasks = split(configs, workers, run)
    yield from run_batches(tasks, executor, workers, progress, done)


def run_batches(
    tasks: list[Batch],
    executor: Executor | None = None,
    workers: int | None = None,
    progress: bool = True,
    done: Container[Config] = (),
    threshold: float = THRESHOLD,
    folder: Path | None = None,
) -> Iterator[tuple[Config, History]]:
    """Trains batches in parallel, yielding each config with its history as they finish (in any
    order).

    `executor`: whose workers train; it is the caller's to shut down. None is a pool of processes on
    this machine, at most `workers`, of which none outlives this process or the last result.
    `progress`: shows a bar. With this machine's processes it counts every step, and with another
    executor those of finished batches. It also counts agents that have reached the `threshold`.
    `done`: configs that need not be trained any more. The others train in the populations that they
    would have been in without it, so that a study that goes on gives the same numbers bit for bit.
    `folder`: where the states of batches are kept that have begun, by workers of this machine or by
    those of an executor with a method `share` (dask_cluster.py). They go on from there.

    Raises what a run raises, and ChildProcessError if a process died or the executor gave up a
    batch. Then, and if the caller stops early, batches that have not begun are cancelled."""
    tasks = [(each, batch) for each, batch in tasks if any(config not in done for config in batch)]
    if not tasks:
        return
    agents = sum(len(batch) for _, batch in tasks)
    counts = [0.0] * (2 * len(tasks))  # of each batch: steps, agents that reached the threshold
    total = sum(steps_of(config) for _, batch in tasks for config in batch)
    waiting: dict[Future, int] = {}  # the number of the batch
    share = getattr(executor, "share", None)
    with contextlib.ExitStack() as on_exit:
        if executor is None:
            counts = multiprocessing.get_context("forkserver").RawArray("d", counts)
            processes = min(workers or cores(), cores(), len(tasks))
            executor = on_exit.enter_context(LocalProcesses(processes, counts))
        if share and folder is None:
            folder = Path(on_exit.enter_context(tempfile.TemporaryDirectory()))
        files = [BatchFile(folder, batch) for _, batch in tasks if folder]
        try:
            for number, (each, batch) in enumerate(tasks):
                keeping = folder
                if share:
                    keeping = share(files[number].path)
                    files[number].shared = keeping
                with held_signals():
                    future = executor.submit(train_batch, each, batch, number, threshold, keeping)
                waiting[future] = number
            with tqdm(total=total, unit="step", unit_scale=True, disable=not progress) as bar:
                while waiting:
                    tell_news(executor)
                    fetch(files)
                    finished = next_results(waiting)
                    for number, histories in finished:
                        _, batch = tasks[number]
                        counts[2 * number] = sum(map(steps_of, batch))
                        counts[2 * number + 1] = sum(reaches(x, threshold) for x in histories)
                    reached = sum(counts[1::2])
                    text = f"{agents} agents, {reached:.0f} at {threshold:g}"
                    bar.set_postfix_str(text, refresh=False)
                    bar.update(sum(counts[::2]) - bar.n)
                    for number, histories in finished:
                        _, batch = tasks[number]
                        for config, history in zip(batch, histories, strict=True):
                            if config not in done:
                                yield config, history
                        if folder:
                            files[number].remove()  # the caller has its results
        except BrokenExecutor as error:
            raise ChildProcessError(
                "a process of the study died (killed, or out of memory): run the command again"
            ) from error
        except CancelledError as error:
            raise ChildProcessError(
                "a batch was cancelled, as when a cluster's scheduler has died: "
                "see whether its workers are there, then run the command again"
            ) from error
        finally:
            for future in waiting:
                future.cancel()
            for file in files:
                file.fetch()
                file.leave()


def fetch(files: list[BatchFile]) -> None:
    """Copies the files of batches that are on the scheduler of a cluster, each when it is time to,
    and tells of batches that begin again and again."""
    for file in files:
        if not file.is_due():
            continue
        before = file.begun
        file.fetch()
        if file.begun > max(before, 1):
            tqdm.write(
                f"fp8rl: {file.path.stem} has begun {file.begun} times without being saved: "
                "let workers live longer, or make batches smaller by more --workers",
                file=sys.stderr,
            )


def tell_news(executor: Executor) -> None:
    """Prints what an executor's user should know while it waits, if there is something new."""
    news = getattr(executor, "news", None)
    if news and (line := news()):
        tqdm.write(f"fp8rl: {line}", file=sys.stderr)


def result_of(future: Future, executor: Executor):
    """The result of a future of an executor, with the executor's news while it is awaited."""
    while not future.done():
        tell_news(executor)
        with held_signals():
            wait([future], 0.5)
    return future.result()


def steps_of(config: Config) -> int:
    """The environment steps of a run."""
    return config.iterations * config.steps_per_iteration


def reaches(history: History, threshold: float) -> bool:
    """Whether an evaluation reached the threshold."""
    return isinstance(history, History) and history.first_step_at(threshold) > 0


def next_results(waiting: dict[Future, int]) -> list[tuple[int, list[History]]]:
    """The batches that have finished within half a second, in order: their numbers and histories.

    `wait` gives a set, whose order differs from one process to the next. Sorted, batches that
    finish together stand in the same order in every journal.

    Their futures are removed from `waiting` and then belong to nobody. A Dask cluster would
    otherwise train a finished batch again when the worker that trained it dies."""
    with held_signals():
        ended, _ = wait(waiting, 0.5, FIRST_COMPLETED)
        in_order = sorted(ended, key=waiting.__getitem__)
        return [(waiting.pop(future), future.result()) for future in in_order]


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """SIGINT and SIGTERM wait for its end. What they raise inside a wait can leave the lock of a
    future held, and the thread that ends the pool would wait for it for ever."""
    held, main = [], threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {
        number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in held:
            signal.raise_signal(number)


def require(tasks: list[Batch], workers: int | None = None, at_once: int | None = None) -> None:
    """Raises, before any begins, what `run_batches` raises of batches that cannot be trained on
    this machine. `at_once`: as many batches share its memory; None is one a core."""
    workers = workers or cores()
    populations = [batch for each, batch in tasks if each is None]
    at_once = min(at_once or cores(), workers, len(populations))
    for batch in populations:
        require_one_population(batch, "cpu", at_once)
    for config in dict.fromkeys(replace(config, seed=0) for each, (config, *_) in tasks if each):
        plan_run(config)


def split(configs: list[Config], workers: int, each: Callable | None) -> list[Batch]:
    """The batches that workers train: single runs with `each`, or populations (None).

    Populations are split over the workers, so that all finish together. Of populations that take
    equally long, as many as give every worker the same number stay whole, because two halves take
    longer than a whole.
    """
    if each:
        return [(each, [config]) for config in configs]
    single = [config for config in configs if obstacle(config)]
    dealt = batches([config for config in configs if not obstacle(config)], AGENTS * workers)
    alike: dict[tuple, list[list[Config]]] = {}
    for batch in dealt:
        length = batch[0].iterations, batch[0].steps_per_iteration, batch[0].updates
        alike.setdefault((len(batch), *length), []).append(batch)
    whole: list[list[Config]] = []
    for (size, *_), like in alike.items():
        if size <= AGENTS:
            whole += like[: len(like) // workers * workers]
    parts = [
        batch[i::workers]
        for batch in dealt
        if batch not in whole
        for i in range(min(workers, len(batch)))
    ]
    populations = [(None, batch) for batch in whole + parts]
    return populations + [(run, [config]) for config in single]


# What a worker does.


def train_batch(
    each: Callable[[Config], History] | None,
    configs: list[Config],
    number: int,
    threshold: float,
    keeping: Path | SharedFile | None = None,
) -> list[History]:
    """Trains a batch in the thread that calls it, and returns the histories in the order of its
    configs. It needs nothing that was set up before, so any worker can do it.

    The batch goes on from its file in the folder `keeping`, or from that on a cluster's scheduler,
    and its state is saved there again and again. A function of the caller, `each`, is called once
    and keeps nothing.

    In a process of this machine's pool, batch `number` counts its steps and agents while it trains.
    """
    keep_freed_memory()
    # Several cores would add up in another order
    with one_core(), opened(keeping, configs) as file:
        if each not in (None, run):
            (config,) = configs
            return [each(config)]
        return _train(each is run, configs, number, threshold, file)


def _train(
    alone: bool,
    configs: list[Config],
    number: int,
    threshold: float,
    file: BatchFile | None = None,
) -> list[History]:
    """Trains a batch in its file, or in none: one config `alone`, or a population."""
    if file is not None:
        made = file.built(alone)
    else:
        made = build(configs[0]) if alone else build_population(configs)
    reached = np.zeros(len(configs), bool)
    for returns in made.history.columns.get("eval_return", ()):
        reached |= returns >= threshold

    def count() -> None:
        if _counts is not None and len(made.recorded):
            reached[:] |= made.recorded.columns["eval_return"][-1] >= threshold
            steps = made.recorded.last["steps"] * len(configs)
            _counts[2 * number : 2 * number + 2] = steps, reached.sum()

    count()
    try:
        with contextlib.closing(iterate(made)) as iterations:
            for _ in iterations:
                count()
                if file is not None:
                    file.keep(made)
    except (ValueError, FloatingPointError, EnvironmentFailed) as error:
        if not alone:
            raise
        record_failure(made.history, error)
    return [made.history] if alone else made.histories(configs)


def record_failure(history: History, error: Exception) -> None:
    """Ends the history of a run that failed with minus infinity, and with the reason."""
    history.failure = str(error)
    start = {"iteration": 0.0, "steps": 0.0, "seconds": 0.0}
    history.add({**start, **history.last, "eval_return": -math.inf})


# Of run_batches, in a process of this machine's pool: the steps of each batch and its agents at the
# threshold.
_counts: MutableSequence[float] | None = None


class LocalProcesses(ProcessPoolExecutor):
    """A pool of processes on this machine that write into `counts`, which is shared memory, while
    they train. They end with this process, and are killed if the block of `with` fails."""

    def __init__(self, processes: int, counts: MutableSequence[float]):
        # Forked from a server that has only imported torch, which ends with this process: a fork of
        # a process that has used torch's threads can hang.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self.others = set(multiprocessing.active_children())
        super().__init__(processes, context, _begin_process, (counts,))

    def submit(self, function, /, *arguments, **options) -> Future:
        """As ProcessPoolExecutor, which starts its processes here."""
        with children_ignore_interrupts(), children_ignore_termination():
            return super().submit(function, *arguments, **options)

    def __exit__(self, kind, error, traceback) -> None:
        if kind:
            for child in set(multiprocessing.active_children()) - self.others:
                child.kill()  # or closing would wait for runs that nobody wants any more
        self.shutdown(cancel_futures=True)


@contextlib.contextmanager
def children_ignore_termination() -> Iterator[None]:
    """A context in which processes that are started ignore SIGTERM.

    Schedulers and `timeout` send it to a whole group of processes, which the parent then ends. If
    the server that forks them died of it first, the study would seem to end because of that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signal handlers can be set only there
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin_process(counts: MutableSequence[float]) -> None:
    global _counts
    _counts = counts  # shared memory goes only to a process that begins
    # Its own has a semaphore of the system, which a worker that is killed would leave there
    tqdm.set_lock(threading.RLock())
    # Ctrl-C goes to all processes of a terminal, and SIGTERM often to all of a job. The parent
    # ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
