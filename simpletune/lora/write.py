"""Writing updates as a LoRA file in diffusers', kohya's or ComfyUI's layout."""

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
    """Write a LoRA file: whole, or not at all.

    Args:
        updates: by diffusers' layer name.
        file: where to.
        layout: ``diffusers``, ``kohya`` or ``comfy``.
        dtype: ``fp32``, ``fp16`` or ``bf16``; None: as they are.
        metadata: strings for the header.

    Raises:
        UserError: there is nothing to write, or values do not fit the type.
    """
    if not updates:
        raise UserError(f"{file}: there is no update to write")
    if file.suffix != ".safetensors":
        raise UserError(f"{file} does not end in .safetensors, by which every tool knows the format")
    tensors = tensors_of(updates, WRITTEN[layout], DTYPES[dtype] if dtype else None)
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UserError(f"{file}: {spoilt[0]} does not fit {dtype}: values become infinite. Use --dtype bf16 or fp32")
    file.parent.mkdir(parents=True, exist_ok=True)
    extra = _adapter_metadata(updates) if layout == "diffusers" else {}
    return write_safetensors(tensors, file, {**metadata, **extra})


def tensors_of(updates: Updates, layout: Layout, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a file in a layout, by key.

    Diffusers' layout has no place for alpha that every reader heeds: the scale is folded into the second factor. The
    others get ``.alpha`` = scale x rank, where the rank of a fused q, k, v is that of the three together.
    """
    named = in_original_names(updates) if layout.original else dict(updates)
    tensors: dict[str, Tensor] = {}
    for module in sorted(named, key=natural):
        update = named[module] if layout.original else named[module].folded()
        tensors[layout.key(module, DOWN)] = update.down.to(dtype or update.down.dtype, copy=True)  # layers may share it
        tensors[layout.key(module, UP)] = update.up.to(dtype or update.up.dtype, copy=True)
        if layout is not DIFFUSERS:
            tensors[layout.key(module, ALPHA)] = torch.tensor(update.scale * update.rank, dtype=torch.float32)
    return tensors


def in_original_names(updates: Updates) -> dict[str, Update]:
    """Updates under the original names: q, k, v fused, halves swapped where the layouts differ.

    Raises:
        UserError: SD3 has no such layer.
    """
    found: dict[str, Update] = {}
    thirds: dict[str, list[Update | None]] = {}
    for layer, update in updates.items():
        try:
            module, third = original_module(layer)
        except (KeyError, ValueError):
            raise UserError(f"{layer} is no layer of SD3: it has no name in the original layout") from None
        if third is None:
            found[module] = swap_halves(update) if halves_swapped(layer, *update.shape) else update
        else:
            thirds.setdefault(module, [None, None, None])[third] = update
    return found | {module: fuse(parts) for module, parts in thirds.items()}


def _adapter_metadata(updates: Updates) -> dict[str, str]:
    """Settings for diffusers where ranks differ; older versions would take the first layer's rank as alpha of all.

    Alpha equals the rank in every layer, so that readers which ignore the header do the same.
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
