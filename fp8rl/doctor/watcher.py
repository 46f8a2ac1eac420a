"""Hooks see the steps of a process, and a watcher reads one optimizer, once a step.

Shadows stand beside a watcher, and take the same step otherwise.

The training is somebody else's. A watcher changes nothing, and keeps no network in memory that the
script has dropped: optimizer and parameters are held by weak references, and everything else that
is kept is a sample.
"""

import contextlib
import contextvars
import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .findings import Finding, judge_all
from .ruler import Ruler, Sample, tensor_names

# Optimizers whose step is not in proportion to their learning rate, by the names of their classes,
# in torch or elsewhere. They search along a line, adapt a step size for each number by signs, or
# estimate the learning rate themselves. So "as at half the learning rate" says nothing of them.
NOT_IN_PROPORTION = frozenset(
    {
        "LBFGS",
        "Rprop",
        "AliG",
        "COCOB",
        "DAdaptAdaGrad",
        "DAdaptAdam",
        "DAdaptLion",
        "DAdaptSGD",
        "DoG",
        "LDoG",
        "Prodigy",
    }
)


class GroupSettings(NamedTuple):
    """The settings of a parameter group at one update: numbers, or arrays for several updates."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    decay_of_gradient: float  # weight decay that is added to the gradient
    sign: float  # sign of the gradient: -1 with `maximize`, otherwise 1
    # Of SGD
    momentum: float
    dampening: float
    nesterov: float  # 1 or 0


class Update(NamedTuple):
    """An update of the optimizer as it was read.

    `before`    float32 [K T, P], weights before the update, then of Adam m and v
    `after`     float32 [(1 + K) T, P], weights after the update, gradients, then of Adam m and v
    `steps`     how many steps Adam had counted before the update, float32 []
    `live`      for each of the T tensors, whether it has a gradient
    `settings`  settings of each parameter group
    """

    before: torch.Tensor
    after: torch.Tensor
    steps: torch.Tensor
    live: list[bool]
    settings: list[GroupSettings]

    @property
    def weight(self) -> torch.Tensor:
        """The weights before the update, [T, P]."""
        return self.before[: len(self.live)]

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the update, [T, P]."""
        return self.after[len(self.live) : 2 * len(self.live)]


class Tape:
    """Tensors of one shape, one after the other, in memory that is taken once.

    A tensor for each update, all of which are freed at the end of a window, would leave holes
    between those of the script. The heap of glibc 2.36 then grows as long as a training does.

    `length`  how many there are at most
    """

    def __init__(self, length: int):
        self.length = length
        self.rows: torch.Tensor | None = None
        self.count = 0

    def append(self, x: torch.Tensor) -> None:
        if self.rows is None:
            self.rows = x.new_empty((self.length, *x.shape))
        self.rows[self.count].copy_(x)
        self.count += 1

    def take(self) -> torch.Tensor:
        """All of them as one tensor, until others take their place."""
        count, self.count = self.count, 0
        return self.rows[:count]


class Shadow:
    """What stands beside an optimizer and takes the same steps otherwise.

    `watcher`  the optimizer's
    `texts`    what is measured by a `Ruler`, as in "weights=bf16"
    `length`   updates in a window
    """

    def __init__(self, watcher: "Watcher", texts: list[str], length: int):
        self.watcher = watcher
        self.length = length
        self.ruler = Ruler(watcher.sample, texts, watcher.tensor_names)

    def before(self) -> None:
        """Is called before each step of the optimizer."""

    def after(self, update: Update) -> None:
        """Is called after each step."""

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        """The findings so far, without cures."""
        return judge_all(self.watcher.name, self.ruler, tolerates, self.length)


class Watcher:
    """One optimizer, read once a step.

    `optimizer`  the optimizer; of its parameters, those that learn and are float32 are followed
    `name`       its name in reports
    `modules`    modules whose names of parameters are used
    `sample`     how many numbers are followed

    `shadows` (`Shadow`) take the same steps otherwise.

    Raises ValueError if no parameters learn, and if none of those that do is float32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str,
        modules: list[nn.Module],
        sample: int,
    ):
        self.name = name
        self.reference = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.modules = [weakref.ref(module) for module in modules]
        # Whether it makes twice the step at twice the learning rate. Those that do not are known by
        # the name of their class or of one that it inherits from, by the option `relative_step` of
        # an Adafactor, the option `d0` of a class that estimates its learning rate, or because they
        # have no learning rate.
        names = {kind.__name__ for kind in type(optimizer).__mro__}
        self.is_in_proportion = not NOT_IN_PROPORTION & names and not any(
            group.get("relative_step") or group.get("lr") is None or "d0" in group
            for group in optimizer.param_groups
        )
        self.is_adam = isinstance(optimizer, torch.optim.Adam) and not any(
            group["amsgrad"] for group in optimizer.param_groups
        )  # AdamW is an Adam, too
        self.is_sgd = isinstance(optimizer, torch.optim.SGD)
        # The parameters are remembered here, because a loaded optimizer has new groups.
        learning = parameters_of(optimizer)
        parameters = [p for p in learning if p.dtype == torch.float32]
        others = [p for p in learning if p.dtype != torch.float32]
        if not learning:
            raise ValueError(f"{name} has no parameters that learn: leave it out")
        if not parameters:
            dtype = others[0].dtype
            raise ValueError(f"parameters are {dtype}: let the doctor watch a training in float32")
        self.keys = {id(p) for p in parameters}
        # The number of each one's group
        self.group = [
            number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if id(p) in self.keys
        ]
        # Parameters that learn and are not followed
        self.not_float32 = [f"{tensor_names([p], modules)[0]} ({p.dtype})" for p in others]
        self.references = [weakref.ref(p) for p in parameters]
        self.tensor_names = tensor_names(parameters, modules)
        self.device = parameters[0].device
        self.sample = Sample(parameters, sample, 0)
        self.shadows: list = []
        self.updates = 0
        self.joined: dict[int, str] = {}  # parameters that joined later, by identity
        self.others_learn = False  # whether the optimizer goes on without a tensor of these
        self.last: Update | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None once the script has dropped it."""
        return self.reference()

    @property
    def groups(self) -> list[dict]:
        """The parameter groups as they are now; none once the script has dropped the optimizer."""
        optimizer = self.optimizer
        return [] if optimizer is None else optimizer.param_groups

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are followed; none once the script has dropped one of them."""
        return alive(self.references)

    def states(self) -> list[dict]:
        """The optimizer's state of each parameter; empty before its first step."""
        state = self.optimizer.state
        return [state.get(p, {}) for p in self.parameters]

    def state(self, name: str) -> list[torch.Tensor]:
        """One tensor of the optimizer's state for each parameter; zeros before the first step."""
        return dense(self.parameters, [state.get(name) for state in self.states()])

    def moments(self) -> list[torch.Tensor]:
        """Adam's moments, m of each parameter and then v of each; none of other optimizers."""
        return [*self.state("exp_avg"), *self.state("exp_avg_sq")] if self.is_adam else []

    def count_steps(self) -> torch.Tensor:
        """How many steps Adam has counted, float32 []; NaN if it does not say. A GPU is not waited
        for."""
        counts = [x["step"] for x in self.states() if self.is_adam and "step" in x] or [0.0]
        # With torch's default device "meta", Adam's counts have no numbers
        counts = [np.nan if getattr(x, "is_meta", False) else x for x in counts]
        # Whatever torch's default type and device are
        options = {"dtype": torch.float32, "device": "cpu"}
        tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x, **options) for x in counts]
        return torch.stack([x.detach().float() for x in tensors]).max()

    def before_step(self) -> None:
        """Reads the weights and Adam's state, before a step.

        Other code may have changed them since the last update. That shows in their numbers alone:
        a change through `p.data` does not raise the version of a tensor.
        """
        parameters = self.parameters
        # Without these parameters, the optimizer goes on with other tensors
        self.others_learn = self.others_learn or not parameters
        if not parameters or not self.is_in_proportion:
            return
        self.read = self.sample.read([*parameters, *self.moments()])
        self.steps = self.count_steps()
        for shadow in self.shadows:
            shadow.before()

    def after_step(self) -> None:
        """Reads the update, and hands it to the shadows."""
        optimizer = self.optimizer
        parameters = self.parameters
        # A GradScaler tells a fused optimizer by `found_inf` to skip the step.
        skips = optimizer is None or getattr(optimizer, "found_inf", None)
        if skips or not parameters or not self.is_in_proportion:
            return
        present = {id(p): p for group in self.groups for p in group["params"]}
        if not self.keys <= present.keys():
            self.others_learn = True
            return
        gradients = [p.grad for p in parameters]
        read = [*parameters, *dense(parameters, gradients), *self.moments()]
        live = [g is not None for g in gradients]
        settings = [self.settings_of(group) for group in self.groups[: max(self.group) + 1]]
        self.last = Update(self.read, self.sample.read(read), self.steps, live, settings)
        self.updates += 1
        for i in present.keys() - self.keys - self.joined.keys():
            p = present[i]
            if p.grad is not None and p.dtype == torch.float32:
                (name,) = tensor_names([p], alive(self.modules))
                self.joined[i] = f"{name} (joined at update {self.updates})"
        for shadow in self.shadows:
            shadow.after(self.last)

    def settings_of(self, group: dict) -> GroupSettings:
        """The settings of a parameter group as they are now."""
        beta1, beta2 = map(float, group["betas"]) if self.is_adam else (0.0, 0.0)
        is_adamw = isinstance(self.optimizer, torch.optim.AdamW)
        is_decoupled = is_adamw or group.get("decoupled_weight_decay")
        has_decay = (self.is_adam or self.is_sgd) and not is_decoupled
        return GroupSettings(
            learning_rate=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=float(group["eps"]) if self.is_adam else 1.0,
            decay_of_gradient=float(group["weight_decay"]) if has_decay else 0.0,
            sign=-1.0 if group.get("maximize") else 1.0,
            momentum=float(group["momentum"]) if self.is_sgd else 0.0,
            dampening=float(group["dampening"]) if self.is_sgd else 0.0,
            nesterov=float(group["nesterov"]) if self.is_sgd else 0.0,
        )

    def by_tensor(self, settings: list[list[GroupSettings]]) -> GroupSettings:
        """The settings of N updates as arrays [N, T, 1], or [N, 1, 1] if there is one group."""
        numbers = np.asarray(settings, np.float32)  # [N, groups, settings]
        if numbers.shape[1] > 1:
            numbers = numbers[:, self.group]
        return GroupSettings(*np.moveaxis(numbers, -1, 0)[..., None])

    def trouble(self) -> str:
        """Why this optimizer cannot be judged, or an empty string."""
        if not self.is_in_proportion:
            return f"a step of {self.kind} is not in proportion to its learning rate"
        if self.others_learn:
            return "other parameters learn than at first"
        weights = self.parameters
        if not weights and self.last is not None:  # they are gone, and those read last count
            weights = [self.last.after[: len(self.references)]]
        if not all(bool(x.isfinite().all()) for x in weights):
            return "float32 itself has become infinite or NaN"
        return ""


def alive(references: list[weakref.ref]) -> list:
    """What weak references hold; nothing once one of them is gone."""
    held = [reference() for reference in references]
    return [] if any(x is None for x in held) else held


def dense(parameters: list[torch.Tensor], tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Dense tensors like the parameters; zeros in place of a tensor that is None."""
    pairs = zip(parameters, tensors, strict=True)
    tensors = [torch.zeros_like(p) if x is None else x for p, x in pairs]
    return [x.to_dense() if x.is_sparse else x for x in tensors]


def largest_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, float32 [T, 1]."""
    norms = [torch.linalg.vector_norm(x.detach(), torch.inf).float() for x in tensors]
    return torch.stack(norms).unsqueeze(1)


# Whether the step that is being made is a shadow's, and none of the script
shadow_steps = contextvars.ContextVar("shadow_steps", default=False)


class Hooks:
    """Hooks that are called before and after every step of every optimizer of this process.

    A subclass has a method `begin(optimizer, name)`, which is called before an optimizer's first
    step and returns what is kept of it. The methods `before` and `after` are called before and
    after every step, with the optimizer and what is kept of it. A method `after_wrapper` is called
    after a step of a wrapper, such as Lookahead, with the optimizer inside it. Nothing else is
    called for a wrapper, because the optimizer inside it makes a step of its own.

    Networks that a script drops do not stay in memory: optimizers are held by weak references.
    """

    def __init__(self):
        self.process = os.getpid()
        self.hooks: list = []
        self.names: list[str] = []  # of the optimizers, in the order of their first steps
        self.known = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which the hooks are called."""
        self.hook(register_optimizer_step_pre_hook, self.before_step)
        self.hook(register_optimizer_step_post_hook, self.after_step)
        try:
            yield
        finally:
            self.stop()

    def hook(self, register: Callable, function: Callable) -> None:
        """Has a function called at each step. `register` is torch's, for all optimizers or one."""
        # A step under torch.compile leaves the hooks out of its graph. Compiling them would take
        # far longer than calling them. The decorator is that of torch.optim itself, which imports
        # the compiler no earlier than the script's first optimizer does.
        left_out = torch._disable_dynamo(lambda *arguments: function(*arguments))
        self.hooks.append(register(left_out))

    def stop(self) -> None:
        """Removes the hooks. What was measured stays."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def before_step(self, optimizer, args, kwargs) -> None:
        if os.getpid() != self.process or shadow_steps.get():
            return  # a fork of the script, or a shadow
        if optimizer not in self.known:
            if optimizer_inside(optimizer) is not None:
                return  # a wrapper
            self.names.append(f"optimizer {len(self.names)} ({type(optimizer).__name__})")
            self.known[optimizer] = self.begin(optimizer, self.names[-1])
        self.before(optimizer, self.known[optimizer])

    def after_step(self, optimizer, args, kwargs) -> None:
        if os.getpid() != self.process or shadow_steps.get():
            return
        if optimizer in self.known:
            self.after(optimizer, self.known[optimizer])
            return
        innermost = innermost_optimizer(optimizer)
        if innermost in self.known:
            self.after_wrapper(innermost)

    def after_wrapper(self, optimizer) -> None:
        """Is called after the step of a wrapper whose own optimizer is watched."""


def modules_alive() -> list[nn.Module]:
    """The modules of this process, without those whose `__init__` has not run."""
    modules = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    return [module for module in modules if "_modules" in vars(module)]


def modules_of_process() -> list[nn.Module]:
    """The modules of this process that are not part of another module.

    Their parameters have names, which reports use.
    """
    modules = modules_alive()
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


def innermost_optimizer(optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the steps: the one given, or the one that a wrapper has inside.

    Libraries wrap an optimizer, as Accelerate and Lookahead do, or have a base optimizer, as SAM
    does. The wrapper may be an Optimizer by class without being one that steps or has hooks.
    Raises ValueError for anything else.
    """
    wrapped = optimizer
    seen = []  # so that a wrapper inside itself ends the search
    while wrapped not in seen:
        seen.append(wrapped)
        wrapped = optimizer_inside(wrapped) or wrapped
    if not isinstance(wrapped, torch.optim.Optimizer):
        raise ValueError(
            f"optimizers have a {type(wrapped).__name__}, which is no optimizer of torch: "
            "give the torch.optim.Optimizer that makes the steps"
        )
    if not hasattr(wrapped, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"optimizers have a {type(wrapped).__name__}, which has no hooks because it does not "
            "call Optimizer.__init__: give the torch.optim.Optimizer that makes the steps"
        )
    return wrapped


def optimizer_inside(wrapper):
    """The optimizer that a wrapper has as `optimizer` or `base_optimizer`, or None.

    Both are told from other things by what can be done with them.
    """

    def is_like_optimizer(x) -> bool:
        can_step = callable(getattr(x, "step", None)) and hasattr(x, "zero_grad")
        return can_step and not isinstance(x, type)

    inside = [getattr(wrapper, name, None) for name in ("optimizer", "base_optimizer")]
    inside = [x for x in inside if x is not wrapper and is_like_optimizer(x)]
    return inside[0] if inside and is_like_optimizer(wrapper) else None
