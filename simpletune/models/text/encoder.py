"""What a pipeline's text encoders have in common. Each kind is a class of its own: ``clip.py``, ``t5.py``.

No torch until an encoder is opened. Shapes: n prompts, L tokens, w an encoder's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.system.options import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

BATCH = 1  # prompts encoded together; with more, the last bits of a prompt's embedding would depend on its neighbours
CHUNK_BYTES = 2**30  # of hidden states in host memory; beyond it, layers are loaded once for each chunk of prompts
GROUP = 64  # numbers of a packed token with one scale
MAX_TOKENIZER_BYTES = 64 * 2**20  # per file; T5's has 2.4 MB
MAX_TOKENS = 4096  # that a tokenizer may name as its own maximum


class Tokens(NamedTuple):
    """Prompts as an encoder reads them."""

    ids: Tensor  # [n, L], int64
    mask: Tensor | None = None
    """[n, L], bool: whether a position belongs to the prompt. None: the encoder reads its padding, too."""
    padded: bool = False
    """With a mask: whether the states of the padding are wanted, too, though no position attends to it."""


class LayerChange(NamedTuple):
    """A change of the weight of one linear layer."""

    source: str  # the name of the file that it comes from, for messages
    apply: Callable[[Tensor], Tensor]  # from the weight to the changed one, of the same type


@dataclass(frozen=True)
class EncoderChanges:
    """What differs from an encoder's own weights and token table."""

    layers: Mapping[str, LayerChange] = field(default_factory=dict)  # by their names in the published checkpoint
    rows: Sequence[Mapping[int, Tensor]] = ()
    """For each prompt the vectors [w] that replace its input embeddings, by position; empty: none."""


UNCHANGED = EncoderChanges()


class OpenEncoder(Protocol):
    """An encoder that can run."""

    layered: bool
    """Whether its layers visit the device one by one, so that its weights never stand there together."""

    def parameter_count(self) -> int:
        """Return the number of its parameters, a tensor with two names counted once."""

    def resident(self) -> Iterable[Tensor]:
        """Return its tensors that stay on the device while it runs."""

    def encode(self, tokens: Tokens, batch_size: int = BATCH) -> Iterator[dict[str, Tensor]]:
        """Yield for each prompt ``hidden`` [L, w], and ``pooled`` [p] if it has a pooled output; without padding if the
        tokens have a mask and are not ``padded``."""


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder with the names of its parts in a pipeline's folder."""

    name: str  # names its cache
    tokenizer: str  # the part with its tokenizer
    model: str  # the part with its weights
    title: str  # its name in messages
    length: int | None = None  # the most tokens of a prompt; None: the tokenizer's maximum
    packed: bool = False  # whether its hidden states are cached in int8

    kind: ClassVar[str]
    """Its architecture, as people call it."""
    may_train: ClassVar[bool] = False
    """Whether a LoRA or new tokens may train in it, so that it can run in every step."""
    one_piece: ClassVar[bool] = False
    """Whether each word of ``text.embeddings.initial`` has to be one token."""
    templated: ClassVar[bool] = False
    """Whether its prompts stand in the chat template that its tokenizer comes with."""

    @property
    def states(self) -> str:
        """The end of its fingerprint, which tells apart outputs of the same weights."""
        return ""

    @property
    def template(self) -> tuple[str, str]:
        """What its template puts before a prompt, and after it."""
        return "", ""

    @property
    def limit(self) -> int:
        """The most tokens that it reads of a prompt, with those that begin and end it."""
        return self.length or MAX_TOKENS

    def width(self, config: ModelConfig) -> int:
        """Return w, from its ``config.json``."""
        raise NotImplementedError

    def pooled_width(self, config: ModelConfig) -> int:
        """Return the width of its pooled output; 0: it has none, or none that is used."""
        return 0

    def positions(self, config: ModelConfig) -> int | None:
        """Return the most tokens for which it has positions; None: any number."""
        return None

    def longest(self, config: ModelConfig) -> int:
        """Return L of the longest prompt, by its ``config.json``, where no tokenizer is at hand."""
        return self.length or self.positions(config) or 0

    def tokenizer_class(self) -> type[PreTrainedTokenizerBase]:
        """Return transformers' class of its tokenizer."""
        raise NotImplementedError

    def text(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """Put a prompt in the encoder's template."""
        return prompt

    def tokenize(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Tokens:
        """Return the tokens of prompts, truncated, and padded to the encoder's length."""
        ids: Tensor = tokenizer(
            [self.text(tokenizer, prompt) for prompt in prompts],
            padding="max_length",
            max_length=self.length or tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        return Tokens(ids)

    def counts(self, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[int]:
        """Return the numbers of tokens of prompts before truncation."""
        return [len(ids) for ids in tokenizer([self.text(tokenizer, prompt) for prompt in prompts]).input_ids]

    def open(
        self,
        part: Part,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        changes: EncoderChanges | None = None,
    ) -> OpenEncoder:
        """Load what stays in memory while it runs.

        Args:
            part: the location of its weights.
            dtype: the type of weights and outputs.
            device: where it runs.
            tokenizer: its tokenizer, which may know the special tokens better than its configuration.
            changes: what differs from its own weights; None: nothing.

        Raises:
            UserError: the weights do not match the configuration, or a change names a layer that it does not have.
        """
        raise NotImplementedError

    def open_empty(self, part: Part, dtype: torch.dtype, device: torch.device) -> OpenEncoder:
        """Open it without values, from the configuration alone."""
        raise NotImplementedError

    def load(self, part: Part, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
        """Load the whole encoder on the CPU, to train in it (``may_train``)."""
        raise NotImplementedError

    def empty(self, config: ModelConfig) -> nn.Module:
        """Build it with uninitialised weights."""
        raise NotImplementedError

    def outputs(self, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
        """Run the loaded encoder once over token ids [b, L]: ``hidden`` [b, L, w], and ``pooled`` [b, p] if it has a
        pooled output (``may_train``)."""
        raise NotImplementedError

    def read_tokenizer(self, folder: Path) -> PreTrainedTokenizerBase:
        """Read its tokenizer. Raises UserError if its files are damaged or have impossible sizes."""
        for file in folder.iterdir():
            if file.is_file() and file.stat().st_size > MAX_TOKENIZER_BYTES:
                raise UserError(
                    f"{file} has {file.stat().st_size:,} bytes; the limit for a tokenizer's file is "
                    f"{MAX_TOKENIZER_BYTES:,}. Download it again"
                )
        kind = self.tokenizer_class()
        try:
            tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the tokenizers library raises nothing narrower
            said = str(error).strip().partition("\n")[0][:300]
            raise UserError(f"{folder} contains no readable tokenizer ({said}). Download it again") from error
        if self.length is None and not 1 <= tokenizer.model_max_length <= MAX_TOKENS:
            raise UserError(
                f"{folder}: model_max_length is {tokenizer.model_max_length}; it must be from 1 to {MAX_TOKENS}. "
                "Download the tokenizer again"
            )
        if self.templated and not tokenizer.chat_template:
            raise UserError(
                f"{folder} has no chat template (chat_template.jinja), in which {self.title} reads prompts. Download "
                "the tokenizer again"
            )
        return tokenizer


def groups_of(width: int) -> int:
    """Return the number of scales for a packed token of this width."""
    return width // GROUP if width % GROUP == 0 else 1
