"""Pictures of a class that the base draws before training: what they are, that they are kept, and runs with them."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from tiny_runs import saved_weights

from simpletune.config.load import validate
from simpletune.config.resolve import resolve_folders
from simpletune.data.storage.claims import KeyRange
from simpletune.data.storage.place import CachePlace
from simpletune.estimate.job_estimate import needs_of
from simpletune.estimate.simulate.simulate_stages import simulate_parts, simulate_stage
from simpletune.runs import checkpoint
from simpletune.runs.folder import read_metrics
from simpletune.system.stage_timer import StageTimer
from simpletune.training import class_images
from simpletune.training.class_images import class_folder, class_requests, with_class_images
from simpletune.training.prepare import prepare_only
from simpletune.training.train import train

CLASS = "a flat picture"
PRIOR = {
    "method": "class_pictures", "prompt": CLASS, "count": 3, "steps": 3, "guidance": 2.0, "seed": 11, "weight": 0.5,
}  # fmt: skip


def with_prior(tiny_config: dict, prompt: str = CLASS, **changes: object) -> dict:
    """The tiny run with class pictures. Tests that look at the files need a prompt of their own."""
    return copy.deepcopy(tiny_config) | {"prior": PRIOR | {"prompt": prompt} | changes}


def folder(data: dict) -> Path:
    """The folder of a run's class pictures."""
    config = resolve_folders(validate(data, "test"))
    return class_folder(config, class_requests(config, config.prior))


def files(data: dict) -> dict[Path, tuple[int, int]]:
    """The class pictures that depend on the same settings: (inode, time of writing)."""
    found = sorted(folder(data).parent.rglob("*.png"))
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in found}


def test_they_are_the_bases_own_pictures_and_train_as_a_source(tiny_config: dict, capsys) -> None:
    data = with_prior(tiny_config, own := "a flat picture of a disc")
    data["validation"] = {"prompts": [own], "seed": 12, "steps": 3, "guidance": 2.0, "loss_samples": 0}
    run = train(validate(data, "test"))
    names = [file.name for file in files(data)]
    assert folder(data).name == "11-13" and names == [f"seed-00000000{seed}.png" for seed in (11, 12, 13)]
    images = [np.asarray(Image.open(folder(data) / name)) for name in names]
    of_base = np.asarray(Image.open(run / "samples/base/prompt-00.png"))  # of seed 12, drawn with the adapter off
    assert (images[1] == of_base).all() and (images[0] != of_base).any()

    samples = json.loads((run / "data.json").read_text())["samples"]
    of_class = [row for row in samples if row["source"] == 1]
    assert [row["file"] for row in of_class] == names
    assert {row["caption"] for row in of_class} == {own} and len(samples) == 6 + 3
    said = capsys.readouterr().out
    assert f"class   3 class pictures of '{own}': 0 kept in {folder(data)}, 3 to draw" in said
    assert "class" in json.loads((run / "summary.json").read_text())["stages"]


@pytest.mark.parametrize("cache", ["folder", "s3://bucket/cache"])
def test_processes_wait_for_each_others_prompts_only_in_a_folder(
    cache: str, tiny_config: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an object store, what another process has encoded may not have arrived yet."""
    given = []
    text = SimpleNamespace(fill=lambda prompts, device, share: given.append(share), load=None)
    monkeypatch.setattr(class_images, "TextCache", lambda *_: text)
    config = validate(with_prior(tiny_config), "test")
    place = config.output.place if cache == "folder" else CachePlace(config.output.place.folder, "shards", cache)
    monkeypatch.setattr(type(config.output), "place", property(lambda self: place))
    two: Any = SimpleNamespace(device=torch.device("cpu"), process_index=1, num_processes=2)
    done: Any = SimpleNamespace(claim=lambda *_: [])
    class_images.generate_missing(config, class_requests(config, config.prior), done, two)
    assert given == [KeyRange(1, 2) if cache == "folder" else KeyRange()]


def test_they_are_drawn_once_and_linked_by_longer_series(tiny_config: dict, capsys: pytest.CaptureFixture[str]) -> None:
    def prepared(count: int, **changes: float) -> dict:
        data = with_prior(tiny_config, "a flat picture of a ring", count=count, **changes)
        prepare_only(validate(data, "test"))
        return data

    two = prepared(2)
    before = files(two)
    assert [file.parent.name for file in before] == ["11-12"] * 2
    assert ": 0 kept in " in (said := capsys.readouterr().out) and ", 2 to draw" in said
    prepared(2, weight=2.0)  # which they do not depend on
    assert ": 2 kept in " in (said := capsys.readouterr().out) and ", 0 to draw" in said
    three = prepared(3)
    assert ": 2 kept in " in (said := capsys.readouterr().out) and ", 1 to draw" in said and "hint" not in said
    after = files(two)
    assert len(after) == 2 + 3 and {file: after[file] for file in before} == before
    assert after[folder(two) / "seed-0000000011.png"] == after[folder(three) / "seed-0000000011.png"]
    assert folder(with_prior(tiny_config, "a flat picture of a ring", guidance=3.0)).parent != folder(two).parent
    prepared(13)
    (hint,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("hint"))
    assert re.search("6 samples to learn and 13 for regularization.*about 2 times", hint), "unequal shares are said"


def test_with_a_trigger_they_have_the_captions_of_the_subject(tiny_config: dict) -> None:
    data = with_prior(tiny_config, "thing", trigger="flat picture", count=8, steps=1)
    run = train(validate(data | {"train": {"steps": 1}}, "test"))
    rows = json.loads((run / "data.json").read_text())["samples"]
    captions = [[row["caption"] for row in rows if row["source"] == source] for source in (0, 1)]
    words = "flat picture"
    replaced = {each.replace(words, "thing") if words in each else "thing" for each in captions[0]}
    assert set(captions[1]) == replaced and len(captions[1]) == 8 and len(replaced) > 2


def test_resumes_bit_for_bit(tiny_config: dict) -> None:
    data = with_prior(tiny_config) | {"checkpoint": {"every": 2}}
    run = train(validate(data, "test"))
    whole = saved_weights(run, 4)
    shutil.rmtree(checkpoint.checkpoint_folder(run, 4))
    assert train(validate(data, "test"), "latest") == run
    torch.testing.assert_close(saved_weights(run, 4), whole, rtol=0, atol=0)


def test_an_inpainting_model_learns_from_them_inside_their_holes_too(tiny_config: dict) -> None:
    config = resolve_folders(validate(with_prior(tiny_config), "test"))
    config = config.model_copy(update={"data": config.data.model_copy(update={"inpainting_loss": "inside"})})
    found = with_class_images(config, Accelerator(cpu=True), StageTimer(cuda=False))
    assert [source.inpainting_loss for source in found.data.members] == ["inside", "inside"]


def test_their_weight_is_that_of_the_prior(tiny_config: dict) -> None:
    """With all nine samples in one step, the first loss is (the six others' + weight times the three's) / 9."""
    first = {}
    for weight in (1.0, 0.5, 0.25):
        data = with_prior(tiny_config, weight=weight) | {"train": {"steps": 1, "batch_size": 9}}
        first[weight] = read_metrics(train(validate(data, "test")))[0]["loss"]
    of_class = (first[1.0] - first[0.5]) / 0.5
    assert first[0.25] == pytest.approx(first[1.0] - 0.75 * of_class, rel=1e-5) and of_class > 0.1


def test_drawing_them_is_predicted_and_counted(tiny_config: dict) -> None:
    data = with_prior(tiny_config)
    data["validation"] = {"prompts": ["a"], "steps": 3, "guidance": 2.0, "loss_samples": 0}
    config = validate(data, "test")
    job = simulate_parts(config)
    drawing, validating = job.stages["class"], job.stages["validate"]
    trained = job.train.trained_bytes + job.train.state_bytes
    assert drawing.phase in ("sample", "decode") and drawing.by_kind["weights"] == validating.by_kind["weights"]
    beside = validating.bytes - drawing.bytes  # the same drawing beside the training's state
    assert 0 < beside < 3 * trained + 64 * 1024
    assert simulate_stage(config, "class", (8, 9)).bytes >= drawing.bytes
    needs = needs_of(config, job, (64, 64))
    without = needs_of(validate(data | {"prior": {"method": "none"}}, "test"), job, (64, 64))
    assert needs.counts.samples == without.counts.samples + 3 and needs.counts.prompts == without.counts.prompts + 1
    assert needs.disk["class pictures"] == 3 * 32 * 32 * 3
    assert needs.disk["cached pictures"] * 6 == without.disk["cached pictures"] * 9
