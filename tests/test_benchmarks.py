"""The benchmarks that score agents, on runs of one iteration."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))


def test_a_cell_of_the_map_is_the_cost_relative_to_the_optimum(monkeypatch):
    import breakage_map
    import tasks

    monkeypatch.setattr(breakage_map, "STEPS", 512)
    plain, coarse = breakage_map.run(tasks.LQR, 2e-3, {("weights", "e8m0"): {"formats": "weights=e8m0"}}, seeds=2)
    assert float(plain["median"]) > 1 and float(plain["score"]) == 1
    assert float(coarse["low"]) <= float(coarse["score"]) <= float(coarse["high"])


def test_mismatch_scores_as_the_tasks_do(monkeypatch):
    import mismatch
    import tasks

    monkeypatch.setattr(mismatch, "SEEDS", 2)
    monkeypatch.setitem(mismatch.TASKS, tasks.LQR, {"steps": 512})
    scores, divergence, new, replayed = mismatch.trained(tasks.LQR, "acting=e8m0", "right")
    assert (scores < 0).all() and divergence > 0 and 0 < new < 1 and 0 < replayed <= 1
    assert tasks.score(tasks.LQR, 1.05 * tasks.best_of(tasks.LQR)) == pytest.approx(-5)
