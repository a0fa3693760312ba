"""The prepare stages: each prompt and picture once, and never a picture with what belongs to another."""

from __future__ import annotations

import copy
import gc
import hashlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, ModelMixin
from parts_read_once import READ
from PIL import Image
from transformers import PreTrainedModel

from benchmarks.tiny_models import vocabulary
from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.data.sources.image_files import crop_to_bucket, decode
from simpletune.data.storage import cache as storage
from simpletune.data.storage.cache import FileCache, crop_key
from simpletune.models.shared.autoencoder import Autoencoder
from simpletune.models.text import prompts
from simpletune.models.text.prompts import Prompts
from simpletune.stages.encode import prepare
from simpletune.stages.prepared import PreparedData
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.text_cache import TextCache
from simpletune.system.options import UserError
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train

CLIP = vocabulary.CLIP_LENGTH
CPU = torch.device("cpu")


class Calls:
    """What went through the encoders since the last ``clear``."""

    def __init__(self) -> None:
        self.prompts: list[tuple[str, str]] = []
        self.images = 0
        self.autoencoders = 0

    def clear(self) -> None:
        self.__init__()

    def of(self, encoder: str) -> list[str]:
        return [prompt for name, prompt in self.prompts if name == encoder]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Counts what the real encoders do."""
    found, encode, encode_images, load_vae = Calls(), prompts.Prompts.encode, Autoencoder.encode, Autoencoder.load

    def count_prompts(
        self: prompts.Prompts, encoder: prompts.TextEncoder, prompts: list[str], *rest: Any, **more: Any
    ) -> Iterator:
        found.prompts += [(encoder.name, prompt) for prompt in prompts]
        return encode(self, encoder, prompts, *rest, **more)

    def count_images(self: Autoencoder, vae: object, pixels: torch.Tensor) -> torch.Tensor:
        found.images += len(pixels)
        return encode_images(self, vae, pixels)

    def count_autoencoders(self: Autoencoder, *rest: object) -> object:
        found.autoencoders += 1
        return load_vae(self, *rest)

    monkeypatch.setattr(Autoencoder, "load", count_autoencoders)
    monkeypatch.setattr(prompts.Prompts, "encode", count_prompts)
    monkeypatch.setattr(Autoencoder, "encode", count_images)
    return found


@pytest.fixture
def data(tiny_config: dict, tmp_path: Path) -> dict:
    """A run on three pictures of its own (a square, an upright, a lying one) with a cache of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number, (name, size) in enumerate({"a": (32, 32), "b": (16, 64), "c": (64, 16)}.items()):
        write_image(folder / f"{name}.png", number, size)
        (folder / f"{name}.txt").write_text(f"a {('red', 'green', 'blue')[number]} circle")
    config = copy.deepcopy(tiny_config)
    config["data"]["path"], config["output"]["cache"] = str(folder), str(tmp_path / "cache")
    config["model"]["t5"] = False  # two small encoders are enough for most tests
    return config


def write_image(file: Path, seed: int, size: tuple[int, int] = (32, 32)) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


def run(data: dict) -> PreparedData:
    return prepare(resolve_folders(validate(data, "test")), Accelerator(cpu=True), StageTimer(False))


def files(data: dict) -> list[Path]:
    return sorted(
        file for file in Path(data["output"]["cache"]).rglob("*") if file.is_file() and ".locks" not in file.parts
    )


def assert_as_encoded_afresh(data: dict, prepared: PreparedData) -> None:
    """Every sample's tensors are those of its own file and its own caption, encoded here without the cache."""
    config, folder = resolve_folders(validate(data, "test")), Path(data["data"]["path"])
    vae, prompts = config.model.autoencoder.load(CPU, torch.float32), Prompts(config.model.text, torch.float32)
    captions = [sample.image.caption for sample in prepared.plan.samples]
    parts = {encoder.name: list(prompts.encode(encoder, captions, CPU)) for encoder in prompts.encoders}
    assert captions == [file.read_text() for file in sorted(folder.glob("*.txt"))]
    for index, sample in enumerate(prepared.plan.samples):
        view = prepared.plan.view(sample, 0)
        pixels = torch.from_numpy(crop_to_bucket(decode((folder / sample.image.name).read_bytes()), sample.bucket))
        z_0 = config.model.autoencoder.encode(vae, pixels[None])[0]
        torch.testing.assert_close(prepared.latents.load(view)[0], z_0)
        expected = prompts.assemble({name: each[index] for name, each in parts.items()})
        torch.testing.assert_close(prepared.text.load(captions[index]).tensors(), expected.tensors())


def test_each_prompt_and_picture_is_encoded_once(data: dict, calls: Calls) -> None:
    data["model"]["t5"] = True
    data["data"] |= {"repeats": 3, "caption_dropout": 0.5}
    write_image(Path(data["data"]["path"]) / "d.png", 9)
    (Path(data["data"]["path"]) / "d.txt").write_text("a red circle")  # as a's
    (Path(data["data"]["path"]) / "copy.png").write_bytes((Path(data["data"]["path"]) / "a.png").read_bytes())
    (Path(data["data"]["path"]) / "copy.txt").write_text("a red circle")
    prepared = run(data)
    for encoder in ("clip_l", "clip_g", "t5"):
        assert sorted(calls.of(encoder)) == ["", "a blue circle", "a green circle", "a red circle"]
    assert len({sample.image.name for sample in prepared.plan.samples}) == 5
    assert calls.images == 4, "the same picture under two names is one"
    calls.clear()
    assert run(data).plan.manifest() == prepared.plan.manifest()
    assert (calls.prompts, calls.images, calls.autoencoders) == ([], 0, 0)
    data["data"]["repeats"] = 1
    assert_as_encoded_afresh(data, run(data))


def test_a_changed_caption_or_picture_encodes_only_itself(data: dict, calls: Calls) -> None:
    run(data)
    calls.clear()
    (Path(data["data"]["path"]) / "b.txt").write_text("a yellow square")
    prepared = run(data)
    assert calls.prompts == [("clip_l", "a yellow square"), ("clip_g", "a yellow square")]
    assert calls.images == 0
    assert_as_encoded_afresh(data, prepared)
    calls.clear()
    write_image(Path(data["data"]["path"]) / "b.png", 77, (16, 64))
    prepared = run(data)
    assert (calls.prompts, calls.images) == ([], 1)
    assert_as_encoded_afresh(data, prepared)


def test_swapped_captions_and_renamed_pictures_never_pair_wrongly(data: dict, calls: Calls) -> None:
    folder = Path(data["data"]["path"])
    before = run(data)
    calls.clear()
    first, second = (folder / "a.txt").read_text(), (folder / "c.txt").read_text()
    (folder / "a.txt").write_text(second)
    (folder / "c.txt").write_text(first)
    (folder / "b.png").rename(folder / "z.png")
    (folder / "c.png").rename(folder / "b.png")
    (folder / "z.png").rename(folder / "c.png")
    after = run(data)
    assert (calls.prompts, calls.images) == ([], 0)
    assert after.plan.manifest() != before.plan.manifest()
    assert_as_encoded_afresh(data, after)


def test_a_picture_changed_after_the_scan_is_refused_not_cached_under_its_old_content(data: dict, monkeypatch) -> None:
    file, fill = Path(data["data"]["path"]) / "b.png", TextCache.fill
    original = hashlib.sha256(file.read_bytes()).hexdigest()
    for harm, said in (
        (lambda: write_image(file, 88, (16, 64)), "b.png: has changed since the folder was scanned"),
        (file.unlink, "1 picture cannot be used:\n  b.png: cannot be read .No such file"),
    ):
        monkeypatch.setattr(TextCache, "fill", lambda *rest, harm=harm: (harm(), fill(*rest))[1])
        with pytest.raises(UserError, match=said):
            run(data)
    monkeypatch.undo()
    write_image(file, 88, (16, 64))
    prepared = run(data)
    assert original not in [sample.image.digest for sample in prepared.plan.samples]
    assert_as_encoded_afresh(data, prepared)


def test_killed_among_the_prompts_it_continues_where_it_was(data: dict, calls: Calls, monkeypatch) -> None:
    save, saved = FileCache.save, []

    def save_four(self: FileCache, key: str, tensors: dict) -> None:
        if len(saved) == 4:
            raise KeyboardInterrupt
        saved.append(key)
        save(self, key, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(FileCache, "save", save_four)
        with pytest.raises(KeyboardInterrupt):
            run(data)
    calls.clear()
    prepared = run(data)
    three_of_clip_l = [f"a {colour} circle" for colour in ("red", "green", "blue")]
    assert saved == [*three_of_clip_l, "a red circle"]  # the last is CLIP-G's
    assert calls.prompts == [("clip_g", "a green circle"), ("clip_g", "a blue circle")]
    assert_as_encoded_afresh(data, prepared)


def test_killed_among_the_pictures_it_continues_where_it_was(data: dict, calls: Calls, monkeypatch) -> None:
    encode_images = Autoencoder.encode

    def second_fails(self: Autoencoder, vae: object, pixels: torch.Tensor) -> torch.Tensor:
        if calls.images == 2:
            raise RuntimeError("out of memory")
        return encode_images(self, vae, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(Autoencoder, "encode", second_fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(data)
    calls.clear()
    prepared = run(data)
    assert (calls.prompts, calls.images) == ([], 1)
    assert_as_encoded_afresh(data, prepared)


def test_killed_while_writing_leaves_no_file_that_counts(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("simpletune.system.atomic.flush_to_disk", die)
        with pytest.raises(KeyboardInterrupt):
            run(data)
    assert files(data) == []
    folder = next((Path(data["output"]["cache"]) / "prompts").iterdir())
    (folder / ".00.safetensors.1.part").write_bytes(b"left by a process that was killed")
    prepared = run(data)
    assert not any(file.suffix == ".part" for file in files(data))
    assert_as_encoded_afresh(data, prepared)


def test_t5_is_encoded_alone_where_it_is_added_or_made_longer(data: dict, calls: Calls) -> None:
    """Without it, its part is zeros; what another combination of encoders has is not encoded again."""
    without = run(data).text.load("a red circle")
    embeds, pooled = without.embeds, without.pooled
    assert embeds.shape == (CLIP + 8, 32)  # t5_length 8, width 32
    assert pooled.shape == (32,)
    assert torch.count_nonzero(embeds[CLIP:]) == 0 < torch.count_nonzero(embeds[:CLIP])
    calls.clear()
    data["model"]["t5"] = True
    found = run(data).text.load("a red circle")
    with_t5, same = found.embeds, found.pooled
    assert {encoder for encoder, _ in calls.prompts} == {"t5"} and len(calls.prompts) == 3
    assert torch.count_nonzero(with_t5[CLIP:]) > 0
    torch.testing.assert_close((with_t5[:CLIP], same), (embeds[:CLIP], pooled))
    calls.clear()
    run(data)
    assert calls.prompts == []
    data["model"]["t5_length"] = 12
    longer = run(data).text.load("a red circle").embeds
    assert {encoder for encoder, _ in calls.prompts} == {"t5"} and longer.shape == (CLIP + 12, 32)


def test_what_changes_the_tensors_makes_other_files(
    data: dict, calls: Calls, tiny_pipeline: Path, tmp_path: Path
) -> None:
    vae = AutoencoderKL.from_pretrained(tiny_pipeline / "vae")  # the same with one weight changed
    next(vae.parameters()).data.view(-1)[0] += 1
    vae.save_pretrained(tmp_path / "vae")
    run(data)
    before = {file: file.read_bytes() for file in files(data)}
    for section, change, prompts_made, images in (
        ("model", {"vae": str(tmp_path / "vae")}, 0, 3),
        ("precision", {"weights": "bf16"}, 6, 3),
        ("data", {"aspect": "square"}, 0, 2),  # a is square already
        ("data", {"crop": "random"}, 0, 3),
        ("data", {"resolution": 48}, 0, 3),
    ):
        calls.clear()
        known = len(files(data))
        run(data | {section: data[section] | change})
        assert (len(calls.prompts), calls.images) == (prompts_made, images), change
        assert len(files(data)) == known + prompts_made // 2 + images, change  # two encoders fill one entry
    assert {file: file.read_bytes() for file in before} == before


def test_encoders_are_loaded_one_at_a_time_and_freed(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one is loaded, none of those before is alive; nor is any when all is done. T5: test_text_layers.py."""
    for module, name in READ.items():
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    data["model"]["t5"] = True
    alive: list[weakref.ref] = []
    at_load: list[int] = []

    def watch(kind: type) -> None:
        load = kind.from_pretrained.__func__

        def load_and_watch(cls: type, *args: object, **options: object) -> torch.nn.Module:
            at_load.append(sum(reference() is not None for reference in alive))
            model = load(cls, *args, **options)
            alive.append(weakref.ref(model))
            return model

        monkeypatch.setattr(kind, "from_pretrained", classmethod(load_and_watch))

    watch(PreTrainedModel)
    watch(ModelMixin)
    prepared = run(data)
    assert at_load == [0, 0, 0]
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    assert len(prepared.plan.samples) == 3


def half_a_jpeg(folder: Path) -> None:
    """Its header is whole, so that it is found out only when it is decoded."""
    write_image(folder / "bad.jpg", 5)
    data = (folder / "bad.jpg").read_bytes()
    (folder / "bad.jpg").write_bytes(data[: len(data) * 2 // 3])
    (folder / "bad.txt").write_text("a broken circle")


def test_a_picture_that_fails_only_when_decoded_is_named_or_left_out(data: dict, capsys) -> None:
    half_a_jpeg(Path(data["data"]["path"]))
    with pytest.raises(UserError, match="1 picture cannot be used:\n  bad.jpg: is damaged .*truncated"):
        run(data)
    data["data"]["on_error"] = "skip"
    prepared = run(data)
    assert [sample.image.name for sample in prepared.plan.samples] == ["a.png", "b.png", "c.png"]
    assert "skipped 1 picture (data.on_error=skip):\n  bad.jpg: is damaged" in capsys.readouterr().out
    assert all(crop_key(view) in prepared.latents.cache for view in prepared.plan.views())


def test_none_left_is_an_error_even_when_skipping(data: dict) -> None:
    folder = Path(data["data"]["path"])
    data["data"]["on_error"] = "skip"
    for name in "abc":
        (folder / f"{name}.png").write_bytes(b"")
    with pytest.raises(UserError, match="data.path: .* contains no usable pictures"):
        run(data)
    for name in "abc":
        (folder / f"{name}.png").unlink()
    half_a_jpeg(folder)
    with pytest.raises(UserError, match="no usable pictures"):
        run(data)


def test_a_cache_file_of_another_key_is_refused(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    cache.save("one", {"x": torch.ones(2)})
    torch.testing.assert_close(cache.load("one"), {"x": torch.ones(2)})
    assert "one" in cache
    assert "two" not in cache
    cache.file("one").rename(cache.file("two"))
    with pytest.raises(ValueError, match="was written for another key"):
        cache.load("two")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        cache.load("one")


def test_validation_prompts_are_prepared_too_and_long_ones_are_told(data: dict, calls: Calls) -> None:
    data["validation"]["prompts"] = [long := "a purple star " * 30]
    data["validation"]["negative_prompt"] = "blurry"
    prepared = run(data)
    assert {long, "blurry"} < set(calls.of("clip_l")) and prepared.requests[0].prompt == long
    assert prepared.text.truncated_prompts([long, "blurry"]) == [long]
    data["validation"]["prompts"] = None
    assert [request.prompt for request in run(data).requests] == ["a red circle"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": {"resolution": 1024}}, "data.resolution: pictures of 1024 x 1024 px are too large"),
        ({"validation": {"width": 1024, "prompts": ["x"]}}, "validation: pictures of 1024 x 32 px are too large"),
    ],
)
def test_pictures_that_the_model_has_no_positions_for_are_refused(tiny_config: dict, change: dict, said: str) -> None:
    config = {**tiny_config, **{key: {**tiny_config.get(key, {}), **value} for key, value in change.items()}}
    config["data"]["max_upscale"] = 64
    with pytest.raises(UserError, match=said):
        train(validate(config, "test"))


def test_a_batch_reads_each_picture_and_each_distinct_prompt_once(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    data["data"]["prompt"] = "a circle"  # the same for all three
    data["data"]["aspect"], data["model"]["t5"] = "square", True
    data["train"] |= {"batch_size": 4}  # one filler
    data["prior"] = {"method": "base_prediction", "prompt": "a thing"}
    prepared = run(data)
    batches = BatchLoader(prepared, 0, CPU, None, validate(data, "test").prior)
    opened: list[Path] = []

    def watched(file: Path, *rest: Any, **more: Any) -> Any:
        opened.append(file)
        return open(file, *rest, **more)

    monkeypatch.setattr(storage, "open", watched, raising=False)
    first, second = batches.fetch(0)
    assert len(opened) == len(set(opened)) == 3 + 2
    assert first.fillers == 1 and torch.equal(first.z_0, second.z_0) and torch.equal(first.noise, second.noise)
    for batch, prompt in ((first, "a circle"), (second, "a thing")):
        own = prepared.text.load(prompt)
        assert all(torch.equal(row, own.embeds) for row in batch.conditioning.embeds)
        assert all(torch.equal(row, own.pooled) for row in batch.conditioning.pooled)


def test_the_pooled_embedding_is_read_without_the_rest(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    data["model"]["t5"] = True
    text = run(data).text
    pooled = text.load("a red circle").pooled
    sizes, read = [], storage._read

    def watched(handle: Any, start: int, end: int) -> bytearray:
        sizes.append(end - start)
        return read(handle, start, end)

    monkeypatch.setattr(storage, "_read", watched)
    assert torch.equal(text.pooled("a red circle"), pooled)
    (key,) = (key for _, key in text.places("a red circle"))
    (file,) = (cache.file(key) for cache in text.caches if isinstance(cache, FileCache))
    assert sum(sizes) < file.stat().st_size / 2


def test_a_folder_of_an_earlier_version_is_joined_without_encoding(data: dict, calls: Calls) -> None:
    """Versions before joined entries stored each encoder's outputs in a folder of its own."""
    prompts, older = ["a red circle", "a green circle", "a blue circle"], {}
    side = Prompts(resolve_folders(validate(data, "test")).model.text, torch.float32)
    for encoder in side.encoders:
        older[encoder.name] = FileCache(Path(data["output"]["cache"]) / "text" / side.fingerprint(encoder))
        for prompt, entry in zip(prompts, side.encode(encoder, prompts, CPU), strict=True):
            older[encoder.name].save(prompt, entry)
    older["clip_g"].file("a blue circle").write_bytes(b"damaged")
    calls.clear()
    prepared = run(data)
    assert calls.prompts == [("clip_g", "a blue circle")]
    assert_as_encoded_afresh(data, prepared)
    assert not any(file.suffix == ".safetensors" for file in files(data) if "text" in file.parts), "stored twice"
    assert len(list((Path(data["output"]["cache"]) / "prompts").rglob("*.safetensors"))) == 3


def test_what_a_kill_leaves_beside_an_entry_is_removed(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(file: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("simpletune.stages.text_cache.remove", die)
        with pytest.raises(KeyboardInterrupt):
            run(data)
    waiting = Path(data["output"]["cache"]).glob("prompts/*/clip_l/*.safetensors")
    assert len(list(waiting)) == 3
    assert_as_encoded_afresh(data, run(data))
    assert not any(file.parent.name == "clip_l" for file in files(data))
