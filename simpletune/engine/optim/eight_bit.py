"""bitsandbytes' optimizers with 8-bit state (arXiv:2110.02861): 2 bytes per parameter for AdamW, 1 for Lion.

Tensors with fewer than 4096 elements keep fp32 state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from simpletune.engine.optim.adamw import Beta
from simpletune.engine.optim.optimizer import OptimizerOption

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PAGED_FROM = 100_000  # elements; bitsandbytes does not page smaller state


class AdamW8bit(OptimizerOption):
    """AdamW with 8-bit state."""

    name: Literal["adamw8bit"] = "adamw8bit"
    """AdamW with 8-bit state: 2 bytes per parameter."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    bytes_per_parameter: ClassVar[float] = 2.03

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build bitsandbytes' AdamW8bit."""
        from simpletune.engine.optim.eight_bit_steps import QueuedAdamW8bit

        return QueuedAdamW8bit(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


class PagedAdamW8bit(OptimizerOption):
    """AdamW with 8-bit state that the driver pages between host and device. Equals adamw8bit on the CPU."""

    name: Literal["paged_adamw8bit"] = "paged_adamw8bit"
    """AdamW with 8-bit state that is paged to host memory when the GPU is full."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator for numerical stability."""

    bytes_per_parameter: ClassVar[float] = 2.03
    no_fsdp_reason: ClassVar[str | None] = "pages state to host memory, of which each process has only a part"
    undoes: ClassVar[bool] = False  # the host would read the paged state while the device writes it

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build bitsandbytes' PagedAdamW8bit, or the equivalent AdamW8bit on the CPU, which has no paging."""
        from simpletune.engine.optim.eight_bit_steps import QueuedAdamW8bit, QueuedPagedAdamW8bit

        parameters = list(parameters)
        kind = QueuedPagedAdamW8bit if parameters[0].device.type == "cuda" else QueuedAdamW8bit
        return kind(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)

    def place(self, parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
        """Move loaded state to the parameter's device, large state into paged memory."""
        paged = name in ("state1", "state2") and value.numel() >= PAGED_FROM and parameter.device.type == "cuda"
        if not paged:
            return OptimizerOption.place(self, parameter, name, value)
        from bitsandbytes.functional import get_paged

        buffer = get_paged(*value.shape, dtype=value.dtype, device=parameter.device)
        return buffer.copy_(value)


class Lion8bit(OptimizerOption):
    """Lion (arXiv:2302.06675) with 8-bit state; needs a learning rate 3 to 10 times smaller than AdamW's."""

    name: Literal["lion8bit"] = "lion8bit"
    """Lion with 8-bit state: 1 byte per parameter; needs a learning rate 3 to 10 times smaller than AdamW's."""
    lr: Annotated[float, Field(gt=0)] = 2e-5
    """Learning rate after warm-up; use 3 to 10 times less than for AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Weight of the running mean in the update, and its decay rate."""

    bytes_per_parameter: ClassVar[float] = 1.02

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build bitsandbytes' Lion8bit."""
        from simpletune.engine.optim.eight_bit_steps import QueuedLion8bit

        return QueuedLion8bit(parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)
