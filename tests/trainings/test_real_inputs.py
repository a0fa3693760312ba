"""Real photographs, paintings, autoencoder and tokenizers (``SIMPLETUNE_TEST_DATA``)."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_models import tiny_sd3
from simpletune.config.load import validate
from simpletune.data.sources.image_files import crop_to_bucket, decode
from simpletune.models.sd3.sd3_option import SD3
from simpletune.training.train import train

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def real_tokens_pipeline(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline with SD3 Medium's own tokenizers."""
    folder = tmp_path_factory.mktemp("real") / "pipeline"
    tiny_sd3.build(folder, tiny_sd3.MINIMAL, dtype="fp32", tokenizers=real_data / "sd3_medium_config")
    return folder


def with_real_inputs(tiny_config: dict, pipeline: Path, real_data: Path, **data: object) -> dict:
    config = copy.deepcopy(tiny_config)
    config["model"] = {"pretrained": str(pipeline), "vae": str(real_data / "taesd3"), "t5_length": 77}
    config["data"] = {"resolution": 128, **data}
    config["train"]["steps"] = 10
    config["validation"] = {"loss_samples": 4, "steps": 1}
    return config


@pytest.mark.parametrize("name", ["dreambooth/dog6/00.jpg", "paintings/sargent/elizabeth_winthrop_chanler_1893.jpg"])
def test_taesd3_gives_photographs_back(name: str, real_data: Path) -> None:
    model = SD3(vae=str(real_data / "taesd3"))
    vae = model.autoencoder.load(torch.device("cpu"), torch.float32)
    pixels = torch.from_numpy(crop_to_bucket(decode((real_data / name).read_bytes()), (128, 128)))[None]
    with torch.no_grad():
        z_0 = model.autoencoder.encode(vae, pixels)
        back = model.autoencoder.decode(vae, z_0)
    assert z_0.shape == (1, 16, 16, 16)
    psnr = -10 * math.log10((back - (pixels / 2 + 0.5)).square().mean().item())
    print(f"{name}: round trip {psnr:.1f} dB at 128 px")
    assert psnr > 28


def test_trains_on_paintings_of_many_shapes(tiny_config, real_tokens_pipeline, real_data: Path) -> None:
    config = with_real_inputs(
        tiny_config, real_tokens_pipeline, real_data, path=str(real_data / "paintings" / "sargent")
    )
    run = train(validate(config, "sargent"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert (run / "samples" / "grid.png").exists()


def test_trains_on_photographs_with_one_prompt(tiny_config, real_tokens_pipeline, real_data: Path, capsys) -> None:
    data = {"path": str(real_data / "dreambooth" / "dog6"), "prompt": "a photo of sks dog"}
    config = with_real_inputs(tiny_config, real_tokens_pipeline, real_data, **data)
    config["validation"]["prompts"] = []
    run = train(validate(config, "dog6"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert "captions from one prompt for all pictures: 'a photo of sks dog'" in capsys.readouterr().out
