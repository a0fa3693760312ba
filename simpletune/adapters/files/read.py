"""Read LoRA files of any layout into updates under diffusers' names. A key that matches no layer is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.files.header import DAMAGED, LISTED, LoraHeader, Module, not_read, open_lora
from simpletune.adapters.files.keys import CORES, DECOMPOSED, DORA_ROLES, LOKR, LORA, OFT, module_kind
from simpletune.adapters.files.updates import DoraUpdate, LohaUpdate, LokrUpdate, LoraUpdate, OftUpdate, Update
from simpletune.adapters.methods.formulas import as_numbers
from simpletune.engine.tensors import swap_halves
from simpletune.models.shared.lora_layout import DORA_MARK, DORA_SCALE, DOWN, MAGNITUDE, MID, OFT_BLOCKS, UP
from simpletune.models.text_layers import is_text
from simpletune.system.console import say
from simpletune.system.options import UserError, join_names


def read_lora(file: Path | LoraHeader) -> dict[str, Update]:
    """Read a LoRA file of any family in diffusers', kohya's, ComfyUI's, PEFT's or OneTrainer's layout, or one whose
    header ``open_lora`` has checked.

    Returns:
        Updates in the file's type, those in fp8 and fp64 in fp32, by diffusers' layer name; those of text encoders by
        ``text_encoder.`` and the layer's name (``models.text_layers``). Scales are those of diffusers and kohya's
        tools: an ``alpha`` tensor / rank, otherwise the header's ``lora_adapter_metadata``, otherwise 1.

    Raises:
        UserError: the file is not a LoRA for a known family, is damaged, has keys that match no layer, or non-finite
            values.
    """
    from safetensors import SafetensorError, safe_open

    header = file if isinstance(file, LoraHeader) else open_lora(file)
    if words := not_read(header):
        say(f"lora    {header.file.name}: names read without {join_names(words, LISTED)}")
    if header.caution:
        say(f"lora    {header.file.name} {header.caution}")
    found: dict[str, Update] = {}
    try:
        opened = safe_open(header.file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{header.file}: {' '.join(str(error).split())[:120]}. {DAMAGED}") from None
    with opened as handle:
        for module in header.all_modules:
            factors = {
                role: as_numbers(f"{header.file}: {key}", handle.get_tensor(key))
                for role, key in module.factors.items()
            }
            update = _update(header, module, factors)
            parts = update.split(module.rows) if module.rows else [update]
            for layer, part in zip(module.layers, parts, strict=True):
                if layer in found:
                    raise UserError(f"{header.file}: {layer} is updated twice, once by {module.name}. {DAMAGED}")
                if part is not None:
                    found[layer] = part
    if header.layout is not None and header.layout.original:
        names = header.layout.names
        for layer, update in [each for each in found.items() if not is_text(each[0])]:
            if isinstance(update, OftUpdate):
                found[layer] = replace(update, original=(layer, names))
            elif names.halves_swapped(layer, *update.shape):
                found[layer] = update.swap_halves()
    return found


def _update(header: LoraHeader, module: Module, factors: Mapping[str, Tensor]) -> Update:
    """Return the update of a module, which may be a fused q, k, v."""
    scale = header.scale(module)
    if module.kind == OFT:
        blocks = factors[OFT_BLOCKS]
        norm, limit = float((blocks - blocks.transpose(1, 2)).float().norm()), header.oft_limit(module)
        if limit is not None and norm > limit:
            blocks = blocks * (limit / norm)
        return OftUpdate(blocks)
    size, kernel = header.size(module), _kernel(factors)
    assert size is not None
    if not kernel and header.layout is not None:  # which 2-D factors do not tell
        kernel = header.layout.names.kernel(module.layers[0], header.family.model)
        kernel = kernel if size.inputs % math.prod(kernel) == 0 else ()
    flat = {role: factor.flatten(1) for role, factor in plain_factors(factors).items() if role not in DORA_ROLES}
    kind = module_kind(flat)
    if kind == LORA:
        update: Update = LoraUpdate(flat[DOWN], flat[UP], scale, kernel)
    elif kind == LOKR:
        update = LokrUpdate(flat, size.outputs, scale, kernel=kernel)
    else:
        update = LohaUpdate(flat, scale, kernel)
    if module.kind not in DECOMPOSED.values():
        return update
    if header.is_by_input(module):
        return DoraUpdate(update, factors[DORA_SCALE].flatten().float(), by_input=True)
    return DoraUpdate(update, *_magnitudes(header, module, factors, update.shape))


def _kernel(factors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the kernel that factors show by their dimensions: the largest; () if none does."""
    found = [tuple(factor.shape[2:]) for role, factor in factors.items() if factor.ndim == 4 and role not in DORA_ROLES]
    return max(found, key=math.prod, default=())


def plain_factors(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an update's factors without the cores of the Tucker form (``files.keys``), which the inner factors absorb
    in fp32."""
    found = {role: factor for role, factor in factors.items() if role != MID and role not in CORES}
    for role, core in factors.items():
        if role == MID:  # B mid A, with the ranks of B first
            down = factors[DOWN].flatten(1).float()
            found[DOWN] = torch.einsum("abhw,bi->aihw", core.float(), down).to(core.dtype)
        elif role in CORES:  # the sum over both ranks of core[a, b] A[a] B[b]
            one, other = (factors[f"{CORES[role]}_{part}"].flatten(1) for part in "ab")
            found[f"{CORES[role]}_a"] = one.t().contiguous()
            inner = torch.einsum("abhw,bi->aihw", core.float(), other.float())
            found[f"{CORES[role]}_b"] = inner.flatten(1).to(core.dtype)
    return found


def _magnitudes(
    header: LoraHeader, module: Module, factors: Mapping[str, Tensor], shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``DoraUpdate``'s magnitude and relative magnitude. Prefers PEFT's key; ``dora_scale`` has the magnitude,
    too, unless the header marks it as made for ComfyUI."""
    vectors = {role: factors[role].flatten().float() for role in DORA_ROLES if role in factors}
    scale, layout = vectors.get(DORA_SCALE), header.layout
    if not DORA_MARK.items() <= header.metadata.items():
        return vectors.get(MAGNITUDE, scale), None
    if scale is not None and layout and not layout.original and not is_text(module.layers[0]):
        if layout.names.halves_swapped(module.layers[0], *shape):
            scale = swap_halves(scale)  # its rows are in the original order, unlike the others
    return vectors.get(MAGNITUDE), scale
