"""This CPU's current speed, for predictions if ``simpletune doctor --calibrate`` has not run.

Times every operation when a prediction asks for it, at its own shape or, if that takes long, at a smaller shape of the
same kind. This takes a few seconds in all, less than calibrating.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice

import torch

from simpletune.estimate.timing.calibrate import describe_device
from simpletune.estimate.timing.composite import composites
from simpletune.estimate.timing.host_probes import host_seconds
from simpletune.estimate.timing.probes import TYPES, TimingProbe, int8_products, probes_of_type
from simpletune.estimate.timing.speeds import CalibratedSpeeds
from simpletune.estimate.timing.stopwatch import Call, CpuStopwatch, cpu_seconds

CPU = torch.device("cpu")
LARGEST = 2**25  # bytes of operands; larger ones are timed in part
MOST_PRODUCTS = 10**9  # operations of a timed product, attention or convolution
ENOUGH = 1e-3  # seconds to time at once
SAMPLES = 3
COPIES = 8  # operands to alternate


class CurrentCpuSpeeds(CalibratedSpeeds):
    """Speeds of this CPU, each timed when it is first asked for."""

    def __init__(self) -> None:
        self._probes = {
            probe.name: probe for name in TYPES for probe in (*probes_of_type(name, CPU), *int8_products(CPU))
        }
        watch = CpuStopwatch()
        found = {"host": host_seconds(watch), "composites": composites(watch)}
        super().__init__(describe_device(watch).model_copy(update=found))

    def _time(self, kind: str, dtype: str, extents: Sequence[int]) -> float:
        for name in (f"{kind}.{dtype}", f"{kind}.fp32", f"{kind}.bf16"):
            if name in self._probes:
                return time_operation(self._probes[name], tuple(extents))
        return time_operation(self._probes[f"add.{dtype}"], (math.prod(extents),))


@cache
def current_cpu_speeds() -> CurrentCpuSpeeds:
    """Return this CPU's speeds; a process measures each operation once."""
    return CurrentCpuSpeeds()


def time_operation(probe: TimingProbe, point: tuple[int, ...]) -> float:
    """Time an operation of these extents; times a part of a large one and scales the result."""
    parts, kept = 1.0, [max(1, extent) for extent in point]
    while probe.size(*kept) > LARGEST or (len(kept) > 1 and math.prod(kept) > MOST_PRODUCTS):
        longest = kept.index(max(kept))
        parts, kept[longest] = parts * kept[longest] / (kept[longest] // 2), kept[longest] // 2
    copies = min(COPIES, max(1, LARGEST // max(1, probe.size(*kept))))
    with torch.no_grad():
        calls = [probe.build(*kept) for _ in range(copies)]
        return parts * _seconds(calls)


def _seconds(calls: Sequence[Call]) -> float:
    """Return the seconds per call: the median of a few timings."""
    for call in calls:
        call()
    once = max(1e-7, cpu_seconds(calls[0]))
    rounds = max(1, min(200, int(ENOUGH / once)))

    def several() -> None:
        for call in islice(cycle(calls), rounds):
            call()

    return statistics.median(cpu_seconds(several) for _ in range(SAMPLES)) / rounds
