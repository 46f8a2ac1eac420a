"""Which formats would break this training? A doctor that watches an optimizer train in float32.

Keep the numbers of one place in few bits and let everything else be as it is. Over a window of updates let d be how far the
weights move in float32, and d' how far they would move then. Their quotient and their distance are

    progress  p = <d', d> / <d, d>        noise  q = |d' - d| / |d|

Learning breaks where p is below a quarter of float32's, or above four times it. Noise up to about 2.5 times the step hardly
matters, because it averages out over updates. So few bits break learning where they bias a sum that goes on, as weights and
moments are, not where they are inaccurate (benchmarks/law.py measures this).

Both numbers come from the updates that the training makes anyway, on a sample of each tensor's numbers:

    weights       begin each window rounded, follow the updates of float32, and are rounded after each: w' <- round(w' + update)
    m, v, root    are kept in few bits from the first update on, v' <- round(beta2 v' + (1 - beta2) g^2), with the gradients of
                  float32; their update is Adam's (Kingma and Ba 2015) with what is kept

What only the loss can show needs the loss (`Doctor.look`). In windows of 8 updates its gradients are taken once more in each of

    forward       inputs and weights of matmuls and convolutions, rounded
    backward      the gradients of their results, rounded
    others        whatever a caller computes in few bits: targets, observations

from float32's weights, and Adam takes its first steps with them. Averages that follow others, such as target networks and running
means, are shadows of the whole run, too (`Doctor.follow`): x' <- round((1 - rate) x' + rate new). Their d is what float32 would
do from where x' is. The verdict says what becomes of the average, not whether learning minds (benchmarks/sums.py).

A place and its format are written as in Config's field `formats` (places.py): "weights=bf16", "v=e4m3:unscaled",
"root=e4m3:stochastic". Adam takes its step from moments as they are kept, whether the word `stored` is there or not. All formats
are followed at once, as the rows of one array. In p and q every tensor counts with as many numbers, or all that it has.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .places import PLACES, STATE, PlaceFormat, places_of

FORMATS = ("weights=bf16", "weights=bf16:stochastic", "weights=fp16", "weights=e4m3", "weights=e4m3:stochastic")
FORMATS += ("m=bf16", "m=e4m3", "m=e4m3:unscaled", "v=bf16", "v=bf16:stochastic", "v=fp16:unscaled", "v=e5m2", "v=e4m3")
FORMATS += ("v=e4m3:unscaled", "v=e4m3:stochastic", "root=e4m3", "root=e4m3:unscaled", "root=e4m3:stochastic")
FORMATS += ("forward=bf16", "forward=e4m3", "forward=e4m3:unscaled", "backward=bf16", "backward=fp16:unscaled")
FORMATS += ("backward=e5m2", "backward=e5m2:unscaled", "backward=e4m3", "backward=e4m3:unscaled")
AVERAGES = ("bf16", "bf16:stochastic", "fp16:unscaled", "e4m3", "e4m3:stochastic")
OPERANDS = ("forward", "backward")
# Products, and where in their arguments the first of two operands is.
PRODUCTS = dict.fromkeys((F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, F.conv1d, F.conv2d, F.conv3d), 0)
PRODUCTS |= dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 0)
PRODUCTS |= dict.fromkeys((torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm), 0)
PRODUCTS |= dict.fromkeys((torch.addmm, torch.baddbmm, torch.Tensor.addmm, torch.Tensor.baddbmm, torch.einsum), 1)
FIRST, LOOKED = 32, 8  # a window of eight looks begins at update 32, 64, 128, ...
BREAKS, UNSURE, NOISY = 4.0, 3.0, 2.5  # factors of progress, and noise, chosen on two tasks (benchmarks/law.py)


class Finding(NamedTuple):
    """What the doctor found of one place and format in one optimizer."""

    optimizer: str
    place: str  # weights, m, v, root, forward, backward, one of the `others` of a look, or the name of an average
    format: str  # with the words after it
    progress: float  # p, mean of the windows, or of the last ones (`verdict`); NaN if there is none
    noise: float  # q, their median
    lost: float  # share of numbers that stay the same over a window (weights, averages), or become 0 (others), their median
    verdict: str  # fine, breaks or unknown
    why: str
    cure: str  # a format of the same place, or the root of v, that the doctor has watched and found fine


class Report(list[Finding]):
    """The findings, in the order of the doctor's formats."""

    def to_markdown(self) -> str:
        rows = [[f"{x:.2f}" if isinstance(x, float) else x for x in finding] for finding in self]
        return "\n".join(f"| {' | '.join(row)} |" for row in (Finding._fields, ["---"] * len(Finding._fields), *rows))

    __str__ = to_markdown

    def to_json(self) -> str:
        """A list of objects; NaN is null."""
        return json.dumps([{name: None if x != x else x for name, x in finding._asdict().items()} for finding in self], indent=2)

    def require(self, *formats: str) -> None:
        """Raises ValueError unless each of these, such as "weights=bf16", is fine in every optimizer."""
        for name in formats:
            found = [finding for finding in self if f"{finding.place}={finding.format}" == name]
            if not found:
                remedy = "let the doctor look at the loss" if name.startswith(OPERANDS) else "use Adam for m, v and root"
                raise ValueError(f"{name} was not watched: name it in the doctor's formats, and {remedy}")
            for finding in found:
                if finding.verdict != "fine":
                    raise ValueError(
                        f"{name} is not fine in {finding.optimizer} ({finding.verdict}: {finding.why}): {finding.cure}"
                    )


class Rows:
    """Samples [C, T, P] of T tensors, each row kept in a format of its own: all of them are rounded at once, to the same numbers
    as by a `PlaceFormat`, one after the other. In NumPy, whose calls cost least. `forms`: formats without blocks, with those that
    round stochastically last."""

    def __init__(self, forms: list[PlaceFormat], seed: int):
        if any(form.block for form in forms):
            raise ValueError("formats has block: leave it out, the doctor follows a sample of each tensor")

        def column(values):
            return np.array(list(values), np.float32).reshape(-1, 1, 1)

        self.normal = column(2.0**form.format.normal for form in forms)
        self.ulp = column(2.0**-form.format.mantissa for form in forms)
        self.largest = column(form.format.largest for form in forms)
        self.limit, self.exponent = np.frexp(self.largest)
        self.plain = column(form.scaled for form in forms) == 0
        self.nearest, self.random = sum("stochastic" not in form.words for form in forms), np.random.default_rng(seed)

    def round(self, x: np.ndarray, least: np.ndarray) -> np.ndarray:
        """The rows, float32, rounded. `least` [C, T, 1]: the largest magnitude of each whole tensor, of which `x` is a sample."""
        mantissa, exponent = np.frexp(np.maximum(np.abs(x).max(-1, keepdims=True), least))
        exponent = np.clip(exponent - self.exponent + (mantissa > self.limit), -126, 128 - self.exponent)
        exponent[self.plain[:, 0, 0]] = 0
        scale = np.ldexp(np.float32(1), exponent)  # fp8.power_of_two_scale
        x = x / scale
        step = (x.view(np.int32) & 0x7F800000).view(np.float32)
        np.maximum(step, self.normal, out=step)
        step *= self.ulp
        x /= step
        whole = np.rint(x)
        if self.nearest < len(x):
            down = np.floor(rest := x[self.nearest :])
            whole[self.nearest :] = down + (self.random.random(down.shape, np.float32) < rest - down)
        whole *= step
        np.clip(whole, -self.largest, self.largest, out=whole)
        whole *= scale
        return whole


class Sample:
    """The numbers of T tensors that are followed, float32 [T, P]: as many of each, so a small one has its own several times."""

    def __init__(self, tensors: Iterable[torch.Tensor], size: int, seed: int):
        self.tensors = list(tensors)
        device, generator = self.tensors[0].device, torch.Generator().manual_seed(seed)
        each, sizes = torch.arange(max(1, size // len(self.tensors))), [x.numel() for x in self.tensors]
        self.index = [torch.randperm(size, generator=generator)[each % size].to(device) for size in sizes]
        self.joined = sum(sizes) <= 2**18  # then one look at the joined tensors is faster than one at each
        self.whole = (torch.stack(self.index) + torch.tensor([0, *sizes[:-1]], device=device).cumsum(0).unsqueeze(1)).flatten()
        self.share = np.minimum(np.array(sizes, np.float32).reshape(-1, 1) / len(each), 1)  # of each of the numbers, in sums

    @torch.no_grad()
    def take(self, tensors: Iterable[torch.Tensor] = ()) -> np.ndarray:
        """Those of the tensors as they are now, or of others like them. Waits for a GPU."""
        flat = [x.reshape(-1) for x in tensors or self.tensors]
        if self.joined:
            return torch.cat(flat).index_select(0, self.whole).view(len(flat), -1).float().cpu().numpy()
        return torch.stack([x[index].float() for x, index in zip(flat, self.index, strict=True)]).cpu().numpy()

    def sums(self, moved: np.ndarray, true: np.ndarray, lost: np.ndarray) -> np.ndarray:
        """<d, d>, <d', d>, |d' - d|^2 and the share lost of each of C rows [C, T, P], float64 [4, C]."""
        true = np.broadcast_to(true, moved.shape)
        share = lost / (self.share.sum() * moved.shape[-1])
        parts = true * true, moved * true, (moved - true) ** 2, share
        return np.stack([(self.share * x).sum((1, 2), dtype=np.float64) for x in parts])


def numbers_of(sums: np.ndarray, rate: float) -> np.ndarray:
    """Progress, noise, the share lost and the learning rate of each of C rows, float64 [C, 4], from their `Sample.sums`."""
    with np.errstate(invalid="ignore", divide="ignore"):  # where nothing moves
        return np.stack((sums[1] / sums[0], np.sqrt(sums[2] / sums[0]), sums[3], np.full(len(sums[0]), rate)), axis=1)


def by_name(names: list[str], windows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers [W, 4] of W windows [C, 4], for each of C names."""
    whole = np.stack(windows) if windows else np.empty((0, len(names), 4))
    return {name: whole[:, i] for i, name in enumerate(names)}


def largest_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each, float32 [T, 1]."""
    return torch.stack([x.detach().abs().max().float() for x in tensors]).unsqueeze(1)


def read(text: str, names: tuple[str, ...]) -> list[tuple[str, PlaceFormat, str]]:
    """The place, format and text of each entry in a text, which must be one."""
    found = [(*entry, text) for entry in places_of(text, names).items()]
    if len(found) != 1:
        raise ValueError(f"formats has {text!r}: give each place and format once, as a string of its own")
    return found


class Average:
    """An average that follows others, seen before every step, as it would be in few bits from the beginning. Progress compares
    how far it moves with how far float32 would move it from where it is: an average forgets, so one that hardly moves falls
    behind, and is pulled the harder. Sums are taken over a quarter of the windows, because in some it hardly has to move."""

    def __init__(self, name: str, rate: float | Callable[[], float], formats: Iterable[str], length: int, sample: Sample):
        self.rate, self.length, self.sample = rate, length, sample
        kept = [(f"{name}={form}", read(f"weights={form}", STATE)[0][1]) for form in formats]
        kept.sort(key=lambda entry: "stochastic" in entry[1].words)
        self.names, self.format, self.x = [text for text, _ in kept], Rows([form for _, form in kept], 0), None
        self.windows: list[np.ndarray] = []  # `Sample.sums` of each

    @torch.no_grad()
    def look(self, *_) -> None:
        x, before = self.sample.take(), self.x
        self.x = x
        if before is None:
            self.least = largest_of(self.sample.tensors).cpu().numpy()
            self.rows = self.format.round(np.broadcast_to(x, (len(self.names), *x.shape)), self.least)
            self.begin()
        elif not np.array_equal(x, before):
            rate = self.rate() if callable(self.rate) else self.rate
            pull = x - (1 - rate) * before - rate * self.rows
            self.true += pull
            self.rows = self.format.round(self.rows + pull, self.least)
            self.count += 1
            if self.count == self.length:
                moved = self.rows - self.start
                self.windows.append(self.sample.sums(moved, self.true, (moved == 0) & (self.true != 0)))
                self.begin()

    def begin(self) -> None:
        """Begins a window."""
        self.start, self.true, self.count = self.rows, np.zeros_like(self.rows), 0
        self.least = largest_of(self.sample.tensors).cpu().numpy()

    @property
    def found(self) -> dict[str, np.ndarray]:
        """The numbers of each quarter of the windows."""
        parts = [part for part in np.array_split(np.array(self.windows), 4) if len(part)]
        numbers = [numbers_of(np.concatenate((part[:, :3].sum(0), part[:, 3:].mean(0))), 1.0) for part in parts]
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
    """Where it is entered, matmuls and convolutions round their two operands, and the gradients of their results. The kernels of
    recurrent layers and of attention are left as they are."""

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


class Watched:
    """One optimizer, seen through its hooks. They read weights, gradients and settings, and change nothing.

    A row follows each format: `rows` [C, T, P] are P weights, moments or roots of each of T tensors as they would be kept, and
    `kind` [C] says which, by its index in STATE. `m` and `v` [T, P] are float32's."""

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, formats: tuple[str, ...], length: int, sample: int, seed: int
    ):
        self.name, self.optimizer, self.length = name, optimizer, length
        pairs = [(p, i) for i, p in self.all() if p.requires_grad and p.numel()]
        self.parameters, self.group = [p for p, _ in pairs], [i for _, i in pairs]  # a loaded optimizer has new groups
        if not pairs:
            raise ValueError(f"{name} has no parameters that learn: leave it out")
        if found := {p.dtype for p in self.parameters} - {torch.float32}:
            raise ValueError(f"parameters are {found.pop()}: let the doctor watch a training in float32")
        self.adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
        self.adam = self.adam and not any(group["amsgrad"] for group in optimizer.param_groups)
        kept = [entry for text in formats for entry in read(text, STATE) if self.adam or entry[0] == "weights"]
        kept.sort(key=lambda entry: ("stochastic" in entry[1].words, STATE.index(entry[0])))
        self.kind = np.array([STATE.index(place) for place, *_ in kept], int)
        self.weights, edges = (self.kind == 0).reshape(-1, 1, 1), [0, *np.flatnonzero(np.diff(self.kind)) + 1, len(kept)]
        self.parts = [(STATE[self.kind[i]], slice(i, j)) for i, j in itertools.pairwise(edges) if i < j]
        self.sample, self.format = Sample(self.parameters, sample, seed), Rows([form for _, form, _ in kept], seed)
        self.names, self.windows = [text for *_, text in kept], []  # `numbers_of` each
        self.rows, self.versions, self.updates, self.looks = None, None, 0, Looks(self)
        self.hooks = [optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)]

    def all(self) -> list[tuple[int, torch.Tensor]]:
        """The optimizer's parameters as they are now, with the number of their group."""
        return [(i, p) for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]]

    def of(self, name: str, part: int | None = None) -> np.ndarray:
        """A setting of the optimizer for each parameter, float32 [T, 1], or [1, 1] if there is one group."""
        groups = self.optimizer.param_groups
        values = [float(group[name] if part is None else group[name][part]) for group in groups]
        return np.array(values if len(groups) == 1 else [values[i] for i in self.group], np.float32).reshape(-1, 1)

    def trouble(self) -> str:
        """Why nothing can be said, or an empty string."""
        if {id(p) for p in self.parameters} != {id(p) for _, p in self.all() if p.requires_grad and p.numel()}:
            return "other parameters learn than at first"
        return "" if all(p.isfinite().all() for p in self.parameters) else "float32 itself has become infinite or NaN"

    def moment(self, name: str) -> list[torch.Tensor]:
        """A tensor of the optimizer's state for each parameter; zeros before the first step."""
        found = [self.optimizer.state.get(p, {}).get(name) for p in self.parameters]
        return [torch.zeros_like(p) if x is None else x for p, x in zip(self.parameters, found, strict=True)]

    @torch.no_grad()
    def before(self, optimizer, args, kwargs) -> None:
        versions = [p._version for p in self.parameters]
        self.weight = self.now if versions == self.versions else self.sample.take()  # as they were after the last step
        if self.rows is None:
            self.steps = max(int(self.optimizer.state.get(p, {}).get("step", 0)) for p in self.parameters)
            self.m, self.v = (self.sample.take(self.moment(name)) for name in ("exp_avg", "exp_avg_sq"))
            self.rows = np.stack((self.weight, self.m, self.v, np.sqrt(self.v)))[self.kind]
            self.begin()
            self.rows = self.format.round(self.rows, self.least)

    def begin(self) -> None:
        """Begins a window, in which weights are those of float32 at first."""
        tops = [self.parameters, *(self.moment(name) for name in ("exp_avg", "exp_avg_sq"))]
        weights, moments, squares = torch.stack([largest_of(tensors) for tensors in tops]).cpu().numpy()
        self.least = np.stack((weights, moments, squares, np.sqrt(squares)))[self.kind]
        fresh = self.format.round(np.broadcast_to(self.sample.take(), self.rows.shape), self.least)
        self.rows = np.where(self.weights, fresh, self.rows)
        self.start = self.rows.copy()
        self.moved, self.true, self.count = np.zeros_like(self.rows), np.zeros((2, *self.m.shape), np.float32), 0

    @torch.no_grad()
    def after(self, optimizer, args, kwargs) -> None:
        gradients = [p.grad if p.grad is None or not p.grad.is_sparse else p.grad.to_dense() for p in self.parameters]
        missing = [gradient is None for gradient in gradients]
        if any(missing):
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, gradients, strict=True)]
        g = self.sample.take(gradients)
        if getattr(optimizer, "found_inf", None) or not np.isfinite(g).all():
            self.looks.new = None
            return  # a GradScaler lets a fused optimizer skip the step; it also unscales the gradients in place
        self.now, self.versions = self.sample.take(), [p._version for p in self.parameters]
        update = self.now - self.weight
        self.updates += 1
        self.true[0] += update
        if self.adam:
            self.steps += 1
            self.looks.after(g)
            self.follow(self.whole(g), update, missing)
        else:
            self.rows = self.format.round(self.rows + update, self.least)
        self.count += 1
        if self.count == self.length:
            self.judge()
            self.begin()

    def whole(self, g: np.ndarray) -> np.ndarray:
        """Gradients as Adam takes them, with its decay of weights in them."""
        if any(group["maximize"] for group in self.optimizer.param_groups):
            g = g * (1 - 2 * self.of("maximize"))
        decays = any(group["weight_decay"] for group in self.optimizer.param_groups)
        if not decays or isinstance(self.optimizer, torch.optim.AdamW):
            return g
        coupled = [not group.get("decoupled_weight_decay", False) for group in self.optimizer.param_groups]
        coupled = np.array([coupled[i] for i in self.group]).reshape(-1, 1)
        return g + coupled * self.of("weight_decay") * self.weight

    def step(self, steps: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """Adam's step, without its sign, after so many: a function of m and the root of v."""
        size, correction = self.of("lr") / (1 - self.of("betas", 0) ** steps), np.sqrt(1 - self.of("betas", 1) ** steps)
        eps = self.of("eps")
        return lambda m, divisor: size * m / (divisor / correction + eps)

    def follow(self, g: np.ndarray, update: np.ndarray, missing: list[bool]) -> None:
        """Takes Adam's step with each row in place of what float32 keeps."""
        beta1, beta2 = self.of("betas", 0), self.of("betas", 1)
        old, first, second = self.rows.copy() if any(missing) else None, (1 - beta1) * g, (1 - beta2) * g * g
        for place, part in self.parts:  # in place, a part of the rows at a time: every update of a training waits for this
            rows = self.rows[part]
            if place == "root":
                rows *= rows
            if place != "weights":
                rows *= beta1 if place == "m" else beta2
            rows += update if place == "weights" else first if place == "m" else second
            if place == "root":
                np.sqrt(rows, out=rows)
        rows = self.format.round(self.rows, self.least)
        m, v = self.m * beta1 + first, self.v * beta2 + second
        live = ~np.array(missing).reshape(-1, 1)
        if old is not None:  # the optimizer leaves them and their moments alone
            rows, m, v = (np.where(live, new, old) for new, old in ((rows, old), (m, self.m), (v, self.v)))
        self.rows, self.m, self.v = rows, m, v
        true, step = np.sqrt(v), self.step(self.steps)
        for place, part in self.parts:
            if place == "m":
                self.moved[part] += live * step(rows[part], true)
            elif place != "weights":
                self.moved[part] += live * step(m, rows[part] if place == "root" else np.sqrt(np.abs(rows[part])))
        self.true[1] += live * step(m, true)

    def judge(self) -> None:
        """Ends a window with its numbers."""
        moved, true = np.where(self.weights, self.rows - self.start, self.moved), self.true[np.minimum(self.kind, 1)]
        kept, exact = np.where(self.weights, moved, self.rows), np.stack((self.true[0], self.m, self.v, self.v))[self.kind]
        self.windows.append(numbers_of(self.sample.sums(moved, true, (kept == 0) & (exact != 0)), self.of("lr").max()))


class Looks:
    """Windows of updates in which Adam's steps are taken with other gradients in place of the training's. `rows` [2, C, T, P] are
    the moments of each, the training's own first. They begin at 0, because Adam's own would carry on the training's direction."""

    def __init__(self, watched: Watched):
        self.watched, self.next, self.new, self.count = watched, FIRST, None, 0
        self.names, self.windows = [], []

    def look(self, losses: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Takes the gradients of losses at the weights as they are, of which the first is the training's."""
        if self.watched.adam and self.watched.updates >= self.next:
            self.names = self.names or [*losses][1:]
            self.new = [self.gradient(loss) for loss in losses.values()]

    def gradient(self, loss: Callable[[], torch.Tensor]) -> tuple[np.ndarray, float]:
        """The sample of a loss's gradient and its whole L2 norm. Every loss draws the same random numbers."""
        parameters = self.watched.parameters
        with torch.enable_grad(), torch.random.fork_rng([p.device for p in parameters[:1] if p.is_cuda]):
            live = [p for p in parameters if p.requires_grad]
            found = dict(zip(map(id, live), torch.autograd.grad(loss(), live, allow_unused=True), strict=True))
        found = [torch.zeros_like(p) if found.get(id(p)) is None else found[id(p)] for p in parameters]
        return self.watched.sample.take(found), float(torch.stack([x.norm() for x in found]).norm())

    def after(self, g: np.ndarray) -> None:
        """Takes the steps of an update from the gradients g of the training, if it was looked at."""
        new, self.new, watched = self.new, None, self.watched
        if new is None:  # of a window every update is looked at, or it is given up
            self.count = 0
            return
        (own, norm), *others = new
        factor = float((g * own).sum(dtype=np.float64) / max((own * own).sum(dtype=np.float64), 1e-38))
        if np.abs(g - factor * own).max() > 1e-2 * np.abs(g).max():
            raise ValueError("loss has another gradient than the training: let it return the loss of the update that follows")
        # A factor below 1 is taken for a clipped norm, to which the others are clipped, too.
        rest = [x * (min(1, factor * norm / max(size, 1e-38)) if factor < 1 else factor) for x, size in others]
        gradients = watched.whole(np.stack([g, *rest]))
        if not self.count:
            self.rows, self.moved = np.zeros((2, *gradients.shape), np.float32), np.zeros_like(gradients)
        betas = np.stack((watched.of("betas", 0), watched.of("betas", 1)))[:, None]
        self.rows = betas * self.rows + (1 - betas) * np.stack((gradients, gradients * gradients))
        self.count += 1
        self.moved += watched.step(self.count)(self.rows[0], np.sqrt(self.rows[1]))
        if self.count == LOOKED:
            lost = (gradients[1:] == 0) & (gradients[0] != 0)
            self.windows.append(numbers_of(watched.sample.sums(self.moved[1:], self.moved[0], lost), watched.of("lr").max()))
            self.count, self.next = 0, 2 * self.next


class Doctor:
    """Watches one or more optimizers from now on. Raises ValueError for a format as `places_of` does, for one in blocks or given
    twice, and for parameters that are not float32.

        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> doctor = Doctor(optimizer)
        >>> for _ in range(64):
        ...     model(torch.ones(8, 4)).square().mean().backward()
        ...     optimizer.step()
        >>> doctor.report().require("weights=bf16:stochastic")

    `formats`: the places and formats to judge; those of operands are judged where `look` is called. An optimizer that is not Adam
    or AdamW, or that uses amsgrad, is judged by its weights alone. `length`: updates in a window. `sample`: numbers followed in
    each optimizer, as many of each tensor. `names`: what reports call the optimizers."""

    def __init__(
        self, *optimizers: torch.optim.Optimizer, formats=FORMATS, length: int = 32, sample: int = 512, seed=0, names=()
    ):
        names, self.formats = names or [f"optimizer {i}" for i in range(len(optimizers))], tuple(formats)
        if len(self.formats) != len({*self.formats}):
            raise ValueError(f"formats is {' '.join(self.formats)!r}: give each place and format once, as a string of its own")
        entries = [entry for text in self.formats for entry in read(text, (*STATE, *OPERANDS))]
        self.operands = {text: Operands(**{place: form}) for place, form, text in entries if place in OPERANDS}
        state = [text for text in self.formats if text not in self.operands]
        self.watched = [Watched(n, o, state, length, sample, seed) for n, o in zip(names, optimizers, strict=True)]
        self.averages: list[Average] = []

    @classmethod
    def of(cls, model, **options) -> "Doctor":
        """A doctor of all the optimizers that a model of Stable-Baselines3, or another object, holds in itself or in its
        attributes. Raises ValueError if there is none."""
        found = {}
        for name, part in {"": model, **vars(model)}.items():
            for own, value in vars(part).items() if hasattr(part, "__dict__") else ():
                if isinstance(value, torch.optim.Optimizer):
                    found.setdefault(id(value), (f"{name}.{own}".lstrip("."), value))
        if not found:
            raise ValueError(f"model is a {type(model).__name__} without optimizers: give them to Doctor itself")
        names, optimizers = zip(*found.values(), strict=True)
        return cls(*optimizers, names=names, **options)

    def look(self, loss: Callable[[], torch.Tensor], optimizer: str | None = None, others=()) -> None:
        """Judges what only the loss can show. Call it before every update, where its loss is computed: `loss` returns that loss,
        a scalar with gradient, and leaves nothing changed behind (batch normalization in training would count its batch again).
        `optimizer`: the name of the one that steps on it, if there are several. `others`: losses with something in few bits, by
        place and format, {"targets=e4m3": function}.

            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            >>> doctor, x = Doctor(optimizer), torch.randn(8, 4)
            >>> for _ in range(80):
            ...     doctor.look(lambda: model(x).square().mean())
            ...     optimizer.zero_grad()
            ...     model(x).square().mean().backward()
            ...     optimizer.step()
            >>> doctor.report().require("forward=bf16", "backward=e5m2")

        It looks at 8 updates in a row from update 32, 64, 128, ... on, and otherwise returns at once. Raises ValueError, at the
        step, if the gradient is not the training's but for a factor, such as a scaled loss or a clipped norm."""
        found = [watched for watched in self.watched if optimizer in (None, watched.name)]
        if len(found) != 1:
            raise ValueError(f"optimizer is {optimizer!r}: choose from {', '.join(watched.name for watched in self.watched)}")

        def within(mode: Operands) -> Callable[[], torch.Tensor]:
            def rounded():
                with mode:
                    found = loss()
                if not mode.seen:
                    raise ValueError("loss has no matmul that can be rounded: give formats without forward and backward")
                return found

            return rounded

        losses = {text: within(mode) for text, mode in self.operands.items()} | dict(others)
        if wrong := [name for name in losses if "=" not in name]:
            raise ValueError(f"others has {wrong[0]!r}: name each by place and format, as in targets=e4m3")
        if losses and self.watched[0].hooks:
            found[0].looks.look({"": loss} | losses)

    def follow(self, name: str, tensors: Iterable[torch.Tensor], rate, formats: Iterable[str] = AVERAGES, sample=512) -> None:
        """Judges an average that something else updates, x <- (1 - rate) x + rate new, float32: a target network's parameters, a
        running mean. `rate`: a number, or a function of nothing that returns it. It is looked at before each step of the first
        optimizer, and may be updated once between two of them. Raises ValueError for tensors of another type, a rate that is no
        number above 0, and the name of a place."""
        first, tensors = self.watched[0], list(tensors)
        if not tensors or {x.dtype for x in tensors} != {torch.float32}:
            raise ValueError(
                f"tensors of {name} are {', '.join(sorted({str(x.dtype) for x in tensors})) or 'none'}: give float32"
            )
        if not callable(rate) and not (isinstance(rate, float | int) and 0 < rate <= 1):
            raise ValueError(f"rate is {rate!r}: give a number above 0 and up to 1, or a function of nothing that returns it")
        if name in PLACES or "=" in name:
            raise ValueError(f"name is {name!r}: choose one that is no place of {', '.join(PLACES)} and has no =")
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
            report += [f._replace(verdict="unknown", why=trouble, cure="") for f in own] if trouble else own
        for average in self.averages:
            found = average.found
            report += [finding("average", found, text) for text in found]
        return report


def finding(optimizer: str, windows: dict[str, np.ndarray], text: str, looked: bool = False) -> Finding:
    """The verdict on a format, and its cure. `looked`: whether it is one of `Looks`."""
    place, form = text.split("=", 1)
    bare = form.split(":")[0]
    cures = [f"{place}={bare}", f"{place}={form}:stochastic", f"{place}={bare}:stochastic"]
    cures += [f"root={form}", f"root={bare}", f"root={bare}:stochastic"] * (place == "v")
    found = verdict(place, windows[text], looked)
    good = [cure for cure in cures if cure in windows and verdict(place, windows[cure])[3] == "fine"]
    cure = "" if found[3] == "fine" else f"use {good[0]}" if good else "keep it in float32"
    return Finding(optimizer, place, form, *found, cure)


def verdict(place: str, windows: np.ndarray, looked: bool = False) -> tuple[float, float, float, str, str]:
    """Progress, noise, the share lost, the verdict and why, from the numbers [W, 4] of windows. Where the last quarter of them is
    worse although the learning rate has not fallen to half, it counts: what has come to a stop then stays there."""
    found = np.asarray(windows)
    if np.isnan(found[:, 0]).all():
        return math.nan, math.nan, math.nan, "unknown", "the training ended before a window was full, or moved nothing"
    late = found[-max(1, len(found) // 4) :]
    parts = [found, late] if late[:, 3].mean() > found[:, 3].max() / 2 and not np.isnan(late[:, 0]).all() else [found]
    part = max(parts, key=lambda part: away(float(np.nanmean(part[:, 0]))))
    progress, noise, lost = float(np.nanmean(part[:, 0])), *(float(np.nanmedian(x)) for x in (found[:, 1], part[:, 2]))
    factor = away(progress)
    if factor <= UNSURE and noise <= NOISY:
        return progress, noise, lost, "fine", ""
    if noise > NOISY and factor <= UNSURE:
        why = f"noise is {noise:.1f} times the step"
    elif place in STATE[1:]:
        kept = "roots of v" if place == "root" else place
        why = f"{kept} do not follow float32's, because their changes are too small for the format"
        if lost > 0.01:
            why = f"{lost:.0%} of the {kept} are kept as 0" + ", and Adam then divides by eps alone" * (place != "m")
    elif looked:
        why = f"{lost:.0%} of the gradients become 0" if lost > 0.01 else "the gradients do not follow float32's"
    else:
        why = f"{lost:.0%} of the numbers stay the same in a window: most steps are too small for the format"
    if factor <= BREAKS:
        return progress, noise, lost, "unknown", why
    return progress, noise, lost, "breaks", f"progress is {progress:.2g} times float32's: {why}"


def away(progress: float) -> float:
    """The factor by which progress is away from 1."""
    return max(progress, 1 / progress) if progress > 0 else math.inf
