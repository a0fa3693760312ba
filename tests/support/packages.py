"""Build the package as pip does, without its environment for builds, from copies of what it is built from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "simpletune", "configs")


def copy_sources(folder: Path) -> None:
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)


def build(folder: Path, kind: str, **settings: str) -> Path:
    """The sdist or wheel of a folder, in its dist/; with settings of setuptools' build backend."""
    code = "import json, sys, setuptools.build_meta as b; "
    code += "print(getattr(b, f'build_{sys.argv[1]}')('dist', json.loads(sys.argv[2])))"
    command = [sys.executable, "-c", code, kind, json.dumps(settings)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.splitlines()[-1]
