"""Sliders of tiny models: trained, resumed and predicted."""

from __future__ import annotations

import math
from typing import Any

import torch
from simulated import assert_same_bytes
from tiny_runs import resumed_from, run_with, saved_weights

from simpletune.config.load import validate
from simpletune.runs.folder import read_metrics

CONCEPT: dict[str, Any] = {
    "directions": [{"target": "a dot", "positive": "a large dot", "negative": "a small dot", "preserved": ["a heart"]}],
    "resolutions": [64],
    "drawing_steps": 5,
}


def assert_slider_resumes(config: dict[str, Any]) -> None:
    """Train four steps of a slider, which draws by the family's own solver, go on from the second, and predict it.

    Args:
        config: of a run on pictures, which keeps the checkpoint of step 2.
    """
    data = {key: value for key, value in config.items() if key != "data"}
    drawn = {"prompts": ["a dot"], "every": 4, "steps": 2, "loss_samples": 0}
    data |= {"concept": CONCEPT, "validation": config["validation"] | drawn}
    whole = run_with(data)
    assert all(math.isfinite(row["loss"]) for row in read_metrics(whole))
    before, after = saved_weights(whole, 2), saved_weights(whole, 4)
    assert any((before[name] != tensor).any() for name, tensor in after.items())
    assert len(list((whole / "samples" / "step-000004").rglob("*.png"))) == 4
    torch.testing.assert_close(saved_weights(resumed_from(whole, data, 2), 4), after, rtol=0, atol=0)
    assert_same_bytes(validate(data, "slider"))
