"""The section ``concept``: what it fills in, and the sentences about what cannot be trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from simpletune.config.explain import explain
from simpletune.config.load import read_saved, validate
from simpletune.config.overrides import merge
from simpletune.system.options import ConfigError, UserError

SIZE = {"target": "a circle", "positive": "a large circle", "negative": "a small circle"}
MINIMAL: dict[str, Any] = {
    "name": "size",
    "model": {"pretrained": "demo:tiny-sd3"},
    "concept": {"directions": [SIZE], "resolutions": [64]},
}


def with_direction(**changes: object) -> dict[str, Any]:
    return MINIMAL | {"concept": MINIMAL["concept"] | {"directions": [SIZE | changes]}}


def test_it_stands_in_place_of_data_and_reads_back() -> None:
    config = validate(copy.deepcopy(MINIMAL), "test")
    assert (config.data, config.sources, config.resolution, config.prompt) == (None, (), 64, None)
    assert config.validation.loss_samples == 0 and config.image_size() == (64, 64)
    assert read_saved(config.model_dump_json(by_alias=True)) == config
    assert validate(config.model_dump(mode="json", by_alias=True), "again") == config
    with pytest.raises(UserError, match="data: the run trains from prompts alone"):
        _ = config.pictures


def test_its_sizes_are_the_familys_unless_given() -> None:
    for family, side in (("sd3", 1024), ("sd15", 512)):
        found = validate({"name": "a", "model": {"family": family}, "concept": {"directions": [SIZE]}}, "test")
        assert found.concept is not None and found.concept.resolutions == [side]
    pictures = validate({"name": "a", "data": {"path": "demo:pictures"}}, "test")
    assert pictures.concept is None and pictures.model_dump(mode="json")["concept"] is None


def test_a_base_of_few_steps_draws_in_its_own() -> None:
    """Unless it is trained under an assistant, with which it draws as a base of many."""
    for name, loras, drawn in (
        ("stabilityai/stable-diffusion-xl-base-1.0", [], (20, 3.0)),
        ("ByteDance/SDXL-Lightning", [], (4, 1.0)),
        ("somebody/sdxl-lightning-1step", [], (2, 1.0)),
        ("stabilityai/sdxl-turbo", ["training:owner/assistant"], (20, 3.0)),
    ):
        model = {"family": "sdxl", "pretrained": name, "loras": loras}
        config = validate({"name": "a", "model": model, "concept": {"directions": [SIZE]}}, "test")
        assert config.concept is not None
        assert (config.concept.drawing_steps, config.concept.drawing_guidance) == drawn
        assert "of 1 drawing, seed" in explain(config)
        assert "Ordinary training undoes" not in explain(config)  # a slider learns from what the base itself predicts


def test_an_override_reaches_a_direction() -> None:
    data, _, problems = merge(copy.deepcopy(MINIMAL), ["concept.directions.0.guidance=3", "concept.drawing_steps=8"])
    config = validate(data, "test", problems)
    assert config.concept is not None
    assert (config.concept.directions[0].guidance, config.concept.drawing_steps) == (3.0, 8)


def test_the_ends_of_a_direction() -> None:
    """A missing side is the unconditional, and leaves one strength."""
    cases: list[tuple[dict[str, Any], tuple[str, str], tuple[float, ...], str]] = [
        ({}, ("a large circle", "a small circle"), (1.0, -1.0), "-1 towards 'a small circle'"),
        ({"negative": None}, ("a large circle", ""), (1.0,), "strength 1 adds 'a large circle'"),
        ({"positive": None, "unconditional": "a"}, ("a", "a small circle"), (1.0,), "strength 1 erases"),
    ]
    for changes, ends, strengths, said in cases:
        config = validate(with_direction(**changes), "test")
        assert config.concept is not None
        direction = config.concept.directions[0]
        assert (direction.ends, direction.strengths) == (ends, strengths)
        assert said in explain(config)


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        (MINIMAL | {"data": {"path": "demo:pictures"}}, "concept", "beside data, but .* Remove one of them"),
        ({"name": "a", "data": None}, "data", "missing, like concept.*data.path.*concept.directions"),
        (with_direction(negative="a large circle"), "negative", "'a large circle' equals positive: .* no direction"),
        (with_direction(negative=None, unconditional="a large circle"), "positive", "equals unconditional"),
        (with_direction(positive=None, negative=None), "positive", "null, like negative"),
        (with_direction(unconditional="x"), "unconditional", "both are given. Leave it out"),
        (with_direction(neutral="a circle"), "neutral", "is the target"),
        (with_direction(preserved=["a", "a circle"]), "preserved", "'a circle' is the target: .* change and stay"),
        (with_direction(preserved=["a", "a"]), "preserved", "'a' is listed twice"),
        (with_direction(preserved_weight=2), "preserved_weight", "no effect without preserved"),
        (MINIMAL | {"adapter": {"method": "full"}}, "adapter.method", "overwrites the base"),
        (MINIMAL | {"prior": {"method": "base_prediction", "prompt": "a"}}, "prior.method", "as preserved"),
        (MINIMAL | {"text": {"lora": {}}}, "text", "encoded once"),
        (MINIMAL | {"validation": {"loss_samples": 4}}, "validation.loss_samples", "no pictures to evaluate on"),
        (MINIMAL | {"validation": {"split": 0.1}}, "validation.split", "Leave it out"),
        (
            MINIMAL | {"concept": {"directions": [SIZE], "resolutions": [72, 64, 64]}},
            "concept.resolutions.0",
            "72 is not a multiple of 16",
        ),
        (
            MINIMAL | {"concept": {"directions": [SIZE], "resolutions": [64, 64]}},
            "concept.resolutions.1",
            "64 is listed twice",
        ),
        (MINIMAL | {"concept": {}}, "concept.directions", "required"),
        (MINIMAL | {"concept": {"directions": [{"positive": "a"}]}}, "concept.directions.0.target", "required"),
        (MINIMAL | {"concept": {"directions": ["a"]}}, "concept.directions.0", "concept.directions.0"),
    ],
)
def test_what_cannot_be_trained_is_said(data: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        validate(copy.deepcopy(data), "test")
    own = path if "." in path or path in ("data", "concept", "text") else f"concept.directions.0.{path}"
    assert own in [problem.path for problem in caught.value.problems]


def test_updates_in_the_backward_pass_have_one_pass() -> None:
    memory: dict[str, Any] = {"memory": {"optimizer_in_backward": True, "checkpointing": "none"}}
    memory["train"] = {"clip": "per_parameter"}
    with pytest.raises(ConfigError, match="memory.optimizer_in_backward: the 2 passes"):
        validate(copy.deepcopy(MINIMAL) | memory, "test")
    validate(with_direction(positive=None) | memory, "test")
