"""``make tiny-sdxl``: make the tiny Stable Diffusion XL that ships with the tool.

Autoencoder, CLIP encoders and tokenizers are the tiny SD3's; the UNet is trained by ``simpletune train`` on captioned
pictures, from scratch to predict noise, then to predict v with a terminal SNR of zero, and exported with them in half
precision. Finished steps are skipped; an interrupted training resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tiny_models import make_tiny_sd3, networks, tiny_sd3, train_text_encoders
from simpletune.data import demo
from simpletune.models.objectives.ddpm import ZERO_SNR
from simpletune.system.atomic import new_folder

FIRST, SECOND = Path("configs/more/tiny_sdxl_from_scratch.json"), Path("configs/more/tiny_sdxl_v.json")
CARD = Path(__file__).with_name("tiny_sdxl_card.md")
IMAGES = 6_144
CLIP_L, CLIP_G = train_text_encoders.CLIP_WIDTHS
SIZE_WIDTH = 16  # of the embedding of each of the six sizes
COMPONENTS = {
    "scheduler": ("diffusers", "DDIMScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
UNET: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "block_out_channels": (64, 96, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (2, 3, 3),  # heads, each of width 32
    "cross_attention_dim": CLIP_L + CLIP_G,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": SIZE_WIDTH,
    "projection_class_embeddings_input_dim": CLIP_G + 6 * SIZE_WIDTH,
    "sample_size": 8,
}
"""Stable Diffusion XL's levels: none, one and more transformer blocks in each attention."""


def assemble(folder: Path, source: Path, seed: int) -> None:
    """Put the parts of a tiny SD3 and an untrained UNet into one pipeline folder, fp32.

    Args:
        folder: must not exist, or be empty.
        source: the tiny SD3's folder.
        seed: seed of the UNet's weights, which `init: random` ignores.
    """
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModelWithProjection

    with new_folder(folder) as sibling:
        for name in ("tokenizer", "tokenizer_2"):
            shutil.copytree(source / name, sibling / name)
        for name in ("text_encoder", "text_encoder_2"):
            encoder = CLIPTextModelWithProjection.from_pretrained(source / name, local_files_only=True)
            is_projected = COMPONENTS[name][1] == "CLIPTextModelWithProjection"
            tiny_sd3.save_model(encoder if is_projected else encoder.text_model, sibling / name, "fp32")
        vae = AutoencoderKL.from_pretrained(source / "vae", local_files_only=True)
        vae.register_to_config(shift_factor=None)  # diffusers' pipeline for SDXL ignores it
        tiny_sd3.save_model(vae, sibling / "vae", "fp32")
        with tiny_sd3.seeded(seed, 3):
            tiny_sd3.save_model(UNet2DConditionModel(**UNET), sibling / "unet", "fp32")
        write_scheduler_and_index(sibling, {})


def write_scheduler_and_index(folder: Path, changes: dict[str, Any]) -> None:
    """Write `scheduler/`, Stable Diffusion XL's with changes, and `model_index.json`."""
    import diffusers

    noise = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    settings = {**noise, "clip_sample": False, "set_alpha_to_one": False, **changes}
    diffusers.DDIMScheduler(**settings).save_pretrained(folder / "scheduler")
    index: dict[str, object] = {
        "_class_name": "StableDiffusionXLPipeline",
        "_diffusers_version": diffusers.__version__,
        "force_zeros_for_empty_prompt": False,  # dropped captions were encoded as an empty prompt
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
    }
    index |= {name: list(source) for name, source in COMPONENTS.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def export(pipeline: Path, runs: Sequence[Path], folder: Path, dtype: networks.Dtype) -> None:
    """Write the trained pipeline in half precision, with its card and what its runs left.

    Args:
        pipeline: the folder from ``assemble``.
        runs: both trainings of the UNet.
        folder: folder to write; replaced if it exists.
        dtype: type of all weights.
    """
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    whole = StableDiffusionXLPipeline.from_pretrained(pipeline, unet=None, local_files_only=True)
    first, second = runs
    unet = UNet2DConditionModel.from_pretrained(second / "unet", local_files_only=True)
    shutil.rmtree(folder, ignore_errors=True)
    with new_folder(folder) as sibling:
        models = {"unet": unet} | {name: getattr(whole, name) for name in ("vae", "text_encoder", "text_encoder_2")}
        for name, model in models.items():
            tiny_sd3.save_model(model, sibling / name, dtype)
        for name in ("tokenizer", "tokenizer_2"):
            shutil.copytree(pipeline / name, sibling / name)
        write_scheduler_and_index(sibling, {"prediction_type": "v_prediction", **ZERO_SNR})
        earlier = {FIRST.name: FIRST, "first_summary.json": first / "summary.json"}
        make_tiny_sd3.write_record(sibling, CARD, SECOND, second, "unet", earlier)


def make(parts: Path, runs: Path, folder: Path, overrides: list[str]) -> None:
    """Run every step that has not been completed yet.

    Args:
        parts: folder for the inputs of the training.
        runs: folder of the runs, as in the configurations.
        folder: for the result.
        overrides: ``key.path=value`` overrides of both configurations, for a shorter trial.
    """
    if not (parts / "pipeline").exists():
        assemble(parts / "pipeline", demo.MODELS[demo.TINY_SD3], seed=0)
    if not (parts / "pictures").exists():
        make_tiny_sd3.write_images(parts / "pictures", IMAGES, seed=7)
    first, second = runs / "tiny-sdxl", runs / "tiny-sdxl-v"
    make_tiny_sd3.train(FIRST, first, overrides)
    make_tiny_sd3.train(SECOND, second, [*overrides, f"model.unet={first / 'unet'}"])
    export(parts / "pipeline", (first, second), folder, "fp16")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="make the tiny Stable Diffusion XL")
    parser.add_argument("--parts", type=Path, default=Path("runs/tiny-sdxl-parts"), help="folder for inputs")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=demo.MODELS[demo.TINY_SDXL], help="folder for the result")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for a trial")
    arguments = parser.parse_args()
    make(arguments.parts, arguments.runs, arguments.out, arguments.overrides)
