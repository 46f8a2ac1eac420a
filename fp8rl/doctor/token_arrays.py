"""Takes numbers of tokens in the forms in which trainers keep them, and checks them.

A trainer keeps the tokens of several sequences in one of three forms:

- padded: an array or a tensor [sequences, tokens], with a mask of the tokens that count;
- ragged: a list with a list, an array or a tensor [tokens] for each sequence;
- packed: an array or a tensor [tokens] of all sequences, one after another, with the number of
  tokens of each (`lengths`).

Each form becomes a padded array of float64 here. Every error is a ValueError of one line that names
the argument and the fix.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

COARSE = 1e-4  # distance of a type's numbers at 1 above which the type has half precision
LEAST = -1e4  # a token with a lower log-probability was not sampled
# How far above 0 rounding may bring a log-probability.
ABOVE_ZERO = 1e-5
ABOVE_ZERO_IN_HALF = 1e-3
MOST_PADDED = 2**28  # numbers in a padded array; one long sequence among many short ones needs most
FLOATS = "give floating point, such as float32"
BINARY = "give booleans, or 0 and 1"
NUMBERS = "give numbers"
WHOLE_NUMBERS = "give whole numbers, those of the tokens in the vocabulary"
WHOLE = "give the number of tokens of each packed sequence, 0 or more"


class Padded(NamedTuple):
    """Numbers of the tokens of several sequences.

    `values`   [S, T], float64; NaN after the end of a sequence
    `lengths`  the number of tokens of each sequence, [S]
    `step`     distance of neighbouring numbers at 1 in the type in which they were given
    """

    values: np.ndarray
    lengths: np.ndarray
    step: float

    @property
    def is_token(self) -> np.ndarray:
        """Where there is a token, [S, T]."""
        return np.arange(self.values.shape[1]) < self.lengths[:, None]


class Tokens(NamedTuple):
    """What is known of the tokens of a dump. All arrays are [S, T].

    `learner`, `actor`  their log-probabilities, checked where `mask` is True
    `mask`              which tokens count
    `advantages`        0 where `mask` is False; None if there are none
    `numbers`           the tokens' numbers in the vocabulary; None if they are not given
    """

    learner: Padded
    actor: Padded
    mask: np.ndarray
    advantages: np.ndarray | None
    numbers: np.ndarray | None


def read_tokens(
    learner_logp, actor_logp, mask=None, advantages=None, lengths=None, tokens=None
) -> Tokens:
    """Checks the arrays of a dump, each in any of the three forms.

    Raises ValueError, with a message of one line, for arrays that cannot be log-probabilities of
    the same tokens.
    """
    lengths = as_lengths(lengths)
    learner = log_probabilities("learner_logp", learner_logp, lengths)
    actor = log_probabilities("actor_logp", actor_logp, lengths)
    check_same_tokens("learner_logp", learner, actor)
    used = as_mask(mask, actor, lengths)
    check_log_probabilities("learner_logp", learner, used)
    check_log_probabilities("actor_logp", actor, used)
    if advantages is not None:
        advantages = as_advantages(advantages, used, actor, lengths)
    numbers = None if tokens is None else as_token_numbers(tokens, actor, lengths)
    return Tokens(learner, actor, used, advantages, numbers)


def log_probabilities(name: str, x, lengths: np.ndarray | None) -> Padded:
    """Log-probabilities in any of the three forms.

    A single row is taken only with `lengths`: packed sequences that are taken for one would hide
    what differs between them.
    """
    rows, step = rows_of(name, x, lengths, "f", FLOATS)
    tokens = len(rows[0]) if len(rows) == 1 else 0
    if tokens and lengths is None:
        raise ValueError(
            f"{name} is a single row of {tokens:,} tokens: give lengths, the number of tokens of "
            f"each sequence that is packed in it, or lengths=[{tokens}] if it is one sequence, in "
            "which nothing can be said of sequences and positions"
        )
    return padded(name, rows, step)


def as_mask(mask, like: Padded, lengths: np.ndarray | None) -> np.ndarray:
    """The tokens that count, [S, T], from booleans or from zeros and ones of any type."""
    if mask is None:
        return like.is_token
    given = padded("mask", *rows_of("mask", mask, lengths, "biuf", BINARY))
    check_same_tokens("mask", given, like)
    is_wrong = like.is_token & (given.values != 0) & (given.values != 1)
    if is_wrong.any():
        i, j = np.argwhere(is_wrong)[0]
        raise ValueError(f"mask is {given.values[i, j]:g} at [{i}, {j}]: {BINARY}")
    used = given.values == 1
    if not used.any():
        raise ValueError("mask is False everywhere: give at least one token that counts")
    return used


def as_token_numbers(tokens, like: Padded, lengths: np.ndarray | None) -> np.ndarray:
    """The tokens' numbers in the vocabulary, [S, T]; 0 where there is no token."""
    given = padded("tokens", *rows_of("tokens", tokens, lengths, "iuf", WHOLE_NUMBERS))
    check_same_tokens("tokens", given, like)
    is_wrong = given.is_token & (given.values != np.floor(given.values))
    if is_wrong.any():
        i, j = np.argwhere(is_wrong)[0]
        raise ValueError(f"tokens is {given.values[i, j]:g} at [{i}, {j}]: {WHOLE_NUMBERS}")
    return np.where(given.is_token, given.values, 0.0)


def as_advantages(
    advantages, used: np.ndarray, like: Padded, lengths: np.ndarray | None
) -> np.ndarray:
    """The advantage of each token, [S, T]; 0 where `used` is False.

    They are given for each sequence, [S], or for each token in any of the three forms.
    """
    sequences = len(used)
    advantages = opened(advantages)
    if like.lengths.max() > 1 and are_columns(advantages):
        advantages = [row[0] for row in advantages]
    is_of_sequences = False
    if not is_list_of_rows(advantages):
        array, _ = array_of("advantages", advantages, "fiu", NUMBERS)
        is_of_sequences = array.shape == (sequences,)
        of_tokens = used.shape if lengths is None else (int(like.lengths.sum()),)
        if array.ndim < 2 and not is_of_sequences and array.shape != of_tokens:
            raise ValueError(
                f"advantages has the shape {array.shape}: give ({sequences},), one for each "
                f"sequence, or {of_tokens}"
            )
    if is_of_sequences:
        values = np.broadcast_to(array[:, None], used.shape)
    else:
        given = padded("advantages", *rows_of("advantages", advantages, lengths, "fiu", NUMBERS))
        check_same_tokens("advantages", given, like)
        values = given.values
    is_wrong = used & ~np.isfinite(values)
    if is_wrong.any():
        i, j = np.argwhere(is_wrong)[0]
        place = f"[{i}]" if is_of_sequences else f"[{i}, {j}]"
        raise ValueError(f"advantages is {values[i, j]} at {place}: give finite numbers")
    return np.where(used, values, 0.0)


def are_columns(x) -> bool:
    """Whether `x` is [sequences, 1], or a list of rows with one number each."""
    if isinstance(x, list | tuple):
        return bool(x) and all(np.shape(row) == (1,) for row in x)
    return x.ndim == 2 and x.shape[1] == 1


def as_lengths(lengths) -> np.ndarray | None:
    """The number of tokens of each packed sequence, as whole numbers."""
    if lengths is None:
        return None
    array, _ = array_of("lengths", lengths, "iuf", WHOLE)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"lengths has the shape {array.shape}: give [sequences]")
    is_whole = (array >= 0) & (array == np.floor(array)) & (array < 2**53)
    if not is_whole.all():
        i = int((~is_whole).argmax())
        raise ValueError(f"lengths is {array[i]:g} at [{i}]: {WHOLE}")
    return array.astype(np.int64)


def check_same_tokens(name: str, given: Padded, like: Padded) -> None:
    """Raises ValueError unless there are the same sequences, with as many tokens each."""
    if len(given.lengths) != len(like.lengths):
        raise ValueError(
            f"{name} has {len(given.lengths):,} sequences, and actor_logp has "
            f"{len(like.lengths):,}: give {name} of the same tokens"
        )
    differs = given.lengths != like.lengths
    if differs.any():
        i = int(differs.argmax())
        raise ValueError(
            f"{name} has {given.lengths[i]:,} tokens in sequence {i}, and actor_logp has "
            f"{like.lengths[i]:,}: give {name} of the same tokens"
        )


def check_log_probabilities(name: str, given: Padded, used: np.ndarray) -> None:
    """Raises ValueError if a number cannot be the log-probability of a sampled token.

    The error names the first such number, and how many there are.
    """
    is_half = given.step > COARSE
    most = ABOVE_ZERO_IN_HALF if is_half else ABOVE_ZERO
    logp = given.values
    is_possible = (logp <= most) & (logp >= LEAST)  # False for NaN
    is_wrong = used & ~is_possible
    if not is_wrong.any():
        return
    i, j = np.argwhere(is_wrong)[0]
    value = logp[i, j]
    if value == -math.inf:
        fix = "the token was sampled, so it has a probability; mask it if it does not count"
    elif math.isnan(value):
        fix = "mask it if it does not count"
    elif value < LEAST:
        fix = "mask fillers of tokens that do not count"
    else:
        fix = "give logarithms of probabilities, which are at most 0, and mask fillers"
    count = int(is_wrong.sum())
    others = f" ({count:,} of {int(used.sum()):,} tokens are impossible)" if count > 1 else ""
    raise ValueError(f"{name} is {value:.6g} at [{i}, {j}]: {fix}{others}")


# The three forms.


def rows_of(
    name: str, x, lengths: np.ndarray | None, kinds: str, fix: str
) -> tuple[list[np.ndarray], float]:
    """The numbers of each sequence, as float64, and the step of their type.

    `kinds` are the kinds of NumPy's types that `name` may have. `fix` is said of all others.
    """
    x = opened(x)
    if is_list_of_rows(x):
        rows = []
        step = 0.0
        for i, row in enumerate(x):
            array, step_of_row = array_of(f"{name}[{i}]", row, kinds, fix)
            if array.ndim != 1:
                raise ValueError(f"{name}[{i}] has the shape {array.shape}: give [tokens]")
            rows.append(array)
            step = max(step, step_of_row)
    else:
        array, step = array_of(name, x, kinds, fix)
        if array.ndim not in (1, 2):
            raise ValueError(f"{name} has the shape {array.shape}: give [sequences, tokens]")
        rows = [array] if array.ndim == 1 else list(array)
        if len(rows) > 1 and lengths is not None:
            raise ValueError(
                f"lengths is given, but {name} has the shape {array.shape}: lengths is for packed "
                "rows, [tokens]; for [sequences, tokens] give a mask"
            )
    if lengths is None:
        return rows, step
    if len(rows) == 1:
        return unpacked(name, rows[0], lengths), step
    if [len(row) for row in rows] != lengths.tolist():
        raise ValueError(f"lengths differs from the lengths of the lists in {name}: leave it out")
    return rows, step


def opened(x):
    """`x` as a list of its sequences, if it is another container of them."""
    if isinstance(x, torch.Tensor):
        return list(x.unbind()) if x.is_nested else x
    if isinstance(x, list | tuple):
        return x
    array = np.asarray(x)
    return list(array) if array.dtype == object and array.ndim == 1 else array


def is_list_of_rows(x) -> bool:
    """Whether `x` is a list that holds a list, an array or a tensor for each sequence."""
    if not isinstance(x, list | tuple):
        return False
    return any(isinstance(row, list | tuple) or getattr(row, "ndim", 0) > 0 for row in x)


def array_of(name: str, x, kinds: str, fix: str) -> tuple[np.ndarray, float]:
    """An array as float64, and the distance of its type's numbers at 1.

    Lists may also hold whole numbers, and None where there is no number.
    """
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        if x.dtype.is_floating_point:
            return x.double().numpy(), torch.finfo(x.dtype).eps
        kind = np.dtype(str(x.dtype).removeprefix("torch.")).kind
        if kind not in kinds:
            raise ValueError(f"{name} is {x.dtype}: {fix}")
        return x.numpy().astype(np.float64), 0.0
    if isinstance(x, list | tuple):
        x = [math.nan if entry is None else entry for entry in x]
        kinds += "iu"
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, RuntimeError) as error:  # NumPy says it in many ways
        raise ValueError(f"{name} is no array of numbers: {fix}") from error
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name} is {array.dtype}: {fix}")
    step = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 0.0
    return array.astype(np.float64), step


def unpacked(name: str, row: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The sequences that are packed in a row."""
    if lengths.sum() != len(row):
        fix = "give the number of tokens of each sequence"
        if lengths[-1] == len(row) and (np.diff(lengths) >= 0).all():
            fix = "these look cumulated, so give their differences, numpy.diff(cu_seqlens)"
        raise ValueError(
            f"lengths has the sum {lengths.sum():,}, but {name} has {len(row):,} tokens: {fix}"
        )
    return np.split(row, np.cumsum(lengths)[:-1])


def padded(name: str, rows: list[np.ndarray], step: float) -> Padded:
    """The rows of all sequences as one array."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    longest = int(lengths.max(initial=0))
    if longest == 0:
        raise ValueError(f"{name} has no tokens: give at least one token")
    if len(rows) * longest > MOST_PADDED:
        raise ValueError(
            f"{name} has {len(rows):,} sequences of up to {longest:,} tokens: give fewer, "
            f"at most {MOST_PADDED:,} tokens after padding to the longest"
        )
    values = np.full((len(rows), longest), math.nan)
    for i, row in enumerate(rows):
        values[i, : len(row)] = row
    return Padded(values, lengths, step)
