"""A run whose weights and Adam's moments are stored in few bits (places.py): in tensors of torch's float8 and 16-bit types.

Nothing of them is float32 for longer than a call. Collecting, updating and evaluating unpack the weights into the network's
parameters, which hold nothing in between; PyTorch's FSDP frees gathered parameters likewise. An update unpacks the moments, takes
Adam's step in float32, rounds, and packs. So a parameter takes a byte or two for itself and as much for each moment, and each
tensor, or each of its blocks, 4 bytes for a scale. While a call runs it takes float32 as well, and in an update a gradient. A
format that torch has no type for is stored in float32. To use a run's model yourself, do it within `run.optimizer.unpacked()`.

The step is that of a population of one (population.py), whose tensors are float32 and only hold rounded numbers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch import nn

from ..config import Config
from ..fp8 import power_of_two_scale
from ..scale import machine
from ..scale.machine import Machine
from ..train import Run
from .formats import DTYPES, blocks, unblocked
from .places import BLOCK, STATE, Kept, places_of
from .population import Adam, in_order

Row = tuple[torch.Tensor, torch.Tensor]


def pack(x: torch.Tensor, kept: Kept | None) -> Row:
    """Stores a float32 tensor that is rounded already: data of its shape in the format's type, and float32 scales, [] for the
    whole tensor or [B] for its blocks."""
    dtype, one = kept and DTYPES.get(kept.format.name), x.new_ones(())
    if not dtype or not kept.scaled:
        return x.to(dtype or torch.float32, copy=True), one
    rows = blocks(x.flatten(), BLOCK) if kept.block else x.flatten()
    scale = power_of_two_scale(rows.abs().amax(-1), kept.format.largest)
    rows = rows / scale.unsqueeze(-1)
    return (unblocked(rows, x.flatten()) if kept.block else rows).view_as(x).to(dtype), scale


def unpack(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 tensor that `pack` stored."""
    if not scale.dim():
        return data.float() * scale
    row = data.float().flatten()
    return unblocked(blocks(row, BLOCK) * scale.unsqueeze(-1), row).view_as(data)


class Packed(torch.optim.Optimizer):
    """The weights of a run and its Adam, packed. Replaces the run's optimizer and, in its state, the parts model and optimizer.
    Weights are first rounded to the nearest, whatever follows."""

    def __init__(self, run: Run):
        config, self.run, self.model, self.places = run.config, run, run.model, places_of(run.config.formats)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.named = {names[parameter]: parameter for parameter in in_order(self.model)}
        self.count, self.depth = torch.zeros(1, 1, device=run.device), 0
        super().__init__(list(self.named.values()), {"lr": config.learning_rate})
        weights = {name: p.data for name, p in self.named.items()}
        zeros = {name: torch.zeros_like(x) for name, x in weights.items()}
        self.stored: dict[str, dict[str, Row]] = {}
        self.store("weights", self.split(self.adam(weights).theta.detach()))
        self.store("m", zeros)
        self.store("v", zeros)
        self.empty()
        for name in ("update", "sync_actor", "act", "evaluate"):
            setattr(run, name, self.unpacking(getattr(run, name)))
        run.optimizer, run.state_dict, run.load_state_dict = self, self.state_of_run, self.load_state_of_run
        run.PARTS = tuple(name for name in run.PARTS if name not in ("model", "optimizer"))

    def adam(self, tensors: dict[str, torch.Tensor]) -> Adam:
        """A population's Adam for these weights."""
        sizes, theta = [x.numel() for x in tensors.values()], nn.Parameter(self.flat(tensors))
        return Adam(theta, self.param_groups[0]["lr"], [self.places], sizes, torch.tensor([self.run.seed], device=theta.device))

    def flat(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Tensors as one row [1, P]."""
        return torch.cat([tensors[name].flatten() for name in self.named]).unsqueeze(0)

    def split(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a row [1, P], by name."""
        shapes = [data.shape for data, _ in self.stored["m"].values()] if self.stored else [p.shape for p in self.named.values()]
        parts = row.squeeze(0).split([math.prod(shape) for shape in shapes])
        return {name: x.view(shape) for name, x, shape in zip(self.named, parts, shapes, strict=True)}

    def store(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Packs weights, m or v, which are rounded already."""
        kept, root = self.places.get(name), name == "v" and self.places.get("root")
        self.stored[name] = {key: pack(x.sqrt(), root) if root else pack(x, kept) for key, x in tensors.items()}

    def load(self, name: str) -> dict[str, torch.Tensor]:
        """Unpacks weights, m or v."""
        tensors = {key: unpack(*row) for key, row in self.stored[name].items()}
        return {key: x.square() for key, x in tensors.items()} if name == "v" and "root" in self.places else tensors

    def __deepcopy__(self, memo):
        raise TypeError("a run that stores its state in few bits cannot be copied: build another and load its state_dict")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Adam's step with the parameters' gradients, within `unpacked`."""
        adam = self.adam({name: p.data for name, p in self.named.items()})
        adam.first, adam.second, adam.count = self.flat(self.load("m")), self.flat(self.load("v")), self.count
        one = torch.ones_like(self.count)
        adam.step(self.flat({name: p.grad for name, p in self.named.items()}), one, one > 0)
        for name, row in {"weights": adam.theta.detach(), "m": adam.first, "v": adam.second}.items():
            self.store(name, self.split(row))
        self.fill()

    def fill(self) -> None:
        """Unpacks the weights into the network."""
        for name, x in self.load("weights").items():
            self.named[name].data = x

    def empty(self) -> None:
        """Frees the network's parameters and gradients."""
        for parameter in self.named.values():
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """The network can be used within."""
        self.depth += 1
        try:
            if self.depth == 1:
                self.fill()
            yield
        finally:
            self.depth -= 1
            if not self.depth:
                self.empty()

    def unpacking(self, function):
        """A function that can use the network."""

        @functools.wraps(function)
        def unpacked(*args, **options):
            with self.unpacked():
                return function(*args, **options)

        return unpacked

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """What is stored of weights, m or v, by parameter, with the scales."""
        rows = self.stored[name].items()
        return {key: data for key, (data, _) in rows} | {
            f"{key}.scale": x for key, (data, x) in rows if data.dtype != torch.float32
        }

    def state_dict(self) -> dict:
        """Adam's state."""
        moments = {name: self.tensors(name) for name in ("m", "v")}
        return {"formats": self.run.config.formats, "count": self.count.clone(), **moments}

    def state_of_run(self, ring: bool = True) -> dict:
        """Like Run.state_dict."""
        return {**Run.state_dict(self.run, ring), "model": self.tensors("weights"), "optimizer": self.state_dict()}

    def load_state_of_run(self, state: dict) -> None:
        """Like Run.load_state_dict. Raises ValueError, too, if the state was stored in other formats."""
        formats = self.run.config.formats
        try:
            found = {"weights": state["model"], **state["optimizer"]}
            if found.get("formats") != formats:
                raise ValueError(f"formats is {formats!r} and the checkpoint's {found.get('formats')!r}: resume with its own")
            for name in ("weights", "m", "v"):
                mine = {key: (x.shape, x.dtype) for key, x in self.tensors(name).items()}
                if mine != {key: (x.shape, x.dtype) for key, x in found[name].items()}:
                    raise ValueError(f"the checkpoint's {name} does not fit the config: resume with the run's own config")
                own = {key: x.to(self.run.device, copy=True) for key, x in found[name].items()}
                one = self.count.new_ones(())
                self.stored[name] = {key: (own[key], own.get(f"{key}.scale", one)) for key in self.named}
            self.count.copy_(found["count"])
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            self.run.close()
            if isinstance(error, ValueError):
                raise
            raise ValueError("the state does not fit the config: resume with the run's own config") from error
        Run.load_state_dict(self.run, state)

    def describe(self) -> str:
        """The type and size of all that is stored, and bytes a parameter, predicted by the formats and counted."""
        lines, predicted = [], 0
        parameters = sum(data.numel() for data, _ in self.stored["m"].values())
        for name in ("weights", "m", "v"):
            data, scales = zip(*self.stored[name].values(), strict=True)
            kept = self.places.get(name) or (self.places.get("root") if name == "v" else None)
            predicted += DTYPES.get(kept.format.name if kept else "", torch.float32).itemsize * parameters
            kind = str(data[0].dtype).removeprefix("torch.")
            scale = 0 if kind == "float32" else sum(x.nbytes for x in scales)
            held = "root of v" if name == "v" and "root" in self.places else name
            lines.append(f"{held}: {len(data)} tensors, {kind}, {sum(x.nbytes for x in data):,} bytes and {scale:,} of scales")
        counted = sum(x.nbytes for name in ("weights", "m", "v") for x in self.tensors(name).values())
        lines.append(f"stored: {counted / parameters:.2f} bytes a parameter, {predicted / parameters:.2f} without scales")
        return "\n".join(lines)


def build(config: Config, on: Machine = machine.HERE, state: dict | None = None) -> Run:
    """Like `scale.machine.build`, for configs with `formats`, too. Raises ValueError for a place that only populations have."""
    places = places_of(config.formats)
    for place in places:
        if place not in STATE:
            raise ValueError(f"formats has {place}: only populations round it, leave it out")
    if "weights" in places and config.collect_precision not in (None, config.precision):
        raise ValueError(f"collect_precision is {config.collect_precision}: leave it out, its copy of the weights is float32")
    if "weights" in places and places["weights"].block:
        raise ValueError("formats has weights in blocks: leave block out, a run keeps one scale for each tensor of weights")
    return machine.build(config, on, state, Packed)
