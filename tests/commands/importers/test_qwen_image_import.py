"""Other trainers' configurations for Qwen-Image; those for Edit are refused."""

from __future__ import annotations

from pathlib import Path

import peer_configs
import pytest
import yaml

from simpletune.commands.importers.importing import ImportResult, import_file
from simpletune.models.qwen_image.qwen_image_files import FIRST, NEWEST
from simpletune.system.options import Json, UserError


def checked(found: ImportResult) -> Json:
    assert not [line.key for line in found.lines if line.became == "unknown"], "every key is known"
    assert found.config["model"]["family"] == "qwen_image"
    assert {problem.path for problem in found.problems} <= {"model.transformer"}, "a file that is not here"
    return found.config


def ai_toolkit(folder: Path, arch: str) -> ImportResult:
    process = {
        "type": "diffusion_trainer", "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "train": {"dtype": "bf16", "steps": 3000, "lr": 1e-4, "optimizer": "adamw8bit", "timestep_type": "sigmoid"},
        "model": {"name_or_path": FIRST, "arch": arch, "quantize": True, "qtype": "qfloat8", "low_vram": True},
        "datasets": [{"folder_path": "pics", "resolution": [1024]}], "sample": {"guidance_scale": 3},
    }  # fmt: skip
    job = {"job": "extension", "config": {"name": "mine", "process": [process]}}
    return import_file(peer_configs.write(folder, config___yaml=yaml.safe_dump(job)))


def test_ai_toolkit(tmp_path: Path) -> None:
    """Its layers are all of the blocks, their modulations too; its guidance is ordinary."""
    found = checked(ai_toolkit(tmp_path, "qwen_image"))
    assert found["adapter"] == {"method": "lora", "targets": "all_linear", "rank": 16, "alpha": 16}
    assert found["model"] == {"family": "qwen_image", "pretrained": FIRST}
    assert (found["precision"]["weights"], found["validation"]["guidance"]) == ("int8", 3)
    with pytest.raises(UserError, match="Qwen-Image-Edit"):
        ai_toolkit(tmp_path, "qwen_image_edit_plus")


def simpletuner(folder: Path, **settings: object) -> ImportResult:
    whole = {"model_family": "qwen_image", "model_type": "lora", "lora_rank": 16, "lora_type": "standard",
             "base_model_precision": "int8-quanto", "max_train_steps": 100, "optimizer": "adamw_bf16"}  # fmt: skip
    sets = [{"id": "a", "type": "local", "instance_data_dir": "pics"}]
    file = peer_configs.write(folder, config___json=whole | settings, data___json=sets)
    return import_file(file, folder / "data.json")


def test_simpletuner(tmp_path: Path) -> None:
    for flavour, base in ((None, FIRST), ("v1.0", FIRST), ("v2.0", NEWEST)):
        found = checked(simpletuner(tmp_path, **({} if flavour is None else {"model_flavour": flavour})))
        assert found["model"]["pretrained"] == base and found["objective"] == {"shift": 3.0}
        assert found["adapter"]["targets"] == "attention_image"
    with pytest.raises(UserError, match="Qwen-Image-Edit"):
        simpletuner(tmp_path, model_flavour="edit-v2")


@pytest.mark.parametrize(
    ("preset", "targets"), [("full", "attention_mlp"), ("attn-mlp", "attention_mlp"), ("attn-only", "attention")]
)
def test_simpletuner_by_lycoris_trains_both_streams(preset: str, targets: str, tmp_path: Path) -> None:
    own = {"algo": "lokr", "linear_dim": 8, "linear_alpha": 8, "preset": preset}
    peer_configs.write(tmp_path, lycoris___json=own)
    found = checked(simpletuner(tmp_path, lora_type="lycoris", lycoris_config="lycoris.json"))
    assert (found["adapter"]["method"], found["adapter"]["targets"]) == ("lokr", targets)


def test_onetrainer(tmp_path: Path) -> None:
    whole = {
        "base_model_name": FIRST, "model_type": "QWEN", "learning_rate": 3e-4, "training_method": "LORA",
        "peft_type": "LORA", "lora_rank": 16, "lora_alpha": 1.0, "layer_filter_preset": "attn-mlp",
        "layer_filter": "attn,img_mlp,txt_mlp", "train_dtype": "BFLOAT_16", "timestep_distribution": "LOGIT_NORMAL",
        "samples": [{"prompt": "a dot", "cfg_scale": 4.0}], "transformer": {"weight_dtype": "FLOAT_8"},
    }  # fmt: skip
    file = peer_configs.write(tmp_path, config___json=whole, data___json=[{"path": "pics"}])
    found = checked(import_file(file, tmp_path / "data.json"))
    assert found["adapter"]["targets"] == "attention_mlp" and found["precision"]["weights"] == "int8"
    for preset, names, targets in (
        ("attn-only", "attn", "attention"), ("blocks", "", "all_linear"), ("custom", "", "all_linear"),
        ("custom", "attn.to_q, attn.to_v", ["attn.to_q", "attn.to_v"]),
    ):  # fmt: skip
        peer_configs.write(tmp_path, config___json=whole | {"layer_filter_preset": preset, "layer_filter": names})
        adapter = checked(import_file(file, tmp_path / "data.json"))["adapter"]
        assert adapter["targets"] == targets, preset
    assert found["model"] == {"family": "qwen_image", "pretrained": FIRST} and found["validation"]["guidance"] == 4.0
    peer_configs.write(tmp_path, config___json=whole | {"base_model_name": "Qwen/Qwen-Image-Edit-2509"})
    with pytest.raises(UserError, match="Qwen-Image-Edit"):
        import_file(file, tmp_path / "data.json")


def test_diffusers_script(tmp_path: Path) -> None:
    """Its noise levels are not shifted by the pictures' sizes."""
    words = (
        f"accelerate launch train_dreambooth_lora_qwen_image.py --pretrained_model_name_or_path={NEWEST} --rank=8 "
        "--instance_data_dir=pics --instance_prompt='a photo of sks' --max_train_steps=100 --mixed_precision=bf16 "
        "--resolution=1024 --train_batch_size=1 --output_dir=out --use_8bit_adam --max_sequence_length=256"
    )
    found = checked(import_file(peer_configs.write(tmp_path, config___sh=f"{words}\n")))
    assert found["objective"] == {"sigma": "uniform", "shift": 1.0}
    assert found["model"] == {"family": "qwen_image", "pretrained": NEWEST, "text_length": 256}
    assert (found["adapter"]["targets"], found["adapter"]["rank"]) == ("attention_image", 8)


def musubi(folder: Path, more: str) -> ImportResult:
    """The command of its page."""
    words = (
        "accelerate launch src/musubi_tuner/qwen_image_train_network.py --dit qwen_image_bf16.safetensors --vae vae "
        "--text_encoder qwen --dataset_config data.toml --sdpa --mixed_precision bf16 --weighting_scheme none "
        "--optimizer_type adamw8bit --learning_rate 5e-5 --gradient_checkpointing --max_train_epochs 16 "
        "--network_module networks.lora_qwen_image --network_dim 16 --seed 42 --output_name style --fp8_base "
        "--fp8_scaled --fp8_vl --blocks_to_swap 45"
    )
    sets = '[general]\nresolution = [1328, 1328]\n[[datasets]]\nimage_directory = "pics"\ncache_directory = "cache"\n'
    peer_configs.write(folder, data___toml=sets)
    return import_file(peer_configs.write(folder, config___sh=f"{words} {more}\n"))


@pytest.mark.parametrize(
    ("more", "shift"),
    [("--timestep_sampling shift --discrete_flow_shift 2.2", 2.2),
     ("--model_version original --timestep_sampling qwen_shift", "auto")],
)  # fmt: skip
def test_musubi_tuner(more: str, shift: float | str, tmp_path: Path) -> None:
    """Its networks leave the modulations out."""
    found = checked(musubi(tmp_path, more))
    assert found["model"] == {
        "family": "qwen_image", "pretrained": NEWEST, "transformer": "qwen_image_bf16.safetensors"
    }  # fmt: skip
    assert found["adapter"] == {"method": "lora", "targets": "attention_mlp", "rank": 16, "alpha": 1.0}
    assert (found["objective"], found["precision"]["weights"]) == ({"sigma": "logit_normal", "shift": shift}, "int8")
    assert found["data"]["resolution"] == 1328


@pytest.mark.parametrize("more", ["--edit", "--edit_plus", "--model_version edit-2509", "--model_version layered"])
def test_musubi_tuner_s_other_versions_are_refused(more: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Qwen-Image-Edit or -Layered"):
        musubi(tmp_path, more)
