"""An optimizer that a doctor watches: what would its weights and moments do in few bits?

The optimizer trains in float32. The doctor's hooks read weights, gradients and settings, and change
nothing. For each format, the doctor follows a sample of numbers as that format would keep them:

    weights     are rounded at the beginning of a window, take float32's updates, and are rounded
                after each update: w' <- round(w' + update)
    m, v, root  are kept in few bits from the first update on:
                v' <- round(beta2 v' + (1 - beta2) g^2), with float32's gradients g; the update is
                Adam's (Kingma and Ba 2015, arXiv:1412.6980) with the rounded moments

The training waits while a hook runs at every update. So a hook only records the update, and the
updates of a window are replayed at the window's end.
"""

from typing import NamedTuple

import numpy as np
import torch

from ..notation import STATE
from ..places import SLACK, PlaceFormat
from .format_rows import FormatRows, MomentBounds
from .looks import Looks
from .sample import Sample, WindowSums

WEIGHTS, M, V, ROOT = range(4)  # indices into STATE


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

    `weight`    float32 [T, P], weights before the update
    `after`     float32 [2 T, P], weights after the update, then gradients
    `live`      for each of the T tensors, whether it has a gradient
    `settings`  settings of each parameter group
    """

    weight: torch.Tensor
    after: torch.Tensor
    live: list[bool]
    settings: list[GroupSettings]


class Replayed(NamedTuple):
    """An update of the window that has been replayed."""

    moved: np.ndarray  # [T, P], how far float32's weights moved
    live: np.ndarray  # bool [T, 1], whether a tensor has a gradient
    settings: list[GroupSettings]


class WatchedOptimizer:
    """One optimizer, watched through its hooks.

    `name`       name of the optimizer in reports
    `optimizer`  an optimizer of float32 parameters; if it is not Adam or AdamW, or uses amsgrad,
                 only the weights are followed
    `formats`    place, format and text of each entry that is followed
    `length`     updates in a window
    `sample`     how many numbers are followed
    `seed`       seed of the sample and of stochastic rounding

    `kept`, float32 [length + 1, C, T, P], has a row for each of C formats. A row has P weights,
    moments or roots of each of T tensors, as they are kept at the beginning of a window and after
    each update in it. The first two rows are float32's m and v. `kind` [C] says which place a row
    keeps, by its index in STATE.

    Raises ValueError if no parameters learn, and for parameters of other types than float32.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        formats: list[tuple[str, PlaceFormat, str]],
        length: int,
        sample: int,
        seed: int,
    ):
        self.name = name
        self.optimizer = optimizer
        self.length = length
        learning = [(p, i) for i, p in self.all_parameters() if p.requires_grad and p.numel()]
        if not learning:
            raise ValueError(f"{name} has no parameters that learn: leave it out")
        # The parameters are remembered here, because a loaded optimizer has new groups.
        self.parameters = [p for p, _ in learning]
        self.group = [i for _, i in learning]
        if wrong_types := {p.dtype for p in self.parameters} - {torch.float32}:
            raise ValueError(
                f"parameters are {wrong_types.pop()}: let the doctor watch a training in float32"
            )
        self.is_adam = isinstance(optimizer, torch.optim.Adam) and not any(
            group["amsgrad"] for group in optimizer.param_groups
        )  # AdamW is an Adam, too
        rows = [entry for entry in formats if self.is_adam or entry[0] == "weights"]
        rows.sort(key=lambda entry: (entry[1].stochastic, STATE.index(entry[0])))
        self.names = [text for *_, text in rows]
        float32 = PlaceFormat.of("fp32")
        places = ["m", "v", *(place for place, *_ in rows)]
        forms = [float32, float32, *(form for _, form, _ in rows)]
        self.kind = np.array([STATE.index(place) for place in places])
        self.keeps_weights = (self.kind == WEIGHTS).reshape(-1, 1, 1)
        self.roots = np.flatnonzero(self.kind == ROOT)
        self.bounded = np.array([not form.independent for form in forms])
        self.sample = Sample(self.parameters, sample, seed)
        self.rows = FormatRows(forms, seed)
        self.windows: list[WindowSums] = []
        self.updates = 0
        self.kept: np.ndarray | None = None
        self.versions: list[int] | None = None
        self.looks = Looks(self)
        self.hooks = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
            optimizer.register_load_state_dict_post_hook(self.after_loading),
        ]

    def all_parameters(self) -> list[tuple[int, torch.Tensor]]:
        """The optimizer's parameters as they are now, with the number of their group."""
        groups = enumerate(self.optimizer.param_groups)
        return [(i, p) for i, group in groups for p in group["params"]]

    def trouble(self) -> str:
        """Why this optimizer cannot be judged, or an empty string."""
        learning = {id(p) for _, p in self.all_parameters() if p.requires_grad and p.numel()}
        if {id(p) for p in self.parameters} != learning:
            return "other parameters learn than at first"
        if not all(p.isfinite().all() for p in self.parameters):
            return "float32 itself has become infinite or NaN"
        return ""

    def read_settings(self) -> list[GroupSettings]:
        """The settings of each group as they are now. Groups that are added later are left out."""
        settings = []
        for group in self.optimizer.param_groups[: max(self.group) + 1]:
            beta1, beta2, eps, decay = 0.0, 0.0, 1.0, 0.0
            if self.is_adam:
                beta1, beta2 = map(float, group["betas"])
                eps = float(group["eps"])
                decoupled = isinstance(self.optimizer, torch.optim.AdamW)
                if not (decoupled or group.get("decoupled_weight_decay")):
                    decay = float(group["weight_decay"])
            sign = -1.0 if group.get("maximize") else 1.0
            settings.append(GroupSettings(float(group["lr"]), beta1, beta2, eps, decay, sign))
        return settings

    def by_tensor(self, settings: list[list[GroupSettings]]) -> GroupSettings:
        """The settings of N updates as arrays [N, T, 1], or [N, 1, 1] if there is one group."""
        numbers = np.asarray(settings, np.float32)  # [N, groups, 6]
        if numbers.shape[1] > 1:
            numbers = numbers[:, self.group]
        return GroupSettings(*np.moveaxis(numbers, -1, 0)[..., None])

    def moment(self, name: str) -> list[torch.Tensor]:
        """One tensor of the optimizer's state for each parameter; zeros before the first step."""
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        return dense(self.parameters, [state.get(name) for state in states])

    def before_step(self, optimizer, args, kwargs) -> None:
        """Reads the weights, and begins a window at the first step."""
        versions = [p._version for p in self.parameters]
        unchanged = versions == self.versions  # whether the weights are those after the last step
        self.weight = self.weight_after if unchanged else self.sample.read()
        if self.kept is None:
            states = [self.optimizer.state.get(p, {}) for p in self.parameters]
            self.steps = max(int(state.get("step", 0)) for state in states)
            m = self.sample.take(self.moment("exp_avg"))
            v = self.sample.take(self.moment("exp_avg_sq"))
            self.kept = np.empty((self.length + 1, len(self.kind), *m.shape), np.float32)
            self.begin_window(np.stack((m, m, v, np.sqrt(v)))[self.kind])
            self.rows.round(self.kept[0], self.largest, out=self.kept[0])

    def after_loading(self, optimizer) -> None:
        """Starts again, with the moments that the optimizer has loaded."""
        self.kept = None
        self.looks.losses_now = None

    def begin_window(self, rows: np.ndarray) -> None:
        """Begins a window. Moments go on from `rows`, weights from float32's weights."""
        tensors = self.parameters, self.moment("exp_avg"), self.moment("exp_avg_sq")
        largest = torch.stack([largest_of(x) for x in tensors]).cpu().numpy()
        weights, moments, squares = largest
        self.largest = np.stack((weights, moments, squares, np.sqrt(squares)))[self.kind]
        weights = self.rows.round(np.broadcast_to(self.sample.take(), rows.shape), self.largest)
        self.kept[0] = np.where(self.keeps_weights, weights, rows)
        self.window: list[Replayed] = []
        self.recorded: list[Update] = []  # updates since the last replay

    def after_step(self, optimizer, args, kwargs) -> None:
        """Records the update."""
        gradients = [p.grad for p in self.parameters]
        # A GradScaler tells a fused optimizer in this way to skip the step.
        skipped = getattr(optimizer, "found_inf", None)
        if skipped or len(optimizer.param_groups) <= max(self.group):
            self.looks.losses_now = None
            return
        weights_and_gradients = [*self.parameters, *dense(self.parameters, gradients)]
        after = self.sample.read(weights_and_gradients)
        live = [g is not None for g in gradients]
        self.weight_after = after[: len(live)]
        self.versions = [p._version for p in self.parameters]
        self.updates += 1
        self.looks.after_step(after[len(live) :], self.weight)
        self.recorded.append(Update(self.weight, after, live, self.read_settings()))
        if len(self.window) + len(self.recorded) == self.length:
            self.replay()
        if len(self.window) == self.length:
            self.end_window()
            self.begin_window(self.kept[-1])

    def replay(self) -> None:
        """Applies the updates that were recorded since the last replay to every row."""
        if not self.recorded:
            return
        updates, self.recorded = self.recorded, []
        weight = torch.stack([update.weight for update in updates]).cpu().numpy()
        after = torch.stack([update.after for update in updates]).cpu().numpy()
        weight_after, g = np.split(after, 2, axis=1)  # [N, T, P] each
        finite = np.isfinite(g).all((1, 2))
        settings = self.by_tensor([update.settings for update in updates])
        beta1, beta2 = settings.beta1, settings.beta2
        live = np.array([update.live for update in updates])[..., None]
        moved = weight_after - weight
        g = settings.sign * g + settings.decay_of_gradient * weight
        # Every row becomes kept * factor + added. The four kinds are weights, m, v, and the root,
        # which is squared first and so is updated like v.
        factor = np.stack((np.ones_like(beta1), beta1, beta2, beta2), axis=1)[:, self.kind]
        added = np.stack((moved, (1 - beta1) * g, (1 - beta2) * g * g), axis=1)
        added_kind = np.minimum(self.kind, V)
        for i in np.flatnonzero(finite):
            old = self.kept[len(self.window)]
            new = self.kept[len(self.window) + 1]
            rows = old.copy()
            rows[self.roots] *= rows[self.roots]
            rows *= factor[i]
            rows += added[i].take(added_kind, 0)
            rows[self.roots] = np.sqrt(rows[self.roots])
            self.rows.round(rows, self.largest, new, self.moment_bounds(rows, beta1[i], beta2[i]))
            if not live[i].all():  # an optimizer leaves tensors without gradient alone
                np.copyto(new, old, where=~live[i])
            self.window.append(Replayed(moved[i], live[i], updates[i].settings))
            self.steps += 1

    def moment_bounds(self, rows: np.ndarray, beta1, beta2) -> MomentBounds:
        """Bounds for rounding moments in view of float32's moments.

        These are the first two of the rows [C, T, P].
        """
        step = self.steps + 1
        limit = SLACK * (1 - beta1**step) / np.sqrt(1 - beta2**step)  # as in Places.moments
        m = np.abs(rows[0])
        root = np.sqrt(rows[1])
        least = np.full_like(rows, np.nan)
        least[self.bounded & (self.kind == V)] = (m / limit) ** 2
        least[self.bounded & (self.kind == ROOT)] = m / limit
        most = np.full_like(rows, np.inf)
        most[self.bounded & (self.kind == M)] = limit * root
        return MomentBounds(least, most)

    def end_window(self) -> None:
        """Ends a window, and measures it."""
        moved = self.moved()
        update = sum(replayed.moved for replayed in self.window)
        m, v = self.kept[-1, :2]
        true = np.where(self.keeps_weights, update, moved[1])
        kept = np.where(self.keeps_weights, moved, self.kept[-1])
        exact = np.stack((update, m, v, v))[self.kind]
        sums = WindowSums.of(moved, true, (kept == 0) & (exact != 0))
        # The first two rows are float32's, which are not measured.
        self.windows.append(WindowSums(*(part[2:] for part in sums)))

    def moved(self) -> np.ndarray:
        """How far the weights have moved in the window with each row, float32 [C, T, P].

        With a row of moments, these are Adam's steps with the rounded moments, without their sign.
        """
        live = np.array([replayed.live for replayed in self.window])
        settings = self.by_tensor([replayed.settings for replayed in self.window])
        steps = np.arange(self.steps - len(live) + 1, self.steps + 1, dtype=np.float32)
        steps = steps.reshape(-1, 1, 1)
        root_correction2 = np.sqrt(1 - settings.beta2**steps)
        step_size = live * settings.learning_rate / (1 - settings.beta1**steps)
        kept = self.kept[1 : len(live) + 1]
        exact_step = step_size * kept[:, 0]
        exact_divisor = np.sqrt(kept[:, 1]) / root_correction2 + settings.eps
        moved = kept[-1] - self.kept[0]
        for row, kind in enumerate(self.kind):
            if kind == M:
                moved[row] = (step_size * kept[:, row] / exact_divisor).sum(0)
            elif kind in (V, ROOT):
                root = np.sqrt(kept[:, row]) if kind == V else kept[:, row]
                moved[row] = (exact_step / (root / root_correction2 + settings.eps)).sum(0)
        return moved


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
