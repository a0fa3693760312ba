"""``adapter.start``: runs that begin with a LoRA, under every precision and lever, resumed, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import TrainOnce, run_with, saved_weights

from simpletune.adapters.methods.adapter import OUTPUT
from simpletune.system.options import UserError

FROZEN = {"lr": 1e-30}  # changes no bit, so a run's result is what it started from


@pytest.fixture
def parent(tiny_config: dict, copy_run: TrainOnce) -> Path:
    return copy_run(tiny_config | {"name": "parent", "checkpoint": {"every": 2}})


def start_at(parent: object, **more: object) -> dict[str, Any]:
    return {"method": "lora", "rank": 2, "start": str(parent), **more}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": {"weights": "int8"}},
        {"precision": {"weights": "nf4"}, "train": {"reduce": "exact"}},
        {"precision": {"weights": "fp32", "compute": "fp16"}, "ema": {"decay": 0.5}},
        {"optimizer": {"name": "adamw_schedule_free"}},
        {"memory": {"checkpointing": "all", "resident_blocks": 0}, "precision": {"weights": "bf16"}},
    ],
    ids=str,
)
def test_a_run_begins_with_its_parent(changes: dict, tiny_config: dict, parent: Path) -> None:
    optimizer = {**changes.pop("optimizer", {}), **FROZEN}
    child = run_with(tiny_config, name="child", adapter=start_at(parent), optimizer=optimizer, **changes)
    torch.testing.assert_close(load_file(child / OUTPUT), load_file(parent / OUTPUT), rtol=0, atol=0)


def test_a_resumed_run_needs_no_parent(tiny_config: dict, parent: Path) -> None:
    changes = {"name": "child", "adapter": start_at(f"{parent}@2"), "checkpoint": {"every": 2}}
    whole = saved_weights(run_with(tiny_config, **changes), 4)
    fresh = run_with(tiny_config, name="fresh", checkpoint={"every": 2})
    assert any(not torch.equal(tensor, saved_weights(fresh, 4)[name]) for name, tensor in whole.items())
    run = run_with(tiny_config, **changes, train={"steps": 2})
    shutil.rmtree(parent)
    assert run_with(tiny_config, "latest", **changes) == run
    torch.testing.assert_close(saved_weights(run, 4), whole, rtol=0, atol=0)
    with pytest.raises(UserError, match="adapter.start: .* does not exist"):
        run_with(tiny_config, **changes)
