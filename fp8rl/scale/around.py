"""What goes around a part of a run."""

from torch import nn

from ..lab.lowbit import LowBitAdam
from ..rollout import Rollout


class Around:
    """A part that holds another one, `inner`, and does some of its work in another place or faster. What a subclass does not
    define is the inner part's."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name: str):
        if name == "inner":  # not there yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.inner, name)


class Unpacked(Around):
    """A collector or a judge that uses a network whose weights an optimizer keeps packed."""

    def __init__(self, inner, optimizer: LowBitAdam):
        super().__init__(inner)
        self.optimizer = optimizer

    def collect(self, learned: nn.Module) -> Rollout:
        with self.optimizer.unpacked():
            return self.inner.collect(learned)

    def evaluate(self, learned: nn.Module) -> float:
        with self.optimizer.unpacked():
            return self.inner.evaluate(learned)
