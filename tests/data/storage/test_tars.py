"""Tar files as a data set in shards: rows, captions, sizes, what is left out, damage, and limits against bombs."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stream_data import add_member, image, rows_of, write_tars

from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.data.sources.source import UnusableImage
from simpletune.data.storage import tars
from simpletune.data.storage.dataset import open_rows
from simpletune.data.storage.rows import Columns, ShardedRows
from simpletune.data.storage.shard_files import split_url
from simpletune.system.options import UserError

COLUMNS = Columns("image", "text", ("width", "height"))
KINDS = [".tar", ".tar.gz", ".tgz"]


def cells(rows: ShardedRows) -> list[tuple[object, object]]:
    return [(rows.image(number), rows.caption(number)) for number in range(len(rows))]


def tar_of(file: Path, members: dict[str, bytes], change: Callable[[tarfile.TarFile], None] = lambda tar: None) -> Path:
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w:gz" if file.suffix.endswith("gz") else "w") as tar:
        for name, data in members.items():
            add_member(tar, name, data)
        change(tar)
    return file


@pytest.mark.parametrize("suffix", KINDS)
def test_the_rows_of_several_tars_are_found_by_their_number(suffix: str, tmp_path: Path) -> None:
    expected, place = rows_of(20), write_tars(tmp_path / "tars", rows_of(20), suffix=suffix)
    for path in (place, f"{place}/*{suffix}", f"file://{place}"):
        rows = open_rows(str(path), COLUMNS, local=tmp_path / "kept")
        assert cells(rows) == [(row["image"]["bytes"], row["text"]) for row in expected]
        assert rows.sizes().tolist() == [[row["width"], row["height"]] for row in expected] and not rows.notes()
        again = open_rows(str(path), COLUMNS, local=tmp_path / "kept")  # as a resumed run does
        keys = [[each.key(row) for row in range(20)] for each in (rows, again)]
        assert rows.name(8) == f"train-00001{suffix}#000001" and len(set(keys[0])) == 20 and keys[0] == keys[1]
    assert len(open_rows(str(place), COLUMNS, split="00002")) == 6
    assert {file.name for file in place.iterdir()} == {f"train-0000{shard}{suffix}" for shard in range(3)}


def test_a_url_may_name_one_tar() -> None:
    assert split_url("s3://b/x/train-0.tar.gz") == ("s3://b/x", "train-0.tar.gz")


def test_a_large_tar_is_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "BLOCKS_IN_MEMORY", 300)
    rows = open_rows(str(write_tars(tmp_path / "tars", rows_of(20))), COLUMNS)
    assert len(rows.starts) > 8 and rows.starts[-1] == 20
    assert cells(rows) == [(row["image"]["bytes"], row["text"]) for row in rows_of(20)]


def test_the_members_of_a_tar_are_counted_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Millions of empty members compress to a few megabytes, and take minutes to read."""
    monkeypatch.setattr("simpletune.system.console.PLAIN_EVERY", 0.0)
    members = {"1.png": image(1), **{f"{number}.x": b"" for number in range(9)}}
    rows = open_rows(str(tar_of(tmp_path / "a.tar.gz", members)), COLUMNS)
    assert len(rows) == 1
    assert re.search(r"^reading a.tar.gz: 10 members in 0 s, the last 8.x$", capsys.readouterr().out, re.MULTILINE)


def test_members_of_one_name_are_a_row_wherever_they_lie(tmp_path: Path) -> None:
    first, second = image(1), image(2)
    file = tar_of(tmp_path / "a.tar", {
        "a/1.txt": b"of a/1", "b/1.JPG": second, "a/1.json": b'{"text": "no", "title": ["x", "y"], "n": 3}',
        "a/1.cover.png": second, "a/1.png": first, ".DS_Store": b"x", "a/._1.png": b"x",
        "b/1.json": b'{"text": "of b/1"}', "notes.md": b"x", "a/1.webp": second,
    })  # fmt: skip
    rows = open_rows(str(file), COLUMNS)
    assert cells(rows) == [(first, "of a/1"), (second, "of b/1")]
    assert [rows.name(0), rows.name(1)] == ["a.tar#a/1", "a.tar#b/1"]
    assert rows.notes() == [f"1 name without a picture in {file}"]
    titled = open_rows(str(file), Columns("cover.png", "title"))
    assert cells(titled) == [(second, ["x", "y"])] and titled.key(0) != rows.key(0)
    with pytest.raises(UserError, match="data.image_column: .* no 'jp2', but .* end in .*cover.png.*Use one of these"):
        open_rows(str(file), Columns("jp2", None))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, "has no caption: no .txt and no .json has its name"),
        ({"1.json": b"{"}, "its .json is not JSON"),
        ({"1.json": b"[1]"}, "its .json has no fields. Set data.caption_column"),
        ({"1.json": b'{"title": "x", "url": "y"}'}, "no field 'text', but title, url. Set data.caption_column"),
        ({"1.txt": b" "}, "its text is empty"),
        ({"1.txt": b"\xff"}, "its text is not UTF-8 text"),
        ({"1.txt": bytes(2**20 + 1)}, "its caption has 1,048,577 bytes; the limit is 1,048,576"),
        ({"1.png": b"", "1.txt": b"x"}, "its cell contains no picture"),
        ({"1.png": image(1)[:60], "1.txt": b"x"}, "is damaged"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_reason(
    members: dict, reason: str, tiny_config: dict, tmp_path: Path
) -> None:
    file = tar_of(tmp_path / "a.tar", {"0.png": image(0), "0.txt": b"fine", "1.png": image(1), **members})
    data = {"source": "stream", "path": str(file), "resolution": 32}
    found = validate({**tiny_config, "data": data}, "tars").data.scan(file)
    assert [each.caption for each in found.images] == ["fine"]
    ((name, said),) = ((each.name, each.reason) for each in found.rejected)
    assert name == "a.tar#1" and reason in said
    assert open_rows(str(file), COLUMNS).sizes().tolist()[0] == [32, 32], "the sizes of the others are known"


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    about = tarfile.TarInfo(name)
    about.type, about.linkname = kind, target
    return about


def test_links_devices_and_names_that_lead_out_are_left_out_by_name(tmp_path: Path) -> None:
    def change(tar: tarfile.TarFile) -> None:
        for about in (
            special("secret.png", tarfile.SYMTYPE, "/etc/passwd"), special("hard.png", tarfile.LNKTYPE, "0.png"),
            special("disk.png", tarfile.BLKTYPE), special("pipe.png", tarfile.FIFOTYPE),
            special("folder", tarfile.DIRTYPE),
        ):  # fmt: skip
            tar.addfile(about)
        for name in ("/etc/1.png", "../2.png", "a/../../3.png"):
            add_member(tar, name, image(1))

    rows = open_rows(str(tar_of(tmp_path / "a.tar", {"0.png": image(0), "0.txt": b"x"}, change)), COLUMNS)
    assert len(rows) == 1
    (note,) = rows.notes()
    assert note.startswith("7 members left out, since links, devices") and note.endswith(
        "a.tar#secret.png, a.tar#hard.png, a.tar#disk.png, a.tar#pipe.png, a.tar#/etc/1.png and 2 more"
    )


def sized(data: bytes, size: bytes, kind: bytes | None = None, at: int = 0) -> bytes:
    """A tar whose member at a place announces another size, or is of another kind."""
    head = bytearray(data[at : at + 512])
    head[124:136], head[148:156] = size, b" " * 8
    head[156:157] = kind or head[156:157]
    head[148:156] = b"%06o\0 " % sum(head)
    return data[:at] + bytes(head) + data[at + 512 :]


DAMAGES = {
    "within data": lambda data: data[: 512 + 60],
    "within a head": lambda data: data[:1024 + 100],
    "no end": lambda data: data[: len(data) - len(data) % 512].rstrip(b"\0").ljust(2048, b"\0")[:2048],
    "a head of zeros and noise": lambda data: data[:1024] + b"noise" * 103 + data[1539:],
    "no tar": lambda data: b"<html>" * 400,
    "empty": lambda data: b"",
    "more than the file": lambda data: sized(data, b"77777777777\0"),
    "its members overlap": lambda data: sized(data, (-512).to_bytes(12, "big", signed=True), at=1024),
    "head of a member has 8,589,934,592 bytes": lambda data: sized(data, b"77777777777\0", b"x"),
    "head of a member has -512 bytes": lambda data: sized(data, (-512).to_bytes(12, "big", signed=True), b"L"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
def test_a_damaged_tar_is_named_with_a_remedy(damage: str, suffix: str, tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "whole.tar", {"0.png": image(0), "0.txt": b"x", "1.png": image(1)}).read_bytes()
    data = DAMAGES[damage](whole)
    (tmp_path / f"b{suffix}").write_bytes(data if suffix == ".tar" else gzip.compress(data))
    with pytest.raises(UserError, match=rf"^data\.path: b{suffix} is damaged: .*\. Fetch or write it again$") as error:
        open_rows(f"{tmp_path}/b*", COLUMNS)
    assert damage in str(error.value) or "member" not in damage


@pytest.mark.parametrize(
    "change", [lambda data: data[:-40], lambda data: data[:60] + b"xyz" + data[63:], lambda data: b"x"]
)
def test_a_damaged_gzip_is_named_with_a_remedy(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tar_of(tmp_path / "a.tgz", {f"{number}.png": image(number) for number in range(8)})
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=r"^data\.path: a\.tgz is damaged: .*\. Fetch or write it again$"):
        open_rows(str(file), COLUMNS)


def test_a_compressed_tar_that_grows_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tar_of(tmp_path / "a.tgz", {"0.png": image(0), "0.txt": bytes(10**6)})
    monkeypatch.setattr(tars, "MAX_BLOCK", 10**5)
    with pytest.raises(
        UserError, match=r"a\.tgz decompresses to more than 100,000 bytes. Write smaller shards, or .tar"
    ):
        open_rows(str(file), COLUMNS)


def test_a_member_larger_than_a_picture_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_BYTES", 1000)
    rows = open_rows(str(tar_of(tmp_path / "a.tar", {"0.png": image(0), "1.png": bytes(2000)})), COLUMNS)
    assert rows.image(0) == image(0)
    with pytest.raises(UnusableImage, match="has 2,000 bytes; the limit is 1,000"):
        rows.image(1)


def test_a_changed_tar_has_other_keys(tmp_path: Path) -> None:
    file = tar_of(tmp_path / "a.tar", {"0.png": image(0)})
    before = open_rows(str(file), COLUMNS).key(0)
    tar_of(file, {"0.png": image(0)[:-1] + b"x"})
    assert open_rows(str(file), COLUMNS).key(0) != before


WHOLE = io.BytesIO()
with tarfile.open(fileobj=WHOLE, mode="w", format=tarfile.PAX_FORMAT) as archive:
    add_member(archive, "ä" * 200 + ".png", image(0))
    add_member(archive, "1.png", image(1))
    add_member(archive, "1.txt", b"x")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0.1, 1))
def test_any_tar_is_read_or_refused(tmp_path: Path, seed: int, count: int, kept: float) -> None:
    chance, data = random.Random(seed), bytearray(WHOLE.getvalue())
    for _ in range(count):
        at = chance.randrange(0, 4096)
        data[at] = chance.randrange(256)
        if chance.random() < 0.8:  # with a checksum that fits
            start = at // 512 * 512
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    (tmp_path / "a.tar").write_bytes(data[: int(kept * len(data))])
    try:
        rows = open_rows(str(tmp_path / "a.tar"), COLUMNS)
        for row in range(len(rows)):
            try:
                assert rows.sizes()[row].all() and rows.image(row) and rows.caption(row)
            except UnusableImage:
                continue
    except UserError as reason:
        assert str(reason).startswith("data.")


def test_check_and_data_know_tars(
    tiny_config: dict, write_config, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = write_tars(tmp_path / "tars", rows_of(9), suffix=".tgz")
    file = str(write_config({**tiny_config, "data": {"source": "stream", "path": str(place), "resolution": 32}}))
    assert main(["check", file]) == 0 and main(["data", file, "--json"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said[said.index("\n{") :])
    assert len(found["usable"]) == 9 and not found["unusable"]
    (place / "train-00001.tgz").write_bytes(b"")
    assert main(["check", file]) == 2
    assert "data.path: train-00001.tgz is damaged" in capsys.readouterr().err
