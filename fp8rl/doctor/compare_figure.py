"""The picture of a comparison: float32's metric over time, and that of each format."""

import itertools
import math
from statistics import fmean

from matplotlib.figure import Figure

from .compare_table import FLOAT32, Results

# Okabe and Ito's colours, which colour-blind readers can tell apart: vermillion, blue, green,
# orange, purple, sky blue
COLORS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
POINTS = 40  # of a line at most
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
    means = {}
    for arm, color in zip(results.traces, colors_of(results), strict=True):
        curves = [
            averaged(trace.numbers, points)
            for trace in results.traces[arm].values()
            if trace.numbers
        ]
        if not curves:
            continue
        times = [(point + 0.5) / points for point in range(points)]
        mean = [fmean(values) for values in zip(*curves, strict=True)]
        means[arm] = mean
        if len(curves) > 1:
            for curve in curves:
                ax.plot(times, curve, color=color, linewidth=0.7, alpha=0.4)
        width = 3.5 if arm == FLOAT32 else 2
        marker = "o" if points == 1 else None
        ax.plot(times, mean, color=color, linewidth=width, marker=marker)
    ax.set_ylim(*limits(means))
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of the training, by the numbers that the script prints")
    better = "higher" if results.higher else "lower"
    ax.set_ylabel(f"{results.reading.metric}\n({better} is better)", parse_math=False)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(message(results), loc="left", fontweight="bold", parse_math=False)
    name_lines(ax, results, means)
    return figure


def points_of(results: Results) -> int:
    """How many points a line has: as many as the shortest trace has numbers, and at most POINTS."""
    lengths = [len(t.numbers) for traces in results.traces.values() for t in traces.values()]
    return min([POINTS, *filter(None, lengths)])


def averaged(numbers: list[float], points: int) -> list[float]:
    """Numbers as a line of points, each the mean of those that are next to each other."""
    borders = [round(point * len(numbers) / points) for point in range(points + 1)]
    return [fmean(numbers[a:b]) for a, b in itertools.pairwise(borders)]


def colors_of(results: Results) -> list[str]:
    """Black for float32, which is the first arm, and a colour for each format."""
    return ["black", *(COLORS[i % len(COLORS)] for i in range(len(results.arms)))]


def limits(means: dict[str, list[float]]) -> tuple[float, float]:
    """The range of the vertical axis. An arm that diverges may leave it."""
    exact = [x for x in means[FLOAT32] if math.isfinite(x)] or [0.0]
    span = max(exact) - min(exact) or 1.0
    lowest = min(exact) - BEYOND * span
    highest = max(exact) + BEYOND * span
    seen = [min(max(x, lowest), highest) for mean in means.values() for x in mean if x == x]
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
    for arm, mean in means.items():
        finite = [x for x in mean if math.isfinite(x)]
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
    lost = "" if math.isnan(share) else f", lost {share:.2f}"
    return f"{arm}\n{said}{lost}"
