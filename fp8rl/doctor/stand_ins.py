"""Stand-ins: some blocks of each tensor of an optimizer, in place of the tensor.

Optimizers that keep few bits share scales within blocks of numbers, and treat each block by itself.
So what such an optimizer does to a tensor of a million numbers can be seen on a few of its blocks,
if they get the tensor's own gradients. Blocks of several tensors are joined to one tensor, because
a step costs most of its time once a tensor.
"""

import copy
import itertools
import math

import torch

from .ruler import Sample
from .watcher import dense

LEAST = 4096  # 8-bit optimizers leave smaller tensors in float32 (torchao, bitsandbytes)


class StandIns:
    """S tensors that stand in for the T parameters of a script's optimizer.

    `optimizer`   the script's optimizer, which is not kept
    `parameters`  the T parameters, float32. They are not kept, either.
    `group`       the number of each one's group
    `sample`      the numbers of them that the ruler follows
    `block`       how many numbers a block has. With 0, a stand-in is a whole parameter.
    `joins`       whether several parameters may have a common stand-in. They must get their
                  gradients in the same steps.

    Of each parameter there are 16 blocks, a block for every 4 numbers that the ruler follows, or 1%
    of its blocks, whichever is most. A parameter with fewer blocks is there whole. So are the
    numbers behind its last whole block. A stand-in has LEAST numbers exactly if its parameters
    have, and is a multiple of the block exactly if they are.

    `numbers`    all numbers, float32 [N], of the parameters when they were last read
    `tensors`    the stand-ins, which are views of `numbers`
    `parts`      which parameters each of them stands for
    `counts`     how many numbers of each parameter there are, in the order of the parts
    `positions`  where the ruler's numbers are among all, [T, P]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        group: list[int],
        sample: Sample,
        block: int,
        joins: bool = True,
    ):
        self.block = block
        self.group = group
        self.index: list[torch.Tensor | None] = [None] * len(parameters)  # None for all numbers
        self.sample = copy.copy(sample)
        self.sample.blocks = {}
        generator = torch.Generator(device="cpu").manual_seed(0)
        followed = [*sample.index]
        for t, p in enumerate(parameters if block else ()):
            blocks = p.numel() // block
            wanted = max(16, math.ceil(sample.numbers_per_tensor / 4), math.ceil(blocks / 100))
            if blocks > wanted:
                # On the CPU, whatever device the script has set as default
                order = torch.randperm(blocks, generator=generator, device="cpu")
                numbers = torch.arange(p.numel(), device="cpu", dtype=torch.int32)
                rows = numbers[: blocks * block].view(blocks, block)[order[:wanted]]
                rest = numbers[blocks * block :]
                self.index[t] = torch.cat((rows.flatten(), rest)).to(p.device)
                order = torch.randperm(rows.numel(), generator=generator, device="cpu")
                order = order[: sample.numbers_per_tensor]
                followed[t] = order.to(p.device)
                self.sample.blocks[t] = (order // block).numpy()
        count = [self.pick(t, p).numel() for t, p in enumerate(parameters)]
        self.parts = self.joined(optimizer, parameters, joins and block > 0, count)
        self.order = [t for part in self.parts for t in part]
        self.counts = [count[t] for t in self.order]
        begins = dict(zip(self.order, itertools.accumulate([0, *self.counts[:-1]]), strict=True))
        self.positions = torch.stack([x + begins[t] for t, x in enumerate(followed)])
        self.shapes = [(-1,) if block else parameters[part[0]].shape for part in self.parts]
        self.sizes = [sum(count[t] for t in part) for part in self.parts]
        self.numbers = self.read(parameters)
        self.tensors = self.split(self.numbers)

    def joined(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        joins: bool,
        count: list[int],
    ) -> list[list[int]]:
        """Which parameters have a common stand-in: those of a group that have made as many steps,
        and on whose size a class would decide alike."""
        parts: dict[tuple, list[int]] = {}
        for t, p in enumerate(parameters):
            is_large = p.numel() >= LEAST
            kind = self.group[t], is_large, float(optimizer.state.get(p, {}).get("step", 0))
            if not joins or p.grad is None or (is_large and p.numel() % self.block):
                kind = (t,)
            if not is_large and sum(count[i] for i in parts.get(kind, ())) + p.numel() >= LEAST:
                parts[kind, t] = parts.pop(kind)  # it is full
            parts.setdefault(kind, []).append(t)
        return [*parts.values()]

    def pick(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor like the parameter t that stand in for it."""
        x = x.reshape(-1)
        return x if self.index[t] is None else x.index_select(0, self.index[t])

    def read(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The numbers [N] of T tensors like the parameters."""
        return torch.cat([self.pick(t, tensors[t]) for t in self.order])

    def split(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """The S stand-ins that have these numbers."""
        pairs = zip(numbers.split(self.sizes), self.shapes, strict=True)
        return [x.view(shape) for x, shape in pairs]

    def tears(self, parameters: list[torch.Tensor]) -> bool:
        """Whether some parameters of a stand-in have a gradient, and others have not."""
        return any(len({parameters[t].grad is None for t in part}) > 1 for part in self.parts)

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], state: bool = False
    ) -> torch.optim.Optimizer:
        """The script's optimizer as if it had the stand-ins as parameters, with the gradients and
        settings of now, and with its state if that is asked for. It cannot make steps."""
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        states = {}
        gradients = self.split(self.read(dense(parameters, [p.grad for p in parameters])))
        for part, x, gradient in zip(self.parts, self.tensors, gradients, strict=True):
            first = parameters[part[0]]
            x.grad = None if first.grad is None else gradient
            if not self.block and first.grad is not None and first.grad.is_sparse:
                x.grad = first.grad
            groups[self.group[part[0]]]["params"].append(x)
            of_part = [optimizer.state.get(parameters[t], {}) for t in part] if state else [{}]
            states[x] = {}
            for name, value in of_part[0].items():
                values = [of_one.get(name) for of_one in of_part]
                sizes = [x.numel() if isinstance(x, torch.Tensor) else 0 for x in values]
                if sizes == [parameters[t].numel() for t in part] and value.dim():
                    pieces = [self.pick(t, x) for t, x in zip(part, values, strict=True)]
                    value = torch.cat(pieces).view(x.shape)
                states[x][name] = value
        return with_groups(optimizer, groups, states)


def with_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict], state: dict
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings with other parameter groups and another state.
    It makes no steps: who copies an optimizer reads it."""
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer), param_groups=groups, state=state)
    return other
