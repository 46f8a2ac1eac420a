"""What `LowBitAdam` may be given: formats of places, and options of a call or a group.

Options of a group that it does not have are refused, because they would be ignored without a word.
"""

import math
from collections.abc import Iterable

from .formats import format_of
from .notation import STATE, check_named_once, read_entry
from .places import PlaceFormat, Places

FLOAT32 = format_of("fp32")


def places_to_keep(formats: dict[str, str | PlaceFormat | None]) -> Places:
    """The places that are kept in few bits, in the order of STATE.

    A format may be a text, such as "e4m3:block", in which v and root are stochastic unless it says
    `nearest`. A PlaceFormat is taken as it is. None keeps a place in float32. Raises ValueError as
    `places_of` does.
    """
    places = Places()
    for name in STATE:
        form = formats.get(name)
        if not form:
            continue
        if not isinstance(form, PlaceFormat):
            form = read_kept_format(name, str(form))
        check_named_once(name, places)
        places[name] = form
    return places


def read_kept_format(name: str, text: str) -> PlaceFormat:
    """Reads the format of a place. For v and root it is stochastic unless the text says
    `nearest`."""
    entry = read_entry(name, text, STATE)
    form = PlaceFormat.of_entry(entry)
    rounds = form.format != FLOAT32 and not form.stochastic
    if name in ("v", "root") and rounds and "nearest" not in entry.words:
        form = PlaceFormat(form.format, (*form.words, "stochastic"))
    return form


def refuse_unknown_options(group: dict, known: Iterable[str]) -> None:
    """Raises ValueError for options of a group that are not `known`.

    torch takes any option in a group. Among them may be a misspelt place with its format.
    """
    for name, value in group.items():
        if name not in known:
            raise ValueError(f"{name} is {value} in a group: use only {', '.join(known)}")


def refuse_wrong_settings(group: dict) -> None:
    """Raises ValueError for numbers with which Adam cannot work."""
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    weight_decay = group["weight_decay"]
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is {weight_decay}: use 0 or more")
    if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
        remedy = "use at least 0, and betas below 1"
        raise ValueError(f"lr, eps and betas are {lr}, {eps} and {betas}: {remedy}")
