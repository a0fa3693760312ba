"""Encoders of random weights in transformers' layout, as small as their classes allow."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.tiny_models import vocabulary
from simpletune.data.demo import demo_scenes

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def write_dino(folder: Path) -> Path:
    """A DINO: 32 px in patches of 8."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(1)
    ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8), add_pooling_layer=False).save_pretrained(folder)
    return folder


def write_dinov2(folder: Path) -> Path:
    """A DINOv2: 28 px in patches of 14."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(2)
    small = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    Dinov2Model(Dinov2Config(**small, image_size=28, patch_size=14)).save_pretrained(folder)
    return folder


def write_clip(folder: Path) -> Path:
    """A CLIP: 32 px, prompts of 24 tokens."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    torch.manual_seed(3)
    vocabulary.write_clip(folder, demo_scenes.words())
    tokens = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    special = {name: getattr(tokens, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {**SMALL, **special, "vocab_size": len(tokens), "max_position_embeddings": vocabulary.CLIP_LENGTH}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)).save_pretrained(folder)
    return folder


def write_siglip(folder: Path) -> Path:
    """A SigLIP: 32 px, prompts of 16 tokens."""
    from transformers import SiglipConfig, SiglipModel, T5TokenizerFast

    torch.manual_seed(4)
    vocabulary.write_t5(folder, demo_scenes.words())
    words = len(T5TokenizerFast.from_pretrained(folder, local_files_only=True))
    text = {**SMALL, "vocab_size": words, "max_position_embeddings": 16, "projection_size": 16}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    SiglipModel(SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    return folder


WRITERS = {"dino": write_dino, "dinov2": write_dinov2, "clip": write_clip, "siglip": write_siglip}
