"""``simpletune data``: print the dataset report, and write it as a self-contained page, a contact sheet and JSON."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from simpletune import __version__
from simpletune.commands.inspect_data.scan import TILE, DatasetReport, ScannedImage, scan_dataset
from simpletune.commands.inspect_data.text import (
    as_json,
    aspects,
    describe_unusable,
    format_limit,
    format_report,
    sizes,
)
from simpletune.config.resolve import resolve_data_folder
from simpletune.config.schema import TrainConfig
from simpletune.data.source_mix import SOURCE_COLUMNS, source_rows
from simpletune.data.sources.image_files import decode_image
from simpletune.data.sources.source import SourceImage, UnusableImage
from simpletune.runs.report.page import page_style, page_template
from simpletune.system.console import say, silence
from simpletune.system.options import UserError, first_lines, plural
from simpletune.system.printable import printable_name
from simpletune.system.sheets import shorten_to_width

PAGE, SHEET, FIGURES = "data.html", "sheet.png", "data.json"
LISTED = 200  # rows of a table, and groups of duplicates listed by name alone
COLUMNS, GAP, LINE = 8, 10, 16  # of the contact sheet: tiles in a row, and pixels
CAPTIONS = 4  # of a picture, shown with its tile
SIDE = 112  # pixels of a duplicate's thumbnail
GROUPS, EACH = 24, 6  # groups of duplicates shown, and thumbnails in each

PageTable = tuple[str, str, tuple[str, ...], Sequence[tuple[str, ...]]]
"""Title, explanation, column names, rows."""


def report(
    config: TrainConfig, out: Path | None, as_figures: bool = False, shown: int = 96, about: str = ""
) -> DatasetReport:
    """Scan a configuration's data, print the report, and write the page, the contact sheet and the JSON file.

    Args:
        config: the configuration, with folders by name.
        out: the folder to write to; None writes nothing.
        as_figures: print JSON, and nothing else.
        shown: the most pictures that the sheet and the page show.
        about: what the sizes are for, in a sentence.
    """
    with silence() if as_figures else nullcontext():
        found = scan_dataset(resolve_data_folder(config), shown, tuple(source.path for source in config.sources))
    found.notes = (*([about] if about else []), *found.notes)
    if as_figures:
        print(json.dumps(as_json(found)))
    else:
        say(format_report(found))
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / PAGE).write_text(page(found, config.name), encoding="utf-8")
            (out / FIGURES).write_text(json.dumps(as_json(found), indent=1), encoding="utf-8")
            written = [out / PAGE, out / FIGURES]
            if any(seen.tile for seen in found.usable):
                sheet(found).save(out / SHEET, optimize=True)
                written.insert(1, out / SHEET)
        except OSError as error:
            raise UserError(f"--out: {out} cannot be written ({error}). Name another folder") from None
        if not as_figures:
            say(f"{'written':<10} {', '.join(str(file) for file in written)}")
    if not found.usable:
        raise UserError(
            f"data.path: {config.pictures.place} contains no usable pictures. Fix the problems listed above"
        )
    return found


def tiles(found: DatasetReport) -> list[tuple[tuple[int, int], list[ScannedImage]]]:
    """Return the training pictures that have a tile, grouped by bucket, the largest group first."""
    order = {row.size: place for place, row in enumerate(found.buckets)}
    trained = [seen for seen in found.usable if seen.tile and seen.image.name not in found.held_out]
    with_tile = sorted(trained, key=lambda s: (order[s.bucket], s.image.name))
    return [(bucket, list(group)) for bucket, group in groupby(with_tile, key=lambda seen: seen.bucket)]


def sheet(found: DatasetReport) -> Image.Image:
    """Draw all tiles on one image, labelled with their file names, under a heading for each bucket."""
    groups = tiles(found)
    counts = {row.size: row for row in found.buckets}
    columns = min(COLUMNS, max(len(group) for _, group in groups))
    width = max(360, GAP + columns * (TILE + GAP))
    rows = [max(seen.tile.height for seen in group if seen.tile) + LINE + GAP // 2 for _, group in groups]
    heights = [row * -(-len(group) // columns) + LINE + GAP for row, (_, group) in zip(rows, groups, strict=True)]
    image = Image.new("RGB", (width, GAP + sum(heights)), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=12)
    top = GAP
    for (bucket, group), row, height in zip(groups, rows, heights, strict=True):
        count = counts[bucket]
        head = f"{bucket[0]}x{bucket[1]}: {plural(count.images, 'picture')}, {count.lost:.1%} cropped"
        pen.text((GAP, top), head if len(group) == count.images else f"{head}, {len(group)} shown", "black", font)
        for place, seen in enumerate(group):
            line, column = divmod(place, columns)
            left, upper = GAP + column * (TILE + GAP), top + LINE + GAP // 2 + line * row
            assert seen.tile is not None
            image.paste(seen.tile, (left, upper))
            label = shorten_to_width(printable_name(seen.image.name), TILE, pen, font)
            pen.text((left, upper + seen.tile.height + 1), label, "dimgray", font)
        top += height
    return image


def page(found: DatasetReport, title: str) -> str:

    def bars(rows: list[tuple[str, int]]) -> list[tuple[str, int, float]]:  # name, count, percent of the largest count
        most = max(count for _, count in rows) or 1
        return [(name, count, 100 * count / most) for name, count in rows]

    charts = []
    if found.usable:
        charts = [
            ("Size, as the side of a square with the same area", bars(sizes(found))),
            ("Width to height", bars(aspects(found))),
        ]
    groups = [
        (bucket, [(seen, _tile_data_uri(seen.tile)) for seen in group if seen.tile is not None])
        for bucket, group in tiles(found)
    ]
    return page_template("data_report", shown=printable_name).render(
        found=found,
        title=title,
        groups=groups,
        varied=[(seen, list(map(_tile_data_uri, seen.variants))) for seen in found.varied],
        rows={row.size: row for row in found.buckets},
        tables=list(_tables(found)),
        alike=look_alikes(found, _tile_data_uri),
        captions_of=_captions_of,
        charts=charts,
        outcome=describe_unusable(found),
        plural=plural,
        listed=LISTED,
        style=page_style("report", "data_report"),
        made_by=f"simpletune {__version__}",
    )


def _captions_of(image: SourceImage) -> list[str]:
    """Format a picture's captions for its tile, each with its share if some are used more often."""
    shares = [f"{weight / sum(image.weights):.0%}: " for weight in image.weights] or [""] * len(image.captions)
    return first_lines([share + caption for share, caption in zip(shares, image.captions, strict=True)], CAPTIONS)


def _tables(found: DatasetReport) -> Iterator[PageTable]:
    """Yield the tables that have rows."""
    small = [
        (
            printable_name(s.image.name),
            f"{s.image.size[0]} x {s.image.size[1]}",
            f"{s.bucket[0]} x {s.bucket[1]}",
            f"{s.upscale:.2f}",
        )
        for s in found.small
    ]
    held = [(printable_name(name),) for name in found.held_out]
    across = [("\n".join(printable_name(name) for name in group),) for group in found.split_duplicates]
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
            f"longer than {format_limit(found)}; the text encoders see only the beginning",
            ("picture", "length"),
            [(printable_name(name), f"{length:,}") for name, length in found.long],
        ),
    ]
    yield from (table for table in every if table[3])


def _tile_data_uri(tile: Image.Image) -> str:
    """Encode a tile as a WebP data URI."""
    buffer = io.BytesIO()
    tile.save(buffer, "WEBP", quality=78, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Group:
    """Pictures that look alike."""

    # (names, thumbnail as a data URI); the URI is empty if the file has changed since the scan
    shown: list[tuple[str, str]]
    others: list[str]  # names of the pictures without a thumbnail


@dataclass(frozen=True)
class DuplicateGroups:
    """All groups of one kind: identical or nearly identical."""

    title: str
    says: str
    groups: list[Group]  # those with thumbnails first
    more: int  # how many groups are omitted


def look_alikes(found: DatasetReport, embed: Callable[[Image.Image], str]) -> list[DuplicateGroups]:
    """Group identical and nearly identical pictures. Decodes the shown ones again; ``embed`` gives a data URI."""
    by_name = {seen.image.name: seen for seen in found.usable}

    def small(seen: ScannedImage) -> str:
        try:
            image = decode_image(seen.image, at_least=2 * SIDE)
        except UnusableImage:  # changed since the scan: show only its name
            return ""
        image.thumbnail((SIDE, SIDE))
        return embed(image)

    def group(names: list[str], same: bool, show: bool) -> Group:
        if not show:
            return Group([], [printable_name(name) for name in names])
        one = ["\n".join(printable_name(name) for name in names)]
        labels = one if same else [printable_name(name) for name in names]
        shown = [(label, small(by_name[name])) for label, name in zip(labels[:EACH], names, strict=False)]
        return Group(shown, labels[EACH:])

    kinds: list[tuple[str, str, Sequence[list[str]], bool]] = [
        ("Identical files", "training sees these pictures more often than others", found.exact, True),
        ("Nearly identical", "found by difference hash and colours; check them by eye", found.near, False),
    ]
    return [
        DuplicateGroups(
            title,
            says,
            [group(names, same, number < GROUPS) for number, names in enumerate(groups[: GROUPS + LISTED])],
            max(0, len(groups) - GROUPS - LISTED),
        )
        for title, says, groups, same in kinds
        if groups
    ]
