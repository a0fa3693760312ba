"""Notice steps that take much longer than the run's first ones while the card's memory is full.

Under Windows the driver then moves memory to the host instead of refusing it, and nothing else says so.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict, deque

import torch

from simpletune.system.devices import is_under_wsl
from simpletune.system.disk import format_bytes

FIRST, LAST = 100, 20  # steps of the beginning, and those compared with them
TIMES = 2.0
SAME = 3  # steps of the same shapes in the beginning that tell their usual seconds
FULL = 0.85  # share of the memory that torch reports; Windows moves some from about 0.9 on (WSL issue 41176)

Shapes = tuple[torch.Size, ...]
"""Of the latents of a step's micro-batches."""


class SlowSteps:
    """Compare the median of the last steps with steps of the beginning that have the same shapes: the pauses of a few
    steps and other buckets do not count. Watches nothing where no driver moves memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._watches = device.type == "cuda" and (os.name == "nt" or is_under_wsl())
        self._first: dict[Shapes, list[float]] = defaultdict(list)
        self._count = 0
        self._times: deque[float] = deque(maxlen=LAST)

    def see(self, seconds: float, shapes: Shapes) -> str | None:
        """Note a step's seconds, without those of waits for data. Return what to warn of; that once."""
        if not self._watches:
            return None
        if self._count < FIRST:
            self._count += 1
            self._first[shapes].append(seconds)
            return None
        usual = self._usual(shapes)
        if usual is None:
            return None
        self._times.append(seconds / usual)
        if len(self._times) < LAST or (times := statistics.median(self._times)) <= TIMES:
            return None
        self._times.clear()  # asks the driver again after as many steps
        free, total = torch.cuda.mem_get_info(self._device)
        if total - free < FULL * total:
            return None
        self._watches = False
        return (
            f"steps take {times:.1f} times as long as at first, and {format_bytes(total - free)} of the card's "
            f"{format_bytes(total)} are in use: the driver may be moving memory to the host (Windows, WSL). End other "
            "programs on the card, or take settings that need less memory (simpletune plan). In NVIDIA's Control "
            "Panel, CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback makes a full card an error instead"
        )

    def _usual(self, shapes: Shapes) -> float | None:
        """Return the seconds that steps of these shapes took at first; if there were too few of them, those of nine in
        ten steps; None for steps larger than any of those."""
        known = self._first.get(shapes, [])
        if len(known) >= SAME:
            return statistics.median(known)
        if _size(shapes) > max(map(_size, self._first)):
            return None
        return statistics.quantiles((each for several in self._first.values() for each in several), n=10)[-1]


def _size(shapes: Shapes) -> int:
    """Count the latents' elements."""
    return sum(shape.numel() for shape in shapes)
