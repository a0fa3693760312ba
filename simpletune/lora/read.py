"""Reading LoRA files of any layout into updates under diffusers' names. What matches nothing is an error."""

from __future__ import annotations

from pathlib import Path

import torch

from simpletune.lora.header import LoraHeader, open_lora
from simpletune.lora.layouts import DOWN, UP, halves_swapped
from simpletune.lora.updates import Update, split, swap_halves
from simpletune.options import UserError

READ = (torch.float32, torch.float16, torch.bfloat16)


def read_lora(file: Path) -> dict[str, Update]:
    """The updates of a LoRA file in diffusers', kohya's, ComfyUI's, PEFT's or OneTrainer's layout.

    Args:
        file: safetensors.

    Returns:
        By diffusers' layer name, in the file's type; scales as diffusers or kohya's tools read them: a tensor ``alpha``
        over the rank, else the header's ``lora_adapter_metadata``, else 1.

    Raises:
        UserError: it is no LoRA for SD3, damaged, has keys that match nothing, or values that are not finite.
    """
    return updates_of(open_lora(file))


def updates_of(header: LoraHeader) -> dict[str, Update]:
    """The updates of a file whose header has been checked.

    Raises:
        UserError: values that are not finite, two updates for one layer, or a type that is not read.
    """
    from safetensors import SafetensorError, safe_open

    assert header.layout is not None
    found: dict[str, Update] = {}
    try:
        opened = safe_open(header.file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{header.file} is damaged ({' '.join(str(error).split())[:120]}). Fetch it again") from None
    with opened as handle:
        for module in header.modules.values():
            down, up = (handle.get_tensor(module.keys[role]) for role in (DOWN, UP))
            for key, tensor in ((module.keys[DOWN], down), (module.keys[UP], up)):
                if tensor.dtype not in READ:
                    raise UserError(f"{header.file}: {key} is in {tensor.dtype}, which is not read")
                if not tensor.isfinite().all():
                    raise UserError(f"{header.file}: {key} holds NaN or infinite values: the training had diverged")
            update = Update(down, up, header.scale(module))
            parts = [update] if len(module.layers) == 1 else split(update, len(module.layers))
            for layer, part in zip(module.layers, parts, strict=True):
                if layer in found:
                    raise UserError(f"{header.file}: {layer} is updated twice, once by {module.name}")
                if part is not None:
                    swapped = header.layout.original and halves_swapped(layer, *part.shape)
                    found[layer] = swap_halves(part) if swapped else part
    return found
