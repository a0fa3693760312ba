"""``simpletune doctor --calibrate``: it times what predictions count; how a watch times it, what is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from recorded_work import seen
from torch import Tensor

from simpletune.estimate.timing import calibrate, host_probes, probes
from simpletune.estimate.timing.constants import Composite, Constants, Grid, read_constants
from simpletune.estimate.timing.probes import TimingProbe
from simpletune.estimate.timing.sections import KernelWork
from simpletune.estimate.timing.stopwatch import Call, CpuStopwatch, CudaStopwatch
from simpletune.system.options import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = {probe.name: probe for probe in probes.probes_of(CPU)}
SIDE_EFFECTS = ("norm_backward", "group_norm_backward", "unpack_int8")  # make small operands in the call


@pytest.mark.parametrize("name", ALL)
def test_a_probe_is_what_a_prediction_counts_under_its_name(name: str) -> None:
    """Its work is recorded by another way (timing/work.py) as the kind, extents and bytes that its grid stands for."""
    probe, (kind, _, dtype) = ALL[name], name.partition(".")
    by_bytes = list(probe.axes) == ["bytes"]
    point = (2**16,) if by_bytes else tuple(values[min(1, len(values) - 1)] for values in probe.axes.values())
    works = seen(probe.build(*point))
    if not by_bytes:
        last = {"product": "product_tn"}.get(kind, kind.replace("_both", "_backward"))
        before = [KernelWork(kind.removesuffix("_both"), dtype, point)] if kind.endswith("_both") else []
        assert works == [*before, KernelWork(last, dtype, point)] and probe.size(*point) > 0
        return
    *others, work = works
    own = "fp32" if kind.startswith("int8_") else dtype
    assert (work.kind, work.dtype, probe.size(*point)) == (kind, own, 2**16)
    assert work.extents[0] == pytest.approx(2**16, rel=0.13)  # rows are whole; norms read weights, too
    assert sum(other.extents[0] for other in others) < 256 and (not others or kind in SIDE_EFFECTS)


def test_what_probes_compute() -> None:
    x = torch.empty(4, 64)
    found = probes.nf4_unpacking(x)()
    assert isinstance(found, Tensor) and found.shape == x.shape
    torch.testing.assert_close(found, torch.full_like(x, -1.0))  # the lowest level, times 1
    grad, weight, bias = probes.group_norm_gradient(torch.randn(4, 1024))  # type: ignore[misc]
    assert grad.shape == (1, 32, 128) and weight is None and bias is None  # of its input alone
    for name, (m, n, k) in {"int8_product.bf16": (64, 256, 64), "int8_gradient.bf16": (256, 256, 1024)}.items():
        found = ALL[name].build(m, n, k)()
        assert isinstance(found, Tensor) and found.shape == (m, n) and found.dtype == torch.bfloat16
        assert found.unique().tolist() == [k]  # of ones
        assert ALL[name].size(m, n, k) == m * k + n * k + 2 * m * n  # bytes


def test_the_8_bit_update_is_adams_by_hand() -> None:
    """The gradient is x itself; codes of 0 are the lowest value for the first moment, and 0 for the second."""
    from bitsandbytes.functional import create_dynamic_map

    x = torch.tensor([1.0, -2.0, 0.5, -0.25] * 128)
    first, second = 0.9 * create_dynamic_map(True)[0] + 0.1 * x, 0.001 * x.square()
    expected = x - 1e-4 * (first / (1 - 0.9)) / (second / (1 - 0.999)).sqrt()
    probes.adam8bit_update(x)()
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-6)


def test_copies_go_where_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory here is not pinned, which needs CUDA: host memory holds 1, the device's 2."""
    made: dict[str, Tensor] = {}

    def empty(size: int, dtype: torch.dtype, pin_memory: bool = False, device: object = None) -> Tensor:
        made["host" if pin_memory else "device"] = found = torch.full((size,), 1 if pin_memory else 2, dtype=dtype)
        return found

    monkeypatch.setattr(torch, "empty", empty)
    for probe, name, value in zip(probes.copies(CUDA), ("to_device", "to_host"), (1, 2), strict=True):
        probe.build(4096)()
        assert probe.name == f"{name}.bytes" and probe.size(4096) == 4096
        assert made["host"].unique().tolist() == made["device"].unique().tolist() == [value], name


def test_the_kinds_that_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "probes_of_type", lambda name, device: [name])
    monkeypatch.setattr(probes, "copies", lambda device: ["copies"])
    monkeypatch.setattr(probes, "int8_products", lambda device: ["int8"])
    for device, reason, names in (
        (CPU, None, ["bf16", "fp32", "int8"]),
        (CPU, "no", ["bf16", "fp32"]),
        (CUDA, None, ["bf16", "fp32", "copies", "int8", "fp16"]),
        (CUDA, "no", ["bf16", "fp32", "copies", "fp16"]),
    ):
        monkeypatch.setattr(probes, "int8_problem", lambda device, reason=reason: reason)
        assert list(probes.probes_of(device)) == names


# What the machine does besides


def test_a_machines_rates_are_per_pixel_and_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_probes, "SIDE", 64)
    monkeypatch.setattr(host_probes, "WRITTEN", 1000)
    seconds = iter([4096.0, 8192.0, 5000.0])

    def timed(call: Callable[[], object]) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(host_probes, "_seconds", timed)
    assert host_probes.machine_rates() == {"read_jpeg": 1.0, "write_png": 2.0, "write_byte": 5.0}


def test_bytes_are_written_through_to_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_probes, "WRITTEN", 1234)
    monkeypatch.setattr(host_probes.os, "fsync", lambda number: sizes.append(host_probes.os.fstat(number).st_size))
    host_probes._write_file()
    assert sizes == [1234] and list(tmp_path.iterdir()) == []


class Clock:
    """The host's clock, which stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("time.perf_counter", found)
    return found


def test_the_least_of_three_timings_counts(clock: Clock) -> None:
    costs = iter([3.0, 1.0, 2.0])

    def call() -> None:
        clock.now += next(costs)

    assert host_probes._seconds(call) == 1.0 and next(costs, None) is None


# A card's watch, without a card


class Watch(CudaStopwatch):
    """A card whose calls take given seconds; a replayed graph takes half as long as its calls, which are launched."""

    def __init__(self, seconds: float, captures: bool = True):
        self.device, self.graphs_failed, self.one, self.captures = CPU, {}, seconds, captures
        self.timed: list[int] = []
        self.graphs: list[int] = []
        self.waits = iter([1.5, 1.0, 1.25])

    def _between_events(self, call: Call, repeats: int) -> float:
        self.timed.append(repeats)
        taken = [call() or self.one for _ in range(repeats)]
        return sum(float(each) for each in taken) / repeats * (1.0 if repeats == 3 else next(self.waits))  # type: ignore[arg-type]

    def _capture(self, calls: Sequence[Call], what: str) -> Call | None:
        self.graphs.append(len(calls))
        if not self.captures:
            self.graphs_failed[what] = "not permitted"
            return None
        return lambda: len(calls) * self.one / 2


@pytest.mark.parametrize(
    ("seconds", "graph", "repeats", "found"),
    [
        (1e-6, 400, 1, 0.5),  # at most 400 calls in a graph, replayed as a whole
        (2e-6, 250, 1, 0.5),  # half a millisecond's worth
        (99e-6, 8, 1, 0.5),  # at least 8
        (100e-6, 0, 20, 1.0),  # a longer operation needs no graph, and is repeated for 2 ms
        (5e-3, 0, 1, 1.0),
    ],
)
def test_a_short_operation_is_replayed_from_a_graph(seconds: float, graph: int, repeats: int, found: float) -> None:
    watch, turns = Watch(seconds), list[int]()
    assert watch.device_seconds([lambda: turns.append(0), lambda: turns.append(1)]) == pytest.approx(found * seconds)
    assert watch.graphs == [graph] * bool(graph) and watch.timed == [3, *[repeats] * 3]  # the best of three
    assert turns[:5] == [0, 1, 0, 1, 0], "once each to begin with, then in turns"


def test_where_graphs_fail_a_kind_is_launched_and_not_tried_again() -> None:
    watch = Watch(50e-6, captures=False)
    assert watch.device_seconds([lambda: None], "adam8bit") == pytest.approx(50e-6)
    assert watch.timed == [3, 10, 10, 10]
    watch.waits = iter([1.0] * 6)
    watch.device_seconds([lambda: None], "adam8bit")
    assert watch.graphs == [10], "the second time is not captured"
    watch.device_seconds([lambda: None], "add")
    assert watch.graphs == [10, 10]


class Graph:
    """A CUDA graph that records what was asked of it."""

    asked: list[str] = []  # noqa: RUF012

    def capture_begin(self, capture_error_mode: str) -> None:
        self.asked.append(capture_error_mode)

    def capture_end(self) -> None:
        self.asked.append("end")

    def replay(self) -> None:
        self.asked.append("replay")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> CudaStopwatch:
    """A watch on torch.cuda's calls alone: waiting for the device takes an hour of the host's clock."""

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    def synchronize(device: object) -> None:
        clock.now += 3600

    monkeypatch.setattr(Graph, "asked", [])
    for name, value in {"Stream": lambda device: None, "Event": Event, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    return CudaStopwatch(CUDA)


def test_waiting_for_the_device_is_not_the_hosts_time_and_events_stand_around_the_calls(
    card: CudaStopwatch, clock: Clock
) -> None:
    calls = iter(range(1, 100))

    def call() -> None:
        clock.now += next(calls)

    # One call to begin with; then the first ten of three lots take 2 to 11 s.
    assert card.host_seconds(call) == pytest.approx(6.5) and next(calls) == 32
    calls = iter([0.25] * 4)
    assert card._between_events(call, 4) == pytest.approx(0.25)
    assert card._between_events(lambda: None, 4) == 1e-7  # never nothing, whose logarithm a grid takes


def test_each_device_is_timed_by_its_own_stopwatch(
    card: CudaStopwatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed_by(watch: object, probes: object, budget: float) -> None:
        raise UserError(type(watch).__name__)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibrate, "choose_device", lambda device, *_, **__: (torch.device(device), ""))
    monkeypatch.setattr(calibrate, "measure", timed_by)
    monkeypatch.setattr(calibrate, "probes_of", lambda device: [])
    for device, expected in {"cuda": "CudaStopwatch", "cpu": "CpuStopwatch"}.items():
        with pytest.raises(UserError, match=f"^{expected}$"):
            calibrate.calibrate(device, tmp_path, 1.0)


def test_a_graph_that_fails_is_ended_and_its_first_line_kept(card: CudaStopwatch) -> None:
    def refuse() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be")

    calls: list[int] = []
    replay = card._capture([lambda: calls.append(1)] * 3, "add")
    assert replay is not None and calls == [1, 1, 1] and not card.graphs_failed
    replay()
    assert Graph.asked == ["thread_local", "end", "replay"]
    assert card._capture([refuse], "normal") is None and Graph.asked[3:] == ["thread_local", "end"]
    assert card.graphs_failed == {"normal": "operation not permitted when stream is capturing"}


# The whole


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What stands in for the parts of a measurement: a value, or an error to raise."""
    found: dict[str, object] = {
        "host_seconds": {"operation": 2.5e-6}, "machine_rates": {"write_byte": 1e-9},
        "composites": [Composite(seconds=1.0, host={}, work=[])],
    }  # fmt: skip

    def stand_in(name: str) -> Callable[..., object]:
        def call(*_: object) -> object:
            if isinstance(value := found[name], Exception):
                raise value
            return value

        return call

    for name in found:
        monkeypatch.setattr(calibrate, name, stand_in(name))
    return found


def a_probe(name: str, error: Exception | None = None) -> TimingProbe:
    def build(size: int) -> Call:
        if error is not None:
            raise error
        return lambda: None

    return TimingProbe(name, {"bytes": [64]}, build, int)


def on_cpu() -> CpuStopwatch:
    return CpuStopwatch(reference=lambda: None)


def test_what_fails_is_named_and_the_rest_measured(parts: dict[str, object]) -> None:
    watch = on_cpu()
    good = calibrate.measure(watch, [a_probe("add.fp32")], 100.0)
    assert good.failed == {} and list(good.grids) == ["add.fp32"] and good.composites == parts["composites"]
    assert good.host == {"operation": 2.5e-6} and (good.kind, good.capability, good.memory_bytes) == ("cpu", None, None)
    assert good.rates == {"write_byte": 1e-9, "reference_seconds": watch.reference_seconds}
    parts["host_seconds"], parts["machine_rates"] = RuntimeError("no host"), OSError("disk full")
    parts["composites"] = RuntimeError("no step")
    failing = [a_probe("a.fp32", RuntimeError("no kernel")), a_probe("b.fp32", NotImplementedError("no op"))]
    bad = calibrate.measure(watch, [*failing, a_probe("add.fp32")], 100.0)
    assert list(bad.grids) == ["add.fp32"] and bad.host == {} and bad.composites == []
    assert set(bad.failed) == {"host", "machine", "steps", "a.fp32", "b.fp32"}
    for name, text in {"machine": "disk full", "steps": "no step", "b.fp32": "no op"}.items():
        assert text in bad.failed[name]


def test_nothing_is_begun_after_the_budget(
    parts: dict[str, object], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def grid_of(watch: object, probe: TimingProbe) -> Grid:
        clock.now += 6.0
        return Grid(axes={"bytes": [1]}, seconds=[1.0])

    watch = on_cpu()
    monkeypatch.setattr(calibrate, "grid_of", grid_of)
    found = calibrate.measure(watch, [a_probe(name) for name in "abc"], 10.0)
    assert list(found.grids) == ["a", "b"] and found.failed == {"c": "10 s were over"}


def test_on_a_card_failed_graphs_are_named(parts: dict[str, object]) -> None:
    watch = Watch(1e-3)
    watch.graphs_failed = {"adam8bit": "not permitted", "normal": "nor this"}
    found = calibrate.measure(watch, [], 10.0)
    assert found.rates == {"write_byte": 1e-9}
    assert found.failed == {"graphs": "2 kinds, such as adam8bit, are timed with their launches: not permitted"}


def constants(**changes: object) -> Constants:
    given = {"version": 1, "device": "A CPU", "kind": "cpu", "capability": None, "memory_bytes": None, "threads": 2}
    return Constants(**{**given, "date": "2026-11-22", "versions": "", "seconds": 0.0, "grids": {}, **changes})  # type: ignore[arg-type]


def test_a_few_figures_are_said() -> None:
    product = Grid(axes={"rows": [1, 8192], "outputs": [1, 1024], "sum": [1, 1024]}, seconds=[1e-12] * 7 + [8192e-6])
    named = {"product.bf16": product, "product_nn.bf16": product, "gelu.fp32": product}
    named |= {name: Grid(axes={"bytes": [2**24]}, seconds=[2**24 / 5e9]) for name in ("add.fp32", "to_host.bytes")}
    rate = 2 * 4096 * 1024 * 1024 / product.time(4096, 1024, 1024) / 1e12
    assert calibrate.constants_lines(constants(grids=named, host={"operation": 2.46e-6})) == [
        f"rate    products in bf16: {rate:.2f} TFLOP/s",
        "rate    add fp32: 5.0 GB/s at 16 MiB",
        "rate    to_host bytes: 5.0 GB/s at 16 MiB",
        "host    2.5 us to queue an operation",
    ]
    assert calibrate.constants_lines(constants()) == []


@pytest.mark.parametrize("named", [True, False])
def test_the_constants_are_written_before_a_failure_is_reported(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    failed: dict[str, str] = {}

    def measure(watch: object, probes: object, budget: float) -> Constants:
        assert not torch.is_grad_enabled() and budget == 7.0
        clock.now += 12.34
        return constants(failed=failed)

    monkeypatch.setattr(calibrate, "CpuStopwatch", on_cpu)
    monkeypatch.setattr(calibrate, "measure", measure)
    wanted = tmp_path / ("mine.json" if named else "calibrations/a-cpu-2-threads.json")
    out = wanted if named else None
    assert calibrate.calibrate("cpu", out, tmp_path, 7.0) == wanted
    assert read_constants(wanted) == constants(seconds=12.3)
    assert f"written {wanted}: 0 kinds of operations in 12 s" in capsys.readouterr().out
    failed.update({f"late.{number}": "7 s were over" for number in range(4)})
    assert calibrate.calibrate("cpu", out, tmp_path, 7.0) == wanted  # a limit that was reached is no failure
    assert "not measured in 7 s: late.0, late.1, late.2 and 1 more." in capsys.readouterr().out
    failed.update({"add.fp32": "no kernel", "steps": "no step"})
    with pytest.raises(UserError, match=r"not measured: add\.fp32 \(no kernel\); steps \(no step\)\. The rest is in "):
        calibrate.calibrate("cpu", out, tmp_path, 7.0)
    assert read_constants(wanted).failed == failed
