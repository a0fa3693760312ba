"""Captions that vary: several for a picture, tags shuffled and dropped, prefix and suffix; kohya's folder names."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from simpletune.data.plan import GlobalBatch, Plan
from simpletune.data.prompts import prompt_of
from simpletune.data.samples import make_samples
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import source_notes
from simpletune.data.sources.source import SourceImage
from simpletune.data.sources.stream import Stream
from simpletune.data.sources.table import Table
from simpletune.models.objectives.flow import Flow

TAGS = "cat, sitting, red sofa, window, 4k"


def image(number: int = 0, caption: str = TAGS, *more: str) -> SourceImage:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return SourceImage(f"{number}.png", caption, (64, 64), digest, bytes, more=more)


def source(**fields: object) -> Folder:
    return Folder.model_validate({"path": "x", "resolution": 64, **fields})


def plan_of(folder: Folder, *images: SourceImage) -> Plan:
    return Plan(make_samples(images, folder.members), folder, Flow(), 3, GlobalBatch(2))


def tags(prompt: str) -> list[str]:
    return prompt.split(", ")


def write_images(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / name)


def test_without_options_a_prompt_is_the_caption_as_it_stands() -> None:
    odd = "two ,spaces,  kept (and commas,)"
    assert {prompt_of(image(0, odd), source(variants=5), 0, variant) for variant in range(5)} == {odd}


def test_shuffled_tags_are_all_there_behind_those_that_stay() -> None:
    folder = source(shuffle_tags=True, keep_tags=2, variants=64)
    prompts = [prompt_of(image(), folder, 0, variant) for variant in range(64)]
    assert all(tags(prompt)[:2] == ["cat", "sitting"] for prompt in prompts)
    assert all(sorted(tags(prompt)) == sorted(tags(TAGS)) for prompt in prompts)
    assert len(set(prompts)) == 6, "all orders of the other three"
    assert prompts == [prompt_of(image(), folder, 0, variant) for variant in range(64)]
    assert prompts != [prompt_of(image(1), folder, 0, variant) for variant in range(64)], "each picture has its own"
    assert prompts != [prompt_of(image(), folder, 1, variant) for variant in range(64)], "and each seed"


def test_tags_are_dropped_with_their_probability_and_keep_their_order() -> None:
    folder, drawn = source(tag_dropout=0.3, keep_tags=1, variants=64), 40 * 64
    found = [tags(prompt_of(image(number), folder, 0, variant)) for number in range(40) for variant in range(64)]
    counts = Counter(tag for each in found for tag in each)
    assert counts["cat"] == drawn
    for tag in tags(TAGS)[1:]:
        assert abs(counts[tag] / drawn - 0.7) < 4 * (0.3 * 0.7 / drawn) ** 0.5
    assert all(each == [tag for tag in tags(TAGS) if tag in each] for each in found)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"caption_prefix": "sks style"}, f"sks style {TAGS}"),
        ({"caption_suffix": "at night "}, f"{TAGS} at night"),
        ({"caption_suffix": ", at night"}, f"{TAGS}, at night"),
        ({"tag_dropout": 1.0, "caption_prefix": "sks"}, "sks"),
        ({"tag_dropout": 1.0, "keep_tags": 1, "caption_suffix": "."}, "cat."),
        ({"tag_dropout": 1.0, "caption_suffix": "only"}, "only"),
        ({"tag_separator": "ts", "tag_dropout": 1.0, "keep_tags": 2}, TAGS),
        ({"tag_separator": " ", "tag_dropout": 1.0, "keep_tags": 3}, "cat, sitting, red"),
    ],
)
def test_prefix_suffix_and_separator(fields: dict, expected: str) -> None:
    assert prompt_of(image(), source(**fields), 0, 0) == expected


def test_variants_use_the_captions_of_a_picture_in_turn() -> None:
    captions = ("a cat", "a sitting cat", "the cat at home")
    several = [image(number, *captions) for number in range(20)]
    for each in several:
        prompts = [prompt_of(each, source(variants=6), 0, variant) for variant in range(6)]
        assert set(prompts[:3]) == set(captions) and prompts[3:] == prompts[:3]
    assert len({prompt_of(each, source(), 0, 0) for each in several}) == 3, "not every picture begins with its first"


def test_a_plan_knows_every_prompt_ahead_and_variants_bound_them() -> None:
    folder = source(shuffle_tags=True, tag_dropout=0.2, variants=3, repeats=2, caption_dropout=0.2)
    plan = plan_of(folder, *(image(number) for number in range(5)))
    drawn = {
        (draw.view.image.name, draw.caption)
        for step in range(10 * plan.steps_per_epoch)
        for draw in plan.micro_batch(step, 0)
    }
    known = plan.captions()
    assert {caption for _, caption in drawn} == set(known) and "" in known and len(known) <= 5 * 3 + 1
    per_image = Counter(name for name, caption in drawn if caption)
    assert max(per_image.values()) <= 3 and len(known) > 5
    rows = {row["file"]: row for row in plan.manifest()}
    assert {caption for row in rows.values() for caption in row.get("captions", [row["caption"]])} == set(known) - {""}


def test_one_variant_with_captions_that_vary_is_said() -> None:
    several, tags_shuffled = [image(0, "a", "b")], source(shuffle_tags=True)
    assert len(list(source_notes(tags_shuffled))) == len(list(source_notes(source(), several))) == 1
    assert list(source_notes(source(shuffle_tags=True, variants=2))) == list(source_notes(source(), [image()])) == []


def test_lines_of_a_text_file_are_several_captions_if_asked(tmp_path: Path) -> None:
    write_images(tmp_path, "a.png", "b.png")
    (tmp_path / "a.txt").write_text("a cat\r\n\n  the cat \na cat\n")
    (tmp_path / "b.caption").write_text("a dog")
    found = Folder(path=str(tmp_path), caption_lines="several").scan(tmp_path)
    assert [(each.captions, each.weights) for each in found.images] == [
        (("a cat", "the cat"), (2, 1)),
        (("a dog",), ()),
    ]
    assert found.captions.endswith("(1 picture with several captions, 1 with weights)")
    assert [each.captions for each in Folder(path=str(tmp_path)).scan(tmp_path).images][0] == ("a cat the cat a cat",)


def test_a_list_of_texts_in_metadata_is_several_captions(tmp_path: Path) -> None:
    write_images(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": ["one\\nline", "two"]}\n{"file_name": "b.png", "text": "b"}\n'
        '{"file_name": "c.png", "text": ["fine", " "]}\n{"file_name": "d.png", "text": []}\n'
    )
    found = Folder(path=str(tmp_path)).scan(tmp_path)
    assert [each.captions for each in found.images] == [("one line", "two"), ("b",)]
    assert {each.name for each in found.rejected} == {"c.png", "metadata.jsonl:4"}


def weighted(folder: Path, text: str, **fields: object) -> tuple[list[SourceImage], list[str]]:
    """A folder of one picture with this text: its pictures, and why others are not."""
    write_images(folder, "a.png")
    (folder / "a.txt").write_text(text)
    found = Folder(path=str(folder), **fields).scan(folder)
    return found.images, [each.reason for each in found.rejected]


@pytest.mark.parametrize(
    ("text", "captions", "weights"),
    [
        ("3::a cat\n.5 :: the cat\ncats", ("a cat", "the cat", "cats"), (3, 0.5, 1)),
        ("a cat\n1::a cat\n1e-1::the cat", ("a cat", "the cat"), (2, 0.1)),
        ("2::a cat\n2::the cat", ("a cat", "the cat"), ()),
        ("2::a cat", ("2::a cat",), ()),  # alone it has no weight: 16::9, or 2001:: a film
        ("std::cat\n3d::cat\n4:3 cat", ("std::cat", "3d::cat", "4:3 cat"), ()),
        ("1" * 500_000, ("1" * 500_000,), ()),  # in linear time
    ],
)
def test_a_caption_may_begin_with_its_weight(tmp_path: Path, text: str, captions: tuple, weights: tuple) -> None:
    (found,), rejected = weighted(tmp_path, text, caption_lines="several")
    assert (found.captions, found.weights, rejected) == (captions, weights, [])


@pytest.mark.parametrize("weight", ["0", "-1", "1,5", "1.2.3", "1e9", "1e999"])
def test_a_wrong_weight_is_said(tmp_path: Path, weight: str) -> None:
    found, (reason,) = weighted(tmp_path, f"a cat\n{weight}::the cat", caption_lines="several")
    assert not found and f"has a caption of weight {weight}, which is not a number above 0 and up to 1000" in reason


def test_a_weight_without_caption_and_weights_of_lines_that_are_joined_are_said(tmp_path: Path) -> None:
    assert "has the weight 2 without a caption" in weighted(tmp_path, "a cat\n2::", caption_lines="several")[1][0]
    for text in ("a cat\n2::the cat", "2::a cat\nthe cat"):
        assert "Set data.caption_lines=several" in weighted(tmp_path, text)[1][0]


def test_the_texts_of_metadata_and_of_tables_may_have_weights(tmp_path: Path) -> None:
    texts = ["3::a\ncat", "the cat"]
    write_images(tmp_path / "folder", "a.png")
    (tmp_path / "folder/metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": texts}))
    cell = {"bytes": (tmp_path / "folder/a.png").read_bytes()}
    for name, rows in {"good": [texts], "bad": [["0::a cat", "a dog"]]}.items():
        pq.write_table(pa.table({"image": [cell] * len(rows), "text": rows}), tmp_path / f"{name}.parquet")
    table = Table(source="table", path=str(tmp_path / "good.parquet"))
    (bad,) = table.scan(tmp_path / "bad.parquet").rejected
    assert bad.name == "bad.parquet#00000000" and "has a caption of weight 0" in bad.reason
    for source in (Folder(path=str(tmp_path / "folder")), table):
        (found,) = source.scan(Path(source.path)).images
        assert (found.captions, found.weights) == (("a cat", "the cat"), (3, 1))
    stream = Stream(source="stream", path=str(tmp_path / "good.parquet"), aspect="square", resolution=64)
    found = stream.image(stream.rows(tmp_path / "local"), 0, (64, 64), 16)
    assert (found.captions, found.weights) == (("a cat", "the cat"), (3, 1))


def test_variants_use_captions_as_often_as_they_weigh() -> None:
    several = [replace(image(number, "a", "b", "c"), weights=(6, 3, 1)) for number in range(40)]
    for count, most in ((10, 2), (64, 3)):
        for each in several:
            counts = Counter(prompt_of(each, source(), 0, variant) for variant in range(count))
            for caption, share in (("a", 0.6), ("b", 0.3), ("c", 0.1)):
                assert abs(counts[caption] - share * count) < most
    firsts = Counter(prompt_of(each, source(), 0, 0) for each in several)
    assert abs(firsts["a"] - 24) < 10 and len(firsts) == 3, "pictures begin at different places"
    assert [prompt_of(each, source(), 0, 1) for each in several] != [
        prompt_of(each, source(), 1, 1) for each in several
    ]


def test_a_change_of_weights_is_another_data_set() -> None:
    """Weights may leave the prompts as they are and change how often each is used."""
    folder = source(variants=8)
    (before,), (after,) = (
        plan_of(folder, replace(image(0, "a", "b"), weights=weights)).manifest() for weights in ((2, 1), (3, 1))
    )
    assert before["captions"] == after["captions"] and before != after
    (plain,) = plan_of(folder, image(0, "a", "b")).manifest()
    assert "weights" not in plain, "manifests of older checkpoints still compare equal"


def test_kohyas_folder_names_repeat_caption_and_are_said(tmp_path: Path) -> None:
    write_images(
        tmp_path, "10_sks dog/a.png", "10_sks dog/b.png", "2_cat/deep/c.png", "3_/d.png", "plain/e.png", "f.png"
    )
    for name, text in {"10_sks dog/b.txt": "my own", "3_/d.txt": "d", "plain/e.txt": "e", "f.txt": "f"}.items():
        (tmp_path / name).write_text(text)
    folder = Folder(path=str(tmp_path), folder_names="kohya", repeats=2, resolution=64)
    found = folder.scan(tmp_path)
    assert [(each.name, each.caption, each.repeats) for each in found.images] == [
        ("10_sks dog/a.png", "sks dog", 10),
        ("10_sks dog/b.png", "my own", 10),
        ("2_cat/deep/c.png", "cat", 2),
        ("3_/d.png", "d", 1),
        ("f.png", "f", 1),
        ("plain/e.png", "e", 1),
    ]
    assert not found.hints and not found.rejected
    (note,) = found.notes
    assert "10_sks dog (10 repeats of 'sks dog'), 2_cat (2 repeats of 'cat')" in note and "once: 3_" in note
    samples = make_samples(found.images, folder.members)
    (share,) = plan_of(folder, *found.images).shares()
    assert (share.images, share.passes, share.samples) == (6, "2 to 20", 2 * (10 + 10 + 2 + 1 + 1 + 1))
    assert Counter(sample.image.name for sample in samples)["10_sks dog/a.png"] == 20
    inner = tmp_path / "10_sks dog"
    assert [each.repeats for each in Folder(path=str(inner), folder_names="kohya").scan(inner).images] == [10, 10]
    (tmp_path / "f.txt").unlink()
    (rejected,) = folder.scan(tmp_path).rejected
    assert rejected.name == "f.png" and "has no caption" in rejected.reason
    plain = tmp_path / "plain"
    assert "finds no folder like" in Folder(path=str(plain), folder_names="kohya").scan(plain).notes[0]


def test_the_variants_of_a_picture_that_its_folder_repeats_go_on_from_epoch_to_epoch() -> None:
    wide = replace(image(), size=(96, 64), repeats=3)
    plan = plan_of(source(folder_names="kohya", variants=6, crop="random"), wide)
    views = {plan.view(plan.samples[0], variant) for variant in range(6)}
    seen = [draw.view for step in range(2 * plan.steps_per_epoch) for draw in plan.micro_batch(step, 0) if draw.weight]
    assert len(views) == 6
    assert Counter(seen) == dict.fromkeys(views, 1), "two epochs of 3 presentations show all 6 variants"
