"""Add one or several LoRA files to a model. A layer that does not match raises an error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from simpletune.adapters.files.header import open_lora, require_safetensors
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import (
    DoraUpdate,
    LohaUpdate,
    LokrUpdate,
    LoraUpdate,
    LoraUpdates,
    OftUpdate,
    Update,
    Updates,
    without_other_input,
)
from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.decomposed_layer import DecomposedLayer, LowRankLayer
from simpletune.adapters.methods.dora_layers import DoraLayer
from simpletune.adapters.methods.formulas import by_norms
from simpletune.adapters.methods.hypernetwork_files import HypernetworkFile, read_hypernetwork
from simpletune.adapters.methods.hypernetwork_layer import put_before
from simpletune.adapters.methods.hypernetwork_structure import is_hypernetwork
from simpletune.adapters.methods.layers import (
    ADAPTER,
    UpdateLayer,
    innermost_layer,
    layer_shapes,
    outer_layers,
    shape_of,
    wrap,
)
from simpletune.adapters.methods.loha_layer import LohaLayer
from simpletune.adapters.methods.lokr_layer import LokrLayer
from simpletune.adapters.methods.lora_layers import compute_in_output_type, lora_layers
from simpletune.adapters.methods.oft_layer import OftLayer
from simpletune.engine.tensors import all_tensors, row_blocks
from simpletune.models.lora_registry import LAYOUTS, require_same_family
from simpletune.models.text_layers import split_text
from simpletune.system.options import UserError, join_names, plural
from simpletune.system.safetensors_file import read_header

SCALED = {"lokr_w1", "lokr_w1_a", "hada_w1_a"}
"""The factor of LoKr's and LoHa's that an update's scale is folded into."""


def load_loras(model: nn.Module, loras: Sequence[tuple[Path, float]]) -> list[str]:
    """Add LoRAs to a denoiser in place and activate all of them: y = W x + sum of scale_n B_n A_n x, or LoKr, LoHa.

    Updates of text encoders are applied when prompts are encoded (``runs.text_side``). Hypernetworks replace x by
    h_n(... h_1(x)) at their strengths.

    Args:
        model: the denoiser, quantised or not, without adapters.
        loras: files in any layout (diffusers', kohya's, ComfyUI's, ...) with their strengths.

    Returns:
        The names of the adapters, in the order of the files, by which the layers' ``scaling`` holds the strengths.

    Raises:
        UserError: keys match no layer, shapes belong to another model, or ``read_lora`` refuses a file.
    """
    names = [ADAPTER if number == 0 else f"{ADAPTER}_{number}" for number in range(len(loras))]
    structured: list[tuple[str, str, Update, float]] = []
    networks: list[tuple[str, HypernetworkFile, float]] = []
    for name, (file, scale) in zip(names, loras, strict=True):
        if holds_hypernetwork(file):
            networks.append((name, read_hypernetwork(file), scale))
            continue
        header = open_lora(file)
        given, _ = split_text(read_lora(header))
        if not given:
            continue
        updates = without_other_input(str(file), given, base_shapes(model))
        require_layers(str(file), updates, model, f" (for {header.family.model})")
        low_rank = {layer: update for layer, update in updates.items() if isinstance(update, LoraUpdate)}
        if low_rank:
            _inject(model, name, low_rank, scale)
        structured += [(name, layer, u, scale) for layer, u in updates.items() if not isinstance(u, LoraUpdate)]
    for _, layer in lora_layers(model):
        layer.set_adapter([name for name in names if name in layer.lora_A])
    compute_in_output_type(model)
    for name, layer_name, update, scale in structured:  # around PEFT's layers, which cannot wrap these
        wrapped = wrapping_layer(update, model.get_submodule(layer_name), name)
        wrapped.scaling[name] = scale
        wrap(model, layer_name, wrapped)
    for name, hypernetwork, scale in reversed(networks):  # the first reads x first; LoRAs update what they feed
        put_before(model, hypernetwork.pairs(), name)
        for _, layer in outer_layers(model):
            if name in layer.scaling:
                layer.scaling[name] = scale
    model.requires_grad_(False)
    return names


def wrapping_layer(update: Update, base: nn.Module, adapter: str) -> UpdateLayer:
    """Wrap a frozen layer, or a layer that wraps it already, with an update. PEFT wraps those of LoRA alone.

    Args:
        adapter: the name by which the wrapping layer's ``scaling`` holds the strength.
    """
    if isinstance(update, DoraUpdate) and not update.is_plain:
        return decomposed_layer(update, base, adapter)
    if isinstance(update, LoraUpdate):
        return LowRankLayer(base, {"down": update.down.float(), "up": update.up.float() * update.scale}, adapter)
    if isinstance(update, LokrUpdate | LohaUpdate | OftUpdate):
        shape = shape_of(innermost_layer(base))
        assert shape is not None
        factors = factors_of(update, math.prod(shape[1:]))
        if isinstance(update, LokrUpdate):
            return LokrLayer(base, factors, adapter, update.skipped)
        return LohaLayer(base, factors, adapter) if isinstance(update, LohaUpdate) else OftLayer(base, factors, adapter)
    assert isinstance(update, DoraUpdate) and isinstance(update.update, LoraUpdate)
    layer = DoraLayer(base, update.rank, update.scale, adapter=adapter)
    with torch.no_grad():
        layer.lora_A.weight.copy_(update.update.down.view_as(layer.lora_A.weight))
        layer.lora_B.weight.copy_(update.update.up.view_as(layer.lora_B.weight))
    set_magnitude(layer, update)
    layer.gain = layer.exact_gains()  # fixed norms make inference as fast as with LoRA; the update does not change
    return layer


@torch.no_grad()
def decomposed_layer(update: DoraUpdate, base: nn.Module, adapter: str) -> DecomposedLayer:
    """Wrap a frozen layer with DoRA of LoKr, of LoHa, or by inputs."""
    frozen = innermost_layer(base)
    turned, outputs = wrapping_layer(update.update, base, ADAPTER), update.shape[0]
    gain = update.gains(row_blocks(frozen, outputs)).to(next(iter(all_tensors(frozen))).device)
    return DecomposedLayer(base, turned, gain, update.by_input, adapter)


def factors_of(update: Update, inputs: int) -> dict[str, Tensor]:
    """Return the fp32 factors of the layer that wraps one of this many inputs with an update of LoKr, LoHa or OFT."""
    if isinstance(update, OftUpdate):
        return {"oft_triangle": update.triangle(inputs)}
    assert isinstance(update, LokrUpdate | LohaUpdate)
    factors = update.shaped() if isinstance(update, LokrUpdate) else update.factors
    return {name: f.float() * update.scale if name in SCALED else f.float() for name, f in factors.items()}


@torch.no_grad()
def set_magnitude(layer: DoraLayer, update: DoraUpdate) -> None:
    """Give a new layer, which has the update's factors already, the update's magnitude."""
    if update.magnitude is not None:
        layer.magnitude.copy_(update.magnitude)
        return
    assert update.relative is not None
    own = layer.magnitude.detach().clone()  # ||W||
    layer.magnitude.copy_(by_norms(update.relative.to(own.device) * layer.exact_norms(), own))


def holds_hypernetwork(file: Path) -> bool:
    """Return whether a file is a hypernetwork, not a LoRA. Raises UserError if it is damaged or no safetensors file."""
    require_safetensors(file)
    return is_hypernetwork(read_header(file))


def require_layers(place: str, updates: Updates, model: nn.Module, version: str = "") -> None:
    """Check that a model has every layer of a LoRA, with the same shape. Raises UserError if not."""
    require_shapes(place, updates, base_shapes(model), version)


def base_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of a model's layers by their names without wrapping layers."""
    return {name.replace(".base_layer", ""): shape for name, shape in layer_shapes(model).items()}


def require_shapes(place: str, updates: Updates, shapes: Shapes, version: str = "") -> None:
    """Check that a model with these layers and shapes has every layer of the LoRA at a place. ``version``: what the
    LoRA is for within its family, for messages. Raises UserError if a layer is missing or has another shape."""
    require_same_family(place, {name: update.shape for name, update in updates.items()}, shapes)
    lost = [name for name in updates if name not in shapes]
    if lost:
        owners = (each for names in LAYOUTS for each in names.layers_of.items())
        other = next((f". {model} has these layers" for model, own in owners if any(map(own.search, lost))), "")
        listed = join_names(lost, 5)
        raise UserError(
            f"{place}{version}: {len(lost)} of {plural(len(updates), 'layer')} are not in this model: {listed}{other}"
        )
    for name, update in updates.items():
        if not update.fits(shapes[name]):
            outputs, *inputs = shapes[name]
            raise UserError(
                f"{place}{version}: {name} has {update.shape[1]} inputs and {update.shape[0]} outputs; "
                f"this model has {math.prod(inputs)} and {outputs}. It belongs to another model"
            )


def _inject(model: nn.Module, adapter: str, updates: LoraUpdates, scale: float) -> None:
    """Add an adapter. Folds each update's scale into its second factor, so that PEFT's scale is the strength."""
    from peft import LoraConfig, inject_adapter_in_model

    ranks = {f"^{layer}$": update.rank for layer, update in updates.items()}
    common = max(ranks.values())
    config = LoraConfig(
        r=common, lora_alpha=common, target_modules=list(updates), rank_pattern=ranks, alpha_pattern=ranks
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are intended
        inject_adapter_in_model(config, model, adapter_name=adapter)
    layers = dict(lora_layers(model))
    with torch.no_grad():
        for name, update in updates.items():
            layer = layers[name]
            a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            a.copy_(update.down.view_as(a))
            b.copy_((update.up.float() * update.scale).view_as(b))
            layer.scaling[adapter] = scale


def fold_lora(model: nn.Module) -> None:
    """Merge each update into its layer's weight, and remove it. Weights must not be quantised."""
    for name, layer in outer_layers(model):
        frozen = innermost_layer(layer)
        weight = frozen.get_parameter("weight")
        weight.data.copy_(_merged(layer, weight.data.float()))
        wrap(model, name, frozen)


def _merged(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the fp32 weight of the innermost layer with the updates of all layers that wrap it, inner ones first."""
    if isinstance(layer, UpdateLayer):
        return layer.merge(_merged(layer.base_layer, weight))
    if isinstance(layer, LoraLayer):
        weight = _merged(layer.base_layer, weight)
        for adapter in layer.active_adapters:
            a, b = (pair[adapter].weight.data for pair in (layer.lora_A, layer.lora_B))
            weight = weight + layer.scaling[adapter] * (b.flatten(1).float() @ a.flatten(1).float()).view_as(weight)
    return weight
