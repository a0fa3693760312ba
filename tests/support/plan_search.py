"""Fixtures of the searches for a plan: one model for all, and predictions that they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from simpletune.config.schema import TrainConfig
from simpletune.estimate.estimate_command import read_for_estimate


@pytest.fixture(autouse=True)
def searches_share_what_they_predict(monkeypatch: pytest.MonkeyPatch, simulate_once) -> None:
    monkeypatch.setattr("simpletune.estimate.planning.simulate", simulate_once)


@pytest.fixture
def config_of(shared_cache: Path) -> Callable[..., TrainConfig]:
    """The demo's model of three blocks, whose activations take most at this size."""

    def make(*overrides: str) -> TrainConfig:
        large = ["train.batch_size=16", "data.resolution=256", "optimizer.name=adamw", "precision.compute=bf16"]
        here = [f"output.cache={shared_cache}", "validation.prompts=[]", "precision.weights=bf16", "device=cpu"]
        return read_for_estimate(Path("configs/demo.json"), ["data.path=/nowhere", *large, *here, *overrides])

    return make
