"""Reads dumps that have a record for each sequence, or for each batch: .jsonl and .parquet.

A record has the names of dump_names.py. The log-probabilities in it are those of one sequence,
[tokens], or of a batch, [sequences, tokens] or a list of lists. An advantage is a number for each
token, or one for each sequence.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from .dump_memory import most_tokens
from .dump_names import KNOWN, NAMES, TOKENS, find_names, take_arrays
from .token_arrays import NUMBERS, array_of, as_lengths, opened, rows_of

LONGEST_LINE = 2**28  # bytes
ROWS_AT_ONCE = 64  # of a Parquet file
INSTALL = "pip install pyarrow"
KINDS = "biuf"  # NumPy's types of numbers


class Records:
    """The arrays of records that are added one by one. All must have the same names.

    `subject`  begins the messages, such as "dump is dump.jsonl"
    """

    def __init__(self, subject: str):
        self.subject = subject
        self.roles = None  # names of the first record, by array
        self.rows = {}  # of each array, the numbers of each sequence
        self.most = most_tokens()
        self.tokens = 0

    def add(self, where: str, record: Mapping) -> None:
        """Adds a record. `where` says which it is, such as "line 3"."""
        subject = f"{self.subject}, {where}"
        is_text = {name for name in NAMES[TOKENS] if isinstance(record.get(name), str)}
        names = [name for name in record if record[name] is not None and name not in is_text]
        roles = find_names(subject, names)
        if self.roles is None:
            self.roles = roles
            self.rows = {role: [] for role in roles if role != "lengths"}
        elif roles != self.roles:
            first = ", ".join(name for group in self.roles.values() for name in group)
            raise ValueError(f"{subject}, which has not the names of the first: {first}")
        try:
            arrays = take_arrays(subject, record, roles)
            lengths = as_lengths(arrays.pop("lengths", None))
            rows = {role: rows_in(role, x, arrays, lengths) for role, x in arrays.items()}
        except ValueError as error:
            raise ValueError(f"{subject}: {error}") from error
        self.tokens += sum(len(row) for row in rows["actor_logp"])
        if self.tokens > self.most:
            raise ValueError(
                f"{subject}: there is memory for {self.most:,} tokens, and the file has more: give "
                "fewer sequences"
            )
        for role, new in rows.items():
            self.rows[role] += new

    def arrays(self) -> dict[str, list]:
        """The arrays of all records, as arguments of `mismatch`."""
        if not self.rows:
            raise ValueError(f"{self.subject}, which has no records: give a sequence in each")
        return self.rows


def rows_in(role: str, x, arrays: dict, lengths: np.ndarray | None) -> list:
    """The numbers of each sequence in one array of a record, or one number for each sequence."""
    x = opened(x)
    if is_one_number(x):
        x = x.item() if isinstance(x, torch.Tensor) else x
        return as_numbers(role, [x]).tolist()
    is_batch = lengths is not None or depth_of(opened(arrays["actor_logp"])) > 1
    if depth_of(x) == 1 and is_batch and role == "advantages":
        values, _ = array_of(role, x, KINDS, NUMBERS)
        if lengths is None or len(values) == len(lengths):
            return values.tolist()
    if lengths is not None:
        return rows_of(role, x, lengths, KINDS, NUMBERS)[0]
    if depth_of(x) == 1:
        return [x if isinstance(x, torch.Tensor) else as_numbers(role, x)]
    rows = list(x)
    return [row if isinstance(row, torch.Tensor) else as_numbers(role, row) for row in rows]


def is_one_number(x) -> bool:
    return not isinstance(x, list | tuple) and np.ndim(x) == 0


def depth_of(x) -> int:
    """1 of a row of numbers, 2 of a list of rows or an array [sequences, tokens]."""
    if isinstance(x, list | tuple):
        is_row = not x or np.ndim(x[0]) == 0 or isinstance(x[0], str)
        return 1 if is_row else 2
    return x.ndim


def as_numbers(name: str, row) -> np.ndarray:
    """A row of numbers, in their own type. None, which JSON has for NaN, becomes NaN."""
    try:
        array = np.asarray(row)
        if array.dtype == object:
            array = np.asarray([np.nan if entry is None else entry for entry in row])
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name} is no row of numbers: give numbers") from error
    if not array.size:
        return array.astype(np.float64)
    if array.dtype.kind not in KINDS:
        raise ValueError(f"{name} holds {array.dtype}: save numbers")
    # JSON does not tell 0 from 0.0, so a whole row of them may be of whole numbers.
    return array.astype(np.float64) if array.dtype.kind in "iu" else array


def read_json_lines(subject: str, path: Path) -> dict[str, list]:
    """The records of a file with a JSON object on each line. Only one line is held at a time."""
    records = Records(subject)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise ValueError(f"{subject}, line {number}, is too long: give a sequence a line")
            if not line.strip():
                continue
            records.add(f"line {number}", parsed(f"{subject}, line {number}", line))
    return records.arrays()


def parsed(subject: str, line: bytes) -> dict:
    """The object on a line. Other names than those of arrays keep their place, without a value."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{subject}, which is not complete JSON: write an object on each line"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{subject}, which is not a JSON object: write an object on each line")
    return {name: value if name in KNOWN else "" for name, value in record.items()}


def read_parquet(subject: str, path: Path) -> dict[str, list]:
    """The records of a Parquet file. Only the columns that are needed are read."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{subject}, which needs a package: {INSTALL}") from error
    path.open("rb").close()  # raises OSError for a file that is not there
    records = Records(subject)
    row = 0
    for batch in parquet_batches(subject, path, pyarrow.parquet.ParquetFile):
        for record in batch:
            records.add(f"row {row}", record)
            row += 1
    return records.arrays()


def parquet_batches(subject: str, path: Path, open_file) -> Iterator[list[dict]]:
    """The records of a Parquet file, some at a time. `open_file` is pyarrow's ParquetFile."""
    incomplete = f"{subject}, which is not a complete Parquet file"
    try:
        file = open_file(path)
        columns = file.schema_arrow.names
    except Exception as error:  # whatever a file that is cut off or forged makes pyarrow raise
        raise ValueError(incomplete) from error
    with file:
        roles = find_names(subject, columns)
        needed = [name for group in roles.values() for name in group]
        batches = file.iter_batches(ROWS_AT_ONCE, columns=needed)
        while True:
            try:
                batch = next(batches, None)
                records = None if batch is None else records_of(batch)
            except Exception as error:
                raise ValueError(incomplete) from error
            if records is None:
                return
            yield records


def records_of(batch) -> list[dict]:
    """The rows of a batch of Arrow. Rows of plain numbers stay arrays of their own type."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    return [
        {name: entry_of(column[i]) for name, column in columns.items()} for i in range(len(batch))
    ]


def entry_of(scalar):
    """An entry of a column of Arrow, as a NumPy array if it is a row of numbers without gaps."""
    values = getattr(scalar, "values", None)
    if values is None or values.null_count or hasattr(values, "values"):
        return scalar.as_py()
    return values.to_numpy(zero_copy_only=False)
