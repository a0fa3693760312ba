"""LoRA layers in a transformer: data type and state of PEFT's layers, dropout and norms of any factors.

Norms are computed in closed form: neither B A nor W + s B A is built. Shapes: o outputs, i inputs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from simpletune.adapters.methods.layers import ADAPTER
from simpletune.adapters.methods.lora_product import InPlaceLoraVariant

TINY = 1e-30


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers with a LoRA update, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def compute_in_output_type(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Store the updates' weights in ``dtype``, and compute their matmuls in the activations' type in place.

    PEFT would cast the activations to the weights' type: fp32 matmuls, and fp32 activations saved for backward.
    """
    for _, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False
        for adapter in layer.lora_A:
            layer.lora_variant[adapter] = InPlaceLoraVariant()
            for pair in (layer.lora_A, layer.lora_B):
                pair[adapter].weight = nn.Parameter(pair[adapter].weight.detach().to(dtype))


def drop_ranks(model: nn.Module, rank: float, module: float) -> None:
    """Add dropout on the ranks of every update and on whole updates; see ``UpdateDropout``."""
    for _, layer in lora_layers(model):
        layer.update_dropout = UpdateDropout(rank, module)


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the updates' weights: ``{layer}.lora_A.weight`` [rank, i] and ``{layer}.lora_B.weight`` [o, rank].

    A convolution's have two more dimensions, of size 1.
    """
    state = {}
    for name, layer in lora_layers(model):
        state[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight.detach()
        state[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight.detach()
    return state


class UpdateDropout(nn.Dropout):
    """Drop columns of an update's second factor, and whole updates, in training mode; draws anew in every pass.

    A kept rank is multiplied by 1 / (1 - rank), so that the expected update stays the same; a kept module is not scaled
    (stochastic depth, arXiv:1603.09382, as kohya's scripts apply it to LoRA). Draws from the device's global generator,
    which the loop seeds for every step, and which checkpointing restores for the recomputation because this is a
    ``Dropout`` with ``p`` > 0.

    Args:
        rank: probability of dropping each rank.
        module: probability of dropping the whole update.
    """

    def __init__(self, rank: float, module: float):
        super().__init__(max(rank, module))
        self.rank, self.module = rank, module

    def forward(self, b: Tensor) -> Tensor:  # [o, r] -> [o, r]
        """Return the factor with zeros in the dropped columns; unchanged in evaluation mode."""
        if not self.training:
            return b
        draws = torch.rand(b.shape[1] + 1, device=b.device)
        kept = (draws[1:] >= self.rank) & (draws[0] >= self.module)
        return b * (kept.to(b.dtype) / (1 - self.rank))


def product_norm(
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
) -> Tensor:  # fp32 []
    """||B A|| (Frobenius) = sqrt(trace((A A^T) (B^T B)))."""
    a, b = a.float(), b.float()
    return ((a @ a.T) * (b.T @ b)).sum().clamp_min(0).sqrt()


@torch.no_grad()
def limit_norms(factors: Iterable[tuple[Tensor, Tensor]], scale: float, limit: float) -> None:
    """Scale both factors of every update with ||s B A|| > limit in place, by the same number, so that its norm is
    limit.

    Equivalent to kohya's ``scale_weight_norms``. Does not read from the device.

    Args:
        factors: A [r, i] and B [o, r] of each update; those of convolutions may have dimensions of size 1.
        scale: s.
        limit: the largest norm.
    """
    for a, b in factors:
        norm = scale * product_norm(a.flatten(1), b.flatten(1))
        root = (limit / norm.clamp_min(TINY)).clamp_max(1).sqrt()
        a.mul_(root)
        b.mul_(root)


def row_norms(
    squares: Tensor,  # fp32 [o]
    projected: Tensor,  # [o, r]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # fp32 [o]
    """||W_j + s B_j A|| of every row j = sqrt(||W_j||^2 + 2 s B_j (W A^T)_j + s^2 B_j (A A^T) B_j^T).

    Args:
        squares: ||W_j||^2.
        projected: W A^T.
        a: first factor.
        b: second factor.
        scale: s.
    """
    a, b = a.float(), b.float()
    crossed = (b * projected.float()).sum(1)
    own = ((b @ (a @ a.T)) * b).sum(1)
    return (squares + 2 * scale * crossed + scale**2 * own).clamp_min(0).sqrt()
