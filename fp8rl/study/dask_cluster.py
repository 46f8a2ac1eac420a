"""The workers of a Dask cluster as an executor for `parallel.run_all` (docs/several_machines.md).

    with dask_cluster("tcp://192.168.0.2:8786") as cluster:
        for config, history in run_all(configs, cluster, workers=cluster.threads):
            ...

Whoever reaches a Dask scheduler can run anything on its workers, and what workers send back is
unpickled here. So connect only to a cluster that nobody but its users can reach.
"""

import collections
import contextlib
import functools
import hashlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from ..machine.hardware import processor
from .batch_file import SharedFile

PATIENCE = 10  # seconds in which a scheduler must answer and have a worker
# Seconds without a worker before the user is told. A worker that has died may start by itself.
ALONE = 5


class Kind(NamedTuple):
    """What a worker computes with. `versions`, name -> version, must be those of this process. The
    last bits of numbers depend on the `processor`, too, which may differ."""

    versions: dict[str, str]
    processor: str


@functools.cache
def own_kind() -> Kind:
    """The kind of this process."""
    capability = torch.backends.cpu.get_cpu_capability()
    versions = {"fp8rl, by a hash of its code,": hash_of_code()}
    # Another build of a version, as for CUDA, may come with other libraries
    versions["torch"], _, build = torch.__version__.partition("+")
    return Kind(versions, f"{processor()}, {capability}, torch {versions['torch']} {build}".strip())


def hash_of_code() -> str:
    """A hash of the package's source files, because a version has several while it is developed."""
    package = Path(__file__).parent.parent
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        hashed.update(path.relative_to(package).as_posix().encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:8]


def require_same(versions: dict[str, str], process: str, theirs: dict[str, str]) -> None:
    """Raises ValueError for other versions than those of the process that began the study."""
    for name, version in versions.items():
        if theirs[name] != version:
            raise ValueError(
                f"{process} has {name} {theirs[name]}, and this study {version}: "
                "install the same there, and start it again"
            )


def call_if_same(versions: dict[str, str], function: Callable, *arguments):
    """What a function returns, on a worker that has these versions. One that joins the cluster
    after the study began is not checked before."""
    require_same(versions, f"the Dask worker on {socket.gethostname()}", own_kind().versions)
    return function(*arguments)


class Cluster(Executor):
    """The workers of a Dask cluster that a `distributed.Client` is connected to.

    If a worker is lost, another one goes on with its batch from where it was saved last. Dask gives
    a batch up when more workers have died over it than the scheduler's setting `allowed-failures`
    says, which is 3 by default.

    `threads`: how many batches the workers that are there train at once.
    `threads_by_host`: the same, by machine.
    `processors`: the kinds of processor that they have.
    `warnings`: what the user should know of them, a line each.

    Raises ValueError if the scheduler or a worker lacks fp8rl or torch, or has another version.
    """

    def __init__(self, client):
        self._client = client
        self._alone_since: float | None = None  # when the last worker was missed first
        self._told_alone = False
        # A result that is kept by a name would be returned in place of a new one
        self._executor = client.get_executor(pure=False)
        self._versions = own_kind().versions
        workers = client.scheduler_info(n_workers=-1)["workers"]
        try:
            # It unpickles what is sent to the workers, and pickles it again
            scheduler = client.run_on_scheduler(own_kind)
            kinds = client.run(own_kind)
        except Exception as error:  # Dask raises a plain one where something cannot be imported
            raise ValueError(
                "the Dask scheduler or a worker cannot tell its version of fp8rl "
                f"({' '.join(str(error).split())}): install the same fp8rl and torch there as here"
            ) from error
        require_same(self._versions, "the Dask scheduler", scheduler.versions)
        for address, kind in kinds.items():
            require_same(self._versions, f"the Dask worker {address}", kind.versions)
        self.processors = sorted({kind.processor for kind in kinds.values()})
        self.threads_by_host = collections.Counter()
        self.warnings = []
        for address, worker in workers.items():
            self.threads_by_host[worker["host"]] += worker["nthreads"]
            if worker["nthreads"] > 1:
                self.warnings.append(
                    f"the Dask worker {address} has {worker['nthreads']} threads, which wait for "
                    "each other: start it with --nthreads 1"
                )
        self.threads = self.threads_by_host.total()
        if len(self.processors) > 1:
            self.warnings.append(
                "the Dask workers have several kinds of processor "
                f"({'; '.join(self.processors)}): the last bits of an agent's numbers depend on "
                "which of them trains it"
            )

    def submit(self, function: Callable, /, *arguments) -> Future:
        return self._executor.submit(call_if_same, self._versions, function, *arguments)

    def share(self, path: Path) -> SharedFile:
        """The file of a batch on the scheduler, as this machine has it at a path, or empty."""
        variable = imported().Variable(client=self._client)
        variable.set((0, path.read_bytes() if path.exists() else None))
        return SharedFile(variable)

    def has_workers(self) -> bool:
        """Whether a worker is there. False if the scheduler has died, too."""
        try:
            return bool(self._client.scheduler_info(n_workers=-1)["workers"])
        except Exception:  # of many unrelated kinds
            return False

    def news(self) -> str | None:
        """A line to print, when no worker has been there for a while and when one has come back."""
        if self.has_workers():
            returned = self._told_alone
            self._alone_since = None
            self._told_alone = False
            return "a Dask worker has come: the study goes on" if returned else None
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if self._told_alone or now - self._alone_since < ALONE:
            return None
        self._told_alone = True
        address = self._client.scheduler.address
        return (
            f"no Dask worker is left at {address}, and the study waits for one: "
            f"start it with dask worker {address} --nthreads 1"
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait and not cancel_futures)


@contextlib.contextmanager
def dask_cluster(address: str) -> Iterator[Cluster]:
    """The cluster whose scheduler has this address, until the end of the block.

    Raises ValueError if the package distributed is missing, or for what is no address or a process
    of another version; OSError if no scheduler answers or no worker is there; ChildProcessError if
    a batch was given up.
    """
    distributed = imported()
    if not re.fullmatch(r"(tcp|tls)://[^/]+:\d+", address):
        raise ValueError(
            f"scheduler is {address!r}: use an address such as tcp://192.168.0.2:8786, "
            "which dask scheduler prints"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(silenced("distributed.client"))
        client = stack.enter_context(connected(distributed, address))
        try:
            yield Cluster(client)
        except distributed.KilledWorker as error:
            raise ChildProcessError(
                f"a batch was given up, because the Dask workers died that trained it, the last of "
                f"them {error.last_worker.address}: see what they print, then run the command again"
            ) from error


def connected(distributed: ModuleType, address: str):
    """A `distributed.Client` of a scheduler that has a worker, or ConnectionError."""
    try:
        client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
    # TypeError where tls has no certificates
    except (OSError, distributed.TimeoutError, TypeError) as error:
        raise ConnectionError(
            f"scheduler is {address}, where none answers ({' '.join(str(error).split())}): "
            "start it with dask scheduler"
        ) from error
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except distributed.TimeoutError as error:
        client.close()
        raise ConnectionError(
            f"scheduler is {address}, which has no worker: "
            f"start some with dask worker {address} --nthreads 1"
        ) from error
    return client


@contextlib.contextmanager
def silenced(logger: str) -> Iterator[None]:
    """Keeps a logger from printing tracebacks of what is raised as well."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        found.setLevel(level)


def imported() -> ModuleType:
    """The package distributed. Raises ValueError unless it can be imported."""
    try:
        import distributed
    except ImportError as error:
        raise ValueError(
            f"scheduler is given, and the package distributed cannot be imported ({error}): "
            "pip install distributed, or leave the scheduler out"
        ) from error
    return distributed
