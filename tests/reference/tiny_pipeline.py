"""A complete StableDiffusion3Pipeline of a few thousand weights, built without downloads, for the reference's tests."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

CLIP_LENGTH = 12


def randomise(model: nn.Module, seed: int, scale: float = 0.3) -> nn.Module:
    """Fresh weights, large enough for every path of the model to show in its output; norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            spread = 2 * scale / fan_in**0.5 if parameter.ndim > 1 else scale
            centre = 1.0 if parameter.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def transformer(seed: int = 0, **changes: object) -> SD3Transformer2DModel:
    """A small SD3Transformer2DModel; `changes` replace fields of its config."""
    config = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 24,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 14,
        "pos_embed_max_size": 13,
    }
    return randomise(SD3Transformer2DModel(**(config | changes)), seed, scale=0.5)


def clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """One token a letter: CLIP's byte alphabet, with and without the end of a word, and no merges."""
    letters = sorted(ByteLevel.alphabet())
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocabulary, [], pad_token=pad_token, model_max_length=CLIP_LENGTH)


def clip_encoder(seed: int, width: int, projection: int, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return randomise(CLIPTextModelWithProjection(config), seed)


def t5_tokenizer() -> T5TokenizerFast:
    letters = [("▁", -2.0), *((letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz")]
    return T5TokenizerFast([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters], extra_ids=0)


def t5_encoder(seed: int, tokenizer: T5TokenizerFast) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=24,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
    )
    return randomise(T5EncoderModel(config), seed)


def autoencoder(seed: int) -> AutoencoderKL:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 8, 8),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=2,
        sample_size=64,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return randomise(vae, seed)


def save(folder: Path) -> Path:
    """Writes the pipeline in diffusers' layout and returns its folder."""
    tokenizer, tokenizer_2, tokenizer_3 = clip_tokenizer("<|endoftext|>"), clip_tokenizer("!"), t5_tokenizer()
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer(seed=1, dual_attention_layers=(0,), qk_norm="rms_norm"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(seed=2),
        text_encoder=clip_encoder(3, 8, 6, tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=clip_encoder(4, 12, 8, tokenizer_2),
        tokenizer_2=tokenizer_2,
        text_encoder_3=t5_encoder(5, tokenizer_3),
        tokenizer_3=tokenizer_3,
    )
    pipeline.save_pretrained(folder)
    return folder
