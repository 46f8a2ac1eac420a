"""`python -m fp8rl bench`: measures how fast this machine trains."""

import dataclasses
import json
import math

import tyro

from ..machine import processes
from . import throughput
from .arguments import Json, MachineOptions, Unchecked, checked


class LoopOptions(Unchecked, throughput.Loop):
    pass


def measure(
    loop: tyro.conf.OmitArgPrefixes[LoopOptions],
    machine: tyro.conf.OmitArgPrefixes[MachineOptions],
    seconds: float = 5.0,
    json_output: Json = False,
) -> None:
    """Measure how fast this machine trains without replay.

    Args:
        loop: What is trained.
        machine: Where it computes. Under torchrun, all processes are measured together.
        seconds: How long to measure.
    """
    loop = checked(loop)
    machine = checked(machine)
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}: use a positive number")
    if not loop.hidden_size:
        raise ValueError("hidden_size is empty: give at least one value")
    processes.start(machine.devices)
    sizes = [dataclasses.replace(loop, hidden_size=(size,)) for size in loop.hidden_size]
    results = [
        throughput.bench_loop(one.fastest(machine), machine, seconds, agents=loop.agents)
        for one in sizes
    ]
    first = processes.rank_and_size()[0] == 0
    processes.stop()
    if first and json_output:
        print(json.dumps(results if len(results) > 1 else results[0]))
    for result in results if first and not json_output else ():
        shown = {name: f"{x:,.3f}" if isinstance(x, float) else x for name, x in result.items()}
        print(
            "\n".join(f"{name:24} {x:>16}" for name, x in shown.items()),
            end="\n\n" if len(results) > 1 else "\n",
        )
