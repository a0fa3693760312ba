"""What every weight precision offers to the loader and to the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.options import Option, Problem

if TYPE_CHECKING:
    import torch
    from torch import nn


class WeightPrecision(Option):
    """How the base model's weights are held, and in what type products are computed.

    Members define ``weights`` (the tag) and ``compute`` ("bf16" or "fp32").
    """

    if (
        TYPE_CHECKING
    ):  # every member has them, with its own values; declared as fields here they would come first in JSON
        weights: str
        compute: str

    trainable: ClassVar[bool] = True
    """Whether base weights in this precision can be trained; quantised ones serve only as a frozen base."""
    cacheable: ClassVar[bool] = False
    """Whether a base in this precision is worth a file of its own: see ``models/quantised_cache.py``."""
    streamable: ClassVar[bool] = True
    """Whether a block's weights can be brought to the device for each pass: all of them are parameters and buffers, and
    nothing keeps a copy or a pointer of its own."""
    bytes_per_weight: ClassVar[float]
    """Bytes of one weight of a linear layer inside the blocks, scales left out."""
    arithmetic: ClassVar[frozenset[str]] = frozenset()
    """Fields that say how weights are multiplied, and nothing of how they are held."""

    def compute_dtype(self) -> torch.dtype:
        """The type of activations and of what is not quantised."""
        import torch

        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.compute]

    def base_dtype(self) -> torch.dtype:
        """The type in which weights are held that are not quantised."""
        return self.compute_dtype()

    def product_dtype(self) -> torch.dtype:
        """The type of the transformer's products: autocast's, where it is on."""
        import torch

        return torch.bfloat16 if self.autocast else self.compute_dtype()

    def encoder_dtype(self) -> torch.dtype:
        """The type in which text encoders and the autoencoder run: that of the products."""
        return self.product_dtype()

    @property
    def autocast(self) -> bool:
        """Whether the forward pass needs autocast: weights are wider than the products."""
        return False

    def rules(self) -> Iterator[Problem]:
        """Combinations of this precision's own fields that cannot work."""
        yield from ()

    def dequantise_count(self, forward: float) -> float:
        """How often a step brings every weight to the type of the products.

        Args:
            forward: forward passes, recomputation included; there is one backward pass.
        """
        return forward + 1

    def describe_matmul(self) -> str:
        """How products are made, in words."""
        return f"products in {self.compute}"

    def cache_key(self) -> dict[str, object]:
        """What the weights' bytes follow from, as JSON: equal for two precisions that hold them alike."""
        return self.model_dump(mode="json", exclude=set(self.arithmetic))

    def quantises(self, name: str) -> bool:
        """Whether the linear layer of that name is quantised."""
        return False

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """The quantised twin of a linear layer, on the same device.

        On the meta device it gives the shapes of the twin's tensors, which a cached base then fills.

        Args:
            name: the layer's, inside the transformer.
            linear: loaded in the type that it has on disk; only those for which ``quantises`` holds.
        """
        raise TypeError(f"{type(self).__name__} does not quantise")


class QuantisedPrecision(WeightPrecision):
    """Quantised weights in the blocks, for a frozen base. Members define ``weights`` and ``convert``."""

    compute: Literal["bf16", "fp32"] = "bf16"
    """The type of products and activations."""

    trainable: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True

    def quantises(self, name: str) -> bool:
        """Every linear layer inside the blocks.

        What stands outside (patch and text embedders, norm_out, proj_out; 1% of the weights) is left in the compute
        type: every one of its errors would reach all tokens.
        """
        return name.startswith("transformer_blocks.")


def is_block_modulation(name: str) -> bool:
    """Whether a layer computes a block's adaLN modulation (shifts, scales and gates; arXiv:2212.09748, section 3.2)."""
    return name.startswith("transformer_blocks.") and name.endswith((".norm1.linear", ".norm1_context.linear"))
