import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from fp8rl.history import History
from fp8rl.study import figures

STEPS = np.arange(1, 31) * 512


@pytest.fixture
def ax():
    return Figure().add_subplot()


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("seeds", [1, 5])
def test_learning_curves_show_the_iqm_and_the_references(ax, seeds):
    returns = np.random.default_rng(0).uniform(0, 200, (seeds, 30))
    of_a = returns if seeds > 1 else returns[0]
    figures.learning_curves(ax, {"a": (STEPS, of_a), "b": (STEPS, returns)})
    middle = np.sort(returns, 0)[seeds // 4 : seeds - seeds // 4]
    np.testing.assert_allclose(ax.lines[0].get_ydata(), middle.mean(0))
    assert legend(ax) == ["a", "b"] and ax.get_xlabel() == "environment steps"
    assert [text.get_text() for text in ax.texts] == list(figures.REFERENCES)


def test_names_of_lines_are_in_the_order_of_their_ends(ax):
    for name, end in {"low": 20, "high": 90}.items():
        ax.plot([0, 1], [0, end], label=name)
    figures.name_lines(ax)
    assert legend(ax) == ["high", "low"]


def history_of(rows: int) -> History:
    history = History()
    for i in range(rows):
        row = {"iteration": i, "steps": 512 * (i + 1)}
        row["train_return"] = math.nan if i < 2 else 10 * i
        row["eval_return"] = 198.0 if i % 3 == 0 else math.nan
        history.add(row | dict.fromkeys(figures.BELOW, 0.1 * i))
    return history


def test_a_training_shows_sampled_returns_and_what_the_loss_did():
    figure = figures.training(Figure(), history_of(6), "a run")
    top, *below = figure.axes
    sampled, greedy = top.lines[:2]
    assert sampled.get_xydata().tolist() == [[512 * (i + 1), 10 * i] for i in range(2, 6)]
    assert greedy.get_xydata().tolist() == [[512, 198], [4 * 512, 198]]
    assert legend(top) == ["sampled, in training", "greedy evaluation"]
    assert [text.get_text() for text in top.texts] == list(figures.REFERENCES)
    assert [ax.get_title() for ax in below] == [*figures.BELOW.values()]
    assert all(np.allclose(ax.lines[0].get_ydata(), 0.1 * np.arange(6)) for ax in below)


# What a study saw


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("has_ended", [True, False])
def test_a_study_shows_training_beside_evaluation_and_every_seed(has_ended):
    """The control has a row and no curve. There is no curve of training if no episode ended."""
    evaluation = {"a": (STEPS, np.linspace([20.0] * 3, [197, 198, 199], 30).T)}
    training = evaluation if has_ended else {"a": (STEPS[:0], np.zeros((3, 0)))}
    final = {"a": np.array([191.0, 199.5]), "control: bad": np.array([5.0, 6.0])}
    figure = Figure(figsize=(15, 4.5))
    figures.study(figure, training, evaluation, final, 195.0)
    left, middle, right = figure.axes
    assert right.get_title() == "1 of 4 seeds end at 195 or above"
    assert [text.get_text() for text in right.get_yticklabels()] == [*final]
    np.testing.assert_allclose(middle.lines[0].get_ydata()[[0, -1]], [20, 198])
    assert legend(middle) == ["a"] and (left.get_legend() is not None) == has_ended
