"""Parquet and Hugging Face data sets, colour profiles, and the limit on scaling up."""

from __future__ import annotations

import base64
import io
import json
import os
import tracemalloc
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageCms

from simpletune.config.load import validate
from simpletune.data.sources import table
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import decode
from simpletune.data.sources.multi_source import find_too_small
from simpletune.data.sources.source import SourceImage, UnusableImage
from simpletune.data.sources.table import Table
from simpletune.runs.folder import read_metrics
from simpletune.system import hub
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train


def rows_of(folder: Path) -> list[dict]:
    """The pictures of a folder as Hugging Face's rows."""
    return [
        {"image": {"bytes": file.read_bytes(), "path": file.name}, "text": file.with_suffix(".txt").read_text().strip()}
        for file in sorted(folder.glob("*.png"))
    ]


def write_parquet(rows: list[dict], file: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    return file


def write_arrow(rows: list[dict], folder: Path) -> Path:
    """As ``Dataset.save_to_disk`` does: a stream of record batches."""
    folder.mkdir()
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        for batch in table.to_batches(max_chunksize=4):
            out.write_batch(batch)
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_trains_as_the_folder_it_came_from(
    kind: str, tiny_config: dict, tiny_images: Path, tmp_path: Path
) -> None:
    rows = rows_of(tiny_images)
    path = write_parquet(rows, tmp_path / "t.parquet") if kind == "parquet" else write_arrow(rows, tmp_path / "saved")
    by_folder = train(validate({**tiny_config, "name": "folder"}, "x"))
    data = {"source": "table", "path": str(path), "resolution": 32}
    by_table = train(validate({**tiny_config, "name": "table", "data": data}, "x"))
    losses = [[row["loss"] for row in read_metrics(run)] for run in (by_folder, by_table)]
    assert losses[0] == losses[1]


def test_columns_are_named_and_a_prompt_needs_no_captions(tiny_images: Path, tmp_path: Path) -> None:
    rows = [{"jpg": row["image"]["bytes"], "json": 3} for row in rows_of(tiny_images)]
    file = write_parquet(rows, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="data.image_column: t.parquet has no column 'image'.*: jpg, json"):
        Table(path=str(file)).scan(file)
    with pytest.raises(UserError, match="data.caption_column: t.parquet has no column 'text'"):
        Table(path=str(file), image_column="jpg").scan(file)
    scan = Table(path=str(file), image_column="jpg", prompt="a shape", limit=4).scan(file)
    assert [image.caption for image in scan.images] == ["a shape"] * 4
    assert [image.read() for image in scan.images] == [row["jpg"] for row in rows[:4]]


def test_rows_that_cannot_be_used_are_named(tiny_images: Path, tmp_path: Path) -> None:
    whole = rows_of(tiny_images)[0]
    outside = "' is outside the dataset's folder"
    cells = [
        ({"text": ""}, "its text is empty or not a string"),
        ({"text": "b\x1b"}, "its text contains the control character U+001B at 2"),
        ({"image": {"bytes": b"no picture", "path": None}}, "is not a picture that Pillow can read"),
        ({"image": {"bytes": None, "path": None}}, "its cell contains no picture"),
        *(
            ({"image": {"bytes": None, "path": path}}, f"its path '{path}{outside}")
            for path in ("../o.png", "/etc/passwd")
        ),
        *(
            ({"image": {"bytes": None, "path": path}}, "its ")
            for path in ("nul\0.png", "n" * 300, "loop.png", "gone.png")
        ),
    ]
    (tmp_path / "loop.png").symlink_to("loop.png")
    file = write_parquet([whole, *(whole | change for change, _ in cells), whole], tmp_path / "t.parquet")
    scan = Table(path=str(file)).scan(file)
    assert [each.name for each in scan.rejected] == [f"t.parquet#{number:08d}" for number in range(1, 11)]
    for each, (_, reason) in zip(scan.rejected, cells, strict=True):
        assert each.reason.startswith(("its path", "its file") if reason == "its " else reason)
    assert len(scan.images) == 2


def test_a_damaged_file_and_a_missing_one(tiny_config: dict, tmp_path: Path) -> None:
    for data, message in (
        ({"source": "table", "path": "nowhere.parquet"}, "data.path: nowhere.parquet does not exist. Give a parquet"),
        (
            {"source": "table", "path": str(tmp_path)},
            r"contains no table \(.parquet, .pq, .arrow, .feather\). Give a folder",
        ),
        ({**tiny_config["data"], "image_column": "x"}, "data.image_column: unknown field"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate({**tiny_config, "data": data}, "x")
    file = tmp_path / "t.parquet"
    file.write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match="t.parquet is damaged or not a .parquet file"):
        Table(path=str(file)).scan(file)


def test_a_table_that_is_damaged_behind_its_header_is_named(tiny_images: Path, tmp_path: Path) -> None:
    """In the columns of texts, and in a picture that is read again."""
    rows = rows_of(tiny_images)
    file = write_parquet(rows, tmp_path / "t.parquet")
    whole = file.read_bytes()
    table._chunk.cache_clear()
    images = Table(path=str(file)).scan(file).images
    file.write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :])
    table._chunk.cache_clear()
    table._open.cache_clear()
    for read in (lambda: Table(path=str(file)).scan(file), images[0].read):
        with pytest.raises(UserError, match="t.parquet is damaged"):
            read()
    file.write_bytes(whole)
    table._open.cache_clear()
    assert images[0].read() == rows[0]["image"]["bytes"]


def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    pil = io.BytesIO()
    Image.new("RGB", (32, 32)).save(pil, "png")
    texts = pa.array([b"\xff\xfe", b"a star"]).view(pa.string())
    pq.write_table(pa.table({"image": [pil.getvalue()] * 2, "text": texts}), tmp_path / "t.parquet")
    scan = Table(path=str(tmp_path)).scan(tmp_path)
    assert [each.reason for each in scan.rejected] == ["its text is not UTF-8 text"]
    assert [image.caption for image in scan.images] == ["a star"]


def test_a_colour_profile_is_turned_into_srgb() -> None:
    """The same numbers under another profile are other colours."""
    plain = Image.new("RGB", (8, 8), (200, 30, 30))

    def read_as(profile: bytes) -> np.ndarray:
        buffer = io.BytesIO()
        plain.save(buffer, "PNG", icc_profile=profile)
        return np.asarray(decode(buffer.getvalue()), int)

    same = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.abs(read_as(same) - np.asarray(plain, int)).max() <= 1
    assert np.array_equal(read_as(b"no profile"), np.asarray(plain))
    turned = read_as(wide_gamut_profile())[0, 0]
    assert turned[0] > 210 and turned[1] < 30


def wide_gamut_profile() -> bytes:
    """An sRGB profile whose red and green primaries are moved outward (its rXYZ tag is scaled)."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = int.from_bytes(data[128:132], "big")
    for entry in range(count):
        at = 132 + 12 * entry
        if data[at : at + 4] == b"rXYZ":
            offset = int.from_bytes(data[at + 4 : at + 8], "big") + 8
            x = int.from_bytes(data[offset : offset + 4], "big")
            data[offset : offset + 4] = int(x * 1.4).to_bytes(4, "big")
    return bytes(data)


def test_pictures_that_would_be_scaled_up_too_far_are_rejected() -> None:
    images = [SourceImage(name, "c", size, name, bytes) for name, size in (("big", (600, 600)), ("small", (300, 150)))]
    (rejected,) = find_too_small(images, Folder(path="x", resolution=512))
    assert rejected.name == "small"
    assert rejected.reason == "is too small: 300x150 would be scaled up 2.4 times; the limit is data.max_upscale=2"
    assert find_too_small(images, Folder(path="x", resolution=512, max_upscale=None)) == []
    both = find_too_small(images, Folder(path="x", resolution=1024, max_upscale=1))
    assert [each.name for each in both] == ["big", "small"]


def bomb(tmp_path: Path, captions: list[str], **options: Any) -> Path:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")
    file = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"image": [buffer.getvalue()] * len(captions), "text": captions}), file, **options)
    return file


def test_a_caption_that_was_compressed_from_far_more_than_a_caption_is_not_read(tmp_path: Path) -> None:
    file = bomb(tmp_path, ["a " * 6_000_000], compression="zstd")
    assert file.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(UserError, match="'text' of row group 0 has 12,...,... bytes in 1 rows; the limit is 1,048,640"):
        Table(path=str(file)).scan(file)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_of_many_rows_the_one_with_too_long_a_caption_is_left_out(tmp_path: Path) -> None:
    file = bomb(tmp_path, ["a red square", "a" * (2**20 + 1), *["a red square"] * 8], compression="zstd")
    scan = Table(path=str(file)).scan(file)
    assert [each.reason for each in scan.rejected] == ["its text has 1,048,577 bytes; the limit is 1,048,576"]
    assert len(scan.images) == 9 and all(each.read_same() for each in scan.images)


def test_a_row_group_is_read_in_parts_where_it_could_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = bomb(tmp_path, [f"a red square {number}" for number in range(50)])
    monkeypatch.setattr(table, "MAX_GROUP", 8000)
    parts = [len(batch) for batch in table._batches(file, 0, ["image", "text"])]
    assert sum(parts) == 50 and max(parts) < 20
    scan = Table(path=str(file)).scan(file)
    assert [each.caption for each in scan.images] == [f"a red square {number}" for number in range(50)]
    monkeypatch.setattr(table, "MAX_GROUP", 100)
    with pytest.raises(UserError, match="'image' of row group 0 has .* the limit is 100"):
        Table(path=str(file)).scan(file)


# Which files are read


def one_row(file: Path, named: str, **columns: list) -> None:
    """A table with one picture, whose caption names the file."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (len(named), 0, 0)).save(buffer, "PNG")
    rows = pa.table(columns or {"image": [buffer.getvalue()], "text": [named]})
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix.lower() in (".parquet", ".pq"):
        pq.write_table(rows, file)
    elif file.suffix == ".feather":
        feather.write_feather(rows, file)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as out:
            out.write_table(rows)


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        one_row(folder / name, name)
    return folder


def texts(folder: Path, **options: Any) -> list[str]:
    return [image.caption for image in Table(path=str(folder), **options).scan(folder).images]


LAYOUTS = {
    "a clone": ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"),
    "hashes": ("data/train-00000-of-00001-0a1b2c3d.parquet", "data/validation-00000-of-00001-0a1b2c3d.parquet"),
    "folders": ("train/0000.parquet", "test/0000.parquet"),
    "other words": ("training.parquet", "eval.parquet"),
    "in the name": ("cats_train.parquet", "cats-val.parquet"),
    "a converted one": ("default/train/0000.parquet", "default/test/0000.parquet"),
    "folders of arrow": ("train/data-00000-of-00001.arrow", "dev/data-00000-of-00001.arrow"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_splits_of_a_local_data_set_are_those_of_the_hub(layout: str, tmp_path: Path) -> None:
    first, second = LAYOUTS[layout]
    tree(tmp_path, first, second)
    other = "validation" if second.startswith(("data/validation", "cats-val", "dev")) else "test"
    assert texts(tmp_path) == texts(tmp_path, split="train") == [first]
    assert texts(tmp_path, split=other) == [second]
    notes = Table(path=str(tmp_path)).scan(tmp_path).notes
    assert notes == (f"the split train is used (data.split): 1 file of 2, without those of {other}",)
    absent = "test" if other == "validation" else "validation"
    (problem,) = Table(path="x", split=absent).problems(tmp_path)
    there = ", ".join(sorted(("train", other)))
    assert (problem.path, problem.message) == (
        "data.split",
        f"x has no split {absent!r}, only {there}. Use one of them",
    )


def test_a_saved_data_set_dict_has_the_splits_that_it_lists(tmp_path: Path) -> None:
    tree(tmp_path, "train/data-00000-of-00001.arrow", "extra/data-00000-of-00001.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "extra"]}')
    assert texts(tmp_path) == ["train/data-00000-of-00001.arrow"]
    assert texts(tmp_path, split="extra") == ["extra/data-00000-of-00001.arrow"]


def test_files_that_name_no_split_are_all_used(tmp_path: Path) -> None:
    """As by version 0.1.0; words within words are no splits."""
    names = tree(tmp_path / "a", "contest.parquet", "sub/b.parquet", "strain.parquet") and [
        "contest.parquet", "strain.parquet", "sub/b.parquet",
    ]  # fmt: skip
    scan = Table(path="x").scan(tmp_path / "a")
    assert [p.caption for p in scan.images] == names and not scan.notes
    assert texts(tmp_path / "a", split="train") == names
    with pytest.raises(UserError, match="data.split: .* has no split 'test', its files name none. Leave it out"):
        texts(tmp_path / "a", split="test")


def test_without_train_a_split_that_is_set_is_obeyed_and_the_default_uses_all(tmp_path: Path) -> None:
    tree(tmp_path, "my_test_cats.parquet", "more.parquet")
    scan = Table(path="x").scan(tmp_path)
    assert [image.caption for image in scan.images] == ["more.parquet", "my_test_cats.parquet"]
    assert scan.notes == ("no file is of the split train, so all are used, those of test too. Set data.split",)
    with pytest.raises(UserError, match="data.split: x has no split 'train', only test. Use one of them"):
        Table(path="x", split="train").scan(tmp_path)


def test_a_configuration_tells_a_split_that_is_set_from_the_default(tiny_config: dict, tmp_path: Path) -> None:
    tree(tmp_path, "test.parquet")
    data = {"source": "table", "path": str(tmp_path), "resolution": 32}
    assert validate({**tiny_config, "data": data}, "x").data.path == str(tmp_path)
    with pytest.raises(ConfigError, match="data.split: .* has no split 'train', only test"):
        validate({**tiny_config, "data": {**data, "split": "train"}}, "x")


def test_a_file_that_is_named_is_read_whatever_its_split(tmp_path: Path) -> None:
    tree(tmp_path, "test.parquet", "cache-0123.arrow")
    for name in ("test.parquet", "cache-0123.arrow"):
        assert texts(tmp_path / name) == [name]


def test_splits_of_the_hub_may_be_in_the_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "default/train/0000.parquet", "default/test/0000.parquet", "other/2022-01.parquet")
    asked = []
    monkeypatch.setattr(hub, "data_set_folder", lambda name, patterns: (asked.append(patterns), tmp_path)[1])
    for split, name in (("train", "default/train"), ("test", "default/test"), ("2022", "other/2022-01.parquet")):
        (image,) = Table(path="owner/name", split=split).scan(Path("owner/name")).images
        assert image.caption.startswith(name)
        assert any(fnmatch(f"{name}/0000.parquet", pattern) for pattern in asked[-1])
    with pytest.raises(UserError, match="contains no .parquet file of the split 'validation'"):
        Table(path="owner/name", split="validation").scan(Path("owner/name"))


def test_what_datasets_writes_beside_its_data_is_not_data(tmp_path: Path) -> None:
    data, cache = "data-00000-of-00001.arrow", "cache-0123456789abcdef.arrow"
    tree(tmp_path, data, cache, "copy.arrow")
    scan = Table(path="x").scan(tmp_path)
    assert [image.caption for image in scan.images] == ["copy.arrow", data]
    assert scan.notes == (f"1 file is left out, which datasets keeps beside its data: {cache}",)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": data}]}))
    scan = Table(path="x").scan(tmp_path)
    assert [image.caption for image in scan.images] == [data]
    assert scan.notes == (f"2 files are left out, which datasets keeps beside its data: {cache}, copy.arrow",)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": [{"filename": "gone.arrow"}]}, "lacks gone.arrow, which its state.json lists. Copy it again"),
        (
            {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]},
            r"is a selection of the rows of its files, which is not read. Save it after flatten_indices\(\)",
        ),
    ],
)
def test_a_saved_data_set_that_is_not_whole_is_refused(state: dict, message: str, tmp_path: Path) -> None:
    tree(tmp_path, "a.arrow")
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=f"data.path: .* {message}"):
        texts(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"_data_files": null}', '{"_data_files": [3]}'])
def test_a_state_of_another_tool_says_nothing(content: str, tmp_path: Path) -> None:
    tree(tmp_path, "a.arrow", "cache-1.arrow")
    (tmp_path / "state.json").write_text(content)
    assert texts(tmp_path) == ["a.arrow"]


def test_a_folder_of_leftovers_alone_is_refused(tmp_path: Path) -> None:
    tree(tmp_path, "cache-1.arrow")
    with pytest.raises(UserError, match="contains no data but cache-1.arrow. Give the file to read it"):
        texts(tmp_path)


@pytest.mark.parametrize("name", ["a.feather", "a.arrow", "a.PARQUET", "a.pq", "a.Arrow"])
def test_tables_of_every_format_and_suffix(name: str, tmp_path: Path) -> None:
    one_row(tmp_path / "a.feather" if name.lower() == "a.arrow" else tmp_path / name, name)
    if name.lower() == "a.arrow":  # the file format under the suffix of the stream
        (tmp_path / "a.feather").rename(tmp_path / name)
    (image,) = Table(path="x").scan(tmp_path).images
    assert image.caption == name and image.read_same().startswith(b"\x89PNG")


def test_a_column_of_base64_is_one_sentence_without_the_text(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    for number, cell in enumerate((text, f"data:image/png;base64,{text}", {"bytes": None, "path": text})):
        one_row(tmp_path / f"{number}.parquet", "", image=[cell] * 3, text=["a"] * 3)
        with pytest.raises(UserError, match="'image' holds pictures as base64 text. Write their bytes") as error:
            texts(tmp_path / f"{number}.parquet")
        assert len(str(error.value)) < 300
    one_row(tmp_path / "long.parquet", "", image=["x" * 5000], text=["a"])
    (rejected,) = Table(path="x").scan(tmp_path / "long.parquet").rejected
    assert rejected.reason.startswith("its file 'xxx") and len(rejected.reason) < 300


def test_a_table_of_other_columns_is_named_with_its_columns(tmp_path: Path) -> None:
    tree(tmp_path, "a.parquet")
    one_row(tmp_path / "ids.parquet", "", id=[1], embedding=[[0.5]])
    with pytest.raises(UserError) as error:
        texts(tmp_path)
    assert str(error.value) == (
        "data.path: ids.parquet has no column 'image', only id, embedding; a.parquet has it. Move what is not of the "
        "data set elsewhere, or give the path of one file"
    )


# What changes or cannot be read


def test_a_table_that_goes_or_is_forbidden_meanwhile_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, "a.parquet", "b.arrow")
    listed = table._table_files(tmp_path)
    monkeypatch.setattr(table, "_table_files", lambda path: listed)
    for file in listed:
        content = file.read_bytes()
        file.unlink()
        table._open.cache_clear()
        with pytest.raises(UserError, match=f"data.path: {file} is gone. Restore it"):
            texts(tmp_path)
        file.write_bytes(content)

    def forbidden(file: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(table, "_Opened", forbidden)
    table._open.cache_clear()
    with pytest.raises(UserError, match="a.parquet cannot be read .Permission denied.. Restore it, or allow"):
        texts(tmp_path)


def test_a_table_that_changes_between_scan_and_reading_is_refused(tmp_path: Path) -> None:
    tree(tmp_path, "a.parquet")
    (image,) = Table(path="x").scan(tmp_path).images
    one_row(tmp_path / "a.parquet", "another")
    table._open.cache_clear()
    table._chunk.cache_clear()
    with pytest.raises(UnusableImage, match="has changed since the folder was scanned. Restart"):
        image.read_same()


def test_a_folder_of_tables_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that leaves it out would train on fewer rows without a word."""
    tree(tmp_path, "a.parquet", "locked/b.parquet")
    scandir = os.scandir

    def refused(folder: Any) -> Any:
        if Path(folder).name == "locked":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    (problem,) = Table(path="x").problems(tmp_path)
    assert problem.message.startswith(f"{tmp_path / 'locked'} cannot be read (Permission denied). Allow it")


def test_names_of_250_bytes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / ("n" * 250)
    name = "é" * 121 + ".parquet"
    assert texts(tree(folder, name)) == [name]
