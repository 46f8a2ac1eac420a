"""metrics.csv: the history of a run, which `train` writes into the run's folder."""

import csv

from ..disk.run_folder import Folder
from ..history import History


class MetricsFile:
    """The file metrics.csv of a run: a header, and a row for each iteration.

    The first rows that are written replace an earlier file.
    """

    def __init__(self, folder: Folder):
        self.folder = folder
        self.rows = 0  # number of rows that have been written

    def write(self, history: History) -> None:
        """Writes the rows of a history that are not in the file yet."""
        rows = history.since(self.rows)
        if not rows:
            return
        path = self.folder.path / "metrics.csv"
        with self.folder.writing(), open(path, "a" if self.rows else "w", newline="") as file:
            writer = csv.writer(file)
            if self.rows == 0:
                writer.writerow(history.columns)
            for row in rows:
                writer.writerow([int(x) if x.is_integer() else x for x in row.values()])
        self.rows += len(rows)
