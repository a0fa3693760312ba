"""SD3's block with adaptive norms, gates and residuals as single operators (engine/kernels/adaln.py).

It has the modules, sums and order of diffusers' ``JointTransformerBlock``, and on the CPU gives the same bits.

Shapes: b samples, n tokens of the picture, t of the text, d width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from simpletune.engine.kernels.adaln import GatedTokens, ScaleShift, add_gated, normalise_and_modulate
from simpletune.engine.kernels.rms_norm import normalise
from simpletune.models.shared.blocks import with_feed_forward


class JointBlock(JointTransformerBlock):
    """Block of SD3 or SD3.5. ``use_joint_blocks`` converts diffusers' blocks."""

    def forward(
        self,
        hidden_states: Tensor,  # [b, n, d]
        encoder_hidden_states: Tensor,  # [b, t, d]
        temb: Tensor,  # [b, d]; with a modulation plan, the modulations of all layers
        joint_attention_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return text tokens (None after the last block) and picture tokens."""
        x, text, more = hidden_states, encoder_hidden_states, joint_attention_kwargs or {}
        norm, norm_text = self.norm1, self.norm1_context
        # [b, d] each: shift, scale and gate of attention, those of the feed-forward, then those of a second attention
        parts = norm.linear(norm.silu(temb)).chunk(9 if self.use_dual_attention else 6, dim=1)
        shift, scale, gate, *of_ff = parts
        second = [ScaleShift(of_ff[4], of_ff[3])] if self.use_dual_attention else []  # SD35AdaLayerNormZeroX's order
        x, inputs = normalise_and_modulate(x, None, [ScaleShift(scale, shift), *second], norm.norm.eps)
        if self.context_pre_only:  # the last block, without text output: AdaLayerNormContinuous, scale before shift
            scale, shift = norm_text.linear(norm_text.silu(temb).to(text.dtype)).chunk(2, dim=1)
        else:
            shift, scale, *of_text = norm_text.linear(norm_text.silu(temb)).chunk(6, dim=1)
        text, (normed_text,) = normalise_and_modulate(text, None, [ScaleShift(scale, shift)], norm_text.norm.eps)
        attended, attended_text = self.attn(hidden_states=inputs[0], encoder_hidden_states=normed_text, **more)
        added = GatedTokens(attended, gate)
        if self.use_dual_attention:
            (x,) = add_gated((x, added))
            added = GatedTokens(self.attn2(hidden_states=inputs[1], **more), of_ff[5])
        del inputs, normed_text, attended
        x, found = with_feed_forward(x, added, of_ff, self.norm2, self.ff)
        del added
        if self.context_pre_only:
            return None, add_gated((x, found))[0]
        of_network = GatedTokens(attended_text, of_text[0])
        del attended_text
        text, found_text = with_feed_forward(text, of_network, of_text[1:], self.norm2_context, self.ff_context)
        del of_network
        text, x = add_gated((text, found_text), (x, found))
        return text, x


def use_joint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Convert diffusers' blocks to ours in place, keeping their modules and parameters."""
    for block in blocks:
        assert type(block) is JointTransformerBlock, type(block)
        block.__class__ = JointBlock
        for attention in block.modules():
            if isinstance(attention, Attention):
                attention.set_processor(JointAttention())


class JointAttention:
    """Attention over the tokens of picture and text together, or of the picture alone (SD3.5 Medium).

    Like diffusers' ``JointAttnProcessor2_0``, with fewer copies: heads are separated after the tokens of both are
    joined, so that queries, keys, values, the output and their gradients have the memory layout that matmuls read and
    write; and the output is split in one operation, so that the gradients of its parts are joined in one pass instead
    of three.
    """

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: object
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from the picture's tokens [b, n, d] and the text's [b, t, d] to both; return the same shapes. Without
        text only the picture attends, and only its tokens are returned."""
        n, text = hidden_states.shape[1], encoder_hidden_states
        layers = (attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k), (attn.to_v, None)
        query, key, value = (_normed(attn, layer(hidden_states), norm) for layer, norm in layers)
        if text is not None:
            layers = (attn.add_q_proj, attn.norm_added_q), (attn.add_k_proj, attn.norm_added_k), (attn.add_v_proj, None)
            of_text = [_normed(attn, layer(text), norm) for layer, norm in layers]
            query, key, value = (torch.cat(pair, dim=1) for pair in zip((query, key, value), of_text, strict=True))
            del of_text
        query, key, value = (x.view(*x.shape[:2], attn.heads, -1).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=False)
        attended = attended.transpose(1, 2).flatten(2).to(query.dtype)
        linear, dropout = attn.to_out
        if text is None:
            return dropout(linear(attended))
        image, rest = attended.split([n, text.shape[1]], dim=1)
        rest = rest if attn.context_pre_only else attn.to_add_out(rest)
        return dropout(linear(image)), rest


def _normed(attn: Attention, x: Tensor, norm: nn.Module | None) -> Tensor:  # [b, n, d]
    return x if norm is None else normalise(x.view(*x.shape[:2], attn.heads, -1), norm).flatten(2)  # of each head
