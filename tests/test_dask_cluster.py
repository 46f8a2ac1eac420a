"""A study on a Dask cluster: two worker processes on this machine, some of which are killed."""

import os
import signal
import time

import pytest
from helpers import SIZED, refusal, refused, run_cli, small, start_server, without_seconds

from fp8rl.disk import checkpoint
from fp8rl.study import batch_file, dask_cluster, parallel
from fp8rl.study.batch_file import BatchFile

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

pytestmark = [
    pytest.mark.usefixtures("without_pictures"),
    pytest.mark.xdist_group("forked"),  # test_run_folder.py says why
]

STUDY = ["study", "--precisions", "fp32", "--seeds", 2, "--eval-episodes", 2, *SIZED]
STUDY += ["--steps", 20_480]


@pytest.fixture(scope="module")
def workers():
    """Two workers, forked from the server of the tests: Dask itself would spawn them, and each
    would import torch."""
    start_server()
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    options |= {"dashboard_address": ":0", "silence_logs": 50}
    with (
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(**options) as workers,
    ):
        yield workers


def kill_one_at_work(workers, ready) -> None:
    """Kills a worker process that has a batch, as soon as `ready` says so."""
    while not ready():
        time.sleep(0.01)
    for nanny in workers.workers.values():
        state = workers.scheduler.workers.get(nanny.worker_address)
        if state and state.processing:
            os.kill(nanny.pid, signal.SIGKILL)
            return
    raise RuntimeError("no worker has a batch")


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.01)


def test_a_study_has_the_results_of_one_machine(workers, tmp_path, one_process):
    run_cli(*STUDY, "--workers", 2, "--out", tmp_path / "here")
    out = tmp_path / "there"
    run_cli(*STUDY, "--scheduler", workers.scheduler_address, "--out", out)
    ours, theirs = (without_seconds(tmp_path / name / "results.csv") for name in ("here", "there"))
    assert ours == theirs and not list(out.glob("batch-*"))
    assert "Trained by Dask workers on " in (out / "table.md").read_text()


def test_another_worker_goes_on_with_a_batch_from_where_it_was_saved(workers, tmp_path):
    """Its worker is killed."""
    config = small(steps=51_200, eval_every=0, eval_episodes=1)
    path = BatchFile(tmp_path, [config]).path
    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        client = cluster._executor._client
        client.run(setattr, batch_file, "SECONDS", -1)
        future = cluster.submit(parallel.train_batch, parallel.run, [config], 0, tmp_path)
        while not path.exists():
            time.sleep(0.01)
        client.run(setattr, batch_file, "SECONDS", 60)
        _, state = checkpoint.resume(path, trust=True)
        (busy,) = (
            nanny.pid
            for nanny in workers.workers.values()
            if workers.scheduler.workers[nanny.worker_address].processing
        )
        os.kill(busy, signal.SIGKILL)
        (history,) = future.result()
    seconds = state["history"]["seconds"].tolist()  # which training again would not repeat
    assert seconds and history.columns["seconds"][: len(seconds)] == seconds
    assert history.columns["loss"] == parallel.run(config).columns["loss"]


def test_a_batch_that_nobody_waits_for_ends(workers):
    config = small(steps=10**7, eval_every=0, eval_episodes=1)

    def busy() -> int:
        return sum(len(worker.processing) for worker in workers.scheduler.workers.values())

    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        task = parallel.train_batch, parallel.run, [config], 0, None, cluster.require_wanted
        future = cluster.submit(*task)
        while not busy():
            time.sleep(0.01)
        future.cancel()
        client = cluster._executor._client
        while busy() or any(client.run(tasks_of_worker).values()):
            time.sleep(0.01)


def tasks_of_worker(dask_worker) -> int:
    """How many tasks the threads of a worker compute."""
    return len(dask_worker.active_threads)


class FakeClient:
    """Stands for a client of workers with these threads and processors, on two machines."""

    def __init__(self, threads, processors, versions="2.0+cpu"):
        addresses = [f"tcp://10.0.0.{k % 2}:{k}" for k in range(len(threads))]
        self.workers = {
            address: {"host": address[6:14], "nthreads": n}
            for address, n in zip(addresses, threads, strict=True)
        }
        self.processors = dict(zip(addresses, processors, strict=True))
        self.version = versions

    def get_executor(self, pure):
        assert pure is False

    def get_versions(self, packages):
        ours = {"packages": dict.fromkeys(packages, "2.0")}
        theirs = {"packages": dict.fromkeys(packages, self.version)}
        return {"client": ours, "scheduler": ours, "workers": dict.fromkeys(self.workers, theirs)}

    def scheduler_info(self, n_workers):
        return {"workers": self.workers}

    def run(self, function):
        return self.processors


def test_threads_and_kinds_of_processors_are_told():
    cluster = dask_cluster.Cluster(FakeClient([1, 1, 1], ["A", "A", "A"]))
    assert cluster.threads == 3 and cluster.threads_by_host.most_common(1) == [("10.0.0.0", 2)]
    assert cluster.processors == ["A"] and not cluster.warnings
    threads, kinds = dask_cluster.Cluster(FakeClient([1, 4], ["B", "A"])).warnings
    assert "tcp://10.0.0.1:1 has 4 threads" in threads and "--nthreads 1" in threads
    assert kinds.startswith("the Dask workers have several kinds of processor (A; B): ")
    for version in ("2.1", None):
        message = f"the Dask worker tcp://10.0.0.0:0 has fp8rl {version}, and this study 2.0: "
        refused(message, dask_cluster.Cluster, FakeClient([1], ["A"], version))


@pytest.mark.parametrize("address", ["127.0.0.1:8786", "http://127.0.0.1:8786", "tcp://127.0.0.1"])
def test_what_is_no_address_of_a_scheduler_is_refused(address, tmp_path, capsys):
    said = refusal(capsys, *STUDY, "--out", tmp_path / "a", "--scheduler", address)
    assert said.startswith(f"scheduler is {address!r}: use an ") and not list(tmp_path.iterdir())
