"""Stable Diffusion XL's autoencoder, which overflows in fp16, and the one that was made for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import BF16, FP32, Int8, WeightPrecision
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.stages.latent_cache import LatentCache
from simpletune.stages.load import empty_autoencoder
from simpletune.stages.prepared import Caches

CPU = torch.device("cpu")
FP16 = Int8(compute="fp16")


def vae_folder(pipeline: Path, folder: Path, factor: float, **changes: object) -> Path:
    """The pipeline's autoencoder with other settings, its first activations this many times as large."""
    tensors = load_file(pipeline / "vae" / "diffusion_pytorch_model.safetensors")
    for name in ("encoder.conv_in", "decoder.conv_in"):
        for leaf in ("weight", "bias"):
            tensors[f"{name}.{leaf}"] = tensors[f"{name}.{leaf}"] * factor
    folder.mkdir()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    config = json.loads((pipeline / "vae" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.fixture(scope="module")
def pipeline(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sdxl")


@pytest.fixture(scope="module")
def original(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vae_folder(pipeline, tmp_path_factory.mktemp("vae") / "original", 1e6, force_upcast=True)


@pytest.fixture(scope="module")
def fixed(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vae_folder(pipeline, tmp_path_factory.mktemp("vae") / "fixed", 1.0, force_upcast=False)


def there_and_back(family: SDXL, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    vae, pixels = family.autoencoder.load(CPU, dtype), torch.rand(1, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        z_0 = family.autoencoder.encode(vae, pixels)
        return z_0, family.autoencoder.decode(vae, z_0.nan_to_num())


@pytest.mark.parametrize("precision", [FP16, BF16(compute="fp16"), FP32(compute="fp16")])
def test_fp16_is_for_an_autoencoder_made_for_it(
    precision: WeightPrecision, pipeline: Path, original: Path, fixed: Path
) -> None:
    families = {name: SDXL(pretrained=str(pipeline), vae=str(vae)) for name, vae in
                {"original": original, "fixed": fixed}.items()}  # fmt: skip
    assert families["original"].autoencoder.dtype(precision) == torch.float32
    assert families["fixed"].autoencoder.dtype(precision) == torch.float16
    assert SDXL().autoencoder.dtype(precision) == torch.float32


@pytest.mark.parametrize(("precision", "dtype"), [(Int8(), torch.bfloat16), (FP32(), torch.float32)])
def test_other_types_follow_the_products(
    precision: WeightPrecision, dtype: torch.dtype, pipeline: Path, original: Path, fixed: Path
) -> None:
    found = {SDXL(pretrained=str(pipeline), vae=str(vae)).autoencoder.dtype(precision) for vae in (original, fixed)}
    assert found == {dtype}


def test_other_families_run_theirs_in_fp32_as_before(unet_pipeline: Callable[..., Path]) -> None:
    """Their configurations deny an upcast too, and SD3's autoencoder overflows in fp16."""
    for family in (SD3(), SD15(), SD15(pretrained=str(unet_pipeline("sd15")))):
        assert family.files.known_part("vae").config().get("force_upcast") is False
        assert family.autoencoder.dtype(FP16) == torch.float32


def test_what_is_chosen_does_not_overflow(pipeline: Path, original: Path, fixed: Path) -> None:
    overflowing = SDXL(pretrained=str(pipeline), vae=str(original))
    assert not there_and_back(overflowing, torch.float16)[0].isfinite().all(), "or this shows nothing"
    for family in (overflowing, SDXL(pretrained=str(pipeline), vae=str(fixed))):
        exact = there_and_back(family, torch.float32)
        assert all(tensor.isfinite().all() for tensor in exact)
        for dtype in {family.autoencoder.dtype(FP16), family.autoencoder.dtype(Int8())} - {torch.float32}:
            found = there_and_back(family, dtype)
            assert all(tensor.isfinite().all() for tensor in found)
            torch.testing.assert_close(found[1], exact[1], rtol=0, atol=0.1)


@pytest.fixture
def config(tiny_config: dict, pipeline: Path, fixed: Path, tmp_path: Path) -> TrainConfig:
    data: dict[str, Any] = {**tiny_config, "model": {"family": "sdxl", "pretrained": str(pipeline), "vae": str(fixed)}}
    data["data"] = {**tiny_config["data"], "resolution": 64}
    data["output"] = {**tiny_config["output"], "cache": str(tmp_path / "cache")}
    found = validate(data, "fixed")
    return found.model_copy(update={"precision": FP16, "validation": found.validation})


def test_cache_and_estimate_use_the_same_type(config: TrainConfig) -> None:
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=1)
    caches = Caches(config, accelerator, None)  # type: ignore[arg-type]
    assert caches.latents.dtype == next(empty_autoencoder(config).parameters()).dtype == torch.float16
    assert LatentCache.from_config(config, config.output.place).dtype == torch.float16
    assert config.precision.encoder_dtype() == torch.float32, "the text encoders' type stays"
