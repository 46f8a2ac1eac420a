"""`python -m fp8rl.doctor keep`: trains a script with places really kept in few bits."""

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from ..bits import adam
from ..bits.catalogue import read_real_optimizer, split_real
from ..bits.notation import OPERANDS, STATE, SUMS
from ..bits.operands import Operands
from ..bits.places import places_of
from . import Refusal, first_line, say
from .copies import OptimizerCopy
from .watcher import Hooks, parameters_of


def refuses(method: Callable) -> Callable:
    """A method of `Keep` that ends the script, instead of raising an error that the script may
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


class Keep(Hooks):
    """Keeps places of a script's training in few bits.

    Weights are rounded before the first step and after every step. Adam's moments are rounded in
    its step, which is then taken from the rounded moments. Operands are rounded in the script's
    matmuls. Sums of gradients are rounded whenever a gradient is added, from the second step on. An
    optimizer is first seen when it makes its first step, so the first sum is rounded once.

    A real optimizer trains in place of the script's own. It makes its steps on copies of the
    parameters (copies.py), and the script's parameters get the copies' numbers after every
    step. The script's optimizer still steps, too, but what it does to the weights is overwritten.

    A training that goes on as it is would pass for the changed one. So a script is ended if it
    cannot be changed.
    """

    def __init__(self, formats: str):
        super().__init__()
        self.refusal = ""  # why the script was ended
        emulated, real = split_real(formats)
        self.places = places_of(emulated, (*STATE, *SUMS, *OPERANDS))
        self.real = read_real_optimizer(real[0]) if real else None
        # Random numbers of its own, so that the script draws what it always draws
        self.generator = torch.Generator(device="cpu").manual_seed(0)
        self.kept = {"weights"}  # places that were really kept in few bits
        operands = {name: self.places[name] for name in OPERANDS if name in self.places}
        self.operands = Operands(**operands) if operands else None

    def refuse(self, why: str) -> NoReturn:
        """Ends the script with exit code 2. Why is said at the end of the process.

        It ends by SystemExit, so its files are closed. A script that catches even this, and trains
        on, is ended at once when it comes here again. In a thread, SystemExit ends the thread, and
        the exit code is 2 as well.
        """
        if self.refusal:
            say(f"fp8rl.doctor: {self.refusal}")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # it may be closed, or no stream at all
                    stream.flush()
            os._exit(2)
        self.refusal = why
        raise SystemExit(2)

    @refuses
    def begin(self, optimizer, name: str) -> OptimizerCopy | None:
        """Returns the copy on which a real optimizer trains, if there is one."""
        self.round_weights(optimizer)
        if "grad" in self.places:
            for p in parameters_of(optimizer):
                if p.grad is not None:
                    self.round_sum(p)
                p.register_post_accumulate_grad_hook(self.after_adding)
        if self.real is None:
            return None
        try:
            copy = OptimizerCopy(self.real, optimizer)
        except ValueError as error:
            raise Refusal(f"{name}: {first_line(error)}") from error
        copy.give_back(optimizer)
        return copy

    @refuses
    def before(self, optimizer, copy: OptimizerCopy | None) -> None:
        if copy is not None:
            copy.take_changes(optimizer)

    @refuses
    def after(self, optimizer, copy: OptimizerCopy | None) -> None:
        self.round_weights(optimizer)
        # A GradScaler tells a fused optimizer by `found_inf` to skip the step.
        if copy is not None and not getattr(optimizer, "found_inf", None):
            with copy.alone():
                copy.step(optimizer)
            copy.give_back(optimizer)

    @refuses
    def after_wrapper(self, optimizer) -> None:
        self.round_weights(optimizer)

    @torch.no_grad()
    def round_weights(self, optimizer) -> None:
        if "weights" not in self.places:
            return
        for p in parameters_of(optimizer):
            row = p.detach().reshape(1, -1)
            rounded = self.places.weights(row.float(), [row.numel()], self.noise(row))
            p.copy_(rounded.view_as(p))

    @refuses
    def after_adding(self, p: torch.Tensor) -> None:
        """Rounds a sum of gradients, after a gradient was added to it."""
        if p.grad is not None:  # another hook of the script may have taken its step already
            self.round_sum(p)
            self.kept.add("grad")

    @torch.no_grad()
    def round_sum(self, p: torch.Tensor) -> None:
        if p.grad.is_sparse:
            raise Refusal("keep can round sums of dense gradients only: leave out grad")
        form = self.places["grad"]
        row = p.grad.reshape(1, -1).float()
        noise = self.drawn(row.shape, row.device) if form.stochastic else None
        p.grad.copy_(form(row, noise).view_as(p.grad))

    def noise(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Noise for the places that are rounded stochastically."""
        shape = (len(self.places.noisy), *row.shape)
        return dict(zip(self.places.noisy, self.drawn(shape, row.device), strict=True))

    def drawn(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Random numbers in [0, 1)."""
        # Whatever the script has set as default type and device
        options = {"generator": self.generator, "dtype": torch.float32, "device": "cpu"}
        return torch.rand(shape, **options).to(device)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().installed())
            if self.operands:
                stack.enter_context(in_all_threads(self.operands))
            if {"m", "v", "root"} & self.places.keys():
                module = importlib.import_module("torch.optim.adam")
                stack.callback(setattr, module, "adam", module.adam)
                module.adam = self.adam
            yield

    @refuses
    @torch.no_grad()
    def adam(
        self,
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        *,
        amsgrad,
        beta1,
        beta2,
        lr,
        weight_decay,
        eps,
        maximize,
        grad_scale=None,
        found_inf=None,
        decoupled_weight_decay=False,
        **options,
    ) -> None:
        """In place of torch.optim.adam.adam: keeps the moments in few bits, and takes its step from
        them."""
        if amsgrad or options.get("has_complex"):
            raise Refusal(
                "keep can round moments only of Adam without amsgrad, with real parameters: "
                "leave out m, v and root"
            )
        if found_inf is not None and found_inf.item():
            return
        self.kept |= {"m", "v", "root"}
        tensors = zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True)
        for p, g, m, v, step in tensors:
            step += 1
            if grad_scale is not None:
                g = g / grad_scale
            if maximize:
                g = -g
            if weight_decay and decoupled_weight_decay:
                p.copy_(adam.with_decoupled_decay(p, lr, weight_decay))
            elif weight_decay:
                g = adam.with_coupled_decay(g, p, weight_decay)
            corrections = adam.bias_corrections(float(step), beta1, beta2)
            (_, m_kept), (_, v_kept) = self.places.moments(
                adam.first_moment(m, g, beta1).reshape(1, -1).float(),
                adam.second_moment(v, g, beta2).reshape(1, -1).float(),
                [p.numel()],
                self.noise(p.reshape(1, -1)),
                adam.full_step_quotient(*corrections),
            )
            m.copy_(m_kept.view_as(m))
            v.copy_(v_kept.view_as(v))
            p.sub_(adam.step(m, v.sqrt(), lr, *corrections, eps))

    def complaint(self) -> str:
        """Says which place could not be kept in few bits; an empty string if all were kept."""
        if self.operands and self.operands.seen:
            self.kept |= {*OPERANDS}
        no_moments = f"only Adam and AdamW have it, and there is {', '.join(self.names)}"
        no_matmul = "the script has no matmul that can be rounded"
        reasons = {
            **dict.fromkeys(OPERANDS, no_matmul),
            **dict.fromkeys(STATE, no_moments),
            "grad": "no gradient was added after the first step",
        }
        missing = [place for place in reasons if place in self.places and place not in self.kept]
        return f"{missing[0]} was not kept: {reasons[missing[0]]}" if missing else ""


@contextlib.contextmanager
def in_all_threads(mode: Operands) -> Iterator[None]:
    """A context of torch in this thread, and in every thread that starts from now on.

    By itself, such a context is one of a single thread, and a script may train in another.
    """
    start = threading.Thread.start

    def run_within(run: Callable[[], None]) -> None:
        with mode:
            run()

    def start_within(thread: threading.Thread) -> None:
        thread.run = functools.partial(run_within, thread.run)
        start(thread)

    thread_of_mode = threading.get_ident()
    mode.__enter__()
    threading.Thread.start = start_within
    try:
        yield
    finally:
        threading.Thread.start = start
        if threading.get_ident() == thread_of_mode:  # the thread that imported torch
            mode.__exit__(None, None, None)
