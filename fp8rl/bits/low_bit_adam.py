"""Adam whose moments, and the weights themselves, are stored in few bits: for any module with
float32 parameters.

A tensor is stored as codes, numbers of one of torch's float8 or 16-bit types (float32 for a format
that torch has no type for), and scales, float32 powers of two: one for the tensor or one for each
block of 32. Of 4 bytes a parameter for weights and 8 for moments there remain 1 and 2, in 16 bits 2
and 4, and 4 for each scale.

    moments    A step unpacks and updates them, uses them, and only then rounds them (as torchao's
               low-bit optimizers do; blocks
               with scales: Dettmers et al. 2022, arXiv:2110.02861). The root of v needs half of v's
               range of exponents (Bjorck
               et al. 2021, arXiv:2102.13565).
               They are rounded so that no step becomes much longer than float32's
               (`Places.moments`), unless the word
               `independent` asks for each to be rounded by itself.
    weights    A step is often far smaller than the distance from a number to the next, and rounding
               to the nearest would undo it.
               Stochastic rounding is right in the mean (Gupta et al. 2015, arXiv:1502.02551),
               without a float32 copy.
    in use     No layer computes with codes. They are unpacked into the parameters for a forward
               pass and until the step after
               it, as FSDP gathers parameters and frees them (Zhao et al. 2023, arXiv:2304.11277).
               So in use there are float32
               weights, gradients and activations, and in a step one tensor's moments and 4 bytes of
               noise for each number that is
               rounded stochastically. What is saved is what lies between calls.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..fp8 import power_of_two_scale
from .formats import DTYPES, blocks, unblocked
from .places import BLOCK, NONE, STATE, PlaceFormat, noises, places_of

# What torch's Adam and AdamW have besides. They may be given with a value that asks for nothing.
OPTIONS_OF_ADAM = (
    "amsgrad",
    "capturable",
    "differentiable",
    "foreach",
    "fused",
    "decoupled_weight_decay",
)
Row = tuple[torch.Tensor, torch.Tensor | None]


def pack(x: torch.Tensor, kept: PlaceFormat | None) -> Row:
    """Stores a float32 tensor that is rounded already: codes of its shape, and scales [] or
    [blocks], or None."""
    dtype = DTYPES.get(kept.format.name, torch.float32) if kept else torch.float32
    if dtype == torch.float32 or not kept.scaled:
        return x.to(dtype, copy=True), None
    flat = x.flatten()
    rows = blocks(flat, BLOCK) if kept.block else flat
    scale = power_of_two_scale(rows.abs().amax(-1), kept.format.largest)
    rows = rows / scale.unsqueeze(-1)
    return (unblocked(rows, flat) if kept.block else rows).view(x.shape).to(dtype), scale


def unpack(codes: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 tensor that `pack` stored, in memory of its own."""
    x = codes.to(torch.float32, copy=True)
    if scale is None or not scale.dim():
        return x if scale is None else x.mul_(scale)
    return unblocked(blocks(x.flatten(), BLOCK) * scale.unsqueeze(-1), x.flatten()).view(x.shape)


@dataclass
class Hook:
    """Calls a method of the optimizer. A deep copy of the module gets its weights, and hooks that
    do nothing."""

    optimizer: "LowBitAdam"
    method: str

    @torch._disable_dynamo  # compiled, it would change copies of what it changes
    def __call__(self, *_) -> None:
        getattr(self.optimizer, self.method)()

    def __deepcopy__(self, memo: dict) -> Callable:
        for p in self.optimizer.parameters if not self.optimizer.filled else ():
            copy.deepcopy(p, memo).data = unpack(*self.optimizer.stored(p, "weights"))
        return lambda *_: None


class LowBitAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) with formats of places.py for weights, m, and v or
    its root; without one they are float32. `weight_decay` is decoupled, as in AdamW (Loshchilov &
    Hutter 2019, arXiv:1711.05101): it multiplies the weights by 1 - lr weight_decay before the
    step, and what comes of both is rounded once. `maximize` climbs. Other options of torch's Adam
    are refused. Weights are first rounded to the nearest. Change them in place, under
    `torch.no_grad()` and after `attach` within `unpacked`: a change of a parameter's `.data` is not
    seen.

    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = LowBitAdam(model.parameters(), weights="e4m3:stochastic", m="e4m3", root="e4m3")
    >>> optimizer.attach(model)  # its parameters are empty now, except in use; without this only moments save memory
    >>> model(torch.randn(8, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> print(optimizer.describe().splitlines()[-1])
    stored: 3.01 bytes a parameter, 3.00 without scales
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        maximize=False,
        seed=0,
        **formats: str | None,
    ):
        if unknown := [name for name in formats if name in OPTIONS_OF_ADAM and formats[name]]:
            raise ValueError(
                f"{unknown[0]} is {formats[unknown[0]]}: leave it out, LowBitAdam does not have it"
            )
        formats = {name: text for name, text in formats.items() if name not in OPTIONS_OF_ADAM}
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay is {weight_decay}: use 0 or more")
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"lr, eps and betas are {lr}, {eps} and {betas}: use at least 0, and betas below 1"
            )
        named = dict.fromkeys(STATE) | formats  # in one order
        self.formats = " ".join(
            f"{name}={text}" for name, text in named.items() if text or name not in STATE
        )
        self.places, self.seed = places_of(self.formats, STATE), seed
        self.second = "root" if "root" in self.places else "v"
        self.versions: dict[
            torch.Tensor, int
        ] = {}  # torch's counts of in-place changes, when weights were packed
        self.parameters: list[torch.Tensor] = []  # in the order of the groups
        # filled: they hold their weights. depth: calls that are using them. pending: a backward
        # pass and a step are due.
        self.filled, self.attached, self.depth, self.pending = True, False, 0, False
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """As in torch. Raises ValueError for a parameter that is empty or not float32."""
        self.fill()
        super().add_param_group(param_group)
        new = self.param_groups[-1]["params"]
        if bad := [
            f"{p.dtype} {list(p.shape)}" for p in new if p.dtype != torch.float32 or not p.numel()
        ]:
            self.param_groups.pop()
            raise ValueError(f"a parameter is {bad[0]}: use float32 parameters that are not empty")
        self.parameters += new
        for p in new:
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
            for name in ("m", self.second):
                self.store(p, name, torch.zeros_like(p))
        self.sync()
        self.release()

    def store(self, p: torch.Tensor, name: str, x: torch.Tensor) -> None:
        """Packs weights, m, v or root, rounded already; in a new dictionary, because a state_dict
        holds the old one."""
        codes, scale = pack(x.detach().view(p.shape), self.places.get(name))
        self.state[p] = {**self.state[p], name: codes} | (
            {} if scale is None else {f"{name}_scale": scale}
        )

    def stored(self, p: torch.Tensor, name: str) -> Row:
        """Codes, and scales or None, of weights, m, or v (its root, if that is kept). Weights
        without a format are those in the parameter."""
        name = self.second if name == "v" else name
        return self.state[p].get(name, p.detach()), self.state[p].get(f"{name}_scale")

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Adam's step of all parameters that have a gradient. After `attach`, frees weights and
        gradients."""
        with torch.enable_grad():
            loss = closure() if closure else None
        drawn, noise = functools.cache(self.noise), {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise[p] = drawn(int(self.state[p]["step"]))[p]
                    self.update(p, group, noise[p])
        self.sync(noise)
        self.pending = False
        self.release()
        return loss

    def noise(self, update: int) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Each parameter's noise for the update after `update` others, [1, P] for each place that
        is rounded stochastically."""
        sizes = [p.numel() for p in self.parameters]
        drawn = noises(
            self.places,
            torch.tensor([self.seed], device="cpu"),
            update,
            sum(sizes),
            self.parameters[0].device,
        )
        parts = {name: x.split(sizes, dim=1) for name, x in drawn.items()}
        return {
            p: {name: own[i].to(p.device) for name, own in parts.items()}
            for i, p in enumerate(self.parameters)
        }

    def update(self, p: torch.Tensor, group: dict, noise: dict[str, torch.Tensor]) -> None:
        """One parameter's step, on rows [1, P]; its weights are not rounded yet."""
        (beta1, beta2), size = group["betas"], [p.numel()]
        step = self.state[p]["step"] + 1
        rate, correction = (1 - beta1**step).reciprocal() * -group["lr"], (1 - beta2**step).sqrt()
        grad = -p.grad if group["maximize"] else p.grad
        g, m, v = (
            x.reshape(1, -1)
            for x in (grad, *(unpack(*self.stored(p, name)) for name in ("m", "v")))
        )
        v = v.square_() if self.second == "root" else v
        m, v = m.lerp_(g, 1 - beta1), v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        limit = (
            1 - beta1**step
        ) / correction  # of |m| / sqrt(v), where the step is as long as the learning rate
        (m, m_kept), (v, v_kept) = self.places.moments(m, v, size, noise, limit.to(m.device))
        row = p.reshape(1, -1)
        if group[
            "weight_decay"
        ]:  # of the weights before they are rounded, or a small decay would always be lost
            row = row * (1 - group["lr"] * group["weight_decay"])
        row = row.addcdiv(m * rate, v.sqrt().div_(correction).add_(group["eps"]))
        self.state[p] = {**self.state[p], "step": step}
        self.store(p, "m", m_kept)
        self.store(p, self.second, v_kept.sqrt() if self.second == "root" else v_kept)
        p.copy_(row.view(p.shape))

    @torch.no_grad()
    def sync(self, noise: dict[torch.Tensor, dict[str, torch.Tensor]] = NONE) -> None:
        """Rounds and packs weights that have been changed in place, by a step or by others, if
        weights have a format."""
        for p in self.parameters if self.filled and "weights" in self.places else ():
            if self.versions.get(p) != p._version:
                p.copy_(
                    self.places.weights(p.reshape(1, -1), [p.numel()], noise.get(p, NONE)).view(
                        p.shape
                    )
                )
                self.store(p, "weights", p)
                self.versions[p] = p._version

    @torch.inference_mode(False)  # in that mode there would be tensors that autograd refuses
    def fill(self) -> None:
        """Unpacks the weights into the parameters, if these are empty."""
        if not self.filled:
            for p in self.parameters:
                p.data, self.versions[p] = unpack(*self.stored(p, "weights")), p._version
            self.filled = True

    @torch.inference_mode(False)
    def release(self) -> None:
        """After `attach`, frees weights and gradients unless they are in use: the parameters hold
        nothing then."""
        if self.attached and not (self.depth or self.pending):
            self.sync()
            for p in self.parameters:
                p.grad, p.data = None, p.data.new_empty(0)
            self.filled = False

    # What the hooks of a module call, beside `fill` and `release`.

    def touch(self) -> None:
        """Before any layer's forward. With gradients, the backward pass will need the weights,
        too."""
        self.fill()
        self.pending |= torch.is_grad_enabled()

    def enter(self) -> None:
        self.depth += 1
        self.fill()

    def leave(self) -> None:
        self.depth -= 1
        self.release()

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """The parameters hold their weights within. At its end they are emptied, unless a backward
        pass was due before it."""
        before = self.pending
        self.enter()
        try:
            yield
        finally:
            self.pending &= before
            self.leave()

    def attach(self, *modules: nn.Module) -> None:
        """Lets the parameters hold their weights only in use, if weights have a format. Forward of
        a module or of any layer in it fills them, as do state_dict and load_state_dict. A module's
        forward without gradients empties them, and so does a step. Whatever else reads them does so
        within `unpacked`. A deep copy of a module is an ordinary one, in float32."""
        if "weights" not in self.places:
            return
        fill, touch, enter, leave, release = (
            Hook(self, name) for name in ("fill", "touch", "enter", "leave", "release")
        )
        for module in modules:
            for layer in module.modules():
                layer.register_forward_pre_hook(touch, prepend=True)
                layer.register_state_dict_pre_hook(fill)
                layer.register_load_state_dict_pre_hook(fill)
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)  # after an exception, too
            module.register_state_dict_post_hook(release)
            module.register_load_state_dict_post_hook(release)
        self.attached = True
        self.release()

    def state_dict(self) -> dict:
        """As in torch, and the formats. Later steps do not change it."""
        self.sync()
        return {**super().state_dict(), "formats": self.formats}

    def load_state_dict(self, state_dict: dict) -> None:
        """As in torch. Raises ValueError, and changes nothing, for a state of other formats or of
        other parameters."""
        own, fits = [self.state[p] for p in self.parameters], False
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            saved = [
                state_dict["state"][i]
                for group in state_dict["param_groups"]
                for i in group["params"]
            ]
            kinds = [
                [{name: (x.shape, x.dtype) for name, x in one.items()} for one in states]
                for states in (own, saved)
            ]
            fits = state_dict["formats"] == self.formats and kinds[0] == kinds[1]
            fits = fits and all(
                0 <= float(one["step"]) < 2**32 for one in saved
            )  # it counts the draws of noise
        if not fits:
            what = f"one of these parameters with formats {self.formats!r}"
            raise ValueError(f"the state is not {what}: resume with its own formats")
        super().load_state_dict(
            {**state_dict, "state": {}}
        )  # with codes, torch would make them float32
        for p, mine, new in zip(self.parameters, own, saved, strict=True):
            self.state[p] = {name: x.to(mine[name].device, copy=True) for name, x in new.items()}
        if self.filled and "weights" in self.places:
            self.filled = False
            self.fill()

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a LowBitAdam cannot be copied or pickled: build another and load its state_dict"
        )

    def describe(self) -> str:
        """The type and size of all that is stored, and bytes a parameter, counted and as the
        formats predict."""
        self.sync()
        lines, counted, predicted = [], 0, 0
        for name, label in {
            "weights": "weights",
            "m": "m",
            "v": "root of v" if self.second == "root" else "v",
        }.items():
            codes, scales = zip(*(self.stored(p, name) for p in self.parameters), strict=True)
            size, of_scales = (
                sum(x.nbytes for x in part if x is not None) for part in (codes, scales)
            )
            counted, predicted = counted + size + of_scales, predicted + codes[0].itemsize
            kind = str(codes[0].dtype).removeprefix("torch.")
            lines.append(
                f"{label}: {len(codes)} tensors, {kind}, {size:,} bytes and {of_scales:,} of scales"
            )
        counted /= sum(x.numel() for x in codes)
        return "\n".join(
            [*lines, f"stored: {counted:.2f} bytes a parameter, {predicted:.2f} without scales"]
        )
