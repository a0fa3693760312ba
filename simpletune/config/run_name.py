"""Turn any text into a valid name for a run."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 80  # characters; a name may have 100, and moving an older run appends a number
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)  # reserved by Windows


def run_name(text: str, default: str = "imported") -> str:
    """Return the closest name to a text that ``TrainConfig.name`` accepts; ``default`` if no character is valid."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._-")[:LONGEST].rstrip("._-")
    if not name:
        return default
    return f"{default}-{name}" if RESERVED.match(name) else name
