"""Files in a folder: how they are opened, whoever filled it.

The threat: a folder comes from a stranger, who can have put anything under any name in it before a
command is given its path.

Read are the mark, config.json, runs.jsonl, checkpoint.pt and a ring's files. Nothing in them is
executed, and none of them says where to write. Written are only names that a command knows
(disk/run_folder.py, disk/mapped_ring.py), directly in the folder that the user named: whole, as a
new file that then takes the name (`write_whole`), or in place (`opened`: mark, lock, journal,
metrics.csv and the mapped files of a ring). TensorBoard's package opens its events file itself,
under a new name, after everything of such a name has been removed (`Folder.remove_events`).

So it can never happen that a file outside the folder is written, emptied or locked, through a
symbolic link or through a second name of its content (a hard link); that a pipe or a device is
opened and waited for; or that code runs. A checkpoint may be a link to a file, as people link their
best one, because it is only read. What the folder can do: hold wrong numbers, or so many that
reading them takes long. A folder that others change while a command runs is no part of this."""

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO


def opened(path: Path, mode: str, **options) -> IO:
    """Like `open`, but only a plain file with one name, looked at when it is open and before
    anything happens to it. Not for mode w, which empties it at once. Raises OSError."""
    return open(path, mode, opener=_plain, **options)


def locked(path: Path, mode: str, taken: str, shared: bool = False) -> IO:
    """Like `opened`, with a lock until it is closed or the process ends, however it ends: an
    exclusive one, or one that is shared with other shared ones. Raises FileExistsError, `taken`, if
    another process or opened file has it."""
    file = opened(path, mode)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise FileExistsError(taken) from error
    return file


def read_json(path: Path):
    """What a JSON file holds. Raises OSError like `opened`, and ValueError if it is none."""
    with opened(path, "rb") as file:
        return parsed(file.read())


def parsed(text: bytes):
    """The value of JSON text. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:  # thousands of brackets
        raise ValueError("nested too deeply") from error


@contextlib.contextmanager
def told(what: str, remedy: str) -> Iterator[None]:
    """Rewords an OSError that the system raises inside: `what`, the system's reason, `remedy`. One
    without a number, which this package raises, stays as it is."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{what} ({error.strerror}): {remedy}") from error


def write_whole(
    path: Path, write: Callable[[BinaryIO], object], check: Callable[[Path], object] = Path.stat
) -> None:
    """Writes a file whole or not at all: to a new temporary file beside it, which is renamed unless
    `check` raises."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process; of a link this removes the link
    try:
        with opened(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.replace(temporary, path)  # a link, too, is replaced and not followed
    finally:
        temporary.unlink(missing_ok=True)


def _plain(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    raise OSError(
        f"{path} is a link, a folder, a pipe or a device, or one of several names of a file: "
        "delete it"
    )
