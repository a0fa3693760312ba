"""Sliders from prompts alone of other trainers, translated to ``concept``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.config.load import validate
from simpletune.system.options import UserError

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


def test_an_empty_side_of_ai_toolkit_is_none(write_config: Any) -> None:
    job = copy.deepcopy(JOB)
    job["slider"]["targets"] = [{"target_class": "van gogh", "positive": "", "negative": "van gogh"}]
    found = import_file(write_config({"job": "train", "config": {"name": "detail", "process": [job]}}))
    config = validate(found.config, "imported")
    assert config.concept is not None
    (direction,) = config.concept.directions
    assert (direction.positive, direction.negative, direction.strengths) == (None, "van gogh", (1.0,))
    (said,) = [line for line in found.lists()["changed"] if line.key == "slider.targets.0.positive"]
    assert "strength 1 alone" in str(said)


def test_a_concept_slider_of_ai_toolkit_learns_between_its_prompts(write_config: Any) -> None:
    """Its pictures are what it noises; here the model draws what it learns on."""
    slider = {"target_class": "a cat", "positive_prompt": "a fat cat", "negative_prompt": "a thin cat"}
    kept = {"anchor_class": "a dog", "anchor_strength": 0.5, "linearity_weight": 0.1}
    sets = [{"folder_path": "pictures", "resolution": [512, 770]}]
    for given, guidance, preserved in (({}, 3.0, []), (kept | {"guidance_strength": 2}, 2.0, ["a dog"])):
        job = JOB | {"type": "concept_slider", "slider": slider | given, "datasets": sets}
        found = import_file(write_config({"job": "train", "config": {"name": "fat", "process": [job]}}))
        assert (found.problems, found.missing, found.lists().get("unknown")) == ([], [], None)
        config = validate(found.config, "imported")
        assert config.data is None and config.concept is not None
        (direction,) = config.concept.directions
        assert (direction.target, direction.ends) == ("a cat", ("a fat cat", "a thin cat"))
        assert (direction.guidance, direction.preserved) == (guidance, preserved)
        assert config.concept.resolutions == [512, 768]
        assert "datasets" in {line.key for line in found.lists()["changed"]}
    assert direction.preserved_weight == 0.5
    assert "slider.linearity_weight" in {line.key for line in found.lists()["left out"]}


def test_every_key_of_a_slider_has_its_line(imported: ImportResult) -> None:
    lists = imported.lists()
    assert not lists.get("unknown")
    assert [line.key for line in lists["left out"]] == ["slider.targets.1.shuffle"]
    idle = {line.key for line in lists["not needed"]}
    assert {"slider.batch_full_slide", "slider.targets.0.multiplier"} <= idle


OPTIONS = """\
pretrained_model_name_or_path = "runwayml/stable-diffusion-v1-5"
prompts_file = "prompts.toml"
network_dim = 8
network_alpha = 8
learning_rate = 1e-4
max_train_steps = 500
leco_denoise_guidance_scale = 4.0
output_name = "leco"
network_train_unet_only = true
"""
ERASED = """\
guidance_scale = 1.5
[[prompts]]
target = "van gogh"
action = "erase"
batch_size = 2
[[prompts]]
target = "a cat"
positive = "a fat cat"
unconditional = "a cat"
action = "enhance"
resolution = [512, 768]
weight = 0.5
dynamic_resolution = true
"""
SLID = """\
neutrals = ["a man", "a woman"]
[[targets]]
target_class = ""
positive = "old"
negative = "young"
resolutions = [512, 576]
multiplier = 2.0
[[targets]]
target_class = "a dog"
positive = "a wet dog"
neutral = "a dog"
"""


def leco(tmp_path: Path, prompts: str, options: str = OPTIONS) -> ImportResult:
    (tmp_path / "prompts.toml").write_text(prompts)
    file = tmp_path / "leco.toml"
    file.write_text(options)
    return import_file(file)


def test_the_prompts_of_leco_are_translated(tmp_path: Path) -> None:
    found = leco(tmp_path, ERASED)
    assert (found.problems, found.missing, found.lists().get("unknown")) == ([], [], None)
    config = validate(found.config, "imported")
    assert config.concept is not None and config.model.family == "sd15" and config.text.lora is None
    erased, enhanced = config.concept.directions
    # v(target) = neutral -+ guidance (positive - unconditional)
    assert (erased.target, erased.ends, erased.start, erased.strengths) == ("van gogh", ("", "van gogh"), "", (1.0,))
    assert (enhanced.target, enhanced.ends, enhanced.start) == ("a cat", ("a fat cat", "a cat"), "a cat")
    assert (erased.guidance, enhanced.guidance, enhanced.weight) == (1.5, 1.5, 0.5)
    assert (config.concept.drawing_steps, config.concept.drawing_guidance) == (40, 4.0)
    assert config.concept.resolutions == [512, 640] and config.train.batch_size == 2 and config.steps(1) == 500
    left = [line.key for line in found.lists()["left out"]]
    assert "prompts_file.1.dynamic_resolution" in left and len(left) == 1


def test_the_sliders_of_leco_have_a_direction_for_each_neutral_prompt(tmp_path: Path) -> None:
    sdxl = OPTIONS.replace("runwayml/stable-diffusion-v1-5", "stabilityai/stable-diffusion-xl-base-1.0")
    found = leco(tmp_path, SLID, sdxl)
    config = validate(found.config, "imported")
    assert config.concept is not None and config.model.family == "sdxl"
    two = config.concept.directions[:2]
    assert [each.start for each in two] == ["a man", "a woman"]
    assert {(each.target, each.ends, each.strengths) for each in two} == {("", ("old", "young"), (1.0, -1.0))}
    (one,) = config.concept.directions[2:]
    assert (one.target, one.ends, one.start, one.strengths) == ("a dog", ("a wet dog", ""), "a dog", (1.0,))
    why = {line.key: line.why for line in found.lists()["changed"]}
    assert "strength that it trains is 1" in why["prompts_file.0.multiplier"]
    assert "-1 is not" in why["prompts_file.1.positive"]


def test_prompts_that_are_not_here_are_said(tmp_path: Path) -> None:
    (tmp_path / "leco.toml").write_text(OPTIONS)
    with pytest.raises(UserError, match="prompts_file: prompts.toml is not here. Put it beside"):
        import_file(tmp_path / "leco.toml")
    with pytest.raises(UserError, match=r"prompts.toml has no \[\[prompts\]\]"):
        leco(tmp_path, "[slider]\ntargets = [1]\n")
    with pytest.raises(UserError, match="prompts.toml: item 1 cannot be read .x is not a number"):
        leco(tmp_path, '[[prompts]]\ntarget = "a"\nguidance_scale = "x"\n')
    with pytest.raises(UserError, match="item 1 cannot be read"):
        leco(tmp_path, '[[prompts]]\ntarget = "a"\nresolution = [512]\n')
