"""Configurations in the forms of other trainers, written from the tables of docs/how-to/from-other-trainers.md."""

from __future__ import annotations

import json
from pathlib import Path

from simpletune.system.options import Json

IMAGES = "data/my_pictures"
STUDY_RUNS = {"full": 24_000, "lora_r1": 24_000, "lora_r16": 24_000, "lora_r64": 140_000}
"""Steps of the runs of a study of SD3 Medium that used SimpleTuner."""
STUDY_DATA: list[Json] = [
    {
        "id": "bucketed", "type": "local", "instance_data_dir": IMAGES, "crop": False, "resolution": 1024,
        "resolution_type": "pixel_area", "repeats": 10, "caption_strategy": "textfile", "minimum_image_size": 768,
    },
    {
        "id": "square", "type": "local", "instance_data_dir": IMAGES, "crop": True, "crop_aspect": "square",
        "resolution": 1024, "resolution_type": "pixel_area", "repeats": 10, "caption_strategy": "textfile",
    },
    {"id": "text", "dataset_type": "text_embeds", "default": True},
]  # fmt: skip


def study(run: str) -> Json:
    """SimpleTuner's config.json of one run of the study, with dashes and strings as its files have them."""
    rank = run.removeprefix("lora_r")
    kind: Json = {"--model_type": "full", "--base_model_precision": "no_change", "--checkpoints_total_limit": 2}
    if rank.isdigit():
        kind = {
            "--model_type": "lora", "--lora_type": "standard", "--lora_rank": rank,
            "--base_model_precision": "int8-quanto", "--checkpoints_total_limit": "5",
        }  # fmt: skip
    return kind | {
        "--model_family": "sd3",
        "--pretrained_model_name_or_path": "stabilityai/stable-diffusion-3-medium-diffusers",
        "--data_backend_config": "config/multidatabackend.json", "--output_dir": f"runs/sd3_medium_study_{run}",
        "--mixed_precision": "bf16", "--optimizer": "adamw_bf16", "--learning_rate": "1e-5",
        "--lr_scheduler": "polynomial", "--lr_warmup_steps": "100", "--max_train_steps": STUDY_RUNS[run],
        "--train_batch_size": "1", "--gradient_checkpointing": "true", "--seed": "42",
        "--caption_dropout_probability": "0.05", "--resolution": 1024, "--resolution_type": "pixel_area",
        "--minimum_image_size": 768, "--checkpointing_steps": "500", "--validation_steps": "500",
        "--validation_resolution": "1024x1024", "--validation_guidance": "3.0",
        "--validation_num_inference_steps": "20", "--validation_seed": "42",
        "--validation_prompt": "A portrait of a woman in a white dress",
    }  # fmt: skip


def write(folder: Path, **files: object) -> Path:
    """Write files, ``__`` standing for a slash and ``___`` for the dot; return the first.

    Args:
        files: JSON values, or the text of other files.
    """
    places = []
    for name, content in files.items():
        file = folder / name.replace("___", ".").replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        places.append(file)
    return places[0]
