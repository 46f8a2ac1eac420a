"""Low-precision reinforcement learning that can be stepped through in one notebook and checked."""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder


class Registering:
    """Gymnasium's loader, which this one holds, and then the registration of the tasks (fp8rl.tasks)."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def exec_module(self, module) -> None:
        self.inner.exec_module(module)
        importlib.import_module("fp8rl.tasks")


class Finder:
    """Registers the tasks as soon as a program imports Gymnasium, which most of the package does not need."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        """Where Gymnasium is, or None for any other module."""
        spec = PathFinder.find_spec(name) if name == "gymnasium" else None
        if spec and spec.loader:
            spec.loader = Registering(spec.loader)
        return spec


if "gymnasium" in sys.modules:
    importlib.import_module("fp8rl.tasks")
else:
    sys.meta_path.insert(0, Finder)
