"""Compressed files of a data set: every codec against its own library, and damage in words."""

from __future__ import annotations

import bz2
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from simpletune.data.storage.mds import decompress
from simpletune.data.storage.shard_files import DataFiles
from simpletune.system.options import UserError
from simpletune.system.stores.object_store import ObjectStore
from simpletune.system.stores.store import StoreError

PLAIN = bytes(range(256)) * 20
PACKED = {
    "zstd:3": bytes(pa.compress(PLAIN, codec="zstd", asbytes=True)),
    "snappy": bytes(pa.compress(PLAIN, codec="snappy", asbytes=True)),
    "br:5": bytes(pa.compress(PLAIN, codec="brotli", asbytes=True)),
    "gz:9": gzip.compress(PLAIN),
    "bz2": bz2.compress(PLAIN),
}


@pytest.mark.parametrize("how", PACKED)
def test_a_file_comes_back_and_damage_is_named(how: str) -> None:
    assert decompress(PACKED[how], how, len(PLAIN), "shard.0.mds") == PLAIN
    for damaged in (b"\x07" * 60, PACKED[how][:40]):
        with pytest.raises(UserError, match=r"^data\.path: shard\.0\.mds is damaged: .* Fetch it again"):
            decompress(damaged, how, len(PLAIN), "shard.0.mds")


@pytest.mark.parametrize("how", ["gz", "bz2"])
def test_a_file_larger_than_announced_is_not_unpacked_to_its_end(how: str) -> None:
    """One byte more than announced is enough to refuse it."""
    bomb = (gzip.compress if how == "gz" else bz2.compress)(bytes(10**6))
    with pytest.raises(UserError, match="it decompresses to 1,001 bytes instead of 1,000. Fetch it again"):
        decompress(bomb, how, 1000, "x")
    with pytest.raises(UserError, match="it decompresses to 1,000,000 bytes instead of 2,000,000"):
        decompress(bomb, how, 2 * 10**6, "x")


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"x is compressed with 'lzma:6', .*Use zstd, snappy, br, gz, bz2"):
        decompress(b"", "lzma:6", 0, "x")


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(5, "Input/output error"), "data.path: hf://x cannot be read ("),
        (ValueError("bad name"), "data.path: hf://x cannot be read (ValueError: bad name). Check the name, the connec"),
        (OSError("hf_" + "a" * 34 + " is no token"), "data.path: hf://x cannot be read ("),
        (KeyError("x"), None),  # other errors pass as they are
        (UserError("said already"), None),
    ],
    ids=repr,
)
def test_what_the_hub_refuses_is_named_without_secrets(
    error: Exception, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: SimpleNamespace(find=refusing(error)))
    words = re.escape(said) if said else f"^{re.escape(str(error))}$"
    with pytest.raises(UserError if said else type(error), match=words) as caught:
        DataFiles("hf://x")
    assert said is None or (caught.value.code == 3 and "aaaa" not in str(caught.value))


def refusing(error: Exception) -> Callable[..., None]:
    """A method that raises an error."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def test_a_store_that_fails_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "versions", refusing(StoreError("listing a in s3://b failed")))
    said = "^data.path: listing a in s3://b failed. Check the name, the connection and the token, and start again$"
    with pytest.raises(UserError, match=said) as caught:
        DataFiles("memory:///")
    assert caught.value.code == 3


def test_two_stars_of_a_pattern_match_folders_and_one_does_not(tmp_path: Path) -> None:
    for name in ("a.bin", "x/a.bin", "x/y/a.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    found = {
        pattern: sorted(DataFiles(f"{tmp_path}/{pattern}").sizes()) for pattern in ("*.bin", "**/*.bin", "*/*.bin")
    }
    assert found == {"*.bin": ["a.bin"], "**/*.bin": ["a.bin", "x/a.bin", "x/y/a.bin"], "*/*.bin": ["x/a.bin"]}
