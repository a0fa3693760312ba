"""What a denoiser reads besides z_t and its time, as named tensors.

Shapes: b samples, t text tokens, e text width, p pooled width, m modulations of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from simpletune.system.options import UserError


@dataclass(frozen=True)
class Conditioning:
    """The conditioning of b samples, or of one prompt, whose tensors then lack the dimension b."""

    embeds: Tensor  # [b, t, e]
    mask: Tensor | None = None  # [b, t], bool
    """Whether a row of ``embeds`` is a token, rather than padding. None: all are."""
    pooled: Tensor | None = None  # [b, p]
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # [b, ...]
    """What else a family reads, such as the sizes of pictures."""
    modulation: Tensor | None = None  # [b, m]
    """A modulation plan's rows; the pooled prompt, from which they were computed, is then absent."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        """Apply a function to every tensor."""
        mask, pooled, modulation = (
            None if each is None else change(each) for each in (self.mask, self.pooled, self.modulation)
        )
        extra = {name: change(tensor) for name, tensor in self.extra.items()}
        return Conditioning(change(self.embeds), mask, pooled, extra, modulation)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        named = {"embeds": self.embeds, "mask": self.mask, "pooled": self.pooled, "modulation": self.modulation}
        return {name: each for name, each in {**named, **self.extra}.items() if each is not None}

    def modulated(self, rows: Tensor) -> Conditioning:
        """Replace what the modulations were computed from by a modulation plan's rows [b, m]."""
        return replace(self, pooled=None, modulation=rows)

    def zeros(self) -> Conditioning:
        """Put zeros in place of all values, for guidance away from nothing."""
        return replace(self.map(torch.zeros_like), mask=self.mask)


def stack(prompts: Sequence[Conditioning]) -> Conditioning:
    """Put the conditioning of single prompts into one batch. Shorter ones are padded with zeros at the end and get a
    mask; prompts of one length get none, so that attention takes its quickest kernel. Raises UserError if some of them
    have a mask, a pooled prompt or an extra that others lack."""
    names = [set(each.tensors()) for each in prompts]
    if odd := names[0].union(*names) - names[0].intersection(*names):
        raise UserError(
            f"some prompts of a batch have {' and '.join(sorted(odd))} and others do not. Their cache entries are of "
            "different models. Delete the cache folder's prompts, and start again"
        )
    lengths = [len(each.embeds) for each in prompts]
    if min(lengths) < max(lengths):
        prompts = [_padded(each, max(lengths)) for each in prompts]
    every = [each.tensors() for each in prompts]
    rows = {name: torch.stack([each[name] for each in every]) for name in every[0]}
    extra = {name: rows.pop(name) for name in prompts[0].extra}
    return Conditioning(rows["embeds"], rows.get("mask"), rows.get("pooled"), extra, rows.get("modulation"))


def _padded(prompt: Conditioning, length: int) -> Conditioning:
    """Return one prompt's conditioning, padded to a number of tokens."""
    missing = length - len(prompt.embeds)
    mask = torch.ones(len(prompt.embeds), dtype=torch.bool) if prompt.mask is None else prompt.mask
    return replace(prompt, embeds=pad(prompt.embeds, (0, 0, 0, missing)), mask=pad(mask, (0, missing)))
