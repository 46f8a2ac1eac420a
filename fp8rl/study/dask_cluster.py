"""The workers of a Dask cluster as an executor for `parallel.run_all` (docs/several_machines.md).

    with dask_cluster("tcp://192.168.0.2:8786") as cluster:
        for config, history in run_all(configs, cluster, workers=cluster.threads):
            ...

Whoever reaches a Dask scheduler can run anything on its workers, and what workers send back is
unpickled here. So connect only to a cluster that nobody but its users can reach.
"""

import collections
import contextlib
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future

import torch

from ..machine.hardware import processor

PATIENCE = 10  # seconds in which a scheduler must answer and have a worker
SAME = ("fp8rl", "torch")  # packages that all processes must have in the same version


def own_processor() -> str:
    """What the last bits of this process's numbers depend on, beside the versions."""
    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def require_wanted() -> None:
    """Ends the batch of the worker that calls it, unless the study still waits for it."""
    import distributed

    worker = distributed.get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    if task is None or task.state != "executing":
        raise distributed.Reschedule  # which counts only if the scheduler wants it after all


class Cluster(Executor):
    """The workers of a Dask cluster that a `distributed.Client` is connected to.

    If a worker is lost, another one goes on with its batch: from where it was saved last if both
    have the study's folder, and otherwise from its beginning. Dask gives a batch up when more
    workers have died over it than the scheduler's setting `allowed-failures` says, which is 3 by
    default.

    `threads`: how many batches the workers that are there train at once.
    `threads_by_host`: the same, by machine.
    `processors`: the kinds of processor that they have. If there are several, the last bits of an
    agent's numbers depend on which of them trains it.

    Warns of workers with several threads. Raises ValueError if the scheduler or a worker has
    another version of fp8rl or torch.
    """

    require_wanted = staticmethod(require_wanted)

    def __init__(self, client):
        require_same_versions(client.get_versions(packages=SAME))
        # A result that is kept by a name would be returned in place of a new one
        self._executor = client.get_executor(pure=False)
        self.processors = sorted(set(client.run(own_processor).values()))
        self.threads_by_host = collections.Counter()
        for address, worker in client.scheduler_info(n_workers=-1)["workers"].items():
            self.threads_by_host[worker["host"]] += worker["nthreads"]
            if worker["nthreads"] > 1:
                warnings.warn(
                    f"the Dask worker {address} has {worker['nthreads']} threads, which wait for "
                    "each other: start it with --nthreads 1",
                    stacklevel=2,
                )
        self.threads = self.threads_by_host.total()

    def submit(self, function: Callable, /, *arguments) -> Future:
        return self._executor.submit(function, *arguments)


def require_same_versions(versions: dict[str, dict]) -> None:
    """Raises ValueError unless the packages in `SAME` are the same in all processes.

    `versions` is what `Client.get_versions` returns. The build of a version, such as that for CUDA,
    may differ.
    """
    processes = {"the Dask scheduler": versions["scheduler"]}
    for address, found in versions["workers"].items():
        processes[f"the Dask worker {address}"] = found
    for process, found in processes.items():
        for name in SAME:
            ours, theirs = (
                str(each["packages"][name]).partition("+")[0]
                for each in (versions["client"], found)
            )
            if theirs != ours:
                raise ValueError(
                    f"{process} has {name} {theirs}, and this study {ours}: "
                    "install the same there, and start it again"
                )


@contextlib.contextmanager
def dask_cluster(address: str) -> Iterator[Cluster]:
    """The cluster whose scheduler has this address, until the end of the block.

    Raises ValueError if the package distributed is missing, or for a process of another version;
    OSError for what is no address, if no scheduler answers or if no worker is there;
    ChildProcessError if a batch was given up.
    """
    try:
        import distributed
    except ImportError as error:
        raise ValueError(
            f"scheduler is given, and the package distributed cannot be imported ({error}): "
            "pip install distributed, or leave the scheduler out"
        ) from error
    # It would print tracebacks of what is raised as well
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL + 1)
    # A client that reached no scheduler closes itself when it is collected. If that happens while
    # another one starts, both wait for the same lock for ever.
    gc.collect()
    with contextlib.ExitStack() as stack:
        try:
            client = distributed.Client(address, timeout=PATIENCE, set_as_default=False)
            stack.enter_context(client)
            client.wait_for_workers(1, timeout=PATIENCE)
        # ValueError for what is no address, TypeError where tls has no certificates
        except (OSError, distributed.TimeoutError, ValueError, TypeError) as error:
            raise ConnectionError(
                f"scheduler is {address!r}, where none answers or no worker is "
                f"({' '.join(str(error).split())}): start it with dask scheduler, and workers with "
                f"dask worker {address} --nthreads 1"
            ) from error
        try:
            yield Cluster(client)
        except distributed.KilledWorker as error:
            raise ChildProcessError(
                f"a batch was given up, because the Dask workers died that trained it, the last of "
                f"them {error.last_worker.address}: see what they print, then run the command again"
            ) from error
