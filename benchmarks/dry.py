"""``dry``: compare the prediction with the memory that torch's CUDA allocator hands out on a simulated card.

torch's CUDA build runs over a stub of the CUDA runtime (tests/gpu/dry_gpu): launches do nothing, and device memory is
address space. The allocator, the dispatcher, the choice of attention kernels and the C++ of the operators are torch's.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.dry_row import predict
from benchmarks.dry_rows import Row, rows_of
from benchmarks.table import Results
from simpletune.estimate.job_estimate import CONTEXT, needed_bytes
from simpletune.system.console import say
from simpletune.system.devices import sm
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json, UserError

L4 = "L4"
LAUNCHER = "tests/gpu/dry_gpu/run"
MEDIAN, WORST = 0.005, 0.02  # goals for the error of the prediction
COLUMNS = {
    "what": "", "predicted_mib": "predicted, MiB", "allocated_mib": "allocated, MiB", "error": "error, %",
    "reserved_mib": "reserved, MiB", "needed_mib": "a card must have, MiB", "spare_mib": "spare, MiB",
    "squeezed_mib": "reserved with no more than that, MiB",
    "attention": "attention", "at": "predicted peak at",
}  # fmt: skip
ABOUT = """\
*Allocated* and *reserved*: peaks of torch's CUDA allocator on a simulated {card}, no hardware: torch's CUDA build over
a stub of the CUDA runtime, on which kernels compute nothing. *Predicted*: what `simpletune estimate` counts on fake
tensors for the same stage. *A card must have*: what it then requires, with its allowances for the CUDA
context and for fragmentation. *Spare*: the part of it that is neither reserved nor the context's 500 MiB; a row with
a negative value was repeated on a card that has no more than that. *Attention*: the
kernel that torch chose for the stage. SD3 Medium at 1024 px, batch 1, gradient checkpointing of all blocks, LoRA on
attention with an fp32 adapter and AdamW, unless a row says otherwise.

Stated, not executed: cuDNN cannot run here, so a convolution is its output and the tool's allowance for cuDNN's
workspace (input, weight and output once more), in both columns. Not real either: time, values, the CUDA context.

{summary}"""


def run(folder: Path, minutes: float, only: str, cards: list[str] | None, again: bool) -> str:
    """Measure the missing rows on each card until the time is up.

    Args:
        cards: names, each of which has a subfolder; None: the L4.
        again: predict the measured rows again and measure none.

    Returns:
        The tables' files.

    Raises:
        UserError: the simulated card cannot be started.
    """
    return "\n".join(str(of_card(find_card(name), folder, minutes, only, again)) for name in cards or [L4])


def of_card(card: Card, folder: Path, minutes: float, only: str, again: bool) -> Path:
    """Measure one card's missing rows.

    Returns:
        The Markdown table.
    """
    rows = rows_of(card.capability)
    words = "dry" + f" --card {card.name}" * (card.name != L4)
    results = Results(folder / f"dry-{card.name.lower()}" / "memory", COLUMNS, words)
    if again:
        for name, found in results.rows.items():
            results.add(name, compared(predict(rows[name], card.capability) | measured_part(found)))
    else:
        wanted = dict(results.missing(rows, minutes, only))
        for name, found in measured(wanted, card, minutes):
            row = compared(predict(rows[name], card.capability) | found)
            results.add(name, row if row["spare_mib"] >= 0 else squeezed(name, rows[name], row, card, minutes))
            say(f"bench   {name}: predicted {row['predicted_mib']:,}, allocated {row['allocated_mib']:,} MiB")
    known, results.rows = results.rows, {}
    for name in rows:
        if name in known:
            results.add(name, compared(known[name]))
    about = ABOUT.format(card=card.name, summary=summary(results.rows))
    return results.write_table(f"Memory on a simulated {card.name}", about, machine(card, results.rows))


def measured_part(row: Json) -> Json:
    """Return the figures of a row that do not depend on the prediction."""
    own = ("allocated_mib", "reserved_mib", "attention", "versions", "squeezed_mib")
    return {key: row[key] for key in own if key in row}


def squeezed(name: str, row: Row, found: Json, card: Card, minutes: float) -> Json:
    """Repeat a row that reserved more than ``estimate`` requires, on a card that has no more than that.

    With memory to spare, torch caches what an earlier phase freed; when memory is short, it frees that.

    Raises:
        UserError: it runs out of memory there.
    """
    room = found["needed_mib"] - CONTEXT / 2**20
    small = replace(card, gib=room / 1024, found=1.0)
    (_, again), *_ = measured({name: row}, small, minutes)
    return found | {"squeezed_mib": again["reserved_mib"]}


def compared(row: Json) -> Json:
    """Add the error of the prediction in percent, and what ``estimate`` requires of a card."""
    must_have = needed_bytes(round(row["predicted_mib"] * 2**20)) / 2**20
    return row | {
        "error": round(100 * (row["predicted_mib"] / row["allocated_mib"] - 1), 2),
        "needed_mib": round(must_have),
        "spare_mib": round(must_have - row["reserved_mib"] - CONTEXT / 2**20),
    }


def errors_of(rows: dict[str, Json]) -> tuple[float, float]:
    """Return the median and the worst absolute error as shares."""
    errors = [abs(row["predicted_mib"] / row["allocated_mib"] - 1) for row in rows.values()]
    return statistics.median(errors), max(errors)


def summary(rows: dict[str, Json]) -> str:
    """Say how good the predictions are."""
    if not rows:
        return "No row was measured yet."
    median, worst = errors_of(rows)
    name = max(rows, key=lambda name: abs(rows[name]["error"]))
    middle = f"{len(rows)} rows: median error {median:.2%} (goal {MEDIAN:.1%})"
    return f"{middle}, worst {worst:.2%} (goal {WORST:.0%}; {name})."


def measured(rows: dict[str, Row], card: Card, minutes: float) -> Iterator[tuple[str, Json]]:
    """Measure rows on the simulated card, several per process as long as none leaves memory allocated.

    Yields:
        A row's name and figures.

    Raises:
        UserError: the process did not measure a row.
    """
    left = list(rows)
    while left:
        before = len(left)
        for line in lines_of([rows[name] for name in left], card):
            found = json.loads(line)
            name = left.pop(0)
            if "failed" in found:
                raise UserError(f"dry: {name}: {found['failed']}. Choose a larger card, or leave the row out")
            yield name, found
        if len(left) == before:
            raise UserError(f"dry: the simulated {card.name} measured nothing for {left[0]}. See its messages above")


def lines_of(rows: list[Row], card: Card) -> Iterator[str]:
    """Start a process on the simulated card and yield the lines of JSON that it prints."""
    launcher = shlex.split(os.environ.get("DRY_RUN", LAUNCHER))
    if shutil.which(launcher[0]) is None:
        raise UserError(f"dry: {launcher[0]} does not exist. Run make dry at the root of the repository")
    command = [*launcher, "python", "-m", "benchmarks.dry_row", json.dumps([asdict(row) for row in rows])]
    major, minor = card.capability
    env = os.environ | {
        "DRY_CC": f"{major}{minor}", "DRY_GIB": f"{card.bytes / 2**30:.4f}", "DRY_NAME": f"NVIDIA {card.name}",
    }  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            yield from (line for line in process.stdout if line.startswith("{"))
        finally:
            process.terminate()


def machine(card: Card, rows: dict[str, Json]) -> dict[str, str]:
    """Describe the simulated card and the versions under it."""
    versions: dict[str, str] = next((row["versions"] for row in rows.values()), {})
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = f"none; simulated {card.name}, {sm(card.capability)}, {card.bytes / 2**30:.2f} GiB"
    return {"device": device, "versions on it": said}
