"""Tensors in a folder of memory-mapped files: larger than RAM if need be, and still there when the process is gone.

A folder holds NAME.bin for each tensor, `ring.json` that says what they are, and `lock`. The files are reserved in full and
`ring.json` comes last, by a rename, so a folder with it is complete. What a process has written to a mapped page belongs to the
kernel from then on: killing the process loses nothing, in the order it wrote. (A power failure is another matter: the kernel
writes pages back when it likes.) One process may write to a folder, or any number read it; the kernel drops the lock of one
that dies.
"""

import fcntl
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import torch


class MappedFolder:
    """A folder's tensors. Makes the folder if there is none; otherwise checks that it is the same.

    Attributes:
        tensors: name -> tensor, whose memory is the file's. Read-only ones are copied on write, so the file never changes.

    Args:
        folder: where.
        about: what must agree with the folder's own, as JSON has it.
        shapes: name -> (shape, dtype).
        writable: off opens an existing folder to read.

    Raises:
        ValueError: the folder holds something else, or a file of the wrong size.
        OSError: no such folder to read, no room, no rights, or another process is using it.
    """

    def __init__(self, folder: str | Path, about: dict, shapes: dict[str, tuple[tuple, torch.dtype]], writable: bool):
        self.folder = Path(folder)
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        try:
            new = writable and not (self.folder / "ring.json").exists()
            if new:
                self._require_room(sum(sizes.values()))
                self.folder.mkdir(parents=True, exist_ok=True)
            self._lock(writable)
            if new:
                self._make(about, sizes)
            self._check(about, sizes)
            self.tensors = {}
            for name, (shape, dtype) in shapes.items():
                mapped = np.memmap(self.path_of(name), np.uint8, "r+" if writable else "c")
                self.tensors[name] = torch.from_numpy(mapped).view(dtype).view(shape)
        except OSError as error:
            if error.errno is None:
                raise  # one of our own lines
            raise OSError(f"memmap is {folder} and cannot be used ({error.strerror}): name another folder") from error

    def close(self) -> None:
        """Drops the lock. The tensors stay mapped: write no more."""
        self._lock_file.close()

    def path_of(self, name: str) -> Path:
        """The file of a tensor."""
        return self.folder / f"{name}.bin"

    @staticmethod
    def about(folder: str | Path, form: str) -> dict:
        """What a folder says about itself.

        Raises:
            FileNotFoundError: no `ring.json` in it. ValueError: one that is damaged or not of format `form`.
        """
        path = Path(folder) / "ring.json"
        try:
            about = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(f"memmap is {folder}, which holds no finished ring: name another, or delete it") from error
        except (ValueError, OSError) as error:
            raise ValueError(
                f"memmap is {folder}, whose ring.json cannot be read: mend its rights or delete the folder"
            ) from error
        if not isinstance(about, dict) or about.get("format") != form:
            raise ValueError(f"memmap is {folder}, whose ring.json is not of format {form}: name another folder")
        return about

    def _lock(self, writable: bool) -> None:
        try:
            self._lock_file = (self.folder / "lock").open("ab" if writable else "rb")
            fcntl.flock(self._lock_file, (fcntl.LOCK_EX if writable else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"memmap is {self.folder}, which holds no ring: name the folder of one") from error
        except BlockingIOError as error:
            raise OSError(f"memmap is {self.folder}, which another ring is using: close that one or name another") from error

    def _require_room(self, needed: int) -> None:
        """Refuses a new folder that holds something else or will not fit, before anything is written."""
        if self.folder.is_dir() and any(path.name != "lock" for path in self.folder.iterdir()):
            raise OSError(f"memmap is {self.folder}, which holds files but no finished ring: name another, or delete it")
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise OSError(f"memmap is {self.folder} and needs {needed:,} bytes, the disk has {free:,} free: lower capacity")

    def _make(self, about: dict, sizes: dict[str, int]) -> None:
        try:
            for name, size in sizes.items():
                with self.path_of(name).open("wb") as file:
                    if hasattr(os, "posix_fallocate"):  # or a full disk would kill the process at some later write
                        os.posix_fallocate(file.fileno(), 0, size)
                    file.truncate(size)
        except OSError:
            for name in sizes:
                self.path_of(name).unlink(missing_ok=True)
            raise
        temporary = self.folder / "ring.json.tmp"
        temporary.write_text(json.dumps(about, indent=1) + "\n")
        os.replace(temporary, self.folder / "ring.json")

    def _check(self, about: dict, sizes: dict[str, int]) -> None:
        theirs = self.about(self.folder, about["format"])
        for name, ours in about.items():
            if theirs.get(name) != ours:
                other = f"has {name} {theirs.get(name)!r} and not {ours!r}"
                raise ValueError(f"memmap is {self.folder}, whose ring {other}: name another folder, or delete this one")
        for name, size in sizes.items():
            path = self.path_of(name)
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise ValueError(
                    f"memmap is {self.folder}, where {path.name} has {found:,} bytes of {size:,}: restore it or delete the folder"
                )
