"""Validation pictures: the sheet shows only pictures of a row's own request, and loses no more than what is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from PIL import Image

from simpletune.adapters.methods.full import Full
from simpletune.apps.web.run.matrix import matrix_of
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.folder import Folder
from simpletune.runs.report.image_rows import row_titles, validation_images
from simpletune.stages.png import generation_parameters, save_png
from simpletune.stages.sample import ImageRequest
from simpletune.training import validation_images as module
from simpletune.training.validation_images import Previews

CONFIG = TrainConfig(name="x", data=Folder(path="."))
RED, BLUE = ImageRequest("a red circle", 0, "", 32, 32, 4, 5.0), ImageRequest("a blue ring", 1, "", 32, 32, 4, 5.0)
OF_BASE, TRAINED = 40, 90  # a picture's grey values, plus a number for each request
Weights = str  # what stands for a transformer here


class Drawing(Previews):
    """Draws a grey for every request and state."""

    drawn: list[tuple[ImageRequest, bool]]  # and whether the base drew it
    is_base = False

    def images(self, denoiser: object, requests: Sequence[ImageRequest]) -> list[Image.Image]:
        self.drawn = [*getattr(self, "drawn", []), *((request, self.is_base) for request in requests)]
        return [Image.new("RGB", (32, 32), (grey(request, self.is_base),) * 3) for request in requests]


def grey(request: ImageRequest, of_base: bool) -> int:
    asked = request.prompt, request.seed, request.guidance, request.steps, request.negative_prompt
    number = crc32(repr(asked).encode()) % 40
    return number + (OF_BASE if of_base else TRAINED)


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def of_base(adapter: object, previews: Drawing) -> Iterator[None]:
        previews.is_base = True
        yield
        previews.is_base = False

    monkeypatch.setattr(module, "restore_base", of_base)


def previews(folder: Path, *requests: ImageRequest, full: bool = False) -> Drawing:
    config = CONFIG.model_copy(update={"adapter": Full()}) if full else CONFIG
    return Drawing(config, list(requests), None, folder)  # type: ignore[arg-type]


def validate(at: Drawing, step: int) -> np.ndarray | None:
    """What a validation draws, and the sheet; the transformer tells its own drawing whether it is the base."""
    at.is_base = at.config.adapter.trains_base and step == 0
    at.generate_base(at, step)  # type: ignore[arg-type]
    at.is_base = False
    if not step:
        return None
    at.generate(at, step)  # type: ignore[arg-type]
    file = at.write_grid()
    assert file is not None
    return np.asarray(Image.open(file).convert("L"))


def cells(sheet: np.ndarray) -> list[list[int]]:
    """The grey of each cell, 255 where it is empty: rows and columns."""
    return [[int(grey) for grey in row[88::168]] for row in sheet[108::188]]


OTHERS = {
    "prompt": replace(RED, prompt="a blue ring"),
    "seed": replace(RED, seed=7),
    "guidance": replace(RED, guidance=9.0),
    "steps": replace(RED, steps=5),
    "negative prompt": replace(RED, negative_prompt="blurry"),
    "no negative prompt": replace(RED, negative_prompt=None),
    "size": replace(RED, width=48, height=48),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_resume_with_another_request_shows_no_picture_of_the_old_one(other: ImageRequest, tmp_path: Path) -> None:
    first = previews(tmp_path, RED)
    validate(first, 0)
    assert cells(validate(first, 2)) == [[grey(RED, True), grey(RED, False)]]
    again = previews(tmp_path, other)
    sheet = validate(again, 4)
    assert cells(sheet) == [[grey(other, True), grey(other, False)]], "base and step 4, not step 2"
    assert again.drawn == [(other, True), (other, False)]
    assert generation_parameters(tmp_path / "base/prompt-00.png")["prompt"] == RED.prompt, "a checkpoint knows its sum"
    back = previews(tmp_path, RED)
    assert cells(validate(back, 6)) == [[grey(RED, True), grey(RED, False), grey(RED, False)]], "base, 2 and 6"
    assert back.drawn == [(RED, False)]


def test_the_grid_of_many_steps_shows_some_from_the_first_to_the_last(tmp_path: Path) -> None:
    """And counts only those that have pictures of what is asked now."""
    validate(previews(tmp_path, OTHERS["seed"]), 0), validate(previews(tmp_path, OTHERS["seed"]), 1)
    at = previews(tmp_path, RED)
    sheets = [validate(at, step) for step in range(2, 2 + module.COLUMNS)]
    assert len(cells(sheets[-1])[0]) == 1 + module.COLUMNS
    later = validate(at, 100)
    assert later.shape == sheets[-1].shape and len(list(tmp_path.glob("step-*"))) == 2 + module.COLUMNS
    (row,) = cells(later)
    assert row == [grey(RED, True), *[grey(RED, False)] * module.COLUMNS]


def test_more_prompts_and_another_order_keep_the_older_columns(tmp_path: Path) -> None:
    first = previews(tmp_path, RED)
    validate(first, 0), validate(first, 2)
    sheet = validate(previews(tmp_path, BLUE, RED), 4)
    red, blue = (grey(RED, False), grey(BLUE, False))
    assert cells(sheet) == [[grey(BLUE, True), 255, blue], [grey(RED, True), red, red]]


def test_a_base_that_trains_is_not_drawn_again(tmp_path: Path) -> None:
    first = previews(tmp_path, RED, full=True)
    validate(first, 0)
    sheet = validate(previews(tmp_path, RED, BLUE, full=True), 2)
    assert cells(sheet) == [[grey(RED, True), grey(RED, False)], [255, grey(BLUE, False)]]


def spoil(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def test_a_damaged_picture_costs_its_own_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = previews(tmp_path, RED, BLUE)
    validate(at, 0), validate(at, 2)
    spoil(tmp_path / "step-000002/prompt-01.png")
    spoil(tmp_path / "base/prompt-00.png")
    again = previews(tmp_path, RED, BLUE)
    expected = [[grey(each, True), *[grey(each, False)] * 2] for each in (RED, BLUE)]
    expected[1][1] = 255
    assert cells(validate(again, 4)) == expected, "the base's is drawn again"
    said = capsys.readouterr().out
    assert said.count("is damaged: set aside as prompt-01.png.damaged") == 1
    expected = [[*row, row[2]] for row in expected]
    assert cells(validate(again, 6)) == expected and "damaged" not in capsys.readouterr().out
    assert again.drawn.count((RED, True)) == 1


def test_a_picture_that_cannot_be_read_now_is_left_out_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = previews(tmp_path, RED)
    validate(at, 0), validate(at, 2)
    file, honest = tmp_path / "step-000002/prompt-00.png", module.load_image

    def fail(place: Path) -> Image.Image:
        if place == file:
            raise OSError(5, "Input/output error")
        return honest(place)

    monkeypatch.setattr(module, "load_image", fail)
    for step in (4, 6):
        assert cells(validate(at, step))[0][:2] == [grey(RED, True), grey(RED, False)]
    assert capsys.readouterr().out.count("cannot be read (Input/output error)") == 1 and file.is_file()


def test_report_and_page_have_a_row_for_each_request(tmp_path: Path) -> None:
    other = replace(RED, guidance=9.0)
    first = previews(tmp_path / "samples", RED, BLUE)
    validate(first, 0), validate(first, 2), validate(previews(tmp_path / "samples", other, BLUE), 4)
    matrix, names = matrix_of(tmp_path), ["a red circle (guidance 9.0)", "a red circle (guidance 5.0)", "a blue ring"]
    assert matrix.titles == ["base", "step 2", "step 4"]
    assert [row["title"] for row in matrix.rows] == names and matrix.rows[0]["prompt"] == "a red circle"
    shown = [[bool(cell["file"]) for cell in row["cells"]] for row in matrix.rows]
    assert shown == [[True, False, True], [True, True, False], [True, True, True]]
    found = validation_images(tmp_path, [])
    assert list(row_titles([each.asked for each in found]).values()) == names
    assert [each.step for each in found] == [0, 4, 0, 2, 0, 2, 4]
    spoil(tmp_path / "samples/step-000004/prompt-01.png")
    assert [row["title"] for row in matrix_of(tmp_path).rows] == names, "a damaged picture stays in its row"


def test_pictures_of_version_0_1_0_stand_beside_todays(tmp_path: Path) -> None:
    """It recorded no digest of what an inpainting model paints into."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")
    Image.new("L", (32, 32), 255).save(tmp_path / "mask.png")
    request = replace(RED, image=tmp_path / "red.png", mask=tmp_path / "mask.png", strength=1.0)
    for state in ("base", "step-000002"):
        save_png(Image.new("RGB", (32, 32), (7, 7, 7)), tmp_path / f"samples/{state}/prompt-00.png", request)
    at = previews(tmp_path / "samples", request)
    assert cells(validate(at, 4))[0][2:] == [7, 7, grey(request, False)] and at.drawn == [(request, False)]
    Image.new("RGB", (32, 32), "blue").save(tmp_path / "red.png")
    changed = previews(tmp_path / "samples", request)
    validate(changed, 6)
    assert changed._find(tmp_path / "samples/step-000004") == [None], "painted into another picture"
