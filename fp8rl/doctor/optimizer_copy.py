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
from .watched_optimizer import NOT_IN_PROPORTION

# Options that say how a step is computed, not which step it is
IMPLEMENTATION = {"capturable", "differentiable", "foreach", "fused", "decoupled_weight_decay"}
# Options that another class may lack, and still do the same
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

    `parameters` has the copy of each parameter by the identity of the script's one. `left_out` says
    in words which options are not the script's. Parameters of other types are left out. Parameters
    that do not learn are copied, too, because they may learn later.

    Raises ValueError, with a message of one line, where the class cannot stand for the script's.
    """

    def __init__(self, entry: RealOptimizer, optimizer: torch.optim.Optimizer):
        self.entry = entry
        self.type = TYPES[entry.type]
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.factory, options, self.left_out = class_and_options(entry, optimizer)
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
        self.groups = groups
        self.take_state(optimizer)

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

    def make(self) -> None:
        """Makes the real optimizer, without a state."""
        groups = [{**group} for group in self.groups]
        defaults = {name: value for name, value in groups[0].items() if name != "params"}
        with self.alone():
            self.optimizer = self.factory(groups, **defaults)
            if hasattr(self.optimizer, "train"):
                self.optimizer.train()  # Schedule-Free begins in its mode of evaluation

    @torch.no_grad()
    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins anew, with the state that the script's optimizer has now.

        A script may resume, or empty, zero or load the state later. What the real optimizer keeps
        under the same name in the same shape is taken over, rounded as it keeps it. `lacks_state`
        says that nothing of a state could be taken over.

        A class makes its state in its first step. So it makes one with gradients of 0, of which
        only the state is left.
        """
        self.make()
        self.lacks_state = False
        states = {
            self.parameters[id(p)]: state
            for p, state in optimizer.state.items()
            if state and id(p) in self.parameters
        }
        if not states:
            return
        weights = [copy.clone() for copy in states]
        settings = [{**group} for group in self.optimizer.param_groups]
        for copy in states:
            copy.grad = torch.zeros_like(copy)
        with self.alone():
            self.optimizer.step()
        for copy, before in zip(states, weights, strict=True):
            copy.copy_(before)
            copy.grad = None
        for group, before in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(before)
        taken = [take_over(state, self.optimizer.state[copy]) for copy, state in states.items()]
        if not any(taken):
            self.make()
            self.lacks_state = True

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
        self.checksums = state_checksums(optimizer)

    @torch.no_grad()
    def take_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the copies what other code has changed since `give_back`: the script's parameters,
        and the state of its optimizer.

        A parameter that nobody has changed has the copy's own numbers.
        """
        for p in self.script_parameters(optimizer):
            self.parameters[id(p)].copy_(p)
        if state_checksums(optimizer) != self.checksums:
            self.take_state(optimizer)

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

    def bytes_of(self, key: int) -> float:
        """The bytes that are kept of a parameter between updates: itself and its state.

        Some classes keep tensors in their groups or attributes. Those that have the shape of the
        parameter are shared by the parameters of this shape.
        """
        copy = self.parameters[key]
        groups = [{**group, "params": []} for group in self.optimizer.param_groups]
        attributes = {**vars(self.optimizer), "param_groups": [], "state": {}}
        elsewhere = [x for x in tensors_in([groups, attributes]) if x.shape == copy.shape]
        alike = sum(other.shape == copy.shape for other in self.parameters.values())
        return bytes_of([copy, dict(self.state(key))]) + bytes_of(elsewhere) / alike


def take_over(state: dict, kept: dict) -> bool:
    """Takes over the state of a parameter, as far as names and shapes are the same. Returns whether
    that has taken over a tensor of several numbers."""
    taken = False
    for name, value in state.items():
        mine = kept.get(name)
        if isinstance(mine, torch.Tensor):
            value = torch.as_tensor(value)
            if value.shape == mine.shape:
                mine.copy_(value)
                taken |= mine.dim() > 0
        elif isinstance(mine, int | float):
            kept[name] = type(mine)(value)
    return taken


def state_checksums(optimizer: torch.optim.Optimizer) -> list[int]:
    """Numbers that tell whether other code has changed the state of an optimizer.

    They are sums of bits: a version of a tensor does not tell of a change through its `data`.
    """
    tensors = [
        x.detach()
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for x in state.values()
        if type(x).__name__ in PLAIN and x.layout == torch.strided
    ]
    sums = [x.float().view(torch.int32).sum() for x in tensors]
    return torch.stack([x.cpu() for x in sums]).tolist() if sums else []


PLAIN = {"Tensor", "Parameter"}  # classes of tensors that keep their numbers as their dtype says


def bytes_of(x) -> int:
    """The bytes of a tensor, also of one that keeps its numbers in other tensors, as those of
    torchao do, and of a list or dict of tensors."""
    total = 0
    for tensor in tensors_in(x):
        if hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ not in PLAIN:
            names, _ = tensor.__tensor_flatten__()
            total += sum(bytes_of(getattr(tensor, name)) for name in names)
        else:
            total += tensor.numel() * tensor.element_size()
    return total


def tensors_in(x) -> list[torch.Tensor]:
    """The tensors in nested lists and dicts."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [tensor for part in x for tensor in tensors_in(part)] if type(x) in (list, tuple) else []


def set_option(group: dict, name: str, value) -> None:
    """Gives an option of a parameter group another value. Some classes keep it as a tensor."""
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(float(value))
    elif isinstance(value, torch.Tensor):
        group[name] = float(value)
    else:
        group[name] = value


def class_and_options(entry: RealOptimizer, optimizer: torch.optim.Optimizer) -> tuple:
    """The class of an entry that takes the place of a script's optimizer, the names of the options
    that it takes over, and what it does not take over, in words.

    An option of another shape, such as three betas in place of two, is left to the class. A class
    with other options, such as momentum in place of betas, is another optimizer: it stands for the
    script's only if the entry names options of its own.

    Raises ValueError, with a message of one line, for a class that does not exist, is no optimizer,
    or does not stand for the script's.
    """
    script_class = type(optimizer)
    if not entry.module:
        names = [*optimizer.defaults, *entry.options]
        taken = [name for name in dict.fromkeys(names) if accepts(script_class, name)]
        return script_class, taken, []
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
    if estimates_learning_rate(factory) and "lr" not in entry.options:
        raise ValueError(
            f"{entry.text}: {name} estimates the learning rate itself: name its own, as in "
            f"{entry.text}:lr=1.0"
        )
    other_options = []  # what only one of the two classes has
    if accepts(factory, "betas") and not {"betas"} & {*optimizer.defaults, *entry.options}:
        other_options.append(f"{name} has betas, which {script_class.__name__} has not")
    options = []
    left_out = []
    for option, value in optimizer.defaults.items():
        if option in IMPLEMENTATION or option in entry.options:
            continue
        if not accepts(factory, option):
            if option not in UNIMPORTANT and any(g[option] for g in optimizer.param_groups):
                other_options.append(f"{name} has no {option}, which {script_class.__name__} has")
        elif has_shape_of(value, default := default_of(factory, option)):
            options.append(option)
        else:
            left_out.append(f"it has its own {option}, {default}")
    if other_options and not entry.options:
        raise ValueError(
            f"{entry.text}: {other_options[0]}: choose a class like it, or name options of its own"
        )
    return factory, options, [*other_options, *left_out]


def estimates_learning_rate(factory) -> bool:
    """Whether a class estimates its learning rate, as Prodigy and D-Adaptation do from `d0`."""
    names = {kind.__name__ for kind in getattr(factory, "__mro__", ())}
    return bool(names & NOT_IN_PROPORTION) or accepts(factory, "d0")


def has_shape_of(value, default) -> bool:
    """Whether an option of one class can be one of another, by the other's default: a number for a
    number, and as many numbers for several. A class without a default takes anything."""
    if default is None or default is inspect.Parameter.empty or value is None:
        return True
    lengths = [len(x) if isinstance(x, list | tuple) else 0 for x in (value, default)]
    return lengths[0] == lengths[1]


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
    return option_of(factory, option) is not None


def default_of(factory, option: str):
    """The default of an option that a class accepts; `inspect.Parameter.empty` if it has none."""
    return option_of(factory, option).default


def option_of(factory, option: str) -> inspect.Parameter | None:
    """An option in the constructor of a class, or in one that it inherits from."""
    if option in ("self", "params"):
        return None
    for kind in getattr(factory, "__mro__", [factory]):
        try:
            signature = inspect.signature(kind.__init__ if isinstance(kind, type) else kind)
        except (TypeError, ValueError):
            continue
        names = signature.parameters
        if option in names:
            return names[option]
        if not any(p.kind is p.VAR_KEYWORD for p in names.values()):
            return None
    return None
