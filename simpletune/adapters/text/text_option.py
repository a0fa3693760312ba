"""What trains on the text side: the option ``text``, with embeddings of a new token and a LoRA on CLIP. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from simpletune.adapters.methods.adapter import TrainingMethod
from simpletune.system.options import Option, plural

if TYPE_CHECKING:
    from simpletune.models.shared.family import Family


class Embeddings(Option):
    """Textual inversion (arXiv:2208.01618): vectors that stand for a new token of the captions."""

    token: Annotated[str, Field(pattern=r"^\S{1,64}$")]
    """The new token as captions and prompts write it, such as "<dots>": one word without spaces. The text encoders read
    the words of initial instead of it."""
    initial: Annotated[str, Field(min_length=1, max_length=200)]
    """Word or words that initialise the embeddings, such as the class of a subject ("dog"). Every word must be a single
    token of CLIP."""
    vectors: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of vectors of the token in each encoder. They start from the words of initial, cycling through them."""
    place: Literal["output", "input"] = "output"
    """Which vectors train. output: the vectors of every text encoder's output at the token's positions. Outputs stay
    cached, so that no encoder is on the device and every memory lever applies; only simpletune reads the file. input:
    rows of CLIP's token tables, as in textual inversion; the CLIP encoders stay on the device, and other tools read the
    file."""
    learning_rate: Annotated[float, Field(gt=0)] | None = 5e-4
    """Learning rate of the embeddings, which follows the schedule; null: optimizer.lr."""
    keep_norm: bool = True
    """For place input: after each step, scale every vector to the median norm of the encoder's token table, as
    OneTrainer does."""
    stop_at: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the run's steps after which embeddings are frozen and only the rest trains (pivotal tuning); 1:
    never."""

    def words(self) -> list[str]:
        """Return the words that stand for the token in the text encoders, one for each vector."""
        initial = self.initial.split()
        return [initial[number % len(initial)] for number in range(self.vectors)]

    def use(self, file: str) -> str:
        """Say where the embeddings are, by the name of their file, and how prompts use them."""
        where = f"The embeddings of `{self.token}` are in `{file}`."
        if self.place == "output":
            return f"{where} They replace parts of the text encoders' output, which only simpletune reads."
        name = f"`embedding:{file.removesuffix('.safetensors')}`"
        return f"{where} ComfyUI reads them from `models/embeddings`: write {name} for `{self.token}` in prompts."


class TextLora(Option):
    """A LoRA on the CLIP text encoders, which then stay on the device."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Rank of each update."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Numerator of the scale alpha / rank that multiplies each update; null: alpha = rank, so the scale is 1."""
    targets: Literal["attention", "attention_and_mlp"] = "attention"
    """Layers to update. attention: q_proj, k_proj, v_proj and out_proj; attention_and_mlp: also fc1 and fc2."""
    encoders: Annotated[list[str], Field(min_length=1)] | None = None
    """CLIP encoders to train: clip_l and clip_g for SD3 and SDXL, clip for SD 1.5 and
    2; null: all of them. T5 never trains."""
    learning_rate: Annotated[float, Field(gt=0)] | None = 1e-5
    """Learning rate of these updates, which follows the schedule; null: optimizer.lr."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class Text(Option):
    """What trains on the text side, besides or instead of the denoiser."""

    embeddings: Embeddings | None = None
    """Embeddings of a new token (textual inversion); null: none."""
    lora: TextLora | None = None
    """LoRA on the CLIP text encoders; null: none."""

    @property
    def trains(self) -> bool:
        """Whether anything trains here."""
        return self.embeddings is not None or self.lora is not None

    def resident(self, encoders: Sequence[str]) -> tuple[str, ...]:
        """Return those of the encoders that may train which run in every step, and therefore stay on the device."""
        if self.embeddings is not None and self.embeddings.place == "input":
            return tuple(encoders)
        return self.with_lora(encoders)

    def with_lora(self, encoders: Sequence[str]) -> tuple[str, ...]:
        """Return those of the encoders that may train which get a LoRA."""
        if self.lora is None:
            return ()
        return tuple(name for name in encoders if self.lora.encoders is None or name in self.lora.encoders)

    def trainable(self, model: Family) -> int:
        """Count the trained parameters, assuming one T5 piece per word. The family's encoders ship or are in local
        folders."""
        count, regions = 0, model.text.regions() if self.trains else {}
        if self.embeddings is not None:
            names = model.text.trainable if self.embeddings.place == "input" else list(regions)
            count += self.embeddings.vectors * sum(regions[name].width for name in names)
        if self.lora is not None:
            for name in self.with_lora(model.text.trainable):  # rank x (inputs + outputs) of every layer
                config = model.files.known_part(regions[name].part).config()
                width, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
                sides = 4 * 2 * width
                if self.lora.targets == "attention_and_mlp":
                    sides += 2 * (width + int(config["intermediate_size"]))
                count += layers * self.lora.rank * sides
        return count

    def lr_ratio(self, name: str, lr: float) -> float:
        """Return the factor on ``optimizer.lr`` of a trained parameter, whose name begins with ``embeddings.`` or
        ``encoders.``."""
        part = self.embeddings if name.startswith("embeddings.") else self.lora
        return 1.0 if part is None or part.learning_rate is None else part.learning_rate / lr

    def describe(self) -> list[str]:
        """Describe what trains."""
        found = []
        if (option := self.embeddings) is not None:
            where = "output embeddings" if option.place == "output" else "input embeddings of CLIP"
            until = "" if option.stop_at == 1 else f", until {option.stop_at:.0%} of the run"
            count = plural(option.vectors, "vector")
            found.append(f"{where} for {option.token} ({count} from {' '.join(option.words())!r}){until}")
        if self.lora is not None:
            names = "CLIP" if self.lora.encoders is None else ", ".join(self.lora.encoders)
            found.append(f"LoRA of rank {self.lora.rank}, scale {self.lora.scale:g}, on {names} ({self.lora.targets})")
        return found


NO_TEXT = Text()


def embedding_name(run: str, token: str) -> str:
    """Return the name of a run's embedding file: the run's name and the token, without characters unfit for files."""
    return f"{run}_{re.sub(r'[^A-Za-z0-9._-]+', '', token) or 'token'}.safetensors"


def result_names(run: str, adapter: TrainingMethod, text: Text, denoiser: str) -> list[str]:
    """Return the names of the files of a run's result: the LoRA or the denoiser's folder, then the embeddings."""
    first = [adapter.result(denoiser)] if adapter.trains or text.lora is not None else []
    return first + ([] if text.embeddings is None else [embedding_name(run, text.embeddings.token)])
