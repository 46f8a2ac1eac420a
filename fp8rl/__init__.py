"""Low-precision reinforcement learning that can be stepped through in one notebook and checked."""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder


class Finder:
    """Registers the tasks (fp8rl.tasks) as soon as a program imports Gymnasium, which most of the package does not need."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        """Where Gymnasium is, or None for any other module."""
        spec = PathFinder.find_spec(name) if name == "gymnasium" else None
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_register(module) -> None:
                load(module)
                importlib.import_module("fp8rl.tasks")

            spec.loader.exec_module = load_and_register
        return spec


if "gymnasium" in sys.modules:
    importlib.import_module("fp8rl.tasks")
else:
    sys.meta_path.insert(0, Finder)
