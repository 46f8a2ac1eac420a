"""Opens, locks and writes the files of a folder of results.

Commands write only to names that they know (disk/run_folder.py, disk/mapped_ring.py), directly in
the folder that the user named. A file is written whole, as a new file that then takes the name
(`write_whole`), or in place."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO


def locked(path: Path, taken: str) -> IO:
    """Opens a file to append to it, with a lock until it is closed or the process ends, however it
    ends.

    Raises FileExistsError with the message `taken` if another process or opened file has the lock.
    """
    file = open(path, "a+")  # noqa: SIM115  The caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise FileExistsError(taken) from error
    return file


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


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file whole or not at all.

    `write` writes to a new temporary file beside it, which is then renamed.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a write that was cut off
    try:
        with open(temporary, "xb") as file:  # a new file, and no link to another one
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
