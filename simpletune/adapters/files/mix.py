"""Mix several LoRAs into one, layer by layer, with the results of PEFT's ``add_weighted_adapter``.

PEFT itself runs only for the methods that prune: importing it takes longer than all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from simpletune.adapters.files.updates import LoraUpdate, Updates
from simpletune.models.lora_registry import require_one
from simpletune.system.options import UserError
from simpletune.system.rng import random_key

METHODS = ("cat", "linear", "svd", "ties", "ties_svd", "dare_linear", "dare_ties", "dare_linear_svd", "dare_ties_svd",
           "magnitude_prune", "magnitude_prune_svd")  # fmt: skip
SAME_RANK = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
PRUNING = tuple(method for method in METHODS if method.startswith(("ties", "dare", "magnitude")))


@dataclass(frozen=True)
class Recipe:
    """How to mix updates.

    Args:
        method: PEFT's ``combination_type``.
        rank: the result's rank for methods that end in svd; None uses the largest rank.
        density: the fraction of values that ties, dare and magnitude_prune keep.
        seed: seeds the values that dare drops.
    """

    method: str = "cat"
    rank: int | None = None
    density: float = 0.5
    seed: int = 0


def mix(loras: Sequence[tuple[Updates, float]], recipe: Recipe) -> dict[str, LoraUpdate]:
    """Mix several LoRAs into one.

    ``cat`` is the exact sum of their deltas, with the sum of their ranks; ``svd`` is the best approximation of that sum
    at a given rank. ``linear`` and the methods based on it sum the factors instead of the products: (sum a_n A_n) and
    (sum a_n B_n) with a_n = sqrt(weight), so their product has cross terms. LoKr and LoHa are mixed as the equivalent
    LoRA.

    Returns:
        Updates with scale 1 for every layer that any LoRA has.

    Raises:
        UserError: families or shapes differ, or ranks differ and the method needs equal ranks.
    """
    layers = sorted({name for updates, _ in loras for name in updates})
    require_one(*({name: update.shape for name, update in updates.items()} for updates, _ in loras))
    mixed = {}
    for name in layers:
        parts = [(updates[name].as_lora(), weight) for updates, weight in loras if name in updates]
        if len({part.shape for part, _ in parts}) > 1:
            raise UserError(f"{name} has different shapes in these files: they are for different models. Give others")
        ranks = sorted({part.rank for part, _ in parts})
        if len(ranks) > 1 and recipe.method in SAME_RANK:
            ways = f"--method cat or svd, or resize them to one rank first: simpletune lora resize --rank {ranks[-1]}"
            raise UserError(f"--method {recipe.method} needs equal ranks; {name} has {ranks}. Use {ways}")
        method = recipe.method if len(parts) > 1 else "linear"  # as PEFT decides
        if method in PRUNING:
            mixed[name] = _mix_by_peft(name, parts, recipe)
            continue
        ups = [part.up.float() for part, _ in parts]
        if method == "cat":
            down = torch.cat([part.down.float() * weight * part.scale for part, weight in parts])
            up = torch.cat(ups, dim=1)
        elif method == "linear":
            weights = [weight * part.scale for part, weight in parts]
            roots = [math.sqrt(abs(weight)) for weight in weights]
            signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
            down, up = _weighted_sum([part.down.float() for part, _ in parts], signed), _weighted_sum(ups, roots)
        else:
            delta = _weighted_sum([part.delta() for part, _ in parts], [weight for _, weight in parts])
            rank = _svd_rank(parts, recipe)
            u, s, vt = torch.linalg.svd(delta, full_matrices=False)  # a convolution's V would have up to 23,040 rows
            down, up = vt[:rank], u[:, :rank] @ torch.diag(s[:rank])
        mixed[name] = LoraUpdate(down.contiguous(), up.contiguous(), kernel=parts[0][0].kernel)
    return mixed


def _weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return (torch.stack(list(tensors)) * torch.tensor(weights)[:, None, None]).sum(0)


def _svd_rank(parts: Sequence[tuple[LoraUpdate, float]], recipe: Recipe) -> int:
    return min(recipe.rank or max(part.rank for part, _ in parts), *parts[0][0].shape)


def _mix_by_peft(name: str, parts: Sequence[tuple[LoraUpdate, float]], recipe: Recipe) -> LoraUpdate:
    """Run PEFT on a model with one linear layer, whose uninitialised weights are never read."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    outputs, inputs = parts[0][0].shape
    holder = nn.ModuleDict({"layer": nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)})
    adapters = [f"lora_{number}" for number in range(len(parts))]
    model = None
    for adapter, (part, _) in zip(adapters, parts, strict=True):
        config = LoraConfig(r=part.rank, lora_alpha=part.scale * part.rank, target_modules=["layer"])
        if model is None:
            model = LoraModel(holder, config, adapter)
        else:
            model.peft_config[adapter] = config
            model.inject_adapter(holder, adapter)
        layer = holder["layer"]
        layer.lora_A[adapter].weight = nn.Parameter(part.down.float())  # type: ignore[union-attr, index]
        layer.lora_B[adapter].weight = nn.Parameter(part.up.float())  # type: ignore[union-attr, index]
    assert model is not None
    extra = {"svd_rank": _svd_rank(parts, recipe), "svd_full_matrices": False} if recipe.method.endswith("svd") else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_key(recipe.seed, "mix", name) % 2**63)
        model.add_weighted_adapter(
            adapters, [weight for _, weight in parts], "mixed", recipe.method, density=recipe.density, **extra
        )
    layer = holder["layer"]
    down, up = (pair["mixed"].weight.detach() for pair in (layer.lora_A, layer.lora_B))  # type: ignore[union-attr, index]
    scale = float(layer.scaling["mixed"])  # type: ignore[index]
    return LoraUpdate(down.contiguous(), up.contiguous(), scale, parts[0][0].kernel).folded()
