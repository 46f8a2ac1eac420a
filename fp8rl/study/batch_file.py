"""Batches of a study that have begun: their state in files, from which a stopped study goes on.

A batch is a population, or a single run. Its state is a checkpoint (disk/checkpoint.py). It is
written once a minute and when the study is interrupted, and removed when the batch's results are in
the study's journal. On a CPU the batch then goes on bit for bit as if it had not been stopped, but
for tasks that Gymnasium steps: like a resumed run, these begin new episodes.

A file takes about as many bytes as the batch's rings: 18 for each transition of the cart in
float32, so 11 MB for 30 agents of the default capacity, which are written in a tenth of a second.
"""

import contextlib
import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..build import build, build_population
from ..config import Config
from ..disk import checkpoint
from ..disk.restore import restore
from ..machine import hardware
from ..train import Run, iterate

SECONDS = 60  # between two times that a batch is saved
# Writing takes at most this share of the time, so large files are written less often.
SHARE = 0.02


class Stopped(NamedTuple):
    """What a batch returns that was told to stop before its end.

    `kept`   whether all that it has learned is kept
    `state`  the content of the batch's file, if the study's folder is on another machine
    """

    kept: bool
    state: bytes | None = None


class Keeping(NamedTuple):
    """How a worker keeps the state of a batch.

    `study`   a name of the call of `parallel.run_batches`, which tells its batches to stop by it
    `folder`  the study's folder; None if it is on another machine, to which the state is returned
    `state`   the content of the batch's file, if there is one and the folder is on another machine
    """

    study: str
    folder: Path | None
    state: bytes | None = None


class BatchFile:
    """The file of a batch in a study's folder, named after the batch's configs."""

    def __init__(self, folder: Path, configs: list[Config]):
        fields = [dataclasses.asdict(config) for config in configs]
        digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        self.configs = configs
        self.path = folder / f"batch-{digest[:12]}.pt"
        self.saved_at = time.monotonic()
        self.pause = SECONDS

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

    def save(self, run: Run) -> bool:
        """Writes the state of a run or population. Returns False if memory has no room for the copy
        of the ring that is written."""
        began = time.monotonic()
        if hardware.available() < run.ring.nbytes:
            return False
        checkpoint.save(self.path, run)
        self.saved_at = time.monotonic()
        self.pause = max(SECONDS, (self.saved_at - began) / SHARE)
        return True

    def is_due(self) -> bool:
        """Whether it is time to save the batch again."""
        return time.monotonic() - self.saved_at > self.pause

    def remove(self) -> None:
        """Removes the file of a batch that has finished."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def batch_file(keeping: Keeping, configs: list[Config]) -> Iterator[BatchFile]:
    """The file of a batch on a worker. If the study's folder is on another machine, it is a
    temporary file here, and the study has a copy."""
    if keeping.folder is not None:
        yield BatchFile(keeping.folder, configs)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = BatchFile(Path(folder), configs)
        if keeping.state is not None:
            file.path.write_bytes(keeping.state)
        yield file


def train_until(
    run: Run, stop: Callable[[], bool], file: BatchFile | None, count: Callable[[], None]
) -> Stopped | None:
    """Trains a run or population to its end, which returns None, or until `stop` says so.

    It is saved in `file` again and again. `count` is called before it begins and after each
    iteration.
    """
    count()
    if stop():  # before it has begun to learn, so nothing is lost
        run.close()
        return Stopped(kept=True)
    with contextlib.closing(iterate(run)) as iterations:
        for _ in iterations:
            count()
            stopping = stop()
            kept = False
            if file is not None and (stopping or file.is_due()):
                kept = file.save(run)
            if stopping:  # in the last iteration too, after which the batch goes on to its end
                return Stopped(kept)
    return None
