"""Verbs that a run's page starts, each a process of its own with a log (``processes``): what they are called."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from simpletune.web.processes import exit_code, running, start, tail
from simpletune.web.roots import Roots

TRAIN = "run"  # as the queue calls the process of a run
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")
LINES = 12  # of a log


@dataclass(frozen=True)
class Job:
    """A process of a run's page.

    Args:
        kind: compare, export and so on.
        running: whether it runs.
        failed: whether it ended with an error.
        lines: the end of its log.
    """

    kind: str
    running: bool
    failed: bool
    lines: list[str]


@functools.lru_cache(maxsize=4096)
def job_name(kind: str, run: str) -> str:
    """Name the process and log of a verb for a run; names that do not fit into it are told apart by their hash."""
    plain = UNUSUAL.sub("_", run)[:100]
    unusual = plain != run
    return f"{kind}-{plain}" + (f"-{hashlib.sha256(run.encode()).hexdigest()[:8]}" if unusual else "")


def begin(roots: Roots, kind: str, run: str, words: Sequence[str]) -> None:
    """Start a verb for a run.

    Raises:
        UserError: one of this kind is running for it.
    """
    start(roots, words, job_name(kind, run))


def job_of(roots: Roots, kind: str, run: str) -> Job | None:
    """Return the last process of a kind for a run; None if there was none."""
    name = job_name(kind, run)
    lines, runs = tail(roots, name, LINES), running(roots, name)
    if not lines and not runs:
        return None
    return Job(kind, runs, not runs and exit_code(roots, name) not in (0, None), lines)
