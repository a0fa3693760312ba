"""Encoded prompts for drawing, with learned embeddings and updated text encoders, cached.

A prompt that neither changes has the same key as in training, so both share its file. The key of any other prompt
includes a digest of the vectors and updates that encoded it, so that no encoding outlives a change of either.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from simpletune.adapters.text.encoding import Embeddings, TextEncoding
from simpletune.adapters.text.side import PLAIN, TextSide
from simpletune.data.storage.place import CachePlace, open_cache
from simpletune.models.families import Model
from simpletune.stages.latent_cache import free_memory
from simpletune.stages.text_cache import encode_prompts

NOT_FINITE = "Its weights or a LoRA's may be damaged, or overflow in this precision. Use precision.compute=fp32"


class PromptStore:
    """Prompts encoded with one text side, in the same folders as training's.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.
        cache: the cache's place; a path: a folder of single files.
        side: embeddings and updates of the text encoders.

    Raises:
        UserError: vectors or updates are for other encoders than the model's.
    """

    def __init__(self, model: Model, dtype: torch.dtype, cache: CachePlace | Path, side: TextSide = PLAIN):
        self.encoding = TextEncoding(model, dtype, side)
        prompts = self.encoding.prompts
        self.caches = {e.name: open_cache(cache, "text", prompts.fingerprint(e)) for e in prompts.encoders}

    def fill(self, prompts: Iterable[str], device: torch.device) -> int:
        """Encode the prompts that are not cached yet, one encoder at a time.

        Returns:
            The number of prompts that at least one encoder has encoded.
        """
        encoded: set[str] = set()
        wanted = list(dict.fromkeys(prompts))
        for encoder in self.encoding.prompts.encoders:
            cache, keys = self.caches[encoder.name], {self.encoding.key(encoder, prompt): prompt for prompt in wanted}
            missing = {key: keys[key] for key in cache.lacking(keys)}
            if not missing:
                continue
            outputs = partial(self.encoding.encode, encoder, device=device)
            encoded |= encode_prompts(cache, encoder.name, missing, outputs, ("prompt", NOT_FINITE))
            free_memory(device)
        return len(encoded)

    def load(self, prompt: str) -> Embeddings:
        """Load (prompt_embeds [t, e], pooled [p]) of one prompt."""
        encoders = self.encoding.prompts.encoders
        parts = {e.name: self.caches[e.name].load(self.encoding.key(e, prompt)) for e in encoders}
        return self.encoding.assemble(prompt, parts)
