"""The Doctor: watches an optimizer train in float32, and predicts what few bits would change.

Imagine that the numbers of one place, such as the weights, are kept in few bits, and that
everything else stays as it is. Over a window of updates, let d be how far the weights move in
float32, and d' how far they would move with few bits. Split d' into the part along d and the rest:

    d' = rate d + noise        rate = <d', d> / <d, d>        noise = |d' - d| / |d|

Training with few bits then does about what float32 does at `rate` times the learning rate
(docs/law.md). Whether that matters depends on the training. If it learns equally well at four times
its learning rate, a rate of 4 does no harm. So the doctor reports the rate, and a verdict for the
factors of the learning rate that, by the user's word, the training tolerates.

The rates come from the updates that the training makes anyway, on a sample of each tensor's numbers
(watched_optimizer.py). Effects that only the loss can show need the loss (low_bit_gradients.py).
Running averages, such as target networks, can be followed, too (averages.py), and so can sums of
gradients over micro-batches (gradient_sums.py).

A place and its format are written as in Config's field `formats` (places.py): "weights=bf16",
"v=e4m3:unscaled", "root=e4m3:stochastic". Adam's step is taken from the moments after they are
rounded, with the word `stored` or without it.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from ..bits.notation import (
    OPERANDS,
    PLACES,
    SAMPLE,
    STATE,
    SUMS,
    TOLERATES,
    check_sample,
    check_tolerance,
)
from ..bits.places import PlaceFormat, places_of
from .averages import AVERAGES, Average
from .findings import Finding, Report, with_cures
from .low_bit_gradients import LENGTH as LOOK_LENGTH
from .low_bit_gradients import Operands
from .real_optimizers import is_real, read_real_optimizer
from .sample import tensor_names
from .verdicts import judge, listed
from .watched_copies import WatchedCopies
from .watched_optimizer import WatchedOptimizer

FORMATS = (
    "weights=bf16",
    "weights=bf16:stochastic",
    "weights=fp16",
    "weights=e4m3",
    "weights=e4m3:stochastic",
    "m=bf16",
    "m=e4m3",
    "m=e4m3:unscaled",
    "v=bf16",
    "v=bf16:stochastic",
    "v=fp16:unscaled",
    "v=e5m2",
    "v=e4m3",
    "v=e4m3:unscaled",
    "v=e4m3:stochastic",
    "root=e4m3",
    "root=e4m3:unscaled",
    "root=e4m3:stochastic",
    "forward=bf16",
    "forward=e4m3",
    "forward=e4m3:unscaled",
    "backward=bf16",
    "backward=fp16:unscaled",
    "backward=e5m2",
    "backward=e5m2:unscaled",
    "backward=e4m3",
    "backward=e4m3:unscaled",
)


def read_format(text: str, names: tuple[str, ...]) -> tuple[str, PlaceFormat, str]:
    """Reads the place and format of an entry such as "weights=bf16". Returns them with the text.

    Raises the errors of `places_of`, and ValueError unless the text has one entry.
    """
    entries = [*places_of(text, names).items()]
    if len(entries) != 1:
        raise ValueError(
            f"formats has {text!r}: give each place and format once, as a string of its own"
        )
    place, form = entries[0]
    return place, form, text


class Doctor:
    """Watches one or more optimizers from now on, and reports which formats would change training.

        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> doctor = Doctor(optimizer, model=model)
        >>> for _ in range(64):
        ...     model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> doctor.report().require("weights=bf16:stochastic")

    `watched`    the optimizers to watch. A wrapper is seen through: what it has as `optimizer` or
                 `base_optimizer` is watched.
    `formats`    the places and formats to judge. Formats of operands are judged only if `look` is
                 called. For an optimizer that is not Adam or AdamW, or that uses amsgrad, only
                 weights are judged, and of SGD sums of gradients. An optimizer whose step is not in
                 proportion to its learning rate, such as LBFGS, is not judged.
    `optimizers` real optimizers that make the same steps on copies of the parameters, and are
                 judged by these: "torchao-8bit", "torch.optim:Adam:bf16:fused", "model=bf16", ...
                 (real_optimizers.py). Each needs the memory of the parameters and of its state.
    `tolerates`  lowest and highest factor of the learning rate at which this training learns
                 equally well; the default is half and four times
    `length`     updates in a window
    `sample`     how many numbers of each optimizer are followed at least: equally many of each
                 tensor, and at least 64 of each. The more there are, the smaller are the standard
                 errors of the rates. The doctor keeps 4 (length + 17) bytes for each of these
                 numbers and each format.
    `names`      names of the optimizers in reports
    `model`      a module, or several, whose names of parameters are used in reports

    Parameters that join later, by `requires_grad_` or `add_param_group`, have findings of their
    own, whose name of the optimizer says from which update they hold. Parameters that are not
    float32 are named in a note.

    A doctor keeps no optimizer, parameter or module alive. What the script has dropped is judged by
    what was measured until then.

    Raises ValueError for something that is no optimizer, for a format that `places_of` refuses, for
    a format in blocks or given twice, if no parameter is float32, and for an option that makes no
    sense.
    """

    def __init__(
        self,
        *watched: torch.optim.Optimizer,
        formats: Iterable[str] = FORMATS,
        optimizers: Iterable[str] = (),
        tolerates: tuple[float, float] = TOLERATES,
        length: int = 32,
        sample: int = SAMPLE,
        seed: int = 0,
        names: Iterable[str] = (),
        model: nn.Module | Iterable[nn.Module] = (),
    ):
        if not watched:
            raise ValueError("optimizers are missing: give one or more of torch.optim")
        names = [*names] or [f"optimizer {i}" for i in range(len(watched))]
        # "torchao-8bit" stands for "optimizer=torchao-8bit"
        optimizers = [
            text if "=" in text.split(":")[0] else f"optimizer={text}" for text in optimizers
        ]
        self.formats = (*formats, *optimizers)
        if len(self.formats) != len({*self.formats}):
            raise ValueError(
                f"formats is {' '.join(self.formats)!r}: give each place and format once, "
                "as a string of its own"
            )
        if type(length) is not int or length < 1:
            raise ValueError(f"length is {length!r}: use a whole number of updates, at least 1")
        check_sample(sample)
        self.tolerates = check_tolerance(tolerates)
        real = [read_real_optimizer(text) for text in self.formats if is_real(text)]
        emulated = [text for text in self.formats if not is_real(text)]
        entries = [read_format(text, (*STATE, *SUMS, *OPERANDS)) for text in emulated]
        self.operands: dict[str, Operands] = {}
        state = []
        for place, form, text in entries:
            if place in OPERANDS:
                self.operands[text] = Operands(**{place: form})
            else:
                state.append((place, form, text))
        modules = [model] if isinstance(model, nn.Module) else [*model]
        self.modules = [weakref.ref(module) for module in modules]
        self.watched = []
        self.copies: dict[str, WatchedCopies] = {}  # by the name of their optimizer
        for name, wrapped in zip(names, watched, strict=True):
            optimizer = innermost_optimizer(wrapped)
            watched_one = WatchedOptimizer(name, optimizer, modules, state, length, sample, seed)
            watched_one.attach()
            self.watched.append(watched_one)
            if real and watched_one.is_in_proportion:
                self.copies[name] = WatchedCopies(
                    name,
                    optimizer,
                    watched_one.parameters,
                    watched_one.tensor_names,
                    real,
                    length,
                    watched_one.sample,
                )
                watched_one.hooks += self.copies[name].install(optimizer)
        self.real = [entry.text for entry in real]
        self.averages: dict[str, Average] = {}

    @classmethod
    def of(cls, model, **options) -> "Doctor":
        """A doctor of all optimizers of an object, such as a model of Stable-Baselines3.

        The optimizers are attributes of the object or of its attributes. Raises ValueError if there
        is none.
        """
        named_optimizers = {}
        for name, part in {"": model, **vars(model)}.items():
            for attribute, value in vars(part).items() if hasattr(part, "__dict__") else ():
                if isinstance(value, torch.optim.Optimizer):
                    full_name = f"{name}.{attribute}".lstrip(".")
                    optimizer = innermost_optimizer(value)
                    named_optimizers.setdefault(id(optimizer), (full_name, optimizer))
        if not named_optimizers:
            raise ValueError(
                f"model is a {type(model).__name__} without optimizers: give them to Doctor itself"
            )
        names, optimizers = zip(*named_optimizers.values(), strict=True)
        return cls(*optimizers, names=names, **options)

    @property
    def is_watching(self) -> bool:
        return bool(self.watched[0].hooks)

    def look(
        self,
        loss: Callable[[], torch.Tensor],
        optimizer: str | None = None,
        others: dict[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:
        """Judges formats whose effect only the loss can show, such as those of operands.

        Call it before every update, where the update's loss is computed.

            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            >>> doctor, x = Doctor(optimizer), torch.randn(8, 4)
            >>> for _ in range(80):
            ...     doctor.look(lambda: model(x).square().mean())
            ...     optimizer.zero_grad()
            ...     model(x).square().mean().backward()
            ...     optimizer.step()
            >>> doctor.report().require("forward=bf16", "backward=e5m2")

        `loss`       a function that returns the update's loss, a scalar with gradient. It must not
                     change anything (batch normalization in training would count its batch again).
        `optimizer`  name of the optimizer that steps on this loss, if the doctor has several
        `others`     functions that return the loss with something else in few bits, by place and
                     format, as in {"targets=e4m3": function}

        The doctor looks at 8 updates in a row, from update 32, 64, 128, ... on. Otherwise `look`
        returns at once. The gradient of the loss must be the training's, up to a factor such as a
        scaled loss or a clipped norm. Otherwise the optimizer's step raises ValueError.
        """
        chosen = [watched for watched in self.watched if optimizer in (None, watched.name)]
        if len(chosen) != 1:
            names = ", ".join(watched.name for watched in self.watched)
            raise ValueError(f"optimizer is {optimizer!r}: choose from {names}")
        losses = {text: partial(mode.within, loss) for text, mode in self.operands.items()}
        losses |= others or {}
        if wrong := [name for name in losses if "=" not in name]:
            raise ValueError(
                f"others has {wrong[0]!r}: name each by place and format, as in targets=e4m3"
            )
        if losses and self.is_watching:
            chosen[0].looks.look({"": loss, **losses})

    def follow(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        rate: float | Callable[[], float],
        formats: Iterable[str] = AVERAGES,
        sample: int = SAMPLE,
    ) -> None:
        """Judges a running average x <- (1 - rate) x + rate new, such as a target network.

        `name`     name of the average in reports, which must not be a place
        `tensors`  its tensors, float32, which other code updates
        `rate`     a number above 0 and up to 1, or a function without arguments that returns it
        `sample`   as of Doctor

        The doctor reads the average before each step of the first optimizer. Between two steps, it
        may be updated once. Raises ValueError for other tensors, rates and names.
        """
        tensors = [x for x in tensors if x.numel()]
        check_sample(sample)
        types = {str(x.dtype) for x in tensors}
        if types != {"torch.float32"}:
            listed = ", ".join(sorted(types)) or "none"
            raise ValueError(f"tensors of {name} are {listed}: give float32")
        if not callable(rate) and not (isinstance(rate, float | int) and 0 < rate <= 1):
            raise ValueError(
                f"rate is {rate!r}: give a number above 0 and up to 1, "
                "or a function without arguments that returns it"
            )
        places = (*PLACES, *SUMS)
        if name in places or "=" in name:
            raise ValueError(
                f"name is {name!r}: choose a name without = that is none of {', '.join(places)}"
            )
        entries = []
        for form in formats:
            _, kept_as, _ = read_format(f"weights={form}", STATE)
            entries.append((f"{name}={form}", kept_as))
        modules = [module for reference in self.modules if (module := reference()) is not None]
        names = tensor_names(tensors, modules)
        first = self.watched[0]
        average = Average(rate, tensors, names, entries, first.length, sample)
        self.averages[name] = average
        if (optimizer := first.optimizer) is not None:
            look = torch.compiler.disable(average.look)
            first.hooks.append(optimizer.register_step_pre_hook(look))

    def stop(self) -> None:
        """Stops watching. The report stays."""
        for watched in self.watched:
            for hook in watched.hooks:
                hook.remove()
            watched.hooks = []

    def report(self) -> Report:
        """The findings so far."""
        report = Report()
        for watched in self.watched:
            for part in watched.parts:
                report += with_cures(self.findings_of(part, watched.follows_all))
            report.notes += notes_on_tensors(watched)
            if self.real and watched.name not in self.copies:
                report.notes.append(
                    f"{watched.name}: real optimizers are not judged: its step is not in "
                    "proportion to its learning rate"
                )
            if not watched.names:
                if trouble := watched.trouble():
                    report.notes.append(f"{watched.name}: not judged: {trouble}")
            elif not watched.is_adam and watched.is_in_proportion:
                report.notes.append(
                    f"{watched.name}: only its weights are judged: "
                    "moments are followed of Adam and AdamW without amsgrad"
                )
        for average in self.averages.values():
            report += average.findings("average", self.tolerates)
        return report

    def findings_of(self, watched: WatchedOptimizer, for_a_twin: bool) -> list[Finding]:
        """The findings of an optimizer, in the order of the formats, without cures.

        `for_a_twin`  whether they have the rates of tensors in each part of the training, by which
                      a twin trains. It needs those of all tensors.
        """
        by_text = {}
        for part, looked in ((watched, False), (watched.looks, True)):
            for i, text in enumerate(part.names):
                free, trials, free_numbers = [], [], None
                if not looked:
                    trials = [sums.of_row(i) for sums in watched.trials]
                if not looked and text in watched.free_names:
                    row = watched.free_names.index(text)
                    free = [sums.of_row(row) for sums in watched.free_windows]
                    free_numbers = watched.free_numbers.of_row(row)
                by_text[text] = judge(
                    watched.name,
                    text,
                    [sums.of_row(i) for sums in part.windows],
                    watched.sample,
                    watched.tensor_names,
                    self.tolerates,
                    LOOK_LENGTH if looked else watched.length,
                    looked,
                    free=free,
                    trials=trials,
                    numbers=part.numbers.of_row(i),
                    free_numbers=free_numbers,
                )
        if watched.sums is not None:
            by_text |= watched.sums.findings(self.tolerates)
        if watched.name in self.copies:
            for finding in self.copies[watched.name].findings(self.tolerates):
                by_text[finding.text] = finding
        order = dict.fromkeys([*self.formats, *by_text])
        findings = [by_text[text] for text in order if text in by_text]
        trouble = watched.trouble()
        if trouble:
            findings = [
                finding._replace(verdict="not judged", why=trouble, cure="") for finding in findings
            ]
        if trouble or not for_a_twin:
            nothing = {"tensor_rates": (), "tensor_noise": (), "free_tensor_rates": ()}
            findings = [finding._replace(**nothing) for finding in findings]
        return findings


def notes_on_tensors(watched: WatchedOptimizer) -> list[str]:
    """Lines on tensors that are not judged, or not to the end."""
    notes = []
    if not watched.is_in_proportion:
        return notes
    if watched.not_float32:
        named = [f"{name} ({dtype})" for name, dtype in watched.not_float32.items()]
        notes.append(f"{watched.name}: not judged, because not float32: {listed(named)}")
    for part in watched.parts:
        stopped = part.stopped_learning()
        if stopped.any():
            named = [name for name, off in zip(part.tensor_names, stopped, strict=True) if off]
            notes.append(f"{part.name}: judged until they stopped learning: {listed(named)}")
    return notes


def innermost_optimizer(optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the steps: the one given, or the one that a wrapper has inside.

    Libraries wrap an optimizer, as Accelerate and Lookahead do, or have a base optimizer, as SAM
    does. The wrapper may be an Optimizer by class without being one that steps or has hooks.
    Raises ValueError for anything else.
    """
    wrapped = optimizer
    seen = []  # so that a wrapper inside itself ends the search
    while wrapped not in seen and (inner := optimizer_inside(wrapped)) is not None:
        seen.append(wrapped)
        wrapped = inner
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
    """The optimizer that a wrapper has as `optimizer` or `base_optimizer`, or None."""
    if not is_like_optimizer(wrapper):
        return None
    for name in ("optimizer", "base_optimizer"):
        inner = getattr(wrapper, name, None)
        if inner is not wrapper and is_like_optimizer(inner):
            return inner
    return None


def is_like_optimizer(x) -> bool:
    """Whether something is an optimizer or a wrapper of one, by what can be done with it."""
    return (
        not isinstance(x, type) and callable(getattr(x, "step", None)) and hasattr(x, "zero_grad")
    )
