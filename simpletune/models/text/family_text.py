"""The text side of a family: which encoders it has, and what its denoiser reads of their outputs. No torch.

Shapes: b samples, t text tokens, e text width, p pooled width, L an encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from simpletune.models.shared.buckets import Framing
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.parts import Part
from simpletune.models.text.encoder import TextEncoder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from simpletune.models.shared.conditioning import Conditioning


class ModelParts(Protocol):
    """What a text side asks of its family's files."""

    def known_config(self) -> ModelConfig:
        """Return the denoiser's ``config.json``."""

    def known_part(self, name: str) -> Part:
        """Locate a part's configuration."""

    def part(self, name: str) -> Part:
        """Locate a part, downloading it if necessary."""

    def pipeline_index(self) -> ModelConfig:
        """Return the pipeline's ``model_index.json``; empty for one without."""


class HasFiles(Protocol):
    """What a text side asks of its family, the model's option."""

    @property
    def files(self) -> ModelParts:
        """Where its parts come from."""


F = TypeVar("F", bound=HasFiles)


class TextRegion(NamedTuple):
    """Where one text encoder's output is in a prompt's embeddings."""

    part: str  # the part with its weights
    width: int  # the width of its output
    column: int = 0  # its first column
    pooled: tuple[int, int] | None = None
    """Its first column and its width in the pooled embedding; None: it has no pooled output."""
    last: bool = False  # its tokens are the last ones, after those of the encoders that share the first


class FamilyText(Generic[F]):
    """A family's text side. Members override what raises NotImplementedError.

    Args:
        family: the model's option.
    """

    reads_framing: ClassVar[bool] = False
    """Whether the denoiser is told how a picture was cut (``framed``)."""
    optional: ClassVar[Mapping[str, str]] = {}
    """The settings that do without an encoder, by the part with its weights, for messages."""
    one_length: ClassVar[bool] = True
    """Whether every prompt has t tokens; if not, it has its own number, at most t."""
    masked: ClassVar[bool] = False
    """Whether the denoiser's attention takes a mask where the prompts of a batch have different lengths."""

    length_multiple: ClassVar[int | None] = None
    """What the denoiser pads a prompt's tokens to a multiple of. Micro-batches are dealt by it, too, so that those of
    one length need no mask. None: by the pictures' size alone."""

    def __init__(self, family: F):
        self.family = family

    @property
    def encoders(self) -> Sequence[TextEncoder]:
        """The encoders in use, in the order in which they run."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """t, the number of text tokens that the denoiser sees, or the largest."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """e, the width of a text token."""
        raise NotImplementedError

    @property
    def pooled_width(self) -> int:
        """p, the width of the pooled prompt; 0 for a family without one."""
        return 0

    def regions(self) -> Mapping[str, TextRegion]:
        """Return where the output of each encoder in use lies in a prompt's embeddings, by its name."""
        raise NotImplementedError

    def fits(self, widths: Sequence[int]) -> bool:
        """Return whether the denoiser can read the outputs of encoders in use of these widths."""
        return sum(widths) == self.width

    def describe(self) -> str:
        """Say which encoders are in use, for ``check``."""
        raise NotImplementedError

    def assemble(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Conditioning:
        """Combine the encoders' outputs for one prompt, by the encoder's name: ``hidden`` [L, width] and, if it has
        one, ``pooled``."""
        raise NotImplementedError

    def pool(self, parts: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
        """Return one prompt's pooled embedding [p], from the outputs' ``pooled``; None for a family without one."""
        return None

    def framed(self, conditioning: Conditioning, framings: Sequence[Framing]) -> Conditioning:
        """Add to the conditioning of b pictures what the model is told of how they were cut (``reads_framing``)."""
        return conditioning

    def steered_from(self, negative_prompt: str | None) -> str | None:
        """Return the text that guidance steers away from if ``negative_prompt`` is given, or with None none is; None:
        zeros take the place of its embeddings."""
        return negative_prompt or ""

    def pipeline_arguments(self) -> dict[str, str]:
        """Return arguments of diffusers' ``from_pretrained`` that make its pipeline read prompts so, as Python."""
        return {}

    def call_arguments(self) -> dict[str, object]:
        """Return arguments for the call of diffusers' pipeline that make it read prompts so."""
        return {}

    def part_names(self) -> list[str]:
        """Return the parts with tokenizers and weights."""
        return [part for encoder in self.encoders for part in (encoder.tokenizer, encoder.model)]

    @property
    def trainable(self) -> tuple[str, ...]:
        """The names of the encoders that may train."""
        return tuple(encoder.name for encoder in self.encoders if encoder.may_train)

    def blank(self, dtype: torch.dtype, rows: int | None = None) -> Conditioning:
        """Return the largest conditioning of b = ``rows`` samples, or of one prompt, of zeros, before ``framed``."""
        import torch

        from simpletune.models.shared.conditioning import Conditioning

        b = () if rows is None else (rows,)
        pooled = torch.zeros(*b, self.pooled_width, dtype=dtype) if self.pooled_width else None
        mask = torch.ones(*b, self.tokens, dtype=torch.bool) if rows and rows > 1 and not self.one_length else None
        return Conditioning(torch.zeros(*b, self.tokens, self.width, dtype=dtype), mask, pooled)
