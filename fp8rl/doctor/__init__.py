"""Looks at a training: how would few bits change it?

    watch.py   `Doctor` watches a training in float32 and predicts which formats would change it
    keep.py    `Keep` really keeps a place in few bits

`python -m fp8rl.doctor` does both for scripts of anybody, and compares log-probabilities (dumps/).
README.md beside this file shows how to use them. Nothing here needs more of the package than bits/.
"""

import importlib

# The file of each name. It is imported when the name is used for the first time, because the
# command must not import torch before the script does.
FILES = {
    "Doctor": ".watch",
    "FORMATS": ".watch",
    "Finding": ".findings",
    "Keep": ".keep",
    "Report": ".findings",
    "MismatchReport": "..dumps.mismatch",
    "mismatch": "..dumps.mismatch",
    "read_dump": "..dumps.dump",
}
__all__ = list(FILES)


def __getattr__(name: str):
    """A name that has not been used before (PEP 562)."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(FILES[name], __name__), name)
    globals()[name] = value
    return value
