"""Training from scratch in two stages: random weights at a small size, then their average at a larger one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_sd15
import torch
from blocks import BLOCKS, CONFIG
from safetensors.torch import load_file, save_file

from simpletune.config.load import read_config, read_json, validate
from simpletune.data.demo import demo_scenes
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import TABLE
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics, read_summary
from simpletune.training.prepare import prepare_only
from simpletune.training.train import train

WEIGHTS = "diffusion_pytorch_model.safetensors"


def stage(name: str, part: str, data: dict[str, Any], place: Path, overrides: list[str]) -> Path:
    """Prepare and run a shipped stage at toy size, from the folder that it names its first stage relative to."""
    common = [
        "device=cpu", f"data.path={data['data']['path']}", "train.steps=4", "train.batch_size=2",
        "precision.compute=fp32",
        "train.global_batch=4", "schedule.warmup_steps=1", "checkpoint.every=2", "validation.every=null",
        "validation.prompts=[]", "validation.loss_samples=2", "profile.max_traces=0", "output.report=false",
        f"output.runs={place}/runs", f"output.profiles={place}/profiles", f"output.cache={place}/cache",
    ]  # fmt: skip
    config = read_config(Path(name), [*common, *overrides])[0]
    prepare_only(config)
    prepared = set((place / "cache").rglob("*.safetensors"))
    run = train(config)
    assert set((place / "cache").rglob("*.safetensors")) == prepared, "training encodes nothing"
    summary = read_summary(run)
    assert summary is not None and summary["complete"] and [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    return run / part


def of_unet(place: Path) -> dict[str, Any]:
    """Stable Diffusion 2 base at toy size: a tiny U-Net that predicts noise, and pictures of 512 px."""
    pipeline = tiny_sd15.build(place / "sd2", "sd2")
    noise = pipeline / "scheduler" / "scheduler_config.json"
    noise.write_text(json.dumps(json.loads(noise.read_text()) | {"prediction_type": "epsilon"}))
    demo_scenes.write_folder(place / "pictures", demo_scenes.sample_scenes(4, seed=3, style="flat"), seed=3, pixels=512)
    return {"model": {"pretrained": str(pipeline)}, "data": {"path": str(place / "pictures")}}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family, part", [("sd3", "transformer"), pytest.param("sd2", "unet", marks=pytest.mark.slow)])
def test_the_second_stage_begins_with_the_average_of_the_first(
    family: str, part: str, tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    """The second stage learns at next to no rate, so that its weights are those that it began with."""
    sd3 = family == "sd3"
    data = tiny_config if sd3 else of_unet(tmp_path)
    pipeline = data["model"]["pretrained"]
    given = [f"model.pretrained={pipeline}", *(["model.t5_length=8"] if sd3 else [])]
    sides = (32, 64) if sd3 else (256, 512)
    first = stage(f"{family}_from_scratch_256", part, data, tmp_path,
                  [*given, f"data.resolution={sides[0]}", "ema.decay=0.5"])  # fmt: skip
    named = read_json(Path(f"{family}_from_scratch_512"))["model"][part]
    assert first == tmp_path / named, "the second stage names the folder that the first one writes"
    result = load_file(first / WEIGHTS)
    saved = checkpoint.checkpoint_folder(first.parent, 4)
    average, last = (load_file(saved / file) for file in (checkpoint.AVERAGE, checkpoint.TRAINABLE))
    names = [name for name in average if not torch.equal(average[name].float(), last[name].float())]
    assert names and all(name in result for name in names)
    for name in names:
        torch.testing.assert_close(result[name].float(), average[name].float(), rtol=1e-6, atol=0)

    base = load_file(Path(pipeline) / part / WEIGHTS)
    assert any(not torch.equal(result[name].float(), base[name].float()) for name in names), "random, not pretrained"
    cached = set((tmp_path / "cache" / "prompts").rglob("*.safetensors"))
    second = stage(f"{family}_from_scratch_512", part, data, tmp_path,
                   [*given, f"data.resolution={sides[1]}", f"model.{part}={first}", "optimizer.lr=1e-30",
                    "optimizer.weight_decay=0"])  # fmt: skip
    for name, tensor in load_file(second / WEIGHTS).items():
        torch.testing.assert_close(tensor, result[name], rtol=1e-6, atol=0)
    assert set((tmp_path / "cache" / "prompts").rglob("*.safetensors")) == cached, "prompts are encoded once for both"
    latents = [load_file(file)["z_0"].shape[-1] for file in (tmp_path / "cache" / "latents").rglob("*.safetensors")]
    assert set(latents) == {side // 8 for side in sides}


def test_both_stages_take_the_same_batch_and_average(tiny_config: dict[str, Any]) -> None:
    for family in ("sd2", "sd3"):
        both = [read_json(Path(f"{family}_from_scratch_{side}")) for side in (256, 512)]
        for key in ("adapter", "precision", "optimizer", "schedule", "ema"):
            assert both[0][key] == both[1][key], key
        assert both[0]["train"]["batch_size"] == both[1]["train"]["batch_size"]
        assert [each["data"]["resolution"] for each in both] == [256, 512] and "init" not in both[1]["model"]
        first = copy.deepcopy(both[0]) | {"data": {**both[0]["data"], "path": tiny_config["data"]["path"]}}
        assert validate(first, "first").adapter.trains_base


def test_modulations_and_the_output_start_at_a_hundredth() -> None:
    """DiT starts them at zero (arXiv:2212.09748, section 3.2)."""
    tensors = SD3().architecture.random_tensors(CONFIG, 0)
    weights = {name: tensors.get(name) for name in tensors.names - {TABLE} if name.endswith(".weight")}
    spread = {name: float(w.std()) * w[0].numel() ** 0.5 for name, w in weights.items()}
    blocks = [
        f"transformer_blocks.{n}.{norm}.linear.weight" for n in range(BLOCKS) for norm in ("norm1", "norm1_context")
    ]
    small = {*blocks, "norm_out.linear.weight", "proj_out.weight"}
    assert small == {name for name, each in spread.items() if 0.008 < each < 0.012}
    assert all(0.8 < spread[name] < 1.2 for name in spread.keys() - small)


def test_random_weights_take_the_position_table_from_the_folder(tmp_path: Path) -> None:
    computed = SD3().architecture.random_tensors(CONFIG, 0, tmp_path).get(TABLE)
    save_file({TABLE: 2 * computed}, tmp_path / WEIGHTS)
    torch.testing.assert_close(
        SD3().architecture.random_tensors(CONFIG, 0, tmp_path).get(TABLE), 2 * computed, rtol=0, atol=0
    )
    assert computed.shape == SD3().architecture.empty_tensors(CONFIG).get(TABLE).shape and computed.std() > 0.1
