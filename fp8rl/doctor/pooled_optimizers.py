"""Many small optimizers that a doctor watches as if they were one.

Some trainings step within the backward pass: each parameter has an optimizer of its own, which
steps as soon as the parameter's gradient is there. Hundreds of optimizers then do what one would
do, and one report on them says more than hundreds.
"""

import torch

from .watched_optimizer import GroupSettings, Update, WatchedOptimizer


class PooledOptimizers(WatchedOptimizer):
    """Several optimizers of one class that step in turn, watched as one optimizer with all their
    parameters.

    An update of the pool is a round, in which each optimizer steps at most once. A round ends when
    an optimizer steps that has stepped in it already. An optimizer that does not step in a round
    leaves its tensors as they are, as one optimizer does with tensors that have no gradient.

    Raises ValueError for optimizers of several classes, and for none.
    """

    def __init__(self, name: str, optimizers: list[torch.optim.Optimizer], *options):
        kinds = sorted({type(optimizer).__name__ for optimizer in optimizers})
        if len(kinds) != 1:
            listed = ", ".join(kinds) or "missing"
            raise ValueError(f"optimizers of {name} are {listed}: give a list of one class")
        super().__init__(name, optimizers, *options)
        self.number = {id(optimizer): k for k, optimizer in enumerate(optimizers)}
        self.tensors_of: list[list[int]] = [[] for _ in optimizers]
        for t, owner in enumerate(self.owner):
            self.tensors_of[owner].append(t)
        # Optimizer and place in it of each parameter group
        self.group_places: list[tuple[int, int]] = []
        for k, optimizer in enumerate(optimizers):
            self.group_places += [(k, i) for i in range(len(optimizer.param_groups))]
        self.is_new = True  # whether the weights must be read as a whole, at the next step
        self.stepped: set[int] = set()  # the optimizers that have stepped in this round

    def read_settings(self) -> list[GroupSettings]:
        optimizers = [reference() for reference in self.optimizers]
        return [self.settings_of(optimizers[k].param_groups[i]) for k, i in self.group_places]

    def before_step(self, optimizer, args, kwargs) -> None:
        """Ends the round before if a new one begins, and reads the optimizer's weights if other
        code has changed them."""
        k = self.number[id(optimizer)]
        if self.is_new:
            self.begin_pool()
        elif k in self.stepped:
            self.end_round()
        for t in self.tensors_of[k]:
            p = self.references[t]()
            if p is not None and p._version != self.versions[t]:
                self.weights_before[t] = self.sample.read_one(t, p)

    def begin_pool(self) -> None:
        """Reads all weights, and begins a window."""
        parameters = self.parameters
        if not parameters or not self.groups:
            raise RuntimeError("some of these optimizers are gone, and others go on")
        self.begin()
        self.is_new = False
        self.versions = [p._version for p in parameters]
        self.weights_now = list(self.sample.read(parameters))
        self.settings = self.read_settings()
        self.begin_round()

    def begin_round(self) -> None:
        """Begins a round, with the weights as they were after the round before."""
        self.stepped.clear()
        self.weights_before = list(self.weights_now)
        self.gradients = [torch.zeros_like(weights) for weights in self.weights_now]
        self.live = [False] * len(self.weights_now)

    def after_step(self, optimizer, args, kwargs) -> None:
        """Reads an optimizer's weights, gradients and settings after its step."""
        if getattr(optimizer, "found_inf", None):
            return
        k = self.number[id(optimizer)]
        self.stepped.add(k)
        for t in self.tensors_of[k]:
            p = self.references[t]()
            if p is None:
                continue
            if p.grad is not None:
                self.live[t] = True
                self.gradients[t] = self.sample.read_one(t, p.grad)
            self.weights_now[t] = self.sample.read_one(t, p)
            self.versions[t] = p._version
            group = self.group[t]
            _, place = self.group_places[group]
            self.settings[group] = self.settings_of(optimizer.param_groups[place])

    def end_round(self) -> None:
        """Records a round as one update."""
        weight = torch.stack(self.weights_before)
        after = torch.stack([*self.weights_now, *self.gradients])
        self.weight_after = after[: len(weight)]
        if parameters := self.parameters:
            self.note_what_learns(parameters)
            self.others_learn |= bool(self.take_joined())  # which a pool cannot follow
        self.record(Update(weight, after, self.live, list(self.settings)))
        self.begin_round()

    def finish(self) -> None:
        """Records the last round, if every optimizer has stepped in it."""
        if len(self.stepped) == len(self.optimizers):
            self.end_round()

    def after_loading(self, optimizer) -> None:
        super().after_loading(optimizer)
        self.is_new = True
        self.stepped.clear()
