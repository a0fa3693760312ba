"""Seconds of recorded work on a device, interpolated from what ``simpletune doctor --calibrate`` measured. Imports no
torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Protocol

from pydantic import Field

from simpletune.estimate.timing.constants import Composite, Constants
from simpletune.system.options import Option, UserError

Extents = tuple[int, ...]
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
SCALES = 50  # tensors per launch of a grouped update
LINK = ("to_device", "to_host")
CLEARLY = 1.2
LARGE = 2**28  # bytes; traffic of this size runs at the memory's bandwidth


Measured = Annotated[float, Field(gt=0, lt=1e9)]


class HostSpeeds(Option):
    """What was measured of a machine in milliseconds (``host_probes.measure_host``); null: there was no card."""

    core: Measured
    """Seconds of a fixed loop on one core of the processor."""
    launch: Measured | None = None
    """The driver's seconds for a launch."""
    to_device: Measured | None = None
    """GB/s from pinned memory to the card."""
    to_host: Measured | None = None
    """GB/s back."""


class Speeds(Protocol):
    """The times that work takes on a device."""

    cuda: bool
    rates: Mapping[str, float]
    """Single figures that were measured, such as ``read_jpeg`` (see ``host_probes.machine_rates``)."""

    launch: float
    """The driver's seconds for a launch, where ``host`` leaves them out."""

    def seconds(self, kind: str, dtype: str, extents: Extents) -> float:
        """Predict the seconds of one kernel (see ``work.KernelWork``)."""

    def host(self, what: str) -> float:
        """Return the host's seconds for one of its tasks (see ``host_probes.host_seconds``)."""


class ScaledSpeeds:
    """Speeds whose device's and host's seconds are multiplied, for the ends of a range."""

    def __init__(self, speeds: Speeds, device: float, host: float):
        self._speeds = speeds
        self._device = device
        self._host = host
        self.cuda = speeds.cuda
        self.rates = speeds.rates
        self.launch = host * speeds.launch

    def seconds(self, kind: str, dtype: str, extents: Extents) -> float:
        return self._device * self._speeds.seconds(kind, dtype, extents)

    def host(self, what: str) -> float:
        return self._host * self._speeds.host(what)


class CalibratedSpeeds:
    """Speeds of a calibrated device."""

    launch = 0.0

    def __init__(self, constants: Constants):
        self.constants, self.cuda = constants, constants.kind == "cuda"
        self.rates: Mapping[str, float] = constants.rates
        self.seconds = lru_cache(maxsize=100_000)(self._seconds)
        # How much longer host and device take in a step than its parts in loops (composite.py).
        self._host_scale = self._device_scale = 1.0
        if not constants.composites:
            return
        smallest, *others = constants.composites
        device, host = self._parts(smallest)
        self._host_scale = max(1.0, (smallest.seconds - (0.0 if self.cuda else device)) / host)
        ratios = []
        for step in others:
            device, host = self._parts(step)
            if not self.cuda:
                ratios.append((step.seconds - host) / device)
            elif step.seconds > CLEARLY * host:  # otherwise the host bounds it
                ratios.append(step.seconds / device)
        self._device_scale = max(1.0, statistics.median(ratios)) if ratios else 1.0  # not faster than alone
        self.seconds.cache_clear()

    def _parts(self, step: Composite) -> tuple[float, float]:
        """Return a step's device and host seconds, as predicted so far."""
        device = sum(count * self.seconds(kind, dtype, tuple(extents)) for kind, dtype, extents, count in step.work)
        return device, sum(count * self.host(what) for what, count in step.host.items())

    def host(self, what: str) -> float:
        """Return the host's overhead in seconds; on a CPU, the operation itself is the device's part."""
        each = self.constants.host
        if what in ("kernel", "tuned"):  # not measured yet
            what = "operation"
        if self.cuda:
            in_a_loop = each.get(what, 0.0)
        elif what == "backward":
            in_a_loop = max(0.0, each["backward"] - each["operation"])
        else:
            in_a_loop = 0.0 if what == "operation" else each[what]
        return (1.0 if what == "recomputed" else self._host_scale) * in_a_loop

    def _seconds(self, kind: str, dtype: str, extents: Extents) -> float:
        return self._alone(kind, dtype, extents) * (1.0 if kind in LINK else self._device_scale)

    def _alone(self, kind: str, dtype: str, extents: Extents) -> float:
        """Predict the seconds of a kernel in a loop."""
        if kind.startswith("product_"):
            seconds = self._time("product", dtype, extents)
            if kind != "product_tn" and f"{kind}.{dtype}" in self.constants.grids:
                seconds *= self._time(kind, dtype, extents) / self._time("product_tn", dtype, extents)
            if not self.cuda:
                return seconds
            m, n, k = extents
            bandwidth = LARGE / self._time("add", "fp32", (LARGE,))
            return max(seconds, (m * k + k * n + m * n) * ITEM[dtype] / bandwidth)  # its operands are read once
        if kind in ("attention_backward", "attention_masked_backward"):
            name = kind.removesuffix("_backward")
            forward, both = (self._time(each, dtype, extents) for each in (name, f"{name}_both"))
            return max(both - forward, forward)
        if kind == "bias":  # part of the product's kernel on a GPU
            return 0.0 if self.cuda else self._time("add", dtype, extents)
        if kind == "each":
            count, size = extents
            launches = max(1, round(count / SCALES)) if self.cuda else count
            return launches * self._time("add", dtype, (max(1, size // launches),))
        return self._time(kind, dtype, extents)

    def _time(self, kind: str, dtype: str, extents: Extents) -> float:
        """Look up the seconds in the grid of a kind; if not measured, a lower bound: that of attention without a mask,
        or of bytes moved. Raises UserError if the calibration lacks the grid, and the grid of bytes moved cannot
        replace it."""
        grids, like = self.constants.grids, "bf16" if dtype == "fp16" and self.cuda else "fp32"
        kinds = kind, kind.replace("_masked", "")  # older calibrations lack attention with a mask
        names = [*(f"{each}.{own}" for each in kinds for own in (dtype, like, "bf16")), f"add.{dtype}", "add.fp32"]
        grid = next((grids[name] for name in names if name in grids), None)
        if grid is None or len(grid.axes) != len(extents):
            raise UserError(
                f"the calibration of {self.constants.device} lacks {kind}.{dtype}. Run simpletune doctor --calibrate "
                "again while nothing else runs"
            )
        return grid.time(*extents)
