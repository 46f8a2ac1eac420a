"""How places and formats are written, as in "weights=e4m3:stochastic v=e5m2".

places.py explains what the places and words mean, and formats.py what a format is. This file only
reads the text. It needs neither torch nor NumPy, so the doctor's command can be checked before a
script has imported them: the variables that they read when they are imported, such as
OMP_NUM_THREADS, are the script's to set.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

NAMES = {"fp32": "e8m23", "bf16": "e8m7", "fp16": "e5m10"}
PLACES = (
    "forward",
    "backward",
    "weights",
    "m",
    "v",
    "root",
    "observations",
    "acting",
    "targets",
)
OPERANDS = ("forward", "backward")  # places in the matmuls of a training step
STATE = ("weights", "m", "v", "root")  # places that an optimizer keeps between updates
SUMS = ("grad",)  # sums of gradients over micro-batches, which only the doctor has as a place
WORDS = ("unscaled", "stochastic", "nearest", "stored", "independent")
OF_MOMENTS = {"stored", "independent"}  # words that only m, v and root can have
SAMPLE = 512  # default of how many numbers a doctor follows
TOLERATES = 0.5, 4.0  # default factors of the learning rate between which training learns as well


class Entry(NamedTuple):
    """A place, the bits of exponent and mantissa of its format, and the words after the format."""

    place: str
    bits: tuple[int, int]
    words: tuple[str, ...]


def split_entry(text: str) -> tuple[str, str]:
    """The name of the place, and the format with its words, of a text such as "v=e5m2:unscaled"."""
    place, _, form = text.partition("=")
    return place, form


def read_entries(text: str, names: tuple[str, ...] = PLACES) -> list[Entry]:
    """Reads the places and formats of a text such as "weights=e4m3:stochastic v=e5m2".

    `names` are the places that are allowed. Raises ValueError for a place, format or word that does
    not exist, for a place that is named twice, and for v beside its root.
    """
    entries = []
    for part in text.split():
        entry = read_entry(*split_entry(part), names)
        check_named_once(entry.place, [other.place for other in entries])
        entries.append(entry)
    return entries


def read_entry(place: str, form: str, names: tuple[str, ...] = PLACES) -> Entry:
    """Reads a format with its words, such as "e4m3:stochastic", for a place.

    Raises ValueError as `read_entries` does.
    """
    if place not in names:
        raise ValueError(f"formats has the place {place!r}: choose from {', '.join(names)}")
    text = f"{place}={form}"
    format_name, *words = form.split(":")
    of_moments = {*words} & OF_MOMENTS
    if not {*words} <= {*WORDS} or (of_moments and place not in ("m", "v", "root")):
        raise ValueError(
            f"formats has {text!r}: after the format, use only {', '.join(WORDS)} "
            f"({' and '.join(sorted(OF_MOMENTS))}: only m, v, root)"
        )
    if "stochastic" in words and place not in (*STATE, *SUMS, "targets"):
        raise ValueError(
            f"formats has {text!r}: only {', '.join((*STATE, *SUMS))} and targets can be stochastic"
        )
    if {*words} >= {"stochastic", "nearest"}:
        raise ValueError(f"formats has {text!r}: leave out stochastic or nearest")
    try:
        bits = bits_of(format_name)
    except ValueError as error:
        raise ValueError(f"formats has {text!r}: {error}") from error
    return Entry(place, bits, tuple(words))


def check_named_once(place: str, others: Iterable[str]) -> None:
    """Raises ValueError if a place is among the others, or is v beside its root."""
    if place in others or {place, *others} >= {"v", "root"}:
        raise ValueError(f"formats has {place} twice: name each place once, and v or its root")


def bits_of(name: str) -> tuple[int, int]:
    """The bits of exponent and of mantissa of a format: e4m3, e2m1, ..., fp32, bf16 or fp16.

    Raises ValueError for a name that is none, and for a format without exponent bits or with more
    bits than float32.
    """
    match = re.fullmatch(r"e([0-9]+)m([0-9]+)", NAMES.get(name, name))
    exponent, mantissa = map(int, match.groups()) if match else (0, 0)
    if not (1 <= exponent <= 8 and mantissa <= 23):
        raise ValueError(
            f"format is {name!r}: use fp32, bf16, fp16, "
            "or e1m0 to e8m23 for its bits of exponent and mantissa"
        )
    return exponent, mantissa


def check_tolerance(tolerates: tuple[float, float]) -> tuple[float, float]:
    """The two factors as floats. Raises ValueError unless the first is from 0 to 1 and the second
    at least 1."""
    try:
        low, high = map(float, tolerates)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not 0 < low <= 1 <= high:
        raise ValueError(
            f"tolerates is {tolerates!r}: give two factors of the learning rate, "
            "at most 1 and at least 1, as in (0.5, 8)"
        )
    return low, high


def check_sample(sample: int) -> int:
    """How many numbers a doctor follows. Raises ValueError unless it is a whole number above 0."""
    if type(sample) is not int or sample < 1:
        raise ValueError(f"sample is {sample!r}: give a whole number, at least 1, such as 4096")
    return sample
