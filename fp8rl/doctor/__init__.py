"""Looks at a training or at log-probabilities: how would few bits change them, is it a bug?

    doctor.py     `Doctor` watches a training in float32 and predicts which formats would change it
    ../dumps/     `mismatch` compares a learner's and an actor's log-probabilities
    __main__.py   `python -m fp8rl.doctor` does both for scripts and files of anybody

README.md beside this file shows how to use them. Nothing here needs more of the package than bits/
and dumps/.
"""

import importlib

from ..bits.notation import OPERANDS, TOLERATES, check_tolerance

# The file of each name. It is imported when the name is used for the first time, because the
# command must not import torch before the script does.
FILES = {
    "AVERAGES": "averages",
    "Doctor": "doctor",
    "FORMATS": "doctor",
    "Finding": "findings",
    "FormatRows": "format_rows",
    "LEAST_PER_TENSOR": "sample",
    "MismatchReport": "..dumps.mismatch",
    "MomentBounds": "format_rows",
    "NumberSums": "sample",
    "Operands": "low_bit_gradients",
    "Report": "findings",
    "Sample": "sample",
    "Through": "low_bit_gradients",
    "WatchedOptimizer": "watched_optimizer",
    "WindowSums": "sample",
    "innermost_optimizer": "doctor",
    "mismatch": "..dumps.mismatch",
    "noise_of": "sample",
    "optimizer_inside": "doctor",
    "rate_of": "sample",
    "rates_by_tensor": "sample",
    "read_dump": "..dumps.dump",
    "read_format": "doctor",
    "sampling_error": "sample",
    "sampling_errors_by_tensor": "sample",
    "tensor_names": "sample",
}
__all__ = ["OPERANDS", "TOLERATES", "check_tolerance", *FILES]


def __getattr__(name: str):
    """A name that has not been used before (PEP 562)."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = FILES[name]
    module = importlib.import_module(path if path[0] == "." else f".{path}", __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
