"""Print lines and progress; show progress bars if the output is a terminal."""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar, TypeVar

from simpletune.system.options import plural
from simpletune.system.portable import PIPES
from simpletune.system.printable import printable
from simpletune.system.processes import is_first_process
from simpletune.system.redact import redact

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY = 10.0  # seconds between progress lines without a terminal
LIVE_EVERY = 0.1  # seconds between updates of a bar
BAR_WIDTH, NARROW_WIDTH = 12, 6  # characters of a bar, the second in terminals of fewer columns than NARROW
NARROW = 100
TELL_EVERY = 1.0  # seconds between words to a watcher
WINDOW = 20  # steps in the mean of seconds per step
WARM_UP = 2  # first steps, excluded from that mean
Told = TypeVar("Told")
_SILENT: list[bool] = []
_VERBOSE: list[bool] = []
_LISTENER: ContextVar[Callable[[int, int], None] | None] = ContextVar("listener", default=None)
_WATCHER: ContextVar[Callable[[str], None] | None] = ContextVar("watcher", default=None)
TICK = 0.25  # seconds between looks at work that does not count itself
NEARLY = 0.95  # of a part that takes longer than usual
LEAST_PACE = 0.3  # of the usual seconds: some parts may have been cached
_DRAWING = threading.RLock()  # several threads may show progress
_PREDICTED: ContextVar[Callable[[float, str, float], None] | None] = ContextVar("predicted", default=None)


def print_any_text() -> None:
    """Write UTF-8 to files and pipes, for which Windows has cp1252; replace what a terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            is_asked = stream.isatty() or "PYTHONIOENCODING" in os.environ
            stream.reconfigure(encoding=None if is_asked else PIPES, errors="replace")


def say(text: str) -> None:
    """Print a line to standard output above any bar, without buffering; only the first of several processes prints."""
    if _SILENT or not is_first_process():
        return
    text = printable(redact(text))
    if _Stage.bars is None:
        print(text, flush=True)
    else:
        _Stage.bars.console.out(text, highlight=False)


def detail(text: str) -> None:
    """Print a line about the inside of the tool, which only ``--verbose`` shows."""
    if _VERBOSE:
        say(text)


@contextmanager
def verbose(shows: bool = True) -> Iterator[None]:
    """Print details, too, within this context, if it ``shows`` them."""
    _VERBOSE.extend([True] * shows)
    try:
        yield
    finally:
        del _VERBOSE[len(_VERBOSE) - shows :]


def note(lines: Iterable[str]) -> None:
    """Print notes to standard error, because programs may read standard output."""
    for line in lines:
        print(redact(line), file=sys.stderr, flush=True)


@contextmanager
def silence() -> Iterator[None]:
    """Suppress output and progress within this context, for simulated runs."""
    _SILENT.append(True)
    try:
        yield
    finally:
        _SILENT.pop()


@contextmanager
def _within(variable: ContextVar[Told | None], told: Told) -> Iterator[None]:
    token = variable.set(told)
    try:
        yield
    finally:
        variable.reset(token)


def progress_to(listener: Callable[[int, int], None]) -> AbstractContextManager[None]:
    """Tell a function, within this context and thread, how many items of how many are done, instead of printing it.
    Other threads may call it."""
    return _within(_LISTENER, listener)


def watch_work(watcher: Callable[[str], None]) -> AbstractContextManager[None]:
    """Tell a function, within this context and thread, too, what is being done beside the steps, such as ``drawing 2 of
    4 pictures``: when it begins, once a second while it is counted, and with an empty text when it ends."""
    return _within(_WATCHER, watcher)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show in a terminal, and tell the watcher, what is done without counting it."""
    stage, watcher = _Stage(None), _WATCHER.get() or _ignore
    watcher(what)
    if stage.live:
        stage.show(time.perf_counter(), 0, what)
    try:
        yield
    finally:
        stage.end()
        watcher("")


def _ignore(_: str) -> None:
    pass


class _Stage:
    """Show the progress of a stage of ``total`` items (None if unknown): a bar in a terminal, else a plain line from
    time to time, the first one an interval after ``start`` by ``time.perf_counter``."""

    bars: ClassVar[Progress | None] = None  # bars of all active stages, at the bottom of the terminal

    def __init__(self, total: int | None, start: float = float("-inf")):
        self.live = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self.due = start + (LIVE_EVERY if self.live else PLAIN_EVERY)  # time of the next line
        self._total, self._line = total, ""
        self._silent = bool(_SILENT)
        self._bar: TaskID | None = None

    def show(self, now: float, done: int, line: str) -> None:
        """Update the bar and its line, or print the line."""
        self.due, self._line = now + (LIVE_EVERY if self.live else PLAIN_EVERY), line
        if not self.live:
            say(line)
        elif not self._silent and is_first_process():
            with _DRAWING:
                _Stage.bars = _Stage.bars or _start_bars()
                if self._bar is None:
                    self._bar = _Stage.bars.add_task(line, total=self._total)
                _Stage.bars.update(self._bar, completed=done, description=line, refresh=True)

    def end(self, keep: bool = False) -> None:
        """Remove the bar, if any; ``keep``: leave its last line."""
        if self._bar is None or _Stage.bars is None:
            return
        with _DRAWING:
            _Stage.bars.remove_task(self._bar)
            _Stage.bars.refresh()
            self._bar = None
            if not _Stage.bars.tasks:
                _Stage.bars.stop()
                _Stage.bars = None
        if keep:
            say(self._line)


def bar_width() -> int:
    """Return the width of a bar in this terminal."""
    return BAR_WIDTH if shutil.get_terminal_size().columns >= NARROW else NARROW_WIDTH


def _start_bars() -> Progress:
    """Start an empty area for bars at the bottom of the terminal; other output appears above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    line = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
    console = Console(force_terminal=True, force_interactive=True)
    bars = Progress(
        BarColumn(bar_width()),
        line,
        console=console,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stderr=sys.stderr.isatty(),  # standard error may be redirected to a file
    )
    bars.start()
    console.show_cursor()  # a second Ctrl-C kills the process, which could not restore the cursor
    return bars


@contextmanager
def progress(what: str, total: int, unit: str, at_end: Callable[[str], None] = say) -> Iterator[Callable[[], None]]:
    """Show progress with rate and time left; yield a thread-safe function that counts one of ``total`` items, whose
    plural noun is ``unit``. ``at_end`` prints how long all took."""
    start = time.perf_counter()
    one = unit.removesuffix("s")
    done, lock, stage, listener = 0, threading.Lock(), _Stage(total, start), _LISTENER.get()
    watcher, told = _WATCHER.get() or _ignore, start
    watcher(what)

    def advance() -> None:
        nonlocal done, told
        with lock:
            done += 1
            if listener is not None:
                listener(done, total)
            now = time.perf_counter()
            if now >= told + TELL_EVERY:
                told = now
                watcher(f"{what} {min(done + 1, total)} of {plural(total, one, unit)}")
            if listener is None and done < total and now >= stage.due:
                rate = done / (now - start)
                left = duration((total - done) / rate)
                stage.show(now, done, f"{what}: {done}/{plural(total, one, unit)}, {rate:.1f}/s, {left} left")

    try:
        yield advance
    finally:
        stage.end()
        watcher("")
    if listener is None:
        at_end(f"{what}: {plural(done, one, unit)} in {time.perf_counter() - start:.1f} s")


@contextmanager
def counting(what: str, unit: str) -> Iterator[Callable[..., None]]:
    """Show progress of work whose total is unknown; yield a function that counts one item, and takes its name and
    perhaps the share of the work that is done."""
    start = time.perf_counter()
    done, stage = 0, _Stage(None, start)

    def count(last: str, share: float = 0.0) -> None:
        nonlocal done
        done += 1
        now = time.perf_counter()
        if now >= stage.due:
            left = f", about {duration((now - start) * (1 / share - 1))} left" if share else ""
            stage.show(now, done, f"{what}: {done} {unit} in {duration(now - start)}{left}, the last {last}")

    try:
        yield count
    finally:
        stage.end()


class Pace:
    """How far work is that has parts, from their usual seconds and the pace so far.

    Args:
        usual: seconds of each part, in order.
        now: when the first part begins, by any clock.
    """

    def __init__(self, usual: Mapping[str, float], now: float):
        self.part = next(iter(usual), "")
        self._usual, self._start = dict(usual), now
        self._place = (0.0, now)  # the usual seconds before this part, and when it began

    def begin(self, part: str, now: float) -> None:
        """Begin a part."""
        names = list(self._usual)
        self._place, self.part = (sum(self._usual[name] for name in names[: names.index(part)]), now), part

    def look(self, now: float) -> tuple[float, float]:
        """Return the share of the work that is done, and the seconds left."""
        (before, began), total = self._place, sum(self._usual.values())
        pace = max(LEAST_PACE, (began - self._start) / before) if before else 1.0
        done = before + min((now - began) / pace, NEARLY * self._usual[self.part])
        return done / total, (total - done) * pace


def watch_progress(watcher: Callable[[float, str, float], None]) -> AbstractContextManager[None]:
    """Tell a function, within this context and thread, what ``expecting`` shows: the share done, the part in words and
    the seconds left. Another thread calls it."""
    return _within(_PREDICTED, watcher)


@contextmanager
def expecting(what: str, usual: Mapping[str, float]) -> Iterator[Callable[[str], None]]:
    """Show, on a terminal or to a watcher, how far work is whose parts usually take some seconds, with the time left;
    yield a function that begins a part."""
    start = time.perf_counter()
    pace, stage, watcher = Pace(usual, start), _Stage(100), _PREDICTED.get()
    ended = threading.Event()

    def begin(part: str) -> None:
        pace.begin(part, time.perf_counter())

    def tick() -> None:
        while not ended.wait(TICK):
            now = time.perf_counter()
            share, left = pace.look(now)
            if watcher is not None:
                watcher(share, pace.part, left)
            else:
                stage.show(now, int(100 * share), f"{what}: {pace.part}, about {duration(left)} left")

    if watcher is None and (_SILENT or not stage.live):
        yield begin
        return
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        ended.set()
        thread.join()
        stage.end()


def duration(seconds: float) -> str:
    """Format seconds as 42 s, 3 min 20 s or 2 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class TrainingProgress:
    """The progress of training; as a context manager, leaves the last line on every exit.

    Args:
        steps: number of steps of the whole run.
        start: first step of this process.
        samples: samples per step in all processes, averaged over an epoch.
        memory: describes the memory in use.
        every: steps between interruptions by name (``validate``, ``save``); None for the end only.
        took: known seconds per interruption.
    """

    def __init__(
        self,
        steps: int,
        start: int,
        samples: float = 1,
        memory: Callable[[], str] = str,
        every: dict[str, int | None] | None = None,
        took: dict[str, float] | None = None,
    ):
        self.steps = steps
        self.samples = samples
        self.memory = memory
        self.every = every or {}
        self.took: dict[str, list[float]] = {name: [seconds] for name, seconds in (took or {}).items()}
        self.loss: float | None = None
        self.look = "pictures"
        """What ``validate`` produces; empty if nothing."""
        self._stage = _Stage(steps)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._warm = start + WARM_UP
        self._width = len(f"{steps:,}")

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.end(keep=True)

    @contextmanager
    def interruption(self, name: str) -> Iterator[None]:
        """Time an interruption, which counts towards the time left but not towards the seconds per step."""
        began = time.perf_counter()
        yield
        self.took.setdefault(name, []).append(time.perf_counter() - began)

    def update(self, step: int, loss: float, seconds: float) -> None:
        """Show that ``step`` steps are finished; loss and seconds are those of the last one."""
        self.loss = loss if self.loss is None else 0.9 * self.loss + 0.1 * loss
        if step == self._warm + 1:
            self._recent.clear()  # caches and allocators were filling
        self._recent.append(seconds)
        now, final = time.perf_counter(), step == self.steps
        if not final and now < self._stage.due:
            return
        pace = sum(self._recent) / len(self._recent)
        every = self.every.get("validate")
        parts = {
            "step": f"train   step {step:>{self._width},}/{self.steps:,}",
            "loss": f"loss {self.loss:.4f}",
            "pace": f"{pace:.3g} s/step",
            "left": "" if final else f"{duration(self.seconds_left(step, pace))} left",
            "rate": f"{self.samples / pace:.3g} samples/s" if pace else "",
            "memory": self.memory(),
            "look": f"{self.look} at {min((step // every + 1) * every, self.steps):,}"
            if self.look and every and not final
            else "",
        }
        self._stage.show(now, step, self._fitting(parts))
        if final:
            self._stage.end(keep=True)

    def _fitting(self, parts: Mapping[str, str]) -> str:
        """Join the parts of a line; leave out what a narrow terminal has no room for, the least important first."""
        room = shutil.get_terminal_size().columns - bar_width() - 1 if self._stage.live else sys.maxsize
        kept = {"step"}
        room -= len(parts["step"])
        for name in ("left", "loss", "pace", "memory", "look", "rate"):
            if parts[name] and (needed := len(parts[name]) + 2) <= room:
                kept.add(name)
                room -= needed
        return "  ".join(parts[name] for name in parts if name in kept)

    def seconds_left(self, step: int, pace: float) -> float:
        """Estimate the seconds left for steps and interruptions, from their mean durations so far."""
        seconds = pace * (self.steps - step)
        for name, every in self.every.items():
            times = self.took.get(name, [])
            coming = 1 + ((self.steps - 1) // every - step // every if every else 0)
            seconds += coming * sum(times) / max(1, len(times))
        return seconds
