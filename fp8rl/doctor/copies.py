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
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..bits.catalogue import RealOptimizer
from ..bits.notation import split_entry
from .findings import NOT_JUDGED, SAME, Finding, judge
from .ruler import Ruler
from .watcher import NOT_IN_PROPORTION, Shadow, Update, Watcher, dense, shadow_steps

PLAIN = {"Tensor", "Parameter"}  # classes of tensors that keep their numbers as their dtype says


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
        self.random_states: list = []  # of its random numbers; none before the first are drawn
        # `shared` are the options that follow the script's, which a schedule may change
        self.factory, self.shared, self.remarks = class_and_options(entry, optimizer)
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self.groups: dict[int, dict] = {}  # by the number of the script's parameter group
        types = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        for number, group in enumerate(optimizer.param_groups):
            copies = {
                id(p): torch.nn.Parameter(p.detach().to(types[entry.type], copy=True))
                for p in group["params"]
                if p.dtype == torch.float32 and p.numel()
            }
            self.parameters |= copies
            if copies:
                self.groups[number] = {"params": [*copies.values()], **entry.options}
                for name in self.shared:
                    set_option(self.groups[number], name, group[name])
        if not self.groups:
            raise ValueError(f"{entry.text}: there are no parameters in float32")
        self.take_state(optimizer)

    def make(self) -> None:
        """Makes the real optimizer, without a state."""
        groups = [{**group} for group in self.groups.values()]
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
        states = {copy: optimizer.state.get(p) for p, copy in self.pairs(optimizer)}
        states = {copy: state for copy, state in states.items() if state}
        if not states:
            return
        weights = [copy.clone() for copy in states]
        settings = [{**group} for group in self.optimizer.param_groups]
        self.step_with({copy: torch.zeros_like(copy) for copy in states})
        torch._foreach_copy_([*states], weights)
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
        from the script, and it draws random numbers of its own."""
        is_eager = self.entry.eager
        stance = torch.compiler.set_stance("force_eager") if is_eager else contextlib.nullcontext()
        token = shadow_steps.set(True)
        self.exchange_random_numbers()
        try:
            with stance:
                yield
        finally:
            self.exchange_random_numbers()
            shadow_steps.reset(token)

    def exchange_random_numbers(self) -> None:
        """Exchanges the states of the global generators of torch, NumPy and Python with its own.

        Real optimizers that round stochastically draw from these. The script draws what it always
        draws.
        """
        generators = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
        ]
        if torch.cuda.is_initialized():
            generators.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
        states = [state_of() for state_of, _ in generators]
        if not self.random_states:
            torch.manual_seed(0)
        for (_, restore), state in zip(generators, self.random_states, strict=False):
            restore(state)
        self.random_states = states

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a step with the gradients and the settings that the script's optimizer has now.

        Call it after the script's step. Gradients are copied, because a class may change them.
        """
        for number, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name in self.shared:
                set_option(group, name, optimizer.param_groups[number][name])
        gradients = {
            copy: p.grad.to(copy.dtype, copy=True)
            for p, copy in self.pairs(optimizer)
            if p.grad is not None
        }
        self.step_with(gradients)

    def step_with(self, gradients: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        """Makes a step with these gradients of the copies."""
        for copy, gradient in gradients.items():
            copy.grad = gradient
        with self.alone():
            self.optimizer.step()
        for copy in gradients:
            copy.grad = None

    @torch.no_grad()
    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the script's parameters the numbers of the copies."""
        for p, copy in self.pairs(optimizer):
            p.copy_(copy)
        self.checksums = state_checksums(optimizer)

    @torch.no_grad()
    def take_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the copies what other code has changed since `give_back`: the script's parameters,
        and the state of its optimizer.

        A parameter that nobody has changed has the copy's own numbers.
        """
        for p, copy in self.pairs(optimizer):
            copy.copy_(p)
        if state_checksums(optimizer) != self.checksums:
            self.take_state(optimizer)

    def pairs(self, optimizer: torch.optim.Optimizer) -> list[tuple]:
        """The script's parameters that have a copy, each with its copy."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [(p, self.parameters[id(p)]) for p in parameters if id(p) in self.parameters]


def take_over(state: dict, kept: dict) -> bool:
    """Takes over the state of a parameter, as far as names and shapes are the same. Returns whether
    that has taken over a tensor of several numbers."""
    taken = False
    for name, value in state.items():
        mine = kept.get(name)
        if isinstance(mine, torch.Tensor):
            value = torch.as_tensor(value, device=mine.device)
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


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """The bytes of tensors, also of those that keep their numbers in other tensors, as those of
    torchao do."""
    total = 0
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ not in PLAIN:
            names, _ = tensor.__tensor_flatten__()
            total += bytes_of([getattr(tensor, name) for name in names])
        else:
            total += tensor.numel() * tensor.element_size()
    return total


def memory(optimizer, parameters: list[torch.Tensor]) -> tuple[float, int]:
    """The bytes that an optimizer keeps of a parameter between updates, itself and its state, and
    of how many tensors everything is kept in float32: nothing was gained there.

    Some classes keep tensors in their groups or attributes. Those that have the shape of one of the
    parameters count.
    """
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    attributes = {**vars(optimizer), "param_groups": [], "state": {}}
    shapes = {p.shape for p in parameters}
    tensors = [x for x in tree_leaves([groups, attributes]) if isinstance(x, torch.Tensor)]
    total = bytes_of([x for x in tensors if x.shape in shapes])
    in_float32 = 0
    for p in parameters:
        leaves = tree_leaves([p, {**optimizer.state.get(p, {})}])
        kept = [x for x in leaves if isinstance(x, torch.Tensor)]
        total += bytes_of(kept)
        whole = [x for x in kept if x.numel() >= p.numel()]
        in_float32 += all(x.dtype == torch.float32 and type(x).__name__ in PLAIN for x in whole)
    return total / sum(p.numel() for p in parameters), in_float32


def set_option(group: dict, name: str, value) -> None:
    """Gives an option of a parameter group another value. Some classes keep it as a tensor."""
    value = float(value) if isinstance(value, torch.Tensor) else value
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
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
        accepted = options_of(script_class).keys() - entry.options.keys()
        return script_class, [name for name in optimizer.defaults if name in accepted], []
    name = name_of_class(entry, optimizer)
    try:
        factory = getattr(importlib.import_module(entry.module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{entry.text}: it cannot be imported: {error}") from error
    if not callable(factory) or not callable(getattr(factory, "step", None)):
        raise ValueError(f"{entry.text}: {name} is no optimizer: it has no step")
    accepted = options_of(factory)
    for option in entry.options:
        if option not in accepted:
            raise ValueError(f"{entry.text}: {name} has no option {option}")
    # Prodigy and D-Adaptation estimate it from `d0`
    estimates = "d0" in accepted or NOT_IN_PROPORTION & {kind.__name__ for kind in factory.__mro__}
    if estimates and "lr" not in entry.options:
        raise ValueError(
            f"{entry.text}: {name} estimates the learning rate itself: name its own, as in "
            f"{entry.text}:lr=1.0"
        )
    other_options = []  # what only one of the two classes has
    if "betas" in accepted and not {"betas"} & {*optimizer.defaults, *entry.options}:
        other_options.append(f"{name} has betas, which {script_class.__name__} has not")
    # Options that say how a step is computed, not which step it is
    of_implementation = {
        "capturable",
        "differentiable",
        "foreach",
        "fused",
        "decoupled_weight_decay",
    }
    options = []
    left_out = []
    for option, value in optimizer.defaults.items():
        if option in of_implementation or option in entry.options:
            continue
        default = accepted.get(option)
        if option not in accepted:
            # Without `eps`, a class still does the same
            if option != "eps" and any(group[option] for group in optimizer.param_groups):
                other_options.append(f"{name} has no {option}, which {script_class.__name__} has")
        elif (
            value is None
            or default in (None, inspect.Parameter.empty)
            or np.shape(value) == np.shape(default)
        ):
            options.append(option)
        else:
            left_out.append(f"it has its own {option}, {default}")
    if other_options and not entry.options:
        raise ValueError(
            f"{entry.text}: {other_options[0]}: choose a class like it, or name options of its own"
        )
    return factory, options, [*other_options, *left_out]


def name_of_class(entry: RealOptimizer, optimizer: torch.optim.Optimizer) -> str:
    """The name of the class that takes the place of a script's optimizer. Raises ValueError if
    there is none."""
    # An explicit class takes any place
    ancestors = ["", *(kind.__name__ for kind in type(optimizer).__mro__)]
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


def options_of(factory) -> dict[str, object]:
    """The options of the constructor of a class with their defaults, and those that it hands on to
    classes that it inherits from. `inspect.Parameter.empty` stands for no default."""
    options: dict[str, object] = {}
    for kind in factory.__mro__:
        parameters = inspect.signature(kind.__init__).parameters.values()
        options = {p.name: p.default for p in parameters} | options
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return {name: options[name] for name in options if name not in ("self", "params")}


class RealCopy:
    """A real optimizer beside a script's, and what was measured of it.

    `copy`      None before the first step, and once it makes no more steps
    `start`     sampled weights [T, P] at the beginning of the window
    `drifted`   the share of the numbers that drift in each window
    `longest`   the longest step of each of the T tensors, in learning rates
    `leaps`     the updates with a leap
    `reason`    why it is not judged; empty if it is
    `diverged`  the update at which its weights were no longer finite; 0 if they are
    `bytes`     what is kept of a parameter; 0 before the first step
    """

    def __init__(self, entry: RealOptimizer, watcher: Watcher):
        self.entry = entry
        self.copy: OptimizerCopy | None = None
        self.ruler = Ruler(watcher.sample, [entry.text], watcher.tensor_names)
        self.drifted: list[float] = []
        self.longest = np.zeros(len(watcher.references), np.float32)
        self.leaps: list[int] = []
        self.reason = ""
        self.diverged = 0
        self.bytes = 0.0
        self.in_float32 = 0  # how many tensors are kept wholly in float32
        self.remarks: list[str] = []  # options that are not the script's, and the like

    def attempt(self, what: str, function: Callable, *arguments) -> None:
        """Calls a function of the copy. A copy that fails makes no more steps."""
        try:
            function(*arguments)
        except Exception as error:
            self.copy = None
            text = str(error).strip().partition("\n")[0]
            self.reason = f"it {what} ({type(error).__name__}: {text})"
            if isinstance(error, ValueError) and text.startswith(self.entry.text):
                self.reason = text.removeprefix(f"{self.entry.text}: ")

    def make(self, optimizer: torch.optim.Optimizer) -> None:
        self.copy = OptimizerCopy(self.entry, optimizer)
        self.remarks = self.copy.remarks  # the same list, to which the copy may add


class CopyShadow(Shadow):
    """Real optimizers beside a script's, each on its own copy of the parameters.

    `watcher`  the script's optimizer
    `entries`  which real optimizers
    `length`   updates in a window
    """

    def __init__(self, watcher: Watcher, entries: list[RealOptimizer], length: int):
        super().__init__(watcher, [], length)
        self.copies = [RealCopy(entry, watcher) for entry in entries]
        tensors = len(watcher.references)
        self.longest = np.zeros(tensors, np.float32)  # the script's own longest steps
        self.longest_ways = np.zeros(tensors)  # the script's, in a window
        self.updates = 0
        self.learning_rates = np.zeros(max(watcher.group) + 1)  # of the groups; sums over updates
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
        sample = self.watcher.sample
        if self.last is None:
            self.last = [p.detach().clone() for p in parameters]
            for real in self.copies:
                real.attempt("could not be made", real.make, optimizer)
            self.checksums = state_checksums(optimizer)
            self.begin_window()
            return
        if state_checksums(optimizer) != self.checksums:
            for real in self.active:
                real.attempt("failed", real.copy.take_state, optimizer)
        changes = torch._foreach_sub(parameters, self.last)
        # A NaN is a change, too
        if not torch.stack(torch._foreach_norm(changes, torch.inf)).any():
            return
        # A window then begins so far away that its way is the same as without the change
        self.start = sample.take(parameters) - (sample.take(self.last) - self.start)
        torch._foreach_copy_(self.last, parameters)
        for real in self.active:
            way = self.weights_of(real) - real.start
            copies = self.parameters_of(real)
            torch._foreach_add_(copies, [change.to(copies[0].dtype) for change in changes])
            real.start = self.weights_of(real) - way

    def begin_window(self) -> None:
        self.start = self.weights_of()
        for real in self.active:
            real.start = self.weights_of(real)

    def parameters_of(self, real: RealCopy) -> list[torch.Tensor]:
        """A copy's parameters, in the order of the script's."""
        return [real.copy.parameters[id(p)] for p in self.watcher.parameters]

    def weights_of(self, real: RealCopy | None = None) -> np.ndarray:
        """The sampled weights [T, P] of a copy, or of the script.

        They are the parameters. A Kahan sum keeps what rounding has left out of a parameter beside
        it, and adds it as soon as it is large enough. So a weight is the sum of both. Where nothing
        is kept, optimi has a single number or None.
        """
        optimizer = real.copy.optimizer if real else self.watcher.optimizer
        parameters = self.parameters_of(real) if real else self.watcher.parameters
        rests = [optimizer.state.get(p, {}).get("kahan_comp") for p in parameters]
        pairs = zip(parameters, rests, strict=True)
        rests = [x if getattr(x, "shape", None) == p.shape else None for p, x in pairs]
        sample = self.watcher.sample
        return sample.take(parameters) + sample.take(dense(parameters, rests))

    @torch.no_grad()
    def after(self, update: Update) -> None:
        """Lets every copy make the step that the script has made, and measures them."""
        optimizer = self.watcher.optimizer
        parameters = self.watcher.parameters
        self.updates += 1
        rates = np.array([settings.learning_rate for settings in update.settings])
        self.learning_rates += rates
        lr = rates[self.watcher.group].astype(np.float32)
        self.longest = np.maximum(self.longest, longest_steps(self.last, parameters, lr))
        if self.updates == 1:
            self.own_bytes, _ = memory(optimizer, parameters)
        for real in self.active:
            self.step(real, lr)
        torch._foreach_copy_(self.last, parameters)
        self.checksums = state_checksums(optimizer)
        if self.updates % self.length == 0:
            self.end_window()

    def step(self, real: RealCopy, lr: np.ndarray) -> None:
        """Lets one copy make a step."""
        copies = self.parameters_of(real)
        before = [copy.clone() for copy in copies]
        what = f"failed in step {self.updates}"
        real.attempt(what, real.copy.step, self.watcher.optimizer)
        if real.copy is None:
            return
        # A step that is longer than 10 of the script's longest ones is a leap
        leap = 10 * float(self.longest.max())
        longest = longest_steps(before, copies, lr, np.minimum(real.longest, leap))
        real.longest = np.maximum(real.longest, longest)
        if longest.max() > leap > 0:
            real.leaps.append(self.updates)
        if self.updates == 1:
            real.bytes, real.in_float32 = memory(real.copy.optimizer, copies)
        if not np.isfinite(longest).all():
            real.diverged = self.updates
            real.copy = None

    def end_window(self) -> None:
        """Measures the window, and begins the next one.

        A number drifts in a window if float32 leaves it alone, and a copy moves it by more than a
        tenth of how far float32 moves the numbers of its tensor (root mean square) in the window
        with the longest way so far. A shorter way may be the rounding of a difference, or the end
        of a momentum, which float32 has rounded away a bit earlier.
        """
        sample = self.watcher.sample
        true = self.weights_of() - self.start
        ways = np.sqrt(sample.mean(np.square(true)))  # [T]
        self.longest_ways = np.maximum(self.longest_ways, ways)
        for real in self.active:
            moved = self.weights_of(real) - real.start
            lost = (moved == 0) & (true != 0)
            real.ruler.add(moved[None], true, lost[None])
            drifts = (true == 0) & (np.abs(moved) > 0.1 * self.longest_ways[:, None])
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
        finding = judge(self.watcher.name, text, real.ruler.reading(0), tolerates, loses)
        if real.diverged:
            why = f"its weights became infinite or NaN at update {real.diverged}"
            finding = finding._replace(verdict="diverges", why=why)
        if not real.bytes:
            return finding
        longest = float(real.longest.max())
        own = float(self.longest.max())
        finding = finding._replace(longest_step=longest, bytes_per_parameter=real.bytes)
        if (finding.rate, finding.noise, longest, real.bytes) == (1, 0, own, self.own_bytes):
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
        if real.drifted and (drifted := float(np.mean(real.drifted))) > 0.01:
            remarks.append(f"{drifted:.0%} of the numbers move although float32's stand still")
        decay = self.decay_rate(real)
        arrives = f"{decay:.2f} of the weight decay arrives"
        if decay < tolerates[0] or decay > tolerates[1]:
            finding = finding.worsened("frozen tensors" if decay < 1 else "faster", arrives)
        elif abs(decay - 1) > 0.1:
            remarks.append(arrives)
        remarks += [
            f"longest step {longest:,.3g} learning rates (float32 {own:,.3g})",
            f"{real.bytes:.3g} bytes a parameter",
        ]
        if real.in_float32:
            remarks.append(f"{real.in_float32} of {len(real.longest)} tensors stay in float32")
        return finding._replace(why="; ".join([finding.why, *remarks]))

    def decay_rate(self, real: RealCopy) -> float:
        """Which share of the weight decay arrives; NaN without weight decay.

        The script's class in float32 and the real optimizer both train a tensor of 64 x 64 numbers
        with gradients of 0, at the training's mean learning rate, in the group with the most weight
        decay. Weight decay is all that moves it. The share is <d', d> / <d, d>, as for every rate.
        """
        optimizer = self.watcher.optimizer
        rates = self.learning_rates / self.updates
        decays = [
            float(group.get("weight_decay") or 0) * lr
            for group, lr in zip(self.watcher.groups, rates, strict=False)
        ]
        if not any(decays):
            return np.nan
        number = int(np.argmax(decays))
        generator = torch.Generator(device="cpu").manual_seed(0)
        weights = torch.randn(64, 64, generator=generator, dtype=torch.float32, device="cpu")
        start = torch.nn.Parameter(weights.to(self.watcher.device))
        start.grad = torch.zeros_like(start)
        # An optimizer with one parameter and the script's settings, which makes no step
        settings = {**optimizer.param_groups[number], "params": [start], "lr": rates[number]}
        scheduled = object.__new__(type(optimizer))
        vars(scheduled).update(vars(optimizer), param_groups=[settings], state={})
        own = RealOptimizer("model=fp32", "", {}, "", {}, False)
        moved = []
        try:
            for entry in (own, real.entry):
                copy = OptimizerCopy(entry, scheduled)
                copied = copy.parameters[id(start)].detach()
                before = copied.float().clone()
                # Until weight decay has taken a tenth, but within limits
                for _ in range(int(np.clip(0.1 / decays[number], 64, 256))):
                    copy.step(scheduled)
                moved.append(copied.float() - before)
        except Exception:  # the decay is a note; the rate stands without it
            return np.nan
        true, with_real = moved
        return float((with_real * true).sum() / true.square().sum())


def longest_steps(
    before: list[torch.Tensor],
    after: list[torch.Tensor],
    lr: np.ndarray,
    known: np.ndarray | None = None,
) -> np.ndarray:
    """The farthest that a number of each tensor has moved, in learning rates, float32 [T].

    In 16 bits, a number moves by whole spacings, however short the step. So one spacing is taken
    off. That is computed only where the result may be longer than `known`.
    """
    moved = torch._foreach_sub(after, before)
    distances = torch.stack(torch._foreach_norm(moved, torch.inf)).float().cpu().numpy()
    longest = np.divide(distances, lr, out=np.zeros_like(lr), where=lr > 0)
    if after[0].dtype == torch.float32:
        return longest
    for t in np.flatnonzero(longest > known):
        farther = torch.maximum(before[t].abs(), after[t].abs()).float()
        _, exponent = torch.frexp(farther)  # farther = fraction 2^exponent, fraction below 1
        spacing = torch.exp2((exponent - 1).float()) * torch.finfo(after[t].dtype).eps
        distance = (after[t].float() - before[t].float()).abs() - spacing
        longest[t] = float(distance.max().clamp(min=0)) / lr[t]
    return longest
