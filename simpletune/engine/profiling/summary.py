"""Write the summary beside a trace, summary.json and summary.md, readable without a plugin."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

from simpletune.engine.memory.snapshot import MemorySnapshot
from simpletune.engine.profiling.figures import Recording, figures, peak_of_memory
from simpletune.system.atomic import write_text
from simpletune.system.gpus import peak_tflops
from simpletune.system.options import Json, plural

JSON, MARKDOWN = "summary.json", "summary.md"
MIB = 2**20
POINTS = 400
PREDICTED = (
    "memory: predicted from one step of this run on fake tensors; the snapshots of a phase are spread evenly over its "
    "measured time"
)


def summarise(
    epoch: int, recording: Recording, steps: int, flops: Sequence[float] | None, device: str, cuda: bool = False
) -> Json:
    """Summarise a window of completely recorded ``steps``.

    Args:
        flops: floating-point operations of each recorded step; None: unknown.
        device: its name, to look up its peak rate; ``cuda``: whether it was recorded.
    """
    values = {"epoch": epoch, **figures(recording, steps)}
    notes = ["times are slower than in the run's summary.json: the profiler slows the steps in its window"]
    if cuda:
        notes.append("phases: from the end of the preceding work to the end of the last work that the phase launched")
        if not recording.device:
            notes.append("the device recorded no events: phases show host times, which do not include device work")
    measured = peak_of_memory(recording)
    if measured is not None:
        more, phase = measured
        notes.append(f"memory: measured peak {to_mib(more):g} MiB above the window's start, in {phase}")
    per_step = sum(flops) / len(flops) if flops else 0.0
    if not flops:
        notes.append("floating-point operations are not known for this model")
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
    """Add the snapshots of a step's predicted memory, in order, to a summary.json."""
    values = json.loads(file.read_text(encoding="utf-8"))
    values["memory"] = memory_over(snapshots, values["phases"])
    values["notes"] = [note for note in values["notes"] if note != PREDICTED] + [PREDICTED]
    write_summary(file.parent, values)


def memory_over(snapshots: Sequence[MemorySnapshot], phases: dict[str, float]) -> Json:
    """Place a step's memory snapshots in time, those of a phase evenly over its seconds.

    A phase that occurs several times splits its time equally. Of more than ``POINTS``, the largest of each group stay.
    """
    if not snapshots:
        return {"peak_mib": 0.0, "at": "", "timeline": []}
    # recomputation is part of the measured backward pass
    visits = groupby(snapshots, key=lambda each: "backward" if each.phase == "recompute" else each.phase)
    runs = [(name, list(run)) for name, run in visits]
    times = Counter(name for name, _ in runs)
    timed, second = [], 0.0
    for name, run in runs:
        taken = phases.get(name, 0.0) / times[name]
        timed += [(second + taken * number / len(run), snapshot) for number, snapshot in enumerate(run)]
        second += taken
    if len(timed) > POINTS:
        edges = [number * len(timed) // POINTS for number in range(POINTS + 1)]
        groups = (timed[start:stop] for start, stop in pairwise(edges))
        timed = [max(group, key=lambda entry: entry[1].bytes) for group in groups]
    peak = max(snapshots, key=lambda snapshot: snapshot.bytes)
    points = [
        {
            "ms": round(1000 * second, 6),
            "phase": snapshot.phase,
            "total_mib": to_mib(snapshot.bytes),
            "by_kind": {kind: to_mib(size) for kind, size in snapshot.by_kind.items()},
        }
        for second, snapshot in timed
    ]
    return {"peak_mib": to_mib(peak.bytes), "at": f"{peak.phase} {peak.module}".strip(), "timeline": points}


def to_mib(size: int) -> float:
    """Convert bytes to MiB, rounded to 0.001."""
    return round(size / MIB, 3)


def write_summary(folder: Path, values: Json) -> Path:
    """Write a summary as Markdown and as JSON, with a key or a point of the timeline per line; return the JSON file."""
    lines = json.dumps(values | {"memory": None}, indent=1)
    points = ",\n  ".join(json.dumps(point) for point in values["memory"]["timeline"])
    memory = json.dumps(values["memory"] | {"timeline": []})
    memory = memory.replace('"timeline": []', f'"timeline": [\n  {points}]')
    write_text(folder / MARKDOWN, markdown(values))
    write_text(folder / JSON, lines.replace('"memory": null', f'"memory": {memory}') + "\n")
    return folder / JSON


def markdown(values: Json) -> str:
    """Format a summary as Markdown."""
    step, idle, memory = values["seconds_per_step"], values["idle"], values["memory"]
    lines = [f"# Epoch {values['epoch']}", "", f"{plural(values['steps'], 'step')} of {1000 * step:.3f} ms each.", ""]
    share = f", {100 * values['mfu']:.1f}% of the card's {values['peak_tflops']:g}" if values["mfu"] else ""
    lines += [f"{values['flops_per_step']:.4g} operations per step: {values['tflops']:.4g} TFLOP/s{share}.", ""]
    waits = f"{1000 * idle['data']:.3f} ms for data, {1000 * idle['host']:.3f} ms for the host"
    lines += [f"Wait per step: {waits}.", ""]
    rows = [[name, f"{1000 * s:.3f}", f"{100 * s / step:.1f}%"] for name, s in values["phases"].items()]
    lines += table(["phase", "ms/step", "share"], rows)
    for title, key in (("operator, on the host", "operators"), ("kernel, on the device", "kernels")):
        timed = [[e["name"], str(e["calls"]), f"{e['self_ms']:.3f}", f"{100 * e['share']:.1f}%"] for e in values[key]]
        lines += table([title, "calls", "self ms/step", "share"], timed) if timed else []
    if memory["timeline"]:
        most = max(memory["timeline"], key=lambda point: point["total_mib"])
        lines += [f"Peak memory {memory['peak_mib']:.1f} MiB, in {memory['at']}:", ""]
        kinds = sorted(most["by_kind"].items(), key=lambda kind: -kind[1])
        lines += table(["kind", "MiB"], [[kind, f"{size:.1f}"] for kind, size in kinds])
    return "\n".join([*lines, *(f"- {note}" for note in values["notes"])]) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a Markdown table, followed by an empty line."""
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
