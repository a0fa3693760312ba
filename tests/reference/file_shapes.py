"""Which shape ComfyUI's weight adapters compute from one module's tensors, from shapes alone, written out by hand.

Part of the independent reference. After `comfy/weight_adapter/{lora,lokr,loha,oft}.py` and `base.py` (2025-10): the
factors' product is reshaped to the weight, so only its number of elements counts; `dora_scale` is divided by the norms
of the weight's rows [o, 1, ...], so it must have as many dimensions as the weight, or the layer stays as it is. kohya's
scripts and diffusers load factors into layers of their own, so a convolution's have four dimensions.
"""

from __future__ import annotations

import math

Shape = tuple[int, ...]


def problem(weight: Shape, parts: dict[str, Shape]) -> str | None:
    """What is wrong with a module's tensors (by their endings) for a weight [o, i] or [o, i, 1, 1]; None: nothing."""
    size = math.prod(weight)
    if "oft_blocks" in parts:
        blocks, side, other = parts["oft_blocks"]
        return None if side == other and blocks * side == weight[0] else f"rotates {blocks * side} of {weight[0]} rows"
    if "hada_w1_a" in parts:
        made = [_product(parts[f"hada_w{n}_a"], parts[f"hada_w{n}_b"]) for n in (1, 2)]
        return None if made == [(weight[0], size // weight[0])] * 2 else f"gives {made}"
    if any(role.startswith("lokr_w") for role in parts):
        (a, b), (c, d) = (_lokr(parts, n) for n in (1, 2))
        return None if (a * c, b * d) == (weight[0], size // weight[0]) else f"gives {(a * c, b * d)}"
    up = parts.get("lora_up.weight", parts.get("lora_B.weight", ()))
    down = parts.get("lora_down.weight", parts.get("lora_A.weight", ()))
    if len(up) != len(weight) or len(down) != len(weight):
        return f"has factors of {len(up)} and {len(down)} dimensions"
    if up[0] * math.prod(down[1:]) != size or up[1] != down[0]:
        return f"gives {up} x {down}"
    if "dora_scale" in parts and parts["dora_scale"] != (weight[0], *(1 for _ in weight[1:])):
        return f"has dora_scale {parts['dora_scale']}"
    return None


def _product(a: Shape, b: Shape) -> Shape | None:
    return (a[0], b[1]) if a[1] == b[0] else None


def _lokr(parts: dict[str, Shape], number: int) -> tuple[int, int]:
    whole = parts.get(f"lokr_w{number}")
    if whole is not None:
        return whole[0], math.prod(whole[1:])
    return parts[f"lokr_w{number}_a"][0], math.prod(parts[f"lokr_w{number}_b"][1:])
