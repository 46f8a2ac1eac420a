import itertools
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    band = ax.collections[0].get_paths()[0].get_extents()
    low, high = np.percentile(returns, 10, 0).min(), np.percentile(returns, 90, 0).max()
    assert (band.y0, band.y1) == pytest.approx((low, high))
    assert legend(ax) == ["a", "b"] and ax.get_xlabel() == "environment steps"
    assert [text.get_text() for text in ax.texts] == list(figures.REFERENCES)


def test_intervals_have_a_row_a_name(ax):
    figures.intervals(ax, {"a": np.arange(8.0), "b": np.arange(8.0) + 3}, "return of 200")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.yaxis_inverted()  # the first name on top
    low, high = ax.get_xlim()
    assert low < 0 and high > 10  # every seed is in sight


def test_names_of_lines_stand_where_the_lines_end_but_apart_from_each_other(ax):
    ax.set_ylim(0, 100)
    for name, end in {"high": 90, "low": 20, "lower": 19, "lowest": 18}.items():
        ax.plot([0, 1], [0, end], label=name)
    ax.plot([0, 1], [0, 50])
    figures.name_lines(ax)
    at = {text.get_text(): text.xy[1] for text in ax.texts}
    assert list(at) == ["lowest", "lower", "low", "high"]
    np.testing.assert_allclose([at["high"], at["lower"]], [0.9, 0.19])
    heights = [text.get_window_extent() for text in ax.texts]
    for below, above in itertools.pairwise(heights):
        assert below.y1 <= above.y0


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


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1, 1e3, 1e6])
def test_the_margins_of_a_training_have_room_for_its_labels(scale, marks):
    history = History()
    for i in range(20):
        row = {"steps": 10**7 * (i + 1), "train_return": -1.2345 * scale * i}
        row["eval_return"] = math.nan
        history.add(row | dict.fromkeys(figures.BELOW, -scale * (1.234 + 0.001 * i)))
    figure = figures.training(Figure(figsize=(8, 5.5), dpi=120), history, "a run", marks)
    FigureCanvasAgg(figure).draw()
    labels = [label for ax in figure.axes for label in (ax.title, ax.xaxis, ax.yaxis)]
    boxes = {label: label.get_tightbbox(figure.canvas.get_renderer()) for label in labels}
    for box in boxes.values():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    for one, other in itertools.combinations(labels, 2):
        share_a_corner = one.axes is other.axes and one is not one.axes.title
        assert share_a_corner or not boxes[one].overlaps(boxes[other])


# What a study saw


def grown(*ends: float) -> dict:
    """Curves of arms a, b and so on, three seeds each, that grow from 20 to these ends."""
    curves = {}
    for name, end in zip("abcd", ends, strict=False):
        curves[name] = (STEPS, np.linspace([20.0] * 3, [end - 1, end, end + 1], 30).T)
    return curves


def study_of(training: dict, final: dict | None = None, threshold: float = 100.0):
    evaluation = grown(*(198.0 for _ in training))
    final = final or {name: np.array([190.0, 198.0, 199.0]) for name in training}
    figure = Figure(figsize=(15, 4.5))
    figures.study(figure, training, evaluation, final, threshold)
    return figure.axes


def test_a_study_shows_training_beside_evaluation_and_every_seed():
    left, middle, right = study_of(grown(190.0, 120.0))
    assert right.get_title() == "6 of 6 seeds end at 100 or above"
    np.testing.assert_allclose(left.lines[0].get_ydata()[[0, -1]], [20, 190])
    np.testing.assert_allclose(middle.lines[0].get_ydata()[[0, -1]], [20, 198])
    assert left.get_ylim() == middle.get_ylim() and legend(left) == ["a", "b"]
    assert figures.png(left.figure).startswith(b"\x89PNG")


def test_controls_have_a_row_and_no_curve():
    final = {"a": np.array([191.0, 199.5]), "control: bad": np.array([5.0, 6.0])}
    left, _, right = study_of(grown(190.0), final, threshold=195.0)
    assert right.get_title() == "1 of 4 seeds end at 195 or above"
    assert [text.get_text() for text in right.get_yticklabels()] == [*final]
    assert legend(left) == ["a"]


@pytest.mark.filterwarnings("error")
def test_a_study_in_which_no_episode_of_training_ended_has_no_curve_of_it():
    left, middle, _ = study_of({"a": (STEPS[:0], np.zeros((3, 0)))})
    assert left.get_legend() is None and legend(middle) == ["a"]
