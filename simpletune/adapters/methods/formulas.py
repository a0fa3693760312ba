"""What layers and files do alike with the factors of LoKr, LoHa, DoRA and OFT.

Needs only torch: the tools for LoRA files start without PEFT and what it imports.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from simpletune.models.shared.lora_layout import OFT_BLOCKS, Layout
from simpletune.system.options import UserError

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Types by their names in options."""


WIDENED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)
"""Types of files that are read in fp32: torch has no arithmetic for the first two; the third is rounded once."""


def as_numbers(place: str, tensor: Tensor) -> Tensor:
    """Return a file's factor, in fp32 if of a type of ``WIDENED``. Raises UserError if ``require_numbers`` refuses
    it."""
    found = tensor.float() if tensor.dtype in WIDENED else tensor
    require_numbers(place, found)
    return found


def require_numbers(place: str, tensor: Tensor) -> None:
    """Refuse a file's tensor of a type that none of them has, or with values that are not finite."""
    if tensor.dtype not in FLOATS.values():
        raise UserError(f"{place} is in {tensor.dtype}, which is not supported. Use fp32, fp16 or bf16")
    if not tensor.isfinite().all():
        raise UserError(f"{place} contains NaN or infinite values: its training diverged. Use an earlier checkpoint")


def full_factor(factors: Mapping[str, Tensor], name: str) -> Tensor:  # 2-D
    """Return a factor, or the product of its two factors; a convolution's as a matrix."""
    return factors[name].flatten(1) if name in factors else factors[f"{name}_a"] @ factors[f"{name}_b"]


def kronecker_delta(factors: Mapping[str, Tensor]) -> Tensor:  # fp32 [l k, m q], or [l k, m q kh kw]
    """Compute LoKr's kron(W1, W2) (arXiv:2309.14859, eq. 5); a convolution's kernel in W2 counts as more of its
    columns."""
    exact = {name: factor.float() for name, factor in factors.items()}
    return torch.kron(full_factor(exact, "lokr_w1"), full_factor(exact, "lokr_w2"))


def hadamard_delta(factors: Mapping[str, Tensor]) -> Tensor:  # fp32 [o, i], or [o, i kh kw]
    """Compute LoHa's (A1 B1) o (A2 B2) (arXiv:2108.06098)."""
    a1, b1, a2, b2 = (factors[f"hada_w{name}"].float() for name in ("1_a", "1_b", "2_a", "2_b"))
    return (a1 @ b1) * (a2 @ b2)


def low_rank(factors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors [r^2, i], or [r^2, i kh kw], and [o, r^2] of the low-rank update that equals LoHa's."""
    a1, b1, a2, b2 = (factors[f"hada_w{name}"] for name in ("1_a", "1_b", "2_a", "2_b"))
    down = (b1[:, None] * b2).flatten(0, 1)  # every row of one by every row of the other
    return down, (a1.t()[:, None] * a2.t()).flatten(0, 1).t()


def by_norms(magnitude: Tensor, norms: Tensor) -> Tensor:
    """Divide by norms; 0 for rows of zeros."""
    return magnitude / torch.where(norms > 0, norms, torch.inf)


def block_rotations(
    triangle: Tensor,  # [k, d (d - 1) / 2]
    side: int,  # d
) -> Tensor:  # fp32 [k, d, d]
    """Compute R^T - I of every block, where R^T = (I + Q) (I - Q)^-1 and Q is skew-symmetric: 2 (I - Q)^-1 Q.

    Does not check the solution, which would read from the device: I - Q is never singular.
    """
    blocks = upper(triangle.float(), side)
    skew = blocks - blocks.transpose(1, 2)
    with torch.autocast(skew.device.type, enabled=False):
        solved: Tensor = torch.linalg.solve_ex(torch.eye(side, device=skew.device) - skew, 2 * skew)[0]
    return solved


def upper(triangle: Tensor, side: int) -> Tensor:  # [k, d (d - 1) / 2] -> [k, d, d]
    """Return matrices with these numbers above the diagonal, row by row, and zeros elsewhere."""
    rows, columns = torch.triu_indices(side, side, 1, device=triangle.device)
    blocks = triangle.new_zeros(len(triangle), side, side)
    return blocks.index_put((torch.arange(len(triangle), device=triangle.device)[:, None], rows, columns), triangle)


def triangle_of(blocks: Tensor) -> Tensor:  # [k, d, d] -> [k, d (d - 1) / 2]
    """Return the entries above the diagonal of B - B^T, which are all that matters in a file's blocks."""
    rows, columns = torch.triu_indices(blocks.shape[1], blocks.shape[1], 1)
    return (blocks - blocks.transpose(1, 2))[:, rows, columns]


def named_blocks(blocks: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return a file's tensors by key, under the original names if the layout has them. The blocks [k, d, d], by
    diffusers' layer name, have halves in the original layout's order."""
    if not layout.original:
        return {layout.key(name, OFT_BLOCKS): own for name, own in blocks.items()}
    # ComfyUI rotates a weight in the original layout. Under diffusers' names it would rotate the rows in the original
    # order and then swap the halves of the difference, which is wrong for layers whose halves are swapped.
    tensors: dict[str, Tensor] = {}
    for name, own in blocks.items():
        module, rows = layout.place(name)
        key = layout.key(module, OFT_BLOCKS)
        if rows is None:
            tensors[key] = own
        else:  # of a fused layer, whose other parts zeros do not rotate
            whole = tensors.setdefault(key, own.new_zeros(rows.whole(len(own)), *own.shape[1:]))
            whole[rows.within(len(whole))] = own
    return tensors


def rotate_rows(weight: Tensor, triangle: Tensor) -> Tensor:  # [o, i], [k, d (d - 1) / 2] -> [o, i]
    """Compute (R - I) W."""
    return rotate(weight.t(), triangle).t()


def rotate(z: Tensor, triangle: Tensor) -> Tensor:  # [..., o] -> [..., o]
    """Multiply each block of columns by its R^T - I."""
    side = z.shape[-1] // len(triangle)
    rotation = block_rotations(triangle, side).to(z.dtype)
    return torch.einsum("...kd,kde->...ke", z.unflatten(-1, (-1, side)), rotation).flatten(-2)
