"""The files that benchmarks write: journals of what is finished, and tables in Markdown.

A benchmark that takes hours keeps a journal beside its table, NAME.csv, and goes on from it. A table
that is too wide for a page is NAME.md, and a few of its columns and rows are NAME_short.md."""

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


class Journal:
    """A .csv file with a line for everything that is finished.

    Raises ValueError if there is a file of this name with other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str]):
        self.path = path
        self.columns = list(columns)
        if not path.exists():
            self.write([])
        with path.open(newline="") as file:
            there = next(csv.reader(file), [])
        if there != self.columns:
            raise ValueError(f"{path} has other columns: delete it to measure everything again")

    def rows(self) -> list[dict[str, str]]:
        """All lines. One that begins with # is a remark."""
        with self.path.open(newline="") as file:
            return list(csv.DictReader(line for line in file if not line.startswith("#")))

    def done(self, *names: str) -> set[tuple[str, ...]]:
        """What is finished, by some of the columns."""
        return {tuple(row[name] for name in names) for row in self.rows()}

    def add(self, *rows: dict) -> None:
        """Appends lines."""
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerows(rows)

    def write(self, rows: Iterable[dict]) -> None:
        """Replaces the file."""
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def table_of(columns: Iterable[str], rows: Iterable[Iterable]) -> str:
    """A Markdown table of rows of cells."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a Markdown table. A bar within a cell is written as \\|."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a text, by the names of its columns."""
    lines = text[text.index("|") :].splitlines()
    names = cells_of(lines[0])
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(names, cells_of(line), strict=True)))
    return rows


def chosen(
    text: str, columns: dict[str, str], keep: Callable[[dict[str, str]], bool] = lambda row: True
) -> str:
    """Some columns of the first table in a text, and of its rows those to `keep`.

    Args:
        columns: the name of a column -> its name in the short table.
    """
    rows = [row for row in rows_of(text) if keep(row)]
    return table_of(columns.values(), [[row[old] for old in columns] for row in rows])


def last_line(text: str) -> str:
    """What a table ends with: its command, the machine and the versions."""
    return text.strip().splitlines()[-1]
