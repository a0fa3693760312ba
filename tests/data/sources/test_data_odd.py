"""Odd pictures, captions, names and links: each has a stated outcome (docs/how-to/pictures-and-captions.md)."""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import struct
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from stream_data import ASSETS as MDS

from simpletune.apps.cli.main import main
from simpletune.data.sources.captions import METADATA
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import decode, decode_mask, has_more_frames, image_size
from simpletune.data.sources.source import RejectedEntry, Scan, UnusableImage
from simpletune.data.sources.walk import MAX_BYTES, USUAL, read_regular, walk
from simpletune.stages.encode import report_rejected
from simpletune.system.devices import prepare_environment
from simpletune.system.extras import install_extra
from simpletune.system.options import UserError
from simpletune.system.printable import printable_name

ASSETS = MDS.parent


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


IMAGE = encoded(noise(8, 8))


# Pictures


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refused(folder: str):
        if os.path.basename(folder) == locked:
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(folder)

    (tmp_path / "inner").mkdir()
    for file in (tmp_path / "a.png", tmp_path / "inner" / "b.png"):
        file.write_bytes(IMAGE)
    monkeypatch.setattr(os, "scandir", refused)
    locked = "inner"
    found = scan(tmp_path, prompt="x")
    assert [(each.name, each.reason) for each in found.rejected] == [("inner", "cannot be read (Permission denied)")]
    assert [image.name for image in found.images] == ["a.png"]
    locked = tmp_path.name
    assert [each.name for each in walk(tmp_path, "inside").rejected] == ["."]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF"])
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
    for kind in ("PNG", "JPEG", "WEBP", "AVIF"):
        for name, size, more in ((f"plain-{kind}.png", (9, 5), {}), (f"turned-{kind}.png", (5, 9), {"exif": exif})):
            (tmp_path / name).write_bytes(encoded(noise(9, 5), kind, **copy.deepcopy(more)))  # AVIF's writer empties it
            expected[name] = size
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    assert {image.name: image.size for image in scan(tmp_path, prompt="x").images} == expected


def test_an_orientation_behind_the_pixels_of_a_png_is_seen() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(noise(9, 5), exif=exif)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    chunk, rest = data[start:end], data[:start] + data[end:]
    late = rest[:-12] + chunk + rest[-12:]  # before IEND
    assert image_size(late) == decode(late).size == (5, 9)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    red, blue = (Image.new("RGB", (16, 16), colour) for colour in ("red", "blue"))
    data = encoded(red, kind, save_all=True, append_images=[blue])
    assert has_more_frames(data) and not has_more_frames(encoded(red, kind))
    assert image_size(data) == (16, 16)
    np.testing.assert_allclose(np.asarray(decode(data))[8, 8], [255, 0, 0], atol=3)


def test_other_files_are_left_alone_refused_or_never_waited_for(tmp_path: Path) -> None:
    for name in ("a.png", "b.psd", "c.PSD", "d.jxl", "Thumbs.db", ".DS_Store", "notes.txt"):
        (tmp_path / name).write_bytes(IMAGE)
    with (tmp_path / "film.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse
    os.mkfifo(tmp_path / "pipe.png")
    found = scan(tmp_path, prompt="x")
    assert [image.name for image in found.images] == ["a.png"]
    assert found.left_alone == {".psd": 2, ".jxl": 1}
    assert {each.name: each.reason for each in found.rejected} == {
        "film.png": "has 1,073,741,825 bytes; the limit is 1,073,741,824",
        "pipe.png": "is not a regular file",
    }


def test_the_smallest_and_the_narrowest_are_read() -> None:
    for size in ((1, 1), (20_000, 20), (20, 20_000)):
        data = encoded(Image.new("RGB", size, (1, 2, 3)))
        assert image_size(data) == decode(data).size == size


def test_levels_in_floating_point_are_refused() -> None:
    image = Image.fromarray(np.ones((4, 4), dtype=np.float32))
    with pytest.raises(UnusableImage, match="floating-point pixels"):
        decode(encoded(image, "TIFF"))


def modes() -> dict[str, Image.Image]:
    """A picture in the modes that formats store."""
    rgb = noise(9, 5)
    levels = np.random.default_rng(1).integers(0, 65536, (5, 9), dtype=np.uint16)
    opacity = Image.fromarray((levels % 256).astype(np.uint8))
    clear = rgb.copy()
    clear.putalpha(opacity)
    spotted = rgb.quantize(8)
    spotted.info["transparency"] = 3
    return {
        "RGB": rgb, "L": rgb.convert("L"), "1": rgb.convert("1"), "P": rgb.quantize(8), "spotted": spotted,
        "RGBA": clear, "LA": clear.convert("LA"), "I;16": Image.fromarray(levels),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "stored", "options"),
    [
        ("TIFF", ("RGB", "L", "1", "P", "RGBA", "LA", "I;16"), {}),
        ("TIFF", ("RGB", "RGBA", "I;16"), {"compression": "tiff_lzw"}),
        ("BMP", ("RGB", "L", "1", "P"), {}),
        ("GIF", ("L", "1", "P", "spotted"), {}),
        ("AVIF", ("RGB", "L", "RGBA"), {"quality": 100, "subsampling": "4:4:4"}),
    ],
)
def test_a_picture_has_the_pixels_of_a_png_of_it(kind: str, stored: tuple[str, ...], options: dict) -> None:
    for name in stored:
        image = modes()[name]
        found, expected = (np.asarray(decode(data)) for data in (encoded(image, kind, **options), encoded(image)))
        np.testing.assert_allclose(found.astype(int), expected, atol=3 if kind == "AVIF" else 0, err_msg=name)


def test_inks_of_a_tiff_are_those_of_a_jpeg() -> None:
    inks = Image.new("CMYK", (16, 16), (200, 30, 0, 60))
    found, expected = (np.asarray(decode(encoded(inks, kind))) for kind in ("TIFF", "JPEG"))
    np.testing.assert_allclose(found.astype(int), expected, atol=3)


@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_picture_is_read_as_a_png_of_it(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    blocks = Image.fromarray(np.kron(np.asarray(noise(4, 2)), np.ones((16, 16, 1), np.uint8)))
    turned, expected = encoded(blocks, kind, exif=copy.deepcopy(exif)), decode(encoded(blocks, exif=exif))
    assert image_size(turned) == decode(turned).size == expected.size
    np.testing.assert_allclose(
        np.asarray(decode(turned))[8::16, 8::16].astype(int), np.asarray(expected)[8::16, 8::16], atol=25
    )


HEIC = (ASSETS / "turned.heic").read_bytes()


def test_a_heic_is_read_or_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for name in ("phone.HEIC", "renamed.jpg"):
        (tmp_path / name).write_bytes(HEIC)
    needs = "is HEIC, which needs one more package. Run: " + install_extra("heic")
    assert reasons(tmp_path, prompt="x") == {"phone.HEIC": needs, "renamed.jpg": needs}
    monkeypatch.undo()
    assert [image.size for image in scan(tmp_path, prompt="x").images] == [(48, 64), (48, 64)]
    pixels = np.asarray(decode(HEIC)).astype(int)
    assert not has_more_frames(HEIC)
    for place, colour in (((10, 10), (40, 60, 220)), ((10, 40), (220, 30, 30)), ((50, 10), (255, 255, 255))):
        np.testing.assert_allclose(pixels[place], colour, atol=6)
    with pytest.raises(UnusableImage):
        image_size(HEIC[:-200])


def _end_of_directory(data: bytes, start: int | None = None) -> int:
    at = struct.unpack_from("<I", data, 4)[0] if start is None else start
    return at + 2 + 12 * struct.unpack_from("<H", data, at)[0]


def _entry(data: bytes, tag: int) -> int:
    """Where a TIFF's first directory has a tag."""
    places = range(struct.unpack_from("<I", data, 4)[0] + 2, _end_of_directory(data), 12)
    return next(at for at in places if struct.unpack_from("<H", data, at)[0] == tag)


def with_wide_tag(data: bytes, width: int, count: int = 1) -> bytes:
    changed, at = bytearray(data), _entry(data, 256)
    struct.pack_into("<HII", changed, at + 2, 4, count, width)
    return bytes(changed)


def bmp_head(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IIIIiiHHIIiiII", 2**32 - 1, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "head",
    [
        bmp_head(2**30, 2**30),
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b",\0\0\0\0\xff\xff\xff\xff\0\2\1\0\0;",
        with_wide_tag(encoded(noise(8, 8), "TIFF"), 2**31 - 1),
    ],
    ids=["BMP", "GIF", "TIFF"],
)
def test_a_head_that_announces_too_many_pixels_is_refused(head: bytes) -> None:
    for read in (image_size, decode, has_more_frames):
        with pytest.raises(UnusableImage, match="has more than 178,956,970 pixels"):
            read(head)


def test_only_the_first_page_of_a_tiff_is_decoded() -> None:
    page = noise(8, 8)
    data = bytearray(encoded(page, "TIFF", save_all=True, append_images=[noise(8, 8, 1)] * 200))
    first = decode(bytes(data))
    (second,) = struct.unpack_from("<I", data, _end_of_directory(data))
    struct.pack_into("<I", data, _end_of_directory(data, second), second)  # the third page is the second: a cycle
    assert image_size(bytes(data)) == (8, 8) and has_more_frames(bytes(data))
    assert np.asarray(decode(bytes(data))).tolist() == np.asarray(first).tolist() == np.asarray(page).tolist()


def test_what_libraries_say_about_a_picture_reaches_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """They name no file; the reasons do."""
    lzw = encoded(noise(12, 10), "TIFF", compression="tiff_lzw")
    (start,) = struct.unpack_from("<I", lzw, _entry(lzw, 273) + 8)
    (tmp_path / "lzw.tif").write_bytes(lzw[: start + 2] + b"\xff" * 40 + lzw[start + 42 :])
    (tmp_path / "odd.tif").write_bytes(with_wide_tag(encoded(noise(8, 8), "TIFF"), 0, count=2))
    (tmp_path / "large.bmp").write_bytes(bmp_head(10_000, 9_000))
    (tmp_path / "fine.png").write_bytes(encoded(Image.new("RGB", (800, 800))))
    with warnings.catch_warnings(record=True) as warned:
        warnings.resetwarnings()  # as in a process that has just started
        prepare_environment()
        assert main(["data", str(tmp_path), "--json"]) == 0
    done = capfd.readouterr()
    assert done.err == "" and not warned and not caplog.records
    assert {each["name"] for each in json.loads(done.out)["unusable"]} >= {"lzw.tif", "large.bmp"}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIC"]),
    st.lists(st.tuples(st.floats(0, 0.9999), st.integers(0, 255)), min_size=1, max_size=4),
    st.floats(0.1, 1),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fuzzed_pictures_are_read_or_refused(kind: str, changes: list[tuple[float, int]], kept: float) -> None:
    data = bytearray(HEIC if kind == "HEIC" else encoded(noise(12, 10), kind))
    for place, value in changes:
        data[int(place * len(data))] = value
    for read in (image_size, decode, has_more_frames):
        try:
            found = read(bytes(data[: int(kept * len(data)) + 1]))
        except UnusableImage as reason:
            assert str(reason)
        else:
            assert found is not None


# Captions


def test_all_bad_lines_of_a_metadata_file_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(IMAGE)
    (tmp_path / "b.psd").write_bytes(IMAGE)
    rows = [{"file_name": "a.png", "text": "fine"}, {"text": "x"}, {"file_name": "../a.png", "text": "x"},
            {"file_name": "a.png", "text": "half \ud83d"},
            {"file_name": "gone.png", "text": "x"}, {"file_name": "b.psd", "text": "x"},
            {"file_name": "nul\0.png", "text": "x"}, {"file_name": "n" * 300 + ".png", "text": "x"}]  # fmt: skip
    (tmp_path / METADATA).write_text("\n".join(map(json.dumps, rows)))
    found = reasons(tmp_path)
    assert list(found) == [f"{METADATA}:{number}" for number in range(2, 9)]
    assert "'../a.png' is outside the folder" in found[f"{METADATA}:3"]
    assert "lone surrogate" in found[f"{METADATA}:4"]
    assert found[f"{METADATA}:5"] == "names 'gone.png', which does not exist"
    assert f"no picture ({USUAL})" in found[f"{METADATA}:6"]
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
    (tmp_path / "a.png").write_bytes(IMAGE)
    (tmp_path / METADATA).write_bytes(content)
    try:
        found = scan(tmp_path)
    except UserError:
        return
    lines = content.decode("utf-8-sig").count("\n") + 1
    for each in found.rejected:
        assert each.name == "a.png" or 1 <= int(each.name.rpartition(":")[2]) <= lines
    assert [image.name for image in found.images] in ([], ["a.png"])


# Names and links


def test_names_of_every_kind_are_read_and_shown_in_one_line(tmp_path: Path) -> None:
    long = "n" * 251 + ".png"
    names = ["with space.png", "-rf.png", "fox 🦊.png", "two\nlines.png", "esc\x1b[2J.png", long, "'\"`$(x).png"]
    for name in names:
        (tmp_path / name).write_bytes(IMAGE)
    assert {image.name for image in scan(tmp_path, prompt="x").images} == set(names)
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
    (data / "a.png").write_bytes(IMAGE)
    (data / "sub" / "b.png").write_bytes(IMAGE)
    (data / "inside.png").symlink_to("sub/b.png")
    (data / "cycle").symlink_to(data)
    (data / "out.png").symlink_to(outside / "o.png")
    (data / "folder").symlink_to(outside)
    (data / "self.png").symlink_to("self.png")
    (data / "device.png").symlink_to("/dev/zero")
    return data


def test_links_that_lead_out_are_refused(linked: Path) -> None:
    found = scan(linked, prompt="x")
    assert [image.name for image in found.images] == ["a.png", "inside.png", "sub/b.png"]
    told = {each.name: each.reason for each in found.rejected}
    assert set(told) == {"out.png", "folder", "self.png", "device.png"}
    for name in ("out.png", "folder", "device.png"):
        assert told[name].startswith("is a symbolic link to a target outside the data folder. Copy the target, or set")
    assert "symbolic links" in told["self.png"]


def test_links_that_lead_anywhere_are_followed_when_asked_and_cycles_end(linked: Path) -> None:
    found = scan(linked, prompt="x", links="anywhere")
    names = ["a.png", "folder/o.png", "inside.png", "out.png", "sub/b.png"]
    assert [image.name for image in found.images] == names
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
    (tmp_path / "a.png").write_bytes(IMAGE)
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
    assert len(scan(tmp_path).images) == 5000
    assert time.process_time() - start < 8


def test_a_file_that_goes_while_it_is_read_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UnusableImage, match="cannot be read .No such file or directory"):
        read_regular(tmp_path / "gone.png")


def test_a_jpeg_with_hundreds_of_scans_is_not_decoded() -> None:
    """Each repeated scan has a few bytes, and takes as long as the first."""
    whole = encoded(noise(64, 64), "JPEG", progressive=True, restart_marker_rows=1)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    own = whole.count(b"\xff\xda")
    assert own == 10

    def repeated(scans: int, between: bytes = b"") -> bytes:
        return whole[:last] + (whole[last:end] + between) * (scans - own + 1) + whole[end:]

    fill, comment = b"\xff\xff\xff", b"\xff\xfe\x00\x06\xff\xda\xff\xda"
    for between in (b"", fill, comment):
        for read in (decode, lambda data: decode_mask(data, "file"), image_size):
            read(repeated(50, between))
            with pytest.raises(UnusableImage, match="is a JPEG in more than 50 scans. Save it again"):
                read(repeated(51, between))
    for plain in (whole[:2] + b"\xff\xe1\x01\x02" + b"\xff\xda" * 128 + whole[2:], whole + b"\xff\xda" * 1000):
        assert np.array_equal(np.asarray(decode(plain)), np.asarray(decode(whole))), "these are not scans"
