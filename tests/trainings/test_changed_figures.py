"""Files that a run's figures are made from, changed while the run was stopped: a warning, and no wrong figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import run_with, stop_at

from simpletune.runs.folder import read_rows
from simpletune.system.safetensors_file import content_hash

STEPS = {"train": {"steps": 4}, "checkpoint": {"every": 2}}
CHECKS = {"validation": {"prompts": ["a red disc"], "steps": 1, "loss_samples": 2, "every": 2}}


@pytest.fixture(scope="module")
def figures() -> Callable[[Path], dict]:
    def of(run: Path) -> dict:
        summary = json.loads((run / "summary.json").read_text())
        kept = {key: value for key, value in summary.items() if "drift" in key or "eval" in key or "loss" in key}
        return kept | {"rows": [{**row} for row in read_rows(run / "evaluations.jsonl")]}

    return of


def zeros(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(64)
    file.write_bytes(bytes(content))


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def digit(file: Path) -> None:
    """Another first digit of the last loss."""
    text = file.read_text()
    at = text.rindex('loss": ') + len('loss": ')
    file.write_text(text[:at] + ("7" if text[at] != "7" else "6") + text[at + 1 :])


DAMAGE = {
    "zeros": ("base_predictions.safetensors", zeros),
    "half": ("base_predictions.safetensors", half),
    "loss before": ("eval_before.json", digit),
    "picture": ("samples/base/prompt-00.png", half),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_no_figure_is_made_from_a_changed_file(
    method: str, damage: str, tiny_config: dict, figures: Callable[[Path], dict], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config | {"adapter": {"method": method}} | STEPS | CHECKS
    expected = figures(run_with(config | {"name": "whole"}))
    stop_at("step.begun", config, "term", 4)
    run = Path(config["output"]["runs"]) / config["name"]
    name, change = DAMAGE[damage]
    change(run / name)
    capsys.readouterr()
    run_with(config, "auto")
    assert f"{name} has changed since it was written" in capsys.readouterr().out
    found = figures(run)
    if (method, name) == (
        "full",
        "base_predictions.safetensors",
    ):  # the base is gone: no drift
        last = found["rows"][-1]
        assert "drift" not in last and last["eval_loss"] == expected["rows"][-1]["eval_loss"]
    else:
        assert found == expected
    assert (run / f"{name}.damaged").is_file()


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_changed_row_is_said(name: str, tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config | STEPS | CHECKS
    stop_at("step.begun", config, "term", 4)
    run = Path(config["output"]["runs"]) / config["name"]
    capsys.readouterr()
    digit(run / name)
    run_with(config, "auto")
    assert f"{name} has changed since the checkpoint was saved" in capsys.readouterr().out


def test_nothing_is_said_of_files_as_they_were(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config | STEPS | CHECKS
    stop_at("step.begun", config, "term", 4)
    run = Path(config["output"]["runs"]) / config["name"]
    before = content_hash(run / "base_predictions.safetensors")
    capsys.readouterr()
    run_with(config, "auto", train={"steps": 6})
    run_with(config, "auto", train={"steps": 8})
    assert "changed since" not in capsys.readouterr().out
    assert content_hash(run / "base_predictions.safetensors") == before
