"""Finds the arrays of a dump by the names that the RL stacks give them.

A stack has a name of its own for each array. For example, the learner's log-probabilities are
`old_per_token_logps` in TRL and `old_log_probs` in verl. A dump is taken as the stack has written
it, and arrays that are not needed, such as `input_ids`, are left alone.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from .token_arrays import BINARY, array_of, is_list_of_rows, opened

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
OURS = (LEARNER, ACTOR, "mask", "advantages", "lengths", TOKENS)
# What a name has in it that may be one of these, misspelt.
LOOKS_KNOWN = ("mask", "adv", "length", "logp", "log_prob")
KNOWN = {name for names in (*NAMES.values(), *MASKS) for name in names}
MOST_LISTED = 24  # names in an error
LONGEST_NAME = 40
# Records of texts that stacks write, by two of their columns.
TEXTS = {
    ("prompt", "completion"): "these are texts, as TRL's log_completions writes them: save the "
    "trainer's inputs, which have log-probabilities",
    ("input", "output"): "these are texts, as verl's rollout_data_dir has them: save the tensors "
    "of the batch with torch.save",
}


def find_names(subject: str, names: Iterable) -> dict[str, tuple[str, ...]]:
    """Which names of a dump hold which array, by the name that the array has here.

    `subject` begins the messages, such as "dump is dump.npz". An array has one name, and a mask may
    have two. Raises ValueError, in one line that lists the names, if a log-probability is missing,
    or if it is not clear which array is meant.
    """
    names = list(names)
    roles = {}
    for role, known in NAMES.items():
        present = tuple(name for name in known if name in names)
        if len(present) > 1:
            raise ValueError(f"{subject}, which has {both(present)}: keep one; {listed(names)}")
        if present:
            roles[role] = present
    masks = [tuple(name for name in group if name in names) for group in MASKS]
    masks = [group for group in masks if group]
    if len(masks) > 1:
        raise ValueError(
            f"{subject}, which has the masks {both([group[0] for group in masks])}: keep one; "
            f"{listed(names)}"
        )
    if masks:
        roles["mask"] = masks[0]
    for role in (LEARNER, ACTOR):
        if role not in roles:
            others = ", ".join(NAMES[role][1:])
            raise ValueError(f"{subject}, which has no {role} (or {others}): {listed(names)}")
    if roles[LEARNER] == (LEARNER,) and roles[ACTOR] == (ACTOR,):
        # Nobody but the user has written this, so such a name is one that was misspelt.
        for name in names:
            if name not in KNOWN and any(part in str(name) for part in LOOKS_KNOWN):
                raise ValueError(
                    f"{subject}, which has {name_in_line(name)!r}: use the names {', '.join(OURS)} "
                    "alone"
                )
    return roles


def dict_as_arrays(learner_logp, actor_logp, mask, advantages, lengths, tokens=None) -> dict:
    """The arguments of `mismatch`, the first of which may be a dict that holds the others."""
    beside = {ACTOR: actor_logp, "mask": mask, "advantages": advantages, "lengths": lengths}
    beside[TOKENS] = tokens
    if not (hasattr(learner_logp, "keys") and hasattr(learner_logp, "__getitem__")):
        if actor_logp is None:
            raise ValueError(
                "actor_logp is missing: give it, or a dict that has both log-probabilities"
            )
        arrays = {name: array for name, array in beside.items() if array is not None}
        return {LEARNER: learner_logp, **arrays}
    arrays = take_arrays("learner_logp is a dict", learner_logp)
    for name, array in beside.items():
        if array is None:
            continue
        if name in arrays:
            raise ValueError(f"{name} is given twice, in the dict and beside it: give it once")
        arrays[name] = array
    return arrays


def take_arrays(subject: str, arrays: Mapping, roles: dict | None = None) -> dict:
    """The arrays of a dump, as arguments of `mismatch`. Entries that are None are left out."""
    if roles is None:
        keys = arrays.keys()
        # What is not needed may take long to read, as in a file that numpy.load has opened.
        names = [name for name in keys if name not in KNOWN or arrays[name] is not None]
        roles = find_names(subject, names)
    taken = {role: arrays[names[0]] for role, names in roles.items()}
    if len(roles.get("mask", ())) == 2:
        first, second = roles["mask"]
        taken["mask"] = both_masks(first, arrays[first], second, arrays[second])
    is_stacks_name = roles.get(TOKENS, (TOKENS,)) != (TOKENS,)
    if is_stacks_name and sizes_of(taken[TOKENS]) != sizes_of(taken[ACTOR]):
        del taken[TOKENS]  # they are of other tokens, such as those with a prompt
    return taken


def sizes_of(x) -> list | tuple:
    """The shape of an array, or of each row in a list of rows."""
    x = opened(x)
    return [np.shape(row) for row in x] if isinstance(x, list | tuple) else tuple(x.shape)


def both_masks(first: str, x, second: str, y):
    """A mask of the tokens that are in both masks, in the form of the first one.

    The second may have one number for each sequence. NaN where an entry is neither 0 nor 1.
    """
    x = opened(x)
    y = opened(y)
    if is_list_of_rows(x):
        if not isinstance(y, list | tuple):
            y = list(y)
        check_same(first, len(x), second, len(y))
        return [
            both_masks(f"{first}[{i}]", row, f"{second}[{i}]", other)
            for i, (row, other) in enumerate(zip(x, y, strict=True))
        ]
    x, _ = array_of(first, x, "biuf", BINARY)
    y, _ = array_of(second, y, "biuf", BINARY)
    if y.ndim < x.ndim and y.shape == x.shape[: y.ndim]:
        y = y[..., None]
    if y.shape != (*x.shape[:-1], 1):
        check_same(first, x.shape, second, y.shape)
    is_in_both = np.where((x == 1) & (y == 1), 1.0, np.nan)
    is_out = ((x == 0) & ((y == 0) | (y == 1))) | ((x == 1) & (y == 0))
    return np.where(is_out, 0.0, is_in_both)


def check_same(first: str, size, second: str, other_size) -> None:
    if size != other_size:
        raise ValueError(
            f"{second} has the size {other_size}, and {first} {size}: give masks of the same tokens"
        )


def both(names) -> str:
    return " and ".join(names)


def listed(names: list) -> str:
    """The names of a dump, as the end of a message."""
    if not names:
        return "there is nothing in it"
    text = ", ".join(name_in_line(name) for name in names[:MOST_LISTED])
    if len(names) > MOST_LISTED:
        text += f" and {len(names) - MOST_LISTED:,} others"
    hints = [hint for columns, hint in TEXTS.items() if set(columns) <= set(names)]
    return "; ".join([f"there is {text}", *hints])


def name_in_line(name) -> str:
    """A name as it can stand in a line."""
    text = str(name)[:LONGEST_NAME]
    return text if text.isprintable() else ascii(text)
