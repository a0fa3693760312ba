"""Products in fp16 on torch's CUDA build over a stub of its runtime: devices, types and synchronisations, no values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from simpletune.config.load import validate
from simpletune.runs.folder import read_metrics
from simpletune.stages.step.train_step import TrainStep
from simpletune.system.devices import BF16_FROM
from simpletune.training.train import train

pytestmark = pytest.mark.dry
CASES: dict[str, dict] = {
    "lora-int8": {"precision": {"weights": "int8"}},
    "lora-nf4": {"precision": {"weights": "nf4"}},
    "lora-bf16": {"precision": {"weights": "bf16"}},
    "lora-int8-streamed-plan": {
        "precision": {"weights": "int8"},
        "memory": {"checkpointing": "all", "resident_blocks": 0, "modulation": "plan"},
    },
    "full": {"adapter": {"method": "full"}, "precision": {"weights": "fp32", "compute": "fp16"}},
    "average-accumulation": {
        "precision": {"weights": "int8"}, "ema": {"decay": 0.9}, "train": {"steps": 6, "gradient_accumulation": 2},
    },
    "sdxl-convolutions": {
        "precision": {"weights": "int8"}, "adapter": {"method": "dora", "rank": 4, "conv_rank": 2},
    },
    "sdxl-lora-int8-streamed": {
        "precision": {"weights": "int8"}, "memory": {"checkpointing": "all", "resident_blocks": 0},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_auto_is_fp16_on_an_old_card_and_no_step_waits(
    case: str, tiny_config: dict, small_unet: Callable[[str], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA itself raises where the host waits in a step, from the third on; whole-device waits are counted."""
    waits: list[int] = []
    honest, steps, synchronize = TrainStep.step, [], torch.cuda.synchronize

    def waited(*args: Any) -> None:
        waits.append(len(steps))
        synchronize(*args)

    def step(self: TrainStep, *args: Any) -> Any:
        if self.accelerator.device.type != "cuda":  # the prediction's step on fake tensors
            return honest(self, *args)
        steps.append(self)
        torch.cuda.set_sync_debug_mode("error" if len(steps) > 2 else "default")
        monkeypatch.setattr(torch.cuda, "synchronize", waited)
        try:
            return honest(self, *args)
        finally:
            monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(TrainStep, "step", step)
    AcceleratorState._reset_state(reset_partial_state=True)  # fixtures may have fixed the CPU
    data = tiny_config | {"device": "cuda", "train": {"steps": 6}, **CASES[case]}
    if case.startswith("sdxl"):
        data |= {"model": small_unet("sdxl"), "data": tiny_config["data"] | {"resolution": 64}}
    folder = train(validate(data, case), force=True)
    compute = json.loads((folder / "config.json").read_text())["precision"]["compute"]
    is_old = torch.cuda.get_device_capability() < BF16_FROM
    assert compute == ("fp16" if is_old or case == "full" else "bf16")
    rows = read_metrics(folder)
    assert len(rows) == 6 and all(("loss_scale" in row) == (compute == "fp16") for row in rows)
    assert len(steps) == 6 and waits == []
    if compute == "fp16":
        fp16 = steps[0].fp16
        assert fp16 is not None and fp16.scale.scale.is_cuda and fp16.scale.overflow.is_cuda
