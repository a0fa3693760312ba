"""Shared by the tests of the text side: prompts encoded with a text side, without a cache."""

from __future__ import annotations

from pathlib import Path

import original_layout
import pytest
import torch
from torch import Tensor

from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.text.embedding_files import EmbeddingFile
from simpletune.adapters.text.encoding import encode_prompts
from simpletune.adapters.text.side import PLAIN, TextSide
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
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
    found = encode_prompts(family(pipeline, name), [prompt], CPU, torch.float32, side)[prompt]
    return found.embeds, found.pooled  # type: ignore[return-value]


CLIP = "text_model.encoder.layers.{}.{}"
T5_LAYER = "text_encoder_3.encoder.block.0.layer.0.SelfAttention.q"
DENOISER = {"sd3": "transformer_blocks.0.attn.to_k", "sd15": "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_layout.build(tmp_path_factory.mktemp("text") / "pipeline", clip_widths=(16, 32), t5_width=64)


def update(shape: tuple[int, int], seed: int, rank: int = 2, scale: float = 0.5) -> LoraUpdate:
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    down, up = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
    return LoraUpdate(down / inputs**0.5, up, scale)


def text_updates(pipeline: Path, t5: bool = False, rank: int = 2) -> dict[str, LoraUpdate]:
    """Updates of two layers of every CLIP encoder, and of one of T5."""
    found, layers = {}, ["self_attn.q_proj", "self_attn.out_proj", "mlp.fc1"]
    for part in ("text_encoder", "text_encoder_2"):
        if (pipeline / part).is_dir():
            state = original_layout.state_of(pipeline / part)
            for leaf in layers:
                name = CLIP.format(1, leaf)
                found[f"{part}.{name}"] = update(tuple(state[f"{name}.weight"].shape), len(found), rank)
    if t5:
        weight = original_layout.state_of(pipeline / "text_encoder_3")[f"{T5_LAYER.partition('.')[2]}.weight"]
        found[T5_LAYER] = update(tuple(weight.shape), 9, rank)
    return found


def of_denoiser(pipeline: Path, family: str) -> dict[str, LoraUpdate]:
    folder = "transformer" if family == "sd3" else "unet"
    weight = original_layout.state_of(pipeline / folder)[f"{DENOISER[family]}.weight"]
    return {DENOISER[family]: update(tuple(weight.shape), 20)}


def comfy_state(pipeline: Path) -> dict[str, Tensor]:
    parts = {"clip_l": "text_encoder", "clip_g": "text_encoder_2", "t5xxl": "text_encoder_3"}
    return {
        f"{name}.transformer.{key}": tensor
        for name, part in parts.items()
        if (pipeline / part).is_dir()
        for key, tensor in original_layout.state_of(pipeline / part).items()
    }
