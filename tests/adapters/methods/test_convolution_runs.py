"""Runs that update convolutions of U-Nets: levers that change nothing, exact resume, and the file drawn again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slow_cases import slow_but
from torch import Tensor

from simpletune.adapters.files.attach import load_loras
from simpletune.adapters.methods.layers import outer_layers
from simpletune.commands.train.train import train
from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics

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
        checkpoint.checkpoint_folder(run, step) for step in (2, 4) if checkpoint.checkpoint_folder(run, step).exists()
    )
    return [row["loss"] for row in read_metrics(run)], load_file(last / checkpoint.TRAINABLE)


@pytest.mark.parametrize(
    ("adapter", "version", "weights"), slow_but([("lora", "sd15", "int8"), ("dora", "sdxl", "bf16")], CASES)
)
def test_levers_and_a_second_start_change_no_bit(
    adapter: str, version: str, weights: str, tiny_config: dict, small_unet: Callable[[str], dict]
) -> None:
    config = tiny_config | {
        "model": small_unet(version), "data": tiny_config["data"] | {"resolution": 64}, "adapter": ADAPTERS[adapter],
        "precision": {"weights": weights}, "checkpoint": {"every": 2}, "ema": {"decay": 0.9},
        "train": {"steps": 4, "clip": "per_parameter"},
    }  # fmt: skip
    plain = trained(config, "plain")
    assert len(plain[0]) == 4 and any(".conv1." in name for name in plain[1])
    trained(config, "levers", train=config["train"] | {"steps": 2}, memory=LEVERS)
    levers = trained(config, "levers", "latest", memory=LEVERS)
    torch.testing.assert_close(levers, plain, rtol=0, atol=0)
    file = validate(config, "x").output.runs / "plain" / FILE
    unet = validate(config, "x").model.load_denoiser(validate(config, "x").precision, torch.device("cpu"))
    load_loras(unet, [(file, 1.0)])
    layers = dict(outer_layers(unet))
    assert {name for name, _ in plain_layers(plain[1])} == set(layers)


def plain_layers(weights: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The updated layers' names with one factor of each."""
    ends = ("lora_A", "lokr_w1", "lokr_w1_a", "hada_w1_a")
    return [
        (name[: name.index(f".{end}")], t) for name, t in weights.items() for end in ends if f".{end}." in f"{name}."
    ]
