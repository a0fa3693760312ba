"""Findings of checks, and how to run checks so that a failing one does not stop the others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from simpletune.system.printable import describe_exception

Level = Literal["ok", "warning", "problem"]
OK: Level = "ok"
WARNING: Level = "warning"
PROBLEM: Level = "problem"


@dataclass(frozen=True)
class Finding:
    """One finding of a check."""

    name: str
    level: Level  # ``ok``; ``warning``: something is slower, smaller or unknown; ``problem``: something does not work
    value: str
    why: str = ""  # why it matters
    remedy: str = ""  # what to do

    def lines(self) -> Iterator[str]:
        """Yield lines of text; with reason and remedy only if action is needed."""
        yield f"{self.level:<8} {self.name}: {self.value}"
        if self.level != OK:
            yield from (f"{'':<9}{text}" for text in (self.why, self.remedy) if text)


Check = Callable[[], Iterable[Finding]]


def examine(name: str, check: Check) -> Iterator[Finding]:
    """Run a check; an exception becomes a finding, with its reason and source line."""
    try:
        yield from check()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        said = f"the check failed: {describe_exception(error)} ({where})"
        yield Finding(name, PROBLEM, said, "Its answer is unknown", "Report it with this file attached")
