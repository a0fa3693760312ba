"""A million rows: how soon the first step is done, and how much memory the rows take (``-s`` prints the figures)."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from stream_data import write_mds

from simpletune.config.load import validate
from simpletune.data.samples import Crop
from simpletune.data.sources.source import RejectedEntry
from simpletune.stages.stream_encode import StreamEncoder
from simpletune.stages.stream_plan import stream_plan

ROWS, BYTES = 1_000_000, 1024
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def samples(count: int) -> Iterator[tuple[bytes, str]]:
    """Pictures of 16 px and captions of their own, 1 KiB a sample: a thousand pictures, padded behind their end."""
    noise, known = np.random.default_rng(0), []
    for _ in range(1000):
        file = io.BytesIO()
        Image.fromarray(noise.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(file, "png")
        known.append(file.getvalue())
    for number in range(count):
        caption = f"picture number {number}"
        yield known[number % 1000].ljust(BYTES - len(caption), b"\0"), caption


def write_rows(kind: str, folder: Path, count: int) -> Path:
    if kind == "mds":
        return write_mds(folder, samples(count), each=2**26 // BYTES)
    folder.mkdir()
    schema = pa.schema({"image": pa.binary(), "text": pa.string()})
    with pq.ParquetWriter(folder / "rows.parquet", schema) as out:
        columns: tuple[list, list] = ([], [])
        for number, sample in enumerate(samples(count)):
            for column, value in zip(columns, sample, strict=True):
                column.append(value)
            if number % 10_000 == 9_999:
                out.write_table(pa.table(list(columns), schema=schema))
                columns = ([], [])
    return folder


@pytest.fixture(scope="module", params=["mds", "parquet"])
def million(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(request.param, tmp_path_factory.mktemp("million") / request.param, ROWS)


def resident() -> float:
    """MiB of this process in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def data_of(place: Path) -> dict:
    return {"source": "stream", "path": str(place), "resolution": 32, "aspect": "square"}


def test_memory_stays_flat_over_a_million_rows(million: Path, tiny_config: dict) -> None:
    config = validate({**tiny_config, "data": data_of(million), "train": {"steps": 250_000, "batch_size": 4}}, "rows")
    before, start = resident(), time.process_time()
    plan = stream_plan(config)
    plan.micro_batch(0, 0)
    opened, seconds = resident(), time.process_time() - start
    sizes, begun = list[float](), time.process_time()
    for step in range(0, plan.steps_per_epoch, 50):  # from one end of the epoch to the other
        for draw in plan.micro_batch(step, 0):
            assert len(draw.view.image.read_same()) > 900
        if step % 2500 == 0:
            sizes.append(resident())
    pace = 20_000 / (time.process_time() - begun)
    later = max(sizes[len(sizes) // 2 :]) - max(sizes[: len(sizes) // 2])
    print(
        f"{million.name}: plan of {len(plan.samples):,} rows in {seconds:.1f} s and {opened - before:.0f} MiB; 20,000 "
        f"rows over an epoch take {max(sizes) - opened:.0f} MiB more, {later:.0f} of them in its second half; "
        f"{pace:,.0f} rows per second of processor time"
    )
    assert opened - before < 200 and max(sizes) - opened < 400 and later < 100


class ReadOnly:
    """Caches that encode nothing: each picture is read once."""

    def __init__(self) -> None:
        self.read, self.prompts, self.text = 0, 0, self

    def fill_text(self, prompts: Sequence[str]) -> None:
        self.prompts += len(prompts)

    def fill_images(self, parts: Sequence[Sequence[Crop]]) -> list[RejectedEntry]:
        self.read += sum(len(view.image.read_same()) > 900 for views in parts for view in views)
        return []

    def truncated_prompts(self, prompts: Sequence[str]) -> list[str]:
        return []


def test_preparing_takes_memory_for_a_portion(million: Path, tiny_config: dict) -> None:
    config = validate({**tiny_config, "data": data_of(million), "train": {"steps": 25_000, "batch_size": 4}}, "rows")
    filling, sizes, start = StreamEncoder(config, stream_plan(config), ReadOnly()), list[float](), time.process_time()
    before = resident()
    for steps in range(2_500, 25_001, 2_500):
        filling.steps(steps - 2_500, steps)
        sizes.append(resident() - before)
    pace = filling.caches.read / (time.process_time() - start)
    print(
        f"{million.name}: MiB more after each 10,000 rows: {[round(size) for size in sizes]}; {pace:,.0f} rows a second"
    )
    assert filling.caches.read == filling.caches.prompts == 100_000
    held = 256 if million.name == "parquet" else 0  # row groups, up to ``rows.BLOCKS_IN_MEMORY``
    assert max(sizes) < 500 and sizes[-1] - max(sizes[:3]) < 50 + held


def test_the_first_step_is_done_within_30_seconds(million: Path, tiny_config: dict, write_config) -> None:
    file = write_config({**tiny_config, "data": data_of(million), "train": {"steps": 20, "batch_size": 4}})
    start, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "simpletune", "train", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-2000:]
    spent, after = time.time() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads((Path(tiny_config["output"]["runs"]) / "tiny" / "summary.json").read_text())
    print(
        f"{million.name}: {summary['seconds_setup']:.1f} s to the first step, {spent:.1f} s in all, {busy:.1f} s of "
        f"processor time, {summary['peak_rss_gib']:.2f} GiB"
    )
    assert busy < 30, "so the first step is there within 30 s of an idle machine"
