"""Shadows that are real optimizers: a class of any package steps on a copy of some parameters.

What an optimizer of another package really does cannot be told from its description: its blocks
hold tensors of some sizes only, its sums are rounded once or twice a step, its weight decay may be
lost. So the class itself runs. The script trains in float32 beside it and is not changed. Its
steps are recorded, and every copy makes a step with the gradients of each (`Recorder`).

Most classes treat each number by itself, or each block of numbers. They run on *stand-ins*: a
sample of whole blocks of each tensor, with the tensor's own gradients there (stand_ins.py). Other
classes, such as Muon, run on copies of whole tensors. `keep` trains with such a copy (keep.py).

A copy is never returned to the script's weights. It goes on from where its own steps have led it,
with float32's gradients. So a training that never starts is seen to stand still.

Nothing that a step measures is looked at before the window ends, so a GPU is not waited for.
"""

import contextlib
import functools
import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..bits.catalogue import RealOptimizer
from ..bits.notation import split_entry
from . import first_line
from .findings import NOT_JUDGED, SAME, Finding
from .stand_ins import LEAST, PLAIN, Recorder, Step, marks_of_state, with_groups
from .watcher import NOT_IN_PROPORTION, Shadow, Tape, Watcher, dense, shadow_steps


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
        self.random_states: list = []  # none before the first are drawn
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
        with self.alone():
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
        """A context for steps of the real optimizer.

        Hooks of the script's optimizers can tell its steps from the script's, and it draws random
        numbers of its own.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(shadow_steps.reset, shadow_steps.set(True))
            self.exchange_random_numbers()
            stack.callback(self.exchange_random_numbers)
            if self.entry.eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                # torchao compiles in every step, which takes longer than the step even so
                stack.callback(setattr, torch, "compile", torch.compile)
                torch.compile = functools.partial(compiled_for_others, torch.compile)
            yield

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

        Call it after the script's step, and within `alone`. Gradients are copied, because a class
        may change them.
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
        """Makes a step with these gradients of the copies, within `alone`."""
        for copy, gradient in gradients.items():
            copy.grad = gradient
        self.optimizer.step()
        for copy in gradients:
            copy.grad = None

    @torch.no_grad()
    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the script's parameters the numbers of the copies."""
        for p, copy in self.pairs(optimizer):
            p.copy_(copy)
        self.marks = marks_of_state(optimizer)

    @torch.no_grad()
    def take_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the copies what other code has changed since `give_back`: the script's parameters,
        and the state of its optimizer.

        A parameter that nobody has changed has the copy's own numbers.
        """
        for p, copy in self.pairs(optimizer):
            copy.copy_(p)
        if marks_of_state(optimizer) != self.marks:
            self.take_state(optimizer)

    def pairs(self, optimizer: torch.optim.Optimizer) -> list[tuple]:
        """The script's parameters that have a copy, each with its copy."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [(p, self.parameters[id(p)]) for p in parameters if id(p) in self.parameters]


def compiled_for_others(compiles: Callable, function: Callable | None = None, **options):
    """What `torch.compile` returns: for a real optimizer the function itself, and for other threads
    of the script what `compiles` makes of it."""
    if not shadow_steps.get():
        return compiles(function, **options)
    return function or (lambda decorated: decorated)


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


def tensors_in(x, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in something, such as the state of a parameter, and their names. A tensor that
    keeps its numbers in other tensors, as those of torchao do, has these in its place."""
    if isinstance(x, dict):
        for key, value in x.items():
            yield from tensors_in(value, f"{name}.{key}")
    elif hasattr(x, "__tensor_flatten__") and type(x).__name__ not in PLAIN:
        names, _ = x.__tensor_flatten__()
        yield from tensors_in({inner: getattr(x, inner) for inner in names}, name)
    else:
        yield from ((name, leaf) for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor))


def memory(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.Tensor],
    stand_for: list[list[int]],
    fixed: Iterable[str] = (),
) -> tuple[float, int]:
    """The bytes that an optimizer keeps of a number of the script's tensors between updates, itself
    and its state, and of how many of these tensors everything is kept in float32: nothing was
    gained there.

    `stand_for` has the sizes of the tensors for which each of the parameters stands. What is kept
    of them is in proportion to that, but for tensors of a state with the names `fixed`.

    Some classes keep tensors in their groups or attributes. Those that have the shape of one of the
    parameters count.
    """
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    attributes = {**vars(optimizer), "param_groups": groups, "state": {}}
    others = [x for x in tree_leaves(attributes) if isinstance(x, torch.Tensor)]
    total = 0.0
    in_float32 = 0
    for p, sizes in zip(parameters, stand_for, strict=True):
        alike = [x for x in others if x.shape == p.shape]
        others = [x for x in others if x.shape != p.shape]
        kept = [*tensors_in(p), *tensors_in({**optimizer.state.get(p, {})})]
        for name, x in [*kept, *tensors_in({i: x for i, x in enumerate(alike)})]:
            times = len(sizes) if name in fixed else sum(sizes) / p.numel()
            total += times * x.numel() * x.element_size()
        # Two codes of 4 bits are in one number
        whole = [x.dtype for _, x in kept if 2 * x.numel() >= p.numel()]
        in_float32 += len(sizes) * ({*whole} == {torch.float32})
    return total / sum(map(sum, stand_for)), in_float32


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


class Blocks(NamedTuple):
    """How a real optimizer treats large tensors.

    `size`   how many numbers a block has that it treats by itself; 0 if it treats none so
    `bytes`  what it keeps of a parameter; 0 if it makes no step
    `fixed`  names of tensors in its state whose sizes are the same for all parameters
    `codes`  whether its state has codes of 8 bits or fewer, which may have a number leap
    """

    size: int = 0
    bytes: float = 0.0
    fixed: frozenset[str] = frozenset()
    codes: bool = False


def trained(
    entry: RealOptimizer,
    optimizer: torch.optim.Optimizer,
    settings: dict,
    gradients: Iterable[list[torch.Tensor]],
    draws: bool = False,
) -> OptimizerCopy:
    """A real optimizer in place of the script's that has trained tensors of its own.

    `settings` are those of a parameter group, with the tensors, and `gradients` those of each step.
    `draws` has it begin with other random numbers.
    """
    script = with_groups(optimizer, [settings], {})
    real = OptimizerCopy(entry, script)
    with real.alone():
        _ = (torch.rand(1), random.random(), np.random.random()) if draws else ()
        for of_step in gradients:
            for p, gradient in zip(settings["params"], of_step, strict=True):
                p.grad = gradient
            real.step(script)
    return real


def every_other_block(tensors: Iterable[torch.Tensor], size: int) -> torch.Tensor:
    """Every other block of tensors, of so many numbers, as one tensor [N]."""
    return joined([x.reshape(-1, size)[::2] for x in tensors])


def noise(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers from N(0, 1) in rows of 128, whatever the script has set as default."""
    options = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    return torch.randn(rows, 128, **options)


@torch.no_grad()
def blocks_of(entry: RealOptimizer, optimizer: torch.optim.Optimizer, device) -> Blocks:
    """How a real optimizer in place of the script's treats large tensors, by trying it.

    It trains two tensors for some steps, and some blocks of both as one tensor. These must end with
    the same numbers. With stochastic rounding, they must differ no more than the two tensors do
    from themselves if other random numbers are drawn.
    """
    entry = entry._replace(eager=True)  # a compiled step does the same
    generator = torch.Generator(device="cpu").manual_seed(0)
    blocks = Blocks()
    for size in (256, 2048):
        rows = 24 * size // 128, 20 * size // 128
        start, *gradients = (
            # Rows have different sizes
            [(noise(n, generator) * noise(n, generator)[:, :1].exp()).to(device) for n in rows]
            for _ in range(7)
        )
        settings = {**optimizer.param_groups[0], "params": start, "lr": 0.1}
        of_blocks = {**settings, "params": [every_other_block(start, size)]}
        gradients_of_blocks = ([every_other_block(x, size)] for x in gradients)
        try:
            whole = trained(entry, optimizer, settings, gradients)
            copies = [*whole.parameters.values()]
            states = [dict(tensors_in({**whole.optimizer.state.get(p, {})})) for p in copies]
            names = [{(name, x.numel()) for name, x in state.items()} for state in states]
            fixed = frozenset(name for name, _ in names[0] & names[1])
            codes = any(x.element_size() == 1 for x in states[0].values())
            total, _ = memory(whole.optimizer, copies, [[p.numel()] for p in copies])
            blocks = Blocks(0, total, fixed, codes)
            again = trained(entry, optimizer, settings, gradients, draws=True).parameters.values()
            alone = trained(entry, optimizer, of_blocks, gradients_of_blocks).parameters.values()
            ends = joined(alone), every_other_block(copies, size), every_other_block(again, size)
            end, exact, other = (x.float().nan_to_num() for x in ends)
            if (end - exact).norm() <= 1.1 * (other - exact).norm():
                return blocks._replace(size=size)
        except Exception:  # it takes no tensors of one dimension, or fails in every step
            continue
    return blocks


class CopyShadow(Shadow):
    """A real optimizer beside a script's, on its own copy of the stand-ins.

    `watcher`  the script's optimizer
    `entry`    which real optimizer
    `length`   updates in a window
    `whole`    whether it runs on whole tensors, although its class treats blocks by themselves
    `tell`     is told how much memory it will take

    `recorder`    whose steps it replays, on which stand-ins
    `blocks`      how it treats large tensors
    `copy`        None before the first step, and once it makes no more steps
    `reason`      why it is not judged; empty if it is
    `diverged`    the update at which its weights were no longer finite; 0 if they are
    `remarks`     in words, options that are not the script's, and the like
    `bytes`       what is kept of a parameter; 0 before the first step
    `in_float32`  how many tensors are kept wholly in float32
    `leaps`       the updates with a leap
    `drifted`     the share of the numbers that drift in each window

    Arrays [2, ...] have what the script does in their first row, and what the copy does in the
    second:

    `start`     sampled weights [2, T, P] at the beginning of the window
    `longest`   the longest step of each of the T tensors, [2, T], in learning rates
    `tape`      of each update since `look_back`: the farthest that a number of each tensor has
                moved, [2, T]
    `rates`     of each of these updates: the tensors' learning rates [T]
    """

    recorder: Recorder

    def __init__(
        self,
        watcher: Watcher,
        entry: RealOptimizer,
        length: int,
        whole: bool,
        tell: Callable[[str], None],
    ):
        super().__init__(watcher, [entry.text], length)
        self.entry = entry
        self.tell = tell
        self.blocks = blocks_of(entry, watcher.optimizer, watcher.device)
        self.block = 0 if whole else self.blocks.size
        self.copy: OptimizerCopy | None = None
        self.reason = ""
        self.diverged = 0
        self.remarks: list[str] = []
        self.bytes = 0.0
        self.in_float32 = 0
        self.leaps: list[int] = []
        self.drifted: list[float] = []
        tensors = len(watcher.references)
        self.longest = np.zeros((2, tensors), np.float32)
        self.longest_ways = np.zeros(tensors)  # the script's, in a window
        self.tape = Tape(length)
        self.rates: list[np.ndarray] = []

    def attempt(self, what: str, function: Callable, *arguments):
        """Calls a function of the copy. A copy that fails makes no more steps."""
        try:
            return function(*arguments)
        except Exception as error:
            self.copy = None
            text = first_line(error)
            self.reason = f"it {what} ({type(error).__name__}: {text})"
            if isinstance(error, ValueError) and text.startswith(self.entry.text):
                self.reason = text.removeprefix(f"{self.entry.text}: ")

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the copy, of an optimizer of the stand-ins. It begins where the script is, and so
        it does once more when some parameters of a common stand-in have no gradient: each then has
        a stand-in of its own."""
        self.look_back()
        if self.reason or self.diverged:  # it makes no more steps
            return
        is_first = self.copy is None
        sample = self.watcher.sample
        self.ruler.sample = self.recorder.stand_ins.sample
        self.copy = self.attempt("could not be made", OptimizerCopy, self.entry, optimizer)
        if self.copy is None:
            return
        self.remarks += self.copy.remarks
        self.copy.remarks = self.remarks  # the same list, to which the copy may add
        self.start = self.weights()
        if not is_first:
            self.remarks.append(
                f"it began anew after update {self.watcher.updates}, when some tensors had no "
                "gradient"
            )
            return
        followed = len(self.recorder.numbers)
        # What it keeps and a gradient, and the script's weights and gradients in float32
        total = followed * (8 + self.blocks.bytes + 4)
        self.tell(
            f"{self.entry.text}: on {followed:,} of {sample.sizes.sum():,} numbers, "
            f"about {total / 1e6:,.3g} MB"
        )

    def resume(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes over the state of an optimizer of the stand-ins, which other code has changed."""
        if self.copy is not None:
            self.attempt("failed", self.copy.take_state, optimizer)

    def copies(self) -> list[torch.Tensor]:
        """The copy's parameters, in the order of the stand-ins."""
        return [self.copy.parameters[id(x)] for x in self.recorder.stand_ins.tensors]

    def weights(self) -> torch.Tensor:
        """The sampled weights of the script and of the copy, float32 [2, T, P].

        They are the parameters. A Kahan sum keeps what rounding has left out of a parameter beside
        it, and adds it as soon as it is large enough. So a weight is the sum of both. Where nothing
        is kept, optimi has a single number or None.
        """
        copies = self.copies()
        rests = [self.copy.optimizer.state.get(p, {}).get("kahan_comp") for p in copies]
        pairs = zip(copies, rests, strict=True)
        rests = [x if getattr(x, "shape", None) == p.shape else None for p, x in pairs]
        numbers = [self.recorder.numbers, joined(copies), joined(dense(copies, rests))]
        positions = self.recorder.stand_ins.positions
        script, copy, rest = (x[positions].float() for x in numbers)
        return torch.stack((script, copy + rest))

    def replay(self, steps: list[Step]) -> None:
        """Lets the copy make steps that the script has made, and measures both."""
        if self.copy is None or not steps:
            return
        stand_ins = self.recorder.stand_ins
        updates = self.watcher.updates
        copies = self.copies()
        before, after = [], []
        numbers = joined(copies)
        with self.copy.alone():
            for update, step in enumerate(steps, updates - len(steps) + 1):
                if step.change is not None:
                    self.displace(step.change)
                    numbers = joined(copies)
                before.append(numbers)
                for x, gradient in zip(stand_ins.tensors, step.gradients, strict=True):
                    x.grad = gradient
                self.attempt(f"failed in step {update}", self.copy.step, step.optimizer)
                if self.copy is None:
                    return
                numbers = joined(copies)
                after.append(numbers)
        copy = stand_ins.farthest(torch.stack(before), torch.stack(after))
        script = torch.stack([step.farthest for step in steps])
        for row in torch.stack((script, copy), 1):
            self.tape.append(row)
        self.rates += [step.rates for step in steps]
        if not self.bytes:
            sizes = self.watcher.sample.sizes.tolist()
            stand_for = [[sizes[t] for t in part] for part in stand_ins.parts]
            self.bytes, self.in_float32 = memory(
                self.copy.optimizer, self.copies(), stand_for, self.blocks.fixed
            )
        if updates % self.length == 0:
            self.end_window()

    def displace(self, change: torch.Tensor) -> None:
        """Moves the copy as other code has moved the script's numbers [N] between two steps. The
        window then begins so far away that its way is the same as without that."""
        stand_ins = self.recorder.stand_ins
        weights = self.weights()
        for copy, part in zip(self.copies(), stand_ins.split(change), strict=True):
            copy += part.to(copy.dtype)
        moved = self.weights() - weights
        moved[0] = change[stand_ins.positions]
        self.start += moved

    def look_back(self) -> None:
        """Looks at the steps since it did so last. A step that is longer than 10 of the script's
        longest ones is a leap. A copy whose weights are no longer finite ends."""
        if not self.rates:
            return
        steps = self.tape.take().cpu().numpy()  # [updates, 2, T]
        rates = np.broadcast_to(np.stack(self.rates)[:, None], steps.shape)
        self.rates = []
        steps = np.divide(steps, rates, out=np.zeros_like(steps), where=rates > 0)
        script, copy = steps.swapaxes(0, 1)
        first = self.watcher.updates - len(steps) + 1
        finite = np.isfinite(copy).all(1)
        if not finite.all():
            last = int(finite.argmin())
            copy[last + 1 :] = 0
            self.diverged = first + last
            self.copy = None
        so_far = np.append(self.longest[0].max(), script.max(1))
        limits = 10 * np.maximum.accumulate(so_far)[1:]
        leaps = (copy.max(1) > limits) & (limits > 0)
        self.leaps += (first + np.flatnonzero(leaps)).tolist()
        self.longest = np.maximum(self.longest, steps.max(0))

    def end_window(self) -> None:
        """Measures the window, and begins the next one.

        A number drifts in a window if float32 leaves it alone, and the copy moves it by more than a
        tenth of how far float32 moves the numbers of its tensor (root mean square) in the window
        with the longest way so far. A shorter way may be the rounding of a difference, or the end
        of a momentum, which float32 has rounded away a bit earlier.
        """
        self.look_back()
        if self.copy is None:
            return
        sample = self.recorder.stand_ins.sample
        weights = self.weights()
        true, moved = (weights - self.start).cpu().numpy()
        lost = (moved == 0) & (true != 0)
        self.ruler.add(moved[None], true, lost[None])
        lengths = np.sqrt(sample.mean(np.square(true)))  # [T]
        self.longest_ways = np.maximum(self.longest_ways, lengths)
        drifts = (true == 0) & (np.abs(moved) > 0.1 * self.longest_ways[:, None])
        self.drifted.append(float(np.average(sample.mean(drifts), weights=sample.sizes)))
        self.start = weights

    def findings(self, tolerates: tuple[float, float]) -> list[Finding]:
        """The finding of the copy, without a cure."""
        if self.reason:
            entry = split_entry(self.entry.text)
            return [Finding(self.watcher.name, *entry, NOT_JUDGED, self.reason)]
        self.look_back()
        (finding,) = super().findings(tolerates)
        if self.diverged:
            why = f"its weights became infinite or NaN at update {self.diverged}"
            finding = finding._replace(verdict="diverges", why=why)
        if not self.bytes:
            return [finding]
        own, longest = self.longest.max(1).tolist()
        tensors = len(self.watcher.references)
        finding = finding._replace(longest_step=longest, bytes_per_parameter=self.bytes)
        if (finding.rate, finding.noise, longest, self.in_float32) == (1, 0, own, tensors):
            finding = finding._replace(why=f"{SAME}: its steps are equal, bit for bit")
        if self.leaps:
            tensor = self.watcher.tensor_names[int(self.longest[1].argmax())]
            times = "once" if len(self.leaps) == 1 else f"{len(self.leaps)} times"
            leap = (
                f"it leaps {times} in {self.watcher.updates} updates, first at {self.leaps[0]}, "
                f"farthest in {tensor}"
            )
            finding = finding.worsened("leaps", leap)
        remarks = [*dict.fromkeys(self.remarks)]
        if self.drifted and (drifted := float(np.mean(self.drifted))) > 0.01:
            remarks.append(f"{drifted:.0%} of the numbers move although float32's stand still")
        decay = self.decay_rate()
        arrives = f"{decay:.2f} of the weight decay arrives"
        if decay < tolerates[0] or decay > tolerates[1]:
            finding = finding.worsened("frozen tensors" if decay < 1 else "faster", arrives)
        elif abs(decay - 1) > 0.1:
            remarks.append(arrives)
        remarks += [
            f"longest step {longest:,.3g} learning rates (float32 {own:,.3g})",
            f"{self.bytes:.3g} bytes a parameter",
        ]
        if self.in_float32:
            remarks.append(f"{self.in_float32} of {tensors} tensors stay in float32")
        followed = len(self.recorder.numbers)
        total = self.watcher.sample.sizes.sum()
        if followed < total:
            remarks.append(f"all this on {followed:,} of {total:,} numbers")
            if self.blocks.codes and not self.leaps:
                remarks.append('perhaps "leaps" in the others')
        elif not self.blocks.size and self.watcher.sample.sizes.max() > LEAST:
            remarks.append(
                "it ran on whole tensors, because a step on blocks of them is another one: "
                f"{self.bytes * total / 1e6:,.3g} MB"
            )
        return [finding._replace(why="; ".join([finding.why, *remarks]))]

    def decay_rate(self) -> float:
        """Which share of the weight decay arrives; NaN without weight decay.

        The script's class in float32 and the real optimizer both train a tensor of 64 x 64 numbers
        with gradients of 0, at the training's mean learning rate, in the group with the most weight
        decay. Weight decay is all that moves it. The share is <d', d> / <d, d>, as for every rate.
        """
        optimizer = self.watcher.optimizer
        rates = self.recorder.learning_rates / self.watcher.updates
        decays = [
            float(group.get("weight_decay") or 0) * lr
            for group, lr in zip(self.watcher.groups, rates, strict=False)
        ]
        if not any(decays):
            return np.nan
        number = int(np.argmax(decays))
        # Until weight decay has taken a tenth, but within limits
        steps = int(np.clip(0.1 / decays[number], 64, 256))
        start = noise(32, torch.Generator(device="cpu").manual_seed(0)).view(64, 64)
        start = start.to(self.watcher.device)
        settings = {**self.watcher.groups[number], "params": [start], "lr": rates[number]}
        gradients = [[torch.zeros_like(start)]] * steps
        own = RealOptimizer("model=fp32", "", {}, "", {}, False)
        moved = []
        try:
            for entry in (own, self.entry):
                (end,) = trained(entry, optimizer, settings, gradients).parameters.values()
                moved.append(end.detach().float() - start.to(end.dtype).float())
        except Exception:  # the decay is a note; the rate stands without it
            return np.nan
        true, with_real = moved
        return float((with_real * true).sum() / true.square().sum())


def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The numbers of tensors as one row [N]."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])
