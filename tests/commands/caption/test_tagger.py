"""Tags by a tiny random tagger: its inputs, which tags are written, what is left alone, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_tagger import TAGS, probabilities, write_tagger

from simpletune.apps.cli.main import main
from simpletune.commands.caption.caption import CaptionRequest, run
from simpletune.commands.caption.record import RECORD
from simpletune.commands.caption.tagger import (
    Tag,
    TagChoice,
    Tagger,
    bgr_square,
    find_tagger,
    plain_tag,
    read_blacklist,
)
from simpletune.system.options import UserError

COLOURS = {"a": "red", "b": "blue", "c": "green"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tagger(tmp_path / "tagger")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    place.mkdir()
    for name, colour in COLOURS.items():
        Image.new("RGB", (40, 20), colour).save(place / f"{name}.png")
    return place


def texts(place: Path) -> dict[str, str]:
    return {file.stem: file.read_text().strip() for file in sorted(place.glob("*.txt"))}


def expected(colour: str, choice: TagChoice | None = None) -> str:
    (row,) = probabilities(bgr_square(Image.new("RGB", (40, 20), colour), 16)[None])
    return ", ".join((choice or TagChoice()).tags([Tag(plain_tag(name), category) for name, category in TAGS], row))


# --- inputs and tags ------------------------------------------------------------------------------------------------


def test_a_picture_is_padded_with_white_and_its_channels_are_bgr() -> None:
    pixels = bgr_square(Image.new("RGB", (40, 20), (10, 20, 30)), 40)
    assert pixels.shape == (40, 40, 3) and pixels.dtype == np.float32 and pixels.flags["C_CONTIGUOUS"]
    assert pixels[20, 5].tolist() == [30, 20, 10] and pixels[2, 5].tolist() == pixels[37, 5].tolist() == [255] * 3
    assert bgr_square(Image.new("RGB", (7, 90)), 16).shape == (16, 16, 3)


def test_underscores_become_spaces_except_in_emoticons() -> None:
    assert [plain_tag(tag) for tag in ("long_hair", "1girl", "k-on!_(style)")] == [
        "long hair",
        "1girl",
        "k-on! (style)",
    ]
    for emoticon in ("0_0", "(o)_(o)", "+_-", "<|>_<|>", ">_<", "3_3", "@_@", "^_^", "o_o", "x_x", "|_|", "||_||"):
        assert plain_tag(emoticon) == emoticon


def test_thresholds_blacklist_ratings_and_order() -> None:
    tags = [Tag("safe", 9), Tag("dog", 0), Tag("Sky", 0), Tag("grass", 0), Tag("rex", 4), Tag("max", 4)]
    scores = np.array([0.99, 0.4, 0.9, 0.34, 0.86, 0.84])
    assert TagChoice().tags(tags, scores) == ["Sky", "rex", "dog"]
    assert TagChoice(0.3, 0.8).tags(tags, scores) == ["Sky", "rex", "max", "dog", "grass"]
    assert TagChoice(0.9, 1.0).tags(tags, scores) == ["Sky"]
    assert TagChoice(blacklist=frozenset({"sky", "rex"})).tags(tags, scores) == ["dog"]


def test_a_blacklist_is_a_list_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "leave_out"
    file.write_text("Long_Hair\n solo , 0_0\n\n")
    assert read_blacklist(str(file)) == read_blacklist("long hair, SOLO,0_0") == {"long hair", "solo", "0_0"}
    (tmp_path / "solo,").write_text("long_hair")
    assert read_blacklist(str(tmp_path / "solo,")) == {str(tmp_path / "solo").replace("_", " ").lower()}, "no file"
    assert read_blacklist("") == frozenset()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="--blacklist: .*leave_out is no readable text .* Give tags between commas"):
        read_blacklist(str(file))


def test_the_models_own_size_is_used_or_448_if_it_takes_any(tmp_path: Path, folder: Path) -> None:
    assert Tagger(find_tagger(str(folder)), TagChoice(), "cpu").side == 16  # type: ignore[arg-type]
    about = find_tagger(str(write_tagger(tmp_path / "any", side="s")))
    assert about is not None and Tagger(about, TagChoice(), "cpu").side == 448


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_verb_writes_what_numpy_computes(folder: Path, images: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["caption", str(images), "--model", str(folder)]
    assert main([*words, "--predict"]) == 0 and texts(images) == {}
    assert main([*words, "--batch-size", "2"]) == 0
    assert texts(images) == {name: expected(colour) for name, colour in COLOURS.items()}
    assert len(set(texts(images).values())) == 3 and "long hair" in " ".join(texts(images).values())
    said = capsys.readouterr().out
    assert "caption 3 pictures" in said and "device  cpu (onnxruntime" in said and "MiB of weights" in said
    (images / "a.txt").write_text("by hand\n")
    more = ["--threshold", "0", "--character-threshold", "0", "--blacklist", "solo, long_hair", "--trigger", "sks"]
    assert main([*words, "--again", *more]) == 0
    choice = TagChoice(0, 0, frozenset({"solo", "long hair"}))
    other = {name: f"sks, {expected(colour, choice)}" for name, colour in COLOURS.items() if name != "a"}
    assert texts(images) == {"a": "by hand", **other}
    assert "0_0" in other["b"] and "hatsune miku" in other["b"] and "explicit" not in other["b"]
    assert main([*words, "--again", *more]) == 0 and "written 0 captions" in capsys.readouterr().out


def test_a_blacklists_text_is_not_recorded(folder: Path, images: Path) -> None:
    run(CaptionRequest(images, str(folder), blacklist="a secret,solo"))
    lines = [json.loads(line) for line in (images / RECORD).read_text().splitlines()]
    assert len(lines) == 3 and "secret" not in str(lines) and '"threshold": 0.35' in lines[0]["settings"]


def test_a_picture_without_a_tag_is_named(folder: Path, images: Path) -> None:
    with pytest.raises(UserError, match="(?s)3 entries have no new caption.*a.png: no tag reaches --threshold"):
        run(CaptionRequest(images, str(folder), threshold=1.0, character_threshold=1.0))
    assert texts(images) == {}


# --- what is refused ------------------------------------------------------------------------------------------------


def a_row_less(folder: Path) -> None:
    file = folder / "selected_tags.csv"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model": (lambda f: (f / "model.onnx").unlink(), "has selected_tags.csv but no model.onnx. Download it again"),
    "no tags": (lambda f: (f / "selected_tags.csv").unlink(), "has model.onnx but no selected_tags.csv. Download it"),
    "other tags": (a_row_less, "has 7 tags in selected_tags.csv, and model.onnx gives 8. Download it again"),
    "no columns": (
        lambda f: (f / "selected_tags.csv").write_text("a,b\n1,2\n"),
        "without the columns name and category",
    ),
    "not UTF-8": (lambda f: (f / "selected_tags.csv").write_bytes(b"\xff"), "without the columns name and category"),
    "no ONNX": (lambda f: (f / "model.onnx").write_bytes(b"no model"), "has a model.onnx that onnxruntime cannot load"),
    "channels": (lambda f: write_tagger(f, channels=4), r"input is \['n', 16, 16, 4\], not pictures of 3 channels"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_tagger_is_refused_and_nothing_is_written(case: str, folder: Path, images: Path) -> None:
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(UserError, match=message):
        run(CaptionRequest(images, str(folder)))
    assert texts(images) == {} and not (images / RECORD).exists()


def test_what_is_no_tagger(tmp_path: Path, folder: Path) -> None:
    assert find_tagger("nowhere") is None
    (folder / "config.json").write_text("{}")
    assert find_tagger(str(folder)) is not None, "published taggers have one, too"
    (folder / "selected_tags.csv").unlink()
    assert find_tagger(str(folder)) is None, "a folder of transformers with its model as ONNX"


@pytest.mark.parametrize("value", ("-0.1", "1.01", "nan", "much"))
@pytest.mark.parametrize("flag", ("--threshold", "--character-threshold"))
def test_a_threshold_outside_of_0_to_1_is_refused(
    flag: str, value: str, folder: Path, images: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        main(["caption", str(images), "--model", str(folder), f"{flag}={value}"])
    assert f"{value} is not a number from 0 to 1, such as 0.35" in capsys.readouterr().err
    assert texts(images) == {}


def test_what_a_tagger_cannot_do(folder: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--prompt: a tagger takes none. Leave it out"):
        run(CaptionRequest(images, str(folder), prompt="what?"))
    with pytest.raises(UserError, match="--device cuda: onnxruntime finds no card. Install onnxruntime-gpu"):
        run(CaptionRequest(images, str(folder), device="cuda"))
    monkeypatch.setattr("simpletune.system.extras.find_spec", lambda _: None)
    with pytest.raises(UserError, match="onnxruntime from the optional extra 'tags'. Run: .*pip install") as found:
        run(CaptionRequest(images, str(folder)))
    assert found.value.code == 3 and "-m pip install -e '.[tags]'" in str(found.value) and texts(images) == {}


def test_a_sentence_model_takes_no_thresholds(images: Path) -> None:
    for change in ({"threshold": 0.5}, {"character_threshold": 0.5}, {"blacklist": "solo"}):
        with pytest.raises(UserError, match="are for taggers, .*name a tagger, such as --model SmilingWolf/wd-vit-tag"):
            run(CaptionRequest(images, **change))  # type: ignore[arg-type]


def test_a_blacklist_of_windows_and_a_long_one(tmp_path: Path) -> None:
    file = tmp_path / "tags.txt"
    file.write_bytes("hatsune miku\r\nhat".encode("utf-8-sig"))
    assert read_blacklist(str(file)) == {"hatsune miku", "hat"}
    assert len(read_blacklist("\n".join(f"tag {number}" for number in range(300)))) == 300
