"""Single files of Stable Diffusion XL: the same tensors as the folder's, marks, and what is refused before loading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import original_layout
import original_sd15
import original_sdxl
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from original_layout import state_of
from PIL import Image
from safetensors.torch import load_file, save_file

from simpletune.adapters.files.base_reader import BaseReader
from simpletune.adapters.files.merge import Merger
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.commands.importers.importing import import_file
from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import suggest
from simpletune.config.load import validate
from simpletune.engine.quant.precision import FP32
from simpletune.models.families import family_of
from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.sd3.sd3_option import SD3
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_config import bundled_configs
from simpletune.models.sdxl.sdxl_files import LAYOUT
from simpletune.models.sdxl.sdxl_lora import LAYOUTS
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.text.clip import load_text_model
from simpletune.models.text.prompts import Prompts
from simpletune.models.unet.unet_files import origins
from simpletune.models.unet.unet_shapes import parameter_shapes
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import read_header

CPU = torch.device("cpu")
LEFT = {
    "denoiser.sigmas",
    f"{original_sdxl.CLIP_G}logit_scale",
    f"{original_sdxl.CLIP_L}text_model.embeddings.position_ids",
}
"""Tensors of a file that no model reads."""
PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")
REMEDY = "Use Stable Diffusion XL base 1.0 or a model made from it"


@pytest.fixture(scope="module")
def pipeline(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sdxl")


@pytest.fixture(scope="module")
def descriptions(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline without a single weight: tokenizers, scheduler and configs."""
    return original_layout.without_weights(pipeline, tmp_path_factory.mktemp("descriptions") / "pipeline")


@pytest.fixture(scope="module")
def file(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original_sdxl.write(pipeline, tmp_path_factory.mktemp("file") / "model.safetensors")


@pytest.fixture(scope="module")
def marked(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files with the marks of v, and of zero terminal SNR too."""
    folder = tmp_path_factory.mktemp("marked")
    return {
        name: original_sdxl.write(pipeline, folder / f"{name}.safetensors", marks=marks)
        for name, marks in (("v", ["v_pred"]), ("zero", ["v_pred", "ztsnr"]))
    }


@pytest.fixture(scope="module")
def family(file: Path, descriptions: Path) -> SDXL:
    return SDXL(pretrained=str(file), text_encoders=str(descriptions))


def problems(**options: object) -> str:
    return "\n".join(str(problem) for problem in SDXL(**options).files.problems())  # type: ignore[arg-type]


def states(family: SDXL) -> dict[str, dict[str, torch.Tensor]]:
    """Every part as this package loads it, in fp32, under names without transformers' prefix."""
    loaded = {
        "unet": family.load_denoiser(FP32(), CPU),
        "vae": family.autoencoder.load(CPU, torch.float32),
        **{
            each.model: load_text_model(family.files.part(each.model), torch.float32, each.projected)
            for each in family.text.encoders
        },
    }
    return {part: without_prefix(model.state_dict()) for part, model in loaded.items()}


def without_prefix(state: Any) -> dict[str, torch.Tensor]:
    return {name.removeprefix("text_model."): tensor for name, tensor in dict(state).items()}


def expected_states(pipeline: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {part: without_prefix(state_of(pipeline / part)) for part in PARTS}


def test_every_part_equals_the_folders(family: SDXL, file: Path, pipeline: Path) -> None:
    assert list(family.files.problems()) == []
    torch.testing.assert_close(states(family), expected_states(pipeline), rtol=0, atol=0)
    config = json.loads((pipeline / "unet" / "config.json").read_text())
    theirs = convert_ldm_unet_checkpoint(load_file(file), config)
    torch.testing.assert_close(theirs, state_of(pipeline / "unet"), rtol=0, atol=0)
    inferred = family.files.known_config()
    told = {name: value for name, value in inferred.items() if name != "sample_size"}
    assert told == {name: config[name] for name in told}


def test_prompts_equal_the_folders(family: SDXL, pipeline: Path) -> None:
    encoded = []
    for option in (family, SDXL(pretrained=str(pipeline))):
        prompts = Prompts(option.text, torch.float32)
        parts = {each.name: next(iter(prompts.encode(each, ["a red disc"], CPU))) for each in prompts.encoders}
        encoded.append(prompts.assemble(parts).tensors())
    torch.testing.assert_close(*encoded, rtol=0, atol=0)


def test_a_folder_becomes_one_file_that_diffusers_loads(pipeline: Path, file: Path, tmp_path: Path) -> None:
    """The tensors are those of the reference writer, whose file ``test_every_part_equals_the_folders`` loads."""
    base = BaseReader(str(pipeline))
    assert base.family.family == "sdxl"
    written = tmp_path / "one.safetensors"
    Merger(base, [], None).write_file(written, {}, lambda: None)
    reference = load_file(file)
    ours = load_file(written)
    torch.testing.assert_close(ours, {n: t for n, t in reference.items() if n not in LEFT}, rtol=0, atol=0)
    assert problems(pretrained=str(written), text_encoders=str(pipeline)) == ""
    theirs = StableDiffusionXLPipeline.from_single_file(written, config=str(pipeline), local_files_only=True)
    found = {part: without_prefix(getattr(theirs, part).state_dict()) for part in PARTS}
    torch.testing.assert_close(found, expected_states(pipeline), rtol=0, atol=0)


def test_marks_tell_what_the_unet_predicts(
    pipeline: Path, descriptions: Path, file: Path, marked: dict[str, Path], tmp_path: Path
) -> None:
    """Also beside a pipeline whose scheduler says otherwise; and a v-predicting folder is written with them."""
    for given, prediction, zero in (
        (file, "epsilon", False),
        (marked["v"], "v_prediction", False),
        (marked["zero"], "v_prediction", True),
    ):
        for text in (str(descriptions), "stabilityai/stable-diffusion-xl-base-1.0"):
            assert told(pretrained=str(given), text_encoders=text) == (prediction, zero)
    bare = tmp_path / "unet.safetensors"
    state = {n.removeprefix(original_sdxl.UNET): t for n, t in load_file(marked["zero"]).items() if "diffusion" in n}
    save_file({**state, "v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, bare)
    model = SDXL(pretrained=str(pipeline), unet=str(bare)).load_denoiser(FP32(), CPU)
    torch.testing.assert_close(dict(model.state_dict()), state_of(pipeline / "unet"), rtol=0, atol=0)

    zero_snr = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    folder = changed(pipeline, tmp_path / "v", "scheduler", **zero_snr)
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    Merger(BaseReader(str(folder)), [], None).write_file(once, {}, lambda: None)
    Merger(BaseReader(str(once)), [], None).write_file(twice, {}, lambda: None)
    for written in (once, twice):
        header = read_header(written)
        assert [header[mark]["shape"] for mark in ("v_pred", "ztsnr")] == [[0], [0]]


def told(**options: object) -> tuple[str, bool]:
    """Prediction, and whether the terminal SNR is zero."""
    found = SDXL(**options).files.scheduler_config()  # type: ignore[arg-type]
    return found.get("prediction_type", "epsilon"), found.get("rescale_betas_zero_snr", False)


def test_whoever_provides_the_unet_says_what_it_predicts(
    pipeline: Path, file: Path, marked: dict[str, Path], tmp_path: Path
) -> None:
    """The marks of its file, or its pipeline's scheduler; else that of the pipeline."""
    epsilon, v = ("epsilon", False), ("v_prediction", True)
    zero, plain = marked["zero"], file
    zero_snr = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
    folder = changed(pipeline, tmp_path / "v", "scheduler", **zero_snr)
    alone = shutil.copytree(pipeline / "unet", tmp_path / "alone" / "unet")
    for base, unet, expected in (
        (pipeline, zero, v), (pipeline, plain, epsilon), (folder, plain, v), (pipeline, folder, v),
        (folder, pipeline, epsilon), (pipeline, f"{folder}/unet", v), (folder, alone, v), (zero, pipeline, epsilon),
        (plain, folder, v), (folder, zero, v),
    ):  # fmt: skip
        options = {"pretrained": str(base), "unet": str(unet), "text_encoders": str(pipeline)}
        assert told(**options) == expected, (base, unet)
        assert problems(**options) == ""
    assert "does not exist" in problems(pretrained=str(pipeline), unet=str(tmp_path / "no.safetensors"))
    model = SDXL(pretrained=str(pipeline), unet="someone/v")
    assert sorted(part.part for part in model.files.hub_parts()) == ["scheduler", "unet"], (
        "a download of its configuration alone"
    )


def test_a_file_without_marks_predicts_what_its_pipeline_does_in_a_folder_or_on_the_hub(
    pipeline: Path, file: Path, marked: dict[str, Path], tmp_path: Path
) -> None:
    plain = str(file)
    folder = changed(pipeline, tmp_path / "v", "scheduler", prediction_type="v_prediction")
    assert told(pretrained=plain, text_encoders=folder) == ("v_prediction", False)
    assert told(pretrained=plain) == told(pretrained=plain, text_encoders=str(pipeline)) == ("epsilon", False)
    on_the_hub = SDXL(pretrained=plain, text_encoders="someone/v")
    assert (
        on_the_hub.files.provider("scheduler") == ("text_encoders", "someone/v")
        and not on_the_hub.files.is_schedule_known()
    )
    assert [each.weights for each in on_the_hub.files.hub_parts() if each.part == "scheduler"] == [False]
    by_mark = SDXL(pretrained=str(marked["v"]), text_encoders="someone/epsilon")
    assert by_mark.files.is_schedule_known() and by_mark.files.scheduler_config()["prediction_type"] == "v_prediction"
    assert "scheduler" not in [each.part for each in by_mark.files.hub_parts()]


def test_a_lora_of_both_encoders_merges_into_a_file_and_a_folder(pipeline: Path, file: Path, tmp_path: Path) -> None:
    """OpenCLIP's q, k and v are one tensor, and its projection is transposed."""
    changes = {}
    for part in ("text_encoder", "text_encoder_2"):
        layers = [f"text_model.encoder.layers.1.{inner}" for inner in
                  ("self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1")]  # fmt: skip
        changes |= {f"{part}.{layer}": 0 for layer in layers}
    changes["text_encoder_2.text_projection"] = 0
    expected, updates, generator = expected_states(pipeline), {}, torch.Generator().manual_seed(3)
    for layer in changes:
        part, _, name = layer.partition(".")
        weight = expected[part][f"{name.removeprefix('text_model.')}.weight"]
        down = torch.randn(2, weight.shape[1], generator=generator)
        updates[layer] = LoraUpdate(down, torch.randn(weight.shape[0], 2, generator=generator))
        expected[part][f"{name.removeprefix('text_model.')}.weight"] = weight + 0.5 * updates[layer].delta()
    lora = write_lora(updates, tmp_path / "lora.safetensors", "kohya", names=LAYOUTS[0].names)
    from_file, from_folder = tmp_path / "from-file.safetensors", tmp_path / "from-folder.safetensors"
    for base, out in ((file, from_file), (pipeline, from_folder)):
        assert main(["merge", f"{lora}:0.5", "--base", str(base), "--out", str(out)]) == 0
    found = states(SDXL(pretrained=str(from_folder), text_encoders=str(pipeline)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    tensors = load_file(from_file)
    for name, tensor in load_file(from_folder).items():
        assert torch.equal(tensors[name], tensor), name
    theirs = StableDiffusionXLPipeline.from_single_file(
        from_file, config=str(pipeline), local_files_only=True, unet=None, vae=None, text_encoder=None
    )
    state = without_prefix(theirs.text_encoder_2.state_dict())
    torch.testing.assert_close(state, expected["text_encoder_2"], rtol=0, atol=1e-5)


def test_a_run_s_full_weights_become_one_file(
    pipeline: Path, file: Path, marked: dict[str, Path], descriptions: Path, tiny_config: dict, tmp_path: Path
) -> None:
    """With the other parts of its base, whether a file or a folder, and marked as it was trained."""
    run, out = tmp_path / "run", tmp_path / "one.safetensors"
    shutil.copytree(pipeline / "unet", run / "unet")
    weights = run / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    (run / "metrics.jsonl").touch()
    expected = {name: t + 1 if name.startswith(original_sdxl.UNET) else t for name, t in load_file(file).items()}
    v, epsilon = {"prediction": "v", "zero_terminal_snr": True}, {"prediction": "epsilon"}
    for base, objective, marks in (
        ({"pretrained": str(file), "text_encoders": str(descriptions)}, v, {"v_pred", "ztsnr"}),
        ({"pretrained": str(pipeline)}, v, {"v_pred", "ztsnr"}),
        ({"pretrained": str(marked["v"]), "text_encoders": str(descriptions)}, epsilon, set[str]()),
    ):
        config = {
            **tiny_config,
            "model": {"family": "sdxl", **base},
            "adapter": {"method": "full"},
            "precision": {"weights": "bf16"},
            "data": {**tiny_config["data"], "resolution": 64},
            "validation": {"prompts": []},
            "objective": {"name": "ddpm", **objective},
        }
        (run / "config.json").write_text(validate(config, "run").model_dump_json(by_alias=True))
        assert main(["merge", "--base", str(run), "--out", str(out), "--overwrite"]) == 0
        found = load_file(out)
        assert found.keys() - expected.keys() == marks and expected.keys() - found.keys() <= LEFT
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name in found)
    assert main(["merge", "--out", str(out), "--overwrite"]) == 2


def test_what_a_file_lacks_is_named_with_the_remedy(pipeline: Path, descriptions: Path, tmp_path: Path) -> None:
    remedy = "Set model.text_encoders to a folder in diffusers' layout or to a Hub name"
    for parts, lacking in (
        ("unet vae clip_l", "CLIP-G"),
        ("unet vae clip_g", "CLIP-L"),
        ("unet vae", "CLIP-L, CLIP-G"),
    ):
        file = str(original_sdxl.write(pipeline, tmp_path / "part.safetensors", parts))
        said = problems(pretrained=file)
        assert f"model.pretrained: {file} contains no {lacking}, tokenizers. {remedy}" in said
        assert "such as stabilityai/stable-diffusion-xl-base-1.0" in said and len(said.splitlines()) == 1
        assert problems(pretrained=file, text_encoders=str(pipeline)) == ""
    no_vae = str(original_sdxl.write(pipeline, tmp_path / "no_vae.safetensors", "unet clip_l clip_g"))
    said = problems(pretrained=no_vae, text_encoders=str(descriptions))
    remedy = "Set model.vae to a folder or Hub name that has one"
    assert said == f"model.pretrained: {no_vae} contains no autoencoder (VAE). {remedy}"
    assert problems(pretrained=no_vae, text_encoders=str(descriptions), vae=str(pipeline)) == ""


def test_init_and_import_name_a_source_of_tokenizers_for_a_single_file(file: Path, tmp_path: Path) -> None:
    example = "stabilityai/stable-diffusion-xl-base-1.0"
    assert (
        SDXL(pretrained=str(file)).files.lacks_tokenizers
        and not SDXL(pretrained=str(file.parent)).files.lacks_tokenizers
    )
    assert not SDXL(pretrained=str(file), text_encoders="folder").files.lacks_tokenizers
    (images := tmp_path / "pictures").mkdir()
    Image.new("RGB", (1024, 1024)).save(images / "a.png")
    found = suggest(images, Answers(model=str(file)))
    assert found.config["model"] == {"pretrained": str(file), "family": "sdxl", "text_encoders": example}
    (why,) = [reason.why for reason in found.reasons if reason.path == "model.text_encoders"]
    assert why == "a single file has no tokenizers; only what it lacks is downloaded"

    trainer = tmp_path / "kohya.json"
    for script, base, wanted in (
        ("sdxl_train_network.py", str(file), example),
        ("sdxl_train_network.py", "/elsewhere/pony.safetensors", example),  # on another machine
        ("train_network.py", "/elsewhere/old.ckpt", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
        ("sdxl_train_network.py", example, None),
    ):
        settings = {"script": script, "pretrained_model_name_or_path": base, "network_module": "networks.lora"}
        trainer.write_text(json.dumps({**settings, "network_dim": 8, "train_data_dir": str(images)}))
        imported = import_file(trainer)
        assert imported.config["model"].get("text_encoders") == wanted, base
        lines = [line.why for line in imported.lines if line.path == "model.text_encoders"]
        assert lines == ([why] if wanted else [])


def test_similar_models_in_single_files_are_refused_by_name(file: Path, descriptions: Path, tmp_path: Path) -> None:
    state = load_file(file)
    odd = tmp_path / "odd.safetensors"

    def said(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, odd)
        found = problems(pretrained=str(odd), text_encoders=str(descriptions))
        assert len(found.splitlines()) == 1, found
        return found

    one = torch.zeros(1)
    assert f"(by its tensor edm_mean) is Playground 2.5, whose noise (EDM) is another one. {REMEDY}" in said(
        state | {"edm_mean": torch.zeros(4), "edm_std": torch.ones(4)}
    )
    assert "(by its tensor edm_vpred.sigma_max) is CosXL" in said(state | {"edm_vpred.sigma_max": one})
    clip_g = {name.replace("embedders.1.", "embedders.0."): t for name, t in state.items() if "embedders.0" not in name}
    assert f"is a refiner of Stable Diffusion XL, which cannot be trained. {REMEDY}" in said(clip_g)
    assert "is damaged or not a safetensors file. Download it again" in damaged(tmp_path, b"<!doctype html>")
    assert "is truncated: " in damaged(tmp_path, file.read_bytes()[:-1])
    first = original_sdxl.UNET + "middle_block.0.in_layers.2.weight"
    del state[first]
    assert "is not a complete SDXL unet; missing: middle_block.0.in_layers.2.weight. Download it again" in said(state)


def damaged(folder: Path, data: bytes) -> str:
    (folder / "damaged.safetensors").write_bytes(data)
    return problems(pretrained=str(folder / "damaged.safetensors"))


def test_pruned_unets_and_those_that_read_another_picture_are_refused(
    file: Path, descriptions: Path, tmp_path: Path
) -> None:
    def refused(tensors: dict[str, torch.Tensor], words: str) -> None:
        save_file(tensors, tmp_path / "odd.safetensors")
        with pytest.raises(UserError, match=words):
            SDXL(pretrained=str(tmp_path / "odd.safetensors"), text_encoders=str(descriptions)).files.known_config()

    state, first = load_file(file), original_sdxl.UNET + "input_blocks.0.0.weight"
    refused(
        state | {first: state[first].repeat(1, 2, 1, 1)},
        rf"in_channels 8 \(must be 4, or 9 .*InstructPix2Pix.*{REMEDY}",
    )
    for block, words in (("middle_block.1.transformer_blocks", "0 transformer blocks, and the way down has 2"),
                         ("output_blocks.1.1.transformer_blocks.1", "1 transformer blocks")):  # fmt: skip
        left = {name: tensor for name, tensor in state.items() if f"{block}." not in name}
        refused(left, rf"odd.safetensors: {block.partition('.tr')[0]} has {words}.*pruned UNet.*was made from")


def changed(pipeline: Path, folder: Path, part: str, **changes: object) -> str:
    """A copy of a pipeline with other settings in a part's configuration."""
    shutil.copytree(pipeline, folder)
    name = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    name.write_text(json.dumps({**json.loads(name.read_text()), **changes}))
    return str(folder)


def test_a_refiner_and_other_unets_in_folders_are_refused(pipeline: Path, tmp_path: Path) -> None:
    for number, (changes, words) in enumerate(
        (
            ({"cross_attention_dim": 1280}, f"a refiner of Stable Diffusion XL, which cannot be trained. {REMEDY}"),
            ({"in_channels": 8}, "in_channels 8 .*InstructPix2Pix"),
            ({"time_cond_proj_dim": 256}, f"time_cond_proj_dim 256 .must be None.. {REMEDY}"),  # LCM's
            ({"mid_block_type": "UNetMidBlock2D"}, "mid_block_type 'UNetMidBlock2D'"),  # SSD-1B's
        )
    ):
        folder = changed(pipeline, tmp_path / str(number), "unet", **changes)
        with pytest.raises(UserError, match=words):
            SDXL(pretrained=folder).files.known_config()
        assert family_of(folder) is None, "no other family takes it"


def test_playground_in_a_folder_is_refused(pipeline: Path, tmp_path: Path) -> None:
    """Its latents and its noise are others, with Stable Diffusion XL's UNet."""
    vae = changed(pipeline, tmp_path / "vae", "vae", latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    words = "has latents_mean and latents_std, as Playground 2.5 has; latents are only shifted and scaled here."
    assert problems(pretrained=vae) == f"model.pretrained: {vae}/vae {words} Use a model without them"
    with pytest.raises(UserError, match=r"^model.vae: .*latents_mean and latents_std"):
        SDXL(pretrained=vae).autoencoder.load(CPU, torch.float32)
    edm = changed(pipeline, tmp_path / "edm", "scheduler", _class_name="EDMDPMSolverMultistepScheduler")
    noise = SDXL(pretrained=edm)
    (problem,) = Ddpm().problems(noise.files.scheduler_config)
    assert str(problem).startswith("objective.name: ddpm cannot train the noise of the model's scheduler, EDMDPMSolver")


def test_models_of_other_families_are_told_apart(
    pipeline: Path, file: Path, unet_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    other = unet_pipeline("sd15")
    single = original_sd15.write(other, tmp_path / "sd15.safetensors")
    assert [family_of(str(each)).family for each in (pipeline, file, other, single)] == ["sdxl"] * 2 + ["sd15"] * 2  # type: ignore[union-attr]
    assert "Stable Diffusion 1.5: set model.family to sd15" in problems(pretrained=str(single))
    for family in (SD15, SD3):
        said = "\n".join(str(problem) for problem in family(pretrained=str(file)).files.problems())
        assert "It seems to be Stable Diffusion XL: set model.family to sdxl" in said
    with pytest.raises(UserError, match="set model.family to sdxl"):
        SD15(pretrained=str(pipeline)).files.known_config()
    with pytest.raises(UserError, match="set model.family to sd15"):
        SDXL(pretrained=str(other)).files.known_config()


def test_text_encoders_of_another_model_are_refused(pipeline: Path, file: Path, tmp_path: Path) -> None:
    """Their widths are summed, and the projection's is the pooled prompt's, whose rest are sizes of pictures."""
    wide = changed(pipeline, tmp_path / "wide", "text_encoder_2", hidden_size=64)
    said = "has text encoders of widths 32 + 64, and the UNet reads 80. Use the pipeline of the UNet's own version"
    assert problems(pretrained=wide) == f"model.pretrained: {wide} {said}"
    only_unet = original_sdxl.write(pipeline, tmp_path / "unet.safetensors", "unet vae")
    assert problems(pretrained=str(only_unet), text_encoders=wide) == f"model.text_encoders: {wide} {said}"
    pooled = changed(pipeline, tmp_path / "pooled", "text_encoder_2", projection_dim=40)
    said = "has a pooled prompt of width 40, and the UNet reads 48. Use the pipeline of the UNet's own version"
    assert problems(pretrained=pooled) == f"model.pretrained: {pooled} {said}"
    assert problems(pretrained=str(file), text_encoders=str(pipeline)) == ""
    assert problems() == problems(unet=str(only_unet), pretrained=str(pipeline)) == ""


def test_names_of_the_whole_unet_are_those_that_diffusers_reads() -> None:
    config = bundled_configs()["sdxl"]["unet"]
    shapes, sources = parameter_shapes(config), origins(config)
    assert {name: original_sdxl.unet_name(name, config) for name in shapes} == {n: o.name for n, o in sources.items()}  # type: ignore[arg-type]
    prefix = original_sdxl.UNET
    original = {prefix + sources[name].name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    theirs = convert_ldm_unet_checkpoint(dict(original), config)
    assert set(theirs) == set(shapes)
    assert all(theirs[name] is original[prefix + sources[name].name] for name in shapes)
    inferred = LAYOUT.infer({name.removeprefix(prefix): list(tensor.shape) for name, tensor in original.items()})
    assert inferred == config
