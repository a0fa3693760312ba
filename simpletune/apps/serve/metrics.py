"""Prometheus metrics of a server; each server has its own registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "Metrics"]
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)  # seconds
disable_created_metrics()  # text format 0.0.4 has no type for the counters' creation times


class Metrics:
    """A server's metrics; thread-safe."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._responses = Counter(
            "simpletune_requests", "responses by route and status", ["route", "status"], registry=registry
        )
        self._images = Counter("simpletune_pictures", "pictures drawn", ["lora"], registry=registry)
        self._request_seconds = Histogram(
            "simpletune_request_seconds",
            "from arrival to response of a served request",
            buckets=BUCKETS,
            registry=registry,
        )
        self._image_seconds = Histogram(
            "simpletune_picture_seconds",
            "time to draw one picture, without waiting",
            buckets=BUCKETS,
            registry=registry,
        )

    def count_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response and, of a served image request, the seconds from its arrival. ``route`` is one of a fixed
        list, never text from a client."""
        self._responses.labels(route, str(status)).inc()
        if route == "predict" and status == 200:
            self._request_seconds.observe(seconds)

    def count_image(self, lora: str, seconds: float) -> None:
        """Count an image of a served name, and the seconds to generate it."""
        self._images.labels(lora).inc()
        self._image_seconds.observe(seconds)

    def image_seconds(self) -> float:
        """Return the mean seconds per image so far; 1 before the first."""
        (family,) = self._image_seconds.collect()
        values = {sample.name: sample.value for sample in family.samples}
        count = values["simpletune_picture_seconds_count"]
        return values["simpletune_picture_seconds_sum"] / count if count else 1.0

    def add_gauges(
        self, ready: Callable[[], bool], waiting: Callable[[], int], peaks: Callable[[], Mapping[str, float]]
    ) -> None:
        """Add the gauges that every scrape asks a worker for; ``peaks`` returns bytes by kind (``process``,
        ``device``)."""
        Gauge("simpletune_ready", "1 when the model is loaded", registry=self.registry).set_function(ready)
        Gauge("simpletune_queue_length", "requests waiting", registry=self.registry).set_function(waiting)
        self.registry.register(_PeakMemory(peaks))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _PeakMemory(Collector):
    """One gauge per kind of memory; the kinds are known once the model is loaded."""

    def __init__(self, peaks: Callable[[], Mapping[str, float]]):
        self._peaks = peaks

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for kind, value in self._peaks().items():
            yield GaugeMetricFamily(f"simpletune_peak_memory_{kind}_bytes", "peak so far", value)
