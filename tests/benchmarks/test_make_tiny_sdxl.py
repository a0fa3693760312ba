"""What makes the tiny SDXL: its parts put together, its UNet trained and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file

from benchmarks.tiny_models import make_tiny_sdxl

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.slow
def test_everything_from_the_tiny_sd3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny_sdxl, "PICTURES", 16)
    small = {"block_out_channels": (32, 32, 32), "attention_head_dim": (1, 1, 1)}
    monkeypatch.setattr(make_tiny_sdxl, "UNET", make_tiny_sdxl.UNET | small)
    parts, runs, out = tmp_path / "parts", tmp_path / "runs", tmp_path / "tiny_sdxl"
    overrides = [
        f"model.pretrained={parts}/pipeline", f"data.path={parts}/pictures", f"output.cache={parts}/cache",
        f"output.runs={runs}", f"output.profiles={tmp_path}/profiles", "train.steps=3", "train.batch_size=2",
        "schedule.warmup_steps=1", "validation.prompts=[]", "validation.loss_samples=4",
    ]  # fmt: skip
    make_tiny_sdxl.make(parts, runs, out, overrides)
    trained, shipped = load_file(runs / "tiny-sdxl-v" / "unet" / WEIGHTS), load_file(out / "unet" / WEIGHTS)
    start = load_file(parts / "pipeline" / "unet" / WEIGHTS)
    assert {tensor.dtype for tensor in shipped.values()} == {torch.float16}
    for name, tensor in shipped.items():
        torch.testing.assert_close(tensor, trained[name].half(), rtol=0, atol=0)
    assert (trained["add_embedding.linear_1.weight"] != start["add_embedding.linear_1.weight"]).any()
    pipeline = StableDiffusionXLPipeline.from_pretrained(out, local_files_only=True)
    image = pipeline("a red star", num_inference_steps=2, height=64, width=64).images[0]
    assert np.asarray(image).shape == (64, 64, 3)
    made_by = {file.name for file in (out / "made_by").iterdir()}
    configs = {make_tiny_sdxl.FIRST.name, make_tiny_sdxl.SECOND.name}
    assert made_by == configs | {"unet_log.jsonl", "summary.json", "first_summary.json"}
    assert (
        pipeline.scheduler.config.prediction_type == "v_prediction" and pipeline.scheduler.config.rescale_betas_zero_snr
    )
    assert json.loads((out / "made_by" / "summary.json").read_text())["steps"] == 3
    before = (out / "model_index.json").stat().st_mtime_ns
    make_tiny_sdxl.make(parts, runs, out, overrides)  # all is done: only the export is repeated
    assert (out / "model_index.json").stat().st_mtime_ns > before
