"""Public configurations of users: keys and numbers as they are, names, paths and prompts replaced.

Each imports to what ``check`` accepts, apart from files that are not here, and to what its trainer would have done; or
it is refused by name. Origins are repositories and paths, or what a public article shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_every_key import keys_of, lists_of
from test_import import at

from simpletune.commands.importers.command_lines import TOOK
from simpletune.commands.importers.config_files import read_any
from simpletune.commands.importers.importing import import_file
from simpletune.commands.importers.kohya import flatten
from simpletune.system.options import Json, UserError

FILES = Path(__file__).parent / "public"
IMPORTED: list[tuple[str, str, Json]] = [
    ("kohya/loha.toml", "cyber-meow/sd_training_config: loha_config.toml",
     {"adapter": {"method": "loha", "rank": 8, "targets": "all_linear"}, "model.family": "sd15", "text": "unset",
      "optimizer.lr": 2e-4, "train.epochs": 2, "objective.min_snr_gamma": 5}),
    ("kohya/attn_mlp.toml", "evanhu1/easylora: lora_config.toml",
     {"adapter.method": "lora", "adapter.rank": 32, "adapter.alpha": 8, "adapter.conv_rank": "unset",
      "schedule.name": "cosine_with_restarts", "text.lora.learning_rate": 2e-4}),
    ("kohya/xl_lora.toml", "coder-gx/my_SDXL: SDXL-Train/train_config/XL_LoRA_config/config_file.toml",
     {"model.family": "sdxl", "adapter.rank": 64, "adapter.conv_rank": 32, "adapter.conv_alpha": 16, "text": "unset",
      "optimizer.name": "adafactor", "train.clip_norm": None, "schedule.warmup_steps": 80}),
    ("kohya/xl_whole.toml", "coder-gx/my_SDXL: SDXL-Train/train_config/XL_config/config_file.toml",
     {"model.family": "sdxl", "adapter": {"method": "full"}, "train.steps": 20, "schedule.warmup_steps": 19,
      "objective.max_timestep": 100, "precision.weights": "fp32"}),
    ("kohya_ss/loha_xl.json", "Albeforia/kohya_ss: presets/lora/SDXL - LoHA by AI_Characters.json",
     {"model.family": "sdxl", "adapter.method": "loha", "adapter.rank": 32}),
    ("kohya_ss/standard_old.json", "Albeforia/kohya_ss: presets/lora/user_presets/lora_config_bra_v0.json",
     {"model.family": "sd15", "adapter.method": "lora", "adapter.rank": 128, "adapter.alpha": 96,
      "adapter.dropout": 0.2, "adapter.max_norm": 2, "precision.compute": "fp32", "train.epochs": 10,
      "validation.height": 704}),
    ("kohya_ss/lokr_xl.json", "an article on training_params of a cloud service",
     {"model.family": "sdxl", "adapter.method": "lokr", "adapter.rank": 64, "adapter.factor": -1,
      "adapter.conv_rank": 64, "optimizer.name": "prodigy", "objective.offset_noise": "unset", "text": "unset"}),
    ("kohya_ss/standard_xl.json", "an article, Training Parameters by Haoming",
     {"model.family": "sdxl", "adapter.method": "lora", "adapter.rank": 32, "adapter.alpha": 16,
      "objective.offset_noise": 0.0357, "text.lora.learning_rate": 1e-4, "train.epochs": 36}),
    ("simpletuner/xl/config.json", "P5ina/zephyr-pbr-training: config.json, config/multidatabackend.json",
     {"model.family": "sdxl", "adapter.method": "lora", "adapter.rank": 64, "data.aspect": "square",
      "data.crop": "random", "data.repeats": 2, "schedule.name": "polynomial", "schedule.end": 0.004}),
    ("simpletuner/lycoris_full/config.json",
     "LShiftLess/SimpleTuner: config/config.json, lycoris_config.json, multidatabackend.json",
     {"adapter": {"method": "full"}, "model.family": "sd3", "train.epochs": 1, "data.resolution": 1504}),
    ("simpletuner/full/config.json", "minha12/SimpleTuner: config/config.json",
     {"adapter": {"method": "full"}, "model.family": "sd3", "train.gradient_accumulation": 4, "optimizer.lr": 5e-6}),
    ("simpletuner/int8.json", "eriksjaastad/Flo-Fi: config/config.json",
     {"model.family": "sdxl", "precision.weights": "int8-quanto", "adapter.alpha": 8, "schedule.name": "cosine",
      "train.epochs": 10, "validation.every": None}),
    ("simpletuner/qwen.json", "akuratabot/lora-trainer: config/config.json, shortened",
     {"model.family": "qwen_image", "model.pretrained": "Qwen/Qwen-Image", "adapter.targets": "attention_image",
      "adapter.rank": 64, "objective.shift": 1.73, "precision.weights": "bf16"}),
    ("onetrainer/xl_lora_old.json", "sangoi-exe/OneTrainer: training_presets/#sdxl 1.0 LoRA.json",
     {"model.family": "sdxl", "adapter.rank": 16, "adapter.conv_rank": 16, "precision.weights": "bf16",
      "train.batch_size": 4, "text": "unset"}),
    ("onetrainer/sd3_lora_old.json", "sangoi-exe/OneTrainer: training_presets/#sd 3 LoRA.json",
     {"model.family": "sd3", "objective.sigma": "logit_normal", "precision.weights": "bf16"}),
    ("onetrainer/tiny.json", "onerok/OneTrainer: training_presets/#sd 1.5 LoRA (tiny-sd test).json",
     {"model.family": "sd15", "adapter.targets": "attention_mlp", "adapter.conv_rank": "unset", "train.epochs": 1}),
    ("onetrainer/dora_v6.json", "sangoi-exe/OneTrainer: Nat.cyb70.001.cli.json, shortened",
     {"model.family": "sdxl", "adapter.method": "dora", "adapter.rank": 32, "memory.checkpointing": "all",
      "precision.weights": "bf16", "train.clip_norm": None, "optimizer.name": "prodigy", "validation.seed": 1234}),
    ("ai_toolkit/xl.yaml", "an installation script's SDXL template",
     {"model.family": "sdxl", "adapter.rank": 16, "train.steps": 1500, "precision.compute": "fp32"}),
    ("ai_toolkit/thorough.yaml", "an article, Training Presets",
     {"model.family": "sdxl", "adapter.rank": 64, "adapter.alpha": 32, "objective.offset_noise": 0.1,
      "schedule.warmup_steps": "unset"}),
    ("ai_toolkit/low_vram.yaml", "a notebook's configuration",
     {"model.family": "sdxl", "data.resolution": 1024, "precision.compute": "fp16"}),
    ("diffusers/dreambooth_lora_xl.sh", "modelscope/ms-swift: run_train_dreambooth_lora_sdxl.sh",
     {"model.family": "sdxl", "adapter.method": "lora", "adapter.rank": 4, "train.steps": 500}),
    ("diffusers/text_to_image_xl.sh", "modelscope/ms-swift: run_train_text_to_image_sdxl.sh",
     {"model.family": "sdxl", "adapter.method": "full", "data.flip": True, "data.caption_dropout": 0.2}),
    ("diffusers/text_to_image_lora.sh", "modelscope/ms-swift: run_train_text_to_image_lora.sh",
     {"model.family": "sd15", "adapter.method": "lora", "data.caption_column": "text", "train.epochs": 100}),
    ("diffusers/sd3_lora.sh", "lvkunpeng01/Test_paddle: CE/ppdiffusers/dreambooth-sd3/lora_train.sh",
     {"model.family": "sd3", "adapter.method": "lora", "data.path": "dog",
      "model.pretrained": "stabilityai/stable-diffusion-3-medium-diffusers"}),
]  # fmt: skip
IN_FP16 = "onetrainer/z_image.json", "gesen2egee/OneTrainer: training_presets/, shortened"
REFUSED = [
    ("kohya/db.toml", "cyber-meow/sd_training_config: kohya_db_config.toml", "network_module names no network"),
    ("kohya/flux.toml", "finesseus/sd-scripts: config_file.toml, shortened", "(Flux) is not supported"),
    ("kohya_ss/flux.json", "bmaltais/kohya_ss: presets/lora/flux1D - adamw8bit fp8.json", "Flux1 is not supported"),
    ("ai_toolkit/controlnet.yaml", "a guide to ControlNet with ai-toolkit", "network.type controlnet"),
    ("diffusers/controlnet_xl.sh", "modelscope/ms-swift: run_train_controlnet_sdxl.sh", "train_controlnet_sdxl.py"),
]


@pytest.mark.parametrize(("name", "origin", "expected"), IMPORTED, ids=[name for name, *_ in IMPORTED])
def test_a_public_file_imports_to_what_its_trainer_would_have_done(name: str, origin: str, expected: Json) -> None:
    found = import_file(FILES / name)
    assert {path: at(found.config, path) for path in expected} == expected, origin
    assert not found.problems


def test_a_public_file_that_trains_z_image_in_fp16_is_imported_with_that_problem() -> None:
    name, origin = IN_FP16
    found = import_file(FILES / name)
    assert found.config["model"]["family"] == "zimage", origin
    assert [problem.path for problem in found.problems] == ["precision.compute"]
    content = read_any(FILES / name)
    if isinstance(content, dict):
        content.pop(TOOK, None)
    for key in keys_of(flatten(content) if isinstance(content, dict) and "kohya" in name else content):
        leaf = key.rpartition(".")[2].replace("-", "_")
        told = [line.key for line in found.lines]
        assert lists_of(found, leaf) or any(f".{leaf}." in f".{each}" for each in told), (name, key)


@pytest.mark.parametrize(("name", "origin", "words"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_public_file_is_refused_by_name(name: str, origin: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        import_file(FILES / name)
    assert words in str(refused.value), origin
