"""PyTorch's AdamW (arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.optimizer import OptimizerOption

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(OptimizerOption):
    """AdamW with state in the parameters' type."""

    name: Literal["adamw"] = "adamw"
    """AdamW; 8 bytes of state per fp32 parameter."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    bytes_per_parameter: ClassVar[float] = 8

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the fused torch.optim.AdamW, which makes one pass over all parameters without temporaries."""
        import torch

        return torch.optim.AdamW(
            parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=True
        )

    def place(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Move state to the parameter's device, including the step counter, which the fused update reads there."""
        return value.to(parameter.device)
