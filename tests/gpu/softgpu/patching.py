"""Patch modules of other packages when they are imported, or now if they are."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


class _Patching(importlib.abc.MetaPathFinder):
    """Finds modules as they are found otherwise, and patches them once they are loaded."""

    def __init__(self, patches: dict[str, Patch]):
        self._patches = patches

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        patch = self._patches.pop(name, None)
        spec = importlib.util.find_spec(name) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def patch_all(patches: dict[str, Patch]) -> None:
    """Patch modules.

    Args:
        patches: what to do with a module, by its name.
    """
    rest = dict(patches)
    for name in [name for name in rest if name in sys.modules]:
        rest.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Patching(rest))
