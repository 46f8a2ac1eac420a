"""Finds a task as tensors by its name.

A task of your own is a subclass of TensorEnv (env.py) in a module of your own. Its name is
"module:Class".
"""

import importlib

from ..distribution import Categorical
from ..env import TensorEnv
from .acrobot import Acrobot
from .cartpole import CartPole
from .lqr import Lqr
from .pendulum import Pendulum

# Tasks of this package, by the names that they have in Gymnasium.
TASKS = {
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
    "Pendulum-v1": Pendulum,
    "fp8rl/Lqr-v0": Lqr,
}


def task_of(env_id: str | None) -> type[TensorEnv] | None:
    """The task of this name as tensors, or None if only Gymnasium may have it.

    Imports the module that a name "module:Class" names. Raises ValueError if that fails, and for a
    task that lacks an attribute or has fewer than 2 or more than 256 actions.
    """
    module, _, name = (env_id or "").rpartition(":")
    if not (module and name.isidentifier()):
        return TASKS.get(env_id)
    try:
        task = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(
            f"env_id is {env_id!r}, whose module cannot be imported ({error}): fix or install it"
        ) from error
    if not (isinstance(task, type) and issubclass(task, TensorEnv)):
        return None
    for attribute in ("bounds", "max_steps", "state_size", "num_actions"):
        # An __init__ of the task's own may set the attribute.
        if task.__init__ is TensorEnv.__init__ and not hasattr(task, attribute):
            raise ValueError(
                f"env_id is {env_id!r}, which has no {attribute}: "
                "give it all attributes of a TensorEnv"
            )
    actions = getattr(task, "num_actions", None)
    if isinstance(actions, int) and task.distribution is Categorical and not 2 <= actions <= 256:
        raise ValueError(f"env_id is {env_id!r}, which has {actions} actions: give it 2 to 256")
    return task
