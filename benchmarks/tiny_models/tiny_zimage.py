"""Write a tiny Z-Image with random weights, in the folder layout of diffusers' pipeline.

It has what the real one has: learned padding of picture and text, blocks for either and for both, sandwiched norms and
gates without shifts, and klein's Qwen3, with its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tiny_models import tiny_klein, tiny_sd3
from benchmarks.tiny_models.networks import Dtype

TRANSFORMER: dict[str, Any] = {
    "dim": 48, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6], "axes_lens": [1536, 512, 512],
}  # fmt: skip
COMPONENTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen3Model"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "ZImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}


def build(
    folder: Path,
    dtype: Dtype = "fp32",
    seed: int = 0,
    shift: float = 6.0,
    text: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write the pipeline's folder, which must not exist, and return it.

    Args:
        folder: to write.
        dtype: of all weights on disk.
        seed: of the weights. No global random state is changed.
        shift: the scheduler's: 6 as in the base, 3 as in Turbo.
        text: what differs in its Qwen3.
        changes: what differs in its transformer.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokens = tiny_klein.write_tokenizer(folder / "tokenizer")
    settings = {**tiny_klein.QWEN, "num_hidden_layers": 3, "vocab_size": tokens, **(text or {})}
    with tiny_sd3.seeded(seed, 0):
        encoder = Qwen3ForCausalLM(Qwen3Config(**settings))
    tiny_sd3.save_model(encoder, folder / "text_encoder", dtype)
    with tiny_sd3.seeded(seed, 1):
        transformer = ZImageTransformer2DModel(**{**TRANSFORMER, **changes})
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            token.data.normal_()
    tiny_sd3.save_model(transformer, folder / "transformer", dtype)
    with tiny_sd3.seeded(seed, 2):
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=16, norm_num_groups=4,
            scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip
    tiny_sd3.save_model(vae, folder / "vae", dtype)
    FlowMatchEulerDiscreteScheduler(shift=shift).save_pretrained(folder / "scheduler")
    index = {"_class_name": "ZImagePipeline", "_diffusers_version": "0.36.0.dev0", **COMPONENTS}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder
