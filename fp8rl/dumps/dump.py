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

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from .gap import Gap

LEARNER = "learner_logp"
ACTOR = "actor_logp"
TOKENS = "tokens"
# Names of an array: here, in TRL, verl, OpenRLHF and NeMo-RL. AReaL's are not among them, because
# its two arrays are not of the same tokens before it has shifted one of them.
NAMES = {
    LEARNER: (
        "learner_logp",
        "old_per_token_logps",
        "old_log_probs",
        "action_log_probs",
        "prev_logprobs",
    ),
    ACTOR: ("actor_logp", "sampling_per_token_logps", "rollout_log_probs", "generation_logprobs"),
    "advantages": ("advantages",),
    "lengths": ("lengths",),
    TOKENS: ("tokens", "completion_ids", "responses"),
}
# Where a stack has two masks, a token counts if it is in both.
MASKS = (
    ("mask",),
    ("completion_mask", "tool_mask"),
    ("response_mask",),
    ("action_mask",),
    ("token_mask", "sample_mask"),
    ("token_loss_mask", "sample_loss_mask"),  # so NeMo-RL calls them in the files that it writes
)
KNOWN = {name for names in (*NAMES.values(), *MASKS) for name in names}
HOW = (
    "save arrays by numpy.savez, a dict of tensors by torch.save, or a JSON object on each line, "
    "with the names that your stack gives them"
)
COARSE = 1e-4  # distance of a type's numbers at 1 above which the type has half precision
FLOATS = "give floating point, such as float32"
BINARY = "give booleans, or 0 and 1"
NUMBERS = "give numbers"
WHOLE_NUMBERS = "give whole numbers, those of the tokens in the vocabulary"
WHOLE = "give the number of tokens of each packed sequence, 0 or more"


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
    depth = depth_of(x)
    if role == "advantages" and depth <= is_batch:
        values, _ = array_of(role, x, "biuf", NUMBERS)
        if lengths is None or values.size == len(lengths):
            return values.ravel().tolist()
    if lengths is not None:
        return rows_of(role, x, lengths, "biuf", NUMBERS)[0]
    return list(opened(x)) if depth > 1 else [x]


def depth_of(x) -> int:
    """0 of a number, 1 of a row of numbers, 2 of a list of rows or an array [sequences, tokens]."""
    if isinstance(x, list | tuple):
        return 1 + bool(x and np.ndim(x[0]))
    return np.ndim(x)


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
    names = [x for x in keys if x not in KNOWN or not is_text(content[x])]
    listed = ", ".join(ascii(name).strip("'") for name in names[:24]) or "nothing in it"
    groups = [(role, (name,)) for role, known in NAMES.items() for name in known]
    groups += [("mask", group) for group in MASKS]
    arrays = {}
    taken = {}
    for role, group in groups:
        present = [name for name in group if name in names]
        if not present:
            continue
        if role in arrays:
            raise ValueError(
                f"{subject}, which has {taken[role]} and {present[0]}: keep one; there is {listed}"
            )
        taken[role] = present[0]
        arrays[role] = content[present[0]]
        if len(present) == 2:
            arrays[role] = both_masks(*present, arrays[role], content[present[1]])
    for role in (LEARNER, ACTOR):
        if role not in arrays:
            others = ", ".join(NAMES[role][1:])
            raise ValueError(f"{subject}, which has no {role} (or {others}): there is {listed}")
    if taken.get(TOKENS, TOKENS) != TOKENS and sizes_of(arrays[TOKENS]) != sizes_of(arrays[ACTOR]):
        del arrays[TOKENS]  # they are of other tokens, such as those with a prompt
    return arrays


def is_text(x) -> bool:
    return x is None or isinstance(x, str)


def sizes_of(x) -> list | tuple:
    """The shape of an array, or of each row in a list of rows."""
    x = opened(x)
    return [np.shape(row) for row in x] if isinstance(x, list | tuple) else tuple(x.shape)


def both_masks(first: str, second: str, x, y) -> list:
    """A mask of the tokens that are in both masks, the second of which may be of sequences."""
    try:
        pairs = zip(opened(x), opened(y), strict=True)
        return [
            array_of(first, a, "biuf", BINARY)[0] * array_of(second, b, "biuf", BINARY)[0]
            for a, b in pairs
        ]
    except ValueError as error:
        raise ValueError(
            f"{second} has other sizes than {first}: give masks of the same tokens"
        ) from error


# Arrays


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


def gap_of(learner_logp, actor_logp, mask=None, advantages=None, lengths=None, tokens=None) -> Gap:
    """Checks the arrays of a dump, each in any of the three forms.

    Raises ValueError, with a message of one line, for arrays that cannot be log-probabilities of
    the same tokens.
    """
    lengths = as_lengths(lengths)
    learner = log_probabilities(LEARNER, learner_logp, lengths)
    actor = log_probabilities(ACTOR, actor_logp, lengths)
    check_same_tokens(LEARNER, learner, actor)
    used = actor.is_token
    if mask is not None:
        values = padded("mask", mask, lengths, "biuf", BINARY, actor).values
        check("mask", values, used & (values != 0) & (values != 1), BINARY)
        used = values == 1
    if not used.any():
        raise ValueError("mask is False everywhere: give at least one token that counts")
    check_log_probabilities(LEARNER, learner, used)
    check_log_probabilities(ACTOR, actor, used)
    if advantages is not None:
        advantages = as_advantages(advantages, used, actor, lengths)
    if tokens is not None:
        values = padded(TOKENS, tokens, lengths, "iuf", WHOLE_NUMBERS, actor).values
        check(TOKENS, values, actor.is_token & (values != np.floor(values)), WHOLE_NUMBERS)
        tokens = np.where(actor.is_token, values, 0.0)
    return Gap(
        np.where(used, learner.values, 0.0),
        np.where(used, actor.values, 0.0),
        used,
        max(learner.step, actor.step, 2.0**-23),  # policies compute in float32 at best
        advantages,
        tokens,
    )


def log_probabilities(name: str, x, lengths: np.ndarray | None) -> Padded:
    """Log-probabilities in any of the three forms.

    A single row is taken only with `lengths`: packed sequences that are taken for one would hide
    what differs between them.
    """
    given = padded(name, x, lengths, "f", FLOATS)
    tokens = given.values.shape[1]
    if len(given.values) == 1 and lengths is None:
        raise ValueError(
            f"{name} is a single row of {tokens:,} tokens: give lengths, the number of tokens of "
            f"each sequence that is packed in it, or lengths=[{tokens}] if it is one sequence, in "
            "which nothing can be said of sequences and positions"
        )
    return given


def as_advantages(x, used: np.ndarray, like: Padded, lengths: np.ndarray | None) -> np.ndarray:
    """The advantage of each token, [S, T]; 0 where `used` is False.

    They are given for each sequence, [S] or [S, 1], or for each token in any of the three forms.
    """
    x = opened(x)
    if like.lengths.max() > 1 and depth_of(x) == 2 and all(len(row) == 1 for row in x):
        x = [row[0] for row in x]
    if not is_list_of_rows(x):
        values, _ = array_of("advantages", x, "fiu", NUMBERS)
        of_tokens = used.shape if lengths is None else (int(like.lengths.sum()),)
        if values.shape == (len(used),):
            check("advantages", values, used.any(1) & ~np.isfinite(values), "give finite numbers")
            return np.where(used, values[:, None], 0.0)
        if values.ndim < 2 and values.shape != of_tokens:
            raise ValueError(
                f"advantages has the shape {values.shape}: give ({len(used)},), one for each "
                f"sequence, or {of_tokens}"
            )
    values = padded("advantages", x, lengths, "fiu", NUMBERS, like).values
    check("advantages", values, used & ~np.isfinite(values), "give finite numbers")
    return np.where(used, values, 0.0)


def as_lengths(lengths) -> np.ndarray | None:
    """The number of tokens of each packed sequence, as whole numbers."""
    if lengths is None:
        return None
    array, _ = array_of("lengths", lengths, "iuf", WHOLE)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"lengths has the shape {array.shape}: give [sequences]")
    is_whole = (array >= 0) & (array == np.floor(array)) & (array < 2**53)
    check("lengths", array, ~is_whole, WHOLE)
    return array.astype(np.int64)


def check(name: str, values: np.ndarray, is_wrong: np.ndarray, fix: str) -> None:
    """Raises ValueError for the first number that is wrong."""
    if is_wrong.any():
        place = np.argwhere(is_wrong)[0].tolist()
        raise ValueError(f"{name} is {values[tuple(place)]:.6g} at {place}: {fix}")


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
    """Raises ValueError if a number cannot be the log-probability of a sampled token."""
    most = 1e-3 if given.step > COARSE else 1e-5  # so far above 0 may rounding bring it
    # A token with a log-probability below -1e4 was not sampled. NaN is not possible either.
    is_possible = (given.values <= most) & (given.values >= -1e4)
    is_wrong = used & ~is_possible
    fix = "mask fillers and other tokens that do not count"
    if (used & (given.values > most)).any():
        fix = "give logarithms of probabilities, which are at most 0, and mask fillers"
    if is_wrong.sum() > 1:
        fix += f" ({is_wrong.sum():,} of {used.sum():,} tokens are impossible)"
    check(name, given.values, is_wrong, fix)


# The three forms


def padded(
    name: str, x, lengths: np.ndarray | None, kinds: str, fix: str, like: Padded | None = None
) -> Padded:
    """The numbers of all sequences as one array, of the same tokens as `like`."""
    rows, step = rows_of(name, x, lengths, kinds, fix)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    if not counts.any():
        raise ValueError(f"{name} has no tokens: give at least one token")
    values = np.full((len(rows), counts.max()), math.nan)
    for i, row in enumerate(rows):
        values[i, : len(row)] = row
    given = Padded(values, counts, step)
    if like is not None:
        check_same_tokens(name, given, like)
    return given


def rows_of(
    name: str, x, lengths: np.ndarray | None, kinds: str, fix: str
) -> tuple[list[np.ndarray], float]:
    """The numbers of each sequence, as float64, and the step of their type.

    `kinds` are the kinds of NumPy's types that `name` may have. `fix` is said of all others.
    """
    x = opened(x)
    if is_list_of_rows(x):
        pairs = [array_of(f"{name}[{i}]", row, kinds, fix) for i, row in enumerate(x)]
        rows = [row for row, _ in pairs]
        step = max(step for _, step in pairs)
        for i, row in enumerate(rows):
            if row.ndim != 1:
                raise ValueError(f"{name}[{i}] has the shape {row.shape}: give [tokens]")
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
    step = 0.0
    try:
        if isinstance(x, torch.Tensor):
            if x.dtype.is_floating_point:
                step = torch.finfo(x.dtype).eps
                x = x.double()
            array = x.detach().cpu().numpy()
        elif isinstance(x, list | tuple):
            array = np.asarray([math.nan if entry is None else entry for entry in x])
            kinds += "iu"
        else:
            array = np.asarray(x)
    except Exception as error:  # NumPy and PyTorch say in many ways that there are no numbers
        raise ValueError(f"{name} is no array of numbers: {fix}") from error
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name} is {getattr(x, 'dtype', array.dtype)}: {fix}")
    if array.dtype.kind == "f" and not step:
        step = float(np.finfo(array.dtype).eps)
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
