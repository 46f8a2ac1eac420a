"""Short versions of tables that are too wide for a page.

A benchmark writes its whole table to NAME.md, and with these functions a few of its columns and
rows to NAME_short.md, which the pages in benchmarks/pages/ show."""

import re
from collections.abc import Callable


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


def table_of(rows: list[dict[str, str]]) -> str:
    """A Markdown table with the keys of the first row as its head."""
    lines = [f"| {' | '.join(rows[0])} |", "| --- " * len(rows[0]) + "|"]
    lines += [f"| {' | '.join(row.values())} |" for row in rows]
    return "\n".join(lines)


def chosen(
    text: str, columns: dict[str, str], keep: Callable[[dict[str, str]], bool] = lambda row: True
) -> str:
    """Some columns of the first table in a text, and of its rows those to `keep`.

    Args:
        columns: the name of a column -> its name in the short table.
    """
    rows = [row for row in rows_of(text) if keep(row)]
    return table_of([{new: row[old] for old, new in columns.items()} for row in rows])


def last_line(text: str) -> str:
    """What a table ends with: its command, the machine and the versions."""
    return text.strip().splitlines()[-1]
