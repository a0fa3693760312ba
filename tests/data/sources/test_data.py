"""Pictures and captions as people have them: buckets, caption sources, odd files, and what is said about bad ones."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simpletune.data.samples import make_samples
from simpletune.data.sources.captions import read_metadata
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import MAX_PIXELS, crop_to_bucket, decode, image_size
from simpletune.data.sources.source import SourceImage, UnusableImage
from simpletune.models.shared.buckets import bucket_sizes, covering_size, nearest_bucket
from simpletune.stages.encode import report_rejected
from simpletune.system.options import UserError

TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
"""What a viewer must do with the stored pixels for each EXIF orientation (TIFF 6.0)."""


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(pil: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    pil.save(buffer, kind, **options)
    return buffer.getvalue()


def rotated(orientation: int, kind: str, width: int = 24, height: int = 16) -> bytes:
    """A picture that says in its EXIF how to hold it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(width, height), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


def png_header(width: int, height: int) -> bytes:
    """A PNG of any size in a few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def put(path: Path, files: dict[str, bytes | str]) -> Path:
    """A folder with these files."""
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def captions(path: Path, **options: object) -> dict[str, str]:
    scan = Folder(path=str(path), **options).scan(path)
    assert scan.rejected == []
    return {image.name: image.caption for image in scan.images}


def reasons(path: Path, **options: object) -> dict[str, str]:
    return {each.name: each.reason for each in Folder(path=str(path), **options).scan(path).rejected}


IMAGE = encoded(noise(8, 8))


# Buckets


@pytest.mark.parametrize(("resolution", "max_aspect"), [(1024, 4.0), (512, 2.0), (256, 8.0), (64, 4.0), (48, 1.0)])
def test_buckets_have_steps_of_16_equal_area_and_bounded_aspect(resolution: int, max_aspect: float) -> None:
    sizes = bucket_sizes(resolution, max_aspect)
    assert (resolution, resolution) in sizes
    assert set(sizes) == {(height, width) for width, height in sizes}
    for width, height in sizes:
        assert width % 16 == height % 16 == 0
        assert max(width / height, height / width) <= max_aspect
        assert resolution**2 - 16 * max(width, height) < width * height <= resolution**2


@pytest.mark.parametrize(
    ("image", "bucket"),
    [((300, 200), (80, 48)), ((10, 12), (64, 64)), ((1, 9), (32, 128)), ((9000, 1), (128, 32)), ((1, 1), (64, 64))],
)
def test_nearest_bucket_by_hand(image: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert nearest_bucket(image, 64, 4.0) == bucket


@pytest.mark.parametrize("size", [(1605, 3400), (3400, 1605), (4032, 3024), (1920, 1080), (1000, 1000)])
def test_pictures_keep_their_aspect_in_buckets_and_lose_it_only_when_asked(size: tuple[int, int]) -> None:
    image = SourceImage("a.jpg", "a", size, "0" * 64, bytes)
    (bucketed,) = make_samples([image], Folder(path="x", resolution=1024).members)
    assert bucketed.bucket[0] / bucketed.bucket[1] == pytest.approx(size[0] / size[1], rel=0.02)
    (square,) = make_samples([image], Folder(path="x", resolution=1024, aspect="square").members)
    assert square.bucket == (1024, 1024)


@pytest.mark.parametrize(
    ("image", "bucket", "covering"),
    [
        ((200, 100), (64, 64), (128, 64)),
        ((100, 200), (64, 64), (64, 128)),
        ((10, 10), (80, 48), (80, 80)),
        ((1605, 3400), (704, 1488), (704, 1491)),
        ((200, 101), (64, 64), (127, 64)),
        ((101, 200), (64, 64), (64, 127)),
        ((64, 64), (64, 64), (64, 64)),
    ],
)
def test_covering_size_by_hand(image: tuple[int, int], bucket: tuple[int, int], covering: tuple[int, int]) -> None:
    assert covering_size(image, bucket) == covering


# Decoding


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", TURNS)
def test_exif_orientation(orientation: int, kind: str) -> None:
    data = rotated(orientation, kind)
    upright = TURNS[orientation](np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    image = decode(data)
    assert image_size(data) == image.size == (upright.shape[1], upright.shape[0])
    np.testing.assert_array_equal(np.asarray(image), upright)


def test_an_orientation_that_does_not_exist_is_no_orientation() -> None:
    for orientation in (0, 9, 300):
        data = rotated(orientation, "JPEG")
        assert image_size(data) == decode(data).size == (24, 16)


GREY_OF_16_BITS = Image.fromarray(np.array([[0, 257 * 64, 65534, 65535]], dtype=np.uint16))
PALETTE = Image.new("P", (3, 1))
PALETTE.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
PALETTE.putdata([0, 1, 2])
WHITE = [255, 255, 255]


@pytest.mark.parametrize(
    ("pil", "options", "expected"),
    [
        # red, transparent, and a fifth of blue over white
        (
            Image.fromarray(np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 255, 51]]], dtype=np.uint8)),
            {},
            [[255, 0, 0], WHITE, [204, 204, 255]],
        ),
        (
            Image.fromarray(np.array([[[0, 255], [0, 0], [100, 255]]], dtype=np.uint8), "LA"),
            {},
            [[0] * 3, WHITE, [100] * 3],
        ),
        (PALETTE, {}, [[10, 20, 30], [40, 50, 60], [70, 80, 90]]),
        (PALETTE, {"transparency": 1}, [[10, 20, 30], WHITE, [70, 80, 90]]),
        (GREY_OF_16_BITS, {}, [[0] * 3, [64] * 3, [254] * 3, WHITE]),  # scaled, not clipped
        (GREY_OF_16_BITS, {"transparency": 0}, [WHITE, [64] * 3, [254] * 3, WHITE]),
        (Image.fromarray(np.array([[0, 255]], dtype=np.uint8)), {}, [[0] * 3, WHITE]),
        (Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("1"), {}, [[0] * 3, WHITE]),
    ],
    ids=["RGBA", "LA", "P", "P and transparent", "16", "16 and transparent", "L", "1"],
)
def test_every_mode_becomes_rgb_on_white(pil: Image.Image, options: dict, expected: list) -> None:
    image = decode(encoded(pil, **options))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image)[0], expected)


def test_cmyk_becomes_rgb() -> None:
    pil = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    image = decode(encoded(pil, "JPEG", quality=100))
    assert image.mode == "RGB"
    np.testing.assert_allclose(np.asarray(image)[4, 4], [0, 255, 255], atol=3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"not a picture", "is not a picture that Pillow can read"),
        (png_header(20_000, 10_000), f"has more than {MAX_PIXELS:,} pixels"),
        (rotated(6, "WEBP").replace(b"MM\x00*", b"XX\x00*"), "is damaged .not a TIFF file"),
    ],
    ids=["empty", "text", "bomb", "exif"],
)
def test_what_is_no_picture_is_told_from_its_header(data: bytes, reason: str) -> None:
    for read in (image_size, decode):
        with pytest.raises(UnusableImage, match=reason):
            read(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_picture_is_damaged_wherever_it_ends(kind: str) -> None:
    data = rotated(6, kind)
    refused = 0
    for length in range(len(data)):
        try:
            decode(data[:length])
        except UnusableImage:
            refused += 1
    assert refused > 0.9 * len(data)  # what follows the pixels may be missing
    with pytest.raises(UnusableImage, match="is damaged|can read"):
        decode(data[: len(data) // 2])


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about EXIF
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_flipped_bytes_give_a_reason_never_another_exception(kind: str) -> None:
    data, draw, refused = rotated(6, kind), np.random.default_rng(1), 0
    for _ in range(300):
        broken = bytearray(data)
        for place in draw.integers(0, min(len(data), draw.choice([100, len(data)])), size=3):
            broken[place] = draw.integers(256)
        for read in (image_size, decode):
            try:
                read(bytes(broken))
            except UnusableImage:
                refused += 1
    assert refused > 0


# The cut


def test_cut_maps_bytes_to_minus_one_to_one() -> None:
    pil = Image.fromarray(np.array([[[0, 255, 51]] * 16] * 32, dtype=np.uint8))
    pixels = crop_to_bucket(pil, (16, 32))
    assert pixels.shape == (3, 32, 16)
    assert pixels.dtype == np.float32
    np.testing.assert_allclose(pixels[:, 5, 7], [-1.0, 1.0, -0.6], atol=1e-6)


@pytest.mark.parametrize(
    ("size", "offset", "left", "top"),
    [
        ((48, 16), (0.0, 0.0), 0, 0),
        ((48, 16), (0.5, 0.5), 16, 0),
        ((48, 16), (0.999, 0.3), 31, 0),
        ((48, 16), (0.25, 0.9), 8, 0),
        ((16, 48), (0.9, 0.25), 0, 8),
    ],
)
def test_cut_stands_where_the_offset_says(size: tuple, offset: tuple[float, float], left: int, top: int) -> None:
    """In a bucket of 16x16: no scaling, 32 spare columns or rows, none of the other."""
    pil = noise(*size)
    whole = np.asarray(pil).astype(np.float32).transpose(2, 0, 1) / 127.5 - 1
    expected = whole[:, top : top + 16, left : left + 16]
    np.testing.assert_array_equal(crop_to_bucket(pil, (16, 16), offset), expected)


def test_cut_centres_by_default_and_mirrors_when_asked() -> None:
    pil = noise(70, 33)
    centre = crop_to_bucket(pil, (32, 32))
    np.testing.assert_array_equal(centre, crop_to_bucket(pil, (32, 32), (0.5, 0.5)))
    np.testing.assert_array_equal(crop_to_bucket(pil, (32, 32), flip=True), centre[:, :, ::-1])
    assert not np.array_equal(centre, centre[:, :, ::-1])


def test_cut_scales_to_cover_the_bucket() -> None:
    """Left half black, right half white, twice as wide as high: the centre square keeps the edge in its middle."""
    pixels = np.zeros((50, 100, 3), dtype=np.uint8)
    pixels[:, 50:] = 255
    got = crop_to_bucket(Image.fromarray(pixels), (32, 32))
    np.testing.assert_allclose(got[:, :, :12], -1, atol=0.02)
    np.testing.assert_allclose(got[:, :, -12:], 1, atol=0.02)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (1, 1), (3, 4000)])
def test_the_narrowest_pictures_are_cut_without_scaling_them_whole(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, to, *rest: (asked.append(to), resize(self, to, *rest))[1])
    bucket = nearest_bucket(size, 64, 4.0)
    pixels = crop_to_bucket(noise(*size), bucket, (0.999, 0.999))
    assert pixels.shape == (3, bucket[1], bucket[0])
    assert pixels.std() > 0 or size == (1, 1)
    assert max(width * height for width, height in asked) <= 8 * 64 * 64


def test_what_is_cut_before_scaling_is_what_would_be_cut_after() -> None:
    """A ramp of 2000 rows, smooth enough for no difference in the order of rounding."""
    ramp = np.repeat(np.linspace(0, 255, 2000)[:, None], 20, axis=1)
    pil = Image.fromarray(np.repeat(ramp[:, :, None], 3, axis=2).astype(np.uint8))
    whole = np.asarray(pil.resize((32, 3200), Image.Resampling.LANCZOS))[1584:1616] / 127.5 - 1
    np.testing.assert_allclose(crop_to_bucket(pil, (32, 32)), whole.transpose(2, 0, 1), atol=1.01 / 127.5)


# Captions


ROWS = [
    {"file_name": "b.png", "text": " a bear\u2028with two lines\x85 "},
    {"file_name": "./sub/c.png", "text": "ice", "more": 1},
]
LINES = ["", *(json.dumps(row, ensure_ascii=False) for row in ROWS), ""]
LISTED = {"b.png": "a bear\u2028with two lines", "sub/c.png": "ice"}
FILE_NAMES = {
    "a_red-fox  7.png": "a red fox 7",
    "emoji 🦊 fox.png": "emoji 🦊 fox",
    "Größe.JPEG": "Größe",
    "UPPER_case.Png": "UPPER case",
}


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        (
            {"b.png": IMAGE, "b.txt": "\ufeff a bear \n", "sub/my.cat.png": IMAGE, "sub/my.cat.txt": "Käse ☕"},
            {},
            {"b.png": "a bear", "sub/my.cat.png": "Käse ☕"},
        ),
        ({"a.png": IMAGE, "a.txt": "word " * 2000}, {}, {"a.png": "word " * 1999 + "word"}),
        *(
            (
                {"b.png": IMAGE, "sub/c.png": IMAGE, "b.txt": "not this", "metadata.jsonl": end.join(LINES)},
                {},
                LISTED,
            )
            for end in ("\n", "\r\n")
        ),
        (dict.fromkeys(FILE_NAMES, IMAGE), {}, FILE_NAMES),
        (
            {"1.png": IMAGE, "2.png": IMAGE, "2.txt": "not this", "metadata.jsonl": "broken"},
            {"prompt": "a photo of sks dog"},
            dict.fromkeys(["1.png", "2.png"], "a photo of sks dog"),
        ),
    ],
    ids=["text files", "long", "metadata", "metadata of Windows", "file names", "prompt"],
)
def test_captions_come_from(files: dict, options: dict, expected: dict, tmp_path: Path) -> None:
    assert captions(put(tmp_path, files), **options) == expected


def test_lines_of_a_caption_are_joined_and_it_is_said(tmp_path: Path) -> None:
    put(tmp_path, {"a.png": IMAGE, "b.png": IMAGE, "a.txt": "a red  disc,\r\n\n on blue \n", "b.txt": "one line\n"})
    assert captions(tmp_path) == {"a.png": "a red  disc, on blue", "b.png": "one line"}
    assert "1 caption of several lines" in Folder(path=str(tmp_path)).scan(tmp_path).captions
    put(tmp_path, {"metadata.jsonl": "\n".join(json.dumps({"file_name": f"{n}.png", "text": "x\ny"}) for n in "ab")})
    assert captions(tmp_path) == {"a.png": "x y", "b.png": "x y"}
    assert "2 captions of several lines" in Folder(path=str(tmp_path)).scan(tmp_path).captions


def test_caption_files_are_read_as_txt_files_are(tmp_path: Path) -> None:
    put(tmp_path, {f"{name}.png": IMAGE for name in ("both", "own", "same")})
    put(tmp_path, {"own.caption": "from caption", "same.caption": "equal\n", "same.txt": "equal"})
    put(tmp_path, {"both.caption": "one", "both.txt": "another"})
    scan = Folder(path=str(tmp_path)).scan(tmp_path)
    assert [(each.name, each.caption) for each in scan.images] == [("own.png", "from caption"), ("same.png", "equal")]
    (both,) = scan.rejected
    assert both.name == "both.png" and "two different captions: both.txt and both.caption" in both.reason
    (tmp_path / "both.txt").unlink()
    (tmp_path / "same.txt").unlink()
    assert Folder(path=str(tmp_path)).scan(tmp_path).captions == ".caption files beside the pictures"


@pytest.mark.parametrize(
    ("names", "repeats", "words"),
    [
        (["10_dog/a.png", "2_cat/deep/b.png", "c.png"], 1, "10_dog, 2_cat:.*ignored, .*kohya.*data.folder_names=kohya"),
        (["10_dog/a.png"], 10, None),
        (["2024_holiday/a.png", "1_dog/b.png", "dog_10/c.png", "10_d.png"], 1, None),
    ],
)
def test_a_number_before_a_folders_name_gets_a_hint(
    names: list[str], repeats: int, words: str | None, tmp_path: Path
) -> None:
    put(tmp_path, {name: IMAGE for name in names})
    hints = Folder(path=str(tmp_path), prompt="x", repeats=repeats).scan(tmp_path).hints
    if words is None:
        assert not hints
    else:
        assert len(hints) == 1 and re.search(words, hints[0])
        inner = tmp_path / "10_dog"
        assert Folder(path=str(inner), prompt="x").scan(inner).hints[0].startswith("10_dog:")


@pytest.mark.parametrize(
    ("kind", "expected", "told"),
    [
        ("auto", "from jsonl", "metadata.jsonl"),
        ("jsonl", "from jsonl", "metadata.jsonl"),
        ("txt", "from txt", ".txt files"),
        ("filename", "name here", "the file names"),
    ],
)
def test_where_captions_come_from_can_be_chosen(tmp_path: Path, kind: str, expected: str, told: str) -> None:
    metadata = json.dumps({"file_name": "name_here.png", "text": "from jsonl"})
    put(tmp_path, {"name_here.png": IMAGE, "name_here.txt": "from txt", "metadata.jsonl": metadata})
    assert captions(tmp_path, captions=kind) == {"name_here.png": expected}
    assert told in Folder(path=str(tmp_path), captions=kind).scan(tmp_path).captions


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.txt": b""}, "its caption a.txt is empty"),
        ({"a.txt": b" \n\t\n"}, "its caption a.txt is empty"),
        ({"a.txt": "Käse".encode("latin-1")}, "its caption a.txt is not UTF-8 text"),
        ({"a.txt": "a".encode("utf-16")}, "its caption a.txt is not UTF-8 text"),
        ({"a.txt": "a \x1b[31mred\x1b[0m cat"}, "its caption a.txt contains the control character U+001B at 3"),
        ({"a.txt": "a\x00b"}, "its caption a.txt contains the control character U+0000 at 2"),
        ({"a.txt": "a\x9bb"}, "its caption a.txt contains the control character U+009B at 2"),
        ({"a.txt": "x" * (2**20 + 1)}, "its caption a.txt has 1,048,577 bytes; the limit is 1,048,576"),
        ({}, "has no caption: a.txt is missing"),  # auto takes text files if there is one
        ({"metadata.jsonl": '{"file_name": "b.png", "text": "b"}'}, "has no line in metadata.jsonl"),
        (
            {"metadata.jsonl": '{"file_name": "a.png", "text": " "}\n{"file_name": "b.png", "text": "b"}'},
            "its text in metadata.jsonl is empty",
        ),
    ],
)
def test_captions_that_cannot_be_used(files: dict, reason: str, tmp_path: Path) -> None:
    put(tmp_path, {"a.png": IMAGE, "b.png": IMAGE, "b.txt": "fine", **files})
    assert reasons(tmp_path) == {"a.png": reason}


def test_a_file_name_without_words_is_no_caption(tmp_path: Path) -> None:
    reason = reasons(put(tmp_path, {"0001.png": IMAGE}))["0001.png"]
    assert "its file name has no words. Set data.prompt or add 0001.txt" in reason


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"file_name": "../secret.png", "text": "a"}', "'../secret.png' is outside the folder"),
        ('{"file_name": "sub/../../x.png", "text": "a"}', "is outside the folder. Use paths inside it"),
        ('{"file_name": "/etc/x.png", "text": "a"}', "'/etc/x.png' is outside the folder"),
        ('{"file_name": "ok.png", "text": "again"}', "repeats 'ok.png' from line 1. Keep one"),
        ('{"file_name": "./ok.png", "text": "again"}', "repeats 'ok.png' from line 1"),
        ('{"file_name": "a.png", "text": "cut sho', 'not a JSON object with "file_name" and "text"'),
        ("[" * 100_000, 'not a JSON object with "file_name" and "text"'),
        ('{"file_name": "a.png"}', 'not a JSON object with "file_name" and "text"'),
        ('["a.png", "text"]', "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"file_name": "a.png", "text": null}', "file_name must be a string, and text a string or a list of them"),
        ('{"file_name": 3, "text": "a"}', "file_name must be a string, and text a string or a list of them"),
        ('{"file_name": "a.png", "text": "\\ud83e"}', "lone surrogate"),
    ],
)
def test_metadata_that_cannot_be_used_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "metadata.jsonl"
    file.write_text('{"file_name": "ok.png", "text": "fine"}\n\n' + line + "\n")
    metadata = read_metadata(file)
    assert metadata.captions == {"ok.png": ("fine",)}
    assert [(each.name, each.kind) for each in metadata.rejected] == [("metadata.jsonl:3", "line")]
    assert message in metadata.rejected[0].reason


def test_metadata_that_is_missing_or_no_text(tmp_path: Path) -> None:
    put(tmp_path, {"a.png": IMAGE})
    with pytest.raises(UserError, match="data.captions: .*metadata.jsonl cannot be read as UTF-8 text .*No such file"):
        Folder(path=str(tmp_path), captions="jsonl").scan(tmp_path)
    (tmp_path / "metadata.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="metadata.jsonl cannot be read as UTF-8 text"):
        Folder(path=str(tmp_path)).scan(tmp_path)


# The folder


def test_pictures_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["b.png", "B.png", "a b.png", "a/z.png", "a.jpg", "10.webp", "2.jpeg", "ä.png"]
    hidden = [".hidden.png", ".cache/a.png", "a/.b/c.png"]
    others = ["notes.md", "film.mp4", "picture.psd", "thumbs.db"]
    put(tmp_path, {name: IMAGE for name in reversed([*names, *hidden, *others])})
    (tmp_path / "folder.png").mkdir()
    scan = Folder(path=str(tmp_path), prompt="x").scan(tmp_path)
    assert [image.name for image in scan.images] == sorted(names)
    assert scan.rejected == []


def test_sizes_and_digests_are_those_of_the_files(tmp_path: Path) -> None:
    put(tmp_path, {"a.jpg": rotated(6, "JPEG"), "one.png": encoded(noise(1, 1)), "same.png": encoded(noise(1, 1))})
    put(tmp_path, {"w.jpg": encoded(noise(9, 5)), "x.png": encoded(noise(5, 9), "JPEG")})  # a wrong extension
    turned, one, same, *wrong = Folder(path=str(tmp_path), prompt="x").scan(tmp_path).images
    assert [each.size for each in (turned, one, *wrong)] == [(16, 24), (1, 1), (9, 5), (5, 9)]
    assert one.digest == same.digest != turned.digest
    assert one.read() == (tmp_path / "one.png").read_bytes()


def test_each_bad_picture_is_named_with_its_reason(tmp_path: Path) -> None:
    bad: dict[str, tuple[bytes | str, str]] = {
        "bomb.png": (png_header(50_000, 50_000), "pixels"),
        "empty.webp": (b"", "the file is empty"),
        "half.png": (encoded(noise(40, 40))[:2000], "is damaged (image file is truncated"),
        "html.jpg": ("<html>", "is not a picture"),
        "inside.png": (encoded(noise(64, 64))[:6000] + b"?" + encoded(noise(64, 64))[6001:], "is damaged"),
        "link.png": (b"", "cannot be read (No such file or directory)"),
        "no exif 🦊.webp": (rotated(6, "WEBP").replace(b"MM\x00*", b"XX\x00*"), "is damaged (not a TIFF file"),
    }
    put(tmp_path, {name: content for name, (content, _) in bad.items()} | {"good.png": IMAGE})
    (tmp_path / "link.png").unlink()
    (tmp_path / "link.png").symlink_to(tmp_path / "gone.png")
    rejected = Folder(path=str(tmp_path), prompt="x").scan(tmp_path).rejected
    assert [each.name for each in rejected] == list(bad)
    assert all(bad[each.name][1] in each.reason for each in rejected)
    with pytest.raises(UserError, match="^data.path: 7 pictures cannot be used:\n") as error:
        report_rejected(rejected, Folder(path=str(tmp_path)))
    assert all(f"\n  {each.name}: {each.reason}\n" in str(error.value) for each in rejected)
    assert str(error.value).endswith("set data.on_error=skip to skip them")


def test_a_file_name_that_is_no_text_is_a_reason(tmp_path: Path) -> None:
    put(tmp_path, {"good.png": IMAGE})
    (tmp_path / b"caf\xe9.png".decode("utf-8", "surrogateescape")).write_bytes(IMAGE)
    assert reasons(tmp_path) == {"caf?.png": "its file name is not UTF-8 text. Rename it"}


def test_many_bad_pictures_take_no_more_than_a_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_rejected([], Folder(path="x"))
    assert capsys.readouterr().out == "", "nothing is said when all are good"
    put(tmp_path, {f"{number:02d}.png": b"" for number in range(25)})
    report_rejected(Folder(path=str(tmp_path), prompt="x").scan(tmp_path).rejected, Folder(path="x", on_error="skip"))
    lines = capsys.readouterr().out.splitlines()
    assert "skipped 25 pictures" in lines[0]
    assert lines[20:] == ["  19.png: the file is empty", "  and 5 more (simpletune data CONFIG lists all)"]


def test_a_path_that_cannot_be_used_is_told_before_anything_is_opened(tmp_path: Path) -> None:
    put(tmp_path, {"a.txt": "x", "empty/.hidden.png": IMAGE})
    for name, message in {
        "gone": "gone does not exist",
        "a.txt": "a.txt is a file. Give the folder",
        "empty": "empty contains no pictures",
    }.items():
        (problem,) = Folder(path=name).problems(tmp_path / name)
        assert problem.path == "data.path" and message in problem.message


PEAKS = """
import io, os, resource
import numpy
from PIL import Image
from simpletune.data.sources.image_files import decode
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for mode in ("RGBA", "LA", "I;16"):
    if os.fork():  # a child's peak is its own; that of a program is at least its parent's
        os.wait()
        continue
    data = io.BytesIO()
    Image.new(mode, (6000, 4000), 9).save(data, "PNG", compress_level=1)
    before = peak()
    decode(data.getvalue())
    print((peak() - before) // 1024, flush=True)
    os._exit(0)
"""


def test_a_decoded_picture_takes_no_more_than_itself_one_result_and_a_strip() -> None:
    """MiB by which the peak of a process grows that decodes 24 million pixels: 92 each, of which the picture that was
    written counts for one, and 80 for the copies of a strip. Copies of the whole make it 365 and 275."""
    told = subprocess.run([sys.executable, "-c", PEAKS], check=True, capture_output=True, text=True).stdout.split()
    assert len(told) == 3 and all(80 < int(found) < 220 for found in told), told
