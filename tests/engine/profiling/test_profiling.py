"""The profiler's windows: where they lie, what is made of their events, and the files beside a trace."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from simpletune.config.load import validate
from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.engine.profiling import summary, traces
from simpletune.engine.profiling.figures import Recording, Span, figures, nested, peak_of_memory, read_events
from simpletune.engine.profiling.profile_option import Profile
from simpletune.engine.profiling.traces import TraceWindow, place_window, traced_epochs
from simpletune.system.options import ConfigError

KEYS = {
    "epoch", "steps", "seconds_per_step", "phases", "idle", "operators", "kernels", "flops_per_step", "tflops",
    "peak_tflops", "mfu", "memory", "notes",
}  # fmt: skip


def never(step: int) -> bool:
    return False


def test_traces_are_spread() -> None:
    assert traced_epochs(3, 5) == [0, 1, 2]
    assert traced_epochs(11, 5) == [0, 2, 5, 8, 10]
    assert traced_epochs(9, 1) == [0] and traced_epochs(9, 0) == []
    assert place_window(Profile(wait=0, warmup=0, active=1), 5, 9, never) == TraceWindow(5, 0, 1)


@pytest.mark.parametrize(
    ("steps", "interrupted", "expected"),
    [
        (1, never, TraceWindow(0, 0, 1)),
        (2, never, TraceWindow(0, 0, 2)),
        (3, never, TraceWindow(0, 1, 2)),
        (4, never, TraceWindow(1, 1, 2)),
        (9, never, TraceWindow(1, 1, 2)),
        (9, lambda step: step == 0, TraceWindow(1, 1, 2)),  # what comes before the window does not matter
        (9, lambda step: step == 3, TraceWindow(1, 1, 2)),  # nor what comes after it
        (9, lambda step: step == 2, TraceWindow(3, 1, 2)),
        (9, lambda step: step % 2 == 1, TraceWindow(2, 0, 2)),
        (9, lambda step: True, TraceWindow(1, 0, 1)),
    ],
)
def test_a_window_lies_where_nothing_interrupts_it(steps: int, interrupted: Callable, expected: TraceWindow) -> None:
    assert place_window(Profile(), 0, steps, interrupted) == expected
    later = place_window(Profile(), 40, 40 + steps, lambda step: interrupted(step - 40))
    assert later == TraceWindow(expected.start + 40, expected.warmup, expected.active)


@dataclass
class Event:
    """As kineto gives them."""

    label: str
    begin: int
    length: int
    device: str = "CPU"
    id: int = 0
    linked: int = 0
    annotation: bool = False
    python: bool = False
    thread: int = 1
    size: int = 0

    def __getattr__(self, name: str) -> Callable[[], object]:
        if name.startswith("__"):
            raise AttributeError(name)
        values = {
            "name": self.label, "start_ns": self.begin, "duration_ns": self.length, "correlation_id": self.id,
            "linked_correlation_id": self.linked, "is_user_annotation": self.annotation, "is_async": False,
            "is_python_function": self.python, "start_thread_id": self.thread, "device_resource_id": 7,
            "nbytes": self.size, "device_type": type("Type", (), {"name": self.device}),
        }  # fmt: skip
        return lambda: values[name]


def step(at: int) -> list[Event]:
    """A step of 100 ns, on the host 60: the device begins late, waits for data, and works on after the host."""
    mark = {"annotation": True}
    return [
        Event("ProfilerStep#1", at, 100, **mark),
        Event("## data ##", at, 20, **mark),
        Event("## noise ##", at + 5, 10, **mark),
        Event("## forward ##", at + 20, 20, **mark),
        Event("## backward ##", at + 40, 20, **mark),
        Event("Optimizer.step", at + 60, 5, **mark),
        Event("aten::copy_", at + 15, 4, id=at + 1),
        Event("cudaMemcpyAsync", at + 16, 2, id=900, linked=at + 1),
        Event("aten::linear", at + 22, 10, id=at + 2),
        Event("aten::mm", at + 24, 6, id=at + 3),
        Event("aten::mm", at + 45, 6, id=at + 4, thread=2),
        Event("a.py(3): f", at + 20, 20, python=True),
        Event("Memcpy HtoD", at + 18, 4, "CUDA", linked=at + 1),
        Event("gemm", at + 30, 20, "CUDA", linked=at + 3),
        Event("## forward ##", at + 30, 20, "CUDA", annotation=True),
        Event("gemm", at + 50, 30, "CUDA", linked=at + 4),
        Event("unknown", at + 84, 6, "CUDA"),
        Event("[memory]", at + 24, 0, "CUDA", size=512),
        Event("[memory]", at + 46, 0, "CUDA", size=1024),
        Event("[memory]", at + 50, 0, "CUDA", size=-1536),
        Event("[memory]", at + 50, 0, "CPU", size=10**6),
    ]


def test_the_figures_of_a_device_and_without_one() -> None:
    def nanoseconds(values: dict[str, float]) -> dict[str, float]:
        return {name: round(1e9 * seconds) for name, seconds in values.items()}

    recording = read_events([*step(1000), *step(1100)])
    found = figures(recording, 2)
    assert (found["steps"], found["seconds_per_step"]) == (2, 100e-9)
    # The first step has nothing before its copy; the second's copy comes 10 after the first's last work, and 22 in.
    phases = nanoseconds(found["phases"])
    assert phases == {"data": (22 + 32) / 2, "forward": 28, "backward": 40, "other": 5}
    assert sum(phases.values()) == 100
    assert nanoseconds(found["idle"]) == {"data": 18, "host": 22}  # 0-18 in phase data; 22-30, 80-84, 90-100 not
    assert found["kernels"][0] == {"name": "gemm", "calls": 4, "self_ms": 50e-6, "share": round(50 / 60, 6)}
    assert {e["name"]: e["self_ms"] for e in found["operators"]} == {
        "aten::mm": 12e-6, "aten::linear": 4e-6, "aten::copy_": 2e-6, "cudaMemcpyAsync": 2e-6,
    }  # fmt: skip
    assert peak_of_memory(recording) == (1536, "backward")

    found = figures(read_events([event for event in step(1000) if event.device == "CPU"]), 1)
    expected = [("data", 10), ("noise", 10), ("forward", 20), ("backward", 20), ("other", 40)]
    assert list(nanoseconds(found["phases"]).items()) == expected
    assert found["idle"] == {"data": pytest.approx(20e-9), "host": 0.0}
    assert found["kernels"] == []
    with pytest.raises(ValueError, match="recorded no step"):
        figures(Recording(), 1)


def test_own_times_leave_out_what_is_inside() -> None:
    spans = [Span("c", 5, 6, 1), Span("a", 0, 10, 1), Span("b", 2, 8, 1), Span("d", 10, 12, 1), Span("e", 3, 4, 2)]
    assert {span.name: own for span, _, own in nested(spans)} == {"a": 4, "b": 5, "c": 1, "d": 2, "e": 1}


def test_the_summary_has_its_keys_and_says_what_is_reached(tmp_path: Path) -> None:
    recording = read_events([*step(1000), *step(1100)])
    values = summary.summarise(3, recording, 2, [1e6, 3e6], "NVIDIA L4", cuda=True)
    assert set(values) == KEYS and values["epoch"] == 3
    assert values["tflops"] == pytest.approx(2e6 / 100e-9 / 1e12) and values["peak_tflops"] == 121
    assert values["mfu"] == pytest.approx(values["tflops"] / 121)
    snapshots = [
        MemorySnapshot(n * 2**20, {"weights": n * 2**20}, "forward" if n < 900 else "recompute", "x")
        for n in range(1000)
    ]
    file = summary.write_summary(tmp_path, values)
    summary.add_memory(file, snapshots)
    again = json.loads(file.read_text())
    assert set(again) == KEYS and summary.PREDICTED in again["notes"]
    assert (again["memory"]["peak_mib"], again["memory"]["at"]) == (999, "recompute x")
    timeline = again["memory"]["timeline"]
    assert len(timeline) == 400 and max(point["total_mib"] for point in timeline) == 999
    forward, backward = 1000 * values["phases"]["forward"], 1000 * values["phases"]["backward"]
    times = [point["ms"] for point in timeline]
    assert times == sorted(times) and times[-1] <= forward + backward
    assert all(point["ms"] >= 0.999 * forward for point in timeline if point["phase"] == "recompute")
    shown = (tmp_path / summary.MARKDOWN).read_text()
    assert "| backward | 0.000 | 40.0% |" in shown and "of the card's 121" in shown and "| weights | 999.0 |" in shown


def test_a_phase_that_comes_twice_has_its_time_in_two_parts() -> None:
    snapshots = [MemorySnapshot(1, {}, phase) for phase in ("forward", "backward", "forward", "recompute", "backward")]
    timeline = summary.memory_over(snapshots, {"forward": 4.0, "backward": 8.0})["timeline"]
    assert [point["ms"] / 1000 for point in timeline] == [0, 2, 6, 8, 10]
    assert summary.memory_over([], {})["timeline"] == []


RAW = """{
 "traceEvents": [
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel"
  },
  {
    "cat": "cuda_driver",
    "name": "a name with \\"cat\\": \\"cuda_runtime\\" in it"
  },
  {
    "cat": "fwdbwd"
  }
 ]
}
"""


def test_a_trace_is_packed_with_the_names_that_the_plugin_knows(tmp_path: Path) -> None:
    file = traces.write_trace(lambda raw: Path(raw).write_text(RAW), tmp_path, 1)
    events = json.loads(gzip.open(file).read())["traceEvents"]
    assert [event["cat"] for event in events] == ["Runtime", "Runtime", "forward_backward"]
    assert events[1]["name"] == json.loads(RAW)["traceEvents"][1]["name"]
    assert list(tmp_path.iterdir()) == [file] and file.name.endswith(".pt.trace.json.gz")


@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        (None, OSError, "truncated after 0 bytes: is the disk full"),
        ("", OSError, "truncated after 0 bytes"),
        (RAW[:-40], OSError, f"truncated after {len(RAW) - 40} bytes"),
        (RAW, traces.TooLarge, "MB or more"),
    ],
)
def test_a_trace_that_cannot_be_written_leaves_nothing(
    written: str | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        traces.write_trace(lambda raw: written is None or Path(raw).write_text(written), tmp_path, 1e-6)
    assert list(tmp_path.iterdir()) == []


def test_packing_stops_when_it_is_too_much(tmp_path: Path) -> None:
    """A line at a time: a trace of gigabytes is not written out to see that it is too large."""
    import random

    noise = random.Random(1)
    lines = (f'"{noise.getrandbits(400):x}",\n' for _ in range(60_000))
    raw = tmp_path / "raw"
    raw.write_text("".join(lines) + "}")
    packed = tmp_path / "packed"
    with pytest.raises(traces.TooLarge):
        traces.pack(raw, packed, 0.3)
    assert packed.stat().st_size < raw.stat().st_size / 4


@pytest.mark.parametrize(
    ("values", "message"),
    [({"active": 0}, "profile.active"), ({"max_mb": 0}, "profile.max_mb"), ({"with_stacks": True}, "mean with_stack")],
)
def test_the_section_is_strict(values: dict, message: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({**tiny_config, "profile": values}, "test")


def test_the_option_needs_no_torch() -> None:
    modules = "simpletune.engine.profiling.profile_option, simpletune.engine.profiling.traces"
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
