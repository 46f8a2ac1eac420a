"""`python -m fp8rl memory`: predicts the bytes of a replay ring, and measures them."""

import contextlib
import json
import sys

import tyro

from ..build import build
from ..disk.mapped_ring import free_on_disk
from ..machine import hardware
from ..machine.plan import plan_run
from ..replay.layouts import LAYOUTS, STORES, difference_codec, layout_bytes
from ..train import Run
from .arguments import ConfigOptions, Json, MachineOptions, checked

PLAYED = 20_000  # rows that an untrained agent plays, at most, to see how many are dummies


def predict_and_measure(
    config: tyro.conf.OmitArgPrefixes[ConfigOptions],
    machine: tyro.conf.OmitArgPrefixes[MachineOptions],
    layout: str = "compact",
    json_output: Json = False,
) -> None:
    """Predict the bytes of a replay ring, allocate the ring, and measure its bytes.

    Args:
        config: What would be trained.
        machine: Where. A ring in a memmap folder has the whole capacity, and stays in the folder.
        layout: How the next observation is stored. Training uses compact, where it is the next row.
            For comparison, full stores it again, and delta its rounded difference. In the compact
            layout not every row is a transition: the newest row of each environment is open, and
            each episode has a dummy row. An untrained agent plays some rollouts, and their share of
            dummy rows is taken for the share in the full ring.
    """
    config = checked(config)
    machine = checked(machine)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: choose from {', '.join(LAYOUTS)}")
    if layout != "compact" and machine.memmap is not None:
        raise ValueError(
            f"memmap is {machine.memmap} and layout {layout!r}: leave memmap out, "
            "or use the compact layout"
        )
    available = (
        free_on_disk(machine.memmap) if machine.memmap else hardware.available(machine.on("store"))
    )
    open_rows = 0
    dummy_rows = 0
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        plan = plan_run(config, machine)
        rows = plan.ring_rows * plan.num_envs
        run = build(config, machine)
        with contextlib.closing(run):
            if layout == "compact":
                open_rows = config.num_envs
                dummy_rows = round((rows - open_rows) * share_of_dummy_rows(run, rows))
    ring = run.ring
    predicted = plan.ring_bytes
    measured = ring.nbytes
    if layout != "compact":
        predicted = layout_bytes(
            layout,
            rows,
            ring.obs_size,
            plan.codec,
            ring.action_size,
            difference_codec(ring.bounds),
        )
        settings = rows, ring.bounds, plan.codec, ring.device, ring.action_size
        del run, ring  # so that the two stores need not be in memory at the same time
        remedy = "lower capacity or choose a one-byte codec"
        hardware.require_room("replay", predicted, remedy, machine.on("store"))
        measured = STORES[layout](*settings).nbytes
    transitions = rows - open_rows - dummy_rows
    result = {
        "layout": layout,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "rows": rows,
        "bytes_per_row": predicted / rows,
        "open_rows": open_rows,
        "dummy_rows": dummy_rows,
        "transitions": transitions,
        "bytes_per_transition": predicted / transitions,
        "available_bytes": available,
    }
    print(json.dumps(result) if json_output else report(result))


def share_of_dummy_rows(run: Run, rows: int) -> float:
    """The share of dummy rows in what an untrained agent plays.

    It plays as many rows as the ring has, but not more than PLAYED, in whole rollouts.
    """
    played = 0
    dummies = 0
    while played < min(rows, PLAYED):
        valid = run.collector.collect(run.model).valid
        played += valid.numel()
        dummies += int((~valid).sum())
    return dummies / played


def report(result: dict) -> str:
    """The result for a terminal, a line for each number."""
    lines = [
        f"{name:20} {value:>20,.1f}" if isinstance(value, float) else f"{name:20} {value:>20}"
        for name, value in result.items()
    ]
    if result["layout"] == "compact":
        lines.append(
            "dummy_rows is an estimate: one follows each episode, and their share is that of an "
            "untrained agent's episodes."
        )
    return "\n".join(lines)
