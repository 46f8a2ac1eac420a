"""An optimizer that a doctor watches: what would its weights and moments do in few bits?

The optimizer trains in float32. The doctor's hooks read weights, gradients and settings, and change
nothing. For each format, the doctor follows a sample of numbers as that format would keep them:

    weights     are rounded at the beginning of a window, take float32's updates, and are rounded
                after each update: w' <- round(w' + update)
    m, v, root  are kept in few bits from the first update on:
                v' <- round(beta2 v' + (1 - beta2) g^2), with float32's gradients g; the update is
                Adam's (bits/adam.py) with the rounded moments

Rows of weights begin each window anew at float32's weights, because rates are measured along
float32's path. That hides a stall: a weight that stands still at 1.0 is moved along by every new
window, and soon lies where the format's numbers are closer together. So formats that round weights
to the nearest have a second row, a free one, which is never returned to float32's weights. Formats
that round stochastically need none: their mean is right wherever they begin.

The training waits while a hook runs at every update. So a hook only records the update, and the
updates of a window are replayed at the window's end.

Parameters may join later: a script turns on their `requires_grad`, or adds a group. A window needs
all its updates, and Adam counts the steps of each parameter by itself. So those that join are
watched by a WatchedOptimizer of their own, which begins after their first step (`later`).

A doctor must not keep a network in memory that the script has dropped. So optimizers and parameters
are held by weak references, and everything else that is kept here is a sample.
"""

import weakref
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..bits import adam
from ..bits.notation import STATE, SUMS
from ..bits.places import SLACK, PlaceFormat
from .format_rows import FormatRows, MomentBounds
from .gradient_sums import GradientSums
from .low_bit_gradients import Looks
from .sample import NumberSums, Sample, WindowSums, tensor_names

WEIGHTS, M, V, ROOT = range(4)  # indices into STATE
# Optimizers whose step is not in proportion to their learning rate, by the names of their classes,
# in torch or elsewhere. They search along a line, adapt a step size for each number by signs, or
# estimate the learning rate themselves. So "as at half the learning rate" says nothing of them.
NOT_IN_PROPORTION = frozenset(
    {
        "LBFGS",
        "Rprop",
        "AliG",
        "COCOB",
        "DAdaptAdaGrad",
        "DAdaptAdam",
        "DAdaptLion",
        "DAdaptSGD",
        "DoG",
        "LDoG",
        "Prodigy",
    }
)


class GroupSettings(NamedTuple):
    """The settings of a parameter group at one update: numbers, or arrays for several updates."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    decay_of_gradient: float  # weight decay that is added to the gradient
    sign: float  # sign of the gradient: -1 with `maximize`, otherwise 1


class Update(NamedTuple):
    """An update as the hooks record it.

    `before`    float32 [K T, P], weights before the update, then of Adam m and v
    `after`     float32 [(1 + K) T, P], weights after the update, gradients, then of Adam m and v
    `steps`     how many steps Adam had counted before the update, float32 []
    `live`      for each of the T tensors, whether it has a gradient
    `settings`  settings of each parameter group
    """

    before: torch.Tensor
    after: torch.Tensor
    steps: torch.Tensor
    live: list[bool]
    settings: list[GroupSettings]

    @property
    def weight(self) -> torch.Tensor:
        """The weights before the update, [T, P]."""
        return self.before[: len(self.live)]

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient of the update, [T, P]."""
        return self.after[len(self.live) : 2 * len(self.live)]


class Replayed(NamedTuple):
    """An update of the window that has been replayed."""

    moved: np.ndarray  # [T, P], how far float32's weights moved
    live: np.ndarray  # bool [T, 1], whether a tensor has a gradient
    count: float  # Adam's count of steps, with this one
    settings: list[GroupSettings]


class WatchedOptimizer:
    """One optimizer, watched through its hooks.

    `name`        name of the optimizer in reports
    `optimizer`   if it is not Adam or AdamW, or uses amsgrad, only the weights are followed
    `modules`     modules whose names of parameters are used
    `formats`     place, format and text of each entry that is followed
    `length`      updates in a window
    `sample`      how many numbers are followed
    `seed`        seed of the sample and of stochastic rounding
    `only`        identities of the parameters that are followed; the default is all that learn

    Only parameters in float32 are followed. `not_float32` has the names of others that learn, with
    their types.

    `kept`, float32 [length + 1, C, T, P], has a row for each of C formats. A row has P weights,
    moments or roots of each of T tensors, as they are kept at the beginning of a window and after
    each update in it. The first two rows are float32's m and v. Free rows of weights follow, and
    then the rows of `names`. `kind` [C] says which place a row keeps, by its index in STATE.

    `windows` has the measurements of the rows of `names`, and `free_windows` those of the free
    rows, whose formats are in `free_names`. `numbers` and `free_numbers` have sums by number, from
    which standard errors follow. `trials` has the windows with the noise that is to be expected of
    stochastic rounding, where less is seen. `sums` has the sums of gradients, if
    they are judged.

    Raises ValueError if no parameters learn, and if none of those that do is float32.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        modules: list[nn.Module],
        formats: list[tuple[str, PlaceFormat, str]],
        length: int,
        sample: int,
        seed: int,
        only: Collection[int] | None = None,
    ):
        self.name = name
        self.options = formats, length, sample, seed
        self.modules = [weakref.ref(module) for module in modules]
        self.length = length
        self.reference = weakref.ref(optimizer)
        self.kind_of_optimizer = type(optimizer).__name__
        self.is_in_proportion = steps_in_proportion(optimizer)
        groups = optimizer.param_groups
        # The parameters are remembered here, because a loaded optimizer has new groups.
        parameters: list[torch.Tensor] = []
        self.group: list[int] = []  # for each parameter, the number of its group
        idle: list[torch.Tensor] = []  # parameters that do not learn
        others: list[torch.Tensor] = []  # parameters that learn, and are not float32
        for number, group in enumerate(groups):
            for p in group["params"]:
                learns = p.requires_grad if only is None else id(p) in only
                if not learns:
                    idle.append(p)
                elif p.dtype != torch.float32:
                    others.append(p)
                elif p.numel():
                    parameters.append(p)
                    self.group.append(number)
        if not (parameters or others):
            raise ValueError(f"{name} has no parameters that learn: leave it out")
        if not parameters:
            raise ValueError(
                f"parameters are {others[0].dtype}: let the doctor watch a training in float32"
            )
        self.references = [weakref.ref(p) for p in parameters]
        self.idle = [weakref.ref(p) for p in idle]
        self.ids = ids_of(groups)
        self.not_float32: dict[str, torch.dtype] = {}
        self.note_types(others)
        self.later: list[WatchedOptimizer] = []  # of parameters that joined
        self.tensor_names = tensor_names(parameters, modules)
        self.shapes = [[*p.shape] for p in parameters]
        self.device = parameters[0].device
        self.is_adam = isinstance(optimizer, torch.optim.Adam) and not any(
            group["amsgrad"] for group in groups
        )  # AdamW is an Adam, too
        self.is_decoupled = isinstance(optimizer, torch.optim.AdamW)
        sums = [(text, form) for place, form, text in formats if place in SUMS]
        formats = [entry for entry in formats if entry[0] not in SUMS]
        rows = [entry for entry in formats if self.is_adam or entry[0] == "weights"]
        rows.sort(key=lambda entry: (entry[1].stochastic, STATE.index(entry[0])))
        free = [entry for entry in rows if entry[0] == "weights" and not entry[1].stochastic]
        self.names = [text for *_, text in rows]
        self.free_names = [text for *_, text in free]
        float32 = PlaceFormat.of("fp32")
        places = ["m", "v", *(place for place, *_ in free + rows)]
        forms = [float32, float32, *(form for _, form, _ in free + rows)]
        self.kind = np.array([STATE.index(place) for place in places])
        self.free = slice(2, 2 + len(free))
        self.measured = slice(2 + len(free), None)
        self.keeps_weights = (self.kind == WEIGHTS).reshape(-1, 1, 1)
        self.is_anchored = self.keeps_weights.copy()  # begins each window at float32's weights
        self.is_anchored[self.free] = False
        self.rows_of_kind = [np.flatnonzero(self.kind == kind) for kind in range(len(STATE))]
        self.bounded = np.array([not form.independent for form in forms])
        self.sample = Sample(parameters, sample, seed)
        self.rows = FormatRows(forms, seed)
        self.free_rows = FormatRows([form for _, form, _ in free], seed)
        # [C, 1]
        self.is_stochastic_weight = self.keeps_weights[:, 0] & [[form.stochastic] for form in forms]
        self.windows: list[WindowSums] = []
        self.trials: list[WindowSums] = []  # the windows, with the noise that is to be expected
        self.free_windows: list[WindowSums] = []
        self.numbers = NumberSums()  # of the rows of `names`
        self.free_numbers = NumberSums()
        self.updates = 0
        self.last_update = np.zeros(len(parameters), int)  # of each tensor; 0 if it had none
        self.switched_off = [False] * len(parameters)  # whether a tensor did not require gradients
        self.others_learn = False  # whether the optimizer goes on without a tensor of these
        self.kept: np.ndarray | None = None
        self.before: torch.Tensor | None = None  # what was read before the update (Update)
        self.after: torch.Tensor | None = None  # what was read after the last update
        self.looks = Looks(self)
        self.sums = GradientSums(self, type(optimizer), sums, seed=seed) if sums else None
        self.hooks = []

    def attach(self) -> None:
        """Attaches hooks to the optimizer."""
        if not self.is_in_proportion:
            return  # nothing would be judged
        # A step under torch.compile leaves the hooks out of its graph. Compiling them would take
        # far longer than calling them.
        optimizer = self.optimizer
        self.hooks += [
            optimizer.register_step_pre_hook(torch.compiler.disable(self.before_step)),
            optimizer.register_step_post_hook(torch.compiler.disable(self.after_step)),
        ]
        if self.sums is not None:
            self.hooks += self.sums.install()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None once the script has dropped it."""
        return self.reference()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are followed; none once the script has dropped one of them."""
        parameters = [reference() for reference in self.references]
        return [] if any(p is None for p in parameters) else parameters

    @property
    def parts(self) -> list["WatchedOptimizer"]:
        """This one, and those of the parameters that joined."""
        return [self, *self.later]

    @property
    def follows_all(self) -> bool:
        """Whether every tensor that the optimizer has trained was followed, from the beginning to
        the end."""
        return not (self.later or self.not_float32 or self.stopped_learning().any())

    @property
    def groups(self) -> list[dict]:
        """The parameter groups as they are now; none once the script has dropped the optimizer."""
        optimizer = self.optimizer
        return [] if optimizer is None else optimizer.param_groups

    def trouble(self) -> str:
        """Why this optimizer cannot be judged, or an empty string."""
        if not self.is_in_proportion:
            return f"a step of {self.kind_of_optimizer} is not in proportion to its learning rate"
        if self.others_learn:
            return "other parameters learn than at first"
        if not self.is_finite():
            return "float32 itself has become infinite or NaN"
        return ""

    def stopped_learning(self) -> np.ndarray:
        """Whether a tensor has learned and then was switched off by the script, bool [T].

        That is judged by the steps that the optimizer made. A network that is frozen after its last
        step, or while another network steps, has learned to the end.
        """
        absent = self.updates - self.last_update >= self.length
        off = np.array(self.switched_off)
        if parameters := self.parameters:
            off &= [not p.requires_grad for p in parameters]  # it may be about to learn again
        return (self.last_update > 0) & absent & off

    def is_finite(self) -> bool:
        """Whether the weights are finite; of weights that are gone, whether those read last are."""
        if parameters := self.parameters:
            return all(bool(p.isfinite().all()) for p in parameters)
        if self.after is None or self.kept is None:
            return True
        weights = self.after[: len(self.references)]
        return bool(weights.isfinite().all() and np.isfinite(self.largest).all())

    def note_what_learns(self, parameters: list[torch.Tensor]) -> None:
        """Notes at a step whether the optimizer still has the tensors that are followed, which of
        them are switched off, and which others it has now."""
        groups = self.groups
        ids = ids_of(groups)
        if ids != self.ids:
            present = {id(p): p for group in groups for p in group["params"]}
            self.others_learn = not {id(p) for p in parameters} <= present.keys()
            added = present.keys() - {*self.ids}
            self.idle += [weakref.ref(present[i]) for i in added]
            self.ids = ids
        self.switched_off = [not p.requires_grad for p in parameters]

    def take_joined(self) -> list[torch.Tensor]:
        """The parameters that have made their first step now. They are idle no more."""
        idle = [p for reference in self.idle if (p := reference()) is not None]
        joined = [p for p in idle if p.grad is not None and p.numel()]
        if joined:
            self.idle = [weakref.ref(p) for p in idle if p.grad is None]
        return joined

    def follow_joined(self) -> None:
        """Begins to watch the parameters that have made their first step now."""
        joined = self.take_joined()
        if not joined:
            return
        self.note_types([p for p in joined if p.dtype != torch.float32])
        joined = [p for p in joined if p.dtype == torch.float32]
        if not joined or self.optimizer is None:
            return
        noun = "tensor" if len(joined) == 1 else "tensors"
        name = f"{self.name}, {len(joined)} {noun} from update {self.updates + 1} on"
        only = {id(p) for p in joined}
        watched = WatchedOptimizer(name, self.optimizer, self.modules_now(), *self.options, only)
        self.later.append(watched)

    def note_types(self, others: list[torch.Tensor]) -> None:
        """Notes parameters that learn and are not float32."""
        types = [p.dtype for p in others]
        self.not_float32 |= zip(tensor_names(others, self.modules_now()), types, strict=True)

    def modules_now(self) -> list[nn.Module]:
        """The modules that the script has not dropped."""
        return [module for reference in self.modules if (module := reference()) is not None]

    def read_settings(self) -> list[GroupSettings]:
        """The settings of each group as they are now. Groups that are added later are left out."""
        return [self.settings_of(group) for group in self.groups[: max(self.group) + 1]]

    def settings_of(self, group: dict) -> GroupSettings:
        """The settings of a parameter group as they are now."""
        beta1, beta2, eps, decay = 0.0, 0.0, 1.0, 0.0
        if self.is_adam:
            beta1, beta2 = map(float, group["betas"])
            eps = float(group["eps"])
            if not (self.is_decoupled or group.get("decoupled_weight_decay")):
                decay = float(group["weight_decay"])
        sign = -1.0 if group.get("maximize") else 1.0
        return GroupSettings(float(group["lr"]), beta1, beta2, eps, decay, sign)

    def by_tensor(self, settings: list[list[GroupSettings]]) -> GroupSettings:
        """The settings of N updates as arrays [N, T, 1], or [N, 1, 1] if there is one group."""
        numbers = np.asarray(settings, np.float32)  # [N, groups, 6]
        if numbers.shape[1] > 1:
            numbers = numbers[:, self.group]
        return GroupSettings(*np.moveaxis(numbers, -1, 0)[..., None])

    def states(self) -> list[dict]:
        """The optimizer's state of each parameter; empty before its first step."""
        state = self.optimizer.state
        return [state.get(p, {}) for p in self.parameters]

    def moment(self, name: str) -> list[torch.Tensor]:
        """One tensor of the optimizer's state for each parameter; zeros before the first step."""
        return dense(self.parameters, [state.get(name) for state in self.states()])

    def moments(self) -> list[torch.Tensor]:
        """Adam's moments, m of each parameter and then v of each; none of other optimizers."""
        if not self.is_adam:
            return []
        return [*self.moment("exp_avg"), *self.moment("exp_avg_sq")]

    def count_steps(self) -> torch.Tensor:
        """How many steps Adam has counted, float32 []. A GPU is not waited for."""
        counts = [state["step"] for state in self.states() if "step" in state]
        if not (self.is_adam and counts):
            return torch.zeros((), dtype=torch.float32, device="cpu")
        return torch.stack([torch.as_tensor(x, dtype=torch.float32) for x in counts]).max()

    def before_step(self, optimizer, args, kwargs) -> None:
        for part in self.parts:
            part.begin_update()

    def begin_update(self) -> None:
        """Reads the weights and Adam's state, and begins a window at the first step.

        Other code may have changed them since the last update. That shows in their numbers alone:
        a change through `p.data` does not raise the version of a tensor.
        """
        parameters = self.parameters
        if not parameters:
            self.others_learn = True  # the optimizer goes on with other tensors
            return
        self.before = self.sample.read([*parameters, *self.moments()])
        self.steps_before = self.count_steps()
        if self.kept is None:
            self.begin()

    def begin(self) -> None:
        """Begins the first window, with the moments that the optimizer has now."""
        self.steps = float(self.count_steps())
        weights = self.sample.take(self.parameters)
        m = self.sample.take(self.moment("exp_avg"))
        v = self.sample.take(self.moment("exp_avg_sq"))
        self.kept = np.empty((self.length + 1, len(self.kind), *m.shape), np.float32)
        # Rows without a bound stay as they are here
        shape = self.kept.shape[1:]
        least, most = np.full(shape, np.nan, np.float32), np.full(shape, np.inf, np.float32)
        self.bounds = MomentBounds(least, most)
        # float32's weights and moments after the last update that was replayed, [K T, P]
        self.last = np.concatenate((weights, m, v))[: len(weights) * (3 if self.is_adam else 1)]
        self.begin_window(np.stack((weights, m, v, np.sqrt(v)))[self.kind])
        self.rows.round(self.kept[0], self.largest, out=self.kept[0])
        if self.sums is not None:
            self.sums.begin()

    def begin_window(self, rows: np.ndarray) -> None:
        """Begins a window. Moments and free rows go on from `rows`, other rows of weights from
        float32's weights."""
        parameters = self.parameters
        tensors = parameters, self.moment("exp_avg"), self.moment("exp_avg_sq")
        largest = torch.stack([largest_of(x) for x in tensors]).cpu().numpy()
        weights, moments, squares = largest
        self.largest = np.stack((weights, moments, squares, np.sqrt(squares)))[self.kind]
        weights = np.broadcast_to(self.sample.take(parameters), rows.shape)
        weights = self.rows.round(weights, self.largest)
        self.kept[0] = np.where(self.is_anchored, weights, rows)
        self.displaced = np.zeros_like(self.kept[0, self.free])
        self.window: list[Replayed] = []
        self.recorded: list[Update] = []  # updates since the last replay

    def after_step(self, optimizer, args, kwargs) -> None:
        # A GradScaler tells a fused optimizer in this way to skip the step.
        skipped = bool(getattr(optimizer, "found_inf", None))
        for part in self.parts:
            part.end_update(optimizer, skipped)
        if not skipped:
            self.follow_joined()

    def end_update(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        """Records the update."""
        parameters = self.parameters
        has_all_groups = len(optimizer.param_groups) > max(self.group)
        if not has_all_groups:
            self.others_learn = True
        if skipped or not has_all_groups or not parameters:
            self.looks.losses_now = None
            return
        gradients = [p.grad for p in parameters]
        live = [g is not None for g in gradients]
        read = [*parameters, *dense(parameters, gradients), *self.moments()]
        self.after = self.sample.read(read)
        self.note_what_learns(parameters)
        self.record(Update(self.before, self.after, self.steps_before, live, self.read_settings()))

    def record(self, update: Update) -> None:
        """Records an update, and ends the window when it is full."""
        self.updates += 1
        self.last_update[update.live] = self.updates
        self.looks.after_step(update.gradient, update.weight)
        if self.sums is not None:
            self.sums.after_step(update)
        self.recorded.append(update)
        if len(self.window) + len(self.recorded) == self.length:
            self.replay()
        if len(self.window) == self.length:
            self.end_window()
            if self.parameters and self.groups:  # a script that has dropped them steps no more
                self.begin_window(self.kept[-1])

    def replay(self) -> None:
        """Applies the updates that were recorded since the last replay to every row."""
        if not self.recorded:
            return
        updates, self.recorded = self.recorded, []
        before = torch.stack([update.before for update in updates]).cpu().numpy()
        after = torch.stack([update.after for update in updates]).cpu().numpy()
        steps = torch.stack([update.steps for update in updates]).cpu().numpy()
        tensors = len(self.references)
        weight = before[:, :tensors]
        weight_after = after[:, :tensors]
        g = after[:, tensors : 2 * tensors]
        after = np.delete(after, slice(tensors, 2 * tensors), axis=1)  # as `before`
        last = np.concatenate((self.last[None], after[:-1]))
        self.last = after[-1]
        finite = np.isfinite(g).all((1, 2))
        settings = self.by_tensor([update.settings for update in updates])
        beta1, beta2 = settings.beta1, settings.beta2
        live = np.array([update.live for update in updates])[..., None]
        moved = weight_after - weight
        # How far other code has moved the weights since the update before
        between = weight - last[:, :tensors]
        g = adam.with_coupled_decay(settings.sign * g, weight, settings.decay_of_gradient)
        for i in np.flatnonzero(finite):
            if between[i].any():
                self.displace(between[i])
            old = self.kept[len(self.window)]
            if (changed := before[i, tensors:] != last[i, tensors:]).any():
                old = self.with_moments(old, before[i, tensors:], changed)
            self.steps = float(steps[i]) if self.is_adam else self.steps
            new = self.kept[len(self.window) + 1]
            rows = self.updated(old, moved[i], g[i], beta1[i], beta2[i])
            self.rows.round(rows, self.largest, new, self.moment_bounds(rows, beta1[i], beta2[i]))
            if not live[i].all():  # an optimizer leaves tensors without gradient alone
                np.copyto(new, old, where=~live[i])
            self.steps += 1
            self.window.append(Replayed(moved[i], live[i], self.steps, updates[i].settings))

    def updated(self, rows: np.ndarray, moved: np.ndarray, g: np.ndarray, beta1, beta2):
        """The rows [C, T, P] after an update, not rounded yet.

        `moved` is how far the update moves float32's weights, and `g` its gradient, both [T, P].
        """
        of_weights, of_m, of_v, of_root = self.rows_of_kind
        after = np.empty_like(rows)
        after[of_weights] = rows[of_weights] + moved
        after[of_m] = adam.first_moment(rows[of_m], g, beta1)
        after[of_v] = adam.second_moment(rows[of_v], g, beta2)
        after[of_root] = np.sqrt(adam.second_moment(np.square(rows[of_root]), g, beta2))
        return after

    def displace(self, by: np.ndarray) -> None:
        """Moves the free rows as other code has moved float32's weights between two updates.

        That does not count as a movement of the window, because it is no step of the optimizer.
        """
        now = self.kept[len(self.window), self.free]
        moved = self.free_rows.round(now + by, self.largest[self.free])
        if self.window:
            self.displaced += moved - now
        now[:] = moved

    def with_moments(self, rows: np.ndarray, moments: np.ndarray, changed: np.ndarray):
        """The rows [C, T, P], with those of moments as other code has left them.

        `moments` [2 T, P] are float32's m and v, and `changed` says where other code has changed
        them: has loaded, zeroed or dropped them. In few bits it would have rounded the same
        numbers.
        """
        m, v = np.split(moments, 2)
        changed_m, changed_v = np.split(changed, 2)
        exact = np.stack((m, m, v, np.sqrt(v)))[self.kind]
        is_changed = np.stack((np.zeros_like(changed_m), changed_m, changed_v, changed_v))
        rounded = self.rows.round(exact, self.largest)
        return np.where(is_changed[self.kind], rounded, rows)

    def moment_bounds(self, rows: np.ndarray, beta1, beta2) -> MomentBounds:
        """Bounds for rounding moments in view of float32's moments.

        These are the first two of the rows [C, T, P].
        """
        corrections = adam.bias_corrections(self.steps + 1, beta1, beta2)
        limit = SLACK * adam.full_step_quotient(*corrections)  # as in Places.moments
        m = np.abs(rows[0])
        root = np.sqrt(rows[1])
        self.bounds.least[self.bounded & (self.kind == V)] = (m / limit) ** 2
        self.bounds.least[self.bounded & (self.kind == ROOT)] = m / limit
        self.bounds.most[self.bounded & (self.kind == M)] = limit * root
        return self.bounds

    def end_window(self) -> None:
        """Ends a window, and measures it."""
        moved = self.moved()
        update = sum(replayed.moved for replayed in self.window)
        m, v = self.kept[-1, :2]
        true = np.where(self.keeps_weights, update, moved[1])
        kept = np.where(self.keeps_weights, moved, self.kept[-1])
        exact = np.stack((update, m, v, v))[self.kind]
        emphasis = self.sample.emphasis
        sums = WindowSums.of(moved, true, (kept == 0) & (exact != 0), emphasis)
        # The first two rows are float32's, which are not measured.
        window = WindowSums(*(part[self.measured] for part in sums))
        self.windows.append(window)
        self.numbers.add(moved[self.measured], true[self.measured])
        self.free_numbers.add(moved[self.free], true[self.free])
        # Weights that are rounded stochastically have at least this noise on average, although
        # few numbers may show it: a step d of numbers that lie s apart is s with probability d / s.
        spacing = self.rows.steps(self.kept[-1], self.largest)
        expected = (spacing * np.abs(true) * emphasis).mean(2, dtype=np.float64)
        expected = (expected * self.is_stochastic_weight)[self.measured]
        self.trials.append(window._replace(apart=np.maximum(window.apart, expected)))
        self.free_windows.append(WindowSums(*(part[self.free] for part in sums)))

    def moved(self) -> np.ndarray:
        """How far the weights have moved in the window with each row, float32 [C, T, P].

        With a row of moments, these are Adam's steps with the rounded moments, without their sign.
        """
        live = np.array([replayed.live for replayed in self.window])
        settings = self.by_tensor([replayed.settings for replayed in self.window])
        steps = np.array([replayed.count for replayed in self.window], np.float32)
        steps = steps.reshape(-1, 1, 1)
        learning_rate = live * settings.learning_rate
        corrections = adam.bias_corrections(steps, settings.beta1, settings.beta2)
        kept = self.kept[1 : len(live) + 1]
        exact_m = kept[:, 0]
        exact_root = np.sqrt(kept[:, 1])
        moved = kept[-1] - self.kept[0]
        moved[self.free] -= self.displaced
        for row, kind in enumerate(self.kind):
            if kind == WEIGHTS:
                continue
            m = kept[:, row] if kind == M else exact_m
            root = exact_root
            if kind in (V, ROOT):
                root = np.sqrt(kept[:, row]) if kind == V else kept[:, row]
            moved[row] = adam.step(m, root, learning_rate, *corrections, settings.eps).sum(0)
        return moved


def steps_in_proportion(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer makes twice the step at twice the learning rate.

    Optimizers that do not are known by the name of their class or of one that it inherits from, by
    the option `relative_step` of an Adafactor, the option `d0` of a class that estimates its
    learning rate, or because they have no learning rate.
    """
    if NOT_IN_PROPORTION & {kind.__name__ for kind in type(optimizer).__mro__}:
        return False
    return not any(
        group.get("relative_step") or group.get("lr") is None or "d0" in group
        for group in optimizer.param_groups
    )


def ids_of(groups: Iterable[dict]) -> list[int]:
    """The identities of all parameters of some groups."""
    return [id(p) for group in groups for p in group["params"]]


def dense(parameters: list[torch.Tensor], tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Dense tensors like the parameters; zeros in place of a tensor that is None."""
    dense_tensors = []
    for p, x in zip(parameters, tensors, strict=True):
        if x is None:
            x = torch.zeros_like(p)
        elif x.is_sparse:
            x = x.to_dense()
        dense_tensors.append(x)
    return dense_tensors


def largest_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each tensor, float32 [T, 1]."""
    norms = [torch.linalg.vector_norm(x.detach(), torch.inf).float() for x in tensors]
    return torch.stack(norms).unsqueeze(1)
