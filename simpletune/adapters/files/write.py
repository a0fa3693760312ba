"""Write updates as a LoRA file in diffusers', kohya's or ComfyUI's layout, or LoKr and LoHa in LyCORIS's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.files.dora_oft import DoraUpdate, OftUpdate, blocks_of, magnitudes_of
from simpletune.adapters.files.header import ADAPTER_METADATA, natural_sort_key
from simpletune.adapters.files.layouts import written
from simpletune.adapters.files.lokr_loha import LokrUpdate
from simpletune.adapters.files.updates import LoraUpdate, LoraUpdates, Update, Updates, fuse
from simpletune.adapters.methods.layers import FLOATS
from simpletune.models.lora_names import names_of, result_layout
from simpletune.models.shared.lora_names import ALPHA, DORA_MARK, Layout, LoraNames
from simpletune.models.shared.text_layers import CLIP_L, T5, encoder_of, split_text, text_key
from simpletune.system.options import Json, UserError
from simpletune.system.safetensors_file import write_safetensors

SPEC, HASH = "modelspec.sai_model_spec", "modelspec.hash_sha256"


def write_lora(
    updates: Updates,
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
            LoKr and LoHa. Text encoders get the keys that readers of this layout know.
        dtype: ``fp32``, ``fp16`` or ``bf16``; None keeps their types.
        metadata: strings for the header.

    Raises:
        UserError: there is nothing to write, the name is wrong, or values overflow the type.
    """
    if not updates:
        raise UserError(f"{file}: there are no updates to write")
    if file.suffix != ".safetensors":
        raise UserError(f"{file} must end in .safetensors, by which tools recognise the format. Rename it")
    kind = FLOATS[dtype] if dtype else None
    single = is_single_encoder(updates, metadata)
    updates, text = split_text(updates)
    low_rank = {layer: update for layer, update in updates.items() if isinstance(update, LoraUpdate)}
    dora = {layer: update for layer, update in updates.items() if isinstance(update, DoraUpdate)}
    oft = {layer: update for layer, update in updates.items() if isinstance(update, OftUpdate)}
    others = {layer: u for layer, u in updates.items() if not isinstance(u, LoraUpdate | DoraUpdate | OftUpdate)}
    if layout == "lycoris":
        for layer in (*low_rank, *dora, *oft):
            raise UserError(f"{layer} is {updates[layer].kind}; lycoris files hold LoKr or LoHa. Use --format kohya")
        tensors = structured_tensors_of(others, kind) if others else {}
    elif others:
        raise _needs_rank(*max(others.items(), key=lambda each: each[1].rank))
    else:
        tensors = {}
        if updates:
            chosen = written(updates, layout)
            tensors = file_tensors(low_rank | {layer: each.update for layer, each in dora.items()}, chosen, kind)
            tensors |= magnitudes_of(dora, chosen) | blocks_of(oft, chosen)
    tensors |= text_tensors_of(text, layout, single, kind)
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UserError(f"{file}: {spoilt[0]} {overflow(dtype)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    extra = {}
    if layout == "diffusers" and not dora:
        groups = {names_of(low_rank).denoiser: low_rank} if low_rank else {}
        extra = _adapter_metadata(groups | _by_encoder(text))
    extra |= DORA_MARK if dora else {}
    return write_safetensors(tensors, file, {**metadata, **extra}, HASH if SPEC in metadata else None)


def _needs_rank(layer: str, update: Update) -> UserError:
    return UserError(
        f"{layer} is {update.kind}, which equals a LoRA of rank {update.rank}. Give --rank {update.rank}, or a "
        "smaller one to approximate it, or use --format lycoris"
    )


def _tensors_of(
    update: Update, key: Callable[[str], str], dtype: torch.dtype | None, with_alpha: bool = True
) -> dict[str, Tensor]:
    """Return an update's tensors by key: copies, because layers may share factors, and alpha in fp32."""
    factors, alpha = update.saved()
    tensors = {key(role): factor.to(dtype or factor.dtype, copy=True) for role, factor in factors.items()}
    return tensors | ({key(ALPHA): torch.tensor(alpha, dtype=torch.float32)} if with_alpha else {})


def overflow(dtype: str | None) -> str:
    """Return the predicate of a message about a tensor whose values overflow a type."""
    return f"overflows {dtype or 'its type'}: values become infinite. Use --dtype bf16 or fp32"


def file_tensors(updates: LoraUpdates, layout: Layout, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file in a layout, by key.

    Not every tool reads alpha in diffusers' layout, so there the scale is folded into the second factor. The other
    layouts get ``.alpha`` = scale x rank, where a fused q, k, v has the rank of the fused update. With diffusers'
    names, alpha is equal in every module: diffusers 0.42.1 applies the most common alpha of a U-Net's file to all
    attention layers.
    """
    named = in_original_names(updates, layout.names) if layout.original else dict(updates)
    if not layout.alpha:
        named = {module: update.folded() for module, update in named.items()}
    elif not layout.original:
        named = _with_one_alpha(named)
    tensors: dict[str, Tensor] = {}
    for module in sorted(named, key=natural_sort_key):
        tensors |= _tensors_of(named[module], partial(layout.key, module), dtype, layout.alpha)
    return tensors


def text_tensors_of(
    text: Updates, layout: str, single: bool = False, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the tensors of text encoders in a file, by key.

    Args:
        text: updates by ``text_encoder...`` names.
        layout: ``diffusers``, ``kohya``, ``comfy`` or ``lycoris``.
        single: whether the model has one text encoder.
        dtype: None keeps their types.

    Raises:
        UserError: no tool reads such an update of a text encoder under these keys.
    """
    low_rank = {layer: update for layer, update in text.items() if isinstance(update, LoraUpdate)}
    others = {layer: update for layer, update in text.items() if not isinstance(update, LoraUpdate)}
    tensors: dict[str, Tensor] = {}
    for layer in sorted(others, key=natural_sort_key):
        update = others[layer]
        if isinstance(update, DoraUpdate | OftUpdate):
            raise UserError(f"{layer} is {update.kind}, which is written for the denoiser only. Merge it into its base")
        if layout != "lycoris":
            raise _needs_rank(layer, update)
        tensors |= _tensors_of(update, partial(text_key, layer, layout=layout, single=single), dtype)
    with_alpha = layout != "diffusers"
    named = _with_one_alpha(low_rank) if with_alpha else {k: u.folded() for k, u in low_rank.items()}
    for layer in sorted(named, key=natural_sort_key):
        if layer.startswith(f"{T5}.") and not with_alpha:
            raise UserError(f"{layer} is a layer of T5, whose LoRA diffusers does not load. Use --format kohya")
        tensors |= _tensors_of(named[layer], partial(text_key, layer, layout=layout, single=single), dtype, with_alpha)
    return tensors


def is_single_encoder(updates: Updates, metadata: Mapping[str, str]) -> bool:
    """Whether updates are for a model with one text encoder (Stable Diffusion 1.5 or 2), by the layers of the denoiser;
    for text encoders only, by what the header says about the base."""
    denoiser, text = split_text(updates)
    if denoiser:
        return names_of(denoiser).denoiser == "unet"
    base = metadata.get("ss_base_model_version", "") + metadata.get("modelspec.architecture", "")
    only_first = all(encoder_of(layer)[0] == CLIP_L for layer in text)
    return only_first and ("sd_v" in base or "stable-diffusion-v" in base)


def _by_encoder(text: Updates) -> dict[str, LoraUpdates]:
    """Return the LoRA updates of each text encoder, by the layers' names in it."""
    found: dict[str, dict[str, LoraUpdate]] = {}
    for layer, update in text.items():
        if isinstance(update, LoraUpdate):
            encoder, name = encoder_of(layer)
            found.setdefault(encoder, {})[name] = update
    return dict(found)


def structured_tensors_of(updates: Updates, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the tensors of a LoKr or LoHa file by key: diffusers' layers under the names that ComfyUI reads.

    Raises:
        UserError: a layer has only rows of a LoKr that was trained on a fused layer.
    """
    layout = result_layout(updates, "lycoris")
    tensors: dict[str, Tensor] = {}
    for layer in sorted(updates, key=natural_sort_key):
        update = updates[layer]
        if isinstance(update, LokrUpdate) and not update.is_own:
            raise UserError(
                f"{layer} has only some rows of a fused layer's {update.kind}, which no file can hold. Approximate it "
                "by a LoRA: --format kohya --rank 32"
            )
        tensors |= _tensors_of(update, partial(layout.key, layer), dtype)
    return tensors


def _with_one_alpha(updates: LoraUpdates) -> dict[str, LoraUpdate]:
    """Give every update the most common alpha (scale x rank), and scale the second factor of the others to match."""
    alphas = Counter(update.scale * update.rank for update in updates.values())
    common = alphas.most_common(1)[0][0] if alphas else 1.0
    found = {}
    for layer, update in updates.items():
        factor = update.scale * update.rank / common
        up = update.up if factor == 1 else (update.up.float() * factor).to(update.up.dtype)
        found[layer] = replace(update, up=up, scale=common / update.rank)
    return found


def in_original_names(updates: LoraUpdates, names: LoraNames) -> dict[str, LoraUpdate]:
    """Convert updates to the original names: fuse q, k, v and swap halves if the layouts differ.

    Raises:
        UserError: the family has no such layer.
    """
    found: dict[str, LoraUpdate] = {}
    thirds: dict[str, list[LoraUpdate | None]] = {}
    for layer, update in updates.items():
        try:
            module, third = names.original(layer)
        except (KeyError, ValueError):
            raise UserError(
                f"{layer} is not a layer of {names.title}, so it has no name in the original layout"
            ) from None
        if third is None:
            found[module] = update.swapped() if names.halves_swapped(layer, *update.shape) else update
        else:
            thirds.setdefault(module, [None, None, None])[third] = update
    return found | {module: fuse(parts) for module, parts in thirds.items()}


def _adapter_metadata(groups: Mapping[str, LoraUpdates]) -> dict[str, str]:
    """Build PEFT's settings for diffusers if ranks differ: older versions would use the first layer's rank as every
    alpha.

    Alpha equals the rank in every layer, so tools that ignore the header apply the same scale.

    Args:
        groups: the updates of each part of the pipeline.
    """
    settings = {part: _settings(updates) for part, updates in groups.items()}
    if not any("rank_pattern" in each for each in settings.values()):
        return {}
    flat = {f"{part}.{key}": value for part, each in settings.items() for key, value in each.items()}
    return {ADAPTER_METADATA: json.dumps(flat)}


def _settings(updates: LoraUpdates) -> Json:
    ranks = {layer: update.rank for layer, update in updates.items()}
    common = Counter(ranks.values()).most_common(1)[0][0]
    others = {f"^{layer}": rank for layer, rank in ranks.items() if rank != common}
    patterns = {"rank_pattern": others, "alpha_pattern": others} if others else {}
    return {"r": common, "lora_alpha": common, **patterns, "target_modules": sorted(ranks, key=natural_sort_key)}
