"""SD3 Medium at its full size with random weights, on the CPU: the same code that loads the real thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simpletune.config.load import validate
from simpletune.demo import tiny_sd3
from simpletune.families.sd3.shapes import sd3_medium_config
from simpletune.training.loop import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline whose transformer/ is SD3 Medium's config; text widths follow from it."""
    folder = tmp_path_factory.mktemp("medium") / "pipeline"
    tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, clip_widths=(768, 1280), t5_width=4096), dtype="bf16")
    (folder / "transformer" / "config.json").write_text(json.dumps(sd3_medium_config()))
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    return folder


LEVERS = {
    "resident": {},
    "plan": {"modulation": "plan", "modulation_window": 2},
    "streamed": {"modulation": "plan", "modulation_window": 2, "resident_blocks": 0, "offload_checkpoint_inputs": True},
}


@pytest.mark.parametrize("lever", LEVERS)
def test_two_int8_lora_steps_at_256_px(lever: str, medium: Path, tiny_pictures: Path, tmp_path: Path) -> None:
    config = {
        "name": "medium", "device": "cpu",
        "model": {"pretrained": str(medium), "init": "random", "t5_length": 77},
        "data": {"path": str(tiny_pictures), "resolution": 256, "max_upscale": None},
        "memory": LEVERS[lever], "adapter": {"rank": 16}, "precision": {"weights": "int8"}, "train": {"steps": 2},
        "validation": {"prompts": [], "eval_samples": 0}, "profile": {"max_traces": 0},
        "output": {name: str(tmp_path / name) for name in ("runs", "profiles", "cache")},
    }  # fmt: skip
    run = train(validate(config, "medium"))
    summary = json.loads((run / "summary.json").read_text())
    print(
        lever,
        {key: summary[key] for key in ("seconds_setup", "seconds_per_step", "peak_rss_gib", "stages", "first_loss")},
    )
    assert summary["total_parameters"] == 2_028_328_000
    assert summary["trainable_parameters"] == 9_388_032
    assert summary["peak_rss_gib"] < 4
