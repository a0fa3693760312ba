"""Arrange labelled pictures on one sheet."""

from __future__ import annotations

from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def grid(rows: list[tuple[str, list[Image.Image]]], columns: list[str]) -> Image.Image:
    """Arrange pictures in a grid with titles above the columns and a caption below each row."""
    cell = max(160, *(image.width for _, images in rows for image in images))
    scale = {id(image): max(1, cell // image.width) for _, images in rows for image in images}
    heights = [max(image.height * scale[id(image)] for image in images) for _, images in rows]
    font, line, gap = ImageFont.load_default(size=13), 20, 8
    width = gap + (cell + gap) * len(columns)
    sheet = Image.new("RGB", (width, gap + line + sum(height + line + gap for height in heights)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, title in enumerate(columns):
        pen.text((gap + number * (cell + gap), gap // 2), shorten_to_width(title, cell, pen, font), "black", font)
    top = gap + line
    for (caption, images), height in zip(rows, heights, strict=True):
        for number, image in enumerate(images):
            factor = scale[id(image)]
            shown = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
            sheet.paste(shown, (gap + number * (cell + gap), top))
        pen.text((gap, top + height + 2), shorten_to_width(caption, width - 2 * gap, pen, font), "dimgray", font)
        top += height + line + gap
    return sheet


def shorten_to_width(text: str, width: int, pen: ImageDraw.ImageDraw, font: Font) -> str:
    """Shorten a text to at most ``width`` pixels."""
    while pen.textlength(text, font) > width and len(text) > 4:
        text = f"{text[:-4]}..."
    return text
