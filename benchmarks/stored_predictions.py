"""Write the predictions that ship with the package (``make predictions``): see ``simpletune/estimate/stored.py``.

    python -m benchmarks.stored_predictions

Computes the rows of the grid that are missing. If only the sources changed, it first computes a sample of the stored
rows again, and keeps them all if these come out equal.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from simpletune.config.compute import settle_compute
from simpletune.config.load import shipped_files, shipped_names
from simpletune.config.schema import TrainConfig
from simpletune.estimate import stored
from simpletune.estimate.estimate_command import read_for_estimate
from simpletune.estimate.job_estimate import attention_of
from simpletune.estimate.simulate.reports import L4
from simpletune.system.atomic import atomic_file
from simpletune.system.console import say, silence
from simpletune.system.options import Json, UserError, plural
from simpletune.system.startup import ensure_libraries

# Every shipped configuration of few micro-batches as it is, and of those to choose from the LoRAs for a person's own
# pictures with one of these changes.
GRID = {"adapter.rank": (4, 8, 16, 32, 64), "train.batch_size": (1, 2, 4), "data.resolution": (512, 768, 1024)}
CHANGED = re.compile("(?!sdxl).*_lora")  # not of SDXL: its rows take twice SD3's time
MOST_MICRO_BATCHES = 8  # each is simulated: the 128 of a training from scratch take minutes
SAMPLE = 5  # rows that are computed again before rows of other sources are kept
PROCESSES, SAVED = 2, 4  # processes; rows after which the file is written


class Row(NamedTuple):
    """A prediction to store, for cards with the attention of an L4: all with bf16."""

    key: str
    file: str
    overrides: tuple[str, ...]


def grid() -> Iterator[Row]:
    """Yield the rows of the shipped configurations, then those of the changes, each key once."""
    seen = set()
    changes = [f"{setting}={value}" for setting, values in GRID.items() for value in values]
    wanted: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in shipped_files()]
    changed = filter(CHANGED.match, shipped_names())
    for file, overrides in [*wanted, *((name, (change,)) for name in changed for change in changes)]:
        try:
            config = settled(file, overrides)
        except UserError:  # the model takes no pictures of that size, for instance
            continue
        key = stored.prediction_key(config, attention_of(config, L4))
        if key not in seen and config.train.accumulation <= MOST_MICRO_BATCHES:
            seen.add(key)
            yield Row(key, file, overrides)


def settled(file: str, overrides: tuple[str, ...]) -> TrainConfig:
    """Read a row's configuration as ``estimate`` does. UserError: it is invalid."""
    with silence():
        return settle_compute(read_for_estimate(Path(file), overrides), L4)


def compute(row: Row) -> tuple[Row, str]:
    """Simulate a row's job; return it as JSON, without what differs from machine to machine."""
    ensure_libraries()
    import torch

    from simpletune.estimate.simulate.simulate_stages import simulate_parts

    torch.set_num_threads(1)
    job = simulate_parts(settled(row.file, row.overrides), capability=L4).as_json()
    job["train"]["seconds"] = 0.0
    return row, json.dumps(job, separators=(",", ":"))


def read(file: Path) -> dict[str, str]:
    """Read the stored rows by key."""
    if not file.exists():
        return {}
    with zipfile.ZipFile(file) as rows:
        return {Path(name).stem: rows.read(name).decode() for name in rows.namelist() if name != stored.ABOUT}


def write(file: Path, about: Json, rows: Mapping[str, str]) -> None:
    """Write rows and what they were made with; equal rows make an equal file."""
    with atomic_file(file) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name, text in [(stored.ABOUT, json.dumps(about)), *((f"{key}.json", rows[key]) for key in sorted(rows))]:
            out.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)  # of a fixed date


def sample(rows: Sequence[Row], seed: str) -> list[Row]:
    """Draw some rows by a hash of the sources."""
    return random.Random(seed).sample(rows, min(SAMPLE, len(rows)))


def update(file: Path, rows: Sequence[Row], simulate: Callable[[Sequence[Row]], Iterable[tuple[Row, str]]]) -> None:
    """Bring a file up to date with today's sources and the installed libraries, for these rows.

    Args:
        simulate: ``compute`` of each of some rows, in any order.
    """
    hashes = {"sources": stored.hash_sources(), "bytes": stored.hash_sources(parsed=False)}
    about: Json = {"versions": stored.versions(), **hashes}
    made, before = stored.read_about(file), read(file)
    known = {row.key: before[row.key] for row in rows if row.key in before}
    if made.get("versions") != about["versions"]:
        known = {}
    elif made["sources"] != about["sources"]:
        drawn = sample([row for row in rows if row.key in known], about["sources"])
        changed = [row.file for row, text in simulate(drawn) if text != known[row.key]]
        say(f"sample  {len(drawn)} of {plural(len(known), 'row')} again, changed: {', '.join(changed) or 'none'}")
        known = {} if changed else known
    missing = [row for row in rows if row.key not in known]
    say(f"compute {len(missing)} of {plural(len(rows), 'row')}")
    for number, (row, text) in enumerate(simulate(missing), 1):
        known[row.key] = text
        say(f"row     {number} {row.file} {' '.join(row.overrides)}".rstrip())
        if number % SAVED == 0:  # a run that is stopped continues from here
            write(file, about, known)
    write(file, about, known)


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        update(stored.FILE, list(grid()), lambda rows: pool.imap_unordered(compute, rows))
