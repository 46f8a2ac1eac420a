"""Dumps of log-probabilities of any length: tokens of an actor, and a learner with noisy logits.

No model is run. The actor's logits are random, tokens are sampled from them exactly, and the
learner's logits differ by noise, so that the noise's distribution and the dump's shape are free. A
sound dump has noise alone. In the others the actor samples at another temperature, by top-p, or
with a repetition penalty.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

VOCABULARY = 16
SPREAD = 2.0  # standard deviation of logits
BLOCK = 2**18  # tokens that are sampled at once
FEW = 0.02  # share of tokens with TEN_TIMES the noise
TEN_TIMES = 10.0
DEGREES = 3.0  # of freedom, of Student's t

Draw = np.random.Generator


class DumpShape(NamedTuple):
    """The number of sequences, and of tokens in the longest."""

    sequences: int
    tokens: int
    is_ragged: bool

    @property
    def name(self) -> str:
        words = ", ragged" if self.is_ragged else ""
        return f"{self.sequences:,} x {self.tokens:,}{words}"

    def mask(self, draw: Draw) -> np.ndarray:
        """The tokens that count: all, or from an eighth of the longest sequence up."""
        if not self.is_ragged:
            return np.ones((self.sequences, self.tokens), bool)
        least = max(self.tokens // 8, 2)
        lengths = draw.integers(least, self.tokens + 1, (self.sequences, 1))
        lengths[0] = self.tokens
        return np.arange(self.tokens) < lengths


# The noise of logits: a factor for each token and a distribution


def gaussian(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


def student(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t. All logits of a token have the same factor."""
    factor = np.sqrt(DEGREES / draw.chisquare(DEGREES, (*shape[:-1], 1)))
    return gaussian(draw, shape) * factor.astype(np.float32)


def few_noisy(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """At 2% of the tokens, ten times the noise."""
    is_noisy = draw.random((*shape[:-1], 1)) < FEW
    return gaussian(draw, shape) * np.where(is_noisy, TEN_TIMES, 1).astype(np.float32)


NOISES = {"Gaussian": gaussian, "Student-t": student, "2% noisy tokens": few_noisy}
# The fourth noise has sizes that differ a little between sequences and grow a little along them.
UNEVEN = "uneven"
OF_SEQUENCES = 0.2  # standard deviation of the logarithm of a sequence's noise
GROWTH = 1.4  # of the noise from the first token to the last


def softmax_logp(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def sampled(draw: Draw, logp: np.ndarray) -> np.ndarray:
    """Tokens of log-probabilities [N, V], as numbers [N, 1]."""
    cumulated = np.exp(logp.astype(np.float64)).cumsum(-1)
    level = draw.random((len(logp), 1)) * cumulated[:, -1:]
    return (cumulated > level).argmax(-1)[:, None]


def nucleus(logp: np.ndarray, top_p: float) -> np.ndarray:
    """Log-probabilities of the most likely tokens that together have `top_p`, normalized."""
    order = np.argsort(-logp, axis=-1)
    ordered = np.take_along_axis(np.exp(logp), order, -1)
    is_left_out = ordered.cumsum(-1) - ordered >= top_p
    kept = np.empty_like(is_left_out)
    np.put_along_axis(kept, order, ~is_left_out, -1)
    return softmax_logp(np.where(kept, logp, -1e4))


def dump_of(
    shape: DumpShape,
    noise: str,
    size: float,
    draw: Draw,
    temperature: float = 1.0,
    top_p: float = 1.0,
    is_half: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The learner's and the actor's log-probabilities [S, T], and the mask.

    `size` is the standard deviation of the noise of logits. With `is_half`, both programs round their logits to float16 after the noise.
    """
    mask = shape.mask(draw)
    scale = np.broadcast_to(np.float32(size), mask.shape)
    if noise == UNEVEN:
        of_sequence = np.exp(OF_SEQUENCES * draw.standard_normal((len(mask), 1)))
        scale = scale * of_sequence * np.linspace(1, GROWTH, mask.shape[1])
    distribution = NOISES.get(noise, gaussian)
    scales = scale[mask].astype(np.float32)
    learner = np.zeros(mask.shape)
    actor = np.zeros(mask.shape)
    pairs = [
        pair_of(draw, part, distribution, temperature, top_p, is_half)
        for part in np.split(scales, range(BLOCK, len(scales), BLOCK))
    ]
    learner[mask] = np.concatenate([pair[0] for pair in pairs])
    actor[mask] = np.concatenate([pair[1] for pair in pairs])
    return learner.astype(np.float32), actor.astype(np.float32), mask


def pair_of(
    draw: Draw,
    scales: np.ndarray,
    distribution: Callable[[Draw, tuple[int, ...]], np.ndarray],
    temperature: float,
    top_p: float,
    is_half: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of N tokens: the learner's and the actor's, [N]."""
    shape = (len(scales), VOCABULARY)
    logits = np.float32(SPREAD) * gaussian(draw, shape)
    noisy = logits + scales[:, None] * distribution(draw, shape)
    if is_half:
        logits, noisy = (x.astype(np.float16).astype(np.float32) for x in (logits, noisy))
    actor = softmax_logp(logits / np.float32(temperature))
    if top_p < 1:
        actor = nucleus(actor, top_p)
    tokens = sampled(draw, actor)
    learner = softmax_logp(noisy)
    return tuple(np.take_along_axis(x, tokens, 1)[:, 0] for x in (learner, actor))


def sound_dump(shape: DumpShape, noise: str, size: float, seed: int, is_half=False) -> dict:
    """A dump with noise alone, and with advantages that have nothing to do with it."""
    draw = np.random.default_rng(seed)
    learner, actor, mask = dump_of(shape, noise, size, draw, is_half=is_half)
    advantages = draw.standard_normal(shape.sequences)
    return {"learner_logp": learner, "actor_logp": actor, "mask": mask, "advantages": advantages}


def penalized(shape: DumpShape, size: float, draw: Draw) -> dict:
    """The actor lowers the logits of tokens that the sequence has had."""
    mask = shape.mask(draw)
    rows = np.arange(shape.sequences)
    was_seen = np.zeros((shape.sequences, 4 * VOCABULARY), bool)
    arrays = [np.zeros(mask.shape) for _ in range(3)]
    for t in range(shape.tokens):
        logits = SPREAD * gaussian(draw, was_seen.shape)
        noisy = logits + size * gaussian(draw, was_seen.shape)
        actor = softmax_logp(logits - 0.1 * np.abs(logits) * was_seen)
        token = sampled(draw, actor)[:, 0]
        for x, column in zip(
            arrays, (softmax_logp(noisy)[rows, token], actor[rows, token], token), strict=True
        ):
            x[:, t] = column
        was_seen[rows, token] = True
    learner, actor, tokens = arrays
    return {
        "learner_logp": learner,
        "actor_logp": actor,
        "mask": mask,
        "tokens": tokens.astype(int),
    }


def sound_dumps(first_seed: int, shape: DumpShape, size: float) -> Iterator[tuple[str, dict]]:
    """Dumps with noise alone of each distribution, and with both programs' logits in float16."""
    for seed, noise in enumerate((*NOISES, UNEVEN), first_seed):
        yield noise, sound_dump(shape, noise, size, seed)
    yield "float16 of both", sound_dump(shape, "", 0.1 * size, first_seed + 4, is_half=True)
