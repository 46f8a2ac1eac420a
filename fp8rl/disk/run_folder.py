"""Output folders of commands: each has one owner at a time and files that are written whole.

A folder is recognized by its mark, the file `.fp8rl`. The process that writes in a folder holds a
lock on the mark. The kernel releases the lock when the process ends, however it ends. The mark is a
JSON object, with the command that made the folder and its options. In a folder without a mark
nothing is ever touched. In a folder with a mark, only the files that the command writes are
touched.

The file of a batch that a study has begun is known only by a pattern: its name has a hash of the
batch's configs (study/batch_file.py)."""

import contextlib
import json
import os
from pathlib import Path

from .safe_files import locked, told, write_whole

MARK = ".fp8rl"
BATCHES = f"batch-{'[0-9a-f]' * 12}.pt"
# Names, or patterns of names, of the files that a command writes, the first one first.
FILES = {
    "train": ("checkpoint.pt", "config.json", "metrics.csv", "reward_curve.png"),
    "study": ("runs.jsonl", "results.csv", "table.md", "curves.png", BATCHES),
}


def read_mark(path: Path) -> dict:
    """The mark of a folder, with `command` and `options`.

    It is empty if there is no mark, or not the file that the command writes first.
    """
    # Errors mean that there is no mark, or that this package did not write it.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        mark = json.loads((path / MARK).read_bytes())
        if isinstance(mark["options"], dict) and (path / FILES[mark["command"]][0]).exists():
            return mark
    return {}


def require_free(path: Path, command: str, overwrite: bool = False) -> None:
    """Raises FileExistsError unless a new run of a command may write to the folder `path`.

    It may not if `path` is a file, or if the folder holds files that no run wrote. With `overwrite`
    the folder may hold a run of the same command.
    """
    if path.is_file():
        raise FileExistsError(f"out is {path}, which is a file: use a folder")
    mark = read_mark(path)
    if mark and not (overwrite and mark["command"] == command):
        raise FileExistsError(
            f"out is {path}, which holds another run, of {mark['command']}: use a new folder, "
            f"or add --overwrite to replace a run of {command}"
        )
    foreign = sorted(file.name for file in path.glob("*") if file.name != MARK)
    if foreign and not mark:
        raise FileExistsError(
            f"out is {path}, which holds other files ({foreign[0]!r}): use a new folder"
        )


class Folder(contextlib.ExitStack):
    """A folder that this process owns until the folder is closed.

    It is made by `create` or `reopen`. Raises OSError if the folder cannot be used, and
    FileExistsError if another process is writing there.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        with told(f"out is {path} and cannot be used", "use another folder"):
            path.mkdir(parents=True, exist_ok=True)
            taken = f"out is {path}, where another process is writing: wait for it or use another"
            self._mark = self.enter_context(locked(path / MARK, taken))

    @classmethod
    def create(cls, path: Path, command: str, options: dict, overwrite: bool = False) -> "Folder":
        """Makes a folder for a new run of a command. Files of the run that it replaces are removed.

        Call `require_free` first. Raises FileExistsError if another process has begun a run since.
        """
        with contextlib.ExitStack() as on_error:
            folder = on_error.enter_context(cls(path))
            # Checked again, now that no other process can fill the folder.
            require_free(path, command, overwrite)
            # Old files are removed, so that a run that fails is not mistaken for the old run.
            folder.remove(*FILES[command])
            with folder.writing():
                folder._mark.truncate(0)
                folder._mark.write(json.dumps({"command": command, "options": options}) + "\n")
                folder._mark.flush()
                os.fsync(folder._mark.fileno())
            on_error.pop_all()
        return folder

    @classmethod
    def reopen(cls, path: Path, command: str) -> "Folder":
        """Opens the folder of a run that is continued. Raises FileNotFoundError for any other."""
        if read_mark(path).get("command") != command:
            raise FileNotFoundError(
                f"{path} holds no run of {command} to continue: use the folder of a stopped run"
            )
        return cls(path)

    def remove(self, *patterns: str) -> None:
        """Removes the files whose names fit one of the patterns, as far as they are there."""
        with self.writing():
            for pattern in patterns:
                for file in (*self.path.glob(pattern), *self.path.glob(f"{pattern}.tmp")):
                    file.unlink()

    def writing(self) -> contextlib.AbstractContextManager:
        """A context that names the folder in the error if a write in it fails."""
        return told(f"out is {self.path} and cannot be written", "make room, then continue")

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole or not at all."""
        with self.writing():
            content = content.encode() if isinstance(content, str) else content
            write_whole(self.path / name, lambda file: file.write(content))
