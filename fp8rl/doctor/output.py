"""What the doctor's command says: errors of one line, reports, and where they go."""

import contextlib
import json
import os
import sys
from pathlib import Path

REPORT_KIND = "fp8rl.doctor report, version 1"
NO_STEP = "no optimizer of torch made a step"


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


def print_out(text: str) -> None:
    """Prints lines to stdout. Raises Refusal if that is not possible, but not if their reader has
    seen enough, as `head` has."""
    try:
        print(text, flush=True)
    except OSError as error:
        # What is left in the buffer would fail once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise Refusal(f"stdout cannot be written: {reason(error)}") from error


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


def check_report_can_be_written(path: Path) -> None:
    """Raises Refusal for a file that exists, and for one in a folder that cannot be written.

    It makes no file: several ranks of torchrun check the same one.
    """
    if os.path.lexists(path):
        raise Refusal(f"json is {path}, which exists: name a new file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise Refusal(f"json is {path}, which cannot be written: name a folder that can")
