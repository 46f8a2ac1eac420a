"""Reads log-probabilities from a file that anybody may have made.

Four kinds of files are read, by their ending:

- .npz, which numpy.savez writes;
- .pt and .pth, which torch.save writes: a dict of tensors, or a list of such dicts;
- .jsonl, with a sequence or a batch on each line;
- .parquet, with a sequence in each row, if pyarrow is installed.

Nothing in the file is trusted before it is checked, and nothing in it is executed: no pickles are
loaded, and torch.load takes tensors alone. The size of an array is compared with what the file
really holds, and with the memory of the machine, before memory is allocated for it.
"""

import math
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .dump_memory import check_memory
from .dump_names import find_names, take_arrays
from .dump_records import read_json_lines, read_parquet
from .torch_dump import SAVE_TENSORS, read_torch_file

SUFFIX = ".npy"
PICKLES = (".pkl", ".pickle", ".dp")


def read_dump(path: Path) -> dict:
    """Reads the arrays of a dump, as arguments of `mismatch`.

    They are learner_logp and actor_logp, and mask, advantages, lengths and tokens if the file has
    them.
    Raises ValueError, with a message of one line, for a file that is not such a dump.
    """
    subject = f"dump is {path}"
    try:
        return reader_of(subject, path)(subject, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{subject}, which cannot be read: {reason}") from error


def reader_of(subject: str, path: Path) -> Callable[[str, Path], dict]:
    """The function that reads files with this ending."""
    readers = {
        ".npz": read_npz,
        ".pt": read_torch_file,
        ".pth": read_torch_file,
        ".jsonl": read_json_lines,
        ".parquet": read_parquet,
    }
    ending = path.suffix.lower()
    if ending in PICKLES:
        raise ValueError(f"{subject}, a pickle, which could run any code: {SAVE_TENSORS}")
    if ending not in readers:
        raise ValueError(f"{subject}: use a file that ends with {', '.join(readers)}")
    return readers[ending]


def read_npz(subject: str, path: Path) -> dict[str, np.ndarray]:
    """The arrays in a file of numpy.savez."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {entry.filename.removesuffix(SUFFIX): entry for entry in archive.infolist()}
            roles = find_names(subject, members)
            arrays = {
                name: read_array(path, archive, members[name], name)
                for names in roles.values()
                for name in names
            }
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{subject}, which is not a complete .npz file: write it with numpy.savez"
        ) from error
    return take_arrays(subject, arrays, roles)


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
        if min(shape, default=0) < 0:
            raise ValueError(
                f"{name} in {path} has the shape {shape} in its header: write it with numpy.savez"
            )
        count = math.prod(shape)
        check_memory(f"{name} in {path} has the shape {shape}", count)
        size = count * dtype.itemsize
        if entry.file_size - file.tell() != size:
            raise ValueError(
                f"{name} in {path} has the shape {shape} in its header, but other data: "
                "write it with numpy.savez"
            )
        content = file.read(size)
        if len(content) != size:
            raise EOFError(name)
    order = "F" if is_column_major else "C"
    return np.frombuffer(content, dtype).reshape(shape, order=order)
