"""Looks at a training: how would few bits change it?

    watch.py   `Doctor` watches a training in float32 and predicts which formats would change it
    keep.py    `Keep` really keeps a place in few bits

`python -m fp8rl.doctor` does both for scripts of anybody, and compares log-probabilities (dumps/).
README.md beside this file shows how to use them. Nothing here needs more of the package than bits/.

This file has what the command and the script's process share: errors of one line, and the file of a
report. It needs neither torch nor NumPy.
"""

import contextlib
import importlib
import json
import sys
from pathlib import Path

# The file of each name. It is imported when the name is used for the first time, because the
# command must not import torch before the script does.
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
    """A name that has not been used before (PEP 562)."""
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(FILES[name], __name__), name)
    globals()[name] = value
    return value


class Refusal(Exception):
    """An error in the command, with a message of one line."""


def reason(error: Exception) -> str:
    """Why something failed, in one line, without a number or a path."""
    return getattr(error, "strerror", None) or first_line(error)


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


def report_as_json(optimizers: list[dict], notes: list[str], averages: list[dict] = ()) -> str:
    """The text of a report's file."""
    content = {"kind": REPORT_KIND, "optimizers": optimizers, "averages": averages, "notes": notes}
    return json.dumps(content, indent=1)


def write_report(path: Path, text: str) -> None:
    """Writes the file of --json whole. Raises Refusal if that is not possible."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise Refusal(f"json is {path}, which cannot be written: {reason(error)}") from error
