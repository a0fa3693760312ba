"""The single files of Stable Diffusion XL."""

from __future__ import annotations

from collections.abc import Mapping

from simpletune.models.sdxl.config import bundled_configs
from simpletune.models.shared.model_config import ModelConfig
from simpletune.models.shared.single_file import FileLayout, SingleFile
from simpletune.models.unet.files import inferred, origins

MARKS = ("v_pred", "ztsnr")
"""Empty tensors of a file whose UNet predicts v, with a terminal SNR of zero."""


def _infer(shapes: Mapping[str, list[int]]) -> ModelConfig:
    """The UNet's configuration, from its tensors' shapes by original names."""
    added = shapes["label_emb.0.0.weight"][1]
    return {**inferred(shapes, bundled_configs()["sdxl"]["unet"]), "projection_class_embeddings_input_dim": added}


def version_of(file: SingleFile) -> str:
    """The version of a file, a key of ``bundled_configs``, by the marks in it."""
    predicts_v, zero_snr = (mark in file.header for mark in MARKS)
    if not predicts_v:
        return "sdxl"
    return "sdxl_v_zero_snr" if zero_snr else "sdxl_v"


LAYOUT = FileLayout(
    family="SDXL",
    denoiser="unet",
    marker="label_emb.0.0.weight",
    prefixes={
        "vae": "first_stage_model.",
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.",
    },
    infer=_infer,
    origins=origins,
)
