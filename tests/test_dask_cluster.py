"""A study on a Dask cluster: two worker processes on this machine, some of which are killed."""

import os
import signal
import time

import pytest
from helpers import (
    SIZED,
    refusal,
    refused,
    run_cli,
    small,
    start_server,
    wait_until,
    without_seconds,
)

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
        wait_until(path.exists)
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
    config = small(steps=10**8, eval_every=0, eval_episodes=1)  # longer than PATIENCE

    def busy() -> int:
        return sum(len(worker.processing) for worker in workers.scheduler.workers.values())

    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        first, again = (cluster.submit(time.time_ns) for _ in range(2))
        assert first.result() != again.result()  # the first is not taken for both
        task = parallel.train_batch, parallel.run, [config], 0, None, cluster.require_wanted
        future = cluster.submit(*task)
        wait_until(busy)
        future.cancel()
        client = cluster._executor._client
        wait_until(lambda: not busy() and not any(client.run(tasks_of_worker).values()))


def tasks_of_worker(dask_worker) -> int:
    """How many tasks the threads of a worker compute."""
    return len(dask_worker.active_threads)


@pytest.mark.parametrize("version", ["2.1", None])
def test_a_worker_of_another_version_is_refused(version):
    ours = {"packages": dict.fromkeys(dask_cluster.SAME, "2.0")}
    for_cuda = {"packages": dict.fromkeys(dask_cluster.SAME, "2.0+cuda")}
    other = {"packages": dict.fromkeys(dask_cluster.SAME, version)}
    versions = {"client": ours, "scheduler": ours, "workers": {"a": for_cuda, "b": other}}
    message = f"the Dask worker b has fp8rl {version}, and this study 2.0: install the same"
    refused(message, dask_cluster.require_same_versions, versions)


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:8786"])
def test_what_is_no_address_of_a_scheduler_is_refused(address, tmp_path, capsys):
    said = refusal(capsys, *STUDY, "--out", tmp_path / "a", "--scheduler", address)
    assert said.startswith(f"scheduler is {address!r}, where ") and not list(tmp_path.iterdir())
