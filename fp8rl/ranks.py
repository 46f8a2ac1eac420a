"""Several processes, one learner: data-parallel training on torch.distributed.

Process k of n (its rank) holds the k-th of n equal shares of the environments, with their rows of the ring. Every update adds up
over the ranks the sums that the loss is made of and the gradients, so that all take the same step.

Every rank draws the random numbers of the whole and uses its share's. So n ranks compute what one would with all environments,
but for the order in which floats are added (and for FP8, whose scales are those of a rank's share of a tensor). A checkpoint
holds the whole: it goes on with any number of ranks.

torchrun starts the processes and says to each which it is. Without it every function here does nothing.
"""

import atexit
import os
import signal

import torch

# Before there is a group: its functions take the group of that moment as a default argument, which would outlive its destruction.
import torch.distributed.nn.functional
from torch import distributed

from .config import Config


def start(config: Config | None = None) -> None:
    """Joins the processes that torchrun started, if it started this one: over gloo, and over nccl besides for a run that has a
    part on CUDA. There "cuda" then means this process's own GPU.

    Args:
        config: the run; None has no part on CUDA.

    Raises:
        ValueError: a part is on CUDA and the processes of this machine cannot have a GPU each.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or distributed.is_initialized():
        return
    backend, gpus = "gloo", torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    for part, place in vars(config.places).items() if config else ():
        if str(place).startswith("cuda") and gpus:  # without any, Config refuses it
            mend = None
            if here > gpus:
                mend = f"start at most {gpus} (--nproc-per-node) or use the CPU"
            elif here > 1 and place != "cuda":
                mend = "give 'cuda', a GPU of its own for each"
            if mend:
                field = f"placement.{part}" if getattr(config.placement, part) else "device"
                raise ValueError(f"{field} is {place!r} and {here} processes share {gpus} GPU{'s' * (gpus > 1)}: {mend}")
            backend = "cpu:gloo,cuda:nccl"
    if backend != "gloo":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    signal.signal(signal.SIGTERM, _end)  # how torchrun ends the others when one has died
    atexit.register(stop)
    distributed.init_process_group(backend)


def _end(*_) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise RuntimeError("torchrun ends this process")


def stop() -> None:
    """Leaves the other processes, at the latest when Python ends: gloo's threads end with the group, and one that still has to
    let go of a tensor after that would abort the process."""
    if distributed.is_initialized():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        distributed.destroy_process_group()


def share() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) alone."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over the ranks, without gradient, the same on all."""
    if share()[1] > 1:
        x = x.detach().clone()
        distributed.all_reduce(x)
    return x


def gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The ranks' tensors, all of one shape, joined in a dimension."""
    ranks = share()[1]
    if ranks == 1:
        return x
    # As bytes: gloo does not know every dtype.
    flat = x.contiguous().flatten().view(torch.uint8)
    parts = [torch.empty_like(flat) for _ in range(ranks)]
    distributed.all_gather(parts, flat)
    return torch.cat([part.view(x.dtype).view(x.shape) for part in parts], dim)
