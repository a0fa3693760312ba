"""What makes the tiny models: short trainings of each part, resumed, put together, trained and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, Flux2KleinPipeline, StableDiffusion3Pipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.tiny_models import (
    make_tiny_klein,
    make_tiny_sd3,
    make_tiny_sdxl,
    networks,
    train_autoencoder,
    train_text_encoders,
)
from simpletune.apps.cli.main import main
from simpletune.data.demo import demo_scenes

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts, and the denoiser's training in this process."""
    small = {"POOL": 16, "HELD_OUT": 2, "CHANNELS": (8, 8, 16, 16), "BATCH": 2, "SAVE_EVERY": 1, "WARMUP": 2}
    for name, value in small.items():
        monkeypatch.setattr(train_autoencoder, name, value)
    monkeypatch.setattr(train_text_encoders, "POOL", 64)

    def instead(command: list[str], check: bool) -> None:
        assert command[1:4] == ["-m", "simpletune", "train"] and check
        assert main(command[3:]) == 0

    monkeypatch.setattr(make_tiny_sd3.subprocess, "run", instead)


def overrides(folder: Path) -> list[str]:
    """A training of 3 steps on what is made in a folder."""
    parts = folder / "parts"
    return [
        f"model.pretrained={parts}/pipeline", f"data.path={parts}/pictures", f"output.cache={parts}/cache",
        f"output.runs={folder}/runs", f"output.profiles={folder}/profiles", "train.steps=3", "train.batch_size=2",
        "schedule.warmup_steps=1", "validation.prompts=[]", "validation.loss_samples=2", "output.report=false",
    ]  # fmt: skip


def assert_exported(out: Path, run: Path, part: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What ships is what was trained, in half precision; returns the start's and the trained weights."""
    trained, shipped = load_file(run / part / WEIGHTS), load_file(out / part / WEIGHTS)
    assert {tensor.dtype for tensor in shipped.values()} == {torch.float16}
    for name, tensor in shipped.items():
        torch.testing.assert_close(tensor, trained[name].half(), rtol=0, atol=0)
    assert json.loads((out / "made_by" / "summary.json").read_text())["steps"] == 3
    return load_file(out.parent / "parts" / "pipeline" / part / WEIGHTS), trained


class Killed(Exception):
    pass


def test_a_killed_autoencoder_training_continues_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_autoencoder.train(tmp_path / "whole", 2)
    log = train_autoencoder.log_line

    def killed(folder: Path, line: dict[str, object]) -> None:
        if line.get("step") == 1:
            raise Killed
        log(folder, line)

    monkeypatch.setattr(train_autoencoder, "log_line", killed)
    with pytest.raises(Killed):
        train_autoencoder.train(tmp_path / "again", 2)
    monkeypatch.setattr(train_autoencoder, "log_line", log)
    train_autoencoder.train(tmp_path / "again", 2)
    whole, again = (load_file(tmp_path / name / "vae" / WEIGHTS) for name in ("whole", "again"))
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    with pytest.raises(SystemExit, match="a training of 2 steps, not 3"):
        train_autoencoder.train(tmp_path / "again", 3)


@pytest.mark.slow
def test_the_start_is_a_blurred_copy_and_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    vae = networks.plain_autoencoder((16, 32, 48, 64))
    pixels = train_autoencoder.render(16, seed=5)
    plain = train_autoencoder.psnr(vae, pixels)
    train_autoencoder.initialise(vae)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = train_autoencoder.loss_of(vae, train_autoencoder.to_unit(pixels[:8]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert train_autoencoder.psnr(vae, pixels) > plain + 1


def test_folding_the_scale_changes_no_picture_and_gives_unit_channels() -> None:
    torch.manual_seed(0)
    vae = networks.plain_autoencoder((8, 8, 16, 16)).eval()
    train_autoencoder.initialise(vae)
    pixels = train_autoencoder.render(12, seed=6)
    x = train_autoencoder.to_unit(pixels)
    with torch.no_grad():
        before = vae.decode(vae.encode(x).latent_dist.mode()).sample
        deviations = vae.encode(x).latent_dist.std
        unequal = vae.encode(x).latent_dist.mode().std(dim=(0, 2, 3))
        train_autoencoder.fold_scale(vae, pixels)
        posterior = vae.encode(x).latent_dist
        torch.testing.assert_close(vae.decode(posterior.mode()).sample, before, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(posterior.std / deviations, (1 / unequal)[:, None, None].expand_as(posterior.std))
        z_0 = (posterior.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    assert float(unequal.max() / unequal.min()) > 1.2
    torch.testing.assert_close(z_0.std(dim=(0, 2, 3)), torch.ones(16), rtol=1e-3, atol=0)
    assert abs(float(z_0.mean())) < 0.02


def test_captions_and_their_labels_agree() -> None:
    captions, labels = train_text_encoders.captions_of(300, seed=2)
    unknown = 0
    for index, text in enumerate(captions):
        for name in ("shape", "colour", "background", "size"):
            value = train_text_encoders.TABLES[name][int(labels[name][index])]
            assert value in text.replace(",", "").split()
        style = int(labels["style"][index])
        unknown += style == train_text_encoders.UNKNOWN
        if style != train_text_encoders.UNKNOWN:
            assert demo_scenes.STYLES[style] in text
    assert 25 < unknown < 80
    held_out, labels = train_text_encoders.captions_of(50, seed=2, held_out=True)
    for index in range(50):
        triple = [train_text_encoders.TABLES[n][int(labels[n][index])] for n in ("shape", "colour", "background")]
        assert demo_scenes.is_held_out(*triple)
    assert not any(demo_scenes.STYLE_TRIGGER in text for text in held_out)


def test_the_tiny_sd3_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_autoencoder, "STEPS", 2)
    monkeypatch.setattr(train_text_encoders, "STEPS", 2)
    monkeypatch.setattr(make_tiny_sd3, "IMAGES", 8)
    monkeypatch.setattr(make_tiny_sd3, "LAYERS", 1)
    parts, run, out = tmp_path / "parts", tmp_path / "runs" / "tiny-sd3", tmp_path / "tiny_sd3"
    make_tiny_sd3.make(parts, run, out, overrides(tmp_path))
    texts = [file.read_text() for file in sorted((parts / "pictures").glob("*.txt"))]
    assert len(texts) == 8 and sum("striped" in text for text in texts) == 1
    start, trained = assert_exported(out, run, "transformer")
    table = "pos_embed.pos_embed"
    torch.testing.assert_close(trained[table], start[table], rtol=0, atol=0)  # a constant: not made anew
    assert (trained["transformer_blocks.0.attn.to_q.weight"] != start["transformer_blocks.0.attn.to_q.weight"]).any()
    pipeline = StableDiffusion3Pipeline.from_pretrained(out, local_files_only=True)
    assert pipeline.vae.config.shift_factor is not None
    image = pipeline("a red star", num_inference_steps=2, max_sequence_length=24).images[0]
    assert np.asarray(image).shape == (64, 64, 3)
    made_by = {file.name for file in (out / "made_by").iterdir()}
    assert made_by >= {"autoencoder_log.jsonl", "text_log.jsonl", "transformer_log.jsonl", "summary.json"}
    before = (out / "model_index.json").stat().st_mtime_ns
    for finished in (train_autoencoder, train_text_encoders):
        monkeypatch.setattr(finished, "train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(make_tiny_sd3.subprocess, "run", lambda *_, **more: pytest.fail("trained again"))
    make_tiny_sd3.make(parts, run, out, overrides(tmp_path))  # all is done: only the export is repeated
    assert (out / "model_index.json").stat().st_mtime_ns > before


@pytest.mark.slow
def test_the_tiny_sdxl_from_the_tiny_sd3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny_sdxl, "IMAGES", 16)
    small = {"block_out_channels": (32, 32, 32), "attention_head_dim": (1, 1, 1)}
    monkeypatch.setattr(make_tiny_sdxl, "UNET", make_tiny_sdxl.UNET | small)
    parts, runs, out = tmp_path / "parts", tmp_path / "runs", tmp_path / "tiny_sdxl"
    make_tiny_sdxl.make(parts, runs, out, overrides(tmp_path))
    start, trained = assert_exported(out, runs / "tiny-sdxl-v", "unet")
    assert (trained["add_embedding.linear_1.weight"] != start["add_embedding.linear_1.weight"]).any()
    pipeline = StableDiffusionXLPipeline.from_pretrained(out, local_files_only=True)
    image = pipeline("a red star", num_inference_steps=2, height=64, width=64).images[0]
    assert np.asarray(image).shape == (64, 64, 3)
    made_by = {file.name for file in (out / "made_by").iterdir()}
    configs = {make_tiny_sdxl.FIRST.name, make_tiny_sdxl.SECOND.name}
    assert made_by == configs | {"unet_log.jsonl", "summary.json", "first_summary.json"}
    noise = pipeline.scheduler.config
    assert noise.prediction_type == "v_prediction" and noise.rescale_betas_zero_snr
    before = (out / "model_index.json").stat().st_mtime_ns
    make_tiny_sdxl.make(parts, runs, out, overrides(tmp_path))  # all is done: only the export is repeated
    assert (out / "model_index.json").stat().st_mtime_ns > before


def test_the_tiny_klein_from_the_tiny_sd3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its autoencoder gives the same pictures back, and latents of mean 0 and deviation 1."""
    monkeypatch.setattr(make_tiny_klein, "IMAGES", 8)
    monkeypatch.setattr(make_tiny_klein, "MEASURED", 24)
    parts, run, out = tmp_path / "parts", tmp_path / "runs" / "tiny-klein", tmp_path / "tiny_klein"
    make_tiny_klein.make(parts, run, out, overrides(tmp_path))
    start, trained = assert_exported(out, run, "transformer")
    assert (trained["context_embedder.weight"] != start["context_embedder.weight"]).any()
    pipeline = Flux2KleinPipeline.from_pretrained(out, local_files_only=True)
    image = pipeline(  # its first argument is a picture
        prompt="a red star", num_inference_steps=2, height=64, width=64, max_sequence_length=32, guidance_scale=2.0
    ).images[0]
    assert np.asarray(image).shape == (64, 64, 3)
    plain = AutoencoderKL.from_pretrained(make_tiny_klein.demo.MODELS["demo:tiny-sd3"] / "vae").eval()
    vae, pixels = (
        make_tiny_klein.autoencoder(make_tiny_klein.demo.MODELS["demo:tiny-sd3"] / "vae", 0),
        torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        raw = vae.encode(pixels).latent_dist.mode()
        assert torch.equal(raw, plain.encode(pixels).latent_dist.mode())
        assert torch.equal(vae.decode(raw).sample, plain.decode(raw).sample)
        drawn = train_autoencoder.to_unit(train_autoencoder.render(24, seed=1))
        patched = torch.nn.functional.pixel_unshuffle(vae.encode(drawn).latent_dist.mode(), 2)
    mean, variance = (each[:, None, None] for each in (vae.bn.running_mean, vae.bn.running_var))
    normal = (patched - mean) / variance.sqrt()
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(64), rtol=0, atol=1e-4)
    torch.testing.assert_close(normal.std((0, 2, 3)), torch.ones(64), rtol=1e-4, atol=0)
