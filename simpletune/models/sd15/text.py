"""Encode prompts with the CLIP encoder of Stable Diffusion 1.x (CLIP-L) or 2.x (OpenCLIP-H).

Both provide the last hidden state after the final layer norm. Stable Diffusion 2's encoder is stored without its last
layer, so for it this is the normalised output of the penultimate layer.

Shapes: L = 77 tokens, e = 768 (CLIP-L) or 1024 (OpenCLIP-H).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from simpletune.models.shared.parts import load_text_model
from simpletune.models.shared.prompts import Prompts, TextEncoder


class ClipPrompts(Prompts):
    """Text side of a pipeline with a single CLIP encoder."""

    def run(
        self, encoder: TextEncoder, ids: Tensor, device: torch.device, batch_size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Load the encoder and run it over all prompts; yields ``hidden`` [L, e]."""
        model = load_text_model(self.part(encoder.model), self.dtype, projected=False)
        return last_hidden_states(model.eval().to(device), ids, device, batch_size)

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return one prompt's embedding [L, e], and a pooled embedding of width 0."""
        return parts[self.encoders[0].name]["hidden"], self.pool(parts)

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        """Return a tensor [0]: this family has no pooled embedding."""
        return parts[self.encoders[0].name]["hidden"].new_zeros(0)


@torch.no_grad()
def last_hidden_states(
    model: nn.Module, ids: Tensor, device: torch.device, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """Run a CLIP encoder without projection.

    Args:
        model: the encoder, on the device.
        ids: token ids [n, L].
        device: the encoder's device.
        batch_size: prompts encoded together.

    Yields:
        For each prompt ``hidden`` [L, e], the last hidden state after the final layer norm.
    """
    for batch in ids.split(batch_size):
        for hidden in clip_output(model, batch.to(device))["hidden"]:
            yield {"hidden": hidden}


def clip_output(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:  # [b, L] -> [b, L, e]
    """Run a CLIP encoder without projection once: ``hidden``, the last hidden state after the final layer norm."""
    return {"hidden": model(ids).last_hidden_state}
