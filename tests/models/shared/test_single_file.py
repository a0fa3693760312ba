"""Single files in the original layout: the same losses as the folder, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import original_layout
import pytest
import torch
from blocks import load
from diffusers import AutoencoderKL, SD3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from tiny_runs import TrainOnce

from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.header import open_lora
from simpletune.config.explain import explain
from simpletune.config.load import read_config, validate
from simpletune.engine.quant.precision import FP32
from simpletune.models.sd3.sd3_files import LAYOUT, bundled_configs, origin_of
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd3.sd3_shapes import parameter_shapes
from simpletune.models.shared.single_file import OriginalReader, open_file
from simpletune.models.text.clip import load_text_model
from simpletune.runs.folder import read_metrics
from simpletune.system import checksums
from simpletune.system.options import ConfigError, UserError

SD35 = {"qk_norm": "rms_norm", "dual_attention_layers": [0, 1]}
CPU = torch.device("cpu")
Losses = Callable[..., list[float]]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_layout.build(tmp_path_factory.mktemp("original") / "pipeline", layers=3, heads=3)


@pytest.fixture(scope="module")
def pipeline_35(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with SD3.5 Medium's norms of queries and keys, and second attentions in two blocks."""
    folder = tmp_path_factory.mktemp("original35") / "pipeline"
    shutil.copytree(pipeline, folder)
    config = SD3Transformer2DModel.load_config(folder / "transformer")
    torch.manual_seed(5)
    model = SD3Transformer2DModel.from_config({**config, **SD35})
    for name, parameter in model.named_parameters():
        if ".norm_" in name and parameter.dim() == 1:  # ones at the start: a swap of two of them would not show
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def descriptions(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline without a single weight: tokenizers, scheduler and configs."""
    return original_layout.without_weights(pipeline, tmp_path_factory.mktemp("descriptions") / "pipeline")


@pytest.fixture(scope="module")
def whole_file(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_layout.write(pipeline, tmp_path_factory.mktemp("file") / "sd3_incl_clips_t5xxl.safetensors")


@pytest.fixture
def losses(tiny_config: dict, train_once: TrainOnce) -> Losses:
    """The losses of two steps of a model."""

    def run(model: dict[str, str], precision: dict | None = None) -> list[float]:
        changes = {"model": {"t5_length": 8, **model}, "train": {"steps": 2}}
        folder = train_once(tiny_config | changes | ({"precision": precision} if precision else {}))
        return [row["loss"] for row in read_metrics(folder)]

    return run


def check(tiny_config: dict, **model: object) -> str:
    """What ``check`` says to a model: the explanation, or the problems."""
    try:
        return explain(validate({**tiny_config, "model": {"t5_length": 8, **model}}, "test"))
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("version", "weights"),
    slow_but([("sd3", "fp32"), ("sd3.5", "int8")], product(("sd3", "sd3.5"), ("fp32", "int8"))),
)
def test_two_steps_give_the_losses_of_the_folder(
    version: str, weights: str, pipeline: Path, pipeline_35: Path, descriptions: Path, losses: Losses, tmp_path: Path
) -> None:
    folder, precision = pipeline if version == "sd3" else pipeline_35, {"weights": weights, "compute": "fp32"}
    file = original_layout.write(folder, tmp_path / "sd3_incl_clips_t5xxl.safetensors")
    expected = losses({"pretrained": str(folder)}, precision)
    assert losses({"pretrained": str(file), "text_encoders": str(descriptions)}, precision) == expected
    assert len(set(expected)) == 2


def test_without_text_encoders_they_come_from_the_folder(pipeline: Path, losses: Losses, tmp_path: Path) -> None:
    file = original_layout.write(pipeline, tmp_path / "sd3_medium.safetensors", "transformer vae")
    expected = losses({"pretrained": str(pipeline)})
    assert losses({"pretrained": str(file), "text_encoders": str(pipeline)}) == expected
    alone = original_layout.write(pipeline, tmp_path / "alone.safetensors", "transformer")
    state = load_file(alone)  # some files come without the prefix
    save_file({k.removeprefix(original_layout.MMDIT): v for k, v in state.items()}, alone)
    assert losses({"pretrained": str(pipeline), "transformer": str(alone)}) == expected


def test_t5_in_fp8_is_widened(pipeline: Path, descriptions: Path, losses: Losses, tmp_path: Path) -> None:
    fp8 = original_layout.write(pipeline, tmp_path / "sd3_t5xxl_fp8.safetensors", t5_dtype=torch.float8_e4m3fn)
    widened = tmp_path / "widened"
    shutil.copytree(pipeline, widened)
    encoder = widened / "text_encoder_3" / "model.safetensors"
    rounded = {k: v.to(torch.float8_e4m3fn).float() if v.dim() == 2 else v for k, v in load_file(encoder).items()}
    save_file(rounded, encoder, {"format": "pt"})
    expected = losses({"pretrained": str(widened)})
    assert losses({"pretrained": str(fp8), "text_encoders": str(descriptions)}) == expected
    assert expected != losses({"pretrained": str(pipeline)})


@pytest.mark.parametrize("version", ["sd3", "sd3.5"])
def test_tensors_equal_those_of_diffusers_converter(version: str, pipeline, pipeline_35, tmp_path: Path) -> None:
    folder = pipeline if version == "sd3" else pipeline_35
    file = original_layout.write(folder, tmp_path / "sd3.safetensors", "transformer")
    theirs = convert_sd3_transformer_checkpoint_to_diffusers(load_file(file))
    ours = OriginalReader(file, LAYOUT)
    assert ours.names == set(theirs)
    torch.testing.assert_close({name: ours.get(name) for name in theirs}, theirs, rtol=0, atol=0)
    torch.testing.assert_close(theirs, original_layout.state_of(folder / "transformer"), rtol=0, atol=0)
    config = {"qk_norm": None, **SD3Transformer2DModel.load_config(folder / "transformer"), "sample_size": 128}
    config["dual_attention_layers"] = list(config.get("dual_attention_layers", []))
    inferred = open_file(file, LAYOUT).denoiser_config
    assert inferred == {key: config[key] for key in inferred}


def test_the_autoencoder_equals_diffusers(pipeline, whole_file, descriptions) -> None:
    model = SD3().model_copy(update={"pretrained": str(whole_file), "text_encoders": str(descriptions)})
    ours = model.autoencoder.load(CPU, torch.float32).state_dict()
    theirs = AutoencoderKL.from_single_file(str(whole_file), config=str(pipeline / "vae"), local_files_only=True)
    torch.testing.assert_close(ours, dict(theirs.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_transformer_in_fp8_is_widened_exactly(dtype: torch.dtype, pipeline, tmp_path: Path) -> None:
    file = original_layout.write(pipeline, tmp_path / "sd3.safetensors", "transformer")
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    name = "transformer_blocks.1.attn.add_k_proj.weight"
    expected = original_layout.state_of(pipeline / "transformer")[name].to(dtype).float()
    tensor = OriginalReader(file, LAYOUT).get(name)
    assert tensor.dtype == torch.bfloat16
    torch.testing.assert_close(tensor.float(), expected, rtol=0, atol=0)


@pytest.mark.data
def test_names_and_config_of_the_published_file(real_data: Path, tmp_path: Path) -> None:
    published = (real_data / "sd3_keys" / "sd3_medium_mmdit_singlefile_keys.txt").read_text().split()
    shapes = {**parameter_shapes(SD3().files.known_config()), "pos_embed.pos_embed": (1, 192**2, 1536)}
    assert {original_layout.MMDIT + origin_of(name, 24).name for name in shapes} == set(published)
    state = original_layout.mmdit({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, 24)
    assert {original_layout.MMDIT + name for name in state} == set(published)
    file = header_only(tmp_path / "sd3_medium.safetensors", {original_layout.MMDIT + k: v for k, v in state.items()})
    inferred, known = open_file(file, LAYOUT).denoiser_config, SD3().files.known_config()
    named = {key: value for key, value in known.items() if not key.startswith("_")}
    assert {key: inferred[key] for key in named} == named


@pytest.mark.data
@pytest.mark.parametrize(("part", "prefix"), [("text_encoder", "CLIP_L"), ("text_encoder_2", "CLIP_G")])
def test_clip_names_of_the_published_file(part: str, prefix: str, real_data: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    published = (real_data / "sd3_keys" / "sd3_medium_clip_singlefile_keys.txt").read_text().split()
    prefix = getattr(original_layout, prefix)
    held = {name.removeprefix(prefix) for name in published if name.startswith(prefix)}
    with init_empty_weights():
        model = CLIPTextModelWithProjection(CLIPTextConfig.from_dict(bundled_configs()["sd3_medium"][part]))
    lacking = {"text_projection.weight"} if part == "text_encoder" else set()
    assert set(model.state_dict()) == held | lacking


def header_only(file: Path, tensors: dict[str, torch.Tensor], dtype: str = "F16", width: int = 2) -> Path:
    """A file of the right header and length, whose bytes take no room on the disk."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * width
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(file, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + offset)
    return file


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["conditioner.embedders.1.model.ln_final.bias", "model.diffusion_model.label_emb.0.0.bias"], "Diffusion XL"),
        (["double_blocks.0.img_attn.norm.key_norm.scale"], "Flux"),
        (["cond_stage_model.transformer.text_model.final_layer_norm.bias"], "Stable Diffusion 1.5"),
        (["cond_stage_model.model.ln_final.bias"], "Stable Diffusion 2"),
        (["transformer.transformer_blocks.0.attn.to_q.lora_A.weight"], "a LoRA"),
        (["transformer_blocks.0.attn.add_q_proj.weight"], "Stable Diffusion 3, in diffusers' names: give the folder"),
        (["encoder.conv_in.weight"], "It seems to be an autoencoder"),
        (["something.else"], "first tensors: something.else"),
    ],
)
def test_foreign_files_are_named(names: list[str], kind: str, tiny_config, tmp_path: Path) -> None:
    file = header_only(tmp_path / "other.safetensors", {name: torch.zeros(2, 2) for name in names})
    said = check(tiny_config, pretrained=str(file))
    assert f"model.pretrained: {file} contains no SD3 model in the original layout" in said
    assert kind in said and "1 problem" in said


def test_what_a_file_lacks_is_named_with_the_remedy(pipeline, descriptions, tiny_config, tmp_path: Path) -> None:
    bare = str(original_layout.write(pipeline, tmp_path / "sd3_medium.safetensors", "transformer vae"))
    remedy = "Set model.text_encoders to a folder in diffusers' layout or to a Hub name"
    assert f"{bare} contains no CLIP-L, CLIP-G, T5, tokenizers. {remedy}" in check(tiny_config, pretrained=bare)
    assert f"{bare} contains no CLIP-L, CLIP-G, tokenizers. {remedy}" in check(tiny_config, pretrained=bare, t5=False)
    clips = str(original_layout.write(pipeline, tmp_path / "clips.safetensors", "transformer vae clip"))
    assert f"{clips} contains no T5, tokenizers. {remedy}" in check(tiny_config, pretrained=clips)
    assert f"{clips} contains no tokenizers. {remedy}" in check(tiny_config, pretrained=clips, t5=False)
    assert "(single file), no T5" in check(tiny_config, pretrained=clips, t5=False, text_encoders=str(descriptions))
    no_vae = str(original_layout.write(pipeline, tmp_path / "no_vae.safetensors", "transformer clip t5"))
    said = check(tiny_config, pretrained=no_vae, text_encoders=str(descriptions))
    assert f"{no_vae} contains no autoencoder (VAE). Set model.vae" in said
    said = check(tiny_config, pretrained=no_vae, text_encoders=str(descriptions), vae=str(pipeline))
    assert "(single file), T5 with 8 tokens" in said


def test_a_part_that_is_nowhere_is_an_error_of_its_own(pipeline, tmp_path: Path) -> None:
    """A configuration with such a model is refused before; a file or folder may change after that."""
    no_vae = str(original_layout.write(pipeline, tmp_path / "no_vae.safetensors", "transformer clip"))
    alone = SD3(pretrained=no_vae)
    with pytest.raises(UserError, match=r"model.pretrained: .* no autoencoder \(VAE\). Set model.vae"):
        alone.files.part("vae")
    with pytest.raises(UserError, match=r"model.pretrained: .* no tokenizer. Set model.text_encoders"):
        alone.files.part("tokenizer")
    assert alone.files.part("scheduler").folder is None and alone.files.part("scheduler").config()
    with pytest.raises(UserError, match=r"model.pretrained: .* has no vae/ folder. Give a folder in diffusers' layout"):
        SD3(pretrained=str(tmp_path)).files.part("vae")


def test_damaged_files(whole_file, descriptions, tiny_config, tmp_path: Path) -> None:
    def said(name: str, data: bytes | dict) -> str:
        file = tmp_path / name
        save_file(data, file) if isinstance(data, dict) else file.write_bytes(data)
        return check(tiny_config, pretrained=str(file), text_encoders=str(descriptions))

    data, state = whole_file.read_bytes(), load_file(whole_file)
    assert "cut.safetensors is truncated: " in said("cut.safetensors", data[:-1])
    assert "is damaged or not a safetensors file. Download it again" in said("web.safetensors", b"<!doctype html>")
    assert "is not a .safetensors file. Pickled checkpoints" in said("old.ckpt", data)
    assert "nowhere.safetensors does not exist" in check(tiny_config, pretrained="/nowhere.safetensors")
    scaled = "its text_encoder_3 is in scaled fp8 (scaled_fp8), which is not supported. Use the fp16 or bf16 file"
    assert scaled in said("scaled.safetensors", state | {original_layout.T5 + "scaled_fp8": torch.zeros(1)})
    del state[original_layout.MMDIT + "joint_blocks.1.x_block.mlp.fc1.weight"]
    missing = "is not a complete SD3 transformer; missing: joint_blocks.1.x_block.mlp.fc1.weight"
    assert missing in said("part.safetensors", state)


def test_configs_that_do_not_fit_are_listed(whole_file, pipeline, tmp_path: Path) -> None:
    tokenizers = tmp_path / "tokenizers"
    shutil.copytree(pipeline, tokenizers, ignore=lambda folder, names: [n for n in names if n.startswith("text_e")])
    part = SD3(pretrained=str(whole_file), text_encoders=str(tokenizers)).files.part("text_encoder")
    with pytest.raises(UserError, match=r"does not match its configuration \(bundled\)\. missing: .*wrong shape"):
        load_text_model(part, torch.float32)


def test_an_unknown_tensor_is_listed(pipeline, tmp_path: Path) -> None:
    file = original_layout.write(pipeline, tmp_path / "sd3.safetensors", "transformer")
    save_file({**load_file(file), original_layout.MMDIT + "extra.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="unexpected: extra.weight"):
        load(open_file(file, LAYOUT).denoiser_config, OriginalReader(file, LAYOUT), FP32(), CPU, place=str(file))


def test_check_reads_headers_only(whole_file, descriptions, tiny_config, write_config, tmp_path) -> None:
    """Of a file of SD3 Medium's size, without torch."""
    descriptions = shutil.copytree(descriptions, tmp_path / "medium")
    for encoder in SD3().text.encoders:
        folder = descriptions / encoder.model
        (folder / "config.json").write_text(json.dumps(SD3().files.known_part(encoder.model).config()))
    shapes = {**parameter_shapes(SD3().files.known_config()), "pos_embed.pos_embed": (1, 192**2, 1536)}
    state = original_layout.mmdit({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, 24)
    named = {original_layout.MMDIT + name: tensor for name, tensor in state.items()}
    file = header_only(descriptions / "medium.safetensors", named)
    model = {"pretrained": str(descriptions), "transformer": str(file), "vae": str(descriptions)}
    config = write_config({**tiny_config, "model": model})
    script = (
        "import sys; from simpletune.apps.cli.main import main; code = main(['check', sys.argv[1]]);"
        "assert not {'torch', 'diffusers', 'transformers', 'huggingface_hub'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "of the base's 2,028,328,000 trained" in done.stdout
    assert read_config(config, [])[0].model.transformer == str(file)


@pytest.mark.parametrize("small", [checksums.SMALL, 0])
def test_a_part_is_known_by_every_byte_of_its_own(
    small: int, whole_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large file (0), and in a small one."""
    monkeypatch.setattr(checksums, "SMALL", small)
    file = open_file(Path(shutil.copy(whole_file, tmp_path)), LAYOUT)
    parts = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
    before = {part: file.fingerprint(part) for part in parts}
    assert len(set(before.values())) == len(parts)
    start = 8 + int.from_bytes(file.path.read_bytes()[:8], "little")
    entry = next(entry for name, entry in file.header.items() if name.startswith("first_stage_model."))
    for byte in (start + entry["data_offsets"][0], start + entry["data_offsets"][1] - 1):
        data = bytearray(file.path.read_bytes())
        data[byte] ^= 1
        file.path.write_bytes(data)
        changed = {part for part in parts if file.fingerprint(part) != before[part]}
        assert changed == {"vae"}
        before["vae"] = file.fingerprint("vae")


def test_class_pictures_of_a_single_file_have_a_folder(whole_file: Path, descriptions: Path) -> None:
    """The denoiser of a single file has no config.json: its configuration is that which its shapes tell."""
    model = SD3(pretrained=str(whole_file), text_encoders=str(descriptions))
    config = model.files.denoiser_config()
    assert re.fullmatch("[0-9a-f]{16}", model.files.part("transformer").fingerprint()) and config["num_layers"] == 3


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        ({"double_blocks.0.img_attn.qkv.weight": (9, 9), "txt_in.weight": (3072, 7680)}, "FLUX.2 klein 4B"),
        ({"single_stream_modulation.linear.weight": (9, 9), "context_embedder.weight": (4, 12288)}, "FLUX.2 klein 9B"),
        ({"model.diffusion_model.txt_in.weight": (6144, 15360)}, "FLUX.2 dev"),
        ({"single_stream_modulation.lin.weight": (9, 9), "txt_in.weight": (3072, 5)}, "FLUX.2"),
        ({"double_blocks.0.img_attn.qkv.weight": (9, 9), "txt_in.weight": (3072, 4096)}, "Flux.1"),
        ({"early_stream_modulations.image.lin.weight": (9, 9), "double_blocks.0.img_attn.x": (9, 9)}, "Flux 3"),
        ({"model.diffusion_model.transformer_blocks.0.img_mod.1.weight": (9, 9)}, "Qwen-Image"),
        ({"transformer_blocks.0.attn.norm_added_q.weight": (9,), "transformer_blocks.0.img_mod.1.bias": (9,)},
         "Qwen-Image"),
        ({"txt_in.text_norm.weight": (9,), "transformer_blocks.0.attn.to_q.weight": (9, 9)}, "Qwen-Image-2.1"),
        ({"layers.0.adaLN_modulation.0.weight": (9, 9), "cap_embedder.0.weight": (9,)}, "Z-Image"),
        ({"layers.0.adaLN_modulation.0.weight": (9, 9), "siglip_embedder.0.weight": (9,)}, "Z-Image-Omni"),
        ({"control_layers.14.adaLN_modulation.0.weight": (9, 9)}, "a ControlNet of Z-Image"),
        ({"cap_embedder.0.weight": (9,), "layers.0.adaLN_modulation.1.weight": (9, 9)}, "Lumina 2"),
        ({"model.layers.0.self_attn.q_proj.weight": (9, 9)}, "a language model, such as"),
        ({"context_embedder.weight": (1536, 4096), "transformer_blocks.0.attn.add_q_proj.weight": (9, 9)},
         "Stable Diffusion 3, in diffusers' names"),
    ],
)  # fmt: skip
def test_a_model_of_another_family_has_one_name_everywhere(tensors, kind: str, tmp_path: Path) -> None:
    file = header_only(tmp_path / "x.safetensors", {name: torch.empty(shape) for name, shape in tensors.items()})
    assert describe(file)["family"].startswith(kind)
    for refused in (lambda: open_lora(file), lambda: open_file(file, LAYOUT)):
        with pytest.raises(UserError, match=f"(is|It seems to be) {re.escape(kind)}"):
            refused()
