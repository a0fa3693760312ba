"""What every weight precision offers to the loader and to the rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from simpletune.options import Option

if TYPE_CHECKING:
    import torch
    from torch import nn


class WeightPrecision(Option):
    """How the base model's weights are held, and in what type products are computed.

    Members define ``weights`` (the tag) and ``compute`` ("bf16" or "fp32").
    """

    trainable: ClassVar[bool] = True
    """Whether base weights in this precision can be trained; quantised ones serve only as a frozen base."""
    streamable: ClassVar[bool] = True
    """Whether a block's weights can be brought to the device for each pass: all of them are parameters and buffers, and
    nothing keeps a copy or a pointer of its own."""
    bytes_per_weight: ClassVar[float]
    """Bytes of one weight of a linear layer inside the blocks, scales left out."""

    def compute_dtype(self) -> torch.dtype:
        """The type of activations and of what is not quantised."""
        import torch

        return {"bf16": torch.bfloat16, "fp32": torch.float32}[getattr(self, "compute")]  # noqa: B009 members own it

    def base_dtype(self) -> torch.dtype:
        """The type in which weights are held that are not quantised."""
        return self.compute_dtype()

    def encoder_dtype(self) -> torch.dtype:
        """The type in which text encoders and the autoencoder run: that of the products."""
        import torch

        return torch.bfloat16 if self.autocast else self.compute_dtype()

    @property
    def autocast(self) -> bool:
        """Whether the forward pass needs autocast: weights are wider than the products."""
        return False

    def quantises(self, name: str) -> bool:
        """Whether the linear layer of that name is quantised."""
        return False

    def convert(self, linear: nn.Linear) -> nn.Module:
        """The quantised twin of a linear layer, on the same device.

        Args:
            linear: loaded in the type that it has on disk; only those for which ``quantises`` holds.
        """
        raise TypeError(f"{type(self).__name__} does not quantise")


def in_blocks(name: str) -> bool:
    """Whether a layer stands inside a transformer block.

    What stands outside (patch and text embedders, norm_out, proj_out; 1% of the weights) is left in the compute type:
    every one of its errors would reach all tokens.
    """
    return name.startswith("transformer_blocks.")
