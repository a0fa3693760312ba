"""Steps on real and on fake tensors, side by side."""

from __future__ import annotations

from simpletune.config.schema import TrainConfig
from simpletune.estimate.simulate.reports import StepReport
from simpletune.estimate.simulate.simulate import simulate, train
from simpletune.stages.load import load_base
from simpletune.stages.step.synthetic import CPU
from simpletune.system.startup import pause_collection

LEVERS: dict[str, dict] = {
    "whole-table": {"memory": {"crop_positions": False}},
    "boundaries": {"memory": {"offload_checkpoint_inputs": True}},
    "plan": {"memory": {"modulation": "plan", "modulation_window": 3}},
    "plan-streamed": {"memory": {"modulation": "plan", "resident_blocks": 1}},
    "streamed": {"memory": {"resident_blocks": 0}},
    "less": {"memory": {"keep_attention": "all", "feed_forward": 64}},
    "feed-forward-only": {"memory": {"checkpointing": "feed_forward"}},
    "in-backward": {"memory": {"optimizer_in_backward": True}, "train": {"steps": 4, "clip": "per_parameter"}},
    "in-backward-streamed": {
        "memory": {"optimizer_in_backward": True, "resident_blocks": 1}, "train": {"steps": 4, "clip": "per_parameter"},
    },
}  # fmt: skip


def real(config: TrainConfig) -> StepReport:
    with pause_collection():
        sizes = [(config.resolution, config.resolution)]
        return train(config, denoiser=load_base(config, CPU, sizes)).report


def assert_same_bytes(config: TrainConfig) -> None:
    measured, predicted = real(config), simulate(config)
    assert predicted.peak == measured.peak
    assert predicted.phases == measured.phases
    assert predicted.steady == measured.steady
    assert predicted.host_bytes == measured.host_bytes
