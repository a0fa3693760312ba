"""Runs that update convolutions of U-Nets: levers that change nothing, exact resume, and the file drawn again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slow_cases import slow_but
from torch import Tensor

from simpletune.adapters.files.attach import _merged, load_loras
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.starting_point import require_startable, start_from
from simpletune.adapters.methods.layers import innermost_layer, outer_layers, shape_of
from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

FILE = "pytorch_lora_weights.safetensors"
ADAPTERS: dict[str, dict] = {
    "lora": {"method": "lora", "rank": 3, "conv_rank": 2, "conv_alpha": 3.0, "targets": "all_linear"},
    "dora": {"method": "dora", "rank": 2, "conv_rank": 2},
    "lokr": {"method": "lokr", "factor": 4, "rank": 1, "conv_rank": 1},
    "lokr, whole": {"method": "lokr", "factor": 4, "rank": None, "conv_rank": 1024},
    "loha": {"method": "loha", "rank": 1, "conv_rank": 1},
}
LEVERS: dict[str, Any] = {"checkpointing": "all", "resident_blocks": 0, "offload_checkpoint_inputs": True}
CASES = [(a, v, w) for a in ADAPTERS for v in ("sd15", "sd2", "sdxl") for w in ("bf16", "int8", "nf4", "fp32")]


def trained(
    config: dict, name: str, resume: str | None = None, **changes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the last checkpoint's weights."""
    run = train(validate(config | {"name": name} | changes, "x"), resume=resume)
    last = max(
        checkpoint.checkpoint_folder(run, step) for step in (1, 2) if checkpoint.checkpoint_folder(run, step).exists()
    )
    return [row["loss"] for row in read_metrics(run)], load_file(last / checkpoint.TRAINABLE)


@pytest.mark.parametrize(("adapter", "version", "weights"), slow_but([("lora", "sd15", "int8")], CASES))
def test_levers_and_a_second_start_change_no_bit(
    adapter: str, version: str, weights: str, tiny_config: dict, small_unet: Callable[[str], dict]
) -> None:
    config = tiny_config | {
        "model": small_unet(version), "data": tiny_config["data"] | {"resolution": 64}, "adapter": ADAPTERS[adapter],
        "precision": {"weights": weights}, "checkpoint": {"every": 1}, "ema": {"decay": 0.9},
        "train": {"steps": 2, "clip": "per_parameter"},
    }  # fmt: skip
    plain = trained(config, "plain")
    assert len(plain[0]) == 2 and any(".conv1." in name for name in plain[1])
    trained(config, "levers", train=config["train"] | {"steps": 1}, memory=LEVERS)
    levers = trained(config, "levers", "latest", memory=LEVERS)
    torch.testing.assert_close(levers, plain, rtol=0, atol=0)
    option, drawn = validate(config, "x"), dict[str, Tensor]()
    rounding = {"rtol": 2**-7, "atol": 1e-4} if weights == "bf16" else {}  # a bf16 model draws with LoRAs in bf16
    shapes, updates = (
        option.model.architecture.known_shapes(),
        read_lora(Path(config["output"]["runs"]) / "plain" / FILE),
    )
    for started in (False, True):
        unet = option.model.load_denoiser(option.precision, torch.device("cpu"))
        if started:
            option.adapter.attach(unet, 3)
            require_startable("it", option.adapter, updates, shapes, 1.0)  # type: ignore[arg-type]
            assert start_from(unet, updates, 1.0) == 0
        else:
            load_loras(unet, [(Path(config["output"]["runs"]) / "plain" / FILE, 1.0)])
        for name, layer in outer_layers(unet):
            shape = shape_of(innermost_layer(layer))
            assert shape is not None
            weight = torch.ones(shape) / 4
            added = _merged(layer, weight) - weight
            torch.testing.assert_close(drawn.setdefault(name, added), added, **rounding)
    assert len(drawn) == len(option.adapter.modules(shapes))  # type: ignore[union-attr]
    assert all(added.any() for name, added in drawn.items() if name.endswith("conv1"))
