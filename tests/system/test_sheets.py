"""Sheets of labelled pictures: labels of any text, empty cells."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from simpletune.system.sheets import grid, shorten_to_width

FONT = ImageFont.load_default(size=13)


class CountingPen(ImageDraw.ImageDraw):
    measured = 0

    def textlength(self, text: str, *more: object) -> float:  # type: ignore[override]
        self.measured += 1
        return super().textlength(text, *more)  # type: ignore[arg-type]


def pen() -> CountingPen:
    return CountingPen(Image.new("RGB", (8, 8)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a red\ncircle", "a red circle"),
        ("a red\r\n\tcircle\u2028 ", "a red circle"),
        ("\x1b[31m\ud800 \u202e", r"\x1b[31m\ud800 \u202e"),
        ("", ""),
        ("日本 🎨", "日本 🎨"),
    ],
)
def test_a_label_of_any_text_is_one_line(text: str, shown: str) -> None:
    assert shorten_to_width(text, 200, pen(), FONT) == shown
    sheet = np.asarray(grid([(text, [Image.new("RGB", (16, 16))])], [text]))
    assert (sheet < 255).any(axis=(1, 2)).sum() >= 160, "the picture, scaled to a cell"


@pytest.mark.parametrize("text", ["cross " * 2000, "i" * 50_000, "e\u0301" * 9000, "W" * 300, "a label of some length"])
@pytest.mark.parametrize("width", [2, 40, 160, 700])
def test_a_long_label_is_cut_where_the_sheet_ends_in_few_measurements(text: str, width: int) -> None:
    counted = pen()
    found = shorten_to_width(text, width, counted, FONT)
    assert counted.measured <= 14
    kept = found.removesuffix("...")
    assert text.startswith(kept) and kept
    assert FONT.getlength(found) <= width or len(kept) == 1
    longer = f"{text[: len(kept) + 1]}..."
    assert found == text or FONT.getlength(longer) > width or len(kept) >= width - 2


def test_a_picture_that_is_missing_leaves_its_cell_empty() -> None:
    red = Image.new("RGB", (160, 100), "red")
    rows = [("first", [None, red]), ("second", [red, None]), ("none", [None, None])]
    sheet = np.asarray(grid(rows, ["base", "step 1"]))
    assert sheet.shape == (8 + 20 + 2 * 128 + 28, 8 + 2 * 168, 3)
    for row, column in ((0, 1), (1, 0)):
        line = sheet[28 + row * 128 : 128 + row * 128]
        filled, empty = (line[:, 8 + place * 168 :][:, :160] for place in (column, 1 - column))
        assert (filled == (255, 0, 0)).all() and (empty == 255).all()
    assert grid([("nothing", [None])], ["base"]).size == (176, 56)
