"""Operations of cuDNN on a simulated card: outputs as torch allocates them, and a stated workspace.

cuDNN cannot run on a simulated card, and torch's convolutions without it unfold the whole input. So these operations
replace torch's for CUDA in the dispatcher. They compute no values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from simpletune.engine.memory.kernel_workspace import (
    convolution_backward_workspace,
    convolution_workspace,
    cudnn_backward,
)

Output = tuple[Tensor | None, ...]


def replace_cudnn() -> torch.library.Library:
    """Replace convolutions and cuDNN's attention on CUDA for as long as the returned library lives."""
    torch.backends.cudnn.enabled = False
    library = torch.library.Library("aten", "IMPL")
    replaced: dict[str, Callable[..., object]] = {
        "convolution": convolution,
        "convolution_backward": convolution_backward,
        "_scaled_dot_product_cudnn_attention": attention,
        "_scaled_dot_product_cudnn_attention_backward": attention_backward,
    }
    for name, function in replaced.items():
        library.impl(name, function, "CUDA")
    return library


def take(size: int, device: torch.device) -> None:
    """Allocate a workspace and free it."""
    torch.empty(size, dtype=torch.uint8, device=device)


def convolution(pixels: Tensor, weight: Tensor, bias: Tensor | None, *rest: object) -> Tensor:
    """Allocate a convolution's output [b, o, h, w]."""
    output = torch.ops.aten.convolution.default(pixels.to("meta"), weight.to("meta"), None, *rest)
    made = torch.empty_like(output, device=pixels.device)
    take(convolution_workspace(pixels, weight, bias, *rest), pixels.device)  # type: ignore[arg-type]
    return made


def convolution_backward(
    grad: Tensor, pixels: Tensor, weight: Tensor, bias_sizes: list[int] | None, *rest: object
) -> Output:
    """Allocate the gradients of input, weight and bias that the last argument asks for."""
    wanted = rest[-1]
    assert isinstance(wanted, list)
    take(convolution_backward_workspace(grad, pixels, weight), pixels.device)
    bias = weight.new_empty(bias_sizes or 0)
    made = (torch.empty_like(pixels), torch.empty_like(weight), bias)
    return tuple(tensor if want else None for tensor, want in zip(made, wanted, strict=True))


def attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[object, ...]:
    """Allocate the output and the statistics of cuDNN's attention: aten/src/ATen/native/cudnn/MHA.cpp."""
    b, heads, rows, _width = query.shape
    seed = torch.empty(2, dtype=torch.int64, device=query.device)
    sums = torch.empty((b, heads, rows, 1), dtype=torch.float32, device=query.device)
    return torch.empty_like(query), sums, None, None, rows, key.shape[2], seed[0], seed[1], None


def attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *_: object) -> Output:
    """Allocate the gradients of cuDNN's attention and its stated workspace."""
    made = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    take(cudnn_backward(grad, query, key, value, out), query.device)
    return made
