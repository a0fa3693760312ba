"""Unquantised weights: bf16 and fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.quant.precision import WeightPrecision

if TYPE_CHECKING:
    import torch


class BF16(WeightPrecision):
    """bfloat16 weights: 2 bytes each."""

    weights: Literal["bf16"] = "bf16"
    """bfloat16 weights, 2 bytes each."""
    compute: Literal["bf16"] = "bf16"
    """Type of matrix products and activations."""

    bytes_per_weight: ClassVar[float] = 2


class FP32(WeightPrecision):
    """float32 weights: 4 bytes each; products in fp32, or in bf16 by autocast."""

    weights: Literal["fp32"] = "fp32"
    """float32 weights, 4 bytes each."""
    compute: Literal["bf16", "fp32"] = "fp32"
    """Type of matrix products: fp32, or bf16 by autocast."""

    bytes_per_weight: ClassVar[float] = 4

    def compute_dtype(self) -> torch.dtype:
        """fp32, the type of activations outside autocast products."""
        import torch

        return torch.float32

    @property
    def autocast(self) -> bool:
        """Whether products are in bf16 over fp32 weights."""
        return self.compute == "bf16"
