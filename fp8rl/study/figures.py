"""Figures: functions that draw arrays on matplotlib's Axes.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart. Lines also differ
in dash and marker, for print.
"""

import io
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from .statistics import bootstrap_interval, iqm, percentiles

# Black, orange, sky blue, green, vermillion, blue, purple, each with a dash pattern and a marker.
STYLES = [
    {"color": color, "linestyle": dash, "marker": marker}
    for color, dash, marker in zip(
        ["#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7"],
        ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))],
        ["o", "s", "^", "D", "v", "P", "X"],
        strict=True,
    )
]
REFERENCES = {"bang-bang 199": 199.0, "random 18.5": 18.5, "constant 6.2": 6.2}


def references(ax: Axes) -> Axes:
    """Draws the cart's reference returns, and scales the vertical axis for returns.

    Their names stand to the right of the axes.
    """
    for name, value in REFERENCES.items():
        ax.axhline(value, color="#888888", linewidth=0.8, zorder=0)
        ax.annotate(
            name,
            (1.01, value),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=7,
            color="#666666",
            annotation_clip=False,
        )
    ax.set(ylim=(0, 215), ylabel="return of an episode")
    return ax


def steps_axis(ax: Axes, ticks: int = 6) -> Axes:
    """Labels the horizontal axis as environment steps, with at most `ticks` + 1 whole numbers."""
    ax.set_xlabel("environment steps")
    ax.xaxis.set_major_locator(MaxNLocator(ticks))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return ax


def learning_curves(
    ax: Axes, curves: dict[str, tuple[np.ndarray, np.ndarray]], marks: bool = True
) -> Axes:
    """Draws evaluation returns against environment steps, with a line for each name.

    The line is the interquartile mean of the seeds. A band goes from their 10th to their 90th
    percentile.

    `curves`  name -> (steps [E], returns [seeds, E])
    `marks`   whether to draw the cart's reference returns; False for other tasks
    """
    for style, (name, (steps, returns)) in zip(cycle(STYLES), curves.items(), strict=False):
        returns = np.atleast_2d(returns)
        central = iqm(returns, axis=0)
        every = max(1, len(steps) // 20)
        ax.plot(steps, central, label=name, markersize=4, markevery=every, **style)
        ax.fill_between(
            steps,
            *percentiles(returns, [10, 90], axis=0),
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
    steps_axis(ax).set_xlim(left=0)
    ax.set_ylabel("return of an episode")
    if curves:
        ax.legend(loc="center right", fontsize=8)
    return references(ax) if marks else ax


# Columns of a history that are drawn below the return, with their titles.
BELOW = {
    "loss": "loss",
    "entropy": "entropy of the policy, nats",
    "k3": "KL from older policies, nats",
    "clip_fraction": "share of steps clipped",
}


def training(figure: Figure, history, title: str, marks: bool = True) -> Figure:
    """Draws how one run learned, from its History.

    Returns are above. Below are loss, entropy, the divergence of the present policy from the
    policies that acted, and the share of clipped steps. The line is the mean return of the training
    episodes, whose actions are sampled. Greedy evaluations are dots, because a greedy policy may do
    well long before the sampled policy does. `marks` says whether to draw the cart's reference
    returns; it is False for other tasks.
    """
    # Margins and the heights of titles are fixed, because a layout engine would draw everything
    # twice to find out how much room the labels need. Long numbers are written with a power of ten.
    axes = figure.subplot_mosaic(
        [["return"] * len(BELOW), list(BELOW)],
        height_ratios=(2, 1),
        # The names of references stand to the right of the axes
        gridspec_kw={
            "left": 0.11,
            "right": 0.89,
            "bottom": 0.05,
            "top": 0.95,
            "wspace": 0.5,
            "hspace": 0.4,
        },
    )
    top = axes["return"]
    top.set_title(title, y=1)
    top.ticklabel_format(axis="y", scilimits=(-3, 5))
    steps = history.column("steps")
    returns = history.column("train_return")
    has_ended = ~np.isnan(returns)  # iterations in which an episode ended
    top.plot(steps[has_ended], returns[has_ended], color="#0072B2", label="sampled, in training")
    top.plot(*history.evaluations(), "o", color="#E69F00", markersize=4, label="greedy evaluation")
    top.legend(loc="lower right", fontsize=8)
    steps_axis(top).set_xlim(left=0)
    top.set_ylabel("return of an episode")
    if marks:
        references(top)
    for name, label in BELOW.items():
        ax = axes[name]
        ax.plot(steps, history.column(name), color="#444444", linewidth=1)
        ax.set_title(label, fontsize=8, y=1, pad=11)  # above the power of ten
        ax.tick_params(labelsize=7)
        ax.ticklabel_format(axis="y", scilimits=(-3, 4))
        ax.yaxis.get_offset_text().set_fontsize(7)
        steps_axis(ax, ticks=2).set_xlabel("")
    return figure


Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # name -> steps [n] and values [seeds, n]


def study(
    figure: Figure,
    training: Curves,
    evaluation: Curves,
    final: dict[str, np.ndarray],
    threshold: float,
    marks: bool = True,
) -> Figure:
    """Draws the results of a study: training returns, greedy evaluations, and final returns.

    Returns of training episodes come first, because their actions are sampled. A greedy policy may
    do well before the sampled policy does, and then its curve shows no learning.

    `final`  name -> final greedy return of each seed
    `marks`  whether to draw the cart's reference returns; False for other tasks
    """
    left, middle, right = figure.subplots(1, 3)
    left.sharey(middle)
    shown = {name: curve for name, curve in training.items() if len(curve[0])}
    learning_curves(left, shown, marks).set_title("in training, sampled actions")
    learning_curves(middle, evaluation, marks).set_title("evaluated, greedy actions")
    looks = dict(zip(evaluation, cycle(STYLES), strict=False))
    plain = {"color": "#888888", "marker": "o"}  # style of controls, which have no curves
    intervals(right, final, "final greedy return", [looks.get(name, plain) for name in final])
    right.axvline(threshold, color="#888888", linewidth=0.8, zorder=0)
    reached = sum((values >= threshold).sum() for values in final.values())
    seeds = sum(map(len, final.values()))
    right.set_title(f"{reached} of {seeds} seeds end at {threshold:g} or above")
    caption = (
        "Curves: interquartile mean and 10th to 90th percentile of the seeds. Right: a stroke "
        "for each seed; above, their interquartile mean and its 95% interval."
    )
    figure.supxlabel(caption, fontsize=8, color="#444444")
    return figure


def name_lines(ax: Axes, size: float = 8) -> Axes:
    """Names the lines to the right of the axes, in their colours, in the order of their ends."""
    lines = [line for line in ax.lines if not line.get_label().startswith("_")]
    lines.sort(key=lambda line: line.get_ydata()[-1], reverse=True)
    at = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    ax.legend(handles=lines, fontsize=size, labelcolor="linecolor", frameon=False, **at)
    return ax


def intervals(
    ax: Axes, scores: dict[str, np.ndarray], label: str, looks: list[dict] | None = None
) -> Axes:
    """Draws scores, with a row for each name.

    A row has the interquartile mean of the seeds with its 95% bootstrap interval and, below them,
    each seed's score as a tick.

    `scores`  name -> scores [seeds]
    `label`   label of the horizontal axis, with the unit
    `looks`   a style for each name; by default those of `STYLES`
    """
    for row, (style, values) in enumerate(
        zip(looks or cycle(STYLES), scores.values(), strict=False)
    ):
        low, high = bootstrap_interval(values)
        ax.plot(values, np.full(len(values), row + 0.25), "|", color=style["color"], markersize=8)
        ax.plot(
            [low, high], [row - 0.1, row - 0.1], "-", color=style["color"], linewidth=4, alpha=0.6
        )
        ax.plot(iqm(values), row - 0.1, style["marker"], color=style["color"], markersize=7)
    ax.ticklabel_format(axis="x", useOffset=False)
    ax.set(
        yticks=range(len(scores)),
        yticklabels=list(scores),
        ylim=(len(scores) - 0.5, -0.5),
        xlabel=label,
    )
    return ax


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
