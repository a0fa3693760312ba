"""What a safetensors file is, by the names and shapes of its tensors: of which model, whole or a LoRA; without torch.

The names are those that diffusers' ``single_file_utils`` and ComfyUI's detection go by; widths are published models'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Shapes = Mapping[str, Sequence[int]]
"""The shapes of a file's tensors, by name."""

ORIGINAL, OF_DIFFUSERS = "in the original layout", "in diffusers' names"
A_LORA = re.compile(r"\.lora_(A|B|up|down)\b|^lora_(unet_|te)|^lycoris_")
"""A tensor of a LoRA, of any model."""


class Kind(NamedTuple):
    """A kind of file, recognised by one tensor."""

    title: str
    pattern: str  # occurs in the tensor's name
    inputs: int | None = None  # its second dimension; None: any
    form: str = ""
    family: str = ""  # the ``model.family`` that trains it

    def __str__(self) -> str:
        return f"{self.title}, {self.form}" if self.form else self.title


SDXL = "Stable Diffusion XL"
# Whole models and parts of them, most specific first.
FILES = (
    Kind("Stable Diffusion 3.5 Medium", r"(^|\.)joint_blocks\.\d+\.x_block\.attn2\.", None, ORIGINAL, "sd3"),
    Kind("Stable Diffusion 3.5", r"(^|\.)joint_blocks\.\d+\.x_block\.attn\.ln_q", None, ORIGINAL, "sd3"),
    Kind("Stable Diffusion 3", r"(^|\.)joint_blocks\.\d+\.x_block\.", None, ORIGINAL, "sd3"),
    Kind("FLUX.2 klein 4B", r"(^|\.)txt_in\.weight$", 7680, ORIGINAL, "klein"),
    Kind("FLUX.2 klein 4B", r"(^|\.)context_embedder\.weight$", 7680, OF_DIFFUSERS, "klein"),
    Kind("FLUX.2 klein 9B", r"(^|\.)(txt_in|context_embedder)\.weight$", 12288),
    Kind("FLUX.2 dev", r"(^|\.)(txt_in|context_embedder)\.weight$", 15360),
    Kind("FLUX.2", r"(^|\.)single_stream_modulation\.lin"),
    Kind("Flux 3", r"(^|\.)early_stream_modulations\."),
    Kind("Flux.1", r"double_blocks\.\d+\.img_attn"),
    Kind("AuraFlow", r"^(model\.)?(double_layers\.\d+\.attn|joint_transformer_blocks\.)"),
    Kind("Flux.1", r"^single_transformer_blocks\.\d+", None, OF_DIFFUSERS),
    Kind("Qwen-Image-2.1", r"(^|\.)txt_in\.text_norm\."),
    Kind("Qwen-Image", r"(^|\.)transformer_blocks\.\d+\.img_mod\.", None, ORIGINAL, "qwen_image"),
    Kind("a ControlNet of Z-Image", r"(^|\.)control_(layers|all_x_embedder)\."),
    Kind("Z-Image-Omni", r"(^|\.)siglip_(embedder|refiner)\."),
    Kind("Z-Image", r"(^|\.)layers\.\d+\.attention\.(qkv|q_norm)\.", 3840, ORIGINAL, "zimage"),
    Kind("Z-Image", r"(^|\.)layers\.\d+\.attention\.to_q\.", 3840, OF_DIFFUSERS, "zimage"),
    Kind("Z-Image", r"(^|\.)layers\.\d+\.adaLN_modulation\.0\."),
    Kind("Lumina 2", r"(^|\.)(cap_embedder\.0|time_caption_embed)\."),
    Kind("Stable Diffusion 3.5 Medium", r"^transformer_blocks\.\d+\.attn2\.norm_q", None, OF_DIFFUSERS, "sd3"),
    Kind("Stable Diffusion 3.5 or Flux.1", r"^transformer_blocks\.\d+\.attn\.norm_added_q", None, OF_DIFFUSERS, "sd3"),
    Kind("Stable Diffusion 3", r"^transformer_blocks\.\d+\.attn\.add_q_proj", None, OF_DIFFUSERS, "sd3"),
    Kind(f"a refiner of {SDXL}, which cannot be trained", r"^conditioner\.embedders\.0\.model\."),
    Kind(SDXL, r"^conditioner\.embedders\.|diffusion_model\.label_emb\.", family="sdxl"),
    Kind("Stable Diffusion 2", r"^cond_stage_model\.model\.", family="sd15"),
    Kind("Stable Diffusion 1.5", r"^cond_stage_model\.transformer\.|diffusion_model\.input_blocks\.",
         family="sd15"),
    Kind("a U-Net (Stable Diffusion 1, 2 or XL)", r"^(down_blocks|up_blocks|mid_block)\.", None, OF_DIFFUSERS),
    Kind("an autoencoder", r"^(encoder|decoder)\.(conv_in|down|up|mid)"),
    Kind("a small autoencoder (TAESD)", r"^(encoder|decoder)\.layers\.\d+\."),
    Kind("the text encoder T5", r"^encoder\.block\.\d+\.layer"),
    Kind("a CLIP text encoder", r"^text_model\."),
    Kind("a language model, such as the text encoders Qwen3 and Qwen2.5-VL", r"^(model\.)?layers\.\d+\.self_attn\."),
    Kind("a textual inversion",
         r"^(em[bp]_params|string_to_param)|^clip_[lg](_out)?$|^t5(xxl|_out)?$|^bundle_emb\."),
)  # fmt: skip
FLUX_2 = ("klein 4B", 3072), ("klein 9B", 4096), ("dev", 6144)  # by width
# LoRAs of other models, most specific first; the names have dots or underscores. ``inputs``: those of a first factor.
LORAS = (
    Kind("AuraFlow", r"joint_transformer_blocks|double_layers|single_layers"),
    Kind("Flux 3", r"(^|[._])(txt_)?mode_blocks[._]|early_stream_modulations"),
    *(Kind(f"FLUX.2 {version}", r"to_qkv_mlp_proj|[._]ff(_context)?[._]linear_in", width)
      for version, width in FLUX_2),
    *(Kind(f"FLUX.2 {version}", r"(double|single)_blocks[._]\d+[._]((img|txt)_attn|(img|txt)_mlp[._]0|linear1)", width)
      for version, width in FLUX_2[1:]),
    Kind("FLUX.2 klein 4B", r"single_blocks[._]\d+[._]linear2", 4 * 3072),
    Kind("FLUX.2 klein 4B", r"double_blocks[._]\d+[._](img|txt)_mlp[._]2", 3 * 3072),
    *(Kind(f"FLUX.2 {version}", r"single_transformer_blocks[._]\d+[._]attn[._]to_out", 4 * width)
      for version, width in FLUX_2),
    Kind("FLUX.2", r"to_qkv_mlp_proj|[._]ff(_context)?[._]linear_(in|out)|(double|single)_stream_modulation"),
    Kind("Flux.1", r"single_blocks[._]\d+[._]linear2", 5 * 3072),
    Kind("Flux.1", r"double_blocks[._]\d+[._](img|txt)_mlp[._]2", 4 * 3072),
    Kind("Flux.1", r"single_transformer_blocks[._]\d+[._](proj_mlp|proj_out|norm|attn[._]to_[qkv][._])"),
    Kind("Flux.1 or FLUX.2 klein 4B", r"single_transformer_blocks|double_blocks|single_blocks"),
    Kind("Qwen-Image-2.1", r"transformer_blocks[._]\d+[._]img_mlp[._](proj|gate_layer|gate_up|out)[._]"),
    Kind("Qwen-Image", r"(img|txt)_mlp|img_mod[._]1|txt_mod[._]1"),
    Kind("Qwen-Image", r"transformer_blocks[._](3[89]|[45]\d)[._]attn[._](to_|add_)", 3072),
    Kind("Wan", r"(^|[._])blocks[._]\d+[._](self_attn|cross_attn)"),
    Kind("Z-Image", r"(^|[._])layers[._]\d+[._](attention[._](to_[qkv]|to_out|qkv|out)|feed_forward[._]w[13])", 3840),
    Kind("Z-Image", r"(^|[._])(layers|refiner)[._]\d+[._]adaLN_modulation[._]0"),
    Kind("Z-Image", r"(^|[._])(layers|refiner)[._]\d+[._]feed_forward[._]w2", 10240),
    Kind("Lumina 2", r"(^|[._])(layers|refiner)[._]\d+[._](attn[._]|adaLN_modulation[._]1|norm1[._]linear)"),
    Kind("Lumina 2", r"(^|[._])(layers|refiner)[._]\d+[._]attention[._]", 2304),
    Kind("Z-Image or Lumina 2", r"noise_refiner|context_refiner|(^|[._])layers[._]\d+[._](attention|feed_forward)[._]"),
    Kind("PixArt or LTX", r"transformer_blocks[._]\d+[._]attn1[._].*"),
    Kind("Stable Cascade", r"lora_prior_|prior\."),
)  # fmt: skip
JOINT = {3072: "Flux.1, FLUX.2 klein 4B or Qwen-Image", 4096: "FLUX.2 klein 9B", 6144: "FLUX.2 dev"}
"""Other models whose joint attention has the names that SD3's has, by its width."""
PARTS = {
    "autoencoder": "first_stage_model.", "CLIP-L": "text_encoders.clip_l.", "CLIP-G": "text_encoders.clip_g.",
    "T5": "text_encoders.t5xxl.", "CLIP": "cond_stage_model.",
}  # fmt: skip
"""Prefixes of the parts of a whole model in the original layout, besides the denoiser."""


def matches(kinds: Sequence[Kind], shapes: Shapes) -> Iterator[tuple[Kind, str]]:
    """Yield the kinds that a file may be of, the most specific first, each with the first tensor that shows it."""
    for kind in kinds:
        for name, shape in shapes.items():
            fits = kind.inputs is None or (len(shape) > 1 and shape[1] == kind.inputs)
            if fits and re.search(kind.pattern, name):
                yield kind, name
                break


def kind_of(shapes: Shapes) -> Kind | None:
    """Return the kind of a file that is not a LoRA; None if it is unknown."""
    return next((kind for kind, _ in matches(FILES, shapes)), None)


def parts_in(shapes: Shapes) -> list[str]:
    """Return the parts of a whole model that a file has besides the denoiser."""
    return [part for part, prefix in PARTS.items() if any(name.startswith(prefix) for name in shapes)]
