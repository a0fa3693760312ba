"""Which steps of a run can still be used, by the names that commands take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletune.config.schema import TrainConfig
from simpletune.options import shortened
from simpletune.report.content import Section, Table
from simpletune.runs.checkpoint_folders import list_checkpoints


def checkpoint_sections(folder: Path, config: TrainConfig | None, drawn: Sequence[int]) -> Iterator[Section]:
    """The checkpoints that there are, and the steps that are shown without one; nothing where there is neither.

    Args:
        folder: of the run.
        config: of the run, if it can be read.
        drawn: steps of the validation pictures, in order.
    """
    steps = [step for step, _ in list_checkpoints(folder)]
    gone = [step for step in drawn if step not in steps]
    if not steps and not gone:
        return
    section = Section("checkpoints", "Checkpoints")
    run = folder.name if folder.is_absolute() else str(folder)
    rows = [(f"{step:,}", f"{run}@{step}", "yes" if step in drawn else "no") for step in steps]
    if rows:
        section.notes.append(f"Commands take a step by its name, as in: simpletune generate --run {rows[-1][1]}")
        section.tables.append(Table("Steps that can be used", ("step", "name", "pictures above"), rows))
    if gone:
        rule = f" ({config.checkpoint.in_words()})" if config is not None else ""
        section.notes.append(
            f"Pictures without a checkpoint: step {shortened([f'{step:,}' for step in gone], 12)}{rule}. "
            "checkpoint.keep_every=N or keep_last=all keeps more."
        )
    yield section
