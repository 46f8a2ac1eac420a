"""Numbers in few bits, for any training in PyTorch: formats, places, and an optimizer.

Nothing in this folder needs the rest of the package. README.md beside this file shows how to use
it. `Doctor` and `mismatch`, which look at a training or at log-probabilities, are in doctor/ and
can be imported from here, too.
"""

import importlib

# The module of each name. It is imported when the name is used, because notation.py must be
# readable without torch and NumPy.
MODULES = {
    "Doctor": "fp8rl.doctor",
    "LowBitAdam": "fp8rl.bits.low_bit_adam",
    "mismatch": "fp8rl.dumps",
}


def __getattr__(name: str):
    """A name of this package (PEP 562)."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
