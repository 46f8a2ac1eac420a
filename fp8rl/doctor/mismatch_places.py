"""Symptoms that say at which tokens a gap is larger: sequences, positions, or a few tokens.

Rounding makes gaps of similar size in all sequences and at all positions. How similar, depends on
the dump: on its number of sequences and tokens, on how noisy log ratios are, and on how far they go
together along a sequence. So the limit of a symptom comes from the dump itself. The symptom is
measured again on permutations of the dump that destroy what it looks for and keep the rest:

- Do sequences differ? Pieces of sequences are exchanged at random between sequences.
- Do positions differ? They are counted from the first token that counts, and from the beginning of
  the row. Each sequence is rotated by a random number of tokens. Tokens that are neighbours stay
  neighbours.

A symptom is seen if it exceeds its mean over permutations by CHANCE standard deviations. A maximum
over positions is thus compared with the maximum over positions of each permutation. In large dumps
permutations show differences of a few percent, which rounding makes, too. So each symptom must
exceed a smallest size as well.

The size of a log ratio d is compared on a scale that few noisy tokens do not rule: log(0.3 + r),
where r is |d| over its mean at tokens of similar log-probability. A difference of 0.7 means twice
as large.
"""

from typing import NamedTuple

import numpy as np

from .mismatch_gap import TINY, Gap, Symptom, bins_of, mean_of_bin

FEW_SEQUENCES = 16  # with fewer sequences, sequences and positions are not compared
CHANCE = 5.0  # standard deviations over permutations; of a maximum, one in a thousand is beyond
# A few hundred permutations, or fewer for dumps of more than a million tokens.
MOST_PERMUTATIONS = 200
FEWEST_PERMUTATIONS = 50
TOKENS_TO_PERMUTE = 5 * 10**7
SMALLEST = 0.3  # of r, below which it does not matter how small a log ratio is
PIECES = 32  # pieces of the longest sequence, to be exchanged between sequences
FIRST = 4  # number of tokens at the beginning of a sequence in which padding is looked for
AFTER = 2  # positions from a position on, which are compared with
BEFORE = 4  # positions before it
FEW_TO_THIRD = 12  # tokens of a sequence of which a trend is measured
LARGE = 5.0  # how much larger than typical a log ratio is that belongs to a heavy tail
NEARLY_ALL = 0.8  # of the squared gap of a heavy tail
MATTERS = 0.2  # nats, which a heavy tail has at least: beyond that PPO clips
NEGLIGIBLE = 1e-4  # nats; smaller log ratios, such as float32 makes, are all alike
CAP = 3.0  # of log ratios over their typical size, where tokens seen before are compared
SHOWN = 5  # sequences that are named
STANDS_OUT = 0.7  # log of 2, by which the size in a sequence exceeds the median

# Differences of sizes (see above) that rounding may make in dumps of any length.
LEAST = {
    "at first": 0.4,
    "as a whole": 0.4,
    "one position": 0.85,
    "one column": 0.85,
    "early": 0.4,
    "first": 0.6,
    "last": 0.7,
    "trend": 0.6,
    "heavy tail": 5.0,  # root mean square over typical size
    "seen before": 0.35,  # typical sizes
}


class Sizes(NamedTuple):
    """How large the log ratios of a dump are, [S, T], with the tokens that count first.

    `typical`   |d| that is typical of the token's log-probability
    `scores`    log(0.3 + |d| / typical); 0 where there is no token
    """

    typical: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, gap: Gap) -> "Sizes":
        # A smaller |d| than the step of the file's type may have become 0 in the file.
        lost = np.maximum(gap.step * np.maximum(-gap.actor, 1.0), NEGLIGIBLE)
        size = np.abs(gap.log_ratio) + lost
        # The mean of roots: a few huge log ratios change it little.
        typical = np.square(mean_of_bin(np.sqrt(size), gap, bins_of(gap)))
        scores = np.log(SMALLEST + size / np.maximum(typical, TINY))
        return cls(typical, np.where(gap.mask, scores, 0.0))


def place_symptoms(gap: Gap, tokens: np.ndarray | None, columns: np.ndarray) -> list[Symptom]:
    """All symptoms of this file.

    `gap` is left-aligned, and so are the `tokens`' numbers and the `columns` in which the tokens
    are in the rows of the dump, [S, T].
    """
    sizes = Sizes.of(gap)
    symptoms = [heavy_tail(gap, sizes, columns)]
    if gap.sequences < FEW_SEQUENCES:
        return symptoms
    draw = np.random.default_rng(0)
    symptoms.append(some_sequences(gap, sizes.scores, draw))
    symptoms += PositionMeans.of(gap, sizes.scores, columns).symptoms(draw)
    if tokens is not None:
        symptoms.append(seen_before(gap, sizes, tokens))
    return symptoms


def permutations_of(tokens: int) -> int:
    """The number of permutations of a dump of so many tokens."""
    return int(np.clip(TOKENS_TO_PERMUTE // tokens, FEWEST_PERMUTATIONS, MOST_PERMUTATIONS))


def limit_of(permuted: np.ndarray, least: float) -> float:
    """The limit of a symptom, from its values in permuted dumps."""
    return max(float(permuted.mean() + CHANCE * permuted.std()), least)


def share_at(gap: Gap, affected: np.ndarray) -> float:
    """The share of the squared gap that is there only because `affected` tokens, [S, T], have
    larger log ratios than the others."""
    square = np.square(gap.log_ratio)
    total = square[gap.mask].sum()
    others = gap.mask & ~affected
    affected = gap.mask & affected
    usual = square[others].mean() if others.any() else 0.0
    return float(np.clip((square[affected] - usual).sum() / max(total, TINY**2), 0, 1))


# Do sequences differ?


def some_sequences(gap: Gap, scores: np.ndarray, draw: np.random.Generator) -> Symptom:
    """Do sequences differ in the size of their log ratios, in the first tokens or as a whole?"""
    piece = -(-gap.mask.shape[1] // PIECES)
    whole, limit = spread_between(scores, gap.mask, piece, LEAST["as a whole"], draw)
    first, limit_first = spread_between(
        scores[:, :FIRST], gap.mask[:, :FIRST], 1, LEAST["at first"], draw
    )
    at_first = first / limit_first > whole / limit
    shown = slice(0, FIRST) if at_first else slice(None)
    count = np.maximum(gap.mask[:, shown].sum(1), 1)
    mean = scores[:, shown].sum(1) / count
    is_sequence = gap.mask.any(1)
    median = np.median(mean[is_sequence])
    stands_out = is_sequence & (mean > median + STANDS_OUT)
    times = np.exp(np.quantile(mean[is_sequence], 0.95) - median)
    worst = np.argsort(-np.where(is_sequence, mean, -np.inf), kind="stable")[:SHOWN]
    says = (
        "sequences differ: for its log-probabilities, a log ratio is "
        f"{times:.1f} times as large in the worst twentieth as in the median"
        f"{', in the first tokens' if at_first else ''} (the largest are those of sequences "
        f"{', '.join(str(i) for i in worst)})"
    )
    return Symptom(
        name="sequences that differ",
        kind="padding",
        value=first if at_first else whole,
        limit=limit_first if at_first else limit,
        says=says,
        share=share_at(gap, stands_out[:, None] & gap.mask),
    )


def spread_between(
    scores: np.ndarray, mask: np.ndarray, piece: int, least: float, draw: np.random.Generator
) -> tuple[float, float]:
    """The standard deviation of scores between sequences, without noise, and its limit.

    The variance of sequences' means has a part that noise makes: the variance that is left when
    pieces of `piece` tokens are exchanged between sequences. What positions have in common is
    subtracted first.
    """
    starts = np.arange(0, mask.shape[1], piece)
    counts = np.add.reduceat(mask.astype(float), starts, axis=1)  # [S, P]
    sums = np.add.reduceat(scores, starts, axis=1)
    mean_of_position = sums.sum(0) / np.maximum(counts.sum(0), 1)
    sums = sums - counts * mean_of_position
    is_piece = counts > 0
    pieces = is_piece.sum(1)
    first_piece = np.cumsum(pieces[pieces > 0]) - pieces[pieces > 0]
    counts = counts[is_piece]
    sums = sums[is_piece]

    def variance(order: np.ndarray) -> float:
        total = np.add.reduceat(sums[order], first_piece)
        number = np.add.reduceat(counts[order], first_piece)
        return float((np.square(total) / number).sum() / number.sum())

    observed = variance(np.arange(len(sums)))
    permuted = np.array([variance(draw.permutation(len(sums))) for _ in range(MOST_PERMUTATIONS)])
    noise = permuted.mean()
    value = np.sqrt(max(observed - noise, 0.0))
    chance = np.sqrt(CHANCE * permuted.std())
    return float(value), max(float(chance), least)


# Do positions differ?


class PositionMeans(NamedTuple):
    """Scores whose means over sequences are compared between positions.

    `gap`      the left-aligned log-probabilities
    `scores`   [S, T], without the mean of each sequence
    `lengths`  the number of tokens of each sequence, [S]
    `enough`   the number of positions that FEW_SEQUENCES sequences have
    `columns`  the columns of the tokens that count, in the rows of the dump, [tokens]; None if all
               sequences begin in the same column
    """

    gap: Gap
    scores: np.ndarray
    lengths: np.ndarray
    enough: int
    columns: np.ndarray | None

    @classmethod
    def of(cls, gap: Gap, scores: np.ndarray, columns: np.ndarray) -> "PositionMeans":
        used = gap.mask.any(1)
        gap = Gap(gap.learner[used], gap.actor[used], gap.mask[used], gap.step)
        scores = scores[used]
        lengths = gap.mask.sum(1)
        centred = scores - scores.sum(1, keepdims=True) / lengths[:, None]
        scores = np.where(gap.mask, centred, 0.0).astype(np.float32)
        columns = columns[used]
        begins_alike = (columns[:, 0] == columns[0, 0]).all()
        return cls(
            gap,
            scores,
            lengths,
            enough=int((gap.mask.sum(0) >= FEW_SEQUENCES).sum()),
            columns=None if begins_alike else columns[gap.mask],
        )

    def symptoms(self, draw: np.random.Generator) -> list[Symptom]:
        """The symptoms of positions, each with its limit from rotated sequences."""
        observed = self.measure(self.scores)
        limits = {name: LEAST[name] for name in observed}
        if any(observed[name] > LEAST[name] for name in observed):
            # Otherwise no symptom is seen, whatever the permutations are.
            tokens = int(self.lengths.sum())
            permuted = [self.measure(self.rotated(draw)) for _ in range(permutations_of(tokens))]
            for name in observed:
                values = np.array([measured[name] for measured in permuted])
                limits[name] = limit_of(values, LEAST[name])
        functions = [self.one_position, self.early, self.first, self.last, self.trend]
        if self.columns is not None:
            functions.append(self.one_column)
        return [function(observed, limits) for function in functions]

    def rotated(self, draw: np.random.Generator) -> np.ndarray:
        """Each sequence begins at a random token, and its beginning follows its end."""
        length = self.lengths[:, None]
        start = draw.integers(0, self.lengths)[:, None]
        position = np.arange(self.scores.shape[1])[None] + start
        position -= np.where(position >= length, length, 0)
        position = np.where(self.gap.mask, position, 0)
        return np.where(self.gap.mask, np.take_along_axis(self.scores, position, 1), 0)

    def means(self, scores: np.ndarray) -> np.ndarray:
        """The mean at each position that enough sequences have."""
        count = self.gap.mask[:, : self.enough].sum(0)
        return scores[:, : self.enough].sum(0, dtype=np.float64) / count

    def means_of_columns(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The columns of the rows that enough sequences have, and the mean in each."""
        counts = np.bincount(self.columns)
        sums = np.bincount(self.columns, scores[self.gap.mask])
        enough = np.flatnonzero(counts >= FEW_SEQUENCES)
        return enough, sums[enough] / counts[enough]

    def median(self, positions: slice) -> float:
        """The median over sequences at these positions: a few sequences do not change it."""
        scores = self.scores[:, positions][self.gap.mask[:, positions]]
        return float(np.median(scores)) if len(scores) else 0.0

    def measure(self, scores: np.ndarray) -> dict[str, float]:
        """How far positions differ, in each way that bugs make them."""
        means = self.means(scores)
        rises = rises_of(means)
        early = means[:2].mean() - np.median(means) if self.enough >= 3 * FIRST else 0.0
        measured = {
            "one position": float(rises.max(initial=0.0)),
            "early": float(early),
            "first": float(means[0] - np.median(means)) if self.enough >= 3 * FIRST else 0.0,
            "last": self.last_over_others(scores),
            "trend": self.last_third_over_first(scores),
        }
        if self.columns is not None:
            _, means = self.means_of_columns(scores)
            measured["one column"] = float(rises_of(means).max(initial=0.0))
        return measured

    def last_over_others(self, scores: np.ndarray) -> float:
        """Scores of the last token of each sequence, less those of the tokens before it."""
        rows = np.flatnonzero(self.lengths > BEFORE)
        if len(rows) < FEW_SEQUENCES:
            return 0.0
        last = self.lengths[rows] - 1
        before = [scores[rows, last - k] for k in range(1, BEFORE + 1)]
        return float((scores[rows, last] - np.mean(before, axis=0)).mean())

    def last_third_over_first(self, scores: np.ndarray) -> float:
        """Scores in the last third of each sequence, less those in the first third."""
        third = np.where(self.lengths >= FEW_TO_THIRD, self.lengths // 3, 0)
        if (third > 0).sum() < FEW_SEQUENCES:
            return 0.0
        until = np.pad(np.cumsum(scores, axis=1, dtype=np.float64), ((0, 0), (1, 0)))
        rows = np.arange(len(scores))
        first = until[rows, third]
        last = until[rows, self.lengths] - until[rows, self.lengths - third]
        return float((last - first).sum() / third.sum())

    def one_position(self, observed: dict, limits: dict) -> Symptom:
        """Is there a position from which on log ratios are much larger?"""
        rises = rises_of(self.means(self.scores))
        position = int(rises.argmax()) + 2 if len(rises) else 0
        after = slice(position, position + AFTER)
        before = slice(max(position - BEFORE, 0), position)
        value = min(observed["one position"], self.median(after) - self.median(before))
        return Symptom(
            name="a position",
            kind="template",
            value=value,
            limit=limits["one position"],
            says=f"from token {position} on, log ratios are {np.exp(value):.1f} times as large as "
            "before",
            share=share_at(self.gap, np.arange(self.gap.mask.shape[1])[None] >= position),
        )

    def one_column(self, observed: dict, limits: dict) -> Symptom:
        """The same of columns, which count from the beginning of the row, prompts included."""
        columns, means = self.means_of_columns(self.scores)
        rises = rises_of(means)
        column = int(columns[rises.argmax() + 2]) if len(rises) else 0
        value = observed["one column"]
        of_tokens = np.full(self.gap.mask.shape, -1)
        of_tokens[self.gap.mask] = self.columns
        return Symptom(
            name="a column",
            kind="template",
            value=value,
            limit=limits["one column"],
            says=f"from column {column} of the rows on, prompts included, log ratios are "
            f"{np.exp(value):.1f} times as large as before",
            share=share_at(self.gap, of_tokens >= column),
        )

    def early(self, observed: dict, limits: dict) -> Symptom:
        """Are log ratios largest at the first tokens?"""
        value = min(observed["early"], self.median(slice(0, 2)) - self.median(slice(2, None)))
        means = self.means(self.scores)
        is_later = means < np.median(means) + value / 2
        end = int(is_later.argmax()) if is_later.any() else len(means)
        return Symptom(
            name="a large beginning",
            kind="beginning",
            value=value,
            limit=limits["early"],
            says=f"log ratios are {np.exp(value):.1f} times as large at the first tokens as later",
            share=share_at(self.gap, np.arange(self.gap.mask.shape[1])[None] < max(end, 2)),
        )

    def first(self, observed: dict, limits: dict) -> Symptom:
        """Are log ratios largest at the first token alone?"""
        value = min(observed["first"], self.median(slice(0, 1)) - self.median(slice(1, None)))
        is_first = np.arange(self.gap.mask.shape[1])[None] == 0
        return Symptom(
            name="the first token",
            kind="beginning",
            value=value,
            limit=limits["first"],
            says=f"log ratios are {np.exp(value):.1f} times as large at the first token as later",
            share=share_at(self.gap, np.broadcast_to(is_first, self.gap.mask.shape)),
        )

    def last(self, observed: dict, limits: dict) -> Symptom:
        """Are log ratios largest at the last token of each sequence?"""
        value = observed["last"]
        is_last = np.arange(self.gap.mask.shape[1])[None] == self.lengths[:, None] - 1
        return Symptom(
            name="the last token",
            kind="last token",
            value=value,
            limit=limits["last"],
            says=f"log ratios are {np.exp(value):.1f} times as large at the last token of "
            "sequences as just before",
            share=share_at(self.gap, is_last),
        )

    def trend(self, observed: dict, limits: dict) -> Symptom:
        """Do log ratios grow along the sequences?"""
        value = observed["trend"]
        is_late = np.arange(self.gap.mask.shape[1])[None] >= self.lengths[:, None] // 3
        return Symptom(
            name="a trend",
            kind="trend",
            value=value,
            limit=limits["trend"],
            says=f"log ratios are {np.exp(value):.1f} times as large in the last third of a "
            "sequence as in the first",
            share=share_at(self.gap, is_late),
        )


def rises_of(means: np.ndarray) -> np.ndarray:
    """How much larger the means of AFTER positions, from position 2 on, are than those before."""
    if len(means) < AFTER + 2:
        return np.zeros(0)
    until = np.pad(np.cumsum(means), (1, 0))  # the sum of the positions before each
    t = np.arange(2, len(means) - AFTER + 1)
    begin = np.maximum(t - BEFORE, 0)
    after = (until[t + AFTER] - until[t]) / AFTER
    before = (until[t] - until[begin]) / (t - begin)
    return after - before


# Do a few tokens differ?


def heavy_tail(gap: Gap, sizes: Sizes, columns: np.ndarray) -> Symptom:
    """Do a few tokens, anywhere, have most of the squared gap?

    Normal noise has a root mean square of 1.5 typical sizes, and Student's t with 3 degrees of
    freedom has 2.2. No permutation is needed: where the tokens are does not matter. Where logits
    are rounded to 16 bits, most log ratios may be 0 and a few are one step. Such steps do not
    matter. If nearly all of these tokens are the first or the last of their sequences, that is
    named.
    """
    size = np.abs(gap.log_ratio)
    typical = sizes.typical
    total = np.square(size[gap.mask]).sum()
    value = np.sqrt(total / max(np.square(typical[gap.mask]).sum(), TINY**2))
    is_large = gap.mask & (size > LARGE * typical)
    squares = -np.sort(-np.square(size[is_large]))
    of_large = squares.sum()
    fewest = int((np.cumsum(squares) < NEARLY_ALL * of_large).sum()) + 1
    share = of_large / max(total, TINY**2)
    if of_large < MATTERS**2 * is_large.sum():
        value = 0.0
    place = np.arange(gap.mask.shape[1])[None]
    last = gap.mask.sum(1)[:, None] - 1
    kind, where = "heavy tail", "here and there"
    for name, words, is_there in (
        ("beginning", "at the first token of sequences", place == 0),
        ("last token", "at the last token of sequences", place == last),
    ):
        if np.square(size[is_large & is_there]).sum() > NEARLY_ALL * of_large:
            kind, where = name, words
    return Symptom(
        name="a heavy tail",
        kind=kind,
        value=float(value),
        limit=LEAST["heavy tail"],
        says=f"{squares[:fewest].sum() / max(total, TINY**2):.0%} of the squared gap is at "
        f"{fewest:,} of {gap.mask.sum():,} tokens, {where}; the largest is token "
        f"{columns[gap.farthest]} of sequence {gap.farthest[0]}",
        share=float(share),
    )


def seen_before(gap: Gap, sizes: Sizes, tokens: np.ndarray) -> Symptom:
    """Are log ratios of tokens that the sequence had before higher or lower than those of new ones?

    Only tokens of similar log-probability are compared. The limit is CHANCE standard errors over
    sequences.
    """
    seen = is_repeated(tokens, gap.mask)
    relative = np.clip(gap.log_ratio / np.maximum(sizes.typical, TINY), -CAP, CAP)
    bins = bins_of(gap)
    relative = np.where(gap.mask, relative - mean_of_bin(relative, gap, bins), 0.0)
    weight = np.where(gap.mask, seen - mean_of_bin(seen.astype(float), gap, bins), 0.0)
    total = np.square(weight).sum()
    difference = (weight * relative).sum() / max(total, TINY)
    rest = weight * (relative - weight * difference)
    error = np.sqrt(np.square(rest.sum(1)).sum()) / max(total, TINY)
    explained = 0.0
    for group in (gap.mask & seen, gap.mask & ~seen):
        if group.any():
            explained += group.sum() * gap.log_ratio[group].mean() ** 2
    side = "higher" if difference > 0 else "lower"
    return Symptom(
        name="tokens seen before",
        kind="repetition",
        value=float(abs(difference)),
        limit=max(float(CHANCE * error), LEAST["seen before"]),
        says=f"where a token occurs again in its sequence, the learner's log-probability is "
        f"{side}, by {abs(difference):.1f} of the typical log ratio",
        share=float(explained / max(np.square(gap.log_ratio[gap.mask]).sum(), TINY**2)),
    )


def is_repeated(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Where a token has the number of a token before it in the same sequence, [S, T]."""
    rows, places = np.nonzero(mask)
    numbers = tokens[mask]
    # In order of sequence, number and place: all but the first of each pair are repeated.
    order = np.lexsort((places, numbers, rows))
    is_same = (np.diff(rows[order]) == 0) & (np.diff(numbers[order]) == 0)
    repeated = np.zeros_like(mask)
    later = order[1:][is_same]
    repeated[rows[later], places[later]] = True
    return repeated
