"""The file with a report: `watch --json` writes it, and `twin` reads it."""

import contextlib
import json
import stat
from pathlib import Path

from .run_script import Refusal, reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

REPORT_KIND = "fp8rl.doctor report, version 1"
NO_STEP = "no optimizer of torch made a step"


class ReportFile:
    """A file for a report, which is reserved when a script starts, and filled when it has ended.

    While it is reserved it is empty and locked. A file that is empty and not locked was left by a
    process that has been killed, and holds nobody's report. Raises Refusal for any other file.
    """

    def __init__(self, path: Path):
        self.name = path
        self.path = path.absolute()  # a script may change the folder in which it runs
        try:
            with contextlib.suppress(FileExistsError):
                self.path.open("x").close()
            if not is_empty_file(self.path):
                raise Refusal(f"json is {path}, which exists: name a new file")
            self.file = self.path.open("a")
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            if fcntl:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(
                f"json is {path}, which another script is about to fill: name a new file"
            ) from error
        except OSError:
            pass  # a file system without locks

    def write(self, text: str) -> None:
        """Writes a report whole. Raises Refusal if that is not possible."""
        unfinished = self.path.with_name(self.path.name + ".tmp")
        try:
            unfinished.write_text(text)
            unfinished.replace(self.path)
        except OSError as error:
            raise self.unwritable(error) from error
        self.file.close()

    def give_up(self) -> None:
        """Removes the file again, unless the report has been written."""
        if not self.file.closed:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.file.close()

    def unwritable(self, error: OSError) -> Refusal:
        return Refusal(f"json is {self.name}, which cannot be written: {reason(error)}")


def report_as_json(optimizers: list[dict], notes: list[str], averages: list[dict] = ()) -> str:
    """The text of a report's file."""
    content = {"kind": REPORT_KIND, "optimizers": optimizers, "averages": averages, "notes": notes}
    return json.dumps(content, indent=1)


def is_empty_file(path: Path) -> bool:
    """Whether a path is a file without content, and no link or device."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def read_report(path: Path) -> dict:
    """Reads a report that `watch --json` wrote. Raises Refusal for any other file."""
    try:
        report = json.loads(path.read_text())
        if report["kind"] == REPORT_KIND and isinstance(report["optimizers"], list):
            for optimizer in report["optimizers"]:
                for finding in optimizer["findings"]:
                    check_finding(finding, len(optimizer["shapes"]))
                int(optimizer["steps"])
            return report
    except OSError as error:
        raise Refusal(f"report is {path}, which cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        pass
    raise Refusal(
        f"report is {path}, which `watch --json` did not write: give a file that it wrote"
    )


def check_finding(finding: dict, tensors: int) -> None:
    """Raises ValueError or TypeError unless the numbers of a finding have the right shapes.

    They are rows of a number, or null, for each tensor.
    """
    rates = finding["tensor_rates"]
    free_rates = finding.get("free_tensor_rates", [])  # which earlier reports do not have
    if free_rates and len(free_rates) != len(rates):
        raise ValueError("free_tensor_rates")
    for row in (*rates, *finding["tensor_noise"], *free_rates):
        if not isinstance(row, list) or len(row) != tensors:
            raise ValueError("rates")
        for number in row:
            if number is not None:
                float(number)
    if not isinstance(finding["place"], str) or not isinstance(finding["format"], str):
        raise TypeError("place")


def require_rates(report: dict, text: str) -> None:
    """Raises Refusal unless a report has rates for a place and format, such as "weights=bf16"."""
    known = {
        f"{finding['place']}={finding['format']}"
        for optimizer in report["optimizers"]
        for finding in optimizer["findings"]
        if finding["tensor_rates"]
    }
    if text not in known:
        remedy = "watch for longer, and let each tensor learn from the first step to the last"
        if known:
            remedy = f"choose from {', '.join(sorted(known))}"
        raise Refusal(f"report has no {text} with a rate for each tensor: {remedy}")
