"""Crop the position table to the pictures that a run sees.

SD3 adds a fixed table of position embeddings to the image tokens: a square with ``pos_embed_max_size`` patches per
side, of which a picture of h x w patches uses the central h x w rows. SD3 Medium's is 192 x 192 x 1536 (216 MiB in
fp32, 108 in bf16), and a picture of 1024 px uses its central 64 x 64 (12 MiB in bf16).

Shapes: s and S patches per side of the cropped and the whole table, e hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor, nn

from simpletune.models.sd3.sd3_shapes import TABLE
from simpletune.models.shared.buckets import STEP, Size
from simpletune.models.shared.model_config import ModelConfig
from simpletune.system.model_folder import weight_files
from simpletune.system.safetensors_file import WeightReader


def side_for(sizes: Iterable[Size], whole: int) -> int:
    """Return s, the patches per side of the smallest central square that gives every size the same rows as the whole
    table; S if a size is larger than the table."""
    side = max(max(size) // STEP for size in sizes)
    # The rows of a picture start at floor((S - h) / 2). In a cropped table they start at the same row only if the crop
    # removes as many rows above as below, so s and S must have the same parity.
    return min(side + (whole - side) % 2, whole)


def crop_positions(embed: nn.Module, sizes: Iterable[Size], whole: Callable[[], Tensor]) -> None:
    """Crop the table [1, S * S, e] of diffusers' ``PatchEmbed`` in place to what pictures of these sizes need, with
    identical results; it refuses larger ones afterwards. ``whole`` reads the whole table again, for an export."""
    old, table = int(embed.pos_embed_max_size), embed.pos_embed  # type: ignore[arg-type]
    assert isinstance(table, Tensor)
    side = side_for(sizes, old)
    if side == old:
        return
    cut = slice((old - side) // 2, (old - side) // 2 + side)
    embed.pos_embed = table.view(1, old, old, -1)[:, cut, cut].reshape(1, side * side, -1)
    embed.pos_embed_max_size = side  # type: ignore[assignment]
    embed.whole_table = whole  # type: ignore[assignment]


def whole_table(config: ModelConfig, folder: Path | None) -> Tensor:  # fp32 [1, S * S, e]
    """Return a model's whole table: read from the weights in a folder if it contains any, else as diffusers computes it
    when it builds a model of that ``config.json``."""
    if folder is not None and any(folder.glob("*.safetensors")):
        return WeightReader(weight_files(folder)).get(TABLE).float()
    from accelerate import init_empty_weights
    from diffusers import SD3Transformer2DModel

    with init_empty_weights(include_buffers=False):
        table: Tensor = SD3Transformer2DModel.from_config({**config, "num_layers": 0}).pos_embed.pos_embed
    return table
