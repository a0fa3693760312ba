"""Print which of the project's requirements this Python lacks, including a CUDA build of torch; exit with 1 if any.

python tests/gpu/dry_gpu/lacking.py pyproject.toml
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def lacking(project: Path) -> Iterator[str]:
    """Describe what is missing."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield "packaging is not installed"
        return
    table = tomllib.loads(project.read_text())["project"]
    extras = table["optional-dependencies"]
    for text in [*table["dependencies"], *extras["serve"], *extras["dev"]]:
        wanted = Requirement(text)
        if wanted.name == table["name"] or (wanted.marker and not wanted.marker.evaluate()):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield f"{wanted} is not installed"
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted} is installed as {found}"
        elif wanted.name == "torch" and not has_cuda():
            yield f"torch {found} is not a CUDA build"


def has_cuda() -> bool:
    """Whether torch brings its library for CUDA; it is not imported, which takes seconds."""
    return any(file.name == "libtorch_cuda.so" for file in metadata.files("torch") or [])


if __name__ == "__main__":
    missing = list(lacking(Path(sys.argv[1])))
    print("\n".join(missing), end="\n" if missing else "")
    sys.exit(1 if missing else 0)
