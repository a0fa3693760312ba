"""LoKr and LoHa by their definitions, and how ComfyUI and Forge apply files of them to SD3, written out by hand.

Part of the independent reference: it imports neither the package under test nor diffusers. The rules are those of
ComfyUI's `comfy/weight_adapter/lokr.py`, `loha.py` and `comfy/lora.py` (2025-10), and of Forge (2025-06), whose
arithmetic is the same.

- LoKr: entry ((a, c), (b, d)) of the difference, row a k + c, column b q + d, is W1[a, b] W2[c, d]. Each factor is one
  tensor, or the product of `_a` and `_b`. The scale is alpha / rank, with the rank of W2's own factors if it has them,
  else of W1's; a file with neither has scale 1 whatever its alpha says, and one without alpha too.
- LoHa: entry (o, i) is (sum_r A1[o, r] B1[r, i]) (sum_r A2[o, r] B2[r, i]); the scale is alpha / rank of the first.
- ComfyUI reshapes the difference to the patched weight. A name of diffusers reaches a third of a fused q, k, v, or a
  modulation whose halves change places. Forge knows only the fused, original names of SD3.
"""

import torch
from lora_readers import targets
from torch import Tensor

LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def lokr(factors: dict[str, Tensor]) -> Tensor:
    """The difference [l k, m q] without scale, entry by entry."""
    w1, w2 = (
        factors[f"lokr_w{n}"] if f"lokr_w{n}" in factors else torch.mm(factors[f"lokr_w{n}_a"], factors[f"lokr_w{n}_b"])
        for n in (1, 2)
    )
    w2 = w2.reshape(w2.shape[0], w2.shape[1])
    rows = []
    for a in range(w1.shape[0]):
        for c in range(w2.shape[0]):
            rows.append(torch.cat([w1[a, b] * w2[c] for b in range(w1.shape[1])]))
    return torch.stack(rows)


def loha(factors: dict[str, Tensor]) -> Tensor:
    """The difference [o, i] without scale."""
    a1, b1, a2, b2 = (factors[name] for name in LOHA)
    return torch.einsum("or,ri,os,si->oi", a1, b1, a2, b2)


def scale(factors: dict[str, Tensor], alpha: float | None) -> float:
    """What readers multiply the difference by."""
    if "hada_w1_b" in factors:
        rank = factors["hada_w1_b"].shape[0]
    elif "lokr_w2_b" in factors:
        rank = factors["lokr_w2_b"].shape[0]
    elif "lokr_w1_b" in factors:
        rank = factors["lokr_w1_b"].shape[0]
    else:
        return 1.0
    return 1.0 if alpha is None else alpha / rank


def modules(file: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The factors and alphas of a file by module."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in file.items():
        module, _, role = key.removesuffix(".weight").rpartition(".")
        found.setdefault(module, {})[role] = tensor.double()
    return found


def difference(parts: dict[str, Tensor]) -> Tensor:
    """What one module adds to its weight."""
    factors = {role: tensor for role, tensor in parts.items() if role != "alpha"}
    alpha = parts["alpha"].item() if "alpha" in parts else None
    whole = loha(factors) if "hada_w1_a" in factors else lokr(factors)
    return scale(factors, alpha) * whole


def comfyui(
    state: dict[str, Tensor],  # original names without prefix
    file: dict[str, Tensor],
    blocks: int,
    strength: float = 1.0,
) -> tuple[dict[str, Tensor], list[str]]:
    """The state with a file of LoKr or LoHa applied, and the modules that nothing asked for."""
    known = targets(state, blocks)
    known |= {"lycoris_" + name[12:].replace(".", "_"): to for name, to in known.items() if name[:12] == "transformer."}
    return _patched(state, file, known, strength)


def forge(state: dict[str, Tensor], file: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The same by Forge, at strength 1."""
    known = targets(state, 0)
    fused = {name: known[name] for name in known if name.startswith(("lora_unet_", "diffusion_model."))}
    return _patched(state, file, fused, 1.0)


def _patched(
    state: dict[str, Tensor], file: dict[str, Tensor], known: dict[str, tuple[str, int | None, bool]], strength: float
) -> tuple[dict[str, Tensor], list[str]]:
    patched = {name: tensor.clone() for name, tensor in state.items()}
    lost = []
    for module, parts in modules(file).items():
        if module not in known:
            lost.append(module)
            continue
        weight, third, swapped = known[module]
        whole = patched[weight]
        part = whole if third is None else whole.chunk(3)[third]
        added = difference(parts).reshape(part.shape)
        if swapped:
            added = torch.cat(added.chunk(2)[::-1])
        part += (strength * added).to(whole.dtype)
    return patched, lost


def convolution_difference(parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """What one module of LoRA, LoKr or LoHa adds to a weight of this shape, [o, i] or [o, i, kh, kw].

    As ComfyUI's ``weight_adapter/lora.py``, ``lokr.py`` and ``loha.py`` (2025-10): in Tucker form (``lora_mid``,
    ``hada_t1``, ``hada_t2``, ``lokr_t2``) a core of the ranks stands between two factors; others' product is reshaped.
    """
    alpha = parts["alpha"].item() if "alpha" in parts else None
    if "lora_up" in parts:
        up, down, core = parts["lora_up"].flatten(1), parts["lora_down"], parts.get("lora_mid")
        if core is not None:
            down = torch.einsum("xykl,yi->xikl", core, down.flatten(1))
        return (1.0 if alpha is None else alpha / len(parts["lora_down"])) * (up @ down.flatten(1)).reshape(shape)
    if "hada_w1_a" in parts:
        made = []
        for n in (1, 2):
            a, b, core = parts[f"hada_w{n}_a"], parts[f"hada_w{n}_b"], parts.get(f"hada_t{n}")
            made.append(torch.mm(a, b) if core is None else torch.einsum("xykl,yi,xo->oikl", core, b, a))
        factor = 1.0 if alpha is None else alpha / parts["hada_w1_b"].shape[0]
        return factor * (made[0] * made[1]).reshape(shape)
    w1 = parts["lokr_w1"] if "lokr_w1" in parts else torch.mm(parts["lokr_w1_a"], parts["lokr_w1_b"])
    w2, rank = parts.get("lokr_w2"), None
    if "lokr_w1_b" in parts:
        rank = parts["lokr_w1_b"].shape[0]
    if w2 is None:
        a, b, core = parts["lokr_w2_a"], parts["lokr_w2_b"], parts.get("lokr_t2")
        w2, rank = torch.mm(a, b) if core is None else torch.einsum("xykl,yi,xo->oikl", core, b, a), b.shape[0]
    if w2.ndim == 4:
        w1 = w1[:, :, None, None]
    factor = 1.0 if alpha is None or rank is None else alpha / rank
    return factor * torch.kron(w1.contiguous(), w2.contiguous()).reshape(shape)
