"""The base classes of weight precisions: what the loader and the configuration's rules use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.system.options import Option, Problem

if TYPE_CHECKING:
    import torch
    from torch import nn

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""torch's name of each compute type."""


class WeightPrecision(Option):
    """The precision of the base model's weights and of matrix products.

    Members define ``weights`` (the tag) and ``compute`` ("auto" or a key of ``DTYPES``).
    """

    if (
        TYPE_CHECKING
    ):  # every member declares them with its own values; as fields of the base class they would come first in JSON
        weights: str
        compute: str

    trainable: ClassVar[bool] = True
    """Whether base weights in this precision can be trained; quantised weights can only be a frozen base."""
    cacheable: ClassVar[bool] = False
    """Whether to cache a base in this precision on disk (see ``models/shared/quantised_cache.py``)."""
    can_offload: ClassVar[bool] = True
    """Whether a block's weights can be copied to the device for each pass: all of them are parameters and buffers, and
    nothing holds another copy or pointer."""
    bytes_per_weight: ClassVar[float]
    """Bytes of one weight of a linear layer inside the blocks, excluding scales."""
    arithmetic: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect only how weights are multiplied, not how they are stored."""

    def auto_compute(self, has_bf16: bool = True) -> str:
        """What ``compute`` auto means: bf16, or fp16 on a card without bf16.

        Args:
            has_bf16: whether the device computes in bf16: the CPU does, and cards from sm_80 on do.
        """
        return "bf16" if has_bf16 else "fp16"

    @property
    def settled(self) -> str:
        """``compute``; for auto without a chosen device, what auto means on a device with bf16."""
        return self.auto_compute() if self.compute == "auto" else self.compute

    @property
    def in_words(self) -> str:
        """The compute type for messages."""
        if self.compute != "auto":
            return self.compute
        new, old = self.auto_compute(), self.auto_compute(has_bf16=False)
        return new if new == old else f"{new} ({old} on a card without bf16)"

    def compute_dtype(self) -> torch.dtype:
        """The type of activations, and of weights that are not quantised."""
        return self.product_dtype()

    def product_dtype(self) -> torch.dtype:
        """The type of the transformer's products, with autocast applied."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.settled])
        return dtype

    def encoder_dtype(self) -> torch.dtype:
        """The type in which text encoders and the autoencoder run: the products' type, but fp32 instead of fp16.

        T5's feed-forward layers and SD3's autoencoder overflow in fp16.
        """
        import torch

        return torch.float32 if self.settled == "fp16" else self.product_dtype()

    @property
    def autocast(self) -> bool:
        """Whether the forward pass needs autocast, because weights are wider than products."""
        return False

    def rules(self) -> Iterator[Problem]:
        """Report incompatible values of this precision's own fields."""
        yield from ()

    def describe_matmul(self) -> str:
        """Describe how products are computed."""
        return f"products in {self.in_words}"

    def describe(self) -> str:
        """Describe weights and products in words."""
        return f"{self.weights} weights, {self.describe_matmul()}"

    def cache_key(self) -> dict[str, object]:
        """The options that determine the bytes of the weights, as JSON; without a rotation if there is none, so that
        bases cached before rotations existed keep their key."""
        options = self.model_dump(mode="json", exclude=set(self.arithmetic)) | {"compute": self.settled}
        return {name: value for name, value in options.items() if (name, value) != ("rotation", "none")}

    def quantises(self, layer: nn.Module) -> bool:
        """Whether to quantise layers of this kind inside the model's units."""
        return False

    def convert(self, name: str, layer: nn.Module) -> nn.Module:
        """Quantise a layer, for which ``quantises`` is true, on its device.

        On the meta device, creates the quantised layer's tensors for a cached base to fill.

        Args:
            name: its name inside the model.
            layer: the layer, in its type on disk.
        """
        raise TypeError(f"{type(self).__name__} does not quantise")

    def prepare(self, units: Iterable[nn.Module]) -> None:
        """Change, in place, how a model's units compute in training, once its adapter is attached."""


class QuantisedPrecision(WeightPrecision):
    """Quantised weights in the blocks, for a frozen base. Members define ``weights`` and ``convert``."""

    compute: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Type of matrix products and activations. auto: bf16, or fp16 on a card without bf16 (T4, RTX 20, V100); the run's
    config.json says which. fp16 scales the loss, skips a step whose scaled gradients overflow, and computes a block in
    fp32 from then on if its activations overflow."""

    trainable: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True

    def quantises(self, layer: nn.Module) -> bool:
        """Quantise linear layers and 2D convolutions.

        Layers outside the units stay in the compute type, because each of their errors would reach all tokens or
        pixels: in SD3 the patch and text embedders, norm_out and proj_out (1% of the weights), in SD 1.5 conv_in,
        conv_out and the time embedding (0.2%).
        """
        from torch import nn

        return isinstance(layer, nn.Linear | nn.Conv2d)


def describe_rotation(rotation: str) -> str:
    """The rotation of linear layers for messages; empty if there is none."""
    return "" if rotation == "none" else f"; linear layers' weights and inputs rotated ({rotation})"


def is_block_modulation(name: str) -> bool:
    """Whether a layer inside a unit computes its modulation from the noise level, one row for each sample.

    These are adaLN's shifts, scales and gates (arXiv:2212.09748, section 3.2), and the shift that a resnet of a UNet
    adds to each channel.
    """
    return name.endswith((".norm1.linear", ".norm1_context.linear", ".time_emb_proj"))
