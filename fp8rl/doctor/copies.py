"""Shadows that are real optimizers: a class of any package steps on a copy of the parameters.

What an optimizer of another package really does cannot be told from its description: its blocks
hold tensors of some sizes only, its sums are rounded once or twice a step, its weight decay may be
lost. So the class itself runs, on copies of whole tensors. The script trains in float32 beside it
and is not changed. After each of its steps, every copy makes a step with the same gradients.

A copy is never returned to the script's weights. It goes on from where its own steps have led it,
with float32's gradients. So a training that never starts is seen to stand still.

A copy needs the memory of its parameters and its state. All copies together need one more copy of
the script's float32 parameters. `keep` trains with such a copy (keep.py).
"""

import contextlib
import importlib
import inspect
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..bits.catalogue import RealOptimizer
from ..bits.notation import split_entry
from .findings import NOT_JUDGED, SAME, Finding, judge
from .ruler import Ruler
from .watcher import NOT_IN_PROPORTION, Update, Watcher, at_work

LEAP = 10  # a step that is longer than so many of the script's longest ones is a leap
# A number drifts in a window if float32 leaves it alone, and a copy moves it by more than this
# share of how far float32 moves the numbers of its tensor (root mean square) in the window with the
# longest way so far. A shorter way may be the rounding of a difference, or the end of a momentum,
# which float32 has rounded away a bit earlier.
DRIFT = 0.1
DRIFTING = 0.01  # a larger share of numbers that drift is part of the line
# How long weight decay is followed: until it has taken this share, but within these updates
DECAY_SHARE = 0.1
DECAY_STEPS = 64, 256
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}

# Options that say how a step is computed, not which step it is
IMPLEMENTATION = {"capturable", "differentiable", "foreach", "fused", "decoupled_weight_decay"}
# Options that another class may lack, and still do the same
UNIMPORTANT = {"eps", *IMPLEMENTATION}
TYPES = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}


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

    `entry`      which class, with which options (bits/catalogue.py)
    `optimizer`  the script's optimizer

    `parameters` has the copy of each parameter by the identity of the script's one. `remarks` say
    in words which options are not the script's, and whether it once began without the script's
    state. Parameters of other types are left out. Parameters that do not learn are copied, too,
    because they may learn later.

    Raises ValueError, with a message of one line, where the class cannot stand for the script's.
    """

    def __init__(self, entry: RealOptimizer, optimizer: torch.optim.Optimizer):
        self.entry = entry
        self.type = TYPES[entry.type]
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.factory, options, self.remarks = class_and_options(entry, optimizer)
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
        under the same name in the same shape is taken over, rounded as it keeps it. If that is
        nothing of a state, it begins without one, and a remark says so.

        A class makes its state in its first step. So it makes one with gradients of 0, of which
        only the state is left.
        """
        self.make()
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
            remark = "it began without the state of the script, which it cannot read"
            if remark not in self.remarks:
                self.remarks.append(remark)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context for calls of the real optimizer. Hooks of the script's optimizers can tell it
        from the script, and its errors from theirs."""
        with contextlib.ExitStack() as stack:
            at_work.is_shadow = True
            stack.callback(setattr, at_work, "is_shadow", False)
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
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, device=mine.device)
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


def nothing(count: int) -> torch.Tensor:
    """Zeros, float32 [count], whatever torch's default type and device are."""
    return torch.zeros(count, dtype=torch.float32, device="cpu")


class RealCopy:
    """A real optimizer beside a script's, and what was measured of it.

    `drifted`   the share of the numbers that drift in each window
    `longest`   the longest step of each of the T tensors, in learning rates
    `leaps`     the updates with a leap
    `reason`    why it is not judged; empty if it is
    `diverged`  the update at which its weights were no longer finite; 0 if they are
    `bytes`     what is kept of each tensor; empty before the first step
    """

    def __init__(self, entry: RealOptimizer, watcher: Watcher):
        self.entry = entry
        self.copy: OptimizerCopy | None = None
        self.ruler = Ruler(watcher.sample, [entry.text], watcher.tensor_names)
        self.drifted: list[float] = []
        self.longest = nothing(len(watcher.references))
        self.leaps: list[int] = []
        self.reason = ""
        self.diverged = 0
        self.bytes: list[float] = []
        self.in_float32 = 0  # how many tensors are kept wholly in float32
        self.remarks: list[str] = []  # options that are not the script's, and the like
        self.start: np.ndarray | None = None  # sampled weights at the beginning of the window
        self.displaced: np.ndarray | None = None  # how far other code has moved them since then


class CopyShadow:
    """Real optimizers beside a script's, each on its own copy of the parameters.

    `watcher`  the script's optimizer
    `entries`  which real optimizers
    `length`   updates in a window
    """

    def __init__(self, watcher: Watcher, entries: list[RealOptimizer], length: int):
        self.watcher = watcher
        self.length = length
        self.copies = [RealCopy(entry, watcher) for entry in entries]
        self.random_numbers = RandomNumbers(watcher.device)
        tensors = len(watcher.references)
        self.longest = nothing(tensors)  # the script's own longest steps
        self.longest_ways = np.zeros(tensors)  # the script's, in a window (`DRIFT`)
        self.decaying_group = 0  # the number of the group with the most weight decay
        self.updates = 0
        self.count = 0  # updates in this window
        self.learning_rates = 0.0  # their sum over the updates, in the decaying group
        self.last: list[torch.Tensor] | None = None  # the script's weights after its last step
        self.checksums: list[int] = []  # of the state of the script's optimizer after that

    @property
    def active(self) -> list[RealCopy]:
        """The copies that still make steps."""
        return [real for real in self.copies if real.copy is not None]

    @torch.no_grad()
    def before(self) -> None:
        """Makes the copies at the first step. Later they are changed as other code has changed the
        script's weights and the state of its optimizer since the last step."""
        optimizer = self.watcher.optimizer
        parameters = self.watcher.parameters
        if self.last is None:
            self.begin(optimizer, parameters)
            return
        if state_checksums(optimizer) != self.checksums:
            with self.random_numbers.in_use():
                for real in self.active:
                    self.attempt(real, "failed", lambda real=real: real.copy.take_state(optimizer))
        changes = torch._foreach_sub(parameters, self.last)
        # A NaN is a change, too
        sizes = torch.stack(torch._foreach_norm(changes, torch.inf)).tolist()
        for t, size in enumerate(sizes):
            if size != 0:
                self.displace(t, parameters[t], changes[t])

    def displace(self, t: int, p: torch.Tensor, by: torch.Tensor) -> None:
        """Moves the copies of a parameter as other code has moved the script's since its step."""
        sample = self.watcher.sample
        self.last[t].copy_(p)
        self.displaced[t] += sample.read_one(t, by).cpu().numpy()
        for real in self.active:
            copy = real.copy.parameters[id(p)]
            before = sample.read_one(t, copy).float()
            copy.add_(by.to(copy.dtype))
            moved = sample.read_one(t, copy).float() - before
            real.displaced[t] += moved.cpu().numpy()

    def begin(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
        """Makes the copies, and begins a window."""
        self.last = [p.detach().clone() for p in parameters]
        with self.random_numbers.in_use():
            for real in self.copies:
                self.attempt(real, "could not be made", lambda real=real: self.make(real))
        decays = [
            (group.get("weight_decay") or 0) * float(group["lr"])
            for group in optimizer.param_groups
        ]
        self.decaying_group = int(np.argmax(decays))
        self.checksums = state_checksums(optimizer)
        self.begin_window()

    def make(self, real: RealCopy) -> None:
        real.copy = OptimizerCopy(real.entry, self.watcher.optimizer)
        real.remarks = real.copy.remarks  # the same list, to which the copy may add

    def attempt(self, real: RealCopy, what: str, function: Callable[[], None]) -> None:
        """Calls a function of a copy. A copy that fails makes no more steps."""
        try:
            function()
        except Exception as error:
            real.copy = None
            text = str(error).strip().partition("\n")[0]
            if isinstance(error, ValueError) and text.startswith(real.entry.text):
                real.reason = text.removeprefix(f"{real.entry.text}: ")
            else:
                real.reason = f"it {what} ({type(error).__name__}: {text})"

    def begin_window(self) -> None:
        self.count = 0
        self.start = self.weights_of(self.watcher.optimizer, self.watcher.parameters)
        self.displaced = np.zeros_like(self.start)
        for real in self.active:
            real.start = self.weights_of(real.copy.optimizer, self.parameters_of(real))
            real.displaced = np.zeros_like(self.start)

    def parameters_of(self, real: RealCopy) -> list[torch.Tensor]:
        """A copy's parameters, in the order of the script's."""
        return [real.copy.parameters[id(p)] for p in self.watcher.parameters]

    def weights_of(self, optimizer, parameters: list[torch.Tensor]) -> np.ndarray:
        """The sampled weights [T, P] of an optimizer.

        They are the parameters. A Kahan sum keeps what rounding has left out of a parameter beside
        it, and adds it as soon as it is large enough. So a weight is the sum of both.
        """
        sample = self.watcher.sample
        states = [optimizer.state.get(p, {}) for p in parameters]
        y = sample.take(parameters)
        if any("kahan_comp" in state for state in states):
            pairs = zip(parameters, states, strict=True)
            y += sample.take([compensation(p, state) for p, state in pairs])
        return y

    @torch.no_grad()
    def after(self, update: Update) -> None:
        """Lets every copy make the step that the script has made, and measures them."""
        optimizer = self.watcher.optimizer
        parameters = self.watcher.parameters
        self.updates += 1
        self.count += 1
        rates = [settings.learning_rate for settings in update.settings]
        self.learning_rates += rates[self.decaying_group]
        by_tensor = [rates[g] for g in self.watcher.group]
        lr = torch.tensor(by_tensor, dtype=torch.float32, device="cpu")
        self.longest = torch.maximum(self.longest, longest_steps(self.last, parameters, lr))
        if self.updates == 1:
            kept = [[p, dict(optimizer.state.get(p, {}))] for p in parameters]
            self.own_bytes = bytes_of(kept) / float(self.watcher.sample.sizes.sum())
        with self.random_numbers.in_use():
            for real in self.active:
                self.step(real, optimizer, lr)
        torch._foreach_copy_(self.last, parameters)
        self.checksums = state_checksums(optimizer)
        if self.count == self.length:
            self.end_window()

    def step(self, real: RealCopy, optimizer, lr: torch.Tensor) -> None:
        """Lets one copy make a step."""
        parameters = self.parameters_of(real)
        before = [p.detach().clone() for p in parameters]
        what = f"failed in step {self.updates}"
        self.attempt(real, what, lambda: real.copy.step(optimizer))
        if real.copy is None:
            return
        leap = LEAP * float(self.longest.max())
        longest = longest_steps(before, parameters, lr, real.longest.clamp(max=leap))
        real.longest = torch.maximum(real.longest, longest)
        if float(longest.max()) > leap > 0:
            real.leaps.append(self.updates)
        diverges = not longest.isfinite().all()
        if self.updates == 1 or diverges:
            keys = [id(p) for p in self.watcher.parameters]
            real.bytes = [real.copy.bytes_of(key) for key in keys]
            real.in_float32 = sum(real.copy.is_in_float32(key) for key in keys)
        if diverges:
            real.diverged = self.updates
            real.copy = None

    def end_window(self) -> None:
        sample = self.watcher.sample
        now = self.weights_of(self.watcher.optimizer, self.watcher.parameters)
        true = now - self.start - self.displaced
        ways = np.sqrt(sample.mean(np.square(true)))  # [T]
        self.longest_ways = np.maximum(self.longest_ways, ways)
        for real in self.active:
            weights = self.weights_of(real.copy.optimizer, self.parameters_of(real))
            moved = weights - real.start - real.displaced
            lost = (moved == 0) & (true != 0)
            real.ruler.add(moved[None], true, lost[None])
            drifts = (true == 0) & (np.abs(moved) > DRIFT * self.longest_ways[:, None])
            real.drifted.append(float(np.average(sample.mean(drifts), weights=sample.sizes)))
        self.begin_window()

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        """The finding of each copy, in the order of the entries, without cures."""
        return [self.finding_of(real, tolerates) for real in self.copies]

    def finding_of(self, real: RealCopy, tolerates: tuple[float, float]) -> Finding:
        text = real.entry.text
        if real.reason:
            return Finding(self.watcher.name, *split_entry(text), NOT_JUDGED, real.reason)
        loses = f"{{share}} of the numbers stay the same over {self.length} updates"
        reading = real.ruler.reading(0)
        finding = judge(self.watcher.name, text, reading, tolerates, loses)
        if real.diverged:
            why = f"its weights became infinite or NaN at update {real.diverged}"
            finding = finding._replace(verdict="diverges", why=why)
        if not real.bytes:
            return finding
        longest = float(real.longest.max())
        own = float(self.longest.max())
        finding = finding._replace(
            longest_step=longest,
            bytes_per_parameter=sum(real.bytes) / float(self.watcher.sample.sizes.sum()),
        )
        is_same = finding.rate == 1 and finding.noise == 0 and longest == own
        if is_same and finding.bytes_per_parameter == self.own_bytes:
            finding = finding._replace(why=f"{SAME}: its steps are equal, bit for bit")
        if real.leaps:
            tensor = self.watcher.tensor_names[int(real.longest.argmax())]
            times = "once" if len(real.leaps) == 1 else f"{len(real.leaps)} times"
            leap = (
                f"it leaps {times} in {self.updates} updates, first at {real.leaps[0]}, farthest "
                f"in {tensor}"
            )
            finding = finding.worsened("leaps", leap)
        remarks = list(real.remarks)
        if real.drifted and (drifted := float(np.mean(real.drifted))) > DRIFTING:
            remarks.append(f"{drifted:.0%} of the numbers move although float32's stand still")
        decay = self.decay_rate(real)
        arrives = f"{decay:.2f} of the weight decay arrives"
        if decay < tolerates[0] or decay > tolerates[1]:
            finding = finding.worsened("frozen tensors" if decay < 1 else "faster", arrives)
        elif abs(decay - 1) > 0.1:
            remarks.append(arrives)
        remarks.append(f"longest step {longest:,.3g} learning rates (float32 {own:,.3g})")
        remarks.append(f"{finding.bytes_per_parameter:.3g} bytes a parameter")
        if real.in_float32:
            tensors = len(real.bytes)
            remarks.append(f"{real.in_float32} of {tensors} tensors stay in float32")
        return finding._replace(why="; ".join([finding.why, *remarks]))

    def decay_rate(self, real: RealCopy) -> float:
        """Which share of the weight decay arrives; NaN without weight decay.

        The script's class in float32 and the real optimizer both train a tensor of 64 x 64 numbers
        with gradients of 0, at the training's mean learning rate. Weight decay is all that moves
        it. The share is <d', d> / <d, d>, as for every rate.
        """
        optimizer = self.watcher.optimizer
        if optimizer is None or self.updates == 0:
            return math.nan
        group = optimizer.param_groups[self.decaying_group]
        lr = self.learning_rates / self.updates
        per_update = lr * float(group.get("weight_decay") or 0)
        if per_update == 0:
            return math.nan
        least, most = DECAY_STEPS
        steps = int(min(max(DECAY_SHARE / per_update, least), most))
        generator = torch.Generator(device="cpu").manual_seed(0)
        weights = torch.randn(64, 64, generator=generator, dtype=torch.float32, device="cpu")
        own = RealOptimizer("model=fp32", "", {}, "", {}, False)
        try:
            with self.random_numbers.in_use():
                start = torch.nn.Parameter(weights.to(self.random_numbers.device))
                scheduled = with_one_parameter(optimizer, group, start, lr)
                copies = [OptimizerCopy(entry, scheduled) for entry in (own, real.entry)]
                # Copies, because the parameters change in place
                before = [copy.parameters[id(start)].detach().float().clone() for copy in copies]
                start.grad = torch.zeros_like(start)
                for _ in range(steps):
                    for copy in copies:
                        copy.step(scheduled)
                after = [copy.parameters[id(start)].detach().float() for copy in copies]
        except Exception:  # the decay is a note; the rate stands without it
            return math.nan
        true, moved = (b - a for a, b in zip(before, after, strict=True))
        return float((moved * true).sum() / true.square().sum())


def with_one_parameter(optimizer, group: dict, parameter, lr: float) -> torch.optim.Optimizer:
    """An object with the class and the settings of an optimizer, and one parameter. It makes no
    step."""
    alone = object.__new__(type(optimizer))
    vars(alone).update(vars(optimizer))
    alone.param_groups = [{**group, "params": [parameter], "lr": lr}]
    alone.state = {}
    return alone


def compensation(parameter: torch.Tensor, state: dict) -> torch.Tensor:
    """What a Kahan sum keeps of a parameter beside it, in the parameter's shape. It is 0 if nothing
    is kept, for which optimi has a single number or None."""
    kept = state.get("kahan_comp")
    if kept is None or kept.shape != parameter.shape or not kept.is_floating_point():
        return torch.zeros_like(parameter)
    return kept


def longest_steps(
    before: list[torch.Tensor],
    after: list[torch.Tensor],
    lr: torch.Tensor,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """The farthest that a number of each tensor has moved, in learning rates, float32 [T].

    In 16 bits, a number moves by whole spacings, however short the step. So one spacing is taken
    off. That is computed only where the result may be longer than `known`.
    """
    moved = torch._foreach_sub(after, before)
    distance = torch.stack(torch._foreach_norm(moved, math.inf)).float().cpu()
    longest = torch.where(lr > 0, distance / lr, 0)
    mantissa = MANTISSA.get(after[0].dtype)
    if mantissa is None:
        return longest
    for t in torch.nonzero(longest > known).flatten().tolist():
        farther = torch.maximum(before[t].abs(), after[t].abs()).float()
        _, exponent = torch.frexp(farther)  # farther = fraction 2^exponent, fraction below 1
        spacing = torch.exp2((exponent - 1 - mantissa).float())
        distance = (after[t].float() - before[t].float()).abs() - spacing
        longest[t] = distance.max().clamp(min=0).cpu() / lr[t]
    return longest
