"""Unquantised weights: 16 bits and fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.engine.quant.precision import WeightPrecision

if TYPE_CHECKING:
    import torch


class BF16(WeightPrecision):
    """bfloat16 weights: 2 bytes each; a frozen base with fp16 products is stored in float16."""

    weights: Literal["bf16"] = "bf16"
    """bfloat16 weights, 2 bytes each; float16 for a frozen base with fp16 products."""
    compute: Literal["auto", "bf16", "fp16"] = "auto"
    """Type of matrix products and activations. auto: bf16, or fp16 on a card without bf16 (T4, RTX 20, V100); the run's
    config.json says which. fp16 needs a frozen base, scales the loss, skips a step whose scaled gradients overflow, and
    computes a block in fp32 from then on if its activations overflow."""

    bytes_per_weight: ClassVar[float] = 2


class FP32(WeightPrecision):
    """float32 weights: 4 bytes each; products in fp32, or in bf16 or fp16 by autocast."""

    weights: Literal["fp32"] = "fp32"
    """float32 weights, 4 bytes each."""
    compute: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Type of matrix products: fp32, or bf16 or fp16 by autocast. auto: fp32. fp16 scales the loss, skips a step whose
    scaled gradients overflow, and computes a block in fp32 from then on if its activations overflow."""

    bytes_per_weight: ClassVar[float] = 4

    def auto_compute(self, has_bf16: bool = True) -> str:
        """fp32, the type of the weights."""
        return "fp32"

    def compute_dtype(self) -> torch.dtype:
        """fp32, the type of activations outside autocast products."""
        import torch

        return torch.float32

    @property
    def autocast(self) -> bool:
        """Whether products are in 16 bits over fp32 weights."""
        return self.settled != "fp32"
