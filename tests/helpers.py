"""What several test files share: runs, rollouts, refusals, and processes."""

import contextlib
import csv
import functools
import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8rl import rng
from fp8rl.build import HERE, build
from fp8rl.cli.main import main
from fp8rl.config import Config
from fp8rl.disk import checkpoint
from fp8rl.disk.mapped_ring import MappedRing
from fp8rl.doctor import __main__ as doctor
from fp8rl.env import STATE_BOUNDS
from fp8rl.history import History
from fp8rl.precision import Precision
from fp8rl.replay.ring import ReplayBuffer
from fp8rl.rollout import DUMMY, TERMINATED, TRUNCATED, Rollout
from fp8rl.train import Run, iterate, train

# Iterations of 512 steps and three updates, for tests to which the size does not matter.
SMALL = {"rollout_length": 32, "slice_length": 32, "batch_size": 512, "replay_updates": 2}
SHORT = {"steps": 2_048, "eval_every": 1_024, "eval_episodes": 5} | SMALL
# And of 64 steps, for those to which not even the length of a rollout does.
TINY = SMALL | {"rollout_length": 4, "slice_length": 4, "batch_size": 64}
# Seconds after which another process is taken to hang. A busy machine is no reason to fail.
PATIENCE = 600
WIDE = (-1000.0, -10.0), (1000.0, 10.0)  # bounds that the times and environments of `coded` stay in

# The same as options
SIZED = [
    word for name, size in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(size))
]
small = functools.partial(Config, **SMALL)


def trained(run: Run | Config) -> Run:
    """A run, or a new one with a config, trained to its end."""
    return train(build(run) if isinstance(run, Config) else run, progress=False)


def change_rollouts(run: Run, change: Callable[[Rollout], Rollout]) -> None:
    """A function changes what a run's collector returns."""
    collect = run.collector.collect
    run.collector.collect = lambda learned: change(collect(learned))


def ring_of(
    rows, num_envs, bounds=STATE_BOUNDS, codec="fp32", device="cpu", folder=None, **options
):
    """A ring in memory, or in a folder of files."""
    if folder is None:
        return ReplayBuffer(rows, num_envs, bounds, codec, device, **options)
    return MappedRing(folder, rows, num_envs, bounds, codec, **options)


@contextlib.contextmanager
def drawn_on_tensors():
    """Random numbers are computed by the lines that a GPU runs, here on the CPU."""
    here = rng.HOST
    rng._words_of_8_iterations.cache_clear()
    rng.HOST = "meta"  # any type of device that is not this one
    try:
        yield
    finally:
        rng.HOST = here
        rng._words_of_8_iterations.cache_clear()


def bang_bang(state: torch.Tensor) -> torch.Tensor:
    """The reference controller: push against p + 3 v. Takes states [..., 2], returns actions [...]
    (int64)."""
    return (state[..., 0] + 3 * state[..., 1] < 0).long()


def refused(message: str, call, *arguments, error: type[Exception] = ValueError, **options) -> None:
    """The call raises this error, in one line that begins with a pattern."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    said = str(caught.value)
    assert re.match(message, said) and "\n" not in said, f"{said!r} is not {message!r}"


def weights(run: Run) -> torch.Tensor:
    """All weights of a run's network."""
    return torch.nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()


def assert_same(one: Run, other: Run) -> None:
    """Weights and history bit for bit."""
    assert torch.equal(weights(one), weights(other))
    assert_same_histories([one.history], [other.history])


def assert_same_histories(ours: list[History], theirs: list[History]) -> None:
    """Histories bit for bit, but for their seconds."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.columns.keys() == other.columns.keys() and one.failure == other.failure
        for name in one.columns.keys() - {"seconds"}:
            np.testing.assert_array_equal(one.column(name), other.column(name), name)


def after(iterations: int, run: Run) -> Run:
    """The run so many iterations on."""
    return next(itertools.islice(iterate(run), iterations - 1, None))


def run_cli(*arguments) -> None:
    """The command line in this process, which need not import everything first."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as put_back:
        patch.setattr(sys, "argv", ["fp8rl", *map(str, arguments)])
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command sets
        for number in (signal.SIGINT, signal.SIGTERM):
            put_back.callback(signal.signal, number, signal.getsignal(number))
        main()


def run_doctor(capfd, *words) -> tuple[int, str, str]:
    """The doctor's command in this process: its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        doctor.main([*map(str, words)])
    return end.value.code, *capfd.readouterr()


SERVER = multiprocessing.get_context("forkserver")


def refusal(capsys, *words) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_cli(*words)
    out, error = capsys.readouterr()
    assert caught.value.code == 2 and not out and error.count("\n") == 1
    return error.removeprefix("fp8rl: ").rstrip("\n")


def start_server() -> None:
    """Starts the server of this process that forks others. It has imported everything, which takes
    longer than what the processes of these tests do. (If a study has started the server before, it
    has only torch, and its processes import the rest.)"""
    # The last comes with a process's first optimizer
    commands = ["fp8rl.cli.train", "fp8rl.cli.study", "fp8rl.study.figures"]
    SERVER.set_forkserver_preload([*commands, "torch._dynamo"])
    forkserver.ensure_running()


def forked(target, *arguments) -> multiprocessing.Process:
    """A process forked from a server that has imported everything."""
    start_server()
    process = SERVER.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what happens in other processes."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def cli_into(said: Path, *arguments) -> None:
    """The command line with a file as stderr, for `forked`."""
    with said.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    run_cli(*arguments)


def resumed(path, machine=HERE) -> Run:
    config, state = checkpoint.resume(path)
    return build(config, machine, state)


def log_probabilities(model, precision: Precision, rollout: Rollout) -> torch.Tensor:
    """What a policy gives a rollout's actions, from its forward pass over all rows."""
    with torch.no_grad(), precision.autocast():
        logits, _ = model(rollout.obs, rollout.state, rollout.first)
    return torch.distributions.Categorical(logits=logits[:-1]).log_prob(rollout.action)


def coded(start: int, length: int, num_envs: int) -> Rollout:
    """A rollout whose numbers tell their time and environment: obs (time, env), reward 4 time +
    env, and so on. No flag ends an episode."""
    time = torch.arange(start, start + length + 1).float().unsqueeze(-1).expand(-1, num_envs)
    env = torch.arange(num_envs).float().expand(length + 1, -1)
    obs = torch.stack((time, env), dim=-1)
    row = number_of(obs)
    return Rollout(obs, (row % 7).long(), row.clone(), 4 * (row % 5).to(torch.uint8), -row)


def number_of(obs: torch.Tensor) -> torch.Tensor:
    """The number, unique among up to 4 environments, of each row but the last of `coded`."""
    return 4 * obs[:-1, :, 0] + obs[:-1, :, 1]


def noise(start: int, length: int, num_envs: int, features: int = 2) -> Rollout:
    """A rollout of random numbers that goes on from one of the same seed sequence: observation t
    depends on t alone."""
    rows = [torch.Generator().manual_seed(t) for t in range(start, start + length + 1)]
    obs = torch.stack([2 * torch.rand(num_envs, features, generator=g) - 1 for g in rows])
    return Rollout(
        obs,
        torch.zeros(length, num_envs).long(),
        obs[1:, :, 0],
        torch.zeros(length, num_envs).byte(),
        obs[1:, :, 1],
    )


def same(one: Rollout, other: Rollout) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one[:5], other[:5], strict=True))


def random_rollout(seed: int, length: int, batch: int = 3, on_policy: bool = False):
    """Values float64 [T+1, B], log ratios [T, B] and a rollout whose episodes end at random, each
    end followed by a dummy row."""
    rng = np.random.default_rng(seed)
    flags = np.zeros((length, batch), dtype=np.uint8)
    for t, b in np.ndindex(length, batch):
        if t and flags[t - 1, b] & (TERMINATED | TRUNCATED):
            flags[t, b] = DUMMY
        else:
            flags[t, b] = rng.choice([0, TERMINATED, TRUNCATED], p=[0.7, 0.15, 0.15])
    tensor = lambda *shape: torch.from_numpy(rng.normal(size=shape))  # noqa: E731
    reward = tensor(length, batch) * torch.from_numpy((flags & DUMMY) == 0)
    action = torch.from_numpy(rng.integers(2, size=(length, batch)))
    rollout = Rollout(
        tensor(length + 1, batch, 2),
        action,
        reward,
        torch.from_numpy(flags),
        tensor(length, batch) * 0.1 - 0.7,
    )
    log_ratios = torch.zeros(length, batch).double() if on_policy else tensor(length, batch)
    return tensor(length + 1, batch), log_ratios, rollout


def rows_of_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def without_seconds(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file without the columns of seconds, which differ from run to run."""
    return [
        {name: text for name, text in row.items() if "seconds" not in name}
        for row in rows_of_csv(path)
    ]


def figures(text: str) -> set[str]:
    """The numbers in a text, as they are written."""
    return set(re.findall(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?", text))
