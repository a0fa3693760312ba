"""SD3's joint attention as a step on the CPU computes it: plain products, and nothing that nobody reads.

PyTorch's fused attention spares memory: it keeps no probabilities, and its backward pass computes them again, tile by
tile. On a CPU that multiplies bf16 in one instruction, whole products are faster while the probabilities are few. Three
further savings: the low-rank updates of queries, keys and values, which read the same input, are multiplied together;
the last block's queries of the text, whose results are dropped, are not computed; and all blocks' scores use the same
memory.

Shapes: b samples, h heads, n tokens (of the picture first, then of the text), q queries, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor, nn

from simpletune.adapters.lora_product import project


class Scratch:
    """Memory for the scores [b, h, q, n], which no two blocks need at a time: fresh memory takes longer than they."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without values; the next call takes its memory again."""
        count = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < count or self._bytes.device != device:
            self._bytes = torch.empty(count, dtype=torch.uint8, device=device)
        return self._bytes[:count].view(dtype).view(shape)


class _PlainAttention(torch.autograd.Function):
    """softmax(Q K^T / sqrt(d)) V with kept probabilities; scores and softmax in fp32 or better."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scratch: Scratch) -> Tensor:
        heads = query.shape[:2]
        q, k, v = (tensor.flatten(0, 1) for tensor in (query, key, value))  # [b h, n, d]
        scale, wide = 1 / math.sqrt(q.shape[-1]), torch.promote_types(q.dtype, torch.float32)
        scores = scratch.of((len(q), q.shape[1], k.shape[1]), wide, q.device)
        with torch.autocast(q.device.type, enabled=False):
            torch.bmm(q.to(wide) * scale, k.to(wide).mT, out=scores)
            torch.softmax(scores, -1, out=scores)  # row by row: it may write over what it has read
            probabilities = scores.to(q.dtype, copy=True)
            result = torch.bmm(probabilities, v)
        ctx.save_for_backward(q, k, v, probabilities)
        ctx.scratch, ctx.scale = scratch, scale
        return result.unflatten(0, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        heads, grad = grads[0].shape[:2], grads[0].flatten(0, 1)
        grad_v = torch.bmm(probabilities.mT, grad)
        inner = ctx.scratch.of(tuple(probabilities.shape), q.dtype, q.device)
        torch.bmm(grad, v.mT, out=inner)  # the gradient of the probabilities, then of the scores
        torch.ops.aten._softmax_backward_data.out(inner, probabilities, -1, q.dtype, grad_input=inner)
        grad_q, grad_k = torch.bmm(inner, k).mul_(ctx.scale), torch.bmm(inner.mT, q).mul_(ctx.scale)
        return *(tensor.unflatten(0, heads) for tensor in (grad_q, grad_k, grad_v)), None


def attend(
    query: Tensor,  # [b, h, q, d]
    key: Tensor,  # [b, h, n, d]
    value: Tensor,  # [b, h, n, d]
    scratch: Scratch,
) -> Tensor:  # [b, h, q, d]
    """Attention without mask and dropout, as ``scaled_dot_product_attention``, by products in the type of the value.

    It keeps the probabilities, b h q n numbers of that type, for the backward pass.
    """
    dtype = value.dtype  # under autocast a norm may have widened the others
    attended: Tensor = _PlainAttention.apply(query.to(dtype), key.to(dtype), value, scratch)
    return attended


class _Unread(torch.autograd.Function):
    """What it is given, unchanged; and zero gradients for weights whose results nobody would read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


class JointAttention:
    """A processor for diffusers' ``Attention`` with the sums of JointAttnProcessor2_0 (arXiv:2403.03206, figure 2).

    Args:
        scratch: for the scores of all blocks; None: attention itself is left to PyTorch's kernels.
    """

    def __init__(self, scratch: Scratch | None):
        self.scratch = scratch

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,  # [b, n, i]
        encoder_hidden_states: Tensor | None = None,  # [b, t, i]
        attention_mask: None = None,
    ) -> Any:
        """The picture's tokens [b, n, i]; where there is a text, its tokens [b, t, i] too."""
        picture = hidden_states.shape[1]
        projections = [attn.to_q, attn.to_k, attn.to_v]
        query, key, value = heads(project(projections, hidden_states), attn.heads)
        query, key = normed(query, attn.norm_q), normed(key, attn.norm_k)
        if encoder_hidden_states is not None:
            *queries, text_key, text_value = self.text(attn, encoder_hidden_states)
            query, key, value = (
                torch.cat(parts, dim=2) for parts in ([query, *queries], [key, text_key], [value, text_value])
            )
        if self.scratch is None:
            result = F.scaled_dot_product_attention(query, key, value)
        else:
            result = attend(query, key, value, self.scratch)
        result = result.transpose(1, 2).flatten(2)  # [b, q, i]
        attended = attn.to_out[1](attn.to_out[0](result[:, :picture]))
        if encoder_hidden_states is None:
            return attended
        if attn.context_pre_only:
            return attended, encoder_hidden_states  # which the last block drops
        return attended, attn.to_add_out(result[:, picture:])

    def text(self, attn: Attention, tokens: Tensor) -> list[Tensor]:
        """Queries, but for the last block, keys and values [b, h, t, d] of the text's tokens [b, t, i]."""
        last = attn.context_pre_only
        layers = [attn.add_k_proj, attn.add_v_proj] if last else [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
        *query, key, value = heads(project(layers, tokens), attn.heads)
        if last:
            unread = [layer for layer in (attn.add_q_proj, attn.norm_added_q) if layer is not None]
            weights = [weight for layer in unread for weight in layer.parameters() if weight.requires_grad]
            value = _Unread.apply(value, *weights)
        return [*(normed(each, attn.norm_added_q) for each in query), normed(key, attn.norm_added_k), value]


def heads(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Tensors [b, n, i] as [b, h, n, d]."""
    return [tensor.unflatten(2, (count, -1)).transpose(1, 2) for tensor in tensors]


def normed(tensor: Tensor, norm: nn.Module | None) -> Tensor:
    """Queries or keys [b, h, n, d], normed where the model does it (SD3.5)."""
    return tensor if norm is None else norm(tensor)


def take_joint_attention(blocks: Iterable[Any], by_products: bool) -> None:
    """Give a transformer's blocks this processor, in place.

    Args:
        blocks: with their adapter.
        by_products: whether attention itself is made of plain products.
    """
    processor = JointAttention(Scratch() if by_products else None)
    for block in blocks:
        for attention in (block.attn, block.attn2):
            if attention is not None:
                assert isinstance(attention.processor, JointAttnProcessor2_0 | JointAttention), attention.processor
                attention.processor = processor
