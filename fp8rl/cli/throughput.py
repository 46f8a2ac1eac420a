"""Measures how fast the loop trains, and how far that is from what the machine could do.

`python -m fp8rl bench` runs these measurements. Every environment step is learned from once,
without replay. The floor is the time of the loop's matmuls alone, at the same shapes and in the
same precision. They run one after the other with preallocated outputs. Each matrix is row-major or
column-major, whichever is fastest on this machine. No loop that multiplies these matrices can be
faster than the floor. Measurements of the loop and of the floor alternate."""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..build import HERE, Machine, build, build_population
from ..config import Config
from ..machine import processes
from ..machine.gpu.cuda_graphs import WARMUP, Graphed, has_graphs
from ..machine.hardware import hardware, is_emulated
from ..precision import PRECISIONS, Precision, available_precisions
from ..train import iterate


@dataclasses.dataclass(frozen=True)
class Loop:
    """The settings of a loop without replay.

    It has unlimited steps, and the smallest ring that takes a rollout.
    """

    num_envs: int = 4096  # Number of environments of each agent.
    rollout_length: int = 32  # Steps collected from each environment per iteration.
    # Precision of the matrix products. None: the fastest precision that the machine does not
    # emulate, or fp32 with agents.
    precision: str | None = None
    # Number of agents to train as one batch (population/population.py). None: a single run.
    agents: int | None = None
    # Units in each layer of the network. With several values, each is measured.
    hidden_size: tuple[int, ...] = (64,)
    layers: int = 2  # Layers of the network.

    def config(self, machine: Machine = HERE) -> Config:
        """The config of the loop on a machine, by default in fp32.

        Raises ValueError for an option of the machine that a population does not have, and for a
        number that is out of range.
        """
        if self.agents is not None:
            if self.agents < 1:
                raise ValueError(f"agents is {self.agents}: use at least 1")
            for field in dataclasses.fields(Machine):
                if (
                    field.name not in ("device", "graph")
                    and getattr(machine, field.name) != field.default
                ):
                    raise ValueError(
                        f"{field.name} is {getattr(machine, field.name)} beside agents: "
                        "leave it out"
                    )
            if processes.rank_and_size()[1] > 1:
                raise ValueError(
                    f"agents is {self.agents} under torchrun: leave one of them out, "
                    "populations exchange nothing"
                )
        return Config(
            precision=self.precision or "fp32",
            num_envs=self.num_envs,
            rollout_length=self.rollout_length,
            hidden_size=self.hidden_size[0],
            layers=self.layers,
            capacity=(self.rollout_length + 1) * self.num_envs,
            slice_length=1,
            replay_updates=0,
            steps=10**15,
            eval_every=0,
        )

    def fastest(self, machine: Machine) -> Config:
        """The config of the loop. If its precision is None, the fastest one on the machine is used.

        Raises the errors of `config`.
        """
        config = self.config(machine)
        if self.agents or self.precision:
            return config
        names = available_precisions(machine.device)
        emulated = torch.tensor([is_emulated(name, machine.device) for name in names])
        (emulated,) = processes.all_reduce([emulated.int()])  # all processes must agree
        configs = [
            dataclasses.replace(config, precision=name)
            for name, no in zip(names, emulated, strict=True)
            if not no
        ]
        if len(configs) == 1:  # nothing to compare
            return configs[0]
        speeds = [bench_loop(one, machine, 0.5, 1)["train_steps_per_second"] for one in configs]
        (speeds,) = processes.all_reduce([torch.tensor(speeds)])
        return configs[int(speeds.argmax())]


def origin() -> str:
    """One line on how a result was made: the machine, versions, and the commit of the code."""
    return f"{hardware()}; commit {commit()}"


@functools.cache  # the code of a process does not change
def commit() -> str:
    """The short hash of this code's commit, with a + if files have changed since then.

    It is "unknown" outside a clone, as for an installed package.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "*.py"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + "+" * bool(changed.returncode)


def bench_loop(
    config: Config,
    machine: Machine,
    seconds: float = 5.0,
    rounds: int = 5,
    agents: int | None = None,
) -> dict[str, float | int | str]:
    """Measures a config's loop, or that of a population of agents with seeds from 0 up.

    Times are medians over rounds, which alternate with measurements of the floor. Returns

        train_steps_per_second        environment steps that are learned from, per second
        agents                        number of agents, for a population
        num_envs, rollout_length, precision, hidden_size, layers
                                      settings of the loop
        floor_share                   the floor's time as a fraction of an iteration's time
    """
    _, ranks = processes.rank_and_size()
    floor = floor_of(config, machine, agents)
    if agents is None:
        run = build(config, machine)
    else:
        configs = [dataclasses.replace(config, seed=seed) for seed in range(agents)]
        run = build_population(configs, machine.device, machine.graph)
    steps = config.steps_per_iteration * (agents or 1)
    speeds = []
    floor_shares = []
    with contextlib.closing(iterate(run)) as iterations:
        for _ in range(5):  # caches, and the capture of a graph
            began = time.perf_counter()
            next(iterations)
            run.launch.finish(run)
        # The same count in every process, because they wait for each other.
        seconds_each = torch.tensor((time.perf_counter() - began) / ranks)
        (seconds_each,) = processes.all_reduce([seconds_each])
        count = max(1, int(seconds / rounds / seconds_each.item()))
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(count):
                next(iterations)
            run.launch.finish(run)
            seconds_each = (time.perf_counter() - began) / count
            floor_seconds = seconds_of({"floor": floor}, 1, 0.05, machine.device)["floor"]
            speeds.append(steps / seconds_each)
            floor_shares.append(floor_seconds / seconds_each)
    result = {"train_steps_per_second": statistics.median(speeds)}
    if agents is not None:
        result["agents"] = agents
    for name in ("num_envs", "rollout_length", "precision", "hidden_size", "layers"):
        result[name] = getattr(config, name)
    result["floor_share"] = statistics.median(floor_shares)
    return result


def floor_of(config: Config, machine: Machine, agents: int | None = None) -> Callable[[], None]:
    """A function that does only the multiplications of an iteration, on the built-in cart.

    They are those of this process's environments or, for a population, those of all agents in
    float32. An iteration has T forward passes to act, and one forward and one backward pass over
    all rows at once. On CUDA with `graph`, the function is a graph, too.
    """
    device = machine.device
    _, ranks = processes.rank_and_size()
    envs = config.num_envs // ranks
    length = config.rollout_length
    size = config.hidden_size
    mode = Precision(config.precision, device).matmul_mode
    sizes = [(2, size), *[(size, size)] * (config.layers - 1), (size, 3)]  # both heads at once

    def forward(rows: int) -> list[tuple[int, int, int]]:
        return [(rows, i, o) for i, o in sizes]

    def backward(rows: int) -> list[tuple[int, int, int]]:
        # The gradients of weights, then those of inputs.
        return [(i, rows, o) for i, o in sizes] + [(rows, o, i) for i, o in sizes[1:]]

    def products(
        shapes: list[tuple[int, int, int]], precision: str = config.precision
    ) -> list[tuple[torch.Tensor, ...]]:
        dtype = torch.float32 if agents else PRECISIONS[precision].autocast or torch.float32
        return [fastest_product(*shape, dtype, device, agents) for shape in shapes]

    acting = products(forward(envs), config.acting_precision)
    learning = products(forward((length + 1) * envs) + backward(length * envs))
    all_products = acting * length + learning

    def multiply():
        with mode():
            for a, b, out in all_products:
                torch.matmul(a, b, out=out)

    device = torch.device(device)
    if not (machine.graph and has_graphs(device)):
        return multiply
    graphed = Graphed(device)
    replay = functools.partial(graphed, multiply)
    for _ in range(WARMUP + 1):  # until it is captured
        replay()
    return replay


def fastest_product(
    m: int, k: int, n: int, dtype: torch.dtype, device: str, agents: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matrices [m, k] and [k, n], and a tensor for their product, in the fastest layouts.

    With `agents` there is a pair of matrices for each agent. Each tensor is row-major or
    column-major. With emulated arithmetic, the times of layouts differ up to tenfold.
    """

    def new(rows, columns, transposed):
        shape = (columns, rows) if transposed else (rows, columns)
        matrix = torch.randn((agents, *shape) if agents else shape, device=device).to(dtype)
        return matrix.mT if transposed else matrix

    triples = [
        (new(m, k, a), new(k, n, b), new(m, n, out))
        for a, b, out in itertools.product((False, True), repeat=3)
    ]
    steps = {
        i: functools.partial(torch.matmul, a, b, out=out) for i, (a, b, out) in enumerate(triples)
    }
    seconds = seconds_of(steps, 3, 0.001, device)
    return triples[min(seconds, key=seconds.get)]


def seconds_of(
    steps: dict, rounds: int = 7, round_seconds: float = 0.05, device="cuda"
) -> dict[str, float]:
    """Median seconds of each callable, over rounds that alternate between them.

    Each round is long enough for the clock's resolution.
    """

    def timed(step, repeats):
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / repeats

    for step in steps.values():
        timed(step, 3)  # warm-up
    repeats = {name: max(1, int(round_seconds / timed(step, 1))) for name, step in steps.items()}
    rounds = [
        {name: timed(step, repeats[name]) for name, step in steps.items()} for _ in range(rounds)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in steps}
