"""The text side's inputs in a training step: where a token's vectors belong, and CLIP's token ids.

Shapes: b prompts, L tokens of an encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from simpletune.adapters.text.placeholders import expand, positions, tokens_of
from simpletune.adapters.text.text_option import Text
from simpletune.models.families import Model
from simpletune.models.text.encoder import TextEncoder
from simpletune.models.text.prompts import Prompts
from simpletune.system.options import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NONE = -1
"""The slot of a position without a vector."""


@dataclass(frozen=True)
class TextInputs:
    """The text side's inputs for a micro-batch's prompts, by the encoder's name.

    Args:
        slots: int64 [b, L]: the number of the vector at each position; ``NONE`` for none.
        ids: int64 [b, L]: the token ids, for the encoders that run in the step.
    """

    slots: Mapping[str, Tensor] = field(default_factory=dict)
    ids: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> TextInputs:
        """Apply a function to every tensor."""
        both = ({name: change(tensor) for name, tensor in each.items()} for each in (self.slots, self.ids))
        return TextInputs(*both)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (*self.slots.values(), *self.ids.values())


def encoders_with_vectors(text: Text, model: Model) -> tuple[str, ...]:
    """Return the names of the text encoders with vectors of the token: all for place output, those that may train for
    place input."""
    if text.embeddings is None:
        return ()
    return tuple(e.name for e in model.text.encoders if text.embeddings.place == "output" or e.may_train)


class PromptTokenizer:
    """Tokenizes prompts, replacing the token of ``text.embeddings`` by its words."""

    def __init__(self, text: Text, model: Model, prompts: Prompts):
        self.text, self.prompts = text, prompts
        self.encoders: dict[str, TextEncoder] = {encoder.name: encoder for encoder in prompts.encoders}
        self.with_vectors, self.resident = encoders_with_vectors(text, model), text.resident(model.text.trainable)
        self._known: dict[str, TextInputs] = {}
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}

    def expanded(self, prompt: str) -> str:
        """Return the prompt as the text encoders read it."""
        option = self.text.embeddings
        return prompt if option is None else expand(prompt, option.token, option.words())

    def of(self, prompts: Sequence[str]) -> TextInputs:
        """Return the inputs of a micro-batch's prompts."""
        for prompt in prompts:
            if prompt not in self._known:
                ids = {}
                for name in self.resident:
                    ids[name] = self.prompts.tokens(self.encoders[name], [self.expanded(prompt)]).ids[0]
                slots = {name: self._slots(name, prompt) for name in self.with_vectors}
                self._known[prompt] = TextInputs(slots, ids)
        found = [self._known[prompt] for prompt in prompts]
        return TextInputs(
            {name: torch.stack([each.slots[name] for each in found]) for name in self.with_vectors},
            {name: torch.stack([each.ids[name] for each in found]) for name in self.resident},
        )

    def _slots(self, name: str, prompt: str) -> Tensor:  # [L]
        option, tokenizer = self.text.embeddings, self._tokenizer(name)
        assert option is not None
        slots = torch.full((self.length(name),), NONE, dtype=torch.int64)
        for rows in positions(tokenizer, prompt, option.token, option.words(), self.length(name)):
            for number, row in enumerate(rows[: self.vectors[name]]):
                slots[row] = number
        return slots

    def length(self, name: str) -> int:
        """Return L of an encoder."""
        return int(self.encoders[name].length or self._tokenizer(name).model_max_length)

    def count(self, prompt: str) -> int:
        """Count the tokens of a prompt in the first encoder, before truncation."""
        first = next(iter(self.encoders.values()))
        return first.counts(self._tokenizer(first.name), [self.expanded(prompt)])[0]

    @cached_property
    def vectors(self) -> dict[str, int]:
        """The number of vectors in each encoder: one per word in CLIP, one per piece of a word in T5."""
        return {name: len(self.word_ids(name)) for name in self.with_vectors}

    def word_ids(self, name: str) -> list[int]:
        """Return the ids of the token's words in an encoder. Raises UserError if a word is not a single token of
        CLIP."""
        option = self.text.embeddings
        assert option is not None
        tokenizer, words = self._tokenizer(name), option.words()
        for word in dict.fromkeys(words) if self.encoders[name].one_piece else ():
            pieces = tokens_of(tokenizer, [word])
            if len(pieces) != 1:
                listed = ", ".join(map(str, tokenizer.convert_ids_to_tokens(pieces)))
                kind = self.encoders[name].kind
                raise UserError(
                    f"text.embeddings.initial: {word!r} is {len(pieces)} tokens of {kind} ({listed}), and each vector "
                    "starts from one. Use a common word, such as the class of the subject"
                )
        return tokens_of(tokenizer, words)

    def _tokenizer(self, name: str) -> PreTrainedTokenizerBase:
        if name not in self._tokenizers:
            self._tokenizers[name] = self.prompts.tokenizer(self.encoders[name])
        return self._tokenizers[name]
