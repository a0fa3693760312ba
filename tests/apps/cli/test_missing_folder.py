"""A configuration whose pictures are not there, as of every shipped one, says what to add to the command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from simpletune.apps.cli.main import main

ADD = r"add {0}=FOLDER, the folder with your pictures \({1} is not {2}\):\n    (\S+simpletune .*)"


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "train --resume auto", "train --prepare", "prepare", "data", "caption"])
def test_a_shipped_configuration_says_which_command_to_type(
    verb: str, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused([*verb.split(), "sd3_medium_lora_8gb", "train.steps=700"], capsys)
    found = re.search(ADD.format("data.path", "data/my_pictures", f"in {re.escape(str(tmp_path))}"), said)
    assert found is not None and "does not exist" not in said, said
    words = shlex.split(found[1])[1:]
    today = ["train", "--prepare"] if verb == "prepare" else verb.split()
    assert words == [*today, "sd3_medium_lora_8gb", "train.steps=700", "data.path=FOLDER"]
    assert main(["check", *words[len(today) : -1], f"data.path={tiny_images}"]) == 0


def test_a_folder_that_the_command_names_is_what_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["check", "sd3_medium_lora_8gb", "data.path=/nowhere"], capsys)
    assert "data.path: /nowhere does not exist. Give a folder with pictures" in said and "FOLDER" not in said
    said = refused(["check", "sd3_medium_study_full", "data.path=/nowhere"], capsys)
    assert said.count("/nowhere does not exist") == 2 and "FOLDER" not in said


def test_each_of_several_sources_is_added_by_its_own_field_beside_other_problems(
    tiny_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [{"path": str(tiny_images), "resolution": 64}, {"path": str(tmp_path / "gone"), "resolution": 64}]
    (tmp_path / "two.json").write_text(json.dumps({"name": "two", "data": {"sources": sources}}))
    said = refused(["check", str(tmp_path / "two.json"), "train.steps=x"], capsys)
    found = re.search(ADD.format(r"data\.sources\.1\.path", re.escape(str(tmp_path / "gone")), "there"), said)
    assert found is not None and found[1].endswith("two.json train.steps=x data.sources.1.path=FOLDER"), said
    assert "2 problems" in said and 'train.steps: "x" does not fit' in said


def test_an_estimate_says_what_to_add_to_count_the_data_set(
    tiny_config: dict, write_config, capsys: pytest.CaptureFixture[str]
) -> None:
    hint = "to count the data set, too, add data.path=FOLDER"
    assert main(["estimate", str(write_config(tiny_config))]) == 0
    assert hint not in capsys.readouterr().out
    tiny_config["data"]["path"] = "/nowhere"
    assert main(["estimate", str(write_config(tiny_config))]) == 0
    assert hint in capsys.readouterr().out
