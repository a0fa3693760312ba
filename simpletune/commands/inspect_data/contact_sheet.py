"""A contact sheet of the pictures as training sees them, grouped by bucket."""

from __future__ import annotations

from itertools import groupby

from PIL import Image, ImageDraw, ImageFont

from simpletune.commands.inspect_data.scan import TILE, DatasetReport, ScannedImage
from simpletune.data.sources.walk import printable_name
from simpletune.system.options import plural
from simpletune.system.sheets import shorten_to_width

COLUMNS, GAP, LINE = 8, 10, 16


def tiles(found: DatasetReport) -> list[tuple[tuple[int, int], list[ScannedImage]]]:
    """Return the training pictures that have a tile, grouped by bucket, the largest group first."""
    order = {row.size: place for place, row in enumerate(found.buckets)}
    trained = [seen for seen in found.usable if seen.tile and seen.picture.name not in found.held_out]
    with_tile = sorted(trained, key=lambda s: (order[s.bucket], s.picture.name))
    return [(bucket, list(group)) for bucket, group in groupby(with_tile, key=lambda seen: seen.bucket)]


def sheet(found: DatasetReport) -> Image.Image:
    """Draw all tiles on one image, labelled with their file names, under a heading for each bucket."""
    groups = tiles(found)
    counts = {row.size: row for row in found.buckets}
    columns = min(COLUMNS, max(len(group) for _, group in groups))
    width = max(360, GAP + columns * (TILE + GAP))
    heights = [_row_height(group) * -(-len(group) // columns) + LINE + GAP for _, group in groups]
    image = Image.new("RGB", (width, GAP + sum(heights)), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=12)
    top = GAP
    for (bucket, group), height in zip(groups, heights, strict=True):
        row = counts[bucket]
        head = f"{bucket[0]}x{bucket[1]}: {plural(row.pictures, 'picture')}, {row.lost:.1%} cropped"
        pen.text((GAP, top), head if len(group) == row.pictures else f"{head}, {len(group)} shown", "black", font)
        for place, seen in enumerate(group):
            line, column = divmod(place, columns)
            left, upper = GAP + column * (TILE + GAP), top + LINE + GAP // 2 + line * _row_height(group)
            assert seen.tile is not None
            image.paste(seen.tile, (left, upper))
            label = shorten_to_width(printable_name(seen.picture.name), TILE, pen, font)
            pen.text((left, upper + seen.tile.height + 1), label, "dimgray", font)
        top += height
    return image


def _row_height(group: list[ScannedImage]) -> int:
    return max(seen.tile.height for seen in group if seen.tile) + LINE + GAP // 2
