"""Looks at a training: how would few bits change it?

    watch.py   `Doctor` watches a training in float32 and predicts which formats would change it
    keep.py    `Keep` really keeps a place in few bits

`python -m fp8rl.doctor` does both for scripts of anybody, and compares log-probabilities (dumps/).
README.md beside this file shows how to use them. Nothing here needs more of the package than bits/.

This file has what the command and the script's process share: errors of one line, which formats can
be judged, and the file of a report. It needs neither torch nor NumPy.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from ..bits.catalogue import is_real, read_real_optimizer
from ..bits.notation import read_entries

# The file of each name. It is imported when the name is used, because the command must not import
# torch before the script does.
FILES = {
    "Doctor": ".watch",
    "FORMATS": ".watch",
    "Finding": ".findings",
    "Keep": ".keep",
    "Report": ".findings",
    "MismatchReport": "..dumps",
    "mismatch": "..dumps",
    "read_dump": "..dumps.dump",
}
__all__ = list(FILES)
REPORT_KIND = "fp8rl.doctor report, version 2"
NO_STEP = "no optimizer of torch made a step"


def __getattr__(name: str):
    """One of the names in `FILES` (PEP 562)."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(FILES[name], __name__), name)


class Refusal(Exception):
    """An error in the command, with a message of one line."""


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def say(text: str) -> None:
    """Writes lines to the stderr that this process was started with.

    Where stderr is closed, or full, or a pipe that nobody reads, they are lost, and nothing else
    changes. They do not go through the buffer of sys.stderr: the script may be writing to it when a
    signal comes, and then nobody else can.
    """
    stderr = sys.__stderr__
    if stderr is None:
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        stderr.flush()
    options = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    with contextlib.suppress(OSError, ValueError), open(stderr.fileno(), "w", **options) as file:
        print(text, file=file)


def check_formats(formats: Iterable[str], places: tuple[str, ...]) -> tuple[str, ...]:
    """The formats that a doctor judges, such as "weights=bf16" or a real optimizer's "model=bf16".

    `places` are those that may have a format. Raises ValueError for a place, format or real
    optimizer that does not exist, and for one that is given twice.
    """
    formats = tuple(formats)
    is_single = [len(text.split()) == 1 for text in formats]
    if not all(is_single) or not 0 < len(formats) == len({*formats}):
        raise ValueError(
            f"formats is {' '.join(formats)!r}: give each place and format once, "
            "as in weights=bf16 v=e5m2; in Python, each is a string of its own"
        )
    for text in formats:
        if is_real(text):
            read_real_optimizer(text)
        else:
            read_entries(text, places)
    return formats


def report_as_json(optimizers: list[dict], notes: list[str], averages: list[dict] = ()) -> str:
    """The text of a report's file."""
    return json.dumps(
        {"kind": REPORT_KIND, "optimizers": optimizers, "averages": averages, "notes": notes},
        indent=1,
    )


def write_report(path: Path, text: str) -> None:
    """Writes the file of --json whole. Raises Refusal if that is not possible."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise Refusal(f"json is {path}, which cannot be written: {error.strerror}") from error
