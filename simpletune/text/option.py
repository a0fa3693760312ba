"""What trains on the text side: the option ``text``, with embeddings of a new token and a LoRA on CLIP. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simpletune.options import Option


class Embeddings(Option):
    """Textual inversion (arXiv:2208.01618): vectors that stand for a new token of the captions."""

    token: Annotated[str, Field(pattern=r"^\S{1,64}$")]
    """The new token as captions and prompts write it, such as "<dots>": one word without spaces. In its place the text
    encoders read the words of initial."""
    initial: Annotated[str, Field(min_length=1, max_length=200)]
    """Word or words that the embeddings start from, such as the class of a subject ("dog"). Every word must be a single
    token of CLIP."""
    vectors: Annotated[int, Field(ge=1, le=64)] = 1
    """Vectors of the token in each encoder: one for each word of initial, whose words are used in turn."""
    place: Literal["output", "input"] = "output"
    """Which vectors train. output: those of every text encoder's output at the token's places, which stay cached, so
    that no encoder is on the device and every memory lever applies; only simpletune reads the file. input: rows of
    CLIP's token tables, as in textual inversion; the CLIP encoders stay on the device, and other tools read the
    file."""
    learning_rate: Annotated[float, Field(gt=0)] | None = 5e-4
    """Learning rate of the embeddings, which follows the schedule; null: optimizer.lr."""
    keep_norm: bool = True
    """For place input: after each step, scale every vector to the median norm of the encoder's token table, as
    OneTrainer does."""
    stop_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the run's steps after which the embeddings stay as they are and only the rest trains (pivotal tuning);
    1: never."""

    def words(self) -> list[str]:
        """The words that stand for the token in the text encoders, one for each vector."""
        initial = self.initial.split()
        return [initial[number % len(initial)] for number in range(self.vectors)]

    def stop_step(self, steps: int) -> int:
        """The first step, counted from 0, that no longer changes the embeddings."""
        return max(1, round(self.stop_at * steps))


class TextLora(Option):
    """A LoRA on the CLIP text encoders, which then stay on the device."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Rank of each update."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the scale alpha / rank that multiplies each update; null: alpha = rank, so the scale is 1."""
    targets: Literal["attention", "attention_and_mlp"] = "attention"
    """Layers to update. attention: q_proj, k_proj, v_proj and out_proj; attention_and_mlp: also fc1 and fc2."""
    encoders: Annotated[list[str], Field(min_length=1)] | None = None
    """CLIP encoders to train: clip_l and clip_g of SD3, clip of SD 1.5 and 2; null: all of them. T5 never trains."""
    learning_rate: Annotated[float, Field(gt=0)] | None = 1e-5
    """Learning rate of these updates, which follows the schedule; null: optimizer.lr."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Text(Option):
    """What trains on the text side, beside or instead of the denoiser."""

    embeddings: Embeddings | None = None
    """Embeddings of a new token (textual inversion); null: none."""
    lora: TextLora | None = None
    """LoRA on the CLIP text encoders; null: none."""

    @property
    def trains(self) -> bool:
        """Whether anything trains here."""
        return self.embeddings is not None or self.lora is not None
