"""Several data sources in one run: what each epoch consists of, configuration, weights, resume and what is shown."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_runs import saved_weights

from simpletune.apps.cli.main import main
from simpletune.config.family_defaults import with_family
from simpletune.config.load import read_saved, validate
from simpletune.config.overrides import merge
from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.samples import PlannedSample, drop_rejected, make_samples
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import MultiSource, example_prompt, find_too_small, scan_sources
from simpletune.data.sources.source import RejectedEntry, Source, SourceImage
from simpletune.models.objectives.flow import Flow
from simpletune.runs.folder import read_metrics
from simpletune.runs.model_card import shareable
from simpletune.runs.report import report_at_end
from simpletune.stages.plan_data import make_plan
from simpletune.system.options import ConfigError, UserError
from simpletune.training.train import train

WIDE = [(96, 64)] * 3 + [(64, 96)] * 4 + [(64, 64)] * 2


def images(count: int = len(WIDE), source: int = 0) -> list[SourceImage]:
    return [
        SourceImage(f"{number:03d}.png", f"caption {number}", WIDE[number], f"{number:064x}", bytes, source=source)
        for number in range(count)
    ]


def plan_of(data: Source | MultiSource, found: list[SourceImage], batch_size: int = 2, seed: int = 5) -> Plan:
    return Plan(make_samples(found, data.members), data, Flow(), seed, GlobalBatch(batch_size))


def epoch(plan: Plan, number: int = 0) -> list[PlannedSample]:
    first = number * plan.steps_per_epoch
    steps = range(first, first + plan.steps_per_epoch)
    draws = [
        draw for step in steps for micro in range(len(plan.micros(step))) for draw in plan.micro_batch(step, micro)
    ]
    return [draw for draw in draws if draw.weight]


def study(repeats: int = 11) -> MultiSource:
    """A folder twice, as the study of SD3 Medium lists it: bucketed and cropped to squares, 11 passes each."""
    one = {"path": "x", "resolution": 64, "repeats": repeats}
    return MultiSource(sources=[Folder(**one), Folder(**one, aspect="square")])


def test_the_studys_two_sources_give_11_passes_of_each_picture_in_each_form() -> None:
    plan = plan_of(study(), [*images(), *images(source=1)])
    for number in (0, 1):
        seen = Counter((draw.view.image.source, draw.view.image.name) for draw in epoch(plan, number))
        assert seen == {(source, f"{index:03d}.png"): 11 for source in (0, 1) for index in range(len(WIDE))}
    shapes = {source: {d.view.bucket for d in epoch(plan) if d.view.image.source == source} for source in (0, 1)}
    assert shapes[1] == {(64, 64)} and len(shapes[0]) == 3
    assert plan.steps_per_epoch == sum(-(-len(members) // 2) for members in plan.buckets.values())


def test_one_source_of_several_is_the_single_form() -> None:
    folder = Folder(path="x", resolution=64, crop="random", flip=True, variants=3, repeats=2, caption_dropout=0.3)
    single, listed = (plan_of(data, images()) for data in (folder, MultiSource(sources=[folder])))
    steps = range(2 * single.steps_per_epoch)
    assert [single.micro_batch(step, 0) for step in steps] == [listed.micro_batch(step, 0) for step in steps]
    assert single.views() == listed.views() and single.evaluation(5) == listed.evaluation(5)
    assert set(single.manifest()[0]) == {"file", "sha256", "caption", "bucket", "repeat"}, "as in old checkpoints"
    assert [{**row, "source": 0} for row in single.manifest()] == listed.manifest()


def test_each_source_keeps_its_own_fields() -> None:
    data = MultiSource(
        sources=[
            Folder(path="a", resolution=64, weight=2.0, crop="random", repeats=3),
            Folder(path="b", resolution=32, caption_dropout=1.0, flip=True, variants=4),
        ]
    )
    flow = Flow(shift="auto")
    plan = Plan(make_samples([*images(), *images(4, 1)], data.members), data, flow, 0, GlobalBatch(3))
    first, second = ([d for d in epoch(plan) if d.view.image.source == source] for source in (0, 1))
    assert (len(first), len(second)) == (3 * len(WIDE), 4)
    assert {draw.loss_weight for draw in first} == {2.0} and {draw.loss_weight for draw in second} == {1.0}
    assert {draw.caption for draw in second} == {""} and "" not in {draw.caption for draw in first}
    assert not any(draw.view.flip for draw in first)
    assert any(view.flip for view in plan.views() if view.image.source == 1)
    assert {d.view.bucket for d in second} <= {(32, 32), (32, 16), (16, 32), (48, 16), (16, 48)}
    two = MultiSource(sources=[Folder(path="a", resolution=1024), Folder(path="a", resolution=512)])
    shifts = Plan(make_samples(images(), two.members), two, flow, 0, GlobalBatch(1)).shifts
    assert shifts == [flow.shift_at(1024), flow.shift_at(512)] and shifts[0] > shifts[1]


def test_regularization_is_trained_but_never_held_out_evaluated_or_the_example(tiny_config: dict) -> None:
    subject = tiny_config["data"]
    kept = subject | {"weight": 0.25, "regularization": True, "prompt": "a figure"}
    tiny_config["data"] = {"sources": [kept, subject]}
    found = scan_sources(validate(tiny_config, "test").data).images
    assert {draw.view.image.source for draw in make_plan(validate(tiny_config, "test"), found).evaluation(12)} == {1}
    config = validate(tiny_config | {"validation": {"prompts": [], "loss_samples": 4, "split": 2}}, "test")
    plan = make_plan(config, found)
    assert Counter(sample.image.source for sample in plan.samples) == {0: 6, 1: 4}
    assert [sample.image.source for sample in plan.held_out] == [1, 1]
    assert all(draw.view.image.source == 1 and draw.loss_weight == 1 for draw in plan.evaluation(4))
    assert plan.example() == example_prompt(config.data, 0) != "a figure"


def test_copies_of_a_held_out_picture_are_held_out_of_every_source_and_evaluated_once(tiny_config: dict) -> None:
    one = tiny_config["data"]
    tiny_config["data"] = {"sources": [one, {**one, "aspect": "square"}]}
    tiny_config["validation"] = {"prompts": [], "loss_samples": 2, "split": 2}
    config = validate(tiny_config, "test")
    plan = make_plan(config, scan_sources(config.data).images)
    held = {sample.image.digest for sample in plan.held_out}
    assert len(plan.held_out) == len(held) == 2 and len(plan.samples) == 8
    assert not held & {sample.image.digest for sample in plan.samples}


def test_the_loss_of_a_source_is_multiplied_by_its_weight(tiny_config: dict) -> None:
    losses, one = [], tiny_config["data"]
    for weight in (1.0, 0.25):
        data = {"name": f"w{weight}", "data": {"sources": [{**one, "weight": weight}]}, "train": {"steps": 1}}
        losses.append(read_metrics(train(validate(copy.deepcopy(tiny_config) | data, "test")))[0]["loss"])
    assert losses[1] == pytest.approx(0.25 * losses[0], rel=1e-6)


def several_config(tiny_config: dict) -> dict:
    one = tiny_config["data"]
    sources = [
        {**one, "repeats": 2, "crop": "random", "variants": 3, "shuffle_tags": True, "caption_dropout": 0.2},
        {**one, "aspect": "square", "weight": 0.5, "flip": True, "caption_suffix": ", square"},
    ]
    return tiny_config | {"data": {"sources": sources}}


def test_resume_is_exact_with_two_sources(tiny_config: dict) -> None:
    base = several_config(tiny_config) | {"train": {"steps": 6, "batch_size": 2}, "checkpoint": {"every": 3}}
    whole = train(validate(base | {"name": "whole"}, "test"))
    base["name"] = "again"
    again = shutil.copytree(whole, whole.with_name("again"))
    shutil.rmtree(again / "checkpoints" / "step-000006")
    train(validate(base, "test"), "latest")
    losses = [[row["loss"] for row in read_metrics(run)] for run in (whole, again)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    torch.testing.assert_close(saved_weights(again, 6), saved_weights(whole, 6), rtol=0, atol=0)
    other = copy.deepcopy(base)
    other["data"]["sources"][1]["caption_suffix"] = ", wide"
    with pytest.raises(UserError, match="the data has changed since the checkpoint:\n.*: changed caption"):
        train(validate(other, "test"), "latest")
    with pytest.raises(UserError, match="the data has changed"):
        train(validate(base | {"data": {"sources": base["data"]["sources"][::-1]}}, "test"), "latest")


def of_sources(*sources: dict) -> dict:
    return {"sources": [{"path": "demo:pictures"} | each for each in sources]}


@pytest.mark.parametrize(
    ("data", "path", "words"),
    [
        ({"sources": []}, "sources", "a list of at least 1"),
        ({"sources": 3}, "sources", "a list"),
        ({"sources": [{}]}, "sources.0.path", "is required"),
        (of_sources({}, {"path": "demo:nowhere"}), "sources.1.path", "unknown demo"),
        (of_sources({"path": "/nowhere"}), "sources.0.path", "does not exist"),
        (of_sources({"resolution": 40}), "sources.0.resolution", "Use 32 or 48"),
        (of_sources({"is_reg": True}), "sources.0.is_reg", "data.regularization"),
        (of_sources({"source": "tabel"}), "sources.0.source", "Did you mean table?"),
        (of_sources({"source": "stream"}), "sources.0", 'need a list of all pictures. Use source "table"'),
        (of_sources({"mask": "column"}), "sources.0.mask", "alpha"),
        (of_sources({"regularization": True}), "sources.0.regularization", "true in every source"),
        ({"path": "demo:pictures", "regularization": True}, "regularization", "true in every source"),
        ({"path": "demo:pictures", "sources": []}, "sources", "unknown field"),
        ({"source": "several"}, "sources", "is required"),
    ],
)
def test_problems_name_the_source(data: dict, path: str, words: str, tiny_config: dict) -> None:
    with pytest.raises(ConfigError) as error:
        validate(tiny_config | {"data": data}, "test")
    (problem,) = error.value.problems
    assert problem.path == f"data.{path}" and words in problem.message


def test_problems_of_several_sources_come_at_once(tiny_config: dict) -> None:
    sources = of_sources({"path": "/nowhere"}, {"repeats": "3"}, {"path": "demo:no"})
    with pytest.raises(ConfigError) as error:
        validate(tiny_config | {"data": sources}, "test")
    found = {problem.path for problem in error.value.problems}
    assert found == {"data.sources.0.path", "data.sources.1.repeats", "data.sources.2.path"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.resolution=64", [(3, 64), (1, 64)]),
        ("data.sources.1.repeats=5", [(3, 32), (5, 48)]),
        ("data.sources.0.repeats=5", [(5, 32), (1, 48)]),
        ("data.repeats=7", [(7, 32), (7, 48)]),
    ],
)
def test_overrides_set_one_source_or_all(override: str, expected: list, tiny_config: dict) -> None:
    path = tiny_config["data"]["path"]
    sources = [{"path": path, "repeats": 3, "resolution": 32}, {"path": path, "resolution": 48}]
    merged, _, problems = merge(tiny_config | {"data": {"sources": sources}}, [override])
    config = validate(merged, "test", problems)
    assert [(source.repeats, source.resolution) for source in config.data.members] == expected
    assert config.data.resolution == max(resolution for _, resolution in expected)


def test_overrides_of_a_source_that_is_not_there(tiny_config: dict) -> None:
    for place in ("2.repeats", "x.repeats", "repeats", "²"):
        data = copy.deepcopy(tiny_config) | {"data": {"sources": [tiny_config["data"]]}}
        merged, _, problems = merge(data, [f"data.sources.{place}=5"])
        with pytest.raises(ConfigError, match="sources is a list. Name a field of one of its items 0 to 0"):
            validate(merged, "test", problems)


def test_the_familys_resolution_is_every_sources_default(tiny_config: dict) -> None:
    path = tiny_config["data"]["path"]
    data = tiny_config | {"data": {"sources": [{"path": path}, {"path": path, "resolution": 256}]}}
    sd15 = data | {"model": {"family": "sd15"}}
    assert [source.resolution for source in validate(data, "test").data.members] == [1024, 256]
    assert [each["resolution"] for each in with_family(sd15)["data"]["sources"]] == [512, 256]


def test_saved_and_shared_configurations_keep_the_sources(tiny_config: dict) -> None:
    data = several_config(tiny_config)
    data["data"]["sources"][0] |= {"mask": "files", "mask_path": str(Path(data["data"]["sources"][0]["path"]).parent)}
    config = validate(data, "test")
    assert read_saved(config.model_dump_json(by_alias=True)) == config
    text = shareable(config).model_dump_json()
    assert str(Path(tiny_config["data"]["path"]).parent) not in text, "no local folders"
    single = validate(tiny_config, "test").model_dump(mode="json", by_alias=True)
    old = {key: value for key, value in single["data"].items() if key in ("source", "path", "resolution", "captions")}
    assert read_saved(json.dumps(single | {"data": old})) == validate(tiny_config, "test")


def test_a_source_without_usable_pictures_is_named(tiny_config: dict, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"no picture")
    bad = {"path": str(tmp_path / "bad"), "prompt": "x", "resolution": 32}
    for more, message in (
        ({}, "a.png in .*bad: is not a picture"),
        ({"on_error": "skip"}, r"data.sources.1.path: .*bad contains no usable pictures"),
    ):
        with pytest.raises(UserError, match=message):
            train(validate(tiny_config | {"data": {"sources": [tiny_config["data"], bad | more]}}, "test"))


def test_data_shows_each_source(tiny_config: dict, tmp_path: Path, capsys: pytest.CaptureFixture, write_config) -> None:  # type: ignore[no-untyped-def]
    other = tmp_path / "other"
    other.mkdir()
    Image.new("RGB", (40, 40), "red").save(other / "000.png")  # a name that the first source has, too
    one = tiny_config["data"]
    sources = [
        {**one, "repeats": 11},
        {**one, "repeats": 11, "aspect": "square"},
        {"path": str(other), "prompt": "a class", "resolution": 32, "regularization": True, "weight": 0.5},
    ]
    file = write_config(tiny_config | {"data": {"sources": sources}})
    assert main(["data", str(file), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "source 0: " in shown and "6 pictures x 11 = 66 samples per epoch, 32 px in buckets, 6 prompts" in shown
    assert "6 pictures x 11 = 66 samples per epoch, 32 px in square" in shown
    assert "1 picture x 1 = 1 sample per epoch" in shown and "loss weight 0.5, for regularization" in shown
    assert (
        "from .txt files beside the pictures (source 0, 1); one prompt for all pictures: 'a class' (source 2)" in shown
    )
    assert "identical files" not in shown, "copies of one folder are not duplicates"
    found = json.loads((tmp_path / "out" / "data.json").read_text())
    assert [each["samples"] for each in found["sources"]] == [66, 66, 1]
    assert {each["name"] for each in found["usable"]} >= {"other/000.png", "pictures/000.png"}
    assert "<h2>Sources</h2>" in (tmp_path / "out" / "data.html").read_text()
    assert sum(row["samples"] for row in found["buckets"]) == 133


def test_a_run_says_and_its_report_shows_each_source_and_a_changed_weight(
    tiny_config: dict, capsys: pytest.CaptureFixture
) -> None:
    data = several_config(tiny_config)
    data["output"]["report"] = True
    run = train(validate(data | {"train": {"steps": 1}}, "test"))
    shown = capsys.readouterr().out
    assert "source 0: " in shown and "x 2 = 12 samples per epoch" in shown and "loss weight 0.5" in shown
    page = (run / "report.md").read_text()
    assert "## Data sources" in page and "0: …/pictures" in page and "data.sources.1.weight" in page
    assert str(Path(tiny_config["data"]["path"]).parent) not in (run / "report.html").read_text(), "pages are shared"
    data["data"]["sources"][1]["weight"] = 0.75
    train(validate(data | {"train": {"steps": 2}}, "test"), "latest")
    assert "resume  changed data.sources.1.weight: 0.5 -> 0.75" in capsys.readouterr().out
    (run / "data.json").write_text('{"sources": [{"path": "x"}]}')
    report_at_end(run)
    assert "data.json lists sources in an unknown form" in (run / "report.md").read_text()


def test_check_and_estimate_know_every_source(tiny_config: dict, capsys: pytest.CaptureFixture, write_config) -> None:  # type: ignore[no-untyped-def]
    file = write_config(several_config(tiny_config))
    assert main(["check", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  data ") == 2 and "loss weight 0.5" in shown and "2 times an epoch" in shown
    assert main(["estimate", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    config = validate(several_config(tiny_config), "test")
    plan = make_plan(config, scan_sources(config.data).images)
    assert told["pictures"] == 12 and told["prompts"] == len(plan.captions()) > 12


def test_too_small_pictures_are_told_by_their_sources_limit(tiny_config: dict) -> None:
    data = MultiSource(sources=[Folder(path="a", resolution=64), Folder(path="b", resolution=256, max_upscale=1.5)])
    rejected = find_too_small([*images(), *images(source=1)], data)
    assert {each.source for each in rejected} == {1} and len(rejected) == len(WIDE)
    assert "data.sources.1.max_upscale=1.5" in rejected[0].reason
    assert find_too_small([replace(image, source=0) for image in images()], data) == []


def test_a_rejected_picture_leaves_those_of_its_name_in_other_sources() -> None:
    both = [*images(2), *images(2, source=1)]
    left = drop_rejected(both, [RejectedEntry("000.png", "is damaged", source=1)])
    assert [(each.source, each.name) for each in left] == [(0, "000.png"), (0, "001.png"), (1, "001.png")]


def test_one_prompt_for_all_is_that_of_the_subjects() -> None:
    def mixed(*prompts: str | None) -> MultiSource:
        sources = [Folder(path="x", prompt=prompt) for prompt in prompts]
        return MultiSource(sources=[*sources, Folder(path="y", prompt="a dog", regularization=True)])

    assert mixed("sks dog", "sks dog").prompt == "sks dog"
    assert mixed("sks dog", "sks cat").prompt is None and mixed(None).prompt is None
