"""Figures of a server in Prometheus' text format (version 0.0.4), for ``/metrics``."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)  # seconds


class Histogram:
    """Counts of durations up to each bound."""

    def __init__(self) -> None:
        self.counts, self.total, self.count = [0] * len(BUCKETS), 0.0, 0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.total += seconds
        self.count += 1
        for number, bound in enumerate(BUCKETS):
            self.counts[number] += seconds <= bound

    def lines(self, name: str) -> list[str]:
        """As Prometheus reads it."""
        rows = [f'{name}_bucket{{le="{bound:g}"}} {n}' for bound, n in zip(BUCKETS, self.counts, strict=True)]
        return [
            *rows,
            f'{name}_bucket{{le="+Inf"}} {self.count}',
            f"{name}_sum {self.total:.6f}",
            f"{name}_count {self.count}",
        ]


class Metrics:
    """What a server counts; every thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._pictures: Counter[str] = Counter()
        self._request_seconds, self._picture_seconds = Histogram(), Histogram()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer; the histogram is of the pictures' requests that were served.

        Args:
            route: one of a fixed few, never what a client wrote.
            status: of HTTP.
            seconds: from arrival to answer.
        """
        with self._lock:
            self._answers[route, status] += 1
            if route == "predict" and status == 200:
                self._request_seconds.observe(seconds)

    def drawn(self, lora: str, seconds: float) -> None:
        """Count a picture.

        Args:
            lora: a name of the menu.
            seconds: that it took.
        """
        with self._lock:
            self._pictures[lora] += 1
            self._picture_seconds.observe(seconds)

    def picture_seconds(self) -> float:
        """The mean so far; a second before the first."""
        with self._lock:
            return self._picture_seconds.total / self._picture_seconds.count if self._picture_seconds.count else 1.0

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything, as Prometheus reads it.

        Args:
            gauges: current values by name and help, as in ``{"queue_length requests waiting": 3}``.
        """
        lines: list[str] = []

        def family(name: str, kind: str, about: str, rows: list[str]) -> None:
            lines.extend([f"# HELP simpletune_{name} {about}", f"# TYPE simpletune_{name} {kind}", *rows])

        with self._lock:
            answers = [
                f'simpletune_requests_total{{route="{route}",status="{status}"}} {count}'
                for (route, status), count in sorted(self._answers.items())
            ]
            pictures = [f'simpletune_pictures_total{{lora="{name}"}} {n}' for name, n in sorted(self._pictures.items())]
            family("requests_total", "counter", "answers by route and status", answers)
            family("pictures_total", "counter", "pictures drawn", pictures)
            for name, histogram, about in (
                ("request_seconds", self._request_seconds, "from a served request's arrival to its answer"),
                ("picture_seconds", self._picture_seconds, "of drawing one picture, waiting left out"),
            ):
                family(name, "histogram", about, histogram.lines(f"simpletune_{name}"))
        for described, value in gauges.items():
            name, _, about = described.partition(" ")
            family(name, "gauge", about, [f"simpletune_{name} {value:.10g}"])
        return "\n".join(lines) + "\n"
