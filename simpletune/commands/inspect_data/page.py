"""The dataset report as one self-contained HTML page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence

from PIL import Image

from simpletune import __version__
from simpletune.commands.inspect_data.contact_sheet import tiles
from simpletune.commands.inspect_data.duplicate_groups import look_alikes
from simpletune.commands.inspect_data.scan import DatasetReport
from simpletune.commands.inspect_data.text import aspects, describe_unusable, limit_in_words, sizes
from simpletune.data.source_mix import SOURCE_COLUMNS, source_rows
from simpletune.data.sources.walk import printable_name
from simpletune.runs.report.page import page_template
from simpletune.system.options import plural
from simpletune.system.package import ASSETS

LISTED = 200  # rows of a table

PageTable = tuple[str, str, tuple[str, ...], Sequence[tuple[str, ...]]]
"""Title, explanation, column names, rows."""


def page(found: DatasetReport, title: str) -> str:
    """Render the page."""
    groups = [
        (bucket, [(seen, _embedded(seen.tile)) for seen in group if seen.tile is not None])
        for bucket, group in tiles(found)
    ]
    return page_template("data_report", shown=printable_name).render(
        found=found,
        title=title,
        groups=groups,
        rows={row.size: row for row in found.buckets},
        tables=list(_tables(found)),
        alike=look_alikes(found, _embedded),
        charts=_charts(found) if found.usable else [],
        outcome=describe_unusable(found),
        plural=plural,
        listed=LISTED,
        style=(ASSETS / "report" / "page.css").read_text(encoding="utf-8"),
        more=(ASSETS / "data_report" / "page.css").read_text(encoding="utf-8"),
        made_by=f"simpletune {__version__}",
    )


def _charts(found: DatasetReport) -> list[tuple[str, list[tuple[str, int, float]]]]:
    return [
        ("Size, as the side of a square with the same area", _bars(sizes(found))),
        ("Width to height", _bars(aspects(found))),
    ]


def _bars(rows: list[tuple[str, int]]) -> list[tuple[str, int, float]]:
    """(name, count, percentage of the largest count)."""
    most = max(count for _, count in rows) or 1
    return [(name, count, 100 * count / most) for name, count in rows]


def _tables(found: DatasetReport) -> Iterator[PageTable]:
    """Yield the tables that have rows."""
    small = [
        (printable_name(s.picture.name), f"{s.picture.size[0]} x {s.picture.size[1]}", f"{s.bucket[0]} x {s.bucket[1]}",
         f"{s.upscale:.2f}")
        for s in found.small
    ]  # fmt: skip
    held = [(printable_name(name),) for name in found.held_out]
    across = [("\n".join(printable_name(name) for name in group),) for group in found.across]
    same = [(printable_name(caption), str(len(names))) for caption, names in found.same_caption.items()]
    every: list[PageTable] = [
        ("Sources", "", SOURCE_COLUMNS, source_rows(found.sources) if len(found.sources) > 1 else []),
        ("Unusable", "", ("entry", "reason"), [(printable_name(r.name), r.reason) for r in found.rejected]),
        ("Scaled up", "smaller than their bucket", ("picture", "size", "bucket", "factor"), small),
        ("Held out", "excluded from training and used for the validation loss", ("picture",), held),
        ("Near-duplicates across the split", "some of a group are held out, others trained on", ("pictures",), across),
        ("Captions shared by several pictures", "", ("caption", "pictures"), same),
        (
            "Captions that are too long",
            f"longer than {limit_in_words(found)}; the CLIP encoders see only the beginning",
            ("picture", "length"),
            [(printable_name(name), f"{length:,}") for name, length in found.long],
        ),
    ]
    yield from (table for table in every if table[3])


def _embedded(tile: Image.Image) -> str:
    """Encode a tile as a WebP data URI."""
    buffer = io.BytesIO()
    tile.save(buffer, "WEBP", quality=78, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
