"""Which formats would break this training? A doctor that watches an optimizer train in float32.

Keep the numbers of one place in few bits and let everything else be as it is. Over a window of
updates let d be how far the weights move in float32, and d' how far they would move then. Their
quotient and their distance are

    progress  p = <d', d> / <d, d>        noise  q = |d' - d| / |d|

Learning breaks where p is below a quarter of float32's, or above four times it. Noise up to about
2.5 times the step hardly matters, because it averages out over updates. So few bits break learning
where they bias a sum that goes on, as weights and moments are, not where they are inaccurate
(benchmarks/law.py measures this).

Both numbers come from the updates that the training makes anyway, on a sample of each tensor's
numbers:

    weights       begin each window rounded, follow the updates of float32, and are rounded after
                  each: w' <- round(w' + update)
    m, v, root    are kept in few bits from the first update on, v' <- round(beta2 v' + (1 - beta2)
                  g^2), with the gradients of
                  float32; their update is Adam's (Kingma and Ba 2015) with what is kept

What only the loss can show needs the loss (`Doctor.look`). In windows of 8 updates its gradients
are taken once more in each of

    forward       inputs and weights of matmuls and convolutions, rounded
    backward      the gradients of their results, rounded
    others        whatever a caller computes in few bits: targets, observations

from float32's weights, and Adam takes its first steps with them. Averages that follow others, such
as target networks and running means, are shadows of the whole run, too (`Doctor.follow`): x' <-
round((1 - rate) x' + rate new). Their d is what float32 would do from where x' is. The verdict says
what becomes of the average, not whether learning minds (benchmarks/sums.py).

An acting policy mu in few bits (`Doctor.act`) learns nothing. It only takes other actions, and the
ratios pi / mu to float32's policy pi correct for them. So its numbers are others: p is the
effective sample size of these ratios as a share of the actions, 1 / E_mu[(pi / mu)^2] = 1 / E_pi[pi
/ mu], from actions of pi, and q the divergence E_pi[log pi - log mu] in nats. The policy is fine
where p is above 0.985, and breaks learning below 0.9.

A place and its format are written as in Config's field `formats` (places.py): "weights=bf16",
"v=e4m3:unscaled", "root=e4m3:stochastic". Adam takes its step from moments as they are kept,
whether the word `stored` is there or not. In p and q every tensor counts with as many numbers, or
all that it has."""

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors as flattened  # one call for all of them
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .places import PLACES, SLACK, STATE, PlaceFormat, places_of, split_entry

FORMATS = (
    "weights=bf16",
    "weights=bf16:stochastic",
    "weights=fp16",
    "weights=e4m3",
    "weights=e4m3:stochastic",
)
FORMATS += (
    "m=bf16",
    "m=e4m3",
    "m=e4m3:unscaled",
    "v=bf16",
    "v=bf16:stochastic",
    "v=fp16:unscaled",
    "v=e5m2",
    "v=e4m3",
)
FORMATS += (
    "v=e4m3:unscaled",
    "v=e4m3:stochastic",
    "root=e4m3",
    "root=e4m3:unscaled",
    "root=e4m3:stochastic",
)
FORMATS += (
    "forward=bf16",
    "forward=e4m3",
    "forward=e4m3:unscaled",
    "backward=bf16",
    "backward=fp16:unscaled",
)
FORMATS += (
    "backward=e5m2",
    "backward=e5m2:unscaled",
    "backward=e4m3",
    "backward=e4m3:unscaled",
    "acting=bf16",
    "acting=e4m3",
)
AVERAGES = ("bf16", "bf16:stochastic", "fp16:unscaled", "e4m3", "e4m3:stochastic")
OPERANDS = ("forward", "backward")
# Products, and where in their arguments the first of two operands is.
PRODUCTS = dict.fromkeys(
    (F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, F.conv1d, F.conv2d, F.conv3d), 0
)
PRODUCTS |= dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 0)
PRODUCTS |= dict.fromkeys(
    (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm), 0
)
PRODUCTS |= dict.fromkeys((torch.Tensor.mv, torch.linalg.matmul), 0)
PRODUCTS |= dict.fromkeys(
    (torch.addmm, torch.baddbmm, torch.Tensor.addmm, torch.Tensor.baddbmm, torch.einsum), 1
)
FIRST, LOOKED = 32, 8  # a window of eight looks begins at update 32, 64, 128, ...
# Factors of progress, and noise, chosen on two tasks (benchmarks/law.py)
BREAKS, UNSURE, NOISY = (
    4.0,
    3.0,
    2.5,
)
FEW, ENOUGH = 0.9, 0.985  # effective sample sizes of an acting policy, chosen on the same tasks


class Finding(NamedTuple):
    """What the doctor found of one place and format in one optimizer."""

    optimizer: str
    # Weights, m, v, root, forward, backward, acting, one of the `others` of a look, or the name of
    # an average
    place: str
    format: str  # with the words after it
    progress: float  # p, mean of the windows, or of the last ones (`verdict`); NaN if there is none
    noise: float  # q, their median
    # Share of numbers that stay the same over a window (weights, averages), or become 0 (others),
    # their median
    lost: float
    verdict: str  # fine, breaks or unknown
    why: str
    # A format of the same place, or the root of v, that the doctor has watched and found fine
    cure: str


class Report(list[Finding]):
    """The findings, in the order of the doctor's formats."""

    def to_markdown(self) -> str:
        rows = ([f"{x:.2f}" if isinstance(x, float) else x for x in finding] for finding in self)
        return "\n".join(
            f"| {' | '.join(row)} |"
            for row in (Finding._fields, ["---"] * len(Finding._fields), *rows)
        )

    __str__ = to_markdown

    def to_json(self) -> str:
        """A list of objects; NaN is null."""
        return json.dumps(
            [
                {name: None if x != x else x for name, x in finding._asdict().items()}
                for finding in self
            ],
            indent=2,
        )

    def require(self, *formats: str) -> None:
        """Raises ValueError unless each of these, such as "weights=bf16", is fine in every
        optimizer."""
        for name in formats:
            found = [finding for finding in self if f"{finding.place}={finding.format}" == name]
            if not found:
                remedies = dict.fromkeys(STATE[1:], ", and use Adam") | {
                    "weights": "",
                    "acting": ", and call the doctor's act",
                }
                remedies |= dict.fromkeys(
                    OPERANDS, ", and let the doctor look at the loss of an Adam"
                )
                remedy = remedies.get(
                    split_entry(name)[0], ", or let the doctor look at it or follow it"
                )
                raise ValueError(f"{name} was not watched: name it in the doctor's formats{remedy}")
            for finding in found:
                if finding.verdict != "fine":
                    said = f"{finding.verdict}: {finding.why}"
                    raise ValueError(
                        f"{name} is not fine in {finding.optimizer} ({said}): {finding.cure}"
                    )


class Rows:
    """Samples [C, T, P] of T tensors, each row kept in a format of its own: all of them are rounded
    at once, to the same numbers as by a `PlaceFormat`, one after the other. In NumPy, whose calls
    cost least, and without dividing by scales: a power of two only moves where a format's normal
    numbers begin. `forms`: formats without blocks, the stochastic ones last."""

    def __init__(self, forms: list[PlaceFormat], seed: int):
        if any(form.block for form in forms):
            raise ValueError(
                "formats has block: leave it out, the doctor follows a sample of each tensor"
            )

        def column(values, dtype=np.float32):
            return np.array(list(values), dtype).reshape(-1, 1, 1)

        self.ulp = column(2.0**-form.format.mantissa for form in forms)
        # A scale leaves nothing above
        self.limit = column(np.inf if form.scaled else form.format.largest for form in forms)
        # The rest in the bits of float32, where 1 << 23 is a doubling and the exponent begins at
        # 127.
        self.largest = column(form.format.largest for form in forms).view(np.int32)
        # To whole doublings; without scale none
        self.mask = column((-1 << 23 if form.scaled else 0 for form in forms), np.int32)
        self.normal = column(
            (form.format.normal + 127 + form.scaled << 23 for form in forms), np.int32
        )
        self.nearest, self.random = (
            sum("stochastic" not in form.words for form in forms),
            np.random.default_rng(seed),
        )

    def round(
        self,
        x: np.ndarray,
        least: np.ndarray,
        out: np.ndarray | None = None,
        moments: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """The rows, float32, rounded. `least` [C, T, 1]: the largest magnitude of each whole
        tensor, of which `x` is a sample. `moments`: of rows that are moments, rounded in view of
        float32's other moment as in `Places.moments`: two arrays [C, T, P], of magnitudes above 0
        up to which a number is not rounded down, and beyond which it is not rounded up."""
        bits = x.view(np.int32) & 0x7FFFFFFF
        top = np.maximum(bits.max(-1, keepdims=True), least.view(np.int32))
        # The scale is the smallest that brings `top` to at most the largest number. It multiplies
        # the smallest normal number.
        normal = np.maximum((top - self.largest - 1 & self.mask) + self.normal, 1 << 23)
        bits &= 0x7F800000
        np.maximum(bits, normal, out=bits)
        step = bits.view(np.float32)
        step *= self.ulp
        out = np.divide(x, step, out=out)
        near, rest = out[: self.nearest], out[self.nearest :]
        np.rint(near, out=near)
        if len(rest):
            down = np.floor(rest)
            rest -= down
            np.add(down, self.random.random(down.shape, np.float32) < rest, out=rest)
        if moments is not None:
            self.bound(x, out, step, *moments)
        out *= step
        np.minimum(out, self.limit, out=out)
        return np.maximum(out, -self.limit, out=out)

    @staticmethod
    def bound(
        x: np.ndarray, out: np.ndarray, step: np.ndarray, least: np.ndarray, most: np.ndarray
    ) -> None:
        """Rounds up in `out`, numbers `x` in units of `step` [C, T, P], what is below `least` or
        has become 0, and rounds towards 0 what is beyond `most`. Rows for which `least` is NaN, and
        those for which `most` is infinite, stay as they are."""
        short = (np.abs(out) * step < np.abs(x)) & (
            (np.abs(x) < least) | ((out == 0) & (x != 0) & ~np.isnan(least))
        )
        long = np.abs(out) * step > np.maximum(np.abs(x), most)
        if short.any():
            out[short] = np.ceil(x[short] / step[short])
        if long.any():
            out[long] = np.trunc(x[long] / step[long])


class Sample:
    """The numbers of T tensors that are followed, float32 [T, P]: as many of each, so a small one
    has its own several times."""

    def __init__(self, tensors: Iterable[torch.Tensor], size: int, seed: int):
        self.tensors = list(tensors)
        device, generator = self.tensors[0].device, torch.Generator().manual_seed(seed)
        each, sizes = (
            torch.arange(max(1, size // len(self.tensors))),
            [x.numel() for x in self.tensors],
        )
        self.index = [
            torch.randperm(size, generator=generator)[each % size].to(device) for size in sizes
        ]
        # Then one look at the joined tensors is faster than one at each
        self.joined = sum(sizes) <= 2**18
        begins = torch.tensor([0, *sizes, *sizes[:-1]], device=device).cumsum(0).unsqueeze(1)
        self.whole = [
            (torch.stack(self.index * n) + begins[: n * len(sizes)]).flatten() for n in (1, 2)
        ]
        # Of each of the numbers, in sums
        self.share = np.minimum(np.array(sizes, np.float32).reshape(-1, 1) / len(each), 1)

    @torch.no_grad()
    def read(self, tensors: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Those of the tensors as they are now, or of others like them, or of two lists of them, on
        their device."""
        tensors = tensors or self.tensors
        times = len(tensors) // len(self.index)
        if self.joined:
            return flattened(tensors).index_select(0, self.whole[times - 1]).view(len(tensors), -1)
        return torch.stack(
            [x.reshape(-1)[index] for x, index in zip(tensors, self.index * times, strict=True)]
        )

    def take(self, tensors: list[torch.Tensor] | None = None) -> np.ndarray:
        """The same in NumPy. Waits for a GPU."""
        return self.read(tensors).float().cpu().numpy()

    def sums(self, moved: np.ndarray, true: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """<d, d>, <d', d>, |d' - d|^2 and the share lost of each of C rows [C, T, P], float64 [4,
        C]."""
        true = np.broadcast_to(true, moved.shape)
        share = lost / (self.share.sum() * moved.shape[-1])
        parts = true * true, moved * true, (moved - true) ** 2, share
        return np.stack([(self.share * x).sum((1, 2), dtype=np.float64) for x in parts])


def numbers_of(sums: np.ndarray, rate: float) -> np.ndarray:
    """Progress, noise, the share lost and the learning rate of each of C rows, float64 [C, 4], from
    their `Sample.sums`."""
    with np.errstate(invalid="ignore", divide="ignore"):  # where nothing moves
        return np.stack(
            (sums[1] / sums[0], np.sqrt(sums[2] / sums[0]), sums[3], np.full(len(sums[0]), rate)),
            axis=1,
        )


def by_name(names: list[str], windows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers [W, 4] of W windows [C, 4], for each of C names."""
    return {
        name: np.reshape([window[i] for window in windows], (-1, 4)) for i, name in enumerate(names)
    }


def dense(parameters: list[torch.Tensor], tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Tensors like these parameters, zeros where there is none."""
    pairs = zip(parameters, tensors, strict=True)
    return [
        torch.zeros_like(p) if x is None else x.to_dense() if x.is_sparse else x for p, x in pairs
    ]


def apart(parameters: list[torch.Tensor], function: Callable):
    """What a function returns, which draws the same random numbers as another one, and leaves the
    generators as they are."""
    with torch.random.fork_rng([p.device for p in parameters[:1] if p.is_cuda]):
        return function()


def largest_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each, float32 [T, 1]."""
    return torch.stack(
        [torch.linalg.vector_norm(x.detach(), torch.inf).float() for x in tensors]
    ).unsqueeze(1)


def read(text: str, names: tuple[str, ...]) -> list[tuple[str, PlaceFormat, str]]:
    """The place, format and text of each entry in a text, which must be one."""
    found = [(*entry, text) for entry in places_of(text, names).items()]
    if len(found) != 1:
        raise ValueError(
            f"formats has {text!r}: give each place and format once, as a string of its own"
        )
    return found


class Average:
    """An average that follows others, seen before every step, as it would be in few bits from the
    beginning. It forgets, so one that hardly moves falls behind and is pulled the harder, which d
    has to count. Sums are taken over a quarter of the windows, because in some it hardly has to
    move."""

    def __init__(
        self,
        name: str,
        rate: float | Callable[[], float],
        formats: Iterable[str],
        length: int,
        sample: Sample,
    ):
        self.rate, self.length, self.sample = rate, length, sample
        kept = [(f"{name}={form}", read(f"weights={form}", STATE)[0][1]) for form in formats]
        kept.sort(key=lambda entry: "stochastic" in entry[1].words)
        self.names, self.format, self.x = (
            [text for text, _ in kept],
            Rows([form for _, form in kept], 0),
            None,
        )
        self.windows: list[np.ndarray] = []  # `Sample.sums` of each

    @torch.no_grad()
    def look(self, *_) -> None:
        before, self.x = self.x, (x := self.sample.take())
        if before is None:
            self.begin(np.repeat(x[None], len(self.names), 0))
            self.rows = self.start = self.format.round(self.rows, self.least)
        elif not np.array_equal(x, before):
            rate = self.rate() if callable(self.rate) else self.rate
            pull = x - (1 - rate) * before - rate * self.rows
            self.true += pull
            self.rows = self.format.round(self.rows + pull, self.least)
            self.count += 1
            if self.count == self.length:
                moved = self.rows - self.start
                self.windows.append(
                    self.sample.sums(moved, self.true, (moved == 0) & (self.true != 0))
                )
                self.begin(self.rows)

    def begin(self, rows: np.ndarray) -> None:
        """Begins a window."""
        self.rows, self.start, self.true, self.count = rows, rows, np.zeros_like(rows), 0
        self.least = largest_of(self.sample.tensors).cpu().numpy()

    @property
    def found(self) -> dict[str, np.ndarray]:
        """The numbers of each quarter of the windows."""
        parts = [part for part in np.array_split(np.array(self.windows), 4) if len(part)]
        numbers = [
            numbers_of(np.concatenate((part[:, :3].sum(0), part[:, 3:].mean(0))), 1.0)
            for part in parts
        ]
        return by_name(self.names, numbers)


class Through(torch.autograd.Function):
    """The same numbers, rounded, and their gradient, rounded."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return Through.rounded(x, there)

    @staticmethod
    def backward(ctx, grad):
        return Through.rounded(grad, ctx.back), None, None

    @staticmethod
    def rounded(x: torch.Tensor, form: PlaceFormat | None) -> torch.Tensor:
        return x.view_as(x) if form is None else form(x.reshape(1, -1)).reshape(x.shape)


class Operands(TorchFunctionMode):
    """Where it is entered, matmuls and convolutions round their two operands, and the gradients of
    their results. Recurrent layers, and attention with its projections, are left as they are,
    because torch computes them in calls of their own."""

    def __init__(self, forward: PlaceFormat | None = None, backward: PlaceFormat | None = None):
        super().__init__()
        self.there, self.back, self.seen = forward, backward, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        first = PRODUCTS.get(func, len(args))
        operands = slice(first, first + 2)
        if len(args[operands]) < 2:
            return func(*args, **(kwargs or {}))
        self.seen, args = self.seen + 1, list(args)
        args[operands] = (Through.apply(x, self.there, None) for x in args[operands])
        return Through.apply(func(*args, **(kwargs or {})), None, self.back)

    def within(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self:
            found = loss()
        if not self.seen:
            raise ValueError(
                "loss or policy has no matmul that can be rounded: leave out forward, "
                "backward and acting"
            )
        return found


class Watched:
    """One optimizer, seen through its hooks. They read weights, gradients and settings, and change
    nothing. A hook is called at every update of a training that waits for it, so it only records
    the update; the updates of a window are replayed at its end.

    A row follows each format: `kept` [N + 1, C, T, P] are P weights, moments or roots of each of T
    tensors as they would be kept at the beginning of a window and after each of its N updates, and
    `kind` [C] says which, by its index in STATE. The first two rows are float32's own m and v."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        formats: list[str],
        length: int,
        sample: int,
        seed: int,
    ):
        self.name, self.optimizer, self.length = name, optimizer, length
        pairs = [(p, i) for i, p in self.all() if p.requires_grad and p.numel()]
        # A loaded optimizer has new groups
        self.parameters, self.group = (
            [p for p, _ in pairs],
            [i for _, i in pairs],
        )
        if not pairs:
            raise ValueError(f"{name} has no parameters that learn: leave it out")
        if found := {p.dtype for p in self.parameters} - {torch.float32}:
            raise ValueError(
                f"parameters are {found.pop()}: let the doctor watch a training in float32"
            )
        self.adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
        self.adam = self.adam and not any(group["amsgrad"] for group in optimizer.param_groups)
        kept = [
            entry
            for text in formats
            for entry in read(text, STATE)
            if self.adam or entry[0] == "weights"
        ]
        kept.sort(key=lambda entry: ("stochastic" in entry[1].words, STATE.index(entry[0])))
        self.names, self.windows = [text for *_, text in kept], []  # `numbers_of` each
        kept = [entry for text in ("m=fp32", "v=fp32") for entry in read(text, STATE)] + kept
        self.kind = np.array([STATE.index(place) for place, *_ in kept])
        self.weights, self.roots = (
            (self.kind == 0).reshape(-1, 1, 1),
            np.flatnonzero(self.kind == STATE.index("root")),
        )
        # Rows that Places.moments rounds with a limit
        self.bounded = np.array([not form.independent for _, form, _ in kept])
        self.sample, self.format = (
            Sample(self.parameters, sample, seed),
            Rows([form for _, form, _ in kept], seed),
        )
        self.kept, self.versions, self.updates, self.looks = None, None, 0, Looks(self)
        self.hooks = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        ]
        self.hooks.append(optimizer.register_load_state_dict_post_hook(self.loaded))

    def all(self) -> list[tuple[int, torch.Tensor]]:
        """The optimizer's parameters as they are now, with the number of their group."""
        return [
            (i, p) for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]
        ]

    def reading(self) -> list[tuple[float, ...]]:
        """The settings of each group as they are now: learning rate, betas, eps, the decay of
        weights that goes into gradients, and the sign of gradients. Groups that are added later are
        left out."""
        found = []
        for group in self.optimizer.param_groups[: max(self.group) + 1]:
            coupled = not (
                isinstance(self.optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
            )
            adams = (
                (*group["betas"], group["eps"], coupled and group["weight_decay"])
                if self.adam
                else (0, 0, 1, 0)
            )
            found.append((*map(float, (group["lr"], *adams)), -1 if group.get("maximize") else 1))
        return found

    def settings(self, readings) -> np.ndarray:
        """Those of N readings, for each parameter, float32 [6, N, T, 1], or [6, N, 1, 1] if there
        is one group."""
        found = np.asarray(readings, np.float32)
        return np.moveaxis(found if found.shape[1] == 1 else found[:, self.group], -1, 0)[..., None]

    def trouble(self) -> str:
        """Why nothing can be said, or an empty string."""
        if {id(p) for p in self.parameters} != {
            id(p) for _, p in self.all() if p.requires_grad and p.numel()
        }:
            return "other parameters learn than at first"
        return (
            ""
            if all(p.isfinite().all() for p in self.parameters)
            else "float32 itself has become infinite or NaN"
        )

    def moment(self, name: str) -> list[torch.Tensor]:
        """A tensor of the optimizer's state for each parameter; zeros before the first step."""
        return dense(
            self.parameters, [self.optimizer.state.get(p, {}).get(name) for p in self.parameters]
        )

    def before(self, optimizer, args, kwargs) -> None:
        versions = [p._version for p in self.parameters]
        # As they were after the last step
        self.weight = self.now if versions == self.versions else self.sample.read()
        if self.kept is None:
            self.steps = max(
                int(self.optimizer.state.get(p, {}).get("step", 0)) for p in self.parameters
            )
            m, v = (self.sample.take(self.moment(name)) for name in ("exp_avg", "exp_avg_sq"))
            self.kept = np.empty((self.length + 1, len(self.kind), *m.shape), np.float32)
            self.begin(np.stack((m, m, v, np.sqrt(v)))[self.kind])
            self.format.round(self.kept[0], self.least, out=self.kept[0])

    def loaded(self, optimizer) -> None:
        """Begins anew, with the moments that the optimizer has loaded."""
        self.kept, self.looks.new = None, None

    def begin(self, rows: np.ndarray) -> None:
        """Begins a window with these rows, but with the weights of float32."""
        tops = [self.parameters, *(self.moment(name) for name in ("exp_avg", "exp_avg_sq"))]
        weights, moments, squares = (
            torch.stack([largest_of(tensors) for tensors in tops]).cpu().numpy()
        )
        self.least = np.stack((weights, moments, squares, np.sqrt(squares)))[self.kind]
        fresh = self.format.round(np.broadcast_to(self.sample.take(), rows.shape), self.least)
        self.kept[0] = np.where(self.weights, fresh, rows)
        # Updates that are replayed, and those that are only recorded
        self.window, self.new = (
            [],
            [],
        )

    def after(self, optimizer, args, kwargs) -> None:
        gradients = [p.grad for p in self.parameters]
        both, live = (
            self.sample.read([*self.parameters, *dense(self.parameters, gradients)]),
            [g is not None for g in gradients],
        )
        if getattr(optimizer, "found_inf", None) or len(self.optimizer.param_groups) <= max(
            self.group
        ):
            self.looks.new = None
            # Without a group that learned (`trouble`), or where a GradScaler lets a fused optimizer
            # skip the step
            return
        self.now, self.versions, self.updates = (
            both[: len(live)],
            [p._version for p in self.parameters],
            self.updates + 1,
        )
        self.looks.after(both, self.weight)
        self.new.append((self.weight, both, live, self.reading()))
        if len(self.window) + len(self.new) == self.length:
            self.replay()
        if len(self.window) == self.length:
            self.judge()
            self.begin(self.kept[-1])

    def replay(self) -> None:
        """Follows the updates that were recorded since the last replay: the recursion of each row,
        and nothing else."""
        if not self.new:
            return
        weight, both, live, readings = zip(*self.new, strict=True)
        self.new, weight, both = [], *(torch.stack(x).cpu().numpy() for x in (weight, both))
        now, g = np.split(both, 2, axis=1)
        finite, all_live = np.isfinite(g).all((1, 2)), [*map(all, live)]
        _, beta1, beta2, _, decay, sign = self.settings(readings)
        live, update, g = np.array(live)[..., None], now - weight, sign * g + decay * weight
        keeps = np.stack((np.ones_like(beta1), beta1, beta2, beta2), axis=1)[:, self.kind]
        adds = np.stack((update, (1 - beta1) * g, (1 - beta2) * g * g), axis=1)
        kind = np.minimum(self.kind, 2)
        for i in np.flatnonzero(finite):
            old, new = self.kept[len(self.window) : len(self.window) + 2]
            rows = old.copy()
            rows[self.roots] *= rows[self.roots]
            rows *= keeps[i]
            rows += adds[i].take(kind, 0)
            rows[self.roots] = np.sqrt(rows[self.roots])
            self.format.round(rows, self.least, new, self.bounds(rows, beta1[i], beta2[i]))
            if not all_live[i]:  # the optimizer leaves them and their moments alone
                np.copyto(new, old, where=~live[i])
            self.window.append((update[i], live[i], readings[i]))
            self.steps += 1

    def bounds(self, rows: np.ndarray, beta1, beta2) -> tuple[np.ndarray, np.ndarray]:
        """What `Rows.round` takes as `moments`, for rows [C, T, P] of which the first two are
        float32's m and v."""
        step = self.steps + 1
        limit = SLACK * (1 - beta1**step) / np.sqrt(1 - beta2**step)  # as in Places.moments
        m, root = np.abs(rows[0]), np.sqrt(rows[1])
        least = np.full_like(rows, np.nan)
        least[self.bounded & (self.kind == STATE.index("v"))] = (m / limit) ** 2
        least[self.bounded & (self.kind == STATE.index("root"))] = m / limit
        most = np.full_like(rows, np.inf)
        most[self.bounded & (self.kind == STATE.index("m"))] = limit * root
        return least, most

    def moved(self) -> np.ndarray:
        """How far each row's weights have moved in the window, float32 [C, T, P]: those of moments
        by Adam's steps, without their sign, with what is kept."""
        _, live, readings = map(np.array, zip(*self.window, strict=True))
        lr, beta1, beta2, eps, *_ = self.settings(readings)
        steps = np.arange(self.steps - len(live) + 1, self.steps + 1, dtype=np.float32).reshape(
            -1, 1, 1
        )
        correction, kept = np.sqrt(1 - beta2**steps), self.kept[1 : len(live) + 1]
        size = live * lr / (1 - beta1**steps)
        m, divisor, moved = (
            size * kept[:, 0],
            np.sqrt(kept[:, 1]) / correction + eps,
            kept[-1] - self.kept[0],
        )
        for row, kind in enumerate(self.kind):
            if STATE[kind] == "m":
                moved[row] = (size * kept[:, row] / divisor).sum(0)
            elif STATE[kind] != "weights":
                root = kept[:, row] if STATE[kind] == "root" else np.sqrt(kept[:, row])
                moved[row] = (m / (root / correction + eps)).sum(0)
        return moved

    def judge(self) -> None:
        """Ends a window with its numbers."""
        moved, update, (m, v) = (
            self.moved(),
            np.array([update for update, *_ in self.window]).sum(0),
            self.kept[-1, :2],
        )
        true = np.stack((update, moved[1]))[np.minimum(self.kind, 1)]
        kept, exact = (
            np.where(self.weights, moved, self.kept[-1]),
            np.stack((update, m, v, v))[self.kind],
        )
        sums = self.sample.sums(moved, true, (kept == 0) & (exact != 0))[:, 2:]
        self.windows.append(numbers_of(sums, self.settings([self.window[-1][-1]])[0].max()))


class Looks:
    """Windows of updates in which Adam's steps are taken with other gradients in place of the
    training's. `rows` [2, C, T, P] are the moments of each, the training's own first. They begin at
    0, because Adam's own would carry on the training's direction."""

    def __init__(self, watched: Watched):
        self.watched, self.next, self.new, self.count = watched, FIRST, None, 0
        self.names, self.windows = [], []

    def look(self, losses: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Takes the gradients of losses at the weights as they are, of which the first is the
        training's."""
        if self.watched.adam and not (self.windows or self.count):
            self.names = [*losses][1:]
        if self.watched.adam and self.watched.updates >= self.next:
            self.new = [self.gradient(loss) for loss in losses.values()]

    def gradient(self, loss: Callable[[], torch.Tensor]) -> tuple[np.ndarray, float]:
        """The sample of a loss's gradient and its whole L2 norm. Every loss draws the same random
        numbers."""
        parameters, live = (
            self.watched.parameters,
            [p for p in self.watched.parameters if p.requires_grad],
        )
        with torch.enable_grad():
            gradients = apart(
                parameters, lambda: torch.autograd.grad(loss(), live, allow_unused=True)
            )
        found = dict(zip(map(id, live), gradients, strict=True))
        found = dense(parameters, [found.get(id(p)) for p in parameters])
        return self.watched.sample.take(found), float(torch.stack([x.norm() for x in found]).norm())

    def after(self, both: torch.Tensor, weight: torch.Tensor) -> None:
        """Takes the steps of an update from the weights before it and the gradients of the
        training, if it was looked at."""
        new, self.new, watched = self.new, None, self.watched
        g = both[len(weight) :].cpu().numpy() if new else None
        # Of a window every update is looked at, or it is given up
        if new is None or not np.isfinite(g).all():
            self.count = 0
            return
        (own, norm), *others = new
        factor = float(
            (g * own).sum(dtype=np.float64) / max((own * own).sum(dtype=np.float64), 1e-38)
        )
        if np.abs(g - factor * own).max() > 1e-2 * np.abs(g).max():
            raise ValueError(
                "loss has another gradient than the training: "
                "let it return the loss of the update that follows"
            )
        # A factor below 1 is taken for a clipped norm, to which the others are clipped, too.
        rest = [
            x * (min(1, factor * norm / max(size, 1e-38)) if factor < 1 else factor)
            for x, size in others
        ]
        lr, beta1, beta2, eps, decay, sign = (x[0] for x in watched.settings([watched.reading()]))
        gradients = sign * np.stack([g, *rest]) + decay * weight.cpu().numpy()
        if not self.count:
            self.rows, self.moved = (
                np.zeros((2, *gradients.shape), np.float32),
                np.zeros_like(gradients),
            )
        betas = np.stack((beta1, beta2))[:, None]
        self.rows = betas * self.rows + (1 - betas) * np.stack((gradients, gradients * gradients))
        self.count += 1
        size, correction = lr / (1 - beta1**self.count), np.sqrt(1 - beta2**self.count)
        self.moved += size * self.rows[0] / (np.sqrt(self.rows[1]) / correction + eps)
        if self.count == LOOKED:
            lost = (gradients[1:] == 0) & (gradients[0] != 0)
            self.windows.append(
                numbers_of(watched.sample.sums(self.moved[1:], self.moved[0], lost), lr.max())
            )
            self.count, self.next = 0, 2 * self.next


class Doctor:
    """Watches one or more optimizers from now on. Raises ValueError for a format as `places_of`
    does, for one in blocks or given twice, and for parameters that are not float32.

        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> doctor = Doctor(optimizer)
        >>> for _ in range(64):
        ...     model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> doctor.report().require("weights=bf16:stochastic")

    `formats`: the places and formats to judge; those of operands are judged where `look` is called.
    An optimizer that is not Adam or AdamW, or that uses amsgrad, is judged by its weights alone.
    `length`: updates in a window. `sample`: numbers followed in each optimizer, as many of each
    tensor; it keeps 4 (length + 1) bytes for each number and format. `names`: what reports call the
    optimizers."""

    def __init__(
        self,
        *optimizers: torch.optim.Optimizer,
        formats=FORMATS,
        length=32,
        sample=512,
        seed=0,
        names=(),
    ):
        names, self.formats = (
            names or [f"optimizer {i}" for i in range(len(optimizers))],
            tuple(formats),
        )
        if len(self.formats) != len({*self.formats}):
            raise ValueError(
                f"formats is {' '.join(self.formats)!r}: give each place and format once, "
                "as a string of its own"
            )
        if type(length) is not int or length < 1:
            raise ValueError(f"length is {length!r}: use a whole number of updates, at least 1")
        entries = [
            entry for text in self.formats for entry in read(text, (*STATE, *OPERANDS, "acting"))
        ]
        self.operands = {
            text: Operands(**{place: form}) for place, form, text in entries if place in OPERANDS
        }
        self.acting = {text: Operands(form) for place, form, text in entries if place == "acting"}
        state = [text for text in self.formats if text not in self.operands | self.acting]
        self.watched = [
            Watched(n, o, state, length, sample, seed)
            for n, o in zip(names, optimizers, strict=True)
        ]
        self.averages: list[Average] = []
        self.acted: list[np.ndarray] = []  # numbers [C, 4] of each `act`

    @classmethod
    def of(cls, model, **options) -> "Doctor":
        """A doctor of all the optimizers that a model of Stable-Baselines3, or another object,
        holds in itself or in its attributes. Raises ValueError if there is none."""
        found = {}
        for name, part in {"": model, **vars(model)}.items():
            for own, value in vars(part).items() if hasattr(part, "__dict__") else ():
                if isinstance(value, torch.optim.Optimizer):
                    found.setdefault(id(value), (f"{name}.{own}".lstrip("."), value))
        if not found:
            raise ValueError(
                f"model is a {type(model).__name__} without optimizers: give them to Doctor itself"
            )
        names, optimizers = zip(*found.values(), strict=True)
        return cls(*optimizers, names=names, **options)

    def look(
        self, loss: Callable[[], torch.Tensor], optimizer: str | None = None, others=()
    ) -> None:
        """Judges what only the loss can show. Call it before every update, where its loss is
        computed: `loss` returns that loss, a scalar with gradient, and leaves nothing changed
        behind (batch normalization in training would count its batch again). `optimizer`: the name
        of the one that steps on it, if there are several. `others`: losses with something in few
        bits, by place and format, {"targets=e4m3": function}.

            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            >>> doctor, x = Doctor(optimizer), torch.randn(8, 4)
            >>> for _ in range(80):
            ...     doctor.look(lambda: model(x).square().mean())
            ...     optimizer.zero_grad()
            ...     model(x).square().mean().backward()
            ...     optimizer.step()
            >>> doctor.report().require("forward=bf16", "backward=e5m2")

        It looks at 8 updates in a row from update 32, 64, 128, ... on, and otherwise returns at
        once. Raises ValueError, at the step, if the gradient is not the training's but for a
        factor, such as a scaled loss or a clipped norm."""
        found = [watched for watched in self.watched if optimizer in (None, watched.name)]
        if len(found) != 1:
            raise ValueError(
                f"optimizer is {optimizer!r}: choose from "
                f"{', '.join(watched.name for watched in self.watched)}"
            )

        losses = {text: partial(mode.within, loss) for text, mode in self.operands.items()} | dict(
            others
        )
        if wrong := [name for name in losses if "=" not in name]:
            raise ValueError(
                f"others has {wrong[0]!r}: name each by place and format, as in targets=e4m3"
            )
        if losses and self.watched[0].hooks:
            found[0].looks.look({"": loss} | losses)

    @torch.no_grad()
    def act(self, logp: Callable[[], torch.Tensor]) -> None:
        """Judges an acting policy in few bits. Call it now and then: `logp` returns the
        log-probabilities of actions that the policy took, of any shape, as it computes them now.

            >>> policy, obs = torch.nn.Linear(4, 2), torch.randn(8, 4)
            >>> actions = torch.ones(8, 1).long()
            >>> doctor = Doctor(torch.optim.Adam(policy.parameters()))
            >>> doctor.act(lambda: policy(obs).log_softmax(-1).gather(-1, actions))
            >>> doctor.report().require("acting=bf16")
        """
        if self.acting and self.watched[0].hooks:
            parameters = self.watched[0].parameters
            exact, *low = (
                apart(parameters, each)
                for each in (logp, *(partial(x.within, logp) for x in self.acting.values()))
            )
            # Pi / mu
            log_ratios = exact.double().flatten() - torch.stack(
                [each.double().flatten() for each in low]
            )
            if log_ratios.numel():
                # A policy that is no number has no actions
                size = (1 / log_ratios.exp().mean(1)).nan_to_num(0.0)
                numbers = torch.stack(
                    (size, log_ratios.mean(1), torch.zeros_like(size), torch.ones_like(size)), dim=1
                )
                self.acted.append(numbers.cpu().numpy())

    def follow(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        rate,
        formats: Iterable[str] = AVERAGES,
        sample=512,
    ) -> None:
        """Judges an average that something else updates, x <- (1 - rate) x + rate new, float32: a
        target network's parameters, a running mean. `rate`: a number, or a function of nothing that
        returns it. It is looked at before each step of the first optimizer, and may be updated once
        between two of them. Raises ValueError for tensors of another type, a rate that is no number
        above 0, and the name of a place."""
        first, tensors = self.watched[0], [x for x in tensors if x.numel()]
        if (types := {str(x.dtype) for x in tensors}) != {"torch.float32"}:
            raise ValueError(
                f"tensors of {name} are {', '.join(sorted(types)) or 'none'}: give float32"
            )
        if not callable(rate) and not (isinstance(rate, float | int) and 0 < rate <= 1):
            raise ValueError(
                f"rate is {rate!r}: give a number above 0 and up to 1, "
                "or a function of nothing that returns it"
            )
        if name in PLACES or "=" in name:
            raise ValueError(
                f"name is {name!r}: choose one that is no place of {', '.join(PLACES)} and has no ="
            )
        self.averages.append(Average(name, rate, formats, first.length, Sample(tensors, sample, 0)))
        first.hooks.append(first.optimizer.register_step_pre_hook(self.averages[-1].look))

    def stop(self) -> None:
        """Watches no longer."""
        for watched in self.watched:
            for hook in watched.hooks:
                hook.remove()
            watched.hooks = []

    def report(self) -> Report:
        """What was found so far."""
        report = Report()
        for watched in self.watched:
            looked, trouble = by_name(watched.looks.names, watched.looks.windows), watched.trouble()
            both = by_name(watched.names, watched.windows) | looked
            order = [text for text in dict.fromkeys((*self.formats, *both)) if text in both]
            own = [finding(watched.name, both, text, text in looked) for text in order]
            report += (
                [f._replace(verdict="unknown", why=trouble, cure="") for f in own]
                if trouble
                else own
            )
        acted = by_name([*self.acting], self.acted) if self.acted else {}
        for name, found in (
            ("policy", acted),
            *(("average", average.found) for average in self.averages),
        ):
            report += [finding(name, found, text) for text in found]
        return report


def finding(
    optimizer: str, windows: dict[str, np.ndarray], text: str, looked: bool = False
) -> Finding:
    """The verdict on a format, and its cure. `looked`: whether it is one of `Looks`."""
    place, form = split_entry(text)
    bare = form.split(":")[0]
    cures = [f"{place}={bare}", f"{place}={form}:stochastic", f"{place}={bare}:stochastic"]
    cures += [f"root={form}", f"root={bare}", f"root={bare}:stochastic"] * (place == "v")
    found = verdict(place, windows[text], looked)
    good = [
        cure for cure in cures if cure in windows and verdict(place, windows[cure])[3] == "fine"
    ]
    cure = "" if found[3] == "fine" else f"use {good[0]}" if good else "keep it in float32"
    cure = cure if len(windows[text]) else "train longer"
    return Finding(optimizer, place, form, *found, cure)


def verdict(
    place: str, windows: np.ndarray, looked: bool = False
) -> tuple[float, float, float, str, str]:
    """Progress, noise, the share lost, the verdict and why, from the numbers [W, 4] of windows.
    Where the last quarter of them is worse although the learning rate has not fallen to half, it
    counts: what has come to a stop then stays there."""
    found = np.asarray(windows)
    if np.isnan(found[:, 0]).all():
        return (
            math.nan,
            math.nan,
            math.nan,
            "unknown",
            "the training ended before a window was full, or moved nothing",
        )
    late = found[-max(1, len(found) // 4) :]
    parts = (
        [found, late]
        if late[:, 3].mean() > found[:, 3].max() / 2 and not np.isnan(late[:, 0]).all()
        else [found]
    )
    part = max(parts, key=lambda part: away(float(np.nanmean(part[:, 0]))))
    progress, noise, lost = (
        float(np.nanmean(part[:, 0])),
        *(float(np.nanmedian(x)) for x in (found[:, 1], part[:, 2])),
    )
    if place == "acting":
        why = f"effective sample size {progress:.2g}: the ratios of its actions are too uneven"
        found = (
            ("fine", "") if progress >= ENOUGH else ("breaks" if progress < FEW else "unknown", why)
        )
        return progress, noise, lost, *found
    factor = away(progress)
    if factor <= UNSURE and noise <= NOISY:
        return progress, noise, lost, "fine", ""
    if noise > NOISY and factor <= UNSURE:
        why = f"noise is {noise:.1f} times the step"
    elif place in STATE[1:]:
        kept = "roots of v" if place == "root" else place
        why = f"{kept} do not follow float32's, because their changes are too small for the format"
        if lost > 0.01:
            why = (
                f"{lost:.0%} of the {kept} are kept as 0"
                + ", and Adam then divides by eps alone" * (place != "m")
            )
    elif looked:
        why = (
            f"{lost:.0%} of the gradients become 0"
            if lost > 0.01
            else "the gradients do not follow float32's"
        )
    else:
        why = (
            f"{lost:.0%} of the numbers stay the same in a window: "
            "most steps are too small for the format"
        )
    if factor <= BREAKS:
        return progress, noise, lost, "unknown", why
    return progress, noise, lost, "breaks", f"progress is {progress:.2g} times float32's: {why}"


def away(progress: float) -> float:
    """The factor by which progress is away from 1."""
    return max(progress, 1 / progress) if progress > 0 else math.inf
