"""Autoencoders of other classes, places and statistics, against diffusers' own pipelines, and through a run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKLFlux2, AutoencoderKLQwenImage, Flux2KleinPipeline, QwenImageImg2ImgPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.sources.masks import latent_mask, mask_pixels
from simpletune.data.storage.cache import crop_key
from simpletune.engine.memory.fake import fake_tensors
from simpletune.estimate.disk_needs import DataCounts, disk_needs
from simpletune.estimate.simulate.simulate_stages import simulate_encoding, simulate_parts
from simpletune.models.families import FAMILIES
from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.architecture import Architecture
from simpletune.models.shared.autoencoder import KINDS, Autoencoder, Latents, autoencoder_config
from simpletune.models.shared.parts import Part
from simpletune.stages.encode import prepare
from simpletune.system.options import UserError
from simpletune.system.stage_timer import StageTimer
from simpletune.training.train import train

CPU = torch.device("cpu")
SIXTEENTHS = Latents(("AutoencoderKLFlux2",), 16)


def flux2(channels: int) -> AutoencoderKLFlux2:
    """A quarter of ``channels`` before 2 x 2 places become one, as FLUX.2's."""
    blocks: dict[str, Any] = {
        "block_out_channels": (8,) * 4,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    vae = AutoencoderKLFlux2(latent_channels=channels // 4, norm_num_groups=4, layers_per_block=1, **blocks)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    return vae.eval()


def qwen_image(channels: int) -> AutoencoderKLQwenImage:
    mean, deviation = torch.randn(channels).tolist(), (torch.rand(channels) + 0.5).tolist()
    return AutoencoderKLQwenImage(8, channels, num_res_blocks=1, latents_mean=mean, latents_std=deviation).eval()


def by_klein(vae: AutoencoderKLFlux2, raw: Tensor) -> Tensor:
    """What diffusers' pipeline of FLUX.2 klein makes of raw latents."""
    fixed = SimpleNamespace(encode=lambda image: SimpleNamespace(latents=image), bn=vae.bn, config=vae.config)
    pipeline: Any = SimpleNamespace(vae=fixed, _patchify_latents=Flux2KleinPipeline._patchify_latents)
    return Flux2KleinPipeline._encode_vae_image(pipeline, raw, None)


def klein_back(vae: AutoencoderKLFlux2, z: Tensor) -> Tensor:
    """The end of its ``__call__``."""
    deviation = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    latents = z * deviation.view(1, -1, 1, 1) + vae.bn.running_mean.view(1, -1, 1, 1)
    return Flux2KleinPipeline._unpatchify_latents(latents)


def by_qwen_image(vae: AutoencoderKLQwenImage, raw: Tensor) -> Tensor:
    fixed = SimpleNamespace(encode=lambda image: SimpleNamespace(latents=image), config=vae.config)
    pipeline: Any = SimpleNamespace(vae=fixed)
    return QwenImageImg2ImgPipeline._encode_vae_image(pipeline, raw[:, :, None], None)[:, :, 0]


def qwen_image_back(vae: AutoencoderKLQwenImage, z: Tensor) -> Tensor:
    """The end of its ``__call__``."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1)
    deviation = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1)
    return z / deviation + mean


class Case(NamedTuple):
    make: Callable[[int], Any]
    latents: Latents
    to_latents: Callable[[Any, Tensor], Tensor]
    to_raw: Callable[[Any, Tensor], Tensor]
    frames: bool = False


CASES = {
    "FLUX.2": Case(flux2, SIXTEENTHS, by_klein, klein_back),
    "Qwen-Image": Case(qwen_image, Latents(("AutoencoderKLQwenImage",), 8), by_qwen_image, qwen_image_back, True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(3)
    return CASES[request.param]


def autoencoder_in(folder: Path, latents: Latents, channels: int = 16) -> Autoencoder:
    part = partial(Part, "vae", folder)
    return Autoencoder(latents, part, part, lambda: channels, {})


def test_latents_are_those_of_diffusers_pipelines(case: Case, tmp_path: Path) -> None:
    case.make(16).save_pretrained(tmp_path)
    own = autoencoder_in(tmp_path, case.latents)
    vae: Any = own.load(CPU, torch.float32)
    pixels, side = torch.rand(2, 3, 64, 96) * 2 - 1, case.latents.downsampling
    inside = pixels[:, :, None] if case.frames else pixels
    posterior = vae.encode(inside).latent_dist
    mode, mean, deviation = (each[:, :, 0] if case.frames else each for each in
                             (posterior.mode(), posterior.mean, posterior.std))  # fmt: skip
    z = own.encode(vae, pixels)
    assert z.dtype == torch.float32 and z.shape == (2, *own.shape(96, 64)) == (2, 16, 64 // side, 96 // side)
    torch.testing.assert_close(z, case.to_latents(vae, mode))
    # numbers in the places of the denoiser's latents: noise that is as normal in those of the raw ones
    noise = torch.randn_like(z)
    rearranged = Flux2KleinPipeline._unpatchify_latents(noise) if side == 16 else noise
    torch.testing.assert_close(own.encode(vae, pixels, noise), case.to_latents(vae, mean + deviation * rearranged))
    raw = case.to_raw(vae, noise)
    expected = vae.decode(raw[:, :, None] if case.frames else raw).sample
    expected = (expected[:, :, 0] if case.frames else expected) / 2 + 0.5
    torch.testing.assert_close(own.decode(vae, noise), expected.clamp(0, 1), rtol=1e-4, atol=1e-5)


def test_there_and_back_the_statistics_cancel(case: Case) -> None:
    vae = case.make(16)
    raw = torch.randn(2, 4 if case.latents.downsampling == 16 else 16, 4, 6) * 3 + 1
    statistics = KINDS[type(vae).__name__].statistics(vae)
    z = statistics.normalise(raw)
    assert z.shape[1] == 16 and (z.std() - raw.std()).abs() > 0.1
    torch.testing.assert_close(statistics.restore(z), raw)
    assert statistics.normalise(raw.bfloat16()).dtype == statistics.restore(z.bfloat16()).dtype == torch.float32


def test_larger_pictures_go_through_in_tiles(case: Case, tmp_path: Path) -> None:
    case.make(16).save_pretrained(tmp_path)
    own = autoencoder_in(tmp_path, case.latents)
    whole, tiled = (own.load(CPU, torch.float32, tile) for tile in (None, 128))
    widths = {"encoder": 0, "decoder": 0}
    for name in widths:
        getattr(tiled, name).register_forward_pre_hook(
            lambda _, args, name=name: widths.update({name: max(widths[name], *args[0].shape[-2:])})
        )
    pixels = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4) * 2 - 1, (144, 160), mode="bicubic").clamp(-1, 1)
    z = own.encode(tiled, pixels)
    assert z.shape == own.encode(whole, pixels).shape and own.decode(tiled, z).shape == pixels.shape
    assert widths == {"encoder": 128, "decoder": 128 // 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_the_same_bytes_real_and_empty(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    case.make(16).save_pretrained(tmp_path)
    own = autoencoder_in(tmp_path, case.latents)
    model: Any = SimpleNamespace(autoencoder=own)
    real = simulate_encoding(model, own.load(CPU, dtype), (64, 96))
    with fake_tensors():
        fake = simulate_encoding(model, own.empty(dtype), (64, 96))
        assert own.decode(own.empty(dtype), torch.zeros(1, *own.shape(64, 96))).shape == (1, 3, 96, 64)
    assert real.by_kind == fake.by_kind and real.bytes > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.family)
def test_every_family_reads_what_its_own_autoencoder_makes(family: Any) -> None:
    for version, parts in family.files.bundled_configs().items():
        config = {**family.architecture.defaults, **parts[family.denoiser]}
        channels = config.get("out_channels") or config["in_channels"]
        own = Part("vae", None, bundled=parts["vae"])
        assert autoencoder_config(own, family.latents, channels) == parts["vae"], version
    assert family.architecture.multiple % family.latents.downsampling == 0
    s = family.latents.downsampling
    assert family.autoencoder.shape(1024, 512) == (family.autoencoder.channels, 512 // s, 1024 // s)


@pytest.mark.data
@pytest.mark.parametrize(("name", "made"), [("flux2_klein", (128, 16)), ("qwen_image", (16, 8)), ("z_image", (16, 8))])
def test_published_autoencoders(name: str, made: tuple[int, int], real_data: Path) -> None:
    folder = real_data / "families" / f"{name}_config" / "vae"
    kind = json.loads((folder / "config.json").read_text())["_class_name"]
    assert autoencoder_config(Part("vae", folder), Latents((kind,), made[1]), made[0])["_class_name"] == kind


OTHERS = "Use the autoencoder of the model's own version"


@pytest.mark.parametrize(
    ("change", "channels", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, 16, "is a AutoencoderKL; the model needs an AutoencoderKLFlux2$"),
        ({}, 32, f"makes latents of 16 channels, and the model reads 32. {OTHERS}$"),
        ({"latent_channels": 8}, 16, f"makes latents of 32 channels, and the model reads 16. {OTHERS}$"),
        ({"patch_size": [1, 4]}, 16, f"makes latents of 8 pixels a side for each place, and .* reads 16. {OTHERS}$"),
        ({"patch_size": 2}, 16, "has a damaged configuration .*Download it again$"),
    ],
)  # fmt: skip
def test_another_autoencoder_is_refused_in_words(
    change: dict[str, object], channels: int, message: str, tmp_path: Path
) -> None:
    flux2(16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    own = autoencoder_in(tmp_path, SIXTEENTHS, channels)
    for build in (partial(own.load, CPU), own.empty):
        with pytest.raises(UserError, match=f"^model.vae: {tmp_path} {message}"):
            build(torch.float32)


@pytest.mark.parametrize("change", [{"latents_std": None}, {"latents_mean": [0.0] * 3}, {"latents_std": [0.0] * 16}])
def test_statistics_that_are_missing_are_named(change: dict[str, object], tmp_path: Path) -> None:
    qwen_image(16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match="needs 16 latents_mean and 16 latents_std above 0. Download it again"):
        autoencoder_in(tmp_path, CASES["Qwen-Image"].latents).load(CPU, torch.float32)


def test_a_batch_norm_that_a_file_lacks_is_named(tmp_path: Path) -> None:
    flux2(16).save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.startswith("bn.")}, file)
    with pytest.raises(UserError, match="missing: bn.num_batches_tracked, bn.running_mean, bn.running_var"):
        autoencoder_in(tmp_path, SIXTEENTHS).load(CPU, torch.float32)


def test_a_single_file_has_ldm_s_autoencoder_alone(tmp_path: Path) -> None:
    flux2(16).save_pretrained(tmp_path)
    part = Part("vae", tmp_path, tmp_path / "x.safetensors")
    own = Autoencoder(SIXTEENTHS, lambda: part, lambda: part, lambda: 16, {})
    with pytest.raises(UserError, match="is an AutoencoderKLFlux2, which is read from folders only. Set model.vae to"):
        own.load(CPU, torch.float32)


def test_check_names_an_autoencoder_with_other_channels(tiny_pipeline: Path, tmp_path: Path) -> None:
    vae = shutil.copytree(tiny_pipeline / "vae", tmp_path / "vae")
    config = json.loads((vae / "config.json").read_text())
    (vae / "config.json").write_text(json.dumps(config | {"latent_channels": 4}))
    words = f"{vae} makes latents of 4 channels, and the model reads 16. {OTHERS}"
    model = SD3(pretrained=str(tiny_pipeline), vae=str(vae))
    assert [str(problem) for problem in model.files.problems()] == [f"model.vae: {words}"]
    with pytest.raises(UserError, match=f"^model.vae: {words}"):
        model.autoencoder.load(CPU, torch.float32)
    assert not list(SD3(vae=str(tiny_pipeline / "vae")).files.problems()), "SD3 Medium reads as many"


class SixteenthsArchitecture(SD3Architecture):
    """SD3's transformer for latents of 16 x 16 pixels."""

    multiple: ClassVar[int] = 32


class Sixteenths(SD3):
    """SD3's transformer on FLUX.2's autoencoder."""

    latents: ClassVar[Latents] = SIXTEENTHS
    architecture_class: ClassVar[type[Architecture]] = SixteenthsArchitecture


@pytest.fixture
def config(tiny_config: dict, tiny_pipeline: Path, tmp_path: Path) -> TrainConfig:
    """A run on three pictures whose masks are white in 16 x 16 pixels of the top left corner, and grey elsewhere."""
    torch.manual_seed(4)
    flux2(16).save_pretrained(tmp_path / "vae")
    folder = tmp_path / "masked"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 4), dtype=np.uint8)
        pixels[..., 3] = 51
        pixels[:16, :16, 3] = 255
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red circle")
    data = {"path": str(folder), "resolution": 64, "mask": "alpha"}
    drawn = {"prompts": ["a red circle"], "steps": 2, "width": 96, "height": 64, "loss_samples": 2}
    output = tiny_config["output"] | {"cache": str(tmp_path / "cache")}
    found = validate(tiny_config | {"data": data, "validation": drawn, "output": output}, "sixteenths")
    model = Sixteenths(pretrained=str(tiny_pipeline), vae=str(tmp_path / "vae"), t5_length=8)
    return found.model_copy(update={"model": model})


def test_a_run_takes_places_of_16_pixels(config: TrainConfig, tmp_path: Path) -> None:
    prepared = prepare(config, Accelerator(cpu=True), StageTimer(False))
    view = prepared.plan.view(prepared.plan.samples[0], 0)
    z_0, mask, *_ = prepared.latents.load(view)
    assert z_0.shape == (16, 4, 4) and mask.shape == (1, 4, 4)
    expected = torch.full((1, 4, 4), 0.2)
    expected[0, 0, 0] = 1.0
    torch.testing.assert_close(mask, expected)
    assert latent_mask(view, 8).shape == (1, 8, 8) and mask_pixels(view).shape == (64, 64)
    assert crop_key(view) in prepared.latents.cache
    counts = DataCounts(3, 1, 3 * 64 * 64, 3)
    needs = {what: count for what, _, count in disk_needs(config, counts=counts)}
    assert needs["cached pictures"] == 3 * math.prod(z_0.shape) * 4
    result = train(config)
    assert {Image.open(file).size for file in (result / "samples").glob("*/*.png")} == {(96, 64)}
    report = simulate_parts(config, (64, 64)).stages
    assert {"latents", "train", "validate"} <= set(report)
