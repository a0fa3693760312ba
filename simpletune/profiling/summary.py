"""The summary beside a trace: summary.json and summary.md, which need no plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from simpletune.cards import peak_tflops
from simpletune.memory.snapshot import MemorySnapshot
from simpletune.options import Json, plural
from simpletune.profiling.aggregate import figures, peak_of_memory
from simpletune.profiling.events import Recording
from simpletune.system.atomic import write_text

JSON, MARKDOWN = "summary.json", "summary.md"
MIB = 2**20
POINTS = 400
PREDICTED = (
    "memory: predicted, one step of this run on fake tensors; its snapshots are spread evenly over the measured "
    "time of their phase"
)


def summarise(
    epoch: int, recording: Recording, steps: int, flops: Sequence[float] | None, device: str, cuda: bool = False
) -> Json:
    """What a window saw.

    Args:
        epoch: its number, from 0.
        recording: the events.
        steps: how many it recorded from beginning to end.
        flops: floating-point operations of each recorded step; None: unknown.
        device: its name.
        cuda: whether the device was recorded.

    Raises:
        ValueError: no step was recorded.
    """
    values = {"epoch": epoch, **figures(recording, steps)}
    notes = ["seconds are those inside the window, where the profiler slows a step: summary.json of the run has others"]
    if cuda:
        notes.append("phases: from the end of the work before to the end of the last work that the phase launched")
        if not recording.device:
            notes.append("the device left no events: phases are the host's, which does not wait for the device")
    measured = peak_of_memory(recording)
    if measured is not None:
        more, phase = measured
        notes.append(f"memory: measured {mib(more):g} MiB more than at the window's start at the most, in {phase}")
    per_step = sum(flops) / len(flops) if flops else 0.0
    if not flops:
        notes.append("operations are not counted for this model")
    achieved, peak = per_step / values["seconds_per_step"] / 1e12, peak_tflops(device)
    return values | {
        "flops_per_step": float(per_step),
        "tflops": achieved,
        "peak_tflops": peak,
        "mfu": None if peak is None or not flops else achieved / peak,
        "memory": {"peak_mib": 0.0, "at": "", "timeline": []},
        "notes": notes,
    }


def add_memory(file: Path, snapshots: Sequence[MemorySnapshot]) -> None:
    """Put a predicted step's memory into a summary.

    Args:
        file: summary.json.
        snapshots: of the step, in order.
    """
    values = json.loads(file.read_text())
    values["memory"] = memory_over(snapshots, values["phases"])
    values["notes"] = [note for note in values["notes"] if note != PREDICTED] + [PREDICTED]
    write(file.parent, values)


def memory_over(snapshots: Sequence[MemorySnapshot], phases: dict[str, float]) -> Json:
    """The memory of a step over its time: the snapshots of a phase are spread evenly over the seconds that it took.

    Args:
        snapshots: in order.
        phases: seconds by phase.
    """
    if not snapshots:
        return {"peak_mib": 0.0, "at": "", "timeline": []}
    peak = max(snapshots, key=lambda snapshot: snapshot.bytes)
    timed = list(_timed(snapshots, phases))
    points = [
        {
            "ms": round(1000 * second, 6),
            "phase": snapshot.phase,
            "total_mib": mib(snapshot.bytes),
            "by_kind": {kind: mib(size) for kind, size in snapshot.by_kind.items()},
        }
        for second, snapshot in thin(timed, POINTS)
    ]
    return {"peak_mib": mib(peak.bytes), "at": f"{peak.phase} {peak.module}".strip(), "timeline": points}


def mib(size: int) -> float:
    """Bytes in MiB, to the kilobyte."""
    return round(size / MIB, 3)


def _timed(snapshots: Sequence[MemorySnapshot], phases: dict[str, float]) -> Iterator[tuple[float, MemorySnapshot]]:
    """Each snapshot with its second. A phase that comes several times in a step has its time in equal parts."""
    runs = [(name, list(run)) for name, run in groupby(snapshots, key=_measured_phase)]
    visits = [name for name, _ in runs]
    second = 0.0
    for name, run in runs:
        taken = phases.get(name, 0.0) / visits.count(name)
        for number, snapshot in enumerate(run):
            yield second + taken * number / len(run), snapshot
        second += taken


def _measured_phase(snapshot: MemorySnapshot) -> str:
    """Recomputation is part of the backward pass; what is in no phase takes the time of none."""
    return "backward" if snapshot.phase == "recompute" else snapshot.phase


def thin(timed: Sequence[tuple[float, MemorySnapshot]], points: int) -> list[tuple[float, MemorySnapshot]]:
    """At most so many snapshots: of each stretch of equal length the largest, so that the peak stays."""
    if len(timed) <= points:
        return list(timed)
    edges = [number * len(timed) // points for number in range(points + 1)]
    stretches = (timed[start:stop] for start, stop in zip(edges, edges[1:], strict=False))
    return [max(stretch, key=lambda entry: entry[1].bytes) for stretch in stretches]


def write(folder: Path, values: Json) -> Path:
    """Write a summary as JSON and as Markdown.

    Returns:
        The JSON file.
    """
    for name, text in ((MARKDOWN, markdown(values)), (JSON, as_json(values) + "\n")):
        write_text(folder / name, text)
    return folder / JSON


def as_json(values: Json) -> str:
    """A key on a line; the points of the timeline on a line each."""
    lines = json.dumps(values | {"memory": None}, indent=1)
    points = ",\n  ".join(json.dumps(point) for point in values["memory"]["timeline"])
    memory = json.dumps(values["memory"] | {"timeline": []})
    return lines.replace(
        '"memory": null', '"memory": ' + memory.replace('"timeline": []', f'"timeline": [\n  {points}]')
    )


def markdown(values: Json) -> str:
    """A summary to read."""
    step, idle, memory = values["seconds_per_step"], values["idle"], values["memory"]
    lines = [f"# Epoch {values['epoch']}", "", f"{plural(values['steps'], 'step')} of {1000 * step:.3f} ms each.", ""]
    share = f", {100 * values['mfu']:.1f}% of the card's {values['peak_tflops']:g}" if values["mfu"] else ""
    lines += [f"{values['flops_per_step']:.4g} operations a step: {values['tflops']:.4g} TFLOP/s{share}.", ""]
    lines += [f"Waiting a step: {1000 * idle['data']:.3f} ms for data, {1000 * idle['host']:.3f} ms for the host.", ""]
    rows = [[name, f"{1000 * s:.3f}", f"{100 * s / step:.1f}%"] for name, s in values["phases"].items()]
    lines += table(["phase", "ms a step", "share"], rows)
    for title, key in (("operator, on the host", "operators"), ("kernel, on the device", "kernels")):
        timed = [[e["name"], str(e["calls"]), f"{e['self_ms']:.3f}", f"{100 * e['share']:.1f}%"] for e in values[key]]
        lines += table([title, "calls", "own ms a step", "share"], timed) if timed else []
    if memory["timeline"]:
        most = max(memory["timeline"], key=lambda point: point["total_mib"])
        lines += [f"Memory at the most {memory['peak_mib']:.1f} MiB, in {memory['at']}:", ""]
        kinds = sorted(most["by_kind"].items(), key=lambda kind: -kind[1])
        lines += table(["kind", "MiB"], [[kind, f"{held:.1f}"] for kind, held in kinds])
    return "\n".join([*lines, *(f"- {note}" for note in values["notes"])]) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a Markdown table, and an empty one."""
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
