"""List the checkpoints of a run under the names that commands take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.runs.checkpoint_folders import list_checkpoints
from simpletune.runs.report.content import ReportSection, ReportTable
from simpletune.system.options import join_names


def checkpoint_sections(folder: Path, config: TrainConfig | None, drawn: Sequence[int]) -> Iterator[ReportSection]:
    """List the checkpoints, and the steps with pictures but no checkpoint; yield nothing if there are neither.

    Args:
        folder: the run's folder.
        config: the run's configuration, if it can be read.
        drawn: steps with validation pictures, in order.
    """
    steps = [step for step, _ in list_checkpoints(folder)]
    gone = [step for step in drawn if step not in steps]
    if not steps and not gone:
        return
    section = ReportSection("checkpoints", "Checkpoints")
    run = folder.name if folder.is_absolute() else str(folder)
    rows = [(f"{step:,}", f"{run}@{step}", "yes" if step in drawn else "no") for step in steps]
    if rows:
        section.notes.append(f"Use a step by its name, as in: simpletune generate --run {rows[-1][1]}")
        section.tables.append(ReportTable("Available steps", ("step", "name", "pictures above"), rows))
    if gone:
        rule = f" ({config.checkpoint.in_words()})" if config is not None else ""
        section.notes.append(
            f"Pictures without a checkpoint: step {join_names([f'{step:,}' for step in gone], 12)}{rule}. "
            "To keep more, set checkpoint.keep_every=N or keep_last=all."
        )
    yield section
