"""How fast is it? Every table of speed, as arms that are timed in turns.

An arm has a name, a setting that differs, and a function that measures it once. One loop runs all
arms of a table in rounds: each once, then each again, so that a slow hour of the machine falls on
all. Every measurement goes to a journal beside the table (NAME.csv), and the command goes on with
those that are missing on this machine. The table has medians over the rounds; a ratio is the median
of the ratios within the rounds. An arm that fails, because a library is missing, is left out, and
the command says so.

    waits             whole processes from their start to their end, with imports, evaluations and
                      files: `train` beside scripts that only train the cart (rivals.py), and
                      `study` beside as many agents in JAX
    watching          scripts alone and under `python -m fp8rl.doctor watch`, by the processor's
                      time: nanoGPT in two sizes and two of CleanRL, in the clones that --clones
                      names (benchmarks/scripts.py has what they need); and `mismatch` on a large
                      dump
    loops             the loop of one agent once it runs, beside JAX, with 1 update an iteration or
                      3: fp8rl replays for the other two, JAX takes the new rollout again
    populations       agents as one batch, beside JAX's vmap; and studies one by one and together
    populations_cuda  the same on a GPU, launched one by one and as a graph
    widths_speed      units in a layer, in each precision, on one core, by the processor's time
    widths_cuda       the same on a GPU with 1,024 environments, by the clock, with the peak memory
    processes         two ranks beside one, and Gymnasium's environments in processes of their own
    placements        a CUDA graph beside eager launches; learner, actor and ring on each device
    fp8_layer         one square linear layer, forward and backward, in each precision, as a graph.
                      It needs a GPU with FP8: elsewhere float8 numbers are multiplied in float32

    python benchmarks/speed/arms.py waits benchmarks/results/waits.md

Trainings have 16 environments, rollouts of 32 steps and one torch thread, in float32, where nothing
else is said. What only the benchmark needs is not counted in waits: the evaluation after a training,
and in JAX's processes the import of torch. JAX compiles at every start; "compiled before" finds what
an earlier process compiled in a cache on disk.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torch import nn
from torch.utils.benchmark import Timer

from fp8rl.build import HERE, Machine, build, build_population
from fp8rl.config import Config
from fp8rl.dumps import mismatch
from fp8rl.machine.gpu.cuda_graphs import WARMUP, Graphed
from fp8rl.machine.gpu.install import quantize_by_kernel
from fp8rl.machine.hardware import cores, hardware, is_emulated
from fp8rl.model import ActorCritic
from fp8rl.precision import Precision, available_precisions
from fp8rl.rollout import Collector
from fp8rl.study import parallel
from fp8rl.tasks.gymnasium_env import GymEnv
from fp8rl.train import Run, iterate

SPEED = Path(__file__).parent
sys.path.insert(0, str(SPEED.parent))
import scripts  # noqa: E402
from results import ROOT, Journal, table_of, write_tables  # noqa: E402

CORES = cores()
VECTORIZATIONS = ("sync", "async")  # how Gymnasium steps the copies of an environment
JOURNAL = ("table", "row", "column", "round", "value", "machine")
SECONDS = 2.0  # that a speed is measured over
FORMS = {
    "seconds": ".1f",
    "greedy return then": ".1f",
    "GB": ".2f",
}  # of a column's numbers, by the end of its name; of all others ",.0f"


class Arm(NamedTuple):
    """What is measured in a round, which makes one cell of a table or several.

    `row`      what the first columns say of it
    `column`   the column of its number
    `measure`  measures it, with a seed: numbers by column, `column` among them
    """

    row: tuple[str, ...]
    column: str
    measure: Callable[[int], dict[str, float]]


class Table(NamedTuple):
    """Arms that are measured in turns.

    `heads`   names of the first columns
    `ratios`  further columns, by name: that of the first column to the second. Where the second is
              "first line", to the same column in the first line that begins with the same word
    `above`   what stands above the table
    """

    heads: tuple[str, ...]
    arms: list[Arm]
    ratios: dict[str, tuple[str, str]] = {}
    above: str = ""


# Processes


def run_processes(
    commands: list[str], environment: dict[str, str] | None = None, folder: Path | None = None
) -> dict:
    """Runs Python commands at the same time, in a folder.

    Returns what each has printed in its last line, as JSON, by "printed"; the seconds until the last
    has ended; those that the processor was busy; and the most memory of a process in MB, that of
    its children included only if they are larger. Raises RuntimeError with the end of the output if
    one fails.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        began = time.perf_counter()
        processes = []
        for command, output in zip(commands, outputs, strict=True):
            words = [str(SPEED / x) if (SPEED / x).exists() else x for x in shlex.split(command)]
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=os.environ | variables | (environment or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            processes.append(process)
            stack.callback(process.kill)  # if this program is interrupted
        used = []
        for process in processes:
            _, status, of_process = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            used.append(of_process)
        seconds = time.perf_counter() - began
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
    for process, text in zip(processes, texts, strict=True):
        if process.returncode:
            raise RuntimeError(text[-2000:])
    return {
        "printed": [numbers_of(text) for text in texts],
        "seconds": seconds,
        "busy": sum(x.ru_utime + x.ru_stime for x in used),
        "megabytes": max(x.ru_maxrss for x in used) / 1000,
    }


def numbers_of(output: str) -> dict:
    """The JSON object in the last line of an output; what `fp8rl train` says; or nothing."""
    with contextlib.suppress(IndexError, ValueError):
        numbers = json.loads(output.splitlines()[-1])
        return numbers if isinstance(numbers, dict) else {}
    found = re.search(r"final greedy return (-?[\d.]+)", output)
    return {"greedy_return": float(found[1])} if found else {}


def wait(commands: list[str], environment: dict[str, str] | None = None) -> dict[str, float]:
    """Seconds of processes from their start, without what only the benchmark needs."""
    ended = run_processes(commands, environment)
    first = ended["printed"][0]
    of_benchmark = first.get("seconds_evaluating", 0) + first.get("seconds_importing_torch", 0)
    numbers = {
        "seconds": ended["seconds"] - of_benchmark,
        "most memory, MB": ended["megabytes"],
    }
    if "greedy_return" in first:
        numbers["greedy return then"] = first["greedy_return"]
    return numbers


def waiting_arm(row: tuple[str, ...], command: str, copies: Iterable[int] = (0,)) -> Arm:
    """An arm of processes. {seed} in the command is the round's, and {core} the copy's own."""

    def measure(seed: int) -> dict[str, float]:
        return wait([command.format(seed=seed, core=core) for core in copies])

    return Arm(row, "seconds", measure)


def speed_arm(row: tuple[str, ...], column: str, command: str, copies: Iterable[int] = (0,)) -> Arm:
    """An arm of processes that print their steps a second, which are added."""

    def measure(seed: int) -> dict[str, float]:
        commands = [command.format(seed=seed, core=core) for core in copies]
        printed = run_processes(commands)["printed"]
        return {column: sum(numbers["train_steps_per_second"] for numbers in printed)}

    return Arm(row, column, measure)


TRAINING = "--rollout-length 32 --steps 100000 --seed {seed}"
OURS = f"rivals.py --num-envs 16 --learning-rate 0.002 {TRAINING}"
JAX = f"jax_rival.py --num-envs 16 --learning-rate 0.002 {TRAINING}"
SB3 = f"sb3_rival.py {TRAINING}"
SCRIPTS = {
    "fp8rl": f"{OURS} --variant on-policy",
    "fp8rl, the defaults: 16 replayed updates": f"{OURS} --variant defaults",
    "JAX": JAX,
    "CleanRL style": f"{OURS} --variant cleanrl",
    "SB3, batched VecEnv": f"{SB3} --num-envs 16 --learning-rate 0.002 --variant batched",
    "SB3, DummyVecEnv": f"{SB3} --num-envs 16 --learning-rate 0.002 --variant dummy",
    # The settings of Stable-Baselines3's zoo for CartPole
    "SB3's PPO, DummyVecEnv": f"{SB3} --num-envs 8 --learning-rate 0.001 --variant ppo",
}


def training_arms(work: Path) -> list[Arm]:
    """Scripts that train the cart and do nothing else."""
    arms = [waiting_arm(("train", name), command) for name, command in SCRIPTS.items()]
    cache = work / "compiled"
    from_cache = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def compiled_before(seed: int) -> dict[str, float]:
        commands = [JAX.format(seed=seed)]
        if not cache.exists():
            wait(commands, from_cache)  # fills the cache
        return wait(commands, from_cache)

    after_jax = list(SCRIPTS).index("JAX") + 1
    arms.insert(after_jax, Arm(("train", "JAX, compiled before"), "seconds", compiled_before))
    return arms


def waits(options: argparse.Namespace) -> list[Table]:
    out = f"--out {options.work}/{{seed}} --overwrite"
    # A study trains 48 iterations with 17 updates each: one on 2,048 new rows, 16 on 1,024 replayed
    # ones. JAX's loop learns 9 times from each of 97 rollouts of 1,024 rows.
    study = "jax_rival.py --num-envs 16 --rollout-length 64 --updates 9 --steps 100000 --agents"
    train = f"-m fp8rl train --steps 100000 --seed {{seed}} {out}"
    arms = [
        waiting_arm(("train", "`python -m fp8rl train`"), train),
        *training_arms(options.work),
        waiting_arm(
            ("study", "`python -m fp8rl study`, 30 seeds in four precisions"),
            f"-m fp8rl study --first-seed {{seed}} {out}",
        ),
        waiting_arm(("study", "JAX under vmap, float32"), f"{study} 120"),
        waiting_arm(
            ("study", "JAX under vmap, float32, a process on each core"),
            f"{study} {120 // CORES} --core {{core}}",
            range(CORES),
        ),
    ]
    ratios = {"times the row's first line": ("seconds", "first line")}
    return [Table(("row", "what one waits for"), arms, ratios)]


def watching(options: argparse.Namespace) -> list[Table]:
    watch = "-m fp8rl.doctor watch"
    packages = (
        "import runpy, sys, torchao.optim, bitsandbytes.optim, optimi; del sys.argv[0]; "
        "sys.path[0] = sys.argv[0].rpartition('/')[0] or '.'; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    hows = {
        "alone": "",
        "importing their packages": f"-c {shlex.quote(packages)}",
        "emulated": watch,
        "four stacks": f"{watch} --formats '{scripts.WATCHING}'",
    }
    clones = dict(zip(("cleanrl", "nanogpt"), map(Path.absolute, options.clones), strict=True))
    scripts.prepare_text(clones["nanogpt"])

    def measure(script: scripts.Script, how: str, seed: int) -> dict[str, float]:
        folder = clones[script.folder]
        paths = os.environ.get("FP8RL_STRANGERS", ""), str(ROOT), str(folder)
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        ended = run_processes([f"{how} {script.arguments.format(seed=seed)}"], variables, folder)
        return {"CPU seconds": ended["busy"], "most memory, MB": ended["megabytes"]}

    arms = [
        Arm((name, how), "CPU seconds", functools.partial(measure, script, hows[how]))
        for name, script in scripts.WATCHED.items()
        for how in hows
    ]
    heads = {"times alone": "CPU seconds", "times its memory": "most memory, MB"}
    ratios = {head: (column, "first line") for head, column in heads.items()}
    dumps = [
        Arm((given or "nothing more",), "CPU seconds", functools.partial(judge, given))
        for given in ("", "mask", "tokens", "tokens advantages")
    ]
    above = (
        "`mismatch` on 256 x 8,000 tokens: what is given beside the log-probabilities, and memory:"
    )
    return [Table(("script", "how"), arms, ratios), Table(("given",), dumps, {}, above)]


def judge(given: str, seed: int) -> dict[str, float]:
    """Judges a large dump, in a process of its own."""
    code = shlex.quote(f"import arms; arms.judge_large({seed}, *{given.split()})")
    return run_processes([f"-c {code}"], {"PYTHONPATH": f"{SPEED}:{ROOT}"})["printed"][0]


def judge_large(seed: int, *given: str) -> None:
    """Judges a dump of 256 x 8,000 tokens. Prints the processor's time, and how much larger the
    process became than it was with the dump."""
    draw = np.random.default_rng(seed)
    shape = 256, 8_000
    actor = -draw.standard_exponential(shape, np.float32)
    learner = np.minimum(actor * (1 + 0.01 * draw.standard_normal(shape, np.float32)), 0)
    beside = {
        "mask": lambda: np.arange(8_000) < draw.integers(4_000, 8_000, (256, 1)),
        "tokens": lambda: draw.integers(0, 50_000, shape, np.int32),
        "advantages": lambda: draw.standard_normal(256),
    }
    beside = {name: beside[name]() for name in given}
    mismatch(learner[:, :100], actor[:, :100])  # what is imported and made once
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    mismatch(learner, actor, **beside)
    seconds = time.process_time() - began
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"CPU seconds": seconds, "bytes a token": 1024 * kilobytes / actor.size}))


def loops(options: argparse.Namespace) -> list[Table]:
    shape = "--rollout-length 32 --updates {} --num-envs {} --seconds {}"
    scripts = {"fp8rl, steps/s": "rivals.py --variant on-policy", "JAX, steps/s": "jax_rival.py"}
    arms = [
        speed_arm(
            (str(updates), str(envs)), column, f"{script} {shape.format(updates, envs, SECONDS)}"
        )
        for updates, envs in itertools.product((1, 3), (16, 64, 256))
        for column, script in scripts.items()
    ]
    heads = ("updates an iteration", "environments")
    return [Table(heads, arms, {"fp8rl / JAX": ("fp8rl, steps/s", "JAX, steps/s")})]


# Many agents


def population_arms(contestants: dict[str, tuple[str, int]], sizes: Iterable[int]) -> list[Arm]:
    """Agents as one batch, or shared by so many processes."""
    return [
        speed_arm(
            (name,),
            f"{agents:,} agents",
            f"{command} --agents {agents // copies} --num-envs 16 --seconds {SECONDS}",
            range(copies),
        )
        for agents in sizes
        for name, (command, copies) in contestants.items()
    ]


def populations(options: argparse.Namespace) -> list[Table]:
    contestants = {
        "fp8rl, a process on each core": ("rivals.py --variant on-policy", CORES),
        "JAX under vmap": ("jax_rival.py", 1),
        "JAX under vmap, unrolled": ("jax_rival.py --variant unrolled", 1),
        "JAX under vmap, a process on each core": ("jax_rival.py --core {core}", CORES),
    }
    arms = population_arms(contestants, (8, 32, 128, 512))
    studies = [
        Arm(("one by one", str(2 * CORES)), "steps/s", functools.partial(study, 2 * CORES, True)),
        Arm(("together", "30"), "steps/s", functools.partial(study, 30, False)),
    ]
    heads = ("study of the cart", "agents")
    return [
        Table(("steps/s of all agents",), arms),
        Table(heads, studies, above="A study with the defaults, start of the processes included:"),
    ]


def study(count: int, alone: bool, seed: int) -> dict[str, float]:
    """Trains agents with the defaults on all cores."""
    run = parallel.run if alone else None
    configs = [Config(seed=seed + k) for k in range(count)]
    warm_up = [replace(config, steps=2 * config.steps_per_iteration) for config in configs[:CORES]]
    list(parallel.run_all(warm_up, run=run, progress=False))
    began = time.perf_counter()
    finished = list(parallel.run_all(configs, run=run, progress=False))
    steps = sum(history.last["steps"] for _, history in finished)
    return {"steps/s": steps / (time.perf_counter() - began)}


def populations_cuda(options: argparse.Namespace) -> list[Table]:
    ours = "rivals.py --variant on-policy --device cuda"
    contestants = {
        "fp8rl, each operation launched": (f"{ours} --no-graph", 1),
        "fp8rl, an iteration as one graph": (ours, 1),
        "JAX under vmap, float32": ("jax_rival.py --matmul float32", 1),
        "JAX under vmap, TF32": ("jax_rival.py", 1),
    }
    # Without a JAX for CUDA, this processor would stand in the table of a GPU
    os.environ["JAX_PLATFORMS"] = "cuda"
    return [Table(("steps/s of all agents",), population_arms(contestants, (32, 1024, 4096)))]


# Runs in this process


def steps_per_second(
    run: Run, agents: int = 1, share: float = 1, clock: Callable = time.perf_counter
) -> float:
    """Environment steps of training in a second of a clock, of all agents of a run together,
    measured over a share of SECONDS."""
    with contextlib.closing(iterate(run)) as iterations:
        for _ in range(WARMUP + 2):  # loads what training needs, and captures graphs
            next(iterations)
        run.launch.finish(run)
        began = clock()
        count = 0
        while count < 3 or clock() - began < share * SECONDS:
            next(iterations)
            count += 1
        run.launch.finish(run)
    return count * agents * run.config.steps_per_iteration / (clock() - began)


def seconds_of(step: Callable, least: float) -> float:
    """Median seconds of a call, measured over so many seconds or more."""
    timer = Timer("step()", globals={"step": step})
    timer.timeit(WARMUP + 2)  # as above: loads what it needs, and captures a graph
    return timer.blocked_autorange(min_run_time=least).median


def run_arm(
    row: tuple[str, ...], column: str, config: Config, machine: Machine = HERE, **measured
) -> Arm:
    """An arm of a run in this process."""
    config = replace(config, steps=10**9, eval_every=0)

    def measure(seed: int) -> dict[str, float]:
        return {column: steps_per_second(build(config, machine), **measured)}

    return Arm(row, column, measure)


def widths_speed(options: argparse.Namespace) -> list[Table]:
    """On one core, by the processor's time, so that programs beside this one count little."""
    measured = {"share": 2.5, "clock": time.process_time}

    def population(column: str, config: Config, seed: int) -> dict[str, float]:
        run = build_population([replace(config, seed=k) for k in range(8)])
        return {column: steps_per_second(run, agents=8, **measured)}

    arms = []
    for width in (16, 64, 256, 1024):
        config = Config(hidden_size=width, steps=10**9, eval_every=0)
        row = (f"{width:,}",)
        for name in ("fp32", "bf16", "fp8"):
            arms.append(run_arm(row, f"{name} alone", replace(config, precision=name), **measured))
        for name in ("fp32", "fp8"):
            column = f"8 agents in {name}"
            of_agents = functools.partial(population, column, replace(config, precision=name))
            arms.append(Arm(row, column, of_agents))
    return [Table(("width",), arms, {"bf16 / fp32": ("bf16 alone", "fp32 alone")})]


def short_run(num_envs: int, precision: str, **fields) -> Config:
    """Three updates an iteration, each from as many rows as a rollout of 32 steps has."""
    shape = {"rollout_length": 32, "slice_length": 32, "replay_updates": 2}
    shape |= {"batch_size": 32 * num_envs, "capacity": 128 * num_envs}
    return Config(precision, num_envs=num_envs, **shape | fields)


def widths_cuda(options: argparse.Namespace) -> list[Table]:
    fields = {"batch_size": 16_384, "capacity": 330_000, "steps": 10**9, "eval_every": 0}

    def speed_and_memory(width: int, name: str, seed: int) -> dict[str, float]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        config = short_run(1024, name, hidden_size=width, **fields)
        speed = steps_per_second(build(config, Machine("cuda")), share=0.25)
        return {name: speed, f"{name}, GB": torch.cuda.max_memory_reserved() / 1e9}

    arms = [
        Arm((f"{width:,}",), name, functools.partial(speed_and_memory, width, name))
        for width in (2**n for n in range(6, 14))
        for name in available_precisions("cuda")
    ]
    return [Table(("width",), arms)]


def placements(options: argparse.Namespace) -> list[Table]:
    devices = ("cpu", "cuda")
    graphs = [
        run_arm((f"{envs:,}", name), column, short_run(envs, name), Machine("cuda", graph=graph))
        for envs, name in itertools.product((16, 4096), available_precisions("cuda"))
        for column, graph in (("eager, steps/s", False), ("graph, steps/s", True))
    ]
    places = [
        run_arm(
            (f"{envs:,}", *on), "steps/s", short_run(envs, "fp32"), Machine(*on, "cpu", graph=False)
        )
        for envs, *on in itertools.product((16, 1024), devices, devices, devices)
    ]
    ratio = {"graph / eager": ("graph, steps/s", "eager, steps/s")}
    return [
        Table(("environments", "precision"), graphs, ratio),
        Table(("environments", "learn", "collect", "store"), places),
    ]


# Processes that share one run, or its environments


class Busy(CartPoleEnv):
    """CartPole whose step computes for about a millisecond more."""

    def step(self, action):
        sum(range(50_000))
        return super().step(action)


class Waiting(CartPoleEnv):
    """CartPole whose step waits for a millisecond more, as for a simulator elsewhere."""

    def step(self, action):
        time.sleep(1e-3)
        return super().step(action)


def collect(env_id: str, copies: int, vectorization: str, seed: int) -> dict[str, float]:
    env = GymEnv(env_id, copies, vectorization=vectorization)
    model = ActorCritic(4)
    collector = Collector(env, model, Precision("fp32"), length=32)
    seconds = seconds_of(functools.partial(collector.collect, model), 0.6)
    env.close()
    return {vectorization: 32 * copies / seconds}


def processes(options: argparse.Namespace) -> list[Table]:
    for name, env in {"Busy": Busy, "Waiting": Waiting}.items():
        gymnasium.register(f"{name}CartPole-v1", env, max_episode_steps=500)
    names = ("CartPole-v1", "BusyCartPole-v1", "WaitingCartPole-v1")
    # First: its processes are forks, of a process that has not trained yet
    collecting = [
        Arm((env_id, str(n)), name, functools.partial(collect, env_id, n, name))
        for env_id, n in itertools.product(names, (4, 16))
        for name in VECTORIZATIONS
    ]
    two = "-m torch.distributed.run --nproc-per-node 2 "
    ranks = [
        speed_arm(
            (f"{envs:,}",),
            column,
            f"{start}rivals.py --variant on-policy --updates 3 --num-envs {envs} --steps {steps}",
        )
        for envs, steps in {16: 76_800, 256: 491_520, 2048: 983_040}.items()
        for column, start in (("one process", ""), ("two ranks", two))
    ]
    return [
        Table(
            ("environment", "copies"),
            collecting,
            {"async / sync": ("async", "sync")},
            "Collecting alone, steps per second. A step of BusyCartPole sums 50,000 numbers more, "
            "one of WaitingCartPole sleeps 1 ms more.",
        ),
        Table(
            ("environments",),
            ranks,
            {"ratio": ("two ranks", "one process")},
            "Training, three updates on a rollout of 32 steps, steps per second:",
        ),
    ]


# One layer

PRECISIONS = ("fp32", "tf32", "bf16", "fp8")


def layer_steps(width: int, batch: int, precisions=PRECISIONS, device="cuda") -> dict:
    """For each precision a function that runs one layer forward and backward, on CUDA as a graph:
    name -> callable. All share one input and one output gradient, which take most of the memory."""
    x = torch.randn(batch, width, device=device, requires_grad=True)
    grad = torch.randn(batch, width, device=device)

    def step_of(name):
        precision = Precision(name, device)
        layer = precision.prepare(nn.Sequential(nn.Linear(width, width)))
        quantize_by_kernel(layer)

        def step():
            layer.zero_grad()
            x.grad = None
            with precision.autocast():  # includes the backward pass, for the TF32 switch
                y = layer(x)
                y.backward(grad.to(y.dtype))

        return functools.partial(Graphed(x.device), step) if x.is_cuda else step

    return {name: step_of(name) for name in precisions}


def time_layer(batch: int, width: int, seed: int) -> dict[str, float]:
    """Microseconds of a step."""
    steps = layer_steps(width, batch)
    return {name: 1e6 * seconds_of(step, 0.1) for name, step in steps.items()}


def fp8_layer(options: argparse.Namespace) -> list[Table]:
    if is_emulated("fp8", "cuda"):
        sys.exit("fp8_layer needs a CUDA device of compute capability 8.9 or higher")
    arms = [
        Arm((f"{batch:,}", f"{width:,}"), "fp8", functools.partial(time_layer, batch, width))
        for batch in (1024, 4096, 16384, 65536)
        for width in (2**n for n in range(6, 14))
    ]
    ratios = {f"{name} / fp8": (name, "fp8") for name in PRECISIONS[:3]}
    above = "Microseconds of a step, forward and backward; where a ratio is above 1, FP8 is faster:"
    return [Table(("rows", "units"), arms, ratios, above)]


# What runs arms, and writes their table

ON_CPU = (waits, watching, loops, populations, widths_speed, processes)
ON_GPU = (populations_cuda, widths_cuda, placements, fp8_layer)
TABLES = {function.__name__: function for function in (*ON_CPU, *ON_GPU)}


def measure(journal: Journal, name: str, arms: list[Arm], rounds: int) -> None:
    """Measures what the journal does not have yet on this machine."""
    machine = hardware()
    done = journal.done("table", "row", "column", "round", "machine")
    left_out = set()
    for number, arm in itertools.product(range(rounds), arms):
        row = " | ".join(arm.row)
        if (name, row, arm.column, str(number), machine) in done or (row, arm.column) in left_out:
            continue
        try:
            # No setting was chosen on seeds from 1000 up
            numbers = arm.measure(1000 + number)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            print(f"{row}, {arm.column} left out, it failed:\n{error}", flush=True)
            left_out.add((row, arm.column))
            continue
        lines = [(name, row, column, number, f"{x:.6g}", machine) for column, x in numbers.items()]
        journal.add(*(dict(zip(JOURNAL, line, strict=True)) for line in lines))
        print(f"{time.strftime('%X')} {row}, {arm.column}: {numbers[arm.column]:,.2f}", flush=True)


Measured = dict[tuple[str, str], dict[str, float]]  # by row and column: numbers by round


def measured_here(journal: Journal, name: str) -> Measured:
    """What the journal has of a table on this machine, in the order in which it was measured."""
    found: Measured = {}
    for line in journal.rows():
        if line["machine"] == hardware() and line["table"] == name:
            rounds = found.setdefault((line["row"], line["column"]), {})
            rounds[line["round"]] = float(line["value"])
    return found


def median_ratio(numbers: dict[str, float], others: dict[str, float]) -> str:
    """The median of the ratios within the rounds."""
    both = numbers.keys() & others.keys()
    return f"{statistics.median(numbers[key] / others[key] for key in both):.2f}" if both else ""


def text_of(table: Table, found: Measured) -> str:
    """A line for each row, in the order in which they were measured."""
    rows = dict.fromkeys(row for row, _ in found)
    columns = dict.fromkeys(column for _, column in found)
    first = {}
    lines = []
    for row in rows:
        first.setdefault(row.split(" | ")[0], row)
        cells = row.split(" | ")
        for column in columns:
            form = next((form for end, form in FORMS.items() if column.endswith(end)), ",.0f")
            numbers = found.get((row, column), {}).values()
            cells.append(format(statistics.median(numbers), form) if numbers else "")
        for column, other in table.ratios.values():
            beside = (first[cells[0]], column) if other == "first line" else (row, other)
            cells.append(median_ratio(found.get((row, column), {}), found.get(beside, {})))
        lines.append(cells)
    text = table_of((*table.heads, *columns, *table.ratios), lines)
    return f"{table.above}\n\n{text}" if table.above else text


def draw(out: Path, found: Measured) -> None:
    """A bar for each training."""
    seconds = {
        row.removeprefix("train | ").replace("`", ""): statistics.median(rounds.values())
        for (row, column), rounds in found.items()
        if column == "seconds" and row.startswith("train | ")
    }
    figure, ax = plt.subplots(figsize=(10, 3.4), layout="constrained")
    colors = ["#0072B2" if "fp8rl" in name else "#999999" for name in seconds]
    bars = ax.barh(list(seconds), list(seconds.values()), color=colors)
    ax.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=9)
    ax.set(title="100,000 steps", xlabel="seconds", xlim=(0, 1.15 * max(seconds.values())))
    ax.spines[["top", "right"]].set_visible(False)
    ax.invert_yaxis()
    figure.suptitle("From the start of a process to a trained agent: shorter is better")
    figure.savefig(out, dpi=110)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("out", type=Path, help="table to write")
    parser.add_argument(
        "--rounds", type=int, default=5, help="0 only writes what is in the journal"
    )
    parser.add_argument(
        "--clones", nargs=2, type=Path, help="of watching: clones of CleanRL and nanoGPT"
    )
    options = parser.parse_args(words)
    if TABLES[options.table] in ON_GPU and not torch.cuda.is_available():
        parser.error(f"{options.table} needs a CUDA device, and there is none")
    torch.set_num_threads(1)
    journal = Journal(options.out.with_suffix(".csv"), JOURNAL)
    texts = []
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        for number, table in enumerate(TABLES[options.table](options)):
            name = f"{options.table} {number}"
            measure(journal, name, table.arms, options.rounds)
            found = measured_here(journal, name)
            texts.append(text_of(table, found))
    note = "Medians over the rounds; a ratio is the median of those within the rounds."
    write_tables(options.out, *texts, note)
    if options.table == "waits":
        draw(options.out.with_suffix(".png"), found)


if __name__ == "__main__":
    main()
