"""Data sets in shards for tests: parquet and tar files, the committed MDS shards, and an MDS writer of our own."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ASSETS = Path(__file__).resolve().parent / "assets" / "mds"
FORMS = ("plain", "zstd", "gz", "bare")
COUNT = 8  # samples of each committed data set


def image(number: int, alpha: bool = False) -> bytes:
    """The picture that assets/mds/make.py draws for a sample."""
    size = (96, 32) if number % 3 == 2 else (32, 32)
    pixels = np.full((size[1], size[0], 3), (20 * number + 5, 240 - 20 * number, 90), dtype=np.uint8)
    pixels[number : number + 8, 8:16] = 255
    file, image = io.BytesIO(), Image.fromarray(pixels)
    if alpha:
        image.putalpha(
            Image.fromarray(np.where(np.indices(pixels.shape[:2])[1] < size[0] // 2, 255, 0).astype(np.uint8))
        )
    image.save(file, "png")
    return file.getvalue()


def caption(number: int) -> str:
    """The caption that assets/mds/make.py writes for a sample."""
    return f"picture {number}, größer" if number == 5 else f"picture {number}"


def rows_of(count: int) -> list[dict]:
    """Rows as Hugging Face lays them out, with the pictures' sizes."""
    sizes = [Image.open(io.BytesIO(image(number % COUNT))).size for number in range(count)]
    return [
        {
            "image": {"bytes": image(number % COUNT), "path": f"{number}.png"},
            "text": f"row {number}",
            "width": sizes[number][0],
            "height": sizes[number][1],
        }
        for number in range(count)
    ]


def write_parquet(folder: Path, rows: Sequence[dict], shards: int = 3, group: int = 3) -> Path:
    """Write rows as several parquet files, with checksums of their pages."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(rows) // shards)
    for number in range(shards):
        part = pa.Table.from_pylist(list(rows[number * each : (number + 1) * each]))
        file = folder / f"train-{number:05d}-of-{shards:05d}.parquet"
        pq.write_table(part, file, row_group_size=group, write_page_checksum=True)
    return folder


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    tar.addfile(about, io.BytesIO(data))


def write_tars(folder: Path, rows: Sequence[dict], shards: int = 3, suffix: str = ".tar") -> Path:
    """Write rows as several tar files, with captions in turn beside the picture as .txt and in a .json."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-len(rows) // shards)
    for shard in range(shards):
        file = folder / f"train-{shard:05d}{suffix}"
        with tarfile.open(file, "w" if suffix == ".tar" else "w:gz") as tar:
            for number, row in enumerate(rows[shard * each : (shard + 1) * each]):
                add_member(tar, f"{number:06d}.png", row["image"]["bytes"])
                text = ("txt", row["text"]) if number % 2 else ("json", json.dumps({"text": row["text"], "seen": 3}))
                add_member(tar, f"{number:06d}.{text[0]}", text[1].encode())
    return folder


def copy_mds(form: str, folder: Path) -> Path:
    """A copy of a committed MDS data set, to be damaged."""
    return Path(shutil.copytree(ASSETS / form, folder))


def write_mds(folder: Path, samples: Iterable[tuple[bytes, str]], each: int) -> Path:
    """Write pictures and captions as plain MDS shards with SHA-1 hashes, by the format's description alone."""
    folder.mkdir(parents=True)
    columns = {"column_names": ["image", "text"], "column_encodings": ["bytes", "str"], "column_sizes": [None, None]}
    config = json.dumps({"format": "mds", "version": 2} | columns).encode()
    shards, waiting = [], list[bytes]()

    def write() -> None:
        head = 4 * (len(waiting) + 2) + len(config)
        ends = head + np.cumsum([0, *map(len, waiting)])
        data = struct.pack("<I", len(waiting)) + ends.astype("<u4").tobytes() + config + b"".join(waiting)
        name = f"shard.{len(shards):05d}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}
        about = {"format": "mds", "version": 2, "compression": None, "hashes": ["sha1"], "size_limit": None}
        shards.append(about | columns | {"raw_data": raw, "zip_data": None, "samples": len(waiting)})
        waiting.clear()

    for data, text in samples:
        encoded = text.encode()
        waiting.append(struct.pack("<II", len(data), len(encoded)) + data + encoded)
        if len(waiting) == each:
            write()
    if waiting:
        write()
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder
