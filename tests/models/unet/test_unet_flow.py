"""Rectified flow for models with a UNet: a step against the forks' arithmetic, drawing, refusals, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import original_sdxl
import pytest
import torch
import unet_flow
import unet_train
from accelerate import Accelerator
from diffusers import DPMSolverMultistepScheduler, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tiny_runs import merged, run_with

from simpletune.adapters.files.header import LoraHeader
from simpletune.apps.cli.arguments import OBJECTIVES
from simpletune.apps.cli.main import main
from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import suggest
from simpletune.commands.init.inspect_folder import inspect_folder
from simpletune.config.explain import explain
from simpletune.config.load import validate
from simpletune.engine.tensors import trained_parameters
from simpletune.models.families import FAMILIES
from simpletune.models.objectives.ddpm import Ddpm
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd15.sd15_option import SD15
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.runs.stack import require_lora_families
from simpletune.stages.encode import prepare
from simpletune.stages.step.batch_loader import BatchLoader
from simpletune.stages.step.train_step import assemble
from simpletune.system.options import ConfigError, UserError
from simpletune.system.safetensors_file import read_header
from simpletune.system.stage_timer import StageTimer

CPU = torch.device("cpu")
LEVELS = [(number + 0.5) / 64 for number in range(64)]
SCHEDULER = {"_class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear", "beta_start": 0.00085,
             "beta_end": 0.012, "num_train_timesteps": 1000, "use_karras_sigmas": False}  # fmt: skip


def config_of(tiny_config: dict, folder: Path, family: str = "sdxl", /, **changes: Any) -> dict:
    own = {"model": {"family": family, "pretrained": str(folder)}, "objective": {"name": "flow"}}
    data = merged(tiny_config | own, data={"resolution": 64}, train={"steps": 1, "batch_size": 2})
    return merged(data, **changes)


@pytest.fixture
def run(unet_pipeline: Callable[..., Path], tiny_config: dict, train_once: Callable[[dict], Path]) -> Path:
    """A LoRA that one step by flow has trained."""
    shown = {"prompts": ["a red disc"], "steps": 2, "loss_samples": 1, "width": 64, "height": 64, "guidance": 1.0}
    return train_once(config_of(tiny_config, unet_pipeline("sdxl"), validation=shown))


@pytest.mark.parametrize(("family", "rounds"), [("sdxl", True), ("sdxl", False), ("sd15", True)])
def test_loss_and_gradients_of_a_step_are_the_forks(
    family: str, rounds: bool, unet_pipeline: Callable[..., Path], tiny_config: dict
) -> None:
    folder = unet_pipeline(family)
    raw = config_of(tiny_config, folder, family, objective={"round_time": rounds}, adapter={"rank": 3})
    config = validate(raw, "ours")
    ready = prepare(config, Accelerator(cpu=True), StageTimer(False))
    first = config.model.load_denoiser(config.precision, CPU)
    config.adapter.attach(first, config.train.seed)
    lora = {name.replace(".default", ""): p.detach().clone() for name, p in trained_parameters(first).items()}
    unet = config.model.load_denoiser(config.precision, CPU)
    batch = BatchLoader(ready, config.train.seed, CPU).step(0)[0]
    loss = assemble(config, unet, Accelerator(cpu=True)).compute(batch)
    ours = {name.replace(".default", ""): p.grad for name, p in trained_parameters(unet).items()}

    other = UNet2DConditionModel.from_pretrained(folder / "unet").requires_grad_(False)
    trained = unet_train.add_adapter(other, lora, 3.0)
    text = batch.conditioning
    added = {} if text.pooled is None else {"added_cond_kwargs": {"text_embeds": text.pooled, **text.extra}}
    given = unet_flow.inputs(batch.z_0, batch.noise, batch.level, rounds)
    wanted = unet_flow.loss(lambda z_t, time: other(z_t, time, text.embeds, **added).sample, given)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, {name: p.grad for name, p in trained.items()}, rtol=0, atol=1e-6)
    whole = torch.equal(given.time.float(), 1000 * batch.level)
    assert rounds != whole and len(batch.level.unique()) == 2, "the levels tell apart whether times are rounded"


@pytest.mark.parametrize(
    ("options", "resolution", "ratio"),
    [
        ({}, 1024, 2.5),
        ({"shift": 4.0}, 512, 4.0),
        ({"shift": "resolution"}, 768, unet_flow.ratio_of(768, 768)),
        ({"shift": "auto"}, 1024, 3.0),
    ],
)
def test_levels_are_uniform_and_shifted_as_the_forks(options: dict, resolution: int, ratio: float) -> None:
    data = {"name": "x", "model": {"family": "sdxl"}, "objective": {"name": "flow", **options}, "data": {"path": "."}}
    objective = validate(data, "x", needs_model=False).objective
    assert objective.shift_at(resolution) == pytest.approx(ratio)
    expected = unet_flow.shifted(torch.tensor(LEVELS, dtype=torch.float64), ratio)
    found = [objective.quantile(level, objective.shift_at(resolution)) for level in LEVELS]
    assert found == pytest.approx(expected.tolist())


def test_a_density_with_its_own_options_is_kept() -> None:
    data = {"name": "x", "model": {"family": "sdxl"}, "data": {"path": "."}}
    kept = validate(data | {"objective": {"name": "flow", "logit_mean": 0.5}}, "x", needs_model=False).objective
    assert (kept.sigma, kept.logit_mean, kept.shift) == ("logit_normal", 0.5, 2.5)
    of_sd3 = validate({"name": "x", "objective": {"name": "flow"}, "data": {"path": "."}}, "x", needs_model=False)
    assert (of_sd3.objective.sigma, of_sd3.objective.shift) == ("logit_normal", "auto"), "SD3 keeps its own"


@pytest.mark.parametrize("family", [SDXL, SD15])
def test_pictures_are_drawn_by_eulers_method_at_the_objectives_shift(
    family: type[Any], unet_pipeline: Callable[..., Path]
) -> None:
    """Whatever the base's scheduler says; times are never rounded."""
    model = family(pretrained=str(unet_pipeline("sdxl" if family is SDXL else "sd15")))
    for objective, size, ratio in (
        (Flow(shift=2.5, round_time=True), (1024, 1024), 2.5),
        (Flow(shift="resolution"), (1536, 1024), unet_flow.ratio_of(1536, 1024)),
        (Flow(), (512, 2048), 3.0),
    ):
        solver = model.solver(objective, size, 8, 2)
        levels = unet_flow.shifted(torch.linspace(1, 0, 9), ratio)[2:]
        torch.testing.assert_close(solver.sigmas, levels, rtol=0, atol=1e-6)
        torch.testing.assert_close(solver.times, 1000 * levels[:-1], rtol=0, atol=1e-3)
    assert type(model.solver(Ddpm(), (64, 64), 8, 0)).__name__ == "DpmSolver"


def test_the_cards_scheduler_takes_the_same_steps_in_diffusers() -> None:
    """Its levels begin at 0.999 of the noise and its times are whole; a step between two levels is the same."""
    conventions = SDXL.flow._replace(shift=2.5)
    name, options = Flow().diffusers_scheduler(conventions) or ("", {})
    assert name == "DPMSolverMultistepScheduler"
    theirs = DPMSolverMultistepScheduler.from_config(SCHEDULER, **options)
    theirs.set_timesteps(12)
    ours = Flow().solver(SCHEDULER, 12, 0, conventions, lambda: 0)
    torch.testing.assert_close(theirs.sigmas, ours.sigmas, rtol=0, atol=1e-3)
    z, velocity = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    for index, time in enumerate(theirs.timesteps):
        stepped = theirs.step(velocity, time, z).prev_sample
        expected = z + (theirs.sigmas[index + 1] - theirs.sigmas[index]) * velocity
        torch.testing.assert_close(stepped, expected, rtol=1e-5, atol=1e-5)
        z = stepped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"min_snr_gamma": 5}}, "objective.min_snr_gamma: unknown field. Only objective.name ddpm has"),
        ({"objective": {"zero_terminal_snr": True}}, "zero_terminal_snr: unknown field. Only objective.name ddpm has"),
        ({"objective": {"prediction": "v"}}, "objective.prediction: unknown field. Only objective.name ddpm has"),
        ({"model": {"vae_scale": 0}}, "model.vae_scale: 0 does not fit"),
    ],
)
def test_what_flow_has_no_place_for_is_refused(
    changes: dict, message: str, unet_pipeline: Callable[..., Path], tiny_config: dict
) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config_of(tiny_config, unet_pipeline("sdxl"), **changes), "x")


def test_whole_times_are_for_unets(tiny_config: dict) -> None:
    with pytest.raises(ConfigError, match=r"objective.round_time: true is for models with a UNet alone. Use false"):
        validate(tiny_config | {"objective": {"name": "flow", "round_time": True}}, "x")


def test_a_scheduler_that_says_otherwise_is_refused() -> None:
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 2.5, "num_train_timesteps": 1000}
    retrained = Flow(shift=2.5).scheduler_config(SCHEDULER, SDXL.flow)
    for told in (flow, retrained):
        assert not list(Flow().problems(lambda told=told: told, SDXL.flow))
        (problem,) = Ddpm().problems(lambda told=told: told, SDXL.flow)
        assert "ddpm, but the model's scheduler, " in problem.message and "Use objective.name flow" in problem.message
    (problem,) = Flow().problems(lambda: {"_class_name": "EDMEulerScheduler"}, SDXL.flow)
    assert "as in Playground 2.5" in problem.message
    assert not list(Ddpm().problems(lambda: SCHEDULER, SDXL.flow))


def test_a_run_by_flow_does_not_go_on_by_another_objective(
    unet_pipeline: Callable[..., Path], tiny_config: dict
) -> None:
    raw = config_of(tiny_config, unet_pipeline("sdxl"), checkpoint={"every": 1})
    run_with(raw)
    with pytest.raises(UserError, match=r"objective"):
        run_with({**raw, "objective": {"name": "ddpm"}, "train": {**raw["train"], "steps": 2}}, "latest")


def test_check_says_what_no_file_tells(unet_pipeline: Callable[..., Path], tiny_config: dict) -> None:
    said = explain(validate(config_of(tiny_config, unet_pipeline("sdxl")), "x"))
    assert "predicts   the velocity noise - z_0 of rectified flow, by objective.name; shift 2.5" in said
    assert "nothing in the files tells whether" in said
    of_noise = explain(validate(config_of(tiny_config, unet_pipeline("sdxl"), objective={"name": "ddpm"}), "x"))
    assert "nothing in the files" not in of_noise
    assert "predicts " not in explain(validate(tiny_config, "x")), "SD3 has no choice"


def test_a_run_begins_with_the_loss_of_one_step_by_each_objective(
    unet_pipeline: Callable[..., Path], tiny_config: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the base alone, without weights of levels, and with no judgement."""
    shown, printed = {"prompts": [], "loss_samples": 1}, list[dict[str, float]]()
    for objective in ({"name": "flow"}, {"name": "ddpm", "min_snr_gamma": 1e-6}):
        capsys.readouterr()
        raw = config_of(tiny_config, unet_pipeline("sdxl"), validation=shown)
        run_with({**raw, "objective": objective})
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("base    loss of one step")]
        losses = {words[2]: float(words[0]) for words in (part.split() for part in line.partition(": ")[2].split(", "))}
        assert set(losses) == {"flow", "ddpm"} and 0.1 < losses["ddpm"] < losses["flow"] < 10
        printed.append(losses)
        assert line.endswith(f"(the run trains by {objective['name']})")
    assert printed[0] == printed[1], "the run's own objective changes neither"


def test_card_and_header_say_what_comfyui_needs(run: Path) -> None:
    header, card = LoraHeader(run / "pytorch_lora_weights.safetensors"), (run / "README.md").read_text()
    sentence = "In ComfyUI, put the node ModelSamplingSD3 with shift 2.5 between the model"
    assert sentence in header.metadata["modelspec.usage_hint"] and header.objective == "flow"
    assert sentence in card and "| objective | flow: the velocity noise - z_0" in card
    assert "use_flow_sigmas=True, flow_shift=2.5, solver_order=1" in card


def test_loras_of_another_objective_are_named(
    run: Path, unet_pipeline: Callable[..., Path], tiny_config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the stack and generate, by merge and mix, from the files' headers alone."""
    flow, noise = run / "pytorch_lora_weights.safetensors", tmp_path / "noise.safetensors"
    base = str(unet_pipeline("sdxl"))
    told = json.loads(LoraHeader(flow).metadata["simpletune_config"]) | {"objective": {"name": "ddpm"}}
    save_file(load_file(flow), noise, {"simpletune_config": json.dumps(told)})
    stack = config_of(tiny_config, Path(base), model={"loras": [str(noise)]})
    require_lora_families(validate(stack, "x"))
    assert f"model.loras: {noise} was trained by ddpm, as its header says, and the base is used by flow" in (
        said := capsys.readouterr().out
    ), said
    require_lora_families(validate(merged(stack, model={"loras": [str(flow)]}), "x"))
    assert not capsys.readouterr().out

    draw = ["generate", "--model", base, "--prompt", "x", "--size", "64x64", "--steps", "1", "--guidance", "1"]
    draw += ["--device", "cpu", "--precision", "fp32", "--out", str(tmp_path / "x.png"), "--overwrite"]
    assert main([*draw, "--lora", str(flow)]) == 0
    assert "was trained by flow, as its header says, and the base is used by ddpm" in capsys.readouterr().out
    assert main([*draw, "--lora", str(flow), "--objective", "flow"]) == 0
    assert "as its header says" not in capsys.readouterr().out
    assert main([*draw, "--run", str(run), "--objective", "flow"]) == 2
    assert "--objective" in capsys.readouterr().err

    several = "trained by different objectives, whose updates do not suit each other"
    assert main(["mix", str(flow), str(noise), "--out", str(tmp_path / "mixed.safetensors")]) == 0
    assert several in capsys.readouterr().out and LoraHeader(tmp_path / "mixed.safetensors").objective is None
    assert main(["mix", str(flow), str(flow), "--out", str(tmp_path / "same.safetensors")]) == 0
    assert several not in capsys.readouterr().out and LoraHeader(tmp_path / "same.safetensors").objective == "flow"
    assert main(["merge", str(flow), str(noise), "--base", base, "--out", str(tmp_path / "merged")]) == 0
    assert f"{several}: {flow.name} by flow, noise.safetensors by ddpm" in capsys.readouterr().out
    exported = tmp_path / "kohya.safetensors"
    assert main(["export", str(run), "--format", "diffusers", "--out", str(exported)]) == 0
    header = LoraHeader(exported)
    assert header.objective == "flow" and "ModelSamplingSD3" in header.metadata["modelspec.usage_hint"]


def test_a_full_run_on_a_base_that_predicted_v_leaves_no_mark_of_it(
    unet_pipeline: Callable[..., Path], tiny_config: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, names = config_of(tiny_config, unet_pipeline("v")) | {"adapter": {"method": "full"}}, dict[str, list[str]]()
    for objective in ("flow", "ddpm"):
        whole = run_with(raw | {"name": objective, "objective": {"name": objective}})
        file = tmp_path / f"{objective}.safetensors"
        assert main(["merge", "--base", str(whole), "--out", str(file)]) == 0
        names[objective] = [name for name in read_header(file) if "." not in name]
    assert "v_pred" in names["ddpm"] and not {"v_pred", "ztsnr"} & set(names["flow"])
    lora = tmp_path / "noise.safetensors"
    save_file({"unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight": torch.zeros(1, 64),
               "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_B.weight": torch.zeros(64, 1)},
              lora, {"simpletune_objective": "ddpm"})  # fmt: skip
    base = str(tmp_path.joinpath("runs", "flow"))
    assert main(["merge", str(lora), "--base", base, "--out", str(tmp_path / "both")]) == 0
    assert f"noise.safetensors by ddpm, {base} by flow" in capsys.readouterr().out


def test_init_has_a_place_to_say_it(tiny_images: Path) -> None:
    seen = inspect_folder(tiny_images)
    found = suggest(tiny_images, Answers(model=SDXL().pretrained, objective="flow"), None, seen)
    assert found.config["objective"] == {"name": "flow"}
    assert any(each.path == "objective.name" and "no file tells" in each.why for each in found.reasons)
    usual = suggest(tiny_images, Answers(model=SDXL().pretrained), None, seen)
    assert usual.config["objective"] == {"name": "ddpm", "min_snr_gamma": 5}
    assert set(OBJECTIVES) == {name for family in FAMILIES for name in family.objectives}


EQ = {"vae_scale": 0.1406, "vae_shift": -0.4743, "vae_padding": "reflect"}


def test_an_autoencoder_has_its_own_scale_shift_and_padding(unet_pipeline: Callable[..., Path]) -> None:
    """Of a folder and of a file alike; the borders differ by the padding, and so does the cache's key."""
    folder = str(unet_pipeline("sdxl"))
    plain, own = SDXL(pretrained=folder), SDXL(pretrained=folder, **EQ)
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    vae, changed = (model.autoencoder.load(CPU, torch.float32) for model in (plain, own))
    zeros = SDXL(pretrained=folder, **{**EQ, "vae_padding": "zeros"}).autoencoder
    with torch.no_grad():
        raw = plain.autoencoder.encode(vae, pixels) / vae.config.scaling_factor
        shifted = zeros.encode(zeros.load(CPU, torch.float32), pixels)
        found = own.autoencoder.encode(changed, pixels)
        torch.testing.assert_close(shifted, (raw + 0.4743) * 0.1406, rtol=1e-5, atol=1e-6)
        for module in vae.modules():  # as the forks: whatever a convolution pads by itself
            if isinstance(module, torch.nn.Conv2d) and any(module.padding):
                module.padding_mode = "reflect"
        reflected = plain.autoencoder.encode(vae, pixels) / vae.config.scaling_factor
        torch.testing.assert_close(found, (reflected + 0.4743) * 0.1406, rtol=1e-5, atol=1e-6)
        assert (found - shifted).abs().max() > 1e-4
        drawn = own.autoencoder.decode(changed, found)
        assert drawn.shape == (1, 3, 64, 64)
    prints = [SDXL(pretrained=folder, **{name: EQ[name]}).files.part("vae").fingerprint() for name in EQ]
    assert len({*prints, plain.files.part("vae").fingerprint(), own.files.part("vae").fingerprint()}) == 5
    empty = own.autoencoder.empty(torch.float32)
    assert empty.config.scaling_factor == 0.1406 and empty.encoder.conv_in.padding_mode == "reflect"


def test_the_autoencoder_in_a_single_file_takes_them_too(unet_pipeline: Callable[..., Path], tmp_path: Path) -> None:
    folder = unet_pipeline("sdxl", True)
    file = original_sdxl.write(folder, tmp_path / "rf.safetensors")
    of_file = {"pretrained": str(file), "text_encoders": str(folder)}
    plain, own, same = SDXL(**of_file), SDXL(**of_file, **EQ), SDXL(pretrained=str(folder), **EQ)
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    encoded = [
        model.autoencoder.encode(model.autoencoder.load(CPU, torch.float32), pixels) for model in (plain, own, same)
    ]
    torch.testing.assert_close(encoded[1], encoded[2], rtol=1e-5, atol=1e-6)
    assert (encoded[0] - encoded[1]).abs().max() > 1e-3
    assert own.files.part("vae").fingerprint() != plain.files.part("vae").fingerprint()
    assert not list(own.files.problems())


def test_an_autoencoders_folder_says_it_itself(unet_pipeline: Callable[..., Path], tmp_path: Path) -> None:
    vae = SDXL(pretrained=str(unet_pipeline("sdxl"))).autoencoder.load(CPU, torch.float32)
    vae.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    told = json.loads(file.read_text()) | {"scaling_factor": 0.1406, "shift_factor": -0.4743}
    file.write_text(json.dumps(told | {"padding_mode": "reflect"}))
    model = SDXL(pretrained=str(unet_pipeline("sdxl")), vae=str(tmp_path))
    found = model.autoencoder.load(CPU, torch.float32)
    assert found.config.shift_factor == -0.4743 and found.decoder.conv_out.padding_mode == "reflect"
    file.write_text(json.dumps(told | {"padding_mode": "circular"}))
    with pytest.raises(UserError, match=r"the padding_mode 'circular' in its config.json. Use zeros or reflect"):
        model.autoencoder.load(CPU, torch.float32)
    file.write_text(json.dumps(told | {"_class_name": "AutoencoderTiny"}))
    with pytest.raises(UserError, match=r"AutoencoderTiny, whose latents scaling_factor 0.2 would not fit"):
        model.model_copy(update={"vae_scale": 0.2}).autoencoder.load(CPU, torch.float32)


def test_a_family_whose_scheduler_tells_the_shift_keeps_its_conventions() -> None:
    sd3 = FAMILIES[0]
    assert sd3.conventions(Flow(shift=5.0), 1024) is sd3.flow and Flow().usage(sd3.flow) is None
    assert SDXL().conventions(Flow(shift=5.0), 1024).shift == 5.0
