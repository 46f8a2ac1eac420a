"""Tasks other than the cart, as tensors, by name. A task of your own is a subclass of TensorEnv (env.py) in a module of your own,
and its name is "module:Class"."""

import importlib

from ..env import TensorEnv
from .acrobot import Acrobot
from .cartpole import CartPole
from .lqr import Lqr
from .pendulum import Pendulum

TASKS = {"CartPole-v1": CartPole, "Acrobot-v1": Acrobot, "Pendulum-v1": Pendulum, "fp8rl/Lqr-v0": Lqr}  # Gymnasium's names


def task_of(env_id: str | None) -> type[TensorEnv] | None:
    """The task of this name as tensors, or None if only Gymnasium may have it. Imports the module that it names; raises
    ValueError if that fails."""
    module, _, name = (env_id or "").rpartition(":")
    if not (module and name.isidentifier()):
        return TASKS.get(env_id)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(f"env_id is {env_id!r}, whose module cannot be imported ({error}): fix or install it") from error
    return found if isinstance(found, type) and issubclass(found, TensorEnv) else None
