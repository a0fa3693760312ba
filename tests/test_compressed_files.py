"""Compressed files of a data set: every codec against its own library, and damage in words."""

from __future__ import annotations

import bz2
import gzip
import re

import pyarrow as pa
import pytest

from simpletune.data.streaming.compression import decompress
from simpletune.data.streaming.remote_files import reaching
from simpletune.system.options import UserError
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
    with pytest.raises(UserError, match=r"^data\.path: shard\.0\.mds is damaged: .* Fetch it again"):
        decompress(b"\x07" * 60, how, len(PLAIN), "shard.0.mds")
    with pytest.raises(UserError, match=r"^data\.path: shard\.0\.mds is damaged: .* Fetch it again"):
        decompress(PACKED[how][:40], how, len(PLAIN), "shard.0.mds")


@pytest.mark.parametrize("how", ["gz", "bz2"])
def test_a_file_larger_than_announced_is_not_unpacked_to_its_end(how: str) -> None:
    """One byte more than announced is enough to refuse it."""
    bomb = (gzip.compress if how == "gz" else bz2.compress)(bytes(10**6))
    with pytest.raises(UserError, match="it decompresses to 1,001 bytes instead of 1,000. Fetch it again"):
        decompress(bomb, how, 1000, "x")
    with pytest.raises(UserError, match="it decompresses to 1,000,000 bytes instead of 2,000,000"):
        decompress(bomb, how, 2 * 10**6, "x")


def test_an_unknown_algorithm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UserError,
        match=r"x is compressed with 'lzma:6', which is unsupported\. Use zstd, snappy, br, gz, bz2",
    ):
        decompress(b"", "lzma:6", 0, "x")


@pytest.mark.parametrize(
    "error, said",
    [
        (StoreError("listing a in s3://b failed"), "data.path: listing a in s3://b failed. Check the connection and"),
        (OSError(5, "Input/output error"), "data.path: hf://x cannot be read ("),
        (ValueError("bad name"), "data.path: hf://x cannot be read (ValueError: bad name). Check the name, the connec"),
        (OSError("hf_" + "a" * 34 + " is no token"), "data.path: hf://x cannot be read ("),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_reached_is_named_without_secrets(error: Exception, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught, reaching("hf://x"):
        raise error
    assert caught.value.code == 3 and "aaaa" not in str(caught.value)


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(KeyError), reaching("hf://x"):
        raise KeyError("x")
    with pytest.raises(UserError, match="^said already$"), reaching("hf://x"):
        raise UserError("said already")
