"""What prompts are encoded with besides the encoders' own weights: embeddings, updates of the encoders, words."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from simpletune.adapters.text.embedding_files import EmbeddingFile
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from simpletune.adapters.files.updates import Updates


@dataclass(frozen=True)
class AppliedText:
    """The text encoders' updates in one LoRA file, at a strength.

    Args:
        name: the file's name, for messages.
        updates: the updates by ``text_encoder...`` names.
        strength: the factor on every difference.
        digest: a digest of the file's updates.
    """

    name: str
    updates: Updates = field(compare=False, repr=False)
    strength: float = 1.0
    digest: str = ""


@dataclass(frozen=True)
class TextSide:
    """What prompts are encoded with, besides the encoders' own weights.

    Args:
        embeddings: the tokens' embeddings; no token twice.
        loras: updates of the encoders, which add up.
        stand_ins: words by token, for tokens without an embedding here: in a run's prompts, a base reads the words that
            the run's embeddings were initialised from.
    """

    embeddings: tuple[EmbeddingFile, ...] = ()
    loras: tuple[AppliedText, ...] = ()
    stand_ins: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        tokens = [each.token for each in self.embeddings]
        if twice := [token for token in tokens if tokens.count(token) > 1]:
            raise UserError(
                f"two embeddings are called {twice[0]}. Give one of them another name, as in --embedding FILE:<other>"
            )

    @cached_property
    def key(self) -> str:
        """A digest of everything that it changes."""
        parts = [[each.token, each.words, embedding_digest(each)] for each in self.embeddings]
        loras = [[each.digest, each.strength] for each in self.loras]
        return hashlib.sha256(json.dumps([parts, loras, self.stand_ins]).encode()).hexdigest()[:32]


PLAIN = TextSide()


def embedding_digest(embedding: EmbeddingFile) -> str:
    """Return a digest of an embedding's place and vectors."""
    digest = hashlib.sha256(embedding.place.encode())
    for encoder in sorted(embedding.vectors):
        vectors = embedding.vectors[encoder].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{encoder}{list(vectors.shape)}".encode())
        digest.update(vectors.numpy().tobytes())
    return digest.hexdigest()[:32]
