"""Numbers in few bits, for any training in PyTorch: formats, an optimizer, a doctor, and a report
on two policies' log-probabilities.

Nothing in this folder needs the rest of the package. README.md beside this file shows how to use
it.
"""

import importlib

# The file of each name. It is imported when the name is used for the first time, because
# notation.py must be readable without torch and NumPy.
FILES = {
    "Doctor": "doctor",
    "Format": "formats",
    "LowBitAdam": "low_bit_adam",
    "MismatchReport": "acting_mismatch",
    "PlaceFormat": "places",
    "Places": "places",
    "format_of": "formats",
    "mismatch": "acting_mismatch",
    "places_of": "places",
}
__all__ = [*FILES]


def __getattr__(name: str):
    """A name that has not been used before (PEP 562)."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{FILES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
