"""Shared by the tests of the text side: prompts encoded with a text side, without a cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from simpletune.adapters.text.encoding import encode_prompts
from simpletune.adapters.text.files import EmbeddingFile
from simpletune.adapters.text.side import PLAIN, TextSide
from simpletune.models.sd3.option import SD3
from simpletune.models.sd15.option import SD15
from simpletune.runs.text_side import text_side_of
from simpletune.runs.weights import Weights

CPU = torch.device("cpu")


def family(pipeline: Path, name: str) -> SD3 | SD15:
    """The family's option for a folder, with T5 sequences as diffusers' pipelines have them."""
    if name == "sd3":
        return SD3().model_copy(update={"pretrained": str(pipeline), "t5_length": 256})
    return SD15().model_copy(update={"pretrained": str(pipeline)})


def with_lora(file: Path, scale: float = 1.0) -> TextSide:
    """The text side of a LoRA file."""
    return text_side_of(Weights("LoRA", lora=file, scale=scale))


def encoded(
    pipeline: Path, name: str, prompt: str, side: TextSide = PLAIN, embeddings: tuple[EmbeddingFile, ...] = ()
) -> tuple[Tensor, Tensor]:
    """(prompt_embeds, pooled) of one prompt, in fp32."""
    side = TextSide(embeddings, side.loras) if embeddings else side
    return encode_prompts(family(pipeline, name), [prompt], CPU, torch.float32, side)[prompt]
