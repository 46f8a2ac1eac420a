"""Opens and writes files safely, in a folder that a stranger may have filled.

The threat is a folder from a stranger, who may have put anything under any name into it before the
user gives its path to a command.

Commands read the mark, config.json, runs.jsonl, checkpoint.pt, a study's batches and the files of a
ring. Nothing in these files is executed, and none of them says where to write. Commands write only
to names that they know (disk/run_folder.py, disk/mapped_ring.py), directly in the folder that the
user named. A file is written whole, as a new file that then takes the name (`write_whole`), or in
place (`opened`: the mark, the lock, the journal, metrics.csv and the mapped files of a ring).
TensorBoard's package opens its events file itself, under a new name, after all files of such names
have been removed (`Folder.remove_matching`).

So three things can never happen. No file outside the folder is written, emptied or locked, neither
through a symbolic link nor through a second name of its content (a hard link). No pipe or device is
opened and waited for. No code runs. A checkpoint may be a link to a file, because it is only read,
and people link their best checkpoint.

The folder can still hold wrong numbers, or so many that reading them takes long. A folder that
other processes change while a command runs is not considered here."""

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
    """Like `open`, but opens only a plain file with one name, otherwise raises OSError.

    The file is checked when it is open and before anything happens to it. Do not use mode w, which
    would empty the file at once.
    """
    return open(path, mode, opener=_plain, **options)


def locked(path: Path, mode: str, taken: str, shared: bool = False) -> IO:
    """Like `opened`, with a lock until the file is closed or the process ends, however it ends.

    The lock is exclusive or, with `shared`, shared with other shared locks. Raises FileExistsError
    with the message `taken` if another process or opened file has a lock.
    """
    file = opened(path, mode)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise FileExistsError(taken) from error
    return file


def read_json(path: Path):
    """The value in a JSON file. Raises OSError like `opened`, and ValueError if it is not JSON."""
    with opened(path, "rb") as file:
        return parsed(file.read())


def parsed(text: bytes):
    """The value of JSON text. Raises ValueError if it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:  # thousands of brackets
        raise ValueError("nested too deeply") from error


@contextlib.contextmanager
def told(what: str, remedy: str) -> Iterator[None]:
    """A context that rewords OSErrors of the system: `what`, the system's reason, then `remedy`.

    An OSError of this package has no error number and stays as it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{what} ({error.strerror}): {remedy}") from error


def write_whole(
    path: Path, write: Callable[[BinaryIO], object], check: Callable[[Path], object] = Path.stat
) -> None:
    """Writes a file whole or not at all.

    `write` writes to a new temporary file beside it. The temporary file is then renamed, unless
    `check` raises.
    """
    temporary = path.with_name(path.name + ".tmp")
    # A killed process may have left such a file. If it is a link, this removes the link.
    temporary.unlink(missing_ok=True)
    try:
        with opened(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.replace(temporary, path)  # a link is replaced, too, and not followed
    finally:
        temporary.unlink(missing_ok=True)


def _plain(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    raise OSError(
        f"{path} is a link, a folder, a pipe or a device, or one of several names of a file: "
        "delete it"
    )
