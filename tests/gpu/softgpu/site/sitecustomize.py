"""Python runs this at its start under the launcher: a GPU in software is installed as soon as PyTorch is imported.

The stub's own sitecustomize.py, next on the path, is run first.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType

from softgpu.patching import patch_all


def run_the_next() -> None:
    """Run the sitecustomize.py that this one hides."""
    for folder in map(Path, sys.path):
        file = folder / "sitecustomize.py"
        if file.is_file() and not file.samefile(__file__):
            runpy.run_path(str(file))
            return


def install_softgpu(torch: ModuleType) -> None:
    """Install a GPU in software."""
    from softgpu.install import install

    install()


run_the_next()
patch_all({"torch": install_softgpu})
