"""Output folders: one owner at a time, known by a mark, with files that are written whole.

Whoever writes in a folder holds a lock on its mark, the file `.fp8rl`; the kernel releases it when
the process ends, however it ends. The mark is a JSON object: which command made the folder, and the
options to continue with. It tells a run's folder from anybody else's: nothing in a folder without
one is ever touched, and in a folder with one only the files that the command writes.

TensorBoard gives its files names of their own, which begin with `events.out.tfevents.`."""

import contextlib
import json
import os
from pathlib import Path

from .safe_files import locked, read_json, told, write_whole

MARK = ".fp8rl"
FILES = {
    "train": ("config.json", "metrics.csv", "checkpoint.pt", "reward_curve.png"),
    "study": ("runs.jsonl", "results.csv", "table.md", "curves.png"),
    "doctor": ("report.json", "report.md", "report.png"),
}
EVENTS = {"train": "events.out.tfevents.*"}  # a pattern: their names tell time, host and process


def files_in(path: Path, command: str | None) -> list[str]:
    """Names of what a folder holds of a command's files."""
    found = [name for name in FILES.get(command, ()) if (path / name).exists()]
    if command in EVENTS:
        found += sorted(file.name for file in path.glob(EVENTS[command]))
    return found


def read_mark(path: Path) -> dict:
    """The mark of a folder, `command` and `options`; empty if there is none, or not the file that
    the command writes first."""
    # No mark, or not one of ours
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(path / MARK)
        if isinstance(found["options"], dict) and (path / FILES[found["command"]][0]).exists():
            return found
    return {}


def require_free(path: Path, command: str, overwrite: bool = False) -> None:
    """Raises FileExistsError if `path` is a file, a folder of somebody else's, or one of a run and
    `overwrite` is off."""
    if path.is_file():
        raise FileExistsError(f"out is {path}, which is a file: use a folder")
    if (
        path.is_dir()
        and not read_mark(path)
        and (found := {entry.name for entry in path.iterdir()} - {MARK})
    ):
        raise FileExistsError(
            f"out is {path}, which holds other files ({min(found)!r}): use a new folder"
        )
    _require_own(path, command, overwrite)


def _require_own(path: Path, command: str, overwrite: bool) -> None:
    """Raises FileExistsError if files would be replaced without leave, or that no run wrote."""
    mark = read_mark(path)
    if mark and not overwrite:
        raise FileExistsError(
            f"out is {path}, which holds another run: use a new folder, "
            "or add --overwrite to replace it"
        )
    own = files_in(path, mark.get("command"))
    foreign = [name for name in files_in(path, command) if name not in own]
    if foreign:
        raise FileExistsError(f"out is {path}, whose {foreign[0]} no run wrote: use a new folder")


class Folder(contextlib.ExitStack):
    """A folder that this process owns until it is closed, made by `create` or `reopen`. Raises
    OSError if it cannot be used, and FileExistsError if another process is writing there."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        with told(f"out is {path} and cannot be used", "use another folder"):
            path.mkdir(parents=True, exist_ok=True)
            taken = f"out is {path}, where another process is writing: wait for it or use another"
            self._mark = self.enter_context(locked(path / MARK, "a+", taken))

    @classmethod
    def create(cls, path: Path, command: str, options: dict, overwrite: bool = False) -> "Folder":
        """A folder for a new run of a command, without the files of the run that it replaces. Ask
        `require_free` first; raises FileExistsError if another process has begun a run since."""
        with contextlib.ExitStack() as on_error:
            folder = on_error.enter_context(cls(path))
            _require_own(path, command, overwrite)  # again, now that nobody else can fill it
            # A run that fails is not mistaken for the old one
            replaced = read_mark(path).get("command")
            for name in FILES.get(replaced, ()):
                for file in (name, f"{name}.tmp"):
                    (path / file).unlink(missing_ok=True)
            if replaced in EVENTS:
                folder.remove_events()
            folder.remember(command, options)
            on_error.pop_all()
        return folder

    @classmethod
    def reopen(cls, path: Path, command: str) -> "Folder":
        """The folder of a run that goes on, or with nothing but its checkpoint. Raises
        FileNotFoundError if there is neither."""
        found = read_mark(path).get("command")
        alone = files_in(path, command) == ["checkpoint.pt"]
        if found != command and (found or not alone):
            raise FileNotFoundError(
                f"{path} holds no run of {command} to continue: use the folder of one"
            )
        return cls(path)

    def remove_events(self) -> None:
        """Removes TensorBoard's files of an earlier run, or of before a resumption."""
        with self.writing():
            for file in self.path.glob(EVENTS["train"]):
                file.unlink()

    def remember(self, command: str, options: dict) -> None:
        """Writes the mark."""
        with self.writing():
            self._mark.truncate(0)
            self._mark.write(json.dumps({"command": command, "options": options}) + "\n")
            self._mark.flush()
            os.fsync(self._mark.fileno())

    def writing(self) -> contextlib.AbstractContextManager:
        """Names the folder where a write in it fails."""
        return told(f"out is {self.path} and cannot be written", "make room, then continue")

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole or not at all."""
        with self.writing():
            content = content.encode() if isinstance(content, str) else content
            write_whole(self.path / name, lambda file: file.write(content))
