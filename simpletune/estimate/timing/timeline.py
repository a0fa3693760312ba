"""The time of a recorded step: the device's streams run concurrently with the host that queues their work, and wait for
each other.

On a CPU there is one stream, and the host's seconds add to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from simpletune.estimate.timing.sections import COMPUTE, KernelWork, StreamWork
from simpletune.estimate.timing.speeds import Speeds

ROUNDS = 4  # steps, until their times have converged


@dataclass(frozen=True)
class StepSeconds:
    """The predicted seconds of a step."""

    seconds: float
    """From one step's end to the next step's."""
    device: dict[str, float]
    """That the computation's stream is busy, by use: products, attention, traffic, unpacking, copies."""
    host: float
    """That the host needs to queue the step."""
    waits: float
    """That the computation waits for copies."""
    phases: dict[str, float] = field(default_factory=dict)
    """The device's, by phase."""
    link: float = 0.0
    """That the link to host memory copies, in the computation's stream and the busiest queue."""

    @property
    def limit(self) -> str:
        """What the step takes as long as: the ``card``, the ``host`` that queues its work, or the ``link`` between."""
        card = sum(seconds for use, seconds in self.device.items() if use != "copies")
        busy = {"card": card, "host": self.host, "link": self.link}
        return max(busy, key=lambda name: busy[name])

    @property
    def by_use(self) -> dict[str, float]:
        """Seconds by use, counting waits for copies as copies, and ``host``."""
        found = {use: self.device.get(use, 0.0) for use in ("products", "attention", "traffic", "unpacking")}
        return {**found, "copies": self.device.get("copies", 0.0) + self.waits, "host": self.host}

    @property
    def bound(self) -> str:
        """The step's bottleneck: launches (the host), copies, products (with attention), or bytes."""
        uses = self.by_use
        host = uses.pop("host")
        if host > sum(uses.values()):
            return "launches"
        parts = {"products": uses["products"] + uses["attention"], "copies": uses["copies"]}
        parts["bytes"] = uses["traffic"] + uses["unpacking"]
        return max(parts, key=lambda name: parts[name])


def use_of(work: KernelWork) -> str:
    """Return the use as which a piece of work counts."""
    if work.kind.startswith(("product_", "convolution", "int8_product", "int8_gradient")):
        return "products"
    if work.kind.startswith("attention"):
        return "attention"
    if work.kind.startswith("unpack"):
        return "unpacking"
    return "copies" if work.kind in ("to_device", "to_host") else "traffic"


def step_seconds(sections: Sequence[StreamWork], speeds: Speeds) -> StepSeconds:
    """Predict the time of a recorded step in the middle of a run."""
    device: dict[str, float] = defaultdict(float)
    phases: dict[str, float] = defaultdict(float)
    link: dict[str, float] = defaultdict(float)
    costs = []
    for section in sections:
        by_use: dict[str, float] = defaultdict(float)
        for work, count in section.work.items():
            by_use[use_of(work)] += section.share * count * speeds.seconds(*work)
        launches = sum(count for work, count in section.work.items() if work.kind != "bias")
        queueing = sum(count * speeds.host(what) for what, count in section.host.items())
        host = section.share * (queueing + launches * speeds.launch)
        costs.append((sum(by_use.values()), host))
        link[section.stream] += by_use["copies"]
        if section.stream == COMPUTE:
            for use, seconds in by_use.items():
                device[use] += seconds
        phases[section.phase or "data"] += costs[-1][0] if section.stream == COMPUTE else 0.0
    host_total = sum(host for _, host in costs)
    if not speeds.cuda:
        total = sum(device.values()) + host_total
        return StepSeconds(total, dict(device), host_total, 0.0, dict(phases))
    total, waits = _fold(sections, costs)
    copies = link.pop(COMPUTE, 0.0) + max(link.values(), default=0.0)
    return StepSeconds(total, dict(device), host_total, waits, dict(phases), copies)


def _fold(sections: Sequence[StreamWork], costs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Simulate the streams for a few steps.

    Returns:
        Seconds of the last step, and the computation's waits for copies in it.
    """
    streams: dict[str, float] = {}
    events: dict[int, float] = {}
    host = end = total = waits = 0.0
    for _ in range(ROUNDS):
        waits = 0.0
        for section, (busy, queueing) in zip(sections, costs, strict=True):
            host = max([host, *_completion(events, section.host_after)]) + queueing
            begin = streams.get(section.stream, 0.0)
            ready = max([begin, *_completion(events, section.after)])
            if section.stream == COMPUTE:
                waits += max(0.0, ready - max(begin, host))
            streams[section.stream] = max(ready + busy, host + busy * (section.stream != COMPUTE))
            if section.event is not None:
                events[section.event] = streams[section.stream]
        total, end = max(host, streams.get(COMPUTE, 0.0)) - end, max(host, streams.get(COMPUTE, 0.0))
    return total, waits


def _completion(events: dict[int, float], wanted: Iterable[int]) -> list[float]:
    """Return when events complete; an event that no section sets has completed before."""
    return [events[event] for event in wanted if event in events]
