"""klein's blocks with norms, positions, activations, gates and residuals as single operators (engine/kernels).

They have the modules, sums and order of diffusers' blocks, and on the CPU give the same bits.

Shapes: b samples, n tokens of the picture, t of the text, d width, f half of a head's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux2 import (
    Flux2Attention,
    Flux2ParallelSelfAttention,
    Flux2PosEmbed,
    Flux2SingleTransformerBlock,
    Flux2SwiGLU,
    Flux2TransformerBlock,
)
from torch import Tensor, nn

from simpletune.engine.kernels.adaln import GatedTokens, ScaleShift, add_gated, normalise_and_modulate
from simpletune.engine.kernels.rotary import normalise_and_rotate
from simpletune.engine.kernels.swiglu import swiglu
from simpletune.models.shared.blocks import with_feed_forward

LARGEST_FP16 = 65504


class JointBlock(Flux2TransformerBlock):
    """Block with layers of their own for text and picture."""

    def forward(
        self,
        hidden_states: Tensor,  # [b, n, d]
        encoder_hidden_states: Tensor,  # [b, t, d]
        temb_mod_img: Tensor,  # [b, 6 d]
        temb_mod_txt: Tensor,  # [b, 6 d]
        image_rotary_emb: tuple[Tensor, Tensor],  # of text and picture, [t + n, f] each
        joint_attention_kwargs: dict[str, object] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens and picture tokens."""
        x, text = hidden_states, encoder_hidden_states
        # [b, d] each: shift, scale and gate of attention, then of the feed-forward network
        shift, scale, gate, *of_ff = temb_mod_img.chunk(6, dim=-1)
        x, inputs = normalise_and_modulate(x, None, [ScaleShift(scale, shift)], self.norm1.eps)
        shift, scale, gate_text, *of_text = temb_mod_txt.chunk(6, dim=-1)
        text, inputs_text = normalise_and_modulate(text, None, [ScaleShift(scale, shift)], self.norm1_context.eps)
        attended, attended_text = self.attn(
            inputs.pop(), inputs_text.pop(), image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})
        )
        added, added_text = GatedTokens(attended, gate), GatedTokens(attended_text, gate_text)
        del attended, attended_text
        x, found = with_feed_forward(x, added, of_ff, self.norm2, self.ff)
        del added
        text, found_text = with_feed_forward(text, added_text, of_text, self.norm2_context, self.ff_context)
        del added_text
        text, x = add_gated((text, found_text), (x, found))
        return _clipped(text), x


class ParallelBlock(Flux2SingleTransformerBlock):
    """Block whose attention and feed-forward network have the same input, and share their first and last layers."""

    def forward(
        self,
        hidden_states: Tensor,  # [b, t + n, d]
        encoder_hidden_states: None,
        temb_mod: Tensor,  # [b, 3 d]
        image_rotary_emb: tuple[Tensor, Tensor],  # [t + n, f] each
        joint_attention_kwargs: dict[str, object] | None = None,
    ) -> Tensor:
        """Return all tokens."""
        shift, scale, gate = temb_mod.chunk(3, dim=-1)
        x, inputs = normalise_and_modulate(hidden_states, None, [ScaleShift(scale, shift)], self.norm.eps)
        found = self.attn(inputs.pop(), image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
        (x,) = add_gated((x, GatedTokens(found, gate)))
        return _clipped(x)


class JointAttention:
    """Attention over the tokens of text and picture together."""

    def __call__(
        self,
        attn: Flux2Attention,
        hidden_states: Tensor,  # [b, n, d]
        encoder_hidden_states: Tensor,  # [b, t, d]
        attention_mask: None,
        image_rotary_emb: tuple[Tensor, Tensor],  # [t + n, f] each
    ) -> tuple[Tensor, Tensor]:
        """Return the picture's tokens and the text's."""
        x, text, d = hidden_states, encoder_hidden_states, attn.head_dim
        query, key = (
            normalise_and_rotate(
                [(of_text(text).unflatten(-1, (-1, d)), norm_text), (of_image(x).unflatten(-1, (-1, d)), norm)],
                *_tables(image_rotary_emb),
            )
            for of_text, norm_text, of_image, norm in (
                (attn.add_q_proj, attn.norm_added_q, attn.to_q, attn.norm_q),
                (attn.add_k_proj, attn.norm_added_k, attn.to_k, attn.norm_k),
            )
        )
        value = torch.cat([attn.add_v_proj(text), attn.to_v(x)], dim=1).unflatten(-1, (-1, d))
        attended = _attend(query, key, value)
        rest, image = attended.split([text.shape[1], x.shape[1]], dim=1)
        linear, dropout = attn.to_out
        return dropout(linear(image)), attn.to_add_out(rest)


class ParallelAttention:
    """Attention of a parallel block, with the network beside it."""

    def __call__(
        self,
        attn: Flux2ParallelSelfAttention,
        hidden_states: Tensor,  # [b, t + n, d]
        attention_mask: None,
        image_rotary_emb: tuple[Tensor, Tensor],  # [t + n, f] each
    ) -> Tensor:  # [b, t + n, d]
        sizes = [attn.inner_dim] * 3 + [attn.mlp_hidden_dim * attn.mlp_mult_factor]
        query, key, value, x = attn.to_qkv_mlp_proj(hidden_states).split(sizes, dim=-1)
        query, key, value = (each.unflatten(-1, (-1, attn.head_dim)) for each in (query, key, value))
        tables = _tables(image_rotary_emb)
        query, key = (
            normalise_and_rotate([(each, norm)], *tables) for each, norm in ((query, attn.norm_q), (key, attn.norm_k))
        )
        attended = _attend(query, key, value)
        del query, key, value
        return attn.to_out(torch.cat([attended, attn.mlp_act_fn(x)], dim=-1))


class SwiGLU(Flux2SwiGLU):
    """Activation of a feed-forward network, or of that part of a parallel block."""

    def forward(self, x: Tensor) -> Tensor:  # [b, n, 2 d] -> [b, n, d]
        return swiglu(x)


class PairPositions(Flux2PosEmbed):
    """Angles of positions, one for each pair of numbers: diffusers' tables have every angle twice."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> cosine and sine [n, f]
        cos, sin = super().forward(ids)
        return cos[:, ::2], sin[:, ::2]


def _tables(positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [n, f] -> [1, n, f]
    cos, sin = positions
    return cos[None], sin[None]


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # [b, n, heads, 2 f] each -> [b, n, d]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=False)
    return attended.transpose(1, 2).flatten(2).to(query.dtype)


def _clipped(x: Tensor) -> Tensor:
    return x.clip(-LARGEST_FP16, LARGEST_FP16) if x.dtype == torch.float16 else x


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    Flux2TransformerBlock: JointBlock,
    Flux2SingleTransformerBlock: ParallelBlock,
    Flux2SwiGLU: SwiGLU,
    Flux2PosEmbed: PairPositions,
}


def use_own_blocks(model: nn.Module) -> None:
    """Convert diffusers' blocks and positions to ours in place, keeping their modules and parameters."""
    for module in model.modules():
        module.__class__ = CLASSES.get(type(module), type(module))
        if isinstance(module, Flux2Attention):
            module.set_processor(JointAttention())
        elif isinstance(module, Flux2ParallelSelfAttention):
            module.set_processor(ParallelAttention())
