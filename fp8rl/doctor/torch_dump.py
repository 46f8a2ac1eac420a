"""Reads tensors from a file of torch.save, without running anything that is in it."""

import contextlib
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from .dump_memory import check_memory
from .dump_names import KNOWN, find_names, listed, take_arrays
from .dump_records import Records

SAVE_TENSORS = "save a dict of tensors by torch.save, with the names that your stack gives them"
DEEPEST = 3  # lists within lists
BEGINNING = 2**16  # bytes of a pickle in which the name of its object is looked for


def read_torch_file(subject: str, path: Path) -> dict:
    """The tensors in a file of torch.save: a dict of tensors, or a list of such dicts.

    The file is mapped into memory, so tensors that are not needed, such as logits, are not read.
    """
    with path.open("rb") as file:
        beginning = file.read(BEGINNING)
    if not beginning.startswith(b"PK"):
        name = name_of_object(beginning)
        if name:
            raise ValueError(f"{subject}, which is a pickle of {name}, an object: {SAVE_TENSORS}")
        raise ValueError(f"{subject}, which is not a complete file of torch.save: {SAVE_TENSORS}")
    try:
        with zipfile.ZipFile(path) as archive:
            is_stored = all(
                entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist()
            )
        if not is_stored:
            raise RuntimeError("compressed")
        with warnings.catch_warnings():  # of a file that is forged
            warnings.simplefilter("ignore")
            content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        names = objects_in(path)
        if names.startswith("numpy"):
            raise ValueError(
                f"{subject}, which has NumPy's arrays: write them with numpy.savez"
            ) from error
        if names:
            raise ValueError(
                f"{subject}, which holds {names}, an object: {SAVE_TENSORS}"
            ) from error
        raise ValueError(f"{subject}, which is not a file of tensors: {SAVE_TENSORS}") from error
    except Exception as error:  # whatever a file that is cut off or forged makes torch raise
        raise ValueError(
            f"{subject}, which is not a complete file of torch.save: {SAVE_TENSORS}"
        ) from error
    return arrays_in(subject, path, content)


def arrays_in(subject: str, path: Path, content) -> dict:
    """The arrays in what torch.load has returned."""
    if not is_list_of_dicts(content):
        content = dict_in(subject, content)
        check_dict(path, content)
        return take_arrays(subject, content)
    records = Records(subject)
    for i, record in enumerate(content):
        check_dict(path, record)
        records.add(f"item {i}", record)
    return records.arrays()


def is_list_of_dicts(content) -> bool:
    is_list = isinstance(content, list | tuple)
    return is_list and bool(content) and all(isinstance(entry, dict) for entry in content)


def dict_in(subject: str, content) -> dict:
    """The dict of tensors: `content` itself, or the one dict in it that has log-probabilities."""
    if not isinstance(content, dict) and hasattr(content, "keys"):
        content = dict(content.items())  # tensordict's, where that package has been imported
    if not isinstance(content, dict):
        raise ValueError(f"{subject}, which holds {kind_of(content)} without names: {SAVE_TENSORS}")
    inner = [entry for entry in content.values() if isinstance(entry, dict)]
    with contextlib.suppress(ValueError):
        find_names(subject, content)
        return content
    for entry in inner:
        with contextlib.suppress(ValueError):
            find_names(subject, entry)
            return entry
    return content


def check_dict(path: Path, content: dict) -> None:
    """Raises ValueError unless the arrays that are needed have numbers that are in the file."""
    for name in KNOWN & content.keys():
        for tensor in tensors_in(f"{name} in {path}", content[name]):
            check_tensor(f"{name} in {path}", tensor)


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    if not (is_plain or tensor.is_nested) or tensor.is_meta or tensor.is_complex():
        raise ValueError(f"{name} is {kind_of(tensor)}: save a plain tensor of numbers")
    # A few bytes may stand for a huge tensor, whose strides are 0.
    check_memory(f"{name} has {tensor.numel():,} numbers", tensor.numel())


def tensors_in(name: str, array, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in lists, or in lists of lists. Raises ValueError for what is no number."""
    if isinstance(array, torch.Tensor):
        yield array
    elif isinstance(array, list | tuple) and depth < DEEPEST:
        for entry in array:
            yield from tensors_in(name, entry, depth + 1)
    elif not isinstance(array, bool | int | float | None):
        raise ValueError(f"{name} holds {kind_of(array)}: save numbers")


def kind_of(x) -> str:
    """What a thing is, in a word or two."""
    if isinstance(x, torch.Tensor):
        return f"a tensor of {x.dtype} on {x.device} ({x.layout})"
    if isinstance(x, dict):
        return f"a dict; {listed(list(x))}"
    return f"a {type(x).__name__}"


def objects_in(path: Path) -> str:
    """The names of the classes and functions that a file would have to import, up to three."""
    with contextlib.suppress(Exception):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        return ", ".join(sorted(name[:80] for name in names if name.isprintable())[:3])
    return ""


def name_of_object(pickled: bytes) -> str:
    """The first name that a pickle imports, or an empty string. Nothing is imported."""
    strings = []
    with contextlib.suppress(Exception):  # the bytes are no pickle, or end within one
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in ("GLOBAL", "INST"):
                name = argument.replace(" ", ".")
                break
            if opcode.name == "STACK_GLOBAL":
                name = ".".join(strings[-2:])
                break
            if isinstance(argument, str):
                strings.append(argument)
        else:
            return ""
        return name[:80] if name.isprintable() else ""
    return ""
