"""A doctor that watches a training in float32 and predicts which formats would change it.

The class `Doctor` is in doctor.py, whose docstring explains what is measured.
"""

from ..notation import OPERANDS, TOLERATES, check_tolerance
from .doctor import AVERAGES, FORMATS, Doctor, read_format, tensor_names
from .findings import ActingLook, Finding, Report, judge_acting
from .format_rows import FormatRows, MomentBounds
from .looks import Operands, Through
from .sample import Sample, WindowSums, noise_of, rate_of, rates_by_tensor
from .watched_optimizer import WatchedOptimizer

__all__ = [
    "AVERAGES",
    "FORMATS",
    "OPERANDS",
    "TOLERATES",
    "ActingLook",
    "Doctor",
    "Finding",
    "FormatRows",
    "MomentBounds",
    "Operands",
    "Report",
    "Sample",
    "Through",
    "WatchedOptimizer",
    "WindowSums",
    "check_tolerance",
    "judge_acting",
    "noise_of",
    "rate_of",
    "rates_by_tensor",
    "read_format",
    "tensor_names",
]
