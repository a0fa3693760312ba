"""A million rows: how soon the first step is done, and how much memory the rows take (``-s`` prints the figures)."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from stream_data import write_mds

from simpletune.config.load import validate
from simpletune.pipeline.stream_plan import stream_plan

ROWS, BYTES = 1_000_000, 1024
pytestmark = pytest.mark.slow


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
    before, start = resident(), time.perf_counter()
    plan = stream_plan(config)
    plan.micro_batch(0, 0)
    opened, seconds = resident(), time.perf_counter() - start
    seen, most, held = 0, 0.0, resident()
    begun = time.perf_counter()
    for step in range(0, plan.steps_per_epoch):
        draws = plan.micro_batch(step, 0)
        seen += len(draws)
        if step % 25 == 0:  # the pictures of every 25th step
            assert all(len(draw.view.picture.read_same()) > 900 for draw in draws)
        if step == 10_000:
            held = resident()
        most = max(most, resident()) if step % 1000 == 0 else most
    pace = seen / (time.perf_counter() - begun)
    print(
        f"{million.name}: plan of {len(plan.samples):,} rows in {seconds:.1f} s, {opened - before:.0f} MiB; an epoch "
        f"{most - opened:.0f} MiB more, {most - held:.0f} of them after step 10,000; {pace:,.0f} samples a second"
    )
    assert seen == ROWS and opened - before < 300 and most - held < 200


def test_the_first_step_is_done_within_30_seconds(
    million: Path, tiny_config: dict, write_config, tmp_path: Path
) -> None:
    data = {**tiny_config, "data": data_of(million), "train": {"steps": 20, "batch_size": 4}}
    file = write_config(data)
    start = time.time()
    command = [sys.executable, "-m", "simpletune", "train", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    run = Path(data["output"]["runs"]) / "tiny"
    summary = json.loads((run / "summary.json").read_text())
    whole = time.time() - start
    first = summary["seconds_setup"]
    print(
        f"{million.name}: set-up {first:.1f} s, with 20 steps {whole:.1f} s, {summary['peak_rss_gib']:.2f} GiB at most"
    )
    assert whole < 30
