"""Reading a LoRA file into a model: what does not fit is an error, never silence."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from simpletune.adapters.lora_layers import ADAPTER, compute_in_input_type, lora_layers
from simpletune.models.weights import read_header
from simpletune.options import UserError

PREFIX = "transformer."
ENDINGS = (".lora_A.weight", ".lora_B.weight")


def load_lora(model: nn.Module, file: Path, scale: float = 1.0) -> None:
    """Add a LoRA in diffusers' format to a transformer, in place.

    Args:
        model: the transformer, quantised or not.
        file: safetensors with keys ``transformer.{layer}.lora_A.weight`` and ``.lora_B.weight``.
        scale: strength.

    Raises:
        UserError: keys that match no layer, another format, or shapes of another model.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import load_file

    header = read_header(file)
    header.pop("__metadata__", None)
    _require_diffusers_format(file, header)
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
    layers = sorted({name.removesuffix(ENDINGS[0]).removesuffix(ENDINGS[1]) for name in tensors})
    modules = dict(model.named_modules())
    lost = [layer for layer in layers if not isinstance(modules.get(layer), nn.Linear)]
    if lost:
        raise UserError(f"{file}: {len(lost)} of {len(layers)} layers are not in this model: {', '.join(lost[:5])}")
    ranks = {}
    for layer in layers:
        pair = [tensors.get(layer + ending) for ending in ENDINGS]
        if pair[0] is None or pair[1] is None:
            raise UserError(f"{file}: {layer} has only one of lora_A and lora_B. The file is damaged")
        linear = modules[layer]
        expected = (linear.in_features, linear.out_features)
        if (pair[0].shape[1], pair[1].shape[0]) != expected or pair[0].shape[0] != pair[1].shape[1]:
            shapes = f"{list(pair[0].shape)} and {list(pair[1].shape)}"
            raise UserError(
                f"{file}: {layer} has {shapes}, which do not fit {expected[0]} inputs and {expected[1]} outputs"
            )
        ranks[layer] = pair[0].shape[0]
    common = max(ranks.values())
    config = LoraConfig(
        r=common, lora_alpha=common, target_modules=layers,
        rank_pattern={f"^{k}$": r for k, r in ranks.items()}, alpha_pattern={f"^{k}$": r for k, r in ranks.items()},
    )  # fmt: skip
    inject_adapter_in_model(config, model)
    for name, layer in lora_layers(model):
        layer.lora_A[ADAPTER].weight.data.copy_(tensors[name + ENDINGS[0]])
        layer.lora_B[ADAPTER].weight.data.copy_(tensors[name + ENDINGS[1]])
        layer.scaling[ADAPTER] = scale
    compute_in_input_type(model)
    model.requires_grad_(False)


def _require_diffusers_format(file: Path, header: dict) -> None:
    """Name the format of a file that is none of diffusers'."""
    strange = [name for name in header if not (name.startswith(PREFIX) and name.endswith(ENDINGS))]
    if not strange and header:
        return
    kind = "no LoRA that is known here"
    if any(name.startswith("lora_unet_") for name in strange):
        kind = "a kohya LoRA"
    elif any(name.startswith("diffusion_model.") for name in strange):
        kind = "a ComfyUI LoRA"
    listed = ", ".join(strange[:4]) or "nothing"
    raise UserError(f"{file} is {kind} (it holds {listed}). Give one in diffusers' format: transformer.*.lora_A.weight")


def fold_lora(model: nn.Module) -> None:
    """Add each update to its layer's weight, W + scale B A, and remove it; weights must not be quantised."""
    for name, layer in list(lora_layers(model)):
        linear = layer.get_base_layer()
        a, b = (pair[ADAPTER].weight.data for pair in (layer.lora_A, layer.lora_B))
        update = layer.scaling[ADAPTER] * (b.float() @ a.float())
        linear.weight.data.copy_(linear.weight.data.float() + update)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)
