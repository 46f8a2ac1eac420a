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
    path = BatchFile(tmp_path, [config]).path
    with dask_cluster.dask_cluster(workers.scheduler_address) as cluster:
        client = cluster._executor._client
        client.run(setattr, batch_file, "SECONDS", -1)
        future = cluster.submit(parallel.train_batch, parallel.run, [config], 0, tmp_path)
        wait_until(path.exists)
        client.run(setattr, batch_file, "SECONDS", 60)
        _, state = checkpoint.resume(path, trust=True)
        if is_killed:
            kill_one_at_work(workers, lambda: True)
        else:
            busy = [address for address, keys in client.processing().items() if keys]
            client.run(close, workers=busy, wait=False)
        (history,) = future.result()
    seconds = state["history"]["seconds"].tolist()  # which training again would not repeat
    assert seconds and history.columns["seconds"][: len(seconds)] == seconds
    assert history.columns["loss"] == parallel.run(config).columns["loss"]


def noted(path: Path, config):
    """Trains a config, and writes its seed down before."""
    with path.open("a") as file:
        file.write(f"{config.seed}\n")
    return parallel.run(config)


def test_a_killed_worker_costs_the_batch_it_had_and_no_earlier_one(workers, tmp_path):
    path = tmp_path / "begun"
    configs = [small(seed=seed, steps=16_384, eval_every=0, eval_episodes=1) for seed in range(5)]
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


def test_a_worker_of_another_version_is_refused(workers, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(dask_cluster, "SAME", ("fp8rl", "torch", "pluggy"))
    distributed.versions._version_cached.cache_clear()
    version = distributed.versions.version

    def changed(name: str) -> str:
        return "0.1" if name == "pluggy" else version(name)

    monkeypatch.setattr(distributed.versions, "version", changed)
    words = ["--scheduler", workers.scheduler_address, "--out", tmp_path / "a"]
    try:
        said = refusal(capsys, *STUDY, *words)
    finally:
        distributed.versions._version_cached.cache_clear()
    assert re.match(r"the Dask worker tcp://\S+ has pluggy \S+, and this study 0\.1: install", said)
    assert not list(tmp_path.iterdir())


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


def test_an_address_where_no_scheduler_answers_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dask_cluster, "PATIENCE", 1)
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        words = [*STUDY, "--out", tmp_path / "a", "--scheduler"]
        said = refusal(capsys, *words, address)
    assert said.startswith(f"scheduler is {address}, where none answers or no worker is (")
    for address in ("127.0.0.1:8786", "http://127.0.0.1:8786", "tcp://127.0.0.1"):
        assert refusal(capsys, *words, address).startswith(f"scheduler is {address!r}: use an ")
    options = {"dashboard_address": ":0", "host": "127.0.0.1", "protocol": "tcp"}
    with distributed.LocalCluster(n_workers=0, processes=False, **options) as empty:
        said = refusal(capsys, *words, empty.scheduler_address)
        assert "workers with dask worker tcp://127.0.0.1:" in said
    assert not list(tmp_path.iterdir())
