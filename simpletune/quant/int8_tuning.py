"""Count the tunings of the int8 kernel that a run's first step may wait for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from simpletune.options import plural
from simpletune.quant.int8_linear import Int8Linear
from simpletune.quant.int8_products import FEW_ROWS, why_not
from simpletune.system.console import say

OF_TEXT = (".add_", ".to_add_out", ".ff_context")  # layers of a block that see the text's tokens


def tunings(model: nn.Module, image_rows: Iterable[int], text_rows: int) -> set[tuple[int, int, int, bool]]:
    """Collect the shapes that the kernel is tuned for.

    Args:
        model: the transformer, with or without an adapter.
        image_rows: samples x image tokens, of each picture size.
        text_rows: samples x text tokens.

    Returns:
        (power of two of rows, outputs, length of the sum, whether the weight is read transposed).
    """
    found, image_rows = set(), list(image_rows)
    for name, layer in model.named_modules():
        if not isinstance(layer, Int8Linear) or not layer.int8_products:
            continue
        outputs, inputs = layer.weight.shape
        for rows in [text_rows] if any(part in name for part in OF_TEXT) else image_rows:
            if rows > FEW_ROWS:
                bucket = 1 << (rows - 1).bit_length()
                found.add((bucket, outputs, inputs, False))
                found |= {(bucket, inputs, outputs, True)} if layer.int8_gradient else set()
    return found


def announce_tuning(model: nn.Module, image_rows: Iterable[int], text_rows: int, device: torch.device) -> None:
    """Log how much tuning the first step includes, if any layer multiplies in int8.

    Args:
        model: as for ``tunings``, like the next two.
        device: a CUDA device.
    """
    shapes = len(tunings(model, image_rows, text_rows))
    if shapes and why_not(device) is None:
        from simpletune.quant.int8_kernel import TILES

        say(
            f"kernel  the first step tunes the int8 kernel: {plural(shapes, 'shape')} x {len(TILES)} tiles, seconds to "
            "minutes, except for shapes that Triton has timed on this card before"
        )
