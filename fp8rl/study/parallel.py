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

A study keeps the state of each batch in a file, which is written once a minute (batch_file.py). A
batch that was stopped goes on from its file and gives the same numbers.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterator, MutableSequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from dataclasses import replace
from pathlib import Path

from tqdm.auto import tqdm

from ..config import Config
from ..history import History
from ..machine.hardware import cores, keep_freed_memory, one_core
from ..machine.plan import plan_run
from ..population.batches import batches, obstacle, require_one_population
from ..tasks.gymnasium_env import EnvironmentFailed
from ..train import iterate
from .batch_file import BatchFile

AGENTS = 64  # in a population, at most: with more, results come later and take more memory
PAUSE = 0.1  # seconds between two looks at the batches

# A batch of agents, and the function that trains each of them alone; None trains a population.
Batch = tuple[Callable[[Config], History] | None, list[Config]]


def run(config: Config) -> History:
    """Trains one config alone, without a progress bar. A run that fails ends with minus infinity,
    and its history tells why."""
    (history,) = _train(True, BatchFile(None, [config]))
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
    folder: Path | None = None,
) -> Iterator[tuple[Config, History]]:
    """Trains batches in parallel, yielding each config with its history as they finish (in any
    order).

    `executor`: whose workers train; it is the caller's to shut down. None is a pool of processes on
    this machine, at most `workers`, of which none outlives this process or the last result.
    `progress`: shows a bar. With this machine's processes it counts every step, and with another
    executor those of finished batches.
    `done`: configs that need not be trained any more. The others train in the populations that they
    would have been in without it, so that a study that goes on gives the same numbers bit for bit.
    `folder`: where the states of batches are kept that have begun. They go on from there. Workers
    on other machines use it, too, if they have this folder.

    Raises what a run raises, and ChildProcessError if a process died or the executor gave up a
    batch. Then, and if the caller stops early, batches that have not begun are cancelled."""
    tasks = [(each, batch) for each, batch in tasks if any(config not in done for config in batch)]
    if not tasks:
        return
    steps = [0.0] * len(tasks)  # of each batch
    total = sum(steps_of(batch) for _, batch in tasks)
    waiting: dict[Future, int] = {}  # the number of the batch
    with contextlib.ExitStack() as on_exit:
        if executor is None:
            steps = multiprocessing.get_context("forkserver").RawArray("d", steps)
            processes = min(workers or cores(), cores(), len(tasks))
            executor = on_exit.enter_context(LocalProcesses(processes, steps))
        try:
            for number, (each, batch) in enumerate(tasks):
                future = executor.submit(
                    train_batch,
                    each,
                    batch,
                    number,
                    folder,
                    getattr(executor, "require_wanted", None),
                )
                waiting[future] = number
            with tqdm(
                desc=f"{sum(len(batch) for _, batch in tasks)} agents",
                total=total,
                unit="step",
                unit_scale=True,
                disable=not progress,
            ) as bar:
                while waiting:
                    finished = next_results(waiting)
                    for number, _ in finished:
                        steps[number] = steps_of(tasks[number][1])
                    bar.update(sum(steps) - bar.n)
                    for number, histories in finished:
                        _, batch = tasks[number]
                        for config, history in zip(batch, histories, strict=True):
                            if config not in done:
                                yield config, history
                        if folder:  # the caller has its results
                            BatchFile(folder, batch).path.unlink(missing_ok=True)
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


def steps_of(batch: list[Config]) -> int:
    """The environment steps of a batch."""
    return sum(config.iterations * config.steps_per_iteration for config in batch)


def next_results(waiting: dict[Future, int]) -> list[tuple[int, list[History]]]:
    """The batches that have finished, in order: their numbers and histories. None may have, and
    then a moment has passed.

    Futures are asked, because an interrupt within `concurrent.futures.wait` can leave the lock of
    one held, and the thread that ends the pool would wait for it for ever. They are removed from
    `waiting` and then belong to nobody. A Dask cluster would otherwise train a finished batch again
    when the worker that trained it dies."""
    ended = [future for future in waiting if future.done()]
    if not ended:
        time.sleep(PAUSE)
    return [(waiting.pop(future), future.result()) for future in ended]


def require(tasks: list[Batch], at_once: int) -> None:
    """Raises, before any begins, what `run_batches` raises of batches that cannot be trained on
    this machine. At most `at_once` batches share its memory."""
    populations = [batch for each, batch in tasks if each is None]
    for batch in populations:
        require_one_population(batch, "cpu", min(at_once, len(populations)))
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
    folder: Path | None = None,
    require_wanted: Callable[[], None] | None = None,
) -> list[History]:
    """Trains a batch in the thread that calls it, and returns the histories in the order of its
    configs. It needs nothing that was set up before, so any worker can do it.

    The batch goes on from its file in the `folder`, if that is there, and its state is saved there
    again and again. `require_wanted` is called after each iteration, and raises what ends a batch
    that nobody waits for. A function of the caller, `each`, is called once and keeps nothing.

    In a process of this machine's pool, batch `number` counts its steps while it trains.
    """
    keep_freed_memory()
    # Several cores would add up in another order
    with one_core():
        if each not in (None, run):
            (config,) = configs
            return [each(config)]
        has_folder = folder is not None and folder.is_dir()
        file = BatchFile(folder if has_folder else None, configs)
        return _train(each is run, file, number, require_wanted)


def _train(
    alone: bool,
    file: BatchFile,
    number: int = 0,
    require_wanted: Callable[[], None] | None = None,
) -> list[History]:
    """Trains the batch of a file: one config `alone`, or a population."""
    made = file.built(alone)
    configs = file.configs
    try:
        with contextlib.closing(iterate(made)) as iterations:
            for _ in iterations:
                if _steps is not None and len(made.recorded):
                    _steps[number] = made.recorded.last["steps"] * len(configs)
                if require_wanted is not None:
                    require_wanted()
                if file.is_due():
                    file.save(made)
    except (ValueError, FloatingPointError, EnvironmentFailed) as error:
        if not alone:
            raise
        # The history of a run that failed ends with minus infinity, and with the reason.
        made.history.failure = str(error)
        start = {"iteration": 0.0, "steps": 0.0, "seconds": 0.0}
        made.history.add({**start, **made.history.last, "eval_return": -math.inf})
    return [made.history] if alone else made.histories(configs)


# Of run_batches, in a process of this machine's pool: the steps of each batch.
_steps: MutableSequence[float] | None = None


class LocalProcesses(ProcessPoolExecutor):
    """A pool of processes on this machine that write into `steps`, which is shared memory, while
    they train. They end with this process, and are killed if the block of `with` fails."""

    def __init__(self, processes: int, steps: MutableSequence[float]):
        # Forked from a server that has only imported torch, which ends with this process: a fork of
        # a process that has used torch's threads can hang.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self.others = set(multiprocessing.active_children())
        super().__init__(processes, context, _begin_process, (steps,))

    def __exit__(self, kind, error, traceback) -> None:
        if kind:
            for child in set(multiprocessing.active_children()) - self.others:
                child.kill()  # or closing would wait for runs that nobody wants any more
        self.shutdown(cancel_futures=True)


def _begin_process(steps: MutableSequence[float]) -> None:
    global _steps
    _steps = steps  # shared memory goes only to a process that begins
    # Its own has a semaphore of the system, which a worker that is killed would leave there
    tqdm.set_lock(threading.RLock())
    # Ctrl-C goes to all processes of a terminal, and the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_study, daemon=True).start()


def _end_with_study() -> None:
    """Ends this process when the process of the study has ended."""
    multiprocessing.parent_process().join()
    os._exit(1)
