"""A doctor that watches a training in float32 and predicts which formats would change it.

The class `Doctor` is in doctor.py, whose docstring explains what is measured.
"""

from ..notation import OPERANDS, TOLERATES, check_tolerance
from .doctor import (
    AVERAGES,
    FORMATS,
    Doctor,
    innermost_optimizer,
    optimizer_inside,
    read_format,
)
from .findings import ActingLook, Finding, Report, judge_acting
from .format_rows import FormatRows, MomentBounds
from .looks import Operands, Through
from .pooled_optimizers import PooledOptimizers
from .sample import Sample, WindowSums, noise_of, rate_of, rates_by_tensor, tensor_names
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
    "PooledOptimizers",
    "Report",
    "Sample",
    "Through",
    "WatchedOptimizer",
    "WindowSums",
    "check_tolerance",
    "innermost_optimizer",
    "judge_acting",
    "noise_of",
    "optimizer_inside",
    "rate_of",
    "rates_by_tensor",
    "read_format",
    "tensor_names",
]
