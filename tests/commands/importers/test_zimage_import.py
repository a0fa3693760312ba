"""Other trainers' configurations for Z-Image, base, Turbo under its assistant, and de-distilled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peer_configs
import pytest
import yaml

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.models.zimage.zimage_files import BASE, TURBO
from simpletune.models.zimage.zimage_option import ASSISTANT
from simpletune.system.options import Json

V1 = ASSISTANT.replace("_v2", "_v1")
DISTILLED = "ostris/Z-Image-De-Turbo"
WITHOUT_REFINERS = [{"pattern": "*_refiner", "rank": 0}]


def checked(found: ImportResult) -> Json:
    assert not [line.key for line in found.lines if line.became == "unknown"], "every key is known"
    assert found.config["model"]["family"] == "zimage"
    problems = {problem.path for problem in found.problems}
    assert problems <= {"model.transformer"}, "a file that is not here"
    return found.config


def ai_toolkit(folder: Path, model: Json, sample: Json | None = None) -> Json:
    process = {
        "type": "diffusion_trainer", "network": {"type": "lora", "linear": 32, "linear_alpha": 32},
        "train": {"dtype": "bf16", "steps": 500, "lr": 1e-4, "optimizer": "adamw8bit", "timestep_type": "sigmoid"},
        "model": {"name_or_path": BASE, "quantize": True, "qtype": "qfloat8"} | model,
        "datasets": [{"folder_path": "pics", "resolution": [512, 768]}], "sample": sample or {},
    }  # fmt: skip
    job = {"job": "extension", "config": {"name": "mine", "process": [process]}}
    return checked(import_file(peer_configs.write(folder, config___yaml=yaml.safe_dump(job))))


def test_ai_toolkit(tmp_path: Path) -> None:
    """Its guidance is ordinary; its layers are those of the blocks for both sequences."""
    found = ai_toolkit(tmp_path, {"arch": "zimage"}, {"guidance_scale": 4, "sample_steps": 30})
    assert found["adapter"] == {
        "method": "lora", "targets": "all_linear", "layers": WITHOUT_REFINERS, "rank": 32, "alpha": 32,
    }  # fmt: skip
    assert (found["validation"]["guidance"], found["validation"]["steps"]) == (4, 30)
    assert found["model"] == {"family": "zimage", "pretrained": BASE}
    turbo = ai_toolkit(tmp_path, {"arch": "zimage:turbo", "name_or_path": TURBO, "assistant_lora_path": ASSISTANT})
    assert turbo["model"] == {"family": "zimage", "pretrained": TURBO, "loras": [f"training:{ASSISTANT}"]}
    other = {"arch": "zimage:deturbo", "name_or_path": DISTILLED, "extras_name_or_path": TURBO}
    assert ai_toolkit(tmp_path, other)["model"] == {"family": "zimage", "pretrained": TURBO, "transformer": DISTILLED}


def simpletuner(folder: Path, **settings: Any) -> Json:
    whole = {"model_family": "z_image", "model_type": "lora", "lora_rank": 16, "lora_type": "standard",
             "base_model_precision": "int8-sdnq", "max_train_steps": 100, "optimizer": "adamw_bf16"}  # fmt: skip
    sets = [{"id": "a", "type": "local", "instance_data_dir": "pics"}]
    file = peer_configs.write(folder, config___json=whole | settings, data___json=sets)
    return checked(import_file(file, folder / "data.json"))


@pytest.mark.parametrize(
    ("flavour", "model"),
    [
        ("base", {"pretrained": BASE}), (None, {"pretrained": TURBO, "loras": [f"training:{ASSISTANT}"]}),
        ("turbo", {"pretrained": TURBO, "loras": [f"training:{V1}"]}),
        ("turbo-ostris-v2", {"pretrained": TURBO, "loras": [f"training:{ASSISTANT}"]}),
        ("ostris-de-turbo", {"pretrained": TURBO, "transformer": DISTILLED}),
    ],
)  # fmt: skip
def test_simpletuner(flavour: str | None, model: Json, tmp_path: Path) -> None:
    """Its flavours, of which Turbo's bring their assistant."""
    found = simpletuner(tmp_path, **({} if flavour is None else {"model_flavour": flavour}))
    assert found["model"] == {"family": "zimage", **model}
    assert found["adapter"].get("targets", "attention") == "attention" and found["objective"] == {"shift": 3.0}


def test_simpletuner_s_own_assistant_guidance_and_length(tmp_path: Path) -> None:
    given: Json = {"assistant_lora_path": "me/mine", "assistant_lora_weight_name": "a.safetensors"}
    given |= {"validation_guidance": 3.0, "tokenizer_max_length": 256}
    found = simpletuner(tmp_path, model_flavour="turbo", **given)
    assert found["model"]["loras"] == ["training:me/mine/a.safetensors"] and found["model"]["text_length"] == 256
    assert found["validation"]["guidance"] == 4.0
    off = simpletuner(tmp_path, model_flavour="turbo", disable_assistant_lora=True, validation_guidance=1.0)
    assert "loras" not in off["model"] and off["validation"]["guidance"] == 1.0


def test_onetrainer(tmp_path: Path) -> None:
    """Its preset, whose filter leaves the refiners out; its samples' guidance, which is ordinary."""
    whole = {
        "base_model_name": BASE, "model_type": "Z_IMAGE", "learning_rate": 3e-4, "training_method": "LORA",
        "peft_type": "LORA", "lora_rank": 16, "lora_alpha": 1.0, "layer_filter_preset": "attn-mlp",
        "layer_filter": "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*",
        "layer_filter_regex": True, "train_dtype": "BFLOAT_16", "timestep_distribution": "LOGIT_NORMAL",
        "text_encoder_sequence_length": 256,
        "samples": [{"prompt": "a dot", "cfg_scale": 4.0, "diffusion_steps": 30}],
        "transformer": {"weight_dtype": "INT_W8A8", "model_name": "https://huggingface.co/a/b/blob/main/c.safetensors"},
    }  # fmt: skip
    file = peer_configs.write(tmp_path, config___json=whole, data___json=[{"path": "pics"}])
    result = import_file(file, tmp_path / "data.json")
    found = checked(result)
    assert found["adapter"]["targets"] == "attention_mlp" and found["adapter"]["layers"] == WITHOUT_REFINERS
    assert found["model"] == {"family": "zimage", "pretrained": BASE, "text_length": 256}
    assert (found["validation"]["guidance"], found["validation"]["steps"]) == (4.0, 30)
    (left,) = [line for line in result.lines if line.key == "transformer.model_name"]
    assert left.became == "left out" and "Download the file and set model.transformer" in left.why


@pytest.mark.parametrize(("base", "shift"), [(BASE, 6.0), (TURBO, 3.0)])
def test_diffusers_script(base: str, shift: float, tmp_path: Path) -> None:
    """Its uniform draws from the scheduler's shifted table."""
    words = (
        f"accelerate launch train_dreambooth_lora_z_image.py --pretrained_model_name_or_path={base} --rank=8 "
        "--instance_data_dir=pics --instance_prompt='a photo of sks' --max_train_steps=100 --guidance_scale=5.0 "
        "--mixed_precision=bf16 --resolution=1024 --train_batch_size=1 --output_dir=out --use_8bit_adam "
        "--max_sequence_length=256"
    )
    found = checked(import_file(peer_configs.write(tmp_path, config___sh=f"{words}\n")))
    assert found["objective"] == {"sigma": "uniform", "shift": shift}
    assert found["model"] == {"family": "zimage", "pretrained": base, "text_length": 256}
    assert found["adapter"] | {"method": "lora", "targets": "attention", "rank": 8} == found["adapter"]
    assert "guidance" not in found.get("validation", {})


def musubi(folder: Path, more: str = "") -> Json:
    """The command of its page."""
    words = (
        "accelerate launch src/musubi_tuner/zimage_train_network.py --dit z_image_bf16.safetensors "
        "--vae ae.safetensors --text_encoder qwen --dataset_config data.toml --sdpa --mixed_precision bf16 "
        "--timestep_sampling shift "
        "--weighting_scheme none --discrete_flow_shift 2.0 --optimizer_type adamw8bit --learning_rate 1e-4 "
        "--gradient_checkpointing --network_module networks.lora_zimage --network_dim 32 --max_train_epochs 16 "
        "--seed 42 --output_name style --fp8_base --fp8_scaled --fp8_llm"
    )
    sets = '[general]\nresolution = [768, 768]\n[[datasets]]\nimage_directory = "pics"\ncache_directory = "cache"\n'
    peer_configs.write(folder, data___toml=sets)
    return checked(import_file(peer_configs.write(folder, config___sh=f"{words} {more}\n")))


def test_musubi_tuner(tmp_path: Path) -> None:
    """Its scale of guidance is one less; LoRAs of its base weights that are assistants are marked."""
    (tmp_path / "prompts.txt").write_text("a dog --w 512 --h 512 --l 4\n")
    found = musubi(
        tmp_path,
        "--base_weights zimage_turbo_training_adapter_v2.safetensors style.safetensors --sample_prompts prompts.txt",
    )
    assert found["model"] == {
        "family": "zimage", "pretrained": BASE, "transformer": "z_image_bf16.safetensors",
        "loras": ["training:zimage_turbo_training_adapter_v2.safetensors", "style.safetensors"],
    }  # fmt: skip
    assert found["adapter"] == {
        "method": "lora", "targets": "attention_mlp", "layers": WITHOUT_REFINERS, "rank": 32, "alpha": 1.0,
    }  # fmt: skip
    assert (found["objective"], found["precision"]["weights"]) == ({"sigma": "logit_normal", "shift": 2.0}, "int8")
    assert found["validation"]["guidance"] == 5.0
