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
from ..replay.ring import ring_bytes
from .arguments import ConfigOptions, Json, MachineOptions, checked


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
            each episode has a dummy row.
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
    with contextlib.redirect_stdout(sys.stderr):  # what an environment prints is no result
        plan = plan_run(config, machine).ring
        rows = plan.rows * plan.num_envs
        with contextlib.closing(build(config, machine)) as run:
            ring = run.ring
    predicted = ring_bytes(*plan)
    measured = ring.nbytes
    if layout != "compact":
        predicted = layout_bytes(
            layout,
            rows,
            plan.features,
            plan.codec,
            plan.action_size,
            difference_codec(ring.bounds),
        )
        settings = rows, ring.bounds, plan.codec, ring.device, ring.action_size
        del run, ring  # so that the two stores need not be in memory at the same time
        hardware.require_room(
            "replay",
            predicted,
            "lower capacity or choose a one-byte codec",
            machine.on("store"),
        )
        measured = STORES[layout](*settings).nbytes
    result = {
        "layout": layout,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "rows": rows,
        "bytes_per_row": predicted / rows,
        "available_bytes": available,
    }
    print(json.dumps(result) if json_output else report(result))


def report(result: dict) -> str:
    """The result for a terminal, a line for each number."""
    return "\n".join(
        f"{name:20} {value:>20,.1f}" if isinstance(value, float) else f"{name:20} {value:>20}"
        for name, value in result.items()
    )
