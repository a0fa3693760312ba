"""The part of a run's report about its data sources."""

from __future__ import annotations

import os

from simpletune.data.shares import SOURCE_COLUMNS, SourceShare, source_rows
from simpletune.report.content import Section, Table
from simpletune.report.recorded import RunRecord, read_object
from simpletune.runs.folder import DATA


def source_sections(run: RunRecord) -> list[Section]:
    """What each of several sources contributed; nothing for a single source, or a run of an earlier version."""
    found = read_object(run.folder / DATA, run.notes, expected=False).get("sources", [])
    try:
        shares = [SourceShare(**{**share, "path": _shared(share["path"])}) for share in found]
        rows = source_rows(shares)
    except (TypeError, KeyError, ValueError, AttributeError):
        run.notes.append(f"{DATA} lists sources in an unknown form.")
        return []
    if len(shares) < 2:
        return []
    return [Section("sources", "Data sources", tables=[Table("What an epoch consists of", SOURCE_COLUMNS, rows)])]


def _shared(path: str) -> str:
    """A path as a page may show it, without the folders above."""
    return f"…/{os.path.basename(path.rstrip('/'))}" if os.path.isabs(path) else path
