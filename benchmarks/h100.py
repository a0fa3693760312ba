"""``h100``: predict the steps that were measured on an H100 again, beside their medians and least, and an H200's runs.

The machines' launches were not measured then. Two rows of each tell what one costs there; these are not counted. No
constant of the package comes from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path

from benchmarks.predicted_seconds import config_of
from benchmarks.table import Results, describe_machine
from simpletune.commands.doctor.bench_steps import run_config
from simpletune.estimate.simulate.simulate import simulate
from simpletune.estimate.timing.datasheet import CORE, LAUNCH, DatasheetSpeeds
from simpletune.estimate.timing.sections import StreamWork
from simpletune.estimate.timing.speeds import HostSpeeds
from simpletune.estimate.timing.timeline import StepSeconds, step_seconds
from simpletune.runs.folder import read_json_or_none
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json

CARD, CARD_OF_RUNS = find_card("H100"), find_card("H200")
LAUNCHES = ("SD3 LoRA bf16", "SDXL LoKr factor 12 bf16, no checkpointing")  # tell what a launch costs there
ALONE = ("sd3_medium_lora_24gb", "sdxl_lora_24gb")  # the runs that had the H200 for themselves tell its launches
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
RUNS = "Whole runs on an H200"
COLUMNS_OF_RUNS = {**COLUMNS, "what": "configuration", "seconds": "measured, s", "ratio": "measured / predicted"}
del COLUMNS_OF_RUNS["least"]
ABOUT = """\
Steps measured on an H100 on 28 November 2026 ([rows.json](rows.json), [how](README.md)), beside predictions of today's
code: by the data sheet, with launches of {stated:.1f} us; and with launches of {launch:.1f} us, the mean of what the
rows *{rows}* ask for, whose own predictions are not counted. A core as that of the host's measured part is assumed, and
the link of the data sheet. Diffusers' rows and the compiled one are left out.

**{inside} of {count} rows are within {within:.0%} of the least** ({before} by the data sheet); of the {calm} that
nothing is known to have disturbed, {calm_inside}. *Disturbed*: another row that queues as much took clearly less.

*{runs}* ([runs.json](runs.json)) had a host whose launches took {launch_of_runs:.1f} us, as the two runs say that had
the card for themselves; of the five others, which shared it, {runs_inside} are within {within:.0%}. Launches of both
machines cost ten times what they do on most; for a virtual machine that was not measured, expect 2 to 30 us."""


def run(folder: Path, minutes: float, only: str = "") -> Path:
    """Predict the missing rows, and write the table."""
    results = Results(folder / "seconds", COLUMNS, "h100")
    measured = {name: row for name, row in measured_rows(folder).items() if is_ours(row)}
    tell = [measured[name] for name in LAUNCHES]
    launch = statistics.mean(launch_of(recorded(tuple(row["overrides"])), row["least"], CARD) for row in tell)
    rows = {name: partial(predicted, name, row, launch) for name, row in measured.items()}
    runs = measured_runs(folder)
    of_runs = statistics.mean(launch_of(recorded_run(name), runs[name], CARD_OF_RUNS) for name in ALONE)
    rows |= {name: partial(predicted_run, name, seconds, of_runs) for name, seconds in runs.items()}
    results.measure(rows, minutes, only, lambda row: f"{row['predicted']:.3f} s, measured {row['seconds']:.3f} s")
    found = {name: row for name, row in results.rows.items() if name not in LAUNCHES and name not in runs}
    shared = [row for name, row in results.rows.items() if name in runs and name not in ALONE]
    calm = {name: row for name, row in found.items() if name not in TWINS}
    words = ABOUT.format(
        stated=LAUNCH * 1e6, launch=launch * 1e6, rows="* and *".join(LAUNCHES), within=WITHIN, count=len(found),
        inside=inside(found.values(), "predicted"), before=inside(found.values(), "stated"), calm=len(calm),
        calm_inside=inside(calm.values(), "predicted"), runs=RUNS, launch_of_runs=of_runs * 1e6,
        runs_inside=inside(shared, "predicted"),
    )  # fmt: skip
    more = {RUNS: COLUMNS_OF_RUNS}
    return results.write_table("Seconds on an H100, predicted again", words, describe_machine(), more)


def measured_rows(folder: Path) -> dict[str, Json]:
    """Read the measured seconds."""
    rows: dict[str, Json] = (read_json_or_none(folder / "rows.json") or {})["seconds"]["rows"]
    return rows


def measured_runs(folder: Path) -> dict[str, float]:
    """Read the measured seconds of a step of the whole runs, by configuration."""
    runs = (read_json_or_none(folder / "runs.json") or {})["runs"]
    return {run["configuration"]: run["seconds_measured"] for run in runs}


def is_ours(row: Json) -> bool:
    """Return whether a measured row is of our step, and not compiled: Inductor's kernels are not predicted."""
    return isinstance(row["overrides"], list) and "speed.compile=true" not in row["overrides"]


@cache
def recorded(overrides: tuple[str, ...]) -> Sequence[StreamWork]:
    """Record a row's step for the card."""
    return simulate(run_config(overrides, CARD.capability), capability=CARD.capability).sections


@cache
def recorded_run(name: str) -> Sequence[StreamWork]:
    """Record the step of a whole run, which did not accumulate."""
    config = config_of(Path(name), ("train.gradient_accumulation=1",), CARD_OF_RUNS)
    return simulate(config, capability=CARD_OF_RUNS.capability).sections


def step_with(sections: Sequence[StreamWork], launch: float | None, card: Card = CARD) -> StepSeconds:
    """Predict a step with a launch's seconds on the machine; None: of the data sheet."""
    return step_seconds(sections, DatasheetSpeeds(card, HostSpeeds(core=CORE, launch=launch)))


def launch_of(sections: Sequence[StreamWork], seconds: float, card: Card) -> float:
    """Return a launch's seconds with which a step is predicted as measured, by bisection."""
    low, high = 0.0, 1e-3
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if step_with(sections, middle, card).seconds < seconds else (low, middle)
    return low


def predicted(name: str, row: Json, launch: float) -> Json:
    """Predict a row by the data sheet, and with the machine's launches."""
    if name in LAUNCHES:
        note = "tells a launch's seconds"
    else:
        note = f"disturbed: *{TWINS[name]}* queues as much" if name in TWINS else ""
    found = compared(recorded(tuple(row["overrides"])), row["least"], launch, CARD)
    return {**found, "seconds": round(row["seconds"], 3), "note": note}


def predicted_run(name: str, seconds: float, launch: float) -> Json:
    """Predict a whole run's step likewise."""
    note = "tells a launch's seconds" if name in ALONE else "shared the card"
    return {"table": RUNS, **compared(recorded_run(name), seconds, launch, CARD_OF_RUNS), "note": note}


def compared(sections: Sequence[StreamWork], least: float, launch: float, card: Card) -> Json:
    """Compare a step's measured seconds with predicted ones."""
    step = step_with(sections, launch, card)
    return {
        "seconds": round(least, 3), "least": round(least, 3), "predicted": round(step.seconds, 3),
        "stated": round(step_with(sections, None, card).seconds, 3), "ratio": round(least / step.seconds, 2),
        "limit": step.limit,
    }  # fmt: skip


def inside(rows: Iterable[Json], name: str) -> int:
    """Count the rows of which a prediction is within a quarter of the least."""
    return sum(abs(row["least"] / row[name] - 1) <= WITHIN for row in rows)
