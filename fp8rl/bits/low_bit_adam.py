"""Adam whose moments, and the weights themselves, are stored in few bits.

It trains any module with float32 parameters. A tensor is stored as codes and scales. Codes are
numbers of one of torch's float8 or 16-bit types, or float32 for a format that torch has no type
for. Scales are float32 powers of two: one for the tensor, or one for each block of 32 numbers.
float32 takes 4 bytes per parameter for weights and 8 for moments. Formats of 8 bits take 1 and 2,
formats of 16 bits 2 and 4, and each scale takes 4.

    moments    A step unpacks the moments, updates them, uses them, and only then rounds them (as
               torchao's low-bit optimizers do; blocks with scales: Dettmers et al. 2022,
               arXiv:2110.02861). The root of v needs half of v's range of exponents (Bjorck et al.
               2021, arXiv:2102.13565). It is rounded stochastically, so that it falls when
               gradients do. Moments are rounded so that no step becomes much longer than float32's
               (`Places.moments`). With the word `independent`, a moment is rounded by itself.
    weights    A step is often far smaller than the distance from a number to the next, and rounding
               to the nearest would undo it. Stochastic rounding is right in the mean (Gupta et al.
               2015, arXiv:1502.02551), without a float32 copy.
    in use     Layers do not compute with codes. The codes are unpacked into the parameters for a
               forward pass, and until the step after it. FSDP gathers and frees parameters in the
               same way (Zhao et al. 2023, arXiv:2304.11277). So while a model is in use, there are
               float32 weights, gradients and activations. In a step there are also the moments of
               one tensor, and 4 bytes of noise for each number that is rounded stochastically.
               Memory is saved between calls.

A parameter is left alone until its first step with a gradient. So weights that are frozen stay as
they are and cost nothing.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .formats import DTYPES, blocks, format_of, power_of_two_scale, unblocked
from .places import BLOCK, NO_NOISE, STATE, PlaceFormat, Places, places_of

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
# What can be read of a parameter whose weights are packed.
READABLE = {
    "device",
    "dim",
    "dtype",
    "element_size",
    "get_device",
    "grad",
    "is_complex",
    "is_cpu",
    "is_cuda",
    "is_floating_point",
    "is_leaf",
    "is_meta",
    "is_mps",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xpu",
    "itemsize",
    "layout",
    "names",
    "nbytes",
    "ndim",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad",
    "requires_grad_",
    "retains_grad",
    "shape",
    "size",
}
FLOAT32 = format_of("fp32")
Packed = tuple[torch.Tensor, torch.Tensor | None]  # codes, and scales or None
Noise = dict[str, torch.Tensor]  # by place, [1, P] each


def dtype_of(form: PlaceFormat | None) -> torch.dtype:
    """The type of the codes of a format; float32 if torch has no type for it."""
    return DTYPES.get(form.format.name, torch.float32) if form else torch.float32


def has_scale(form: PlaceFormat | None) -> bool:
    """Whether scales are stored beside the codes of a format."""
    return dtype_of(form) != torch.float32 and form.scaled


def pack(x: torch.Tensor, form: PlaceFormat | None) -> Packed:
    """Packs a float32 tensor whose numbers are already rounded to a format.

    Returns codes of the tensor's shape, and scales [] or [blocks], or None if there is no scale.
    """
    dtype = dtype_of(form)
    if not has_scale(form):
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


class PackedParameter(nn.Parameter):
    """A parameter whose weights are packed. To read or to change them raises RuntimeError.

    `LowBitAdam` turns a parameter into a PackedParameter when it frees the weights, and back when
    it unpacks them. (torch does the same with the parameters of lazy modules.) Otherwise code that
    reads parameters, such as a norm or an average, would go on with numbers that are not there.
    Shape, type and gradient can be read. A deep copy, and what torch.save writes, is an ordinary
    parameter with the weights.
    """

    packed_by: "LowBitAdam"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__  # of the property
        if name not in READABLE:
            problem = f"{name} was called on a parameter whose weights are packed"
            raise RuntimeError(f"{problem}: call it within `with optimizer.unpacked():`")
        return super().__torch_function__(func, types, args, kwargs or {})

    @torch.inference_mode(False)  # because autograd refuses tensors made in inference mode
    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        weights = unpack(*self.packed_by.stored(self, "weights"))
        return nn.Parameter(weights, self.requires_grad)

    def __reduce_ex__(self, protocol):
        return copy.deepcopy(self).__reduce_ex__(protocol)

    def __repr__(self):
        return f"a parameter {list(self.shape)}: read it within `with optimizer.unpacked():`"


def do_nothing(*_) -> None:
    """The hook of a copy of a module."""


def hook_of_copy() -> Callable:
    return do_nothing


@dataclass
class Hook:
    """A hook of a module, which calls a method of the optimizer.

    A copy of the module, and what torch.save writes, has hooks that do nothing.
    """

    optimizer: "LowBitAdam"
    method: str

    @torch._disable_dynamo  # if it were compiled, it would change copies of the parameters
    def __call__(self, *_) -> None:
        getattr(self.optimizer, self.method)()

    def __reduce__(self):
        return hook_of_copy, ()


class ParameterStates(dict):
    """What an optimizer stores of each parameter, by parameter.

    As long as nothing is stored of a parameter, it keeps its weights itself, in float32. Its state
    says so, and to read it adds no entry.
    """

    def __missing__(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weights": p}


class LowBitAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) that keeps its state in few bits.

    `weights`, `m`, `v` or `root` (the root of v) are formats of places.py, such as
    "e4m3:stochastic". Without a format, a place is float32.

    `v` and `root` are rounded stochastically, because to the nearest they could not fall
    (places.py). The word `nearest`, as in "e4m3:nearest", rounds them to the nearest and saves the
    noise.

    `weight_decay` is decoupled, as in AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): the
    weights are multiplied by 1 - lr * weight_decay before the step, and the result of both is
    rounded once. `maximize` maximizes the loss. `noise` draws the numbers for stochastic rounding;
    the default is `seeded_noise(seed)`. Other options of torch's Adam are refused.

    A parameter group may have formats of its own. For example, `{"params": norms, "weights": None}`
    keeps the weights of these parameters in float32.

    A parameter that has never had a gradient, because it is frozen or not used, is left alone: it
    keeps its numbers, and the optimizer stores nothing for it. With a parameter's first step its
    weights are rounded for the first time. `pack_weights` rounds them earlier.

    To change weights, change them in place, under `torch.no_grad()` and, after `attach`, within
    `unpacked`. A change of a parameter's `.data` is not noticed.

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
        refuse_options_of_adam(formats)
        self.default_formats = dict.fromkeys(STATE) | formats
        self.formats = text_of(self.default_formats)  # in the language of places.py
        self.places = places_of(self.formats, STATE)
        self.draw_noise = noise or seeded_noise(seed)
        self.parameters: list[torch.Tensor] = []  # in the order of the groups
        # The places of each parameter that are kept in few bits. They are those of its group.
        self.places_of_parameter: dict[torch.Tensor, Places] = {}
        # torch's count of in-place changes of each parameter, at the time its weights were packed.
        self.versions: dict[torch.Tensor, int] = {}
        # The types of the parameters that are PackedParameters now.
        self.types: dict[torch.Tensor, type] = {}
        self.attached = False  # whether weights are freed when they are not in use
        self.filled = True  # whether all parameters hold their weights now
        self.depth = 0  # number of calls that are using the weights
        self.pending = False  # whether a backward pass and a step are still to come
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        refuse_wrong_settings(defaults)
        super().__init__(params, defaults)
        self.state = ParameterStates()

    @property
    def has_weights(self) -> bool:
        """Whether it keeps weights in few bits."""
        return any("weights" in places for places in self.places_of_parameter.values())

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group of parameters, as in torch. It may have formats of its own.

        A format that the group does not name is that of the call. Raises ValueError for a
        parameter that learns and is empty or not float32, and for options that are not offered.
        """
        group = {**param_group}
        refuse_options_of_adam(group)
        own_formats = {name: group.pop(name) for name in STATE if name in group}
        formats = dict(self.default_formats)
        if own_formats.keys() & {"v", "root"}:  # the group's takes the place of either
            del formats["v"], formats["root"]
        refuse_ignored_options(group)
        group["formats"] = text_of(formats | own_formats)
        places = places_of(group["formats"], STATE)
        refuse_wrong_settings({**self.defaults, **group})
        super().add_param_group(group)
        new_parameters = self.param_groups[-1]["params"]
        for p in new_parameters:
            if p.requires_grad and (p.dtype != torch.float32 or not p.numel()):
                self.param_groups.pop()
                remedy = "use float32 parameters that are not empty"
                raise ValueError(f"a parameter is {p.dtype} {list(p.shape)}: {remedy}")
        self.parameters += new_parameters
        self.places_of_parameter.update(dict.fromkeys(new_parameters, places))

    def second(self, p: torch.Tensor) -> str:
        """What is kept of a parameter's second moment: "v", or "root" for its root."""
        return "root" if "root" in self.places_of_parameter[p] else "v"

    def state_of(self, p: torch.Tensor) -> dict:
        """What is stored for a parameter; an empty dictionary if nothing is."""
        return self.state.get(p, {})

    def store(self, p: torch.Tensor, name: str, x: torch.Tensor) -> None:
        """Packs the weights, m, v or root of a parameter, which are rounded already.

        The parameter's state becomes a new dictionary, because a state_dict holds the old one.
        """
        codes, scale = pack(x.detach().view(p.shape), self.places_of_parameter[p].get(name))
        state = {**self.state_of(p), name: codes}
        if scale is not None:
            state[f"{name}_scale"] = scale
        self.state[p] = state

    def stored(self, p: torch.Tensor, name: str) -> Packed:
        """The codes, and the scales or None, of the weights, m or v of a parameter.

        For v, these are those of its root, if the root is kept. Weights that are not packed are
        those in the parameter.
        """
        if name == "v":
            name = self.second(p)
        state = self.state_of(p)
        if name == "weights" and name not in state:
            return p.detach(), None
        return state[name], state.get(f"{name}_scale")

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Takes Adam's step for all parameters that have a gradient.

        After `attach`, the step then frees weights and gradients.
        """
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        self.fill()
        for group in self.param_groups:
            self._check_gradients(group)
        noise_of_update = functools.cache(self._noise)
        noise = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if "step" not in self.state_of(p):
                        self._begin(p)
                    updates = int(self.state[p]["step"])
                    noise[p] = noise_of_update(updates)[p]
                    self._update(p, group, noise[p])
        self.sync(noise)
        self.pending = False
        self.release()
        return loss

    def _check_gradients(self, group: dict) -> None:
        """Raises ValueError if a parameter of a group cannot take a step."""
        names = group.get("param_names") or [
            f"a parameter {list(p.shape)}" for p in group["params"]
        ]
        for name, p in zip(names, group["params"], strict=True):
            if p.grad is None:
                continue
            if p.grad.layout != torch.strided:
                remedy = "make it dense, as nn.Embedding does with sparse=False"
                raise ValueError(f"the gradient of {name} is sparse: {remedy}")
            if p.dtype != torch.float32:  # it was frozen when its group was added
                raise ValueError(f"{name} is {p.dtype}: make it float32 before it learns")

    def _begin(self, p: torch.Tensor) -> None:
        """Stores moments of 0, before a parameter's first step."""
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        self.state[p] = {**self.state_of(p), "step": step}
        self.store(p, "m", torch.zeros_like(p))
        self.store(p, self.second(p), torch.zeros_like(p))

    def _noise(self, update: int) -> dict[torch.Tensor, Noise]:
        """The noise of each parameter for update number `update`, counted from 0.

        A parameter has noise for each place that is rounded stochastically. What a parameter gets
        does not depend on which others have a gradient, as long as the same ones are frozen.
        """
        all_places = self.places_of_parameter
        noisy = [name for name in STATE if any(name in all_places[p].noisy for p in all_places)]
        noise: dict[torch.Tensor, Noise] = {p: {} for p in self.parameters}
        if not noisy:
            return noise
        learning = [p for p in self.parameters if p.requires_grad or p.grad is not None]
        sizes = [p.numel() for p in learning]
        drawn = self.draw_noise(update, (len(noisy), sum(sizes)), learning[0].device)
        for name, numbers in zip(noisy, drawn.unsqueeze(1), strict=True):
            for p, part in zip(learning, numbers.split(sizes, dim=1), strict=True):
                if name in all_places[p].noisy:
                    noise[p][name] = part.to(p.device)
        return noise

    def _update(self, p: torch.Tensor, group: dict, noise: Noise) -> None:
        """Takes the step of one parameter, on rows [1, P]. Its weights are not rounded yet."""
        places = self.places_of_parameter[p]
        second = self.second(p)
        beta1, beta2 = group["betas"]
        step = self.state[p]["step"] + 1
        bias_correction1 = 1 - beta1**step
        root_correction2 = (1 - beta2**step).sqrt()
        step_size = bias_correction1.reciprocal() * -group["lr"]
        grad = -p.grad if group["maximize"] else p.grad
        g = grad.reshape(1, -1)
        m = unpack(*self.stored(p, "m")).reshape(1, -1)
        v = unpack(*self.stored(p, "v")).reshape(1, -1)
        if second == "root":
            v = v.square_()
        m = m.lerp_(g, 1 - beta1)
        v = v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        # The quotient |m| / sqrt(v) at which the step is as long as the learning rate.
        limit = (bias_correction1 / root_correction2).to(m.device)
        (m, m_kept), (v, v_kept) = places.moments(m, v, [p.numel()], noise, limit)
        row = p.reshape(1, -1)
        if group["weight_decay"]:
            # The decay acts before the weights are rounded, because a small decay would otherwise
            # always be lost.
            row = row * (1 - group["lr"] * group["weight_decay"])
        denominator = v.sqrt().div_(root_correction2).add_(group["eps"])
        row = row.addcdiv(m * step_size, denominator)
        self.state[p] = {**self.state[p], "step": step}
        self.store(p, "m", m_kept)
        self.store(p, second, v_kept.sqrt() if second == "root" else v_kept)
        p.copy_(row.view(p.shape))

    @torch.no_grad()
    def sync(self, noise: dict[torch.Tensor, Noise] = NO_NOISE) -> None:
        """Rounds and packs weights that have been changed in place, by a step or by other code.

        Weights that have not been packed yet are packed if `noise` names their parameter.
        """
        if not self.filled:
            return
        for p in self.parameters:
            places = self.places_of_parameter[p]
            begins = p in noise and "weights" in places
            is_packed = "weights" in self.state_of(p)
            if (begins or is_packed) and self.versions.get(p) != p._version:
                row = p.reshape(1, -1)
                rounded = places.weights(row, [p.numel()], noise.get(p, NO_NOISE))
                p.copy_(rounded.view(p.shape))
                self.store(p, "weights", p)
                self.versions[p] = p._version

    def pack_weights(self) -> None:
        """Rounds and packs the weights of all parameters that learn, if weights have a format.

        Without this call, a parameter is rounded for the first time after its first step.
        """
        self.fill()
        self.sync({p: NO_NOISE for p in self.parameters if p.requires_grad})
        self.release()

    @torch.inference_mode(False)  # because autograd refuses tensors made in inference mode
    def fill(self) -> None:
        """Unpacks the weights into the parameters from which they were freed."""
        for p, ordinary_type in self.types.items():
            p.__class__ = ordinary_type
            del p.packed_by
            self._fill_one(p)
        self.types.clear()
        self.filled = True

    def _fill_one(self, p: torch.Tensor) -> None:
        p.data = unpack(*self.stored(p, "weights"))
        self.versions[p] = p._version

    @torch.inference_mode(False)
    def release(self) -> None:
        """After `attach`, frees weights and gradients unless they are in use.

        A parameter whose weights are not packed keeps them.
        """
        if not self.attached or self.depth or self.pending:
            return
        self.sync()
        for p in self.parameters:
            p.grad = None
            if "weights" in self.state_of(p) and p not in self.types:
                # One number, which stands for all. It is NaN, so that code which reads it in a way
                # that PackedParameter does not see goes wrong visibly.
                p.data = p.data.new_full((), math.nan).expand(p.shape)
                self.types[p] = type(p)
                p.packed_by = self
                p.__class__ = PackedParameter
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

        At its end they are freed, unless a backward pass was still to come before it.
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

        The weights are unpacked by the forward pass of a module or of any layer in it, and by
        state_dict and load_state_dict. They are freed at the end of a module's forward pass
        without gradients, and by a step. Other code that reads the weights must do so within
        `unpacked`, and gets an error otherwise. A deep copy of a module, and what torch.save
        writes, is an ordinary module in float32. A parameter that has not taken a step yet keeps
        its weights, unless `pack_weights` is called.
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
        saved_states = self._saved_states(state_dict)
        if saved_states is None:
            problem = f"does not fit these parameters with formats {self.formats!r}"
            raise ValueError(f"the state {problem}: resume with its own formats")
        self.fill()
        formats_of_groups = [group["formats"] for group in self.param_groups]
        # Without the state, because torch would make codes float32.
        super().load_state_dict({**state_dict, "state": {}})
        self.state = ParameterStates()
        for group, formats in zip(self.param_groups, formats_of_groups, strict=True):
            group["formats"] = formats  # which a state of an earlier version does not have
        self.versions.clear()
        for p, saved in zip(self.parameters, saved_states, strict=True):
            if saved:
                self.state[p] = {
                    name: x.to("cpu" if name == "step" else p.device, copy=True)
                    for name, x in saved.items()
                }
            if "weights" in saved:
                self._fill_one(p)
        self.release()

    def _saved_states(self, state_dict: dict) -> list[dict] | None:
        """The state of each parameter in a saved state, or None if it does not fit."""
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            groups = state_dict["param_groups"]
            formats = state_dict["formats"]
            formats_of_groups = [group.get("formats", formats) for group in groups]
            sizes = [len(group["params"]) for group in groups]
            same_formats = formats == self.formats and formats_of_groups == [
                group["formats"] for group in self.param_groups
            ]
            if not same_formats or sizes != [len(group["params"]) for group in self.param_groups]:
                return None
            numbers = [i for group in groups for i in group["params"]]
            saved_states = [state_dict["state"].get(i, {}) for i in numbers]
            if not all(saved_states) and any("formats" not in group for group in groups):
                return None  # earlier versions had a state for each parameter
            if all(map(self._fits, self.parameters, saved_states)):
                return saved_states
        return None

    def _fits(self, p: torch.Tensor, saved: dict) -> bool:
        """Whether a saved state is one that this parameter can have."""
        places = self.places_of_parameter[p]
        kinds = {name: (x.shape, x.dtype) for name, x in saved.items()}
        weights_only = {}
        if "weights" in places:
            weights_only = kinds_of(p, "weights", places["weights"])
        if not saved or kinds == weights_only:
            return True
        second = self.second(p)
        moments = kinds_of(p, "m", places.get("m")) | kinds_of(p, second, places.get(second))
        step = {"step": (torch.Size(), torch.float32)}
        # The step is the number of the next draw of noise.
        return kinds == step | moments | weights_only and 0 <= float(saved["step"]) < 2**32

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a LowBitAdam cannot be copied or pickled: build another and load its state_dict"
        )

    def describe(self) -> str:
        """The types and sizes of everything that is stored, in lines.

        The last line has the bytes per parameter, with scales and without. Parameters that have
        not taken a step are not counted.
        """
        self.sync()
        begun = [p for p in self.parameters if self.state_of(p)]
        left_alone = [p for p in self.parameters if not self.state_of(p)]
        total_bytes = 0
        total_code_bytes = 0
        lines = []
        for place in ("weights", "m", "v", "root"):
            by_dtype: dict[torch.dtype, list[Packed]] = {}
            for p in begun:
                if place == "weights" or place in self.state_of(p):
                    codes, scale = self.stored(p, place)
                    by_dtype.setdefault(codes.dtype, []).append((codes, scale))
            for dtype, packed in by_dtype.items():
                code_bytes = sum(codes.nbytes for codes, _ in packed)
                scale_bytes = sum(scale.nbytes for _, scale in packed if scale is not None)
                total_code_bytes += code_bytes
                total_bytes += code_bytes + scale_bytes
                label = "root of v" if place == "root" else place
                kind = str(dtype).removeprefix("torch.")
                sizes = f"{code_bytes:,} bytes and {scale_bytes:,} of scales"
                lines.append(f"{label}: {len(packed)} tensors, {kind}, {sizes}")
        if left_alone:
            count = sum(p.numel() for p in left_alone)
            lines.append(f"left alone: {len(left_alone)} tensors, {count:,} numbers, no step yet")
        numbers = sum(p.numel() for p in begun)
        if not numbers:
            return "\n".join([*lines, "stored: nothing"])
        counted = total_bytes / numbers
        without_scales = total_code_bytes / numbers
        per_parameter = f"{counted:.2f} bytes a parameter, {without_scales:.2f} without scales"
        return "\n".join([*lines, f"stored: {per_parameter}"])


def text_of(formats: dict[str, str | None]) -> str:
    """Formats by place as a text for `places_of`, in the order of STATE.

    For v and root, the text says `stochastic` unless the format says `nearest`. Raises the errors
    of `places_of`.
    """
    in_one_order = dict.fromkeys(STATE) | formats
    entries = {
        name: f"{name}={form}" for name, form in in_one_order.items() if form or name not in STATE
    }
    places = places_of(" ".join(entries.values()), STATE)
    for name, place in places.items():
        words = entries[name].split(":")
        if "nearest" in words:
            words.remove("nearest")  # which is what no word means there
        elif name in ("v", "root") and not place.stochastic and place.format != FLOAT32:
            words.append("stochastic")
        entries[name] = ":".join(words)
    return " ".join(entries.values())


def kinds_of(p: torch.Tensor, name: str, form: PlaceFormat | None) -> dict[str, tuple]:
    """Shapes and types of what `store` stores of a parameter under a name."""
    kinds = {name: (p.shape, dtype_of(form))}
    if has_scale(form):
        shape = [-(-p.numel() // BLOCK)] if form.block else []
        kinds[f"{name}_scale"] = (torch.Size(shape), torch.float32)
    return kinds


def refuse_options_of_adam(options: dict) -> None:
    """Raises ValueError for an option of torch's Adam that is not offered.

    An option whose value asks for nothing is removed from `options`.
    """
    for name in OPTIONS_OF_ADAM:
        if value := options.pop(name, None):
            raise ValueError(f"{name} is {value}: leave it out, LowBitAdam does not have it")


def refuse_ignored_options(group: dict) -> None:
    """Raises ValueError for options of a group that would be ignored without a word.

    torch takes any option in a group. Among them may be a misspelt place with its format.
    """
    for name, value in group.items():
        if name in ("seed", "noise"):
            raise ValueError(f"{name} is {value} in a group: give it in the call, it holds for all")
        if name == "formats" or (isinstance(value, str) and is_format(value)):
            places = ", ".join(STATE)
            raise ValueError(f"formats has the place {name!r} in a group: choose from {places}")


def is_format(text: str) -> bool:
    """Whether a text is a format with its words, such as "e4m3:block"."""
    try:
        PlaceFormat.of(text)
    except (ValueError, KeyError):
        return False
    return True


def refuse_wrong_settings(group: dict) -> None:
    """Raises ValueError for numbers with which Adam cannot work."""
    lr, betas, eps = group["lr"], group["betas"], group["eps"]
    weight_decay = group["weight_decay"]
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay is {weight_decay}: use 0 or more")
    if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
        remedy = "use at least 0, and betas below 1"
        raise ValueError(f"lr, eps and betas are {lr}, {eps} and {betas}: {remedy}")
