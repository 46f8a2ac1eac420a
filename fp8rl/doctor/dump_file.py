"""Reads arrays of log-probabilities from an .npz file that anybody may have made.

Nothing in the file is trusted before it is checked. No pickles are loaded. The size of an array is
compared with what the file really holds, before memory is allocated for it.
"""

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

REQUIRED = ("learner_logp", "actor_logp")
OPTIONAL = ("mask", "advantages", "lengths", "tokens")
MOST_BYTES = 2**30  # the largest size of an array
SUFFIX = ".npy"


def read_dump(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a dump, by name.

    They are learner_logp and actor_logp, and mask, advantages, lengths and tokens if the file has
    them.
    Raises ValueError, with a message of one line, for a file that is not such a dump.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {entry.filename.removesuffix(SUFFIX): entry for entry in archive.infolist()}
            check_names(path, members)
            return {name: read_array(path, archive, entry, name) for name, entry in members.items()}
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"dump is {path}, which cannot be read: {reason}") from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise ValueError(
            f"dump is {path}, which is not a complete .npz file: write it with numpy.savez"
        ) from error


def check_names(path: Path, names) -> None:
    known = (*REQUIRED, *OPTIONAL)
    for name in REQUIRED:
        if name not in names:
            raise ValueError(f"dump is {path}, which has no {name}: save it under this name")
    for name in names:
        if name not in known:
            raise ValueError(
                f"dump is {path}, which has {name[:40]!r}: use the names {', '.join(known)} alone"
            )


def read_array(
    path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str
) -> np.ndarray:
    """Reads one array. Raises ValueError unless its header fits the bytes that follow."""
    with archive.open(entry) as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, is_column_major, dtype = read_header(file)
        except zipfile.BadZipFile:
            raise
        except Exception as error:  # whatever a forged header makes NumPy raise
            raise ValueError(
                f"{name} in {path} has no NumPy header: write it with numpy.savez"
            ) from error
        if dtype.kind not in "fiub":
            raise ValueError(f"{name} in {path} holds {dtype}: save numbers")
        size = math.prod(shape) * dtype.itemsize
        if size > MOST_BYTES:
            raise ValueError(
                f"{name} in {path} has the shape {shape}, {size:,} bytes: "
                f"give at most {MOST_BYTES:,} bytes, fewer sequences are enough"
            )
        if min(shape, default=0) < 0 or entry.file_size - file.tell() != size:
            raise ValueError(
                f"{name} in {path} has the shape {shape} in its header, but other data: "
                "write it with numpy.savez"
            )
        content = file.read(size)
        if len(content) != size:
            raise EOFError(name)
    order = "F" if is_column_major else "C"
    return np.frombuffer(content, dtype).reshape(shape, order=order)
