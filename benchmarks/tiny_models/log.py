"""Log the training of the demo's parts."""

from __future__ import annotations

import json
from pathlib import Path


def log_line(file: Path, line: dict[str, object]) -> None:
    """Add one JSON line to a file, and print it."""
    with file.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
