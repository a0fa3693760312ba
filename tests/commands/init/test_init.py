"""``simpletune init``: what it sees in a folder, what it suggests for which machine and why, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from simpletune.apps.cli.main import main
from simpletune.apps.cli.train import find_or_write_config
from simpletune.commands.doctor.machine import OK, WARNING, Finding
from simpletune.commands.init import Answers, Suggestion, fit_card, init_command, inspect_folder, suggest
from simpletune.commands.init import choices as making
from simpletune.commands.init.answers import WHAT, ask
from simpletune.commands.init.choices import PROFILES, profile_of, templates_for
from simpletune.config.load import read_config, read_json, validate
from simpletune.data.demo import MODELS
from simpletune.data.sources.multi_source import scan_sources
from simpletune.data.sources.walk import USUAL
from simpletune.data.split import split_images
from simpletune.models.families import FAMILIES
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.system.gpus import Card, find_card
from simpletune.system.options import Json, UserError
from simpletune.system.shell import quote_command

MEDIUM = "stabilityai/stable-diffusion-3-medium-diffusers"
L4 = find_card("L4")


def write(folder: Path, count: int, side: int = 64, name: str = "{}.png", caption: str | None = None) -> Path:
    """Write different plain pictures, each with a caption beside it if there is one; ``{}`` is the number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour = (number * 37 % 256, number * 91 % 256, number)
        file = folder / name.format(number)
        Image.new("RGB", (side, side), colour).save(file)
        if caption is not None:
            file.with_suffix(".txt").write_text(caption.format(number))
    return folder


def accepted(config: Json) -> Json:
    """``check`` accepts a configuration."""
    validate(config, "suggested")
    return config


def why(found: Suggestion, path: str) -> str:
    return "; ".join(reason.why for reason in found.reasons if reason.path == path)


def test_without_a_card_it_is_the_tiny_model_and_says_that_it_is_for_trying_out(tiny_images: Path) -> None:
    found = suggest(tiny_images)
    config = accepted(found.config)
    assert (config["model"], config["data"]["resolution"]) == ({"pretrained": "demo:tiny-sd3", "t5_length": 24}, 64)
    assert config["about"].startswith("For trying out:")
    assert "no graphics card" in why(found, "model.pretrained") and "for trying out" in why(found, "model.pretrained")
    assert list(config)[:2] == ["about", "name"] and config["train"] == {"steps": 200, "batch_size": 6}
    assert config["precision"] == {"weights": "int8", "compute": "fp32"}


@pytest.mark.parametrize("name", MODELS)
def test_each_tiny_model_that_one_names_comes_with_its_own_settings(name: str, tiny_images: Path) -> None:
    model = accepted(suggest(tiny_images, Answers(model=name)).config)["model"]
    own = {"demo:tiny-sd3": {"t5_length": 24}, "demo:tiny-klein": {"family": "klein", "text_length": 32}}
    assert model == {"pretrained": name} | own.get(name, {"family": "sdxl"})


@pytest.mark.parametrize(
    ("card", "profile"),
    [
        ("L4", "24gb"), ("A10G", "24gb"), ("T4", "16gb"), ("12GiB", "12gb"), ("RTX3080-10GB", "8gb"),
        ("RTX3070", "8gb"),
        ("RTX2060", "6gb"), ("4GiB", "4gb"), ("3GiB", "4gb"), ("H100", "24gb"),
    ],
)  # fmt: skip
def test_a_card_gets_sd3_medium_and_the_profile_of_its_size(card: str, profile: str, tiny_images: Path) -> None:
    found = suggest(tiny_images, device=find_card(card))
    config = accepted(found.config)
    assert (config["model"]["pretrained"], config["memory"]) == (MEDIUM, {"profile": profile})
    assert "device" not in config and "precision" not in config  # both are left to the machine and the profile
    assert config["about"].endswith(f"Base: {MEDIUM}.")
    # The driver's figure of a card, which is less than the label, gets the same profile.
    assert profile_of(Card("NVIDIA L4", 22.03, (8, 9), found=1.0))[0] == "24gb"
    assert profile_of(Card("NVIDIA GeForce RTX 3060", 11.75, (8, 6), found=1.0))[0] == "12gb"
    assert profile_of(None)[0] == "8gb"


@pytest.mark.parametrize(
    ("model", "family", "resolution"),
    [("stabilityai/stable-diffusion-3.5-large", "sd3", 1024),
     ("stable-diffusion-v1-5/stable-diffusion-v1-5", "sd15", 512),
     ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl", 1024), ("someone/fine-tune-xl-v9", "sdxl", 1024),
     ("diffusers/stable-diffusion-xl-1.0-inpainting-0.1", "sdxl", 1024)],
)  # fmt: skip
def test_a_named_model_is_taken_with_its_family(model: str, family: str, resolution: int, tmp_path: Path) -> None:
    found = suggest(write(tmp_path / "a", 3, 1024), Answers(model=model), L4)
    config = accepted(found.config)
    assert config["model"]["pretrained"] == model and config["model"].get("family", "sd3") == family
    assert config["data"]["resolution"] == resolution and why(found, "model.pretrained") == "you named it"
    assert any(f"{model} inpaints: " in note for note in found.notes) == ("inpainting" in model)


def test_sdxl_gets_the_shipped_settings_of_a_card_and_1024_px_for_small_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = suggest(write(tmp_path / "a", 3, 600), Answers(model="stabilityai/stable-diffusion-xl-base-1.0"), L4)
    config = accepted(found.config)
    own = read_json(
        Path(next(str(each.value) for each in found.reasons if each.path == "precision, memory").split()[-1])
    )
    assert [config.get(name) for name in ("precision", "optimizer")] == [
        own[name] for name in ("precision", "optimizer")
    ]
    assert config["memory"] == own["memory"] and "profile" not in config["memory"]
    assert config["data"]["resolution"] == 1024, "the model is told the pictures' own sizes"
    assert "told the others' own sizes" in why(found, "data.resolution")
    smaller = suggest(write(tmp_path / "b", 3, 300), Answers(model="stabilityai/stable-diffusion-xl-base-1.0"), L4)
    assert smaller.config["data"]["max_upscale"] is None
    assert why(smaller, "data.max_upscale") == (
        "3 pictures would be scaled up more than twice, which the model is told: larger ones would teach more detail"
    )
    full = validate(config, "x")
    assert (full.validation.guidance, full.objective.name) == (5.0, "ddpm")

    shipped = ["sdxl_lora_6gb", "sdxl_lora_8gb", "sdxl_lora_24gb", "sd15_lora"]
    monkeypatch.setattr(making, "shipped_names", lambda: shipped)
    named = SDXL.words.templates["style"]
    assert templates_for(named, "24gb") == ["sdxl_lora_24gb", "sdxl_lora_8gb", "sdxl_lora_6gb"]
    assert templates_for(named, "16gb") == ["sdxl_lora_8gb", "sdxl_lora_6gb"]
    assert templates_for(named, "4gb") == ["sdxl_lora_6gb"], "the smallest, for a card that is smaller still"
    assert templates_for(SD15.words.templates["style"], "4gb") == ["sd15_lora"]


def test_a_familys_templates_are_shipped_configurations_of_it() -> None:
    for family in FAMILIES:
        assert set(family.words.templates) in (set(WHAT), set()), family.words.title
        for named in family.words.templates.values():
            for profile in PROFILES:
                for name in templates_for(named, profile):
                    assert read_config(Path(name), needs_data=False)[0].model.family == family.family, name


def test_settings_that_do_not_fit_give_way_to_those_of_a_smaller_card(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"name": "x", "precision": {"weights": "bf16"}, "memory": {"checkpointing": "none"}}
    eight: Json = {"precision": {"weights": "int8"}, "memory": {}, "optimizer": {"name": "adamw8bit"}}
    six: Json = {"precision": {"weights": "nf4"}, "memory": {"resident_blocks": 0}, "optimizer": {}}
    smaller = (("eight", eight), ("six", six))
    tried: list[Json] = []

    def predicted(config: Json, card: Card) -> tuple[str, bool, list[str]]:
        tried.append(config)
        return "9,000 MiB", len(tried) == 2, ["0.8 s a step"]

    monkeypatch.setattr(fit_card, "_predict", predicted)
    found = fit_card.fit_to_card(Suggestion(first, (), (), smaller), L4)
    assert tried[0] == first and found.config == tried[1]
    assert tried[1] == {"name": "x", "precision": {"weights": "int8"}, "optimizer": {"name": "adamw8bit"}}
    assert why(found, "precision, memory") == "predicted: 9,000 MiB" and found.notes == ("0.8 s a step",)
    monkeypatch.setattr(fit_card, "_predict", lambda config, card: ("9,000 MiB", False, []))
    none_fits = fit_card.fit_to_card(Suggestion(first, (), (), smaller), L4)
    assert none_fits.config == first and "with the levers of six: 9,000 MiB" in none_fits.notes[-1]


def test_a_named_model_without_a_card(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 3)
    elsewhere = suggest(folder, Answers(model=MEDIUM))
    assert elsewhere.config["memory"] == {"profile": "8gb"} and "device" not in elsewhere.config
    assert any("train on a machine with one" in note for note in elsewhere.notes)
    here = suggest(folder, Answers(model=MEDIUM, on_cpu=True))
    assert accepted(here.config)["device"] == "cpu" and "profile" not in here.config.get("memory", {})


@pytest.mark.parametrize(
    ("sides", "resolution", "skips", "upscale"),
    [
        ([1024] * 4, 1024, False, 2.0), ([830, 900, 1100, 400], 1024, True, 2.0), ([700] * 4, 768, False, 2.0),
        ([500] * 4, 512, False, 2.0), ([500, 500, 500, 200], 512, True, 2.0), ([120] * 4, 512, False, None),
    ],
)  # fmt: skip
def test_the_resolution_is_one_that_most_pictures_reach(
    sides: list[int], resolution: int, skips: bool, upscale: float | None, tmp_path: Path
) -> None:
    for number, side in enumerate(sides):
        write(tmp_path / "a", 1, side, f"{number}-{side}.png")
    found = suggest(tmp_path / "a", device=L4)
    data = accepted(found.config)["data"]
    found_here = (data["resolution"], data.get("on_error") == "skip", data.get("max_upscale", 2.0))
    assert found_here == (resolution, skips, upscale)
    assert ("blurred" in why(found, "data.max_upscale")) == (upscale is None)


def test_without_captions_one_prompt_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 4, name="IMG_{}.png")
    found = suggest(folder)
    assert found.config["data"]["prompt"] == "a photo of sks" and "no captions" in why(found, "data.prompt")
    assert suggest(folder, Answers(trigger=" my  dog ")).config["data"]["prompt"] == "a photo of my dog"
    style = suggest(folder, Answers(what="style", trigger="glim"))
    assert style.config["data"]["prompt"] == "a picture in glim style"
    assert "a lighthouse at dusk, glim style" in style.config["validation"]["prompts"]


@pytest.mark.parametrize(
    ("name", "caption", "kind"),
    [
        ("{}.png", "a red cat {}", "files"), ("a_red_cat_{}.png", None, "names"), ("DSC_{}.png", None, "none"),
        ("Screenshot 2024-{}.png", None, "none"), ("IMG-final_copy{}.jpg", None, "none"),
        ("{}_猫_寺院の庭.png", None, "none"),
        ("großer_blauer_hund_{}.png", None, "names"),
    ],
)  # fmt: skip
def test_where_captions_come_from(name: str, caption: str | None, kind: str, tmp_path: Path) -> None:
    seen = inspect_folder(write(tmp_path / "a", 4, name=name, caption=caption))
    assert seen.captions == kind
    config = accepted(suggest(tmp_path / "a", seen=seen).config)
    assert ("prompt" in config["data"]) == (kind == "none")
    assert config["data"].get("captions") == ("filename" if kind == "names" else None)


def test_pictures_without_a_caption_beside_captioned_ones_get_the_prompt_of_the_trigger(tmp_path: Path) -> None:
    many = write(tmp_path / "many", 12)
    (many / "7.txt").write_text("a cat on a mat")
    found = suggest(many)
    data = accepted(found.config)["data"]
    assert (data["missing_prompt"], data.get("on_error"), data.get("caption_prefix")) == ("a photo of sks", None, None)
    assert why(found, "data.missing_prompt").startswith(
        "11 of 12 pictures have no caption (0.png, 1.png, 10.png and 8 more): they get this one. Or write captions"
    )
    assert "such as 'a cat on a mat'" in why(found, "data.captions") and not found.questions
    images = scan_sources(validate(found.config, "x").data).images
    assert sorted({each.caption for each in images}) == ["a cat on a mat", "a photo of sks"] and len(images) == 12
    assert suggest(many, Answers(trigger="glim dog")).config["data"]["missing_prompt"] == "a photo of glim dog"


def test_captions_that_cannot_be_used_are_asked_about_unless_they_are_few(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 3)
    (folder / "0.txt").touch()  # no caption is left
    (question,) = suggest(folder).questions
    assert question.text == "no caption can be used. 0.png: its caption 0.txt is empty"
    assert [choice.overrides for choice in question.choices] == [{}, {"data.prompt": "a photo of sks"}]
    chosen = suggest(folder, chosen={"data.prompt": "a photo of sks"})
    assert not chosen.questions and chosen.config["data"]["prompt"] == "a photo of sks"
    few = write(tmp_path / "few", 6, caption="a cat {}")
    (few / "0.txt").write_bytes(b"")
    found = suggest(few)
    assert found.config["data"]["on_error"] == "skip" and "0.png" in why(found, "data.on_error")
    for number in range(1, 4):
        (few / f"{number}.txt").write_bytes("ein Bär".encode("cp1252"))
    (question,) = suggest(few).questions
    assert question.text.startswith("4 of 6 pictures have a caption that cannot be used. 0.png: its caption 0.txt is ")
    assert [list(choice.overrides) for choice in question.choices] == [[], ["data.on_error"], ["data.prompt"]]
    lines = [json.dumps({"file_name": "5.png", "text": "a dog"})]
    (few / "metadata.jsonl").write_text("\n".join(lines))
    reasons = {each.name: each.reason for each in inspect_folder(few).report.rejected}
    assert reasons["5.png"] == "has two different captions: metadata.jsonl and 5.txt. Keep one"


@pytest.mark.parametrize(
    ("caption", "prefix", "noted"),
    [("a cat {}", "glim,", False), ("a Glim cat {}", None, False), ("a cat {}", None, True)],
)
def test_a_trigger_goes_before_captions_that_lack_it(
    caption: str, prefix: str | None, noted: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", 4, caption=caption)
    if noted:
        (folder / "0.txt").write_text("a glim cat")
    found = suggest(folder, Answers(trigger="glim"))
    assert found.config["data"].get("caption_prefix") == prefix
    assert any("'glim' is in 1 of 4 captions" in note for note in found.notes) == noted
    prompts = accepted(found.config)["validation"]["prompts"]
    assert (prompts[0] == "glim, a cat 0") == (prefix is not None)


def test_a_class_after_the_trigger_is_preserved(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 4)
    found = suggest(folder, Answers(trigger="sks owl"), L4)
    config = accepted(found.config)
    assert config["prior"] == {"method": "base_prediction", "prompt": "a photo of an owl"}
    assert config["validation"]["class_prompt"] == "a photo of an owl" and why(found, "prior.method")
    assert "a photo of sks owl on a beach at sunset" in config["validation"]["prompts"]
    without = suggest(folder, Answers(trigger="sks"), L4)
    assert "prior" not in without.config and any("the trigger 'sks dog'" in note for note in without.notes)
    captioned = write(tmp_path / "b", 4, caption="my sks dog, day {}")
    config = accepted(suggest(captioned, Answers("subject", "sks dog"), L4).config)
    assert config["prior"] == {"method": "base_prediction", "prompt": "dog", "trigger": "sks dog"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dog", "dog"), ("my_Dog photos", "dog"), ("pictures", None), ("rex and bella", None), ("2024-05", None)],
)
def test_the_folder_s_name_may_be_the_class(name: str, kind: str | None, tmp_path: Path) -> None:
    folder = write(tmp_path / name, 4)
    found = suggest(folder, device=L4)
    config = accepted(found.config)
    assert config["data"]["prompt"] == (f"a photo of sks {kind}" if kind else "a photo of sks")
    assert config.get("prior", {}).get("prompt") == (f"a photo of a {kind}" if kind else None)
    assert ("The folder's name is taken for the class" in why(found, "prior.method")) == (kind is not None)
    assert "prior" not in suggest(folder, Answers(trigger="glim"), L4).config  # the user named no class
    assert suggest(folder, Answers("style"), L4).config["data"]["prompt"] == "a picture in sks style"


@pytest.mark.parametrize(
    ("count", "captioned", "what"),
    [(5, False, "subject"), (31, False, "style"), (5, True, "style"), (200, True, "general")],
)
def test_the_guess_of_what_it_is(count: int, captioned: bool, what: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", count, 64, caption="a thing {}" if captioned else None)
    found = suggest(folder)
    assert f"{what} (" in why(found, "adapter.method") and "a guess" in why(found, "adapter.method")
    said = suggest(folder, Answers("style"), seen=inspect_folder(folder))
    assert why(said, "adapter.method").endswith("you said so")


def test_kohya_s_folders_are_understood(tmp_path: Path) -> None:
    write(tmp_path / "a" / "10_sks dog", 3)
    write(tmp_path / "a" / "5_dog", 2)
    data = accepted(suggest(tmp_path / "a").config)["data"]
    assert data["folder_names"] == "kohya" and "prompt" not in data
    config = validate({"name": "x", "data": data}, "kohya")
    assert sorted((p.caption, p.repeats) for p in scan_sources(config.data).images)[-1] == ("sks dog", 10)


@pytest.mark.parametrize("count", [49, 50, 55])
def test_from_50_pictures_on_a_tenth_is_held_out(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = suggest(write(tmp_path / "a", count, 64))
    split = accepted(found.config)["validation"].get("split")
    assert (split is not None) == (count >= 50)
    if split is not None:
        trained, out = split_images(inspect_folder(tmp_path / "a").images, split)
        assert 0.02 * count < len(out) < 0.25 * count and len(trained) + len(out) == count

        def empty(images: object, split: float) -> None:
            raise UserError("holds out none")

        monkeypatch.setattr(making, "split_images", empty)  # as where no hash lies below the share
        assert suggest(tmp_path / "a").config["validation"]["split"] == {50: 5, 55: 6}[count]


@pytest.mark.parametrize(("length", "factor"), [("short", 0.5), ("normal", 1), ("long", 2)])
def test_steps_follow_pictures_and_length(length: str, factor: float, tmp_path: Path) -> None:
    config = suggest(write(tmp_path / "a", 8), Answers(length=length), L4).config  # type: ignore[arg-type]
    assert config["train"] == {"steps": 800 * factor, "batch_size": 1}
    assert config["checkpoint"] == {"every": 200 * factor, "keep_last": 4}
    assert config["validation"]["every"] == 200 * factor


def test_duplicates_and_other_formats_are_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 3)
    (folder / "again.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "layers.psd").touch()
    found = suggest(folder)
    assert "1 group of identical files, such as 0.png, again.png" in " ".join(found.notes)
    assert found.files.reason_sentences() == [
        "layers.psd: .psd pictures are not read. Convert them to jpg, png or webp"
    ]


@pytest.mark.parametrize("name", ["my pictures", "käse 猫", "-rf", "x\ny", "con", "...", "a" * 200])
def test_folders_of_any_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write(tmp_path / name, 2, name="a  b {}\n.png")
    assert main(["init", str(folder), "--device", "cpu", "--trigger", "sks"]) == 0
    file = tmp_path / f"{name}.json"
    config, _ = read_config(file)
    assert config.data.members[0].path == str(folder) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name)
    assert config.name.lower() not in ("con", "nul")


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("a", {}, f"contains no pictures ({USUAL}). Add some"),
        ("a/nothing", {}, "nothing does not exist. Give a folder with pictures"),
        ("a/x", {"x": ""}, "x is a file. Give the folder"),
        ("a", {"metrics.jsonl": "", "0.png": None}, "is the folder of a run"),
        ("a", {"a.png": "no picture"}, "none of 1 picture can be used: a.png is not a picture"),
        ("a", {"a.psd": ""}, "It has 1 .psd: convert them"),
    ],
)
def test_what_is_no_folder_of_pictures(
    name: str, files: dict[str, str | None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out.json"
    (tmp_path / "a").mkdir()
    for file, text in files.items():
        write(tmp_path / "a", 1) if text is None else (tmp_path / "a" / file).write_text(text)
    assert main(["init", str(tmp_path / name), "--device", "cpu", "--out", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_the_verb_writes_says_why_and_never_overwrites(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")  # commands are printed with their path
    out = tmp_path / "mine.json"
    words = ["init", str(tiny_images), "--device", "cpu", "--out", str(out), "--trigger", "glim", "--what", "style"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"written    {out}" in text and "model.pretrained demo:tiny-sd3: no graphics card here" in text
    assert (
        f"next       {quote_command('simpletune', 'check', out)}; {quote_command('simpletune', 'train', out)}" in text
    )
    written = out.read_text()
    assert json.loads(written)["data"]["caption_prefix"] == "glim,"
    assert main(words) == 2 and out.read_text() == written
    assert f"--out: {out} exists. Choose another name, or add --overwrite" in capsys.readouterr().err
    assert main([*words, "--length", "short", "--overwrite"]) == 0
    assert json.loads(out.read_text())["train"]["steps"] == 100
    assert main(["check", str(out)]) == 0
    assert main(["init", str(tiny_images), "--device", "cpu", "--out", str(tmp_path / "no" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_prediction_accepts_it(tiny_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "mine.json"
    assert main(["init", str(tiny_images), "--device", "cpu", "--out", str(out)]) == 0
    assert main(["estimate", str(out), f"output.cache={tmp_path / 'cache'}", "--device", "L4"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("card", ["4GiB", "RTX3070", "T4", "L4"])
def test_the_prediction_of_sd3_medium_fits_the_card_without_a_smaller_profile(card: str, tiny_images: Path) -> None:
    first = suggest(tiny_images, device=find_card(card))
    found = fit_card.fit_to_card(first, find_card(card))
    assert found.config == first.config and "predicted: " in why(found, "memory.profile")
    assert any(note.endswith(" a step, limited by the card") for note in found.notes)


def test_a_profile_that_does_not_fit_gives_way(tiny_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def predicted(config: Json, card: Card) -> tuple[str, bool, list[str]]:
        tried.append(config["memory"]["profile"])
        return "9,000 MiB", tried[-1] == "8gb", []

    monkeypatch.setattr(fit_card, "_predict", predicted)
    found = fit_card.fit_to_card(suggest(tiny_images, device=L4), L4)
    assert tried == ["24gb", "16gb", "12gb", "8gb"] and found.config["memory"]["profile"] == "8gb"
    assert why(found, "memory.profile").endswith("predicted: 9,000 MiB")
    assert [each.path for each in found.reasons].count("memory.profile") == 1
    monkeypatch.setattr(fit_card, "_predict", lambda config, card: ("9,000 MiB", False, []))
    found = fit_card.fit_to_card(suggest(tiny_images, device=L4), L4)
    assert f"predicted not to fit even with the levers of {PROFILES[0]}: 9,000 MiB" in found.notes[-1]

    def unknown(config: Json, card: Card) -> tuple[str, bool]:
        raise UserError("not in the local cache")

    monkeypatch.setattr(fit_card, "_predict", unknown)  # as where it needs a download
    found = fit_card.fit_to_card(suggest(tiny_images, device=L4), L4)
    assert found.notes[-1].startswith("not predicted (not in the local cache)")


def test_the_card_of_this_machine_is_asked_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"name": "NVIDIA L4", "total": 22 * 2**30, "free": 0, "capability": [8, 9]}
    refused: Json = {"devices": [], "refused": "the driver is too old"}
    answers: list[Json] = [{"devices": [device]}, refused, {"error": "killed"}]
    monkeypatch.setattr(fit_card.ProbeProcess, "ask", lambda probe, question: answers.pop(0))
    monkeypatch.setattr(fit_card.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    card, reason = fit_card.card_here()
    assert card is not None and (card.name, card.capability, profile_of(card)[0]) == ("NVIDIA L4", (8, 9), "24gb")
    assert fit_card.card_here() == (None, "the driver is too old") and fit_card.card_here() == (None, "killed")
    monkeypatch.setattr(fit_card.shutil, "which", lambda name: None)
    monkeypatch.setattr(fit_card, "SIGNS", ("/no/such/device",))
    assert fit_card.card_here() == (None, "no NVIDIA driver was found")  # asks nothing: there is no answer left


def test_a_missing_login_or_licence_is_said_before_a_download(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    level, asked = WARNING, []

    def access(model: str) -> list[Finding]:
        asked.append(model)
        return [Finding(model, level, "the hub does not give it to this account", "why", "accept the licence")]

    monkeypatch.setattr(fit_card, "access", access)
    finding = Finding("hub login", WARNING, "no token", "", "hf auth login")
    monkeypatch.setattr(fit_card, "login", lambda machine: [finding])
    monkeypatch.setattr(fit_card, "_predict", lambda config, card: ("1 MiB", True, []))
    assert main(["init", str(tiny_images), "--device", "L4", "--out", str(tmp_path / "a.json")]) == 0
    text = capsys.readouterr().out
    assert asked == [MEDIUM] and "hf auth login" in text and "accept the licence" in text
    level = OK
    assert list(fit_card.model_findings(MEDIUM)) == []  # a model that can be had needs no login
    assert list(fit_card.model_findings(str(tiny_images))) == [] and len(asked) == 2  # a folder is not asked for


class Typed:
    """Somebody at a terminal."""

    def __init__(self, *lines: str):
        self.lines, self.questions = list(lines), list[str]()

    def __call__(self, question: str) -> str:
        self.questions.append(question)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


def test_three_questions_have_defaults() -> None:
    person = Typed("", "", "")
    assert ask(Answers(), "style", None, person) == Answers("style", None, "normal") and len(person.questions) == 3
    assert "[style]" in person.questions[0] and "[none]" in person.questions[1] and "[normal]" in person.questions[2]
    assert ask(Answers(), "style", "sks", Typed()) == Answers("style", "sks", "normal")  # the input ends
    typed = Typed("SUB", "sks dog", "lo")
    assert ask(Answers(), "style", None, typed) == Answers("subject", "sks dog", "long")
    assert ask(Answers(), "subject", "sks dog", Typed()).trigger == "sks dog"
    assert ask(Answers(), "style", "sks dog", Typed()).trigger == "sks"  # only a subject has a class
    wrong = Typed("cat", "dog", "s", "x", "")  # s may be subject or style
    assert ask(Answers(), "style", None, wrong) == Answers("style", "x", "normal") and len(wrong.questions) == 5
    known = Typed("short")
    assert ask(Answers("general", "glim"), "style", None, known) == Answers("general", "glim", "short")
    assert len(known.questions) == 1


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_only_a_terminal_is_asked(
    terminal: bool, quiet: bool, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Answers] = []
    monkeypatch.setattr(init_command, "ask", lambda answers, *rest: asked.append(answers) or answers)
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    init_command.init_command(tiny_images, Answers(), tmp_path / "a.json", "cpu", quiet=quiet)
    assert len(asked) == (terminal and not quiet)


def test_a_folder_is_trained_with_the_configuration_beside_it(tmp_path: Path, monkeypatch, capsys) -> None:
    folder, file = write(tmp_path / "my pictures", 3, 64), tmp_path / "my pictures.json"
    monkeypatch.setattr(fit_card, "card_here", lambda: (None, "no driver"))
    no_photos = "this trains the tiny model: it draws flat figures of 64 px, no photos"
    assert find_or_write_config(folder) == file
    told = capsys.readouterr().out
    assert re.search(f"written.*{no_photos}", told, re.DOTALL) and "next" not in told, "it goes on by itself"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"name": "mine"}))
    assert find_or_write_config(folder) == file and json.loads(file.read_text())["name"] == "mine"
    told = capsys.readouterr().out
    assert (
        f"{file} is used again. {quote_command('simpletune', 'init', folder)} --overwrite" in told and no_photos in told
    )
    file.write_text(json.dumps(config | {"data": config["data"] | {"path": "demo:pictures"}}))
    with pytest.raises(UserError, match="is a configuration for other pictures"):
        find_or_write_config(folder)
    file.write_text('{"photos": 3}')
    with pytest.raises(UserError, match="unknown field"):
        find_or_write_config(folder)
    assert file.read_text() == '{"photos": 3}'
    assert find_or_write_config(file) == file and find_or_write_config(Path("demo")) == Path("demo")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.json").write_text("{}")
    assert find_or_write_config(tmp_path / "configs") == tmp_path / "configs"  # reading it says to name a file in it


def test_the_predicted_peak_is_compared_with_the_card(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    words, fits, speed = fit_card._predict(tiny_config, L4)
    needed = int(re.match(r"([\d,]+) MiB of the card's 22,", words).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert fits and "with allowances, most in the stage " in words
    assert "a step, limited by the host" in speed[0] and speed[-1].startswith("train.batch_size=")
    assert capsys.readouterr().out == "predict    memory on L4\n", "what the configuration settles is not said"
    for gib, enough in (((needed + 1) / 1024, True), ((needed - 1) / 1024, False)):
        assert fit_card._predict(tiny_config, Card("Test", gib, (8, 9), found=1.0))[1] is enough


def test_files_that_may_hold_captions_are_asked_about(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 3)
    (folder / "README.txt").write_text("taken in May")  # is left over, and nothing more
    assert not suggest(folder).questions
    (folder / "captions").mkdir()
    for number in range(3):
        (folder / "captions" / f"{number}.txt").write_text("a cat")
    (question,) = suggest(folder).questions
    assert question.text == (
        "no caption can be used. captions/0.txt: the picture of this name lies in another folder. Put both into one, "
        "and 2 others"
    )
    (folder / "0.txt").write_text("a dog")
    (question,) = suggest(folder).questions
    assert question.text.startswith("2 of 3 pictures have no caption, and files that may hold some are not read. ")
    assert [choice.overrides for choice in question.choices] == [
        {}, {"data.missing_prompt": "a photo of sks"}, {"data.missing_prompt": None, "data.on_error": "skip"},
    ]  # fmt: skip
    chosen = suggest(folder, chosen={"data.missing_prompt": None, "data.on_error": "skip"})
    assert not chosen.questions and len(chosen.config["validation"]["prompts"]) > 0


def masked(folder: Path, masks: int, side: int = 64) -> Path:
    """Write three pictures, and masks of a size beside the first ones."""
    for number in range(masks):
        write(folder, 1, side, f"{number}-masklabel.png")
    return write(folder, 3)


def test_masks_of_all_pictures_are_used_and_said(tmp_path: Path) -> None:
    found = suggest(masked(tmp_path / "dog", 3))
    assert accepted(found.config)["data"]["mask"] == "files" and not found.questions
    (reason,) = [each for each in found.reasons if each.path == "data.mask"]
    assert (
        reason.why == "every picture has a mask, such as 0-masklabel.png: only its white parts are learned"
        and reason.override == "data.mask=null leaves the masks alone"
    )
    assert len(scan_sources(validate(found.config, "x").data).images) == 3
    some = suggest(masked(tmp_path / "owl", 2), chosen={"data.on_error": "skip"})
    assert len(some.questions) == 1, "which is not about masks"
    off = suggest(tmp_path / "dog", chosen={"data.mask": None})
    assert "mask" not in off.config["data"] and not off.questions
    apart = write(tmp_path / "cat", 2)
    write(apart / "masks", 2)
    data = accepted(suggest(apart).config)["data"]
    assert (data["mask"], data["mask_path"]) == ("files", str(apart / "masks"))


def test_texts_with_other_names_than_the_pictures_are_asked_about(tmp_path: Path) -> None:
    folder = write(tmp_path / "dog", 4)
    (folder / "notes.txt").write_text("from a friend")
    assert not suggest(folder).questions, "one text is a note"
    for number in range(3):
        (folder / f"img_{number}.txt").write_text("a dog")
    (question,) = suggest(folder).questions
    assert question.text == "no caption can be used. img_0.txt: no picture has this name, and 3 others"


def test_folders_of_sd_scripts_below_another_are_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "dog"
    write(folder / "img" / "10_sks dog", 3, caption="a dog {}")
    write(folder / "reg" / "1_dog", 4)
    (question,) = suggest(folder).questions
    assert question.text.startswith("folders are named as for kohya's scripts (img/10_sks dog, reg/1_dog)")
    assert main(["init", str(folder), "--device", "cpu"]) == 2
    commands = [line.partition(":  ")[2] for line in capsys.readouterr().err.splitlines() if ":  " in line]
    assert [shlex.split(command)[2:-2] for command in commands] == [
        [str(folder / "img")], [str(folder / "reg")], [str(folder), "data.folder_names=plain"],
    ]  # fmt: skip
    assert all(command.endswith(" --device cpu") for command in commands)
    found = suggest(folder / "img")
    assert found.config["data"]["folder_names"] == "kohya" and not found.questions
    assert "10 repeats of 'sks dog'" in why(found, "data.folder_names")
    plain = suggest(folder, chosen={"data.folder_names": "plain"})
    assert not plain.questions and "folder_names" not in plain.config["data"]
    one = suggest(write(tmp_path / "one" / "img" / "10_sks dog", 3, caption="a dog {}").parents[1])
    assert not one.questions and "are read if you give" in " ".join(one.notes)


def test_splits_without_train_are_asked_about(tmp_path: Path) -> None:
    for name, count in (("test", 3), ("val", 2)):
        write(tmp_path / "dog" / name, count, caption="a dog {}")
    (question,) = suggest(tmp_path / "dog").questions
    assert question.text == "no pictures are of the split train, but of validation (2 pictures), test (3 pictures)"
    for choice, count in zip(question.choices, (2, 3, 5), strict=True):
        answered = suggest(tmp_path / "dog", chosen=choice.overrides)
        config = {**answered.config, "data": answered.config["data"] | {"split": choice.overrides["data.split"]}}
        assert not answered.questions and len(scan_sources(validate(config, "x").data).images) == count


def test_a_folder_of_links_is_read_with_the_option_that_its_error_names(tmp_path: Path) -> None:
    write(tmp_path / "far", 3)
    (tmp_path / "dog").mkdir()
    for number in range(3):
        (tmp_path / "dog" / f"{number}.png").symlink_to(tmp_path / "far" / f"{number}.png")
    with pytest.raises(UserError, match="data.links=anywhere"):
        suggest(tmp_path / "dog")
    assert len(inspect_folder(tmp_path / "dog", {"links": "anywhere"}).images) == 3


def test_a_folder_of_masks_alone_is_called_so(tmp_path: Path) -> None:
    write(tmp_path / "dog", 3, name="{}-masklabel.png")
    with pytest.raises(UserError, match="holds 3 masks and no pictures. Add the pictures"):
        suggest(tmp_path / "dog")


def test_one_picture_is_not_spoken_of_as_several(tmp_path: Path) -> None:
    folder = write(tmp_path / "dog", 4, caption="a dog {}")
    (folder / "1.txt").unlink()
    assert "1 of 4 pictures has no caption (1.png): it gets this one" in why(suggest(folder), "data.missing_prompt")
    (folder / "captions.csv").write_text("image,text")
    (question,) = suggest(folder).questions
    assert question.text.startswith("1 of 4 pictures has no caption, ")
    assert [each.words for each in question.choices] == [
        "mend the files, and call this again", "use one prompt for this picture", "leave this picture out",
    ]  # fmt: skip


def test_lines_that_cannot_be_used_are_asked_about_if_pictures_lack_a_caption(tmp_path: Path) -> None:
    folder = write(tmp_path / "dog", 3)
    (folder / "metadata.csv").write_text("file_name,text\n0.png,a dog\n1.png,a dog, sitting\n2.png,a dog, running\n")
    (question,) = suggest(folder).questions
    assert question.text == (
        "2 of 3 pictures have no caption, and lines with some cannot be used. metadata.csv:3: has more cells than the "
        "first line. Put quotes around a text with commas, and 1 other"
    )


def test_the_caption_of_a_damaged_picture_is_no_caption_for_another(tmp_path: Path) -> None:
    folder = write(tmp_path / "dog", 3, caption="a dog {}")
    (folder / "1.txt").unlink()
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:60])
    found = suggest(folder)
    assert not found.questions and "1 of 2 pictures has" in why(found, "data.missing_prompt")


@pytest.mark.parametrize("masks", ["masks", "one/masks"])
def test_masks_that_training_would_not_find_are_asked_about(masks: str, tmp_path: Path) -> None:
    folder = tmp_path / "dog"
    write(folder / "one", 3)
    write(folder / masks, 3)
    found = suggest(folder)
    text = f"3 of 3 masks lie where training does not look, such as {masks}/0.png. "
    assert [question.text.startswith(text) for question in found.questions] == [True]
    assert "mask" not in found.config["data"] and found.questions[0].choices[0].overrides == {"data.mask": None}
    answered = suggest(folder, chosen={"data.mask": None})
    assert not answered.questions and len(scan_sources(validate(answered.config, "x").data).images) == 3


def test_masks_in_capital_letters_are_used(tmp_path: Path) -> None:
    folder = write(tmp_path / "dog", 3, name="A{}.JPG")
    write(folder, 3, name="A{}-MASKLABEL.PNG")
    config = suggest(folder).config
    assert config["data"]["mask"] == "files"
    found = scan_sources(validate(config, "x").data)
    assert [bool(each.mask) for each in found.images] == [True] * 3 and not found.rejected


@pytest.mark.parametrize(
    ("masks", "side", "text", "answers"),
    [
        (2, 64, "2 of 3 pictures have a mask; without one: 2.png", [
            {"data.mask": None}, {"data.mask": "files", "data.on_error": "skip"},
        ]),
        (3, 32, "3 of 3 masks have another size than their picture, or cannot be read (0.png, 1.png, 2.png)", [
            {"data.mask": "files", "data.on_error": "skip"}, {"data.mask": None},
        ]),
    ],
)  # fmt: skip
def test_masks_of_some_pictures_or_of_another_size_are_asked_about(
    masks: int, side: int, text: str, answers: list[Json], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = masked(tmp_path / "dog", masks, side)
    (question,) = suggest(folder).questions
    assert question.text == text and [choice.overrides for choice in question.choices] == answers
    assert main(["init", str(folder), "--device", "cpu"]) == 2 and not (tmp_path / "dog.json").exists()
    said = capsys.readouterr().err
    assert "1 question before anything is written" in said
    commands = [line.partition(":  ")[2] for line in said.splitlines() if ":  " in line]
    assert len(commands) == 2 and all(f"simpletune init {folder} data.mask=" in answer for answer in commands)
    assert all(answer.endswith("--device cpu") for answer in commands), "the options given are repeated"
    for answer in commands:
        words = shlex.split(answer)[1:]
        assert main([*words, "--overwrite"]) == 0
        assert read_config(tmp_path / "dog.json")[0].data.mask == (None if "data.mask=null" in words else "files")
    assert len(scan_sources(read_config(tmp_path / "dog.json")[0].data).images) in (2, 3)


def test_train_of_a_folder_stops_at_a_question_and_writes_the_answer_into_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = masked(tmp_path / "dog", 2)
    assert main(["train", str(folder)]) == 2 and not (tmp_path / "dog.json").exists()
    said = capsys.readouterr().err
    assert "1 question before anything is trained" in said and f"simpletune train {folder} data.mask=null" in said
    find_or_write_config(folder, ["data.mask=null", "train.steps=3"])
    written = json.loads((tmp_path / "dog.json").read_text())
    assert written["data"]["mask"] is None and written["train"]["steps"] != 3, "only what is said of the data"


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        ("maskdog", ["sks maskdog", "sks"]), ("katze", ["sks katze", "sks"]), ("собака", ["sks собака", "sks"]),
        ("golden retriever", ["sks golden retriever", "sks golden", "sks retriever", "sks"]),
        ("rex and bella", ["sks rex bella", "sks rex", "sks bella", "sks"]),
    ],
)  # fmt: skip
def test_a_class_that_is_not_one_known_word_is_asked_for(name: str, offered: list[str], tmp_path: Path) -> None:
    found = suggest(write(tmp_path / name, 3))
    (question,) = found.questions
    assert [choice.overrides.get("trigger") for choice in question.choices] == offered
    assert "prior" not in found.config
    named = suggest(tmp_path / name, Answers(trigger="sks dog"))
    assert not named.questions and named.config["prior"]["prompt"] == "a photo of a dog"
    assert "A step takes about twice the time" in why(named, "prior.method")
    command_line = init_command.open_questions(Path("x y"), found.questions, Answers(), ["data.flip=true"], "train")
    assert "init 'x y' data.flip=true --trigger sks && " in command_line and "train 'x y'" in command_line


def test_a_train_folder_beside_test_is_the_split_train(tmp_path: Path) -> None:
    folder = tmp_path / "dog"
    write(folder / "train", 4)
    write(folder / "test", 2, 80)
    found = suggest(folder)
    assert accepted(found.config)["data"]["split"] == "train"
    assert why(found, "data.split").startswith("test (2 pictures) left out")
    assert len(scan_sources(validate(found.config, "x").data).images) == 4
    both = inspect_folder(folder, {"split": None})
    assert len(both.images) == 6 and both.splits is None


def test_a_folder_of_tables_or_shards_says_how_to_train_on_it(tmp_path: Path) -> None:
    for name, source in (("a.parquet", "table"), ("b.tar", "stream")):
        folder = tmp_path / source
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(UserError, match=f"data.source={source} data.path="):
            inspect_folder(folder)
