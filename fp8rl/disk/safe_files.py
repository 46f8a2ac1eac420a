"""Opens, locks and writes the files of a folder of results.

Commands write only to names that they know (disk/run_folder.py, disk/mapped_ring.py), directly in
the folder that the user named. A file is written whole, as a new file that then takes the name
(`write_whole`), or in place (`opened`). Neither follows a symbolic link, because it may lead out of
the folder."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO


def opened(path: Path, mode: str, **options) -> IO:
    """Like `open`, but raises OSError for a symbolic link."""
    return open(path, mode, opener=_not_a_link, **options)


def _not_a_link(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a symbolic link: delete it") from error
        raise


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
    temporary.unlink(missing_ok=True)  # a killed process may have left it, or a link may be there
    try:
        with opened(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # a link is replaced, too, and not followed
    finally:
        temporary.unlink(missing_ok=True)
