"""Operations of cuDNN on a simulated card: outputs as torch allocates them, and a stated workspace.

cuDNN cannot run on a simulated card, and torch's convolutions without it unfold the whole input. So these operations
replace torch's for CUDA in the dispatcher. They compute no values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simpletune.engine.memory.kernel_workspace import convolution_backward_workspace, convolution_workspace

Output = tuple[Tensor | None, ...]


def replace_cudnn() -> torch.library.Library:
    """Replace convolutions on CUDA for as long as the returned library lives, and leave cuDNN's attention out of
    torch's choice, as ``choose_device`` does."""
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution", convolution, "CUDA")
    library.impl("convolution_backward", convolution_backward, "CUDA")
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
