"""Pictures of the package's own tasks, for Gymnasium's `render` and for films (study/film.py).

A drawing is a function of matplotlib axes and of a state, which is a list of floats. A task of your
own can be drawn if it has such a method, `paint(self, ax, state)`. It may also have an attribute
`frames_per_second`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..env import LIMIT, Cart, TensorEnv
from . import cartpole
from .acrobot import Acrobot
from .cartpole import CartPole
from .lqr import Lqr
from .pendulum import Pendulum

BLACK, BLUE, GREEN, RED, GREY = "#000000", "#56B4E9", "#009E73", "#D55E00", "#999999"


class Drawing(NamedTuple):
    """How a task is drawn: the function, the size of the picture, and the frames per second."""

    draw: Callable
    size: tuple[int, int] = (480, 240)  # pixels
    frames_per_second: int = 25


def draw_cart(ax, state: list[float]) -> None:
    """Draws a square at the cart's position, and above it an arrow of three times its velocity.

    The track is shaded, and a dotted line is at the origin.
    """
    position, velocity = state
    ax.axvspan(-LIMIT, LIMIT, color=BLUE, alpha=0.15)
    ax.axvline(0, color=GREEN, linestyle=":")
    arrow = {
        "arrowstyle": "-|>",
        "color": RED,
        "lw": 3,
        "mutation_scale": 16,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    ends = (position + 3 * velocity, 0.72), (position, 0.72)
    ax.annotate("", *ends, arrowprops=arrow).arrow_patch.set_clip_box(ax.bbox)
    ax.plot(position, 0.4, "s", color=BLACK, markersize=18)
    # The last step of an episode may end far outside the track.
    width = max(1.25 * LIMIT, abs(position) + 0.25)
    ax.set(xlim=(-width, width), ylim=(0, 1), yticks=[], xlabel="position")


def draw_cartpole(ax, state: list[float]) -> None:
    """Draws the cart on its track, and the pole. The wedge shows where the pole may be."""
    position, _, angle, _ = state
    length = 2 * cartpole.LENGTH
    ax.axvspan(-cartpole.LIMIT, cartpole.LIMIT, color=BLUE, alpha=0.15)
    reach = length * math.sin(cartpole.ANGLE)
    top = length * math.cos(cartpole.ANGLE)
    ax.fill([position, position - reach, position + reach], [0, top, top], color=GREEN, alpha=0.25)
    ax.axhline(0, color=GREY, linewidth=1)
    ax.fill(
        [position - 0.25, position + 0.25, position + 0.25, position - 0.25],
        [-0.12, -0.12, 0.12, 0.12],
        color=BLACK,
    )
    tip = (position + length * math.sin(angle), length * math.cos(angle))
    ax.plot([position, tip[0]], [0, tip[1]], color=RED, linewidth=5, solid_capstyle="round")
    # The picture is wide enough for the cart, wherever the last step of an episode ends.
    width = max(1.15 * cartpole.LIMIT, abs(position) + 0.5)
    ax.set(xlim=(-width, width), ylim=(-0.45, 1.4), yticks=[], xlabel="position, m")
    ax.set_aspect("equal")


def draw_pendulum(ax, state: list[float]) -> None:
    """Draws the pendulum, and a ring where its end should be."""
    angle, _ = state
    draw_links(ax, [(-math.sin(angle), math.cos(angle))], reach=1.25)
    ax.plot(0, 1, "o", color=GREEN, markersize=22, markerfacecolor="none", markeredgewidth=2)


def draw_acrobot(ax, state: list[float]) -> None:
    """Draws the two links, and the line that the tip must pass."""
    first, second, _, _ = state
    elbow = (math.sin(first), -math.cos(first))
    tip = (elbow[0] + math.sin(first + second), elbow[1] - math.cos(first + second))
    ax.axhline(1, color=GREEN, linestyle="--", linewidth=2)
    ax.text(-2.2, 1.06, "goal: the tip above this line", color=GREEN, fontsize=9)
    draw_links(ax, [elbow, tip], reach=2.3)


def draw_links(ax, ends: list[tuple[float, float]], reach: float) -> None:
    """Draws links from a hinge at the origin, one after the other."""
    begin = (0.0, 0.0)
    for end, color in zip(ends, (BLACK, RED), strict=False):
        across, up = zip(begin, end, strict=True)
        ax.plot(across, up, color=color, linewidth=8, solid_capstyle="round")
        begin = end
    ax.plot(0, 0, "o", color=GREY, markersize=8)
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[])
    ax.set_aspect("equal")


SQUARE = (320, 336)
# Pendulum and CartPole are shown as fast as they are in reality. The other tasks are shown at a
# speed at which they can be followed.
DRAWINGS = {
    Cart: Drawing(draw_cart),
    Lqr: Drawing(draw_cart, frames_per_second=10),
    CartPole: Drawing(draw_cartpole, frames_per_second=50),
    Pendulum: Drawing(draw_pendulum, SQUARE, frames_per_second=20),
    Acrobot: Drawing(draw_acrobot, SQUARE, frames_per_second=15),
}


def drawing_of(task: type[TensorEnv]) -> Drawing | None:
    """How a task is drawn: by its own method `paint`, or like the task of this package that it
    derives from. None if it cannot be drawn."""
    if paint := getattr(task, "paint", None):
        return Drawing(paint, frames_per_second=getattr(task, "frames_per_second", 25))
    return next((DRAWINGS[kind] for kind in task.__mro__ if kind in DRAWINGS), None)


def picture(env: TensorEnv, state, title: str) -> np.ndarray:
    """A picture of the state of one environment, below a title: uint8 [height, width, 3].

    `state` is a tensor [state_size]. The environment's task must have a drawing.
    """
    # Imported here, because only rendering needs matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = drawing_of(type(env))
    draw = getattr(env, "paint", drawing.draw)
    width, height = drawing.size
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    below = 0.22 if width > height else 0.04  # room for a label, where the axis has one
    ax = figure.add_axes((0.05, below, 0.9, 0.86 - below))
    draw(ax, state.tolist())
    ax.set_title(title)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
