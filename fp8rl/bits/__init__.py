"""Numbers in few bits, for any training in PyTorch: formats, an optimizer, a doctor, and a report
on two policies' log-probabilities.

Nothing in this folder needs the rest of the package. README.md beside this file shows how to use
it.
"""

from .acting_mismatch import MismatchReport, mismatch
from .doctor import Doctor
from .formats import Format, format_of
from .low_bit_adam import LowBitAdam
from .places import PlaceFormat, Places, places_of

__all__ = [
    "Doctor",
    "Format",
    "LowBitAdam",
    "MismatchReport",
    "PlaceFormat",
    "Places",
    "format_of",
    "mismatch",
    "places_of",
]
