"""``python -m benchmarks.whole_qwen_image [--blocks N] [key.path=value ...]``: a step of Qwen-Image at its published
width on the CPU, from weights that are written, quantised and deleted one shard at a time.

Weights are random. Shards are of the published size, and no more than one is on the disk beside the quantised base, so
that the whole model takes 19.1 GiB of it and a shard's. Text encoder and autoencoder are tiny. The base stays in the
cache's file (``memory.host_weights`` mapped). Prints the disk's and the main memory's peaks; results are in
``results/notes.md``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.quiet import ALONE
from benchmarks.tiny_models import tiny_qwen_image
from simpletune.config.load import read_config
from simpletune.config.schema import TrainConfig
from simpletune.models.qwen_image.qwen_image_option import QwenImage
from simpletune.models.shared import weights
from simpletune.models.shared.model_config import Shape
from simpletune.models.shared.parts import Part
from simpletune.models.shared.weights import TensorSource
from simpletune.runs.folder import SUMMARY
from simpletune.system.options import Json
from simpletune.system.safetensors_file import WeightReader, write_safetensors

SETTINGS: Json = {
    "name": "whole-qwen-image",
    "device": "cpu",
    "model": {"family": "qwen_image", "text_length": 64},
    "data": {"path": "demo:style", "resolution": 256, "max_upscale": 8},
    "adapter": {"method": "lora", "rank": 16, "targets": "attention"},
    "precision": {"weights": "int8"},
    "memory": {
        "checkpointing": "all", "resident_blocks": 0, "offload_checkpoint_inputs": True, "modulation": "plan",
        "modulation_window": 1, "host_weights": "mapped",
    },
    "train": {"steps": 1},
    "optimizer": {"lr": 1e-4},
}  # fmt: skip
SHARD = 4_990_000_000
"""Bytes of a published shard in bf16."""
WIDE: Json = {"hidden_size": 3584, "intermediate_size": 16, "num_attention_heads": 224}
"""The tiny text encoder's states are as wide as the published one's."""
PERIOD = 2**22 + 1
"""Random numbers are drawn once, and repeat after this many: drawing all would take longer than the rest."""


@dataclass
class Shards:
    """Random weights in bf16 as a source of tensors, in shards: each is written when a tensor of it is first read, and
    deleted when another one is."""

    folder: Path
    shapes: Mapping[str, Shape]
    limit: int = SHARD
    written: list[int] = field(default_factory=list)
    """Bytes of each, in the order of writing."""
    seconds: float = 0.0
    """Spent on writing."""

    def __post_init__(self) -> None:
        self.names = set(self.shapes)
        draw = torch.Generator().manual_seed(0)
        self._numbers = torch.empty(PERIOD).normal_(generator=draw).bfloat16()
        self._shard: dict[str, int] = {}
        number, size = 0, 0
        for name, shape in self.shapes.items():
            if size and size + 2 * _count(shape) > self.limit:
                number, size = number + 1, 0
            self._shard[name] = number
            size += 2 * _count(shape)
        self._open: tuple[int, Path, WeightReader] | None = None

    def get(self, name: str) -> Tensor:
        """Read one tensor, as a view of its shard's mapped file."""
        number = self._shard[name]
        if self._open is None or self._open[0] != number:
            self.close()
            self._open = (number, *self._write(number))
        return self._open[2].get(name)

    def close(self) -> None:
        """Delete the shard that is on the disk."""
        if self._open is not None:
            self._open[1].unlink()
            self._open = None

    def _write(self, number: int) -> tuple[Path, WeightReader]:
        """Write a shard, one tensor after the other, so that no more than one is in memory."""
        began, file = time.perf_counter(), self.folder / f"shard-{number:05d}.safetensors"
        names = [name for name, own in self._shard.items() if own == number]
        header, start = dict[str, Json](), 0
        for name in names:
            stop = start + 2 * _count(self.shapes[name])
            header[name] = {"dtype": "BF16", "shape": self.shapes[name], "data_offsets": [start, stop]}
            start = stop
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                opened.write(self._tensor(self.shapes[name]).view(torch.uint8).numpy().data)
        self.written.append(file.stat().st_size)
        self.seconds += time.perf_counter() - began
        return file, WeightReader([file])

    def _tensor(self, shape: Shape) -> Tensor:
        if len(shape) == 1:  # a bias, or a norm's weight
            return torch.zeros(shape, dtype=torch.bfloat16)
        count = _count(shape)
        repeated = self._numbers.repeat(-(-count // PERIOD))[:count]
        return (repeated * shape[-1] ** -0.5).view(shape)


def _count(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


@dataclass
class Peaks:
    """The largest figures of this process and of a folder while ``sampled``."""

    disk: int = 0
    """Bytes of the folder's files."""
    rss: int = 0
    """Resident bytes, with pages of files, which the system takes back when it needs them."""
    own: int = 0
    """Resident bytes that are no pages of files."""

    def look(self, folder: Path) -> None:
        """Take one sample."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        rss, own = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "RssAnon"))
        sizes = [size for file in folder.rglob("*") if (size := _size(file)) is not None]
        self.disk, self.rss, self.own = max(self.disk, sum(sizes)), max(self.rss, rss), max(self.own, own)


def _size(file: Path) -> int | None:
    try:
        return 512 * file.stat().st_blocks
    except FileNotFoundError:  # deleted meanwhile
        return None


@contextmanager
def sampled(folder: Path, every: float = 0.05) -> Iterator[Peaks]:
    """Watch this process and a folder."""
    peaks, done = Peaks(), threading.Event()

    def watch() -> None:
        while not done.wait(every):
            peaks.look(folder)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()
        peaks.look(folder)


def build(folder: Path, text: Mapping[str, Any] = WIDE, **changes: object) -> Path:
    """Write a pipeline whose transformer has the published configuration but for ``changes``. A single number stands
    for its weights, which ``Shards`` makes, since caches know a model by its files."""
    pipeline = tiny_qwen_image.build(folder, text=text)
    transformer = pipeline / "transformer"
    shutil.rmtree(transformer)
    transformer.mkdir()
    published = QwenImage().files.known_config()
    (transformer / "config.json").write_text(json.dumps({**published, **changes}))
    write_safetensors({"none": torch.zeros(1)}, transformer / "diffusion_pytorch_model.safetensors", {})
    return pipeline


def measure(pipeline: Path, folder: Path, overrides: list[str], limit: int = SHARD) -> Json:
    """Train on a pipeline of ``build`` within a folder; return what it took."""
    from simpletune.training.train import train

    (file := folder / "config.json").write_text(json.dumps(SETTINGS))
    places = [f"output.{part}={folder / part}" for part in ("runs", "profiles", "cache")]
    config, _ = read_config(
        file, [f"model.pretrained={pipeline}", *places, *ALONE, "validation.loss_samples=0", *overrides]
    )
    model = config.model
    shards = Shards(folder, model.architecture.tensor_shapes(model.files.known_config()), limit)
    others = weights.open_tensors

    def opened(part: Part) -> TensorSource:
        return shards if part.name == model.denoiser else others(part)

    with mock.patch.object(weights, "open_tensors", opened), sampled(folder) as peaks:
        run = train(config)
        shards.close()
    found = json.loads((run / SUMMARY).read_text())
    base = sum(each.stat().st_size for each in (folder / "cache" / "quantised").rglob("*.safetensors"))
    gib = {"disk": peaks.disk, "base on disk": base, "rss": peaks.rss, "rss without files": peaks.own}
    return {
        "parameters": model.architecture.parameter_count(),
        "shards": len(shards.written),
        "largest shard, GiB": round(max(shards.written, default=0) / 2**30, 3),
        "seconds of writing shards": round(shards.seconds, 1),
        **{f"{name}, GiB": round(size / 2**30, 3) for name, size in gib.items()},
        "predicted rss without files, GiB": round(predicted(config) / 2**30, 3),
        "final_loss": found["final_loss"],
        "stages": found["stages"],
    }


def predicted(config: TrainConfig) -> int:
    """Return the bytes of a step on a CPU, where the device's are the host's, beside the libraries'."""
    from simpletune.estimate.simulate.simulate import simulate

    found = simulate(config)
    return found.peak.bytes + found.host_bytes


def main() -> None:
    """Measure in a scratch folder, or in one that is kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_qwen_image", description=__doc__)
    parser.add_argument("--blocks", type=int, default=60, help="of 60")
    parser.add_argument("--folder", type=Path, help="keep the quantised base here; the next start reads it")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        pipeline = folder / "pipeline"
        if not pipeline.exists():
            build(pipeline, num_layers=args.blocks)
        print(json.dumps(measure(pipeline, folder, args.overrides), indent=1))


if __name__ == "__main__":
    main()
