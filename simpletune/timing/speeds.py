"""Seconds of recorded work on a device: what ``simpletune calibrate`` measured, interpolated. Imports no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from simpletune.timing.constants import Constants
from simpletune.timing.grid import Grid

Extents = tuple[int, ...]
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALES = 50  # tensors that one launch of a grouped update takes
LARGE = 2**28  # bytes; traffic of this size runs at the memory's rate


class Speeds(Protocol):
    """How long work takes on a device."""

    cuda: bool

    def seconds(self, kind: str, dtype: str, extents: Extents) -> float:
        """Seconds of one kernel (see ``work.Work``)."""

    def host(self, what: str) -> float:
        """Seconds of the host for one thing that it does (see ``host_probes.host_seconds``)."""

    def rate(self, name: str, otherwise: float) -> float:
        """A single figure."""


class MeasuredSpeeds:
    """Speeds of a calibrated device.

    Args:
        constants: measured.
    """

    def __init__(self, constants: Constants):
        self.constants, self.cuda = constants, constants.kind == "cuda"
        self.seconds = lru_cache(maxsize=100_000)(self._seconds)

        self._scale = self._host_scale()

    def host(self, what: str) -> float:
        """Seconds of the host beside the device's; on a CPU the operation itself is the device's part."""
        return self._scale * self._in_a_loop(what)

    def _in_a_loop(self, what: str) -> float:
        each = self.constants.host
        if self.cuda:
            return each[what]
        if what == "operation":
            return 0.0
        return max(0.0, each["backward"] - each["operation"]) if what == "backward" else each[what]

    def _host_scale(self) -> float:
        """How much longer the host takes in a step, whose code is not in the caches, than in a loop (composite.py)."""
        each = self.constants.host
        if "composite" not in each:
            return 1.0
        parts = {name.partition(".")[2]: count for name, count in each.items() if name.startswith("composite.")}
        kernels = parts.pop("kernel") * (0.0 if self.cuda else self._time("add", "fp32", (1,)))
        expected = sum(count * self._in_a_loop(what) for what, count in parts.items())
        return max(1.0, (each["composite"] - kernels) / expected)

    def rate(self, name: str, otherwise: float) -> float:
        """A measured figure, or another one where it was not measured."""
        return self.constants.rates.get(name, otherwise)

    def _seconds(self, kind: str, dtype: str, extents: Extents) -> float:
        if kind.startswith("product_"):
            return self._product(kind, dtype, extents)
        if kind == "attention_backward":
            forward, both = (self._time(name, dtype, extents) for name in ("attention", "attention_both"))
            return max(both - forward, forward)
        if kind == "bias":  # a part of the product's kernel on a card
            return 0.0 if self.cuda else self._time("add", dtype, extents)
        if kind == "each":
            count, size = extents
            launches = max(1, round(count / SCALES)) if self.cuda else count
            return launches * self._time("add", dtype, (max(1, size // launches),))
        return self._time(kind, dtype, extents)

    def _product(self, kind: str, dtype: str, extents: Extents) -> float:
        """A product of whichever layout; its operands come from memory at least once."""
        seconds = self._time("product", dtype, extents)
        if kind != "product_tn" and f"{kind}.{dtype}" in self.constants.grids:
            seconds *= self._time(kind, dtype, extents) / self._time("product_tn", dtype, extents)
        m, n, k = extents
        moved = (m * k + k * n + m * n) * ITEM[dtype]
        return max(seconds, moved / self.bandwidth) if self.cuda else seconds

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a large addition reads and writes."""
        return LARGE / self._grid("add", "fp32").time(LARGE)

    def _time(self, kind: str, dtype: str, extents: Extents) -> float:
        return self._grid(kind, dtype).time(*extents)

    def _grid(self, kind: str, dtype: str) -> Grid:
        """The grid of a kind; where it was not measured that of bytes moved, which is the least it takes."""
        grids = self.constants.grids
        for name in (f"{kind}.{dtype}", f"{kind}.bf16", f"{kind}.fp32", f"add.{dtype}"):
            if name in grids:
                return grids[name]
        return grids["add.fp32"]
