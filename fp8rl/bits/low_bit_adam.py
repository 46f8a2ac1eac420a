"""Adam whose moments, and the weights themselves, are stored in few bits.

It trains any module with float32 parameters. float32 takes 4 bytes per parameter for weights and 8
for moments. Formats of 8 bits take 1 and 2, formats of 16 bits 2 and 4 (`pack`).

    moments    A step unpacks the moments, updates them, uses them, and only then rounds them (as
               torchao's low-bit optimizers do; blocks with scales: Dettmers et al. 2022,
               arXiv:2110.02861). The root of v needs half of v's range of exponents (Bjorck et al.
               2021, arXiv:2102.13565). It is rounded stochastically, so that it falls when
               gradients do. Moments are rounded so that no step becomes much longer than float32's
               (`Places.moments`). With the word `independent`, a moment is rounded by itself.
    weights    A step is often far smaller than the distance from a number to the next, and rounding
               to the nearest would undo it. Stochastic rounding is right in the mean (Gupta et al.
               2015, arXiv:1502.02551), without a float32 copy. Layers compute with rounded weights
               in float32. Weights are packed in a `state_dict`, and between `pack` and `unpack`.

In a step there are also the moments of one tensor in float32, and 4 bytes of noise for each number
that is rounded stochastically. A parameter is left alone until its first step with a gradient. So
weights that are frozen stay as they are and cost nothing.
"""

import functools
import math
from collections.abc import Callable

import torch

from . import adam
from .formats import DTYPES, format_of, power_of_two_scale
from .notation import STATE, check_named_once, read_entry
from .places import PlaceFormat, Places

OPTIONS_OF_GROUP = ("params", "param_names", "name")  # beside Adam's settings and the places
Noise = dict[str, torch.Tensor]  # by place, [1, P] each


def pack(name: str, x: torch.Tensor, form: PlaceFormat | None) -> dict[str, torch.Tensor]:
    """Packs a float32 tensor whose numbers are already rounded to a format.

    Returns codes under `name` and, under `name` with "_scale" behind, a scale if there is one.
    Codes are numbers of one of torch's float8 or 16-bit types, or float32 for a format that torch
    has no type for.
    """
    dtype = DTYPES.get(form.format.name, torch.float32) if form else torch.float32
    if dtype == torch.float32 or not form.scaled:
        return {name: x.to(dtype, copy=True)}
    scale = power_of_two_scale(x.abs().amax(), form.format.largest)
    return {name: (x / scale).to(dtype), f"{name}_scale": scale}


def unpack(packed: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The float32 tensor that `pack` packed under a name, in memory of its own."""
    x = packed[name].to(torch.float32, copy=True)
    scale = packed.get(f"{name}_scale")
    return x if scale is None else x.mul_(scale)


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


class LowBitAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980) that keeps its state in few bits.

    `weights`, `m`, `v` or `root` (the root of v) are formats of places.py, such as
    "e4m3:stochastic". Without a format, a place is float32. A PlaceFormat is taken as it is.

    In such a text, `v` and `root` are rounded stochastically, because to the nearest they could not
    fall (places.py). The word `nearest`, as in "e4m3:nearest", rounds them to the nearest and saves
    the noise.

    `weight_decay` is decoupled, as in AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): the
    weights are multiplied by 1 - lr * weight_decay before the step, and the result of both is
    rounded once. `maximize` maximizes the loss. `noise` draws the numbers for stochastic rounding;
    the default is `seeded_noise(seed)`.

    A parameter group may have formats of its own. For example, `{"params": norms, "weights": None}`
    keeps the weights of these parameters in float32.

    A parameter that has never had a gradient, because it is frozen or not used, is left alone: it
    keeps its numbers, and the optimizer stores nothing for it. With a parameter's first step its
    weights are rounded for the first time. `round_weights` rounds them earlier.

    Between steps, the parameters hold rounded weights in float32. `pack` frees them and keeps them
    in few bits, until `unpack`.

    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = LowBitAdam(model.parameters(), weights="e4m3:stochastic", m="e4m3", root="e4m3")
    >>> model(torch.randn(8, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.pack()  # the model cannot be used until optimizer.unpack()
    >>> print(optimizer.describe().splitlines()[-1])
    stored: 3.01 bytes a parameter
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
        weights: str | PlaceFormat | None = None,
        m: str | PlaceFormat | None = None,
        v: str | PlaceFormat | None = None,
        root: str | PlaceFormat | None = None,
    ):
        self.places = places_to_keep({"weights": weights, "m": m, "v": v, "root": root})
        # In the order of the groups
        self.places_of_parameter: dict[torch.Tensor, Places] = {}
        self.draw_noise = noise or seeded_noise(seed)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        refuse_wrong_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group of parameters, as in torch. It may have formats of its own.

        A format that the group does not name is that of the call. Raises ValueError for options
        that are not offered.
        """
        group = {**param_group}
        known = (*OPTIONS_OF_GROUP, *self.defaults, *STATE)
        # torch takes any option in a group. Among them may be a misspelt place with its format.
        for name in sorted(group.keys() - {*known}):
            raise ValueError(f"{name} is {group[name]} in a group: use only {', '.join(known)}")
        formats_of_group = {name: group.pop(name) for name in STATE if name in group}
        formats = dict(self.places)
        if formats_of_group.keys() & {"v", "root"}:  # the group's takes the place of either
            formats.pop("v", None)
            formats.pop("root", None)
        places = places_to_keep(formats | formats_of_group)
        group["formats"] = str(places)
        refuse_wrong_settings({**self.defaults, **group})
        super().add_param_group(group)
        self.places_of_parameter.update(dict.fromkeys(self.param_groups[-1]["params"], places))

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of the groups."""
        return list(self.places_of_parameter)

    @property
    def has_weights(self) -> bool:
        """Whether it keeps weights in few bits."""
        return any("weights" in places for places in self.places_of_parameter.values())

    def second(self, p: torch.Tensor) -> str:
        """What is kept of a parameter's second moment: "v", or "root" for its root."""
        return "root" if "root" in self.places_of_parameter[p] else "v"

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Takes Adam's step for all parameters that have a gradient.

        Raises ValueError, and changes nothing, for a parameter that is not float32 or is empty, and
        for a sparse gradient.
        """
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        for p in self.parameters:
            is_good = p.dtype == torch.float32 and p.numel()
            if p.grad is not None and not (is_good and p.grad.layout == torch.strided):
                raise ValueError(
                    f"a parameter {list(p.shape)} is {p.dtype} with a {p.grad.layout} gradient: "
                    "use float32 parameters that are not empty, and dense gradients"
                )
        noise_of_update = functools.cache(self._noise)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._begin(p)
                    updates = int(self.state[p]["step"])
                    self._update(p, group, noise_of_update(updates)[p])
        return loss

    def _begin(self, p: torch.Tensor) -> None:
        """Stores moments of 0 for a parameter that has none."""
        if p not in self.state:
            places = self.places_of_parameter[p]
            second = self.second(p)
            self.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                **pack("m", torch.zeros_like(p), places.get("m")),
                **pack(second, torch.zeros_like(p), places.get(second)),
            }

    @torch.no_grad()
    def round_weights(self) -> None:
        """Rounds the weights of all parameters that learn to the nearest, if they have a format.

        Without this call, a parameter is rounded for the first time after its first step.
        """
        for p, places in self.places_of_parameter.items():
            if p.requires_grad and "weights" in places:
                self._begin(p)
                p.copy_(self._rounded(p))

    def _rounded(self, p: torch.Tensor) -> torch.Tensor:
        """The weights of a parameter, rounded to the nearest."""
        row = p.detach().reshape(1, -1)
        return self.places_of_parameter[p].weights(row, [p.numel()]).view(p.shape)

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
        """Takes the step of one parameter, on rows [1, P]."""
        places = self.places_of_parameter[p]
        second = self.second(p)
        beta1, beta2 = group["betas"]
        t = self.state[p]["step"] + 1
        grad = -p.grad if group["maximize"] else p.grad
        g = grad.reshape(1, -1)
        m = unpack(self.state[p], "m").reshape(1, -1)
        v = unpack(self.state[p], second).reshape(1, -1)
        if second == "root":
            v.square_()
        adam.update_moments_fast(m, v, g, beta1, beta2)
        bias_correction1, root_correction2 = adam.bias_corrections(t, beta1, beta2)
        limit = adam.full_step_quotient(bias_correction1, root_correction2).to(m.device)
        (m, m_kept), (v, v_kept) = places.moments(m, v, [p.numel()], noise, limit)
        # The decay acts before the weights are rounded, because a small decay would otherwise
        # always be lost.
        row = adam.with_decoupled_decay(p.reshape(1, -1), group["lr"], group["weight_decay"])
        adam.step_fast(row, m, v, group["lr"], bias_correction1, root_correction2, group["eps"])
        p.copy_(places.weights(row, [p.numel()], noise).view(p.shape))
        kept = v_kept.sqrt() if second == "root" else v_kept
        # A new dictionary, because a state_dict holds the old one.
        self.state[p] = {
            "step": t,
            **pack("m", m_kept.view(p.shape), places.get("m")),
            **pack(second, kept.view(p.shape), places.get(second)),
        }

    def _packed(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is stored of a parameter, with its weights if they have a format; empty if it has
        not begun to learn."""
        state = {**self.state.get(p, {})}
        form = self.places_of_parameter[p].get("weights")
        if state and form and "weights" not in state:
            state |= pack("weights", self._rounded(p), form)
        return state

    def pack(self) -> None:
        """Keeps weights only in few bits, if they have a format, and frees the gradients.

        Until `unpack`, these parameters are empty.
        """
        for p in self.parameters:
            state = self._packed(p)
            if "weights" in state:
                self.state[p] = state
                p.data = p.data.new_empty(0)
                p.grad = None

    def unpack(self) -> None:
        """Puts packed weights back into their parameters."""
        for p, state in self.state.items():
            if "weights" in state:
                p.data = unpack(state, "weights")
                self.state[p] = {
                    name: x for name, x in state.items() if not name.startswith("weights")
                }

    def state_dict(self) -> dict:
        """The state as in torch, with packed weights. Later steps do not change it."""
        packed = {i: self._packed(p) for i, p in enumerate(self.parameters)}
        state = {i: of_parameter for i, of_parameter in packed.items() if of_parameter}
        return {**super().state_dict(), "state": state}

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state, and the weights in it, as in torch.

        Raises ValueError, and changes nothing, for a state of other formats or of other parameters.
        """
        self.unpack()
        groups = state_dict["param_groups"]
        formats = [group.get("formats") for group in groups]
        states = [state_dict["state"].get(i, {}) for group in groups for i in group["params"]]
        fits = len(states) == len(self.parameters)
        fits &= formats == [group["formats"] for group in self.param_groups]
        for p, state in zip(self.parameters, states, strict=False):
            fits &= all(x.shape in ((), p.shape) for x in state.values())
        if not fits:
            raise ValueError(
                f"the state does not fit these parameters with formats {str(self.places)!r}: "
                "resume with its own formats"
            )
        # Without the state, because torch would make codes float32.
        super().load_state_dict({**state_dict, "state": {}})
        for p, state in zip(self.parameters, states, strict=True):
            if state:
                self.state[p] = {
                    name: x.to("cpu" if name == "step" else p.device) for name, x in state.items()
                }
        self.unpack()

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a LowBitAdam cannot be copied or pickled: build another and load its state_dict"
        )

    def describe(self) -> str:
        """The bytes of everything that is stored, with its scales, in a line for each place.

        Weights are counted as `pack` keeps them. The last line has the bytes per parameter.
        Parameters that have not taken a step are not counted.
        """
        sizes = dict.fromkeys(STATE, 0)
        numbers = 0
        for p in self.parameters:
            state = self._packed(p)
            if state:
                numbers += state["m"].numel()
                for name, x in {"weights": p, **state}.items():
                    if name != "step":
                        sizes[name.removesuffix("_scale")] += x.nbytes
        lines = [f"{place}: {size:,} bytes" for place, size in sizes.items() if size]
        left = [p.numel() for p in self.parameters if p not in self.state]
        if left:
            lines.append(f"left alone: {len(left)} tensors, {sum(left):,} numbers, no step yet")
        each = sum(sizes.values()) / max(1, numbers)
        return "\n".join([*lines, f"stored: {each:.2f} bytes a parameter"])


def places_to_keep(formats: dict[str, str | PlaceFormat | None]) -> Places:
    """The places that are kept in few bits, in the order of STATE.

    A format may be a text, such as "e4m3:block", in which v and root are stochastic unless it says
    `nearest`. A PlaceFormat is taken as it is. None keeps a place in float32. Raises ValueError as
    `places_of` does.
    """
    places = Places()
    for name in STATE:
        form = formats.get(name)
        if not form:
            continue
        if not isinstance(form, PlaceFormat):
            entry = read_entry(name, str(form), STATE)
            form = PlaceFormat.of_entry(entry)
            rounds = form.format != format_of("fp32") and not form.stochastic
            if name in ("v", "root") and rounds and "nearest" not in entry.words:
                form = PlaceFormat(form.format, (*form.words, "stochastic"))
        check_named_once(name, places)
        places[name] = form
    return places


def refuse_wrong_settings(group: dict) -> None:
    """Raises ValueError for numbers with which Adam cannot work."""
    lr = group["lr"]
    betas = group["betas"]
    eps = group["eps"]
    if not 0 <= group["weight_decay"] < math.inf:
        raise ValueError(f"weight_decay is {group['weight_decay']}: use 0 or more")
    if not (lr >= 0 and eps >= 0 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(
            f"lr, eps and betas are {lr}, {eps} and {betas}: use at least 0, and betas below 1"
        )
