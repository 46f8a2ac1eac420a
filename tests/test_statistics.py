import numpy as np

from fp8rl.study.statistics import bootstrap_interval, fails, iqm, share_lost


def test_iqm_by_hand():
    for scores, expected in (
        ([5, 1, 2, 3], 2.5),
        ([9, 1, 2, 3, 4], 3),
        ([0, 0, 1, 2, 3, 4, 50, 90], 2.5),
        ([7], 7),
    ):
        assert iqm(np.array(scores)) == expected
    table = np.array([[5, 1, 2, 3], [50, 10, 20, 30]])
    assert iqm(table, axis=1).tolist() == [2.5, 25] and iqm(table.T, axis=0).tolist() == [2.5, 25]


def test_bootstrap_interval_brackets_the_iqm_and_narrows():
    scores = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(scores)
    few_low, few_high = bootstrap_interval(scores[:20])
    assert low < iqm(scores) < high and high - low < 0.5 * (few_high - few_low)
    assert bootstrap_interval(scores) == (low, high)
    assert bootstrap_interval(np.full(30, 3.0)) == (3, 3)


def test_a_failure_is_a_loss_of_more_than_a_tenth_of_the_gain():
    assert share_lost(90, 110, 10) == 0.2 and share_lost(120, 110, 10) == -0.1
    assert not fails(120, 110, 10) and not fails(101, 110, 10)
    assert all(fails(score, 110, 10) for score in (99, -np.inf, np.nan))
    assert fails(-3.5, -1, -21) and not fails(-2.5, -1, -21)  # costs are negative scores
    reference, start = np.array([100.0, 200.0, 300.0]), np.zeros(3)
    # Medians: one bad seed of three is no failure
    assert share_lost(np.array([90.0, 190.0, 0.0]), reference, start) == 0.05
