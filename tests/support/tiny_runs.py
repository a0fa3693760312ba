"""Tiny trainings as tests start them, and what they leave."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import failpoints
import pytest
import torch
from safetensors.torch import load_file

from simpletune.config.load import validate
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.system import signals
from simpletune.training.train import train

TrainOnce = Callable[[dict], Path]
"""``train_once`` and ``copy_run`` of conftest.py: from a configuration's JSON to a run's folder."""


def merged(data: dict, /, **changes: Any) -> dict:
    """A copy of a configuration's JSON with changes, section by section."""
    data = copy.deepcopy(data)
    for section, values in changes.items():
        data[section] = {**(data.get(section) or {}), **values} if isinstance(values, dict) else values
    return data


def run_with(tiny_config: dict, resume: str | None = None, **changes: Any) -> Path:
    return train(validate(merged(tiny_config, **changes), "test"), resume)


def saved_weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.checkpoint_folder(run, step) / checkpoint.TRAINABLE)


def cut_back(run: Path, step: int) -> Path:
    """Leave of a run what it had after a checkpoint's step."""
    for folder in (run / "checkpoints").iterdir():
        if folder.name > checkpoint.checkpoint_folder(run, step).name:
            shutil.rmtree(folder)
    (run / "summary.json").unlink()
    return run


def resumed_from(whole: Path, data: dict, step: int) -> Path:
    """A run that goes on from a step of a whole one, which has kept that step's checkpoint."""
    halves = cut_back(shutil.copytree(whole, whole.with_name(f"from-{step}")), step)
    return train(validate(data | {"name": halves.name}, "halves"), resume="latest")


def fail_at(moment: str, tiny_config: dict, count: int = 1, **changes: dict) -> None:
    """Start by --resume auto; the run dies at a moment, as far as Python can die."""
    failpoints.arm(moment, "raise", count)
    with pytest.raises(failpoints.InjectedError):
        run_with(tiny_config, "auto", **changes)


def stop_at(moment: str, tiny_config: dict, name: str, count: int = 1, **changes: dict) -> int:
    """Start by --resume auto; the run is sent a signal at a moment. Its exit code."""
    failpoints.arm(moment, name, count)
    with pytest.raises(signals.Stopped) as caught, signals.handle_signals():
        run_with(tiny_config, "auto", **changes)
    return caught.value.code


def run_on(tiny_config: dict, device: str, resume: str | None = None, **changes: Any) -> Path:
    folder = run_with(tiny_config | {"device": device}, resume, **changes)
    peak = json.loads((folder / "summary.json").read_text())["peak_allocated_gib"]
    assert (peak is None) if device == "cpu" else peak > 0, f"a run on {device} measured a peak of {peak}"
    return folder


def losses_of(tiny_config: dict, adapter: str, weights: str, compute: str) -> list[float]:
    data = copy.deepcopy(tiny_config)
    data["adapter"] = {"method": adapter} | ({"rank": 2} if adapter in ("lora", "loha", "dora") else {})
    weights, _, rotation = weights.partition("+")
    data["precision"] = {"weights": weights, "compute": compute} | ({"rotation": rotation} if rotation else {})
    data["train"]["batch_size"] = 2
    return [row["loss"] for row in read_metrics(train(validate(data, "golden")))]
