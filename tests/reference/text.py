"""Prompt embeddings of SD3, from transformers' encoders directly (part of the independent reference).

Shapes: b captions, l = 77 + t5_length tokens, width = the transformer's `joint_attention_dim` (T5's own width).
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast


def tokenise(tokenizer: CLIPTokenizer | T5TokenizerFast, captions: list[str], length: int) -> Tensor:  # [b, length]
    tokens = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return tokens.input_ids


def encode_clip(pipeline: Path, number: str, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Penultimate hidden states [b, 77, features] and projected text embedding [b, features] of one CLIP."""
    tokenizer = CLIPTokenizer.from_pretrained(pipeline / f"tokenizer{number}")
    encoder = CLIPTextModelWithProjection.from_pretrained(pipeline / f"text_encoder{number}", dtype=torch.float32)
    tokens = tokenise(tokenizer, captions, tokenizer.model_max_length)
    output = encoder.eval()(tokens, output_hidden_states=True)
    return output.hidden_states[-2], output.text_embeds


def encode_t5(pipeline: Path, captions: list[str], length: int) -> Tensor:
    """T5's last hidden state, [b, length, width]; the padding is neither masked nor zeroed."""
    tokenizer = T5TokenizerFast.from_pretrained(pipeline / "tokenizer_3")
    encoder = T5EncoderModel.from_pretrained(pipeline / "text_encoder_3", dtype=torch.float32)
    return encoder.eval()(tokenise(tokenizer, captions, length)).last_hidden_state


@torch.no_grad()
def encode(pipeline: Path, captions: list[str], t5: bool, t5_length: int) -> tuple[Tensor, Tensor]:
    """Encodes captions as SD3's transformer reads them.

    Returns:
        prompt_embeds [b, 77 + t5_length, width]: both CLIPs side by side on the features, zero-padded to the width,
        then T5 (zeros without it) on the sequence axis; and pooled [b, CLIP-L + CLIP-G features].
    """
    config = json.loads((pipeline / "transformer" / "config.json").read_text(encoding="utf-8"))
    width = config["joint_attention_dim"]
    states_l, pooled_l = encode_clip(pipeline, "", captions)
    states_g, pooled_g = encode_clip(pipeline, "_2", captions)
    clip = torch.cat([states_l, states_g], dim=2)
    clip = F.pad(clip, (0, width - clip.shape[2]))
    tail = encode_t5(pipeline, captions, t5_length) if t5 else torch.zeros(len(captions), t5_length, width)
    return torch.cat([clip, tail], dim=1), torch.cat([pooled_l, pooled_g], dim=1)
