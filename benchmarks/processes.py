"""What more processes bring to one run on this machine's CPU.

Two ways to use a second core, each against one: two ranks that share environments and learning
(processes.py), and Gymnasium environments in processes of their own. Rounds alternate between what
is compared; every rate is a median over them. One torch thread in each process. What other programs
took of the processor meanwhile is written down too: it weighs on two processes more than on one.

Ranks train at the config's defaults, but for the number of environments N, rollouts of 32 steps,
two replayed batches as large as a rollout and a ring of 100 N transitions. The first fifth of a
run's iterations is left out, evaluations too.

    python benchmarks/processes.py benchmarks/results/processes.md
"""

import functools
import itertools
import multiprocessing
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import gymnasium
import psutil
import torch
from files import table_of
from gymnasium.envs.classic_control import CartPoleEnv

from fp8rl.build import build
from fp8rl.cli import throughput
from fp8rl.cli.throughput import origin
from fp8rl.config import Config
from fp8rl.history import History
from fp8rl.machine import processes
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision
from fp8rl.rollout import Collector
from fp8rl.tasks.gymnasium_env import VECTORIZATIONS, GymEnv
from fp8rl.train import train

SIZES = {16: 150, 256: 60, 2048: 15}  # environments: iterations that are timed
ROUNDS = 5
PAUSE, WORK = 1e-3, 50_000  # seconds, and numbers whose sum takes Python about so long


class Busy(CartPoleEnv):
    """CartPole whose step computes for about a millisecond more."""

    def step(self, action):
        sum(range(WORK))
        return super().step(action)


class Waiting(CartPoleEnv):
    """CartPole whose step waits for a millisecond more, as for a simulator elsewhere."""

    def step(self, action):
        time.sleep(PAUSE)
        return super().step(action)


def config_of(num_envs: int, iterations: int, **fields) -> Config:
    length = 32
    shape = {
        "num_envs": num_envs,
        "rollout_length": length,
        "slice_length": length,
        "batch_size": length * num_envs,
    }
    shape |= {
        "capacity": 100 * num_envs,
        "replay_updates": 2,
        "steps": length * num_envs * iterations,
    }
    return Config(**shape | {"eval_every": 0, "eval_episodes": 1} | fields)


def rate(history: History) -> float:
    """Environment steps per second of training."""
    steps, seconds = history.column("steps"), history.column("seconds")
    skipped = len(steps) // 5
    return (steps[-1] - steps[skipped]) / (seconds[-1] - seconds[skipped])


def serve(rank: int, size: int, port: int, jobs) -> None:
    """One of `size` processes that train configs together, until there is none."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes.start()
    while config := jobs.recv():
        jobs.send(rate(train(build(config), progress=False).history))
    processes.stop()


class Group:
    """Processes that train together, started once."""

    def __init__(self, size: int):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.jobs, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
        ends = enumerate(theirs)
        self.processes = [
            context.Process(target=serve, args=(rank, size, port, end), daemon=True)
            for rank, end in ends
        ]
        for process in self.processes:
            process.start()

    def train(self, config: Config) -> float:
        """The first one's rate."""
        for job in self.jobs:
            job.send(config)
        first, *_ = [job.recv() for job in self.jobs]
        return first

    def close(self) -> None:
        for job, process in zip(self.jobs, self.processes, strict=True):
            job.send(None)
            process.join()


def alternating(runs: dict, rounds: int) -> dict[object, float]:
    """Medians of functions of the round's number, after a round that does not count."""
    results = [{name: run(number) for name, run in runs.items()} for number in range(-1, rounds)][
        1:
    ]
    return {name: statistics.median(result[name] for result in results) for name in runs}


def training_table() -> str:
    """Training by one process and by two ranks."""
    groups = {"one": Group(1), "two": Group(2)}
    rows = []
    for n, iterations in SIZES.items():
        config = config_of(n, iterations)
        runs = {
            name: lambda _, group=group, config=config: group.train(config)
            for name, group in groups.items()
        }
        one, two = alternating(runs, ROUNDS).values()
        rows.append([f"{n:,}", f"{one:,.0f}", f"{two:,.0f}", f"{two / one:.2f}"])
        print(*rows[-1], flush=True)
    for group in groups.values():
        group.close()
    return table_of(("environments", "one process", "two ranks", "ratio"), rows)


def collecting_table() -> str:
    """Rates of collecting alone in Gymnasium environments."""
    for name, env in {"Busy": Busy, "Waiting": Waiting}.items():
        gymnasium.register(f"{name}CartPole-v1", env, max_episode_steps=500)
    names = ("CartPole-v1", "BusyCartPole-v1", "WaitingCartPole-v1")
    model, precision = ActorCritic(4), Precision("fp32")
    rows = []
    for env_id, n in itertools.product(names, (4, 16)):
        envs = {name: GymEnv(env_id, n, vectorization=name) for name in VECTORIZATIONS}
        collectors = {
            name: Collector(env, model, precision, length=32) for name, env in envs.items()
        }
        steps = {name: functools.partial(each.collect, model) for name, each in collectors.items()}
        seconds = throughput.seconds_of(steps, ROUNDS, 0.6, device="cpu")
        for env in envs.values():
            env.close()
        ratios = [f"{32 * n / t:,.0f} ({seconds['sync'] / t:.2f})" for t in seconds.values()]
        rows.append([env_id, n, *ratios])
        print(*rows[-1], flush=True)
    return table_of(("environment", "copies", "sync", "async"), rows)


def others_seconds() -> float:
    """Seconds that programs other than this one and its ended processes have kept cores busy."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0) - sum(os.times()[:4])


def main(out: Path) -> None:
    torch.set_num_threads(1)
    began, before = time.perf_counter(), others_seconds()
    # First: its processes are forks, of a process that has not trained yet
    collecting = collecting_table()
    parts = [
        "Training, steps per second:",
        training_table(),
        "Collecting alone, steps per second, and how many times sync's:",
        collecting,
        f"A step of BusyCartPole sums {WORK:,} numbers more, "
        f"one of WaitingCartPole sleeps {PAUSE * 1e3:g} ms more.",
    ]
    others = (others_seconds() - before) / (time.perf_counter() - began)
    about = f"Medians of {ROUNDS} alternating rounds; one torch thread each; other programs kept {max(0, others):.2f} cores busy meanwhile."
    parts.append(f"{about} `python benchmarks/processes.py {out}` on {origin()}.")
    out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
