"""An events file for TensorBoard, which `train --tensorboard` writes into the run's folder.

    tensorboard --logdir runs

Every column of the history is a scalar. Scalars are in groups, like those of CleanRL's scripts. An
event's step is the number of environment steps. Its time counts the seconds of training, without
the pauses before a run was resumed. There is no event where a column is NaN, as a return is while
no episode ends.
"""

import math
import time

from ..disk.run_folder import EVENTS, Folder
from ..history import History

# Columns of a history by the group that TensorBoard shows them in. `iteration` and `steps` are left
# out, because they are the horizontal axis.
GROUPS = {
    "charts": ("train_return", "eval_return", "learning_rate", "seconds"),
    "losses": ("loss", "policy_loss", "value_loss", "entropy", "k3", "clip_fraction"),
    "ratios": ("ess", "mean_ratio", "min_ratio", "max_ratio", "min_logp"),
    "numerics": ("loss_scale", "grad_norm", "nonfinite", "skipped", "clipped", "outside"),
}
TAGS = {column: f"{group}/{column}" for group, columns in GROUPS.items() for column in columns}


def require_tensorboard() -> None:
    """Raises ValueError unless the package can be imported."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"tensorboard is True, and its package cannot be imported ({error}): "
            "pip install tensorboard, or use --no-tensorboard"
        ) from error


class EventFile:
    """The events file of a run, which is always a new file in the run's folder.

    A resumed run replaces its earlier file. It writes all rows of its history again, so that no row
    is there twice. Raises OSError if the file cannot be written.
    """

    def __init__(self, folder: Folder):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.rows = 0  # number of rows that have been written
        self.began = None  # the time at which training would have begun without pauses
        folder.remove(EVENTS)
        with folder.writing():
            # A TensorBoard that has read the earlier file forgets its events from step 0 on.
            self.writer = SummaryWriter(str(folder.path), purge_step=0)

    def write(self, history: History) -> None:
        """Writes an event for every column of the rows of a history that are not written yet."""
        rows = history.since(self.rows)
        if not rows:
            return
        if self.began is None:
            self.began = time.time() - rows[-1]["seconds"]
        with self.folder.writing():
            for row in rows:
                when = self.began + row["seconds"]
                for column, tag in TAGS.items():
                    number = row.get(column, math.nan)
                    if not math.isnan(number):
                        self.writer.add_scalar(tag, number, int(row["steps"]), walltime=when)
            self.writer.flush()  # raises what its thread could not write
        self.rows += len(rows)

    def close(self) -> None:
        with self.folder.writing():
            self.writer.close()
