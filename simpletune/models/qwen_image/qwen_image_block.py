"""Qwen-Image's block with norms, positions, gates and residuals as single operators (engine/kernels), and its positions
from shapes alone.

It has the modules, sums and order of diffusers' ``QwenImageTransformerBlock``.

Shapes: b samples, n tokens of the picture, t of the text, d width, f half of a head's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformerBlock
from torch import Tensor, nn

from simpletune.engine.kernels.adaln import GatedTokens, ScaleShift, add_gated, normalise_and_modulate
from simpletune.engine.kernels.rotary import normalise_and_rotate
from simpletune.models.shared.blocks import with_feed_forward

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of the places of text and picture, fp32 [1, t + n, f] each."""


class QwenImageBlock(QwenImageTransformerBlock):
    """A block. ``use_blocks`` converts diffusers'."""

    def forward(
        self,
        hidden_states: Tensor,  # [b, n, d]
        encoder_hidden_states: Tensor,  # [b, t, d]
        encoder_hidden_states_mask: Tensor | None,  # [b, t], bool
        temb: Tensor,  # [b, d]; with a modulation plan, the modulations of all layers
        image_rotary_emb: Angles,
        joint_attention_kwargs: object = None,
        modulate_index: None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return text tokens and picture tokens."""
        x, text = hidden_states, encoder_hidden_states
        # [b, d] each: shift, scale and gate of attention, then those of the feed-forward network
        shift, scale, gate, *of_ff = self.img_mod(temb).chunk(6, 1)
        x, inputs = normalise_and_modulate(x, None, [ScaleShift(scale, shift)], self.img_norm1.eps)
        shift, scale, gate_of_text, *of_text = self.txt_mod(temb).chunk(6, 1)
        text, of_prompt = normalise_and_modulate(text, None, [ScaleShift(scale, shift)], self.txt_norm1.eps)
        attended, attended_text = self.attn(
            hidden_states=inputs.pop(),
            encoder_hidden_states=of_prompt.pop(),
            attention_mask=encoder_hidden_states_mask,
            angles=image_rotary_emb,
        )
        added, added_text = GatedTokens(attended, gate), GatedTokens(attended_text, gate_of_text)
        del attended, attended_text
        x, found = with_feed_forward(x, added, of_ff, self.img_norm2, self.img_mlp)
        del added
        text, found_text = with_feed_forward(text, added_text, of_text, self.txt_norm2, self.txt_mlp)
        del added_text
        text, x = add_gated((text, found_text), (x, found))
        return text, x


class QwenImageAttention:
    """Attention over the tokens of text and picture together, with positions."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,  # [b, n, d]
        encoder_hidden_states: Tensor | None = None,  # [b, t, d]
        attention_mask: Tensor | None = None,  # [b, t], bool
        angles: Angles | None = None,
    ) -> tuple[Tensor, Tensor]:  # [b, n, d], [b, t, d]
        x, text, mask = hidden_states, encoder_hidden_states, attention_mask
        assert text is not None and angles is not None

        def heads(layer: nn.Module, tokens: Tensor) -> Tensor:  # [b, its tokens, heads, 2 f]
            return layer(tokens).unflatten(-1, (attn.heads, -1))

        query, key = (
            normalise_and_rotate([(heads(of_text, text), norm_text), (heads(of_image, x), norm)], *angles).transpose(
                1, 2
            )
            for of_text, norm_text, of_image, norm in (
                (attn.add_q_proj, attn.norm_added_q, attn.to_q, attn.norm_q),
                (attn.add_k_proj, attn.norm_added_k, attn.to_k, attn.norm_k),
            )
        )
        value = torch.cat([heads(attn.add_v_proj, text), heads(attn.to_v, x)], 1).transpose(1, 2)
        seen = None if mask is None else torch.cat([mask, mask.new_ones(len(x), x.shape[1])], 1)[:, None, None]
        attended = F.scaled_dot_product_attention(query, key, value, seen)
        del query, key, value
        rest, image = attended.transpose(1, 2).flatten(2).split([text.shape[1], x.shape[1]], 1)
        return attn.to_out[0](image), attn.to_add_out(rest)


class Positions(nn.Module):
    """Angles of the places of picture and text, in the middle of which the picture is. diffusers' ``QwenEmbedRope``
    keeps tables of them, and caches that know its modules for ever.

    Args:
        theta: the base of the frequencies.
        widths: of a head's parts for frame, row and column.
    """

    def __init__(self, theta: float, widths: Sequence[int]):
        super().__init__()
        self.theta, self.widths = theta, widths

    def forward(
        self, shapes: Sequence[Sequence[tuple[int, int, int]]], max_txt_seq_len: int, device: torch.device
    ) -> Angles:
        """Return those of pictures of 1 frame, h rows and w columns, and of texts of ``max_txt_seq_len`` tokens."""
        ((_, h, w),) = shapes[0]
        rows, columns = (torch.arange(-(side - side // 2), side // 2, device=device) for side in (h, w))
        image = torch.cartesian_prod(rows.new_zeros(1), rows, columns)
        first = max(h // 2, w // 2)
        text = torch.arange(first, first + max_txt_seq_len, device=device)[:, None].expand(-1, 3)
        turns = self._turns(torch.cat([text, image]))[None]
        return turns.cos(), turns.sin()

    def _turns(self, places: Tensor) -> Tensor:  # [t + n, 3] -> [t + n, f]
        parts = []
        for place, width in zip(places.unbind(1), self.widths, strict=True):
            steps = torch.arange(0, width, 2, device=places.device).float().div(width)
            parts.append(torch.outer(place.float(), 1.0 / torch.pow(self.theta, steps)))
        return torch.cat(parts, 1)


def use_blocks(model: nn.Module) -> None:
    """Convert diffusers' blocks and positions to ours in place, keeping modules and parameters."""
    embed = model.get_submodule("pos_embed")
    assert isinstance(embed, QwenEmbedRope) and embed.scale_rope
    model.pos_embed = Positions(embed.theta, embed.axes_dim)
    blocks: Iterable[nn.Module] = model.get_submodule("transformer_blocks").children()
    for block in blocks:
        assert type(block) is QwenImageTransformerBlock, type(block)
        block.__class__ = QwenImageBlock
        assert isinstance(block.attn, Attention)
        block.attn.set_processor(QwenImageAttention())
