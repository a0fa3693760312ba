"""``remote-cache``: samples per second from the cache, at SD3 Medium's sizes for 1024 px.

A sample is a latent of 1.0 MiB in fp32, T5's 256 tokens (2.0 MiB in bf16, 1.06 in int8) and CLIP's 77 (0.3 MiB). Every
row is a separate process. From a web server each sample is read once, with an empty local copy; the server is another
process on this machine, whose processor time does not count, and may delay each response like a distant one.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.table import Results, describe_machine
from simpletune.data.storage.cache import Cache
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.data.storage.shard_cache import SamplePrefetcher, ShardCache
from simpletune.data.storage.shard_index import SampleIndex, write_rows
from simpletune.data.storage.shards import SampleLocation
from simpletune.models.shared.prompts import pack
from simpletune.system.console import say
from simpletune.system.options import Json

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "latents": {"z_0": (16, 128, 128)},
    "prompts": {"clip_g": (77, 1280), "clip_l": (77, 768), "t5": (256, 4096)},
}
BATCH = 4
STEPS = 75
LIMIT = 2**28  # bytes of the local part
MILLION = 1_000_000


@dataclass(frozen=True)
class Way:
    """A way of reading.

    Args:
        form: ``files``, ``shards`` or ``web``.
        int8: whether T5's embeddings are in int8.
        delay: seconds before each answer of the web server.
        pace: samples a second that the steps ask for; 0: as many as possible.
    """

    form: str
    int8: bool = False
    delay: float = 0.0
    pace: float = 0.0


ROWS: dict[str, Way] = {
    "files in a folder": Way("files"),
    "shards in a folder": Way("shards"),
    "web server": Way("web"),
    "web server, int8": Way("web", int8=True),
    "web server, 20 ms an answer": Way("web", delay=0.02),
    "web server, 20 ms an answer, 35 samples a second asked for": Way("web", delay=0.02, pace=35.0),
}
INDEX = "index of 1,000,000 samples"
COLUMNS = {
    "row": "from", "mib": "MiB a sample", "rate": "samples a second", "mb": "MB a second",
    "cpu": "processor seconds a sample", "waited": "seconds waited per step, mean", "longest": "longest wait, s",
    "grown": "memory grown after step 20, MiB",
}  # fmt: skip
INDEX_COLUMNS = {"row": "", "mb": "MB in memory", "file_mb": "MB on the disk", "seconds": "seconds to read",
                 "micros": "µs to find a sample"}  # fmt: skip


def run(out: Path, minutes: float, only: str) -> Path:
    """Measure the rows that are missing, and write the table."""
    results = Results(out / "remote_cache", COLUMNS)
    rows: dict[str, Way | None] = {**ROWS, INDEX: None}
    for name, _ in results.missing(rows, minutes, only):
        say(f"bench   {name}")
        found = subprocess.run([sys.executable, "-m", "benchmarks.remote_cache", name], capture_output=True, check=True)
        results.add(name, json.loads(found.stdout.splitlines()[-1]))
    about = (
        f"{STEPS} steps of {BATCH} samples, read ahead in the order of the plan. Rows with a web server: on the same "
        "machine, in a process of its own, whose processor time does not count."
    )
    return results.write_table("Samples per second from the cache", about, describe_machine(), {INDEX: INDEX_COLUMNS})


def measure(way: Way) -> Json:
    """Measure a way of reading."""
    keys = [f"sample {number}" for number in range(STEPS * BATCH)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        filled = CachePlace(folder / "cache", "files" if way.form == "files" else "shards")
        size = sum(_fill(open_cache(filled, "data", part), part, keys, way.int8) for part in SHAPES)
        with _served(filled.folder, way) as place:
            return {
                "mib": size / len(keys) / 2**20,
                **_read({p: open_cache(place, "data", p) for p in SHAPES}, keys, way),
            }


def _fill(cache: Cache, part: str, keys: list[str], int8: bool) -> int:
    """Fill one part of the cache with random numbers; return its bytes."""
    generator, total = torch.Generator().manual_seed(0), 0
    for group in cache.claimed(cache.lacking(keys), together=64):
        for key in group:
            tensors = dict[str, Tensor]()
            for name, shape in SHAPES[part].items():
                plain = torch.randn(shape, generator=generator)
                own: dict[str, Tensor] = {"hidden": plain if part == "latents" else plain.to(torch.bfloat16)}
                own = pack(own) if name == "t5" and int8 else own
                tensors |= {f"{name}.{kind}": tensor for kind, tensor in own.items()}
            cache.save(key, tensors)
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return total


@contextmanager
def _served(folder: Path, way: Way) -> Iterator[CachePlace]:
    """Yield the folder or URL to read from; runs the web server meanwhile."""
    if way.form != "web":
        yield CachePlace(folder, "files" if way.form == "files" else "shards")
        return
    command = [sys.executable, "-m", "benchmarks.ranges_server", str(folder), str(way.delay)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield CachePlace(folder / "here", "shards", f"http://127.0.0.1:{int(server.stdout.readline())}", LIMIT)
    finally:
        server.terminate()
        server.wait()


def _read(caches: dict[str, Cache], keys: list[str], way: Way) -> Json:
    """Read all samples in steps."""

    def needs(step: int) -> Iterator[tuple[Cache, str]]:
        return ((cache, key) for key in keys[step * BATCH : (step + 1) * BATCH] for cache in caches.values())

    remote = [cache for cache in caches.values() if isinstance(cache, ShardCache) and cache.remote]
    for cache in remote:
        len(cache.index.samples)  # read before the clock starts
    ahead = SamplePrefetcher(needs, STEPS, LIMIT) if remote else None
    waits, memory = list[float](), list[float]()
    began, used, before = time.perf_counter(), _processor_seconds(), 0.0
    for step in range(STEPS):
        if way.pace:
            time.sleep(max(0.0, began + step * BATCH / way.pace - time.perf_counter()))
        if ahead is not None:
            ahead.at(step)
        for part, own in caches.items():
            loaded = [own.load(key) for key in keys[step * BATCH : (step + 1) * BATCH]]
            for name in SHAPES[part]:
                torch.stack([tensors[f"{name}.hidden"] for tensors in loaded])
        waited = sum(cache.waited for cache in remote)
        waits.append(waited - before)
        before = waited
        memory.append(_resident())
    seconds, processor = time.perf_counter() - began, _processor_seconds() - used
    if ahead is not None:
        ahead.close()
    size = sum(cache.size_of(key) for cache in remote for key in keys) or None
    return {
        "rate": len(keys) / seconds,
        "mb": None if size is None else size / seconds / 1e6,
        "cpu": processor / len(keys),
        "waited": float(np.mean(waits)) if remote else None,
        "longest": max(waits[2:]) if remote else None,
        "grown": max(memory[20:]) - memory[20],
        "way": asdict(way),
    }


def measure_index() -> Json:
    """Measure the index of a million samples."""
    layout = (("hidden", "BF16", (256, 4096), 0),)
    names = (hashlib.sha256(b"%d" % number).hexdigest() for number in range(MILLION))
    rows = (
        SampleLocation(
            name[:32], f"{number // 256:032x}", number % 256 * 1000, 1000, number, layout, f"the prompt {name}"
        )
        for number, name in enumerate(names)
    )
    content = write_rows(rows, [f"{number:032x}" for number in range(MILLION // 256 + 1)])
    began = time.perf_counter()
    index = SampleIndex.read(content)
    seconds = time.perf_counter() - began
    asked = [hashlib.sha256(b"%d" % number).hexdigest()[:32] for number in range(0, MILLION, 101)]
    began = time.perf_counter()
    assert all(index.find(name) is not None for name in asked)
    micros = 1e6 * (time.perf_counter() - began) / len(asked)
    return {
        "table": INDEX,
        "mb": index.bytes / 1e6,
        "file_mb": len(content) / 1e6,
        "seconds": seconds,
        "micros": micros,
    }


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident() -> float:
    """This process's memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    print(json.dumps(measure_index() if sys.argv[1] == INDEX else measure(ROWS[sys.argv[1]])))
