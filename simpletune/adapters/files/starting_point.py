"""Start training from a LoRA file: check that its updates suit what a run trains, and give them to its fresh layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from simpletune.adapters.files.attach import factors_of, require_shapes, set_magnitude
from simpletune.adapters.files.factors import resize_update
from simpletune.adapters.files.keys import DOHA, DOKR
from simpletune.adapters.files.updates import DoraUpdate, LokrUpdate, LoraUpdate, OftUpdate, Updates
from simpletune.adapters.methods.adapter import Shapes
from simpletune.adapters.methods.dora_layers import DoraLayer
from simpletune.adapters.methods.layers import ADAPTER, FactorLayer, outer_layers
from simpletune.adapters.methods.lora_layers import product_norm
from simpletune.adapters.methods.targets import LayerMethod, TargetedMethod
from simpletune.models.lora_registry import TARGETS, is_convolution, is_residual, is_target
from simpletune.system.options import UserError, join_names, plural

ON_TOP = "Train on top of it: name it in model.loras"
UNSCALED = DoraUpdate, OftUpdate
"""Kinds whose multiples are not of the same kind."""


def require_startable(place: str, method: TargetedMethod, updates: Updates, shapes: Shapes, scale: float) -> None:
    """Check that a run that trains by ``method`` can start from the updates of a denoiser, times ``scale``.

    Args:
        place: what messages begin with.
        shapes: the base model's.
    """
    require_shapes(place, updates, {name.removesuffix(".weight"): shape for name, shape in shapes.items()})
    trained = set(method.modules(shapes))
    if strays := [layer for layer in updates if layer not in trained]:
        fitting = [name for name in TARGETS if all(is_target(name, layer) for layer in updates)]
        remedy = f"Use adapter.targets {fitting[0] if fitting else 'a list with the endings of these names'}"
        lacks_rank = not method.updates_convolutions and hasattr(method, "conv_rank")
        if lacks_rank and any(map(is_convolution, strays)):
            if all(is_residual(each) or method.is_targeted(each) for each in strays):
                remedy = "Give convolutions a rank by adapter.conv_rank, with which all layers of the resnets train"
            else:
                remedy += ", and give their convolutions a rank by adapter.conv_rank"
        elif all(map(method.is_targeted, strays)):
            remedy = "Use an adapter.layers that does not leave them out"
        raise UserError(
            f"{place}: {len(strays)} of {plural(len(updates), 'layer')} are not trained by this run: "
            f"{join_names(strays, 5)}. {remedy}"
        )
    if others := {update.kind: layer for layer, update in updates.items() if update.kind != method.title}:
        kind, layer = next(iter(others.items()))
        if kind in (DOKR, DOHA):
            raise UserError(f"{place} is {kind} ({layer}), which no method here trains. {ON_TOP}")
        raise UserError(
            f"{place} is {kind} ({layer}), and {method.title} starts only from its own kind. Use adapter.method "
            f"{kind.lower()}, or start from a {method.title}"
        )
    if odd := [layer for layer, each in updates.items() if isinstance(each, DoraUpdate) and each.by_input]:
        raise UserError(
            f"{place} has a magnitude for each input ({odd[0]}), and this run trains one for each output. {ON_TOP}"
        )
    if not 0 < scale < float("inf"):
        raise UserError(f"{place}: the strength {scale:g} must be above 0. Leave it out for 1")
    if scale != 1 and any(isinstance(update, UNSCALED) for update in updates.values()):
        raise UserError(f"{place}: no {method.title} equals the multiple of another. Leave out the strength, {scale:g}")
    if isinstance(method, LayerMethod):
        for layer, update in updates.items():
            inputs = math.prod(shapes[f"{layer}.weight"][1:])
            own = {name: tuple(factor.shape) for name, factor in factors_of(update, inputs).items()}
            fused = isinstance(update, LokrUpdate) and not update.is_own  # with another layer
            if fused or own != (wanted := method.shapes_of(layer, shapes)):
                raise UserError(
                    f"{place}: {layer} has the factors {_listed(own)}, and this run trains {_listed(wanted)}. Use the "
                    "adapter settings that the file was trained with"
                )


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in shapes.items())


@torch.no_grad()
def start_from(model: nn.Module, updates: Updates, scale: float) -> float:
    """Give the fresh updates of a model those that ``require_startable`` has checked, times a scale. Layers without one
    keep their first values.

    A lower rank gets the best approximation of the product; a higher one keeps it, with new ranks that add nothing yet.

    Returns:
        The Frobenius norm of what was left out, relative to that of all updates.
    """
    layers, left_out, whole = dict(outer_layers(model)), 0.0, 0.0
    for name, update in updates.items():
        layer = layers[name]
        if isinstance(layer, FactorLayer):
            assert layer.shape is not None
            scaled = update if isinstance(update, UNSCALED) else replace(update, scale=update.scale * scale)  # type: ignore[type-var]
            for factor, values in factors_of(scaled, math.prod(layer.shape[1:])).items():
                layer.factors[factor].copy_(values)
        elif isinstance(layer, DoraLayer):
            assert isinstance(update, DoraUpdate)
            low_rank = update.update
            assert isinstance(low_rank, LoraUpdate)
            left_out += _fill(layer.lora_A.weight, layer.lora_B.weight, low_rank, 1 / layer.scale)
            whole += _square(low_rank)
            set_magnitude(layer, update)
        else:
            assert isinstance(layer, LoraLayer) and isinstance(update, LoraUpdate)
            a, b = (pair[ADAPTER].weight for pair in (layer.lora_A, layer.lora_B))
            left_out += _fill(a, b, update, scale / layer.scaling[ADAPTER])
            whole += _square(update)
    return (left_out / whole) ** 0.5 if whole else 0.0


def _square(update: LoraUpdate) -> float:
    """Compute ||s B A||^2 (Frobenius)."""
    return float(product_norm(update.down, update.up) * update.scale) ** 2


def _fill(a: Tensor, b: Tensor, update: LoraUpdate, scale: float) -> float:
    """Fill a layer's factors; returns the squared norm of the part of the update that a lower rank leaves out."""
    left_out = 0.0
    if update.rank > len(a):
        update, left_out = resize_update(update, len(a), None)
    a.flatten(1)[: update.rank].copy_(update.down)
    b.flatten(1)[:, : update.rank].copy_(update.up.float() * (update.scale * scale))  # to the bit as generate --lora
    return left_out
