"""A real optimizer that steps on a copy of a script's parameters, with the script's gradients.

What an optimizer of another package really does cannot be told from its description: its blocks
hold tensors of some sizes only, its sums are rounded once or twice a step, its weight decay may be
lost. So the class itself runs, on copies of whole tensors. The script's own optimizer trains in
float32 beside it.

A copy is never returned to the script's weights. It goes on from where its own steps have led it,
with float32's gradients. So a training that never starts is seen to stand still.

`optimizer_for` makes a real optimizer for the parameter groups of a script's. `watch` measures such
a copy (watched_copies.py), and `keep` trains with it (keep.py).
"""

import contextlib
import importlib
import inspect
import random
import threading
from collections.abc import Iterator

import numpy as np
import torch

from .real_optimizers import RealOptimizer

# Options that say how a step is computed, not which step it is
IMPLEMENTATION = {"capturable", "differentiable", "foreach", "fused", "decoupled_weight_decay"}
# Options that another class may lack and still do the same
UNIMPORTANT = {"eps", *IMPLEMENTATION}
TYPES = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}

at_work = threading.local()  # has `is_copy` while a copy makes its step in this thread


def is_step_of_copy() -> bool:
    """Whether the step that is being made is a copy's, and none of the script."""
    return getattr(at_work, "is_copy", False)


class RandomNumbers:
    """Random numbers of the copies, so that the script draws what it always draws.

    Real optimizers that round stochastically draw from the global generators of torch, NumPy and
    Python. Within `in_use` these have the copies' states.

    `device`  that of the parameters
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.own = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        of_script = self.states()
        if self.own is None:
            torch.manual_seed(0)
        else:
            self.restore(self.own)
        try:
            yield
        finally:
            self.own = self.states()
            self.restore(of_script)

    def states(self) -> tuple:
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()

    def restore(self, states: tuple) -> None:
        cpu, cuda, of_python, of_numpy = states
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class OptimizerCopy:
    """A real optimizer with copies of the float32 parameters of a script's optimizer.

    `entry`      which class, with which options (real_optimizers.py)
    `optimizer`  the script's optimizer

    `parameters` has the copy of each parameter by the identity of the script's one. Parameters
    of other types are left out. Parameters that do not learn are copied, too, because they may
    learn later.

    Raises ValueError, with a message of one line, where the class cannot stand for the script's.
    """

    def __init__(self, entry: RealOptimizer, optimizer: torch.optim.Optimizer):
        self.entry = entry
        self.type = TYPES[entry.type]
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.versions: dict[int, int] = {}  # of the script's parameters, at `give_back`
        self.factory, options = class_and_options(entry, optimizer)
        # Options that follow the script's, which a schedule may change
        self.shared = [name for name in options if name not in entry.options]
        groups = []
        for group in optimizer.param_groups:
            settings = {name: group[name] for name in options if name in group}
            settings |= entry.options
            if "lr" in settings:
                settings["lr"] = float(settings["lr"])
            groups.append({"params": self.copies_of(group), **settings})
        self.numbers_of_groups = [i for i, group in enumerate(groups) if group["params"]]
        groups = [groups[i] for i in self.numbers_of_groups]
        if not groups:
            raise ValueError(f"{entry.text}: there are no parameters in float32")
        defaults = {name: value for name, value in groups[0].items() if name != "params"}
        with self.alone():
            self.optimizer = self.factory(groups, **defaults)
            if hasattr(self.optimizer, "train"):
                self.optimizer.train()  # Schedule-Free begins in its mode of evaluation
        if not entry.module and optimizer.state:
            self.optimizer.load_state_dict(self.state_of(optimizer))

    def copies_of(self, group: dict) -> list[torch.nn.Parameter]:
        """Copies of the parameters of a group."""
        copies = []
        for p in group["params"]:
            if p.dtype != torch.float32 or not p.numel():
                continue
            copy = torch.nn.Parameter(p.detach().to(self.type or p.dtype, copy=True))
            self.parameters[id(p)] = copy
            copies.append(copy)
        return copies

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict:
        """The state of a script's optimizer that has made steps already, for its own class."""
        state = optimizer.state_dict()
        if len(state["param_groups"]) != len(self.optimizer.param_groups) or any(
            p.dtype != torch.float32 for group in optimizer.param_groups for p in group["params"]
        ):
            raise ValueError(f"{self.entry.text}: its state cannot be taken over")
        return state

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context for calls of the real optimizer. Hooks of the script's optimizers can tell it
        from the script, and its errors from theirs."""
        with contextlib.ExitStack() as stack:
            at_work.is_copy = True
            stack.callback(setattr, at_work, "is_copy", False)
            if self.entry.eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a step with the gradients and the settings that the script's optimizer has now.

        Call it after the script's step. Gradients are copied, because a class may change them.
        """
        for i, group in zip(self.numbers_of_groups, self.optimizer.param_groups, strict=True):
            script_group = optimizer.param_groups[i]
            for name in self.shared:
                set_option(group, name, script_group[name])
            for p in script_group["params"]:
                copy = self.parameters.get(id(p))
                if copy is not None:
                    copy.grad = None if p.grad is None else p.grad.to(copy.dtype, copy=True)
        with self.alone():
            self.optimizer.step()
        for copy in self.parameters.values():
            copy.grad = None

    @torch.no_grad()
    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the script's parameters the numbers of the copies."""
        for p in self.script_parameters(optimizer):
            p.copy_(self.parameters[id(p)])
            self.versions[id(p)] = p._version

    @torch.no_grad()
    def take_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the copies the numbers of the script's parameters, where other code has changed
        these since `give_back`."""
        for p in self.script_parameters(optimizer):
            if p._version != self.versions[id(p)]:
                self.parameters[id(p)].copy_(p)

    def script_parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The script's parameters that have a copy."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if id(p) in self.parameters]

    def state(self, key: int) -> dict:
        """The real optimizer's state of a parameter. `key` is the identity of the script's one."""
        return self.optimizer.state.get(self.parameters[key], {})

    def is_in_float32(self, key: int) -> bool:
        """Whether everything that is kept of a parameter is in float32: nothing was gained."""
        copy = self.parameters[key]
        kept = [copy, *self.state(key).values()]
        whole = [x for x in kept if isinstance(x, torch.Tensor) and x.numel() >= copy.numel()]
        return all(x.dtype == torch.float32 and type(x).__name__ in PLAIN for x in whole)

    def bytes_of(self, key: int) -> int:
        """The bytes that are kept of a parameter between updates: itself and its state."""
        return bytes_of(self.parameters[key]) + bytes_of(dict(self.state(key)))


PLAIN = {"Tensor", "Parameter"}  # classes of tensors that keep their numbers as their dtype says


def bytes_of(x) -> int:
    """The bytes of a tensor, also of one that keeps its numbers in other tensors, as those of
    torchao do, and of a list or dict of tensors."""
    if isinstance(x, dict):
        return sum(map(bytes_of, x.values()))
    if isinstance(x, list | tuple):
        return sum(map(bytes_of, x))
    if not isinstance(x, torch.Tensor):
        return 0
    if hasattr(x, "__tensor_flatten__") and type(x).__name__ not in PLAIN:
        names, _ = x.__tensor_flatten__()
        return sum(bytes_of(getattr(x, name)) for name in names)
    return x.numel() * x.element_size()


def set_option(group: dict, name: str, value) -> None:
    """Gives an option of a parameter group another value. Some classes keep it as a tensor."""
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(float(value))
    elif isinstance(value, torch.Tensor):
        group[name] = float(value)
    else:
        group[name] = value


def class_and_options(entry: RealOptimizer, optimizer: torch.optim.Optimizer) -> tuple:
    """The class of an entry that takes the place of a script's optimizer, and the names of the
    options that it takes over.

    Raises ValueError, with a message of one line, for a class that does not exist or is no
    optimizer, and where one of the two classes has an option without which the other is something
    else: momentum, betas, ...
    """
    script_class = type(optimizer)
    if not entry.module:
        names = [*optimizer.defaults, *entry.options]
        return script_class, [name for name in dict.fromkeys(names) if accepts(script_class, name)]
    name = name_of_class(entry, optimizer)
    try:
        factory = getattr(importlib.import_module(entry.module), name)
    except ImportError as error:
        raise ValueError(f"{entry.text}: {entry.module} cannot be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{entry.text}: {entry.module} has no {name}") from error
    if not callable(factory) or not callable(getattr(factory, "step", None)):
        raise ValueError(f"{entry.text}: {name} is no optimizer: it has no step")
    for option in entry.options:
        if not accepts(factory, option):
            raise ValueError(f"{entry.text}: {name} has no option {option}")
    if accepts(factory, "betas") and not {"betas"} & {*optimizer.defaults, *entry.options}:
        raise ValueError(
            f"{entry.text}: {name} has betas, which {script_class.__name__} has not: choose a "
            "class like it"
        )
    options = []
    for option in optimizer.defaults:
        if option in IMPLEMENTATION:
            continue
        if accepts(factory, option):
            options.append(option)
        elif option not in UNIMPORTANT and any(g[option] for g in optimizer.param_groups):
            raise ValueError(
                f"{entry.text}: {name} has no {option}, which {script_class.__name__} has: choose "
                "a class like it"
            )
    return factory, options


def name_of_class(entry: RealOptimizer, optimizer: torch.optim.Optimizer) -> str:
    """The name of the class that takes the place of a script's optimizer. Raises ValueError if
    there is none."""
    if "" in entry.classes:
        return entry.classes[""]
    ancestors = [kind.__name__ for kind in type(optimizer).__mro__]
    # torch's AdamW is an Adam whose weight decay is decoupled. Without weight decay they are one.
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    decoupled = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    if "Adam" in ancestors and "AdamW" not in ancestors:
        if decoupled or not (decays or "Adam" in entry.classes):
            ancestors.insert(0, "AdamW")
    for ancestor in ancestors:
        if ancestor in entry.classes:
            return entry.classes[ancestor]
    listed = ", ".join(entry.classes)
    kind = type(optimizer).__name__ + (" with weight decay" if decays else "")
    raise ValueError(f"{entry.text}: it stands for {listed}, and the script has {kind}")


def accepts(factory, option: str) -> bool:
    """Whether a class has an option in its constructor, or in one that it inherits from."""
    for kind in getattr(factory, "__mro__", [factory]):
        try:
            parameters = inspect.signature(kind.__init__ if isinstance(kind, type) else kind)
        except (TypeError, ValueError):
            continue
        names = parameters.parameters
        if option in names:
            return option not in ("self", "params")
        if not any(p.kind is p.VAR_KEYWORD for p in names.values()):
            return False
    return False
