"""Restores a run from the state in a checkpoint, or says in one line that it does not fit.

Most misfits show by themselves, as a missing key or a tensor of another shape. Three do not, and
are checked here: a ring whose rows are in a folder, a ring whose observations are in another codec,
and a network whose weights the optimizer keeps.
"""

import torch

from ..replay.ring import ReplayBuffer
from ..returns import EpisodeReturns
from ..train import Run


def restore(run: Run, state: dict, new_episodes: bool = False) -> None:
    """Restores a `state_dict` into a run that has not started.

    With `new_episodes`, its episodes start anew, because the state of Gymnasium's environments
    cannot be saved. Raises ValueError if the state does not fit the run, OSError if the ring's rows
    are in another folder than this run's, and torch.OutOfMemoryError. After an error the run is
    closed.
    """
    if new_episodes:
        state = {**state, "state": None}  # that of a recurrent policy
    try:
        check_ring(run.ring, state["ring"])
        check_stored_weights(run.learner, state)
        run.load_state_dict(state)
    except (OSError, torch.OutOfMemoryError):
        run.close()
        raise
    # What loading the state of another config raises.
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        run.close()
        raise ValueError(
            "the state does not fit the config: resume with the run's own config"
        ) from error
    if new_episodes:
        run.returns = EpisodeReturns(run.env.num_envs, run.env.device)
        run.ring.new_episodes = True
        run.learner.reward_scale.open.zero_()


def check_ring(ring: ReplayBuffer, state: dict | None) -> None:
    """Raises FileNotFoundError if the rows are in a folder and this ring is not, and ValueError for
    rows of other types, which torch would convert."""
    state = state or {}
    if "folder" in state and not ring.outlives_run:
        raise FileNotFoundError(
            f"memmap is None and the run stored its ring in {state['folder']}: "
            "use that folder, or a new one"
        )
    for name, field in ring.fields.items():
        if name in state and state[name].dtype != field.dtype:
            raise ValueError(f"{name} is from a ring of another codec")


def check_stored_weights(learner, state: dict) -> None:
    """Raises ValueError if an optimizer that keeps the weights is to load those of another network.

    The network's own state is then only its buffers, and neither torch nor the optimizer notices
    that a buffer or the weights of a layer are missing.
    """
    if not learner.optimizer_has_weights:
        return
    if state["model"].keys() != dict(learner.model.named_buffers()).keys():
        raise ValueError("the network has other buffers")
    if len(state["optimizer"]["state"]) != len(learner.optimizer.parameters):
        raise ValueError("weights are missing")
