"""DoRA's and OFT's weights by their definitions, and how ComfyUI and Forge compute theirs, written out by hand.

Part of the independent reference: it imports neither the package under test nor PEFT. Everything builds whole weights
in float64.

- DoRA (arXiv:2402.09353, eq. 5, by rows as PEFT has it): m_j (W + s B A)_j / ||(W + s B A)_j||, the norm a constant.
- OFT (arXiv:2306.07280): an orthogonal R by Cayley's transform of a skew Q; here on the outputs, R W.
- ComfyUI (``comfy/weight_adapter``, 2025-10): ``dora_scale`` with as many rows as the weight is divided by the norms
  of the rows of the *old* weight; any other by those of the columns of the new one; strength k gives W + k (W' - W).
  ``oft_blocks`` B: Q = B - B^T, r = (I + Q) (I - Q)^-1, W'_m = sum over n of r[n, m] W_n, and k counts
  twice: W + k^2 (W' - W); ``alpha`` above 0 limits the norm of Q.
- Forge (``backend/patcher/lora.py``, 2025-06): ``dora_scale`` is always divided by the norms of the columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dora(w: Tensor, a: Tensor, b: Tensor, scale: float, m: Tensor) -> Tensor:
    """The weight [o, i] that DoRA trains; gradients do not pass through the norm."""
    turned = w + scale * (b @ a)
    lengths = turned.detach().pow(2).sum(dim=1).sqrt()
    return torch.stack([m[j] / lengths[j] * turned[j] if lengths[j] else turned[j] for j in range(len(w))])


def oft(w: Tensor, blocks: Tensor) -> Tensor:
    """The weight [o, i] that ComfyUI makes of ``oft_blocks`` [k, d, d] at strength 1."""
    side = blocks.shape[1]
    eye = torch.eye(side, dtype=w.dtype)
    parts = []
    for number, block in enumerate(blocks.to(w.dtype)):
        q = block - block.T
        r = (eye + q) @ torch.linalg.inv(eye - q)
        parts.append(r.T @ w[number * side : (number + 1) * side])
    return torch.cat(parts)


def comfy_dora(w: Tensor, difference: Tensor, dora_scale: Tensor, strength: float) -> Tensor:
    """ComfyUI's weight of a file with ``dora_scale``, its faulty norm included."""
    changed = w + difference
    if dora_scale.shape[0] == w.shape[0]:
        norms = w.norm(dim=1, keepdim=True)
    else:
        norms = changed.norm(dim=0, keepdim=True)
    changed = changed * (dora_scale.reshape(dora_scale.shape[:2]) / (norms + 2.0**-23))
    return w + strength * (changed - w)


def comfy_oft(w: Tensor, blocks: Tensor, strength: float, alpha: float | None = None) -> Tensor:
    """ComfyUI's weight of a file with ``oft_blocks``."""
    q = blocks - blocks.transpose(1, 2)
    if alpha and q.norm() > alpha:
        blocks = blocks * alpha / q.norm()
    return w + strength**2 * (oft(w, blocks) - w)


def forge_dora(w: Tensor, difference: Tensor, dora_scale: Tensor) -> Tensor:
    """Forge's weight of a file with ``dora_scale`` at strength 1."""
    changed = w + difference
    return changed * (dora_scale.reshape(dora_scale.shape[:2]) / changed.norm(dim=0, keepdim=True))


def comfy(w: Tensor, file: dict[str, Tensor], module: str, strength: float = 1.0, swapped: bool = False) -> Tensor:
    """ComfyUI's float64 weight [o, i] of a layer for which a file has this module.

    Under some names it exchanges the halves of the difference (swapped), but not those of ``dora_scale``.
    """
    w = w.double()
    own = {key.removeprefix(module + "."): tensor.double() for key, tensor in file.items()}
    if f"{module}.oft_blocks" in file:
        alpha = own["alpha"].item() if f"{module}.alpha" in file else None
        return comfy_oft(w, own["oft_blocks"], strength, alpha)
    kohya = "lora_up.weight" in own
    up, down = (
        own["lora_up.weight" if kohya else "lora_B.weight"],
        own["lora_down.weight" if kohya else "lora_A.weight"],
    )
    up, down = up.flatten(1), down.flatten(1)
    scale = own["alpha"].item() / len(down) if f"{module}.alpha" in file else 1.0
    difference = scale * (up @ down)
    if swapped:
        difference = torch.cat(difference.chunk(2)[::-1])
    if f"{module}.dora_scale" in file:
        return comfy_dora(w, difference, own["dora_scale"], strength)
    return w + strength * difference
