"""The page Data: what it shows, what it writes and what it leaves alone, in this process and without a browser."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from starlette.testclient import TestClient
from web_pages import open_pages

from benchmarks.tiny_models import vocabulary
from simpletune.apps.cli.main import main
from simpletune.apps.web import data_page, data_set, processes
from simpletune.apps.web.data_page import caption_words
from simpletune.apps.web.roots import make_roots
from simpletune.commands.inspect_data.caption_edits import (
    CaptionedImage,
    Edit,
    apply,
    preview,
    read_captions,
    tag_counts,
)
from simpletune.commands.inspect_data.prompt_cuts import Cutter, read_fast_tokenizer, token_counts
from simpletune.config.load import validate
from simpletune.system.gpus import find_card
from simpletune.system.options import UserError

HOSTILE = "<img src=x onerror=alert(1)> \"&'.png"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures: one wide, one with a hostile name and caption, one unreadable, one without a caption."""
    place = tmp_path_factory.mktemp("data") / "pictures"
    (place / "sub").mkdir(parents=True)
    for index, name in enumerate(("a.png", "sub/b c.jpg", HOSTILE, "d.png")):
        pixels = np.random.default_rng(index).integers(0, 256, (12, 18, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((900, 600), Image.Resampling.NEAREST).save(place / name)
    (place / "e.png").write_bytes(b"no picture")
    (place / "a.txt").write_text("a red dog, grass\n")
    (place / "sub" / "b c.txt").write_text("a red cat, grass, sky\n")
    (place / HOSTILE).with_suffix(".txt").write_text("</textarea><script>alert(2)</script>\n")
    return place


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """A copy of the pictures in a root."""
    return Path(shutil.copytree(images, tmp_path / "pictures"))


@pytest.fixture
def client(tmp_path: Path, folder: Path) -> TestClient:
    return open_pages(tmp_path)


def field(text: str, name: str) -> str:
    """The value of the first hidden field of that name."""
    return html.unescape(re.search(rf'name="{name}" value="([^"]*)"', text)[1])  # type: ignore[index]


def card(client: TestClient, name: str) -> str:
    """The part of the gallery about one picture."""
    cards = client.get("/data/gallery", params={"place": "pictures"}).text.split('<li class="data-card"')
    return next(
        each for each in cards if f">{html.escape(name, quote=False)}</h3>" in html.unescape(each) or name in each
    )


def digest(client: TestClient, name: str) -> str:
    return field(card(client, name), "digest")


def save(client: TestClient, name: str, caption: str, seen: str) -> str:
    form = {"place": "pictures", "source": "0", "name": name, "caption": caption, "digest": seen}
    answer = client.post("/data/caption", data=form)
    assert answer.status_code == 200
    return answer.text


# --- what it shows --------------------------------------------------------------------------------------------------


def test_names_and_captions_stay_text(client: TestClient) -> None:
    text = client.get("/data", params={"place": "pictures"}).text
    assert "<script>alert" not in text and "<img src=x" not in text and " style=" not in text
    assert "&lt;/textarea&gt;&lt;script&gt;" in text and "&lt;img src=x onerror=alert(1)&gt;" in text
    summary = client.get("/data/summary", params={"place": "pictures"}).text
    assert "3 of 5 pictures have a caption" in summary and "<script>" not in summary
    assert "Unusable: is not a picture that Pillow can read" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for label in re.findall(r'<label for="([^"]+)"', text):
        assert label in ids
    assert all(re.search(r' alt="[^"]+"', image) for image in re.findall(r"<img [^>]+>", text))


def test_the_page_asks_for_a_place_and_names_folders_with_pictures(client: TestClient, tmp_path: Path) -> None:
    text = client.get("/data").text
    assert f"{tmp_path}/pictures</a>" in text and "data-place" in text
    gone = client.get("/data", params={"place": "nowhere"})
    assert gone.status_code == 422 and "nowhere does not exist below" in gone.text


def test_a_thumbnail_is_what_training_cuts_and_is_kept(client: TestClient, folder: Path, tmp_path: Path) -> None:
    thirds = Image.new("RGB", (900, 300), "green")
    thirds.paste("red", (0, 0, 300, 300))
    thirds.paste("blue", (600, 0, 900, 300))
    thirds.save(folder / "a.png")
    data = {"path": str(folder), "resolution": 512, "aspect": "square", "max_upscale": 4}
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "data": data}))
    asked = {"place": "config.json", "name": "a.png"}
    answer = client.get("/data/thumbnail", params=asked)
    assert answer.headers["content-type"] == "image/webp"
    (kept,) = (tmp_path / "runs" / ".web" / "thumbnails").rglob("*.webp")
    shown = np.asarray(Image.open(kept).convert("RGB"), dtype=np.float32)
    assert shown.shape == (256, 256, 3) and np.abs(shown[:, 4:-4] - (0, 128, 0)).max() < 12  # the middle third alone
    before = kept.stat().st_mtime_ns
    client.get("/data/thumbnail", params=asked)
    assert kept.stat().st_mtime_ns == before
    Image.new("RGB", (900, 600), "red").save(folder / "a.png")
    client.get("/data/thumbnail", params=asked)
    assert len(list((tmp_path / "runs" / ".web" / "thumbnails").rglob("*.webp"))) == 2


def test_no_path_outside_of_the_roots_is_shown_or_written(client: TestClient, folder: Path, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside.png"
    Image.new("RGB", (64, 64)).save(outside)
    (folder / "link.png").symlink_to(outside)
    (folder / ".hidden.png").write_bytes(outside.read_bytes())
    (folder / "out").symlink_to(tmp_path.parent)
    for name in ("../../outside.png", str(outside), "link.png", ".hidden.png", "out/outside.png", "a\0.png", "a.txt"):
        assert client.get("/data/thumbnail", params={"place": "pictures", "name": name}).status_code == 404, name
        form = {"place": "pictures", "source": "0", "name": name, "caption": "x", "digest": ""}
        assert client.post("/data/caption", data=form).status_code == 422, name
    assert not outside.with_suffix(".txt").exists() and not (folder / "link.txt").exists()
    for place in ("..", "/etc", str(tmp_path.parent), "pictures/out"):
        refused = client.get("/data", params={"place": place})
        assert refused.status_code == 422 and "outside of the folders" in refused.text


def test_pages_of_many_pictures(client: TestClient, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    Image.new("RGB", (64, 64)).save(many / "000.png")
    for index in range(1, 100):
        (many / f"{index:03}.png").write_bytes((many / "000.png").read_bytes())
    (many / "070.txt").write_text("The One")
    first = client.get("/data", params={"place": "many"}).text
    assert "100 pictures, page 1 of 3" in html.unescape(first) and ">047.png</h3>" in first and "048.png" not in first
    last = client.get("/data/gallery", params={"place": "many", "page": "99999999"}).text
    assert "page 3 of 3" in last and ">096.png</h3>" in last and last.count("<h3") == 4
    found = client.get("/data/gallery", params={"place": "many", "q": "the one"}).text
    assert "1 picture\n" in re.sub("<[^>]+>", "\n", found) and "070.png" in found
    assert client.get("/data/gallery", params={"place": "many", "show": "without"}).text.count("<h3") == 48


# --- one caption ----------------------------------------------------------------------------------------------------


def test_a_caption_is_edited_in_place(client: TestClient, folder: Path) -> None:
    text = save(client, "a.png", "a blue dog\r\nin two lines", digest(client, "a.png"))
    assert (folder / "a.txt").read_text() == "a blue dog\nin two lines\n" and ">Saved<" in text
    assert ">\na blue dog\nin two lines</textarea>" in text  # the first line feed is the parser's
    save(client, "d.png", "a new one", digest(client, "d.png"))
    assert (folder / "d.txt").read_text() == "a new one\n"
    text = save(client, "a.png", "a\x1bb", digest(client, "a.png"))
    assert "contains the control character U+001B" in text and (folder / "a.txt").read_text().startswith("a blue")


def test_a_caption_that_changed_since_it_was_shown_is_not_written_over(client: TestClient, folder: Path) -> None:
    seen, new = digest(client, "a.png"), digest(client, "d.png")
    save(client, "a.png", "of another page", seen)
    (folder / "d.txt").write_text("appeared")
    text = save(client, "a.png", "typed on this page", seen)
    assert (folder / "a.txt").read_text() == "of another page\n"
    assert "was changed by something else" in text and "typed on this page</textarea>" in text
    assert '<p class="data-now">of another page</p>' in text
    save(client, "a.png", "typed on this page", field(text, "digest"))  # now the user knows
    assert (folder / "a.txt").read_text() == "typed on this page\n"
    assert "was changed by something else" in save(client, "d.png", "typed", new)
    assert (folder / "d.txt").read_text() == "appeared"


def test_what_was_typed_comes_back_if_there_is_nothing_to_write_to(client: TestClient, folder: Path) -> None:
    seen = digest(client, "a.png")
    form = {"place": "pictures", "source": "0", "name": "a.png", "caption": "typed <i>", "digest": seen}
    (folder / "a.caption").write_text("another")
    answer = client.post("/data/caption", data=form)
    assert answer.status_code == 422 and "has two caption files" in answer.text and "typed &lt;i&gt;" in answer.text
    (folder / "a.png").unlink()
    answer = client.post("/data/caption", data=form)
    assert answer.status_code == 422 and "longer has this picture" in answer.text and "typed &lt;i&gt;" in answer.text
    assert (folder / "a.txt").read_text() == "a red dog, grass\n"


def test_captions_that_training_reads_elsewhere_are_not_edited(client: TestClient, folder: Path) -> None:
    (folder / "metadata.jsonl").write_text("")
    text = client.get("/data", params={"place": "pictures"}).text
    assert "takes its captions from metadata.jsonl" in text and "<textarea" not in text
    form = {"place": "pictures", "source": "0", "name": "a.png", "caption": "x", "digest": ""}
    assert client.post("/data/caption", data=form).status_code == 422
    assert client.post("/data/captioning", data={**form, "model": "a/b"}).status_code == 422
    assert (folder / "a.txt").read_text() == "a red dog, grass\n"


def test_a_source_of_a_configuration(client: TestClient, folder: Path, tmp_path: Path) -> None:
    data = {"sources": [{"path": str(folder / "sub")}, {"path": str(folder), "resolution": 512}]}
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "data": data}))
    first = client.get("/data", params={"place": "config.json"}).text
    assert "b c.png" not in first and "b c.jpg</h3>" in first and "a.png</h3>" not in first and "source=1" in first
    second = client.get("/data", params={"place": "config.json", "source": "1"}).text
    assert "cropped to 624 x 416" in second and ">a.png</h3>" in second


# --- many captions --------------------------------------------------------------------------------------------------


def test_find_and_replace_counts_first_then_writes(client: TestClient, folder: Path) -> None:
    form = {"place": "pictures", "source": "0", "kind": "replace", "find": "red", "text": "<b>"}
    text = client.post("/data/preview", data=form).text
    assert "2 captions would change" in text and "a &lt;b&gt; dog, grass" in text and "<b>" not in text
    assert (folder / "a.txt").read_text() == "a red dog, grass\n"
    fingerprint = field(text, "fingerprint")
    (folder / "a.txt").write_text("a red dog on sand\n")
    refused = client.post("/data/apply", data={**form, "fingerprint": fingerprint})
    assert refused.status_code == 422 and "changed since the preview, and nothing was written" in refused.text
    assert "red cat" in (folder / "sub" / "b c.txt").read_text()
    again = field(client.post("/data/preview", data=form).text, "fingerprint")
    assert "2 captions changed" in client.post("/data/apply", data={**form, "fingerprint": again}).text
    assert (folder / "a.txt").read_text() == "a <b> dog on sand\n"
    for wrong in ({**form, "find": ""}, {**form, "kind": "x"}, {**form, "kind": "prefix", "text": " "}):
        assert client.post("/data/preview", data=wrong).status_code == 422


def test_a_prefix_is_put_once_and_no_caption_is_emptied(folder: Path) -> None:
    def entries() -> list[CaptionedImage]:
        return read_captions(folder, sorted(folder.rglob("*.[pj][np]g")))

    found = preview(Edit("prefix", "", "sks,"), entries())
    assert len(found.changes) == 3 and apply(found, found.fingerprint) == (3, [])
    assert (folder / "a.txt").read_text() == "sks, a red dog, grass\n"
    assert preview(Edit("prefix", "", "sks,"), entries()).changes == []
    everything = preview(Edit("replace", "sks, a red dog, grass", " "), entries())
    assert (everything.changes, everything.emptied) == ([], ["a.png"])
    (folder / "a.jpg").write_bytes((folder / "a.png").read_bytes())  # shares the caption file
    assert len(preview(Edit("replace", "dog", "cat"), entries()).changes) == 1


def test_a_caption_that_changes_during_an_edit_is_left_and_named(folder: Path) -> None:
    found = preview(Edit("replace", "red", "blue"), read_captions(folder, sorted(folder.rglob("*.[pj][np]g"))))
    (folder / "a.txt").write_text("now")
    written, left = apply(found, found.fingerprint)
    assert written == 1 and len(left) == 1 and "a.txt was changed" in left[0]
    assert (folder / "a.txt").read_text() == "now"


def test_tags_are_counted_once_a_caption() -> None:
    captions = ["dog, grass,dog ", "cat,\ngrass", "a long sentence " * 9, ""]
    assert tag_counts(captions) == [("grass", 2), ("cat", 1), ("dog", 1)]


# --- what encoders cut off ------------------------------------------------------------------------------------------

TEXTS = ["a red dog", "Café  naïve\nA.B's dog's 123 don't", "<|endoftext|> x", "", "日本 🐕", "dog " * 100]


def test_clips_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    vocabulary.write_clip(tmp_path / "clip", ["red", "dog", "a"])
    assert_same_tokens(CLIPTokenizer.from_pretrained(tmp_path / "clip", local_files_only=True), tmp_path / "clip")


@pytest.mark.data
def test_sd3s_tokens_are_those_of_transformers(real_data: Path) -> None:
    from transformers import CLIPTokenizer, T5TokenizerFast

    folder = real_data / "sd3_medium_config"
    assert_same_tokens(CLIPTokenizer.from_pretrained(folder / "tokenizer"), folder / "tokenizer")
    assert_same_tokens(T5TokenizerFast.from_pretrained(folder / "tokenizer_3"), folder / "tokenizer_3")


def assert_same_tokens(theirs, folder: Path) -> None:
    ours = read_fast_tokenizer(folder)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text, verbose=False).input_ids, text


def write_model(folder: Path) -> Path:
    """The tokenizers of a tiny SD3."""
    words = [f"w{letter}" for letter in "abcdefghij"]
    vocabulary.write_clip(folder / "tokenizer", words)
    vocabulary.write_t5(folder / "tokenizer_3", words)
    return folder


def test_the_place_where_a_caption_is_cut_and_a_damaged_tokenizer_is_said(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    config = {"name": "x", "model": {"pretrained": str(model), "t5_length": 80}, "data": {"path": str(tmp_path)}}
    cutter = Cutter(validate(config, "x", needs_data=False, needs_model=False))
    assert cutter.names == ["CLIP", "T5"]
    fits, clip, both = ("wa " * 75).strip(), ("wa " * 76).strip(), ("wa  " * 90).strip()
    none, one, two = cutter.cuts([fits, clip, both])
    assert none == []
    assert [(c.encoder, c.tokens, c.limit, c.place) for c in one] == [("CLIP", 78, 77, len(fits))]
    assert [(c.encoder, c.tokens, c.limit) for c in two] == [("CLIP", 92, 77), ("T5", 91, 80)]
    assert [both[: c.place] for c in two] == [("wa  " * 75).strip(), ("wa  " * 79).strip()]
    (model / "tokenizer" / "vocab.json").write_text("{")  # in place: the folder's own time stays
    (model / "tokenizer_3" / "tokenizer.json").write_text("[]")
    damaged = Cutter(validate(config, "x", needs_data=False, needs_model=False))
    assert damaged.names == [] and len(damaged.problems) == 2
    assert all("is damaged" in problem and "Download it again" in problem for problem in damaged.problems)
    with pytest.raises(UserError, match=r"tokenizer in .*model/tokenizer is damaged .* Download it again"):
        token_counts(validate(config, "x", needs_data=False, needs_model=False), ["a dog"])


def test_the_cut_is_shown_on_the_page(client: TestClient, folder: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (folder / "a.txt").write_text("wa " * 75 + "<wb> wc")
    config = {"name": "x", "model": {"pretrained": str(model)}, "data": {"path": str(folder), "caption_prefix": "wd"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"place": "config.json", "show": "cut"}
    text = client.get("/data/gallery", params=asked).text
    assert text.count("<h3") == 1 and re.search(r"CLIP sees 77 of \d+ tokens", text)
    assert "<p>wd " in text and "<mark> wa&lt;wb&gt; wc</mark>".replace("wa", "wa ") in text.replace("\n", "")
    assert "CLIP cuts off 1. T5 cuts off 0." in " ".join(client.get("/data/summary", params=asked).text.split())
    (model / "tokenizer" / "vocab.json").write_text("{")
    data = client.get("/data/summary", params=asked)
    assert data.status_code == 200


# --- what it starts -------------------------------------------------------------------------------------------------


def test_the_words_of_captioning(tmp_path: Path, folder: Path) -> None:
    roots = make_roots(tmp_path / "runs", [tmp_path])
    form = {"model": "owner/name", "prompt": "--replace", "trigger": " sks ", "prefix": "", "precision": "int8"}
    assert caption_words(roots, folder, form) == [
        "caption", str(folder), "--model=owner/name", "--prompt=--replace", "--trigger=sks", "--precision=int8",
        "--device=auto",
    ]  # fmt: skip
    (tmp_path / "model").mkdir()
    words = caption_words(roots, folder, {"model": "model", "which": "ours"})
    assert words[2] == f"--model={tmp_path}/model" and words[-1] == "--again" and "--replace" not in words
    tags = {"model": "a/b", "threshold": " .5", "character-threshold": "1", "blacklist": "/etc/hostname"}
    assert caption_words(roots, folder, tags)[3:6] == [
        "--blacklist=/etc/hostname,", "--threshold=.5", "--character-threshold=1",
    ], "a list of one tag: with its comma it names no file"  # fmt: skip
    for wrong in ("1.5", "-1", "nan", "much"):
        with pytest.raises(UserError, match=f"Least probability: {wrong} is not a number from 0 to 1"):
            caption_words(roots, folder, {**tags, "threshold": wrong})
    for wrong in ("../model", "/etc", "a/../../b", "../../etc/passwd", "~"):
        with pytest.raises(UserError, match="is outside of the folders"):
            caption_words(roots, folder, {"model": wrong})
    for change in ({"model": ""}, {"precision": "x"}, {"device": "--x"}, {"prompt": "x" * 2001}, {"prefix": "a\0b"}):
        with pytest.raises(UserError):
            caption_words(roots, folder, {**form, **change})


def test_the_form_of_captioning_names_a_model_that_fits_and_its_download(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for card, name, size, device in (
        (None, "florence-community/Florence-2-base", 0.5, "cpu"),
        (find_card("RTX3070"), "Qwen/Qwen3-VL-2B-Instruct", 4.3, "auto"),
    ):
        monkeypatch.setattr(data_page, "card_here", lambda card=card: card)
        text = client.get("/data", params={"place": "pictures"}).text
        assert f'value="{name}" list="data-models"' in text
        assert ("fits RTX3070: " if card else "The smallest, for a machine without a card: ") in text
        assert f"{size} GB from huggingface.co/{name}, fetched once" in text
        assert ('value="cpu" selected' in text) == (device == "cpu")
        assert "For tags: 0.4 GB from huggingface.co/SmilingWolf/wd-vit-tagger-v3" in text
        for field in ("threshold", "character-threshold", "blacklist"):
            assert f'name="{field}"' in text


def test_captioning_is_started_and_stopped(
    client: TestClient, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb that waits stands for the model."""
    started, honest = [], processes.start

    def start(roots, words, log_name, title):
        started.append(list(words))
        (tmp_path / "waits.py").write_text("import time\nprint('caption: 1/4 pictures', flush=True)\ntime.sleep(60)\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return honest(roots, [], log_name, module="waits", title=title)

    monkeypatch.setattr(processes, "start", start)
    form = {"place": "pictures", "source": "0", "model": "owner/name"}
    assert "Captioning: 3 of 5 pictures" in client.post("/data/captioning", data=form).text
    assert started == [["caption", str(folder), "--model=owner/name", "--precision=bf16", "--device=auto"]]
    assert wait_for(client, "/data/captioning", "caption: 1/4 pictures")
    twice = client.post("/data/captioning", data=form)
    assert twice.status_code == 422 and "Captioning of these pictures is still running" in twice.text
    assert "caption: 1/4 pictures" in twice.text
    client.post("/data/captioning/stop", data=form)
    assert wait_for(client, "/data/captioning", "The last captioning")


def test_a_check_finds_duplicates_and_what_is_unusable(
    client: TestClient, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb runs in this process, while one that waits for its end stands for it."""
    (tmp_path / "waits.py").write_text(
        "import pathlib, sys, time\nwhile not pathlib.Path('checked').exists(): time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started, honest = [], processes.start
    monkeypatch.setattr(
        processes, "start",
        lambda roots, words, name, title: started.append(list(words)) or honest(roots, [], name, module="waits"),
    )  # fmt: skip
    (folder / "copy.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "copy.txt").write_text("a copy")
    (folder / "e.txt").write_text("text beside no picture")
    form = {"place": "pictures", "source": "0"}
    assert "data-start-check" in client.get("/data/check", params=form).text
    assert "Checking" in client.post("/data/check", data=form).text
    (words,) = started
    assert main(words) == 0
    (tmp_path / "checked").touch()
    text = wait_for(client, "/data/check", "data-checked")
    assert "Identical files: 1 group" in text and 'alt="a.png"' in text and 'alt="copy.png"' in text
    assert "e.png</th>" in text and "is not a picture that Pillow can read" in text
    assert "d.png</th>" not in text, "a run would give it the prompt of pictures without a caption"
    assert quote("copy.png") in text and list(data_page.stamps(make_roots(tmp_path / "runs", [tmp_path]), []))


def test_pictures_are_ordered_by_what_the_check_found(client: TestClient, folder: Path, tmp_path: Path) -> None:
    def names(order: str) -> list[str]:
        text = client.get("/data/gallery", params={"place": "pictures", "order": order}).text
        assert ("The order needs a check" in text) == (
            order in data_set.ORDERS and order != "name" and not place.exists()
        )
        return re.findall(r">([^<]+)</h3>", text)

    key = data_set.open_data_set(make_roots(tmp_path / "runs", [tmp_path]), "pictures", "0").key
    place = tmp_path / "runs" / ".web" / "data" / key / "data.json"
    by_name = names("name")
    assert names("small") == by_name and names("unknown") == by_name
    place.parent.mkdir(parents=True)
    sizes = {"a.png": (90, 60), "d.png": (30, 30), "sub/b c.jpg": (50, 50)}
    cut = {"a.png": 0.1, "d.png": 0.3, "sub/b c.jpg": 0.2}
    usable = [{"name": name, "size": size, "cut_away": cut[name]} for name, size in sizes.items()]
    figures = {"unusable": [], "usable": usable, "duplicates": [], "alike": [["d.png", "sub/b c.jpg"]]}
    place.write_text(json.dumps(figures))
    assert names("small")[:3] == ["d.png", "sub/b c.jpg", "a.png"] and len(names("small")) == 5
    assert names("large")[:3] == ["a.png", "sub/b c.jpg", "d.png"]
    assert names("cropped")[:3] == ["d.png", "sub/b c.jpg", "a.png"]
    assert names("alike")[:2] == ["d.png", "sub/b c.jpg"]


# --- captions and pictures elsewhere --------------------------------------------------------------------------------


def test_captions_of_metadata_are_shown(client: TestClient, folder: Path) -> None:
    """As a run of the folder would read them: from the file of all captions, and from the texts beside pictures."""
    (folder / "metadata.jsonl").write_text('{"file_name": "d.png", "text": "of <metadata>"}\n')
    text = client.get("/data", params={"place": "pictures"}).text
    assert '<p class="data-now">of &lt;metadata&gt;</p>' in text and '<p class="data-now">a red dog, grass</p>' in text


def test_a_tables_pictures_captions_and_masks_are_shown(client: TestClient, tmp_path: Path) -> None:
    cells = []
    for shade in (0, 255):
        image = Image.new("RGBA", (64, 64), (0, 128, 0, shade))
        image.paste((0, 128, 0, 255), (0, 0, 32, 64))
        file = io.BytesIO()
        image.save(file, "PNG")
        cells.append(file.getvalue())
    table = pa.table({"image": [*cells, b"no picture"], "text": ["half <i>", "whole", "none"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(
        json.dumps({"name": "x", "data": {"source": "table", "path": str(tmp_path / "rows.parquet"), "mask": "alpha"}})
    )
    plain = client.get("/data", params={"place": "rows.parquet"}).text
    assert "3 pictures" in plain and "masked=1" not in plain and "<textarea" not in plain and "/data/mask" not in plain
    assert '<p class="data-now">half &lt;i&gt;</p>' in plain and "is not a picture that Pillow can read" in plain
    assert "a table holds them; the first 480 rows are shown" in plain
    text = client.get("/data", params={"place": "rows.json"}).text
    first, *_ = (html.unescape(each) for each in re.findall(r'src="([^"]+masked=1[^"]*)"', text))
    shown = np.asarray(Image.open(io.BytesIO(client.get(first).content)).convert("RGB"), dtype=np.float32)
    assert shown[:, :100].mean((0, 1)) == pytest.approx((0, 128, 0), abs=8) and shown[:, -100:].min() > 200
    assert "2 of 3 pictures have a caption" in client.get("/data/summary", params={"place": "rows.json"}).text
    gone = client.get("/data/thumbnail", params={"place": "rows.json", "name": "rows.parquet#00000009"})
    assert gone.status_code == 404
    refused = client.post("/data/mask", params={"place": "rows.json", "name": "rows.parquet#00000000"})
    assert refused.status_code in (415, 422)


def wait_for(client: TestClient, path: str, what: str, seconds: float = 60) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = client.get(path, params={"place": "pictures"}).text
        assert "ended with code" not in text, text
        if what in text:
            return text
        time.sleep(0.1)
    raise AssertionError(text)
