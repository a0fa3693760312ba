"""How kohya's scripts and ComfyUI apply a LoRA file to a U-Net, written out by hand.

Part of the independent reference: it imports neither the package under test nor diffusers. Both walk the model's
modules, make the names that a file may use for each, and look those up; neither parses the names in the file.

- kohya (``networks/lora.py``): ``lora_unet_`` and the module's name with underscores for dots, of the linear layers and
  1x1 convolutions inside ``Transformer2DModel``; ``.lora_down.weight``, ``.lora_up.weight``, ``.alpha``; without alpha
  the scale is 1.
- ComfyUI (``comfy/lora.py``, 2025): the same names of any weight, and ``unet.`` or nothing with diffusers' name in
  which ``.to_`` is ``.processor.to_`` and a last ``.0`` of ``to_out.0`` is dropped; then ``.lora_up.weight``,
  ``_lora.up.weight``, ``.lora.up.weight`` or ``.lora_B.weight`` and their counterparts. Whatever the name, the weight
  gets strength * alpha / rank * up @ down, with alpha = rank where the file has none. Other keys are only logged.
"""

from __future__ import annotations

import torch
from torch import Tensor

ENDINGS = (
    (".lora_up.weight", ".lora_down.weight"),
    ("_lora.up.weight", "_lora.down.weight"),
    (".lora.up.weight", ".lora.down.weight"),
    (".lora_B.weight", ".lora_A.weight"),
)


def kohya_names(state: dict[str, Tensor]) -> dict[str, str]:
    """Names in kohya's files, with their weights."""
    found = {}
    for weight, tensor in state.items():
        module = weight.removesuffix(".weight")
        if module == weight or ".attentions." not in module or ".norm" in module:
            continue
        if tensor.ndim == 2 or tensor.ndim == 4 and tuple(tensor.shape[2:]) == (1, 1):
            found["lora_unet_" + module.replace(".", "_")] = weight
    return found


def comfy_names(state: dict[str, Tensor]) -> dict[str, str]:
    """Names in files that ComfyUI knows, with their weights under diffusers' names."""
    found = {}
    for weight in state:
        module = weight.removesuffix(".weight")
        if module == weight:
            continue
        found["lora_unet_" + module.replace(".", "_")] = weight
        processor = module.replace(".to_", ".processor.to_")
        processor = processor[:-2] if processor.endswith(".to_out.0") else processor
        found[processor] = found["unet." + processor] = weight
    return found


def apply(
    state: dict[str, Tensor],  # diffusers' names
    file: dict[str, Tensor],
    names: dict[str, str],
    strength: float = 1.0,
) -> tuple[dict[str, Tensor], list[str]]:
    """The state with the file applied, and the keys of the file that nothing asked for."""
    patched = {name: tensor.clone() for name, tensor in state.items()}
    used = set()
    for name, weight in names.items():
        for up_ending, down_ending in ENDINGS:
            if name + up_ending not in file:
                continue
            up, down = file[name + up_ending], file[name + down_ending]
            used |= {name + up_ending, name + down_ending, name + ".alpha"}
            rank = down.shape[0]
            alpha = file[name + ".alpha"].item() if name + ".alpha" in file else rank
            convolution = patched[weight].ndim == 4
            assert (up.ndim == down.ndim == 4) == convolution, f"{name}: the factors' shape is not the layer's"
            difference = up.reshape(-1, rank).double() @ down.reshape(rank, -1).double()
            patched[weight] += (strength * alpha / rank * difference).reshape(patched[weight].shape).to(torch.float32)
    return patched, sorted(set(file) - used)
