"""Batches of a study that have begun: their state in files, from which a stopped study goes on.

A batch is a population, or a single run. Its state is a checkpoint (disk/checkpoint.py), which is
written once a minute, and removed when the batch's results are in the study's journal. On a CPU the
batch then goes on bit for bit as if it had not been stopped, but for tasks that Gymnasium steps:
like a resumed run, these begin new episodes.

A file takes about as many bytes as the batch's rings: 18 for each transition of the cart in
float32, so 11 MB for 30 agents of the default capacity, which are written in a tenth of a second.
"""

import dataclasses
import functools
import hashlib
import json
import time
from pathlib import Path

from ..build import build, build_population
from ..config import Config
from ..disk import checkpoint
from ..machine import hardware
from ..train import Run

SECONDS = 60  # between two times that a batch is saved


class BatchFile:
    """The file of a batch in a study's folder, named after the batch's configs.

    Without a folder there is no file: the batch is new, and is never saved.
    """

    def __init__(self, folder: Path | None, configs: list[Config]):
        fields = [dataclasses.asdict(config) for config in configs]
        digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        self.configs = configs
        self.path = None if folder is None else folder / f"batch-{digest[:12]}.pt"
        self.saved_at = time.monotonic()

    def built(self, alone: bool) -> Run:
        """The batch as it was saved or, if it was not, a new one. `alone` builds a single run.

        Raises ValueError for a file that cannot be read.
        """
        make = functools.partial(build_population, self.configs)
        if alone:
            make = functools.partial(build, self.configs[0])
        if self.path is None or not self.path.exists():
            return make()
        try:
            # Trusted, because the command line names the task.
            _, state = checkpoint.resume(self.path, trust=True)
        except ValueError as error:
            raise ValueError(f"{error}; without the file its agents begin again") from error
        return make(state=state)

    def is_due(self) -> bool:
        """Whether it is time to save the batch."""
        return self.path is not None and time.monotonic() - self.saved_at > SECONDS

    def save(self, run: Run) -> None:
        """Writes the state of a run or population, unless memory has no room for the copy of the
        ring that is written."""
        if hardware.available() > run.ring.nbytes:
            checkpoint.save(self.path, run)
        self.saved_at = time.monotonic()
