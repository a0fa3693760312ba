"""Cache a run's prompt embeddings, each encoder's outputs in a separate folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.text.inputs import PromptTokenizer, TextInputs
from simpletune.adapters.text.option import NO_TEXT, Text
from simpletune.data.storage.cache import Cache
from simpletune.data.storage.claims import ALONE, KeyRange
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.models.families import Model
from simpletune.models.shared.parts import TextEncoder
from simpletune.models.shared.prompts import unpack
from simpletune.stages.latent_cache import all_finite, free_memory
from simpletune.system.console import progress
from simpletune.system.options import UserError
from simpletune.system.signals import poll

Parts = Mapping[str, Tensor]  # an encoder's outputs for a prompt
PROMPTS = 512  # claimed together; each portion loads T5's layers once
NOT_FINITE = (
    "Its weights may be damaged, or overflow in this precision. Download it again, or use precision.compute=fp32"
)


def encode_prompts(
    cache: Cache,
    encoder: str,
    missing: Mapping[str, str],
    outputs: Callable[[list[str]], Iterable[Parts]],
    failure: tuple[str, str],
    share: KeyRange = ALONE,
) -> set[str]:
    """Encode prompts with one encoder into its cache.

    Args:
        cache: the encoder's cache.
        encoder: its name.
        missing: the prompts by their keys.
        outputs: encodes prompts.
        failure: for the message if an embedding is not finite: what to call the prompts, and the remedy.
        share: what this process encodes first, if others fill the cache too.

    Returns:
        The prompts that this process has encoded.

    Raises:
        UserError: an embedding is not finite.
    """
    encoded, (noun, remedy) = set[str](), failure
    with progress(f"text  {encoder}", share.count(len(missing)), "prompts") as advance:
        for keys in cache.claimed(missing, share, PROMPTS):
            for key, parts in zip(keys, outputs([missing[key] for key in keys]), strict=True):
                prompt = missing[key]
                if not all_finite(parts.values()):
                    raise UserError(
                        f"{encoder} encodes the {noun} {prompt[:80]!r} to NaN or infinity. {remedy}", code=4
                    )
                cache.save(key, parts)
                encoded.add(prompt)
                advance()
                poll()
    return encoded


class TextCache:
    """Prompt embeddings by prompt, in one folder per encoder.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.
        cache: the cache's place; a path: a folder of single files.
        text: what trains on the text side. A new token is encoded as its words; encoders that run in every step are not
            cached, and zeros replace their embeddings.
    """

    def __init__(self, model: Model, dtype: torch.dtype, cache: CachePlace | Path, text: Text = NO_TEXT):
        self.prompts, self.dtype = model.prompts(dtype), dtype
        self.tokens = PromptTokenizer(text, model, self.prompts)
        self.encoders = [e for e in self.prompts.encoders if e.name not in self.tokens.resident]
        self.caches = {e.name: open_cache(cache, "text", self.prompts.fingerprint(e)) for e in self.encoders}
        self._regions = model.text_regions() if self.tokens.resident else {}

    def fill(self, prompts: Iterable[str], device: torch.device, share: KeyRange = ALONE) -> int:
        """Encode the prompts that are not cached yet, one encoder at a time.

        Args:
            prompts: the prompts.
            device: where the encoders run.
            share: what this process encodes first, if others fill the cache too; afterwards the cache holds all
                prompts.

        Returns:
            The number of prompts that at least one encoder has encoded in this process.
        """
        encoded: set[str] = set()
        wanted = list(dict.fromkeys(map(self.tokens.expanded, prompts)))
        for encoder in self.encoders:
            missing = self.caches[encoder.name].lacking(wanted, share)
            if missing:
                encoded |= self._encode(encoder, missing, device, share)
                free_memory(device)
        return len(encoded)

    def lacking(self, prompts: Iterable[str]) -> set[str]:
        """The prompts that at least one encoder has to encode."""
        wanted = {self.tokens.expanded(prompt): prompt for prompt in prompts}
        return {wanted[prompt] for cache in self.caches.values() for prompt in cache.lacking(wanted)}

    def _encode(self, encoder: TextEncoder, missing: list[str], device: torch.device, share: KeyRange) -> set[str]:
        """Encode prompts with one encoder, and return those that this process has encoded.

        Raises:
            UserError: an embedding is not finite.
        """
        by_key = {prompt: prompt for prompt in missing}

        def outputs(prompts: list[str]) -> Iterable[Parts]:
            return self.prompts.encode(encoder, prompts, device)

        return encode_prompts(self.caches[encoder.name], encoder.name, by_key, outputs, ("caption", NOT_FINITE), share)

    def load(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Load (prompt_embeds [t, e], pooled [p]) of one prompt."""
        return self.prompts.assemble({encoder.name: self.part(encoder, prompt) for encoder in self.prompts.encoders})

    def pooled(self, prompt: str) -> Tensor:
        """Load the pooled embedding [p] of one prompt, reading only the encoders that contribute to it."""
        return self.prompts.pool({encoder.name: self.part(encoder, prompt) for encoder in self.prompts.pooling})

    def part(self, encoder: TextEncoder, prompt: str) -> dict[str, Tensor]:
        """Load one encoder's output for one prompt; zeros for an encoder that runs in every step."""
        if encoder.name in self.caches:
            return unpack(self.caches[encoder.name].load(self.tokens.expanded(prompt)), self.dtype)
        region, length = self._regions[encoder.name], self.tokens.length(encoder.name)
        pooled = torch.zeros(0 if region.pooled is None else region.pooled[1], dtype=self.dtype)
        return {"hidden": torch.zeros(length, region.width, dtype=self.dtype), "pooled": pooled}

    def places(self, prompt: str, pooled: bool = False) -> Iterator[tuple[Cache, str]]:
        """Where the outputs for one prompt are cached, or only those that ``pooled`` reads."""
        for encoder in self.prompts.pooling if pooled else self.prompts.encoders:
            if encoder.name in self.caches:
                yield self.caches[encoder.name], self.tokens.expanded(prompt)

    def inputs(self, prompts: Sequence[str]) -> TextInputs | None:
        """The trained text side's inputs for a micro-batch's prompts; None if nothing trains there."""
        return self.tokens.of(prompts) if self.tokens.text.trains else None

    def too_long(self, prompts: Iterable[str], limit: int = 77) -> list[str]:
        """The prompts that CLIP truncates, at 77 tokens by default."""
        first = self.caches.get(self.prompts.encoders[0].name)
        if first is None or first.remote:  # not a request for each
            return [prompt for prompt in prompts if self.tokens.count(prompt) > limit]
        return [prompt for prompt in prompts if int(first.load(self.tokens.expanded(prompt))["tokens"]) > limit]
