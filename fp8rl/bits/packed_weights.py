"""Parameters that hold their weights only while a model is in use.

Layers do not compute with codes. So the codes (packed_tensors.py) are unpacked into the parameters
for a forward pass, and until the step after it. FSDP gathers and frees parameters in the same way
(Zhao et al. 2023, arXiv:2304.11277). While a model is in use, there are float32 weights, gradients
and activations. Memory is saved between calls.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .packed_tensors import Packed, pack, unpack
from .places import NO_NOISE, Places

Noise = dict[str, torch.Tensor]  # by place, [1, P] each
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


class PackedParameter(nn.Parameter):
    """A parameter whose weights are packed. To read or to change them raises RuntimeError.

    A `PackingOptimizer` turns a parameter into a PackedParameter when it frees the weights, and
    back when it unpacks them. (torch does the same with the parameters of lazy modules.) Otherwise
    code that reads parameters, such as a norm or an average, would go on with numbers that are not
    there. Shape, type and gradient can be read. A deep copy, and what torch.save writes, is an
    ordinary parameter with the weights.
    """

    packed_by: "PackingOptimizer"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            name = func.__self__.__name__  # of the property
        if name not in READABLE:
            raise RuntimeError(
                f"{name} was called on a parameter whose weights are packed: "
                "call it within `with optimizer.unpacked():`"
            )
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

    optimizer: "PackingOptimizer"
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


class PackingOptimizer(torch.optim.Optimizer):
    """An optimizer that stores what it keeps of each parameter in few bits.

    A subclass sets `places_of_parameter` in `add_param_group`, and calls `fill` before a step and
    `sync` and `release` after it.

    `places_of_parameter`  for each parameter, in the order of the groups, the places (places.py)
                           that are kept in few bits
    """

    def __init__(self, params, defaults: dict):
        self.places_of_parameter: dict[torch.Tensor, Places] = {}
        # torch's count of in-place changes of each parameter, at the time its weights were packed.
        self.versions: dict[torch.Tensor, int] = {}
        # The types of the parameters that are PackedParameters now.
        self.types: dict[torch.Tensor, type] = {}
        self.attached = False  # whether weights are freed when they are not in use
        self.filled = True  # whether all parameters hold their weights now
        self.depth = 0  # number of calls that are using the weights
        self.pending = False  # whether a backward pass and a step are still to come
        super().__init__(params, defaults)
        self.state = ParameterStates()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return list(self.places_of_parameter)

    @property
    def has_weights(self) -> bool:
        """Whether it keeps weights in few bits."""
        return any("weights" in places for places in self.places_of_parameter.values())

    def state_of(self, p: torch.Tensor) -> dict:
        """What is stored for a parameter; an empty dictionary if nothing is."""
        return self.state.get(p, {})

    def packed(self, p: torch.Tensor, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored of the weights, m, v or root of a parameter, which are rounded already."""
        codes, scale = pack(x.detach().view(p.shape), self.places_of_parameter[p].get(name))
        if scale is None:
            return {name: codes}
        return {name: codes, f"{name}_scale": scale}

    def store(self, p: torch.Tensor, name: str, x: torch.Tensor) -> None:
        """Packs the weights, m, v or root of a parameter, which are rounded already.

        The parameter's state becomes a new dictionary, because a state_dict holds the old one.
        """
        self.state[p] = {**self.state_of(p), **self.packed(p, name, x)}

    def stored(self, p: torch.Tensor, name: str) -> Packed:
        """The codes, and the scales or None, of the weights, m, v or root of a parameter.

        Weights that are not packed are those in the parameter.
        """
        state = self.state_of(p)
        if name == "weights" and name not in state:
            return p.detach(), None
        return state[name], state.get(f"{name}_scale")

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
