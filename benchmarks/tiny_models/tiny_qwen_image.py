"""Write a tiny Qwen-Image with random weights, in the folder layout of diffusers' pipeline.

It has what the real one has: a Qwen2.5-VL with its vision tower and biases of q, k and v, a tokenizer in which the
template of prompts begins with 34 tokens, a transformer of two streams with modulations in each block, and an
autoencoder for videos with means and deviations by channel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tiny_models import tiny_klein, tiny_sd3
from benchmarks.tiny_models.networks import Dtype

WORDS = (
    "system", "user", "assistant", "Describe", "the", "image", "by", "detailing", "color", "shape", "size", "texture",
    "quantity", "text", "spatial", "relationships", "of", "objects", "and", "background",
)  # fmt: skip
"""Of the template, each one token as in the real vocabulary."""
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}, "rope_theta": 1e6,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 16,
    "num_attention_heads": 3, "joint_attention_dim": 32, "guidance_embeds": False, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
SCHEDULER: dict[str, Any] = {
    "base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 8192, "max_shift": 0.9, "shift": 1.0,
    "shift_terminal": 0.02, "use_dynamic_shifting": True, "time_shift_type": "exponential",
}  # fmt: skip
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "QwenImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLQwenImage"),
}


def build(
    folder: Path, dtype: Dtype = "fp32", seed: int = 0, text: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """Write the pipeline's folder, which must not exist, and return it.

    Args:
        folder: to write.
        dtype: of all weights on disk.
        seed: of the weights. No global random state is changed.
        text: what differs in the text part of its Qwen2.5-VL.
        changes: what differs in its transformer.
    """
    import torch
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = tiny_klein.write_tokenizer(folder / "tokenizer", WORDS)
    settings = {**TEXT, "vocab_size": tokens, **(text or {})}
    vision = VISION | {"out_hidden_size": settings["hidden_size"]}
    with tiny_sd3.seeded(seed, 0):
        config = Qwen2_5_VLConfig(text_config=settings, vision_config=vision, tie_word_embeddings=False)
        encoder = Qwen2_5_VLForConditionalGeneration(config)
        for name, parameter in encoder.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    tiny_sd3.save_model(encoder, folder / "text_encoder", dtype)
    with tiny_sd3.seeded(seed, 1):
        transformer = QwenImageTransformer2DModel(**{**TRANSFORMER, **changes})
    tiny_sd3.save_model(transformer, folder / "transformer", dtype)
    with tiny_sd3.seeded(seed, 2):
        mean, deviation = torch.randn(16).tolist(), (torch.rand(16) + 0.5).tolist()
        vae = AutoencoderKLQwenImage(8, 16, num_res_blocks=1, latents_mean=mean, latents_std=deviation)
    tiny_sd3.save_model(vae, folder / "vae", dtype)
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    index = {"_class_name": "QwenImagePipeline", "_diffusers_version": "0.36.0.dev0", **COMPONENTS}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder
