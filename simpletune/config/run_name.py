"""Make the name of a run from any text."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 80  # characters; a run's name may have 100, and a moved older run adds a number
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)  # by Windows


def run_name(text: str, default: str = "imported") -> str:
    """The nearest name that ``TrainConfig.name`` accepts.

    Args:
        text: any, such as the name of a folder.
        default: the name if nothing of the text can stay.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._-")[:LONGEST].rstrip("._-")
    if not name:
        return default
    return f"{default}-{name}" if RESERVED.match(name) else name
