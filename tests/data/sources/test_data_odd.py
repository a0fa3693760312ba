"""Odd pictures, captions, names and links: each has a stated outcome (docs/how-to/pictures-and-captions.md)."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from simpletune.data.sources.captions import METADATA
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.pictures import decode, picture_size
from simpletune.data.sources.source import RejectedEntry, Scan, UnusablePicture
from simpletune.data.sources.walk import MAX_BYTES, printable_name, read_regular, walk
from simpletune.stages.encode import report_rejected
from simpletune.system.options import UserError


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def scan(path: Path, **options: object) -> Scan:
    return Folder(path=str(path), **options).scan(path)


def reasons(path: Path, **options: object) -> dict[str, str]:
    return {each.name: each.reason for each in scan(path, **options).rejected}


PICTURE = encoded(noise(8, 8))


# Pictures


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refused(folder: str):
        if os.path.basename(folder) == locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(folder)

    (tmp_path / "inner").mkdir()
    for file in (tmp_path / "a.png", tmp_path / "inner" / "b.png"):
        file.write_bytes(PICTURE)
    monkeypatch.setattr(os, "scandir", refused)
    locked = "inner"
    found = scan(tmp_path, prompt="x")
    assert [(each.name, each.reason) for each in found.rejected] == [("inner", "cannot be read (Permission denied)")]
    assert [picture.name for picture in found.pictures] == ["a.png"]
    locked = tmp_path.name
    assert [each.name for each in walk(tmp_path, "inside").rejected] == ["."]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_picture_is_found_while_scanning(kind: str, tmp_path: Path) -> None:
    """Not hours later, when its turn to be encoded comes."""
    data = encoded(noise(64, 64), kind)
    for kept in (0.3, 0.6, 0.95):
        (tmp_path / f"{kept}.png").write_bytes(data[: int(kept * len(data))])
    assert list(reasons(tmp_path, prompt="x")) == ["0.3.png", "0.6.png", "0.95.png"]


def test_whole_pictures_are_not_decoded_by_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    expected = {}
    for kind in ("PNG", "JPEG", "WEBP"):
        for name, size, more in ((f"plain-{kind}.png", (9, 5), {}), (f"turned-{kind}.png", (5, 9), {"exif": exif})):
            (tmp_path / name).write_bytes(encoded(noise(9, 5), kind, **more))
            expected[name] = size
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    assert {picture.name: picture.size for picture in scan(tmp_path, prompt="x").pictures} == expected


def test_an_orientation_behind_the_pixels_of_a_png_is_seen() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(noise(9, 5), exif=exif)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    chunk, rest = data[start:end], data[:start] + data[end:]
    late = rest[:-12] + chunk + rest[-12:]  # before IEND
    assert picture_size(late) == decode(late).size == (5, 9)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = encoded(red, kind, save_all=True, append_images=[blue])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert picture_size(data) == (16, 16)
    np.testing.assert_allclose(np.asarray(decode(data))[8, 8], [255, 0, 0], atol=3)


def test_other_files_are_left_alone_refused_or_never_waited_for(tmp_path: Path) -> None:
    for name in ("a.png", "b.gif", "c.GIF", "d.heic", "Thumbs.db", ".DS_Store", "notes.txt"):
        (tmp_path / name).write_bytes(PICTURE)
    with (tmp_path / "film.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse
    os.mkfifo(tmp_path / "pipe.png")
    found = scan(tmp_path, prompt="x")
    assert [picture.name for picture in found.pictures] == ["a.png"]
    assert found.left_alone == {".gif": 2, ".heic": 1}
    assert {each.name: each.reason for each in found.rejected} == {
        "film.png": "has 1,073,741,825 bytes; the limit is 1,073,741,824",
        "pipe.png": "is not a regular file",
    }


def test_the_smallest_and_the_narrowest_are_read() -> None:
    for size in ((1, 1), (20_000, 20), (20, 20_000)):
        data = encoded(Image.new("RGB", size, (1, 2, 3)))
        assert picture_size(data) == decode(data).size == size


def test_levels_in_floating_point_are_refused() -> None:
    image = Image.fromarray(np.ones((4, 4), dtype=np.float32))
    with pytest.raises(UnusablePicture, match="floating-point pixels"):
        decode(encoded(image, "TIFF"))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]),
    st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255)), min_size=1, max_size=4),
    st.floats(0.1, 1),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fuzzed_pictures_are_read_or_refused(kind: str, changes: list[tuple[float, int]], kept: float) -> None:
    data = bytearray(encoded(noise(12, 10), kind))
    for place, value in changes:
        data[int(place * len(data))] = value
    for read in (picture_size, decode):
        try:
            found = read(bytes(data[: int(kept * len(data)) + 1]))
        except UnusablePicture as reason:
            assert str(reason)
        else:
            assert found is not None


# Captions


def test_all_bad_lines_of_a_metadata_file_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    (tmp_path / "b.gif").write_bytes(PICTURE)
    rows = [{"file_name": "a.png", "text": "fine"}, {"text": "x"}, {"file_name": "../a.png", "text": "x"},
            {"file_name": "a.png", "text": "half \ud83d"},
            {"file_name": "gone.png", "text": "x"}, {"file_name": "b.gif", "text": "x"},
            {"file_name": "nul\0.png", "text": "x"}, {"file_name": "n" * 300 + ".png", "text": "x"}]  # fmt: skip
    (tmp_path / METADATA).write_text("\n".join(map(json.dumps, rows)))
    found = reasons(tmp_path)
    assert list(found) == [f"{METADATA}:{number}" for number in range(2, 9)]
    assert "'../a.png' is outside the folder" in found[f"{METADATA}:3"]
    assert "lone surrogate" in found[f"{METADATA}:4"]
    assert found[f"{METADATA}:5"] == "names 'gone.png', which does not exist"
    assert "not a .jpg, .jpeg, .png, .webp file" in found[f"{METADATA}:6"]
    with pytest.raises(
        UserError, match="^data.path: 7 lines cannot be used:\n  metadata.jsonl:2: is not a JSON object"
    ):
        report_rejected(scan(tmp_path).rejected, Folder(path="x"))


LINES = st.one_of(
    st.text(max_size=60),
    st.recursive(st.none() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)).map(json.dumps),
    st.fixed_dictionaries({"file_name": st.sampled_from(["a.png", "./a.png", "b.png", "../x", "/", ""]) | st.text(),
                           "text": st.none() | st.text(max_size=20)}).map(json.dumps),
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(LINES, max_size=5).map("\n".join).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.binary(max_size=80)
)
def test_any_metadata_file_is_read_or_refused_with_its_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    (tmp_path / METADATA).write_bytes(content)
    try:
        found = scan(tmp_path)
    except UserError:
        return
    lines = content.decode("utf-8-sig").count("\n") + 1
    for each in found.rejected:
        assert each.name == "a.png" or 1 <= int(each.name.rpartition(":")[2]) <= lines
    assert [picture.name for picture in found.pictures] in ([], ["a.png"])


# Names and links


def test_names_of_every_kind_are_read_and_shown_in_one_line(tmp_path: Path) -> None:
    long = "n" * 251 + ".png"
    names = ["with space.png", "-rf.png", "fox 🦊.png", "two\nlines.png", "esc\x1b[2J.png", long, "'\"`$(x).png"]
    for name in names:
        (tmp_path / name).write_bytes(PICTURE)
    assert {picture.name for picture in scan(tmp_path, prompt="x").pictures} == set(names)
    assert printable_name("two\nlines.png") == "two\\nlines.png"
    assert printable_name("esc\x1b[2J.png") == "esc\\x1b[2J.png"
    assert printable_name("fox 🦊 ä.png") == "fox 🦊 ä.png"
    assert len(printable_name(long)) == 120
    with pytest.raises(UserError) as error:
        report_rejected([RejectedEntry(name, "why") for name in names], Folder(path="x"))
    assert len(str(error.value).splitlines()) == len(names) + 2


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A data folder with links inside, outside, to itself and to a device."""
    outside, data = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    (data / "sub").mkdir(parents=True)
    (outside / "o.png").write_bytes(encoded(noise(8, 8, 1)))
    (outside / "secret.txt").write_text("a password")
    (data / "a.png").write_bytes(PICTURE)
    (data / "sub" / "b.png").write_bytes(PICTURE)
    (data / "inside.png").symlink_to("sub/b.png")
    (data / "cycle").symlink_to(data)
    (data / "out.png").symlink_to(outside / "o.png")
    (data / "folder").symlink_to(outside)
    (data / "self.png").symlink_to("self.png")
    (data / "device.png").symlink_to("/dev/zero")
    return data


def test_links_that_lead_out_are_refused(linked: Path) -> None:
    found = scan(linked, prompt="x")
    assert [picture.name for picture in found.pictures] == ["a.png", "inside.png", "sub/b.png"]
    told = {each.name: each.reason for each in found.rejected}
    assert set(told) == {"out.png", "folder", "self.png", "device.png"}
    for name in ("out.png", "folder", "device.png"):
        assert told[name].startswith("is a symbolic link to a target outside the data folder. Copy the target, or set")
    assert "symbolic links" in told["self.png"]


def test_links_that_lead_anywhere_are_followed_when_asked_and_cycles_end(linked: Path) -> None:
    found = scan(linked, prompt="x", links="anywhere")
    names = ["a.png", "folder/o.png", "inside.png", "out.png", "sub/b.png"]
    assert [picture.name for picture in found.pictures] == names
    assert {each.name: each.reason for each in found.rejected}["device.png"] == "is not a regular file"


@pytest.mark.parametrize("name", ["a.txt", METADATA])
def test_captions_may_not_come_from_outside_by_a_link(name: str, linked: Path) -> None:
    """What is read there would stand in the run's files, and be pushed with them."""
    for link in ("out.png", "folder", "self.png", "device.png"):
        (linked / link).unlink()
    (linked / name).symlink_to(linked.parent / "outside" / "secret.txt")
    try:
        found = reasons(linked)
    except UserError as error:
        found = {name: str(error)}
    assert "is a symbolic link to a target outside the data folder" in next(iter(found.values()))
    assert "password" not in str(found)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_and_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.png").chmod(0)
    (tmp_path / "sub").chmod(0)
    assert set(reasons(tmp_path, prompt="x").values()) == {"cannot be read (Permission denied)"}


# Time


def test_5000_files_are_scanned_within_seconds(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"p{number:04d}.png").write_bytes(encoded(noise(16, 16, number)))
        (tmp_path / f"p{number:04d}.txt").write_text("a picture")
    for number in range(10, 5000):  # links take less than writing
        for kind in ("png", "txt"):
            os.link(tmp_path / f"p{number % 10:04d}.{kind}", tmp_path / f"p{number:04d}.{kind}")
    start = time.process_time()
    assert len(scan(tmp_path).pictures) == 5000
    assert time.process_time() - start < 8


def test_a_file_that_goes_while_it_is_read_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UnusablePicture, match="cannot be read .No such file or directory"):
        read_regular(tmp_path / "gone.png")
