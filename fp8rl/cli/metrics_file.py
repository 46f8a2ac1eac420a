"""metrics.csv: the history of a run, which `train` writes into the run's folder."""

import csv
import io

from ..disk.run_folder import Folder
from ..disk.safe_files import opened
from ..history import History


class MetricsFile:
    """The file metrics.csv of a run: a header, and a row for each iteration."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.rows = 0  # number of rows that have been written

    def write(self, history: History) -> None:
        """Writes the rows of a history that are not in the file yet. The first rows replace the
        file."""
        if len(history) == self.rows:
            return
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        if self.rows == 0:
            writer.writerow(history.columns)
        writer.writerows(
            [int(x) if x.is_integer() else x for x in row.values()]
            for row in history.since(self.rows)
        )
        if self.rows == 0:
            self.folder.write("metrics.csv", text.getvalue())
        else:
            path = self.folder.path / "metrics.csv"
            with self.folder.writing(), opened(path, "a", newline="") as file:
                file.write(text.getvalue())
        self.rows = len(history)
