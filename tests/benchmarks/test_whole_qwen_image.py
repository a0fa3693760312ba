"""Qwen-Image from shards that are on the disk one at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import whole_qwen_image
from benchmarks.tiny_models import tiny_qwen_image

TINY = {**tiny_qwen_image.TRANSFORMER, "axes_dims_rope": [4, 6, 6]}
SMALL = ["data.resolution=64", "train.steps=2"]


def test_only_one_shard_is_on_the_disk_and_each_is_written_once(tmp_path: Path) -> None:
    shapes = {f"blocks.{number}.{name}": shape for number in range(5)
              for name, shape in (("weight", (64, 32)), ("bias", (64,)), ("norm", (32,)))}  # fmt: skip
    shards = whole_qwen_image.Shards(tmp_path, shapes, limit=2 * 4096 + 500)
    assert shards.names == set(shapes)
    values = {}
    for name, shape in shapes.items():
        values[name] = shards.get(name).clone()
        assert values[name].shape == shape and values[name].dtype == torch.bfloat16
        assert len(list(tmp_path.iterdir())) == 1
    assert len(shards.written) == 3 and max(shards.written) < 2 * 4096 + 2000
    drawn = values["blocks.0.weight"].float()
    assert float(drawn.std()) == pytest.approx(32**-0.5, rel=0.1) and not values["blocks.0.bias"].any()
    shards.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_base_from_shards_trains_and_the_next_start_reads_the_cache(tmp_path: Path) -> None:
    pipeline = whole_qwen_image.build(tmp_path / "pipeline", {}, **TINY)
    found = whole_qwen_image.measure(pipeline, tmp_path, SMALL, limit=50_000)
    assert found["shards"] > 3 and found["final_loss"] > 0 and found["base on disk, GiB"] >= 0
    assert not list(tmp_path.glob("shard-*"))
    again = whole_qwen_image.measure(pipeline, tmp_path, SMALL, limit=50_000)
    assert again["shards"] == 0 and again["final_loss"] == found["final_loss"]


@pytest.mark.slow
def test_eight_of_sixty_blocks_of_the_published_width_take_what_is_predicted(tmp_path: Path) -> None:
    """2.8 billion parameters, of which two blocks are in memory at a time; the rest are pages of a file."""
    command = [sys.executable, "-m", "benchmarks.whole_qwen_image", "--blocks", "8", "--folder", str(tmp_path / "base")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["parameters"] == 2_759_173_696
    libraries = 0.9
    assert found["rss without files, GiB"] < found["predicted rss without files, GiB"] + libraries
    assert found["disk, GiB"] < found["base on disk, GiB"] + found["largest shard, GiB"] + 0.1
