"""Encode prompts with learned embeddings and with updates of the text encoders, one encoder in memory at a time.

Input embeddings replace rows of an encoder's token embeddings, and output embeddings replace rows of its output, at the
positions of the words that stand for the token (``placeholders``). Updates are added to an encoder's weights in fp32
while it is loaded. Shapes: L tokens, v vectors, d an encoder's width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from simpletune.adapters.text.embedding_files import SINGLE, EmbeddingFile
from simpletune.adapters.text.placeholders import expand, occurs, positions, tokens_of
from simpletune.adapters.text.side import PLAIN, AppliedText, TextSide, embedding_digest
from simpletune.models.families import Model
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.text.encoder import BATCH, EncoderChanges, LayerChange, TextEncoder
from simpletune.models.text.prompts import Prompts, unpack
from simpletune.models.text_layers import T5, encoder_of
from simpletune.system.options import UserError, join_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from simpletune.adapters.files.updates import Update

    LayerUpdates = dict[str, list[tuple[Update, AppliedText]]]

PLACEHOLDERS = ("a", "the", "x", "one", "of")
"""Words that are a single token in CLIP and T5, for embeddings whose words are unknown; their meaning is replaced."""


class TextEncoding:
    """Encodes prompts with one text side.

    Args:
        model: the model, with folders resolved.
        dtype: the type of the encoders' weights and of the embeddings.

    Raises:
        UserError: vectors or updates are for other encoders than the model's.
    """

    def __init__(self, model: Model, dtype: torch.dtype, side: TextSide = PLAIN):
        self.model, self.dtype, self.side = model, dtype, side
        self.prompts: Prompts = Prompts(model.text, dtype)
        widths = {}
        for encoder in self.prompts.encoders if side.embeddings else ():
            config = self.prompts.part(encoder.model).config()
            widths[encoder.name] = encoder.width(config)
        self.embeddings = tuple(_fitted(each, widths, model.words.title) for each in side.embeddings)
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        parts = {encoder.model for encoder in model.text.encoders}
        for lora in side.loras:
            lost = [layer for layer in lora.updates if encoder_of(layer)[0] not in parts]
            own = [layer for layer in lost if encoder_of(layer)[0] != T5]
            if own:
                raise UserError(f"{lora.name}: {join_names(own, 3)}: {model.words.title} has no such text encoder")

    def tokenizer(self, encoder: TextEncoder) -> PreTrainedTokenizerBase:
        """Return an encoder's tokenizer, read once."""
        if encoder.name not in self._tokenizers:
            self._tokenizers[encoder.name] = self.prompts.tokenizer(encoder)
        return self._tokenizers[encoder.name]

    def _words(self, embedding: EmbeddingFile, encoder: TextEncoder) -> tuple[str, ...]:
        """Return the words that stand for a token in one encoder: a single-token word for each of its vectors there, if
        any."""
        vectors = embedding.vectors.get(encoder.name)
        if vectors is None or embedding.place == "output" and embedding.words:
            return embedding.words
        for words in (embedding.words, *((word,) * len(vectors) for word in PLACEHOLDERS)):
            ids = tokens_of(self.tokenizer(encoder), words) if words else []
            if len(ids) == len(vectors) and self.tokenizer(encoder).eos_token_id not in ids:
                return tuple(words)
        raise UserError(
            f"{embedding.token}: none of {', '.join(PLACEHOLDERS)} is one token of {encoder.name}, so there are no "
            "positions for its vectors. Use the tokenizer that belongs to the model"
        )

    def _stand_ins(self, encoder: TextEncoder) -> dict[str, tuple[str, ...]]:
        """Return the replacement words for every token in one encoder."""
        return {**dict(self.side.stand_ins), **{each.token: self._words(each, encoder) for each in self.embeddings}}

    def expanded(self, encoder: TextEncoder, prompt: str) -> str:
        """Return the prompt as an encoder reads it, with words instead of tokens."""
        for token, words in self._stand_ins(encoder).items() if self.side != PLAIN else ():
            prompt = expand(prompt, token, words)
        return prompt

    def rows(self, encoder: TextEncoder, prompt: str, embedding: EmbeddingFile) -> list[tuple[int, int]]:
        """Return the positions of an embedding's vectors in an encoder's sequence: pairs of row and vector number."""
        others = {token: words for token, words in self._stand_ins(encoder).items() if token != embedding.token}
        for token, words in others.items():
            prompt = expand(prompt, token, words)
        words, vectors = self._words(embedding, encoder), embedding.vectors.get(encoder.name)
        if vectors is None or not words:
            return []
        places = positions(self.tokenizer(encoder), prompt, embedding.token, words, encoder.length)
        return [(row, number) for place in places for number, row in enumerate(place[: len(vectors)])]

    def _inputs(self, encoder: TextEncoder, prompt: str) -> list[EmbeddingFile]:
        """Return the input embeddings of an encoder that a prompt uses."""
        return [
            each
            for each in self.embeddings
            if each.place == "input" and encoder.name in each.vectors and occurs(prompt, each.token)
        ]

    def _updates(self, encoder: TextEncoder) -> LayerUpdates:
        """Return the updates of an encoder's layers, by their names in the published checkpoint."""
        found: LayerUpdates = {}
        for lora in self.side.loras:
            for layer, update in lora.updates.items():
                part, name = encoder_of(layer)
                if part == encoder.model and lora.strength:
                    found.setdefault(name, []).append((update, lora))
        return found

    def key(self, encoder: TextEncoder, prompt: str) -> str:
        """Return what an encoder's output depends on, apart from the encoder itself: the expanded prompt alone, unless
        its weights or inputs change."""
        changes: list[object] = [[embedding_digest(each), each.token] for each in self._inputs(encoder, prompt)]
        if self._updates(encoder):
            changes += [["lora", each.digest, each.strength] for each in self.side.loras if each.strength]
        text = self.expanded(encoder, prompt)
        if not changes:
            return text
        return "\0" + json.dumps({"prompt": prompt, "text": text, "changes": changes}, ensure_ascii=False)

    def encode(
        self, encoder: TextEncoder, prompts: Sequence[str], device: torch.device, batch_size: int = BATCH
    ) -> Iterator[dict[str, Tensor]]:
        """Load one encoder, encode prompts with it, and free it.

        Yields:
            For each prompt the tensors of ``Prompts.encode``, before output embeddings are inserted.
        """
        texts = [self.expanded(encoder, prompt) for prompt in prompts]
        inputs = [self._inputs(encoder, prompt) for prompt in prompts]
        updates = self._updates(encoder)
        if not updates and not any(inputs):
            yield from self.prompts.encode(encoder, texts, device, batch_size)
            return
        rows = [
            {row: each.vectors[encoder.name][n] for each in called for row, n in self.rows(encoder, prompt, each)}
            for prompt, called in zip(prompts, inputs, strict=True)
        ]
        layers = {
            name: LayerChange(each[0][1].name, partial(_changed, f"{name} of {encoder.name}", updates=each))
            for name, each in updates.items()
        }
        yield from self.prompts.encode(encoder, texts, device, changes=EncoderChanges(layers, rows))

    def assemble(self, prompt: str, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        """Assemble one prompt's embeddings from ``encode``'s outputs by encoder name, and insert output embeddings."""
        by_name, outputs = {encoder.name: encoder for encoder in self.prompts.encoders}, {}
        for name, each in parts.items():
            outputs[name] = found = unpack(each, self.dtype)
            for embedding in self.embeddings:
                if embedding.place == "output" and name in embedding.vectors and occurs(prompt, embedding.token):
                    found["hidden"] = hidden = found["hidden"].clone()
                    for row, number in self.rows(by_name[name], prompt, embedding):
                        hidden[row] = embedding.vectors[name][number].to(hidden.dtype)
        return self.prompts.assemble(outputs)


def encode_prompts(
    model: Model,
    prompts: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    side: TextSide = PLAIN,
    done: Callable[[], None] = lambda: None,
) -> dict[str, Conditioning]:
    """Encode prompts, each alone, without a cache, with one encoder in memory at a time. Calls ``done`` after each
    encoder, to free memory.

    Returns:
        The conditioning by prompt, on the CPU.
    """
    encoding, wanted = TextEncoding(model, dtype, side), list(dict.fromkeys(prompts))
    parts: dict[str, dict[str, dict[str, Tensor]]] = {prompt: {} for prompt in wanted}
    for encoder in encoding.prompts.encoders:
        for prompt, output in zip(wanted, encoding.encode(encoder, wanted, device), strict=True):
            parts[prompt][encoder.name] = output
        done()
    return {prompt: encoding.assemble(prompt, parts[prompt]) for prompt in wanted}


def _fitted(embedding: EmbeddingFile, widths: Mapping[str, int], title: str) -> EmbeddingFile:
    """Return the embedding with its vectors under the names of the model's encoders. A single-encoder file's vectors go
    to the encoder with the same width; T5's are ignored if T5 is not in use."""
    vectors: dict[str, Tensor] = {}
    for name, each in embedding.vectors.items():
        alike = [name] if name in widths else []
        if not alike and name in (SINGLE, "clip_l", "clip_g"):
            alike = [encoder for encoder, width in widths.items() if width == each.shape[1] and encoder != "t5"]
        if not alike and name == "t5":
            continue
        if len(alike) != 1 or widths[alike[0]] != each.shape[1]:
            known = ", ".join(f"{encoder} {width}" for encoder, width in widths.items())
            raise UserError(
                f"the vectors of {embedding.token} for {name} have width {each.shape[1]}, and the encoders of {title} "
                f"have {known}. The embedding belongs to another model"
            )
        vectors[alike[0]] = each
    if not vectors:
        raise UserError(f"{embedding.token} has vectors only for encoders that are not in use. Use T5, or another file")
    return replace(embedding, vectors=vectors)


def _changed(layer: str, weight: Tensor, updates: Sequence[tuple[Update, AppliedText]]) -> Tensor:
    """Return a weight with its updates, in its own type."""
    exact = weight.detach().float()
    changed = exact.clone()
    for update, lora in updates:
        if not update.fits(exact.shape):
            outputs, inputs = update.shape
            raise UserError(
                f"{lora.name}: {layer} has {inputs} inputs and {outputs} outputs; this model has {exact.shape[1]} and "
                f"{exact.shape[0]}. It belongs to another model"
            )
        changed += lora.strength * update.delta_for(exact).to(exact.device)
    return changed.to(weight.dtype)
