"""Machine: where a run computes, and how fast. What it learns is set by a Config (config.py)."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Machine:
    """The settings of where a run computes, and how fast.

    A resumed run may have another Machine, but not another Config.

    A run has four parts: the learner, the collector, the replay ring and the evaluator. Each part
    may be on a device of its own. Only rollouts, slices and copies of the weights pass between
    them. (This is the scheme of rlstructures, which has separate devices for the learner, the
    batcher and the evaluation.)
    """

    # Device of all parts that the next three options do not place elsewhere: cpu, cuda or cuda:1.
    device: str = "cpu"
    # Device of the environments and of the policy that acts. None: the same as device.
    collect_device: str | None = None
    # Device of the replay ring; cpu keeps the ring in RAM. None: the same as device.
    store_device: str | None = None
    # Device of the evaluations, which have a copy of the weights and their own environments. None:
    # the same as device.
    evaluate_device: str | None = None
    # Folder to store the replay ring in, instead of memory. If the folder already holds a ring with
    # the same settings, that ring is continued.
    memmap: str | None = None
    # How Gymnasium steps the copies of an environment: sync, one after the other, or async, each in
    # its own process, which pays off for slow environments. None: this package's own implementation
    # of the environment (tasks/) where there is one, otherwise sync.
    vectorization: str | None = None
    # Launch each iteration as one CUDA graph (machine/gpu/cuda_graphs.py). That happens only with
    # all parts on one GPU, in one process and in the package's own environments, without normalized
    # observations and formats.
    graph: bool = True
    # Compute forward and backward passes with fewer calls: written out on a CPU
    # (machine/by_hand.py), in one kernel on a GPU (machine/gpu/acting_kernel.py). Without it, the
    # agent runs exactly the code of its plain files. The results are the same but for rounding.
    fast_forward: bool = True

    def __post_init__(self):
        count = torch.cuda.device_count()
        available = ["cpu", *(f"cuda:{i}" for i in range(count))]
        for field, device in self.devices.items():
            if device not in available and not (device == "cuda" and count):
                raise ValueError(
                    f"{field} is {device!r} and torch cannot use it here: "
                    f"choose from {', '.join(available)}"
                )

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
