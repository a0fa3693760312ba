"""Write a tiny FLUX.2 klein with random weights, in the folder layout of diffusers' pipeline.

It has what the real one has: a batch norm's statistics in an autoencoder of 16 x 16 pixels a place, joint and parallel
blocks, and a Qwen3 with its chat template, its special tokens and more layers than are read. Its vocabulary is the 256
bytes and what words are merged of, so the special tokens' ids follow these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tiny_models import tiny_sd3, vocabulary
from benchmarks.tiny_models.networks import Dtype

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
"""What Qwen3's own template makes of one message."""
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
"""Qwen3's special tokens, in the order of their ids, which follow the words'."""
SPACE, NEWLINE = "\u0120", "\u010a"  # as byte-level vocabularies spell them
QWEN: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 28,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {
    "patch_size": 1, "in_channels": 128, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 96, "timestep_guidance_channels": 32, "mlp_ratio": 3.0,
    "axes_dims_rope": (4, 4, 4, 4), "rope_theta": 2000, "guidance_embeds": False,
}  # fmt: skip
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen3ForCausalLM"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "transformer": ("diffusers", "Flux2Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLFlux2"),
}


def build(
    folder: Path, dtype: Dtype = "fp32", seed: int = 0, text: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """Write the pipeline's folder, which must not exist, and return it.

    Args:
        folder: to write.
        dtype: of all weights on disk.
        seed: of the weights. No global random state is changed.
        text: what differs in its Qwen3.
        changes: what differs in its transformer.
    """
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = write_tokenizer(folder / "tokenizer")
    with tiny_sd3.seeded(seed, 0):
        encoder = Qwen3ForCausalLM(Qwen3Config(**{**QWEN, "vocab_size": tokens, **(text or {})}))
    tiny_sd3.save_model(encoder, folder / "text_encoder", dtype)
    with tiny_sd3.seeded(seed, 1):
        transformer = Flux2Transformer2DModel(**{**TRANSFORMER, **changes})
    tiny_sd3.save_model(transformer, folder / "transformer", dtype)
    with tiny_sd3.seeded(seed, 2):
        vae = AutoencoderKLFlux2(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2.0)
    tiny_sd3.save_model(vae, folder / "vae", dtype)
    write_scheduler_and_index(folder)
    return folder


def write_scheduler_and_index(folder: Path, **changes: Any) -> None:
    """Write `scheduler/`, with the real one's settings but for changes, and `model_index.json`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    settings = {"shift": 3.0, "use_dynamic_shifting": True, **changes}
    FlowMatchEulerDiscreteScheduler(**settings).save_pretrained(folder / "scheduler")
    index = {"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.0.dev0", **COMPONENTS}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, words: Sequence[str] = ()) -> int:
    """Write Qwen3's tokenizer with the 256 bytes and one token for each word, alone and after a space; return its
    number of tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True)
    spelt = [*words, *(f"{SPACE}{word}" for word in words)]
    merges = vocabulary.merges_of([*spelt, 2 * NEWLINE] if words else [], end="")
    known = list(dict.fromkeys([*sorted(ByteLevel.alphabet()), *(first + second for first, second in merges)]))
    numbers = json.dumps({word: number for number, word in enumerate(known)}, ensure_ascii=False)
    (folder / "vocab.json").write_text(numbers, encoding="utf-8")
    lines = "".join(f"{first} {second}\n" for first, second in merges)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    added = {
        str(len(known) + number): {
            "content": word, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": word.startswith("<|") and "fim" not in word,
        }
        for number, word in enumerate(SPECIAL)
    }  # fmt: skip
    settings = {
        "added_tokens_decoder": added, "model_max_length": 131072, "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None,
        "add_prefix_space": False, "add_bos_token": False, "errors": "replace", "split_special_tokens": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    return len(known) + len(SPECIAL)
