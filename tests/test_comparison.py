import csv
import dataclasses
import io
import json
import math

import numpy as np
import pytest
from helpers import refused, small

from fp8rl.build import build_population
from fp8rl.history import History
from fp8rl.study import comparison, parallel
from fp8rl.train import train


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


def test_the_control_that_must_fail_fails_where_float32_learns():
    study = comparison.Comparison(("fp32",), seeds=2, controls=True)
    arms = study.arms(steps=10_240, eval_every=10_240, eval_episodes=10)
    plain, _, bad = arms.values()
    histories = train(build_population(plain + bad), progress=False).histories(plain + bad)
    returns = [history.final_return for history in histories]
    assert min(returns[:2]) > 190 and max(returns[2:]) < 60


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


def test_stack_leaves_out_rows_without_a_value_and_runs_that_ended_early():
    nan = np.nan
    runs = [history_of(returns) for returns in ([nan, 1, 2], [9], [nan, 3, 4])]
    steps, values = comparison.stack(runs, "eval_return")
    assert steps.tolist() == [1024, 1536] and values.tolist() == [[1, 2], [3, 4]]


def test_scores_are_by_arm_and_in_order_of_seed():
    results = [result("b", 1, 30), result("a", 2, 7), result("b", 0, 20), result("a", 1, 9)]
    scores = comparison.scores(results, "final_return")
    assert {arm: values.tolist() for arm, values in scores.items()} == {"b": [20, 30], "a": [9, 7]}


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


def test_table_pairs_returns_while_training_too():
    results = [result("a", seed, 198, train_return=100 + seed) for seed in range(5)]
    results += [result("b", seed, 198, train_return=98 + seed) for seed in range(5)]
    results += [result("c", seed, 198) for seed in range(5)]
    cells = [row[7:] for row in rows_of(comparison.table(results, ["a", "b", "c"]))[2:]]
    assert cells[0][0].startswith("102.00 [") and cells[0][1] == ""
    assert cells[1][0].startswith("100.00 [") and cells[1][1] == "-2.00 [-2.00, -2.00]"
    assert cells[2] == ["-", "-"]


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


def test_results_are_ordered_and_complete():
    configs = [small(seed=seed, precision=name) for seed in (1, 0) for name in ("fp32", "bf16")]
    rows = [comparison.summarize(config, history_of([100])) for config in configs]
    read = list(csv.DictReader(io.StringIO(comparison.results_csv(rows))))
    in_order = [(row["precision"], row["seed"]) for row in read]
    assert in_order == [("bf16", "0"), ("bf16", "1"), ("fp32", "0"), ("fp32", "1")]
    assert list(read[0]) == list(rows[0])


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


def test_a_journal_of_an_older_study_has_its_curve_of_training_and_its_clip(tmp_path):
    config = small(steps=1024, eval_episodes=2, collect_precision="bf16")
    history = parallel.run(config)
    journal = comparison.Journal(tmp_path / "runs.jsonl")
    journal.add("bf16", config, history)
    line = json.loads(journal.path.read_text())
    del line["config"]["clip_by"]
    journal.path.write_text(json.dumps(line) + "\n")
    ((again, kept),) = comparison.Journal(journal.path).histories.items()
    assert again == dataclasses.replace(config, clip_by="actor")
    steps, values = comparison.stack([kept], "train_return", carry=True)
    assert steps.size and values[0, -1] == history.column("train_return")[-1]


@pytest.mark.parametrize("change", [None, {"rows": []}, {"arm": []}])
def test_a_line_of_a_journal_that_is_no_run_is_named_and_the_rest_stays(change, tmp_path):
    journal = comparison.Journal(tmp_path / "runs.jsonl")
    for seed in range(3):
        journal.add("a", small(seed=seed), history_of([100]))
    lines = journal.path.read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    row = change and row | change
    lines[1] = json.dumps(row) + "\n"
    damaged = "".join(lines) + "half a li"
    journal.path.write_text(damaged)
    message = r".*runs\.jsonl, line 2 is no run of a study: delete that line"
    refused(message, comparison.Journal, journal.path)
    assert journal.path.read_text() == damaged
    journal.path.write_text("".join(lines[::2]))
    assert len(comparison.Journal(journal.path).histories) == 2


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
    def trained(*returns) -> History:
        history = history_of(returns)
        history.columns["train_return"] = [*map(float, returns)]
        return history

    nan = math.nan
    runs = [trained(nan, 1, nan, 3), trained(5, nan, 6, nan), trained(9)]  # the last ended early
    steps, values = comparison.stack(runs, "train_return", carry=True)
    assert steps.tolist() == [1024, 1536, 2048]
    assert values.tolist() == [[1, 1, 3], [5, 6, 6]]
    steps, values = comparison.stack(
        [history_of([1, 2])], "train_return", carry=True
    )  # has no such column
    assert steps.shape == (0,) and values.shape == (1, 0)
