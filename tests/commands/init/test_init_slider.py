"""``init --slider``: a configuration from prompts alone, for this machine or a named card."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from simpletune.apps.cli.main import main
from simpletune.commands.init import Answers, suggest_slider
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_model_folder
from simpletune.data.concept import Direction
from simpletune.data.demo import MODELS
from simpletune.models.families import FAMILIES
from simpletune.models.shared.family import Family
from simpletune.system.gpus import find_card

SMILE = Direction(target="a person", positive="a person, smiling", negative="a person, frowning")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_a_slider_of_the_tiny_model_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--slider", "a medium disc", "a large disc", "a small disc", "--device", "cpu", "--length", "short"]
    assert main(["init", "train.seed=3", *words]) == 0
    config, _ = read_config(Path("a_large_disc.json"))
    assert config.is_demo and config.data is None and config.concept is not None and config.train.seed == 3
    (direction,) = config.concept.directions
    assert (direction.target, direction.ends) == ("a medium disc", ("a large disc", "a small disc"))
    assert config.concept.resolutions == [64] and config.steps(8) == 30
    assert config.validation.prompts == ["a medium disc"]
    assert "drawn at the strengths -2 to 2" in capsys.readouterr().out
    assert main(["init", *words]) == 2 and "exists. Choose another name" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.family)
def test_every_family_has_one_for_a_card(family: Family) -> None:
    found = suggest_slider(SMILE, Answers(model=family.pretrained), find_card("8GiB"))
    assert "strength 1 towards 'a person, smiling', -1 towards" in found.config["about"]
    Path("slider.json").write_text(json.dumps(found.config))
    config, _ = read_config(Path("slider.json"))
    assert config.model.family == family.family and config.concept is not None
    assert config.concept.resolutions == [min(768, family.words.resolution)]
    assert (config.adapter.method, config.validation.loss_samples) == ("lora", 0)
    assert getattr(config.objective, "min_snr_gamma", None) is None


@pytest.mark.parametrize("tiny", MODELS)
def test_every_tiny_model_has_one_of_its_own_layers(tiny: str) -> None:
    Path("slider.json").write_text(json.dumps(suggest_slider(SMILE, Answers(model=tiny)).config))
    config, _ = read_config(Path("slider.json"))
    shapes = dict(resolve_model_folder(config).model.architecture.known_shapes())
    assert config.model.pretrained == tiny and 0 < config.adapter.trainable(shapes) < 100_000


def test_an_erasure_starts_from_the_empty_text() -> None:
    assert main(["init", "--slider", "heart", "", "heart", "--device", "cpu"]) == 0
    config, _ = read_config(Path("heart.json"))
    assert config.concept is not None and config.concept.directions[0].start == ""
    assert main(["init", "--slider", "a disc", "", "a heart", "--device", "cpu", "--out", "b.json"]) == 0
    other, _ = read_config(Path("b.json"))
    assert other.concept is not None and other.concept.directions[0].start == "a disc"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "FOLDER: missing. .*--slider"),
        (["--slider", "a"], "--slider: 1 prompt, but it takes"),
        (["--slider", "a", "b", "c", "train.steps=4"], "--slider: 4 prompts, but it takes"),
        (["--slider", "a", "b", "b"], "--slider: negative: 'b' equals positive"),
        (["--slider", "a", "", ""], "--slider: positive: null, like negative"),
        (["pictures", "--slider", "a", "b"], "pictures: a slider .* Leave the folder out"),
        (["--slider", "a", "b", "--trigger", "sks"], "--trigger: it is about pictures"),
        (["--slider", "a", "b", "--what", "style"], "--what: it is about pictures"),
    ],
)
def test_what_makes_no_slider_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not list(Path().iterdir())
