"""OFT's layer: W' = R W, with a block-diagonal orthogonal R on the outputs (arXiv:2306.07280, Cayley parameterisation).

The paper rotates the inputs of a layer. ComfyUI expects rotated outputs, which need only the frozen layer's output and
so work with every precision. Like the paper's, they keep all singular values of W.

Shapes: n rows, o outputs in k blocks of d.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from simpletune.adapters.methods.layers import ADAPTER, FactorLayer, innermost_layer
from simpletune.models.shared.lora_names import OFT_BLOCKS, Layout


def turn(
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
    """Matrices with these numbers above the diagonal, row by row, and zeros elsewhere."""
    rows, columns = torch.triu_indices(side, side, 1, device=triangle.device)
    blocks = triangle.new_zeros(len(triangle), side, side)
    return blocks.index_put((torch.arange(len(triangle), device=triangle.device)[:, None], rows, columns), triangle)


def triangle_of(blocks: Tensor) -> Tensor:  # [k, d, d] -> [k, d (d - 1) / 2]
    """The entries above the diagonal of B - B^T, which are all that matters in a file's blocks."""
    rows, columns = torch.triu_indices(blocks.shape[1], blocks.shape[1], 1)
    return (blocks - blocks.transpose(1, 2))[:, rows, columns]


def named_blocks(blocks: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """A file's tensors by key, under the original names if the layout has them.

    ComfyUI rotates a weight in the original layout. Under diffusers' names it would rotate the rows in the original
    order and then swap the halves of the difference, which is wrong for layers whose halves are swapped. A fused q, k,
    v gets the blocks of all three; zeros, which rotate nothing, stand in for missing ones. The blocks [k, d, d], by
    diffusers' layer name, have halves in the original layout's order.
    """
    if not layout.original:
        return {layout.key(name, OFT_BLOCKS): own for name, own in blocks.items()}
    parts: dict[str, dict[int | None, Tensor]] = {}
    for name, own in blocks.items():
        module, third = layout.names.original(name)
        parts.setdefault(module, {})[third] = own
    tensors = {}
    for module, found in parts.items():
        if None not in found:
            nothing = torch.zeros_like(next(iter(found.values())))
            found = {None: torch.cat([found.get(third, nothing) for third in range(3)])}
        tensors[layout.key(module, OFT_BLOCKS)] = found[None]
    return tensors


class OftLayer(FactorLayer):
    """A frozen linear layer or 1x1 convolution whose outputs are rotated block by block; at strength k, W + k (R - I)
    W. Its factor ``oft_triangle`` [k, d (d - 1) / 2] has the entries above the diagonal of each block's Q."""

    oft_triangle: nn.Parameter

    def __init__(self, base_layer: nn.Module, factors: Mapping[str, Tensor], adapter: str = ADAPTER):
        super().__init__(base_layer, factors, adapter)
        assert self.shape is not None
        self.side = self.shape[0] // len(self.oft_triangle)

    @staticmethod
    def initial_factors(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}

    def updated(self, y: Tensor, x: Tensor) -> Tensor:
        bias = innermost_layer(self).bias  # is not rotated
        turned = _turned(y if bias is None else y - bias.to(y.dtype), self.oft_triangle)  # type: ignore[operator]
        return torch.add(y, turned, alpha=self.strength)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        return weight + self.strength * turned_rows(weight.flatten(1), self.oft_triangle).view_as(weight)


def turned_rows(weight: Tensor, triangle: Tensor) -> Tensor:  # [o, i], [k, d (d - 1) / 2] -> [o, i]
    """(R - I) W."""
    return _turned(weight.t(), triangle).t()


def _turned(z: Tensor, triangle: Tensor) -> Tensor:  # [..., o] -> [..., o]
    """Multiply each block of columns by its R^T - I."""
    side = z.shape[-1] // len(triangle)
    rotation = turn(triangle, side).to(z.dtype)
    return torch.einsum("...kd,kde->...ke", z.unflatten(-1, (-1, side)), rotation).flatten(-2)
