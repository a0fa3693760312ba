"""Write updates as a LoRA file in diffusers', kohya's or ComfyUI's layout, or LoKr and LoHa in LyCORIS's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.files.header import ADAPTER_METADATA, natural_sort_key
from simpletune.adapters.files.updates import (
    DoraUpdate,
    LohaUpdate,
    LokrUpdate,
    LoraUpdate,
    LoraUpdates,
    OftUpdate,
    Update,
    Updates,
    fuse,
)
from simpletune.adapters.methods.formulas import FLOATS, named_blocks
from simpletune.engine.tensors import swap_halves
from simpletune.models.lora_registry import LAYOUTS, factor_layout, family_of_names, names_of
from simpletune.models.shared.fused import Rows
from simpletune.models.shared.lora_encoders import LoraEncoder
from simpletune.models.shared.lora_layout import ALPHA, DORA_MARK, DORA_SCALE, MAGNITUDE, Layout, LoraNames
from simpletune.models.shared.lora_verdicts import DIFFUSERS
from simpletune.models.text_layers import FIRST, FOLDERS, encoder_of, encoder_with, encoders_in, split_text, text_key
from simpletune.system.options import Json, UserError
from simpletune.system.safetensors_file import write_safetensors

SPEC, HASH = "modelspec.sai_model_spec", "modelspec.hash_sha256"
MERGE = "Merge it into its base with simpletune lora merge"


def write_lora(
    updates: Updates,
    file: Path,
    layout: str = "diffusers",
    dtype: str | None = None,
    metadata: Mapping[str, str] = {},
    names: LoraNames | None = None,
) -> Path:
    """Write a LoRA file atomically.

    Args:
        updates: updates by diffusers' layer name.
        file: the target.
        layout: ``diffusers``, ``kohya`` or ``comfy`` for LoRA and DoRA; ``kohya`` or ``comfy`` for OFT; ``lycoris`` for
            LoKr and LoHa. Text encoders get the keys that readers of this layout know.
        dtype: ``fp32``, ``fp16`` or ``bf16``; None keeps their types.
        metadata: strings for the header.
        names: of the model's family; None: by the layers.

    Raises:
        UserError: there is nothing to write, the name is wrong, or values overflow the type.
    """
    if not updates:
        raise UserError(f"{file}: there are no updates to write")
    if file.suffix != ".safetensors":
        raise UserError(f"{file} must end in .safetensors, by which tools recognise the format. Rename it")
    kind = FLOATS[dtype] if dtype else None
    names = names or names_in(updates)
    single = is_single_encoder(updates, metadata, names)
    updates, text = split_text(updates)
    low_rank = {layer: update for layer, update in updates.items() if isinstance(update, LoraUpdate)}
    dora = {layer: update for layer, update in updates.items() if isinstance(update, DoraUpdate)}
    for layer, each in dora.items():
        if not each.is_plain:
            form = f"{each.kind} with a magnitude for each input" if each.by_input else each.kind
            raise UserError(
                f"{layer} is {form}, which is not written. Merge it into its base: simpletune lora merge, and for a "
                "LoRA that is close to it: simpletune lora extract"
            )
    oft = {layer: update for layer, update in updates.items() if isinstance(update, OftUpdate)}
    others = {layer: u for layer, u in updates.items() if isinstance(u, LokrUpdate | LohaUpdate)}
    tensors: dict[str, Tensor] = {}
    if layout == "lycoris":
        for layer in (*low_rank, *dora, *oft):
            raise UserError(f"{layer} is {updates[layer].kind}; lycoris files hold LoKr or LoHa. Use --format kohya")
        tensors = _lycoris_tensors(others, names, kind)
    elif others:
        raise _needs_rank(*max(others.items(), key=lambda each: each[1].rank))
    elif updates:
        assert names is not None
        chosen = next((each for each in LAYOUTS[names] if each.name == layout), None)
        if chosen is None:
            known = " or ".join(each.name for each in LAYOUTS[names] if each.prefix)
            raise UserError(f"{layout}: files for {names.title} have no such layout. Use {known}")
        directions = {layer: each.update for layer, each in dora.items() if isinstance(each.update, LoraUpdate)}
        tensors = file_tensors(low_rank | directions, chosen, kind)
        tensors |= _magnitudes(dora, chosen)
        for layer, turned in oft.items():  # ComfyUI would rotate the wrong rows under other names
            if not chosen.alpha or chosen.names.reorders and chosen.original != (turned.original is not None):
                raise UserError(f"{layer} is OFT, which ComfyUI reads only under its own names. Use --format kohya")
        tensors |= named_blocks({layer: turned.blocks for layer, turned in oft.items()}, chosen)
    tensors |= text_tensors_of(text, layout, single, kind, names.encoders if names else ())
    spoilt = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if spoilt:
        raise UserError(f"{file}: {spoilt[0]} {overflow(dtype)}")
    file.parent.mkdir(parents=True, exist_ok=True)
    extra = {}
    if layout == "diffusers" and not dora:
        extra = adapter_metadata(low_rank, names, text)
    extra |= DORA_MARK if dora else {}
    return write_safetensors(tensors, file, {**metadata, **extra}, HASH if SPEC in metadata else None)


def _needs_rank(layer: str, update: Update) -> UserError:
    return UserError(
        f"{layer} is {update.kind}, which equals a LoRA of rank {update.rank}. Give --rank {update.rank}, or a "
        "smaller one to approximate it, or use --format lycoris"
    )


def overflow(dtype: str | None) -> str:
    """Return the predicate of a message about a tensor whose values overflow a type."""
    return f"overflows {dtype or 'its type'}: values become infinite. Use --dtype bf16 or fp32"


def _tensors_of(
    update: Update, key: Callable[[str], str], dtype: torch.dtype | None, with_alpha: bool = True
) -> dict[str, Tensor]:
    """Return an update's tensors by key: copies, because layers may share factors, and alpha in fp32."""
    factors, alpha = update.file_factors()
    tensors = {key(role): factor.to(dtype or factor.dtype, copy=True) for role, factor in factors.items()}
    return tensors | ({key(ALPHA): torch.tensor(alpha, dtype=torch.float32)} if with_alpha else {})


def file_tensors(updates: LoraUpdates, layout: Layout, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the tensors of LoRA updates in a layout, by key; alpha is scale x rank, of a fused q, k, v the fused
    update's."""
    named = in_original_names(updates, layout.names) if layout.original else dict(updates)
    if not layout.alpha:  # not every tool reads it in diffusers' layout
        named = {module: update.folded() for module, update in named.items()}
    elif not layout.original or layout.names.one_alpha:
        named = _with_one_alpha(named)
    tensors: dict[str, Tensor] = {}
    for module in sorted(named, key=natural_sort_key):
        tensors |= _tensors_of(named[module], partial(layout.key, module), dtype, layout.alpha)
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
    """Convert updates to the original names: fuse q, k, v and swap halves if the layouts differ."""
    found: dict[str, LoraUpdate] = {}
    parts: dict[str, dict[Rows, LoraUpdate]] = {}
    for layer, update in updates.items():
        try:
            module, rows = names.original(layer)
        except (KeyError, ValueError):
            raise UserError(
                f"{layer} is not a layer of {names.title}, so it has no name in the original layout"
            ) from None
        if rows is None:
            found[module] = update.swap_halves() if names.halves_swapped(layer, *update.shape) else update
        else:
            parts.setdefault(module, {})[rows] = update
    return found | {module: fuse(own) for module, own in parts.items()}


def _magnitudes(updates: Mapping[str, DoraUpdate], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors by which tools scale the rows of DoRA, by key; in fp32, because rounding them changes whole
    rows.

    ``lora_magnitude_vector`` is for diffusers, which reads only its own layout; ``dora_scale`` is for ComfyUI. A file
    gets both if both are known.
    """
    for layer, update in updates.items():
        if layout.alpha and update.relative is None:
            raise UserError(
                f"{layer} has a magnitude but no norm of its base's rows, which ComfyUI's dora_scale needs. {MERGE}"
            )
        if not layout.alpha and update.magnitude is None:
            raise UserError(f"{layer} has only ComfyUI's dora_scale, which diffusers cannot apply. {MERGE}")
    scales = {layer: update.relative for layer, update in updates.items() if update.relative is not None}
    magnitudes = {layer: update.magnitude for layer, update in updates.items() if update.magnitude is not None}
    exchanged = {layer for layer, update in updates.items() if layout.names.halves_swapped(layer, *update.shape)}
    for layer in exchanged & scales.keys():  # rows are in ComfyUI's order, whatever the names
        scales[layer] = swap_halves(scales[layer])
    for layer in exchanged & magnitudes.keys() if layout.original else ():
        magnitudes[layer] = swap_halves(magnitudes[layer])
    convolutions = {layout.module(layer) for layer, update in updates.items() if update.kernel}
    tensors: dict[str, Tensor] = {}
    for module, vector in _by_module(scales, layout).items():
        sides = (1, 1, 1) if module in convolutions else (1,)
        tensors[layout.key(module, DORA_SCALE)] = vector.float().view(-1, *sides).clone()
    for module, vector in _by_module(magnitudes, layout).items():
        shape = [-1]
        if not layout.alpha and module in convolutions:
            shape = [1, -1, 1, 1]  # as PEFT keeps a convolution's
        tensors[layout.key(module, MAGNITUDE)] = vector.float().view(shape).clone()
    return tensors


def _by_module(vectors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return vectors by the layout's modules; under the original names, those of q, k and v are stacked."""
    if not layout.original:
        return dict(vectors)
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[Rows, Tensor]] = {}
    for layer, vector in vectors.items():
        module, rows = layout.place(layer)
        if rows is not None:
            parts.setdefault(module, {})[rows] = vector
        else:
            found[module] = vector
    for module, own in parts.items():
        fused = layout.names.layers(layout.spelt(module), layout)
        if len(own) < len(fused):
            raise UserError(
                f"{module} fuses {len(fused)} layers, and this DoRA has {len(own)} of them; the norms of the others' "
                "rows are unknown. Use --format diffusers, which ComfyUI reads too"
            )
        found[module] = torch.cat([own[rows] for rows in sorted(own)])
    return found


def _lycoris_tensors(updates: Updates, names: LoraNames | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors of LoKr and LoHa by key: the layers under the names that ComfyUI reads."""
    tensors: dict[str, Tensor] = {}
    layout = factor_layout(LAYOUTS[names]) if updates and names is not None else None
    for layer in sorted(updates, key=natural_sort_key):
        update = updates[layer]
        assert layout is not None
        if isinstance(update, LokrUpdate) and not update.is_own:
            raise UserError(
                f"{layer} has only some rows of a fused layer's {update.kind}, which no file can hold. Approximate it "
                "by a LoRA: --format kohya --rank 32"
            )
        tensors |= _tensors_of(update, partial(layout.key, layout.module(layer)), dtype)
    return tensors


def text_tensors_of(
    text: Updates,
    layout: str,
    single: bool = False,
    dtype: torch.dtype | None = None,
    encoders: Sequence[LoraEncoder] = (),
) -> dict[str, Tensor]:
    """Return the tensors of text encoders in a file, by key, from updates by ``text_encoder...`` names. ``single``: the
    model has one text encoder. ``encoders``: the family's, if it is known. Raises UserError if no tool reads such an
    update of a text encoder under these keys, or the model has no such encoder."""
    more = [layer for layer in text if single and encoder_of(layer)[0] != FIRST]
    if more:
        raise UserError(
            f"{more[0]} is a layer of {encoders_in(more)}, and the denoiser's layers are of a model with one text "
            "encoder. Use LoRAs for the same model"
        )
    low_rank = {layer: update for layer, update in text.items() if isinstance(update, LoraUpdate)}
    others = {layer: update for layer, update in text.items() if not isinstance(update, LoraUpdate)}
    tensors: dict[str, Tensor] = {}
    for layer in sorted(others, key=natural_sort_key):
        update = others[layer]
        if isinstance(update, DoraUpdate | OftUpdate):
            raise UserError(f"{layer} is {update.kind}, which is written for the denoiser only. Merge it into its base")
        if layout != "lycoris":
            raise _needs_rank(layer, update)
        tensors |= _tensors_of(update, partial(text_key, layer, layout=layout, single=single, encoders=encoders), dtype)
    with_alpha = layout != "diffusers"
    named = _with_one_alpha(low_rank) if with_alpha else {k: u.folded() for k, u in low_rank.items()}
    for layer in sorted(named, key=natural_sort_key):
        encoder = encoder_with(layer, encoders)
        if layout == "diffusers" and not encoder.read_by[DIFFUSERS]:
            raise UserError(
                f"{layer} is a layer of {encoder.title}, whose LoRA diffusers does not load. Use --format kohya"
            )
        tensors |= _tensors_of(
            named[layer], partial(text_key, layer, layout=layout, single=single, encoders=encoders), dtype, with_alpha
        )
    return tensors


def names_in(updates: Updates) -> LoraNames | None:
    """Return the names of the family of the denoiser's layers among these (``names_of``); None without any."""
    denoiser, _ = split_text(updates)
    return names_of({layer: update.shape for layer, update in denoiser.items()}) if denoiser else None


def is_single_encoder(updates: Updates, metadata: Mapping[str, str], names: LoraNames | None) -> bool:
    """Return whether updates are for a model with one text encoder: of the family with these names, else by what the
    header says about the base."""
    if names is not None:
        return len(family_of_names(names).text.encoders) == 1
    text = split_text(updates)[1]
    base = metadata.get("ss_base_model_version", "") + metadata.get("modelspec.architecture", "")
    only_first = all(encoder_of(layer)[0] == FIRST for layer in text)
    return only_first and ("sd_v" in base or "stable-diffusion-v" in base)


def adapter_metadata(denoiser: LoraUpdates, names: LoraNames | None, text: Updates | None = None) -> dict[str, str]:
    """Return PEFT's settings for diffusers if ranks differ: older versions would use the first layer's rank as every
    alpha.

    Alpha equals the rank in every layer, so tools that ignore the header apply the same scale.
    """
    parts: dict[str, dict[str, int]] = {}  # the ranks of each part of the pipeline, by its layers
    if denoiser:
        assert names is not None
        parts[names.denoiser] = {layer: update.rank for layer, update in denoiser.items()}
    for layer, update in (text or {}).items():
        if isinstance(update, LoraUpdate):
            encoder, name = encoder_of(layer)  # CLIPTextModel has no text_model since transformers 5.6
            parts.setdefault(encoder, {})[name.removeprefix("text_model.")] = update.rank
    flat: Json = {}
    for part, ranks in parts.items():
        common = Counter(ranks.values()).most_common(1)[0][0]
        start = "" if part in FOLDERS else "^"
        others = {f"{start}{layer}": rank for layer, rank in ranks.items() if rank != common}
        patterns = {"rank_pattern": others, "alpha_pattern": others} if others else {}
        settings = {
            "r": common,
            "lora_alpha": common,
            **patterns,
            "target_modules": sorted(ranks, key=natural_sort_key),
        }
        flat |= {f"{part}.{key}": value for key, value in settings.items()}
    return {ADAPTER_METADATA: json.dumps(flat)} if any(key.endswith(".rank_pattern") for key in flat) else {}
