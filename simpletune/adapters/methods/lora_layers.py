"""LoRA layers in a denoiser: the update added to its layer's output within the matmul, dropout, and norms.

PEFT computes the update, multiplies it by its scale and adds it to the layer's output, which writes and reads three
tensors of the output's size. Here the matmul with the second factor adds to the output in place and rounds once, and so
does that of the input's gradient to the gradient through the frozen weight. With checkpointing, a layer's update reads
or writes 11 tensors of the activations' size per step instead of 23.

On a convolution, A is a convolution of its geometry to r channels, and B mixes these at every pixel of the output.

Norms are computed in closed form: neither B A nor W + s B A is built.

Shapes: n rows (samples x tokens), i inputs, o outputs, r rank; of convolutions b samples, p pixels of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Conv2d, Linear, LoraLayer, LoraVariant
from torch import Tensor, nn

from simpletune.adapters.methods.layers import ADAPTER, FactorLayer, geometry_of
from simpletune.engine.quant.frozen_product import Packed, multiply
from simpletune.engine.quant.int8_conv import Geometry

TINY = 1e-30
Context = Any
"""Context of an autograd function, whose ``saved_tensors`` and ``needs_input_grad`` have no useful types."""


def _add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Add an update to y in place; returns what its gradients need: x, x A^T [n, r], a and b, in the type of y."""
    if not x.dtype == a.dtype == b.dtype == y.dtype:
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
    down = x.flatten(0, -2) @ a.t()  # [n, r]
    y.detach().view(-1, y.shape[-1]).addmm_(down, b.t(), alpha=scale)
    return x, down, a, b


def _add_by_pixels(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, geometry: Geometry | None
) -> tuple[Tensor, ...]:
    """Add an update to y in place, with channels first, as ``_add`` does; A x is [b, r, p]. A is [r, i], or [r, i, kh,
    kw] with a geometry."""
    x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
    down = a @ x.flatten(2) if geometry is None else F.conv2d(x, a, None, *geometry).flatten(2)
    batch = b.expand(len(x), *b.shape)
    y.detach().view(*y.shape[:2], -1).baddbmm_(batch, down, alpha=scale)
    return x, down, a, b


def _gradients(
    rows: Tensor,  # of the output [n, o]
    x: Tensor,  # [..., i]
    down: Tensor,  # [n, r]
    b: Tensor,  # [o, r]
    scale: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x A^T [n, r], and of A and B where they are wanted."""
    grad_down = rows @ b
    if scale != 1:
        grad_down.mul_(scale)
    grad_a = grad_down.t() @ x.flatten(0, -2) if wanted[0] else None
    grad_b = rows.t() @ down if wanted[1] else None
    if grad_b is not None and scale != 1:
        grad_b.mul_(scale)
    return grad_down, grad_a, grad_b


class _Added(torch.autograd.Function):
    """Compute y += scale (x A^T) B^T in the type of y and return y. The op that made y must not need y for backward."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(*_add(y, x, a, b, scale))
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        x, down, a, b = ctx.saved_tensors
        _, wants_x, *wanted, _ = ctx.needs_input_grad
        grad_down, *of_factors = _gradients(grad_y.flatten(0, -2), x, down, b, ctx.scale, wanted)
        grad_x = (grad_down @ a).view(x.shape) if wants_x else None
        return grad_y, grad_x, *of_factors, None


class _Updated(torch.autograd.Function):
    """Compute y = x W^T + bias + scale (x A^T) B^T for a frozen W, as ``_Added`` does.

    One node for both: the update's part of the gradient of x is added in its product to W's, without a tensor and a
    pass of its own. Saves references to the packed weight, not W itself.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        unpack: Callable[..., Tensor],
        constants: tuple[Any, ...],
        bias: Tensor | None,
        *packed: Tensor,
    ) -> Tensor:
        y = multiply(x, (unpack, constants, packed), bias)
        ctx.save_for_backward(*_add(y, x, a, b, scale), *packed)
        ctx.scale, ctx.unpack, ctx.constants = scale, unpack, constants
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        x, down, a, b, *packed = ctx.saved_tensors
        wants_x, *wanted = ctx.needs_input_grad[:3]
        rows = grad_y.flatten(0, -2)  # [n, o]
        grad_down, *of_factors = _gradients(rows, x, down, b, ctx.scale, wanted)
        grad_x = None
        if wants_x:
            grad_x = (rows @ ctx.unpack(rows.dtype, *ctx.constants, *packed)).addmm_(grad_down, a).view(x.shape)
        return grad_x, *of_factors, None, None, None, None, *[None] * len(packed)


class _UpdatedQuantised(_Updated):
    """The same for a weight that is unpacked, which traces tell by the name (engine/profiling/figures.py)."""


def convolution_gradients(
    grad_down: Tensor,  # [b, r, h', w']
    x: Tensor,  # [b, i, h, w]
    a: Tensor,  # [r, i, kh, kw]
    geometry: Geometry,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and A in A x, a convolution, where they are wanted."""
    if not any(wanted):
        return None, None
    *own, groups = geometry
    mask = (*wanted, False)
    grad_x, grad_a, _ = torch.ops.aten.convolution_backward(grad_down, x, a, None, *own, False, (0, 0), groups, mask)
    return grad_x, grad_a


class _AddedByPixels(torch.autograd.Function):
    """Compute y += scale B (A x) for a convolution, under the conditions of ``_Added``."""

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, geometry: Geometry | None
    ) -> Tensor:
        ctx.save_for_backward(*_add_by_pixels(y, x, a, b, scale, geometry))
        ctx.scale, ctx.geometry = scale, geometry
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [b, o, h', w']
        x, down, a, b = ctx.saved_tensors
        _, wants_x, wants_a, wants_b, *_ = ctx.needs_input_grad
        pixels = grad_y.flatten(2)  # [b, o, p]
        grad_down = b.t() @ pixels  # [b, r, p]
        if ctx.scale != 1:
            grad_down.mul_(ctx.scale)
        if ctx.geometry is None:
            grad_x = (a.t() @ grad_down).view(x.shape) if wants_x else None
            grad_a = (grad_down @ x.flatten(2).transpose(1, 2)).sum(0) if wants_a else None
        else:
            narrow = grad_down.unflatten(2, grad_y.shape[2:])
            grad_x, grad_a = convolution_gradients(narrow, x, a, ctx.geometry, (wants_x, wants_a))
        grad_b = (pixels @ down.transpose(1, 2)).sum(0) if wants_b else None
        if grad_b is not None and ctx.scale != 1:
            grad_b.mul_(ctx.scale)
        return grad_y, grad_x, grad_a, grad_b, None, None


def add_update(
    y: Tensor,  # [..., o]
    x: Tensor,  # [..., i]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # [..., o]
    """Add a LoRA update to a layer's output: y + scale (x A^T) B^T (arXiv:2106.09685, eq. 3), in the type of y.

    Overwrites y, so nothing else may need it, and returns it. Computes a new tensor instead under ``torch.compile``,
    which fuses the expression itself, and if y is not contiguous.
    """
    if torch.compiler.is_compiling() or not y.is_contiguous():
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        return y + scale * F.linear(F.linear(x, a), b)
    if not torch.is_grad_enabled():
        _add(y, x, a, b, scale)
        return y
    added: Tensor = _Added.apply(y, x, a, b, scale)
    return added


def add_pointwise_update(
    y: Tensor,  # [b, o, h, w]
    x: Tensor,  # [b, i, h, w]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # [b, o, h, w]
    """Apply ``add_update`` at every pixel of the output of a 1x1 convolution, with channels first.

    Channels-last tensors go through ``add_update`` itself: their last dimension is the channels.
    """
    if y.is_contiguous() and not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            _add_by_pixels(y, x, a, b, scale, None)
            return y
        added: Tensor = _AddedByPixels.apply(y, x, a, b, scale, None)
        return added
    return add_update(y.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1), a, b, scale).permute(0, 3, 1, 2)


def add_convolution_update(
    y: Tensor,  # [b, o, h', w']
    x: Tensor,  # [b, i, h, w]
    a: Tensor,  # [r, i, kh, kw]
    b: Tensor,  # [o, r]
    scale: float,
    geometry: Geometry,
) -> Tensor:  # [b, o, h', w']
    """Add the update scale B (A x) to the output of a convolution with this geometry, in the type of y, under the
    conditions of ``add_update``. Both convolutions read the same pixels: the product is one of B A [o, i, kh, kw]."""
    if torch.compiler.is_compiling() or not y.is_contiguous():
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        return y + scale * F.conv2d(F.conv2d(x, a, None, *geometry), b[:, :, None, None])
    if not torch.is_grad_enabled():
        _add_by_pixels(y, x, a, b, scale, geometry)
        return y
    added: Tensor = _AddedByPixels.apply(y, x, a, b, scale, geometry)
    return added


class InPlaceLoraVariant(LoraVariant):
    """Apply an update through PEFT's hook, which calls ``forward`` with the layer's output."""

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **more: Any) -> Tensor:
        """Return the output, [..., o] or [b, o, h', w'] of a convolution, with one adapter's update."""
        dropout = module._modules["lora_dropout"]._modules[active_adapter]
        dropped = x if type(dropout) is nn.Identity else dropout(x)
        a, b = _operands(module, active_adapter, result.dtype)
        scale = module.scaling[active_adapter]
        if a.dim() > 2:
            return add_convolution_update(result, dropped, a, b, scale, geometry_of(module))
        add = add_pointwise_update if isinstance(module, Conv2d) else add_update
        return add(result, dropped, a, b, scale)


class _OneUpdate:
    """PEFT's layer with the same names and state. Its forward pass is shorter where a single update is active, as in
    training: PEFT asks for merged, disabled and several updates, and for types, in every pass."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own, (active, *others) = self.__dict__, self.active_adapters or [""]
        if args or kwargs or others or own["_disable_adapters"] or own["merged_adapters"] or active not in self.scaling:
            found: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
            return found
        base, dropout = self._modules["base_layer"], self._modules["lora_dropout"]._modules[active]
        alone = torch.is_grad_enabled() and type(dropout) is nn.Identity
        if alone and (weight := _frozen_weight(base)) and not torch.is_autocast_enabled(x.device.type):
            unpack, constants, packed = weight
            a, b = (each.to(x.dtype) for each in _operands(self, active, x.dtype))
            node = _Updated if unpack is _as_it_is else _UpdatedQuantised
            result: Tensor = node.apply(x, a, b, self.scaling[active], unpack, constants, base.bias, *packed)
            return result
        return InPlaceLoraVariant.forward(self, active, x, base(x))


class OneUpdateLinear(_OneUpdate, Linear):
    """A linear layer with LoRA."""


class OneUpdateConv2d(_OneUpdate, Conv2d):
    """A convolution with LoRA."""


ONE_UPDATE: dict[type, type] = {Linear: OneUpdateLinear, Conv2d: OneUpdateConv2d}


def _frozen_weight(layer: nn.Module) -> Packed | None:
    """Return a frozen linear layer's weight, if nothing but its product is wanted of the layer."""
    if torch.compiler.is_compiling() or layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__:
        return None
    if type(layer) is nn.Linear:
        frozen = not any(each is not None and each.requires_grad for each in layer._parameters.values())
        return (_as_it_is, (), (layer.weight,)) if frozen else None
    own: Callable[[], Packed | None] | None = getattr(layer, "packed_weight", None)
    return None if own is None else own()


def _as_it_is(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight


def _operands(layer: LoraLayer, adapter: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A [r, i], or [r, i, kh, kw] of a larger kernel, and B [o, r] of this pass: those that the block has cast
    if they have this type, with ranks dropped."""
    a, b = _factors(layer, adapter)
    cast = layer.__dict__.get("cast")
    if cast is not None and cast["a"].dtype == dtype:
        a, b = cast["a"], cast["b"]
    if a.dim() > 2:  # of a convolution
        a, b = a.flatten(1) if a.shape[2:] == (1, 1) else a, b.flatten(1)
    drop = layer._modules.get("update_dropout")
    return a, b if drop is None else drop(b)


def _factors(layer: LoraLayer, adapter: str) -> tuple[Tensor, Tensor]:
    """Return a layer's A and B without ``nn.Module``'s search of its parts, which takes as long as a small
    operation."""
    own: Any = layer._modules
    a, b = own["lora_A"]._modules[adapter], own["lora_B"]._modules[adapter]
    return a._parameters["weight"], b._parameters["weight"]


class _Cast(torch.autograd.Function):
    """Convert tensors to another type by one operation, and their gradients back by another."""

    @staticmethod
    def forward(ctx: Context, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = tensors[0].dtype
        return tuple(_converted(tensors, dtype))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(_converted([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(found) for grad in grads)


def _converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    found = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(found, list(tensors))
    return found


def cast_together(blocks: Iterable[nn.Module]) -> None:
    """Let each block convert the factors of all its layers to the type of its activations together, once in a pass:
    LoRA's, and those that a ``FactorLayer`` names.

    Layers that drop ranks convert their own, after scaling those kept.
    """
    for block in blocks:
        layers = [layer for layer in block.modules() if _to_cast(layer)]
        if layers:
            block.forward = _casting(block.forward, layers)


def _to_cast(layer: nn.Module) -> dict[str, Tensor]:
    """Return the factors of a layer that its block converts."""
    if isinstance(layer, FactorLayer):
        return {name: factor for name, factor in layer.factors.items() if name in layer.cast_first}
    if isinstance(layer, LoraLayer) and isinstance(layer, _OneUpdate):
        if getattr(layer, "update_dropout", None) is None:
            return dict(zip("ab", _factors(layer, ADAPTER), strict=True))
    return {}


def _casting(plain: Callable[..., Any], layers: Sequence[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler fuses the casts
            return plain(*args, **kwargs)
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        named = [_to_cast(layer) for layer in layers]
        factors = [factor for each in named for factor in each.values()]
        device = x.device.type
        if x.dtype == factors[0].dtype or torch.is_autocast_enabled(device):
            return plain(*args, **kwargs)
        cast = iter(_Cast.apply(x.dtype, *factors))
        for layer, names in zip(layers, named, strict=True):
            layer.__dict__["cast"] = dict(zip(names, cast, strict=False))
        try:
            return plain(*args, **kwargs)
        finally:
            for layer in layers:
                del layer.__dict__["cast"]

    return forward


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the layers with a LoRA update, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def compute_in_output_type(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Store the updates' weights in ``dtype``, and compute their matmuls in the activations' type in place.

    PEFT would cast the activations to the weights' type: fp32 matmuls, and fp32 activations saved for backward.
    """
    for _, layer in lora_layers(model):
        layer.cast_input_dtype_enabled = False
        layer.__class__ = ONE_UPDATE.get(type(layer), type(layer))
        for adapter in layer.lora_A:
            layer.lora_variant[adapter] = InPlaceLoraVariant()
            for pair in (layer.lora_A, layer.lora_B):
                pair[adapter].weight = nn.Parameter(pair[adapter].weight.detach().to(dtype))


def lora_factors(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each updated layer's name, A [r, i] and B [o, r]; those of a convolution are [r, i, kh, kw] and
    [o, r, 1, 1]."""
    for name, layer in lora_layers(model):
        yield name, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


class UpdateDropout(nn.Dropout):
    """Drop columns of an update's second factor, and whole updates, in training mode; draws anew in every pass.

    A kept rank is multiplied by 1 / (1 - rank), so that the expected update stays the same; a kept module is not scaled
    (stochastic depth, arXiv:1603.09382, as kohya's scripts apply it to LoRA). Draws from the device's global generator,
    which the loop seeds for every step, and which checkpointing restores for the recomputation because this is a
    ``Dropout`` with ``p`` > 0.
    """

    def __init__(self, rank: float, module: float):
        super().__init__(max(rank, module))
        self.rank, self.module = rank, module

    def forward(self, b: Tensor) -> Tensor:  # [o, r] -> [o, r]
        if not self.training:
            return b
        draws = torch.rand(b.shape[1] + 1, device=b.device)
        kept = (draws[1:] >= self.rank) & (draws[0] >= self.module)
        return b * (kept.to(b.dtype) / (1 - self.rank))


def product_norm(
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
) -> Tensor:  # fp32 []
    """Compute ||B A|| (Frobenius) = sqrt(trace((A A^T) (B^T B))); of B A itself where that is smaller than [r, r]."""
    a, b = a.float(), b.float()
    if a.shape[0] ** 2 > a.shape[1] * b.shape[0]:
        return (b @ a).norm()
    return ((a @ a.T) * (b.T @ b)).sum().clamp_min(0).sqrt()


@torch.no_grad()
def limit_norm(a: Tensor, b: Tensor, scale: float, limit: float) -> None:
    """Scale both factors of an update with ||s B A|| > limit in place, by the same number, so that its norm is limit.
    Equivalent to kohya's ``scale_weight_norms``. Does not read from the device.
    """
    norm = scale * product_norm(a.flatten(1), b.flatten(1))
    root = (limit / norm.clamp_min(TINY)).clamp_max(1).sqrt()
    a.mul_(root)
    b.mul_(root)


def row_norms(
    squares: Tensor,  # fp32 [o]
    projected: Tensor,  # [o, r]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    scale: float,
) -> Tensor:  # fp32 [o]
    """Compute ||W_j + s B_j A|| of every row j = sqrt(||W_j||^2 + 2 s B_j (W A^T)_j + s^2 B_j (A A^T) B_j^T), from
    ``squares`` ||W_j||^2 and ``projected`` W A^T."""
    a, b = a.float(), b.float()
    crossed = (b * projected.float()).sum(1)
    own = ((b @ (a @ a.T)) * b).sum(1) if len(a) <= a.shape[1] else (b @ a).square().sum(1)  # no [r, r] larger than A
    return (squares + 2 * scale * crossed + scale**2 * own).clamp_min(0).sqrt()
