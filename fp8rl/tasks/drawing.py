"""A picture of the cart, for `render` (custom_env.py)."""

import numpy as np

from ..env import LIMIT


def picture_of_cart(state, title: str) -> np.ndarray:
    """A picture of a cart below a title: uint8 [240, 480, 3].

    `state` is a tensor [2]. The square is at its position, and the arrow above it is three times as
    long as its velocity. The track is shaded, and a dotted line is at the origin.
    """
    # Imported here, because only rendering needs matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    position, velocity = state.tolist()
    figure = Figure(figsize=(4.8, 2.4), dpi=100)
    canvas = FigureCanvasAgg(figure)
    ax = figure.add_axes((0.05, 0.22, 0.9, 0.64))
    ax.axvspan(-LIMIT, LIMIT, color="#56B4E9", alpha=0.15)
    ax.axvline(0, color="#009E73", linestyle=":")
    arrow = {
        "arrowstyle": "-|>",
        "color": "#D55E00",
        "lw": 3,
        "mutation_scale": 16,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    ends = (position + 3 * velocity, 0.72), (position, 0.72)
    ax.annotate("", *ends, arrowprops=arrow).arrow_patch.set_clip_box(ax.bbox)
    ax.plot(position, 0.4, "s", color="#000000", markersize=18)
    # The last step of an episode may end far outside the track.
    width = max(1.25 * LIMIT, abs(position) + 0.25)
    ax.set(xlim=(-width, width), ylim=(0, 1), yticks=[], xlabel="position")
    ax.set_title(title)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
