"""What a person sees while a run goes on: plain lines, and a progress bar where the output is a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PLAIN_EVERY = 10.0  # seconds between progress lines when the output is no terminal
_SILENT: list[bool] = []


def say(text: str) -> None:
    """A line on standard output, at once; of several processes only the first speaks."""
    if os.environ.get("RANK", "0") == "0" and not _SILENT:
        print(text, flush=True)


@contextmanager
def silent() -> Iterator[None]:
    """Within this context nothing is said, and no progress shown: what runs only stands in for the real thing."""
    _SILENT.append(True)
    try:
        yield
    finally:
        _SILENT.pop()


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
    """Progress with rate and time left; the context gives the function that counts one.

    Args:
        what: the stage.
        total: how many there are.
        unit: of what.
    """
    start = last = time.perf_counter()
    done = 0
    live = sys.stdout.isatty()

    def advance() -> None:
        nonlocal done, last
        done += 1
        now = time.perf_counter()
        if _SILENT or done == total or now - last < (0.1 if live else PLAIN_EVERY):
            return
        last = now
        rate = done / (now - start)
        line = f"{what}: {done}/{total} {unit}, {rate:.1f}/s, {duration((total - done) / rate)} left"
        print(f"\r\x1b[2K{line}" if live else line, end="" if live else "\n", flush=True)

    yield advance
    seconds = time.perf_counter() - start
    print("\r\x1b[2K" if live and not _SILENT else "", end="")
    say(f"{what}: {done} {unit} in {seconds:.1f} s")


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 20 s or 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class TrainingLine:
    """The line that tells how training goes: step, smoothed loss, seconds a step, time left.

    Args:
        steps: steps of the whole run.
        start: the step the run starts from.
    """

    def __init__(self, steps: int, start: int):
        self.steps, self.start = steps, start
        self.live = sys.stdout.isatty()
        self.loss: float | None = None
        self._last = 0.0
        self._begin = time.perf_counter()
        self._width = len(str(steps))

    def update(self, step: int, loss: float, seconds: float) -> None:
        """Tell of a finished step.

        Args:
            step: how many steps are done.
            loss: of this step.
            seconds: of this step.
        """
        self.loss = loss if self.loss is None else 0.9 * self.loss + 0.1 * loss
        now, final = time.perf_counter(), step == self.steps
        if not final and now - self._last < (0.1 if self.live else PLAIN_EVERY):
            return
        self._last = now
        pace = (now - self._begin) / (step - self.start)
        left = "" if final else f"  {duration(pace * (self.steps - step))} left"
        line = f"train   step {step:>{self._width}}/{self.steps}  loss {self.loss:.4f}  {seconds:.3g} s/step{left}"
        clear = "\r\x1b[2K" if self.live else ""
        print(f"{clear}{line}", end="" if self.live and not final else "\n", flush=True)
