"""``simpletune doctor --calibrate``: measure this device's speed, and store it for predicting time."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from simpletune.estimate.timing.composite import composites
from simpletune.estimate.timing.constants import (
    VERSION,
    Composite,
    Constants,
    Grid,
    constants_file,
    points,
    write_constants,
)
from simpletune.estimate.timing.host_probes import host_seconds, machine_rates
from simpletune.estimate.timing.probes import TimingProbe, probes_of
from simpletune.estimate.timing.stopwatch import CpuStopwatch, CudaStopwatch, Stopwatch
from simpletune.system.console import say
from simpletune.system.devices import choose_device
from simpletune.system.environment import cpu_name, describe_machine
from simpletune.system.options import UserError, join_names
from simpletune.system.printable import describe_exception

SECONDS = 110.0
LONGEST = 0.03  # seconds; longer operations are extrapolated from smaller shapes


def calibrate(device: str, out: Path | None, folder: Path, budget: float = SECONDS) -> Path:
    """Measure the device (cuda or cpu), write its constants to ``out`` or into the cache's ``folder``, and print a few.

    Begins nothing further after ``budget`` seconds. Raises UserError if the device does not exist, or something failed
    to be measured; the rest is written.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: torch finds no CUDA device. Use --device cpu")
    here = choose_device(device, "auto", is_demo=True)[0]
    clock = time.perf_counter()
    with torch.no_grad():
        watch = CudaStopwatch(here) if device == "cuda" else CpuStopwatch()
        constants = measure(watch, probes_of(here), budget)
    constants = constants.model_copy(update={"seconds": round(time.perf_counter() - clock, 1)})
    file = out or constants_file(folder, constants.device, constants.threads, constants.kind)
    write_constants(file, constants)
    for line in constants_lines(constants):
        say(line)
    say(f"written {file}: {len(constants.grids)} kinds of operations in {constants.seconds:.0f} s")
    late = [name for name, why in constants.failed.items() if why == _budget_note(budget)]
    if late:
        say(f"note    not measured in {budget:.0f} s: {join_names(late, 3)}. --seconds S gives more time")
    failed = {name: why for name, why in constants.failed.items() if name not in late}
    if failed:
        raise UserError(
            f"not measured: {'; '.join(f'{name} ({why})' for name, why in failed.items())}. The rest is in {file}", 1
        )
    return file


def measure(watch: Stopwatch, probes: Iterable[TimingProbe], budget: float) -> Constants:
    """Measure everything that a device can do; begin nothing further after ``budget`` seconds."""
    grids: dict[str, Grid] = {}
    failed: dict[str, str] = {}
    started = time.perf_counter()
    figures: dict[str, dict[str, float]] = {"host": {}, "machine": {}}
    singles: dict[str, Callable[[], dict[str, float]]] = {
        "host": lambda: host_seconds(watch),
        "machine": machine_rates,
    }
    for name, call in singles.items():
        try:
            figures[name] = call()
        except (RuntimeError, OSError) as error:
            failed[name] = describe_exception(error)
    steps: list[Composite] = []
    try:
        steps = composites(watch)
    except RuntimeError as error:
        failed["steps"] = describe_exception(error)
    for probe in probes:
        if time.perf_counter() - started > budget:
            failed[probe.name] = _budget_note(budget)
            continue
        try:
            grids[probe.name] = grid_of(watch, probe)
        except (RuntimeError, OSError, NotImplementedError) as error:
            failed[probe.name] = describe_exception(error)
        say(f"measure {probe.name} ({time.perf_counter() - started:.0f} s)")
    rates = figures["machine"]
    if isinstance(watch, CpuStopwatch):
        rates["reference_seconds"] = watch.reference_seconds
    elif watch.graphs_failed:
        name, why = next(iter(watch.graphs_failed.items()))
        failed["graphs"] = f"{len(watch.graphs_failed)} kinds, such as {name}, are timed with their launches: {why}"
    about = describe_device(watch)
    return about.model_copy(
        update={"grids": grids, "host": figures["host"], "composites": steps, "rates": rates, "failed": failed}
    )


def _budget_note(budget: float) -> str:
    """Return the reason of measurements that were not begun; a wanted limit, no failure."""
    return f"{budget:.0f} s were over"


def grid_of(watch: Stopwatch, probe: TimingProbe) -> Grid:
    """Time the points of a grid, except those that would take too long judging by their smaller neighbours."""
    found: dict[tuple[int, ...], float] = {}
    skipped: list[tuple[int, ...]] = []
    for point in sorted(points(probe.axes), key=lambda point: (sum(point), point)):
        smaller = [(seconds, before) for before, seconds in found.items() if _is_within(before, point)]
        longest = min((seconds * math.prod(point) / math.prod(before) for seconds, before in smaller), default=0.0)
        if longest > LONGEST or any(_is_within(before, point) for before in skipped):
            skipped.append(point)
            continue
        copies = min(watch.most_copies, max(1, watch.beyond_caches // probe.size(*point)))
        found[point] = watch.device_seconds([probe.build(*point) for _ in range(copies)], probe.name)
    return Grid(axes=probe.axes, seconds=[found.get(point) for point in points(probe.axes)])


def _is_within(smaller: tuple[int, ...], point: tuple[int, ...]) -> bool:
    """Return whether no extent of a point is larger than another point's."""
    return all(a <= b for a, b in zip(smaller, point, strict=True))


def describe_device(watch: Stopwatch) -> Constants:
    """Describe the device and the versions measured with."""
    cuda = watch.device.type == "cuda"
    properties = torch.cuda.get_device_properties(watch.device) if cuda else None
    return Constants(
        version=VERSION,
        device=properties.name if properties else cpu_name(),
        kind=watch.device.type,
        capability=[properties.major, properties.minor] if properties else None,
        memory_bytes=properties.total_memory if properties else None,
        threads=torch.get_num_threads(),
        date=datetime.date.today().isoformat(),
        versions=describe_machine()["versions"] + (f", CUDA {torch.version.cuda}" if cuda else ""),
        seconds=0.0,
        grids={},
    )


def constants_lines(constants: Constants) -> list[str]:
    """Format a few familiar figures: the best rates of products and of memory traffic, and the host's overhead."""
    lines = []
    for name, grid in constants.grids.items():
        kind, _, dtype = name.partition(".")
        largest = [values[-1] for values in grid.axes.values()]
        if kind == "product":
            m, n, k = (min(extent, 4096) for extent in largest)
            lines.append(f"rate    products in {dtype}: {2 * m * n * k / grid.time(m, n, k) / 1e12:.2f} TFLOP/s")
        elif kind in ("add", "to_device", "to_host"):
            size = 2**24
            lines.append(f"rate    {kind} {dtype}: {size / grid.time(size) / 1e9:.1f} GB/s at 16 MiB")
    if constants.host:
        lines.append(f"host    {constants.host['operation'] * 1e6:.1f} us to queue an operation")
    return lines
