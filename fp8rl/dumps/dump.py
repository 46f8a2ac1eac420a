"""Takes log-probabilities as trainers keep them, from a file or in arrays, and checks them.

A dump has the learner's and the actor's log-probabilities, and perhaps a mask, advantages, lengths
and the tokens' numbers, under the names of a stack. Each is in one of three forms:

- padded: an array or a tensor [sequences, tokens], with a mask of the tokens that count;
- ragged: a list with a list, an array or a tensor [tokens] for each sequence;
- packed: an array or a tensor [tokens] of all sequences, one after another, with the number of
  tokens of each (`lengths`).

Three kinds of files are read, by their ending:

- .npz, which numpy.savez writes;
- .pt and .pth, which torch.save writes: a dict of tensors, or a list of such dicts;
- .jsonl, with a sequence or a batch on each line.

Nothing in a file is executed: NumPy and PyTorch load no pickles here. What else a dump holds is
left alone. Every error is a ValueError of one line that names the array and the fix.
"""

import functools
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

LEARNER = "learner_logp"
ACTOR = "actor_logp"
# Names of an array: here, in TRL and ms-swift, verl, OpenRLHF and SkyRL, NeMo-RL, slime and
# prime-rl. AReaL's are not among them, because its two arrays are not of the same tokens before it
# has shifted one of them.
NAMES = {
    LEARNER: (
        "learner_logp",
        "old_per_token_logps",
        "old_log_probs",
        "action_log_probs",
        "prev_logprobs",
        "log_probs",
        "trainer_logprobs",
    ),
    ACTOR: (
        "actor_logp",
        "sampling_per_token_logps",
        "rollout_per_token_logps",
        "rollout_log_probs",
        "rollout_logprobs",
        "generation_logprobs",
        "inference_logprobs",
    ),
    "advantages": ("advantages",),
    "lengths": ("lengths",),
    "tokens": ("tokens", "completion_ids", "responses"),
    "mask": (
        "mask",
        "completion_mask",
        "tool_mask",
        "response_mask",
        "action_mask",
        "token_mask",
        "sample_mask",
        "token_loss_mask",  # so NeMo-RL calls them in the files that it writes
        "sample_loss_mask",
        "loss_mask",
        "loss_masks",
    ),
}
KNOWN = {name for names in NAMES.values() for name in names}
# The kinds of NumPy's types that an array may have, and what is said of all others.
KINDS = {
    LEARNER: ("f", "give floating point, such as float32"),
    ACTOR: ("f", "give floating point, such as float32"),
    "advantages": ("iuf", "give numbers"),
    "lengths": ("iuf", "give the number of tokens of each packed sequence, 0 or more"),
    "tokens": ("iuf", "give whole numbers, those of the tokens in the vocabulary"),
    "mask": ("biuf", "give booleans, or 0 and 1"),
}
HOW = (
    "save arrays by numpy.savez, a dict of tensors by torch.save, or a JSON object on each line, "
    "with the names that your stack gives them"
)
COARSE = 1e-4  # distance of a type's numbers at 1 above which the type has half precision
TINY = 1e-12  # a standard deviation below this is only the error of arithmetic in float64
# Log ratio to which larger ones are limited, in all numbers alike: so sums of squares of ratios
# stay finite.
LARGEST = 300.0
AT_ONCE = 2**18  # tokens of which arrays are made where not all are needed at once


def pieces(*arrays: np.ndarray) -> Iterable[tuple[np.ndarray, ...]]:
    """Arrays in pieces along their first axis, of which those of the first have few tokens."""
    count = min(len(arrays[0]), arrays[0].size // AT_ONCE + 1)
    return zip(*(np.array_split(x, count) for x in arrays), strict=True)


@dataclass(frozen=True, eq=False)
class Gap:
    """The learner's and the actor's log-probabilities of the same tokens, each sequence from 0 on.

    pi is the learner's policy and mu the actor's, which sampled the tokens:

        ratio = pi / mu          d = log ratio = learner - actor

    All arrays are [S, T]; those of `flat` are [tokens]. The tokens that count come first in each
    row, for example answers without their prompts. T is the number of them in the longest sequence.

    `learner`, `actor`  float32, or float64 if a program gave that, and 0 where `mask` is False
    `mask`              which tokens count
    `step`              distance of neighbouring numbers at 1 in the type in which the
                        log-probabilities were saved, or of the decimals that they were rounded to
    `advantages`        of the tokens; None if there are none
    `tokens`            their numbers in the vocabulary; None if they are not given
    `columns`           the tokens' columns in the rows of the dump
    `unscored`          the number of tokens that are left out, because a program has NaN there
    """

    learner: np.ndarray
    actor: np.ndarray
    mask: np.ndarray
    step: float
    advantages: np.ndarray | None = None
    tokens: np.ndarray | None = None
    columns: np.ndarray | None = None
    unscored: int = 0

    def aligned(self) -> "Gap":
        """The same, with the tokens that count first in each row."""
        longest = int(self.mask.sum(1).max())
        if longest == self.mask.shape[1] and self.mask.all():
            return self
        order = np.argsort(~self.mask, axis=1, kind="stable")[:, :longest]
        names = ("learner", "actor", "mask", "advantages", "tokens", "columns")
        arrays = {name: getattr(self, name) for name in names}
        moved = {k: np.take_along_axis(x, order, 1) for k, x in arrays.items() if x is not None}
        return replace(self, **moved)

    # log_ratio, difference and excess are computed anew each time: they would take most of the
    # memory, and take little time

    @property
    def log_ratio(self) -> np.ndarray:
        """log pi / mu, float64 [S, T]."""
        return np.subtract(self.learner, self.actor, dtype=np.float64)

    @property
    def difference(self) -> np.ndarray:
        """log pi / mu in the type of the log-probabilities, [S, T]."""
        return self.learner - self.actor

    @property
    def excess(self) -> np.ndarray:
        """pi / mu - 1, float64 [S, T], exact where it is tiny and finite where it is huge."""
        return np.expm1(np.minimum(self.log_ratio, LARGEST))

    def among(self, x: np.ndarray) -> np.ndarray:
        """The numbers of an array [S, T] at the tokens that count, [tokens]."""
        return x.ravel() if self.mask.all() else x[self.mask]

    @functools.cached_property
    def flat(self) -> "Gap":
        """The tokens that count alone, in arrays [tokens]."""
        return Gap(*map(self.among, (self.learner, self.actor, self.mask)), self.step)

    @property
    def rms(self) -> float:
        """The root mean square of the log ratios."""
        return np.sqrt(np.square(self.flat.log_ratio).mean())

    @property
    def sequences(self) -> int:
        """The number of sequences with a token that counts."""
        return int(self.mask.any(1).sum())

    @property
    def farthest(self) -> tuple[int, int]:
        """The row and the column of the token whose log ratio is largest in size."""
        row, place = np.unravel_index(np.abs(self.log_ratio).argmax(), self.mask.shape)
        return int(row), int(self.columns[row, place])


# Files


def read_dump(path: Path) -> dict:
    """The arrays of a dump, as arguments of `mismatch`.

    They are learner_logp and actor_logp, and mask, advantages, lengths and tokens if the file has
    them.
    Raises ValueError, with a message of one line, for a file that is not such a dump.
    """
    subject = f"dump is {path}"
    readers = {
        ".npz": read_npz,
        ".pt": read_torch_file,
        ".pth": read_torch_file,
        ".jsonl": read_json_lines,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{subject}: use a file that ends with {', '.join(readers)}; {HOW}")
    try:
        content = reader(path)
    except Exception as error:  # whatever NumPy, PyTorch and json raise for what they cannot read
        reason = getattr(error, "strerror", None) or f"{error or type(error).__name__}"
        if "pickle" in f"{type(error)} {reason}":
            reason = "it holds an object, not numbers alone"
        line = reason.splitlines()[0]
        raise ValueError(f"{subject}, which cannot be read: {line}; {HOW}") from error
    if isinstance(content, list):
        return joined(subject, content)
    return take_arrays(subject, content)


def read_npz(path: Path) -> dict:
    """The arrays of a file of numpy.savez. Others than those that are needed are not read."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] if name in KNOWN else "" for name in file.files}


def read_torch_file(path: Path) -> Mapping | list:
    """What a file of torch.save holds: tensors, or a list of records.

    The file is mapped into memory, so tensors that are not needed, such as logits, are not read.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no complete file of torch.save")
    content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    if isinstance(content, list | tuple) and all(isinstance(x, dict) for x in content):
        return [(f"item {i}", record) for i, record in enumerate(content)]
    content = dict(content.items())
    inner = [x for x in content.values() if isinstance(x, dict)]
    with_learner = [x for x in (content, *inner) if not x.keys().isdisjoint(NAMES[LEARNER])]
    return with_learner[0] if with_learner else content


def read_json_lines(path: Path) -> list[tuple[str, Mapping]]:
    """The records of a file with a JSON object on each line."""
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                records.append((f"line {number}", dict(json.loads(line).items())))
            except (ValueError, RecursionError, AttributeError) as error:
                raise ValueError(f"line {number} is no complete JSON object") from error
    return records


def joined(subject: str, records: list[tuple[str, Mapping]]) -> dict[str, list]:
    """The arrays of records, with a row for each sequence.

    A record has the arrays of one sequence or of a batch. An advantage is a number for each token,
    or one for each sequence.
    """
    rows = {}
    for where, record in records:
        arrays = take_arrays(f"{subject}, {where}", record)
        lengths = as_lengths(arrays.pop("lengths", None))
        if rows and rows.keys() != arrays.keys():
            raise ValueError(
                f"{subject}, {where}, which has not the names of the first: {', '.join(rows)}"
            )
        is_batch = lengths is not None or depth_of(arrays[ACTOR]) > 1
        for role, x in arrays.items():
            rows.setdefault(role, []).extend(rows_in(role, x, is_batch, lengths))
    if not rows:
        raise ValueError(f"{subject}, which has no records; {HOW}")
    return rows


def rows_in(role: str, x, is_batch: bool, lengths: np.ndarray | None) -> list:
    """The rows of one array of a record, or one advantage for each sequence."""
    if role == "advantages" and depth_of(x) <= is_batch:
        values, _ = array_of(role, x)
        if lengths is None or values.size == len(lengths):
            return values.ravel().tolist()
    if lengths is not None:
        return rows_of(role, x, lengths)[0]
    return list(opened(x)) if depth_of(x) > 1 else [x]


# Names


def arrays_of(learner_logp, **beside) -> dict:
    """The arrays of a dump, under the names that they have here.

    `learner_logp` may be a dict that holds the others under the names of a stack.
    """
    beside = {name: x for name, x in beside.items() if x is not None}
    if not hasattr(learner_logp, "keys"):
        if ACTOR not in beside:
            raise ValueError(
                "actor_logp is missing: give it, or a dict that has both log-probabilities"
            )
        return {LEARNER: learner_logp, **beside}
    arrays = take_arrays("learner_logp is a dict", learner_logp)
    for name in beside:
        if name in arrays:
            raise ValueError(f"{name} is given twice, in the dict and beside it: give it once")
    return arrays | beside


def take_arrays(subject: str, content: Mapping) -> dict:
    """The arrays of a dump, under the names that they have here.

    `subject` begins the messages, such as "dump is dump.npz". Entries that are None are left out,
    and so are texts. Raises ValueError if a log-probability is missing, or if it is not clear which
    array is meant.
    """
    # What is not needed may take long to read, as in a file that numpy.load has opened.
    keys = content.keys()
    names = [x for x in keys if x not in KNOWN or not isinstance(content[x], str | None)]
    listed = ", ".join(ascii(name).strip("'") for name in names[:24]) or "nothing in it"
    arrays = {}
    for role, known in NAMES.items():
        present = [name for name in known if name in names]
        if role == "mask" and len(present) > 1:
            arrays[role] = functools.reduce(both_masks, [(x, content[x]) for x in present])[1]
        elif len(present) > 1:
            raise ValueError(
                f"{subject}, which has {present[0]} and {present[-1]}: keep one; there is {listed}"
            )
        elif present:
            arrays[role] = content[present[0]]
        elif role in (LEARNER, ACTOR):
            others = ", ".join(known[1:])
            raise ValueError(f"{subject}, which has no {role} (or {others}): there is {listed}")
    # Those of stacks may be of other tokens, such as those with a prompt
    are_of_a_stack = "tokens" in arrays and "tokens" not in names
    if are_of_a_stack and sizes_of(arrays["tokens"]) != sizes_of(arrays[ACTOR]):
        del arrays["tokens"]
    return arrays


def sizes_of(x) -> list | tuple:
    """The shape of an array, or of each row in a list of rows."""
    x = opened(x)
    return [np.shape(row) for row in x] if isinstance(x, list | tuple) else tuple(x.shape)


def both_masks(one: tuple, other: tuple) -> tuple[str, list]:
    """A mask of the tokens that are in both masks, one of which may be of sequences.

    Masks are pairs of a name and an array.
    """
    (first, x), (second, y) = one, other
    try:
        rows = [
            array_of("mask", a, first)[0] * array_of("mask", b, second)[0]
            for a, b in zip(opened(x), opened(y), strict=True)
        ]
    except ValueError as error:
        raise ValueError(
            f"{second} has other sizes than {first}: give masks of the same tokens"
        ) from error
    return first, rows


# Arrays


def gap_of(learner_logp, actor_logp, mask=None, advantages=None, lengths=None, tokens=None) -> Gap:
    """Checks the arrays of a dump, each in any of the three forms.

    Raises ValueError, with a message of one line, for arrays that cannot be log-probabilities of
    the same tokens.
    """
    lengths = as_lengths(lengths)
    learner, step_of_learner = rows_of(LEARNER, learner_logp, lengths)
    if not any(len(row) for row in learner):
        raise ValueError(f"{LEARNER} has no tokens: give at least one token")
    if len(learner) == 1 and lengths is None:
        # Packed sequences that are taken for one would hide what differs between them.
        raise ValueError(
            f"{LEARNER} is a single row of {len(learner[0]):,} tokens: give lengths, the number of "
            "tokens of each sequence that is packed in it, or "
            f"lengths=[{len(learner[0])}] if it is one sequence, in which nothing can be said of "
            "sequences and positions"
        )
    actor, step_of_actor = rows_of(ACTOR, actor_logp, lengths)
    counts = np.array([len(row) for row in actor])
    learner = padded(LEARNER, learner, counts)
    actor = padded(ACTOR, actor, counts)
    is_token = np.arange(counts.max()) < counts[:, None]
    is_used = is_token
    if mask is not None:
        values = padded("mask", rows_of("mask", mask, lengths)[0], counts)
        check("mask", values, is_token & (values != 0) & (values != 1))
        is_used = values == 1
    if not is_used.any():
        raise ValueError("mask is False everywhere: give at least one token that counts")
    # So stacks mark tokens whose log-probability the engine did not return
    is_unscored = is_used & (np.isnan(learner) | np.isnan(actor))
    is_used = is_used & ~is_unscored
    if not is_used.any():
        raise ValueError(f"{LEARNER} or {ACTOR} is NaN at each token that counts: give numbers")
    check_log_probabilities(LEARNER, learner, is_used, step_of_learner)
    check_log_probabilities(ACTOR, actor, is_used, step_of_actor)
    if advantages is not None:
        values = padded(
            "advantages", rows_of_advantages(advantages, counts, is_used, lengths), counts
        )
        check("advantages", values, is_used & ~np.isfinite(values), "give finite numbers")
        advantages = np.where(is_used, values, 0.0).astype(np.float32)
    if tokens is not None:
        values = padded("tokens", rows_of("tokens", tokens, lengths)[0], counts)
        check("tokens", values, is_token & (values != np.floor(values)))
        tokens = np.where(is_token, values, 0.0)
        tokens = tokens.astype(np.int32 if np.abs(tokens).max() < 2**31 else np.int64)
    return Gap(
        np.where(is_used, learner, np.zeros_like(learner)),
        np.where(is_used, actor, np.zeros_like(actor)),
        is_used,
        # Policies compute in float32 at best
        max(
            step_of_learner,
            step_of_actor,
            *(grid_of(logp[is_used]) for logp in (learner, actor)),
            2**-23,
        ),
        advantages,
        tokens,
        np.broadcast_to(np.arange(counts.max(), dtype=np.int32), is_used.shape),
        int(is_unscored.sum()),
    ).aligned()


def grid_of(values: np.ndarray) -> float:
    """The distance of the numbers' grid, if they were rounded to 2 to 4 decimals; otherwise 0."""
    for distance in (1e-2, 1e-3, 1e-4):
        is_on_grid = np.abs(values / distance - np.round(values / distance)) < 0.05
        # A few different numbers are on a grid by chance
        if is_on_grid.all() and len(np.unique(values)) > 16:
            return distance
    return 0.0


def rows_of_advantages(
    x, counts: np.ndarray, is_used: np.ndarray, lengths: np.ndarray | None
) -> list[np.ndarray]:
    """The advantage of each token of each sequence.

    They are given for each sequence, [S] or [S, 1], or for each token in any of the three forms.
    """
    x = opened(x)
    if counts.max() > 1 and depth_of(x) == 2 and all(len(row) == 1 for row in x):
        x = [row[0] for row in x]
    if depth_of(x) < 2:
        values, _ = array_of("advantages", x)
        of_tokens = (len(counts), int(counts.max())) if lengths is None else (int(counts.sum()),)
        if values.shape == counts.shape:
            is_wrong = is_used.any(1) & ~np.isfinite(values)
            check("advantages", values, is_wrong, "give finite numbers")
            return np.split(np.repeat(values, counts), np.cumsum(counts)[:-1])
        if values.shape != of_tokens:
            raise ValueError(
                f"advantages has the shape {values.shape}: give ({len(counts)},), one for each "
                f"sequence, or {of_tokens}"
            )
    return rows_of("advantages", x, lengths)[0]


def as_lengths(lengths) -> np.ndarray | None:
    """The number of tokens of each packed sequence, as whole numbers."""
    if lengths is None:
        return None
    array, _ = array_of("lengths", lengths)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"lengths has the shape {array.shape}: give [sequences]")
    is_whole = (array >= 0) & (array == np.floor(array)) & (array < 2**53)
    check("lengths", array, ~is_whole)
    return array.astype(np.int64)


def check(role: str, values: np.ndarray, is_wrong: np.ndarray, fix: str = "") -> None:
    """Raises ValueError for the first number that is wrong."""
    if is_wrong.any():
        place = np.argwhere(is_wrong)[0].tolist()
        value = values[tuple(place)]
        raise ValueError(f"{role} is {value:.6g} at {place}: {fix or KINDS[role][1]}")


def check_log_probabilities(
    role: str, values: np.ndarray, is_used: np.ndarray, step: float
) -> None:
    """Raises ValueError if a number cannot be the log-probability of a sampled token."""
    most = 1e-3 if step > COARSE else 1e-5  # so far above 0 may rounding bring it
    # A token with a log-probability below -1e4 was not sampled.
    is_wrong = is_used & ~((values <= most) & (values >= -1e4))
    fix = "mask fillers and other tokens that do not count"
    if (is_used & (values > most)).any():
        fix = "give logarithms of probabilities, which are at most 0, and mask fillers"
    if is_wrong.sum() > 1:
        fix += f" ({is_wrong.sum():,} of {is_used.sum():,} tokens are impossible)"
    check(role, values, is_wrong, fix)


# The three forms


def padded(role: str, rows: list[np.ndarray], counts: np.ndarray) -> np.ndarray:
    """The rows as one array [S, T], with NaN after the end of each.

    Raises ValueError unless there are as many tokens in each as `counts`, [S], the actor's.
    """
    if len(rows) != len(counts):
        raise ValueError(
            f"{role} has {len(rows):,} sequences, and actor_logp has {len(counts):,}: give {role} "
            "of the same tokens"
        )
    values = np.full((len(rows), counts.max()), np.nan, np.result_type(*rows))
    for i, row in enumerate(rows):
        if len(row) != counts[i]:
            raise ValueError(
                f"{role} has {len(row):,} tokens in sequence {i}, and actor_logp has "
                f"{counts[i]:,}: give {role} of the same tokens"
            )
        values[i, : len(row)] = row
    return values


def rows_of(role: str, x, lengths: np.ndarray | None) -> tuple[list[np.ndarray], float]:
    """The numbers of each sequence, and the step of their type."""
    x = opened(x)
    if isinstance(x, list | tuple) and depth_of(x) == 2:
        pairs = [array_of(role, row, f"{role}[{i}]") for i, row in enumerate(x)]
        rows, steps = zip(*pairs, strict=True)
        step = max(steps)
        for i, row in enumerate(rows):
            if row.ndim != 1:
                raise ValueError(f"{role}[{i}] has the shape {row.shape}: give [tokens]")
    else:
        array, step = array_of(role, x)
        if array.ndim not in (1, 2):
            raise ValueError(f"{role} has the shape {array.shape}: give [sequences, tokens]")
        rows = list(np.atleast_2d(array))
        if len(rows) > 1 and lengths is not None:
            raise ValueError(
                f"lengths is given, but {role} has the shape {array.shape}: lengths is for packed "
                "rows, [tokens]; for [sequences, tokens] give a mask"
            )
    if lengths is not None and len(rows) == 1:
        rows = unpacked(role, rows[0], lengths)
    elif lengths is not None and [len(row) for row in rows] != lengths.tolist():
        raise ValueError(f"lengths differs from the lengths of the lists in {role}: leave it out")
    return rows, step


def opened(x):
    """`x` as a list of its sequences, if it is another container of them."""
    if isinstance(x, torch.Tensor):
        return list(x.unbind()) if x.is_nested else x
    if isinstance(x, list | tuple):
        return x
    array = np.asarray(x)
    return list(array) if array.dtype == object and array.ndim == 1 else array


def depth_of(x) -> int:
    """0 of a number, 1 of a row of numbers, 2 of a list of rows or an array [sequences, tokens]."""
    if isinstance(x, list | tuple):
        return 1 + any(isinstance(row, list | tuple) or getattr(row, "ndim", 0) > 0 for row in x)
    return np.ndim(x)


def array_of(role: str, x, name: str = "") -> tuple[np.ndarray, float]:
    """An array in float32 or, if it has float64 or no floating point, float64, and the distance of
    its type's numbers at 1.

    Lists may also hold whole numbers, and None where there is no number. `name` is that of the
    array in messages, if it is not `role`.
    """
    kinds, fix = KINDS[role]
    name = name or role
    try:
        if isinstance(x, torch.Tensor):
            # NumPy has no bfloat16
            array = (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)
        elif isinstance(x, list | tuple):
            array = np.asarray([np.nan if entry is None else entry for entry in x])
            kinds += "iu"
        else:
            array = np.asarray(x)
    except Exception as error:  # NumPy and PyTorch say in many ways that there are no numbers
        raise ValueError(f"{name} is no array of numbers: {fix}") from error
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name} is {getattr(x, 'dtype', array.dtype)}: {fix}")
    if array.dtype.kind != "f":
        return array.astype(np.float64), 0.0
    info = torch.finfo(x.dtype) if isinstance(x, torch.Tensor) else np.finfo(array.dtype)
    return array.astype(np.result_type(array, np.float32)), float(info.eps)


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
