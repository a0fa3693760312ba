"""What New run and Pictures say of a folder: sums, what is left over, questions and their answers, scans under way."""

from __future__ import annotations

import html
import json
import os
import re
import threading
import zlib
from pathlib import Path

import pytest
from PIL import Image
from serving import until
from starlette.testclient import TestClient
from test_web_start import HX, Form, change
from web_pages import open_pages

from simpletune.apps.web import live, queue, scans
from simpletune.apps.web.form import presets
from simpletune.apps.web.roots import make_roots
from simpletune.apps.web.scans import ImageScan, Scans
from simpletune.commands.init import inspect_folder
from simpletune.config.load import read_config
from simpletune.data.demo import TINY_SD3
from simpletune.system.console import progress
from simpletune.system.options import UserError

ORIGIN_SIZE = (96, 64)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is predicted or started."""
    monkeypatch.setattr(live.Estimator, "want", lambda *_: None)
    monkeypatch.setattr(queue, "ensure_runner", lambda roots: None)
    monkeypatch.setattr(presets, "card_here", lambda: None)


def images(folder: Path, count: int = 3) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.effect_noise(ORIGIN_SIZE, 60 + number).convert("RGB").save(folder / f"{number}.png")
    return folder


def masked(folder: Path, count: int) -> Path:
    for number in range(count):
        Image.new("L", ORIGIN_SIZE, 255).save(folder / f"{number}-masklabel.png")
    return folder


def begin(client: TestClient, folder: str) -> tuple[str, dict[str, str]]:
    """New run with a folder: the page, and its form."""
    page = client.get("/start", params={"folder": folder})
    assert page.status_code == 200, page.text
    return page.text, Form(page.text).values


def words(text: str, id: str) -> str:
    """The text of an element without elements of its own kind inside."""
    found = re.search(rf'<(\w+)[^>]* id="{id}"[^>]*>(.*?)</\1>', text, re.S)
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", found[2])).split()) if found else ""


def buttons(text: str) -> dict[str, str]:
    """The value of each choice by its words."""
    found = re.findall(r'<button [^>]*name="choice" value="([^"]*)"[^>]*>([^<]*)</button>', text)
    return {html.unescape(said): html.unescape(value) for value, said in found}


def questions(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r"<legend>([^<]*)</legend>\n<div class=\"buttons\">", text)]


def can_start(text: str) -> bool:
    return re.search(r'<button[^>]*id="go"[^>]* disabled', text) is None


def queued(root: Path) -> list[queue.QueueEntry]:
    return queue.read_queue(make_roots(root / "runs", [root]))


def test_a_run_waits_for_an_answer_which_sets_the_fields_as_the_users(tmp_path: Path) -> None:
    masked(images(tmp_path / "pictures"), 2)
    client = open_pages(tmp_path)
    text, values = begin(client, "pictures")
    assert words(text, "sums") == "5 files: 3 pictures, 2 masks"
    asked = "2 of 3 pictures have a mask; without one: 2.png"
    assert questions(text) == [asked] and "masklabel" not in words(text, "pictures") and not can_start(text)
    assert "Answer the question above first" in text
    refused = client.post("/start/run", data=values)
    assert refused.status_code == 422 and asked in html.unescape(refused.text) and not queued(tmp_path)
    (leave,) = [value for said, value in buttons(text).items() if said.startswith("leave out")]
    answer, values = change(client, values, choice=leave)
    values.pop("choice")
    assert questions(answer) == [] and can_start(answer)
    assert values["data.mask"] == "files" and values["data.on_error"] == "skip"
    assert "set by you" in words(answer, "n-data-mask")
    assert "data.mask=files" in words(answer, "command").split("&&")[0], "init asks without it"
    answer, values = change(client, values, train__seed="3")  # it stays answered, beside other changes
    assert questions(answer) == [] and values["data.mask"] == "files"
    assert client.post("/start/run", data=values).status_code == 303
    config, _ = read_config(Path(queued(tmp_path)[0].config))
    assert (config.data.mask, config.data.on_error, config.train.seed) == ("files", "skip", 3)


def test_a_folder_below_may_be_the_answer(tmp_path: Path) -> None:
    for name in ("img/10_sks dog", "reg/1_dog"):
        images(tmp_path / "kohya" / name)
    client = open_pages(tmp_path)
    text, _ = begin(client, "kohya")
    assert len(questions(text)) >= 1 and not can_start(text)
    (link,) = re.findall(r'<a class="button" href="(/start[?]folder=[^"]*img)">', text)
    below = client.get(html.unescape(link)).text
    assert str(tmp_path / "kohya" / "img") in html.unescape(below) and words(below, "sums") == "3 files: 3 pictures"


def test_an_answer_is_for_its_folder_and_its_question_alone(tmp_path: Path) -> None:
    for name in ("a pictures", "b pictures"):
        masked(images(tmp_path / name), 2)
    client = open_pages(tmp_path)
    text, values = begin(client, "a pictures")
    (leave,) = [value for said, value in buttons(text).items() if said.startswith("leave out")]
    _, values = change(client, values, choice=leave)
    values.pop("choice")
    text, values = change(client, values, data__path="b pictures")
    assert "2 of 3 pictures have a mask" in text and not can_start(text) and values["data.mask"] == ""
    (whole,) = [value for said, value in buttons(text).items() if said.startswith("learn from the whole")]
    answer, _ = change(client, values, choice=whole)  # which is the default, and the user's nevertheless
    assert can_start(answer) and "set by you" in words(answer, "n-data-mask")
    text, values = change(client, values, choice=json.dumps(["no such question", "yes"]))
    assert not can_start(text)
    values.pop("choice")
    text, values = change(client, values, data__mask="files", data__on_error="skip")  # by hand
    assert can_start(text), text
    Image.new("L", ORIGIN_SIZE, 255).save(tmp_path / "a pictures" / "2-masklabel.png")
    text, values = begin(client, "a pictures")  # all of them: nothing is left to ask
    assert can_start(text) and values["data.mask"] == "files"
    assert "Mask “files”: every picture has a mask" in html.unescape(text)
    for damaged in ('["a"]', "[1, 2]", "{", '[["a"], "b"]'):
        assert client.post("/start/change", data={**values, "choice": damaged}, headers=HX).status_code == 400


def test_the_class_is_asked_and_the_answer_is_the_trigger_word(tmp_path: Path) -> None:
    images(tmp_path / "rex lawn")
    client = open_pages(tmp_path)
    text, values = begin(client, "rex lawn")
    assert "what do the pictures of 'rex lawn' show?" in html.unescape(text) and not can_start(text)
    whole = client.post("/start/change", data={**values, "choice": buttons(text)["lawn"]})  # without scripts
    values = Form(whole.text).values
    assert "<h1>New run</h1>" in whole.text and can_start(whole.text)
    assert (values["trigger"], values["class"]) == ("sks", "lawn") and values["data.prompt"] == "a photo of sks lawn"
    text, values = change(client, values, trigger="", **{"class": ""})
    assert not can_start(text), "it is asked again"
    text, _ = change(client, values, trigger="sks dog")
    assert can_start(text)


def test_pictures_without_a_caption_are_said(tmp_path: Path) -> None:
    folder = images(tmp_path / "pictures", 4)
    client = open_pages(tmp_path)
    text, _ = begin(client, "pictures")
    assert words(text, "one-caption").startswith(
        "4 pictures are trained with one caption, “a photo of sks”: no captions"
    )
    (folder / "1.txt").write_text("a red dog")
    (folder / "notes.txt").write_text("x")
    (folder / "raw.CR2").write_bytes(b"x")
    text, values = begin(client, "pictures")
    assert words(text, "sums") == "7 files: 4 pictures, 1 file of captions, 1 left over, 1 of a kind that is not read"
    said = html.unescape(text)
    assert "3 of 4 pictures have no caption (0.png, 2.png, 3.png): they get this one" in said
    assert "notes.txt: no picture has this name" in said and "raw.CR2: .cr2 pictures are not read" in said
    assert values["data.missing_prompt"] and values["data.prompt"] == "" and can_start(text)
    assert text.count("/data/thumbnail?") == 4 and f'href="/data?place={folder}">See all 4' in text


def test_pictures_says_the_same_and_the_real_fault_of_each_picture(tmp_path: Path) -> None:
    folder = masked(images(tmp_path / "pictures", 4), 1)
    Image.effect_noise((640, 480), 50).convert("RGB").save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:9000])
    data = (folder / "1.png").read_bytes()
    at, end = data.index(b"IDAT") + 4, data.rindex(b"IEND") - 8
    pixels = bytes(end - at)  # with the right checksum
    checksum = zlib.crc32(b"IDAT" + pixels).to_bytes(4, "big")
    (folder / "inside.png").write_bytes(data[:at] + pixels + checksum + data[end + 4 :])
    (folder / "empty.png").write_bytes(b"")
    (folder / "0.txt").write_bytes("ein Hund".encode("utf-16"))
    (folder / ("n" * 250 + ".png")).write_bytes((folder / "1.png").read_bytes())
    (folder / "link.png").symlink_to("/etc/hostname")
    client = open_pages(tmp_path)
    page = client.get("/data", params={"place": "pictures"})
    text = html.unescape(page.text)
    assert page.status_code == 200
    sums = "11 files: 5 pictures, 1 file of captions, 1 mask, 1 left over, 3 damaged"
    assert words(text, "sums") == sums == words(begin(client, "pictures")[0], "sums")
    assert "masklabel.png</h3>" not in text and "link.png: is a symbolic link to a target outside" in text
    cards = dict(re.findall(r'-name">([^<]+)</h3>(.*?)</li>', page.text, re.S))
    assert "Unusable: is damaged (image file is truncated" in cards["cut.jpg"]
    assert "Unusable: is damaged (" in cards["inside.png"], "only a scan decodes it"
    assert "Unusable: the file is empty" in cards["empty.png"]
    assert "ein Hund" in cards["0.png"] and "no caption" not in cards["0.png"]
    assert ">no caption<" in cards["1.png"] and "Unusable" not in cards["1.png"]
    assert f'href="/start?folder={folder}">Train on these' in page.text


def test_what_is_no_text_no_file_or_a_loop_is_a_sentence(tmp_path: Path) -> None:
    folder = images(tmp_path / "pictures", 1)
    os.link(folder / "0.png", os.fsencode(folder) + b"/\xff.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "up").symlink_to("..")
    (folder / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "a dog"}\n')
    client = open_pages(tmp_path)
    for text in (begin(client, "pictures")[0], client.get("/data", params={"place": "pictures"}).text):
        text = html.unescape(text)
        assert words(text, "sums") == "6 files: 1 picture, 1 file of captions, 2 left over, 2 damaged", text
        assert "?.png: its file name is not UTF-8 text. Rename it" in text
        assert "pipe.png: is not a regular file" in text and "up/: is a symbolic link to a target outside" in text
        assert "loop.png: cannot be read (Too many levels of symbolic links)" in text
    cards = dict(re.findall(r'-name">([^<]+)</h3>(.*?)</li>', text, re.S))
    assert "Unusable: its file name is not UTF-8 text" in cards["?.png"] and "a dog" in cards["0.png"]


def test_sizes_are_those_of_a_real_model_where_there_is_no_card(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (1200, 800), "teal").save(folder / "a.png")
    client = open_pages(tmp_path)
    shown = {
        model: re.findall(r"px, scaled and cropped to (\d+ x \d+)", client.get("/data", params=given).text)
        for model, given in {
            "": {"place": "photos"},
            "sd15": {"place": "photos", "model": "stable-diffusion-v1-5/stable-diffusion-v1-5"},
            "tiny": {"place": "photos", "model": TINY_SD3},
        }.items()
    }
    assert shown == {"": ["1248 x 832"], "sd15": ["640 x 384"], "tiny": ["80 x 48"]}
    Image.new("RGB", (600, 400), "teal").save(folder / "a.png")  # a run of it would take 512 px
    assert "cropped to 624 x 416" in client.get("/data", params={"place": "photos"}).text


def test_after_an_upload_its_pictures_and_folder_are_shown(tmp_path: Path) -> None:
    client = open_pages(tmp_path)
    assert "data-suggested" not in client.get("/data").text
    masked(images(tmp_path / "new"), 1)
    strip = client.get("/data/strip", params={"place": "new"}).text
    assert re.findall(r'alt="([^"]+)"', strip) == ["0.png", "1.png", "2.png"] and "See all 3" in strip
    assert "/start?folder=" in strip and f"{tmp_path}/new</a>" in client.get("/data/folders").text


@pytest.mark.parametrize("name", ["empty", "unreadable", "broken", "a run"])
def test_a_folder_of_which_nothing_can_be_used_is_a_sentence(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    expected = "contains no pictures"
    if name == "unreadable":
        images(folder / "below")
        (folder / "below").chmod(0)
        if os.access(folder / "below", os.R_OK):
            pytest.skip("root may read everything")
    elif name == "broken":
        (folder / "a.png").write_bytes(b"x")
        expected = "none of 1 picture can be used: a.png is not a picture that Pillow can read"
    elif name == "a run":
        images(folder / "samples")
        (folder / "metrics.jsonl").touch()
        expected = "is the folder of a run"
    client = open_pages(tmp_path)
    text, values = begin(client, name)
    assert expected in html.unescape(text) and not can_start(text)
    assert client.post("/start/run", data=values).status_code == 422 and not queued(tmp_path)
    assert client.get("/data", params={"place": name}).status_code == 200
    if name == "unreadable":
        (folder / "below").chmod(0o700)


def test_no_run_starts_while_the_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images(tmp_path / "pictures")
    go, half = threading.Event(), threading.Event()

    def slow(folder: Path, chosen: object) -> object:
        with progress("look", 1000, "pictures") as advance:
            for _ in range(400):
                advance()
            half.set()
            assert go.wait(60)
        return inspect_folder(folder)

    monkeypatch.setattr(scans, "inspect_folder", slow)
    monkeypatch.setattr(Scans.scan_folder, "__defaults__", (None, 0.0))
    client = open_pages(tmp_path)
    begin(client, "pictures")
    assert half.wait(60)
    text, values = begin(client, "pictures")
    assert "Looking at the folder: 400 of 1,000 pictures" in text and 'max="1000" value="400"' in text
    assert not can_start(text) and "no prediction until the folder has been looked at" in text
    assert client.post("/start/run", data=values).status_code == 422 and not queued(tmp_path)
    go.set()
    until(lambda: can_start(change(client, values)[0]))
    assert client.post("/start/run", data=change(client, values)[1]).status_code == 303


def test_a_large_folder_is_scanned_by_a_process_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, roots = masked(images(tmp_path / "pictures"), 1), make_roots(tmp_path / "runs", [tmp_path])
    text = json.dumps([str(folder), {}])
    here, beside = ImageScan("a"), ImageScan("b")  # type: ignore[var-annotated]
    found, same = here.scan_here("folder", text), beside.scan_in_child(roots, "folder", text)
    assert same.report.files == found.report.files and (beside.done, beside.total) == (3, 3)
    assert [each.image.read_same() for each in same.report.usable] == [
        each.image.read_same() for each in found.report.usable
    ]
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no pictures"):
        beside.scan_in_child(roots, "folder", json.dumps([str(empty), {}]))


def test_a_scan_that_nobody_asks_for_ends_and_a_changed_folder_is_scanned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, roots = images(tmp_path / "pictures"), make_roots(tmp_path / "runs", [tmp_path])
    known = Scans(roots)
    first = known.scan_folder(folder, wait=60)
    assert first.found is not None and known.scan_folder(folder) is first
    (folder / "0.txt").write_text("a dog")
    second = known.scan_folder(folder, wait=60)
    assert second.found is not None and second.found.report.files.count("caption") == 1
    monkeypatch.setattr(scans, "FEW", 0)
    monkeypatch.setattr(scans, "__name__", "simpletune.apps.web.waits")
    monkeypatch.setattr(scans.processes, "spawn", lambda roots, module, words, **pipes: sleeper(pipes))
    third = known.scan_folder(images(tmp_path / "more"), wait=0)
    assert third.is_running
    known.close()
    assert third.ended.wait(60) and third.found is None and third.problem == scans.FAILED
    assert known.scan_folder(tmp_path / "more", wait=0) is not third
    known.close()


def sleeper(pipes: dict[str, int]) -> object:
    import subprocess
    import sys

    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], **pipes)  # type: ignore[call-overload]
