"""SD3 Medium, SD3.5 Large, SD 1.5 and SDXL at full size, random weights, on the CPU: as the real ones are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_sd15
import tiny_sdxl
import torch

from benchmarks.tiny_models import tiny_sd3
from simpletune.models.sd3.sd3_files import SD3_MEDIUM, SD35_LARGE
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_config import bundled_configs
from simpletune.models.sdxl.sdxl_config import bundled_configs as xl_configs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipeline_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny pipeline whose transformer/ is the bundled config of a hub name; text widths follow from it."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("full") / "pipeline"
        tiny_sd3.build(folder, replace(tiny_sd3.MINIMAL, clip_widths=(768, 1280), t5_width=4096), dtype="bf16")
        (folder / "transformer" / "config.json").write_text(json.dumps(SD3(pretrained=name).files.known_config()))
        (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
        return folder

    return make


@pytest.fixture(scope="module")
def medium(pipeline_of: Callable[[str], Path]) -> Path:
    return pipeline_of(SD3_MEDIUM)


INT8 = {"weights": "int8", "compute": "fp32"}  # products in bf16 take up to 100 times as long on a CPU without AVX-512
LEVERS = {
    "resident": {},
    "plan": {"modulation": "plan", "modulation_window": 2},
    "streamed": {"modulation": "plan", "modulation_window": 2, "resident_blocks": 0, "offload_checkpoint_inputs": True},
}


def trained(pipeline: Path, images: Path, folder: Path, *, model: dict | None = None, **changes: object) -> dict:
    """Take steps at 64 px in a process of its own, whose peak memory is the run's: the summary."""
    config = {
        "name": "full_size", "device": "cpu",
        "model": {"pretrained": str(pipeline), "init": "random"} | (model or {"t5_length": 77}),
        "data": {"path": str(images), "resolution": 64, "max_upscale": None},
        "validation": {"prompts": [], "loss_samples": 0}, "profile": {"max_traces": 0},
        "output": {name: str(folder / name) for name in ("runs", "profiles", "cache")},
    }  # fmt: skip
    file = folder / "full_size.json"
    file.write_text(json.dumps(config | {"adapter": {"rank": 16}, "precision": INT8} | changes))
    subprocess.run([sys.executable, "-m", "simpletune", "train", file], check=True)
    summary = json.loads((folder / "runs" / "full_size" / "summary.json").read_text())
    shown = ("seconds_setup", "seconds_per_step", "seconds_total", "peak_rss_gib", "first_loss")
    print({key: summary[key] for key in shown})
    return summary


@pytest.mark.parametrize("lever", LEVERS)
def test_two_int8_lora_steps(lever: str, medium: Path, tiny_images: Path, tmp_path: Path) -> None:
    summary = trained(medium, tiny_images, tmp_path, memory=LEVERS[lever], train={"steps": 2})
    assert summary["total_parameters"] == 2_028_328_000
    assert summary["trainable_parameters"] == 9_388_032
    assert summary["peak_rss_gib"] < 4.25  # streamed: 3.81 to 4.02 measured


@pytest.mark.timeout(3600)
def test_an_int8_lora_step_of_sd35_large_streamed(
    pipeline_of: Callable[[str], Path], tiny_images: Path, tmp_path: Path
) -> None:
    """Needs 10 to 12.5 GiB of memory: on the CPU the host's copy of the blocks is the only one; beside it stand
    pages of the quantised base that is being cached, as many as the system has not reclaimed yet."""
    memory = LEVERS["streamed"] | {"modulation_window": 1}
    summary = trained(pipeline_of(SD35_LARGE), tiny_images, tmp_path, memory=memory, train={"steps": 1})
    assert summary["total_parameters"] == 8_056_627_520
    assert summary["trainable_parameters"] == 23_580_672
    assert summary["peak_rss_gib"] < 14


@pytest.mark.parametrize("precision", [{"weights": "bf16"}, INT8], ids=["bf16", "int8"])
def test_five_lora_steps_of_sd15(
    precision: dict, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision is not INT8 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("products in bf16 take minutes on a CPU without AVX-512")
    monkeypatch.setitem(tiny_sd15.TEXT, "sd15", 768)
    pipeline = tiny_sd15.build(tmp_path / "pipeline", "sd15", dtype="bf16")
    (pipeline / "unet" / "config.json").write_text(json.dumps(bundled_configs()["sd15"]["unet"]))
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    options: dict = {"adapter": {"rank": 8}, "precision": precision, "train": {"steps": 5}}
    summary = trained(pipeline, tiny_images, tmp_path, model={"family": "sd15"}, **options)
    assert summary["total_parameters"] == 859_520_964
    assert summary["trainable_parameters"] == 8 * 199_296
    assert summary["peak_rss_gib"] < 6


@pytest.mark.timeout(3600)
def test_two_int8_lora_steps_of_sdxl_streamed(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_sdxl, "CLIP_L", 768)
    monkeypatch.setattr(tiny_sdxl, "CLIP_G", 1280)
    pipeline = tiny_sdxl.build(tmp_path / "pipeline", dtype="bf16")
    (pipeline / "unet" / "config.json").write_text(json.dumps(xl_configs()["sdxl"]["unet"]))
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    memory = {"resident_blocks": 0, "offload_checkpoint_inputs": True}
    options: dict = {"model": {"family": "sdxl"}, "memory": memory, "train": {"steps": 2}}
    summary = trained(pipeline, tiny_images, tmp_path, **options)
    assert summary["total_parameters"] == 2_567_463_684
    assert summary["trainable_parameters"] == 23_224_320
    assert summary["peak_rss_gib"] < 8
