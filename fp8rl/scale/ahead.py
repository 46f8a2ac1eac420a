"""Collecting one iteration ahead of the learner, in a separate thread.

The acting policy is a copy of the learner's weights, taken before its rollout starts, so the learner may change meanwhile. The
rollout is one update older than the learner that receives it, which the importance ratios correct. The learner waits for the end
of the rollout, so runs are deterministic: the same seed gives the same run.
"""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..precision import Precision
from ..rollout import Collector, Rollout
from .around import Around


class Ahead(Around):
    """Lets a collector with a copy of the network collect ahead, `most` rollouts in all. `learning`: the learner's precision."""

    def __init__(self, inner: Collector, learning: Precision, most: int):
        super().__init__(inner)
        self.learning, self.most, self.waiting = learning, most, None
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(ThreadPoolExecutor(1))

    def collect(self, learned: torch.nn.Module) -> Rollout:
        """Returns the waiting rollout, or the first one, and starts the next."""
        if self.waiting is None:
            self.stack.enter_context(self.learning.matmul_mode())  # once for both threads: a process-wide switch
            self.waiting = self.start(learned)
        rollout = self.waiting.result()
        self.waiting = self.start(learned) if self.inner.rollouts < self.most else None
        return rollout

    def start(self, learned: torch.nn.Module) -> Future:
        """Starts the next rollout with the current weights."""
        self.inner.sync(learned)
        device = self.inner.env.device
        if device.type != "cuda":
            return self.pool.submit(self.inner.act)
        caller, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        own.wait_stream(caller)
        return self.pool.submit(self.act_on, own, caller)

    def act_on(self, own: torch.cuda.Stream, caller: torch.cuda.Stream) -> Rollout:
        """A rollout on a separate CUDA stream: on the default stream, which all threads share, its kernels would wait for the
        learner's. It is finished when it returns."""
        with torch.cuda.stream(own):
            rollout = self.inner.act()
        own.synchronize()
        for x in rollout:
            if x is not None:
                x.record_stream(caller)  # its memory is not reused before the learner's kernels have read it
        return rollout

    def state_dict(self) -> dict:
        """With the waiting rollout, if there is one: the environments have already taken its steps."""
        waiting = self.waiting.result()._asdict() if self.waiting else {}  # first: the thread changes the rest
        return {**self.inner.state_dict(), "waiting": {name: x for name, x in waiting.items() if x is not None}}

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        waiting = waiting_in(state, self.inner)
        self.inner.load_state_dict(state, rollouts + bool(waiting))
        if waiting:
            self.waiting = Future()
            self.waiting.set_result(waiting)

    def close(self) -> None:
        """Waits for the thread and closes the environments."""
        self.stack.close()
        self.inner.close()


class InTurn(Around):
    """A collector that goes on in turn after a run that collected ahead: it begins with the rollout that was waiting."""

    waiting: Rollout | None = None

    def collect(self, learned: torch.nn.Module) -> Rollout:
        """Like Collector.collect."""
        rollout, self.waiting = self.waiting, None
        return rollout or self.inner.collect(learned)

    def load_state_dict(self, state: dict, rollouts: int) -> None:
        self.waiting = waiting_in(state, self.inner)
        self.inner.load_state_dict(state, rollouts + bool(self.waiting))


def waiting_in(state: dict, collector: Collector) -> Rollout | None:
    """The rollout that waits in a collector's state."""
    return Rollout(**state["waiting"]).to(collector.env.device) if state.get("waiting") else None
