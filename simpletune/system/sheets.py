"""Arrange labelled pictures on one sheet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeVar

from PIL import Image, ImageDraw, ImageFont

from simpletune.system.printable import printable

T = TypeVar("T")
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def grid(rows: Sequence[tuple[str, Sequence[Image.Image | None]]], columns: Sequence[str]) -> Image.Image:
    """Arrange images in a grid with titles above the columns and a caption below each row; None leaves a cell empty."""
    cell = max([160, *(image.width for _, images in rows for image in images if image is not None)])
    font, line, gap = ImageFont.load_default(size=13), 20, 8

    def size(image: Image.Image) -> tuple[int, int]:
        scale = max(1, cell // image.width)
        return image.width * scale, image.height * scale

    heights = [max([0, *(size(image)[1] for image in images if image is not None)]) for _, images in rows]
    width = gap + (cell + gap) * len(columns)
    sheet = Image.new("RGB", (width, gap + line + sum(height + line + gap for height in heights)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, title in enumerate(columns):
        pen.text((gap + number * (cell + gap), gap // 2), shorten_to_width(title, cell, pen, font), "black", font)
    top = gap + line
    for (caption, images), height in zip(rows, heights, strict=True):
        for number, image in enumerate(images):
            if image is not None:
                shown = image.resize(size(image), Image.Resampling.NEAREST)
                sheet.paste(shown, (gap + number * (cell + gap), top))
        pen.text((gap, top + height + 2), shorten_to_width(caption, width - 2 * gap, pen, font), "dimgray", font)
        top += height + line + gap
    return sheet


def spread_steps(steps: list[T], room: int) -> list[T]:
    """Select at most ``room`` steps, evenly spread, including the first and the last."""
    if len(steps) <= room:
        return steps
    return [steps[round(number * (len(steps) - 1) / (room - 1))] for number in range(room)]


def shorten_to_width(text: str, width: int, pen: ImageDraw.ImageDraw, font: Font) -> str:
    """Put a text on one line of at most ``width`` pixels, but of at least one character."""
    text = printable(" ".join(text.split()))  # Pillow measures neither several lines nor lone surrogates
    if len(text) <= width and pen.textlength(text, font) <= width:  # almost no character is narrower than a pixel
        return text
    most = min(len(text), width)
    fitting = bisect_right(range(most), float(width), key=lambda count: pen.textlength(f"{text[:count]}...", font))
    return f"{text[: max(1, fitting - 1)]}..."
