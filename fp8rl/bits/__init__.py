"""Numbers in few bits, for any training in PyTorch: formats, places, and an optimizer.

Nothing in this folder needs the rest of the package. README.md beside this file shows how to use
it. `Doctor` and `mismatch`, which look at a training or at log-probabilities, are in doctor/ and
can be imported from here, too.
"""

import importlib

# The module of each name. It is imported when the name is used for the first time, because
# notation.py must be readable without torch and NumPy.
MODULES = {
    "Doctor": "fp8rl.doctor",
    "Format": "fp8rl.bits.formats",
    "LowBitAdam": "fp8rl.bits.low_bit_adam",
    "MismatchReport": "fp8rl.dumps",
    "PlaceFormat": "fp8rl.bits.places",
    "Places": "fp8rl.bits.places",
    "format_of": "fp8rl.bits.formats",
    "mismatch": "fp8rl.dumps",
    "places_of": "fp8rl.bits.places",
}
__all__ = [*MODULES]


def __getattr__(name: str):
    """A name that has not been used before (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
