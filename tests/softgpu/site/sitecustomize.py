"""Python runs this at its start under the launcher: a GPU in software is installed as soon as PyTorch is imported.

The stub's own sitecustomize.py, next on the path, is run first.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def run_the_next() -> None:
    """Run the sitecustomize.py that this one hides."""
    for folder in map(Path, sys.path):
        file = folder / "sitecustomize.py"
        if file.is_file() and not file.samefile(__file__):
            runpy.run_path(str(file))
            return


class Installing(importlib.abc.MetaPathFinder):
    """Finds torch as it is found otherwise, and installs once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            from softgpu.install import install

            install()

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


run_the_next()
sys.meta_path.insert(0, Installing())
