"""The autoencoder in tiles: less memory at once, each tile as if it were alone, and a cache of its own."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import AutoencoderTiny
from PIL import Image
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.shared.autoencoder import KINDS, Autoencoder
from simpletune.stages.encode import prepare
from simpletune.stages.prepared import PreparedData
from simpletune.system.options import ConfigError
from simpletune.system.stage_timer import StageTimer
from simpletune.training.validation_images import Previews

CPU = torch.device("cpu")
TILE = 128


def smooth(height: int, width: int) -> Tensor:
    """A picture [1, 3, h, w] in -1..1 without edges."""
    torch.manual_seed(0)
    coarse = torch.rand(1, 3, 4, 4) * 2 - 1
    return torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(-1, 1)


def seen(module: torch.nn.Module) -> list[tuple[int, int]]:
    """The sizes of what goes into a module from now on."""
    sizes: list[tuple[int, int]] = []
    module.register_forward_pre_hook(lambda _, args: sizes.append(tuple(args[0].shape[-2:])))
    return sizes


@pytest.fixture
def autoencoder(tiny_pipeline: Path) -> Autoencoder:
    return SD3(pretrained=str(tiny_pipeline)).autoencoder


def test_larger_pictures_go_through_in_tiles(autoencoder: Autoencoder) -> None:
    pixels = smooth(192, 256)
    whole, tiled = (autoencoder.load(CPU, torch.float32, tile) for tile in (None, TILE))
    encoded, decoded = seen(tiled.encoder), seen(tiled.decoder)
    with torch.no_grad():
        expected, z = autoencoder.encode(whole, pixels), autoencoder.encode(tiled, pixels)
        shown, shown_in_tiles = autoencoder.decode(whole, expected), autoencoder.decode(tiled, expected)
    assert max(max(size) for size in encoded) == TILE and len(encoded) > 1
    assert max(max(size) for size in decoded) == TILE // 8 and len(decoded) > 1
    assert z.shape == expected.shape == (1, 16, 24, 32)
    assert shown_in_tiles.shape == shown.shape == pixels.shape
    assert not torch.equal(z, expected) and not torch.equal(shown_in_tiles, shown)  # not exact, and said to be so
    with torch.no_grad():  # three quarters of the first tile are blended with nothing: they are that tile alone
        alone = autoencoder.encode(whole, pixels[..., :TILE, :TILE])[..., :12, :12]
        shown_alone = autoencoder.decode(whole, expected[..., :16, :16])[..., :96, :96]
    torch.testing.assert_close(z[..., :12, :12], alone, rtol=0, atol=0)
    torch.testing.assert_close(shown_in_tiles[..., :96, :96], shown_alone, rtol=0, atol=0)


def test_pictures_no_larger_than_a_tile_go_through_whole(autoencoder: Autoencoder) -> None:
    pixels = smooth(TILE, TILE)
    whole, tiled = (autoencoder.load(CPU, torch.float32, tile) for tile in (None, TILE))
    with torch.no_grad():
        z = autoencoder.encode(tiled, pixels)
        torch.testing.assert_close(z, autoencoder.encode(whole, pixels), rtol=0, atol=0)
        torch.testing.assert_close(autoencoder.decode(tiled, z), autoencoder.decode(whole, z), rtol=0, atol=0)


def test_autoencoder_tiny_takes_pictures_whole(autoencoder: Autoencoder) -> None:
    """diffusers' tiles of its encoder have room for 4 channels."""
    torch.manual_seed(1)
    vae = AutoencoderTiny(latent_channels=16, encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4)
    vae = vae.eval()
    pixels = smooth(TILE + 64, TILE)
    with torch.no_grad():
        expected = autoencoder.encode(vae, pixels)
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = TILE, TILE // 8
        with pytest.raises(RuntimeError, match="shape|size"):  # when this fails, diffusers can do it: use its tiles
            autoencoder.encode(vae, pixels)
        vae.disable_tiling()
        KINDS["AutoencoderTiny"].use_tiles(vae, TILE)
        torch.testing.assert_close(autoencoder.encode(vae, pixels), expected, rtol=0, atol=0)
        assert autoencoder.decode(vae, expected).shape == pixels.shape


@pytest.fixture
def data(tiny_config: dict, tmp_path: Path) -> dict:
    """A run on one picture of 192 px with a cache of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (192, 192, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    (folder / "a.txt").write_text("a red circle")
    config = copy.deepcopy(tiny_config)
    config["data"] = {"path": str(folder), "resolution": 192}
    config["output"]["cache"] = str(tmp_path / "cache")
    config["model"]["t5"] = False
    return config


def prepared(data: dict) -> PreparedData:
    return prepare(resolve_folders(validate(data, "test")), Accelerator(cpu=True), StageTimer(False))


def test_latents_in_tiles_never_stand_in_for_whole_ones(data: dict) -> None:
    found = []
    for tile in (None, TILE, 192):
        data["memory"]["vae_tile"] = tile
        run = prepared(data)
        found.append(run.latents.load(run.plan.view(run.plan.samples[0], 0))[0])
    whole, tiled, one_tile = found
    assert torch.equal(one_tile, whole) and not torch.equal(tiled, whole)
    folders = list((Path(data["output"]["cache"]) / "latents").iterdir())
    assert sorted(folder.name.rpartition("-")[2] for folder in folders) == ["float32", "tile128", "tile192"]


def test_validation_pictures_are_decoded_in_the_same_tiles(data: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, load = [], Autoencoder.load

    def watch(self: Autoencoder, *rest: object) -> object:
        vae = load(self, *rest)
        tiles.append(vae.use_tiling and vae.tile_sample_min_size)
        return vae

    monkeypatch.setattr(Autoencoder, "load", watch)
    data["memory"]["vae_tile"] = TILE
    data["validation"] = {"prompts": ["a red circle"], "steps": 1, "loss_samples": 0}
    config, run = resolve_folders(validate(data, "test")), prepared(data)
    transformer = config.model.load_denoiser(config.precision, CPU)
    Previews(config, run.requests, run.text, Path(data["output"]["cache"]) / "samples").generate(transformer, 1)
    assert tiles == [TILE, TILE]


@pytest.mark.parametrize("tile", [100, 64, 0])
def test_sizes_that_cannot_be_tiled_are_refused(tile: int, data: dict) -> None:
    data["memory"]["vae_tile"] = tile
    with pytest.raises(ConfigError, match=f"memory.vae_tile: {tile} "):
        validate(data, "test")
