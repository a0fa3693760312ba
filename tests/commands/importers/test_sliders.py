"""Sliders from prompts alone of other trainers, translated to ``concept``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.config.load import validate

JOB: dict[str, Any] = {
    "type": "slider",
    "network": {"type": "lierla", "linear": 8, "linear_alpha": 8},
    "train": {"steps": 500, "lr": 2e-4, "max_denoising_steps": 40},
    "model": {"name_or_path": "runwayml/stable-diffusion-v1-5"},
    "sample": {"prompts": ["a woman, hat --m -5", "a woman, hat --m 5", "a dog"]},
    "slider": {
        "resolutions": [[512, 512], [512, 760], [512, 770]],
        "batch_full_slide": True,
        "targets": [
            {"target_class": "", "positive": "detail", "negative": "blurry", "weight": 0.5, "multiplier": 1.0},
            {"target_class": "a cat", "positive": "a fat cat", "negative": "a thin cat", "shuffle": True},
        ],
        "anchors": [{"prompt": "a man", "neg_prompt": "animal", "multiplier": 1.0}],
    },
}


@pytest.fixture
def imported(write_config: Any) -> ImportResult:
    file: Path = write_config({"job": "train", "config": {"name": "detail", "process": [copy.deepcopy(JOB)]}})
    return import_file(file)


def test_the_sliders_of_ai_toolkit_are_translated(imported: ImportResult) -> None:
    assert (imported.problems, imported.missing) == ([], [])
    config = validate(imported.config, "imported")
    assert config.data is None and config.concept is not None and config.objective.name == "ddpm"
    first, second = config.concept.directions
    assert (first.target, first.positive, first.negative, first.weight) == ("", "detail", "blurry", 0.5)
    assert (second.target, second.ends, second.weight) == ("a cat", ("a fat cat", "a thin cat"), 1.0)
    assert first.preserved == second.preserved == ["a man"]
    assert (config.concept.resolutions, config.concept.drawing_steps) == ([512, 768], 40)
    assert config.validation.prompts == ["a woman, hat", "a dog"]
    assert "max_timestep" not in imported.config.get("objective", {})


def test_every_key_of_a_slider_has_its_line(imported: ImportResult) -> None:
    lists = imported.lists()
    assert not lists.get("unknown")
    assert [line.key for line in lists["left out"]] == ["slider.targets.1.shuffle"]
    idle = {line.key for line in lists["not needed"]}
    assert {"slider.batch_full_slide", "slider.targets.0.multiplier"} <= idle
