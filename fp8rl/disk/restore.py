"""Restores a run from a state that comes from a file, which may hold anything.

The `load_state_dict` methods of the agent take a state as it is. Here its names, types and shapes
are checked first. Values are checked only where a wrong value would reach memory that does not
belong to the run, or the content of a file. A state that does not fit raises ValueError before the
run goes on.
"""

import numpy as np
import torch

from ..history import LOSS_TERMS, ROW_MEANS
from ..replay.ring import ReplayBuffer
from ..train import Run

DOES_NOT_FIT = "the state does not fit the config: resume with the run's own config"
REQUIRED_COLUMNS = ("iteration", "steps", "seconds", "eval_return")  # that every history has
COLUMNS = (
    *REQUIRED_COLUMNS,
    *LOSS_TERMS,
    *ROW_MEANS,
    "learning_rate",
    "loss_scale",
    "train_return",
    "clipped",
    "outside",
    "ess",
    "min_logp",
    "min_ratio",
    "max_ratio",
    "grad_norm",
    "nonfinite",
    "skipped",
)
# The errors that reading values from a state of another shape may raise.
MISFIT = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError)


def restore(run: Run, state: dict) -> None:
    """Restores a `state_dict` into a run that has not started.

    Raises ValueError if the state does not fit the run, OSError if the ring's rows are in another
    folder than this run's, and torch.OutOfMemoryError. After an error the run is closed.
    """
    try:
        check_learner(run.learner, state)
        check_collector(run.collector, state)
        check_ring(run.ring, state["ring"], run.env.num_actions)
        scaler = check_scaler(run.learner.precision.scaler, state["scaler"])
        run.load_state_dict({**state, "scaler": scaler})
    except (OSError, torch.OutOfMemoryError):
        run.close()
        raise
    except MISFIT as error:
        run.close()
        raise ValueError(DOES_NOT_FIT) from error


def check_learner(learner, state: dict) -> None:
    """Raises ValueError for the state of another network or of another optimizer."""
    if learner.optimizer_has_weights:
        buffers = dict(learner.model.named_buffers())
        if state["model"].keys() != buffers.keys():
            raise ValueError("the network has other buffers: resume with the run's own config")
        if len(state["optimizer"]["state"]) != len(learner.optimizer.parameters):
            raise ValueError("weights are missing: resume with the run's own config")
    if isinstance(learner.optimizer, torch.optim.Adam):
        check_moments(learner.optimizer, state["optimizer"])


def check_moments(optimizer: torch.optim.Adam, state: dict) -> None:
    """Raises ValueError for moments of other shapes than the parameters.

    Adam's fused step would read and write beyond the ends of such moments.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in state["param_groups"] for i in group["params"]]
    moments = state["state"]
    if moments and len(numbers) != len(parameters):
        raise ValueError(DOES_NOT_FIT)
    for number, p in zip(numbers, parameters, strict=False):
        if number not in moments:
            continue
        shapes = {"step": torch.Size(()), "exp_avg": p.shape, "exp_avg_sq": p.shape}
        if {name: x.shape for name, x in moments[number].items()} != shapes:
            what = "the optimizer's state does not fit these parameters"
            raise ValueError(f"{what}: resume with the run's own config")


def check_scaler(scaler, state: dict) -> dict:
    """The saved state of a loss scaler, with the scaler's own settings.

    Raises ValueError for a loss scale that is not a number.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        return state
    settings = scaler.state_dict()
    if not settings:  # the scaler is disabled
        return settings
    saved = {name: state[name] for name in ("scale", "_growth_tracker")}
    if not all(isinstance(number, int | float) for number in saved.values()):
        raise ValueError(DOES_NOT_FIT)
    return settings | saved


def check_collector(collector, state: dict) -> None:
    """Raises ValueError if the state of a policy with memory is that of another policy."""
    saved = state["state"]
    expected = None
    if collector.model.recurrent:
        expected = (torch.float32, (collector.env.num_envs, collector.model.hidden_size))
    if saved is not None and (saved.dtype, tuple(saved.shape)) != expected:
        raise ValueError("state does not fit this policy: resume with the run's own config")


def check_ring(ring: ReplayBuffer, state: dict | None, num_actions: int) -> None:
    """Raises ValueError for rows of another ring, and for actions that the task does not have."""
    if state is None:
        return
    if "folder" in state:
        if not ring.outlives_run:
            where = f"the run stored its ring in {state['folder']}"
            raise FileNotFoundError(f"memmap is None and {where}: use that folder, or a new one")
        return
    start, count = map(int, state["clock"])
    if not can_be(start, count, ring.rows):
        clock = f"{start} and {count}, which no ring of {ring.rows} rows has"
        raise ValueError(f"clock is {clock}: restore the original")
    filled = min(count + 1, ring.rows)
    for name, field in ring.fields.items():
        rows = field[:, :filled]
        if state[name].shape != rows.shape or state[name].dtype != rows.dtype:
            raise ValueError(f"{name} is from a ring of other settings: use the same settings")
    if state["clipped"].shape != ring.clipped.shape:
        raise ValueError(DOES_NOT_FIT)
    if count and not ring.action_size:
        require_actions(state["action"][:, : count + 1], num_actions)


def can_be(start: int, count: int, rows: int) -> bool:
    """Whether a ring of this many rows can have complete rows `start` to `count` - 1, and go on."""
    return 0 <= start <= count < min(start + rows, 2**62)


def require_actions(actions: torch.Tensor, number: int) -> None:
    """Raises ValueError if one of the discrete actions is not in 0 to `number` - 1."""
    largest = int(actions.max())
    if largest >= number:
        what = f"ring holds action {largest}, and the task has {number}"
        raise ValueError(f"{what}: use another memmap folder")


def check_history(state: dict, agents: int | None = None) -> None:
    """Raises ValueError for a state that History.state_dict cannot have returned.

    The check is needed because the history's names and numbers are written into files. `agents` is
    the number of agents in a population.
    """
    columns = {name: x.numpy() for name, x in state.items() if name != "failures"}
    failures = [*state.get("failures", [None] * (agents or 1))]
    if columns and not columns.keys() >= {*REQUIRED_COLUMNS}:
        needed = ", ".join(REQUIRED_COLUMNS)
        raise ValueError(f"history lacks one of the columns {needed}: restore the original")
    shape = ()
    if columns:
        shape = columns["iteration"].shape[:1]
        if agents:
            shape = (*shape, agents)
    for name, values in columns.items():
        if name not in COLUMNS:
            raise ValueError(f"history has the column {name!r}, which does not exist: leave it out")
        if values.dtype != np.float64 or values.shape != shape:
            what = f"history has the column {name!r} in another type or shape than {shape}"
            raise ValueError(f"{what}: restore the original")
    is_text = all(isinstance(reason, str | None) for reason in failures)
    if len(failures) != (agents or 1) or not is_text:
        raise ValueError(f"history has failures {failures!r}: restore the original")
