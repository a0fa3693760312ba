"""The prompts of an evaluation: the benchmark's own, files, and what is scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletune.commands.evaluate.prompt_sets import (
    Prompt,
    Words,
    dreambooth,
    find_prompts,
    from_file,
    remove_token,
    subject_words,
)
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.data.demo import demo_scenes
from simpletune.system.options import UserError

DOG = Words("sks", "dog")


def config(**more: object) -> TrainConfig:
    return validate({"name": "x", "data": {"path": "demo:subject"}, **more}, "test", needs_model=False)


@pytest.mark.data
def test_the_benchmarks_prompts_are_the_published_ones(real_data: Path) -> None:
    text = (real_data / "dreambooth" / "prompts_and_classes.txt").read_text()
    objects, live = text.split("Object Prompts")[1].split("Live Subject Prompts")
    for name, block in {"dreambooth-object": objects, "dreambooth-live": live}.items():
        lines = [line.strip().removesuffix(",") for line in block.splitlines() if ".format(" in line]
        published = [line.split("'")[1].replace("{0}", "{token}").replace("{1}", "{class}") for line in lines]
        assert dreambooth(name) == published and len(published) == 25


def test_the_token_is_drawn_and_not_scored() -> None:
    found = find_prompts("dreambooth-live", config(), DOG, [])
    assert found.name == "dreambooth-live" and len(found.prompts) == len(set(found.prompts)) == 25
    assert found.prompts[1] == Prompt("a sks dog in the snow", "a dog in the snow") and found.prompts[1].has_token
    assert found.prompts[-1] == Prompt("a cube shaped sks dog", "a cube shaped dog")
    assert remove_token("a sks dog, sks, by sksmith and asks", "sks") == "a dog, by sksmith and asks"
    assert remove_token("a dog", "") == "a dog"


@pytest.mark.parametrize(("path", "first"), [("demo:subject", "blick"), ("demo:pictures", "glim")])
def test_the_demo_names_its_own_words(path: str, first: str) -> None:
    own = config(data={"path": path})
    found = find_prompts(None, own, subject_words(own, None, None), [])
    assert found.name == "demo, 12 prompts" and len(set(found.prompts)) == 12
    for prompt in found.prompts:
        assert f" {first} " in prompt.text and first not in prompt.scored
        assert set(prompt.scored.replace(",", "").split()) <= set(demo_scenes.words())
    assert subject_words(own, "other", "thing") == Words("other", "thing")


def test_a_run_is_asked_for_its_own_prompts_or_captions(tiny_images: Path) -> None:
    mine = {"path": str(tiny_images), "resolution": 32}
    own = config(data=mine, validation={"prompts": ["a sks dog", "a cat", "a sks dog"]})
    assert subject_words(own, None, None) == Words("", "")
    expected = (Prompt("a sks dog", "a dog"), Prompt("a cat", "a cat"))
    assert find_prompts(None, own, DOG, ["not this"]).prompts == expected
    bare = config(data=mine)
    captions = [f"picture {number % 20}" for number in range(40)]
    assert [each.text for each in find_prompts(None, bare, DOG, captions).prompts] == captions[:16]
    with pytest.raises(UserError, match="no prompts and no captions. Give a file, or one of dreambooth-object"):
        find_prompts(None, bare, DOG, ["", ""])


def test_a_file_of_templates(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("a {token} {class}, in the rain\na plain sks thing\nno words\n", encoding="utf-8-sig")
    found = from_file(file, DOG)
    assert found.name == "mine.txt, 3 prompts"
    assert found.prompts == (
        Prompt("a sks dog, in the rain", "a dog, in the rain"),
        Prompt("a plain sks thing", "a plain thing"),
        Prompt("no words", "no words"),
    )
    file.write_text("a dog\n\na {tokn} dog\na {dog\na dog\n   \n")
    with pytest.raises(UserError) as caught:  # every hole at once
        from_file(file, DOG)
    for part in ("mine.txt: 5 problems", "line 2 is empty", "line 3: {tokn} is unknown. Use {token} or {class}",
                 "line 4: expected '}'", "line 5 repeats line 1", "line 6 is empty"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "words", "message"),
    [
        ("dreambooth-live", None, Words("", ""), "needs --token and --class, as in --token sks --class dog"),
        ("dreambooth-live", None, Words("sks", ""), "needs --class, as"),
        ("file", "a {token}", Words("", "dog"), "file needs --token, as"),
        ("file", "", DOG, "it is empty"),
        ("nowhere", None, DOG, "nowhere cannot be read .*or one of dreambooth-object, dreambooth-live, demo, run"),
    ],
)
def test_what_is_missing_is_said(name: str, text: str | None, words: Words, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    wanted = name if name.startswith("dream") else str(tmp_path / name)
    with pytest.raises(UserError, match=message):
        find_prompts(wanted, config(), words, [])
