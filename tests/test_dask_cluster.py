"""A study on a Dask cluster: two worker processes on this machine, some of which are killed."""

import functools
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import SIZED, refusal, refused, run_cli, small, start_server, without_seconds

from fp8rl.study import batch_file, dask_cluster, parallel

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


def test_a_study_that_is_interrupted_stops_its_workers_and_has_the_results_of_one_machine(
    workers, tmp_path, capsys, one_process
):
    run_cli(*STUDY, "--workers", 2, "--out", tmp_path / "here")
    out = tmp_path / "there"
    scheduler = workers.scheduler

    def busy() -> bool:
        return all(worker.processing for worker in scheduler.workers.values())

    def interrupt() -> None:
        wait_until(busy)
        time.sleep(0.2)  # Whether they have learned by then or not, the results are the same
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SystemExit) as caught:
        run_cli(*STUDY, "--scheduler", workers.scheduler_address, "--out", out)
    thread.join()
    assert caught.value.code == 130
    wait_until(lambda: not any(worker.processing for worker in scheduler.workers.values()))
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"fp8rl: interrupted: \d of 2 agents have finished, and the others go on", said)
    run_cli(*STUDY, "--scheduler", workers.scheduler_address, "--out", out)
    assert without_seconds(out / "results.csv") == without_seconds(
        tmp_path / "here" / "results.csv"
    )
    assert "Trained by Dask workers on " in (out / "table.md").read_text()
    assert not list(out.glob("batch-*"))


async def close(dask_worker) -> None:
    """Ends a worker as its --lifetime does."""
    await dask_worker.close_gracefully(restart=True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_another_worker_goes_on_with_a_batch_from_where_it_was_saved(is_killed, workers, tmp_path):
    config = small(steps=51_200, eval_every=0, eval_episodes=1)
    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        client = cluster._client
        client.run(setattr, batch_file, "FIRST", 0)  # seconds
        shared = cluster.share(tmp_path / "nothing")
        future = cluster.submit(parallel.train_batch, parallel.run, [config], 0, 195, shared)
        wait_until(lambda: shared.variable.get(timeout=1)[1])
        client.run(setattr, batch_file, "FIRST", 1)
        if is_killed:
            kill_one_at_work(workers, lambda: True)
        else:
            busy = [address for address, keys in client.processing().items() if keys]
            client.run(close, workers=busy, wait=False)
        wait_until(lambda: shared.variable.get(timeout=1)[0])
        begun, content = shared.variable.get(timeout=1)
        assert begun == 1 and content  # another worker has begun with it
        (history,) = future.result()
    assert history.columns["loss"] == parallel.run(config).columns["loss"]


def noted(path: Path, config):
    """Trains a config, and writes its seed down before."""
    with path.open("a") as file:
        file.write(f"{config.seed}\n")
    return parallel.run(config)


def test_a_killed_worker_costs_the_batch_it_had_and_no_earlier_one(workers, tmp_path):
    path = tmp_path / "begun"
    configs = [small(seed=seed, steps=4_096, eval_every=0, eval_episodes=1) for seed in range(5)]
    finished = {}
    kill = (workers, lambda: len(finished) >= 3)
    thread = threading.Thread(target=kill_one_at_work, args=kill)
    thread.start()
    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        run = functools.partial(noted, path)
        for config, history in parallel.run_all(configs, cluster, cluster.threads, False, run):
            finished[config] = history
    thread.join()
    begun = Counter(map(int, path.read_text().split()))
    assert finished.keys() == set(configs) and sorted(begun) == list(range(5))
    # The third may have been on its way
    assert begun.total() <= 7 and all(begun[config.seed] == 1 for config in [*finished][:2])
    for config in configs[3:]:  # the numbers of this machine, also after a kill
        assert finished[config].columns["loss"] == parallel.run(config).columns["loss"]


def test_a_worker_of_another_version_is_refused_also_if_it_joins_later(
    workers, monkeypatch, capsys, tmp_path
):
    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        assert cluster.submit(pow, 2, 3).result() == 8
        cluster._versions = cluster._versions | {"torch": "0.1"}
        message = r"the Dask worker on .* has torch .*, and this study 0\.1: "
        refused(message, cluster.submit(pow, 2, 3).result)
    monkeypatch.setattr(dask_cluster, "hash_of_code", lambda: "of a test")
    dask_cluster.own_kind.cache_clear()
    try:
        words = ["--scheduler", workers.scheduler_address, "--out", tmp_path / "a"]
        said = refusal(capsys, *STUDY, *words)
    finally:
        dask_cluster.own_kind.cache_clear()
    assert "has fp8rl, by a hash of its code, " in said
    assert not list(tmp_path.iterdir())


class FakeClient:
    """Stands for a client of workers with these threads and processors, on two machines."""

    scheduler = SimpleNamespace(address="tcp://10.0.0.9:8786")

    def __init__(self, threads, processors):
        addresses = [f"tcp://10.0.0.{k % 2}:{k}" for k in range(len(threads))]
        self.workers = {
            address: {"host": address[6:14], "nthreads": n}
            for address, n in zip(addresses, threads, strict=True)
        }
        kind = dask_cluster.own_kind()
        self.kinds = {
            address: kind._replace(processor=name)
            for address, name in zip(addresses, processors, strict=True)
        }

    def get_executor(self, pure):
        assert pure is False

    def scheduler_info(self, n_workers):
        return {"workers": self.workers}

    def run_on_scheduler(self, function):
        return dask_cluster.own_kind()

    def run(self, function):
        if not self.kinds:
            raise Exception("ModuleNotFoundError(\"No module named 'fp8rl'\")")
        return self.kinds


def test_threads_and_kinds_of_processors_are_told():
    cluster = dask_cluster.Cluster(FakeClient([1, 1, 1], ["A", "A", "A"]))
    assert cluster.threads == 3 and cluster.threads_by_host.most_common(1) == [("10.0.0.0", 2)]
    assert cluster.processors == ["A"] and not cluster.warnings
    threads, kinds = dask_cluster.Cluster(FakeClient([1, 4], ["B", "A"])).warnings
    assert "tcp://10.0.0.1:1 has 4 threads" in threads and "--nthreads 1" in threads
    assert kinds.startswith("the Dask workers have several kinds of processor (A; B): ")
    message = "the Dask scheduler or a worker cannot tell its version"
    refused(message, dask_cluster.Cluster, FakeClient([], []))


def test_a_study_without_a_worker_tells_once_that_it_waits_and_that_one_has_come(monkeypatch):
    monkeypatch.setattr(dask_cluster, "ALONE", 0)
    client = FakeClient([1], ["A"])
    cluster = dask_cluster.Cluster(client)
    assert cluster.news() is None
    worker = client.workers
    client.workers = {}
    assert "no Dask worker is left at tcp://10.0.0.9:8786" in cluster.news()
    assert cluster.news() is None
    client.workers = worker
    assert "a Dask worker has come" in cluster.news()
    assert cluster.news() is None


def test_an_address_where_no_scheduler_answers_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dask_cluster, "PATIENCE", 1)
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        words = [*STUDY, "--out", tmp_path / "a", "--scheduler"]
        said = refusal(capsys, *words, address)
    assert said.startswith(f"scheduler is {address}, where none answers (")
    for address in ("127.0.0.1:8786", "http://127.0.0.1:8786", "tcp://127.0.0.1"):
        assert refusal(capsys, *words, address).startswith(f"scheduler is {address!r}: use an ")
    options = {"dashboard_address": ":0", "host": "127.0.0.1", "protocol": "tcp"}
    with distributed.LocalCluster(n_workers=0, processes=False, **options) as empty:
        said = refusal(capsys, *words, empty.scheduler_address)
        assert "which has no worker: start some with dask worker tcp://127.0.0.1:" in said
    assert not list(tmp_path.iterdir())
