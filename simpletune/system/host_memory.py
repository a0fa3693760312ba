"""The main memory that this process may use."""

from __future__ import annotations

import re
from pathlib import Path

AMOUNTS = Path("/proc/meminfo")
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container's limit stands: cgroup 2 and 1."""


def usable_memory() -> int | None:
    """Return the machine's main memory in bytes, or a container's limit below it; None if the system does not say."""
    amounts = AMOUNTS.read_text(encoding="utf-8") if AMOUNTS.is_file() else ""
    found = re.search(r"^MemTotal:\s+(\d+) kB", amounts, re.M)
    if found is None:
        return None
    limits = [file.read_text(encoding="utf-8").strip() for file in map(Path, LIMITS) if file.is_file()]
    return min([int(found[1]) * 1024, *(int(text) for text in limits if text.isdecimal())])
