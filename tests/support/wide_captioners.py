"""Image-to-text models of random weights with the widths of published ones and few layers, to count what work takes."""

from __future__ import annotations

from pathlib import Path

from tiny_captioners import write_blip, write_florence, write_qwen
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessorPil,
    CLIPImageProcessorPil,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)


def florence_base(folder: Path) -> Path:
    """Florence-2-base's widths, 768 px, 3 beams; two layers of text, five of vision."""
    write_florence(folder)
    text = {
        "model_type": "bart", "vocab_size": 51289, "d_model": 768, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "max_position_embeddings": 1024, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }  # fmt: skip
    vision = {"depths": [1, 1, 2, 1], "projection_dim": 768}
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=3, pad_token_id=1, bos_token_id=0)
    model = Florence2ForConditionalGeneration(config).bfloat16()
    model.generation_config.num_beams = 3
    model.save_pretrained(folder)
    side = {"height": 768, "width": 768}
    CLIPImageProcessorPil(size=side, do_center_crop=False, crop_size=side).save_pretrained(folder)
    return folder


def blip_large(folder: Path) -> Path:
    """BLIP-large's widths, 384 px; two layers each."""
    write_blip(folder)
    text = {
        "hidden_size": 768, "encoder_hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 30524,
        "bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 16,
        "image_size": 384, "patch_size": 16,
    }  # fmt: skip
    BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision)).bfloat16().save_pretrained(folder)
    BlipImageProcessorPil().save_pretrained(folder)
    return folder


def qwen_4b(folder: Path) -> Path:
    """Qwen3-VL-4B's widths; two layers each."""
    write_qwen(folder)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
        "out_hidden_size": 2560, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=5, video_token_id=6, vision_start_token_id=3,
        vision_end_token_id=4, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3VLForConditionalGeneration(config).bfloat16()
    model.generation_config.update(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    Qwen2VLImageProcessorPil(patch_size=16, size=size, merge_size=2).save_pretrained(folder)
    return folder


WRITERS = {"Florence-2-base": florence_base, "BLIP-large": blip_large, "Qwen3-VL-4B": qwen_4b}
