"""DoRA's layer: W' = m (W + s B A) / ||W + s B A||, with one norm and one magnitude for each output (arXiv:2402.09353).

The norm is a constant of the backward pass (section 4.3 of the paper) and needs no weight: see ``row_norms``.

diffusers (PEFT) reads the magnitude m from a file and divides it by ||W + s B A||. ComfyUI does not know that key: it
reads ``dora_scale`` and divides it by ||W|| (ComfyUI #15458). Writing ``dora_scale`` as m ||W|| / ||W + s B A|| makes
ComfyUI compute the trained weight W', and W + k (W' - W) at strength k. diffusers drops that key from SD3's files, but
in a U-Net's file in kohya's layout it would take ``dora_scale`` for m. Every file has both keys, so that it can be
converted.

Shapes: n rows (samples x tokens), i inputs, o outputs, r rank; of convolutions b samples, p pixels of the output.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from simpletune.adapters.methods.formulas import by_norms
from simpletune.adapters.methods.layers import ADAPTER, UpdateLayer, geometry_of, innermost_layer, shape_of
from simpletune.adapters.methods.lora_layers import Context, UpdateDropout, convolution_gradients, row_norms
from simpletune.engine.quant.int8_conv import Geometry, Int8Conv2d
from simpletune.engine.tensors import row_blocks, swap_halves
from simpletune.models.shared.lora_layout import ALPHA, DORA_SCALE, DOWN, MAGNITUDE, UP, Layout


class _Rescaled(torch.autograd.Function):
    """Compute y += delta (y - bias) + (x A^T) B^T in the type of y and return y.

    The op that made y must not need y for backward. Backward reads the output, so only y's memory is kept.
    """

    @staticmethod
    def forward(ctx: Context, y: Tensor, x: Tensor, a: Tensor, b: Tensor, delta: Tensor, bias: Tensor | None) -> Tensor:
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        down = x.flatten(0, -2) @ a.t()  # [n, r]
        rows = y.detach().view(-1, y.shape[-1])
        if bias is None:
            rows.addcmul_(rows, delta.to(y.dtype))
        else:
            rows.lerp_(bias.to(y.dtype), -delta.to(y.dtype))  # y + delta (y - bias), rounded once
        rows.addmm_(down, b.t())
        ctx.save_for_backward(x, down, a, b, delta, y.detach(), *([] if bias is None else [bias]))
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [..., o]
        x, down, a, b, delta, y, *bias = ctx.saved_tensors
        wants_y, wants_x, wants_a, wants_b, wants_delta, _ = ctx.needs_input_grad
        rows = grad_y.flatten(0, -2)  # [n, o]
        grad_down = rows @ b  # [n, r]
        grad_x = (grad_down @ a).view(x.shape) if wants_x else None
        grad_a = grad_down.t() @ x.flatten(0, -2) if wants_a else None
        grad_b = rows.t() @ down if wants_b or wants_delta else None
        grad_delta = None
        if wants_delta:
            assert grad_b is not None
            wide = y.float() if y.dtype == torch.float16 else y  # scaled gradients overflow in fp16
            centred = (wide - bias[0] if bias else wide).flatten(0, -2)
            grad_delta = _gradient_of_gain((centred * rows).sum(0).float(), grad_b, b, delta)
        grad_input = torch.addcmul(grad_y, grad_y, delta.to(grad_y.dtype)) if wants_y else None
        return grad_input, grad_x, grad_a, grad_b, grad_delta, None


def _gradient_of_gain(
    of_output: Tensor,  # fp32 [o]: of the whole output without its bias
    grad_b: Tensor,  # [o, r]
    b: Tensor,  # [o, r]
    delta: Tensor,  # fp32 [o]
) -> Tensor:  # fp32 [o]
    """Return the gradient of delta, from an output that it and the update have changed already."""
    own = of_output - (grad_b * b).sum(1, dtype=torch.float32)
    gain = 1 + delta
    return torch.where(gain == 0, 0, own / gain)


class _RescaledConvolution(torch.autograd.Function):
    """``_Rescaled`` for a convolution: y += delta (y - bias) + B (A x), with channels first."""

    @staticmethod
    def forward(
        ctx: Context,
        y: Tensor,  # [b, o, h', w']
        x: Tensor,  # [b, i, h, w]
        a: Tensor,  # [r, i, kh, kw]
        b: Tensor,  # [o, r]
        delta: Tensor,  # fp32 [o]
        bias: Tensor | None,  # [o]
        geometry: Geometry,
    ) -> Tensor:
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        down = F.conv2d(x, a, None, *geometry).flatten(2)  # [b, r, p]
        pixels, gain = y.detach().view(*y.shape[:2], -1), delta.to(y.dtype)[:, None]
        if bias is None:
            pixels.addcmul_(pixels, gain)
        else:
            pixels.lerp_(bias.to(y.dtype)[:, None], -gain)
        pixels.baddbmm_(b.expand(len(x), *b.shape), down)
        ctx.save_for_backward(x, down, a, b, delta, y.detach(), *([] if bias is None else [bias]))
        ctx.geometry = geometry
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads  # [b, o, h', w']
        x, down, a, b, delta, y, *bias = ctx.saved_tensors
        wants_y, wants_x, wants_a, wants_b, wants_delta, *_ = ctx.needs_input_grad
        pixels = grad_y.flatten(2)  # [b, o, p]
        grad_down = (b.t() @ pixels).unflatten(2, grad_y.shape[2:])
        grad_x, grad_a = convolution_gradients(grad_down, x, a, ctx.geometry, (wants_x, wants_a))
        grad_b = (pixels @ down.transpose(1, 2)).sum(0) if wants_b or wants_delta else None
        grad_delta = None
        if wants_delta:
            assert grad_b is not None
            wide = (y.float() if y.dtype == torch.float16 else y).flatten(2)
            centred = wide - bias[0][:, None] if bias else wide
            grad_delta = _gradient_of_gain((centred * pixels).sum((0, 2)).float(), grad_b, b, delta)
        grad_input = torch.addcmul(grad_y, grad_y, delta.to(grad_y.dtype)[:, None, None]) if wants_y else None
        return grad_input, grad_x, grad_a, grad_b, grad_delta, None, None


def rescaled_convolution(
    y: Tensor,  # [b, o, h', w']
    x: Tensor,  # [b, i, h, w]
    a: Tensor,  # [r, i, kh, kw]
    b: Tensor,  # [o, r]
    delta: Tensor,  # fp32 [o]
    bias: Tensor | None,  # [o]
    geometry: Geometry,
) -> Tensor:  # [b, o, h', w']
    """Compute ``rescaled`` for a convolution with this geometry: its weight becomes (1 + delta) W + B A."""
    if torch.compiler.is_compiling() or not y.is_contiguous():
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        gain = delta.to(y.dtype)[:, None, None]
        scaled = torch.addcmul(y, y, gain) if bias is None else torch.lerp(y, bias.to(y.dtype)[:, None, None], -gain)
        return scaled + F.conv2d(F.conv2d(x, a, None, *geometry), b[:, :, None, None])
    found: Tensor = _RescaledConvolution.apply(y, x, a, b, delta, bias, geometry)
    return found


def rescaled(
    y: Tensor,  # [..., o]
    x: Tensor,  # [..., i]
    a: Tensor,  # [r, i]
    b: Tensor,  # [o, r]
    delta: Tensor,  # fp32 [o]
    bias: Tensor | None,  # [o]
) -> Tensor:  # [..., o]
    """Compute y + delta (y - bias) + (x A^T) B^T in the type of y: the output of a layer whose weight is (1 + delta) W
    + B A.

    Overwrites y, so nothing else may need it. Computes a new tensor instead under ``torch.compile``, which fuses the
    expression itself, and if y is not contiguous.
    """
    if torch.compiler.is_compiling() or not y.is_contiguous():
        x, a, b = (tensor.to(y.dtype) for tensor in (x, a, b))
        delta = delta.to(y.dtype)
        scaled = torch.addcmul(y, y, delta) if bias is None else torch.lerp(y, bias.to(y.dtype), -delta)
        return scaled + F.linear(F.linear(x, a), b)
    found: Tensor = _Rescaled.apply(y, x, a, b, delta, bias)
    return found


class DoraLayer(UpdateLayer):
    """A frozen linear layer or convolution with a DoRA update; at strength k its weight is W + k (W' - W).

    The magnitudes are fp32 whatever the type of the factors: they start at ||W_j||, and rounding them would change the
    model before training. A row of zeros, which has no direction, stays zero.

    Args:
        base_layer: the frozen layer.
        rank: r.
        scale: s.
        dtype: type of the factors.
        adapter: name by which ``scaling`` holds the strength.
        dropouts: probabilities for the update's input, its ranks, and the whole update without its magnitudes.
    """

    squares: Tensor
    gain: Tensor | None

    def __init__(
        self,
        base_layer: nn.Module,
        rank: int,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        adapter: str = ADAPTER,
        dropouts: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ):
        super().__init__(base_layer, adapter)
        frozen = innermost_layer(base_layer)
        shape, device = shape_of(frozen), next(frozen.parameters()).device
        assert shape is not None
        self.scale, self.pointwise = scale, shape[2:] == (1, 1)
        kernel = () if self.pointwise else shape[2:]
        self.lora_A: nn.Linear | nn.Conv2d = nn.Linear(shape[1], rank, bias=False, device=device, dtype=dtype)
        if kernel:
            self.lora_A = nn.Conv2d(shape[1], rank, kernel, bias=False, device=device, dtype=dtype)  # type: ignore[arg-type]
        self.lora_B = nn.Linear(rank, shape[0], bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_B.weight)
        self.register_buffer("squares", squared_norms(frozen), persistent=False)
        self.register_buffer("gain", None, persistent=False)
        self.magnitude = nn.Parameter(self.squares.sqrt())
        inputs, *others = dropouts
        self.input_dropout = nn.Dropout(inputs) if inputs else nn.Identity()
        self.update_dropout = UpdateDropout(*others) if any(others) else nn.Identity()

    @torch.no_grad()
    def norms(self, dtype: torch.dtype) -> Tensor:  # fp32 [o]
        """Compute ||W_j + s B_j A||; W A^T is a product in a type, which the frozen layer itself computes unless its
        kernel is larger: its stride and padding would leave out parts of A."""
        frozen, a, b = innermost_layer(self), self.lora_A.weight, self.lora_B.weight
        if a.dim() == 4:
            weight = frozen.dequantise(dtype) if isinstance(frozen, Int8Conv2d) else frozen.get_parameter("weight")
            with torch.autocast(a.device.type, enabled=False):
                projected = weight.to(dtype).flatten(1) @ a.to(dtype).flatten(1).t()
                return row_norms(self.squares, projected, a.flatten(1), b, self.scale)
        rows = a.t()[None, :, :, None] if self.pointwise else a  # as pixels, or as rows
        without = {} if frozen.bias is None else {"bias": torch.zeros_like(frozen.bias)}  # type: ignore[arg-type]
        projected = functional_call(frozen, without, (rows.to(dtype),))
        projected = projected[0, :, :, 0] if self.pointwise else projected.t()  # [o, r]
        with torch.autocast(a.device.type, enabled=False):
            return row_norms(self.squares, projected, a, b, self.scale)

    @torch.no_grad()
    def exact_norms(self) -> Tensor:  # fp32 [o]
        """Compute ||W_j + s B_j A|| from the frozen weight, a few rows at a time, on the weight's device."""
        a, b = self.lora_A.weight.float().flatten(1), self.scale * self.lora_B.weight.float()
        rows, first = [], 0
        for block in row_blocks(innermost_layer(self), len(b)):
            own = b[first : first + len(block)].to(block.device) @ a.to(block.device)
            rows.append((block + own).norm(dim=1))
            first += len(block)
        return torch.cat(rows).to(self.magnitude.device)

    @torch.no_grad()
    def exact_gains(self) -> Tensor:  # fp32 [o]
        """Compute m / ||W + s B A|| for every row, by ``exact_norms``."""
        return by_norms(self.magnitude, self.exact_norms())

    def saved(self, name: str, layout: Layout) -> dict[str, Tensor]:
        """Return the tensors for a file by role. In diffusers' layout the scale is folded into B; kohya's has alpha.
        ComfyUI scales rows in the original layout's order, whatever the names."""
        down, up = self.lora_A.weight.detach(), self.lora_B.weight.detach()
        if not layout.alpha:
            up = (up.float() * self.scale).to(up.dtype)
        assert self.shape is not None
        relative = self.exact_gains() * self.squares.sqrt().to(self.magnitude.device)
        if layout.names.halves_swapped(name, self.shape[0], self.shape[1]):
            relative = swap_halves(relative)
        state = {DOWN: down, UP: up, DORA_SCALE: relative[:, None]}
        if len(self.shape) == 4:
            state = {role: tensor if tensor.dim() == 4 else tensor[:, :, None, None] for role, tensor in state.items()}
        state[MAGNITUDE] = self.magnitude.detach()
        return state | ({ALPHA: torch.tensor(self.scale * down.shape[0])} if layout.alpha else {})

    def add_linear(self, y: Tensor, x: Tensor) -> Tensor:
        """Add k (W' - W) x: gain - 1 times the frozen layer's output without its bias, and gain s B A x."""
        return rescaled(y, *self._operands(y, x))

    def add_convolution(self, y: Tensor, x: Tensor) -> Tensor:
        return rescaled_convolution(y, *self._operands(y, x), geometry_of(self))

    def _operands(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Return x, A, gain s B, gain - 1 and the bias."""
        gain = by_norms(self.magnitude, self.norms(y.dtype)) if self.gain is None else self.gain
        b = self.update_dropout(self.lora_B.weight) * (gain * (self.strength * self.scale))[:, None]
        bias = cast(Tensor | None, innermost_layer(self).bias)
        return self.input_dropout(x), self.lora_A.weight, b, (gain - 1) * self.strength, bias

    @torch.no_grad()
    def merge(self, weight: Tensor) -> Tensor:
        """Return W + k (W' - W). Also scales the rows of other updates in the weight, as ``add_linear`` does."""
        flat = weight.flatten(1)
        rotate = flat + self.scale * (self.lora_B.weight.float() @ self.lora_A.weight.float().flatten(1))
        return torch.lerp(flat, self.exact_gains()[:, None] * rotate, self.strength).view_as(weight)


def squared_norms(frozen: nn.Module) -> Tensor:  # fp32 [o]
    """Compute ||W_j||^2 of a frozen layer; dequantises its weight a few rows at a time."""
    shape = shape_of(frozen)
    assert shape is not None
    return torch.cat([block.square().sum(1) for block in row_blocks(frozen, shape[0])])
