"""Several processes, one learner: data-parallel training with torch.distributed.

Process k of n has the rank k. It holds an nth of the environments, with their rows of the ring and
its own random numbers, and replays an nth of each batch. Every update sums the gradients, and the
sums in the loss, over the ranks. So all ranks take the same step. The gradient is that of one
process on all the rollouts, except in FP8, whose scales are those of a rank's own tensors. A
checkpoint holds the whole run and is resumed with as many ranks. Every rank has a seed of its own
(rng.py).

torchrun starts the processes and tells each its rank. Without torchrun, the functions of this file
do nothing.
"""

import atexit
import io
import os
import signal

import torch

# This is imported before a group exists, because its functions take the current group as their
# default. That reference would outlive the group's destruction.
import torch.distributed.nn.functional
from torch import distributed


def start(devices: dict[str, str] | None = None) -> None:
    """Joins this process to the other processes of torchrun, if torchrun started it.

    `devices` are the devices of the run's parts, by the Machine's fields. The processes communicate
    over gloo and, if one of the devices is on CUDA, also over nccl. "cuda" then means this
    process's own GPU. Raises ValueError if the processes of this machine cannot have one GPU each.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or distributed.is_initialized():
        return
    gpus = torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    cuda = {field: device for field, device in (devices or {}).items() if device.startswith("cuda")}
    for field, device in cuda.items():
        if here > gpus or (here > 1 and device != "cuda"):
            raise ValueError(
                f"{field} is {device!r} and {here} processes share {gpus} GPU{'s' * (gpus != 1)}: "
                f"use 'cuda' for a GPU each, and start at most {gpus} (--nproc-per-node)"
            )
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # When one process has died, torchrun ends the others by SIGTERM.
    signal.signal(signal.SIGTERM, _end)
    atexit.register(stop)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")


def _end(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise RuntimeError("torchrun ends this process")


def stop() -> None:
    """Leaves the group of processes, at the latest when Python exits.

    gloo's threads must end before Python does. A thread that releases a tensor later would abort
    the process.
    """
    if distributed.is_initialized():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        distributed.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without torchrun."""
    return (
        (distributed.get_rank(), distributed.get_world_size())
        if distributed.is_initialized()
        else (0, 1)
    )


def all_reduce(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of tensors over the ranks, without gradient.

    All tensors go in one message, because the latency of a message costs more than its bytes.
    """
    if rank_and_size()[1] == 1:
        return tensors
    flat = torch.cat([x.detach().flatten() for x in tensors])
    distributed.all_reduce(flat)
    return [
        part.view(x.shape)
        for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)
    ]


# Parts of a run's state of which each rank has its own. All others are the same on all ranks.
OF_RANK = ("env", "returns", "rewards", "state", "ring")


def whole_state(state: dict) -> dict:
    """The state of the whole run, from the state of this rank. All ranks must call it.

    With several ranks, `ranks` has what each has of its own, on the CPU.
    """
    size = rank_and_size()[1]
    if size == 1:
        return state
    buffer = io.BytesIO()
    torch.save({name: state[name] for name in OF_RANK}, buffer)
    buffers = [b""] * size
    distributed.all_gather_object(buffers, buffer.getvalue())
    ranks = [torch.load(io.BytesIO(x), "cpu", weights_only=True) for x in buffers]
    return {name: x for name, x in state.items() if name not in OF_RANK} | {"ranks": ranks}


def state_of_rank(state: dict) -> dict:
    """This rank's state, from that of a whole run.

    Raises ValueError if the run had another number of ranks.
    """
    rank, size = rank_and_size()
    ranks = state.get("ranks", [{}])
    if len(ranks) != size:
        raise ValueError(f"resume is of {len(ranks)} processes and not of {size}: start as many")
    return state | ranks[rank]
