"""Write updates as a LoRA file in diffusers', kohya's or ComfyUI's layout, or LoKr and LoHa in LyCORIS's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from simpletune.families.lora_names import names_of, update_layout
from simpletune.lora.header import ADAPTER_METADATA, natural
from simpletune.lora.layouts import written
from simpletune.lora.of_weight import DoraUpdate, OftUpdate, blocks_of, lora_of, magnitudes_of
from simpletune.lora.structured import AnyUpdates, Structured
from simpletune.lora.updates import Update, Updates, fuse, swap_halves
from simpletune.models.lora_names import ALPHA, DORA_MARK, DOWN, UP, Layout, LoraNames
from simpletune.options import UserError
from simpletune.system.safetensors_file import write_safetensors

SPEC, HASH = "modelspec.sai_model_spec", "modelspec.hash_sha256"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def write_lora(
    updates: AnyUpdates,
    file: Path,
    layout: str = "diffusers",
    dtype: str | None = None,
    metadata: Mapping[str, str] = {},
) -> Path:
    """Write a LoRA file atomically.

    Args:
        updates: updates by diffusers' layer name.
        file: the target.
        layout: ``diffusers``, ``kohya`` or ``comfy`` for LoRA and DoRA; ``kohya`` or ``comfy`` for OFT; ``lycoris`` for
            LoKr and LoHa.
        dtype: ``fp32``, ``fp16`` or ``bf16``; None keeps their types.
        metadata: strings for the header.

    Raises:
        UserError: there is nothing to write, the name is wrong, or values overflow the type.
    """
    if not updates:
        raise UserError(f"{file}: there are no updates to write")
    if file.suffix != ".safetensors":
        raise UserError(f"{file} must end in .safetensors, by which tools recognise the format. Rename it")
    kind = DTYPES[dtype] if dtype else None
    low_rank = {layer: update for layer, update in updates.items() if isinstance(update, Update)}
    dora = {layer: update for layer, update in updates.items() if isinstance(update, DoraUpdate)}
    oft = {layer: update for layer, update in updates.items() if isinstance(update, OftUpdate)}
    others = {layer: u for layer, u in updates.items() if not isinstance(u, Update | DoraUpdate | OftUpdate)}
    if layout == "lycoris":
        for layer in (*low_rank, *dora, *oft):
            raise UserError(f"{layer} is {updates[layer].kind}; lycoris files hold LoKr or LoHa. Use --format kohya")
        tensors = structured_tensors_of(others, kind)
    elif others:
        layer, update = max(others.items(), key=lambda each: each[1].rank)
        raise UserError(
            f"{layer} is {update.kind}, which equals a LoRA of rank {update.rank}. Give --rank {update.rank}, or a "
            "smaller one to approximate it, or use --format lycoris"
        )
    else:
        chosen = written(updates, layout)
        tensors = tensors_of({**low_rank, **lora_of(dora)}, chosen, kind) if low_rank or dora else {}
        tensors |= magnitudes_of(dora, chosen) | blocks_of(oft, chosen)
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UserError(f"{file}: {spoilt[0]} {overflow(dtype)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    extra = _adapter_metadata(low_rank, names_of(updates).denoiser) if layout == "diffusers" and not dora else {}
    extra |= DORA_MARK if dora else {}
    return write_safetensors(tensors, file, {**metadata, **extra}, HASH if SPEC in metadata else None)


def overflow(dtype: str | None) -> str:
    """The predicate of a message about a tensor whose values overflow a type."""
    return f"overflows {dtype or 'its type'}: values become infinite. Use --dtype bf16 or fp32"


def tensors_of(updates: Updates, layout: Layout, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a file in a layout, by key.

    Not every tool reads alpha in diffusers' layout, so there the scale is folded into the second factor. The other
    layouts get ``.alpha`` = scale x rank, where a fused q, k, v has the rank of the fused update. With diffusers' names
    it is the same number in every module: diffusers 0.42.1 applies the most common alpha of a U-Net's file to all
    attention layers.
    """
    named = in_original_names(updates, layout.names) if layout.original else dict(updates)
    if not layout.alpha:
        named = {module: update.folded() for module, update in named.items()}
    elif not layout.original:
        named = _with_one_alpha(named)
    tensors: dict[str, Tensor] = {}
    for module in sorted(named, key=natural):
        update = named[module]
        tensors[layout.key(module, DOWN)] = update.saved(update.down, dtype)
        tensors[layout.key(module, UP)] = update.saved(update.up, dtype)
        if layout.alpha:
            tensors[layout.key(module, ALPHA)] = torch.tensor(update.scale * update.rank, dtype=torch.float32)
    return tensors


def structured_tensors_of(updates: Mapping[str, Structured], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a file with LoKr or LoHa, by key: diffusers' layers under the names that ComfyUI reads.

    Raises:
        UserError: a layer has only rows of a LoKr that was trained on a fused layer.
    """
    layout = update_layout(updates)
    tensors: dict[str, Tensor] = {}
    for layer in sorted(updates, key=natural):
        update = updates[layer]
        if not update.is_own:
            raise UserError(
                f"{layer} has rows of a {update.kind} of a fused layer, which is none by itself. Approximate it by a "
                "LoRA: --format kohya --rank 32"
            )
        factors, alpha = update.saved()
        for name, factor in factors.items():
            tensors[layout.key(layer, name)] = factor.to(dtype or factor.dtype, copy=True).contiguous()
        tensors[layout.key(layer, ALPHA)] = torch.tensor(alpha, dtype=torch.float32)
    return tensors


def _with_one_alpha(updates: Updates) -> dict[str, Update]:
    """Give every update the most common alpha (scale x rank), and scale the second factor of the others to match."""
    common = Counter(update.scale * update.rank for update in updates.values()).most_common(1)[0][0]
    found = {}
    for layer, update in updates.items():
        factor = update.scale * update.rank / common
        up = update.up if factor == 1 else (update.up.float() * factor).to(update.up.dtype)
        found[layer] = replace(update, up=up, scale=common / update.rank)
    return found


def in_original_names(updates: Updates, names: LoraNames) -> dict[str, Update]:
    """Convert updates to the original names: fuse q, k, v and swap halves if the layouts differ.

    Raises:
        UserError: the family has no such layer.
    """
    found: dict[str, Update] = {}
    thirds: dict[str, list[Update | None]] = {}
    for layer, update in updates.items():
        try:
            module, third = names.original(layer)
        except (KeyError, ValueError):
            raise UserError(
                f"{layer} is not a layer of {names.title}, so it has no name in the original layout"
            ) from None
        if third is None:
            found[module] = swap_halves(update) if names.halves_swapped(layer, *update.shape) else update
        else:
            thirds.setdefault(module, [None, None, None])[third] = update
    return found | {module: fuse(parts) for module, parts in thirds.items()}


def _adapter_metadata(updates: Updates, denoiser: str) -> dict[str, str]:
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
    return {ADAPTER_METADATA: json.dumps({f"{denoiser}.{key}": value for key, value in settings.items()})}
