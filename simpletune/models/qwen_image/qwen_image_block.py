"""Qwen-Image's block with adaptive norms, gates and residuals as single operators (engine/kernels/adaln.py), and its
positions from shapes alone.

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
from simpletune.engine.kernels.rms_norm import normalise

Angles = tuple[Tensor, Tensor]
"""Those of the picture's places [n, f] and of the text's [t, f], complex."""


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
        x, found = _with_feed_forward(x, added, of_ff, self.img_norm2, self.img_mlp)
        del added
        text, found_text = _with_feed_forward(text, added_text, of_text, self.txt_norm2, self.txt_mlp)
        del added_text
        text, x = add_gated((text, found_text), (x, found))
        return text, x


def _with_feed_forward(
    x: Tensor,  # [b, n, d]
    added: GatedTokens,
    parts: Sequence[Tensor],  # shift, scale and gate of the network, [b, d] each
    norm: nn.Module,
    network: nn.Module,
) -> tuple[Tensor, GatedTokens]:
    """Add the output of attention, and run the feed-forward network on the normalised sum; return the sum, and the
    network's gated output, still to be added."""
    shift, scale, gate = parts
    assert isinstance(norm, nn.LayerNorm)
    x, inputs = normalise_and_modulate(x, added, [ScaleShift(scale, shift)], norm.eps)
    del added
    return x, GatedTokens(network(inputs.pop()), gate)


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
        turns = torch.cat(angles[::-1])

        def joined(of_text: nn.Module, of_image: nn.Module, *norms: nn.Module) -> Tensor:  # [b, t + n, heads, 2 f]
            parts = [layer(each).unflatten(-1, (attn.heads, -1)) for layer, each in ((of_text, text), (of_image, x))]
            if norms:
                parts = [normalise(part, norm) for part, norm in zip(parts, norms, strict=True)]
            return torch.cat(parts, 1)

        query = _turned(joined(attn.add_q_proj, attn.to_q, attn.norm_added_q, attn.norm_q), turns).transpose(1, 2)
        key = _turned(joined(attn.add_k_proj, attn.to_k, attn.norm_added_k, attn.norm_k), turns).transpose(1, 2)
        value = joined(attn.add_v_proj, attn.to_v).transpose(1, 2)
        seen = None if mask is None else torch.cat([mask, mask.new_ones(len(x), x.shape[1])], 1)[:, None, None]
        attended = F.scaled_dot_product_attention(query, key, value, seen)
        del query, key, value
        rest, image = attended.transpose(1, 2).flatten(2).split([text.shape[1], x.shape[1]], 1)
        return attn.to_out[0](image), attn.to_add_out(rest)


def _turned(x: Tensor, angles: Tensor) -> Tensor:  # [b, n, heads, 2 f], [n, f], complex
    """Turn neighbouring pairs of numbers by the angles of their positions, in fp32 (RoPE, arXiv:2104.09864)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(x)


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
        return self._angles(image), self._angles(text)

    def _angles(self, places: Tensor) -> Tensor:  # [n, 3] -> [n, f], complex
        parts = []
        for place, width in zip(places.unbind(1), self.widths, strict=True):
            steps = torch.arange(0, width, 2, device=places.device).float().div(width)
            parts.append(torch.outer(place.float(), 1.0 / torch.pow(self.theta, steps)))
        turns = torch.cat(parts, 1)
        return torch.polar(torch.ones_like(turns), turns)


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
