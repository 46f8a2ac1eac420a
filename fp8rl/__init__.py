"""Low-precision reinforcement learning that can be stepped through in one notebook and checked."""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder


class Hook:
    """Registers the tasks (fp8rl.tasks) as soon as a program imports Gymnasium, which most of the package does not need."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        """Gymnasium's, made to import the tasks when it has been loaded."""
        spec = PathFinder.find_spec(name) if name == "gymnasium" else None
        if spec and spec.loader:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), importlib.import_module("fp8rl.tasks"))
        return spec


if "gymnasium" in sys.modules:
    importlib.import_module("fp8rl.tasks")
else:
    sys.meta_path.insert(0, Hook)
