"""Studies: which configs are compared, the journal of those that have finished, and the table.

`parallel.py` trains the configs. Each that finishes is written down at once (`Journal`), so that a
study that was stopped goes on with the rest."""

import contextlib
import csv
import dataclasses
import io
import json
import math
from pathlib import Path

import gymnasium
import numpy as np

from ..config import Config
from ..history import History
from ..tasks.by_id import TASKS, task_of
from ..tasks.gymnasium_env import GymEnv
from .statistics import bootstrap_interval, iqm

THRESHOLD = float(gymnasium.spec("fp8rl/CustomEnv-v0").reward_threshold)  # the cart's
# An arm passes if its seeds do, and if the interval of its difference to the first arm is within
# this of 0.
MARGIN = 2.0
FEWEST = 5  # seeds, for an interval and a verdict


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Precisions compared on the same seeds."""

    # What to compare; differences are taken to the first.
    precisions: tuple[str, ...] = (
        "fp32",
        "bf16",
        "fp16",
        "fp8",
    )
    seeds: int = 30  # Agents of each.
    first_seed: int = 0  # Seeds run upwards from here.
    # Train each precision once more, with the acting policy in this one.
    collect_precision: str | None = None
    # Add two arms that test the comparison itself: the first precision on other seeds, which must
    # pass, and float32 whose second moments are kept in e4m3 without a scale, each moment rounded
    # by itself, which must fail.
    controls: bool = False
    # The task, as in `train`. The package has some of Gymnasium's as tensors; in any other the
    # agents train one by one.
    env_id: str | None = None
    # The return that every seed should end at; None is the reward threshold that Gymnasium's
    # registration of the task names.
    threshold: float | None = None

    def __post_init__(self):
        for name, value in {"seeds": self.seeds, "precisions": len(self.precisions)}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: use at least 1")
        if not math.isfinite(self.threshold or 0):
            raise ValueError(f"threshold is {self.threshold}: use a finite number")

    def arms(self, suffix: str = "", **fields) -> dict[str, list[Config]]:
        """The arms, name -> a config for each seed, with this suffix of their names and these
        fields of their configs."""

        def runs(first: int = self.first_seed, **changes) -> list[Config]:
            return [
                Config(seed=seed, env_id=self.env_id, **fields, **changes)
                for seed in range(first, first + self.seeds)
            ]

        arms = {name: runs(precision=name) for name in self.precisions}
        acting = self.collect_precision
        for name in self.precisions:
            if acting and name != acting:
                arms[f"{name} acting in {acting}"] = runs(precision=name, collect_precision=acting)
        if self.controls:
            first = self.precisions[0]
            arms[f"control: {first}, other seeds"] = runs(
                self.first_seed + self.seeds, precision=first
            )
            # Most of v becomes 0 there, so nothing should be learned
            arms["control: v in e4m3, unscaled, independent"] = runs(
                formats="v=e4m3:unscaled:independent:stored"
            )
        return {name + suffix: configs for name, configs in arms.items()}


def threshold_of(env_id: str | None) -> float:
    """The return at which a task counts as solved, by its registration in Gymnasium; None is the
    cart. Raises ValueError if it names none, or if the task cannot be trained on."""
    if env_id is None:
        return THRESHOLD
    task = task_of(env_id)
    if task and env_id not in TASKS:  # a task of one's own
        found = getattr(task, "reward_threshold", None)
    else:
        with contextlib.closing(GymEnv(env_id, 1)) as env:  # says why, if it cannot be made
            found = env.envs.spec.reward_threshold
    if found is None:
        raise ValueError(
            f"threshold is None, and {env_id} has none itself: name it, as in --threshold 100"
        )
    return float(found)


class Journal:
    """The finished runs of a study in a file, a JSON object a line: arm, config and the history's
    rows that hold an evaluation. `histories` has them by config, with those rows alone. The arm is
    for the reader: a study that is called with more values names its arms anew."""

    def __init__(self, path: Path):
        self.path = path
        self.histories: dict[Config, History] = {}
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
            for number, line in enumerate(file, 1):
                # It was being written when the study was killed, and is no run
                if not line.endswith(b"\n"):
                    file.truncate(file.tell() - len(line))
                    break
                try:
                    self._keep(**json.loads(line))
                except (ValueError, TypeError, AttributeError, OverflowError) as error:
                    raise ValueError(
                        f"{path}, line {number} is no run of a study: delete that line"
                    ) from error

    def add(self, arm: str, config: Config, history: History) -> None:
        """Writes a finished run down."""
        rows = [row for row in history.rows if not math.isnan(row["eval_return"])]
        line = {
            "arm": arm,
            "config": dataclasses.asdict(config),
            "rows": rows,
            "failure": history.failure,
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self._keep(**line)

    def _keep(
        self, arm: str, config: dict, rows: list[dict[str, float]], failure: str | None = None
    ) -> None:
        history = History()
        for row in rows:
            history.add(row)
        history.failure = failure
        self.histories[Config.of(config)] = history


def summarize(
    config: Config, history: History, arm: str | None = None, threshold: float = THRESHOLD
) -> dict[str, float | str]:
    """One run as a row of results.csv. `arm` names the group it is compared in, the precision if
    not given. `final_return`: mean of the last evaluation, minus infinity if the run failed.
    `area`: mean of all evaluations, the normalized area under the learning curve.
    `train_return`: mean return of the episodes of training, whose actions are sampled, over the
    rows that the history holds; NaN if no episode ended.
    `first_step_at_threshold`, `seconds_to_threshold`: environment steps and training seconds at the
    first evaluation that reached the threshold, NaN if none did."""
    first = history.first_step_at(threshold)
    reached = history.column("steps") == first
    returns = history.column("train_return")
    returns = returns[~np.isnan(returns)]  # of the iterations in which an episode ended
    return {
        "arm": arm or config.precision,
        "precision": config.precision,
        "collect_precision": config.acting_precision,
        "seed": config.seed,
        "final_return": -math.inf if history.failure else history.final_return,
        "area": float(history.evaluations()[1].mean()),
        "train_return": float(returns.mean()) if len(returns) else math.nan,
        "first_step_at_threshold": first,
        "seconds_to_threshold": float(history.column("seconds")[reached][0])
        if reached.any()
        else math.nan,
        "train_seconds": history.last["seconds"],
        "failure": history.failure or "",
    }


def stack(
    histories: list[History], column: str, carry: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """One column of runs of equal length: steps [n] and values [runs, n], without the rows that
    hold no value and the runs that ended early.

    With `carry`, a row without a value has that of the row before. So it is with returns of
    training episodes, none of which may end in an iteration.
    """
    whole = [history for history in histories if len(history) == max(map(len, histories))]
    values = np.array([history.column(column) for history in whole])
    if carry:
        for t in range(1, values.shape[1]):
            values[:, t] = np.where(np.isnan(values[:, t]), values[:, t - 1], values[:, t])
    filled = ~np.isnan(values).any(axis=0)
    steps = whole[0].column("steps")[: len(filled)]  # none in journals without the column
    return steps[filled], values[:, filled]


def results_csv(results: list[dict]) -> str:
    """The text of results.csv, ordered by arm and seed."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(results[0]))
    writer.writeheader()
    writer.writerows(sorted(results, key=lambda row: (row["arm"], row["seed"])))
    return file.getvalue()


def scores(results: list[dict], column: str) -> dict[str, np.ndarray]:
    """A column of the results by arm, each ordered by seed: name -> float64 [seeds]."""
    ordered = sorted(results, key=lambda row: row["seed"])
    names = dict.fromkeys(row["arm"] for row in results)
    return {
        name: np.array([row[column] for row in ordered if row["arm"] == name]) for name in names
    }


def table(results: list[dict], arms: list[str], threshold: float = THRESHOLD) -> str:
    """Markdown table of a study: interquartile means with 95% bootstrap intervals, and the paired
    difference to the first arm (seed by seed). An arm passes when every seed ends at the threshold
    or above it and the difference's interval lies within +-MARGIN; with fewer than FEWEST seeds
    there is no interval and no verdict. A seed that failed counts as minus infinity.

    Final returns are of greedy episodes. On the cart these are nearly the best possible as soon as
    the sign of the push is right. The last two columns are of the episodes of training, whose
    actions are sampled, and tell more."""
    final = scores(results, "final_return")
    first = scores(results, "first_step_at_threshold")
    seeds = scores(results, "seed")
    trained = scores(results, "train_return")
    baseline = arms[0]
    heads = [
        "arm",
        "final return, IQM [95%]",
        "lowest seed",
        f"seeds at {threshold:g}",
        f"minus {baseline}, IQM [95%]",
        "verdict",
        f"first at {threshold:g}, median steps",
        "return while training, IQM [95%]",
        f"minus {baseline}, IQM [95%]",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name in arms:
        values = final[name]
        with np.errstate(invalid="ignore"):  # of two seeds that failed
            difference = values - final[baseline]
        difference = np.nan_to_num(difference, nan=0.0, neginf=-np.inf, posinf=np.inf)
        failed = sum(bool(row.get("failure")) for row in results if row["arm"] == name)
        reached = f"{(values >= threshold).sum()} of {len(values)}"
        if failed:
            reached += f", {failed} failed"
        if len(values) < FEWEST:
            verdict = f"fewer than {FEWEST} seeds"
        else:
            is_close = np.abs(bootstrap_interval(difference)).max() <= MARGIN
            verdict = "pass" if values.min() >= threshold and is_close else "fail"
        gained = trained[name] - trained[baseline]
        cells = (
            name,
            with_interval(values),
            f"{values.min():.2f} (seed {seeds[name][values.argmin()]})",
            reached,
            "" if name == baseline else with_interval(difference, signed=True),
            verdict,
            median_of(first[name], ",.0f"),
            with_interval(trained[name]),
            "" if name == baseline else with_interval(gained, signed=True),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def median_of(values: np.ndarray, form: str) -> str:
    """A median as text, in a format such as ",.0f"."""
    # A seed that never got there counts as the latest
    median = np.median(np.where(np.isnan(values), np.inf, values))
    return f"{median:{form}}" if np.isfinite(median) else "not reached"


def with_interval(values: np.ndarray, signed: bool = False) -> str:
    """The interquartile mean of values that are not NaN as text, with its 95% bootstrap interval if
    there are FEWEST of them or more; "-" if there is none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return "-"
    form = "+.2f" if signed else ".2f"
    text = f"{iqm(values):{form}}"
    if len(values) < FEWEST:
        return text
    low, high = bootstrap_interval(values)
    return f"{text} [{low:{form}}, {high:{form}}]"
