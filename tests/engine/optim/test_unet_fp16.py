"""Products in fp16 over U-Nets: units that overflow compute in fp32, also those that a skip connection reaches."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import unit_names
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from torch import Tensor

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.engine.fp16_blocks import finite_passes, fp16_blocks_of
from simpletune.engine.optim import loss_scale
from simpletune.models.shared.buckets import Framing
from simpletune.models.shared.conditioning import Conditioning
from simpletune.runs.folder import OVERFLOWS, read_metrics, read_rows
from simpletune.training.train import train

CPU = torch.device("cpu")
MIDDLE = "mid_block.resnets.0"
DOWN, SKIPPED_TO = "down_blocks.1.resnets.0", "up_blocks.0.resnets.0"
PROJECTED = "mid_block.attentions.0"
BLOCKS = {f"{PROJECTED}.transformer_blocks.{number}" for number in range(2)}


def inside(weights: dict[str, Tensor]) -> None:
    """The first convolution of a residual block exceeds fp16; the norm after it hides by how much."""
    weights[f"{MIDDLE}.conv1.weight"].mul_(1e5)
    weights[f"{MIDDLE}.time_emb_proj.weight"].mul_(1e5)


def between(weights: dict[str, Tensor]) -> None:
    """The output of a residual block exceeds fp16, and a skip connection carries it to the way up."""
    for name in ("conv2.bias", "conv_shortcut.bias"):
        bias = weights[f"{DOWN}.{name}"]
        bias.copy_(torch.linspace(-6e4, 6e4, len(bias)))


def outside(weights: dict[str, Tensor]) -> None:
    """The projection before an attention overflows, and so do its blocks; the projection after them hides it."""
    weights[f"{PROJECTED}.proj_in.weight"].mul_(1e6)
    weights[f"{PROJECTED}.proj_out.weight"].mul_(1e-6)


def summed(weights: dict[str, Tensor]) -> None:
    """What an attention adds to its input fits into fp16, and so does the input; their sum does not."""
    for name in (f"{MIDDLE}.conv2.bias", f"{PROJECTED}.proj_out.bias"):
        weights[name].copy_(torch.linspace(-4e4, 4e4, len(weights[name])))


TRAINED = [("sd2", "int8"), ("sdxl", "bf16"), ("sdxl", "int8"), ("sdxl", "nf4")]


@pytest.fixture
def changed(small_unet: Callable[[str], dict[str, str]], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A function that returns the option ``model`` of a small U-Net with other weights."""

    def change_weights(change: Callable[[dict[str, Tensor]], None], version: str) -> dict[str, str]:
        model = small_unet(version)
        unet = Path(shutil.copytree(model["unet"], tmp_path / "unet"))
        (file,) = unet.glob("*.safetensors")
        weights = load_file(file)
        change(weights)
        save_file(weights, file)
        return model | {"unet": str(unet)}

    return change_weights


def config_json(
    tiny_config: dict, model: dict, compute: str, weights: str = "int8", **changes: object
) -> dict[str, Any]:
    precision = {"weights": weights, "compute": compute}
    data = {"model": model, "data": tiny_config["data"] | {"resolution": 64}, "precision": precision}
    return copy.deepcopy(tiny_config | data | {"name": compute, "optimizer": {"lr": 1e-6}} | changes)


@pytest.mark.parametrize(("version", "weights"), slow_but([("sdxl", "int8")], TRAINED))
def test_a_unit_that_overflows_is_computed_in_fp32(
    version: str, weights: str, tiny_config: dict, changed: Callable[..., dict[str, str]]
) -> None:
    """It is found in the first step and computed in fp32 from the third on; the scale of the loss falls meanwhile."""
    model = changed(inside, version)
    memory = {"checkpointing": "all", "resident_blocks": 4, "offload_checkpoint_inputs": True}
    adapter = {"rank": 2, "targets": "all_linear"}  # the projections between units, too
    more = {"train": {"steps": 4}, "memory": memory, "adapter": adapter}
    run = train(validate(config_json(tiny_config, model, "fp16", weights, **more), "fp16"))
    middle = unit_names(version).index(MIDDLE)
    overflows = list(read_rows(run / OVERFLOWS))
    assert [(row["step"], row["blocks"]) for row in overflows] == [(1, [middle]), (2, [])]
    assert json.loads((run / "summary.json").read_text())["fp32_blocks"] == [middle]
    rows = list(read_metrics(run))
    scales = [row["loss_scale"] for row in [*overflows, *rows]]
    assert scales == [loss_scale.INITIAL / 2**halved for halved in (0, 1, 2, 2)]
    more["memory"] = {"checkpointing": "none"}
    wide = config_json(tiny_config, model, "fp32", weights if weights != "bf16" else "fp32", **more)
    plain = [row["loss"] for row in read_metrics(train(validate(wide, "fp32")))]
    assert [row["step"] for row in rows] == [3, 4]
    assert [row["loss"] for row in rows] == pytest.approx(plain[2:], rel=5e-3)


CHANGES = [(inside, "sd2"), (between, "sd2"), (between, "sdxl"), (outside, "sdxl"), (summed, "sdxl")]
FAST = [case for case in CHANGES if case != (between, "sdxl")]


@pytest.mark.parametrize(("change", "version"), slow_but(FAST, CHANGES))
def test_predictions_with_such_units_are_those_of_fp32(
    change: Any, version: str, tiny_config: dict, changed: Callable[..., dict[str, str]]
) -> None:
    model = changed(change, version)
    generator, found = torch.Generator().manual_seed(3), {}
    for compute in ("fp16", "fp32"):
        config = resolve_folders(validate(config_json(tiny_config, model, compute), compute))
        unet, dtype = config.model.load_denoiser(config.precision, CPU), config.precision.compute_dtype()
        if compute == "fp16":
            z_t, text = (
                torch.randn(shape, generator=generator) for shape in ((1, 4, 8, 8), (1, 77, config.model.text.width))
            )
            pooled = torch.randn(1, config.model.text.pooled_width, generator=generator)
            text = Conditioning(text, pooled=pooled if config.model.text.pooled_width else None)
            text = config.model.text.framed(text, [Framing((64, 64), (0, 0), (64, 64))])
        with torch.no_grad():
            predict = partial(config.model.predict, unet, z_t, torch.tensor([500.0]), text, dtype)
            found[compute] = finite_passes(unet, predict).float()
        if compute == "fp16":
            blocks = fp16_blocks_of(unet)
            assert blocks is not None
            names = unit_names(version)
            wide = {names[index] for index in blocks.wide_in_generation}
            expected = {
                inside: {MIDDLE}, between: {DOWN, MIDDLE, SKIPPED_TO}, outside: {MIDDLE, *BLOCKS},
                summed: {f"{PROJECTED}.transformer_blocks.1", "mid_block.resnets.1"},
            }[change]  # fmt: skip
            assert wide >= expected and len(wide) < len(names)
            assert wide == expected or change in (between, summed)  # which spread
    assert found["fp32"].std() > 0.1
    torch.testing.assert_close(found["fp16"], found["fp32"], rtol=0.02, atol=0.02)
