"""What the NVIDIA cards of this machine are doing: memory in use, load, power and temperature, by ``nvidia-smi``."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

FIELDS = ("name", "memory.used", "memory.total", "utilization.gpu", "power.draw", "power.limit", "temperature.gpu")
PERIOD = 2.0  # seconds between two questions
STALE = 15.0  # seconds until an answer is no longer shown
SECONDS = 10.0  # timeout of nvidia-smi; one that a hung driver holds cannot even be killed


@dataclass(frozen=True)
class CardLoad:
    """One card's figures; None if the card does not report one."""

    name: str
    used_mib: float | None
    total_mib: float | None
    busy: float | None  # percent of the time in which a kernel ran
    watts: float | None
    watts_limit: float | None
    celsius: float | None


class CardMeter:
    """Ask nvidia-smi at most once per period, in a thread of its own, so that one that hangs holds nobody up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked = self._answered = float("-inf")
        self._found: Sequence[CardLoad] = ()

    def read(self, wait: float = 1.0) -> Sequence[CardLoad]:
        """Return the cards' figures, after at most ``wait`` seconds; empty without a card or an answer of late."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if not running and time.monotonic() - self._asked >= PERIOD:
                self._asked = time.monotonic()
                self._thread = threading.Thread(target=self._ask, daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(wait)
        return self._found if time.monotonic() - self._answered < STALE else ()

    def _ask(self) -> None:
        query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(
                query, capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):  # the next question may be answered
            return
        lines = answer.stdout.splitlines() if answer.returncode == 0 else []
        self._found = [card for line in lines if (card := parse_load(line)) is not None]
        self._answered = time.monotonic()


def parse_load(line: str) -> CardLoad | None:
    """Read one card's line; None if it is no such line, such as an error's."""
    name, *figures = (part.strip() for part in line.rsplit(",", len(FIELDS) - 1))
    if len(figures) != len(FIELDS) - 1:
        return None
    return CardLoad(name, *map(_number, figures))


def _number(text: str) -> float | None:
    """Read a figure; None for ``[N/A]``, ``[Not Supported]`` and the like."""
    try:
        return float(text)
    except ValueError:
        return None
