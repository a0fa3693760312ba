"""``h100``: predict the steps that were measured on an H100 again, beside their medians and least.

The machine's launches were not measured then. Two of the rows tell what one costs there; these are not counted. No
constant of the package comes from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from benchmarks.table import Results, describe_machine
from simpletune.commands.doctor.bench_steps import run_config
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import CORE, LAUNCH, DatasheetSpeeds
from simpletune.estimate.timing.sections import StreamWork
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.estimate.timing.timeline import step_seconds
from simpletune.runs.folder import read_json_or_none
from simpletune.system.gpus import find_card
from simpletune.system.options import Json

CARD = find_card("H100")
LAUNCHES = ("SD3 LoRA bf16", "SDXL LoKr factor 12 bf16, no checkpointing")  # tell what a launch costs there
WITHIN = 0.25
# Rows that queue no less work for no smaller a card's part, but took clearly less time: something disturbed the row.
TWINS = {
    "SD3 LoRA int8": "SD3 LoRA int8, plan", "SD3 LoRA nf4": "SD3 LoRA nf4, 512 px",
    "SD3 LoRA bf16, plan": "SD3 LoRA bf16", "SD3 LoRA bf16, 512 px, batch 4": "SD3 LoRA bf16",
}  # fmt: skip
COLUMNS = {
    "what": "training step", "seconds": "median, s", "least": "least, s", "stated": "data sheet, s",
    "predicted": "with this host's launches, s", "ratio": "least / predicted", "limit": "limited by", "note": "",
}  # fmt: skip
ABOUT = """\
Steps measured on an H100 on 28 November 2026 ([rows.json](rows.json), [how](README.md)), beside predictions of today's
code: by the data sheet, with launches of {stated:.1f} us; and with launches of {launch:.1f} us, the mean of what the
rows *{rows}* ask for, whose own predictions are not counted. A core as that of the host's measured part is assumed, and
the link of the data sheet. Diffusers' rows and the compiled one are left out.

**{inside} of {count} rows are within {within:.0%} of the least** ({before} by the data sheet); of the {calm} that
nothing is known to have disturbed, {calm_inside}. *Disturbed*: another row that queues as much took clearly less."""


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Predict the missing rows, and write the table."""
    results = Results(folder / "seconds", COLUMNS, "h100")
    measured = {name: row for name, row in measured_rows(folder).items() if is_ours(row)}
    launch = statistics.mean(launch_of(measured[name]) for name in LAUNCHES)
    rows = {name: partial(predicted, name, row, launch) for name, row in measured.items()}
    results.measure(rows, minutes, only, lambda row: f"{row['predicted']:.3f} s, least {row['least']:.3f} s")
    found = {name: row for name, row in results.rows.items() if name not in LAUNCHES}
    calm = {name: row for name, row in found.items() if name not in TWINS}
    words = ABOUT.format(
        stated=LAUNCH * 1e6, launch=launch * 1e6, rows="* and *".join(LAUNCHES), within=WITHIN, count=len(found),
        inside=inside(found.values(), "predicted"), before=inside(found.values(), "stated"), calm=len(calm),
        calm_inside=inside(calm.values(), "predicted"),
    )  # fmt: skip
    return results.write_table("Seconds on an H100, predicted again", words, describe_machine())


def measured_rows(folder: Path) -> dict[str, Json]:
    """Read the measured seconds."""
    rows: dict[str, Json] = (read_json_or_none(folder / "rows.json") or {})["seconds"]["rows"]
    return rows


def is_ours(row: Json) -> bool:
    """Return whether a measured row is of our step, and not compiled: Inductor's kernels are not predicted."""
    return isinstance(row["overrides"], list) and "speed.compile=true" not in row["overrides"]


@cache
def recorded(overrides: tuple[str, ...]) -> Sequence[StreamWork]:
    """Record a row's step for the card."""
    return simulate(run_config(overrides, CARD.capability), capability=CARD.capability).sections


def seconds_with(sections: Sequence[StreamWork], launch: float | None) -> float:
    """Predict a step with a launch's seconds on the machine; None: of the data sheet."""
    return step_seconds(sections, DatasheetSpeeds(CARD, HostSpeeds(core=CORE, launch=launch))).seconds


def launch_of(row: Json) -> float:
    """Return a launch's seconds with which a row is predicted as measured, by bisection."""
    sections, low, high = recorded(tuple(row["overrides"])), 0.0, 1e-3
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_with(sections, middle) < row["least"] else (low, middle)
    return low


def predicted(name: str, row: Json, launch: float) -> Json:
    """Predict a row by the data sheet, and with the machine's launches."""
    sections = recorded(tuple(row["overrides"]))
    seconds, speeds = seconds_with(sections, launch), DatasheetSpeeds(CARD, HostSpeeds(core=CORE, launch=launch))
    if name in LAUNCHES:
        note = "tells a launch's seconds"
    else:
        note = f"disturbed: *{TWINS[name]}* queues as much" if name in TWINS else ""
    return {
        "seconds": round(row["seconds"], 3), "least": round(row["least"], 3), "predicted": round(seconds, 3),
        "stated": round(seconds_with(sections, None), 3), "ratio": round(row["least"] / seconds, 2),
        "limit": step_seconds(sections, speeds).limit, "note": note,
    }  # fmt: skip


def inside(rows: Iterable[Json], name: str) -> int:
    """Count the rows of which a prediction is within a quarter of the least."""
    return sum(abs(row["least"] / row[name] - 1) <= WITHIN for row in rows)
