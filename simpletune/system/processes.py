"""Which of the processes that train together this one is."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Whether this process speaks and writes for all; a process that was started alone does.

    For code without an ``Accelerator``, whose ``is_main_process`` says the same: launchers set ``RANK``.
    """
    return os.environ.get("RANK", "0") == "0"
