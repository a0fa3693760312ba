"""Variables of accelerate and torch, and versions: the configuration decides what is trained, or a line names one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend

from simpletune.config.load import validate
from simpletune.runs import resume
from simpletune.runs.checkpoint import SavedState, read_checkpoint
from simpletune.system.environment import (
    CHANGE_LAST_BITS,
    CHANGES,
    REFUSED,
    describe_machine,
    numeric_versions,
    settle_variables,
)
from simpletune.system.options import UserError
from simpletune.training.accelerator import make_accelerator
from simpletune.training.train import train

NAME = re.compile(r"[\"']((?:ACCELERATE|FORK)_[A-Z0-9_]+)[\"']")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """accelerate keeps its settings for the whole process: forget them before the test and after it."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def figures(config: dict, folder: Path) -> list[tuple[float, float]]:
    """The losses and gradient norms of a run."""
    options = config | {"output": config["output"] | {"runs": str(folder)}}
    lines = (train(validate(options, "test")) / "metrics.jsonl").read_text().splitlines()
    return [(row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


GIVEN = {
    "ACCELERATE_MIXED_PRECISION": "bf16",  # multiplied in bf16
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",  # divided gradients by 4
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",  # compiled
}


def test_variables_of_accelerate_change_no_loss(tiny_config: dict, tmp_path: Path, monkeypatch, capsys) -> None:
    plain = figures(tiny_config, tmp_path / "plain")
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(True)
    capsys.readouterr()
    assert figures(tiny_config, tmp_path / "given") == plain
    said = capsys.readouterr().out
    assert all(f"warning {name}={value} is not used: " in said for name, value in GIVEN.items())


@pytest.mark.parametrize("value", ["1", "bf16", "fp8", "cuda:7", "nonsense"])
def test_nothing_is_taken_from_any_variable(value: str, tiny_config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that accelerate's source reads, whatever they hold."""
    sources = Path(accelerate.__file__).parent.rglob("*.py")
    names = {name for source in sources for name in NAME.findall(source.read_text())}
    assert {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DOWNCAST_BF16", "ACCELERATE_TORCH_DEVICE"} <= names
    for name in names - set(REFUSED):
        monkeypatch.setenv(name, value)
    made, _ = make_accelerator(validate(tiny_config, "test"))
    assert (made.mixed_precision, made.native_amp, made.scaler, made.device.type) == ("no", False, None, "cpu")
    assert made.gradient_accumulation_steps == 1 and made.state.dynamo_plugin.backend == DynamoBackend.NO
    assert not any(name in os.environ for name in names - set(REFUSED))


@pytest.mark.parametrize("name", REFUSED)
def test_another_way_to_divide_a_run_is_refused(name: str, tiny_config: dict, monkeypatch) -> None:
    monkeypatch.setenv(name, "true")
    for _ in range(2):  # the next run of this process, too
        with pytest.raises(UserError, match=rf"{name}=true: .* is not used here.*Unset {name}"):
            make_accelerator(validate(tiny_config, "test"))
    monkeypatch.setenv(name, "false")
    assert settle_variables("cpu", compiles=False) == []


@pytest.mark.parametrize(
    ("name", "value", "device", "compiles", "said"),
    [
        ("NVIDIA_TF32_OVERRIDE", "0", "cuda", False, True),
        ("NVIDIA_TF32_OVERRIDE", "1", "cpu", False, False),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "cuda", False, True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", "cuda", False, False),
        ("PYTORCH_TUNABLEOP_ENABLED", "1", "cuda", False, True),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "cuda", False, True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", "cpu", False, True),
        ("TORCH_COMPILE_DISABLE", "1", "cuda", True, True),
        ("TORCH_COMPILE_DISABLE", "1", "cuda", False, False),
        ("MKL_CBWR", "COMPATIBLE", "cpu", False, False),
    ],
)
def test_what_changes_torchs_arithmetic_is_said_where_it_does_and_recorded(
    name: str, value: str, device: str, compiles: bool, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (*CHANGES, *CHANGE_LAST_BITS):
        monkeypatch.delenv(each, raising=False)
    assert "variables" not in describe_machine()
    monkeypatch.setenv(name, value)
    lines = settle_variables(device, compiles)
    assert [line.split(" changes ")[0] for line in lines] == ([f"{name}={value}"] if said else [])
    assert describe_machine()["variables"] == f"{name}={value}"


def test_a_resumed_run_says_which_versions_have_changed(tiny_config: dict, monkeypatch, capsys) -> None:
    """As the checkpoint has them, not the folder's record, which each start replaces."""
    config = tiny_config | {"checkpoint": {"every": 1}, "train": {"steps": 1}}
    folder = train(validate(config, "test"))
    assert read_checkpoint(folder / "checkpoints" / "step-000001").versions == numeric_versions()
    capsys.readouterr()
    train(validate(config | {"train": {"steps": 2}}, "test"), resume="latest")
    assert "resume  with" not in capsys.readouterr().out
    newer = {"torch": "9.1.0", "cuda": "14.1", "cudnn": None}
    monkeypatch.setattr(resume, "numeric_versions", lambda: newer)
    train(validate(config | {"train": {"steps": 3}}, "test"), resume="latest")
    now = numeric_versions()
    changed = f"torch 9.1.0 (the checkpoint: {now['torch']}), CUDA 14.1 (the checkpoint: {now['cuda'] or 'none'})"
    assert f"resume  with {changed}" in capsys.readouterr().out
    older = SavedState(folder, 1, {}, [], {}, 1, versions={"torch": "9.1.0"})
    assert resume.changed_versions(older) is None, "its CUDA is unknown"
