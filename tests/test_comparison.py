import math

import numpy as np
import pytest
from helpers import refused, small

from fp8rl.history import History
from fp8rl.study import comparison


def history_of(returns, failure=None) -> History:
    history = History()
    history.failure = failure
    for i, value in enumerate(returns):
        history.add(
            {"iteration": i, "steps": 512 * (i + 1), "eval_return": value, "seconds": 0.5 * (i + 1)}
        )
    return history


def result(arm, seed, final, failure="", train_return=np.nan):
    return {
        "arm": arm,
        "seed": seed,
        "final_return": final,
        "train_return": train_return,
        "first_step_at_threshold": 512,
        "seconds_to_threshold": 0.1,
        "failure": failure,
    }


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_summary_by_hand():
    config = small(seed=4, collect_precision="fp8")
    history = history_of([np.nan, 100, np.nan, 196, 190])
    history.columns["train_return"] = [np.nan, 10.0, np.nan, 20.0, np.nan]
    row = comparison.summarize(config, history)
    assert row == {
        "arm": "fp32",
        "precision": "fp32",
        "collect_precision": "fp8",
        "seed": 4,
        "final_return": 190,
        "area": pytest.approx((100 + 196 + 190) / 3),
        "train_return": 15.0,
        "first_step_at_threshold": 2048,
        "seconds_to_threshold": 2.0,
        "train_seconds": 2.5,
        "failure": "",
    }
    row = comparison.summarize(config, history_of([100], "diverged"), arm="another")
    assert row["arm"] == "another"
    for name in ("train_return", "first_step_at_threshold", "seconds_to_threshold"):
        assert np.isnan(row[name])
    # Whatever the agent as it is would earn
    assert row["failure"] == "diverged" and row["final_return"] == -np.inf


def test_table_pairs_by_seed_and_judges():
    results = [result("a", seed, 196 + seed) for seed in range(5)]
    # In any order: always one less
    results += [result("b", seed, 195 + seed) for seed in (2, 0, 4, 1, 3)]
    # Its lowest seed is below 195
    results += [result("c", seed, 194.9 + seed) for seed in range(5)]
    # 2 above in the middle, up to 4 in a resample
    results += [result("d", seed, 200) for seed in range(5)]
    a, b, c, d = rows_of(comparison.table(results, ["a", "b", "c", "d"]))[2:]
    assert [row[5] for row in (a, b, c, d)] == ["pass", "pass", "fail", "fail"]
    assert a[1].startswith("198.00 [19") and a[2:5] == ["196.00 (seed 0)", "5 of 5", ""]
    assert b[4] == "-1.00 [-1.00, -1.00]" and d[4].startswith("+2.00 [+")
    assert c[2:4] == ["194.90 (seed 0)", "4 of 5"]
    header, _, *rows = rows_of(comparison.table(results, ["a", "b", "d"], 197.5))
    assert header[3] == "seeds at 197.5"
    verdicts = [(row[3], row[5]) for row in rows]
    assert verdicts == [("3 of 5", "fail"), ("2 of 5", "fail"), ("5 of 5", "fail")]


def test_table_judges_no_few_seeds_and_counts_those_that_failed():
    results = [result(arm, seed, 196 + seed) for arm in "ab" for seed in range(4)]
    few = rows_of(comparison.table(results, ["a", "b"]))[2:]
    assert [(row[1], row[4], row[5]) for row in few] == [
        ("197.50", "", "fewer than 5 seeds"),
        ("197.50", "+0.00", "fewer than 5 seeds"),
    ]
    results += [result("a", 4, 196), result("b", 4, -np.inf, "diverged")]
    a, b = rows_of(comparison.table(results, ["a", "b"]))[2:]
    assert b[2:4] == ["-inf (seed 4)", "4 of 5, 1 failed"] and (a[5], b[5]) == ("pass", "fail")


@pytest.mark.parametrize(
    "values, text", [([1, 3, 2], "2"), ([1, np.nan, 2], "2"), ([1, np.nan, np.nan], "not reached")]
)
def test_a_seed_that_never_got_there_counts_as_the_latest(values, text):
    assert comparison.median_of(np.array(values), "g") == text


def test_a_journal_gives_back_what_finished_and_forgets_half_a_line(tmp_path):
    journal = comparison.Journal(tmp_path / "runs.jsonl")
    histories = {
        small(seed=seed): history_of([np.nan, 100 + seed], "diverged" if seed else None)
        for seed in range(2)
    }
    for config, history in histories.items():
        journal.add("a", config, history)
    with journal.path.open("a") as file:
        file.write('{"arm": "a", "conf')
    again = comparison.Journal(journal.path)
    assert again.histories.keys() == histories.keys()
    for config, history in histories.items():
        found = again.histories[config]
        assert (found.rows, found.failure) == (history.rows[1:], history.failure)
    assert len(journal.path.read_text().splitlines()) == 2


def test_a_task_counts_as_solved_where_gymnasium_says_or_needs_a_threshold():
    found = {
        None: 195,
        "CartPole-v1": 475,
        "Acrobot-v1": -100,
        "fp8rl.tasks:fp8rl/CustomEnv-v0": 195,
    }
    assert {env_id: comparison.threshold_of(env_id) for env_id in found} == found
    refused("threshold is None, and Pendulum-v1", comparison.threshold_of, "Pendulum-v1")
    refused("env_id is 'No-v0'", comparison.threshold_of, "No-v0")


def test_curves_of_training_take_the_last_value_where_no_episode_ended():
    nan = math.nan
    runs = [history_of(returns) for returns in ([nan, 1, nan, 3], [5, nan, 6, nan], [9])]
    steps, values = comparison.stack(runs, "eval_return", carry=True)  # the last ended early
    assert steps.tolist() == [1024, 1536, 2048]
    assert values.tolist() == [[1, 1, 3], [5, 6, 6]]
    steps, values = comparison.stack(runs, "no_such_column", carry=True)
    assert steps.shape == (0,) and values.size == 0
