import numpy as np
import pytest
import torch

from fp8rl.evaluate import bootstrap_interval, evaluate, gumbel, iqm, play
from fp8rl.model import ActorCritic


@pytest.mark.parametrize(
    "scores, expected", [([5, 1, 2, 3], 2.5), ([9, 1, 2, 3, 4], 3), ([0, 0, 1, 2, 3, 4, 50, 90], 2.5), ([7], 7), ([1, 2, 6], 3)]
)
def test_iqm_by_hand(scores, expected):
    assert iqm(np.array(scores)) == expected


def test_iqm_along_an_axis():
    table = np.array([[5, 1, 2, 3], [50, 10, 20, 30]])
    assert iqm(table, axis=1).tolist() == [2.5, 25] and iqm(table.T, axis=0).tolist() == [2.5, 25]


def test_bootstrap_interval_brackets_the_iqm_and_narrows():
    scores = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(scores)
    few_low, few_high = bootstrap_interval(scores[:20])
    assert low < iqm(scores) < high and high - low < 0.5 * (few_high - few_low)
    assert bootstrap_interval(scores) == (low, high)
    assert bootstrap_interval(np.full(30, 3.0)) == (3, 3)


def test_bootstrap_interval_covers_the_truth_about_19_times_of_20():
    rng = np.random.default_rng(0)
    intervals = [bootstrap_interval(rng.normal(size=30), resamples=500) for _ in range(200)]
    covered = sum(low <= 0 <= high for low, high in intervals)
    assert 0.88 * 200 <= covered <= 200 * 0.995


def test_an_episode_counts_nothing_after_its_end():
    returns = play(lambda obs: torch.ones(len(obs), dtype=torch.long), 50, start_noise=0.05)
    assert returns.shape == (50,) and (returns > 4).all() and (returns < 8).all()


def test_same_seed_same_starts():
    def still(obs):
        return (obs[:, 0] < 0).long()

    assert np.array_equal(play(still, 20, seed=3), play(still, 20, seed=3))
    assert not np.array_equal(play(still, 20, seed=3), play(still, 20, seed=4))


def test_greedy_takes_the_likeliest_action_and_sampling_does_not_always():
    model = ActorCritic()
    with torch.no_grad():
        model.actor.bias.copy_(torch.tensor([0.0, 1.0]))  # prefers right everywhere
    greedy = evaluate(model, 50)
    right = play(lambda obs: torch.ones(len(obs), dtype=torch.long), 50)
    assert np.array_equal(greedy, right)
    sampled = evaluate(model, 50, greedy=False)
    assert not np.array_equal(sampled, greedy) and np.array_equal(sampled, evaluate(model, 50, greedy=False))


def test_gumbel_noise_draws_from_the_softmax():
    logits, draws = torch.tensor([0.0, 1.0, -2.0]), 100_000
    noise = gumbel((draws, 3), "cpu", torch.Generator().manual_seed(0))
    share = (logits + noise).argmax(-1).bincount(minlength=3) / draws
    probability = logits.softmax(-1)
    assert ((share - probability).abs() < 4 * (probability * (1 - probability) / draws).sqrt()).all()
