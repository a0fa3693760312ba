"""A saliency model in U2-Net's layout that takes bright for salient: ONNX of 300 bytes, written as protobuf by hand."""

from __future__ import annotations

from pathlib import Path

from tiny_tagger import _node, _number, _shaped, _text


def write_saliency(
    file: Path, license: str = "", side: int | str = 320, channels: int = 3, kept: int = 1, inputs: int = 1
) -> Path:
    """Write a model: the mean of a picture's channels at each pixel (onnx.proto of ONNX 1.12); ``kept`` 0 drops the
    axis and the next, so that its output has one value for each column. ``inputs``: how many; reads the first."""
    axes = _text(1, "axes") + b"".join(_number(8, axis) for axis in ((1,) if kept else (1, 2))) + _number(20, 7)
    keepdims = _text(1, "keepdims") + _number(3, kept) + _number(20, 2)
    graph = _text(1, _node("ReduceMean", ["picture"], "saliency") + _text(5, axes) + _text(5, keepdims))
    graph += _text(2, "saliency")
    for number in range(inputs):
        graph += _text(11, _shaped(f"picture{number or ''}", [1, channels, side, side]))
    graph += _text(12, _shaped("saliency", [1, 1, side, side] if kept else [1, side]))
    model = _number(1, 8) + _text(8, _text(1, "") + _number(2, 13)) + _text(7, graph)
    if license:
        model += _text(14, _text(1, "license") + _text(2, license))
    file.write_bytes(model)
    return file
