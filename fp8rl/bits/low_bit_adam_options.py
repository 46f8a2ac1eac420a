"""What `LowBitAdam` may be given: formats of places, and options of a call or a group.

Options of torch's Adam that it does not have are refused, because they would be ignored without a
word.
"""

import math

from .formats import format_of
from .notation import STATE, check_named_once, read_entry
from .places import PlaceFormat, Places

# Options of torch's Adam and AdamW that LowBitAdam does not have. They may be given with a value
# that asks for nothing.
OPTIONS_OF_ADAM = (
    "amsgrad",
    "capturable",
    "differentiable",
    "foreach",
    "fused",
    "decoupled_weight_decay",
)
FLOAT32 = format_of("fp32")


def places_to_keep(formats: dict[str, str | PlaceFormat | None]) -> Places:
    """The places that are kept in few bits, in the order of STATE.

    A format may be a text, such as "e4m3:block", in which v and root are stochastic unless it says
    `nearest`. A PlaceFormat is taken as it is. None keeps a place in float32. Raises ValueError as
    `places_of` does.
    """
    places = Places()
    for name in dict.fromkeys((*STATE, *formats)):
        form = formats.get(name)
        if name in STATE and not form:
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


def refuse_options_of_adam(options: dict) -> None:
    """Raises ValueError for an option of torch's Adam that is not offered.

    An option whose value asks for nothing is removed from `options`.
    """
    for name in OPTIONS_OF_ADAM:
        if value := options.pop(name, None):
            raise ValueError(f"{name} is {value}: leave it out, LowBitAdam does not have it")


def refuse_ignored_options(group: dict) -> None:
    """Raises ValueError for options of a group that would be ignored without a word.

    torch takes any option in a group. Among them may be a misspelt place with its format.
    """
    for name, value in group.items():
        if name in ("seed", "noise"):
            raise ValueError(f"{name} is {value} in a group: give it in the call, it holds for all")
        if name == "formats" or is_format(value):
            places = ", ".join(STATE)
            raise ValueError(f"formats has the place {name!r} in a group: choose from {places}")


def is_format(value) -> bool:
    """Whether a value is a format with its words, such as "e4m3:block"."""
    if not isinstance(value, str):
        return isinstance(value, PlaceFormat)
    try:
        PlaceFormat.of(value)
    except ValueError:
        return False
    return True


def refuse_wrong_settings(group: dict) -> None:
    """Raises ValueError for numbers with which Adam cannot work."""
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    weight_decay = group["weight_decay"]
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is {weight_decay}: use 0 or more")
    if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
        remedy = "use at least 0, and betas below 1"
        raise ValueError(f"lr, eps and betas are {lr}, {eps} and {betas}: {remedy}")
