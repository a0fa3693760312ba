"""Merge, mix, extract, resize and export as a user runs them, and what diffusers makes of the files."""

from __future__ import annotations

import copy
import functools
import json
import logging
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import original_layout
import pytest
import torch
from blocks import predict_velocity
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from random_loras import random_lora
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from torch import nn

from simpletune.adapters.files.attach import fold_lora, load_loras
from simpletune.adapters.files.base_reader import BaseReader, locate_denoiser
from simpletune.adapters.files.extract import extract
from simpletune.adapters.files.factors import resize_update
from simpletune.adapters.files.merge import _cast
from simpletune.adapters.files.mix import METHODS, PRUNING, Recipe, _mix_by_peft, mix
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.updates import LoraUpdate
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods.layers import all_layers
from simpletune.apps.cli import lora as verbs
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.engine.quant.precision import FP32, Int8, Nf4
from simpletune.models.sd3.sd3_option import SD3
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import SafetensorsWriter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, one of them the last."""
    return original_layout.build(tmp_path_factory.mktemp("tools") / "pipeline", layers=2, heads=2)


@pytest.fixture(scope="module")
def single(pipeline: Path) -> Path:
    return original_layout.write(pipeline, pipeline.parent / "single.safetensors")


@pytest.fixture(scope="module")
def files(pipeline: Path) -> dict[str, Path]:
    """One LoRA in three layouts, and another one."""
    folder = pipeline.parent / "loras"
    updates = random_lora(pipeline, 1)
    found = {layout: write_lora(updates, folder / f"{layout}.safetensors", layout) for layout in verbs.FORMATS}
    return found | {"other": write_lora(random_lora(pipeline, 2, 3), folder / "other.safetensors", "kohya")}


@functools.cache
def in_fp32(pipeline: Path) -> nn.Module:
    return SD3().model_copy(update={"pretrained": str(pipeline)}).load_denoiser(FP32(), CPU)


def base_model(pipeline: Path) -> nn.Module:
    return copy.deepcopy(in_fp32(pipeline))


def diffusers_own(pipeline: Path) -> StableDiffusion3Pipeline:
    """diffusers' pipeline, of which only the transformer is used."""
    unused = dict.fromkeys(f"{part}{n}" for part in ("tokenizer", "text_encoder") for n in ("", "_2", "_3"))
    return StableDiffusion3Pipeline.from_pretrained(pipeline, vae=None, **unused, dtype=torch.float32)


@torch.no_grad()
def velocity(model: nn.Module) -> torch.Tensor:
    config = model.config
    generator = torch.Generator().manual_seed(0)
    return predict_velocity(
        model,
        torch.randn(2, 16, 4, 4, generator=generator),
        torch.tensor([0.3, 0.8]),
        torch.randn(2, 9, config["joint_attention_dim"], generator=generator),
        torch.randn(2, config["pooled_projection_dim"], generator=generator),
        dtype=torch.float32,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """fp32, 1e-5 of the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


@functools.cache
def live(pipeline: Path, *loras: tuple[Path, float]) -> torch.Tensor:
    model = base_model(pipeline)
    load_loras(model, loras)
    return velocity(model)


def test_the_layouts_do_the_same_live_and_the_same_as_in_diffusers(pipeline: Path, files: dict[str, Path]) -> None:
    expected = live(pipeline, (files["diffusers"], 1.0))
    base = velocity(base_model(pipeline))
    assert (expected - base).abs().max() > 0.1 * base.abs().max()
    for layout in ("kohya", "comfy"):
        assert_close(live(pipeline, (files[layout], 1.0)), expected)
    theirs = diffusers_own(pipeline)
    theirs.load_lora_weights(files["diffusers"])
    assert_close(velocity(theirs.transformer), expected)


def test_what_diffusers_makes_of_the_other_layouts(pipeline: Path, files: dict[str, Path], caplog, tmp_path) -> None:
    """What ``inspect`` says of diffusers is what diffusers does."""
    theirs = diffusers_own(pipeline)
    base = velocity(theirs.transformer)
    with caplog.at_level(logging.ERROR):
        theirs.load_lora_weights(files["kohya"])
    torch.testing.assert_close(velocity(theirs.transformer), base, rtol=0, atol=0)
    with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
        theirs.load_lora_weights(files["comfy"])
    updates = random_lora(pipeline, 1)
    for number, name in enumerate(sorted(updates)):  # other ranks in every third layer
        if number % 3 == 0:
            updates[name] = resize_update(updates[name], 2, None)[0]
    file = write_lora(updates, tmp_path / "ranks.safetensors")
    theirs.load_lora_weights(file)
    assert_close(velocity(theirs.transformer), live(pipeline, (file, 1.0)))


def test_two_loras_at_once_are_the_sum_of_their_deltas(pipeline: Path, files: dict[str, Path]) -> None:
    first, second = read_lora(files["diffusers"]), read_lora(files["other"])
    expected = base_model(pipeline)
    for name, parameter in expected.named_parameters():
        layer = name.removesuffix(".weight")
        if layer != name and layer in first:
            parameter.data += 0.7 * first[layer].delta() - 0.5 * second[layer].delta()
    weights = [(files["diffusers"], 0.7), (files["other"], -0.5)]
    model = base_model(pipeline)
    names = load_loras(model, weights)
    assert_close(velocity(model), velocity(expected))
    for strengths, velocities in (
        ((1.0, 0.0), live(pipeline, (files["diffusers"], 1.0))),
        ((0.7, -0.5), velocity(expected)),
    ):
        for _, layer in all_layers(model):
            layer.scaling.update({n: s for n, s in zip(names, strengths, strict=True) if n in layer.scaling})
        assert_close(velocity(model), velocities)
    fold_lora(model)
    assert_close(velocity(model), velocity(expected))
    assert not any("lora" in name for name, _ in model.named_modules())


def test_two_loras_on_a_quantised_base(pipeline: Path, files: dict[str, Path]) -> None:
    model = SD3().model_copy(update={"pretrained": str(pipeline)}).load_denoiser(Int8(compute="fp32"), CPU)
    base = velocity(model)
    load_loras(model, [(files["kohya"], 0.5), (files["other"], 0.5)])
    effect = live(pipeline, (files["kohya"], 0.5), (files["other"], 0.5)) - velocity(base_model(pipeline))
    assert ((velocity(model) - base) - effect).norm() < 0.1 * effect.norm()


@pytest.mark.parametrize(
    ("source", "layout"),
    slow_but(
        [("pipeline", "kohya"), ("transformer", "diffusers")],
        product(("pipeline", "transformer", "single"), ("diffusers", "kohya")),
    ),
)
def test_a_merged_folder_is_the_base_with_the_lora(source, layout, pipeline, single, files, tmp_path, capsys) -> None:
    base = {"pipeline": pipeline, "transformer": pipeline / "transformer", "single": single}[source]
    run("merge", files[layout], "--scale", "0.8", "--base", base, "--out", tmp_path / "merged")
    merged = SD3Transformer2DModel.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_close(velocity(merged), live(pipeline, (files[layout], 0.8)))
    assert "written in F32; rounding lost 0.00% of the update" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["pipeline", pytest.param("single", marks=pytest.mark.slow)])
def test_a_merged_single_file_is_the_base_with_the_loras(source, pipeline, single, files, tmp_path) -> None:
    base, out = {"pipeline": pipeline, "single": single}[source], tmp_path / "merged.safetensors"
    run("merge", f"{files['comfy']}:0.7", f"{files['other']}:0.5", "--base", base, "--out", out)
    state = load_file(out)
    assert set(load_file(single)) == set(state) if source == "single" else set(state) < set(load_file(single))
    if source == "single":
        untouched = [name for name in state if not name.startswith("model.diffusion_model.")]
        assert untouched and all(torch.equal(state[name], load_file(single)[name]) for name in untouched)
    inner = {k.removeprefix("model.diffusion_model."): v for k, v in state.items() if k.startswith("model.")}
    theirs = SD3Transformer2DModel.from_config(BaseReader(str(pipeline)).config)
    theirs.load_state_dict(convert_sd3_transformer_checkpoint_to_diffusers(inner))
    assert_close(velocity(theirs.eval()), live(pipeline, (files["comfy"], 0.7), (files["other"], 0.5)))
    with safe_open(out, framework="pt") as handle:
        made = json.loads(handle.metadata()["simpletune_made_from"])
    assert made == {"base": base.name, "loras": [["comfy.safetensors", 0.7], ["other.safetensors", 0.5]]}


def test_strength_zero_is_the_base_bit_for_bit_and_bf16_says_what_rounding_costs(
    pipeline, files, tmp_path, capsys
) -> None:
    words = ["merge", files["kohya"], "--base", pipeline, "--out"]
    run(*words, tmp_path / "zero", "--scale", "0")
    expected, actual = (original_layout.state_of(place) for place in (pipeline / "transformer", tmp_path / "zero"))
    assert set(actual) == set(expected) and all(torch.equal(actual[name], expected[name]) for name in expected)
    capsys.readouterr()
    run(*words, tmp_path / "bf16", "--scale", "0.05", "--dtype", "bf16")
    assert {tensor.dtype for tensor in original_layout.state_of(tmp_path / "bf16").values()} == {torch.bfloat16}
    assert 1 < float(capsys.readouterr().out.split("rounding lost ")[1].split("%")[0]) < 50


@pytest.mark.parametrize(
    "precision",
    [
        Int8(compute="fp32"),
        Nf4(compute="fp32"),
        pytest.param(Nf4(compute="fp32", modulation="nf4"), marks=pytest.mark.slow),
        Int8(compute="fp32", rotation="hadamard"),
        pytest.param(Nf4(compute="fp32", rotation="hadamard"), marks=pytest.mark.slow),
    ],
)
def test_a_kept_quantised_base_is_dequantised(precision, pipeline, files, tmp_path) -> None:
    model = SD3().model_copy(update={"pretrained": str(pipeline)})
    quantised = model.load_denoiser(precision, CPU, cache=tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "quantised").iterdir()
    run("merge", files["kohya"], "--base", kept, "--out", tmp_path / "merged")
    load_loras(quantised, [(files["kohya"], 1.0)])
    merged = SD3Transformer2DModel.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_close(velocity(merged), velocity(quantised))


@pytest.fixture(scope="module")
def tuned(pipeline: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model that differs from the base at full rank in some layers, and in one bias; and its tensors."""
    state = original_layout.state_of(pipeline / "transformer")
    generator = torch.Generator().manual_seed(3)
    for name in ("transformer_blocks.0.attn.to_q.weight", "transformer_blocks.1.norm1_context.linear.weight",
                 "transformer_blocks.0.ff.net.0.proj.weight", "proj_out.bias"):  # fmt: skip
        state[name] = state[name] + 0.1 * torch.randn(state[name].shape, generator=generator)
    folder = pipeline.parent / "tuned"
    folder.mkdir()
    (folder / "config.json").write_text((pipeline / "transformer" / "config.json").read_text())
    save_file(state, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    return folder, state


def test_extract_at_full_rank_is_the_difference(pipeline, single, tuned, tmp_path, capsys) -> None:
    folder, state = tuned
    run("extract", single, folder, "--rank", "9999", "--out", tmp_path / "x.safetensors", "--format", "kohya")
    base = original_layout.state_of(pipeline / "transformer")
    updates = read_lora(tmp_path / "x.safetensors")
    assert len(updates) == 3
    for name, update in updates.items():
        difference = state[f"{name}.weight"] - base[f"{name}.weight"]
        torch.testing.assert_close(update.delta(), difference, rtol=0, atol=1e-5)
    out = capsys.readouterr().out
    assert "3 layers: residual 0.000% of the difference" in out
    assert "left out 1 tensors" in out and "proj_out.bias" in out


def test_extract_leaves_out_the_smaller_singular_values(pipeline, tuned) -> None:
    """At a rank, and by energy: the fewest that hold it."""
    folder, state = tuned
    base, readers = (
        original_layout.state_of(pipeline / "transformer"),
        (BaseReader(str(pipeline)), BaseReader(str(folder))),
    )
    found = extract(*readers, rank=5, energy=None, device=CPU)
    whole = rest = 0.0
    for row in found.rows:
        difference = (state[f"{row.layer}.weight"] - base[f"{row.layer}.weight"]).double()
        discarded = torch.linalg.svdvals(difference)[5:].square().sum()
        error = (difference - found.updates[row.layer].delta().double()).square().sum()
        assert found.updates[row.layer].rank == row.rank == 5
        assert error.item() == pytest.approx(discarded.item(), rel=1e-4)
        assert row.residual**2 == pytest.approx(discarded.item(), rel=1e-4)
        whole, rest = whole + difference.square().sum().item(), rest + discarded.item()
    assert found.relative == pytest.approx((rest / whole) ** 0.5, rel=1e-4)
    for row in extract(*readers, rank=None, energy=0.6, device=CPU).rows:
        squares = torch.linalg.svdvals(state[f"{row.layer}.weight"] - base[f"{row.layer}.weight"]).square()
        share = squares.cumsum(0) / squares.sum()
        assert share[row.rank - 1] >= 0.6 > share[row.rank - 2]
        assert row.relative == pytest.approx((1 - share[row.rank - 1].item()) ** 0.5, rel=1e-3)


def test_extract_gives_back_a_merged_lora(pipeline, files, tmp_path) -> None:
    run("merge", files["diffusers"], "--base", pipeline, "--out", tmp_path / "merged")
    run("extract", pipeline, tmp_path / "merged", "--energy", "0.9999", "--out", tmp_path / "x.safetensors")
    old, new = read_lora(files["diffusers"]), read_lora(tmp_path / "x.safetensors")
    assert set(old) == set(new)
    for name in old:
        assert new[name].rank == 4
        torch.testing.assert_close(new[name].delta(), old[name].delta(), rtol=0, atol=1e-4)


def test_extract_refuses_models_that_do_not_fit(pipeline, tiny_pipeline) -> None:
    with pytest.raises(UserError, match="different architectures: .*has no transformer_blocks"):
        extract(BaseReader(str(pipeline)), BaseReader(str(tiny_pipeline)), 4, None, CPU)
    with pytest.raises(UserError, match="do not differ in any linear layer"):
        extract(BaseReader(str(pipeline)), BaseReader(str(pipeline / "transformer")), 4, None, CPU)


def test_mix_by_cat_is_the_sum_of_the_deltas(pipeline, files, tmp_path) -> None:
    run("mix", f"{files['kohya']}:0.7", f"{files['other']}:-0.5", "--out", tmp_path / "x.safetensors")
    mixed, first, second = (read_lora(file) for file in (tmp_path / "x.safetensors", files["kohya"], files["other"]))
    for name, update in mixed.items():
        assert update.rank == 7
        expected = 0.7 * first[name].delta() - 0.5 * second[name].delta()
        torch.testing.assert_close(update.delta(), expected, rtol=0, atol=1e-5)
    both = live(pipeline, (files["kohya"], 0.7), (files["other"], -0.5))
    assert_close(live(pipeline, (tmp_path / "x.safetensors", 1.0)), both)


def test_mix_by_svd_at_enough_rank_is_the_sum_too() -> None:
    torch.manual_seed(0)
    a, b = (LoraUpdate(torch.randn(3, 20), torch.randn(30, 3), scale) for scale in (0.5, 2.0))
    mixed = mix([({"l": a}, 0.7), ({"l": b}, 0.5)], Recipe("svd", rank=6))["l"]
    torch.testing.assert_close(mixed.delta(), 0.7 * a.delta() + 0.5 * b.delta(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_mixes_and_repeats_itself(method: str) -> None:
    torch.manual_seed(0)
    a, b = (LoraUpdate(torch.randn(3, 20), torch.randn(30, 3)) for _ in range(2))
    first, second = (mix([({"l": a, "m": a}, 0.7), ({"l": b}, 0.5)], Recipe(method, seed=4)) for _ in range(2))
    assert set(first) == {"l", "m"}
    assert all(torch.equal(first[name].up, second[name].up) and first[name].delta().norm() > 0 for name in first)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in PRUNING])
def test_mixing_without_peft_gives_its_bits(method: str) -> None:
    torch.manual_seed(0)
    a, b = (LoraUpdate(torch.randn(3, 20).half(), torch.randn(30, 3).half(), scale) for scale in (0.7, 2.3))
    for parts in ([(a, 0.7), (b, -0.45)], [(a, -0.6)]):
        recipe = Recipe(method, rank=2 if method == "svd" else None)
        mine = mix([({"l": update}, weight) for update, weight in parts], recipe)["l"]
        theirs = _mix_by_peft("l", parts, recipe)
        assert torch.equal(mine.down, theirs.down) and torch.equal(mine.up, theirs.up) and mine.scale == theirs.scale


def test_mix_says_which_methods_take_different_ranks(files, tmp_path) -> None:
    words = ["mix", str(files["kohya"]), str(files["other"]), "--out", str(tmp_path / "x.safetensors")]
    assert main([*words, "--method", "linear"]) == 2
    assert main([*words, "--rank", "4"]) == 2
    assert main(["mix", str(files["kohya"]), "--out", str(tmp_path / "x.safetensors")]) == 2
    assert not (tmp_path / "x.safetensors").exists()
    assert verbs.METHODS == METHODS


def test_resize_is_the_truncated_product_by_rank_or_energy(files, tmp_path, capsys) -> None:
    run("resize", files["kohya"], "--rank", "2", "--out", tmp_path / "x.safetensors")
    old, new = read_lora(files["kohya"]), read_lora(tmp_path / "x.safetensors")
    lost = whole = 0.0
    for name, update in old.items():
        u, s, vt = torch.linalg.svd(update.delta(), full_matrices=False)
        torch.testing.assert_close(new[name].delta(), u[:, :2] * s[:2] @ vt[:2], rtol=0, atol=1e-5)
        lost, whole = lost + s[2:].square().sum().item(), whole + s.square().sum().item()
    assert f"rank 4 before, 2 now; lost {(lost / whole) ** 0.5:.3%}" in capsys.readouterr().out
    squares = s.square()
    smaller, error = resize_update(update, None, 0.7)
    assert error == pytest.approx(squares[smaller.rank :].sum().item(), rel=1e-3)
    assert squares[: smaller.rank].sum() >= 0.7 * squares.sum() > squares[: smaller.rank - 1].sum()
    larger, error = resize_update(update, 9, None)
    assert larger.rank == 9 and error == 0
    torch.testing.assert_close(larger.delta(), update.delta(), rtol=0, atol=1e-5)
    assert larger.down[-1].any() and not larger.up[:, -1].any()


def test_export_of_a_run_fills_the_header(pipeline, files, tiny_config, tmp_path, capsys) -> None:
    folder = tmp_path / "my_style"
    folder.mkdir()
    settings = {**tiny_config, "name": "my_style", "model": {"pretrained": str(pipeline)}}
    settings["data"] = {**tiny_config["data"], "prompt": "a photo of sks dog"}
    (folder / "config.json").write_text(validate(settings, "test").model_dump_json(by_alias=True))
    write_lora(read_lora(files["kohya"]), folder / "pytorch_lora_weights.safetensors")
    (folder / "summary.json").write_text('{"steps": 37}')
    run("export", folder, "--format", "kohya", "--dtype", "bf16")
    with safe_open(folder / "my_style_kohya.safetensors", framework="pt") as handle:
        header = handle.metadata()
        assert handle.get_tensor("lora_unet_final_layer_linear.lora_up.weight").dtype is torch.bfloat16
    assert header["modelspec.trigger_phrase"] == "a photo of sks dog"
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "4")
    assert header["ss_steps"] == header["ss_max_train_steps"] == "37"
    assert (header["ss_learning_rate"], header["ss_sd_model_name"]) == ("0.01", "pipeline")
    assert not any(str(tmp_path.parent) in value or str(pipeline.parent) in value for value in header.values())
    run("inspect", folder / "my_style_kohya.safetensors", "--json")
    about = json.loads(capsys.readouterr().out.split("MiB\n")[1])
    assert about["layout"] == "kohya" and about["base"]["ss_sd_model_name"] == "pipeline"
    run("inspect", folder / "my_style_kohya.safetensors")
    assert "base       ss_sd_model_name: pipeline" in capsys.readouterr().out
    run("inspect", folder)
    assert f"file       {folder / 'pytorch_lora_weights.safetensors'}" in capsys.readouterr().out
    run("merge", folder, "--out", tmp_path / "merged")  # the run knows its base
    assert (tmp_path / "merged" / "config.json").is_file()
    settings["model"]["init"] = "random"
    (folder / "config.json").write_text(validate(settings, "test").model_dump_json(by_alias=True))
    assert main(["merge", str(folder), "--out", str(tmp_path / "random")]) == 2
    assert "trained on random weights" in capsys.readouterr().err
    (folder / "config.json").write_text('{"name": "older", "gone": 1}')
    run("export", folder, "--format", "comfy")
    assert "is from another version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export {lora} --format kohya --out {lora}", "is the input file"),
        ("export {folder}/nothing --format kohya", "does not exist"),
        ("export {lora} --format kohya --out {folder}/x.pt", "must end in .safetensors"),
        ("merge {lora} --out {folder}/m", "--base: name the model to merge into"),
        ("merge {lora} --base {base} --out {base}", "is not empty"),
        ("merge {lora} --base {base} --out {folder}/m --format single-file", "does not end in"),
        ("merge {lora} --base {tiny} --out {folder}/m", "layers of the LoRA are not in"),
        ("merge {lora} --base {folder}/no.safetensors --out {folder}/m", "does not exist"),
        ("resize {lora} --out {folder}/x.safetensors", "give --rank, such as"),
        ("resize {lora} --rank 2 --energy 0.5 --out {folder}/x.safetensors", "or --energy, not both"),
        ("merge {lora} --base {base} --out {folder}/m.safetensors --format diffusers", "but --format diffusers writes"),
        ("merge {folder} --base {base} --out {folder}/m", "contains neither pytorch_lora_weights.safetensors nor tran"),
        ("mix {lora}:much --out {folder}/x.safetensors", "'much' is not a number"),
        ("resize {lora} --energy 2 --out {folder}/x.safetensors", "2 is not a share between 0 and 1"),
    ],
)
def test_mistakes_are_explained(words: str, message, files, pipeline, tiny_pipeline, tmp_path, capsys) -> None:
    names = {"lora": files["kohya"], "folder": tmp_path, "base": pipeline, "tiny": tiny_pipeline}
    assert main([word.format(**names) for word in words.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_verb_replaces_a_file_unless_told(files, pipeline, tmp_path, capsys) -> None:
    lora, out = str(files["kohya"]), tmp_path / "mine.safetensors"
    verbs = {
        "export": [lora, "--format", "comfy"], "resize": [lora, "--rank", "2"], "mix": [lora, str(files["other"])],
        "merge": [lora, "--base", str(pipeline)], "extract": [str(pipeline), str(pipeline), "--rank", "1"],
    }  # fmt: skip
    for verb, words in verbs.items():
        out.write_bytes(b"mine")
        assert main([verb, *words, "--out", str(out)]) == 2, verb
        assert f"--out: {out} exists. Choose another name, or add --overwrite" in capsys.readouterr().err
        assert out.read_bytes() == b"mine"
        if verb != "extract":  # two equal models: there would be nothing to write
            assert main([verb, *words, "--out", str(out), "--overwrite"]) == 0
            assert out.stat().st_size > 1000
    capsys.readouterr()
    shutil.copy(lora, tmp_path / "x.safetensors")
    for code in (0, 2):
        assert main(["export", str(tmp_path / "x.safetensors"), "--format", "comfy"]) == code
    assert "x_comfy.safetensors exists" in capsys.readouterr().err


def test_a_lora_of_sd35_is_refused_by_sd3(pipeline: Path, tmp_path: Path) -> None:
    updates = random_lora(pipeline, 1)
    second = {
        name.replace(".attn.", ".attn2."): update
        for name, update in updates.items()
        if ".attn.to_" in name and "add" not in name
    }
    file = write_lora(updates | second, tmp_path / "x.safetensors", "kohya")
    with pytest.raises(UserError, match="for Stable Diffusion 3.5 Medium.*not in this model: .*attn2"):
        load_loras(base_model(pipeline), [(file, 1.0)])
    wide = write_lora(random_lora(pipeline, 1) | {"proj_out": LoraUpdate(torch.ones(1, 9), torch.ones(9, 1))}, file)
    with pytest.raises(UserError, match="proj_out has 9 inputs and 9 outputs; this model has 128 and 64"):
        load_loras(base_model(pipeline), [(wide, 1.0)])


def test_inspect_imports_no_torch_and_the_others_none_of_the_libraries_around_it(files, pipeline, tmp_path) -> None:
    """PEFT imports transformers, and with bitsandbytes seconds of torch's compiler: more than all of a verb's work."""
    names = {"lora": files["kohya"], "other": files["other"], "base": pipeline, "out": tmp_path}
    verbs = (
        "export {lora} --format comfy --out {out}/export.safetensors",
        "resize {lora} --rank 2 --out {out}/resize.safetensors",
        "mix {lora} {other} --method cat --out {out}/cat.safetensors",
        "mix {lora} {other} --method svd --out {out}/svd.safetensors",
        "merge {lora} --base {base} --out {out}/merged",
        "extract {base} {out}/merged --rank 2 --out {out}/extract.safetensors",
    )
    code = (
        "import json, sys; from simpletune.apps.cli.main import main\n"
        "assert main(['inspect', sys.argv[1]]) == 0 and 'torch' not in sys.modules\n"
        "for words in json.loads(sys.argv[2]): assert main(words) == 0, words\n"
        "heavy = ('accelerate', 'bitsandbytes', 'diffusers', 'peft', 'transformers', 'torch._dynamo')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    words = json.dumps([[word.format(**names) for word in verb.split()] for verb in verbs])
    done = subprocess.run([sys.executable, "-c", code, files["kohya"], words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    entries = {"a": ("F32", (2, 3)), "b": ("BF16", (3,)), "c": ("F32", ())}
    a, b, c = torch.arange(6.0).reshape(2, 3), torch.ones(3), torch.tensor(4.0)
    with pytest.raises(RuntimeError), SafetensorsWriter(tmp_path / "x.safetensors", entries, {}) as writer:
        writer.write("a", a)
        raise RuntimeError
    with pytest.raises(ValueError, match="never written: b, c"):
        with SafetensorsWriter(tmp_path / "x.safetensors", entries, {}) as writer:
            writer.write("a", a)
    with pytest.raises(ValueError, match="cannot be written as"):
        with SafetensorsWriter(tmp_path / "x.safetensors", entries, {}) as writer:
            writer.write("a", b)
    assert list(tmp_path.iterdir()) == []
    with SafetensorsWriter(tmp_path / "x.safetensors", entries, {"format": "pt"}) as writer:
        for name, tensor in (("c", c), ("b", b), ("a", a.T.contiguous().T)):
            writer.write(name, tensor)
    state = load_file(tmp_path / "x.safetensors")
    assert torch.equal(state["a"], a) and state["b"].dtype is torch.bfloat16 and state["c"] == 4
    assert (tmp_path / "x.safetensors").stat().st_size == writer.size


def test_a_base_is_located_in_whatever_holds_it(pipeline: Path, single: Path, tmp_path: Path) -> None:
    for name, folder in ((pipeline, None), (pipeline / "transformer", pipeline / "transformer"), (single, None)):
        family, part = locate_denoiser(str(name))
        assert (family.denoiser, part.name) == ("transformer", "transformer")
        assert part.folder == folder or folder is None
    with pytest.raises(UserError, match=r"gone.safetensors does not exist. Check the path"):
        locate_denoiser(str(tmp_path / "gone.safetensors"))
    for name in (str(tmp_path / "gone"), "./gone"):
        with pytest.raises(UserError, match=r"gone does not exist. Give a folder, a .safetensors file or a Hub name"):
            locate_denoiser(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as refused:
        locate_denoiser(str(tmp_path / "empty"))
    assert "empty" in str(refused.value) and "model.pretrained" not in str(refused.value)


def test_a_weight_that_fp16_cannot_hold_is_refused_by_its_name() -> None:
    assert torch.equal(_cast("x", torch.tensor([65504.0]), torch.float16), torch.tensor([65504.0]).half())
    assert _cast("x", torch.tensor([1e30]), torch.bfloat16).isfinite().all()
    with pytest.raises(UserError, match="blocks.0.weight .*fp16"):
        _cast("blocks.0.weight", torch.tensor([1.0, 1e6]), torch.float16)
