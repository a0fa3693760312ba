"""Encode prompts with SD3's three text encoders, one encoder at a time.

Shapes: L = 77 CLIP tokens, widths 768 (CLIP-L) and 1280 (CLIP-G), T T5 tokens of width e = 4096 (for SD3 Medium).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from simpletune.models.shared.parts import Part, load_text_model
from simpletune.models.shared.prompts import Prompts, TextEncoder


class SD3Prompts(Prompts):
    """Text side of an SD3 pipeline.

    Args:
        part: locates a part by its name.
        encoders: CLIP-L, CLIP-G and, unless zeros replace its embeddings, T5.
        dtype: the type of the encoders' weights and of the embeddings.
        t5_length: tokens of the T5 part.
        width: e, the width of a prompt's embedding.
    """

    def __init__(
        self,
        part: Callable[[str], Part],
        encoders: tuple[TextEncoder, ...],
        dtype: torch.dtype,
        t5_length: int,
        width: int,
    ):
        super().__init__(part, encoders, dtype)
        self.t5_length, self.width = t5_length, width

    def run(
        self, encoder: TextEncoder, ids: Tensor, device: torch.device, batch_size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Load an encoder and run it; yields for each prompt ``hidden`` [L or T, width], and for CLIP ``pooled``
        [width]."""
        return (_run_t5 if encoder.is_t5 else _run_clip)(self.part(encoder.model), ids, self.dtype, device, batch_size)

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Combine the encoders' outputs into one prompt's embeddings.

        Concatenates CLIP-L and CLIP-G along the width, pads them with zeros to e, and appends T5 along the sequence
        (arXiv:2403.03206, section 4).

        Args:
            parts: ``encode``'s output by the encoder's name.

        Returns:
            prompt_embeds [L + T, e] and pooled [768 + 1280], with leading batch dimensions if the parts have any.
        """
        clip = torch.cat([parts["clip_l"]["hidden"], parts["clip_g"]["hidden"]], dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self.width - clip.shape[-1]))
        zeros = (*clip.shape[:-2], self.t5_length, self.width)
        t5 = parts["t5"]["hidden"] if len(self.encoders) == 3 else clip.new_zeros(zeros)
        return torch.cat([clip, t5], dim=-2), self.pool(parts)

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Concatenate CLIP-L's and CLIP-G's pooled embeddings of one prompt: [768 + 1280]."""
        return torch.cat([parts["clip_l"]["pooled"], parts["clip_g"]["pooled"]], dim=-1)


def _run_clip(
    part: Part, ids: Tensor, dtype: torch.dtype, device: torch.device, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Run a whole CLIP encoder over all prompts."""
    return clip_outputs(load_text_model(part, dtype).eval().to(device), ids, device, batch_size)


@torch.no_grad()
def clip_outputs(model: nn.Module, ids: Tensor, device: torch.device, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """Compute the outputs of a CLIP encoder that SD3 uses.

    Args:
        model: the encoder, on the device.
        ids: token ids [n, L].
        device: the encoder's device.
        batch_size: prompts encoded together.

    Yields:
        For each prompt ``hidden`` [L, width], the penultimate hidden state, and ``pooled`` [width], projected.
    """
    for batch in ids.split(batch_size):
        found = clip_output(model, batch.to(device))
        for hidden, pooled in zip(found["hidden"], found["pooled"], strict=True):
            yield {"hidden": hidden, "pooled": pooled}


def clip_output(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:  # [b, L] -> [b, L, width], [b, width]
    """Run a CLIP encoder once: ``hidden``, the penultimate hidden state, and ``pooled``, projected."""
    output = model(ids, output_hidden_states=True)
    return {"hidden": output.hidden_states[-2], "pooled": output.text_embeds}


def _run_t5(
    part: Part, ids: Tensor, dtype: torch.dtype, device: torch.device, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Run the T5 encoder over all prompts, layer by layer."""
    from simpletune.models.shared.t5_layers import LayeredT5

    return ({"hidden": hidden} for hidden in LayeredT5(part, dtype, device).encode(ids, batch_size))
