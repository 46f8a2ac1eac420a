"""Studies: many configs over the machine's cores, and the table that compares them.

Each run is a single-threaded process: these networks are too small to share, and two runs side by side beat one on two threads.
What has finished is written down at once (`Journal`), so that a study that was stopped goes on with the rest.
"""

import csv
import dataclasses
import io
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from .. import fp8
from ..config import Config
from ..history import History
from ..scale.gym import children_ignore_interrupts
from ..scale.machine import build
from ..train import train
from .statistics import bootstrap_interval, iqm

THRESHOLD = 195.0
MARGIN = 2.0
FIELDS = ["arm", "precision", "collect_precision", "seed", "final_return", "area"]
FIELDS += ["first_step_at_195", "seconds_to_195", "train_seconds"]


def run(config: Config) -> History:
    """Trains one config without a progress bar."""
    return train(build(config), progress=False).history


def run_unscaled(config: Config) -> History:
    """The control that must fail: `run` with an FP8 that divides tensors by their scales and leaves the scales out of the
    products. (Casting with all scales at 1 is no such control: this task's tensors survive it.)"""

    def without_scales(a, b, emulate=None, matmul=fp8.scaled_matmul):
        return matmul(a._replace(scale=torch.ones_like(a.scale)), b._replace(scale=torch.ones_like(b.scale)), emulate)

    intact, fp8.scaled_matmul = fp8.scaled_matmul, without_scales
    try:
        return run(config)
    finally:
        fp8.scaled_matmul = intact


def run_all(
    configs: list[Config], workers: int | None = None, progress: bool = True, run: Callable[[Config], History] = run
) -> Iterator[tuple[Config, History]]:
    """Trains configs in parallel processes of one thread each, yielding each with its history as they finish (in any order).

    Args:
        configs: what to train.
        workers: processes at a time; None is one a core.
        progress: show a bar.
        run: what each process does with a config.

    Raises:
        ChildProcessError: a process died. What a run raises is raised here. No process outlives this one or the last result.
    """
    if not configs:
        return
    # Spawned, not forked: a fork of a process that has used torch's threads can hang.
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    workers = min(workers or os.cpu_count() or 1, len(configs))
    pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        with children_ignore_interrupts():
            futures = {pool.submit(run, config): config for config in configs}
        for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=not progress):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError("a process of the study died (killed, or out of memory): run the command again") from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()  # or closing would wait for runs that nobody wants any more
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends its children
    parent = multiprocessing.parent_process()

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class Journal:
    """The finished runs of a study in a file, a JSON object a line: arm, config and the history's rows that hold an evaluation.

    Attributes:
        histories: of the finished runs, by arm and config, with those rows alone.
    """

    def __init__(self, path: Path):
        self.path, self.histories = path, {}
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a line that was being written when the study was killed is no run
        for line in whole.splitlines():
            self._keep(**json.loads(line))
        if whole != text:
            path.write_text(whole)

    def add(self, arm: str, config: Config, history: History) -> None:
        """Writes a finished run down."""
        rows = [row for row in history.rows if not math.isnan(row["eval_return"])]
        line = {"arm": arm, "config": dataclasses.asdict(config), "rows": rows}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._keep(**line)

    def _keep(self, arm: str, config: dict, rows: list[dict[str, float]]) -> None:
        self.histories[arm, Config.of(config)] = history = History()
        for row in rows:
            history.add(row)


def summarize(config: Config, history: History, arm: str | None = None) -> dict[str, float | str]:
    """One run as a row of results.csv. `arm` names the group it is compared in, the precision if not given.

    final_return: mean of the last evaluation. area: mean of all evaluations, the normalized area under the learning curve.
    first_step_at_195 and seconds_to_195: environment steps and training seconds at the first evaluation of 195 or more, NaN if
    there was none.
    """
    first = history.first_step_at(THRESHOLD)
    reached = history.column("steps") == first
    return {
        "arm": arm or config.precision,
        "precision": config.precision,
        "collect_precision": config.collect_precision or config.precision,
        "seed": config.seed,
        "final_return": history.final_return,
        "area": float(history.evaluations()[1].mean()),
        "first_step_at_195": first,
        "seconds_to_195": float(history.column("seconds")[reached][0]) if reached.any() else math.nan,
        "train_seconds": history.last["seconds"],
    }


def stack(histories: list[History], column: str) -> tuple[np.ndarray, np.ndarray]:
    """One column of runs of equal length: steps [n] and values [runs, n], without the rows that hold no value."""
    values = np.array([history.column(column) for history in histories])
    filled = ~np.isnan(values).any(axis=0)
    return histories[0].column("steps")[filled], values[:, filled]


def results_csv(results: list[dict]) -> str:
    """The text of results.csv, ordered by arm and seed."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, FIELDS)
    writer.writeheader()
    writer.writerows(sorted(results, key=lambda row: (row["arm"], row["seed"])))
    return file.getvalue()


def scores(results: list[dict], column: str) -> dict[str, np.ndarray]:
    """A column of the results by arm, each ordered by seed: name -> float64 [seeds]."""
    ordered = sorted(results, key=lambda row: row["seed"])
    names = dict.fromkeys(row["arm"] for row in results)
    return {name: np.array([row[column] for row in ordered if row["arm"] == name]) for name in names}


def table(results: list[dict], arms: list[str]) -> str:
    """Markdown table of a study: interquartile means with 95% bootstrap intervals, and the paired difference to the first arm
    (seed by seed). An arm passes when every seed ends at 195 or more and the difference's interval lies within +-2."""
    final, first = scores(results, "final_return"), scores(results, "first_step_at_195")
    baseline = arms[0]
    lines = [
        f"| arm | final return, IQM [95%] | lowest seed | seeds at 195 | minus {baseline}, IQM [95%] | verdict "
        "| first at 195, median steps |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in arms:
        values, difference = final[name], final[name] - final[baseline]
        passes = values.min() >= THRESHOLD and np.abs(bootstrap_interval(difference)).max() <= MARGIN
        lines.append(
            f"| {name} | {with_interval(values)} | {values.min():.2f} | {(values >= THRESHOLD).sum()} of {len(values)} "
            f"| {'' if name == baseline else with_interval(difference, signed=True)} | {'pass' if passes else 'fail'} "
            f"| {median_of(first[name], ',.0f')} |"
        )
    return "\n".join(lines) + "\n"


def median_of(values: np.ndarray, form: str) -> str:
    """A median as text, in a format such as ",.0f"."""
    median = np.median(np.nan_to_num(values, nan=np.inf))  # a seed that never got there counts as the latest
    return f"{median:{form}}" if np.isfinite(median) else "not reached"


def with_interval(values: np.ndarray, signed: bool = False) -> str:
    """An interquartile mean with its 95% bootstrap interval, as text."""
    low, high = bootstrap_interval(values)
    form = "+.2f" if signed else ".2f"
    return f"{iqm(values):{form}} [{low:{form}}, {high:{form}}]"
