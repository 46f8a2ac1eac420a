"""Studies: many configs over the machine's cores, and the table that compares them.

Every run is a process of one thread: these networks are too small to share, and two runs side by side beat one on two threads.
Results are written after each run, so that a study that is stopped keeps what it has.
"""

import csv
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from .. import fp8
from ..config import Config
from ..history import History
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
    """
    if not configs:
        return
    # Spawned, not forked: a fork of a process that has used torch's threads can hang.
    context = multiprocessing.get_context("spawn")
    workers = min(workers or os.cpu_count() or 1, len(configs))
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(run, config): config for config in configs}
        try:
            for future in tqdm(as_completed(futures), total=len(futures), unit="run", disable=not progress):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


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


def write_results(path: Path, results: list[dict]) -> None:
    """Writes results.csv, ordered by arm and seed."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(sorted(results, key=lambda row: (row["arm"], row["seed"])))


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
