"""Uploads: what becomes a folder, what is left out and why, attacks by names, contents and zip files; what ends one."""

from __future__ import annotations

import argparse
import asyncio
import errno
import io
import json
import os
import re
import stat
import struct
import tracemalloc
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image
from starlette.testclient import TestClient
from web_pages import ADDRESS, open_pages

from simpletune.apps.web import app, live, upload, upload_page
from simpletune.apps.web.access import Access
from simpletune.apps.web.data_set import list_folders
from simpletune.apps.web.roots import make_roots
from simpletune.data.sources.image_files import decode, image_size
from simpletune.system.atomic import temporary_path
from simpletune.system.options import UserError

JSON = {"accept": "application/json"}
Files = list[tuple[str, bytes]]


def image(shade: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, (shade, 100, 200)).save(content, kind, **options)
    return content.getvalue()


GOOD = ("good.png", image(1))


def packed(
    *entries: tuple[str, bytes],
    change: Callable[[zipfile.ZipInfo], object] | None = None,
    method: int = zipfile.ZIP_DEFLATED,
) -> bytes:
    """A zip file of a good picture and of these; ``change`` alters how the list of entries describes the last one."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (GOOD, *entries):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED if name == GOOD[0] else method)
        if change is not None:
            change(archive.filelist[-1])
    return content.getvalue()


def described(name: str, value: object, content: bytes = b"") -> Files:
    """A zip file whose list of entries says something else of x.png."""
    entry = ("x.png", content or image(2))
    return [("x.zip", packed(entry, change=lambda found: setattr(found, name, value)))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root inside of a folder in which nothing may be written."""
    place = tmp_path / "outside" / "root"
    place.mkdir(parents=True)
    return place


@pytest.fixture
def client(root: Path) -> TestClient:
    return open_pages(root)


def begin(client: TestClient, name: str = "set", size: int = 0) -> str:
    answer = client.post("/upload", data={"name": name, "bytes": str(size)}, headers=JSON)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def send(client: TestClient, id: str, path: str, content: bytes) -> Any:
    return client.post(f"/upload/{id}/file?path={quote(path, safe='')}", content=content, headers=JSON)


def put(client: TestClient, files: Files, name: str = "set") -> tuple[Any, list[str]]:
    """Upload files; return the last answer, and all that was left out."""
    id, left_out = begin(client, name), list[str]()
    for path, content in files:
        answer = send(client, id, path, content)
        assert answer.status_code == 200, answer.text
        left_out += answer.json()["left_out"]
    answer = client.post(f"/upload/{id}/finish", headers=JSON)
    return answer, left_out + answer.json().get("left_out", [])


def tree(folder: Path) -> list[str]:
    """All files and empty folders below a folder."""
    found = (each for each in folder.rglob("*") if not each.is_dir() or not any(each.iterdir()))
    return sorted(each.relative_to(folder).as_posix() for each in found)


def test_pictures_and_captions_become_a_folder_and_duplicates_and_orphans_are_named(
    client: TestClient, root: Path
) -> None:
    mask = image(255)
    answer, left_out = put(client, [
        ("a.png", image(1)), ("a.txt", b"a red cat"), ("sub/B.JPG", image(2, kind="JPEG")), ("sub/B.TXT", b"b"),
        ("copy.png", image(1)), ("copy.txt", b"a red cat"), ("lonely.caption", b"c"), ("a-masklabel.png", mask),
        ("sub/B-masklabel.png", mask), ("metadata.jsonl", b'{"file_name": "a.png", "text": "x"}'),
        (".DS_Store", b"x"), ("__MACOSX/a.png", b"x"), ("Thumbs.db", b"x"), ("old.psd", b"8BPS"), ("it.7z", b"7z"),
    ])  # fmt: skip
    assert answer.json() | {"left_out": []} == {"folder": str(root / "set"), "pictures": 2, "left_out": []}
    assert tree(root) == [
        "set/a-masklabel.png", "set/a.png", "set/a.txt", "set/metadata.jsonl", "set/sub/B-masklabel.png",
        "set/sub/B.JPG", "set/sub/B.txt",
    ]  # fmt: skip
    assert left_out == [
        "copy.png has the same content as a.png",
        "old.psd is a picture of a kind that is not read (.psd). Save it as JPEG or PNG",
        "it.7z is an archive of another kind than zip. Unpack it, or pack the pictures as a zip file",
        "lonely.caption is a caption, and no picture has its name",
    ]


def test_a_turned_picture_keeps_its_bytes_and_is_turned_once_where_it_is_read(client: TestClient, root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = image(3, kind="JPEG", exif=exif)
    put(client, [("turned.jpg", content)])
    kept = (root / "set" / "turned.jpg").read_bytes()
    assert kept == content
    assert image_size(kept) == decode(kept).size == (30, 40)


def test_a_zip_file_is_unpacked_and_its_only_folder_is_dropped_unless_training_reads_its_name(
    client: TestClient, root: Path
) -> None:
    def zipped(top: str) -> bytes:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(f"{top}/", b"")
            archive.writestr(f"{top}/a.png", image(1))
            archive.writestr(f"{top}/a.txt", b"a cat")
            archive.writestr("__MACOSX/._a.png", b"x")
            archive.writestr(".DS_Store", b"x")
        return content.getvalue()

    for name, top in (("one", "mine"), ("two", "10_sks dog")):
        answer, left_out = put(client, [("any.zip", zipped(top))], name)
        assert answer.json()["pictures"] == 1 and left_out == []
    answer, left_out = put(client, [("x/x.zip", zipped("mine")), ("y/y.zip", zipped("mine"))], "three")
    assert left_out == ["y.zip: y/a.png has the same content as x/a.png"]
    assert tree(root) == [
        "one/a.png", "one/a.txt", "three/x/a.png", "three/x/a.txt", "two/10_sks dog/a.png", "two/10_sks dog/a.txt",
    ]  # fmt: skip


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG with its true sum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_scans(more: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    whole = image(2, kind="JPEG", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:last] + whole[last:end] * (more + 1) + whole[end:]


BOMB = image()[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 6, 0, 0, 0)) + image()[33:]
NO_PIXELS = image()[:33] + chunk(b"IDAT", b"no zlib") + chunk(b"IEND", b"")
ATTACKS: dict[str, tuple[Files, str]] = {
    # names
    "parent": ([("../x.png", image(2))], "leads out of the folder"),
    "parent inside": ([("a/../../x.png", image(2))], "leads out of the folder"),
    "absolute": ([("/tmp/x.png", image(2))], "leads out of the folder"),
    "backslash": ([("..\\x.png", image(2))], "leads out of the folder"),
    "drive": ([("C:x.png", image(2))], "leads out of the folder"),
    "null byte": ([("x.png\0.txt", image(2))], "control or direction characters"),
    "escape": ([("x\x1b[2J.png", image(2))], "control or direction characters"),
    "line feed": ([("x\ny.png", image(2))], "control or direction characters"),
    "bidirectional": ([("x\u202egnp.png", image(2))], "control or direction characters"),
    "reserved": ([("sub/com1.png", image(2))], "Windows cannot use (com1.png)"),
    **{
        f"reserved {name}": ([(name, image(2))], f"Windows cannot use ({name.rpartition('/')[2]})")
        for name in ("x?.png", "x*.png", "x<y>.png", "x|y.png", 'x"y.png', "xx:y.png", "CONIN$.png", "conout$ .png",
                     "COM¹.png", "lpt³", "a/LPT9.txt.png")
    },
    "dot at the end": ([("sub./x.png", image(2))], "Windows cannot use (sub.)"),
    "long": ([("x" * 300 + ".png", image(2))], "more than 200 bytes"),
    "deep": ([("/".join("abcdefghi") + ".png", image(2))], "more than 8 folders"),
    "nothing": ([("", image(2))], "has no name"),
    "case": ([("GOOD.png", image(2))], "GOOD.png has the name of good.png, apart from case"),
    "accents": (
        [("\u00e9.png", image(2)), ("e\u0301.png", image(3))], "has the name of \u00e9.png, apart from case",
    ),
    "file as folder": ([("good.png/x.png", image(2))], "has the name of a folder"),
    # contents
    "scans": ([("x.jpg", with_scans(60))], "is a JPEG in more than 50 scans"),
    "page": ([("x.png", b"<html><script>alert(1)</script>")], "is not a picture that Pillow can read"),
    "program": ([("x.sh", b"#!/bin/sh")], "is neither a picture nor a caption"),
    "drawing": ([("x.svg", b"<svg/>")], "is a picture of a kind that is not read (.svg)"),
    "empty": ([("x.jpg", b"")], "the file is empty"),
    "truncated": ([("x.png", image(2, (400, 300))[:-60])], "x.png is damaged"),
    "whole but without pixels": ([("x.png", NO_PIXELS)], "x.png is damaged"),
    "picture bomb": ([("x.png", BOMB)], "has more than 178,956,970 pixels"),
    "caption in bytes": ([("x.txt", b"\xff\xfe\x00")], "is not UTF-8 text"),
    "caption that steers": ([("x.txt", b"a\x1b[2J")], "control character U+001B"),
    # zip files
    "no zip": ([("x.zip", b"PK\x03\x04 and no more")], "is not a zip file that can be read"),
    "zip parent": ([("x.zip", packed(("../x.png", image(2))))], "leads out of the folder"),
    "zip absolute": ([("x.zip", packed(("/tmp/x.png", image(2))))], "leads out of the folder"),
    "zip backslash": ([("x.zip", packed(("a\\..\\x.png", image(2))))], "leads out of the folder"),
    "zip null byte": (described("filename", "x.png\0y"), "control or direction characters"),
    "zip without a name": (described("filename", ""), "has no name"),
    "zip link": (described("external_attr", (stat.S_IFLNK | 0o777) << 16, b"/etc/passwd"), "is a link or a device"),
    "zip device": (described("external_attr", (stat.S_IFBLK | 0o777) << 16), "is a link or a device"),
    "zip encrypted": (described("flag_bits", 1), "without a password"),
    "zip in zip": ([("x.zip", packed(("y.zip", packed())))], "is a zip file in a zip file"),
    "zip of a method": (described("compress_type", 99), "x.png cannot be unpacked"),
    **{
        f"zip {name}": ([("x.zip", packed(("x.png", image(2)), method=method))], f"is packed by {name}. Pack it")
        for name, method in (("bzip2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA))
    },
    "zip sum": (described("CRC", 1), "cannot be unpacked"),
    "zip understates": (described("file_size", 9), "cannot be unpacked"),
    "zip overstates": (described("file_size", 2**45), "would unpack to 32,768.0 GiB; an upload takes 32.0 GiB"),
    "zip bomb": ([("x.zip", packed(("x.png", b"\0" * 2**22)))], "times its size, as no picture does"),
    "zip bomb among noise": (
        [("x.zip", packed(("noise.txt", os.urandom(2**17)), ("x.png", b"\0" * 2**22)))],
        "x.png would unpack to",
    ),
    "zip case": ([("x.zip", packed(("a.png", image(2)), ("A.PNG", image(3))))], "A.PNG has the name of a.png"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_with_a_sentence_and_nothing_is_written_outside(
    client: TestClient, root: Path, attack: str
) -> None:
    files, said = ATTACKS[attack]
    answer, left_out = put(client, [GOOD, *files])
    assert answer.status_code == 200 and any(said in each for each in left_out), left_out
    kept = {"accents": ["set/good.png", "set/\u00e9.png"], "zip case": ["set/a.png", "set/good.png"]}
    assert tree(root.parent.parent) == [f"outside/{root.name}/{each}" for each in kept.get(attack, ["set/good.png"])]
    assert not Path("/tmp/x.png").exists()
    assert not any(re.search("[\x00-\x08\x0b-\x1f\u202e\n]", each) for each in left_out), "sentences do not steer"


def test_limits_of_a_zip_file(client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MOST_FILES", 3)
    many = packed(*((f"{n}.png", image(n)) for n in range(9)))
    assert "x.zip holds 10 files; an upload takes 3" in put(client, [GOOD, ("x.zip", many)])[1][0]
    monkeypatch.setattr(upload, "DIRECTORY_BYTES", 100)
    assert "its list of entries is too long" in put(client, [GOOD, ("x.zip", many)])[1][0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../x", "leads out"), ("a/b", "is not a folder's name"), ("/etc", "leads out"), (".hidden", "is not a folder"),
        ("s3:", "Windows cannot use"), ("nul", "Windows cannot use"), ("run*s", "Windows cannot use"),
        ("x" * 300, "more than 200 bytes"),
        ("a\u202eb", "control or direction"), ("..", "leads out"),
    ],
)  # fmt: skip
def test_names_of_folders_that_are_refused(client: TestClient, root: Path, name: str, said: str) -> None:
    answer = client.post("/upload", data={"name": name}, headers=JSON)
    assert answer.status_code == 422 and said in answer.json()["problem"]
    assert tree(root.parent) == ["root"]


def test_a_folder_never_replaces_what_is_there(client: TestClient, root: Path) -> None:
    (root / "set").mkdir()
    (root / "set-2").write_text("a file")
    (root / "set-3").symlink_to("nowhere")
    assert put(client, [GOOD])[0].json()["folder"] == str(root / "set-4")
    assert put(client, [GOOD], "runs")[0].json()["folder"] == str(root / "runs-2"), "the runs' folder is not one"
    assert put(client, [GOOD], " ")[0].json()["folder"] == str(root / "pictures")
    assert tree(root / "set") == [] and (root / "set-2").read_text() == "a file"


def test_an_upload_without_a_usable_picture_leaves_nothing(client: TestClient, root: Path) -> None:
    answer, _ = put(client, [("x.png", b"none"), ("x.txt", b"a cat")])
    assert answer.status_code == 422
    assert "No picture could be used, so no folder was made: x.png is not a picture" in answer.json()["problem"]
    assert tree(root.parent) == ["root"]


def limited(name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(upload, name, value)


def full(*words: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (limited("MOST_FILES", 1), "The upload has more than 1 files"),
        (limited("MOST_BYTES", 150), "The upload is larger than 150 bytes"),
        (limited("flush_to_disk", full), "is full, so nothing of this upload was kept. Free some space"),
    ],
)
def test_what_fails_as_a_whole_ends_with_a_sentence_and_nothing_left(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    id = begin(client)
    assert send(client, id, *GOOD).status_code == 200
    assert len(tree(root)) == 1
    change(monkeypatch)
    answer = send(client, id, "b.png", image(9))
    assert answer.status_code == 422 and said in answer.json()["problem"] and answer.headers["connection"] == "close"
    assert tree(root.parent) == ["root"]
    for address in ("file?path=c.png", "finish"):
        assert client.post(f"/upload/{id}/{address}", headers=JSON).status_code == 404


def test_a_file_or_an_upload_that_is_too_large_is_refused_before_it_is_sent(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = begin(client)
    answer = client.post(f"/upload/{id}/file?path=x.txt&size=9000000", headers=JSON)
    assert answer.json()["left_out"] == ["x.txt has 9,000,000 bytes; the limit is 1,048,576"]
    assert "the limit is 1,048,576" in send(client, id, "x.txt", b"x" * 2_000_000).json()["left_out"][0]
    client.post(f"/upload/{id}/cancel")
    for size, said in ((2**40, "an upload takes 32.0 GiB"), (2**34, "are needed. Free some space")):
        monkeypatch.setattr(upload, "free_disk_bytes", lambda folder: 2**30)
        answer = client.post("/upload", data={"bytes": str(size)}, headers=JSON)
        assert answer.status_code == 422 and said in answer.json()["problem"]
    assert tree(root.parent) == ["root"]


@pytest.mark.parametrize(("then", "status"), [("lost", 499), ("silent", 408), ("cancelled", 200)])
def test_an_upload_that_stops_within_a_file_leaves_nothing(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch, then: str, status: int
) -> None:
    if then == "silent":
        monkeypatch.setattr(upload_page, "BODY_TIMEOUT", 0.05)
    id = begin(client)
    send(client, id, *GOOD)
    messages: list[Any] = [{"type": "http.request", "body": b"half of", "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        assert len(tree(root)) == 2, "the half is there"
        if then == "silent":
            await asyncio.sleep(60)
        if then == "cancelled":
            assert send(client, id, *GOOD).status_code == 409, "one file at a time"
            assert client.post(f"/upload/{id}/cancel").status_code == 204
            return {"type": "http.request", "body": b"the picture"}
        return {"type": "http.disconnect"}

    async def answer(message: Any) -> None:
        sent.append(message)

    headers = {"host": "127.0.0.1:8100", "origin": ADDRESS, **JSON}
    scope = {
        "type": "http", "method": "POST", "path": f"/upload/{id}/file", "query_string": b"path=b.png",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()], "http_version": "1.1",
    }  # fmt: skip
    asyncio.run(client.app(scope, receive, answer))  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    assert tree(root.parent) == ["root"]
    assert send(client, id, *GOOD).status_code == 404


def test_cancelled_abandoned_and_too_many_uploads(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = begin(client)
    send(client, id, *GOOD)
    assert client.post(f"/upload/{id}/cancel").status_code == 204
    assert client.post(f"/upload/{id}/cancel").status_code == 204
    assert tree(root.parent) == ["root"]
    assert all(begin(client) for _ in range(upload.MOST_OPEN))
    answer = client.post("/upload", data={"name": ""}, headers=JSON)
    assert "8 uploads are under way" in answer.json()["problem"]
    monkeypatch.setattr(upload, "IDLE", -1)
    begin(client)
    assert len(tree(root)) == 1, "abandoned ones are removed"


def test_only_the_page_itself_may_upload(root: Path) -> None:
    client = open_pages(root, token="secret")
    for headers, status in (
        ({"origin": "https://evil.example"}, 403), ({"origin": ""}, 403), ({"origin": "null"}, 403), ({}, 401),
    ):  # fmt: skip
        for address in ("/upload", "/upload/x/file?path=a.png", "/upload/x/finish", "/upload/x/cancel"):
            assert client.post(address, headers=headers, content=b"x").status_code == status
    assert client.get("/folders").status_code == 401
    assert tree(root.parent) == ["root"]


def test_what_a_killed_server_left_is_removed_at_the_next_start_and_at_the_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = temporary_path(root / f"{upload.HIDDEN}1", shared=True)
    ended = own.with_name(own.name.replace(f"-{os.getpid()}.", "-999999999."))
    other = own.with_name(own.name.replace(f"-{os.getpid()}.", "-1."))
    foreign = root / ".film.part"
    for each in (own, ended, other, foreign):
        each.mkdir()
        (each / "a.png").write_bytes(GOOD[1])
    os.utime(foreign, (0, 0))
    seen: list[list[str]] = []

    def serve(self: app.PageServer, sockets: list[Any]) -> None:
        seen.append(sorted(each.name for each in root.iterdir()))
        own.mkdir()
        sockets[0].close()

    monkeypatch.setattr(app.PageServer, "run", serve)
    app.run(argparse.Namespace(runs=root / "runs", root=[root], host="127.0.0.1", port=0, token=False))
    assert seen == [sorted([other.name, foreign.name])], "another server's and other programs' files stay"
    assert not own.exists()


def test_a_root_that_cannot_be_written_is_said(client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    answer = client.post("/upload", data={"name": ""}, headers=JSON)
    assert f"{root} cannot be written to (Permission denied). Start the page with" in answer.json()["problem"]


def test_folders_are_listed_level_by_level_with_their_pictures(client: TestClient, root: Path, tmp_path: Path) -> None:
    put(client, [GOOD, ("sub/b.png", image(2)), ("sub/c.png", image(3)), ("good.txt", b"a cat")], "b")
    (root / "b").rename(root / "<b>")
    for name in (".hidden", "runs", "empty"):
        (root / name).mkdir()
    (root / "link").symlink_to(tmp_path)
    os.mkdir(os.fsencode(root) + b"/\xff")
    page = client.get("/folders").text
    assert re.findall(r'aria-label="Open ([^"]*)"', page) == ["&lt;b&gt;", "empty"]
    assert "One level up" not in page and "1 picture<" in page and "0 pictures" in page
    page = client.get(f"/folders?folder={quote(str(root / '<b>'))}").text
    assert "One level up" in page and "Use this folder" in page and "2 pictures" in page and 'Open sub"' in page
    page = client.get(f"/folders?folder={quote(str(root))}").text
    assert "0 pictures, 1 in folders below" in page and "Use this folder" in page
    assert "no pictures here" in client.get("/folders?folder=empty").text
    for outside in ("..", "/etc", "link", "nothing", "\0"):
        assert client.get(f"/folders?folder={quote(outside)}").status_code == 422, outside
    two = make_roots(root / "runs", [root / "empty", root / "<b>"])
    top = list_folders(two, "")
    assert [each.path for each in top.folders] == [root / "empty", root / "<b>"] and top.above is None
    assert list_folders(two, str(root / "empty")).above == ""
    with pytest.raises(UserError, match="outside of the folders"):
        list_folders(two, str(root))


def test_both_pages_offer_the_kinds_of_files_that_are_read(client: TestClient) -> None:
    for address in ("/start", "/data"):
        accept = re.search(r'id="upload-files" multiple accept="([^"]*)"', client.get(address).text)
        assert accept is not None
        kinds = {kind.removeprefix("metadata") for kind in upload.LIMITS}
        assert set(accept[1].split(",")) == kinds
    assert set(json.loads(client.post("/upload", data={"name": ""}, headers=JSON).text)["limits"]) == set(upload.LIMITS)
    assert unicodedata.is_normalized("NFC", upload.new_folder_name("e\u0301"))


def test_no_entry_of_a_zip_file_takes_more_memory_than_it_claims(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever method packed 16 MiB of zeros that claim to be one MiB."""
    monkeypatch.setattr(upload, "read_regular", Path.read_bytes)  # the real one asks for room up to its limit
    for name, method in (("deflate", zipfile.ZIP_DEFLATED), ("bz2", zipfile.ZIP_BZIP2), ("lzma", zipfile.ZIP_LZMA)):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(zipfile.ZipInfo("bomb.png"), bytes(2**24), method)
            archive.filelist[0].file_size = 2**20
        tracemalloc.start()
        try:
            put(client, [(f"{name}.zip", content.getvalue()), GOOD], name)
            assert tracemalloc.get_traced_memory()[1] < 2**23, name
        finally:
            tracemalloc.stop()
    assert tree(root) == ["bz2/good.png", "deflate/good.png", "lzma/good.png"]


def test_a_folder_is_tried_to_be_removed_once_however_many_captions_leave_it(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    removedirs = os.removedirs
    monkeypatch.setattr(os, "removedirs", lambda place: (tried.append(Path(place).name), removedirs(place)))
    stray = [(f"{place}/{n}.txt", b"a cat") for place in ("sub", "sub/empty") for n in range(20)]
    answer, _ = put(client, [GOOD, ("sub/b.png", image(2)), *stray])
    assert len(answer.json()["left_out"]) == 40 and tree(root) == ["set/good.png", "set/sub/b.png"]
    assert sorted(tried) == ["empty", "sub"] and not (root / "set" / "sub" / "empty").exists()


def test_without_a_root_uploads_leave_a_checkout_clean_and_older_folders_are_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(live.Estimator, "want", lambda *_: None)
    (root / "old").mkdir()
    (root / "old" / "a.png").write_bytes(image())
    roots = make_roots(Path("runs"), [])
    assert (roots.named, roots.uploads) == ((root,), root / "data")
    pages, _ = app.make_app(roots, Access({"127.0.0.1"}))
    client = TestClient(pages, base_url=ADDRESS, headers={"origin": ADDRESS})
    app.clean(roots)  # before there is such a folder
    assert f"It goes into {root / 'data'}." in client.get("/start").text
    assert put(client, [GOOD])[0].json()["folder"] == str(root / "data" / "set")
    assert tree(root) == ["data/set/good.png", "old/a.png"]
    shown = client.get("/data").text
    assert f"It goes into {root / 'data'}." in shown
    assert re.findall(r'<option value="([^"]*)"', shown) == [str(root / "data" / "set"), str(root / "old")]
    assert client.get("/data?place=data/set").status_code == client.get("/data?place=old").status_code == 200
    left = temporary_path(root / "data" / f"{upload.HIDDEN}x", shared=True)
    left.mkdir()
    app.clean(roots)
    assert not left.exists()
    ignored = (Path(upload.__file__).parents[3] / ".gitignore").read_text().splitlines()
    assert "/data/" in ignored and make_roots(Path("runs"), [root / "old"]).uploads == root / "old"
