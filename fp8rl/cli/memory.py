"""`python -m fp8rl memory`: predicts the bytes of a replay ring, and measures them."""

import contextlib
import json
import sys

import tyro

from .. import hardware
from ..build import build
from ..disk.mapped_ring import free_on_disk
from ..requirements import ring_rows
from ..study.replay_layouts import LAYOUTS, STORES, layout_bytes
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
            For comparison, full stores it again, and delta its rounded difference.
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
        run = build(config, machine)
        run.close()
    ring = run.ring
    transitions = ring_rows(config, machine) * config.num_envs
    predicted = layout_bytes(layout, transitions, ring.obs_size, config.codec, ring.action_size)
    if layout == "compact" and ring.proximal:
        predicted += transitions * ring.fields["proximal_logp"].itemsize
    measured = ring.nbytes
    if layout != "compact":
        settings = transitions, ring.bounds, config.codec, ring.device, ring.action_size
        del run, ring  # so that the two stores need not be in memory at the same time
        measured = STORES[layout](*settings).nbytes
    result = {
        "layout": layout,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "bytes_per_transition": predicted / transitions,
        "transitions": transitions,
        "available_bytes": available,
    }
    print(
        json.dumps(result)
        if json_output
        else "\n".join(
            f"{name:20} {value if name == 'layout' else f'{value:,}':>20}"
            for name, value in result.items()
        )
    )
