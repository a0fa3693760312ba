"""Augmentation: what is drawn for a variant, and what it does to colours and edges."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
from PIL import Image
from plans import make_plan, some_images

from simpletune.data.sources.augmentation import RANGES, UNCHANGED, Augmentation, recolour
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import crop_to_bucket
from simpletune.data.sources.multi_source import source_notes

LIMITS = {"brightness": 0.1, "contrast": 0.2, "saturation": 0.3, "hue": 20.0, "rotation": 8.0}


def test_changes_are_spread_evenly_over_their_ranges_and_the_first_variant_has_none() -> None:
    plan = make_plan(some_images([(100, 100)] * 20), variants=32, **LIMITS)
    drawn = [plan.view(sample, variant).augmentation for sample in plan.samples for variant in range(32)]
    assert set(drawn[::32]) == {UNCHANGED} and len(set(drawn)) == 20 * 31 + 1
    values = np.array([[getattr(each, name) / LIMITS[name] for name in RANGES] for each in drawn if each != UNCHANGED])
    assert np.abs(values).max() <= 1
    np.testing.assert_allclose(values.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(values.var(axis=0), 1 / 3, rtol=0.15)
    assert np.abs(np.corrcoef(values.T) - np.eye(len(RANGES))).max() < 0.15


def test_changes_depend_on_seed_and_bytes_and_each_only_on_its_own_range() -> None:
    first, other = some_images([(100, 100)] * 2)

    def changes(seed: int = 7, **limits: object) -> tuple[Augmentation, ...]:
        return tuple(view.augmentation for view in make_plan([first], seed=seed, variants=4, **limits).views())

    every = changes(**LIMITS)
    assert every == changes(**LIMITS) != changes(seed=8, **LIMITS)
    assert [each.hue for each in changes(hue=20.0)] == [each.hue for each in every]
    assert [view.augmentation for view in make_plan([other], variants=4, **LIMITS).views()] != list(every)
    assert [each.changes().keys() for each in changes(rotation=8.0)[1:]] == [{"rotation"}] * 3


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("bucket", [(64, 64), (32, 96), (80, 48)])
def test_a_rotation_leaves_no_empty_corner(bucket: tuple[int, int], flip: bool) -> None:
    for size in ((64, 64), (301, 199), (60, 1500)):
        for angle in (-45.0, -7.3, 0.01, 3.0, 30.0, 45.0):
            pixels = crop_to_bucket(Image.new("RGB", size, "white"), bucket, (0, 1), flip, Augmentation(rotation=angle))
            assert pixels.shape == (3, bucket[1], bucket[0]) and pixels.min() == 1


def test_a_rotation_turns_about_the_centre_counter_clockwise_and_keeps_all_that_fits() -> None:
    """By the corners of the crop, mapped by hand: a square of side 200 rotated by 30 degrees holds one of 146.4."""
    y, x = np.mgrid[:200, :200]
    image = Image.fromarray(np.stack([x, y, 0 * x], axis=2).astype(np.uint8))  # each pixel holds its place
    pixels = (crop_to_bucket(image, (128, 128), augmentation=Augmentation(rotation=30)) + 1) * 127.5
    half = 200 / (np.cos(np.pi / 6) + np.sin(np.pi / 6)) / 2 * 127 / 128
    for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        right, down = half * (1 if column else -1), half * (1 if row else -1)
        place = (
            100 + np.cos(np.pi / 6) * right - np.sin(np.pi / 6) * down - 0.5,
            100 + np.sin(np.pi / 6) * right + np.cos(np.pi / 6) * down - 0.5,
        )
        np.testing.assert_allclose(pixels[:2, row, column], place, atol=2.5)
    np.testing.assert_allclose(pixels[:2, 63:65, 63:65].mean((1, 2)), 99.5, atol=1)


def test_colours_change_by_their_definitions() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3))
    image = Image.fromarray(noise.astype(np.uint8))
    grey = np.asarray(image.convert("L"), dtype=float)[..., None]

    def changed(**amounts: float) -> np.ndarray:
        return np.asarray(recolour(image, Augmentation(**amounts)), dtype=float)

    for amount in (-0.4, 0.25):
        for name, middle in (("brightness", 0), ("contrast", round(grey.mean())), ("saturation", grey)):
            expected = (middle + (noise - middle) * (1 + amount)).clip(0, 255)
            np.testing.assert_allclose(changed(**{name: amount}), expected, atol=1.01)
    for degrees in (-45.0, 90.0):
        by_hand = [colorsys.rgb_to_hsv(*pixel) for pixel in noise.reshape(-1, 3) / 255]
        expected = np.array([colorsys.hsv_to_rgb((h + degrees / 360) % 1, s, v) for h, s, v in by_hand]) * 255
        assert np.abs(changed(hue=degrees).reshape(-1, 3) - expected).mean() < 2  # Pillow has 256 hues
    assert recolour(image, Augmentation(rotation=9)) is image
    cropped = crop_to_bucket(image, image.size, augmentation=Augmentation(hue=90))
    np.testing.assert_allclose((cropped.transpose(1, 2, 0) + 1) * 127.5, changed(hue=90), atol=1e-4)


def test_one_variant_with_augmentation_is_said() -> None:
    (note,) = source_notes(Folder(path="x", hue=5))
    assert note.startswith("data.variants is 1, so no picture is augmented")
    assert list(source_notes(Folder(path="x", hue=5, variants=2))) == list(source_notes(Folder(path="x"))) == []


@pytest.mark.parametrize(
    ("field", "value"), [("brightness", 1.1), ("contrast", -0.1), ("saturation", 2), ("hue", 181), ("rotation", 46)]
)
def test_ranges_are_limited(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Folder.model_validate({"path": "x", field: value})
