"""Machine: where and how fast a run computes. What it learns is in Config."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where and how fast a run computes. A resumed run may change it, but not its Config.

    The parts of a run, learner, collector, replay ring and evaluator, may each be on a device of
    their own. Only rollouts, slices and copies of the weights pass between them. (The scheme is
    that of rlstructures: separate devices for learner, batcher and evaluation.)
    """

    # Device of everything that has no device of its own: cpu, cuda or cuda:1.
    device: str = "cpu"
    collect_device: str | None = None  # Device of the environments and the acting policy.
    store_device: str | None = None  # Device of the replay ring; cpu keeps it in RAM.
    # Device of evaluations, with a copy of the weights and environments of their own.
    evaluate_device: str | None = None
    # Folder to store the replay ring in, instead of memory. If it already holds a ring of the same
    # settings, that ring is continued.
    memmap: str | None = None
    # How copies of a Gymnasium environment are stepped: sync, one after the other; or async, each
    # in its own process, for slow ones. None steps this package's own tensor form (tasks/), or sync
    # if it has none.
    vectorization: str | None = None
    # Launch each iteration as one CUDA graph (gpu/cuda_graphs.py), where that is possible: with all
    # parts on one GPU, in one process and in the package's own environments, without normalized
    # observations and formats.
    graph: bool = True
    # Save calls and repeated forward passes (fast_forward.py, gpu/acting_kernel.py). Without it the
    # agent computes as its own files say, which is the same but for rounding.
    fast_forward: bool = True

    def __post_init__(self):
        count = torch.cuda.device_count()
        available = ["cpu", *(f"cuda:{i}" for i in range(count))]
        for field, device in self.devices.items():
            if device not in available and not (device == "cuda" and count):
                remedy = f"choose from {', '.join(available)}"
                raise ValueError(f"{field} is {device!r} and torch cannot use it here: {remedy}")

    @property
    def devices(self) -> dict[str, str]:
        """The devices that are set, by field."""
        fields = ("device", "collect_device", "store_device", "evaluate_device")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}

    def on(self, part: str) -> torch.device:
        """The device of a part: learn, collect, store or evaluate."""
        device = getattr(self, f"{part}_device", None) or self.device
        if part == "store" and self.memmap:
            device = "cpu"
        return torch.empty(0, device=device).device  # with its index, like that of tensors on it


HERE = Machine()
