"""``simpletune data``: what it finds, prints and writes; and what a run keeps of what it left out."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from simpletune.apps.cli.main import main
from simpletune.commands.init import fit_card
from simpletune.commands.inspect_data import near_duplicates as duplicates
from simpletune.commands.inspect_data import scan as look_at
from simpletune.commands.inspect_data.folder_config import folder_config, page_config
from simpletune.commands.inspect_data.near_duplicates import BITS, COLOURS, ImageHash, hash_of, near_duplicates
from simpletune.commands.inspect_data.report import EACH, GROUPS, SIDE, look_alikes
from simpletune.commands.inspect_data.scan import AUGMENTED, TILE, DatasetReport, spread_indices
from simpletune.commands.inspect_data.text import format_report
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_data_folder
from simpletune.data.demo import SUBJECT, resolve
from simpletune.data.sources.source import UnusableImage
from simpletune.training.train import train


def scene(seed: int, size: tuple[int, int] = (96, 96)) -> Image.Image:
    """A picture with a slope and some discs, different for each seed."""
    draw = np.random.default_rng(seed)
    image = Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((96, 96), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = draw.integers(0, 80, 2)
        pen.ellipse((x, y, x + 30, y + 30), tuple(int(c) for c in draw.integers(0, 256, 3)))
    return image.resize(size)


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Eight pictures that can be used, of which two are the same and one nearly; three that cannot; one GIF."""
    folder = tmp_path / "messy"
    folder.mkdir()
    for seed in range(5):
        scene(seed).save(folder / f"p{seed}.png")
        (folder / f"p{seed}.txt").write_text(f"scene {seed}")
    shutil.copy(folder / "p0.png", folder / "same.png")
    scene(1, (90, 90)).save(folder / "near.jpg", quality=80)
    scene(9, (200, 50)).save(folder / "<img src=x>.png")
    for name, caption in {"same": "word " * 100, "near": "scene 2", "<img src=x>": "<script>alert(1)</script>"}.items():
        (folder / f"{name}.txt").write_text(caption)
    (folder / "half.jpg").write_bytes((folder / "near.jpg").read_bytes()[:700])
    (folder / "half.txt").write_text("x")
    (folder / "bare.png").write_bytes((folder / "p0.png").read_bytes())
    scene(8, (12, 12)).save(folder / "tiny.png")
    (folder / "tiny.txt").write_text("tiny")
    (folder / "film.psd").write_bytes(b"8BPS")
    return folder


@pytest.fixture
def config(tiny_config: dict, messy: Path, write_config: Callable[[object], Path]) -> str:
    tiny_config["data"] = {"path": str(messy), "resolution": 64}
    tiny_config["train"]["batch_size"] = 3
    return str(write_config(tiny_config))


def look(config: str, *words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["data", config, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_that_is_odd_is_found(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = look(config, capsys=capsys)
    assert len(found["usable"]) == 8
    reasons = {each["name"]: each["reason"] for each in found["unusable"]}
    assert set(reasons) == {"half.jpg", "bare.png", "tiny.png"}
    assert reasons["tiny.png"] == "is too small: 12x12 would be scaled up 5.3 times; the limit is data.max_upscale=2"
    assert found["without_caption"] == ["bare.png"]
    assert found["duplicates"] == [["p0.png", "same.png"]]
    assert found["alike"] == [["near.jpg", "p1.png"]]
    assert found["same_caption"] == {"scene 2": ["near.jpg", "p2.png"]}
    (name, tokens), *others = found["too_long"]["captions"].items()
    assert (found["too_long"]["limit"], name, others) == ("77 CLIP tokens", "same.png", []) and tokens >= 102
    assert found["left_alone"] == {".psd": 1}


def test_an_animation_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene(1).save(tmp_path / "film.gif", save_all=True, append_images=[scene(2)])
    scene(3).save(tmp_path / "still.gif")
    assert main(["data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "animated   1 picture: the first frame or page is used" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "data.json").read_text())["animated"] == ["film.gif"]
    assert "is used of 1 picture: film.gif." in (tmp_path / "out" / "data.html").read_text()


def test_the_text_says_what_was_scaled_up(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", config, "data.max_upscale=null", "data.on_error=skip"]) == 0
    said = capsys.readouterr().out
    assert "tiny.png: 5.33 times" in said and "training would skip them" in said


def test_the_text_says_what_leaks_and_hints() -> None:
    near = [["a.png", "b.png"], ["c.png", "d.png"]]
    found = DatasetReport("x", "y", [], [], {}, near=near, held_out=["a.png"], hints=("look here",))
    lines = format_report(found).splitlines()
    (leak,) = [line for line in lines if line.startswith("leak")]
    assert "a.png, b.png" in leak and "c.png" not in leak
    assert [line for line in lines if line.startswith("hint")] == ["hint       look here"]


def test_buckets_and_epochs_by_hand(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seven squares in batches of three: two fillers; 200x50 in 128x32 fits exactly, and has two fillers more."""
    found = look(config, "data.repeats=1", capsys=capsys)
    assert found["buckets"] == [
        {"size": [64, 64], "pictures": 7, "samples": 7, "batches": 3, "fillers": 2, "cut_away": 0.0},
        {"size": [128, 32], "pictures": 1, "samples": 1, "batches": 1, "fillers": 2, "cut_away": 0.0},
    ]
    assert found["epoch"] == {"steps": 4, "pictures_a_step": 3, "dropped": 0, "fillers": 4}
    square = look(config, "data.aspect=square", "data.max_upscale=null", capsys=capsys)
    assert {row["name"]: row["cut_away"] for row in square["usable"]}["<img src=x>.png"] == 0.75
    assert square["scaled_up"] == {"tiny.png": 5.3333, "<img src=x>.png": 1.28}


def test_a_folder_is_examined_as_training_would_read_it(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(tiny_images, folder)
    monkeypatch.setattr("simpletune.commands.init.fit_card.card_here", lambda: (None, "no driver"))

    def sizes(*words: str) -> tuple[int, list[list[int]]]:
        assert main(["data", str(folder), "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        return len(found["usable"]), [bucket["size"] for bucket in found["buckets"]]

    usable, at_64 = sizes()
    assert usable == 6 and list(tmp_path.iterdir()) == [folder]  # it writes no configuration
    assert sizes("data.resolution=32")[1] != at_64
    assert main(["init", str(folder), "--device", "cpu"]) == 0
    config = json.loads((tmp_path / "mine.json").read_text())
    config["data"]["resolution"] = 32
    (tmp_path / "mine.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert sizes()[1] != at_64  # the configuration beside it is used


def test_page_and_sheet_hold_the_pictures_and_escape_what_was_typed(config: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["data", config, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "unusable   3 entries: training would stop (data.on_error=stop)" in said
    assert f"{out / 'data.html'}, {out / 'sheet.png'}, {out / 'data.json'}" in said
    page = (out / "data.html").read_text()
    same, alike, tiles = re.split("Identical files|Nearly identical|As training sees them", page)[-3:]
    counts = [part.count('<img src="data:image/webp;base64,') for part in (same, alike, tiles)]
    assert counts == [1, 2, 8]  # one picture stands for the same bytes, with all names
    assert "p0.png\nsame.png" in same
    assert "<script" not in page and "<img src=x>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http://" not in page and "https://" not in page
    with Image.open(out / "sheet.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB"), dtype=int)
    near = Image.open(Path(json.loads((out / "data.json").read_text())["path"]) / "near.jpg").convert("RGB")
    first = np.asarray(near.resize((TILE, TILE), Image.Resampling.LANCZOS), dtype=int)
    assert np.abs(pixels[31 : 31 + TILE, 10 : 10 + TILE] - first).mean() < 3  # the first of the largest bucket


def test_the_number_of_tiles_is_bounded(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", config, "--out", str(tmp_path / "out"), "--pictures", "3"]) == 0
    page = (tmp_path / "out" / "data.html").read_text()
    assert page[page.index("As training sees them") :].count("<img ") == 3
    assert spread_indices(10, 3) == [0, 3, 6] and spread_indices(2, 5) == [0, 1] and spread_indices(5, 0) == []


def test_the_variants_of_augmented_pictures_are_shown(config: str, tmp_path: Path, capsys) -> None:
    words = ["data.hue=20", "data.rotation=9", "data.variants=3"]
    assert main(["data", config, "--out", str(tmp_path / "out"), *words]) == 0
    assert "augmented  hue ±20 degrees, rotation ±9 degrees\n" in capsys.readouterr().out
    page = (tmp_path / "out" / "data.html").read_text()
    shown = re.findall('src="([^"]+)" alt="variant', page)
    assert len(shown) == 3 * AUGMENTED and len(set(shown)) > 2 * AUGMENTED
    assert json.loads((tmp_path / "out" / "data.json").read_text())["augmentation"] == [
        "hue ±20 degrees, rotation ±9 degrees"
    ]
    for off in ("data.variants=3", "data.hue=20"):  # the first variant stays as it is
        assert main(["data", config, "--out", str(tmp_path / "off"), "--pictures", "1", off]) == 0
        assert "augmented " not in capsys.readouterr().out
        assert "Variants" not in (tmp_path / "off" / "data.html").read_text()


def test_captions_of_a_picture_are_shown_with_their_shares(config: str, messy: Path, tmp_path: Path, capsys) -> None:
    (messy / "p3.txt").write_text("3::scene 3\nthe <third>")
    (messy / "p4.txt").write_text("\n".join(f"scene {letter}" for letter in "abcdef"))
    assert main(["data", config, "--out", str(tmp_path / "out"), "data.caption_lines=several"]) == 0
    assert "(2 pictures with several captions, 1 with weights)\n" in capsys.readouterr().out
    page = (tmp_path / "out" / "data.html").read_text()
    words = [re.findall('class="words">([^<]*)<', tile) for tile in page.split("<b>")]
    assert ["75%: scene 3", "25%: the &lt;third&gt;"] in words
    assert ["scene a", "scene b", "scene c", "scene d", "and 2 more"] in words
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "data.json").read_text())["usable"]}
    assert (rows["p3.png"]["captions"], rows["p3.png"]["weights"]) == (["scene 3", "the <third>"], [3, 1])
    (messy / "p3.txt").write_text("0::scene 3\nthe third")
    reasons = {each["name"]: each["reason"] for each in look(config, capsys=capsys)["unusable"]}
    assert "Set data.caption_lines=several" in reasons["p3.png"]


def test_a_damaged_picture_without_a_caption_is_damaged_first(config: str, messy: Path, capsys) -> None:
    """Whoever writes the caption first would find the damage out afterwards."""
    scene(7, (300, 300)).save(messy / "half.jpg", quality=95)
    (messy / "half.jpg").write_bytes((messy / "half.jpg").read_bytes()[:-5000])  # its size can still be read
    (messy / "half.txt").unlink()
    found = look(config, capsys=capsys)
    reasons = {each["name"]: each["reason"] for each in found["unusable"]}
    assert reasons["half.jpg"].startswith("is damaged (") and reasons["bare.png"].startswith("has no caption")
    assert found["without_caption"] == ["bare.png"]
    assert found["files"]["half.jpg"] == {"class": "damaged", "reason": reasons["half.jpg"]}


def test_nothing_usable_is_exit_2_with_the_reasons(config: str, messy: Path, capsys) -> None:
    for file in messy.glob("*"):
        file.write_bytes(b"")
    assert main(["data", config]) == 2
    said = capsys.readouterr()
    assert "p0.png: the file is empty" in said.out  # the fault of the picture, which a caption would not mend
    assert "contains no usable pictures" in said.err


def test_likeness_survives_scaling_and_jpeg_and_tells_others_apart(tmp_path: Path) -> None:
    scenes = [scene(seed) for seed in range(40)]
    again = []
    for number, image in enumerate(scenes):
        image.resize((70, 70)).save(tmp_path / f"{number}.jpg", quality=60)
        again.append(Image.open(tmp_path / f"{number}.jpg").convert("RGB"))
    groups = near_duplicates([hash_of(image) for image in [*scenes, *again]])
    found = sum(group == [number, number + 40] for number in range(40) for group in groups)
    assert found >= 36 and len(groups) == found
    grey = np.asarray(scenes[0].convert("L"))
    scenes[0] = Image.fromarray(grey).convert("RGB")
    tinted = [grey // 2 + 120, grey // 2, grey // 2]  # as bright as before in the same places: the same bits
    recoloured = Image.fromarray(np.stack(tinted, axis=-1))
    assert (hash_of(scenes[0]).bits ^ hash_of(recoloured).bits).bit_count() <= BITS
    assert near_duplicates([hash_of(scenes[0]), hash_of(recoloured)]) == []


def test_only_so_many_look_alikes_are_drawn(config: str) -> None:
    found = look_at.scan_dataset(resolve_data_folder(validate(json.loads(Path(config).read_text()), "x")), 0)
    names = [seen.image.name for seen in found.usable]
    found.exact, found.near = [], [names] * 300
    drawn: list[Image.Image] = []
    (kind,) = look_alikes(found, lambda image: str(drawn.append(image)))
    assert len(drawn) == GROUPS * EACH and max(drawn[0].size) == SIDE
    assert kind.groups[0].others == names[EACH:] and kind.groups[-1].shown == []
    assert len(kind.groups) + kind.more == 300


def test_a_run_keeps_what_it_left_out(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(Path(config).read_text())
    data["data"]["on_error"], data["train"]["steps"] = "skip", 1
    run = train(validate(data, "x"))
    assert "skipped 3 pictures" in capsys.readouterr().out
    kept = json.loads((run / "data.json").read_text())
    assert sorted(each["name"] for each in kept["left_out"]) == ["bare.png", "half.jpg", "tiny.png"]
    assert len(kept["samples"]) == 8


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("demo:tiny-sd3", "77 CLIP tokens"),
        ("{folder}/nothing.safetensors", "300 characters"),
        ("/nowhere", "300 characters"),
        ("owner/not-fetched", "300 characters"),
    ],
)
def test_tokens_are_counted_where_a_tokenizer_is_at_hand(
    model: str, limit: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    name = model.format(folder=tmp_path)
    found = look(config, f"model.pretrained={name}", capsys=capsys)["too_long"]
    assert found["limit"].startswith(limit) and list(found["captions"]) == ["same.png"]
    data = json.loads(Path(config).read_text())
    data["model"] = {"pretrained": name, "text_encoders": str(tmp_path)}
    Path(config).write_text(json.dumps(data))
    assert look(config, capsys=capsys)["too_long"]["limit"].startswith("300")


def test_what_changes_meanwhile_and_a_place_that_cannot_be_written_are_said(
    config: str, messy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["data", config, "--out", str(messy / "p0.png" / "report")]) == 2
    assert "report cannot be written (" in capsys.readouterr().err
    seen = look_at.decode

    def changed(data: bytes, **more: Any) -> Image.Image:
        if data == (messy / "p2.png").read_bytes():
            raise UnusableImage("has changed since it was first read")
        return seen(data, **more)

    monkeypatch.setattr(look_at, "decode", changed)
    reasons = {each["name"]: each["reason"] for each in look(config, capsys=capsys)["unusable"]}
    assert reasons["p2.png"] == "has changed since it was first read"


def test_of_many_pictures_that_are_alike_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: Counter[str] = Counter()

    def count(name: str, dimensions: int) -> None:
        honest = getattr(np, name)

        def counting(array: np.ndarray) -> np.ndarray:
            compared[name] += len(array) * (array.ndim == dimensions)
            return honest(array)

        monkeypatch.setattr(np, name, counting)

    def groups(colours: np.ndarray, bits: int) -> list[list[int]]:
        compared.clear()
        return near_duplicates([ImageHash(bits + row % 3, each.tobytes()) for row, each in enumerate(colours)])

    count("bitwise_count", 1)
    count("abs", 3)  # whole thumbnails
    rng, many = np.random.default_rng(0), 1000
    base = rng.integers(20, 230, 192, dtype=np.uint8)
    assert groups(np.tile(base, (many, 1)), 2**40) == [list(range(many))] and compared["bitwise_count"] < 10
    near = (base + rng.integers(-3, 4, (many, 192))).astype(np.uint8)
    assert groups(near, 2**40) == [list(range(many))] and many - 1 <= compared["bitwise_count"] < 2 * many
    flat = np.repeat(rng.integers(0, 256, (many, 1, 3), dtype=np.uint8), 64, axis=1).reshape(many, -1)
    groups(flat, 0)  # the same bits, and colours that differ
    assert compared["abs"] < many < compared["bitwise_count"]


def test_groups_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(1)
    means = rng.integers(0, 256, (12, 1, 3))
    hashes = []
    for number, bits in enumerate(rng.choice([0, 0b1111, 0b11111111, 2**50 - 1], 120)):
        pixels = (means[number % 12] + rng.integers(-6, 7, (64, 3))).clip(0, 255).astype(np.uint8)
        hashes.append(ImageHash(int(bits), pixels.tobytes()))
    colours = np.array([np.frombuffer(each.colours, dtype=np.uint8) for each in hashes]).astype(int)
    alike = np.abs(colours[:, None] - colours[None]).mean(axis=-1) <= COLOURS
    alike &= np.array([[(one.bits ^ other.bits).bit_count() <= BITS for other in hashes] for one in hashes])
    for _ in range(8):  # by way of a third
        alike = (alike.astype(int) @ alike.astype(int)) > 0
    wanted = {tuple(np.flatnonzero(row).tolist()) for row in alike if row.sum() > 1}
    assert {tuple(group) for group in near_duplicates(hashes)} == wanted and len(wanted) > 5


def test_beyond_the_limit_only_equal_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "COMPARED", 2)
    hashes = [ImageHash(number, bytes(192)) for number in (0, 2**30, 1, 1, 3)]
    assert near_duplicates(hashes) == [[0, 1], [2, 3]]  # 2 and 3 are equal; 4 is like them


# The sizes of the model that would be trained

SD15, SDXL = "stable-diffusion-v1-5/stable-diffusion-v1-5", "stabilityai/stable-diffusion-xl-base-1.0"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two photos of a dog on a machine without a card."""
    monkeypatch.setattr(fit_card, "card_here", lambda: (None, "no NVIDIA driver was found"))
    folder = tmp_path / "dog"
    folder.mkdir()
    for number, size in enumerate([(1282, 1282), (1600, 1000)]):
        Image.new("RGB", size, (number, 90, 90)).save(folder / f"{number}.png", compress_level=1)
    return folder


@pytest.mark.parametrize(
    ("words", "buckets", "note"),
    [
        ([], ["1024x1024", "1296x800"], "sizes are for Stable Diffusion 3 Medium at 1024 px; --model names another"),
        (["--device", "cpu"], ["1024x1024", "1296x800"], "Diffusion 3 Medium at 1024 px; --model names another"),
        (["--device", "l4"], ["1024x1024", "1296x800"], "Medium at 1024 px, on L4; --model names another"),
        (["--device", "12GiB", "--model", "demo:tiny-sd3"], ["64x64", "80x48"], "demo:tiny-sd3 at 64 px, on 12 GiB"),
        (["--model", SD15], ["512x512", "640x384"], f"sizes are for {SD15} at 512 px"),
        (["--model", SDXL], ["1024x1024", "1280x768"], f"sizes are for {SDXL} at 1024 px"),
    ],
)
def test_sizes_are_those_of_the_model_that_would_be_trained(
    words: list[str], buckets: list[str], note: str, photos: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["data", str(photos), "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted("x".join(map(str, row["size"])) for row in found["buckets"]) == buckets
    assert found["notes"][0].endswith(note)


def test_a_configuration_beside_the_folder_keeps_its_sizes_unless_a_model_is_named(photos: Path) -> None:
    data = {"path": str(photos), "prompt": "x", "resolution": 256}
    config = {"name": "dog", "data": data, "train": {"batch_size": 2}}
    photos.with_name("dog.json").write_text(json.dumps(config))
    config, about = folder_config(photos)
    assert (config.data.resolution, about) == (256, "")
    config, about = folder_config(photos, model=SD15)
    assert (config.data.resolution, about) == (512, f"sizes are for {SD15} at 512 px")


def test_a_configuration_is_shown_for_another_model_with_its_own_data(
    photos: Path, capsys: pytest.CaptureFixture
) -> None:
    data = {"path": str(photos), "prompt": "x", "resolution": 512}
    config = {"name": "dog", "data": data, "adapter": {"method": "lora", "targets": ["attn.add_k_proj"]}}
    file = photos.with_name("other.json")
    file.write_text(json.dumps(config))
    assert main(["data", str(file), "--json", "--model", SDXL, "--device", "L4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(row["size"] for row in found["buckets"]) == [[512, 512], [640, 384]]  # multiples of 64, not of 16
    assert found["notes"][0] == "sizes are the configuration's own, on L4 as on any card"


def test_a_folder_whose_name_leaves_no_room_for_a_suffix_is_shown(photos: Path) -> None:
    folder = photos.rename(photos.with_name("n" * 252))
    assert folder_config(folder)[0].data.resolution == 1024


def test_a_card_that_is_unknown_is_refused(photos: Path, capsys: pytest.CaptureFixture) -> None:
    for place in (str(photos), "demo"):
        assert main(["data", place, "--device", "L44"]) == 2
        assert "--device: unknown card 'L44'. Did you mean L4" in capsys.readouterr().err


def test_the_page_shows_the_same_sizes_without_reading_the_pictures(photos: Path, tmp_path: Path) -> None:
    config, about = page_config(photos)
    assert (config.data.resolution, config.model.pretrained) == (
        1024,
        "stabilityai/stable-diffusion-3-medium-diffusers",
    )
    assert about == "sizes are for Stable Diffusion 3 Medium at 1024 px; --model names another"
    config, about = page_config(photos, SD15)
    assert (config.data.resolution, config.model.architecture.multiple, about) == (
        512,
        64,
        f"sizes are for {SD15} at 512 px",
    )
    config, about = page_config(resolve(SUBJECT, tmp_path))  # pictures of 64 px that come with simpletune
    assert (config.data.resolution, about) == (64, "sizes are for demo:tiny-sd3 at 64 px")
    assert page_config(tmp_path / "t.parquet")[0].data.source == "table"
