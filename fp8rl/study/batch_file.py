"""Batches of a study that have begun: their state in files, from which a stopped study goes on.

A batch is a population, or a single run. Its state is a checkpoint (disk/checkpoint.py). It is
written after a second, after two, after four and so on, and at last once a minute. It is removed
when the batch's results are in the study's journal. On a CPU the batch then goes on bit for bit as
if it had not been stopped, but for tasks that Gymnasium steps: like a resumed run, these begin new
episodes.

A file takes about as many bytes as the batch's rings: 18 for each transition of the cart in
float32, so 11 MB for 30 agents of the default capacity, which are written in a tenth of a second.
"""

import contextlib
import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..build import build, build_population
from ..config import Config
from ..disk import checkpoint
from ..disk.restore import restore
from ..disk.safe_files import write_whole
from ..machine import hardware
from ..train import Run

FIRST = 1  # seconds until a batch is saved first
SECONDS = 60  # between two times that a batch is saved, at most
# Writing takes at most this share of the time, so large files are written less often.
SHARE = 0.02
LOOK = 5  # seconds between two looks at a cluster that has not saved a batch yet
WAIT = 0.1  # seconds to wait for a variable that a scheduler does not have


class SharedFile(NamedTuple):
    """The file of a batch on the scheduler of a Dask cluster, for workers that lack its folder. If
    a worker ends, whoever gets its batch goes on from there.

    `variable`  a `distributed.Variable`: how often the batch has begun since it was saved, and the
                content of its file, or None
    """

    variable: Any

    def begin(self, path: Path) -> None:
        """Writes the file to a path of a worker, and counts that the worker begins the batch."""
        begun, content = self.variable.get(timeout=WAIT)
        self.variable.set((begun + 1, content))
        if content is not None:
            path.write_bytes(content)

    def save(self, path: Path) -> None:
        """Replaces the file by that of a worker."""
        with contextlib.suppress(OSError):  # a scheduler that is too busy gets the next one
            self.variable.set((0, path.read_bytes()))

    def fetch(self, path: Path) -> int:
        """Copies the file to a path of the study. Returns how often the batch has begun since it
        was saved, or 0 if the scheduler does not answer."""
        begun = 0
        content = None
        with contextlib.suppress(Exception):  # of many unrelated kinds
            begun, content = self.variable.get(timeout=WAIT)
        if content is not None:
            write_whole(path, lambda file: file.write(content))
        return begun

    def require_wanted(self) -> None:
        """Ends the batch of the worker that calls it, unless the study still waits for it."""
        import distributed

        worker = distributed.get_worker()
        task = worker.state.tasks.get(worker.get_current_task())
        if task is None or task.state != "executing":
            raise distributed.Reschedule  # which counts only if the scheduler wants it after all


class BatchFile:
    """The file of a batch in a study's folder, named after the batch's configs.

    `shared`  the same file on the scheduler of a cluster, for workers that lack the folder
    """

    def __init__(self, folder: Path, configs: list[Config], shared: SharedFile | None = None):
        fields = [dataclasses.asdict(config) for config in configs]
        digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        self.configs = configs
        self.path = folder / f"batch-{digest[:12]}.pt"
        self.shared = shared
        self.begun = 0  # how often workers have begun the batch since it was saved
        self.begun_at = time.monotonic()
        self.saved_at = self.begun_at
        self.pause = FIRST

    def built(self, alone: bool) -> Run:
        """The batch as it was saved or, if it was not, a new one. `alone` builds a single run.

        Raises ValueError for a file that cannot be read, or that is the file of other agents.
        """
        if not self.path.exists():
            return build(self.configs[0]) if alone else build_population(self.configs)
        try:
            # Trusted, because the command line names the task, and the configs must be the same.
            found, state = checkpoint.resume(self.path, trust=True)
            if found != (self.configs[0] if alone else self.configs):
                raise ValueError(f"checkpoint {self.path} is of other agents")
            if alone:
                return build(self.configs[0], state=state)
            population = build_population(self.configs)
            restore(population, state)
            return population
        except ValueError as error:
            what = f"{self.path.name} cannot be continued ({error})"
            raise ValueError(f"{what}: delete it, and its agents begin again") from error

    def keep(self, run: Run) -> None:
        """Saves a run or population if it is time to. Ends if the batch is not wanted any more."""
        if self.shared is not None:
            self.shared.require_wanted()
        if self.is_due():
            self.save(run)

    def is_due(self) -> bool:
        """Whether it is time to save or to fetch the batch."""
        return time.monotonic() - self.saved_at > self.pause

    def save(self, run: Run) -> None:
        """Writes the state of a run or population, unless memory has no room for the copy of the
        ring that is written."""
        began = time.monotonic()
        if hardware.available() < run.ring.nbytes:
            return
        checkpoint.save(self.path, run)
        if self.shared is not None:
            self.shared.save(self.path)
        self.set_pause(began)

    def fetch(self) -> None:
        """Copies the file from the scheduler of a cluster, if it is on one."""
        began = time.monotonic()
        if self.shared is not None:
            self.begun = self.shared.fetch(self.path)
        self.set_pause(began)
        if not self.path.exists():
            self.pause = min(self.pause, LOOK)

    def set_pause(self, began: float) -> None:
        """Sets when it is time again, from when the last writing began."""
        self.saved_at = time.monotonic()
        age = self.saved_at - self.begun_at
        self.pause = max(min(SECONDS, age), (self.saved_at - began) / SHARE)

    def remove(self) -> None:
        """Removes the file of a batch that has finished, from a scheduler, too."""
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Removes the file from the scheduler of a cluster, if it is on one."""
        if self.shared is not None:
            self.shared.variable.delete()
            self.shared = None


@contextlib.contextmanager
def opened(keeping: Path | SharedFile | None, configs: list[Config]) -> Iterator[BatchFile | None]:
    """The file of a batch, for the worker that trains it: in the study's folder or, on a cluster,
    in a temporary one."""
    if keeping is None or isinstance(keeping, Path):
        yield keeping and BatchFile(keeping, configs)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = BatchFile(Path(folder), configs, keeping)
        keeping.begin(file.path)
        yield file
