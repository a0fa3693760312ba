"""The one thread that runs the model, and its bounded queue."""

from __future__ import annotations

import base64
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal, Protocol

from simpletune.apps.serve.limits import Limits
from simpletune.apps.serve.metrics import Metrics
from simpletune.apps.serve.requests import RequestError, ServedImage
from simpletune.system.console import say

State = Literal["loading", "ready", "stopping", "ended"]
LOOKAHEAD = 8  # waiting images whose two prompts are encoded together with the next request's
STOPPING = "The server is stopping"
FAILED = "The server failed; see its log"


class SupportsGenerate(Protocol):
    """The part of ``generator.ImageGenerator`` that the worker calls."""

    def encode(self, images: Sequence[ServedImage]) -> None: ...

    def generate(self, image: ServedImage, check_cancelled: Callable[[], None]) -> bytes: ...

    def peak_bytes(self) -> dict[str, float]: ...


class JobCancelled(Exception):
    """The client left, or the deadline passed."""


class GenerationJob:
    """The images of one HTTP request, which have some seconds from its arrival to the deadline."""

    def __init__(self, images: Sequence[ServedImage], seconds: float, arrived: float | None = None):
        self.images = list(images)
        self.submitted = time.monotonic()
        self.started = self.submitted
        self.deadline = (self.submitted if arrived is None else arrived) + seconds
        self.done: Future[list[str]] = Future()
        self.done.set_running_or_notify_cancel()  # from here on only the worker completes it
        self.cancelled = threading.Event()  # keeps it from starting, or stops it before the next sampling step

    def check_cancelled(self) -> None:
        """Raise JobCancelled if the job was cancelled, or its deadline passed."""
        if self.cancelled.is_set() or time.monotonic() > self.deadline:
            raise JobCancelled


class Worker(threading.Thread):
    """Run jobs in the order in which they were submitted, in a thread that first calls ``load`` for the generator."""

    def __init__(self, load: Callable[[], SupportsGenerate], limits: Limits, metrics: Metrics):
        super().__init__(name="simpletune-worker", daemon=True)
        self.limits = limits
        self.metrics = metrics
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self._load = load
        self._generator: SupportsGenerate | None = None
        self._waiting: deque[GenerationJob] = deque()
        self._places = 0  # of requests that are being read
        self._current: GenerationJob | None = None
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """The number of waiting jobs."""
        return len(self._waiting)

    def peak_bytes(self) -> dict[str, float]:
        """Return the peak memory so far by kind; empty before the model is loaded."""
        return self._generator.peak_bytes() if self._generator is not None else {}

    def require_ready(self) -> None:
        """Raise RequestError, 503, if the model is not loaded yet or the server is stopping."""
        if self.state == "loading":
            raise RequestError(503, "The model is loading. Try again shortly", headers={"Retry-After": "5"})
        if self.state != "ready":
            raise RequestError(503, STOPPING, headers={"Retry-After": "30", "Connection": "close"})

    def require_room(self) -> None:
        """Raise RequestError: 429 if the queue is full, 503 if the server is not ready."""
        with self._changed:
            self.require_ready()
            known = len(self._waiting) + self._places
            if known + (self._current is not None) <= self.limits.queue:
                return
            ahead = sum(len(job.images) for job in self._waiting) + self._places
            wait = max(1, min(600, math.ceil(ahead * self.metrics.image_seconds())))
            message = f"The queue is full with {known} requests. Try again in {wait} s"
        raise RequestError(429, message, headers={"Retry-After": str(wait)})

    @contextmanager
    def place(self) -> Iterator[None]:
        """Keep a place in the queue for a request while it is read: no more of them are in memory than may wait. Raises
        RequestError as ``require_room`` does."""
        with self._changed:
            self.require_room()
            self._places += 1
        try:
            yield
        finally:
            with self._changed:
                self._places -= 1

    def submit(self, images: Sequence[ServedImage], arrived: float | None = None) -> GenerationJob:
        """Append a request that has a place to the queue. Raises RequestError if the server is not ready any more."""
        with self._changed:
            self.require_ready()
            job = GenerationJob(images, self.limits.seconds, arrived)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: GenerationJob) -> None:
        """Cancel a job and free its place in the queue."""
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.done.set_result([])

    def stop(self, at_once: bool = False) -> None:
        """Accept no more jobs, refuse waiting ones, and finish the current one, or cancel it too."""
        with self._changed:
            if self.state != "ended":
                self.state = "stopping"
            while self._waiting:
                self._waiting.popleft().done.set_exception(RequestError(503, STOPPING))
            if at_once and self._current is not None:
                self._current.cancelled.set()
            self._changed.notify()

    def run(self) -> None:
        """Load the model, then run jobs until stopped."""
        try:
            clock = time.perf_counter()
            generator = self._load()
            self._generator = generator
            with self._changed:
                if self.state == "loading":
                    self.state = "ready"
                    say(f"ready after {time.perf_counter() - clock:.1f} s")
            while (job := self._next()) is not None:
                self._run_job(generator, job)
        except BaseException as failure:
            self.failure = failure  # raised by Service.run
            self.stop()
            if self._current is not None and not self._current.done.done():
                self._current.done.set_exception(RequestError(500, FAILED))
        finally:
            self.state = "ended"

    def _next(self) -> GenerationJob | None:
        """Wait for the next job; None: the worker is stopping."""
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._waiting or self.state != "ready")
            self._current = self._waiting.popleft() if self._waiting else None
            return self._current

    def _run_job(self, generator: SupportsGenerate, job: GenerationJob) -> None:
        """Generate a job's images; an error ends this job only."""
        try:
            job.started = time.monotonic()
            job.check_cancelled()
            with self._changed:
                ahead = [image for waiting in self._waiting for image in waiting.images][:LOOKAHEAD]
            generator.encode([*job.images, *ahead])  # the encoders load once for all their prompts
            encoded = []
            for image in job.images:
                clock = time.perf_counter()
                png = generator.generate(image, job.check_cancelled)
                self.metrics.count_image(image.lora, time.perf_counter() - clock)
                encoded.append(base64.b64encode(png).decode("ascii"))
            job.done.set_result(encoded)
        except JobCancelled:
            job.done.set_result([])
        except Exception as error:
            traceback.print_exc()
            full = "OutOfMemory" in type(error).__name__
            message = (
                "The device ran out of memory. Request smaller pictures" if full else "Drawing failed; see the log"
            )
            job.done.set_exception(RequestError(503 if full else 500, message))
