"""Dumps of log-probabilities of any length: tokens of an actor, and a learner with noisy logits.

No model is run. The actor's logits are random, tokens are sampled from them exactly, and the
learner's logits differ by noise, so that the noise's distribution and the dump's shape are free. A
sound dump has noise alone. A bug is planted in the noise, in the actor's sampling, or in how the
numbers are stored.
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


class NoiseDump(NamedTuple):
    """One dump. `bug` is empty where there is only noise. `options` are for `mismatch`, too."""

    bug: str
    variant: str
    learner_logp: np.ndarray  # [S, T]
    actor_logp: np.ndarray  # [S, T]
    mask: np.ndarray  # [S, T]
    options: dict


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
    factor: np.ndarray | float = 1.0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    is_half: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The learner's and the actor's log-probabilities [S, T], and the mask.

    `size` is the standard deviation of the noise of logits, and `factor`, [S, T], multiplies it.
    With `is_half`, both programs round their logits to float16 after the noise.
    """
    mask = shape.mask(draw)
    scale = np.broadcast_to(np.float32(size) * factor, mask.shape)
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


def sound_dump(shape: DumpShape, noise: str, size: float, seed: int, is_half=False) -> NoiseDump:
    """A dump with noise alone, and with advantages that have nothing to do with it."""
    draw = np.random.default_rng(seed)
    arrays = dump_of(shape, noise, size, draw, is_half=is_half)
    advantages = draw.standard_normal(shape.sequences)
    return NoiseDump("", noise, *arrays, {"advantages": advantages})


# Bugs: each function returns the pair of log-probabilities, the mask, and options of `mismatch`


def larger_noise(where: Callable[[np.ndarray, Draw], np.ndarray], times: float):
    """A bug that makes the noise larger at the tokens of `where`."""

    def make(shape: DumpShape, noise: str, size: float, draw: Draw):
        # The mask decides what is first and last, so it is drawn twice from the same seed.
        seed = draw.integers(2**32)
        mask = shape.mask(np.random.default_rng(seed))
        factor = np.where(where(mask, draw), times, 1.0)
        return *dump_of(shape, noise, size, np.random.default_rng(seed), factor), {}

    return make


def places(mask: np.ndarray) -> np.ndarray:
    """The position of each token, [1, T]."""
    return np.arange(mask.shape[1])[None]


def every_sequence(count: int) -> Callable[[np.ndarray, Draw], np.ndarray]:
    """All tokens of every third sequence, for example."""
    return lambda mask, draw: np.arange(len(mask))[:, None] % count == 0


def from_a_position(mask: np.ndarray, draw: Draw) -> np.ndarray:
    shortest = int(mask.sum(1).min())
    position = draw.integers(shortest // 4 + 1, max(shortest // 2, shortest // 4 + 2))
    return places(mask) >= position


def growing(shape: DumpShape, noise: str, size: float, draw: Draw):
    """The noise grows tenfold along the longest sequence."""
    factor = np.geomspace(1, 10, shape.tokens)
    return *dump_of(shape, noise, size, draw, factor), {}


def sampling(**options):
    """A bug of how the actor samples."""

    def make(shape: DumpShape, noise: str, size: float, draw: Draw):
        return *dump_of(shape, noise, size, draw, **options), {}

    return make


def shifted(shape: DumpShape, noise: str, size: float, draw: Draw):
    learner, actor, mask = dump_of(shape, noise, size, draw)
    learner = np.where(mask, np.roll(learner, 1, 1), 0)
    return np.minimum(learner, 0), actor, mask, {}


def raised(shape: DumpShape, noise: str, size: float, draw: Draw):
    """The learner's log-probabilities are 0.03 too high."""
    learner, actor, mask = dump_of(shape, noise, size, draw)
    return np.minimum(learner + 0.03, 0), actor, mask, {}


def pushed(shape: DumpShape, noise: str, size: float, draw: Draw):
    """The learner has learned from the sequences' advantages, the actor has not."""
    learner, actor, mask = dump_of(shape, noise, size, draw)
    advantages = draw.standard_normal(shape.sequences)
    push = 0.5 * size * advantages[:, None] * -np.expm1(actor)
    return np.minimum(learner + push, 0), actor, mask, {"advantages": advantages}


def penalized(shape: DumpShape, noise: str, size: float, draw: Draw):
    """The actor lowers the logits of tokens that the sequence has had."""
    mask = shape.mask(draw)
    rows = np.arange(shape.sequences)
    was_seen = np.zeros((shape.sequences, 4 * VOCABULARY), bool)
    arrays = [np.zeros(mask.shape) for _ in range(3)]
    for t in range(shape.tokens):
        logits = SPREAD * gaussian(draw, was_seen.shape)
        noisy = logits + size * NOISES.get(noise, gaussian)(draw, was_seen.shape)
        actor = softmax_logp(logits - 0.1 * np.abs(logits) * was_seen)
        token = sampled(draw, actor)[:, 0]
        for x, column in zip(
            arrays, (softmax_logp(noisy)[rows, token], actor[rows, token], token), strict=True
        ):
            x[:, t] = column
        was_seen[rows, token] = True
    learner, actor, tokens = arrays
    return learner, actor, mask, {"tokens": tokens.astype(np.int64)}


# By the kind that the report should name
BUGS = {
    "shift": ("rolled by one", shifted),
    "temperature": ("0.9", sampling(temperature=0.9)),
    "truncation": ("top-p 0.95", sampling(top_p=0.95)),
    "temperature and truncation": ("0.6, top-p 0.95", sampling(temperature=0.6, top_p=0.95)),
    "stale": ("pushed by advantages", pushed),
    "repetition": ("penalty of a tenth", penalized),
    "padding": ("a third of the sequences", larger_noise(every_sequence(3), 8.0)),
    "padding of few": ("an eighth of the sequences", larger_noise(every_sequence(8), 8.0)),
    "template": ("from a position on", larger_noise(from_a_position, 8.0)),
    "beginning": ("the first 4 tokens", larger_noise(lambda mask, draw: places(mask) < 4, 8.0)),
    "last token": (
        "8 times",
        larger_noise(lambda mask, draw: places(mask) == mask.sum(1)[:, None] - 1, 8.0),
    ),
    "trend": ("tenfold along the sequence", growing),
    "heavy tail": (
        "3% of the tokens, 60 times",
        larger_noise(lambda mask, draw: draw.random(mask.shape) < 0.03, 60.0),
    ),
    "mean ratio": ("log ratios 0.03 too high", raised),
    "precision": (
        "3 bits, bf16 claimed",
        lambda shape, noise, size, draw: (
            *dump_of(shape, noise, 0.25, draw),
            {"precision": "bf16"},
        ),
    ),
}


def buggy_dump(bug: str, shape: DumpShape, noise: str, size: float, seed: int) -> NoiseDump:
    variant, make = BUGS[bug]
    *arrays, options = make(shape, noise, size, np.random.default_rng(seed))
    return NoiseDump(bug, variant, *arrays, options)


# What tests go through

SHAPES_OF_SOUND = [DumpShape(64, 32, True), DumpShape(16, 64, True)]


def sound_dumps(first_seed: int, shape: DumpShape, size: float) -> Iterator[NoiseDump]:
    """Dumps with noise alone of each distribution, and with both programs' logits in float16."""
    for seed, noise in enumerate((*NOISES, UNEVEN), first_seed):
        yield sound_dump(shape, noise, size, seed)
    yield sound_dump(shape, "float16 of both", 0.1 * size, first_seed + 4, is_half=True)
