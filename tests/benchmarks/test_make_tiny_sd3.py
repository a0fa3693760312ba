"""What makes the tiny SD3: short trainings of each part, resumed, put together, trained and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from safetensors.torch import load_file

from benchmarks.tiny_models import make_tiny_sd3, networks, train_autoencoder, train_text_encoders
from simpletune.data.demo import pictures


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"POOL": 32, "HELD_OUT": 4, "CHANNELS": (8, 8, 16, 16), "BATCH": 4, "SAVE_EVERY": 2, "WARMUP": 2}
    for name, value in small.items():
        monkeypatch.setattr(train_autoencoder, name, value)
    monkeypatch.setattr(train_text_encoders, "POOL", 64)


class Killed(Exception):
    pass


def test_a_killed_autoencoder_training_continues_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_autoencoder.train(tmp_path / "whole", 4)
    log = train_autoencoder.log_line

    def killed(folder: Path, line: dict[str, object]) -> None:
        if line.get("step") == 2:
            raise Killed
        log(folder, line)

    monkeypatch.setattr(train_autoencoder, "log_line", killed)
    with pytest.raises(Killed):
        train_autoencoder.train(tmp_path / "again", 4)
    monkeypatch.setattr(train_autoencoder, "log_line", log)
    train_autoencoder.train(tmp_path / "again", 4)
    name = "vae/diffusion_pytorch_model.safetensors"
    whole, again = load_file(tmp_path / "whole" / name), load_file(tmp_path / "again" / name)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    with pytest.raises(SystemExit, match="a training of 4 steps, not 6"):
        train_autoencoder.train(tmp_path / "again", 6)


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
            assert pictures.STYLES[style] in text
    assert 25 < unknown < 80
    held_out, labels = train_text_encoders.captions_of(50, seed=2, held_out=True)
    for index in range(50):
        triple = [train_text_encoders.TABLES[n][int(labels[n][index])] for n in ("shape", "colour", "background")]
        assert pictures.is_held_out(*triple)
    assert not any(pictures.STYLE_TRIGGER in text for text in held_out)


def test_everything_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_autoencoder, "STEPS", 2)
    monkeypatch.setattr(train_text_encoders, "STEPS", 2)
    monkeypatch.setattr(make_tiny_sd3, "PICTURES", 16)
    monkeypatch.setattr(make_tiny_sd3, "LAYERS", 1)
    parts, run, out = tmp_path / "parts", tmp_path / "runs" / "tiny-sd3", tmp_path / "tiny_sd3"
    overrides = [
        f"model.pretrained={parts}/pipeline", f"data.path={parts}/pictures", f"output.cache={parts}/cache",
        f"output.runs={tmp_path}/runs", f"output.profiles={tmp_path}/profiles", "train.steps=3", "train.batch_size=2",
        "schedule.warmup_steps=1", "validation.prompts=[]", "validation.loss_samples=4",
    ]  # fmt: skip
    make_tiny_sd3.make(parts, run, out, overrides)
    texts = [file.read_text() for file in sorted((parts / "pictures").glob("*.txt"))]
    assert len(texts) == 16 and sum("striped" in text for text in texts) == 2
    pipeline = StableDiffusion3Pipeline.from_pretrained(out, local_files_only=True)
    trained = load_file(run / "transformer" / "diffusion_pytorch_model.safetensors")
    shipped = load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")
    start = load_file(parts / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in shipped.values()} == {torch.float16}
    for name, tensor in shipped.items():
        torch.testing.assert_close(tensor, trained[name].half(), rtol=0, atol=0)
    table = "pos_embed.pos_embed"
    torch.testing.assert_close(trained[table], start[table], rtol=0, atol=0)  # a constant: not made anew
    name = "transformer_blocks.0.attn.to_q.weight"
    assert (trained[name] != start[name]).any()
    assert isinstance(pipeline.vae, AutoencoderKL) and pipeline.vae.config.shift_factor is not None
    image = pipeline("a red star", num_inference_steps=2, max_sequence_length=24).images[0]
    assert np.asarray(image).shape == (64, 64, 3)
    made_by = {file.name for file in (out / "made_by").iterdir()}
    assert made_by >= {"autoencoder_log.jsonl", "text_log.jsonl", "transformer_log.jsonl", "summary.json"}
    assert json.loads((out / "made_by" / "summary.json").read_text())["steps"] == 3
    before = (out / "model_index.json").stat().st_mtime_ns
    make_tiny_sd3.make(parts, run, out, overrides)  # all is done: only the export is repeated
    assert (out / "model_index.json").stat().st_mtime_ns > before
