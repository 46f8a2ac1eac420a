"""Adam whose moments, and the weights themselves, are stored in few bits.

It trains any module with float32 parameters. A tensor is stored as codes and scales. Codes are
numbers of one of torch's float8 or 16-bit types, or float32 for a format that torch has no type
for. Scales are float32 powers of two: one for the tensor, or one for each block of 32 numbers.
float32 takes 4 bytes per parameter for weights and 8 for moments. Formats of 8 bits take 1 and 2,
formats of 16 bits 2 and 4, and each scale takes 4.

    moments    A step unpacks the moments, updates them, uses them, and only then rounds them (as
               torchao's low-bit optimizers do; blocks with scales: Dettmers et al. 2022,
               arXiv:2110.02861). The root of v needs half of v's range of exponents (Bjorck et al.
               2021, arXiv:2102.13565). Moments are rounded so that no step becomes much longer than
               float32's (`Places.moments`). With the word `independent`, a moment is rounded by
               itself.
    weights    A step is often far smaller than the distance from a number to the next, and rounding
               to the nearest would undo it. Stochastic rounding is right in the mean (Gupta et al.
               2015, arXiv:1502.02551), without a float32 copy.
    in use     Layers do not compute with codes. The codes are unpacked into the parameters for a
               forward pass, and until the step after it. FSDP gathers and frees parameters in the
               same way (Zhao et al. 2023, arXiv:2304.11277). So while a model is in use, there are
               float32 weights, gradients and activations. In a step there are also the moments of
               one tensor, and 4 bytes of noise for each number that is rounded stochastically.
               Memory is saved between calls.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .formats import DTYPES, blocks, power_of_two_scale, unblocked
from .places import BLOCK, NO_NOISE, STATE, PlaceFormat, places_of

# Options of torch's Adam and AdamW that LowBitAdam does not have. They may be given with a value
# that asks for nothing.
OPTIONS_OF_ADAM = (
    "amsgrad",
    "capturable",
    "differentiable",
    "foreach",
    "fused",
    "decoupled_weight_decay",
)
Packed = tuple[torch.Tensor, torch.Tensor | None]  # codes, and scales or None


def pack(x: torch.Tensor, form: PlaceFormat | None) -> Packed:
    """Packs a float32 tensor whose numbers are already rounded to a format.

    Returns codes of the tensor's shape, and scales [] or [blocks], or None if there is no scale.
    """
    dtype = DTYPES.get(form.format.name, torch.float32) if form else torch.float32
    if dtype == torch.float32 or not form.scaled:
        return x.to(dtype, copy=True), None
    flat = x.flatten()
    rows = blocks(flat, BLOCK) if form.block else flat
    scale = power_of_two_scale(rows.abs().amax(-1), form.format.largest)
    rows = rows / scale.unsqueeze(-1)
    flat_codes = unblocked(rows, flat) if form.block else rows
    return flat_codes.view(x.shape).to(dtype), scale


def unpack(codes: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 tensor that `pack` packed, in memory of its own."""
    x = codes.to(torch.float32, copy=True)
    if scale is None:
        return x
    if not scale.dim():
        return x.mul_(scale)
    flat = x.flatten()
    return unblocked(blocks(flat, BLOCK) * scale.unsqueeze(-1), flat).view(x.shape)


def seeded_noise(seed: int) -> Callable:
    """A function that draws the noise of stochastic rounding from a seed.

    Its arguments are the number of the update, a shape and a device. It returns float32 numbers,
    uniform in [0, 1), which depend on nothing else. So a training that is resumed draws the same
    numbers.
    """

    def draw(update: int, shape: tuple[int, ...], device) -> torch.Tensor:
        generator = torch.Generator(device)
        # An odd constant, which spreads neighbouring seeds and updates.
        generator.manual_seed((seed * 0x9E3779B97F4A7C15 + update) % 2**63)
        return torch.rand(shape, generator=generator, dtype=torch.float32, device=device)

    return draw


@dataclass
class Hook:
    """A hook of a module, which calls a method of the optimizer.

    A deep copy of the module gets the unpacked weights, and hooks that do nothing.
    """

    optimizer: "LowBitAdam"
    method: str

    @torch._disable_dynamo  # if it were compiled, it would change copies of the parameters
    def __call__(self, *_) -> None:
        getattr(self.optimizer, self.method)()

    def __deepcopy__(self, memo: dict) -> Callable:
        if not self.optimizer.filled:
            for p in self.optimizer.parameters:
                copy.deepcopy(p, memo).data = unpack(*self.optimizer.stored(p, "weights"))
        return lambda *_: None


class LowBitAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) that keeps its state in few bits.

    `weights`, `m`, `v` or `root` (the root of v) are formats of places.py, such as
    "e4m3:stochastic". Without a format, a place is float32. `weight_decay` is decoupled, as in
    AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): the weights are multiplied by
    1 - lr * weight_decay before the step, and the result of both is rounded once. `maximize`
    maximizes the loss. `noise` draws the numbers for stochastic rounding; the default is
    `seeded_noise(seed)`. Other options of torch's Adam are refused.

    The initial weights are rounded to the nearest. To change weights, change them in place, under
    `torch.no_grad()` and, after `attach`, within `unpacked`. A change of a parameter's `.data` is
    not noticed.

    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = LowBitAdam(model.parameters(), weights="e4m3:stochastic", m="e4m3", root="e4m3")
    >>> optimizer.attach(model)  # without this only moments save memory
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
        noise: Callable | None = None,
        **formats: str | None,
    ):
        for name in OPTIONS_OF_ADAM:
            if value := formats.pop(name, None):
                raise ValueError(f"{name} is {value}: leave it out, LowBitAdam does not have it")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay is {weight_decay}: use 0 or more")
        if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
            remedy = "use at least 0, and betas below 1"
            raise ValueError(f"lr, eps and betas are {lr}, {eps} and {betas}: {remedy}")
        in_one_order = dict.fromkeys(STATE) | formats
        self.formats = " ".join(
            f"{name}={form}" for name, form in in_one_order.items() if form or name not in STATE
        )
        self.places = places_of(self.formats, STATE)
        self.has_weights = "weights" in self.places  # whether it keeps the weights, in few bits
        self.second = "root" if "root" in self.places else "v"
        self.draw_noise = noise or seeded_noise(seed)
        self.parameters: list[torch.Tensor] = []  # in the order of the groups
        # torch's count of in-place changes of each parameter, at the time its weights were packed.
        self.versions: dict[torch.Tensor, int] = {}
        self.attached = False  # whether parameters are emptied when they are not in use
        self.filled = True  # whether the parameters hold their weights now
        self.depth = 0  # number of calls that are using the weights
        self.pending = False  # whether a backward pass and a step are still to come
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group of parameters, as in torch.

        Raises ValueError for a parameter that is empty or not float32.
        """
        self.fill()
        super().add_param_group(param_group)
        new_parameters = self.param_groups[-1]["params"]
        for p in new_parameters:
            if p.dtype != torch.float32 or not p.numel():
                self.param_groups.pop()
                remedy = "use float32 parameters that are not empty"
                raise ValueError(f"a parameter is {p.dtype} {list(p.shape)}: {remedy}")
        self.parameters += new_parameters
        for p in new_parameters:
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
            self.store(p, "m", torch.zeros_like(p))
            self.store(p, self.second, torch.zeros_like(p))
        self.sync()
        self.release()

    def store(self, p: torch.Tensor, name: str, x: torch.Tensor) -> None:
        """Packs the weights, m, v or root of a parameter, which are rounded already.

        The parameter's state becomes a new dictionary, because a state_dict holds the old one.
        """
        codes, scale = pack(x.detach().view(p.shape), self.places.get(name))
        state = {**self.state[p], name: codes}
        if scale is not None:
            state[f"{name}_scale"] = scale
        self.state[p] = state

    def stored(self, p: torch.Tensor, name: str) -> Packed:
        """The codes, and the scales or None, of the weights, m or v of a parameter.

        For v, these are those of its root, if the root is kept. Weights without a format are those
        in the parameter.
        """
        if name == "v":
            name = self.second
        state = self.state[p]
        return state.get(name, p.detach()), state.get(f"{name}_scale")

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Takes Adam's step for all parameters that have a gradient.

        After `attach`, the step then frees weights and gradients.
        """
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        noise_of_update = functools.cache(self._noise)
        noise = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    updates = int(self.state[p]["step"])
                    noise[p] = noise_of_update(updates)[p]
                    self._update(p, group, noise[p])
        self.sync(noise)
        self.pending = False
        self.release()
        return loss

    def _noise(self, update: int) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The noise of each parameter for update number `update`, counted from 0.

        It is [1, P] for each place that is rounded stochastically.
        """
        if not self.places.noisy:
            return dict.fromkeys(self.parameters, NO_NOISE)
        sizes = [p.numel() for p in self.parameters]
        shape = (len(self.places.noisy), sum(sizes))
        drawn = self.draw_noise(update, shape, self.parameters[0].device)
        by_place = self.places.split_noise(drawn.unsqueeze(0))
        noise: dict = {p: {} for p in self.parameters}
        for name, numbers in by_place.items():
            for p, part in zip(self.parameters, numbers.split(sizes, dim=1), strict=True):
                noise[p][name] = part.to(p.device)
        return noise

    def _update(self, p: torch.Tensor, group: dict, noise: dict[str, torch.Tensor]) -> None:
        """Takes the step of one parameter, on rows [1, P]. Its weights are not rounded yet."""
        beta1, beta2 = group["betas"]
        step = self.state[p]["step"] + 1
        bias_correction1 = 1 - beta1**step
        root_correction2 = (1 - beta2**step).sqrt()
        step_size = bias_correction1.reciprocal() * -group["lr"]
        grad = -p.grad if group["maximize"] else p.grad
        g = grad.reshape(1, -1)
        m = unpack(*self.stored(p, "m")).reshape(1, -1)
        v = unpack(*self.stored(p, "v")).reshape(1, -1)
        if self.second == "root":
            v = v.square_()
        m = m.lerp_(g, 1 - beta1)
        v = v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        # The quotient |m| / sqrt(v) at which the step is as long as the learning rate.
        limit = (bias_correction1 / root_correction2).to(m.device)
        (m, m_kept), (v, v_kept) = self.places.moments(m, v, [p.numel()], noise, limit)
        row = p.reshape(1, -1)
        if group["weight_decay"]:
            # The decay acts before the weights are rounded, because a small decay would otherwise
            # always be lost.
            row = row * (1 - group["lr"] * group["weight_decay"])
        denominator = v.sqrt().div_(root_correction2).add_(group["eps"])
        row = row.addcdiv(m * step_size, denominator)
        self.state[p] = {**self.state[p], "step": step}
        self.store(p, "m", m_kept)
        self.store(p, self.second, v_kept.sqrt() if self.second == "root" else v_kept)
        p.copy_(row.view(p.shape))

    @torch.no_grad()
    def sync(self, noise: dict[torch.Tensor, dict[str, torch.Tensor]] = NO_NOISE) -> None:
        """Rounds and packs weights that have been changed in place, by a step or by other code.

        Does nothing if weights have no format.
        """
        if not self.filled or not self.has_weights:
            return
        for p in self.parameters:
            if self.versions.get(p) != p._version:
                row = p.reshape(1, -1)
                rounded = self.places.weights(row, [p.numel()], noise.get(p, NO_NOISE))
                p.copy_(rounded.view(p.shape))
                self.store(p, "weights", p)
                self.versions[p] = p._version

    @torch.inference_mode(False)  # because autograd refuses tensors made in inference mode
    def fill(self) -> None:
        """Unpacks the weights into the parameters, if these are empty."""
        if self.filled:
            return
        for p in self.parameters:
            p.data = unpack(*self.stored(p, "weights"))
            self.versions[p] = p._version
        self.filled = True

    @torch.inference_mode(False)
    def release(self) -> None:
        """After `attach`, frees weights and gradients unless they are in use.

        The parameters are empty then.
        """
        if not self.attached or self.depth or self.pending:
            return
        self.sync()
        for p in self.parameters:
            p.grad = None
            p.data = p.data.new_empty(0)
        self.filled = False

    # Methods that the hooks of a module call, beside `fill` and `release`.

    def touch(self) -> None:
        """Called before the forward pass of any layer.

        With gradients, the backward pass will need the weights, so they stay until the step.
        """
        self.fill()
        self.pending |= torch.is_grad_enabled()

    def enter(self) -> None:
        """Called before the forward pass of an attached module."""
        self.depth += 1
        self.fill()

    def leave(self) -> None:
        """Called after the forward pass of an attached module."""
        self.depth -= 1
        self.release()

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """A context in which the parameters hold their weights.

        At its end they are emptied, unless a backward pass was still to come before it.
        """
        pending_before = self.pending
        self.enter()
        try:
            yield
        finally:
            self.pending &= pending_before
            self.leave()

    def attach(self, *modules: nn.Module) -> None:
        """Makes parameters hold their weights only while they are in use, if weights have a format.

        The parameters are filled by the forward pass of a module or of any layer in it, and by
        state_dict and load_state_dict. They are emptied at the end of a module's forward pass
        without gradients, and by a step. Other code that reads the weights must do so within
        `unpacked`. A deep copy of a module is an ordinary module, in float32.
        """
        if not self.has_weights:
            return
        fill = Hook(self, "fill")
        touch = Hook(self, "touch")
        enter = Hook(self, "enter")
        leave = Hook(self, "leave")
        release = Hook(self, "release")
        for module in modules:
            for layer in module.modules():
                layer.register_forward_pre_hook(touch, prepend=True)
                layer.register_state_dict_pre_hook(fill)
                layer.register_load_state_dict_pre_hook(fill)
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)  # also after an exception
            module.register_state_dict_post_hook(release)
            module.register_load_state_dict_post_hook(release)
        self.attached = True
        self.release()

    def state_dict(self) -> dict:
        """The state as in torch, with the formats. Later steps do not change it."""
        self.sync()
        return {**super().state_dict(), "formats": self.formats}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state, as in torch.

        Raises ValueError, and changes nothing, for a state of other formats or of other parameters.
        """
        own_states = [self.state[p] for p in self.parameters]
        saved_states = self._saved_states(state_dict, own_states)
        if saved_states is None:
            problem = f"does not fit these parameters with formats {self.formats!r}"
            raise ValueError(f"the state {problem}: resume with its own formats")
        # Without the state, because torch would make codes float32.
        super().load_state_dict({**state_dict, "state": {}})
        for p, state, saved in zip(self.parameters, own_states, saved_states, strict=True):
            self.state[p] = {name: x.to(state[name].device, copy=True) for name, x in saved.items()}
        if self.filled and self.has_weights:
            self.filled = False
            self.fill()

    def _saved_states(self, state_dict: dict, own_states: list[dict]) -> list[dict] | None:
        """The states of the parameters in a saved state, or None if it does not fit."""

        def kinds(states: list[dict]) -> list[dict]:
            return [{name: (x.shape, x.dtype) for name, x in state.items()} for state in states]

        with contextlib.suppress(KeyError, TypeError, AttributeError):
            numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
            saved_states = [state_dict["state"][i] for i in numbers]
            # The step is the number of the next draw of noise.
            good_steps = all(0 <= float(state["step"]) < 2**32 for state in saved_states)
            same_formats = state_dict["formats"] == self.formats
            if good_steps and same_formats and kinds(saved_states) == kinds(own_states):
                return saved_states
        return None

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a LowBitAdam cannot be copied or pickled: build another and load its state_dict"
        )

    def describe(self) -> str:
        """The types and sizes of everything that is stored, in lines.

        The last line has the bytes per parameter, with scales and without.
        """
        self.sync()
        labels = {"weights": "weights", "m": "m", "v": "v"}
        if self.second == "root":
            labels["v"] = "root of v"
        numbers = 0
        total_bytes = 0
        predicted = 0
        lines = []
        for name, label in labels.items():
            packed = [self.stored(p, name) for p in self.parameters]
            codes = [codes for codes, _ in packed]
            scales = [scale for _, scale in packed if scale is not None]
            code_bytes = sum(x.nbytes for x in codes)
            scale_bytes = sum(x.nbytes for x in scales)
            numbers = sum(x.numel() for x in codes)
            total_bytes += code_bytes + scale_bytes
            predicted += codes[0].itemsize
            kind = str(codes[0].dtype).removeprefix("torch.")
            sizes = f"{code_bytes:,} bytes and {scale_bytes:,} of scales"
            lines.append(f"{label}: {len(codes)} tensors, {kind}, {sizes}")
        counted = total_bytes / numbers
        lines.append(f"stored: {counted:.2f} bytes a parameter, {predicted:.2f} without scales")
        return "\n".join(lines)
