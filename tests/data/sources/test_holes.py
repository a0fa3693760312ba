"""Holes: drawn with the plan, cached beside their pictures' own latents, read with them, and weighted in the loss."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import make_plan, some_images
from test_masks import Autoencoder, Recorded, blob, encoded, grey, image_of, latents_in

from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import Crop, make_samples
from simpletune.data.sources.augmentation import Augmentation
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.holes import draw_hole, hole_pixels, latent_hole
from simpletune.data.sources.image_files import crop_to_bucket, decode
from simpletune.data.sources.multi_source import MultiSource, source_notes, source_rules
from simpletune.data.sources.source import Hole, SourceImage, UnusableImage
from simpletune.data.storage.cache import crop_key
from simpletune.models.objectives.flow import Flow
from simpletune.stages.step.batch_loader import BatchLoader

CPU = torch.device("cpu")
RANDOM = ("rectangles", "strokes")


def plan_of(images: list[SourceImage], batch_size: int = 4, held_out: int = 0, **fields: object) -> Plan:
    folder = Folder.model_validate({"path": "x", "resolution": 64, **fields})
    samples = make_samples(images, folder.members)
    kept = make_samples(images, folder.members, 1)[:held_out]
    return Plan(samples, folder, Flow(), 0, GlobalBatch(batch_size), kept, inpaints=True)


def filled(folder: Path, plan: Plan) -> BatchLoader:
    latents = latents_in(folder)
    assert latents.fill(plan.views(), CPU)[1] == []
    return BatchLoader(Recorded(plan, latents), 0, CPU)  # type: ignore[arg-type]


def crop(image: SourceImage, hole: Hole | None, bucket: tuple[int, int] = (64, 64), **more: object) -> Crop:
    return replace(Crop(image, bucket, (0.5, 0.5), False, hole=hole), **more)


def test_holes_follow_from_seed_picture_and_variant_in_the_shares_of_the_published_models() -> None:
    source, digests = Folder(path="x"), [image.digest for image in some_images([(64, 64)] * 400)]
    holes = [draw_hole(source, 7, digest, variant) for digest in digests for variant in range(4)]
    kinds = Counter(hole.kind for hole in holes)
    assert kinds["whole"] == pytest.approx(400, abs=70)  # 4 standard deviations of 1600 draws
    assert all(kinds[kind] == pytest.approx(600, abs=78) for kind in RANDOM) and kinds.total() == 1600
    assert len({hole.draw for hole in holes if hole.kind != "whole"}) == 1600 - kinds["whole"]
    assert holes[5] == draw_hole(source, 7, digests[1], 1) != draw_hole(source, 8, digests[1], 1)
    assert draw_hole(Folder(path="x", mask="files", inpainting_mask="own"), 7, digests[0], 1) == Hole("own")


@pytest.mark.parametrize("place", [8, 16])
@pytest.mark.parametrize("kind", RANDOM)
def test_drawn_holes_have_the_sizes_of_lama_s_large_masks(kind: str, place: int) -> None:
    (image,) = some_images([(64, 64)])
    shares: dict[tuple[int, int], float] = {}
    for bucket in ((512, 512), (1024, 256), (64, 64)):
        found = [hole_pixels(crop(image, Hole(kind, draw), bucket), place) for draw in range(60)]  # type: ignore[arg-type]
        assert all(each.shape == bucket[::-1] and latent_hole(each, place).any() and not each.all() for each in found)
        assert len({each.tobytes() for each in found}) == len(found)
        shares[bucket] = float(np.mean(found))
    most = 0.5 if place == 8 else 0.55  # strokes are at least as wide as a place, a quarter of 64 pixels
    assert all(0.1 < share < most for share in shares.values()), shares
    again = hole_pixels(crop(image, Hole(kind, 3), (64, 64), flip=True), place)  # type: ignore[arg-type]
    assert np.array_equal(again, found[3])


def test_strokes_between_latents_are_drawn_again() -> None:
    """With these seeds the first strokes lie beside a border, between the pixels that latents take."""
    (image,) = some_images([(64, 64)])
    for bucket, seed in (((64, 64), 138), ((64, 64), 990), ((48, 80), 466)):
        assert latent_hole(hole_pixels(crop(image, Hole("strokes", seed), bucket), 8), 8).any()


def test_a_plan_without_inpainting_draws_no_hole_and_keeps_its_keys() -> None:
    plain, other = make_plan(crop="random", variants=3), plan_of(some_images(), crop="random", variants=3)
    assert all(view.hole is None and view.cached == (view,) for view in plain.views())
    assert "inpainting_mask" not in plain.manifest()[0]
    assert {row["inpainting_mask"] for row in other.manifest()} == {"random"}
    with_holes = [other.view(sample, v) for sample in other.samples for v in range(3)]
    without = [
        plan_of(some_images(), crop="random", variants=3).view(sample, v).without_hole
        for sample in other.samples
        for v in range(3)
    ]
    assert [view.without_hole for view in with_holes] == without
    with_batch = other.with_batch(GlobalBatch(2))
    assert with_batch.views() == other.views()  # divided by processes and trials


def test_keys_tell_holes_apart_and_share_what_is_equal() -> None:
    first, second = some_images([(100, 100)] * 2)
    masked = image_of(blob(64, 64))
    bare = crop(first, None)
    holes = [Hole("whole"), Hole("rectangles", 1), Hole("rectangles", 2), Hole("strokes", 1)]
    keys = [crop_key(bare), *(crop_key(crop(first, hole)) for hole in holes)]
    keys += [crop_key(crop(second, holes[1])), crop_key(crop(first, holes[1], flip=True))]
    keys += [crop_key(crop(masked, Hole("own"))), crop_key(crop(masked, None)), crop_key(crop(masked, holes[1]))]
    assert len(set(keys)) == len(keys)
    assert crop_key(crop(second, holes[0])) == crop_key(crop(first, holes[0]))  # nothing of the picture is left
    assert crop_key(crop(first, holes[0], (64, 128))) != crop_key(crop(first, holes[0]))
    assert [crop_key(each) for each in crop(first, holes[1]).cached] == [crop_key(bare), keys[2]]
    # A mask that is the hole does not weigh the loss: the picture's own latents are those without a mask.
    assert crop_key(crop(masked, Hole("own")).without_hole) == crop_key(crop(replace(masked, mask=None), None))
    assert crop_key(crop(masked, holes[1])) == crop_key(crop(replace(masked, mask=None), holes[1]))


def test_the_cache_encodes_each_picture_once_for_all_its_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [replace(image_of(blob(96, 64)), name=name, mask=None) for name in ("a.png", "b.png")]
    images[1] = replace(images[1], digest="other", by_row=True)
    holes = [Hole("rectangles", 1), Hole("strokes", 2), Hole("whole")]
    views = [crop(image, hole) for image in images for hole in holes]
    views.append(crop(images[0], Hole("strokes", 2), augmentation=Augmentation(brightness=0.3, rotation=9)))
    encodings: list[torch.Tensor] = []
    encode = Autoencoder.encode
    monkeypatch.setattr(
        Autoencoder, "encode", lambda self, vae, pixels: encodings.append(pixels) or encode(self, vae, pixels)
    )
    cache = latents_in(tmp_path)
    assert cache.fill(views, CPU) == (9, []) == (len(encodings), [])  # 3 pictures, 5 holes in them, 1 whole
    assert cache.fill(views, CPU) == (0, [])
    for view in views:
        pixels = crop_to_bucket(decode(view.image.read_same()), view.bucket, augmentation=view.augmentation)
        # diffusers' prepare_mask_and_masked_image, and its interpolation of the mask
        pil, mask = torch.from_numpy(pixels)[None], torch.from_numpy(hole_pixels(view, 8)).float()[None, None]
        masked, small = pil * (mask < 0.5), F.interpolate(mask, size=(8, 8))
        found = cache.load(view)
        assert torch.equal(found.z_0, encode(Autoencoder(), None, pil)[0])
        assert found.inpainting is not None
        assert torch.equal(found.inpainting, torch.cat([small[0], encode(Autoencoder(), None, masked)[0]]))
    assert cache.load(views[0].without_hole).inpainting is None


def test_a_picture_s_own_mask_is_cropped_with_it_and_is_the_hole(tmp_path: Path) -> None:
    plan = plan_of([image_of(blob(150, 100))], mask="files", inpainting_mask="own", flip=True, variants=8)
    views = plan.views()
    assert len(views) == 2 and all(view.hole == Hole("own") for view in views)
    batches = filled(tmp_path, plan)
    for view in views:
        red = crop_to_bucket(decode(view.image.read_same()), view.bucket, flip=view.flip)[0]  # the mask itself
        hole = hole_pixels(view, 8)
        assert np.array_equal(hole, red >= 0) and hole.any() and not hole.all()
    (batch,) = batches.step(0)
    assert batch.weight is None or (batch.weight[:1] == 1).all()  # but for fillers
    unusable = image_of(blob(64, 64), mask_bytes=encoded(grey(level=0)))
    with pytest.raises(UnusableImage, match="black everywhere"):
        hole_pixels(crop(unusable, Hole("own")), 8)
    _, rejected = latents_in(tmp_path / "other").fill([crop(unusable, Hole("own"))], CPU)
    assert [each.name for each in rejected] == ["a.png"] and "black everywhere" in rejected[0].reason
    thin = grey(level=0)
    thin.paste(255, (1, 0, 7, 64))  # between the pixels that the latents' places read
    for pixels in (grey(level=120), thin):
        unusable = image_of(blob(64, 64), mask_bytes=encoded(pixels))
        _, rejected = latents_in(tmp_path / "third").fill([crop(unusable, Hole("own"))], CPU)
        assert "its mask leaves no hole in a crop" in rejected[0].reason


def test_batches_carry_holes_and_the_loss_counts_everywhere_or_inside(tmp_path: Path) -> None:
    images = [replace(image_of(blob(64, 64)), name="a.png", mask=None), replace(image_of(blob(64, 64).T))]
    images = [images[0], replace(images[1], name="z.png")]
    fields = {"unmasked_weight": 0.25, "weight": 2.0, "variants": 4, "mask": "files"}
    for where in ("everywhere", "inside"):
        batches = filled(tmp_path, plan_of(images, **fields, inpainting_loss=where))
        for step in range(4):
            draws, (batch,) = batches.plan.micro_batch(step, 0), batches.step(step)
            assert batch.inpainting is not None and batch.inpainting.shape == (4, 17, 8, 8)
            assert batch.weight is not None
            for row, draw in enumerate(draws[:2]):
                cached = batches.latents.load(draw.view)
                assert torch.equal(batch.inpainting[row], cached.inpainting)
                inside = cached.inpainting[:1] if where == "inside" else 1.0
                torch.testing.assert_close(
                    batch.weight[row], (2 * torch.lerp(torch.tensor(0.25), torch.ones(()), cached.mask) * inside)
                    .expand(1, 8, 8)
                )  # fmt: skip
    draws = batches.plan.micro_batch(0, 0)
    cached_keys = {crop_key(each) for draw in draws for each in draw.view.cached}
    assert {key for each, key in batches.needs(0) if each is batches.latents.cache} == cached_keys
    evaluated = batches.load(batches.plan.evaluation(1))
    view = batches.plan.evaluation(1)[0].view
    assert view == batches.plan.view(batches.plan.samples[0], 0)
    assert torch.equal(evaluated.inpainting[0], batches.latents.load(view).inpainting)


def test_options_of_holes_are_checked_and_explained() -> None:
    own = Folder(path="x", inpainting_mask="own")
    (problem,) = source_rules(own)
    assert str(problem) == "data.inpainting_mask: own, but the pictures have no masks. Set data.mask, or use random"
    several = MultiSource(sources=[Folder(path="y"), own])
    assert [each.path for each in source_rules(several)] == ["data.sources.1.inpainting_mask"]
    assert not list(source_rules(Folder(path="x", mask="alpha", inpainting_mask="own")))
    (problem,) = source_rules(Folder(path="x", mask="alpha", inpainting_mask="own", unmasked_weight=0.3))
    assert str(problem).startswith("data.unmasked_weight: 0.3, but with inpainting_mask own the mask is the hole")
    (note,) = source_notes(Folder(path="x"), inpaints=True)
    assert note.startswith("data.variants is 1, so each picture keeps one hole")
    assert not list(source_notes(Folder(path="x", regularization=True), inpaints=True)), "each has few uses"
    quiet = [Folder(path="x", variants=8), Folder(path="x", mask="alpha", inpainting_mask="own")]
    assert not [note for source in quiet for note in source_notes(source, inpaints=True)]
    assert [each.weighs_places for each in (Folder(path="x"), Folder(path="x", inpainting_loss="inside"), *quiet)] == [
        False, True, False, False,
    ]  # fmt: skip
    assert Folder(path="x", mask="files").weighs_places
