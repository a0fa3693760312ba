"""Encoders: their papers' preprocessing beside transformers' own, what they embed, and folders that are refused."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_encoders import WRITERS

from benchmarks.tiny_models import vocabulary
from simpletune.commands.evaluate.encoders import (
    CLIP,
    FIRST_VOCABULARY,
    HALF,
    IMAGENET,
    Siglip,
    find_encoder,
    normalise,
    scale_and_crop,
)
from simpletune.commands.evaluate.predict_stages import encoding_bytes
from simpletune.data.demo import demo_scenes
from simpletune.estimate.timing.recorder import Recorder
from simpletune.system.options import UserError
from simpletune.system.stage_timer import peak_rss_gib

CPU = torch.device("cpu")
READ_PROMPTS = ("clip", "siglip")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("encoders")
    return {kind: write(place / kind) for kind, write in WRITERS.items()}


def siglip_pixels(image: Image.Image, words: int) -> torch.Tensor:
    """What a SigLIP at its published size, with a vocabulary of ``words``, sees of a picture."""
    vision, text = SimpleNamespace(image_size=224), SimpleNamespace(vocab_size=words)
    encoder = object.__new__(Siglip)
    vars(encoder)["model"] = SimpleNamespace(config=SimpleNamespace(vision_config=vision, text_config=text))
    return encoder.pixels([image])


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9), np.cos(y / 7), np.sin((x + y) / 11)], axis=-1) * 90 + 128
    return Image.fromarray(np.clip(waves + rng.normal(0, 12, waves.shape), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", [(301, 200), (120, 333), (224, 224), (90, 90)], ids=str)
def test_preprocessing_equals_transformers_processors(size: tuple[int, int]) -> None:
    """Facebook's, OpenAI's and Google's preprocessor_config.json at their published sizes."""
    from transformers import BitImageProcessorPil, CLIPImageProcessorPil, SiglipImageProcessorPil

    image, square = photo(*size), {"height": 224, "width": 224}
    imagenet = {"resample": 3, "image_mean": IMAGENET[0], "image_std": IMAGENET[1]}
    dino = BitImageProcessorPil(size={"shortest_edge": 256}, crop_size=square, **imagenet)
    clip = CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size=square)
    siglip, siglip2 = (SiglipImageProcessorPil(size=square, resample=resample) for resample in (3, 2))
    for name, theirs, ours in (
        ("dino", dino, normalise([scale_and_crop(image, 256, 224)], IMAGENET)),
        ("clip", clip, normalise([scale_and_crop(image, 224, 224)], CLIP)),
        ("siglip", siglip, siglip_pixels(image, FIRST_VOCABULARY)),
        ("siglip2", siglip2, siglip_pixels(image, 256_000)),
    ):
        expected = theirs(image, return_tensors="pt").pixel_values
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_each_kind_prepares_pictures_its_own_way(folders: dict[str, Path]) -> None:
    image = photo(90, 60)
    found = {kind: find_encoder(str(folder)).load(CPU).pixels([image]) for kind, folder in folders.items()}
    expected = {
        "dino": normalise([scale_and_crop(image, 37, 32)], IMAGENET),  # 32 x 256 / 224
        "dinov2": normalise([scale_and_crop(image, 32, 28)], IMAGENET),
        "clip": normalise([scale_and_crop(image, 32, 32)], CLIP),
        "siglip": normalise([image.resize((32, 32), Image.Resampling.BILINEAR)], HALF),
    }
    for kind, pixels in found.items():
        torch.testing.assert_close(pixels, expected[kind], rtol=0, atol=0)


def test_dinov2_looks_at_224_px_whatever_its_configuration_says(folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=518, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path)
    encoder = find_encoder(str(tmp_path)).load(CPU)
    assert encoder.pixels([photo(300, 300)]).shape == (1, 3, 224, 224)
    assert encoder.embed_images([photo(300, 300)]).shape == (1, 16)


@pytest.mark.parametrize("kind", WRITERS)
def test_an_encoder_embeds_what_its_model_does(kind: str, folders: dict[str, Path]) -> None:
    from transformers import AutoModel, AutoTokenizer

    encoder = find_encoder(str(folders[kind])).load(CPU)
    images = [photo(64, 48, seed) for seed in range(3)]
    found = encoder.embed_images(images)
    model = AutoModel.from_pretrained(folders[kind], local_files_only=True).eval()
    with torch.no_grad():
        if kind in READ_PROMPTS:
            vision = model.vision_model(pixel_values=encoder.pixels(images)).pooler_output
            expected = model.visual_projection(vision) if kind == "clip" else vision
        else:
            expected = model(pixel_values=encoder.pixels(images)).last_hidden_state[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    alone = encoder.embed_images(images[1:2])
    torch.testing.assert_close(found[1:2], alone, rtol=0, atol=0)
    assert encoder.about.parameters == sum(p.numel() for p in encoder.model.parameters())
    if kind not in READ_PROMPTS:
        with pytest.raises(UserError, match=f"is a {kind} encoder, which reads no prompts. Use CLIP or SigLIP"):
            encoder.embed_prompts(["a star"])
        return
    prompts = ["a red star", "a large blue heart on the left", "a red star"]
    one, other, again = read = encoder.embed_prompts(prompts)
    if kind == "clip":  # SigLIP's: below
        tokens = AutoTokenizer.from_pretrained(folders[kind])(prompts, padding=True, return_tensors="pt")
        with torch.no_grad():
            text = model.get_text_features(**tokens)
        expected = text if isinstance(text, torch.Tensor) else text.pooler_output
        torch.testing.assert_close(read, expected, rtol=0, atol=1e-5)
    assert one.shape == found[0].shape
    assert torch.equal(one, again) and not torch.allclose(one, other)
    assert encoder.embed_prompts(["red " * 200]).isfinite().all(), "long prompts are cut"


def test_siglip_reads_lower_case_padded_to_its_length(folders: dict[str, Path]) -> None:
    encoder = find_encoder(str(folders["siglip"])).load(CPU)
    upper, lower = encoder.embed_prompts(["A RED Star", "a red star"])
    assert torch.equal(upper, lower)
    ids = encoder.tokenizer("a red star").input_ids  # type: ignore[attr-defined]
    padded = torch.tensor([ids + [encoder.tokenizer.pad_token_id] * (16 - len(ids))])  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = encoder.model.text_model(input_ids=padded).pooler_output[0]
    torch.testing.assert_close(lower, expected, rtol=1e-4, atol=1e-5)


def operations_of(recorder: Recorder) -> int:
    """Multiplications and additions of what was recorded."""
    total = 0
    for work, count in sum((section.work for section in recorder.sections), Counter()).items():
        factor = {"product": 2, "attention": 4, "convolution": 18}.get(work.kind.partition("_")[0], 0)
        total += factor * count * math.prod(work.extents)
    return total


@pytest.mark.parametrize("kind", WRITERS)
def test_memory_and_operations_are_predicted_without_weights(kind: str, folders: dict[str, Path]) -> None:
    about = find_encoder(str(folders[kind]))
    recorder = Recorder(cuda=False)
    assert encoding_bytes(about, recorder) > 4 * about.parameters
    operations = operations_of(recorder)
    side, patch = (28, 14) if kind == "dinov2" else (32, 8)
    tokens = (side // patch) ** 2 + (kind != "siglip")
    patches = 2 * (side // patch) ** 2 * 3 * patch**2 * 16
    inner = 64 if kind == "dinov2" else 16
    layer = 2 * tokens * (4 * 16 * 16 + 2 * 16 * inner) + 4 * tokens**2 * 16
    assert operations == pytest.approx(patches + layer, rel=0.15)  # the rest: projections and pooling


def other_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))


def drop_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[3:]), file)


def reshape_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.fc1.weight"))
    save_file({**tensors, name: torch.zeros(7, 16)}, folder / "model.safetensors")


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json, only .*Name a folder of transformers"),
    "damaged config": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged .*Download it again"),
    "other kind": (other_kind, "is a bert model. Use one of vit, dinov2"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "contains neither .* nor model.safetensors"),
    "a pickle": (only_a_pickle, "only pytorch_model.bin. A pickle can run code .*: use a copy with model.safetensors"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors is truncated: ",
    ),
    "missing weights": (drop_weights, "lacks 3 weights of its model"),
    "other shapes": (reshape_weights, "has weights whose shapes differ from config.json .*mlp.fc1.weight"),
    "no tokenizer": (
        lambda f: [file.unlink() for file in f.iterdir() if file.name not in ("config.json", "model.safetensors")],
        "has no usable tokenizer",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_folder_is_refused_with_its_reason(damage: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(folders["clip"], folder)
    harm, message = BROKEN[damage]
    harm(folder)
    with pytest.raises(UserError, match=message):
        find_encoder(str(folder)).load(CPU)


def test_weights_that_are_not_finite_and_unknown_names_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(folders["dino"], folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * torch.nan for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match="embeddings are not finite. Its weights are damaged"):
        find_encoder(str(folder)).load(CPU).embed_images([photo(32, 32)])
    with pytest.raises(UserError, match="unknown demo name. Use one of demo:tiny-dino, demo:tiny-clip"):
        find_encoder("demo:tiny-dinno")
    with pytest.raises(UserError, match="nowhere/at/all does not exist. Give a folder or a hub name"):
        find_encoder("nowhere/at/all")


def real_sizes() -> dict[str, tuple[type, object, bool]]:
    """Class, configuration and whether it reads prompts, of the published models."""
    from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel, ViTConfig, ViTModel

    small = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    wide = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    clip_l = CLIPConfig(text_config=wide, vision_config={**large, "patch_size": 14}, projection_dim=768)
    return {
        "dino-vits16": (ViTModel, ViTConfig(**small, image_size=224, patch_size=16), False),
        "clip-vit-base-patch32": (CLIPModel, CLIPConfig(), True),
        "clip-vit-large-patch14": (CLIPModel, clip_l, True),
        "siglip2-base-patch16-224": (SiglipModel, SiglipConfig(text_config={"vocab_size": 256_000}), True),
    }


def write_random(folder: Path, kind: type, config: object) -> None:
    """A model of random weights, written in half precision."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.no_grad():
        model = kind(config, add_pooling_layer=False) if kind.__name__ == "ViTModel" else kind(config)
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.to(torch.float16).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("dino-vits16", 21.7), ("clip-vit-base-patch32", 151.3), ("clip-vit-large-patch14", 427.6),
        ("siglip2-base-patch16-224", 375.2),
    ],
)  # fmt: skip
def test_encoders_of_real_size_run(name: str, millions: float, tmp_path: Path) -> None:
    """Prints what docs/how-to/best-checkpoint.md records: ``pytest -s -m slow`` of this file."""
    kind, config, reads = real_sizes()[name]
    if reads:
        (vocabulary.write_t5 if "siglip" in name else vocabulary.write_clip)(tmp_path / name, demo_scenes.words())
    write_random(tmp_path / name, kind, config)
    about = find_encoder(str(tmp_path / name))
    assert about.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    recorder = Recorder(cuda=False)
    predicted, operations = encoding_bytes(about, recorder), operations_of(recorder)
    clock, cpu = time.perf_counter(), time.process_time()
    encoder = about.load(CPU)
    loaded = time.perf_counter() - clock, time.process_time() - cpu
    photos = [photo(640, 480, seed) for seed in range(4)]
    cpu = time.process_time()
    found = encoder.embed_images(photos)
    took = (time.process_time() - cpu) / 4
    assert found.isfinite().all() and not torch.allclose(found[0], found[1])
    weights = 4 * sum(p.numel() for p in encoder.model.parameters())
    assert weights < predicted < 1.2 * weights + 2**26
    if reads:
        assert encoder.embed_prompts(["a red star"]).isfinite().all()
    print(
        f"\n| {name} | {millions} M | {predicted / 2**20:,.0f} MiB | {peak_rss_gib():.2f} GiB | {loaded[1]:.1f} s | "
        f"{operations / 1e9:.1f} G | {took:.2f} s |"
    )
