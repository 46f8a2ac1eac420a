"""Collecting one iteration ahead of the learner, in a separate thread.

The acting policy is a copy of the learner's weights, taken before its rollout starts, so the learner may change meanwhile. The
rollout is one update older than the learner that receives it, which the importance ratios correct. The learner waits for the end
of the rollout, so runs are deterministic: the same seed gives the same run.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..precision import Precision
from ..rollout import Collector, Rollout
from .around import Around


class InTurn(Around):
    """A collector that takes turns with the learner. In a resumed run that collected ahead it begins with the rollout that was
    waiting; `waiting` returns that."""

    waiting: Callable[[], Rollout] | None = None

    def collect(self, learned: torch.nn.Module) -> Rollout:
        waiting, self.waiting = self.waiting, None
        return waiting() if waiting else self.inner.collect(learned)

    def state_dict(self) -> dict:
        """With the waiting rollout, if there is one: the environments have already taken its steps."""
        waiting = self.waiting()._asdict() if self.waiting else {}  # first: the thread changes the rest
        return {**self.inner.state_dict(), "waiting": {name: x for name, x in waiting.items() if x is not None}}

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        if state.get("waiting"):
            rollout = Rollout(**state["waiting"]).to(self.inner.env.device)
            self.waiting, rollouts = lambda: rollout, rollouts + 1
        self.inner.load_state_dict(state, rollouts)


class Ahead(InTurn):
    """Lets a collector with a copy of the network collect ahead, `most` rollouts in all. `learning`: the learner's precision."""

    def __init__(self, inner: Collector, learning: Precision, most: int):
        super().__init__(inner)
        self.learning, self.most, self.pool, self.stack = learning, most, None, contextlib.ExitStack()

    def collect(self, learned: torch.nn.Module) -> Rollout:
        """Returns the waiting rollout, or the first one, and starts the next."""
        if self.pool is None:
            self.stack.enter_context(self.learning.matmul_mode())  # once for both threads: a process-wide switch
            self.pool = self.stack.enter_context(ThreadPoolExecutor(1))
        waiting, self.waiting = self.waiting or self.start(learned), None  # if it fails, a checkpoint does not wait for it
        rollout = waiting()
        self.waiting = self.start(learned) if self.inner.rollouts < self.most else None
        return rollout

    def start(self, learned: torch.nn.Module) -> Callable[[], Rollout]:
        """Starts a rollout with the current weights; what it returns waits for its end."""
        self.inner.sync(learned)
        device = self.inner.env.device
        if device.type != "cuda":
            return self.pool.submit(self.inner.act).result
        caller, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        own.wait_stream(caller)
        return self.pool.submit(self.act_on, own, caller).result

    def act_on(self, own: torch.cuda.Stream, caller: torch.cuda.Stream) -> Rollout:
        """A rollout on a separate CUDA stream: on the default stream, which all threads share, its kernels would wait for the
        learner's. It is finished when it returns."""
        with torch.cuda.stream(own):
            rollout = self.inner.act()
        own.synchronize()
        for x in filter(torch.is_tensor, rollout):
            x.record_stream(caller)  # its memory is not reused before the learner's kernels have read it
        return rollout

    def close(self) -> None:
        """Waits for the thread and closes the environments."""
        self.stack.close()
        self.inner.close()
