"""Z-Image's transformer on tensors: modules, sums and order of diffusers' class, whose forward pass takes lists of
pictures and texts of any length and so has to know these on the host. Norms, positions and activations are single
operators (engine/kernels).

Picture and text are padded to multiples of 32 tokens by two learned ones, which are attended like the rest.

Shapes: b samples, c = 16 latent channels, h and w an eighth of the picture's, n picture tokens and t text tokens, both
with their padding, e = 2560 text width, d width, f half of a head's.
"""

from __future__ import annotations

from collections.abc import Iterable

import diffusers
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_z_image import FeedForward, ZImageTransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from simpletune.engine.kernels.rms_norm import normalise
from simpletune.engine.kernels.rotary import normalise_and_rotate
from simpletune.engine.kernels.swiglu import swiglu
from simpletune.models.zimage.zimage_files import KIND, PATCH, padded


class ZImageTransformer2DModel(diffusers.ZImageTransformer2DModel):
    """diffusers' class, with its name, by which configurations and files know it."""

    def forward(
        self,
        z_t: Tensor,  # [b, c, h, w]
        time: Tensor,  # [b], fp32: 1 - sigma
        embeds: Tensor,  # [b, t, e]
        tokens: Tensor,  # [b]: how many of t are the prompt's; the learned token follows these
        mask: Tensor | None = None,  # [b, t]: which are the sample's own, where the samples of a batch differ in t
    ) -> Tensor:  # [b, c, h, w]
        """Predict z_0 - noise."""
        b, c, h, w = z_t.shape
        rows, columns = h // PATCH, w // PATCH
        real, t, device = rows * columns, embeds.shape[1], z_t.device
        n = padded(real)
        condition = self.t_embedder(time * self.t_scale).type_as(z_t)  # with a modulation plan, all modulations

        patches = pixel_unshuffle(z_t, PATCH).unflatten(1, (c, PATCH * PATCH)).transpose(1, 2)  # channels last
        x = self.all_x_embedder[KIND](patches.flatten(1, 2).flatten(2).transpose(1, 2))
        x = torch.cat([x, self.x_pad_token.to(x).expand(b, n - real, -1)], 1) if n > real else x
        # Text has the places 1 to t, each sample's own, all of the picture the next one, and its padding place 0.
        after = (torch.full((1,), t, device=device) if mask is None else mask.sum(1)) + 1
        grid = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
        places = torch.cat([after[:, None, None].expand(-1, real, 1), grid.expand(len(after), -1, -1)], 2)
        angles = self._angles(pad(places, (0, 0, 0, n - real)))
        for block in self.noise_refiner:
            x = block(x, None, angles, condition)

        own = torch.arange(t, device=device) < tokens[:, None]
        text = self.cap_embedder(embeds)
        text = torch.where(own[..., None], text, self.cap_pad_token.to(text))
        text_angles = self._angles(pad(torch.arange(1, t + 1, device=device)[None, :, None], (0, 2)))
        for block in self.context_refiner:
            text = block(text, mask, text_angles)

        x = torch.cat([x, text], 1)
        angles = torch.cat([angles, text_angles.expand(len(angles), -1, -1)], 1)
        seen = None if mask is None else torch.cat([mask.new_ones(b, n), mask], 1)
        for block in self.layers:
            x = block(x, seen, angles, condition)
        x = self.all_final_layer[KIND](x[:, :real], c=condition)
        x = x.transpose(1, 2).unflatten(1, (PATCH * PATCH, c)).transpose(1, 2)
        return pixel_shuffle(x.flatten(1, 2).unflatten(2, (rows, columns)), PATCH)

    def _angles(self, places: Tensor) -> Tensor:  # [1 or b, n, 3] -> [1 or b, n, f], complex
        angles: Tensor = self.rope_embedder(places.flatten(0, 1))
        return angles.unflatten(0, places.shape[:2])


class ZImageBlock(ZImageTransformerBlock):
    """A block: attention and a feed-forward network between two norms each, with gates if the time changes them.
    ``use_blocks`` converts diffusers' blocks."""

    def forward(
        self,
        x: Tensor,  # [b, n, d]
        mask: Tensor | None,  # [b, n]
        angles: Tensor,  # [1 or b, n, f], complex
        condition: Tensor | None = None,  # [b, 256]; with a modulation plan, the modulations of all layers
    ) -> Tensor:  # [b, n, d]
        if condition is None:
            found = self.attention(normalise(x, self.attention_norm1), attention_mask=mask, angles=angles)
            x = x + normalise(found, self.attention_norm2)
            found = self.feed_forward(normalise(x, self.ffn_norm1))
            return x + normalise(found, self.ffn_norm2)
        scale, gate, scale_of_ff, gate_of_ff = self.adaLN_modulation(condition)[:, None].chunk(4, 2)
        found = normalise(x, self.attention_norm1) * (1.0 + scale)
        found = self.attention(found, attention_mask=mask, angles=angles)
        x = x + gate.tanh() * normalise(found, self.attention_norm2)
        found = self.feed_forward(normalise(x, self.ffn_norm1) * (1.0 + scale_of_ff))
        return x + gate_of_ff.tanh() * normalise(found, self.ffn_norm2)


class ZImageAttention:
    """Attention of a sequence to itself, with positions."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,  # [b, n, d]
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,  # [b, n]
        angles: Tensor | None = None,  # [1 or b, n, f], complex
    ) -> Tensor:  # [b, n, d]
        assert angles is not None
        x, mask = hidden_states, attention_mask
        layers, tables = ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k)), torch.view_as_real(angles).unbind(-1)
        query, key = (
            normalise_and_rotate([(layer(x).unflatten(-1, (attn.heads, -1)), norm)], *tables).transpose(1, 2)
            for layer, norm in layers
        )
        value = attn.to_v(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        seen = None if mask is None else mask[:, None, None]
        attended = F.scaled_dot_product_attention(query, key, value, seen)
        found: Tensor = attn.to_out[0](attended.transpose(1, 2).flatten(2))
        return found


class ZImageFeedForward(FeedForward):
    """A feed-forward network with SwiGLU."""

    def forward(self, x: Tensor) -> Tensor:  # [b, n, d]
        return self.w2(swiglu(self.w1(x), self.w3(x)))


def use_blocks(model: nn.Module, kinds: Iterable[str]) -> None:
    """Convert diffusers' blocks in these lists to ours in place, keeping their modules and parameters."""
    for kind in kinds:
        for block in model.get_submodule(kind).children():
            assert type(block) is ZImageTransformerBlock, type(block)
            block.__class__, block.feed_forward.__class__ = ZImageBlock, ZImageFeedForward
            assert isinstance(block.attention, Attention)
            block.attention.set_processor(ZImageAttention())
