"""Dumps of log-probabilities of any length: tokens of an actor, and a learner with noisy logits.

No model is run. The actor's logits are random, tokens are sampled from them exactly, and the
learner's logits differ by noise, so that the noise's distribution and the dump's shape are free. A
sound dump has noise alone. In the others the actor samples at another temperature, by top-p, or
with a repetition penalty.
"""

from collections.abc import Iterator

import numpy as np

VOCABULARY = 16
SPREAD = 2.0  # standard deviation of logits

Draw = np.random.Generator


def ragged_mask(draw: Draw, sequences: int, tokens: int) -> np.ndarray:
    """The tokens that count, [S, T]: from an eighth of the longest sequence up."""
    lengths = draw.integers(max(tokens // 8, 2), tokens + 1, (sequences, 1))
    lengths[0] = tokens
    return np.arange(tokens) < lengths


# The noise of logits: a factor for each token and a distribution


def gaussian(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


def student(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with 3 degrees of freedom. All logits of a token have the same factor."""
    factor = np.sqrt(3.0 / draw.chisquare(3.0, (*shape[:-1], 1)))
    return gaussian(draw, shape) * factor.astype(np.float32)


def few_noisy(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """At 2% of the tokens, ten times the noise."""
    is_noisy = draw.random((*shape[:-1], 1)) < 0.02
    return gaussian(draw, shape) * np.where(is_noisy, 10.0, 1).astype(np.float32)


NOISES = {"Gaussian": gaussian, "Student-t": student, "2% noisy tokens": few_noisy}
# The fourth noise has sizes that differ a little between sequences and grow a little along them.
UNEVEN = "uneven"


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
    shape: tuple[int, int],
    noise: str,
    size: float,
    draw: Draw,
    temperature: float = 1.0,
    top_p: float = 1.0,
    is_half: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The learner's and the actor's log-probabilities [S, T], and the mask.

    `shape` is the number of sequences, and of tokens in the longest. `size` is the standard
    deviation of the noise of logits. With `is_half`, both programs round their logits to float16
    after the noise.
    """
    mask = ragged_mask(draw, *shape)
    scale = np.broadcast_to(np.float32(size), mask.shape)
    if noise == UNEVEN:
        of_sequence = np.exp(0.2 * draw.standard_normal((len(mask), 1)))
        scale = scale * of_sequence * np.linspace(1, 1.4, mask.shape[1])
    of_logits = (mask.sum(), VOCABULARY)
    logits = np.float32(SPREAD) * gaussian(draw, of_logits)
    distribution = NOISES.get(noise, gaussian)
    noisy = logits + scale[mask, None].astype(np.float32) * distribution(draw, of_logits)
    if is_half:
        logits, noisy = (x.astype(np.float16).astype(np.float32) for x in (logits, noisy))
    actor = softmax_logp(logits / np.float32(temperature))
    if top_p < 1:
        actor = nucleus(actor, top_p)
    tokens = sampled(draw, actor)
    pair = np.zeros((2, *mask.shape), np.float32)
    for rows, logp in zip(pair, (softmax_logp(noisy), actor), strict=True):
        rows[mask] = np.take_along_axis(logp, tokens, 1)[:, 0]
    return (*pair, mask)


def sound_dump(shape: tuple[int, int], noise: str, size: float, seed: int, is_half=False) -> dict:
    """A dump with noise alone, and with advantages that have nothing to do with it."""
    draw = np.random.default_rng(seed)
    learner, actor, mask = dump_of(shape, noise, size, draw, is_half=is_half)
    advantages = draw.standard_normal(len(mask))
    return {"learner_logp": learner, "actor_logp": actor, "mask": mask, "advantages": advantages}


def penalized(shape: tuple[int, int], size: float, draw: Draw) -> dict:
    """The actor lowers the logits of tokens that the sequence has had."""
    mask = ragged_mask(draw, *shape)
    sequences, length = shape
    rows = np.arange(sequences)
    was_seen = np.zeros((sequences, 4 * VOCABULARY), bool)
    arrays = np.zeros((3, *shape))
    for t in range(length):
        logits = SPREAD * gaussian(draw, was_seen.shape)
        noisy = logits + size * gaussian(draw, was_seen.shape)
        actor = softmax_logp(logits - 0.1 * np.abs(logits) * was_seen)
        token = sampled(draw, actor)[:, 0]
        arrays[:, :, t] = softmax_logp(noisy)[rows, token], actor[rows, token], token
        was_seen[rows, token] = True
    learner, actor, tokens = arrays
    return {
        "learner_logp": learner,
        "actor_logp": actor,
        "mask": mask,
        "tokens": tokens.astype(int),
    }


def sound_dumps(first_seed: int, shape: tuple[int, int], size: float) -> Iterator[tuple[str, dict]]:
    """Dumps with noise alone of each distribution, and with both programs' logits in float16."""
    for seed, noise in enumerate((*NOISES, UNEVEN), first_seed):
        yield noise, sound_dump(shape, noise, size, seed)
    yield "float16 of both", sound_dump(shape, "", 0.1 * size, first_seed + 4, is_half=True)
