"""Identify this process among those that train together, and count what it does."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Whether this process prints and writes for all; true for a single process."""
    # For code without an Accelerator; agrees with its is_main_process, because launchers set RANK.
    return process_number() == 0


def process_number() -> int:
    """This process's rank among those that train together."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many processes train together, as set by the launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_here() -> int:
    """How many of them run on this machine, as set by the launcher; 1 if it is not set."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class WorkDone:
    """What this process has done, so that others can tell a long task from a hang."""

    count = 0  # pieces of work: pictures, prompts, denoising steps, training steps
    trains = False  # a training step was finished


progressed = WorkDone()
