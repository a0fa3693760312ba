"""The index of an MDS data set: what it announces is checked before anything is reserved or read."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from stream_data import copy_mds

from simpletune.data.storage.mds import read_index
from simpletune.system.options import UserError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 2**32 - 1}, "4,294,967,295 samples do not fit into the"),
        ({"samples": 1e400}, "inf is no length"),
        ({"samples": True}, "True is no length"),
        ({"column_sizes": [1e400, None, None, None]}, "is no length"),
        ({"column_sizes": ["8", None, None, None]}, "is no length"),
        ({"column_sizes": 3}, "not iterable"),
        ({"compression": True}, "the compression True"),
        (
            {"compression": "zstd", "raw_data": {"basename": "a", "bytes": 2**30, "hashes": {}},
             "zip_data": {"basename": "a.zstd", "bytes": 32787, "hashes": {}}},
            "a grows to 1,073,741,824 bytes, over 1,000 times what is stored",
        ),
        ({"raw_data": {"basename": "a", "bytes": -1, "hashes": {}}}, "-1 is no length"),
    ],
)  # fmt: skip
@pytest.mark.timeout(120)
def test_what_cannot_be_is_refused(changes: dict, words: str, tmp_path: Path) -> None:
    place = copy_mds("plain", tmp_path / "plain")
    index = json.loads((place / "index.json").read_text())
    count = len(index["shards"][0]["column_names"])
    for name, value in changes.items():
        index["shards"][0][name] = value[:1] + [None] * (count - 1) if isinstance(value, list) else value
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=f"is not the index of an MDS data set .*{words}"):
        read_index(json.dumps(index).encode(), "index.json")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


@pytest.mark.parametrize("size", [0, 3, None, 16])
def test_a_column_of_numbers_has_their_width(size: int | None, tmp_path: Path) -> None:
    place = copy_mds("plain", tmp_path / "plain")
    index = json.loads((place / "index.json").read_text())
    shard = index["shards"][0]
    number = next(at for at, kind in enumerate(shard["column_encodings"]) if "int" in kind)
    shard["column_sizes"][number] = size
    with pytest.raises(UserError, match="no length|a column of"):
        read_index(json.dumps(index).encode(), "index.json")
