"""What a person sees while a run goes on: plain lines, and a progress bar where the output is a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from simpletune.system.redact import redact

PLAIN_EVERY = 10.0  # seconds between progress lines when the output is no terminal
WINDOW = 20  # steps that the seconds a step are a mean of
WARM_UP = 2  # steps that are left out of it
CLEAR = "\r\x1b[2K"
_SILENT: list[bool] = []


class _Screen:
    """Whether the terminal's last line is a progress line that the next words must not follow."""

    line_open = False


def say(text: str) -> None:
    """A line on standard output, at once; of several processes only the first speaks."""
    if os.environ.get("RANK", "0") == "0" and not _SILENT:
        print(f"{CLEAR if _Screen.line_open else ''}{redact(text)}", flush=True)
        _Screen.line_open = False


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
        print(f"{CLEAR}{line}" if live else line, end="" if live else "\n", flush=True)

    yield advance
    seconds = time.perf_counter() - start
    print(CLEAR if live and not _SILENT else "", end="")
    say(f"{what}: {done} {unit} in {seconds:.1f} s")


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 20 s or 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class TrainingProgress:
    """The line that tells how training goes; as a context it ends the line on every way out.

    Args:
        steps: steps of the whole run.
        start: the step the run starts from.
        samples: pictures a step, of all processes.
        memory: tells the memory in use, in words.
        every: steps between what interrupts training (``validate``, ``save``); None: it comes at the end only.
        took: seconds that one such interruption is known to take.
    """

    def __init__(
        self,
        steps: int,
        start: int,
        samples: int = 1,
        memory: Callable[[], str] = str,
        every: dict[str, int | None] | None = None,
        took: dict[str, float] | None = None,
    ):
        self.steps, self.samples, self.memory = steps, samples, memory
        self.every = every or {}
        self.took: dict[str, list[float]] = {name: [seconds] for name, seconds in (took or {}).items()}
        self.live = sys.stdout.isatty()
        self.loss: float | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._warm = start + WARM_UP
        self._last = 0.0
        self._width = len(f"{steps:,}")

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live and _Screen.line_open:
            print(flush=True)
            _Screen.line_open = False

    @contextmanager
    def interrupted(self, name: str) -> Iterator[None]:
        """Something that interrupts training: its time counts for the time left, never for the seconds a step."""
        began = time.perf_counter()
        yield
        self.took.setdefault(name, []).append(time.perf_counter() - began)

    def update(self, step: int, loss: float, seconds: float) -> None:
        """Tell of a finished step.

        Args:
            step: how many steps are done.
            loss: of this step.
            seconds: of this step alone.
        """
        self.loss = loss if self.loss is None else 0.9 * self.loss + 0.1 * loss
        if step == self._warm + 1:
            self._recent.clear()  # caches and allocators were filling
        self._recent.append(seconds)
        now, final = time.perf_counter(), step == self.steps
        if not final and now - self._last < (0.1 if self.live else PLAIN_EVERY):
            return
        self._last = now
        parts = self._parts(step)
        line = "  ".join(parts)
        if not self.live:
            print(line, flush=True)
            return
        room = shutil.get_terminal_size().columns - 1
        while len(line) > room and len(parts) > 2:
            parts.pop()
            line = "  ".join(parts)
        print(f"{CLEAR}{line[:room]}", end="\n" if final else "", flush=True)
        _Screen.line_open = not final

    def _parts(self, step: int) -> list[str]:
        """What the line says, the dispensable last."""
        pace = sum(self._recent) / len(self._recent)
        parts = [f"train   step {step:>{self._width},}/{self.steps:,}", f"loss {self.loss:.4f}", f"{pace:.3g} s/step"]
        if step < self.steps:
            parts.append(f"{duration(self.left(step, pace))} left")
        parts += [f"{self.samples / pace:.3g} samples/s" if pace else "", self.memory()]
        every = self.every.get("validate")
        if every and step < self.steps:
            parts.append(f"pictures at {min((step // every + 1) * every, self.steps):,}")
        return [part for part in parts if part]

    def left(self, step: int, pace: float) -> float:
        """Seconds left: the steps, and what interrupts them or follows the last, taking what it took so far."""
        seconds = pace * (self.steps - step)
        for name, every in self.every.items():
            times = self.took.get(name, [])
            coming = 1 + ((self.steps - 1) // every - step // every if every else 0)
            seconds += coming * sum(times) / max(1, len(times))
        return seconds
