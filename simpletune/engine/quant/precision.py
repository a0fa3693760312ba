"""The options of weight precisions: a class each, discriminated by ``precision.weights``. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal

from simpletune.system.options import Option, Problem, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""torch's name of each compute type."""
ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number of each compute type."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for a key of ``DTYPES``."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


class WeightPrecision(Option):
    """The precision of the base model's weights and of matrix products.

    Members define ``weights`` (the tag) and ``compute`` ("auto" or a key of ``DTYPES``).
    """

    if TYPE_CHECKING:  # every member declares them with its own values; as fields here they would come first in JSON
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
        """Return what ``compute`` auto means on a device with bf16 (the CPU, cards from sm_80 on), or without."""
        return "bf16" if has_bf16 else "fp16"

    @property
    def settled_compute(self) -> str:
        """``compute``; for auto without a chosen device, what auto means on a device with bf16."""
        return self.auto_compute() if self.compute == "auto" else self.compute

    @property
    def compute_label(self) -> str:
        """The compute type for messages."""
        if self.compute != "auto":
            return self.compute
        new, old = self.auto_compute(), self.auto_compute(has_bf16=False)
        return new if new == old else f"{new} ({old} on a card without bf16)"

    @property
    def compute_type(self) -> str:
        """The type of activations, and of weights that are not quantised: a key of ``DTYPES``."""
        return self.settled_compute

    @property
    def encoder_type(self) -> str:
        """The type of text encoders and of autoencoders not made for fp16."""
        # T5's feed-forward layers and SD3's autoencoder overflow in fp16
        return "fp32" if self.settled_compute == "fp16" else self.settled_compute

    def compute_dtype(self) -> torch.dtype:
        """Return ``compute_type`` for torch."""
        return torch_dtype(self.compute_type)

    def product_dtype(self) -> torch.dtype:
        """Return the type of the denoiser's products, with autocast applied."""
        return torch_dtype(self.settled_compute)

    def encoder_dtype(self) -> torch.dtype:
        """Return ``encoder_type`` for torch."""
        return torch_dtype(self.encoder_type)

    @property
    def autocast(self) -> bool:
        """Whether the forward pass needs autocast, because weights are wider than products."""
        return False

    def autocast_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Multiply in the products' type within this context; do nothing where the weights have it."""
        import torch

        return torch.autocast(device.type, self.product_dtype()) if self.autocast else nullcontext()

    def rules(self) -> Iterator[Problem]:
        """Report incompatible values of this precision's own fields."""
        yield from ()

    def describe_matmul(self) -> str:
        """Describe how products are computed."""
        return f"products in {self.compute_label}"

    def describe(self) -> str:
        """Describe weights and products."""
        return f"{self.weights} weights, {self.describe_matmul()}"

    def cache_key(self) -> dict[str, object]:
        """Return the options that determine the bytes of the weights, as JSON; without a rotation if there is none, so
        that bases cached before rotations existed keep their key."""
        options = self.model_dump(mode="json", exclude=set(self.arithmetic)) | {"compute": self.settled_compute}
        return {name: value for name, value in options.items() if (name, value) != ("rotation", "none")}

    def quantises(self, layer: nn.Module) -> bool:
        """Return whether to quantise layers of this kind inside the model's units."""
        return False

    def convert(self, layer: nn.Module, per_sample: bool = False) -> nn.Module:
        """Quantise a layer, in its type on disk, for which ``quantises`` is true, on its device; on the meta device,
        only create the tensors.

        ``per_sample``: whether it sees one row for each sample, as modulations do: its error is the same for all of the
        sample's tokens or pixels, so it does not average out.
        """
        raise TypeError(f"{type(self).__name__} does not quantise")

    def prepare(self, units: Iterable[nn.Module]) -> None:
        """Change, in place, how a model's units compute in training, once its adapter is attached."""


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
        return "fp32"

    @property
    def compute_type(self) -> str:
        return "fp32"  # of activations outside autocast products

    @property
    def autocast(self) -> bool:
        return self.settled_compute != "fp32"


class QuantisedPrecision(WeightPrecision):
    """Quantised weights in the blocks, for a frozen base. Members define ``weights`` and ``convert``."""

    compute: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Type of matrix products and activations. auto: bf16, or fp16 on a card without bf16 (T4, RTX 20, V100); the run's
    config.json says which. fp16 scales the loss, skips a step whose scaled gradients overflow, and computes a block in
    fp32 from then on if its activations overflow."""

    trainable: ClassVar[bool] = False
    cacheable: ClassVar[bool] = True

    def quantises(self, layer: nn.Module) -> bool:
        """Quantise linear layers and 2D convolutions."""
        # Layers outside the units stay in the compute type, because each of their errors would reach all tokens or
        # pixels: in SD3 the patch and text embedders, norm_out and proj_out (1% of the weights), in SD 1.5 conv_in,
        # conv_out and the time embedding (0.2%).
        from torch import nn

        return isinstance(layer, nn.Linear | nn.Conv2d)


def describe_rotation(rotation: str) -> str:
    """Describe the rotation of linear layers for messages; empty if there is none."""
    return "" if rotation == "none" else f"; linear layers' weights and inputs rotated ({rotation})"


# Stock int8 layers save their input, or a dequantised copy of their weight, for the backward pass. Ours save only
# references to the int8 weight and the scale: a frozen weight needs no gradient, and the gradient of the input
# dequantises the weight again.
class Int8(QuantisedPrecision):
    """int8 weights in the blocks with one scale per output channel, for a frozen base."""

    weights: Literal["int8"] = "int8"
    """int8 weights, 1 byte each, for a frozen base."""
    products: Literal["dequantised", "int8", "auto"] = "dequantised"
    """How the blocks' linear layers multiply. dequantised: every pass converts the weight to the compute type first;
    int8: activations are quantised to int8 row by row, and a Triton kernel multiplies int8 x int8. It pays where the
    card limits a step and not the host: GeForce cards of sm_80 and newer (predicted); on an H100 it was slower. auto:
    a run times one product of each kind on its card at the start and takes the faster; predictions count it as
    dequantised. Errors grow, above all if activations have outliers (docs/explanation/measurements.md). LoRA's own
    products stay in the compute type, and convolutions dequantise."""
    input_gradient: Literal["dequantised", "int8"] = "dequantised"
    """How the backward pass computes these layers' input gradients. int8: gradients are quantised like activations;
    needs products int8, or auto where it is chosen."""
    rotation: Literal["none", "hadamard"] = "none"
    """Rotate the linear layers' weights, and their inputs in every pass, by a block Hadamard matrix of 256, 64 or 16
    columns (arXiv:2512.03673), so that outliers do not decide the scales (docs/explanation/measurements.md has the
    errors). Costs time. Convolutions are not rotated."""

    bytes_per_weight: ClassVar[float] = 1
    arithmetic: ClassVar[frozenset[str]] = frozenset({"products", "input_gradient"})

    def convert(self, layer: nn.Module, per_sample: bool = False) -> nn.Module:
        from torch import nn

        from simpletune.engine.quant.int8_conv import Int8Conv2d
        from simpletune.engine.quant.int8_linear import Int8Linear

        if isinstance(layer, nn.Conv2d):
            return Int8Conv2d.from_conv(layer, self.compute_dtype())
        assert isinstance(layer, nn.Linear)
        twin = Int8Linear.from_linear(layer, self.compute_dtype(), self.rotation)
        twin.rotates_weight = not per_sample
        twin.int8_products = self.products == "int8" and not per_sample
        twin.int8_gradient = self.input_gradient == "int8"
        return twin

    def prepare(self, units: Iterable[nn.Module]) -> None:
        from simpletune.engine.quant.int8_gelu import fuse_feed_forwards

        if self.products == "int8":
            fuse_feed_forwards(units)

    def rules(self) -> Iterator[Problem]:
        if self.input_gradient == "int8" and self.products == "dequantised":
            yield Problem(
                "precision.input_gradient",
                f"int8 needs precision.products int8, which is {self.products}. Use products int8, or input_gradient "
                "dequantised",
            )

    def describe_matmul(self) -> str:
        turned = describe_rotation(self.rotation)
        if self.products != "int8":
            or_int8 = " or in int8, as the card is faster" if self.products == "auto" else ""
            return f"products in {self.compute_label}, with dequantised weights{or_int8}{turned}"
        gradient = "too" if self.input_gradient == "int8" else f"in {self.compute_label}"
        return (
            f"products in int8 by Triton (dequantised for 16 rows or fewer), input gradients {gradient}, "
            f"everything else in {self.compute_label}{turned}"
        )


# optimum-quanto's linear layer saves input and weight for the backward pass, so it needs more memory than ``int8``
# without checkpointing. Order matters: quantise, freeze, then add the adapter. Convolutions stay in the compute type:
# for quanto's, PEFT 0.21 builds the factors as quanto layers without a weight.
#
# torch's CPU kernel for bf16 inputs and int8 weights (_weight_int8pack_mm, 2.13) loads 16 columns at a time, beyond the
# end of rows of another width: layers of such widths, which no published model has, stay in the compute type.
class Int8Quanto(QuantisedPrecision):
    """int8 weights in the blocks' linear layers by optimum-quanto, for a frozen base."""

    weights: Literal["int8-quanto"] = "int8-quanto"
    """int8 weights by optimum-quanto, 1 byte each, for a frozen base. Convolutions stay in the compute type."""

    bytes_per_weight: ClassVar[float] = 1

    def quantises(self, layer: nn.Module) -> bool:
        from torch import nn

        return isinstance(layer, nn.Linear) and layer.in_features % 16 == 0

    def convert(self, layer: nn.Module, per_sample: bool = False) -> nn.Module:
        try:
            from optimum.quanto import QLinear, qint8
        except Exception as error:  # also those of a library that torch has outgrown
            raise UserError(
                f"precision.weights=int8-quanto needs optimum-quanto, which cannot be imported: {error}. "
                "Use precision.weights=int8, which does not need it."
            ) from error
        twin = QLinear.from_module(layer.to(self.compute_dtype()), weights=qint8)
        twin.freeze()  # leaves only the int8 weight and its scales
        # quanto's CPU kernel crashes or refuses otherwise: a UNet's tokens are a transposed view of its features
        twin.register_forward_pre_hook(lambda module, inputs: tuple(value.contiguous() for value in inputs))
        return twin.requires_grad_(False)


# 4 bits each, at the quantiles of a normal distribution (arXiv:2305.14314, section 3), in blocks of 64. Three kinds of
# layers keep more bits. Layers outside the model's blocks stay in the compute type, as with int8. Convolutions are
# int8. The blocks' modulation is int8 by default: its error is the same for every token of an image, so it does not
# average out. On blocks of SD3 Medium's size with random weights, nf4 throughout changes a block's residual update by
# 23%, nf4 with int8 modulation by 17%, and int8 throughout by 2%.
class Nf4(QuantisedPrecision):
    """nf4 weights in the blocks' linear layers with one scale per 64 weights, for a frozen base."""

    weights: Literal["nf4"] = "nf4"
    """nf4 weights, half a byte each, for a frozen base: half of int8's memory and nine times its rounding error.
    Convolutions are int8."""
    double_quantisation: bool = True
    """Store the scales in 8 bits, not 32: 0.52 instead of 0.56 bytes per weight, and less than 0.1% more error."""
    modulation: Literal["int8", "nf4"] = "int8"
    """Precision of the blocks' modulation: adaLN, a third of SD3's weights; time_emb_proj, 3% of SD 1.5's. int8
    errs less, nf4 takes less memory (docs/reference/memory-levers.md). Z-Image's stays in the compute type."""
    rotation: Literal["none", "hadamard"] = "none"
    """Rotate the linear layers' weights, and their inputs in every pass, by a block Hadamard matrix of 256, 64 or 16
    columns (arXiv:2512.03673), so that outliers do not decide the scales (docs/explanation/measurements.md has the
    errors). Costs time. Convolutions are not rotated."""

    bytes_per_weight: ClassVar[float] = 0.5

    def describe_matmul(self) -> str:
        return super().describe_matmul() + describe_rotation(self.rotation)

    def convert(self, layer: nn.Module, per_sample: bool = False) -> nn.Module:
        from torch import nn

        from simpletune.engine.quant.int8_conv import Int8Conv2d
        from simpletune.engine.quant.int8_linear import Int8Linear
        from simpletune.engine.quant.nf4_linear import Nf4Linear

        if isinstance(layer, nn.Conv2d):
            return Int8Conv2d.from_conv(layer, self.compute_dtype())
        assert isinstance(layer, nn.Linear)
        twin: Int8Linear | Nf4Linear
        if self.modulation == "int8" and per_sample:
            twin = Int8Linear.from_linear(layer, self.compute_dtype(), self.rotation)
        else:
            twin = Nf4Linear.from_linear(layer, self.compute_dtype(), self.double_quantisation, self.rotation)
        twin.rotates_weight = not per_sample
        return twin
