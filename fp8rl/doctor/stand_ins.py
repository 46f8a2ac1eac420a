"""Stand-ins: some blocks of each tensor of an optimizer, in place of the tensor.

Optimizers that keep few bits share scales within blocks of numbers, and treat each block by itself.
So what such an optimizer does to a tensor of a million numbers can be seen on a few of its blocks,
if they get the tensor's own gradients. Blocks of several tensors are joined to one tensor, because
a step costs most of its time once a tensor.

What the script's steps do to the stand-ins is recorded once for all real optimizers. Each replays
several steps at once, so that what it needs around its steps, such as random numbers of its own, is
prepared once for all of them.
"""

import copy
import itertools
import math
from typing import NamedTuple

import numpy as np
import torch

from .ruler import Sample
from .watcher import Shadow, Update, Watcher, dense

LEAST = 4096  # 8-bit optimizers leave smaller tensors in float32 (torchao, bitsandbytes)
AT_ONCE = 8  # updates that are replayed at once
RECORDED = 2**18  # numbers that the gradients of these updates have at most, if there are several
PLAIN = {"Tensor", "Parameter"}  # classes of tensors that keep their numbers as their dtype says


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
        self.places = [self.order.index(t) for t in range(len(parameters))]
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

    def read(self, tensors: list[torch.Tensor], row: torch.Tensor | None = None) -> torch.Tensor:
        """The numbers [N] of T tensors like the parameters, in a row if there is one."""
        return torch.cat([self.pick(t, tensors[t]) for t in self.order], out=row)

    def split(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """The S stand-ins that have these numbers."""
        pairs = zip(numbers.split(self.sizes), self.shapes, strict=True)
        return [x.view(shape) for x, shape in pairs]

    def farthest(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The farthest that a number of each tensor has moved in each of R steps, float32 [R, T],
        from all numbers [R, N] before a step and after it.

        In 16 bits, a number moves by whole spacings, however short the step. So one spacing is
        taken off.
        """
        moved = after.float() - before.float()
        if after.dtype != torch.float32:
            larger = torch.maximum(before.abs(), after.abs())
            next_number = (larger.view(torch.int16) + 1).view(after.dtype)
            spacing = (next_number.float() - larger.float()).nan_to_num()  # none beside infinity
            moved = (moved.abs() - spacing).clamp(min=0)
        farthest = [x.amax(1) for x in moved.abs().split(self.counts, 1)]
        return torch.stack([farthest[i] for i in self.places], 1)

    def tears(self, parameters: list[torch.Tensor]) -> bool:
        """Whether some parameters of a stand-in have a gradient, and others have not."""
        return any(len({parameters[t].grad is None for t in part}) > 1 for part in self.parts)

    def gradients(
        self, parameters: list[torch.Tensor], row: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """The gradients of the S stand-ins as they are now, in a row [N]. A whole one may be
        sparse."""
        gradients = self.split(self.read(dense(parameters, [p.grad for p in parameters]), row))
        for s, part in enumerate(self.parts):
            own = parameters[part[0]].grad
            if own is None:
                gradients[s] = None
            elif own.is_sparse and not self.block:
                gradients[s] = own.clone()
        return gradients

    def optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], state: bool = False
    ) -> torch.optim.Optimizer:
        """The script's optimizer as if it had the stand-ins as parameters, with the settings of
        now, and with its state if that is asked for. It cannot make steps."""
        groups = [
            {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in group.items()}
            for group in optimizer.param_groups
        ]
        for number, group in enumerate(groups):
            pairs = zip(self.parts, self.tensors, strict=True)
            group["params"] = [x for part, x in pairs if self.group[part[0]] == number]
        states = {}
        for part, x in zip(self.parts, self.tensors, strict=True) if state else ():
            of_part = [optimizer.state.get(parameters[t], {}) for t in part]
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


def marks_of_state(optimizer: torch.optim.Optimizer, waits: bool = True) -> bytes | list:
    """What tells whether other code has changed the state of an optimizer.

    It is some numbers of each tensor: a version of a tensor does not tell of a change through its
    `data`. The versions are what can be had without waiting for a GPU, if `waits` is False.
    """
    tensors = [
        x.detach()
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for x in state.values()
        if type(x).__name__ in PLAIN and x.layout == torch.strided
    ]
    if not waits:
        return [(id(x), x._version) for x in tensors]
    some = [x.reshape(-1)[:: x.numel() // 64 + 1].float().cpu() for x in tensors]
    return torch.cat(some).numpy().tobytes() if some else b""


class Step(NamedTuple):
    """A step of the script's optimizer, on the stand-ins.

    `change`     how far other code has moved all numbers since the step before, float32 [N]; None
                 if it has not
    `gradients`  of each of the S stand-ins; None for one without gradient
    `optimizer`  the script's optimizer with the stand-ins as parameters, and its settings then
    `farthest`   the farthest that a number of each tensor has moved in the step, float32 [T]
    `rates`      the learning rates of the T tensors, float32 [T]
    """

    change: torch.Tensor | None
    gradients: list[torch.Tensor | None]
    optimizer: torch.optim.Optimizer
    farthest: torch.Tensor
    rates: np.ndarray


class Recorder(Shadow):
    """Records the steps of a script's optimizer, and has real optimizers replay them.

    `watcher`  the script's optimizer
    `length`   updates in a window, at whose end all steps are replayed
    `block`    how many numbers a block of the stand-ins has
    `copies`   the shadows of real optimizers that replay them (CopyShadow)

    `stand_ins`  the stand-ins; None before the first step
    `numbers`    all numbers, float32 [N], of the parameters after the last step
    `begun`      all numbers before the step that is being made
    `rows`       float32 [R, N], for the gradients of R steps that are replayed at once
    `marks`      of the state of the script's optimizer after a step
    `steps`      those that have not been replayed
    `learning_rates`  of the groups, sums over updates
    """

    def __init__(self, watcher: Watcher, length: int, block: int, copies: list):
        super().__init__(watcher, [], length)
        self.block = block
        self.copies = copies
        self.is_on_host = watcher.device.type == "cpu"
        self.stand_ins: StandIns | None = None
        self.steps: list[Step] = []
        self.learning_rates = np.zeros(max(watcher.group) + 1)
        for shadow in copies:
            shadow.recorder = self

    @torch.no_grad()
    def before(self) -> None:
        """Reads the stand-ins. Copies begin before the first step. They take over what other code
        has changed of the state of the script's optimizer since the last step."""
        optimizer = self.watcher.optimizer
        parameters = self.watcher.parameters
        begins = self.stand_ins is None or self.stand_ins.tears(parameters)
        if begins or self.marks_among(self.watcher.read) != self.marks:
            self.replay()
            if begins:
                joins = self.stand_ins is None  # later, each parameter has a stand-in of its own
                sample, group = self.watcher.sample, self.watcher.group
                self.stand_ins = StandIns(optimizer, parameters, group, sample, self.block, joins)
                self.numbers = self.stand_ins.numbers
                self.begun = torch.empty_like(self.numbers)
                count = len(self.numbers)
                self.rows = self.numbers.new_empty(min(AT_ONCE, RECORDED // count + 1), count)
            stand_in = self.stand_ins.optimizer(optimizer, parameters, state=True)
            for shadow in self.copies:
                shadow.begin(stand_in) if begins else shadow.resume(stand_in)
        self.stand_ins.read(parameters, self.begun)

    @torch.no_grad()
    def after(self, update: Update) -> None:
        """Records the step that the script has made."""
        parameters = self.watcher.parameters
        rates = np.array([settings.learning_rate for settings in update.settings])
        self.learning_rates += rates
        change = self.begun - self.numbers
        # A NaN is a change, too. A GPU would have to be waited for.
        if self.is_on_host and not change.any():
            change = None
        self.stand_ins.read(parameters, self.numbers)
        step = Step(
            change,
            self.stand_ins.gradients(parameters, self.rows[len(self.steps)]),
            self.stand_ins.optimizer(self.watcher.optimizer, parameters),
            self.stand_ins.farthest(self.begun[None], self.numbers[None])[0],
            rates[self.watcher.group].astype(np.float32),
        )
        self.steps.append(step)
        self.marks = self.marks_among(update.after)
        if len(self.steps) == len(self.rows) or self.watcher.updates % self.length == 0:
            self.replay()

    @torch.no_grad()
    def replay(self) -> None:
        """Has the copies replay the steps that they have not replayed."""
        steps, self.steps = self.steps, []
        for shadow in self.copies:
            shadow.replay(steps)

    def marks_among(self, numbers: torch.Tensor) -> bytes | list:
        """What tells whether other code has changed the state of the script's optimizer. `numbers`
        were read by the watcher, Adam's moments at the end."""
        if self.watcher.is_adam and self.is_on_host:
            return numbers[-2 * len(self.watcher.references) :].numpy().tobytes()
        return marks_of_state(self.watcher.optimizer, self.is_on_host)
