"""The tiny SD3's four networks, randomly initialised from torch's global generator.

Legend: b is the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from simpletune.data.demo import demo_scenes

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    from simpletune.system.options import Json

HEAD_WIDTH = 64  # ComfyUI infers layers and heads from hidden width / 64
SAMPLE_SIZE = 8  # latent side of the pipeline's default picture: 64 px
POSITIONS = 32  # patches per side: 512 px, so 256 px buckets reach an aspect ratio of 4:1 (512 x 128)
POSITION_SPACING = 0.5  # the default, sample_size / 2 / POSITIONS = 0.125, makes neighbours almost equal
GATE = 0.5  # added to the modulation's gates, so that every block contributes to the output

Module = TypeVar("Module", bound="torch.nn.Module")
Dtype = Literal["fp32", "fp16", "bf16"]
TORCH_DTYPES: dict[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def cast(model: Module, dtype: Dtype) -> Module:
    """Cast a model's weights and buffers in place, and return the model."""
    import torch

    # diffusers' own model.to() warns of modules to keep in float32 although there are none.
    return torch.nn.Module.to(model, getattr(torch, TORCH_DTYPES[dtype]))


def clip(tokenizer_folder: Path, width: int, activation: str) -> CLIPTextModelWithProjection:
    """Build a text encoder like CLIP-L or CLIP-G with two layers.

    Args:
        tokenizer_folder: Defines the vocabulary size and the special tokens.
        width: Width of the hidden states and of the pooled output; 16 per head.
        activation: `quick_gelu` for CLIP-L, `gelu` for CLIP-G.
    """
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=2,  # SD3 reads hidden_states[-2], here the first layer's output
        num_attention_heads=width // 16,
        max_position_embeddings=tokenizer.model_max_length,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModelWithProjection(config)
    embeddings = encoder.text_model.embeddings
    embeddings.token_embedding.weight.data.normal_(0.0, 0.5)  # at the default 0.02 all prompts are almost equal
    embeddings.position_embedding.weight.data.normal_(0.0, 0.1)
    return encoder


def t5(tokenizer_folder: Path, width: int) -> T5EncoderModel:
    """Build a T5 encoder with two layers of the given width, 32 per head."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    tokenizer = T5Tokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=32,
        d_ff=2 * width,
        num_layers=2,
        num_heads=width // 32,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config)  # T5 initialises its embeddings with standard deviation 1


def transformer_config(layers: int, text_width: int, pooled_width: int) -> Json:
    """Return the configuration of the tiny transformer for diffusers' class.

    Args:
        layers: Joint blocks, and heads of 64.
        text_width: Width of T5, to which the CLIP states are padded.
        pooled_width: Width of both pooled CLIP outputs together.
    """
    return {
        "sample_size": SAMPLE_SIZE,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": layers,
        "num_attention_heads": layers,
        "attention_head_dim": HEAD_WIDTH,
        "joint_attention_dim": text_width,
        "caption_projection_dim": HEAD_WIDTH * layers,
        "pooled_projection_dim": pooled_width,
        "pos_embed_max_size": POSITIONS,
    }


def transformer(layers: int, text_width: int, pooled_width: int) -> SD3Transformer2DModel:
    """Build an MMDiT with nothing initialised to zero, so that a LoRA on it has a gradient from the first step.

    Args:
        layers: Joint blocks, and heads of 64.
        text_width: Width of T5, to which the CLIP states are padded.
        pooled_width: Width of both pooled CLIP outputs together.
    """
    from diffusers import SD3Transformer2DModel
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    hidden = HEAD_WIDTH * layers
    model = SD3Transformer2DModel(**transformer_config(layers, text_width, pooled_width))
    table = get_2d_sincos_pos_embed(hidden, POSITIONS, base_size=int(POSITIONS * POSITION_SPACING), output_type="pt")
    model.pos_embed.pos_embed.copy_(table)  # [1, POSITIONS**2, hidden], a buffer saved with the weights
    for block in model.transformer_blocks:
        # shift, scale, gate of attention; shift, scale, gate of feed-forward. The last norm1_context has no gates.
        norms = [block.norm1] if block.context_pre_only else [block.norm1, block.norm1_context]
        for norm in norms:
            norm.linear.bias.data.view(6, hidden)[[2, 5]] += GATE
    return model


def plain_autoencoder(channels: tuple[int, ...]) -> AutoencoderKL:
    """Build an 8x autoencoder with 16 latent channels and one layer per level, initialised by diffusers."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
        sample_size=64,
        force_upcast=False,
    )


def autoencoder(channels: tuple[int, ...], dtype: Dtype) -> AutoencoderKL:
    """Build an 8x autoencoder whose scale and shift give the demo's pictures latents of mean 0 and deviation 1."""
    import torch

    vae = plain_autoencoder(channels).eval()
    cast(cast(vae, dtype), "fp32")  # measure the weights that will be saved
    with torch.no_grad():
        z_0 = vae.encode(_demo_pixels()).latent_dist.mode()  # [b, 16, 8, 8]
    # Round to three digits: later digits differ between machines, and the folder's bytes should not.
    vae.register_to_config(
        scaling_factor=float(f"{1.0 / float(z_0.std()):.3g}"), shift_factor=float(f"{float(z_0.mean()):.3g}")
    )
    return vae


def _demo_pixels(count: int = 8) -> torch.Tensor:
    """Draw demo pictures in -1..1, [b, 3, 64, 64]."""
    import numpy as np
    import torch

    drawn = [demo_scenes.render(scene, 64, seed) for seed, scene in enumerate(demo_scenes.sample_scenes(count, seed=0))]
    return torch.from_numpy(np.stack([np.asarray(image) for image in drawn])).permute(0, 3, 1, 2) / 127.5 - 1.0
