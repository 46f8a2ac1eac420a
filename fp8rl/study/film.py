"""Films of an agent: one episode as an animated GIF."""

import io
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..rollout import inference
from ..tasks.drawing import picture_of_cart
from ..tasks.gymnasium_env import GymEnv

# Number of frames of a film at most. Of longer episodes, only every second or third step is shown.
MOST_FRAMES = 250
WIDEST = 480  # pixels; wider pictures are made smaller
COLORS = 64


class Film(NamedTuple):
    """A film of an episode: the GIF file, the number of steps, and the return."""

    gif: bytes
    steps: int
    episode_return: float


def film_episode(policy: Callable, env, frames_per_second: float) -> Film:
    """Plays one episode in a newly created environment, and films it.

    The policy is like that of evaluate.play. The environment is a Cart, or a GymEnv whose
    render_mode is rgb_array. Each frame has a title with the step and the return.
    """
    every = math.ceil(env.max_steps / MOST_FRAMES)
    total = 0.0
    step = 0
    with inference(env):
        frames = [frame_of(env, title_of(env, step, total))]
        while not env.done.any() and step < env.max_steps:
            (start,) = env.draw(1)
            _, reward, terminated, _ = env.step(policy(env.obs), start)
            total += env.discount**step * float(reward)
            step += 1
            has_ended = bool(env.done)
            if has_ended or step % every == 0:
                end = ", terminated" if terminated else ", time limit" if has_ended else ""
                frames.append(frame_of(env, title_of(env, step, total) + end))
    return Film(gif_of(frames, every / frames_per_second), step, total)


def title_of(env, step: int, total: float) -> str:
    name = "return" if env.discount == 1 else "discounted return"
    return f"step {step}, {name} {total:.2f}"


def frame_of(env, title: str) -> Image.Image:
    """A picture of the environment as it is now, below a title."""
    if isinstance(env, GymEnv):
        return titled(env.render(), title)
    return Image.fromarray(picture_of_cart(env.state[0], title))


def titled(frame: np.ndarray, title: str) -> Image.Image:
    """A picture below a title. A picture that is too wide is made smaller."""
    image = Image.fromarray(frame)
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)))
    band = 30
    whole = Image.new("RGB", (max(image.width, 300), image.height + band), "white")
    whole.paste(image, (0, band))
    font = ImageFont.load_default(14)
    ImageDraw.Draw(whole).text((10, band // 2), title, "black", font, anchor="lm")
    return whole


def gif_of(frames: Iterable[Image.Image], seconds: float) -> bytes:
    """A GIF file that loops endlessly. Each frame is shown for `seconds`.

    The last frame stays for two seconds, so that one sees how the episode ended.
    """
    first, *others = (frame.quantize(COLORS, dither=Image.Dither.NONE) for frame in frames)
    milliseconds = max(20, round(100 * seconds) * 10)  # GIF counts hundredths of a second
    durations = [milliseconds] * len(others) + [2000]
    file = io.BytesIO()
    first.save(
        file, "GIF", save_all=True, append_images=others, duration=durations, loop=0, optimize=False
    )
    return file.getvalue()
