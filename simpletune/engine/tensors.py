"""List, replace and move the tensors of a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def set_tensor(module: nn.Module, name: str, tensor: Tensor, *, requires_grad: bool = False) -> None:
    """Replace a module's own parameter or buffer."""
    from torch import nn

    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=requires_grad)
    else:
        module._buffers[name] = tensor


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List a module's own parameters and buffers, without those of its children."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in own if tensor is not None]


def all_tensors(model: nn.Module) -> list[Tensor]:
    """List all parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@cache
def is_wrapper(kind: type) -> bool:
    """Return whether tensors of a class consist of other tensors."""
    return hasattr(kind, "__tensor_flatten__")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor, or the plain tensors inside a subclass (integers and scales of a quantised weight)."""
    if is_wrapper(type(tensor)):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        for part in [each for each in parts if hasattr(each, "untyped_storage")]:  # a DTensor also lists its mesh
            yield from plain_tensors(part)
    else:
        yield tensor


def move_own_tensors(module: nn.Module, device: torch.device) -> None:
    """Move a module's own frozen tensors, but not those of its children, which may not be loaded yet."""
    for name, tensor in own_tensors(module):
        set_tensor(module, name, tensor.detach().to(device))


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor to a device; the result is never a view of a memory-mapped file."""
    return tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True)


def swap_halves(tensor: Tensor) -> Tensor:  # [2 n, ...] -> [2 n, ...]
    """Swap the halves of the first dimension: layouts differ in whether shift or scale comes first."""
    import torch

    return torch.cat(tensor.chunk(2)[::-1])


def row_blocks(layer: nn.Module, outputs: int, rows: int = 256) -> Iterator[Tensor]:  # fp32 [rows, i]
    """Yield the dequantised weight, of ``outputs`` rows, of a frozen linear layer or convolution in blocks of rows; i
    includes the kernel.

    quanto's weights, and nf4 weights whose rows do not fill whole blocks of scales, are dequantised at once.
    """
    row_block = getattr(layer, "row_block", None)  # our own quantised layers dequantise some of their rows
    if row_block is not None:
        for first in range(0, outputs, rows):
            yield row_block(first, min(first + rows, outputs))
        return
    weight = layer.get_parameter("weight").detach()
    if hasattr(weight, "qtype"):  # quanto's
        weight = weight.dequantize()
    yield from (block.flatten(1).float() for block in weight.split(rows))
