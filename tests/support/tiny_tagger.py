"""A tagger of random weights in WD14's layout: ONNX of 700 bytes, written as protobuf by hand, and its list of tags."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TAGS = (  # name, category
    ("general", 9), ("explicit", 9), ("1girl", 0), ("long_hair", 0), ("0_0", 0), ("solo", 0), ("hatsune_miku", 4),
    ("outdoors", 0),
)  # fmt: skip


def write_tagger(folder: Path, side: int | str = 16, channels: int = 3) -> Path:
    """Write a tagger: the sigmoid of a linear map of a picture's mean colour; see ``probabilities``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(_model(side, channels))
    rows = [f"{index},{name},{category},{100 - index}" for index, (name, category) in enumerate(TAGS)]
    (folder / "selected_tags.csv").write_text("\n".join(["tag_id,name,category,count", *rows, ""]))
    return folder


def weights(channels: int = 3) -> tuple[np.ndarray, np.ndarray]:  # [channels, tags], [tags]
    random = np.random.default_rng(1)
    map_ = random.normal(0, 10 / 255, (channels, len(TAGS))).astype(np.float32)
    return map_, -180 * map_.sum(0)  # scores are 0 at a light grey, so that colours change them


def probabilities(batch: np.ndarray) -> np.ndarray:  # [n, side, side, 3] -> [n, tags]
    """What the tagger answers, by numpy."""
    map_, bias = weights()
    return 1 / (1 + np.exp(-(batch.mean((1, 2)) @ map_ + bias)))


def _model(side: int | str, channels: int) -> bytes:
    """The bytes of a ModelProto (onnx.proto of ONNX 1.12): ReduceMean, MatMul, Add, Sigmoid."""
    map_, bias = weights(channels)
    axes = _text(1, "axes") + _number(8, 1) + _number(8, 2) + _number(20, 7)
    dropped = _text(1, "keepdims") + _number(3, 0) + _number(20, 2)
    nodes = (
        _node("ReduceMean", ["picture"], "mean") + _text(5, axes) + _text(5, dropped),
        _node("MatMul", ["mean", "map"], "scores"),
        _node("Add", ["scores", "bias"], "logits"),
        _node("Sigmoid", ["logits"], "tags"),
    )
    graph = b"".join(_text(1, node) for node in nodes) + _text(2, "tagger")
    graph += _text(5, _tensor("map", map_)) + _text(5, _tensor("bias", bias))
    graph += _text(11, _shaped("picture", ["n", side, side, channels])) + _text(12, _shaped("tags", ["n", len(TAGS)]))
    return _number(1, 8) + _text(8, _text(1, "") + _number(2, 13)) + _text(7, graph)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, value: str | bytes) -> bytes:
    """A field of a length: a string, bytes or a message."""
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    head, low = value >> 7, value & 127
    return bytes([low | 128]) + _varint(head) if head else bytes([low])


def _node(kind: str, inputs: list[str], output: str) -> bytes:
    return b"".join(_text(1, name) for name in inputs) + _text(2, output) + _text(4, kind)


def _tensor(name: str, values: np.ndarray) -> bytes:
    sizes = b"".join(_number(1, size) for size in values.shape)
    return sizes + _number(2, 1) + _text(8, name) + _text(9, values.tobytes())


def _shaped(name: str, shape: list[int | str]) -> bytes:
    sizes = b"".join(_text(1, _text(2, size) if isinstance(size, str) else _number(1, size)) for size in shape)
    return _text(1, name) + _text(2, _text(1, _number(1, 1) + _text(2, sizes)))
