"""Read LoRA files of any layout into updates under diffusers' names. A key that matches no layer is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.files.detect_model import SD15
from simpletune.adapters.files.header import DAMAGED, LoraHeader, Module, open_lora
from simpletune.adapters.files.keys import DORA, DORA_ROLES, LOKR, LORA, OFT
from simpletune.adapters.files.updates import DoraUpdate, LohaUpdate, LokrUpdate, LoraUpdate, OftUpdate, Update, split
from simpletune.engine.tensors import exchanged_halves
from simpletune.models.shared.lora_names import DORA_MARK, DORA_SCALE, DOWN, MAGNITUDE, OFT_BLOCKS, UP, LoraNames
from simpletune.models.shared.text_layers import is_text
from simpletune.system.options import UserError

READ = (torch.float32, torch.float16, torch.bfloat16)


def read_lora(file: Path) -> dict[str, Update]:
    """Read a LoRA file of any family in diffusers', kohya's, ComfyUI's, PEFT's or OneTrainer's layout.

    Returns:
        Updates in the file's type by diffusers' layer name; those of text encoders by ``text_encoder.`` and the layer's
        name (``models.text_layers``). Scales are those of diffusers and kohya's tools: an ``alpha`` tensor / rank,
        otherwise the header's ``lora_adapter_metadata``, otherwise 1.

    Raises:
        UserError: the file is not a LoRA for a known family, is damaged, has keys that match no layer, or non-finite
            values.
    """
    return updates_of(open_lora(file))


def updates_of(header: LoraHeader) -> dict[str, Update]:
    """``read_lora`` for a file whose header has been checked."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Update] = {}
    try:
        opened = safe_open(header.file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{header.file}: {' '.join(str(error).split())[:120]}. {DAMAGED}") from None
    with opened as handle:
        for module in header.all_modules:
            factors = {role: handle.get_tensor(key) for role, key in module.factors.items()}
            for role, tensor in factors.items():
                key = module.keys[role]
                if tensor.dtype not in READ:
                    raise UserError(
                        f"{header.file}: {key} is in {tensor.dtype}, which is not supported. Use fp32, fp16 or bf16"
                    )
                if not tensor.isfinite().all():
                    raise UserError(
                        f"{header.file}: {key} contains NaN or infinite values: its training diverged. "
                        "Use an earlier checkpoint"
                    )
            for layer, part in zip(module.layers, _parts(header, module, factors), strict=True):
                if layer in found:
                    raise UserError(f"{header.file}: {layer} is updated twice, once by {module.name}. {DAMAGED}")
                if part is not None:
                    names = _original_names(header, layer)
                    swapped = names is not None and names.halves_swapped(layer, *part.shape)
                    found[layer] = part.swapped() if swapped else part
    return found


def _parts(header: LoraHeader, module: Module, factors: Mapping[str, Tensor]) -> Sequence[Update | None]:
    """The updates of a module's layers: one, or those that a fused q, k, v stacks."""
    count, scale = len(module.layers), header.scale(module)
    if module.kind == OFT:
        blocks, names = factors[OFT_BLOCKS], _original_names(header, module.layers[0])
        norm = float((blocks - blocks.transpose(1, 2)).norm())
        if module.alpha and norm > module.alpha > 0:  # a limit on ||B - B^T||, as in ComfyUI
            blocks = blocks * (module.alpha / norm)
        own = zip(module.layers, blocks.chunk(count), strict=True)
        return [OftUpdate(part, (layer, names) if names else None) for layer, part in own]
    flat = {role: factor.flatten(1) for role, factor in factors.items() if role not in DORA_ROLES}
    if module.kind in (LORA, DORA):
        update = LoraUpdate(flat[DOWN], flat[UP], scale, pointwise=factors[DOWN].ndim == 4)
        if module.kind == DORA:
            return DoraUpdate(update, *_magnitudes(header, module, factors, update.shape)).parts(count)
        return [update] if count == 1 else split(update, count)
    size = header.size(module)
    assert size is not None
    pointwise = any(factor.ndim == 4 for factor in factors.values())
    if header.family[0] == SD15 and module.layers[0].endswith((".proj_in", ".proj_out")):
        pointwise = True  # 1x1 convolutions, which 2-D factors do not tell
    whole: LokrUpdate | LohaUpdate = LohaUpdate(flat, scale, pointwise)
    if module.kind == LOKR:
        whole = LokrUpdate(flat, size.outputs, scale, pointwise=pointwise)
    height = size.outputs // count
    return [whole.rows(number * height, height) for number in range(count)]


def _magnitudes(
    header: LoraHeader, module: Module, factors: Mapping[str, Tensor], shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """``DoraUpdate``'s magnitude and relative magnitude. Prefers PEFT's key; ``dora_scale`` has the magnitude, too,
    unless the header marks it as made for ComfyUI."""
    vectors = {role: factors[role].flatten().float() for role in DORA_ROLES if role in factors}
    scale, layout = vectors.get(DORA_SCALE), header.layout
    if not DORA_MARK.items() <= header.metadata.items():
        return vectors.get(MAGNITUDE, scale), None
    if scale is not None and layout and not layout.original and not is_text(module.layers[0]):
        if layout.names.halves_swapped(module.layers[0], *shape):
            scale = exchanged_halves(scale)  # its rows are in the original order, unlike the others
    return vectors.get(MAGNITUDE), scale


def _original_names(header: LoraHeader, layer: str) -> LoraNames | None:
    """The family's names if the file has a layer of the denoiser under its original name."""
    layout = header.layout
    return layout.names if layout is not None and layout.original and not is_text(layer) else None
