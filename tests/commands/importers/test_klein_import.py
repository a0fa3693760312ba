"""Other trainers' configurations for FLUX.2 klein 4B, and for its neighbours, which are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peer_configs
import pytest
import yaml

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.models.flux2.flux2_files import KLEIN
from simpletune.system.options import Json, UserError

NINE, DEV = "black-forest-labs/FLUX.2-klein-base-9B", "black-forest-labs/FLUX.2-dev"
LAYERS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"]


def ai_toolkit(folder: Path, model: Json | None = None, data: Json | None = None) -> ImportResult:
    process = {
        "type": "diffusion_trainer", "network": {"type": "lora", "linear": 32, "linear_alpha": 32},
        "train": {"dtype": "bf16", "steps": 500, "lr": 1e-4, "optimizer": "adamw8bit", "timestep_type": "sigmoid"},
        "model": {"arch": "flux2_klein_4b", "name_or_path": KLEIN, "quantize": True} | (model or {}),
        "datasets": [{"folder_path": "pics", "resolution": [512, 768]} | (data or {})],
    }  # fmt: skip
    job = {"job": "extension", "config": {"name": "mine", "process": [process]}}
    return import_file(peer_configs.write(folder, config___yaml=yaml.safe_dump(job)))


def simpletuner(folder: Path, settings: Json | None = None, data: Json | None = None) -> ImportResult:
    whole = {"model_family": "flux2", "model_flavour": "klein-4b", "model_type": "lora", "lora_rank": 16,
             "lora_type": "standard", "base_model_precision": "int8-sdnq", "max_train_steps": 100,
             "tokenizer_max_length": 512, "flow_schedule_shift": 3, "optimizer": "adamw_bf16"}  # fmt: skip
    whole = {key: value for key, value in (whole | (settings or {})).items() if value is not None}
    sets = [{"id": "a", "type": "local", "instance_data_dir": "pics"} | (data or {})]
    return import_file(peer_configs.write(folder, config___json=whole, data___json=sets), folder / "data.json")


def onetrainer(folder: Path, settings: Json | None = None) -> ImportResult:
    whole = {"model_type": "FLUX_2", "base_model_name": KLEIN, "training_method": "LORA", "peft_type": "LORA",
             "lora_rank": 16, "lora_alpha": 16, "layer_filter": "transformer_block", "layer_filter_preset": "blocks",
             "timestep_distribution": "LOGIT_NORMAL", "dynamic_timestep_shifting": True, "train_dtype": "BFLOAT_16",
             "text_encoder_sequence_length": 512} | (settings or {})  # fmt: skip
    return import_file(
        peer_configs.write(folder, config___json=whole, data___json=[{"path": "pics"}]), folder / "data.json"
    )


def adapter(found: ImportResult) -> Any:
    assert not [line.key for line in found.lines if line.became == "unknown"], "every key is known"
    assert found.config["model"]["family"] == "klein" and not found.problems
    return found.config["adapter"]


def test_ai_toolkit(tmp_path: Path) -> None:
    found = ai_toolkit(tmp_path)
    assert adapter(found) == {"method": "lora", "targets": "all_linear", "rank": 32, "alpha": 32}
    assert found.config["model"]["pretrained"] == KLEIN and found.config["precision"]["weights"] == "int8"
    assert found.config["objective"]["sigma"] == "logit_normal" and found.config["data"]["resolution"] == 768
    assert adapter(ai_toolkit(tmp_path, {"name_or_path": "/models/flux-2-klein-base-4b.safetensors"}))


def test_simpletuner(tmp_path: Path) -> None:
    found = simpletuner(tmp_path)
    assert adapter(found)["targets"] == LAYERS and found.config["model"]["pretrained"] == KLEIN
    assert found.config["objective"] == {"shift": 3}
    assert "t5_length" not in found.config["model"]
    for way in ({"model_flavour": None}, {"model_flavour": "klein-9b"}):
        with pytest.raises(UserError, match="FLUX.2 klein 9B"):
            simpletuner(tmp_path, way)


def test_onetrainer(tmp_path: Path) -> None:
    found = onetrainer(tmp_path)
    assert adapter(found) | {"targets": "all_linear", "rank": 16} == found.config["adapter"]
    assert found.config["objective"]["shift"] == "auto" and found.config["objective"]["sigma"] == "logit_normal"


@pytest.mark.parametrize(("base", "what"), [(NINE, "FLUX.2 klein 9B, whose licence is non-commercial"), (DEV, "dev")])
def test_other_models_of_flux_2_are_refused_by_name(base: str, what: str, tmp_path: Path) -> None:
    for read in (
        lambda: ai_toolkit(tmp_path, {"name_or_path": base}),
        lambda: simpletuner(tmp_path, {"pretrained_model_name_or_path": base}),
        lambda: onetrainer(tmp_path, {"base_model_name": base}),
    ):
        with pytest.raises(UserError, match=f"{what}.* is not supported: simpletune trains .*FLUX.2 klein 4B"):
            read()
    for arch, name in (("flux2_klein_9b", "klein 9B"), ("flux2", "dev")):
        with pytest.raises(UserError, match=rf"model.arch {arch} \(FLUX.2 {name}"):
            ai_toolkit(tmp_path, {"arch": arch})


def test_reference_pictures_are_refused(tmp_path: Path) -> None:
    for read in (
        lambda: ai_toolkit(tmp_path, data={"control_path": "before"}),
        lambda: simpletuner(tmp_path, data={"conditioning_data": "before"}),
    ):
        with pytest.raises(UserError, match="reference pictures, which are not trained on; without them it is another"):
            read()


def musubi(folder: Path, more: str = "", data: str = "") -> ImportResult:
    """The command of its page, with the small model."""
    words = (
        "accelerate launch src/musubi_tuner/flux_2_train_network.py --model_version klein-base-4b --dit "
        "flux-2-klein-base-4b.safetensors --vae ae.safetensors --text_encoder qwen --dataset_config data.toml --sdpa "
        "--mixed_precision bf16 --timestep_sampling flux2_shift --weighting_scheme none --optimizer_type adamw8bit "
        "--learning_rate 1e-4 --gradient_checkpointing --network_module networks.lora_flux_2 --network_dim 32 "
        "--max_train_epochs 16 --seed 42 --fp8_base --fp8_scaled --output_name style"
    )
    sets = f"""[general]
resolution = [768, 768]
caption_extension = ".txt"
enable_bucket = true

[[datasets]]
image_directory = "pics"
cache_directory = "cache"
num_repeats = 2
{data}"""
    peer_configs.write(folder, data___toml=sets)
    return import_file(peer_configs.write(folder, config___sh=f"{words} {more}\n"))


def test_musubi_tuner(tmp_path: Path) -> None:
    found = musubi(tmp_path)
    config = found.config
    assert not [line.key for line in found.lines if line.became == "unknown"]
    assert {problem.path for problem in found.problems} <= {"model.transformer"}  # which is not here
    assert config["model"] == {
        "family": "klein", "pretrained": KLEIN, "transformer": "flux-2-klein-base-4b.safetensors"
    }  # fmt: skip
    assert config["adapter"] == {"method": "lora", "targets": "all_linear", "rank": 32, "alpha": 1.0}
    assert (config["objective"], config["precision"]["weights"]) == ({"sigma": "logit_normal", "shift": "auto"}, "int8")
    assert (config["data"]["path"], config["data"]["resolution"], config["data"]["repeats"]) == ("pics", 768, 2)
    assert (config["train"]["epochs"], config["optimizer"]["lr"], config["name"]) == (16, 1e-4, "style")
    assert "datasets[0].image_directory" in {line.key for line in found.lines}


def test_musubi_tuners_other_models_and_references_are_refused(tmp_path: Path) -> None:
    for version in ("klein-base-9b", "klein-4b", "dev"):
        with pytest.raises(UserError, match="FLUX.2 other than klein-base-4b, by musubi-tuner"):
            musubi(tmp_path, f"--model_version {version}")
    with pytest.raises(UserError, match="control_directory before .reference pictures"):
        musubi(tmp_path, data='control_directory = "before"')
