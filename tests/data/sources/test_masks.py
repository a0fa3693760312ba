"""Masks: found and refused, cropped and mirrored as their pictures, cached, and weighted in the loss."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from simpletune.config.load import validate
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import Crop, make_samples
from simpletune.data.sources.augmentation import Augmentation
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.image_files import crop_to_bucket, decode, decode_mask
from simpletune.data.sources.masks import latent_mask
from simpletune.data.sources.source import Mask, SourceImage, UnusableImage
from simpletune.data.sources.table import Table
from simpletune.data.storage import cache as storage
from simpletune.data.storage.cache import crop_key
from simpletune.estimate.simulate.simulate import simulate
from simpletune.models.objectives.flow import Flow, FlowProcess
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_text import SD3Text
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs.folder import read_metrics
from simpletune.stages.latent_cache import LatentCache
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train

CPU = torch.device("cpu")


class Autoencoder:
    """A model whose latents are the means of squares of 8 x 8 pixels."""

    reads_framing = False
    downsampling = 8

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

    text = SD3Text(SD3())

    def encode(self, vae: None, pixels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(pixels, 8).mean(1, keepdim=True).repeat(1, 16, 1, 1)


def latents_in(folder: Path) -> LatentCache:
    return LatentCache(Autoencoder(), torch.float32, folder)  # type: ignore[arg-type]


def encoded(image: Image.Image, kind: str = "PNG", **more: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **more)
    return buffer.getvalue()


def blob(width: int, height: int) -> np.ndarray:
    """A mask without symmetry: a disc left of the middle and a bar at the top right, uint8 [height, width]."""
    y, x = (np.mgrid[:height, :width] + 0.5) / min(width, height)
    disc = (x - 0.4) ** 2 + (y - 0.6) ** 2 < 0.06
    return np.where(disc | ((x > 0.7) & (y < 0.2)), 255, 0).astype(np.uint8)


def image_of(mask: np.ndarray, alpha: bool = False, mask_bytes: bytes | None = None) -> SourceImage:
    """A picture whose red channel is its own mask, so that both can be compared after the crop."""
    height, width = mask.shape
    pixels = np.zeros((height, width, 4 if alpha else 3), np.uint8)
    pixels[..., 0] = mask
    if alpha:
        pixels[..., 3] = mask
    data = encoded(Image.fromarray(pixels))
    content = data if alpha else (mask_bytes or encoded(Image.fromarray(mask)))
    found = Mask("alpha" if alpha else "file", hashlib.sha256(content).hexdigest(), lambda: content)
    return SourceImage("a.png", "a", (width, height), hashlib.sha256(data).hexdigest(), lambda: data, mask=found)


@pytest.mark.parametrize(
    ("size", "bucket", "flip", "alpha"),
    [
        ((150, 100), (64, 64), False, False),
        ((150, 100), (64, 64), True, True),
        ((90, 160), (48, 80), True, False),
        ((90, 160), (48, 80), False, True),
        ((64, 64), (64, 64), True, True),
    ],
)
@pytest.mark.parametrize("rotation", [0.0, -12.0])
def test_a_mask_is_cropped_mirrored_and_rotated_as_its_picture_but_not_recoloured(
    size: tuple[int, int], bucket: tuple[int, int], flip: bool, alpha: bool, rotation: float
) -> None:
    turned = Augmentation(rotation=rotation)
    recoloured = replace(turned, brightness=-0.5, hue=90.0)
    for offset in ((0.5, 0.5), (0.0, 0.1), (0.9, 1.0)):
        found = latent_mask(Crop(image_of(blob(*size), alpha), bucket, offset, flip, recoloured), 8)
        assert found.shape == (1, bucket[1] // 8, bucket[0] // 8) and found.dtype == np.uint8
        red = Image.fromarray(np.repeat(blob(*size)[..., None], 3, axis=2))
        pixels = (crop_to_bucket(red, bucket, offset, flip, turned)[0] + 1) / 2  # [h, w]
        places = pixels.reshape(bucket[1] // 8, 8, bucket[0] // 8, 8).mean((1, 3))
        assert np.abs(found[0] / 255 - places).max() <= 0.5 / 255 + 1e-6
        assert found.min() == 0 and found.max() > 200


def test_a_smaller_mask_is_scaled_to_its_picture_and_16_bits_are_read() -> None:
    big = blob(160, 96)

    def read(mask: np.ndarray) -> np.ndarray:
        image = image_of(big, mask_bytes=encoded(Image.fromarray(mask)))
        return latent_mask(Crop(image, (80, 48), (0.5, 0.5), False), 8)

    exact, small = read(big), read(blob(80, 48))
    assert np.abs(small.astype(int) - exact).max() < 60 and small.max() > 200
    assert np.array_equal(read(big.astype(np.uint16) * 257), exact)


@pytest.mark.parametrize("kind", ["alpha", "file"])
def test_a_damaged_mask_and_one_of_too_many_pixels_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("LA", (64, 64), (255, 128)))
    assert decode_mask(data, kind).size == (64, 64)
    with pytest.raises(UnusableImage, match="truncated|damaged"):
        decode_mask(data[:60], kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UnusableImage, match="pixels"):
        decode_mask(data, kind)


@pytest.mark.parametrize("kind", ["alpha", "file"])
def test_orientation_of_a_photo_turns_its_mask(kind: Literal["alpha", "file"]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = blob(64, 96)
    turned = np.rot90(upright)  # orientation 6: turn clockwise to see it upright
    content = encoded(Image.fromarray(np.stack([turned] * (4 if kind == "alpha" else 3), axis=2)), exif=exif)
    mask = Mask(kind, hashlib.sha256(content).hexdigest(), lambda: content)
    image = SourceImage("a", "a", (64, 96), "0", bytes, mask=mask)
    expected = latent_mask(centred(image_of(upright), (64, 96)), 8)
    assert np.array_equal(latent_mask(centred(image, (64, 96)), 8), expected)


def centred(image: SourceImage, bucket: tuple[int, int] = (64, 64)) -> Crop:
    return Crop(image, bucket, (0.5, 0.5), False)


def write(folder: Path, files: dict[str, Image.Image | bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else encoded(content))


def grey(width: int = 64, height: int = 64, level: int = 200) -> Image.Image:
    return Image.new("L", (width, height), level)


RGB = Image.new("RGB", (64, 64), "blue")


def test_masks_beside_pictures_are_found_and_are_no_pictures(tmp_path: Path) -> None:
    write(tmp_path, {"a.jpg": encoded(RGB, "JPEG"), "a-masklabel.png": grey(), "sub/b.png": RGB})
    write(tmp_path, {"sub/b-masklabel.jpg": encoded(grey(32, 32), "JPEG"), "c-masklabel.png": RGB})
    write(tmp_path, {"c-masklabel-masklabel.png": grey()})
    found = Folder(path=str(tmp_path), prompt="x", mask="files").scan(tmp_path)
    assert [each.name for each in found.images] == ["a.jpg", "sub/b.png"] and not found.rejected  # c is a mask's name
    assert all(each.mask is not None and each.mask.kind == "file" for each in found.images)
    assert not found.hints
    plain = Folder(path=str(tmp_path), prompt="x").scan(tmp_path)
    assert [each.name for each in plain.images] == ["a.jpg", "sub/b.png"] and plain.images[0].mask is None
    assert plain.hints[0].startswith("4 masks are left alone") and "data.mask=files" in plain.hints[0]


def test_masks_in_a_folder_of_their_own_have_the_pictures_names(tmp_path: Path) -> None:
    write(tmp_path, {"p/a.jpg": encoded(RGB, "JPEG"), "p/sub/b.png": RGB, "p/masks/a.png": grey()})
    write(tmp_path, {"p/masks/sub/b.PNG": grey(level=100)})
    folder = Folder(path=str(tmp_path / "p"), prompt="x", mask="files", mask_path=str(tmp_path / "p" / "masks"))
    found = folder.scan(tmp_path / "p")
    assert [each.name for each in found.images] == ["a.jpg", "sub/b.png"] and not found.rejected
    digests = [hashlib.sha256(encoded(grey(level=level))).hexdigest() for level in (200, 100)]
    assert [each.mask and each.mask.digest for each in found.images] == digests


@pytest.mark.parametrize(
    ("files", "mask", "reason"),
    [
        ({}, "files", "has no mask: a-masklabel.png is missing"),
        ({"a-masklabel.png": grey(64, 48)}, "files", "is 64x48, another shape than the picture's 64x64"),
        ({"a-masklabel.png": b"no"}, "files", "its mask a-masklabel.png is not a picture"),
        ({}, "alpha", "has no transparency, which data.mask=alpha reads"),
    ],
)
def test_masks_that_cannot_be_used(files: dict, mask: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.png": RGB, **files})
    (rejected,) = Folder.model_validate({"path": "x", "prompt": "x", "mask": mask}).scan(tmp_path).rejected
    assert rejected.name == "a.png" and reason in rejected.reason


def test_a_mask_outside_by_a_link_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"p/a.png": RGB, "secret.png": grey()})
    (tmp_path / "p" / "a-masklabel.png").symlink_to(tmp_path / "secret.png")
    rejected = Folder(path="x", prompt="x", mask="files").scan(tmp_path / "p").rejected
    assert sorted(each.name for each in rejected) == ["a-masklabel.png", "a.png"]
    assert all("outside the data folder" in each.reason for each in rejected)
    assert not Folder(path="x", prompt="x", mask="files", links="anywhere").scan(tmp_path / "p").rejected


def test_masks_that_fail_later_are_left_out_with_their_reason(tmp_path: Path) -> None:
    view = centred(image_of(blob(64, 64), mask_bytes=encoded(grey(level=0))))
    with pytest.raises(UnusableImage, match="black everywhere"):
        latent_mask(view, 8)
    changed = SourceImage("b.png", "b", (64, 64), "1", bytes, mask=Mask("file", "0", lambda: b"x"), source=1)
    _, rejected = latents_in(tmp_path).fill([view, centred(changed)], CPU)
    assert [(each.name, each.source) for each in rejected] == [("a.png", 0), ("b.png", 1)]
    assert "has changed since" in rejected[1].reason


def test_the_cache_keeps_a_mask_by_its_crop_and_content(tmp_path: Path) -> None:
    cache, image = latents_in(tmp_path), image_of(blob(96, 64))
    views = [centred(image), replace(centred(image), flip=True), centred(image, (96, 64))]
    views.append(centred(image_of(blob(96, 64), mask_bytes=encoded(grey(96, 64)))))
    views.append(replace(centred(image), augmentation=Augmentation(brightness=-0.5, rotation=20)))
    assert cache.fill(views, CPU) == (5, []) and len({crop_key(view) for view in views}) == 5
    assert cache.cache.lacking(map(crop_key, views)) == []
    for view in views:
        z_0, mask, framing, inpainting = cache.load(view)
        assert framing is None and inpainting is None
        torch.testing.assert_close(mask, torch.from_numpy(latent_mask(view, 8)).float() / 255, rtol=0, atol=0)
        pixels = crop_to_bucket(decode(view.image.read_same()), view.bucket, view.offset, view.flip, view.augmentation)
        assert torch.equal(z_0, Autoencoder().encode(None, torch.from_numpy(pixels)[None])[0])


def test_one_read_brings_latents_and_mask_and_a_changed_mask_is_another_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = image_of(blob(64, 64))

    def masked(level: int) -> Crop:
        mask = image_of(blob(64, 64), mask_bytes=encoded(grey(level=level))).mask
        return centred(replace(image, mask=mask))

    bare, first, second, third = centred(replace(image, mask=None)), masked(255), masked(100), masked(50)
    cache, opened = latents_in(tmp_path), list[Path]()
    assert cache.fill([first], CPU) == (1, [])
    with monkeypatch.context() as patch:
        patch.setattr(
            storage, "open", lambda file, *how, **more: opened.append(file) or open(file, *how, **more), False
        )
        assert cache.load(first)[1].unique().tolist() == [1.0]
    assert len(opened) == 1
    with pytest.raises(FileNotFoundError):
        cache.load(second)
    assert cache.fill([bare, second], CPU) == (2, [])
    assert cache.load(second)[1].unique().tolist() == pytest.approx([100 / 255])
    assert cache.load(bare)[1].tolist() == [[[1.0]]] and cache.load(first)[1].unique().tolist() == [1.0]
    # Latents without a mask are not encoded again for one.
    monkeypatch.setattr(Autoencoder, "encode", lambda *rest: pytest.fail("it encodes"))
    assert cache.fill([third], CPU) == (1, [])
    assert torch.equal(cache.load(third)[0], cache.load(first)[0])
    assert cache.load(third)[1].unique().tolist() == pytest.approx([50 / 255])


class Recorded:
    """A prepared run's parts that batches use, with constant prompts."""

    remote = ()

    def __init__(self, plan: Plan, latents: LatentCache):
        self.plan, self.latents, self.text = plan, latents, self

    def inputs(self, prompts: object) -> None:
        """Nothing trains on the text side."""

    def places(self, prompt: str) -> list[tuple[object, str]]:
        return []

    def load(self, prompt: str) -> Conditioning:
        return Conditioning(torch.zeros(2, 3), pooled=torch.zeros(4))


def batches_of(tmp_path: Path, images: list[SourceImage], **fields: object) -> BatchLoader:
    folder = Folder.model_validate({"path": "x", "resolution": 64, **fields})
    plan = Plan(make_samples(images, folder.members), folder, Flow(), 0, GlobalBatch(4))
    latents = latents_in(tmp_path)
    assert latents.fill(plan.views(), CPU)[1] == []
    return BatchLoader(Recorded(plan, latents), 0, CPU)  # type: ignore[arg-type]


def test_batches_carry_the_weights_of_places_samples_and_fillers(tmp_path: Path) -> None:
    with_mask, without = image_of(blob(64, 64)), replace(image_of(blob(64, 64).T), name="z.png", mask=None)
    batches = batches_of(tmp_path, [with_mask, without], unmasked_weight=0.25, weight=2.0)
    (batch,) = batches.step(0)
    assert batch.fillers == 2 and batch.weight is not None and batch.weight.shape == (4, 1, 8, 8)
    mask = torch.from_numpy(latent_mask(centred(with_mask), 8)).float() / 255  # [1, 8, 8]
    expected = {"a.png": 2 * (0.25 + 0.75 * mask), "z.png": torch.full((1, 8, 8), 2.0)}
    for name, weight in zip(batch.names, batch.weight, strict=True):
        torch.testing.assert_close(weight, expected[name])
    evaluated = batches.load(batches.plan.evaluation(1))
    torch.testing.assert_close(evaluated.weight, (expected["a.png"] / 2)[None])
    assert batches_of(tmp_path, [without]).step(0)[0].weight is None
    (plain,) = batches_of(tmp_path, [without], weight=0.5).step(0)
    assert plain.weight is not None and plain.weight.shape == (4, 1, 1, 1) and (plain.weight == 0.5).all()


def test_the_loss_ignores_what_a_mask_of_weight_0_covers(tmp_path: Path) -> None:
    (batch,) = batches_of(tmp_path, [image_of(blob(64, 64))], unmasked_weight=0.0).step(0)
    prediction, target = torch.randn(4, 16, 8, 8, requires_grad=True), torch.randn(4, 16, 8, 8)
    FlowProcess().loss(prediction, target, batch.level, batch.weight).backward()
    outside = batch.weight == 0
    assert prediction.grad is not None and outside.any()
    assert (prediction.grad[outside.expand(-1, 16, -1, -1)] == 0).all()
    assert (prediction.grad[~outside.expand(-1, 16, -1, -1)] != 0).all()


def test_a_mask_s_level_multiplies_a_run_s_loss_and_a_changed_mask_is_a_change_of_the_data(
    tiny_config: dict, tiny_images: Path, tmp_path: Path
) -> None:
    losses, data = {}, {}
    for level in (None, 255, 51):
        folder = Path(shutil.copytree(tiny_images, tmp_path / f"{level}"))
        if level is not None:
            write(folder, {f"{file.stem}-masklabel.png": grey(32, 32, level) for file in tiny_images.glob("*.png")})
        mask = {} if level is None else {"mask": "files", "unmasked_weight": 0.0}
        data[level] = copy.deepcopy(tiny_config) | {"data": {"path": str(folder), "resolution": 32, **mask}}
        data[level] |= {"name": f"m{level}", "train": {"steps": 1}}
        run = train(validate(data[level], "test"))
        losses[level] = read_metrics(run)[0]["loss"]
    assert losses[255] == pytest.approx(losses[None], rel=1e-6)
    assert losses[51] == pytest.approx(losses[None] * 51 / 255, rel=1e-6)
    assert all(row["mask"] for row in json.loads((run / "data.json").read_text())["samples"])
    write(tmp_path / "51", {"000-masklabel.png": grey(32, 32, 100)})
    with pytest.raises(UserError, match="the data has changed since the checkpoint:\n.*: changed mask"):
        train(validate(data[51] | {"train": {"steps": 2}}, "test"), "latest")


def test_a_table_takes_masks_from_alpha(tmp_path: Path) -> None:
    images = [encoded(Image.fromarray(np.stack([blob(64, 64)] * 4, axis=2))), encoded(RGB)]
    captions = [["a", "b"], ["c"]]
    pq.write_table(pa.table({"image": images, "text": captions}), tmp_path / "t.parquet")
    found = Table(path=str(tmp_path / "t.parquet"), mask="alpha").scan(tmp_path / "t.parquet")
    assert [(each.captions, each.mask and each.mask.kind) for each in found.images] == [(("a", "b"), "alpha")]
    assert "has no transparency" in found.rejected[0].reason
    (image,) = found.images
    assert decode(image.read_same()).size == (64, 64)
    assert np.array_equal(latent_mask(centred(image), 8), latent_mask(centred(image_of(blob(64, 64))), 8))


def test_the_options_of_masks_are_checked(tiny_config: dict, tmp_path: Path) -> None:
    for mask, words in (({"mask_path": "x"}, "is not read"), ({"mask": "files", "mask_path": "x"}, "is not a folder")):
        with pytest.raises(ConfigError, match=f"data.mask_path: x {words}"):
            validate(tiny_config | {"data": {**tiny_config["data"], **mask}}, "test")


def test_the_simulated_step_counts_the_weights_of_places(tiny_config: dict) -> None:
    tiny_config["train"] |= {"batch_size": 4}
    plain = simulate(validate(tiny_config, "test")).peak.bytes
    tiny_config["data"] |= {"mask": "alpha"}
    assert simulate(validate(tiny_config, "test")).peak.bytes > plain
