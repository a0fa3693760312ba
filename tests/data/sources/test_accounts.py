"""What is in a folder: each file in one class, captions in every known form, splits, and older configurations."""

from __future__ import annotations

import codecs
import io
import json
import os
import shutil
import tarfile
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from simpletune.commands.caption.uncaptioned_images import sources_of
from simpletune.data.sources.accounts import Accounts
from simpletune.data.sources.caption_files import caption_file, write_caption
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.source import Scan
from simpletune.data.sources.stream import Stream
from simpletune.data.sources.table import Table
from simpletune.data.sources.walk import FOREIGN_FOLDERS
from simpletune.system import regular_files
from simpletune.system.options import UserError

PIXELS = io.BytesIO()
Image.new("RGB", (64, 64), "teal").save(PIXELS, "PNG")
PNG = PIXELS.getvalue()
REVIEWED = Path(__file__).parents[4] / "shared" / "reviews" / "inputs" / "data"


def tree(root: Path, files: dict[str, bytes | str]) -> Path:
    """Write files by relative name; a text of UTF-8, or bytes."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def scan(root: Path, **fields: object) -> Scan:
    return Folder.model_validate({"path": str(root), "reading": "any", **fields}).scan(root)


def captions(found: Scan) -> dict[str, str]:
    return {each.name: each.caption for each in found.images}


def classes(found: Scan) -> dict[str, str]:
    return {name: kind for name, (kind, _) in found.files.files.items()}


STEMS = ("a", "b", "A", "dog-masklabel", "dog", "dog_mask", "café", "x.jpg", "metadata", "Thumbs", ".hidden")
ENDINGS = (
    ".png",
    ".PNG",
    ".jfif",
    ".txt",
    ".TXT",
    ".caption",
    ".json",
    ".jsonl",
    ".csv",
    ".dng",
    ".db",
    ".zip",
    "",
    ".tags",
)
FOLDERS = ("", "train/", "test/", "masks/", "__MACOSX/", ".git/", "10_sks dog/", "deep/er/")
CONTENTS = (
    PNG, PNG[:60], b"", b"a dog", b"a d\xf6g",
    '{"file_name": "a.png", "text": "a cat"}', "file_name,text\na.png,a cow\n",
    '{"caption": "an owl"}', '{"a": {"tags": "owl"}}', codecs.BOM_UTF16_LE + "a hen".encode("utf-16-le"),
)  # fmt: skip


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(FOLDERS), st.sampled_from(STEMS), st.sampled_from(ENDINGS)),
        st.sampled_from(CONTENTS), max_size=14,
    ),
    st.fixed_dictionaries({
        "reading": st.sampled_from(["any", "0.1"]), "captions": st.sampled_from(["auto", "txt", "filename"]),
        "mask": st.sampled_from([None, "files"]), "missing_prompt": st.sampled_from([None, "a photo of sks"]),
        "split": st.sampled_from([None, "train"]), "prompt": st.sampled_from([None, None, "a thing"]),
    }),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_every_file_is_in_exactly_one_class(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[str, str, str], bytes | str], fields: dict[str, object]
) -> None:
    root = tree(tmp_path_factory.mktemp("t"), {"".join(name): content for name, content in files.items()})
    found = scan(root, **fields)
    closed = FOREIGN_FOLDERS if fields["reading"] == "any" else ()
    expected = set()
    for folder, names, inside in os.walk(root):
        place = Path(folder).relative_to(root)
        for name in list(names):
            if name.startswith(".") or name.lower() in closed:  # it stands for what is in it
                expected.add((place / name).as_posix())
                names.remove(name)
        expected |= {(place / name).as_posix() for name in inside}
    assert set(found.files.files) == expected
    assert sum(int(part.split()[0]) for part in found.files.line().partition(": ")[2].split(", ") if expected) == len(
        expected
    )
    kinds = classes(found)
    assert {name for name, kind in kinds.items() if kind == "picture"} == {each.name for each in found.images}
    rejected = {each.name for each in found.rejected if each.kind == "picture"}
    assert all(kinds[name] in ("damaged", "left over") for name in rejected)
    said = " ".join(found.files.reason_sentences())
    assert all(
        found.files.files[name][1] for name, kind in kinds.items() if kind in ("left over", "damaged", "not read")
    )
    assert len(kinds) > 8 or all(
        name in said or "more" in said for name, kind in kinds.items() if kind in ("left over", "damaged", "not read")
    )
    shutil.rmtree(root)


def test_the_sums_are_a_line_and_the_most_surprising_file_comes_first(tmp_path: Path) -> None:
    tree(tmp_path, {
        "a.png": PNG, "a.txt": "a dog", "b.png": PNG[:60], "b.txt": "a cat", "c.txt": "a hen", "raw.CR3": b"x",
        "a-masklabel.png": PNG, ".DS_Store": b"x", "film.mp4": b"x", "d.png": PNG, "d.tags": "owl",
    })  # fmt: skip
    found = scan(tmp_path)
    assert found.files.line() == (
        "11 files: 1 picture, 1 file of captions, 1 mask, 4 left over, 1 damaged, 2 of a kind that is not read, 1 of "
        "another program"
    )
    said = found.files.reason_sentences()
    assert [line.partition(":")[0] for line in said[:4]] == ["d.png", "b.txt", "d.tags", "c.txt"]
    assert said[4].startswith("b.png: is damaged") and said[3] == "c.txt: no picture has this name"
    assert said[5:] == [
        "raw.CR3: .cr3 pictures are not read. Convert them to jpg, png or webp",
        "film.mp4: neither a picture nor a caption",
    ]  # fmt: skip
    assert Accounts().line() == "0 files: none"


FORMS: dict[str, tuple[dict[str, bytes | str], str]] = {
    "capital letters": ({"a.png": PNG, "a.TXT": "a dog"}, "a dog"),
    "the picture's whole name": ({"a.png": PNG, "a.png.txt": "a dog"}, "a dog"),
    "UTF-16 with a mark": ({"a.png": PNG, "a.txt": codecs.BOM_UTF16_BE + "a dög".encode("utf-16-be")}, "a dög"),
    "decomposed by a Mac": (
        {unicodedata.normalize("NFD", "é.png"): PNG, unicodedata.normalize("NFC", "é.txt"): "a dog"},
        "a dog",
    ),
    "metadata of a sub-folder": (
        {"s/a.png": PNG, "s/metadata.jsonl": '{"file_name": "a.png", "text": "a dog"}'},
        "a dog",
    ),
    "metadata named from the root": (
        {"s/a.png": PNG, "s/metadata.jsonl": '{"file_name": "s/a.png", "text": "a dog"}'},
        "a dog",
    ),
    "metadata of Windows": (
        {"s/a.png": PNG, "metadata.jsonl": json.dumps({"file_name": "s\\a.png", "text": "a dog"})},
        "a dog",
    ),
    "metadata with a caption": (
        {"a.png": PNG, "metadata.jsonl": '{"file_name": "a.png", "caption": "a dog"}'},
        "a dog",
    ),
    "metadata in UTF-16": (
        {
            "a.png": PNG,
            "metadata.jsonl": codecs.BOM_UTF16_LE + '{"file_name":"a.png","text":"a dog"}'.encode("utf-16-le"),
        },
        "a dog",
    ),
    "metadata.csv": ({"a.png": PNG, "metadata.csv": 'file_name,text\r\na.png,"a dog, a ball"\r\n'}, "a dog, a ball"),
    "a JSON for each": ({"a.png": PNG, "a.json": '{"width": 3, "caption": "a dog"}'}, "a dog"),
    "a JSON for all of sd-scripts": (
        {"a.png": PNG, "meta_cap.json": '{"C:\\\\pics\\\\a.png": {"caption": "a dog", "tags": "ball, sun"}}'},
        "a dog, ball, sun",
    ),
    "the same by stems": ({"s/a.png": PNG, "meta_lat.json": '{"a": {"tags": "dog"}}'}, "dog"),
}


@pytest.mark.parametrize("form", FORMS)
def test_captions_in_every_known_form_are_read(form: str, tmp_path: Path) -> None:
    files, caption = FORMS[form]
    found = scan(tree(tmp_path, files))
    assert list(captions(found).values()) == [caption] and not found.rejected and not found.files.reason_sentences()
    assert sorted(classes(found).values()) == ["caption", "picture"]
    assert "names" not in found.captions


UNREAD: dict[str, tuple[dict[str, bytes | str], str]] = {
    "another encoding": ({"a.png": PNG, "a.txt": "a dög".encode("cp1252")}, "its caption a.txt is not UTF-8 text"),
    "UTF-16 without a mark": ({"a.png": PNG, "a.txt": "a dog".encode("utf-16-le")}, "control character U+0000"),
    "an empty text": ({"a.png": PNG, "a.txt": " \n"}, "its caption a.txt is empty"),
    "two that differ": ({"a.png": PNG, "a.txt": "a dog", "a.caption": "a cat"}, "has two different captions"),
    "no column of captions": ({"a.png": PNG, "metadata.csv": "image,label\na.png,3\n"}, "'image', 'label'"),
    "no field of names": ({"a.png": PNG, "metadata.jsonl": '{"image": "a.png", "text": "a dog"}'}, '"file_name"'),
    "tags in a form of their own": ({"a.png": PNG, "a.tags": "dog"}, "in a form that is not read"),
    "texts in a folder of their own": ({"p/a.png": PNG, "captions/a.txt": "a dog"}, "lies in another folder"),
    "one text for all": ({"a.png": PNG, "captions.txt": "a.png|a dog"}, "in a form that is not read"),
    "a JSON without captions": ({"a.png": PNG, "a.json": '{"label": 3}'}, "in a form that is not read"),
}


@pytest.mark.parametrize("form", UNREAD)
def test_captions_that_are_not_read_are_named_with_the_reason(form: str, tmp_path: Path) -> None:
    files, reason = UNREAD[form]
    found = scan(tree(tmp_path, files))
    assert any(reason in line for line in [*found.files.reason_sentences(), *(each.reason for each in found.rejected)])
    assert "caption" not in classes(found).values()


def test_an_exact_name_comes_before_one_in_other_letters(tmp_path: Path) -> None:
    tree(tmp_path, {"a.png": PNG, "A.png": PNG, "a.txt": "small", "A.txt": "large", "b.png": PNG, "B.TXT": "b"})
    assert captions(scan(tmp_path)) == {"a.png": "small", "A.png": "large", "b.png": "b"}


def test_the_nearest_metadata_counts_and_a_csv_beside_it_is_named(tmp_path: Path) -> None:
    tree(tmp_path, {
        "s/a.png": PNG, "b.png": PNG, "s/metadata.jsonl": '{"file_name": "a.png", "text": "near"}',
        "metadata.jsonl": '{"file_name": "s/a.png", "text": "far"}\n{"file_name": "b.png", "text": "b"}',
        "metadata.csv": "file_name,text\nb.png,other\n",
    })  # fmt: skip
    found = scan(tmp_path)
    assert captions(found) == {"s/a.png": "near", "b.png": "b"}
    assert "metadata.csv: metadata.jsonl beside it is read instead" in found.files.reason_sentences()


def test_a_configuration_of_0_1_trains_what_it_trained_and_says_what_it_does_not_see(tmp_path: Path) -> None:
    tree(tmp_path, {
        "a_red_dog.png": PNG, "a_red_dog.TXT": "a dog", "b.jfif": PNG, "train/c_blue_cat.png": PNG,
        "test/a_dog.png": PNG, "@eaDir/a_red_dog.png": PNG,
    })  # fmt: skip
    found = scan(tmp_path, reading="0.1")
    assert captions(found) == {
        "a_red_dog.png": "a red dog", "train/c_blue_cat.png": "c blue cat", "test/a_dog.png": "a dog",
        "@eaDir/a_red_dog.png": "a red dog",
    }  # fmt: skip
    hints = " ".join(found.hints)
    for said in (
        "1 more picture would have captions, from .TXT files", "1 .jfif: pictures that this configuration does not see",
        "all splits of the folder are trained on: train (3 pictures), test (1 picture). Set data.split=train",
        "1 picture of another program's folder",
    ):  # fmt: skip
        assert said in hints
    assert captions(scan(tmp_path, missing_prompt="x", split="train")) == {
        "a_red_dog.png": "a dog", "b.jfif": "x", "train/c_blue_cat.png": "x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("folders", "split", "kept"),
    [
        (["train", "test"], "train", ["train"]), (["train", "test"], "test", ["test"]),
        (["Training", "val", "x"], "train", ["Training", "x"]), (["Training", "val"], "validation", ["val"]),
        (["data/train", "data/dev"], "validation", ["data/dev"]),
    ],
)  # fmt: skip
def test_splits_of_folders_mean_what_they_mean_on_the_hub(
    folders: list[str], split: str, kept: list[str], tmp_path: Path
) -> None:
    tree(tmp_path, {f"{folder}/a.png": PNG for folder in folders})
    found = scan(tmp_path, prompt="x", split=split)
    assert [each.name for each in found.images] == [f"{folder}/a.png" for folder in sorted(kept)]
    left = [name for name, kind in classes(found).items() if kind == "left over"]
    assert len(left) == len(folders) - len(kept)
    (problem,) = Folder(path=str(tmp_path), split="tset").problems(tmp_path)
    assert problem.path == "data.split" and "Its splits: train, " in problem.message


def test_pictures_beside_a_test_folder_are_those_to_train_on(tmp_path: Path) -> None:
    tree(tmp_path, {"a.png": PNG, "sub/b.png": PNG, "test/c.png": PNG})
    assert [each.name for each in scan(tmp_path, prompt="x", split="train").images] == ["a.png", "sub/b.png"]


def test_a_folder_without_another_split_has_none(tmp_path: Path) -> None:
    tree(tmp_path, {"train/a.png": PNG, "b.png": PNG})  # also beside others: these have no word for a split
    assert len(scan(tmp_path, prompt="x").images) == 2
    (problem,) = Folder(path=str(tmp_path), split="train").problems(tmp_path)
    assert problem.message.endswith("It has none")


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.png.txt", "a.CAPTION"])
def test_the_caption_that_is_edited_is_the_one_that_is_read(name: str, tmp_path: Path) -> None:
    tree(tmp_path, {"a.png": PNG, name: codecs.BOM_UTF16_LE + "a dög".encode("utf-16-le")})
    before = caption_file(tmp_path, tmp_path / "a.png")
    assert (before.file.name, before.text) == (name, "a dög")
    write_caption(before, "a hün")
    assert captions(scan(tmp_path)) == {"a.png": "a hün"} and (tmp_path / name).read_bytes() == "a hün\n".encode()


def test_captions_are_not_written_beside_those_of_a_metadata_file(tmp_path: Path) -> None:
    tree(tmp_path, {"s/a.png": PNG, "s/metadata.csv": "file_name,text\na.png,a dog\n"})
    with pytest.raises(UserError, match="takes its captions from metadata.csv.* Set data.captions=txt"):
        sources_of(tmp_path, [])


@pytest.mark.parametrize("links", ["inside", "anywhere"])
def test_a_link_to_a_folder_is_in_a_class_of_its_own(links: str, tmp_path: Path) -> None:
    tree(tmp_path, {"a/one.png": PNG})
    (tmp_path / "b").symlink_to(tmp_path / "a")
    found = scan(tmp_path, prompt="x", links=links)
    assert classes(found) == {"a/one.png": "picture", "b": "not read"}


def test_odd_names_and_folders_that_change_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 251
    tree(tmp_path, {f"{long}.png": PNG, "b.png": PNG, "c.png": PNG})
    (tmp_path / "b.txt").symlink_to(tmp_path.parent / "outside.txt")
    read = regular_files.read_regular

    def removed(file: Path, *rest: int) -> bytes:
        if file.name == "c.png":
            file.unlink(missing_ok=True)
        return read(file, *rest)

    monkeypatch.setattr(regular_files, "read_regular", removed)
    found = scan(tmp_path, missing_prompt="x", mask=None)
    assert [each.name for each in found.images] == [f"{long}.png"]
    reasons = {each.name: each.reason for each in found.rejected}
    assert reasons["c.png"] == "cannot be read (No such file or directory)"
    assert reasons["b.png"].startswith("its caption b.txt is a symbolic link to a target outside the data folder")
    assert classes(found) == {f"{long}.png": "picture", "c.png": "damaged", "b.png": "left over", "b.txt": "left over"}


def test_tables_and_shards_are_accounted_for(tmp_path: Path) -> None:
    rows = pa.table({"image": [PNG, PNG], "text": ["a", "b"]})
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        pq.write_table(rows, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    tree(tmp_path, {"README.md": "x", ".gitattributes": "x", "cover.png": PNG, "notes.docx": b"x"})
    found = Table(path=str(tmp_path)).scan(tmp_path)
    assert found.files.line() == (
        "6 files: 1 table or shard, 2 left over, 1 of a kind that is not read, 2 of other programs"
    )
    assert classes(found)["data/test-00000-of-00001.parquet"] == "left over"
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for name, content in (("0.png", PNG), ("0.txt", b"a dog")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    stream = Stream(path=str(tmp_path / "data"), format="tar")
    assert classes(stream.scan(tmp_path / "data"))["a.tar"] == "table"


def test_one_reason_of_many_files_is_one_sentence(tmp_path: Path) -> None:
    files = {f"{name}.png": PNG for name in "abcde"} | {f"{name}.txt": " " for name in "abcde"}
    named = scan(tree(tmp_path, files)).files.reason_sentences()
    assert named == [
        "a.png, b.png, c.png and 2 more: its caption NAME.txt is empty",
        "a.txt, b.txt, c.txt and 2 more: its picture is not used",
    ]
    (tmp_path / "b.txt").write_text("a dog")
    for name in "cde":
        (tmp_path / f"{name}.txt").write_text("a cat")
    assert scan(tmp_path).files.reason_sentences() == [
        "a.png: its caption a.txt is empty",
        "a.txt: its picture is not used",
    ]


def test_a_caption_with_commas_and_without_quotes_is_not_cut_off(tmp_path: Path) -> None:
    rows = 'file_name,text\na.png,1girl, solo, red hat\nb.png,"a dog, a cat"\n'
    found = scan(tree(tmp_path, {"a.png": PNG, "b.png": PNG, "metadata.csv": rows}), missing_prompt="x")
    assert captions(found) == {"a.png": "x", "b.png": "a dog, a cat"}
    assert [(each.name, each.reason) for each in found.rejected] == [
        ("metadata.csv:2", "has more cells than the first line. Put quotes around a text with commas")
    ]


def test_captions_of_another_split_or_of_masks_are_no_fault_and_never_another_pictures(tmp_path: Path) -> None:
    tree(tmp_path, {
        "a.png": PNG, "b.png": PNG, "b.txt": "an owl",
        "metadata.csv": "file_name,text\na.png,a dog\ntest/c.png,a cat\n",
        "test/a.png": PNG, "test/metadata.jsonl": '{"file_name": "a.png", "text": "wrong"}\n',
        "test/c.png": PNG, "test/b.png": PNG, "test/b.txt": "wrong", "b-masklabel.png": PNG, "b-masklabel.txt": "wrong",
    })  # fmt: skip
    found = scan(tmp_path, split="train")
    assert captions(found) == {"a.png": "a dog", "b.png": "an owl"} and not found.rejected
    unused = {name for name, (_, why) in found.files.files.items() if why == "its picture is not used"}
    assert unused == {"test/metadata.jsonl", "test/b.txt", "b-masklabel.txt"}


def test_metadata_of_a_folder_never_captions_pictures_outside_of_it(tmp_path: Path) -> None:
    tree(tmp_path, {"a.png": PNG, "sub/b.png": PNG, "sub/metadata.jsonl": '{"file_name": "a.png", "text": "wrong"}\n'})
    found = scan(tmp_path, missing_prompt="x")
    assert set(captions(found).values()) == {"x"}
    assert [each.reason for each in found.rejected] == ["names 'a.png', which is no picture here"]


def test_a_configuration_of_0_1_is_not_stopped_by_captions_of_its_masks(tmp_path: Path) -> None:
    lines = "".join(f'{{"file_name": "{name}.png", "text": "a dog"}}\n' for name in ("a", "a-masklabel"))
    found = scan(tree(tmp_path, {"a.png": PNG, "a-masklabel.png": PNG, "metadata.jsonl": lines}), reading="0.1")
    assert captions(found) == {"a.png": "a dog"} and not found.rejected


def test_a_configuration_of_0_1_does_not_promise_to_read_what_it_has_read(tmp_path: Path) -> None:
    tree(tmp_path, {"a.png": PNG[:60], "a.txt": "a dog", "b.png": PNG, "b.txt": b"\xf6", "c.png": PNG, "c.txt": "cat"})
    reasons = {name: why for name, (_, why) in scan(tmp_path, reading="0.1").files.files.items()}
    assert reasons["a.txt"] == reasons["b.txt"] == "its picture is not used" and reasons["c.txt"] == ""


MASKS: dict[str, tuple[list[str], list[str]]] = {
    "OneTrainer": (["a-masklabel.png", "a-condlabel.png"], ["a.jpg"]),
    "a plain label": (["a.mask.png", "a_mask.png"], ["a.jpg"]),
    "capital letters": (["a-MaskLabel.PNG"], ["a.jpg"]),
    "a folder of SimpleTuner": (["masks/a.png"], ["a.jpg"]),
    "a folder of sd-scripts": (["conditioning/a.png"], ["a.jpg"]),
    "a picture's name in capitals": (["a-masklabel.png"], ["A.JPG"]),
}
ELSEWHERE: dict[str, tuple[list[str], list[str]]] = {
    "a folder beside that of the pictures": (["conditioning/a.png", "conditioning/b.png"], ["img/a.jpg", "img/b.png"]),
    "a folder in each folder": (["s/masks/a.png", "t/masks/a.png"], ["s/a.jpg", "t/a.jpg"]),
    "labels in a folder": (["masks/a_mask.png", "masks/b-masklabel.png"], ["a.jpg", "b.jpg"]),
    "two suffixes": (["masks/a.jpg.png", "masks/b.jpg.png"], ["a.jpg", "b.jpg"]),
    "some masks without a picture": ([f"masks/{name}.png" for name in "abcde"], ["a.jpg", "b.jpg"]),
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("reading", ["0.1", "any"])
def test_a_mask_is_never_a_picture(form: str, reading: str, tmp_path: Path) -> None:
    masks, images = MASKS[form]
    found = scan(tree(tmp_path, dict.fromkeys([*masks, *images], PNG)), reading=reading, prompt="x")
    assert [each.name for each in found.images] == images
    assert [name for name, kind in classes(found).items() if kind == "mask"] == sorted(masks)
    assert "Set data.mask=files" in found.hints[0]


@pytest.mark.parametrize("form", ELSEWHERE)
def test_a_mask_in_another_place_is_no_picture_either(form: str, tmp_path: Path) -> None:
    masks, images = ELSEWHERE[form]
    found = scan(tree(tmp_path, dict.fromkeys([*masks, *images], PNG)), prompt="x")
    assert [each.name for each in found.images] == images
    assert [name for name, kind in classes(found).items() if kind == "mask"] == sorted(masks)
    beside = "Put each beside its picture as NAME-masklabel.png" in found.hints[0]
    assert beside == (form != "some masks without a picture"), "those are in data.mask_path"


def test_a_picture_that_is_only_named_like_a_mask_is_one(tmp_path: Path) -> None:
    tree(tmp_path, {"venice_mask.png": PNG, "masks/one.png": PNG, "masks/two.png": PNG, "three.png": PNG})
    assert len(scan(tmp_path, prompt="x").images) == 4


@pytest.mark.skipif(not REVIEWED.is_dir(), reason="needs the real inputs")
@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("utf16", {"a red dog"}), ("caption_key", {"a red dog"}), ("backslashes", {"a red dog"}),
        ("upper_txt", {"a red dog"}), ("jpg_txt", {"a red dog"}), ("nfd", {"a red cup"}),
        ("nested_metadata", {"a blue dog"}),
        ("metadata_csv", {"a blue dog"}), ("cp1252", set()),
    ],
)  # fmt: skip
def test_the_folders_that_people_reported(folder: str, expected: set[str]) -> None:
    found = scan(REVIEWED / folder)
    assert expected <= set(captions(found).values()) and len(found.images) == (3 if expected else 0)
    if not expected:
        assert all("is not UTF-8 text" in each.reason for each in found.rejected) and len(found.rejected) == 3
