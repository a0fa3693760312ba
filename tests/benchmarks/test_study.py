"""The study of four runs: what each is told to be, and the report on them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from recorded_runs import add_images, write_run

from benchmarks import study
from simpletune.runs.report import page as report_page
from simpletune.training.train import train

MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"


def test_the_real_model_gets_the_settings_of_the_study() -> None:
    configs = {name: study.config_of(name, MEDIUM, ["data.path=demo:pictures"])[2] for name in study.RUNS}
    assert list(configs) == ["full", "LoRA r64", "LoRA r16", "LoRA r1"]
    for name, config in configs.items():
        assert config.model.pretrained == MEDIUM and config.data.resolution == 1024
        assert (config.train.batch_size, config.data.caption_dropout) == (1, 0.05)
        assert (config.optimizer.name, config.optimizer.lr) == ("adamw_bf16", 1e-5)
        assert (config.schedule.name, config.schedule.warmup_steps) == ("polynomial", 100)
        assert config.memory.checkpointing == "all" and config.validation.guidance == 3.0
        assert config.precision.weights == ("bf16" if name == "full" else "int8-quanto")
        assert config.adapter.trains_base is (name == "full")
    assert [config.adapter.rank for config in list(configs.values())[1:]] == [64, 16, 1]  # type: ignore[union-attr]


def test_the_settings_train_scaled_down(tiny_config: dict) -> None:
    model = tiny_config["model"]["pretrained"]
    small = [
        "data.resolution=32", f"data.path={tiny_config['data']['path']}", "train.steps=2", "schedule.warmup_steps=1",
        "model.t5_length=8", "device=cpu", "validation.prompts=[]", "validation.loss_samples=2", "output.report=false",
        *(f"output.{key}={value}" for key, value in tiny_config["output"].items() if key != "report"),
    ]  # fmt: skip
    folder = train(study.config_of("LoRA r1", model, small)[2])
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2


def test_four_runs_become_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    runs = tmp_path / "runs"

    def instead(command: list[str], check: bool) -> None:
        commands.append(command)
        name = next(word for word in command if word.startswith("name=")).removeprefix("name=")
        add_images(write_run(runs / name, scale=1.0 if name == "study-full" else 0.2), ["a calm sea"], (40,))

    def again() -> Path:
        return study.run(tmp_path, 5, "", None, [f"output.runs={runs}"])

    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.setattr(report_page, "vega_bundle", str)
    page = again()
    assert [command[1:5] for command in commands] == [["-m", "simpletune", "train", str(study.DEMO)]] * 4
    assert again() == page == tmp_path / "study.html" and len(commands) == 4  # what is done is not done again
    twin = page.with_suffix(".md").read_text()
    for words in ("## Runtime per epoch", "## Peak memory usage", "| LoRA r16 |", "(20%)", "20.26 GB", "not measured"):
        assert words in twin
    assert set(json.loads((tmp_path / "study.json").read_text())["rows"]) == set(study.RUNS)
