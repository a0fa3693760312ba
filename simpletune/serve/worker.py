"""The one thread that drives the model, and the bounded queue before it."""

from __future__ import annotations

import base64
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, Protocol

from simpletune.serve.limits import Limits
from simpletune.serve.metrics import Metrics
from simpletune.serve.orders import Order, Refusal
from simpletune.system.console import say

State = Literal["loading", "ready", "stopping", "ended"]
AHEAD = 16  # prompts of waiting requests that are encoded together with the next one's


class Draws(Protocol):
    """What the worker needs of ``painter.Painter``."""

    def encode(self, prompts: Sequence[str]) -> None: ...

    def draw(self, order: Order, go_on: Callable[[], None]) -> bytes: ...

    def peak_bytes(self) -> dict[str, float]: ...


class Gone(Exception):
    """Nobody waits for this work any more."""


class Job:
    """The pictures of one request.

    Args:
        orders: one a picture.
        seconds: until it is too late.
    """

    def __init__(self, orders: Sequence[Order], seconds: float):
        self.orders = list(orders)
        self.arrived = time.monotonic()
        self.begun = self.arrived
        self.deadline = self.arrived + seconds
        self.done: Future[list[str]] = Future()
        self.done.set_running_or_notify_cancel()  # from here on only the worker ends it
        self._gone = threading.Event()

    def leave(self) -> None:
        """Nobody waits for it any more: it is not begun, or it ends before the next sampling step."""
        self._gone.set()

    def require_wanted(self) -> None:
        """Raises:
        Gone: nobody waits for it, or it is too late.
        """
        if self._gone.is_set() or time.monotonic() > self.deadline:
            raise Gone


class Worker:
    """Takes jobs in the order in which they came.

    Args:
        load: makes what draws; called in the worker's thread.
        limits: of the queue and of time.
        metrics: counts pictures.
    """

    def __init__(self, load: Callable[[], Draws], limits: Limits, metrics: Metrics):
        self.limits, self.metrics = limits, metrics
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self._load = load
        self._painter: Draws | None = None
        self._waiting: deque[Job] = deque()
        self._in_hand: Job | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="simpletune-worker", daemon=True)

    def start(self) -> None:
        """Begin to load, then to work."""
        self._thread.start()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended."""
        self._thread.join(seconds)

    @property
    def waiting(self) -> int:
        """Jobs that are not begun."""
        return len(self._waiting)

    def peak_bytes(self) -> dict[str, float]:
        """Peak memory so far, by kind; empty before the model is loaded."""
        return self._painter.peak_bytes() if self._painter is not None else {}

    def require_ready(self) -> None:
        """Raises:
        Refusal: 503, the model is not loaded yet, or the server is stopping.
        """
        if self.state == "loading":
            raise Refusal(503, "The model is being loaded. Try again shortly", headers={"Retry-After": "5"})
        if self.state != "ready":
            raise Refusal(503, "The server is stopping", headers={"Retry-After": "30", "Connection": "close"})

    def submit(self, orders: Sequence[Order]) -> Job:
        """Put a job at the end of the queue.

        Raises:
            Refusal: 429, the queue is full; 503, nothing is taken now.
        """
        with self._changed:
            self.require_ready()
            if len(self._waiting) >= self.limits.queue:
                pictures = sum(len(job.orders) for job in self._waiting)
                wait = max(1, min(600, math.ceil(pictures * self.metrics.picture_seconds())))
                message = f"{len(self._waiting)} requests are waiting, and no more may. Try again in {wait} s"
                raise Refusal(429, message, headers={"Retry-After": str(wait)})
            job = Job(orders, self.limits.seconds)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def leave(self, job: Job) -> None:
        """Nobody waits for a job any more; its place in the queue is free at once."""
        job.leave()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.done.set_result([])

    def stop(self, at_once: bool = False) -> None:
        """Take no more, refuse what waits, finish what is in hand.

        Args:
            at_once: give up what is in hand, too, before its next sampling step.
        """
        with self._changed:
            if self.state != "ended":
                self.state = "stopping"
            while self._waiting:
                self._waiting.popleft().done.set_exception(Refusal(503, "The server is stopping"))
            if at_once and self._in_hand is not None:
                self._in_hand.leave()
            self._changed.notify()

    def _run(self) -> None:
        """Load, then work until there is nothing more to do."""
        try:
            clock = time.perf_counter()
            painter = self._load()
            self._painter = painter
            with self._changed:
                if self.state == "loading":
                    self.state = "ready"
                    say(f"ready after {time.perf_counter() - clock:.1f} s")
            while (job := self._next()) is not None:
                self._do(painter, job)
        except BaseException as failure:
            self.failure = failure  # Service.run raises it
            self.stop()
            if self._in_hand is not None and not self._in_hand.done.done():
                self._in_hand.done.set_exception(Refusal(500, "The server has failed; see its log"))
        finally:
            self.state = "ended"

    def _next(self) -> Job | None:
        """The next job; None: there will be none."""
        with self._changed:
            self._in_hand = None
            self._changed.wait_for(lambda: self._waiting or self.state != "ready")
            self._in_hand = self._waiting.popleft() if self._waiting else None
            return self._in_hand

    def _do(self, painter: Draws, job: Job) -> None:
        """Draw a job's pictures; whatever goes wrong with them ends this job alone."""
        try:
            job.begun = time.monotonic()
            job.require_wanted()
            painter.encode(self._prompts(job))
            pictures = []
            for order in job.orders:
                clock = time.perf_counter()
                png = painter.draw(order, job.require_wanted)
                self.metrics.drawn(order.lora, time.perf_counter() - clock)
                pictures.append(base64.b64encode(png).decode("ascii"))
            job.done.set_result(pictures)
        except Gone:
            job.done.set_result([])
        except Exception as error:
            traceback.print_exc()
            full = "OutOfMemory" in type(error).__name__
            message = (
                "The device's memory was full. Ask for smaller pictures" if full else "Drawing failed; see the log"
            )
            job.done.set_exception(Refusal(503 if full else 500, message))

    def _prompts(self, job: Job) -> list[str]:
        """A job's prompts, and those of some that wait: encoders are loaded once for all of them."""
        own = _prompts_of(job)
        with self._changed:
            others = [prompt for waiting in self._waiting for prompt in _prompts_of(waiting)]
        return [*own, *list(dict.fromkeys(others))[:AHEAD]]


def _prompts_of(job: Job) -> list[str]:
    return [prompt for o in job.orders for prompt in (o.request.prompt, o.request.negative_prompt)]
