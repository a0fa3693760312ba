"""Losses over a few steps with each lever on and off, from the same seed: equal to the last bit where it is exact."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from slow_cases import slow_but
from tiny_runs import TrainOnce, saved_weights

from simpletune.config.load import validate
from simpletune.runs.folder import read_metrics
from simpletune.training.train import train

STEPS, FULL_STEPS = 3, 2
GOLDEN = Path(__file__).parents[2] / "reference" / "golden_losses.json"
PER_PARAMETER = {"clip": "per_parameter", "clip_norm": 0.5}
BASES: dict[str, dict] = {
    "lora": {"adapter": {"method": "lora", "rank": 4}, "precision": {"weights": "int8", "compute": "bf16"}},
    "full": {
        "adapter": {"method": "full"}, "precision": {"weights": "bf16"}, "optimizer": {"name": "adamw8bit", "lr": 1e-3},
        "train": {"steps": FULL_STEPS, "batch_size": 2, **PER_PARAMETER},
    },
    "rotated": {
        "adapter": {"method": "lora", "rank": 4}, "data": {"resolution": 64},  # more rows than are dequantised
        "precision": {"weights": "int8", "compute": "bf16", "products": "int8", "rotation": "hadamard"},
    },
    "fp16": {"adapter": {"method": "lora", "rank": 4}, "precision": {"weights": "int8", "compute": "fp16"}},
    "full-fp16": {
        "adapter": {"method": "full"}, "precision": {"weights": "fp32", "compute": "fp16"},
        "optimizer": {"name": "adamw8bit", "lr": 1e-3},
        "train": {"steps": FULL_STEPS, "batch_size": 2, **PER_PARAMETER},
    },
}  # fmt: skip
EXACT: dict[str, tuple[str, dict]] = {
    "lora-whole-table": ("lora", {"crop_positions": False}),
    "lora-no-checkpointing": ("lora", {"checkpointing": "none"}),
    "lora-one-block": ("lora", {"checkpointing": 1}),
    "lora-host-boundaries": ("lora", {"offload_checkpoint_inputs": True}),
    "lora-streamed": ("lora", {"resident_blocks": 0}),
    "lora-one-resident-host": ("lora", {"resident_blocks": 1, "offload_checkpoint_inputs": True}),
    "lora-no-cache": ("lora", {"cache_quantised": False}),
    "lora-attention-kept": ("lora", {"keep_attention": "all"}),
    "lora-feed-forward-alone": ("lora", {"feed_forward": "alone"}),
    "lora-feed-forward-only": ("lora", {"checkpointing": "feed_forward"}),
    "lora-less-streamed-host": (
        "lora", {"keep_attention": 2, "feed_forward": "alone", "resident_blocks": 0, "offload_checkpoint_inputs": True}
    ),
    "lora-all": (
        "lora", {
            "crop_positions": False, "cache_quantised": False, "keep_attention": 2, "feed_forward": "alone",
            "resident_blocks": 1, "offload_checkpoint_inputs": True,
        }
    ),
    "rotated-less": ("rotated", {"keep_attention": "all", "feed_forward": "alone"}),
    "full-less-streamed": (
        "full",
        {"keep_attention": "all", "feed_forward": "alone", "optimizer_in_backward": True, "resident_blocks": 0},
    ),
    "fp16-attention-kept": ("fp16", {"keep_attention": "all", "resident_blocks": 1}),
    "rotated-no-checkpointing": ("rotated", {"checkpointing": "none"}),
    "rotated-streamed-no-cache": ("rotated", {"resident_blocks": 0, "cache_quantised": False}),
    "rotated-one-resident-host": ("rotated", {"resident_blocks": 1, "offload_checkpoint_inputs": True}),
    "full-host-boundaries": ("full", {"offload_checkpoint_inputs": True}),
    "full-in-backward": ("full", {"optimizer_in_backward": True}),
    "full-in-backward-streamed": ("full", {"optimizer_in_backward": True, "resident_blocks": 0}),
    "fp16-one-resident-host": ("fp16", {"resident_blocks": 1, "offload_checkpoint_inputs": True}),
    "full-fp16-all": (
        "full-fp16", {"optimizer_in_backward": True, "resident_blocks": 1, "offload_checkpoint_inputs": True}
    ),
    "full-all": ("full", {"optimizer_in_backward": True, "resident_blocks": 1, "offload_checkpoint_inputs": True}),
}  # fmt: skip
FAST = ("lora-no-checkpointing", "lora-all", "full-all")
PLANNED: dict[str, dict] = {
    "plan-less": {"modulation": "plan", "modulation_window": 2, "keep_attention": "all", "feed_forward": "alone"},
    "plan": {"modulation": "plan", "modulation_window": 2},
    "plan-streamed": {"modulation": "plan", "modulation_window": 2, "resident_blocks": 0},
    "plan-less-streamed": {
        "modulation": "plan", "modulation_window": 2, "keep_attention": "all", "feed_forward": "alone",
        "resident_blocks": 1,
    },
    "plan-streamed-host": {"modulation": "plan", "resident_blocks": 1, "offload_checkpoint_inputs": True},
}  # fmt: skip


Result = tuple[list[float], dict[str, torch.Tensor]]


@pytest.fixture
def run_with(tiny_config: dict, three_blocks: Path, train_once: TrainOnce):
    """A few steps of one base with some memory options: the losses, and the weights afterwards.

    Without options it is trained once for all tests.
    """

    def run(base: str, memory: dict, precision: dict | None = None) -> Result:
        chosen = copy.deepcopy(BASES[base])
        data = copy.deepcopy(tiny_config) | {"train": {"steps": STEPS, "batch_size": 2}}
        data |= chosen | {"data": data["data"] | chosen.get("data", {})}
        data["model"]["pretrained"] = str(three_blocks)
        data |= {"memory": memory, "precision": precision or data["precision"]}
        folder = train(validate(data, "lever")) if memory else train_once(data)
        losses = [row["loss"] for row in read_metrics(folder)]
        assert len(losses) == data["train"]["steps"]
        return losses, saved_weights(folder, len(losses))

    return run


@pytest.mark.parametrize("case", slow_but(FAST, EXACT))
def test_an_exact_lever_changes_no_bit(case: str, run_with) -> None:
    base, memory = EXACT[case]
    losses, weights = run_with(base, memory)
    plain_losses, plain_weights = run_with(base, {})
    assert losses == plain_losses and len(set(losses)) == len(losses)
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=0)


@pytest.mark.parametrize("case", slow_but(["plan-less-streamed"], PLANNED))
def test_the_plan_changes_the_last_bits_at_most(case: str, run_with) -> None:
    fp32 = {"weights": "int8", "compute": "fp32"}
    losses, _ = run_with("lora", PLANNED[case], fp32)
    plain, _ = run_with("lora", {}, fp32)
    assert losses == pytest.approx(plain, rel=1e-6)


def test_the_plan_in_fp16_changes_little(run_with) -> None:
    losses, _ = run_with("fp16", PLANNED["plan-streamed-host"])
    plain, _ = run_with("fp16", {})
    assert losses == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("base", slow_but(["lora", "full", "fp16"], BASES))
def test_losses_are_those_recorded(base: str, run_with) -> None:
    """In bf16, where machines differ: within the tolerance of test_golden.py."""
    losses, _ = run_with(base, {})
    print(f'GOLDEN "levers-{base}": {json.dumps(losses)}')
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[f"levers-{base}"][: len(losses)], rel=5e-3)
