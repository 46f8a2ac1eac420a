"""Finds a task as tensors by its name.

A task of your own is a subclass of TensorEnv (env.py) in a module of your own. Its name is
"module:Class". (A subclass of gymnasium.Env is named in the same way; gymnasium_env.py finds it.)
"""

import importlib
from types import ModuleType

from ..env import TensorEnv
from .classic_control import Acrobot, CartPole, Pendulum
from .lqr import Lqr

# Tasks of this package, by the names that they have in Gymnasium.
TASKS = {
    "CartPole-v1": CartPole,
    "Acrobot-v1": Acrobot,
    "Pendulum-v1": Pendulum,
    "fp8rl/Lqr-v0": Lqr,
}


def split_id(env_id: str) -> tuple[str, str]:
    """The module that an env_id "module:name" names, or an empty string, and the name."""
    module, _, name = env_id.rpartition(":")
    return module, name


def import_module_of(env_id: str) -> ModuleType | None:
    """Imports the module that an env_id "module:name" names. None if it names no module.

    Raises ValueError if the module is missing or raises while it is imported.
    """
    module, _ = split_id(env_id)
    if not module:
        return None
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the module's own code raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"env_id is {env_id!r}, whose module cannot be imported ({reason}): "
            "name a module, not a file, that is in this folder or installed"
        ) from error


def task_of(env_id: str | None) -> type[TensorEnv] | None:
    """The task of this name as tensors, or None if only Gymnasium may have it.

    Imports the module that a name "module:Class" names. Raises ValueError if that fails.
    """
    module, name = split_id(env_id or "")
    if not (module and name.isidentifier()):
        return TASKS.get(env_id)
    task = getattr(import_module_of(env_id), name, None)
    return task if isinstance(task, type) and issubclass(task, TensorEnv) else None
