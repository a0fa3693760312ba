"""Write updates as a LoRA file in diffusers', kohya's or ComfyUI's layout."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from simpletune.lora.header import ADAPTER_METADATA, natural
from simpletune.lora.layouts import ALPHA, DIFFUSERS, DOWN, UP, WRITTEN, Layout, halves_swapped, original_module
from simpletune.lora.updates import Update, Updates, fuse, swap_halves
from simpletune.options import UserError
from simpletune.system.safetensors_file import write_safetensors

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def write_lora(
    updates: Updates, file: Path, layout: str = "diffusers", dtype: str | None = None, metadata: Mapping[str, str] = {}
) -> Path:
    """Write a LoRA file atomically.

    Args:
        updates: updates by diffusers' layer name.
        file: the target.
        layout: ``diffusers``, ``kohya`` or ``comfy``.
        dtype: ``fp32``, ``fp16`` or ``bf16``; None keeps their types.
        metadata: strings for the header.

    Raises:
        UserError: there is nothing to write, the name is wrong, or values overflow the type.
    """
    if not updates:
        raise UserError(f"{file}: there are no updates to write")
    if file.suffix != ".safetensors":
        raise UserError(f"{file} must end in .safetensors, by which tools recognise the format. Rename it")
    tensors = tensors_of(updates, WRITTEN[layout], DTYPES[dtype] if dtype else None)
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UserError(f"{file}: {spoilt[0]} {overflow(dtype)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    extra = _adapter_metadata(updates) if layout == "diffusers" else {}
    return write_safetensors(tensors, file, {**metadata, **extra})


def overflow(dtype: str | None) -> str:
    """The predicate of a message about a tensor whose values overflow a type."""
    return f"overflows {dtype or 'its type'}: values become infinite. Use --dtype bf16 or fp32"


def tensors_of(updates: Updates, layout: Layout, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a file in a layout, by key.

    Not every tool reads alpha in diffusers' layout, so there the scale is folded into the second factor. The other
    layouts get ``.alpha`` = scale x rank, where a fused q, k, v has the rank of the fused update.
    """
    named = in_original_names(updates) if layout.original else dict(updates)
    tensors: dict[str, Tensor] = {}
    for module in sorted(named, key=natural):
        update = named[module] if layout.original else named[module].folded()
        tensors[layout.key(module, DOWN)] = update.down.to(
            dtype or update.down.dtype, copy=True
        )  # layers may share down
        tensors[layout.key(module, UP)] = update.up.to(dtype or update.up.dtype, copy=True)
        if layout is not DIFFUSERS:
            tensors[layout.key(module, ALPHA)] = torch.tensor(update.scale * update.rank, dtype=torch.float32)
    return tensors


def in_original_names(updates: Updates) -> dict[str, Update]:
    """Convert updates to the original names: fuse q, k, v and swap halves if the layouts differ.

    Raises:
        UserError: SD3 has no such layer.
    """
    found: dict[str, Update] = {}
    thirds: dict[str, list[Update | None]] = {}
    for layer, update in updates.items():
        try:
            module, third = original_module(layer)
        except (KeyError, ValueError):
            raise UserError(f"{layer} is not a layer of SD3, so it has no name in the original layout") from None
        if third is None:
            found[module] = swap_halves(update) if halves_swapped(layer, *update.shape) else update
        else:
            thirds.setdefault(module, [None, None, None])[third] = update
    return found | {module: fuse(parts) for module, parts in thirds.items()}


def _adapter_metadata(updates: Updates) -> dict[str, str]:
    """PEFT settings for diffusers if ranks differ: older versions would use the first layer's rank as every alpha.

    Alpha equals the rank in every layer, so that tools that ignore the header apply the same scale.
    """
    ranks = {layer: update.rank for layer, update in updates.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{layer}": rank for layer, rank in ranks.items() if rank != common}
    if not others:
        return {}
    settings = {
        "r": common,
        "lora_alpha": common,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ranks, key=natural),
    }
    return {ADAPTER_METADATA: json.dumps({f"transformer.{key}": value for key, value in settings.items()})}
