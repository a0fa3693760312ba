"""Identify this process among those that train together."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Tell whether this process prints and writes for all; a single process does.

    For code without an ``Accelerator``; agrees with its ``is_main_process``, because launchers set ``RANK``.
    """
    return os.environ.get("RANK", "0") == "0"
