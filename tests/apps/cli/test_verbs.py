"""The verbs: those that became options or verbs of ``lora`` go on under their former names, and the help is short."""

from __future__ import annotations

import re
import shlex

import pytest
from packages import ROOT

from simpletune.apps.cli.generate import FIRST
from simpletune.apps.cli.lora import LORA_VERBS
from simpletune.apps.cli.main import FORMER_VERBS, VERBS, main, parse

FORMER = {
    "inspect a.safetensors --json --header-only": "lora inspect a.safetensors --json --header-only",
    "export r@1 --format kohya --rank 2 --title x": "lora export r@1 --format kohya --rank 2 --title x",
    "merge a:0.5 b --base c --out d --scale 2": "lora merge a:0.5 b --base c --out d --scale 2",
    "mix a:1 b:2 --method svd --rank 4 --out x": "lora mix a:1 b:2 --method svd --rank 4 --out x",
    "extract a b --energy 0.9 --device cpu --out x": "lora extract a b --energy 0.9 --device cpu --out x",
    "resize a --rank 4 --conv-rank 2 --out x": "lora resize a --rank 4 --conv-rank 2 --out x",
    "schema": "check --schema",
    "prepare demo train.steps=3 --from other --verbose name=x":
        "train demo train.steps=3 --prepare --from other --verbose name=x",
    "finish runs/demo@100": "control runs/demo@100 --finish",
    "calibrate": "doctor --calibrate",
    "calibrate --device cpu --out x.json --cache c --seconds 5":
        "doctor --calibrate --device cpu --out x.json --cache c --seconds 5",
    "calibrate --cache c demo train.steps=3": "doctor demo train.steps=3 --calibrate --cache c",
    "calibrate demo --cache c train.steps=3": "doctor --calibrate demo --cache c train.steps=3",
}  # fmt: skip


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("former", FORMER)
def test_a_former_verb_takes_its_arguments(former: str) -> None:
    assert parse(shlex.split(former)) == parse(shlex.split(FORMER[former]))
    assert {words.split()[0] for words in FORMER} == {*FORMER_VERBS}


def test_schema_goes_on_printing_the_schema_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capfd.readouterr() == ((ROOT / "configs" / "schema.json").read_text(), "")


def test_the_help_names_no_former_verb_and_lora_names_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    listed = r"^ +([a-z]+) {2,}\S"
    assert set(re.findall(listed, shown("--help", capsys).partition("options:")[0], re.M)) == set(VERBS)
    for words in ("lora", "lora --help"):
        assert re.findall(listed, shown(words, capsys).partition("verbs:")[2], re.M) == [*LORA_VERBS]
    assert shown("export --help", capsys) == shown("lora export --help", capsys)


@pytest.mark.parametrize(("verb", "own"), [("generate", "--lora"), ("compare", "--checkpoints")])
def test_the_help_of_pictures_shows_eight_options_and_help_all_every_one(
    verb: str, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def options(words: str) -> set[str]:
        return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", shown(f"{verb} {words}", capsys), re.M)) - {"--help"}

    first = {*FIRST, own, "--help-all"}
    every = options("--help-all")
    assert options("--help") == options("-h") == first and len(first) == 9
    assert first < every and {"--guidance", "--vae-tile", "--compile", "--precision"} < every
    assert f"\n{len(every - first)} more options: simpletune {verb} --help-all\n" in shown(f"{verb} -h", capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("exprot a", "unknown verb exprot. Did you mean lora export? See simpletune --help"),
        ("shcema", "unknown verb shcema. Did you mean check --schema? See simpletune --help"),
        ("lora exprot a", "unknown verb exprot. Did you mean export? See simpletune lora --help"),
        ("lora --fast", "unknown argument --fast. See simpletune lora --help"),
        ("lora mix a b --out x --metod svd", "unknown argument --metod. Did you mean --method?"),
        ("mix a b --out x --metod svd", "unknown argument --metod. Did you mean --method? See simpletune lora mix"),
        ("generate --vae-tlie 512", "unknown argument --vae-tlie. Did you mean --vae-tile? See simpletune generate"),
        ("check", "CONFIG or --schema is missing. See simpletune check --help"),
        ("check demo --schema", "--schema: not allowed with argument CONFIG. See simpletune check --help"),
    ],
)
def test_a_mistake_is_said_with_what_is_near(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_an_unknown_verb_that_is_near_none_lists_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["zzzz"])
    assert re.findall(r"Known: (.*)\. See", capsys.readouterr().err) == [", ".join(VERBS)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train demo --from x", "--from belongs to --prepare"),
        ("train demo --prepare --resume auto", "--resume belongs to a training, and --prepare stops before it"),
        ("prepare demo --force", "--force belongs to a training"),
        ("control runs/demo --finish --wait 3", "--wait does not belong to --finish"),
        ("finish runs/demo --negative-prompt x", "--negative-prompt does not belong to --finish"),
        ("doctor demo", "CONFIG belongs to --calibrate"),
        ("doctor --seconds 0", "--seconds belongs to --calibrate"),
        ("doctor --calibrate --json", "--calibrate takes none of --json"),
    ],
)
def test_an_option_of_another_form_of_the_verb_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err
