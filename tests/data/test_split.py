"""Held-out pictures: chosen by their bytes alone, never trained on, and what the validation loss is of."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_runs import run_with as run

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.validation_schedule import ON_TRAINING, loss_name
from simpletune.data.plan import Plan
from simpletune.data.sources.source import SourceImage
from simpletune.data.split import split_images
from simpletune.data.storage.cache import crop_key
from simpletune.runs.folder import read_metrics
from simpletune.runs.report.losses import loss_section
from simpletune.runs.report.run_data import read_run
from simpletune.runs.report.single_run import headline
from simpletune.stages.latent_cache import LatentCache
from simpletune.system.options import ConfigError, UserError

CONTENTS = st.lists(st.binary(max_size=4), min_size=1, max_size=40)


def images_of(contents: list[bytes], first: int = 0) -> list[SourceImage]:
    return [
        SourceImage(f"{number:03d}.png", "a caption", (64, 64), hashlib.sha256(content).hexdigest(), bytes)
        for number, content in enumerate(contents, first)
    ]


def digests(images: list[SourceImage]) -> set[str]:
    return {image.digest for image in images}


def split_or_none(images: list[SourceImage], split: float) -> tuple[set[str], set[str]] | None:
    try:
        training, held_out = split_images(images, split)
    except UserError:
        return None
    assert len(training) + len(held_out) == len(images)
    return digests(training), digests(held_out)


# The choice


@given(CONTENTS, CONTENTS, st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_with_a_share_adding_pictures_moves_none(old: list[bytes], new: list[bytes], share: float) -> None:
    before = split_or_none(images_of(old), share)
    after = split_or_none([*images_of(new, first=len(old)), *images_of(old)], share)
    assume(before and after)
    assert before[0] <= after[0] and before[1] <= after[1]
    assert not after[0] & after[1]  # the same bytes never stand on both sides


@given(CONTENTS, st.integers(1, 50))
def test_a_number_holds_out_the_lowest_hashes(contents: list[bytes], number: int) -> None:
    found, different = split_or_none(images_of(contents), number), sorted(digests(images_of(contents)))
    assert found == ((set(different[number:]), set(different[:number])) if number < len(different) else None)


def test_a_share_is_about_that_share() -> None:
    many = images_of([str(number).encode() for number in range(4000)])
    assert 340 < len(split_images(many, 0.1)[1]) < 460
    assert digests(split_images(many, 0.1)[1]) < digests(split_images(many, 0.2)[1])


@pytest.mark.parametrize(
    ("contents", "split", "words"),
    [
        ([b"a", b"b", b"c"], 3, "validation.split: 3 of 3 pictures.*leaves none to train on.*from 1 to 2"),
        ([b"a", b"b", b"b"], 7, "7 of 2 pictures.*leaves none to train on"),
        ([b"a", b"b", b"c"], 1e-9, "1e-09 of 3 pictures.*holds out none.*larger fraction"),
        ([b"a", b"b"], 1 - 1e-9, "leaves none to train on.*smaller fraction"),
        ([b"a", b"a"], 0.5, "of 1 picture:.*Add pictures"),
    ],
)
def test_a_split_with_an_empty_side_is_refused(contents: list[bytes], split: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        split_images(images_of(contents), split)


def test_what_is_no_split_is_refused(tiny_config: dict) -> None:
    for split in (0, 0.0, 1.0, 1.5, -1, -0.2):
        tiny_config["validation"] |= {"split": split, "loss_samples": 4}
        with pytest.raises(ConfigError, match=f"validation.split: {split} is neither a share .* nor a whole number"):
            validate(tiny_config, "test")
    tiny_config["validation"] |= {"split": 0.2, "loss_samples": 0}
    with pytest.raises(ConfigError, match="validation.split: 0.2 .*loss_samples 0"):
        validate(tiny_config, "test")


def test_the_name_says_how_many_pictures_were_seen() -> None:
    assert loss_name(0, 0) == ON_TRAINING == "loss on training pictures at fixed noise"
    assert loss_name(1, 1) == "validation loss (1 held-out picture)"
    assert loss_name(16, 100) == "validation loss (16 of 100 held-out pictures)"


# A run


@pytest.fixture
def held_config(tiny_config: dict) -> dict:
    """Two of six pictures are held out; each of the others appears three times an epoch, in two variants."""
    tiny_config["data"] |= {"repeats": 3, "variants": 2, "crop": "random"}
    tiny_config["train"] = {"epochs": 1, "batch_size": 2}
    tiny_config["validation"] |= {"split": 2, "loss_samples": 5}
    return tiny_config


def test_a_held_out_picture_never_reaches_a_training_batch(
    held_config: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, loaded, micro_batch, load = set(), [], Plan.micro_batch, LatentCache.load

    def planned(self: Plan, *place: int) -> list:
        draws = micro_batch(self, *place)
        trained.update(crop_key(draw.view) for draw in draws)
        return draws

    monkeypatch.setattr(Plan, "micro_batch", planned)
    monkeypatch.setattr(LatentCache, "load", lambda self, view: loaded.append(view) or load(self, view))
    folder = run(held_config)
    data = json.loads((folder / "data.json").read_text())
    held, samples = {row["sha256"] for row in data["held_out"]}, {row["sha256"] for row in data["samples"]}
    assert (len(data["held_out"]), len(held), len(samples), len(data["samples"])) == (2, 2, 4, 12)
    assert held == set(sorted(held | samples)[:2])
    # What was loaded is what was planned, and 5 held-out draws with two prompts before and after.
    evaluated = [view for view in loaded if view.image.digest in held]
    assert len(evaluated) == 20 and {view.image.digest for view in evaluated} == held
    assert {crop_key(view) for view in loaded if view.image.digest not in held} <= trained
    assert not {crop_key(view) for view in evaluated} & trained
    assert len(read_metrics(folder)) == 6  # 12 samples in batches of 2: held-out pictures are in no epoch
    summary, shown = json.loads((folder / "summary.json").read_text()), capsys.readouterr().out
    assert (summary["steps_per_epoch"], summary["held_out_pictures"]) == (6, 2)
    name = "validation loss (2 held-out pictures)"
    assert summary["eval_loss_is"] == name
    for words in ("4 pictures, 12 samples and 6 steps per epoch", "2 pictures held out", f"{name}: "):
        assert words in shown
    assert "fixed noise" not in shown
    card = (folder / "README.md").read_text()
    assert f"| {name} |" in card and "and 2 held out" in card
    record = read_run(folder)
    assert name[1:] in [fact.name[1:] for fact in headline(record)]
    assert any(name in note for note in loss_section([record]).notes)


def test_without_a_split_the_figure_is_called_what_it_is(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tiny_config, validation={"loss_samples": 4})
    summary, shown = json.loads((folder / "summary.json").read_text()), capsys.readouterr().out
    assert summary["eval_loss_is"] == ON_TRAINING and summary["held_out_pictures"] == 0
    assert f"{ON_TRAINING}: {summary['eval_loss_before']:.4f} before" in shown
    assert "held out" not in shown and "validation loss" not in shown
    assert f"| {ON_TRAINING} |" in (folder / "README.md").read_text()
    (folder / "summary.json").unlink()  # while it still goes on
    assert read_run(folder).loss_is == ON_TRAINING


def test_a_resumed_run_holds_out_the_same_and_refuses_another_split(held_config: dict) -> None:
    held_config["train"] = {"steps": 4}
    held_config["checkpoint"] = {"every": 2, "keep_last": 3}
    whole = run(held_config)
    before = [(whole / name).read_text() for name in ("data.json", "evaluations.jsonl")]
    losses = [row["loss"] for row in read_metrics(whole)]
    shutil.rmtree(whole / "checkpoints" / "step-000004")
    (whole / "summary.json").unlink()
    run(held_config, "latest")
    assert [(whole / name).read_text() for name in ("data.json", "evaluations.jsonl")] == before
    assert [row["loss"] for row in read_metrics(whole)] == losses
    for split, words in ((1, "now trained on"), (3, "now held out"), (None, "now trained on")):
        with pytest.raises(UserError, match="the data has changed") as caught:
            run(held_config, "latest", train={"steps": 6}, validation={"split": split})
        assert words in str(caught.value)


def test_with_number_or_share_the_other_pictures_are_trained_as_without_them(
    held_config: dict, tiny_images: Path, tmp_path: Path
) -> None:
    """The split changes nothing but which pictures there are."""
    split = run(held_config)
    held = {row["file"] for row in json.loads((split / "data.json").read_text())["held_out"]}
    rest = shutil.copytree(tiny_images, tmp_path / "rest")
    for name in held:
        (rest / name).unlink()
    losses = [row["loss"] for row in read_metrics(split)]
    alone = run(held_config, data={"path": str(rest)}, validation={"split": None})
    assert [row["loss"] for row in read_metrics(alone)] == losses


def test_the_data_command_and_check_say_what_is_held_out(
    held_config: dict, write_config: Callable[[object], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(write_config(held_config))
    assert main(["data", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["held_out"]) == 2 and len(found["usable"]) == 6
    assert found["epoch"]["steps"] == 6 and sum(row["pictures"] for row in found["buckets"]) == 4
    assert main(["data", file, "--out", str(tmp_path / "look")]) == 0
    assert "held out   2 pictures (validation.split)" in capsys.readouterr().out
    page = (tmp_path / "look" / "data.html").read_text()
    assert "Held out" in page and page.count("<figcaption>") == 4
    assert main(["check", file]) == 0
    assert "validation loss on 2 pictures held out" in capsys.readouterr().out
    assert main(["check", file, "validation.split=null"]) == 0
    assert ON_TRAINING in capsys.readouterr().out
    assert main(["data", file, "validation.split=6"]) == 2
    assert "leaves none to train on" in capsys.readouterr().err
