"""Collecting one iteration ahead of the learner, in a separate thread.

The acting policy is a copy of the learner's weights, taken before its rollout starts, so the learner may change meanwhile. The
rollout is one update older than the learner that receives it, which the importance ratios correct. The learner waits for the end
of the rollout, so runs are deterministic: the same seed gives the same run.
"""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..rollout import Rollout
from ..train import Run


class Ahead:
    """Replaces `run.collect`, and becomes the run's part that holds the waiting rollout.

    Args:
        run: a run whose actor is a separate copy.
    """

    def __init__(self, run: Run):
        self.run, self.waiting = run, None
        self.close_run = run.close
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(ThreadPoolExecutor(1))
        run.ahead, run.collect, run.close = self, self.collect, self.close
        run.PARTS = ("ahead", *run.PARTS)  # first: its thread changes the others

    def collect(self) -> Rollout:
        """Returns the waiting rollout, or the first one, and starts the next."""
        if self.waiting is None:
            self.stack.enter_context(self.run.precision.matmul_mode())  # once for both threads: a process-wide switch
            self.waiting = self.start()
        rollout = self.waiting.result()
        self.waiting = self.start() if len(self.run.history) + 1 < self.run.config.iterations else None
        return rollout

    def start(self) -> Future:
        """Starts the next rollout with the current weights."""
        self.run.sync_actor()
        device = self.run.env.device
        if device.type != "cuda":
            return self.pool.submit(self.run.act)
        caller, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        own.wait_stream(caller)
        return self.pool.submit(self.act_on, own, caller)

    def act_on(self, own: torch.cuda.Stream, caller: torch.cuda.Stream) -> Rollout:
        """`run.act` on a separate CUDA stream: on the default stream, which all threads share, its kernels would wait for the
        learner's. It is finished when it returns."""
        with torch.cuda.stream(own):
            rollout = self.run.act()
        own.synchronize()
        for x in rollout:
            if x is not None:
                x.record_stream(caller)  # its memory is not reused before the learner's kernels have read it
        return rollout

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The waiting rollout; empty if there is none."""
        rollout = self.waiting.result()._asdict() if self.waiting else {}
        return {name: x for name, x in rollout.items() if x is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continues with the rollout that was waiting; the environments have already taken its steps."""
        if state:
            self.waiting = Future()
            self.waiting.set_result(Rollout(**state).to(self.run.env.device))

    def close(self) -> None:
        """Waits for the thread and closes the run."""
        self.stack.close()
        self.close_run()


def collect_first(run: Run, state: dict[str, torch.Tensor]) -> None:
    """Makes a run without collection ahead start with the rollout that was waiting, if there was one."""
    collect = run.collect

    def collect_waiting() -> Rollout:
        run.collect = collect
        return Rollout(**state).to(run.env.device)

    if state:
        run.collect = collect_waiting
