"""Parts of stored files: rows of tensors over several files, indices of files, compressed shards, locked ranges."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from simpletune.optim.adamw import AdamW
from simpletune.optim.optimizer import state_to_tensors
from simpletune.options import UserError
from simpletune.sharding.checkpoints import require_written, restore_parts
from simpletune.sharding.files import SavedStates
from simpletune.streams.compression import decompressed
from simpletune.system import locks
from simpletune.system.safetensors_file import INDEX_SUFFIX, WeightReader, files_of_index


@pytest.mark.parametrize(("first", "last"), [(0, 2), (1, 6), (3, 5), (5, 9), (0, 9)])
def test_rows_of_a_tensor_in_three_files(first: int, last: int, tmp_path: Path) -> None:
    whole = torch.arange(18.0).view(9, 2)
    for number, (begin, end) in enumerate([(0, 2), (2, 5), (5, 9)]):
        save_file({"w": whole[begin:end].clone()}, tmp_path / f"{number}.safetensors")
    index = tmp_path / f"x{INDEX_SUFFIX}"
    index.write_text(json.dumps({"files": [{"file": f"{number}.safetensors"} for number in range(3)]}))
    reader = WeightReader([index])
    assert torch.equal(reader.rows("w", first, last), whole[first:last])
    assert torch.equal(reader.get("w"), whole)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is damaged"),
        ("{}", "is damaged"),
        ('{"files": [3]}', "is damaged"),
        ('{"files": [{"file": "../a.safetensors"}]}', "outside its folder"),
        ('{"files": [{"file": ".."}]}', "outside its folder"),
    ],
)
def test_an_index_that_cannot_be_used(content: str, words: str, tmp_path: Path) -> None:
    index = tmp_path / "x.index.json"
    index.write_text(content)
    with pytest.raises(UserError, match=words):
        files_of_index(index)


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    index = tmp_path / "x.index.json"
    index.write_text(json.dumps({"files": [{"file": "a"}, {"file": "b"}]}))
    assert files_of_index(index) == [tmp_path / "a", tmp_path / "b"]


TEXT = b"a star " * 50
COMPRESSED = {
    "gz": gzip.compress(TEXT), "gz:6": gzip.compress(TEXT), "bz2": bz2.compress(TEXT),
    "zstd": pa.Codec("zstd").compress(TEXT, asbytes=True),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", COMPRESSED)
def test_compressed_shards(algorithm: str) -> None:
    data = COMPRESSED[algorithm]
    assert decompressed(data, algorithm, len(TEXT), "shard.0.mds") == TEXT
    for wrong in (b"no " + data, data[: len(data) // 2]):
        with pytest.raises(UserError, match="shard.0.mds is damaged"):
            decompressed(wrong, algorithm, len(TEXT), "shard.0.mds")


@pytest.mark.parametrize("algorithm", ["gz", "bz2"])
def test_a_shard_that_grows_beyond_its_size_is_damaged(algorithm: str) -> None:
    with pytest.raises(UserError, match="instead of 10"):
        decompressed(COMPRESSED[algorithm], algorithm, 10, "shard.0.mds")


def test_an_unknown_compression_is_named() -> None:
    with pytest.raises(UserError, match="'snappy2', which is unsupported. Use .*gz"):
        decompressed(TEXT, "snappy2", len(TEXT), "shard.0.mds")


def test_ranges_without_a_lock_file_are_unsure_and_let_all_in(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with locks.Ranges(tmp_path / "file" / "lock") as ranges, ranges.held(0, 5) as first, ranges.held(3, 9) as second:
        assert first and second and not ranges.sure


def test_the_state_of_a_checkpoint_in_one_file_and_in_parts(tmp_path: Path) -> None:
    """Names in one file are places in the order of the model; of parts, each knows its parameters by name."""
    sizes = {"a": 4, "b": 6}
    one = tmp_path / "optimizer.safetensors"
    save_file({"0.mean": torch.arange(4.0), "1.mean": torch.arange(6.0)}, one)
    scalars = {"values": {"0.step": 3, "1.step": 3}, "shared": {}}
    saved = SavedStates(one, sizes, scalars)
    (piece,) = saved.pieces("b", 2, 4)
    assert (piece.start, piece.stop, piece.values["step"]) == (0, 6, 3)
    assert torch.equal(piece.values["mean"], torch.arange(6.0))
    assert saved.pieces("a", 4, 9) == []


def test_weights_and_state_of_a_whole_model_are_restored(tmp_path: Path) -> None:
    """The next step of a restored optimizer has the bits of the one that went on."""
    option = AdamW(lr=0.1)
    torch.manual_seed(0)
    went_on, restored = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [option.build(model.parameters()) for model in (went_on, restored)]
    gradients = [torch.randn(2, 3) for _ in range(2)]

    def step(number: int, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        model.weight.grad, model.bias.grad = gradients[number], gradients[number][:, 0].clone()
        optimizer.step()

    step(0, went_on, optimizers[0])
    tensors, scalars = state_to_tensors(optimizers[0])
    files = tmp_path / "weights.safetensors", tmp_path / "optimizer.safetensors"
    save_file({name: parameter.detach().clone() for name, parameter in went_on.named_parameters()}, files[0])
    save_file(tensors, files[1])
    restore_parts(restored, optimizers[1], option, files, scalars)
    for model, optimizer in zip((went_on, restored), optimizers, strict=True):
        step(1, model, optimizer)
    assert torch.equal(restored.weight, went_on.weight) and torch.equal(restored.bias, went_on.bias)


@pytest.mark.parametrize(
    ("every", "words"),
    [
        ([{}, {"error": "No space left on device", "code": 1}], "process 1 could not write .*: No space left"),
        ([{"bad": ["a.weight"]}, {"bad": ["b.weight"]}], r"2 trained parameters are non-finite \(a.weight, b.weight\)"),
    ],
)
def test_what_a_process_could_not_write_is_named(every: list[dict], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        require_written(every, tmp_path)
    require_written([{}, {}], tmp_path)
