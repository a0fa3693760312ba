"""Image-to-text models of random weights in transformers' layout, as small as their classes allow, one of each kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

WORDS = "a photo of the red dog on green grass under blue sky with white star in front and small house".split()


def write_words(folder: Path, special: Sequence[str], **settings: str) -> None:
    """Write a tokenizer in which each word, each byte and each special token is one token.

    Args:
        folder: to write to.
        special: special tokens, with ids from 0.
        settings: of tokenizer_config.json, such as ``eos_token``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in ("\u0120" + word for word in WORDS):
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    tokens = dict.fromkeys([*special, *alphabet, *(a + b for a, b in merges)])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, **settings})
    (folder / "tokenizer_config.json").write_text(text)


def words_in(folder: Path) -> int:
    """How many tokens a folder's tokenizer has."""
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])


def write_florence(folder: Path) -> Path:
    """A Florence-2: 64 px, 2 x 2 + 1 tokens of a picture."""
    from transformers import CLIPImageProcessorPil, Florence2Config, Florence2ForConditionalGeneration

    write_words(folder, ["<s>", "<pad>", "</s>", "<image>"], bos_token="<s>", pad_token="<pad>", eos_token="</s>")
    text = {
        "model_type": "bart", "vocab_size": words_in(folder), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_position_embeddings": 128, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "depths": [1, 1, 1, 1], "embed_dim": [8, 8, 16, 16], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2],
        "window_size": 2, "projection_dim": 16, "drop_path_rate": 0.0,
    }  # fmt: skip
    torch.manual_seed(5)
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=3, pad_token_id=1, bos_token_id=0)
    loud(Florence2ForConditionalGeneration(config)).save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"height": 64, "width": 64}, do_center_crop=False, crop_size={"height": 64, "width": 64}
    ).save_pretrained(folder)
    return folder


def write_blip(folder: Path) -> Path:
    """A BLIP: 32 px in patches of 8."""
    from transformers import BlipConfig, BlipForConditionalGeneration, BlipImageProcessorPil

    write_words(folder, ["[PAD]", "[CLS]", "[SEP]", "[DEC]"], pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **small, "encoder_hidden_size": 16, "projection_dim": 16, "vocab_size": words_in(folder), "bos_token_id": 3,
        "eos_token_id": 2, "pad_token_id": 0, "sep_token_id": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(6)
    vision = {**small, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    loud(BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision))).save_pretrained(folder)
    BlipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


TALK = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen(folder: Path) -> Path:
    """A Qwen3-VL: patches of 8 px, 2 x 2 of them a token."""
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
               "<|video_pad|>"]  # fmt: skip
    write_words(folder, special, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TALK)
    text = {
        "vocab_size": words_in(folder), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    torch.manual_seed(7)
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=5, video_token_id=6, vision_start_token_id=3,
        vision_end_token_id=4,
    )  # fmt: skip
    model = loud(Qwen3VLForConditionalGeneration(config))
    model.generation_config.update(eos_token_id=2, pad_token_id=0, do_sample=True, temperature=0.7, top_k=20)
    model.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}, merge_size=2
    ).save_pretrained(folder)
    return folder


def loud(model: torch.nn.Module) -> torch.nn.Module:
    """Scale up the initial weights, so that pictures and rounding change the captions of random models."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8 if "embed" not in name else 20)
    return model


WRITERS = {"florence": write_florence, "qwen": write_qwen, "blip": write_blip}
