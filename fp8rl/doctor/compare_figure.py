"""The picture of a comparison: float32's metric over time, and that of each format."""

import math
from collections.abc import Iterable

from matplotlib.figure import Figure

from .compare_table import FLOAT32, Results, Trace, mean

# Okabe and Ito's colours, which colour-blind readers can tell apart: vermillion, blue, green,
# orange, purple, sky blue
COLORS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
POINTS = 25  # of a line at most
BEYOND = 1.0  # how far outside float32's range is shown, in its range: an arm may diverge
APART = 0.09  # between the names of two lines, in the height of the picture
NAMED = 3  # formats in the title at most


def figure_of(results: Results) -> Figure:
    """Draws the metric of each arm, from the beginning to the end of the script's output.

    Thick lines are means over seeds, and thin ones single seeds. Each point is the mean of some of
    the numbers that a training has printed.
    """
    figure = Figure(figsize=(9, 5), layout="constrained")
    ax = figure.add_subplot()
    points = points_of(results)
    end = end_of(results)
    means = {}
    for arm, color in zip(results.traces, colors_of(results), strict=True):
        traces = results.traces[arm].values()
        if not traces:  # all have failed
            continue
        if len(traces) > 1:
            for trace in traces:
                ax.plot(*line_of([trace], points, end), color=color, linewidth=0.7, alpha=0.4)
        times, means[arm] = line_of(traces, points, end)
        width = 3.5 if arm == FLOAT32 else 2
        marker = "o" if len(times) == 1 else None
        ax.plot(times, means[arm], color=color, linewidth=width, marker=marker)
    ax.set_ylim(*limits(means))
    ax.set_xlim(0, end)
    if results.reading.step is None:
        ax.set_xlabel("share of the numbers that the script prints")
    else:
        ax.set_xlabel(results.reading.step, parse_math=False)
    better = "higher" if results.higher else "lower"
    ax.set_ylabel(f"{results.reading.metric}\n({better} is better)", parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(message(results), loc="left", fontweight="bold", parse_math=False)
    name_lines(ax, results, means)
    return figure


def points_of(results: Results) -> int:
    """How many points a line has: as many as the shortest trace has numbers, and at most POINTS."""
    lengths = [len(t.numbers) for traces in results.traces.values() for t in traces.values()]
    return min(POINTS, *lengths)


def end_of(results: Results) -> float:
    """Where the horizontal axis ends: at 1, or at the last step of a training."""
    if results.reading.step is None:
        return 1.0
    traces = [t for of_arm in results.traces.values() for t in of_arm.values()]
    return max((time for t in traces for time in t.times if time == time), default=0) or 1.0


def line_of(traces: Iterable[Trace], points: int, end: float) -> tuple[list[float], list[float]]:
    """The times and heights of a line. The axis is cut into equal parts, and each is a point: the
    mean of its numbers in each training, and then over those. A part without numbers is none."""
    heights: list[list[float]] = [[] for _ in range(points)]
    for trace in traces:
        parts: list[list[float]] = [[] for _ in range(points)]
        for time, number in zip(trace.times, trace.numbers, strict=True):
            if time == time:  # a step is known
                part = int(points * time / end)
                parts[min(max(part, 0), points - 1)].append(number)
        for height, numbers in zip(heights, parts, strict=True):
            if numbers:
                height.append(mean(numbers))
    seen = [part for part in range(points) if heights[part]]
    times = [(part + 0.5) / points * end for part in seen]
    return times, [mean(heights[part]) for part in seen]


def colors_of(results: Results) -> list[str]:
    """Black for float32, which is the first arm, and a colour for each format."""
    return ["black", *(COLORS[i % len(COLORS)] for i in range(len(results.arms)))]


def limits(means: dict[str, list[float]]) -> tuple[float, float]:
    """The range of the vertical axis. An arm that diverges may leave it."""
    exact = [x for x in means[FLOAT32] if math.isfinite(x)] or [0.0]
    span = max(exact) - min(exact) or 1.0
    lowest = min(exact) - BEYOND * span
    highest = max(exact) + BEYOND * span
    seen = [min(max(x, lowest), highest) for line in means.values() for x in line if x == x]
    low, high = min(seen, default=0.0), max(seen, default=1.0)
    margin = 0.05 * (high - low or 1.0)
    return low - margin, high + margin


def message(results: Results) -> str:
    """The title: which formats lose, in at most three names."""
    worse = [arm for arm in results.arms if results.is_worse(arm)]
    known = [arm for arm in results.arms if results.is_worse(arm) is not None]
    if not known:
        return "No loss is known: the table says why"
    if not worse:
        return f"No format loses more than {results.reading.loss:g} of what float32 gains"
    names = ", ".join(worse[:NAMED]) + (", ..." if len(worse) > NAMED else "")
    if len(known) == 1:
        return f"{names} ends worse than float32"
    verb = "ends" if len(worse) == 1 else "end"
    return f"{len(worse)} of {len(known)} formats {verb} worse than float32:\n{names}"


def name_lines(ax, results: Results, means: dict[str, list[float]]) -> None:
    """Writes the name of each line beside its end, with the word and what was lost. Names that
    would cover each other are moved apart."""
    low, high = ax.get_ylim()
    ends = {}
    for arm, line in means.items():
        finite = [x for x in line if math.isfinite(x)]
        height = ((finite[-1] if finite else high) - low) / (high - low)  # of the axes, 0 to 1
        ends[arm] = min(max(height, 0), 1)
    order = sorted(ends, key=ends.get)
    heights = spread_out([ends[arm] for arm in order])
    colors = dict(zip(results.traces, colors_of(results), strict=True))
    for arm, height in zip(order, heights, strict=True):
        ax.annotate(
            label_of(arm, results),
            (1.02, height),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=colors[arm],
            fontweight="bold" if arm == FLOAT32 else None,
            annotation_clip=False,
            parse_math=False,
        )


def spread_out(heights: list[float]) -> list[float]:
    """Rising heights, moved up where two are nearer than APART, and then down from the top."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + APART) if moved else height)
    ceiling = max(1.0, APART * (len(heights) - 1))
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - APART
    return moved


def label_of(arm: str, results: Results) -> str:
    if arm == FLOAT32:
        return FLOAT32
    words = [w.word for seed in results.exact for w in results.words_for(arm, seed)]
    said = ", ".join(dict.fromkeys(words))
    share = results.loss(arm).share
    if math.isnan(share):
        return f"{arm}\n{said}"
    outcome = f"lost {share:.2f}" if share >= 0 else f"better by {-share:.2f}"
    return f"{arm}\n{said}, {outcome}"
