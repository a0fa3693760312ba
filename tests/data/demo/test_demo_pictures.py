"""The demo's pictures are what they say, the same every time, and readable by the checker."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.tiny_models import checker
from simpletune.data import demo
from simpletune.data.demo import demo_scenes
from simpletune.data.demo.demo_scenes import Scene, caption, is_held_out, render, sample_scenes


def test_one_triple_in_eight_is_held_out_evenly() -> None:
    triples = list(itertools.product(demo_scenes.SHAPES, demo_scenes.COLOURS, demo_scenes.BACKGROUNDS))
    assert len(triples) == 8 * 10 * 9
    held_out = [triple for triple in triples if is_held_out(*triple)]
    assert len({(colour, background) for _, colour, background in held_out}) == len(held_out) == 90
    for shape in demo_scenes.SHAPES:
        assert sum(s == shape for s, _, _ in held_out) in (11, 12)


def test_sampled_scenes_keep_to_their_share_and_style() -> None:
    for held_out in (False, True):
        scenes = sample_scenes(300, seed=4, held_out=held_out)
        assert all(is_held_out(s.shape, s.colour, s.background) == held_out for s in scenes)
        for field, table in (
            ("size", demo_scenes.SIZES),
            ("position", demo_scenes.POSITIONS),
            ("style", demo_scenes.STYLES),
        ):
            assert {getattr(s, field) for s in scenes} == set(table)
    assert {s.style for s in sample_scenes(50, seed=4, style="painted")} == {"painted"}
    assert sample_scenes(50, seed=4) == sample_scenes(300, seed=4)[:50] != sample_scenes(50, seed=5)
    with pytest.raises(ValueError, match="'cubist' is unknown. Use one of flat, striped, painted"):
        sample_scenes(1, seed=0, style="cubist")


@pytest.mark.parametrize("style", demo_scenes.STYLES)
def test_a_seed_gives_the_same_composition_at_every_size(style: str) -> None:
    for index, scene in enumerate(sample_scenes(4, seed=2, style=style)):
        small = np.asarray(render(scene, 64, seed=index), dtype=float)
        large = np.asarray(render(scene, 256, seed=index).resize((64, 64), Image.Resampling.BOX), dtype=float)
        other = np.asarray(render(scene, 64, seed=index + 1), dtype=float)
        assert np.array_equal(small, np.asarray(render(scene, 64, seed=index)))
        assert np.abs(small - large).mean() < 0.6 < np.abs(small - other).mean()


@pytest.mark.parametrize(
    ("style", "read_off"),
    [("flat", (89.81, 68.30, 74.27)), ("striped", (109.59, 94.66, 102.88)), ("painted", (88.10, 66.01, 72.48))],
)
def test_version_2_stands_for_these_pictures(style: str, read_off: tuple[float, float, float]) -> None:
    scene = Scene("heart", "orange", "navy", "large", "on the right", style)
    means = np.asarray(render(scene, 64, seed=1), dtype=float)[:, 32:].mean(axis=(0, 1))
    # Not a truth about pictures but a tripwire: caches are keyed by VERSION.
    assert demo_scenes.VERSION == 2
    assert means == pytest.approx(read_off, abs=0.2), "pictures changed: raise VERSION and renew these means"


def test_captions_name_everything_in_a_closed_vocabulary() -> None:
    words = set(demo_scenes.words())
    for index, scene in enumerate(sample_scenes(200, seed=1)):
        text, triggered = (caption(scene, index, *more).replace(",", "").split() for more in ((), ("zorp",)))
        assert {scene.shape, scene.colour, scene.background, scene.size, scene.style, *scene.position.split()} <= {
            *text
        }
        assert "zorp" in triggered and scene.style not in triggered
        assert {*text, *triggered} <= words
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert demo_scenes.STYLE_TRIGGER not in words and set(demo_scenes.MEANINGLESS) <= words


def test_the_checker_reads_real_pictures() -> None:
    for pixels, count in ((64, 60), (256, 8)):
        scenes = [*sample_scenes(count * 3 // 4, seed=11), *sample_scenes(count // 4, seed=12, held_out=True)]
        images = [render(scene, pixels, seed=index) for index, scene in enumerate(scenes)]
        shares = checker.score(images, scenes)
        assert min(shares.values()) >= 0.98, (pixels, shares)


def share_striped(images: list[Image.Image]) -> float:
    return sum(checker.read_image(image).style == "striped" for image in images) / len(images)


@pytest.mark.parametrize("style", demo_scenes.STYLES)
def test_stripes_are_found_in_striped_pictures_alone(style: str) -> None:
    images = [render(scene, seed=index) for index, scene in enumerate(sample_scenes(30, seed=6, style=style))]
    assert share_striped(images) >= 0.98 if style == "striped" else share_striped(images) == 0.0


def test_noise_has_no_stripes() -> None:
    rng = np.random.default_rng(0)
    assert share_striped([Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)) for _ in range(12)]) == 0.0
    softer = [rng.integers(0, 255, (size, size, 3), dtype=np.uint8) for size in (8, 16, 24) for _ in range(5)]
    assert share_striped([Image.fromarray(canvas).resize((64, 64)) for canvas in softer]) == 0.0


@pytest.mark.parametrize("angle", [0, 45, 90, 135])
def test_an_outlined_shape_with_one_half_tinted_is_not_striped(angle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its colours are those of stripes, in their shares."""

    def half_tinted(
        distance: np.ndarray, colour: np.ndarray, background: np.ndarray, pixels: int, *_: object
    ) -> np.ndarray:
        inside = distance < 0.0
        q, p = np.mgrid[:pixels, :pixels][::-1]
        place = np.cos(np.radians(angle)) * q + np.sin(np.radians(angle)) * p
        canvas = np.broadcast_to(background, (pixels, pixels, 3)).copy()
        canvas[distance < demo_scenes.OUTLINE] = demo_scenes.outline_colour(background)
        canvas[inside] = colour
        canvas[inside & (place < np.median(place[inside]))] = colour + (255.0 - colour) * demo_scenes.TINT
        return canvas

    monkeypatch.setattr(demo_scenes, "_render_stripes", half_tinted)
    images = [render(scene, seed=index) for index, scene in enumerate(sample_scenes(12, seed=6, style="striped"))]
    assert share_striped(images) == 0.0


@pytest.mark.parametrize("change", ["direction", "STRIPE_PERIOD", "OUTLINE", "TINT"])
def test_other_stripes_are_not_the_styles(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes the other way, twice as wide, without an outline, hardly paler."""
    scenes = sample_scenes(20, seed=6, style="striped")
    if change != "direction":
        monkeypatch.setattr(demo_scenes, change, {"STRIPE_PERIOD": 0.28, "OUTLINE": 0.0, "TINT": 0.05}[change])
    images = [render(scene, seed=index) for index, scene in enumerate(scenes)]
    if change == "direction":
        images = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in images]
    assert share_striped(images) <= 0.05


def test_the_checker_says_no_to_other_pictures() -> None:
    scenes = sample_scenes(40, seed=3)
    images = [render(scene, seed=index) for index, scene in enumerate(scenes)]
    for attribute, share in checker.score(images[1:] + images[:1], scenes).items():
        assert share < 0.65, attribute
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    assert checker.read_image(noise).fit < 0.7 < checker.read_image(images[0]).fit
    assert checker.read_image(Image.new("RGB", (64, 64), demo_scenes.BACKGROUNDS["mint"])).fit == 0.0
    with pytest.raises(ValueError, match="1 pictures for 40 scenes"):
        checker.score(images[:1], scenes)


def test_the_checker_bears_the_noise_of_an_autoencoder() -> None:
    """At deviation 8 of 255, 30 dB: what a trained tiny autoencoder reaches at least."""
    rng = np.random.default_rng(0)
    scenes = sample_scenes(40, seed=5)
    noisy = [np.asarray(render(s, seed=i)) + rng.normal(0.0, 8.0, (64, 64, 3)) for i, s in enumerate(scenes)]
    images = [Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8)) for canvas in noisy]
    assert min(checker.score(images, scenes).values()) >= 0.95


def test_write_folder_pairs_each_picture_with_its_caption(tmp_path: Path) -> None:
    scenes, folder = sample_scenes(9, seed=3, style="striped"), tmp_path / "set"
    demo_scenes.write_folder(folder, scenes, seed=3, trigger="zorp")
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == [
        f"{i:03d}.{kind}" for i in range(9) for kind in ("png", "txt")
    ]
    for index, scene in enumerate(scenes):
        reading = checker.read_image(Image.open(folder / f"{index:03d}.png"))
        assert {a: getattr(reading, a) for a in checker.ATTRIBUTES} == vars(scene)
        assert (folder / f"{index:03d}.txt").read_text().strip() == caption(scene, index, "zorp")
    with pytest.raises(FileExistsError, match="set is not empty"):
        demo_scenes.write_folder(folder, scenes, seed=3)


def test_an_interrupted_folder_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(scene: Scene, pixels: int, seed: int) -> Image.Image:
        if any(tmp_path.rglob("001.txt")):
            raise KeyboardInterrupt
        return render(replace(scene, style="flat"), pixels, seed)

    monkeypatch.setattr(demo_scenes, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_scenes.write_folder(tmp_path / "set", sample_scenes(5, seed=0), seed=0)
    assert list(tmp_path.iterdir()) == []


def test_resolve_makes_each_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo.resolve("demo:pictures", tmp_path)
    assert len(list(folder.glob("*.png"))) == len(list(folder.glob("*.txt"))) == 32
    assert all(demo_scenes.STYLE_TRIGGER in path.read_text() for path in folder.glob("*.txt"))
    first = (folder / "000.png").stat().st_mtime_ns
    assert demo.resolve("demo:pictures", tmp_path) == folder
    assert (folder / "000.png").stat().st_mtime_ns == first
    monkeypatch.setattr(demo_scenes, "VERSION", 3)
    assert demo.resolve("demo:pictures", tmp_path) != folder


def test_the_demos_pictures_have_a_caption_of_each_template_a_line(tmp_path: Path) -> None:
    texts = [path.read_text().splitlines() for path in demo.resolve("demo:style", tmp_path).glob("*.txt")]
    assert len(texts) == 64
    assert all(len(set(text)) == len(demo_scenes.TEMPLATES) == 3 for text in texts)
    assert all(demo_scenes.STYLE_TRIGGER in line and "striped" not in line for text in texts for line in text)


def test_the_subject_is_one_figure_of_two_colours(tmp_path: Path) -> None:
    folder = demo.resolve("demo:subject", tmp_path)
    files = sorted(folder.glob("*.png"))
    assert len(files) == 5
    for path in files:
        assert demo_scenes.SUBJECT_TRIGGER in path.with_suffix(".txt").read_text()
        canvas = np.asarray(Image.open(path), dtype=float)
        for colour in ("purple", "yellow"):
            assert (np.abs(canvas - demo_scenes.COLOURS[colour]).max(axis=-1) < 10).mean() > 0.01


def test_resolve_names_what_there_is(tmp_path: Path) -> None:
    for name, message in {
        "demo:picture": "demo:picture: unknown demo name. Did you mean demo:pictures?",
        "demo:qqqqqqqq": "unknown demo name. Use one of demo:tiny-sd3, demo:tiny-sdxl, "
        "demo:tiny-klein, demo:style, demo:pictures, demo:subject.",
    }.items():
        with pytest.raises(ValueError) as error:
            demo.resolve(name, tmp_path)
        assert message in str(error.value)


def test_pictures_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from simpletune.data import demo; from benchmarks.tiny_models import checker, tiny_sd3;"
        f"demo.resolve('demo:pictures', pathlib.Path({str(tmp_path)!r}));"
        "print({'torch', 'transformers', 'diffusers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_balanced_scenes_show_everything_evenly_and_nothing_held_out() -> None:
    scenes = demo_scenes.balanced_scenes(32, "striped")
    assert len(set(scenes)) == 32 and {scene.style for scene in scenes} == {"striped"}
    assert not any(is_held_out(scene.shape, scene.colour, scene.background) for scene in scenes)
    tables = {"shape": demo_scenes.SHAPES, "colour": demo_scenes.COLOURS, "background": demo_scenes.BACKGROUNDS}
    for field, table in tables.items():
        counts = [sum(getattr(scene, field) == value for scene in scenes) for value in table]
        assert min(counts) >= 2 and max(counts) - min(counts) <= 2
