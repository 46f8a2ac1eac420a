"""Running averages of a script's weights, found without being named.

Target networks, EMA and SWA are tensors beside the weights of a network. Each update moves such a
tensor x towards the weights p that it averages, by the same share tau of the way for all its
numbers:

    x <- x + tau (p - x)        0 < tau < 1

The doctor looks for tensors that do so. At the optimizer's steps 32, 256, 2048, ... it lists the
float32 tensors of the process that have the shape of a parameter and that no optimizer trains or
keeps. Those that move are read before each step. tau is fitted to each move, by least squares. A
tensor that moves in another way is dropped at once. A tensor whose moves are explained by tau, up
to the rounding of float32, is a running average.

A copy of the weights (tau = 1) is none. An average whose tensors are replaced by new ones, instead
of being changed in place, is not found.

Everything is held by weak references, and nothing is changed.
"""

import gc
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..bits.places import PlaceFormat
from .averages import AVERAGES, Average
from .findings import Finding
from .sample import Sample

FIRST_SEARCH = 32  # the step at which tensors are listed for the first time
SEARCHES_APART = 8  # each search comes at so many times the steps of the one before
PERIOD = 32  # tensors that have not moved yet are compared every so many steps
MOVES = 3  # an average is found after so many moves in a row that tau explains
NUMBERS = 16  # how many of its numbers must be seen to do so
LEADING = 8  # how many numbers a tensor must have, for tau to be fitted to it alone
SAMPLED = 32  # how many numbers of a tensor are read during a search
# A script may keep thousands of tensors that have the shape of a bias, such as observations. If
# there are more than so many times the parameters of a shape, none of them is read.
CROWD = 16
COPY = 0.999  # a larger share is a copy of the weights
# A move is explained if it differs from tau (p - x) by less than this, relative to |x| + |p|. The
# plain ways to write the update differ by a fifth of it, because they round up to three times.
ROUNDING = 2.0**-23
SAME = 4  # shares that differ by less than so many times their errors are the same
CLEAR = 8  # a move must be so many times as long, or it says nothing
PLAIN = (torch.Tensor, nn.Parameter)  # types of tensors that can be read without side effects


class Move(NamedTuple):
    """How well a move of some numbers is explained by a share of the way to others.

    Of several moves, each field is an array.

    `share`     the share that explains most of the move, by least squares
    `error`     how far the share may be off because of rounding
    `length`    norm of the move
    `residual`  norm of what the share does not explain
    `rounding`  norm of what rounding may do
    """

    share: float
    error: float
    length: float
    residual: float
    rounding: float

    @classmethod
    def of(cls, old: np.ndarray, new: np.ndarray, p: np.ndarray) -> "Move":
        """The move of P numbers from `old` to `new`, towards `p`: [P], or [N, P] for N moves."""
        old, new, p = (np.asarray(x, np.float64) for x in (old, new, p))
        move = new - old
        way = p - old
        distance = np.maximum(np.linalg.norm(way, axis=-1), 1e-150)
        share = (move * way).sum(-1) / distance**2
        rounding = ROUNDING * np.linalg.norm(np.abs(old) + np.abs(p), axis=-1)
        residual = np.linalg.norm(move - share[..., None] * way, axis=-1)
        return cls(share, rounding / distance, np.linalg.norm(move, axis=-1), residual, rounding)

    @property
    def is_explained(self) -> bool:
        return self.residual <= self.rounding

    @property
    def is_clear(self) -> bool:
        """Whether the move is long enough to tell an average from something else."""
        return self.length > CLEAR * self.rounding

    def differs_from(self, other: "Move") -> float:
        """How far two shares differ, in units of what rounding may do to them."""
        return abs(self.share - other.share) / (self.error + other.error + 1e-150)


class Candidate:
    """A tensor that may be a running average, or a part of one.

    `owner`      what it belongs to: an identity of a module, or 0
    `value`      its sampled numbers, when they were read last
    `parameter`  number of the parameter that it averages; None before its first explained move
    `moves`      explained moves so far
    `copies`     how often it has become a copy of the parameter
    """

    def __init__(self, tensor: torch.Tensor, owner: int):
        self.reference = weakref.ref(tensor)
        self.shape = tensor.shape
        self.owner = owner
        self.value: np.ndarray | None = None
        self.parameter: int | None = None
        self.moves = 0
        self.copies = 0

    def best_move(
        self, value: np.ndarray, weights: dict[int, np.ndarray], leading: Move | None = None
    ) -> tuple[int, Move]:
        """The move to a new value, towards the parameter that explains it best, with its number.

        `weights` has the parameters by number. If another tensor leads, its move counts, too.
        """
        if self.parameter is not None:
            weights = {self.parameter: weights[self.parameter]}
        moves = {t: Move.of(self.value, value, p) for t, p in weights.items()}

        def misfit(t: int) -> float:
            residual = moves[t].residual / (moves[t].rounding + 1e-150)
            return residual + (moves[t].differs_from(leading) if leading else 0)

        number = min(moves, key=misfit)
        return number, moves[number]


class FoundAverage:
    """A running average that was found, followed from then on.

    `name`     its name in reports, without tau
    `average`  what few bits would make of it
    `shares`   the shares tau of its first and its last clear move
    `moves`    how often it has moved since it was found
    """

    def __init__(
        self,
        name: str,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        tensor_names: list[str],
        length: int,
        size: int,
        share: float,
    ):
        """`pairs` has tensors of the average, each with the parameter that it averages."""
        tensors = [x for x, _ in pairs]
        parameters = [p for _, p in pairs]
        entries = [(f"average={form}", PlaceFormat.of(form)) for form in AVERAGES]
        self.name = name
        self.average = Average(self.last_share, tensors, tensor_names, entries, length, size)
        self.parameters = [weakref.ref(p) for p in parameters]
        # The same numbers of the parameters, which may lie on another device
        self.sample = Sample(parameters, size, 0)
        self.shares = [share, share]
        self.moves = 0
        self.recorded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.last: torch.Tensor | None = None  # the average, when it was read last
        self.average.look()  # where it begins

    def last_share(self) -> float:
        return self.shares[1]

    def record(self) -> None:
        """Reads the average and the weights, before a step. A GPU is not waited for."""
        tensors = self.average.tensors
        parameters = [reference() for reference in self.parameters]
        if not tensors or any(p is None for p in parameters):
            return  # the script has dropped them
        x = sampled(self.average.sample, tensors)
        if x.device.type == "cpu" and self.last is not None and torch.equal(x, self.last):
            return  # it has not moved (a GPU would be waited for to know)
        self.last = x
        self.recorded.append((x, sampled(self.sample, parameters)))
        if len(self.recorded) == PERIOD:
            self.replay()

    def replay(self) -> None:
        """Follows the average through what was recorded."""
        if not self.recorded:
            return
        recorded, self.recorded = self.recorded, []
        averages = torch.stack([x for x, _ in recorded]).cpu().numpy()  # [N, T, P]
        weights = torch.stack([p for _, p in recorded]).cpu().numpy()
        before = np.concatenate((self.average.x[None], averages[:-1]))
        moves = Move.of(*(x.reshape(len(x), -1) for x in (before, averages, weights)))
        self.moves += int((moves.length > 0).sum())
        is_average = moves.is_clear & moves.is_explained
        is_other = moves.is_clear & ~moves.is_explained
        for n, x in enumerate(averages):
            if is_average[n]:
                self.shares[1] = min(float(moves.share[n]), 1.0)
            elif is_other[n]:
                self.average.x = None  # other code has changed it: begin again from there
            self.average.follow(x, self.shares[1])

    def findings(self, name: str, tolerates: tuple[float, float]) -> list[Finding]:
        """The findings so far, under a name in reports."""
        return self.average.findings(name, tolerates)

    def __str__(self) -> str:
        first, last = (f"{share:.2g}" for share in self.shares)
        return f"{self.name} (tau {first if first == last else f'{first} to {last}'})"


class AverageSearch:
    """Looks for running averages of an optimizer's parameters, and follows those that it finds.

    `watched`     the WatchedOptimizer whose parameters may be averaged. Call `before_step` before
                  each of its steps.
    `optimizers`  all optimizers of the process (hooks.Optimizers), whose tensors are no averages
    """

    def __init__(self, watched, optimizers):
        self.watched = watched
        self.optimizers = optimizers
        self.steps = 0
        self.next_search = FIRST_SEARCH
        self.still: list[Candidate] = []  # have not moved since they were listed
        self.moving: list[Candidate] = []  # have moved, and are read before each step
        self.found: list[FoundAverage] = []
        self.is_schedule_free = False  # whether evaluation has other weights, which are not stored
        self.index: dict[torch.Size, torch.Tensor] = {}  # which numbers are read, by shape

    @torch.no_grad()
    def before_step(self) -> None:
        parameters = self.watched.parameters
        if not parameters:
            return  # the script has dropped them
        for average in self.found:
            average.record()
        if self.moving:
            self.test_moves(parameters)
        if self.still and self.steps % PERIOD == 0:
            self.notice_moves()
        self.steps += 1
        if self.steps == self.next_search:
            self.next_search *= SEARCHES_APART
            self.search(parameters)

    def search(self, parameters: list[torch.Tensor]) -> None:
        """Lists the tensors that may be averages, beside those that are listed already."""
        self.is_schedule_free = any("train_mode" in group for group in self.watched.groups)
        self.is_schedule_free &= any("z" in state for state in self.watched.states())
        counts: dict[torch.Size, int] = {}
        for p in parameters:
            counts[p.shape] = counts.get(p.shape, 0) + 1
        by_shape: dict[torch.Size, list[torch.Tensor]] = {shape: [] for shape in counts}
        for x in gc.get_objects():
            if type(x) in PLAIN and x.dtype == torch.float32 and x.shape in by_shape:
                by_shape[x.shape].append(x)
        trained = self.ids_of_optimizers()
        listed = {id(x) for c in self.still + self.moving if (x := c.reference()) is not None}
        listed |= {id(x) for average in self.found for x in average.average.tensors}
        tensors = []
        for shape, alike in by_shape.items():
            alike = [x for x in alike if id(x) not in trained and can_be_read(x)]
            if len(alike) <= CROWD * (1 + counts[shape]):
                tensors += [x for x in alike if id(x) not in listed]
        if not tensors:
            return
        owners = owners_of(tensors, trained)
        self.still += [Candidate(x, owners.get(id(x), 0)) for x in tensors]
        self.notice_moves()

    def ids_of_optimizers(self) -> set[int]:
        """The identities of all parameters that optimizers train, of their gradients, and of the
        tensors of their state."""
        ids = set()
        for number in range(len(self.optimizers)):
            optimizer = self.optimizers[number]
            if optimizer is None:
                continue
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.requires_grad:
                        ids |= {id(p), id(p.grad)}
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    ids |= {id(x) for x in state.values()}
        return ids

    def read(self, tensors: list[torch.Tensor]) -> list[np.ndarray]:
        """Sampled numbers of tensors as they are now, the same numbers for the same shape."""
        samples = []
        for x in tensors:
            if x.shape not in self.index:
                draw = torch.Generator(device="cpu").manual_seed(0)
                order = torch.randperm(x.numel(), generator=draw, device="cpu")
                self.index[x.shape] = order[:SAMPLED]
            samples.append(x.detach().reshape(-1)[self.index[x.shape].to(x.device)])
        values = []
        for device in {x.device for x in samples}:  # one transfer from each
            here = [i for i, x in enumerate(samples) if x.device == device]
            joined = torch.cat([samples[i] for i in here]).cpu().numpy()
            ends = np.cumsum([samples[i].numel() for i in here])
            values += zip(here, np.split(joined, ends[:-1]), strict=True)
        return [value for _, value in sorted(values, key=lambda pair: pair[0])]

    def read_candidates(self, candidates: list[Candidate]) -> list[tuple[Candidate, np.ndarray]]:
        """Candidates that the script has not dropped, with their sampled numbers now."""
        pairs = [(c, x) for c in candidates if (x := c.reference()) is not None]
        values = self.read([x for _, x in pairs])
        return [(c, value) for (c, _), value in zip(pairs, values, strict=True)]

    def notice_moves(self) -> None:
        """Reads the candidates that have been still. Those that have moved are read more often."""
        still = []
        for candidate, value in self.read_candidates(self.still):
            has_moved = candidate.value is not None and not np.array_equal(candidate.value, value)
            candidate.value = value
            (self.moving if has_moved else still).append(candidate)
        self.still = still

    def test_moves(self, parameters: list[torch.Tensor]) -> None:
        """Tests the moves since the step before, and keeps the candidates that tau explains."""
        values = self.read_candidates(self.moving)
        self.moving = [candidate for candidate, _ in values]
        moved: dict[int, list[tuple[Candidate, np.ndarray]]] = {}  # by owner
        for candidate, value in values:
            if not np.array_equal(candidate.value, value):
                moved.setdefault(candidate.owner, []).append((candidate, value))
        if not moved:
            return
        shapes = {candidate.shape for pairs in moved.values() for candidate, _ in pairs}
        numbers = [t for t, p in enumerate(parameters) if p.shape in shapes]
        weights = self.read([parameters[t] for t in numbers])
        by_shape: dict[torch.Size, dict[int, np.ndarray]] = {}
        for t, weight in zip(numbers, weights, strict=True):
            by_shape.setdefault(parameters[t].shape, {})[t] = weight
        for pairs in moved.values():
            pairs.sort(key=lambda pair: -len(pair[1]))
            while pairs:
                pairs = self.test_together(pairs, by_shape, parameters)

    def test_together(self, pairs: list, by_shape: dict, parameters: list[torch.Tensor]) -> list:
        """Fits tau to one of some candidates, and tests it on the others.

        Candidates that move by the same tau are taken together. Returns the other ones, among which
        there may be averages with another tau; none if no candidate can lead.
        """
        leader, left = None, []
        for candidate, value in pairs:
            t, move = candidate.best_move(value, by_shape[candidate.shape])
            if leader is None and move.is_clear and len(value) >= LEADING:
                if move.is_explained and move.share > 0:
                    leader, leading = candidate, move
                    together = [(candidate, value, t)]
                else:
                    self.moving.remove(candidate)
            else:
                left.append((candidate, value))
        if leader is None:
            for candidate, value in left:  # they move by next to nothing, or are too small
                candidate.value = value
            return []
        others, left = left, []
        for candidate, value in others:
            t, move = candidate.best_move(value, by_shape[candidate.shape], leading)
            if move.is_explained and move.differs_from(leading) < SAME:
                together.append((candidate, value, t))
            else:
                left.append((candidate, value))
        for candidate, value, t in together:
            candidate.value = value
            candidate.parameter = t
        candidates = [candidate for candidate, *_ in together]
        self.count(candidates, sum(len(value) for _, value, _ in together), leading, parameters)
        return left

    def count(
        self,
        candidates: list[Candidate],
        numbers: int,
        move: Move,
        parameters: list[torch.Tensor],
    ) -> None:
        """Counts a move that candidates have made together, of which `numbers` were read."""
        if move.share > COPY:
            for candidate in candidates:
                candidate.copies += 1
                if candidate.copies == MOVES and not candidate.moves:
                    self.moving.remove(candidate)
            return
        for candidate in candidates:
            candidate.moves += 1
        if candidates[0].moves >= MOVES and numbers >= NUMBERS:
            self.follow(candidates, float(move.share), parameters)

    def follow(
        self, candidates: list[Candidate], share: float, parameters: list[torch.Tensor]
    ) -> None:
        """Follows an average that has been found."""
        self.moving = [candidate for candidate in self.moving if candidate not in candidates]
        candidates = sorted(candidates, key=lambda candidate: candidate.parameter)
        pairs = [(c.reference(), parameters[c.parameter]) for c in candidates]
        name = f"average of {name_of([p for _, p in pairs])}"
        names = [self.watched.tensor_names[c.parameter] for c in candidates]
        size = self.watched.sample.numbers_per_tensor * len(self.watched.sample.sizes)
        self.found.append(FoundAverage(name, pairs, names, self.watched.length, size, share))


def sampled(sample: Sample, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sampled numbers [T, P], read from each tensor. Joining the tensors would copy them."""
    return torch.stack([x.take(index) for x, index in zip(tensors, sample.index, strict=True)])


def can_be_read(x: torch.Tensor) -> bool:
    """Whether a tensor has numbers in memory, as one that is meta, sparse or freed has not."""
    if x.layout != torch.strided or x.device.type == "meta" or not x.numel():
        return False
    return x.untyped_storage().size() > 0


def owners_of(tensors: list[torch.Tensor], trained: set[int]) -> dict[int, int]:
    """The largest module of each tensor that has no tensor which is trained, by identities."""
    wanted = {id(x) for x in tensors}
    owners: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for module in modules_alive():
        ids = {id(x) for x in (*module.parameters(), *module.buffers())}
        if ids & trained:
            continue
        for i in ids & wanted:
            if len(ids) > sizes.get(i, 0):
                owners[i] = id(module)
                sizes[i] = len(ids)
    return owners


def name_of(parameters: list[torch.Tensor]) -> str:
    """The class of the smallest module that has all these parameters."""
    wanted = {id(p) for p in parameters}
    smallest, best = "", None
    for module in modules_alive():
        ids = {id(p) for p in module.parameters()}
        size = len(ids), sum(1 for _ in module.modules())
        if wanted <= ids and (best is None or size < best):
            smallest, best = type(module).__name__, size
    noun = "tensor" if len(parameters) == 1 else "tensors"
    return smallest or f"{len(parameters)} {noun}"


def modules_alive() -> list[nn.Module]:
    return [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
