"""Two processes that train together, and runs to compare with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launcher
from safetensors.torch import load_file
from tiny_runs import merged

from benchmarks.tiny_models import tiny_sd3
from simpletune.data.demo import demo_scenes
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics

LEVERS = {"resident_blocks": 1, "offload_checkpoint_inputs": True}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return of_two_blocks(tmp_path_factory.mktemp("processes"), count=6, pixels=32)


def of_two_blocks(place: Path, count: int, pixels: int) -> dict[str, Any]:
    """The configuration of a run with a model of two blocks, which is written, and its pictures."""
    tiny_sd3.build(place / "pipeline", replace(tiny_sd3.MINIMAL, layers=2, heads=2), seed=1, dtype="fp32")
    scenes = demo_scenes.sample_scenes(count, seed=3, style="flat")
    demo_scenes.write_folder(place / "pictures", scenes, seed=3, pixels=pixels)
    return {
        "name": "whole",
        "device": "cpu",
        "model": {"pretrained": str(place / "pipeline"), "t5_length": 8},
        "data": {"path": str(place / "pictures"), "resolution": 32, "caption_dropout": 0.3},
        "adapter": {"rank": 2},
        "precision": {"weights": "fp32"},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 4, "gradient_accumulation": 2},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": 2},
        "validation": {"prompts": ["a red disc"], "steps": 1, "loss_samples": 2},
        "profile": {"max_traces": 0},
        "output": {name: str(place / name) for name in ("runs", "profiles", "cache")} | {"report": False},
    }


def changed(ground: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    return merged(ground, **{"name": name, "profile": {"max_traces": 0}, **changes})


def run_of(data: dict[str, Any]) -> Path:
    return Path(data["output"]["runs"]) / data["name"]


def together(launcher: Launcher, data: dict[str, Any], **how: Any) -> list[str]:
    """Two processes that end well; what each said."""
    outcome = launcher.train(data, data, **how)
    assert outcome.codes == [0, 0], outcome.said
    return outcome.said


@pytest.fixture(scope="module", autouse=True)
def whole(launcher: Launcher, ground: dict[str, Any]) -> tuple[Path, list[str]]:
    """Two processes from an empty cache, never stopped: the run, and what each process said. It comes before the
    module's other runs, which fill the cache, in whatever order the tests run."""
    return run_of(ground), together(launcher, ground)


def tensors(run: Path, step: int = 4) -> dict[str, torch.Tensor]:
    """Weights, optimizer and average of a checkpoint."""
    files = (checkpoint.TRAINABLE, checkpoint.OPTIMIZER, checkpoint.AVERAGE)
    found = {file: load_file(checkpoint.checkpoint_folder(run, step) / file) for file in files}
    return {f"{file}:{name}": tensor for file in files for name, tensor in found[file].items()}


def require_same(run: Path, other: Path) -> None:
    """Two runs ended alike, bit for bit."""
    torch.testing.assert_close(tensors(run), tensors(other), rtol=0, atol=0)
    mine, others = ([{**row, "seconds": 0} for row in read_metrics(each)] for each in (run, other))
    assert mine == others
