"""Python runs this at its start under the launcher: PyTorch is told that there is no cuDNN, as soon as it is imported.

cuDNN chooses its kernels by asking the card, and would find none. Convolutions take PyTorch's own kernels then.
The package itself knows nothing of it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class WithoutCuDNN(importlib.abc.MetaPathFinder):
    """Finds torch as it is found otherwise, and switches cuDNN off once it is loaded."""

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

        def load_and_switch(module: ModuleType) -> None:
            load(module)
            module.backends.cudnn.enabled = False

        spec.loader.exec_module = load_and_switch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, WithoutCuDNN())
