"""Read LoRA files of any layout into updates under diffusers' names. A key that matches no layer is an error."""

from __future__ import annotations

from pathlib import Path

import torch

from simpletune.lora.header import DAMAGED, LoraHeader, open_lora
from simpletune.lora.updates import Update, split, swap_halves
from simpletune.models.lora_names import DOWN, UP
from simpletune.options import UserError, plural
from simpletune.system.console import say

READ = (torch.float32, torch.float16, torch.bfloat16)


def read_lora(file: Path) -> dict[str, Update]:
    """Read a LoRA file of any family in diffusers', kohya's, ComfyUI's, PEFT's or OneTrainer's layout.

    Args:
        file: a safetensors file.

    Returns:
        Updates in the file's type by diffusers' layer name. Scales are those of diffusers and kohya's tools: an
        ``alpha`` tensor / rank, otherwise the header's ``lora_adapter_metadata``, otherwise 1.

    Raises:
        UserError: it is not a LoRA for a known family, is damaged, has keys that match no layer, or values that are not
            finite.
    """
    return updates_of(open_lora(file))


def updates_of(header: LoraHeader) -> dict[str, Update]:
    """Read the updates of a file whose header has been checked.

    Raises:
        UserError: values are not finite, a layer has two updates, or a type is not supported.
    """
    from safetensors import SafetensorError, safe_open

    assert header.layout is not None
    if header.text:
        say(
            f"{header.file}: {plural(len(header.text), 'key')} of text encoders, such as {header.text[0]}, "
            "are not applied: simpletune reads updates of the denoiser only"
        )
    found: dict[str, Update] = {}
    try:
        opened = safe_open(header.file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{header.file}: {' '.join(str(error).split())[:120]}. {DAMAGED}") from None
    with opened as handle:
        for module in header.modules.values():
            down, up = (handle.get_tensor(module.keys[role]) for role in (DOWN, UP))
            for key, tensor in ((module.keys[DOWN], down), (module.keys[UP], up)):
                if tensor.dtype not in READ:
                    raise UserError(
                        f"{header.file}: {key} is in {tensor.dtype}, which is not supported. Use fp32, fp16 or bf16"
                    )
                if not tensor.isfinite().all():
                    raise UserError(
                        f"{header.file}: {key} contains NaN or infinite values: its training diverged. "
                        "Use an earlier checkpoint"
                    )
            update = Update(down.flatten(1), up.flatten(1), header.scale(module), pointwise=down.ndim == 4)
            parts = [update] if len(module.layers) == 1 else split(update, len(module.layers))
            for layer, part in zip(module.layers, parts, strict=True):
                if layer in found:
                    raise UserError(f"{header.file}: {layer} is updated twice, once by {module.name}. {DAMAGED}")
                if part is not None:
                    swapped = header.layout.original and header.layout.names.halves_swapped(layer, *part.shape)
                    found[layer] = swap_halves(part) if swapped else part
    return found
