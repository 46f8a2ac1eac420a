"""Finds tokens whose log-probability is a filler: a constant that stands for "there is none".

A trainer counts tokens that the engine did not sample, such as an appended end token, a tool's
reply, a prompt or padding. The engine has no log-probability of them, and the file has 0 or another
constant in its place. A constant alone is no sign: of a token that is certain, both programs say 0.
So a constant counts as a filler where the other program clearly says something else, or where it
fills the end of sequences.
"""

from typing import NamedTuple

import numpy as np

ZERO = 1e-6  # a log-probability of this size is 0
CLEAR = 0.7  # nats: the other program gives the token less than half of the constant's probability
CERTAIN = 0.01  # nats below 0, down to which both programs are certain of a token
# Of the zeros of which only one program is certain, this share must differ clearly. It is small
# where an actor samples by top-p, and a single token is left to sample.
SOME = 0.2
CLEAR_AT_END = 0.1  # the same for the first or last token of nearly every sequence
FEW = 4  # tokens of this number may be chance
MUCH_MORE = 2.0  # how much more often such tokens must differ than all others
SPIKE = 5  # how much more often a constant must occur than the numbers beside it
LONG = 16  # tokens of padding at one end of a sequence, in the tenth of them with the most
LARGE_SHARE = 0.05  # of all tokens that padding must have
FEW_PERCENT = 0.02  # of all tokens that a program which is certain of all of them must miss
NEARLY = 0.9  # share that stands for all


class Fillers(NamedTuple):
    """Tokens of one program whose log-probability is a filler.

    `tokens`     where they are, [S, T]
    `is_greedy`  whether nearly all of the actor's log-probabilities are 0
    `says`       which tokens they are, and what to do
    """

    tokens: np.ndarray
    is_greedy: bool
    says: str


def find_fillers(learner: np.ndarray, actor: np.ndarray, mask: np.ndarray) -> Fillers | None:
    """The tokens of one program that are fillers, or None. All arrays are [S, T].

    The tokens that count are at the beginning of each sequence. If both programs have fillers, the
    actor's are returned, because it is the actor that samples.
    """
    candidates = (
        ("the actor's", constants(actor, learner, mask), actor),
        ("the learner's", constants(learner, actor, mask), learner),
        ("both programs'", padding(learner, actor, mask), actor),
    )
    for whose, tokens, logp in candidates:
        if not tokens.any():
            continue
        where, fix = whereabouts(tokens, mask)
        numbers, counts = np.unique(logp[tokens], return_counts=True)
        constant = numbers[counts.argmax()]
        if abs(constant) <= ZERO:
            constant = 0.0
        says = f"{whose} log-probabilities are exactly {constant:g} at {where}. {fix}"
        is_everywhere = tokens.sum() >= NEARLY * mask.sum()
        return Fillers(tokens, is_everywhere and constant == 0 and logp is actor, says)
    return None


def constants(logp: np.ndarray, other: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Tokens at which `logp` is a constant that the other program clearly contradicts, [S, T]."""
    is_zero = mask & (np.abs(logp) <= ZERO)
    differs = mask & (np.abs(logp - other) > CLEAR)
    found = zeros_in_every_sequence(is_zero, other, mask)
    clear_zeros = is_zero & differs
    is_rare_elsewhere = rate(differs, is_zero) > MUCH_MORE * rate(differs, mask & ~is_zero)
    is_most = rate(differs, is_zero & (other < -CERTAIN)) > SOME
    if clear_zeros.sum() >= FEW and is_rare_elsewhere and is_most:
        found |= runs_with(is_zero, clear_zeros)
    elif is_zero.sum() >= NEARLY * mask.sum():
        # A policy that is nearly as certain as a greedy one differs less.
        is_contradicted = is_zero & (other < -CLEAR_AT_END)
        if is_contradicted.sum() >= max(FEW, FEW_PERCENT * mask.sum()):
            found |= is_zero
    for number in repeated_numbers(logp[mask & ~is_zero]):
        tokens = mask & (logp == number)
        seen = other[tokens & differs]
        is_common = len(seen) > max(FEW, tokens.sum() / 2)
        # The same context gives the same two log-probabilities again. A filler stands for many.
        varies = len(np.unique(seen)) > FEW
        if (
            is_common
            and varies
            and rate(differs, tokens) > MUCH_MORE * rate(differs, mask & ~tokens)
        ):
            found |= tokens
    return found


def zeros_in_every_sequence(is_zero: np.ndarray, other: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Zeros at the last token of most sequences, or at the first, that are rare elsewhere, [S, T].

    The other program often expects such a token, so a smaller difference is enough.
    """
    is_clear = is_zero & (other < -CLEAR_AT_END)
    found = np.zeros_like(mask)
    last = mask.sum(1)[:, None] - 1
    place = np.arange(mask.shape[1])
    for is_place in (mask & (place == last), mask & (place == 0)):
        tokens = is_clear & is_place
        elsewhere = rate(is_clear, mask & ~is_place)
        if tokens.sum() >= FEW and rate(is_clear, is_place) > max(0.5, 5 * elsewhere):
            found |= tokens
    return found


def repeated_numbers(logp: np.ndarray) -> np.ndarray:
    """Whole and half numbers that occur far more often than the numbers beside them in order.

    In a file of few bits every number occurs often, and so do its neighbours. Numbers such as
    log 1/2 occur where coarse arithmetic gives several tokens the same logit.
    """
    numbers, counts = np.unique(logp, return_counts=True)
    beside = np.pad(counts, 2)
    neighbours = np.max([beside[:-4], beside[1:-3], beside[3:-1], beside[4:]], axis=0)
    is_spike = (counts > FEW) & (counts >= SPIKE * np.maximum(neighbours, 1))
    is_spike &= 2 * numbers == np.round(2 * numbers)
    order = np.argsort(-counts[is_spike], kind="stable")
    return numbers[is_spike][order[:FEW]]


def padding(learner: np.ndarray, actor: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Tokens at one end of the sequences that are the same constants in both programs, [S, T]."""
    reverse = reversed_rows(mask)
    for order in (np.arange(mask.shape[1])[None].repeat(len(mask), 0), reverse):
        tokens = beginning(
            np.take_along_axis(learner, order, 1), np.take_along_axis(actor, order, 1), mask
        )
        if tokens.any():
            found = np.zeros_like(mask)
            np.put_along_axis(found, order, tokens, 1)
            return found
    return np.zeros_like(mask)


def reversed_rows(mask: np.ndarray) -> np.ndarray:
    """Indices that reverse the tokens that count of each row and leave the others, [S, T]."""
    place = np.arange(mask.shape[1])[None]
    last = mask.sum(1)[:, None] - 1
    return np.where(mask, last - place, place)


def beginning(learner: np.ndarray, actor: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Tokens at the beginning that are the same constants in both programs, if too many, [S, T]."""
    pairs = np.stack((learner[:, 0], actor[:, 0]), 1)[mask[:, 0]]
    values, counts = np.unique(pairs, axis=0, return_counts=True)
    most_common = values[counts.argmax()]
    is_same = mask & (learner == most_common[0]) & (actor == most_common[1])
    run = np.logical_and.accumulate(is_same, axis=1)
    lengths = run.sum(1)[mask[:, 0]]
    # Runs at one end have this mean length if the pair is as frequent there as elsewhere.
    share = rate(is_same, mask & ~run)
    expected = share / max(1 - share, 1e-9)
    is_much = LARGE_SHARE < run.sum() / mask.sum() < NEARLY
    is_long = np.quantile(lengths, 0.9) >= LONG and lengths.mean() > 5 * expected + 1
    return run if is_much and is_long else np.zeros_like(mask)


def rate(hits: np.ndarray, among: np.ndarray) -> float:
    """The share of the tokens `among` that are `hits`; 0 if there are none."""
    return float(hits[among].mean()) if among.any() else 0.0


def runs_with(inside: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """The runs of tokens `inside` that contain a marked token, [S, T]."""
    starts = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    number = np.cumsum(starts.ravel()).reshape(inside.shape)
    wanted = np.unique(number[marked])
    return inside & np.isin(number, wanted)


def whereabouts(tokens: np.ndarray, mask: np.ndarray) -> tuple[str, str]:
    """Which tokens these are, in words, and what to do about them."""
    count = int(tokens.sum())
    rows = int(tokens.any(1).sum())
    sequences = int(mask.any(1).sum())
    share = count / mask.sum()
    length = mask.sum(1)[:, None]
    place = np.arange(mask.shape[1])
    if share >= NEARLY:
        text = "all" if count == mask.sum() else f"{share:.0%} of the"
        return (
            f"{text} tokens",
            "An actor that is greedy (temperature 0) reports this, and so does a program that has "
            "not recorded them.",
        )
    is_whole = (tokens | ~mask).all(1)[:, None]
    if tokens[is_whole[:, 0]].sum() >= NEARLY * count:
        return (
            f"all tokens of {int(tokens[is_whole[:, 0]].any(1).sum())} of {sequences} sequences",
            "These are greedy (temperature 0), or they were not recorded: mask them.",
        )
    of_sequences = f"{rows} of {sequences} sequences"
    if tokens[place == length - 1].sum() >= NEARLY * count:
        return (
            f"the last token of {of_sequences}",
            "An end token was appended that was not sampled: mask it.",
        )
    if tokens[:, 0].sum() >= NEARLY * count:
        return f"the first token of {of_sequences}", "It was not sampled: mask it."
    mean = count / rows
    is_at_end = np.logical_and.accumulate((tokens | ~mask)[:, ::-1], axis=1)[:, ::-1]
    if (tokens & is_at_end).sum() >= NEARLY * count:
        return (
            f"the last {mean:.0f} tokens (on average) of {of_sequences}",
            "This is padding that counts: give a mask that leaves it out.",
        )
    is_at_beginning = np.logical_and.accumulate(tokens, axis=1)
    if is_at_beginning.sum() >= NEARLY * count:
        return (
            f"the first {mean:.0f} tokens (on average) of {of_sequences}",
            "This is a prompt or padding that counts: give a mask that leaves it out.",
        )
    runs = int((tokens & ~np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]).sum())
    if count >= 3 * runs:
        return (
            f"{share:.1%} of the tokens, in {runs:,} runs of about {count / runs:.0f} tokens in "
            f"{of_sequences}",
            "These were not sampled, as replies of a tool are not: mask them.",
        )
    return (
        f"{share:.1%} of the tokens, here and there in {of_sequences}",
        "These were not sampled, or were not recorded: mask them.",
    )
