"""Hooks of all optimizers of a process, and the hooks that change a training or refuse to.

`Watch` (watch.py), `Keep` (keep.py) and `Twin` (twin.py) are made of them.
"""

import contextlib
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .doctor import innermost_optimizer, optimizer_inside
from .optimizer_copy import is_step_of_copy
from .run_script import Refusal, first_line, say


class Optimizers:
    """The optimizers of a process, numbered in the order of their first steps.

    They are held by weak references, so that networks that a script drops do not stay in memory.
    An optimizer that is gone is None.
    """

    def __init__(self):
        self.references: list[weakref.ref] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}  # by identity, which a later optimizer may have again

    def __len__(self) -> int:
        return len(self.references)

    def __getitem__(self, number: int) -> torch.optim.Optimizer | None:
        return self.references[number]()

    def append(self, optimizer: torch.optim.Optimizer) -> None:
        self.numbers[id(optimizer)] = len(self)
        self.names.append(f"optimizer {len(self)} ({type(optimizer).__name__})")
        self.references.append(weakref.ref(optimizer))

    def number_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        """The number of an optimizer, by identity; None before its first step."""
        number = self.numbers.get(id(optimizer))
        return number if number is not None and self[number] is optimizer else None


class Hooks:
    """Hooks that are called before and after every step of every optimizer of this process.

    A subclass has a method `begin`, which is called before an optimizer's first step, and methods
    `before` and `after`, which are called before and after every step. It may have a method
    `after_wrapper`, which is called after a step of a wrapper, such as Lookahead, with the number
    of the optimizer inside it. Nothing else is called for a wrapper, because the optimizer inside
    it makes a step of its own.
    """

    def __init__(self):
        self.process = os.getpid()
        self.optimizers = Optimizers()
        self.notes: list[str] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        # A step under torch.compile leaves the hooks out of its graph. Compiling them would take
        # far longer than calling them. The decorator is that of torch.optim itself, which imports
        # the compiler no earlier than the script's first optimizer does.
        handles = [
            register_optimizer_step_pre_hook(
                torch._disable_dynamo(lambda *arguments: self.before_step(*arguments))
            ),
            register_optimizer_step_post_hook(
                torch._disable_dynamo(lambda *arguments: self.after_step(*arguments))
            ),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def before_step(self, optimizer, args, kwargs) -> None:
        if os.getpid() != self.process:
            return  # a fork of the script
        if is_step_of_copy():
            return
        number = self.optimizers.number_of(optimizer)
        if number is None:
            if optimizer_inside(optimizer) is not None:
                return  # a wrapper
            number = len(self.optimizers)
            self.optimizers.append(optimizer)
            self.begin(number)
        self.before(number)

    def after_step(self, optimizer, args, kwargs) -> None:
        if os.getpid() != self.process or is_step_of_copy():
            return
        number = self.optimizers.number_of(optimizer)
        if number is not None:
            self.after(number)
            return
        innermost = self.optimizers.number_of(innermost_optimizer(optimizer))
        if innermost is not None:
            self.after_wrapper(innermost)

    def after_wrapper(self, number: int) -> None:
        pass

    def name_of(self, number: int) -> str:
        return self.optimizers.names[number]


def modules_of_process() -> list[nn.Module]:
    """The modules of this process that are not part of another module.

    Their parameters have names, which reports use.
    """
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in parts]


def parameters_of(optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer that are trained."""
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p.numel()
    ]


def seeded_generator() -> torch.Generator:
    """Random numbers of the doctor's own, so that the script draws what it always draws."""
    return torch.Generator(device="cpu").manual_seed(0)


class Change(Hooks):
    """Hooks that change a training, or end the script if they cannot.

    A training that goes on as it is would pass for the changed one.
    """

    def __init__(self):
        super().__init__()
        self.refusal = ""  # why the script was ended

    def refuse(self, why: str) -> NoReturn:
        """Ends the script with a line and exit code 2.

        It ends by SystemExit, so its files are closed. A script that catches even this, and trains
        on, is ended at once when it comes here again. In a thread, SystemExit ends the thread, and
        the exit code is 2 as well.
        """
        if self.refusal:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # it may be closed, or no stream at all
                    stream.flush()
            os._exit(2)
        self.refusal = why
        say(f"fp8rl.doctor: {why}")
        raise SystemExit(2)


def refuses(method: Callable) -> Callable:
    """A method of `Change` that ends the script, instead of raising an error that the script may
    take for its own. It does so in every later call, too."""

    @functools.wraps(method)
    def refusing(self, *arguments, **options):
        if self.refusal:
            self.refuse(self.refusal)
        try:
            return method(self, *arguments, **options)
        except Refusal as error:
            self.refuse(first_line(error))
        except Exception as error:
            name = type(self).__name__.lower()
            self.refuse(f"{name} failed in a step ({type(error).__name__}: {first_line(error)})")

    return refusing
