"""The page that paints masks: what it writes, where, and what it refuses; and the undo of captions and masks."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from web_pages import open_pages

from simpletune.apps.web import history
from simpletune.config.load import validate
from simpletune.data.sources import mask_files
from simpletune.data.sources.folder import Folder
from simpletune.data.sources.multi_source import scan_sources

PLACE = {"place": "pictures", "source": "0"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pictures with captions; the first is turned by its EXIF data."""
    place = tmp_path / "pictures"
    (place / "sub").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((90, 60), 50).convert("RGB").save(place / "a.jpg", exif=exif)
    Image.effect_noise((64, 64), 50).convert("RGB").save(place / "sub" / "b c.png")
    (place / "a.txt").write_text("a dog\n")
    (place / "sub" / "b c.txt").write_text("a cat\n")
    return place


@pytest.fixture
def client(tmp_path: Path, folder: Path) -> TestClient:
    return open_pages(tmp_path)


def png(size: tuple[int, int], colour: str = "white", mode: str = "RGBA") -> bytes:
    """A mask of which the left half is painted, as a canvas gives it."""
    image = Image.new(mode, size, "black")
    image.paste(colour, (0, 0, size[0] // 2, size[1]))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def post(client: TestClient, body: bytes, name: str = "a.jpg", seen: str = "", kind: str = "image/png", **more: str):
    headers = {"content-type": kind, "accept": "application/json"}
    return client.post(
        "/data/mask", params={**PLACE, "name": name, "digest": seen, **more}, content=body, headers=headers
    )


def undo(client: TestClient) -> str:
    """Undo the last change of the data set."""
    number = re.search(r'name="number" value="(\d+)"', client.get("/data/undo", params=PLACE).text)
    assert number is not None, "there is nothing to undo"
    answer = client.post("/data/undo", data={**PLACE, "number": number[1]})
    assert answer.status_code == 200
    return answer.text


def test_a_painted_mask_is_the_one_that_training_reads(client: TestClient, folder: Path) -> None:
    page = client.get("/data/mask", params={**PLACE, "name": "a.jpg"})
    assert 'width="60" height="90"' in page.text and "data-painted" not in page.text
    assert "New run uses the masks" in page.text
    shown = Image.open(io.BytesIO(client.get("/data/mask/picture", params={**PLACE, "name": "a.jpg"}).content))
    assert shown.size == (60, 90)  # as training turns it
    assert client.get("/data/mask/painted", params={**PLACE, "name": "a.jpg"}).status_code == 404
    answer = post(client, png((60, 90)))
    assert answer.status_code == 200 and answer.json()["file"] == "a-masklabel.png"
    assert answer.json()["digest"] == hashlib.sha256((folder / "a-masklabel.png").read_bytes()).hexdigest()
    assert post(client, png((64, 64)), "sub/b c.png").status_code == 200
    scan = Folder(path=str(folder), mask="files").scan(folder)
    assert [each.name for each in scan.images] == ["a.jpg", "sub/b c.png"] and scan.rejected == []
    written = Image.open(folder / "a-masklabel.png")
    assert written.mode == "L" and written.size == (60, 90)
    assert np.asarray(written)[:, :30].min() == 255 and np.asarray(written)[:, 30:].max() == 0
    again = client.get("/data/mask/painted", params={**PLACE, "name": "a.jpg"})
    assert (np.asarray(Image.open(io.BytesIO(again.content))) == np.asarray(written)).all()
    assert "data-painted" in client.get("/data/mask", params={**PLACE, "name": "a.jpg"}).text


def test_a_large_picture_is_painted_smaller_and_its_mask_has_its_size(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_files, "LONGEST_SIDE", 45)
    assert 'width="30" height="45"' in client.get("/data/mask", params={**PLACE, "name": "a.jpg"}).text
    assert post(client, png((60, 90))).status_code == 422
    assert post(client, png((30, 45))).status_code == 200
    assert Image.open(folder / "a-masklabel.png").size == (60, 90)


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"no picture", "image/png", 422, "is not a PNG of 60x90"),
        (png((60, 91)), "image/png", 422, "is not a PNG of 60x90"),
        (png((60, 90))[:-30], "image/png", 422, "The mask is damaged"),
        (png((60, 90), "black"), "image/png", 422, "nothing would be learned, and nothing was written"),
        (png((60, 90)), "text/plain", 415, "Send a PNG"),
        (bytes(40 * 2**20), "image/png", 413, "The mask is larger than 33554432 bytes"),
    ],
)
def test_what_is_no_mask_is_refused(
    client: TestClient, folder: Path, body: bytes, kind: str, status: int, message: str
) -> None:
    before = sorted(folder.rglob("*"))
    answer = post(client, body, kind=kind)
    assert answer.status_code == status and message in answer.json()["problem"]
    assert sorted(folder.rglob("*")) == before and "number" not in client.get("/data/undo", params=PLACE).text


def test_no_mask_is_written_outside_of_the_folder_or_for_another_site(
    client: TestClient, folder: Path, tmp_path: Path
) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    Image.new("RGB", (64, 64)).save(outside / "x.png")
    Image.new("RGB", (60, 90)).save(outside / "mask.png")
    (folder / "out").symlink_to(outside)
    (folder / "link.png").symlink_to(outside / "x.png")
    for name in ("../x.png", str(outside / "x.png"), "out/x.png", "link.png", ".hidden.png", "a\0.png", "gone.png"):
        for answer in (
            post(client, png((64, 64)), name),
            client.get("/data/mask/picture", params={**PLACE, "name": name}),
        ):
            assert answer.status_code == 404, name
    (folder / "a-masklabel.png").symlink_to(outside / "mask.png")
    before = (outside / "mask.png").read_bytes()
    refused = post(client, png((60, 90)), seen=hashlib.sha256(before).hexdigest())
    assert refused.status_code == 422 and "target outside the data folder" in refused.json()["problem"]
    assert (outside / "mask.png").read_bytes() == before and sorted(outside.iterdir()) == [
        outside / "mask.png",
        outside / "x.png",
    ]
    foreign = client.post(
        "/data/mask", params={**PLACE, "name": "sub/b c.png"}, content=png((64, 64)),
        headers={"content-type": "image/png", "origin": "http://evil.example"},
    )  # fmt: skip
    assert foreign.status_code == 403 and not (folder / "sub" / "b c-masklabel.png").exists()


def test_a_mask_that_changed_since_it_was_shown_is_not_written_over(client: TestClient, folder: Path) -> None:
    seen = post(client, png((60, 90))).json()["digest"]
    (folder / "a-masklabel.png").write_bytes(png((60, 90), "grey"))
    refused = post(client, png((60, 90)), seen=seen)
    assert refused.status_code == 422 and "changed by something else" in refused.json()["problem"]
    assert (folder / "a-masklabel.png").read_bytes() == png((60, 90), "grey")


def test_a_mask_is_undone_step_by_step(client: TestClient, folder: Path) -> None:
    (folder / "a-masklabel.jpg").write_bytes(jpeg := b"of another program")
    seen = hashlib.sha256(jpeg).hexdigest()
    first = post(client, png((60, 90)), seen=seen)  # training reads the PNG first
    kept = (folder / "a-masklabel.png").read_bytes()
    assert post(client, png((60, 90), "grey"), seen=first.json()["digest"]).status_code == 200
    assert post(client, png((60, 90)), "a-masklabel.png").status_code == 404  # a mask is no picture
    assert "Undone: mask of a.jpg" in undo(client) and (folder / "a-masklabel.png").read_bytes() == kept
    undo(client)
    assert not (folder / "a-masklabel.png").exists() and (folder / "a-masklabel.jpg").read_bytes() == jpeg
    assert "number" not in client.get("/data/undo", params=PLACE).text
    assert client.post("/data/undo", data={**PLACE, "number": "1"}).status_code == 422


def test_masks_in_a_folder_of_their_own(client: TestClient, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    data = {"path": str(folder), "mask": "files", "mask_path": str(tmp_path / "masks"), "resolution": 64}
    (tmp_path / "config.json").write_text(json.dumps({"name": "x", "data": data}))
    asked = {"place": "config.json"}
    assert "every picture needs one" in client.get("/data/mask", params={**asked, "name": "sub/b c.png"}).text
    assert post(client, png((64, 64)), "sub/b c.png", place="config.json").status_code == 200
    assert post(client, png((60, 90)), place="config.json").status_code == 200
    scan = scan_sources(validate({"name": "x", "data": data}, "x", needs_data=False, needs_model=False).data)
    assert [each.name for each in scan.images] == ["a.jpg", "sub/b c.png"]
    for wrong, why in ({"mask_path": str(tmp_path.parent)}, "outside of the folders"), ({"mask": "alpha"}, "opacity"):
        without = {key: value for key, value in data.items() if key != "mask_path" or "mask" not in wrong}
        (tmp_path / "other.json").write_text(json.dumps({"name": "x", "data": {**without, **wrong}}))
        refused = post(client, png((60, 90)), place="other.json")
        assert refused.status_code == 422 and why in refused.json()["problem"]


def test_the_gallery_shows_masks_and_finds_pictures_without(client: TestClient, folder: Path) -> None:
    assert post(client, png((60, 90))).status_code == 200
    text = client.get("/data/gallery", params=PLACE).text
    assert "2 pictures" in text and "masklabel" not in text  # a mask is no picture
    (shown,) = re.findall(r'src="([^"]+masked=1[^"]*)"', text)
    thumbnail = client.get(shown.replace("&amp;", "&"))
    pixels = np.asarray(Image.open(io.BytesIO(thumbnail.content)).convert("L"), dtype=np.float32)
    assert thumbnail.status_code == 200 and pixels[:, -20:].mean() > 200 > 160 > pixels[:, :20].mean()
    assert "5 files: 2 pictures, 2 files of captions, 1 mask" in client.get("/data", params=PLACE).text
    left = client.get("/data/gallery", params={**PLACE, "show": "unmasked"}).text
    assert "1 picture" in left and ">sub/b c.png</h3>" in left
    assert client.get("/data/thumbnail", params={**PLACE, "name": "sub/b c.png", "masked": "1"}).status_code == 404


def save(client: TestClient, name: str, caption: str) -> str:
    cards = client.get("/data/gallery", params=PLACE).text.split('<li class="data-card"')
    card = next(each for each in cards if f">{name}</h3>" in each)
    seen = re.search(r'name="digest" value="([^"]*)"', card)
    assert seen is not None
    return client.post("/data/caption", data={**PLACE, "name": name, "caption": caption, "digest": seen[1]}).text


def test_a_saved_caption_is_undone_in_its_card(client: TestClient, folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfa dog  \r\n")
    card = save(client, "a.jpg", "a wolf")
    assert (folder / "a.txt").read_text() == "a wolf\n"
    number = re.search(r'name="number" value="(\d+)"', card)
    assert number is not None
    form = {**PLACE, "name": "a.jpg", "number": number[1]}
    back = client.post("/data/undo", data=form)
    assert ">Undone<" in back.text and ">\na dog</textarea>" in back.text and "number" not in back.text
    assert (folder / "a.txt").read_bytes() == b"\xef\xbb\xbfa dog  \r\n"
    assert client.post("/data/undo", data=form).status_code == 422
    (folder / "a.txt").unlink()
    card = save(client, "a.jpg", "the first")
    undo(client)
    assert not (folder / "a.txt").exists()  # there was none


def test_an_edit_of_many_captions_is_undone_but_for_those_that_changed_since(client: TestClient, folder: Path) -> None:
    form = {**PLACE, "kind": "prefix", "find": "", "text": "sks"}
    fingerprint = re.search(r'name="fingerprint" value="(\w+)"', client.post("/data/preview", data=form).text)
    assert fingerprint is not None
    assert "2 captions changed" in client.post("/data/apply", data={**form, "fingerprint": fingerprint[1]}).text
    assert client.post("/data/apply", data={**form, "fingerprint": fingerprint[1]}).status_code == 422
    (folder / "a.txt").write_text("by hand\n")
    text = undo(client)
    assert "Undone: 2 captions (prefix)" in text and "a.txt was changed by something else since" in text
    assert (folder / "sub" / "b c.txt").read_text() == "a cat\n" and (folder / "a.txt").read_text() == "by hand\n"
    assert "number" not in text


def test_only_the_latest_changes_are_kept(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    for number in range(5):
        save(client, "a.jpg", f"caption {number}")
    assert len(list((tmp_path / "runs" / ".web" / "history").rglob("*.jsonl"))) == 3
    save(client, "a.jpg", "caption 4")  # changes nothing
    assert "Undone: caption of a.jpg" in undo(client)


def test_an_older_change_can_be_undone_after_the_later_one(client: TestClient, folder: Path) -> None:
    save(client, "a.jpg", "one")
    older = re.search(r'name="number" value="(\d+)"', client.get("/data/undo", params=PLACE).text)
    save(client, "a.jpg", "two")
    assert older is not None
    left = client.post("/data/undo", data={**PLACE, "number": older[1]}).text  # as another tab still offers it
    assert "changed by something else since" in left and (folder / "a.txt").read_text() == "two\n"
    undo(client)
    assert (folder / "a.txt").read_text() == "one\n"
    undo(client)
    assert (folder / "a.txt").read_text() == "a dog\n"


def test_a_broken_mask_and_a_name_without_an_address_leave_the_pages(client: TestClient, folder: Path) -> None:
    (folder / "a-masklabel.png").symlink_to(folder.parent / "nowhere.png")
    (folder / os.fsdecode(b"c\xe9.png")).write_bytes((folder / "sub" / "b c.png").read_bytes())
    shown = client.get("/data/gallery", params=PLACE)
    assert shown.status_code == 200 and "Unusable: " in shown.text and "b c.png" in shown.text
    assert client.get("/data/mask", params={**PLACE, "name": "sub/b c.png"}).status_code == 200


def history_of(folder: Path) -> Path:
    """The file of the latest change."""
    return max((folder.parent / "runs" / ".web" / "history").rglob("*.jsonl"))


HELD, WRITTEN = b"a dog\n", hashlib.sha256(b"a wolf\n").hexdigest()
OTHER = base64.b64encode(b"a god\n").decode()


@pytest.mark.parametrize(
    "line",
    [
        '["FILE", "@@@", "WRITTEN"]', '["FILE", "@@@", "WRITTEN", "HELD"]', '["FILE", "é", "WRITTEN"]',
        f'["FILE", "{OTHER}", "WRITTEN", "HELD"]', '["FILE", null, "WRITTEN", "HELD"]', '["FILE", 7, "WRITTEN"]',
        '["FILE", "", "WRITTEN", "HELD"]', '["FILE", "YQ=", "WRITTEN"]', '["FILE", "WRITTEN"]', '["FILE"', "7",
        "", "{}", '[7, null, "WRITTEN"]', '["FILE", null, 7]', "[" * 100_000, '["FILE", null, "WRITTEN", null, null]',
    ],
)  # fmt: skip
def test_undo_restores_nothing_but_what_was_kept(client: TestClient, folder: Path, line: str) -> None:
    save(client, "sub/b c.png", "a lion")
    place = history_of(folder)
    words, sound = place.read_text().splitlines()
    save(client, "a.jpg", "a wolf")
    for name, value in (
        ("FILE", str(folder / "a.txt")),
        ("WRITTEN", WRITTEN),
        ("HELD", hashlib.sha256(HELD).hexdigest()),
    ):
        line = line.replace(name, value)
    history_of(folder).write_text("\n".join([words, line, sound]))
    text = undo(client)
    assert "A damaged line of the history names no file with what it held, and is skipped" in text
    assert (folder / "a.txt").read_text() == "a wolf\n", "what the damaged line names is left"
    assert (folder / "sub" / "b c.txt").read_text() == "a cat\n", "the others are undone"


def test_undo_reads_what_version_0_1_wrote_and_answers_in_words_when_it_can_read_none(
    client: TestClient, folder: Path
) -> None:
    save(client, "a.jpg", "a wolf")
    place = history_of(folder)
    words, line = place.read_text().splitlines()
    assert json.loads(line)[3] == hashlib.sha256(HELD).hexdigest()
    place.write_text("\n".join([words, json.dumps(json.loads(line)[:3])]))
    undo(client)
    assert (folder / "a.txt").read_bytes() == HELD
    for content in (b"", b"\xff\n", b"[1]\n", b"[" * 10**5):
        save(client, "a.jpg", "a wolf")
        place = history_of(folder)
        place.write_bytes(content)
        assert "number" not in client.get("/data/undo", params=PLACE).text
        answer = client.post("/data/undo", data={**PLACE, "number": str(int(place.stem))})
        assert answer.status_code == 422 and "cannot be undone any more" in answer.text
        place.unlink()
        (folder / "a.txt").write_bytes(HELD)
    for number in ("", "x", "-1", "9" * 5000):
        answer = client.post("/data/undo", data={**PLACE, "number": number})
        assert answer.status_code == 422 and "not the number of a change" in answer.text


def test_undo_leaves_a_file_that_is_now_outside_and_goes_on(client: TestClient, folder: Path, tmp_path: Path) -> None:
    save(client, "sub/b c.png", "a lion")
    place = history_of(folder)
    outside = tmp_path.parent / f"{tmp_path.name}-outside.txt"
    outside.write_text("a wolf\n")
    words, sound = place.read_text().splitlines()
    place.write_text("\n".join([words, json.dumps([str(outside), None, WRITTEN, None]), sound]))
    assert "is outside of the folders that this page may use" in undo(client)
    assert outside.read_text() == "a wolf\n" and (folder / "sub" / "b c.txt").read_text() == "a cat\n"
