"""Encode prompts with a family's text encoders, one encoder at a time.

Shapes: n prompts, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.parts import Part
from simpletune.models.shared.transformers_folder import TOKENIZERS
from simpletune.models.text.encoder import BATCH, EncoderChanges, TextEncoder, Tokens, groups_of
from simpletune.models.text.family_text import FamilyText
from simpletune.system.model_folder import files_hash
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompts:
    """The text side of a pipeline at work.

    Args:
        text: the family's text side, which combines the encoders' outputs.
        dtype: the type of the encoders' weights and of the embeddings.
    """

    def __init__(self, text: FamilyText[Any], dtype: torch.dtype):
        self.text, self.encoders, self.dtype = text, text.encoders, dtype
        self._hashes: dict[str, str] = {}  # of the tokenizers' folders, which each run reads once

    def part(self, name: str) -> Part:
        """Locate a part by its name."""
        return self.text.family.files.part(name)

    def load(self, encoder: TextEncoder) -> nn.Module:
        """Load an encoder that may train, on the CPU."""
        return encoder.load(self.part(encoder.model), self.dtype, self.tokenizer(encoder))

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        """Combine the encoders' outputs for one prompt, by the encoder's name (``encode``, ``unpack``)."""
        return self.text.assemble(parts)

    def _tokenizer_folder(self, encoder: TextEncoder) -> Path:
        folder = self.part(encoder.tokenizer).folder
        assert folder is not None  # single files never contain tokenizers
        return folder

    def tokenizer(self, encoder: TextEncoder) -> PreTrainedTokenizerBase:
        """See ``TextEncoder.read_tokenizer``."""
        folder = self._tokenizer_folder(encoder)
        return _known_tokenizer(encoder, folder, self._hash(encoder), get_ident())

    def tokens(self, encoder: TextEncoder, prompts: Sequence[str]) -> Tokens:
        """Return the tokens of prompts. Raises UserError if the encoder has no such token or position, so that one of
        both is damaged."""
        tokenizer, config = self.tokenizer(encoder), self.part(encoder.model).config()
        length, folder = encoder.length or tokenizer.model_max_length, self._tokenizer_folder(encoder)
        room = encoder.positions(config)
        remedy = "One of them is damaged, or they do not belong together. Download both again"
        if room is not None and length > room:
            file = folder / "tokenizer_config.json"
            raise UserError(f"{file}: model_max_length is {length}, but {encoder.title} reads {room} tokens. {remedy}")
        tokens = encoder.tokenize(tokenizer, prompts)
        size, largest = config.get("vocab_size"), int(tokens.ids.max())
        if isinstance(size, int) and largest >= size:
            file = next((folder / name for name in TOKENIZERS if (folder / name).is_file()), folder)
            token = tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"{file} numbers the token {token!r} {largest}, but {encoder.title} has {size} tokens. {remedy}"
            )
        return tokens

    def _hash(self, encoder: TextEncoder) -> str:
        if encoder.tokenizer not in self._hashes:
            self._hashes[encoder.tokenizer] = files_hash(self._tokenizer_folder(encoder))
        return self._hashes[encoder.tokenizer]

    def fingerprint(self, encoder: TextEncoder, sums: Path | None = None) -> str:
        """Name everything an encoder's output depends on, apart from the prompt; ``sums`` as for
        ``Part.fingerprint``."""
        length = "" if encoder.length is None else f"-{encoder.length}"
        tokens = self._hash(encoder)
        weights = self.part(encoder.model).fingerprint(sums)
        packed, dtype = "-int8" if encoder.packed else "", str(self.dtype).removeprefix("torch.")
        return f"{encoder.name}-{weights}-{tokens}-{dtype}{length}{packed}{encoder.states}"

    def encode(
        self,
        encoder: TextEncoder,
        prompts: Sequence[str],
        device: torch.device,
        batch_size: int = BATCH,
        changes: EncoderChanges | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """Load one encoder, encode prompts with it, and free it; prompts with changed rows pass through it one by one.

        Yields:
            For each prompt what ``OpenEncoder.encode`` yields, in the encoders' type on the CPU or packed, and
            ``tokens`` [1],
            the number of tokens in the prompt before truncation.
        """
        tokenizer = self.tokenizer(encoder)
        counts, tokens = encoder.counts(tokenizer, prompts), self.tokens(encoder, prompts)
        opened = encoder.open(self.part(encoder.model), self.dtype, device, tokenizer, changes)
        for output, count in zip(opened.encode(tokens, batch_size), counts, strict=True):
            parts = {name: tensor.to("cpu", self.dtype) for name, tensor in output.items()}
            yield {**(pack(parts) if encoder.packed else parts), "tokens": torch.tensor([count])}


def pack(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round an encoder's ``hidden`` [L, width] to int8, and add its ``scale`` [L, width / 64] in fp32: one for each 64
    numbers of a token, whose largest becomes 127. One for a whole token would round all of it as coarsely as its few
    large channels."""
    hidden = parts["hidden"].float()
    grouped = hidden.unflatten(-1, (groups_of(hidden.shape[-1]), -1))
    scale = grouped.abs().amax(dim=-1) / 127
    steps = grouped / scale.where(scale > 0, 1.0)[..., None]
    return {**parts, "hidden": steps.round().clamp(-127, 127).to(torch.int8).flatten(-2), "scale": scale}


def unpack(parts: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Convert an encoder's output to what ``Prompts.assemble`` reads: hidden states in a floating-point type."""
    if "scale" not in parts:
        return dict(parts)
    found = {name: tensor for name, tensor in parts.items() if name != "scale"}
    scale, hidden = parts["scale"], parts["hidden"].float()
    return found | {"hidden": (hidden.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2).to(dtype)}


@lru_cache(maxsize=8)
def _known_tokenizer(encoder: TextEncoder, folder: Path, content: str, thread: int) -> PreTrainedTokenizerBase:
    """Cache a tokenizer per thread: reading it takes longer than encoding a prompt, and it is not thread-safe."""
    return encoder.read_tokenizer(folder)
