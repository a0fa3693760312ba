"""Formats by their content, colour profiles in every mode, transparency on a background, HDR, and the keys of what is
decoded differently than by version 0.1.0."""

from __future__ import annotations

import io
import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageCms
from plans import make_plan

from simpletune.config.load import validate
from simpletune.data.samples import Crop
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import decode, decode_mask, decoding_of, image_size, require_alpha
from simpletune.data.sources.multi_source import scan_sources
from simpletune.data.sources.source import Decoding, SourceImage, UnusableImage
from simpletune.data.sources.stream import Stream
from simpletune.data.storage.cache import crop_key
from simpletune.runs.resume import _manifest_changes
from simpletune.stages.latent_cache import LatentCache
from simpletune.system.options import ConfigError

ORANGE, SEEN = (200, 100, 50), (215, 93, 31)  # in Display P3, and in sRGB by its matrix and curve
P3 = {
    b"rXYZ": (0.51512, 0.24120, -0.00105),
    b"gXYZ": (0.29198, 0.69225, 0.04189),
    b"bXYZ": (0.15710, 0.06657, 0.78407),
}


def display_p3() -> bytes:
    """Display P3: the curve of sRGB with other primaries (SMPTE EG 432-1, adapted to D50)."""
    data = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for entry in range(int.from_bytes(data[128:132], "big")):
        name, offset, _ = struct.unpack_from(">4sII", data, 132 + 12 * entry)
        if name in P3:
            struct.pack_into(">iii", data, offset + 8, *(round(value * 65536) for value in P3[name]))
    return bytes(data)


def linear_grey() -> bytes:
    """A grey profile whose levels are proportional to the light."""
    white = struct.pack(">iii", 63190, 65536, 54061)
    tags = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", 5) + b"grey\0" + bytes(78),
        b"wtpt": b"XYZ " + bytes(4) + white,
        b"kTRC": b"curv" + bytes(4) + struct.pack(">IHH", 1, 256, 0),
        b"cprt": b"text" + bytes(4) + b"none\0\0\0\0",
    }
    table, body = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(body), len(content))
        body += content
    head = b"lcms" + bytes([2, 16, 0, 0]) + b"mntrGRAYXYZ " + bytes(12) + b"acsp" + bytes(28) + white
    return struct.pack(">I", 128 + len(table + body)) + head.ljust(124, b"\0") + table + body


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_chunk(png: bytes, name: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk behind its head."""
    chunk = struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return png[:33] + chunk + png[33:]


def colours(image: Image.Image) -> list:
    """The pixels of the first row."""
    return [tuple(pixel) if isinstance(pixel, list) else pixel for pixel in np.asarray(image)[0].tolist()]


def orange(mode: str) -> Image.Image:
    """An opaque orange pixel beside one that is transparent as far as the mode can say it."""
    pixels = Image.new("RGBA", (2, 1), (*ORANGE, 255))
    pixels.putpixel((1, 0), (0, 0, 255, 0))
    if mode == "P":  # Pillow stores the transparent colour in tRNS
        image = Image.new("P", (2, 1))
        image.putpalette([*ORANGE, 0, 0, 255])
        image.putdata([0, 1])
        image.info["transparency"] = 1
        return image
    return pixels.convert(mode)


PROFILED = {
    "RGBA": encoded(orange("RGBA"), icc_profile=display_p3()),
    "RGBA in TIFF": encoded(orange("RGBA"), "TIFF", icc_profile=display_p3()),
    "RGBA in WebP": encoded(orange("RGBA"), "WEBP", lossless=True, exact=True, icc_profile=display_p3()),
    "P": encoded(orange("P"), icc_profile=display_p3()),
    "RGB and a transparent colour": encoded(orange("RGB"), icc_profile=display_p3(), transparency=(0, 0, 255)),
}


@pytest.mark.parametrize("name", PROFILED)
@pytest.mark.parametrize(("background", "behind"), [("white", (255, 255, 255)), ("#102030", (16, 32, 48))])
def test_a_profile_applies_in_every_mode_and_keeps_transparency(name: str, background: str, behind: tuple) -> None:
    data = PROFILED[name]
    assert colours(decode(data, background=background)) == [SEEN, behind]
    require_alpha(data)
    assert colours(decode_mask(data, "alpha")) == [255, 0]


def test_a_palette_without_transparency_has_its_profile() -> None:
    palette = Image.new("P", (1, 1))
    palette.putpalette([*ORANGE])
    assert colours(decode(encoded(palette, icc_profile=display_p3()))) == [SEEN]
    with pytest.raises(UnusableImage, match="has no transparency"):
        require_alpha(encoded(palette, icc_profile=display_p3()))


@pytest.mark.parametrize(
    ("image", "options", "expected"),
    [
        (Image.new("L", (1, 1), 55), {}, [(128, 128, 128)]),
        (Image.fromarray(np.array([[[55, 255], [55, 0]]], np.uint8), "LA"), {}, [(128, 128, 128), (255, 255, 255)]),
        (Image.fromarray(np.array([[55 * 257]], np.uint16)), {}, [(128, 128, 128)]),
        (
            Image.fromarray(np.array([[55 * 257, 9]], np.uint16)),
            {"transparency": 9},
            [(128, 128, 128), (255, 255, 255)],
        ),
    ],
    ids=["L", "LA", "16", "16 and transparent"],
)
def test_a_profile_of_grey_applies(image: Image.Image, options: dict, expected: list) -> None:
    """A fifth of the light is level 128 in sRGB: 0.2158 ** (1 / 2.4) * 1.055 - 0.055 = 0.5."""
    assert colours(decode(encoded(image, icc_profile=linear_grey(), **options))) == expected


def test_sixteen_bits_keep_what_eight_lose_in_the_dark() -> None:
    """Levels 1 to 256 of 65535 in linear light are one level of 8 bits, and 0 to 13 of sRGB."""
    ramp = Image.fromarray(np.array([[0, 64, 128, 256]], np.uint16))
    found = np.asarray(decode(encoded(ramp, icc_profile=linear_grey()))).astype(int)[0, :, 0]
    np.testing.assert_allclose(found, [0, 3.2, 6.4, 12.7], atol=1)


def test_lab_becomes_srgb() -> None:
    image = Image.new("LAB", (1, 1), (138, 148, 98))  # L* 54.1, a* 20, b* -30
    for options in ({}, {"icc_profile": display_p3()}):  # which is of other colours, and ignored
        assert colours(decode(encoded(image, "TIFF", **options))) == [(143, 118, 182)]


def test_a_profile_of_other_colours_is_ignored() -> None:
    for image, profile in ((orange("RGB"), linear_grey()), (orange("RGBA"), b"none"), (orange("L"), display_p3())):
        data = encoded(image, icc_profile=profile)
        assert colours(decode(data)) == colours(decode(encoded(image)))
        assert decoding_of(data) == Decoding()


def test_a_transparent_colour_of_16_bits_is_transparent() -> None:
    head = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" + struct.pack(">6H", 51400, 25700, 12850, 1000, 2000, 3000))
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", head), (b"IDAT", pixels), (b"IEND", b"")):
        data += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    data = with_chunk(data, b"tRNS", struct.pack(">3H", 1000, 2000, 3000))
    assert colours(decode(data)) == [ORANGE, (255, 255, 255)]
    assert colours(decode_mask(data, "alpha")) == [255, 0]
    grey = encoded(Image.fromarray(np.array([[257 * 7, 257 * 9]], np.uint16)), transparency=257 * 9)
    assert colours(decode(grey, background="black")) == [(7, 7, 7), (0, 0, 0)]
    assert colours(decode_mask(grey, "alpha")) == [255, 0]


def test_large_pictures_are_converted_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (64, 8, 4), dtype=np.uint8)
    data = encoded(Image.fromarray(rows), icc_profile=display_p3())
    whole, converted = decode(data), []
    monkeypatch.setattr("simpletune.data.sources.image_files.STRIP_PIXELS", 80)
    apply = ImageCms.applyTransform
    monkeypatch.setattr(ImageCms, "applyTransform", lambda image, t: (converted.append(image.size), apply(image, t))[1])
    assert np.array_equal(np.asarray(decode(data)), np.asarray(whole))
    assert max(height for _, height in converted) == 10


# Formats


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[("JPEG2000", mode) for mode in ("RGB", "RGBA", "L", "LA")],
        *[("PPM", mode) for mode in ("RGB", "L", "1")],
        *[("TGA", mode) for mode in ("RGB", "RGBA", "L", "P")],
        *[("DDS", mode) for mode in ("RGB", "RGBA")],
        *[("ICO", mode) for mode in ("RGB", "RGBA")],
        *[("PCX", mode) for mode in ("RGB", "P")],
        ("QOI", "RGBA"),
        ("SGI", "RGB"),
    ],
)
def test_what_pillow_reads_is_read_by_content(kind: str, mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize((32, 32)))
    data = encoded(image, kind)
    assert image_size(data) == (32, 32)
    found, expected = (np.asarray(decode(each)).astype(int) for each in (data, encoded(image)))
    np.testing.assert_array_equal(found, expected)
    (tmp_path / "picture.png").write_bytes(data)
    assert [each.size for each in Folder(path="x", prompt="x").scan(tmp_path).images] == [(32, 32)]


@pytest.mark.parametrize("kind", ["JPEG2000", "PPM", "TGA", "QOI", "DDS", "PCX", "SGI"])
def test_a_truncated_picture_of_another_format_is_refused_by_the_scan(kind: str) -> None:
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)), kind)
    with pytest.raises(UnusableImage, match="is damaged|can read"):
        image_size(data[: len(data) // 2])


def test_no_format_starts_a_program() -> None:
    """Pillow hands EPS to Ghostscript."""
    with pytest.raises(UnusableImage, match="is not a picture that Pillow can read"):
        decode(encoded(orange("RGB"), "EPS"))


def test_texts_and_archives_are_no_pictures() -> None:
    for data in (b"a photo of sks dog\n" * 50, b"PK\3\4" + bytes(500), bytes(5000), b"\0\0\2" + bytes(50)):
        with pytest.raises(UnusableImage, match="is not a picture that Pillow can read"):
            image_size(data)


# HDR


HDR = {
    "pq.png": with_chunk(encoded(orange("RGB")), b"cICP", bytes([9, 16, 0, 1])),
    "hlg.png": with_chunk(encoded(orange("RGB")), b"cICP", bytes([9, 18, 0, 1])),
    "sdr.png": with_chunk(encoded(orange("RGB")), b"cICP", bytes([1, 13, 0, 1])),
}


def test_hdr_is_said_and_no_reason_to_refuse(tmp_path: Path) -> None:
    avif = bytearray(encoded(Image.new("RGB", (16, 16), ORANGE), "AVIF"))
    at = avif.index(b"colrnclx") + 10
    for name, transfer in (("pq.avif", 16), ("sdr.avif", 13)):
        avif[at : at + 2] = transfer.to_bytes(2, "big")
        (tmp_path / name).write_bytes(avif)
    for name, data in HDR.items():
        (tmp_path / name).write_bytes(data)
    scan = scan_sources(Folder(path=str(tmp_path), prompt="x"))
    assert len(scan.images) == 5 and not scan.rejected
    (hint,) = scan.hints
    assert hint == (
        "3 pictures have a high dynamic range (HLG and PQ), which is not converted: the colours would be learned "
        "washed out. Export without HDR: hlg.png, pq.avif, pq.png"
    )


# Keys


@pytest.mark.parametrize(
    ("data", "changes", "on_red"),
    [
        (encoded(orange("RGB")), "", ""),
        (encoded(orange("RGB"), icc_profile=display_p3()), "", ""),  # which was always applied
        (encoded(orange("RGBA")), "", "on red"),
        (encoded(orange("P")), "", "on red"),
        (encoded(orange("L"), icc_profile=linear_grey()), "", ""),
        (PROFILED["RGBA"], "profile", "profile, on red"),
        (PROFILED["P"], "profile", "profile, on red"),
        (PROFILED["RGB and a transparent colour"], "profile", "profile, on red"),
    ],
)
def test_only_what_is_decoded_differently_is_so_marked(data: bytes, changes: str, on_red: str) -> None:
    assert decoding_of(data) == Decoding(changes)
    assert decoding_of(data, "red") == Decoding(on_red)


class Autoencoder:
    """A model whose latents are the means of squares of 8 x 8 pixels."""

    downsampling = 8
    text = SimpleNamespace(reads_framing=False)

    @property
    def autoencoder(self) -> Autoencoder:
        return self

    @property
    def files(self) -> Autoencoder:
        return self

    def part(self, name: str) -> Autoencoder:
        return self

    def fingerprint(self, sums: Path) -> str:
        return "means"

    def load(self, *rest: object) -> None:
        return None

    def encode(self, vae: None, pixels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(pixels, 8)


def view_of(data: bytes, decoding: Decoding, by_row: bool = False) -> Crop:
    image = SourceImage("a.png", "a", (32, 32), "0" * 64, lambda: data, decoding=decoding, by_row=by_row)
    return Crop(image, (32, 32), (0.5, 0.5), False)


def test_a_picture_that_is_decoded_differently_has_another_key() -> None:
    before = crop_key(view_of(b"", Decoding()))
    assert "decoding" not in before  # older caches stay valid
    assert crop_key(view_of(b"", Decoding(hdr="PQ"))) == before
    assert json.loads(crop_key(view_of(b"", Decoding("profile"))))["decoding"] == "profile"


def test_a_resumed_run_is_told_which_pictures_are_decoded_differently(tmp_path: Path) -> None:
    for name, mode in (("a.png", "RGBA"), ("b.png", "RGB")):
        (tmp_path / name).write_bytes(encoded(orange(mode).resize((64, 64)), icc_profile=display_p3()))
    source = Folder(path=str(tmp_path), prompt="x", resolution=64)
    images = scan_sources(source).images
    rows = {
        version: make_plan([replace(p, decoding=Decoding()) if version == "0.1.0" else p for p in images]).manifest()
        for version in ("0.1.0", "now")
    }
    assert _manifest_changes(rows["0.1.0"], rows["now"]) == [
        "a.png: changed decoding (its colour profile or transparency, as this version reads it)"
    ]


def test_rows_of_a_stream_keep_the_latents_of_what_is_decoded_as_before(tmp_path: Path) -> None:
    """A stream knows a row's picture only by its place, so the picture itself must tell."""
    plain = encoded(orange("RGB").resize((32, 32)))
    profiled = encoded(orange("RGBA").resize((32, 32)), icc_profile=display_p3())
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": [plain], "text": ["x"], "width": [32], "height": [32]}), file)
    row, red = (
        stream.image(stream.rows(), 0, (32, 32), 16).decoding
        for stream in (Stream(path=str(file)), Stream(path=str(file), background="red"))
    )
    assert row.changes and red.changes == f"{row.changes}, on red"
    for data, kept in ((plain, True), (profiled, False)):
        cache = LatentCache(Autoencoder(), torch.float32, tmp_path / str(kept))  # type: ignore[arg-type]
        older, view = view_of(data, Decoding(), by_row=True), view_of(data, row, by_row=True)
        cache.cache.save(crop_key(older), {"z_0": torch.full((1, 4, 4), 7.0)})
        assert cache.fill([view], torch.device("cpu")) == (1, [])
        assert bool((cache.load(view).z_0 == 7).all()) == kept
        assert cache.fill([view], torch.device("cpu")) == (0, [])


def test_a_background_is_a_colour(tiny_config: dict) -> None:
    for colour in ("white", "Grey", "#A0b1C2"):
        config = validate({**tiny_config, "data": {**tiny_config["data"], "background": colour}}, "x")
        assert config.data.background == colour.lower()
    for colour in ("whitish", "#fff", "", "hsl(0,100%,50%)"):
        with pytest.raises(ConfigError, match="data.background: .* is no colour. Use a name, such as white"):
            validate({**tiny_config, "data": {**tiny_config["data"], "background": colour}}, "x")
