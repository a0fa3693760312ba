"""LoRA files as other tools write them: prefixes and adapters' names, types of 8 and 64 bits, DoRA of all forms, OFT's
limit, and what is said of a file that is not read. Expected values are sums by hand over the factors."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import dora_oft
from safetensors.torch import load_file, save_file
from torch import Tensor

from simpletune.adapters.files.attach import factors_of, fold_lora, load_loras
from simpletune.adapters.files.describe import describe, format_description
from simpletune.adapters.files.header import LoraHeader, open_lora
from simpletune.adapters.files.keys import DECOMPOSED, LOHA, LOKR, LORA, OFT, PEFT, plain_key
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.starting_point import require_startable
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.formulas import rotate_rows
from simpletune.adapters.methods.layers import at_strength, updates_disabled
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.apps.cli.main import main
from simpletune.engine.quant.precision import FP32, Int8, Nf4
from simpletune.engine.tensors import row_blocks
from simpletune.models.lora_registry import LAYOUTS
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.system.options import UserError
from simpletune.system.safetensors_file import fp8_value

BASE = "demo:tiny-sdxl"
Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
K = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
CONV = "down_blocks.1.resnets.0.conv1"
FLAT = {layer: layer.replace(".", "_") for layer in (Q, K, CONV)}


@pytest.fixture(scope="module")
def model() -> Any:
    from simpletune.data.demo import resolve

    folder = resolve(BASE, Path(".cache"))
    return SDXL().model_copy(update={"pretrained": str(folder)})


@pytest.fixture(scope="module")
def weights(model: Any) -> dict[str, Tensor]:
    return dict(model.load_denoiser(FP32(), torch.device("cpu")).state_dict())


def factors(weight: Tensor, rank: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, *weight.shape[1:], generator=generator) * 0.3
    return down, torch.randn(len(weight), rank, *(1 for _ in weight.shape[2:]), generator=generator) * 0.3


def loras(weights: dict[str, Tensor], layers: tuple[str, ...] = (Q, K)) -> dict[str, tuple[Tensor, Tensor]]:
    return {layer: factors(weights[f"{layer}.weight"], seed=seed) for seed, layer in enumerate(layers)}


def kohya(weights: dict[str, Tensor], prefix: str = "lora_unet_") -> dict[str, Tensor]:
    found = {}
    for layer, (down, up) in loras(weights).items():
        module = prefix + FLAT[layer]
        found |= {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
        found[f"{module}.alpha"] = torch.tensor(1.0)
    return found


def saved(tensors: dict[str, Tensor], folder: Path, metadata: dict[str, str] | None = None, name: str = "x") -> Path:
    file = folder / f"{name}.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, metadata)
    return file


def merged(file: Path, out: Path, *words: str) -> dict[str, Tensor]:
    assert main(["merge", str(file), "--base", BASE, "--out", str(out), "--dtype", "fp32", *words]) == 0
    return load_file(next(out.glob("*.safetensors")))


def verdicts(file: Path) -> dict[str, tuple[str, str]]:
    return {tool["tool"]: (tool["loads"], "; ".join(tool["notes"])) for tool in describe(file)["tools"]}


def assert_everywhere(file: Path, weights: dict[str, Tensor], expected: dict[str, Tensor], model: Any) -> None:
    """A file changes these weights, and only these, in ``merge`` and live at full and at half strength, folded and by
    what the layer computes."""
    assert verdicts(file)["simpletune"] == ("yes", "")
    found = merged(file, file.with_suffix(""))
    for name, weight in weights.items():
        goal = expected.get(name.removesuffix(".weight"), weight).view_as(weight).float()
        torch.testing.assert_close(found[name], goal, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for strength in (1.0, 0.5):
        live = model.load_denoiser(FP32(), torch.device("cpu"))
        load_loras(live, [(file, strength)])
        for layer, goal in expected.items():
            weight = weights[f"{layer}.weight"]
            goal = torch.lerp(weight, goal.view_as(weight).float(), strength)
            shape = (2, 5, weight.shape[1]) if weight.dim() == 2 else (2, weight.shape[1], 6, 6)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            bias = weights.get(f"{layer}.bias")
            with torch.no_grad():
                y = live.get_submodule(layer)(x)
            if weight.dim() == 2:
                wanted = torch.nn.functional.linear(x, goal, bias)
            else:
                wanted = torch.nn.functional.conv2d(x, goal, bias, padding=1)
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        fold_lora(live)
        for layer, goal in expected.items():
            weight = weights[f"{layer}.weight"]
            goal = torch.lerp(weight, goal.view_as(weight).float(), strength)
            torch.testing.assert_close(live.state_dict()[f"{layer}.weight"], goal, rtol=1e-4, atol=1e-5)


def plain_goal(weights: dict[str, Tensor], scale: float = 0.5) -> dict[str, Tensor]:
    return {layer: weights[f"{layer}.weight"] + scale * up @ down for layer, (down, up) in loras(weights).items()}


# Names


WRAPPED = {  # what stands before and inside the names, and what is said to be left out
    ("unet._orig_mod.", ".", ""): "_orig_mod.",
    ("_orig_mod.unet.", ".", ""): "_orig_mod.",
    ("unet.module.", ".", ""): "module.",
    ("module.unet.", ".", ""): "module.",
    ("module._orig_mod.unet.", ".", ""): "module., _orig_mod.",
    ("unet.base_model.model.", ".", ""): "base_model.model.",
    ("base_model.model.unet.", ".", ""): "base_model.model.",
    ("module.base_model.model.", ".", ""): "module.",
    ("unet.", ".default.", ""): "the adapter's name default",
    ("unet.", ".my-style_2.", ""): "the adapter's name my-style_2",
    ("base_model.model.", ".style.", ""): "the adapter's name style",
    ("base_model.model.unet._orig_mod.", ".style.", ""): "_orig_mod., base_model.model., the adapter's name style",
}


@pytest.mark.parametrize("names", WRAPPED, ids="".join)
def test_words_of_wrappers_and_adapters_are_left_out_and_said(
    names: tuple[str, str, str], weights: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, inside, _ = names
    tensors = {}
    for layer, (down, up) in loras(weights).items():
        tensors |= {f"{before}{layer}.lora_A{inside}weight": down, f"{before}{layer}.lora_B{inside}weight": up}
    file = saved(tensors, tmp_path)
    found = merged(file, tmp_path / "merged")
    assert set(WRAPPED[names].split(", ")) == set(describe(file)["not_read"])
    assert "names read without" in capsys.readouterr().out
    for layer, goal in plain_goal(weights, 1.0).items():
        torch.testing.assert_close(found[f"{layer}.weight"], goal, rtol=1e-5, atol=1e-6)
    about = verdicts(file)
    assert about["diffusers"][0] in ("silently nothing", "refuses") and about["diffusers"][1].endswith("export it")
    out = tmp_path / "exported.safetensors"  # what the sentence says
    assert main(["export", str(file), "--format", "kohya", "--out", str(out)]) == 0
    assert {tool: loads for tool, (loads, _) in verdicts(out).items()} == dict.fromkeys(about, "yes")
    assert {layer: update.delta().tolist() for layer, update in read_lora(out).items()} == {
        layer: update.delta().tolist() for layer, update in read_lora(file).items()
    }


def test_a_text_encoder_s_names_lose_the_same_words(tmp_path: Path) -> None:
    layer = "text_model.encoder.layers.0.self_attn.q_proj"
    tensors = {f"text_encoder.base_model.model.{layer}.lora_A.style.weight": torch.ones(2, 8)}
    tensors[f"text_encoder.base_model.model.{layer}.lora_B.style.weight"] = torch.ones(8, 2)
    assert set(read_lora(saved(tensors, tmp_path))) == {f"text_encoder.{layer}"}


def test_peft_s_factors_of_other_kinds_lose_the_adapter_s_name(weights: dict[str, Tensor], tmp_path: Path) -> None:
    outputs, inputs = weights[f"{Q}.weight"].shape
    tensors = {f"base_model.model.{Q}.lokr_w1.style": torch.randn(2, 2)}
    tensors[f"base_model.model.{Q}.lokr_w2.style"] = torch.randn(outputs // 2, inputs // 2)
    (update,) = read_lora(saved(tensors, tmp_path)).values()
    w1, w2 = tensors.values()
    torch.testing.assert_close(update.delta(), torch.kron(w1, w2))


def test_two_adapters_in_a_file_and_two_names_of_one_layer_are_refused(weights, tmp_path: Path) -> None:
    down, up = factors(weights[f"{Q}.weight"])
    both = {f"unet.{Q}.lora_{f}.{name}.weight": t for name in "ab" for f, t in (("A", down.clone()), ("B", up.clone()))}
    with pytest.raises(UserError, match=r"holds 2 adapters of PEFT: a, b. Save one of them by itself: save_pretrained"):
        open_lora(saved(both, tmp_path))
    twice = {f"unet.{w}{Q}.lora_{f}.weight": t.clone() for w in ("", "module.") for f, t in (("A", down), ("B", up))}
    with pytest.raises(UserError, match=r"has two keys for one factor, unet\.(module\.)?down.* is the second"):
        open_lora(saved(twice, tmp_path))
    assert verdicts(saved(twice, tmp_path))["simpletune"][0] == "refuses"


@pytest.mark.parametrize("prefix", ["lycoris_", "lora_unet_"])
def test_lycoris_names_of_u_nets_are_read_as_kohya_s(prefix: str, weights, model, tmp_path: Path) -> None:
    assert_everywhere(saved(kohya(weights, prefix), tmp_path), weights, plain_goal(weights), model)


@pytest.mark.parametrize("family", LAYOUTS, ids=lambda names: names.title)
def test_every_family_reads_lycoris_names_and_comfyui_is_said_to_load_them(family: Any, tmp_path: Path) -> None:
    layout = next(each for each in LAYOUTS[family] if each.name == "lycoris")
    layer, inputs = (K, 768) if family.title.endswith("1.5 or 2") else (K, 2048)
    if family.denoiser == "transformer":
        layer, inputs = "transformer_blocks.0.attn.to_k", 1536
    tensors = {layout.key(layer, "down"): torch.ones(2, inputs), layout.key(layer, "up"): torch.ones(8, 2)}
    file = saved(tensors | {layout.key(layer, "alpha"): torch.tensor(1.0)}, tmp_path)
    assert set(read_lora(file)) == {layer}
    about = verdicts(file)
    assert about["ComfyUI"][0] == "yes" and about["Forge"][0] == "silently nothing"


STRANGE = ("model.diffusion_model.", "foo.bar.", "lora_foo_")


@pytest.mark.parametrize("prefix", STRANGE)
def test_an_unknown_prefix_is_named_with_the_file_s_family_and_the_printed_command_mends_it(
    prefix: str, weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, flat = {}, prefix.endswith("_")
    for layer, (down, up) in loras(weights).items():
        module = prefix + (FLAT[layer] if flat else layer)
        tensors |= {f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}
    file = saved(tensors, tmp_path, {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"})
    with pytest.raises(UserError) as refused:
        read_lora(file)
    said = str(refused.value)
    assert "4 of 4 keys match no layer of Stable Diffusion XL: " in said and "Stable Diffusion 3" not in said
    assert f"After {prefix!r} they are those of Stable Diffusion XL" in said
    assert verdicts(file)["ComfyUI"] == ("silently nothing", "knows none of its names")
    words = shlex.split(said.partition("To rename them: ")[2])
    subprocess.run([sys.executable, *words[1:]], check=True)
    deltas = [update.delta() for update in read_lora(tmp_path / "x-renamed.safetensors").values()]
    goals = [up @ down for down, up in loras(weights).values()]
    for delta, goal in zip(deltas, goals, strict=True):
        torch.testing.assert_close(delta, goal)


def test_what_cannot_be_known_is_an_unknown_kind_with_what_it_resembles(tmp_path: Path) -> None:
    odd = saved({f"unet.{Q}.weird_a": torch.ones(2, 8), f"unet.{Q}.weird_b": torch.ones(8, 2)}, tmp_path)
    with pytest.raises(UserError, match="is an unknown kind; resembles most Stable .*whose layers 1 of 1 names"):
        open_lora(odd)
    tensors = {"foo.layers.0.attentions.to_q.lora_A.weight": torch.ones(2, 8)}
    tensors["foo.layers.0.attentions.to_q.lora_B.weight"] = torch.ones(8, 2)
    with pytest.raises(UserError, match=r"a LoRA for an unknown model .*: unknown kind; resembles most .*, with \d of"):
        open_lora(saved(tensors, tmp_path))


# Types


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("what", ["factors", "alpha", "both"])
def test_factors_and_alphas_of_8_and_64_bits_are_widened(kind: torch.dtype, what: str, weights, tmp_path: Path) -> None:
    tensors = kohya(weights)
    changed = {key for key in tensors if what == "both" or key.endswith("alpha") is (what == "alpha")}
    given = {key: tensor.to(kind) if key in changed else tensor for key, tensor in tensors.items()}
    wide = {key: tensor.float() for key, tensor in given.items()}
    file = saved(given, tmp_path)
    (tmp_path / "wide").mkdir()
    same = saved(wide, tmp_path / "wide")
    assert verdicts(file)["simpletune"] == ("yes", "")
    for words in (["export", "--format", "diffusers"], ["resize", "--rank", "1"]):
        outs = []
        for each in (file, same):
            out = each.parent / f"{words[0]}.safetensors"
            assert main([words[0], str(each), *words[1:], "--out", str(out), "--overwrite"]) == 0
            outs.append(load_file(out))
        assert outs[0].keys() == outs[1].keys() and all(torch.equal(t, outs[1][k]) for k, t in outs[0].items())
    one, other = merged(file, tmp_path / "a"), merged(same, tmp_path / "b")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not torch.equal(one[f"{Q}.weight"], weights[f"{Q}.weight"])


@pytest.mark.parametrize(("kind", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_number_of_8_bits_is_torch_s(kind: str, dtype: torch.dtype) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    found = torch.tensor([fp8_value(byte, kind) for byte in range(256)])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.uint8, torch.bool])
def test_inspect_refuses_the_types_that_every_verb_refuses(kind: torch.dtype, weights, tmp_path: Path) -> None:
    file = saved({k: t.to(kind) if "down" in k else t for k, t in kohya(weights).items()}, tmp_path)
    loads, why = verdicts(file)["simpletune"]
    assert loads == "refuses" and "which is not supported. Use F32, F16, BF16, F64, F8_E4M3, F8_E5M2" in why
    with pytest.raises(UserError, match="which is not supported. Use F32"):
        read_lora(file)


# DoRA of every form


def lokr_of(weight: Tensor, whole: bool, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    outputs, inputs, *kernel = weight.shape
    w1 = torch.randn(2, 2, generator=generator) * 0.4
    if whole:
        w2 = torch.randn(outputs // 2, inputs // 2, *kernel, generator=generator) * 0.4
        return {"lokr_w1": w1, "lokr_w2": w2}, torch.kron(w1, w2.flatten(1))
    a = torch.randn(outputs // 2, 2, generator=generator) * 0.4
    b = torch.randn(2, inputs // 2 * math.prod(kernel), generator=generator) * 0.4
    return {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "alpha": torch.tensor(1.0)}, 0.5 * torch.kron(w1, a @ b)


def update_of(kind: str, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Factors by the ends of their keys, and the matrix that they make."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs, *kernel = weight.shape
    if kind == "LoRA":
        down, up = factors(weight, seed=seed)
        tensors = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(1.0)}
        return tensors, 0.5 * up.flatten(1) @ down.flatten(1)
    if kind == "LoHa":
        shapes = {"hada_w1_a": (outputs, 2), "hada_w1_b": (2, inputs * math.prod(kernel))}
        shapes |= {"hada_w2_a": shapes["hada_w1_a"], "hada_w2_b": shapes["hada_w1_b"]}
        tensors = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}
        a1, b1, a2, b2 = tensors.values()
        return {**tensors, "alpha": torch.tensor(1.0)}, 0.5 * (a1 @ b1) * (a2 @ b2)
    return lokr_of(weight, kind == "LoKr", generator)


@pytest.mark.parametrize("side", ["output", "input"])
@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr", "decomposed LoKr"])
def test_dora_of_every_kind_and_side(kind: str, side: str, weights, model, tmp_path: Path) -> None:
    """By inputs as in ComfyUI and LyCORIS before wd_on_out; by outputs as LyCORIS and the paper have it."""
    tensors, goals = {}, {}
    for seed, layer in enumerate((Q, K, CONV)):
        weight = weights[f"{layer}.weight"]
        own, delta = update_of(kind, weight, seed)
        generator = torch.Generator().manual_seed(100 + seed)
        turned = (weight.flatten(1) + delta).view_as(weight).double()
        count = weight.shape[0 if side == "output" else 1]
        magnitude = torch.rand(count, generator=generator) + 0.5
        if side == "output":
            shape, norms = (-1, *(1 for _ in weight.shape[1:])), turned.flatten(1).norm(dim=1)
        else:
            shape, norms = (1, -1, *(1 for _ in weight.shape[2:])), turned.transpose(0, 1).flatten(1).norm(dim=1)
        goals[layer] = (magnitude / norms).view(shape) * turned
        own["dora_scale"] = magnitude.view(shape)
        tensors |= {f"lora_unet_{FLAT[layer]}.{role}": tensor for role, tensor in own.items()}
        if side == "input" and weight.dim() == 2:
            comfy = dora_oft.comfy_dora(weight.double(), delta.double(), magnitude.view(shape).double(), 1.0)
            torch.testing.assert_close(goals[layer], comfy, rtol=1e-5, atol=1e-6)
    file = saved(tensors, tmp_path)
    assert describe(file)["method"] == {"LoRA": "DoRA", "LoHa": "DoHa"}.get(kind, "DoKr")
    assert_everywhere(file, weights, goals, model)
    about = verdicts(file)
    assert about["ComfyUI"] == ("yes", "" if side == "input" else about["ComfyUI"][1])
    assert ("wrong" in about["ComfyUI"][1]) is ("wrong" in about["Forge"][1]) is (side == "output")
    for tool in ("diffusers", "simpletune"):
        assert about[tool][0] == ("yes" if tool == "simpletune" else "refuses")
    if kind == "LoRA" and side == "output":
        assert about["diffusers"][1].endswith("export to diffusers")
        assert main(["export", str(file), "--format", "diffusers", "--out", str(tmp_path / "d.safetensors")]) == 0
        assert verdicts(tmp_path / "d.safetensors")["diffusers"] == ("yes", "")
    else:
        assert about["diffusers"][1].endswith("merge it into its base instead")  # as ``assert_everywhere`` has done
        for words in (["export", "--format", "kohya"], ["export", "--format", "lycoris"], ["resize", "--rank", "2"]):
            assert main([words[0], str(file), *words[1:], "--out", str(tmp_path / "no.safetensors")]) == 2


def test_what_export_says_of_dokr_works(weights, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, delta = update_of("LoKr", weights[f"{Q}.weight"], 0)
    magnitude = (weights[f"{Q}.weight"] + delta).norm(dim=1, keepdim=True) * 1.1
    tensors = {f"lora_unet_{FLAT[Q]}.{role}": tensor for role, tensor in (own | {"dora_scale": magnitude}).items()}
    file = saved(tensors, tmp_path)
    assert main(["export", str(file), "--format", "kohya", "--out", str(tmp_path / "no.safetensors")]) == 2
    said = capsys.readouterr().err
    assert f"{Q} is DoKr, which is not written. Merge it into its base: simpletune lora merge, and" in said
    assert "simpletune lora extract" in said
    folder, out = tmp_path / "merged", tmp_path / "lora.safetensors"
    goal = merged(file, folder)[f"{Q}.weight"] - weights[f"{Q}.weight"]
    assert main(["extract", BASE, str(folder), "--rank", "96", "--out", str(out)]) == 0
    torch.testing.assert_close(read_lora(out)[Q].delta(), goal, rtol=1e-3, atol=1e-5)


def test_dora_s_magnitudes_that_fit_nothing_are_refused(weights, tmp_path: Path) -> None:
    own, _ = update_of("LoKr", weights[f"{K}.weight"], 0)
    for shape in ((3, 1), (1, 3), (1,), (1, 0), (2, 2), (1, 1, 7, 7)):
        tensors = {f"lora_unet_{FLAT[K]}.{role}": tensor for role, tensor in own.items()}
        file = saved(tensors | {f"lora_unet_{FLAT[K]}.dora_scale": torch.ones(shape)}, tmp_path)
        with pytest.raises(UserError, match="which do not match"):
            open_lora(file)


def test_oft_with_magnitudes_is_refused_by_name(weights, tmp_path: Path) -> None:
    outputs = len(weights[f"{Q}.weight"])
    module = f"lora_unet_{FLAT[Q]}"
    tensors = {f"{module}.oft_blocks": torch.zeros(outputs // 8, 8, 8), f"{module}.dora_scale": torch.ones(outputs, 1)}
    with pytest.raises(UserError, match="is OFT with DoRA's magnitudes, which is not supported"):
        open_lora(saved(tensors, tmp_path))


def test_training_starts_from_no_form_of_dora_that_it_does_not_train(weights, tmp_path: Path) -> None:
    shapes = {f"{Q}.weight": tuple(weights[f"{Q}.weight"].shape)}
    for kind, side, message in (
        ("LoKr", 0, r"is DoKr \(.*\), which no method here trains. Train on top of it: name it in model.loras"),
        ("LoHa", 0, r"is DoHa \(.*\), which no method here trains. Train on top of it"),
        ("LoRA", 1, r"has a magnitude for each input \(.*\), and this run trains one for each output. Train on top"),
    ):
        own, _ = update_of(kind, weights[f"{Q}.weight"], 0)
        own["dora_scale"] = torch.ones(1, shapes[f"{Q}.weight"][1]) if side else torch.ones(shapes[f"{Q}.weight"][0], 1)
        updates = read_lora(saved({f"lora_unet_{FLAT[Q]}.{role}": tensor for role, tensor in own.items()}, tmp_path))
        with pytest.raises(UserError, match=message):
            require_startable("start", Dora(rank=2), updates, shapes, 1.0)


def test_what_start_says_of_a_locon_with_the_layer_that_reads_the_latents_works(weights, tmp_path: Path) -> None:
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    tensors = {}
    for layer in ("conv_in", Q):
        down, up = factors(weights[f"{layer}.weight"])
        module = f"unet.{layer}"
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
    updates = read_lora(saved(tensors, tmp_path))
    with pytest.raises(UserError, match="a list with the endings of these names, and give their convolutions a rank"):
        require_startable("start", Lora(rank=2), updates, shapes, 1.0)
    with pytest.raises(UserError, match="and give their convolutions a rank by adapter.conv_rank"):
        require_startable("start", Lora(rank=2, targets=["conv_in", "attn1.to_q"]), updates, shapes, 1.0)
    require_startable("start", Lora(rank=2, targets=["conv_in", "attn1.to_q"], conv_rank=2), updates, shapes, 1.0)


@pytest.mark.parametrize("precision", [Int8(), Nf4()], ids=lambda option: option.weights)
@pytest.mark.parametrize("side", ["output", "input"])
def test_dora_of_lokr_over_a_quantised_base(side: str, precision: Any, weights, model, tmp_path: Path) -> None:
    quantised = model.load_denoiser(precision, torch.device("cpu"))
    own, delta = update_of("LoKr", weights[f"{Q}.weight"], 0)
    layer = quantised.get_submodule(Q)
    base = torch.cat(list(row_blocks(layer, len(delta))))
    turned = base + delta
    own["dora_scale"] = torch.rand(len(delta), 1) if side == "output" else torch.rand(1, delta.shape[1])
    goal = own["dora_scale"] * turned / turned.norm(dim=1 if side == "output" else 0, keepdim=True)
    file = saved({f"lora_unet_{FLAT[Q]}.{role}": tensor for role, tensor in own.items()}, tmp_path)
    x = torch.randn(2, 5, delta.shape[1])
    error = (layer(x) - x @ base.T).norm()  # of the quantised product itself
    load_loras(quantised, [(file, 1.0)])
    with torch.no_grad():
        assert (quantised.get_submodule(Q)(x) - x @ goal.T).norm() <= 2 * error + 1e-2 * (x @ goal.T).norm()
        updated = quantised.get_submodule(Q)
        whole = updated(x)
        with updates_disabled(quantised):
            torch.testing.assert_close(updated(x), layer(x), rtol=0, atol=0)
        with at_strength(quantised, 0.5):
            torch.testing.assert_close(updated(x), torch.lerp(layer(x), whole, 0.5), rtol=1e-5, atol=1e-6)


def test_a_rank_of_loha_whose_equal_lora_would_fill_the_memory_is_refused(weights, tmp_path: Path) -> None:
    outputs, inputs = weights[f"{Q}.weight"].shape
    for rank in (128, 300):
        shapes = {"hada_w1_a": (outputs, rank), "hada_w1_b": (rank, inputs)}
        shapes |= {"hada_w2_a": (outputs, rank), "hada_w2_b": (rank, inputs)}
        file = saved({f"lora_unet_{FLAT[Q]}.{role}": torch.ones(shape) for role, shape in shapes.items()}, tmp_path)
        if rank == 128:
            assert read_lora(file)[Q].as_lora().rank == min(outputs, inputs)
            continue
        with pytest.raises(UserError, match="LoHa of rank 300 equals a LoRA of rank 90,000; at most 32,768 are read"):
            open_lora(file)


# OFT's limit


@pytest.mark.parametrize("header", [{}, {"ss_network_module": "networks.oft"}, {"ss_network_module": "lycoris.kohya"}])
@pytest.mark.parametrize("names", ["lora_unet_", "lycoris_"])
def test_oft_is_limited_as_its_trainer_did_and_both_strengths_are_said(
    names: str, header: dict[str, str], weights, model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    weight, module = weights[f"{Q}.weight"], f"{names}{FLAT[Q]}"
    outputs = len(weight)
    blocks, alpha = torch.randn(outputs // 8, 8, 8), 0.01
    file = saved({f"{module}.oft_blocks": blocks, f"{module}.alpha": torch.tensor(alpha)}, tmp_path, header)
    goal = dora_oft.comfy_oft(weight.double(), blocks.double(), 1.0, alpha * outputs)
    weaker = dora_oft.comfy_oft(weight.double(), blocks.double(), 1.0, alpha)
    assert (goal - weight).norm() > 20 * (weaker - weight).norm()
    assert_everywhere(file, weights, {Q: goal}, model)
    said = f"{alpha * outputs:.3g} as trained, limited to alpha x outputs (sd-scripts, LyCORIS), and 0.01 in ComfyUI"
    assert said in format_description(describe(file))
    capsys.readouterr()
    merged(file, tmp_path / "again")
    assert f"{said}, which limits it to alpha: {outputs} times weaker" in capsys.readouterr().out
    assert verdicts(file)["ComfyUI"][1].startswith("wrongly: limits")


def test_oft_of_comfyui_s_own_is_limited_as_comfyui_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = "diffusion_model.joint_blocks.0.x_block.attn.proj"
    w, blocks = torch.randn(32, 32), torch.randn(4, 8, 8)
    file = {f"{module}.oft_blocks": blocks, f"{module}.alpha": torch.tensor(0.1)}
    (update,) = read_lora(saved(file, tmp_path)).values()
    expected = dora_oft.comfy(w, file, module).float()
    torch.testing.assert_close(w + update.delta_for(w), expected, rtol=1e-5, atol=1e-5)
    assert describe(saved(file, tmp_path))["oft_strengths"] is None


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -1.0])
def test_a_limit_that_limits_nothing_is_refused(alpha: float, weights, tmp_path: Path) -> None:
    module = f"lora_unet_{FLAT[Q]}"
    blocks = torch.randn(len(weights[f"{Q}.weight"]) // 8, 8, 8)
    with pytest.raises(UserError, match=r"alpha is (nan|inf|-1), and it limits OFT"):
        open_lora(saved({f"{module}.oft_blocks": blocks, f"{module}.alpha": torch.tensor(alpha)}, tmp_path))


def test_training_starts_where_a_limited_oft_ended(weights, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, module = weights[f"{Q}.weight"], f"lora_unet_{FLAT[Q]}"
    blocks = torch.randn(len(weight) // 8, 8, 8)
    file = saved({f"{module}.oft_blocks": blocks, f"{module}.alpha": torch.tensor(0.01)}, tmp_path)
    updates = read_lora(file)
    require_startable("start", Oft(block_size=8), updates, {f"{Q}.weight": tuple(weight.shape)}, 1.0)
    goal = dora_oft.comfy_oft(weight.double(), blocks.double(), 1.0, 0.01 * len(weight)).float()
    found = weight + rotate_rows(weight, factors_of(updates[Q], weight.shape[1])["oft_triangle"])
    torch.testing.assert_close(found, goal, rtol=1e-5, atol=1e-5)


# What the verbs keep


def test_fields_of_another_tool_s_header_are_kept_and_said(weights, tmp_path: Path, capsys) -> None:
    about = {"ss_tag_frequency": '{"a": {"dog": 3}}', "ss_seed": "7", "sshs_model_hash": "abc", "ss_network_dim": "128"}
    about |= {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 64}), "modelspec.author": "me"}
    file = saved(kohya(weights), tmp_path, about)
    for words in (["export", "--format", "kohya"], ["resize", "--rank", "1"]):
        out = tmp_path / f"{words[0]}.safetensors"
        capsys.readouterr()
        assert main([words[0], str(file), *words[1:], "--out", str(out)]) == 0
        said = capsys.readouterr().out
        metadata = LoraHeader(out).metadata
        assert {name: metadata.get(name) for name in about} == {
            "ss_tag_frequency": '{"a": {"dog": 3}}', "ss_seed": "7", "modelspec.author": "me",
            "sshs_model_hash": None, "lora_adapter_metadata": None,
            "ss_network_dim": "2" if words[0] == "export" else "1",
        }  # fmt: skip
        assert re.search(r"keeps \d other fields of its header: .*ss_seed, ss_tag_frequency", said)
        assert "leaves out 2 fields of x.safetensors's header: " in said and "sshs_model_hash" in said


def test_embeddings_inside_a_file_are_named_where_they_are_left_out(weights, tmp_path: Path, capsys) -> None:
    file = saved(kohya(weights) | {"bundle_emb.sks.clip_l": torch.ones(1, 768)}, tmp_path)
    out = tmp_path / "out.safetensors"
    for words in (["export", "--format", "kohya"], ["resize", "--rank", "1"], ["merge", "--base", BASE]):
        capsys.readouterr()
        folder = tmp_path / "merged" if words[0] == "merge" else out
        assert main([words[0], str(file), *words[1:], "--out", str(folder), "--overwrite"]) == 0
        said = capsys.readouterr().out
        assert "leaves out 1 tensor of embeddings inside x.safetensors: bundle_emb.sks.clip_l" in said


@pytest.mark.parametrize("style", ["kohya", "diffusers"])
def test_resize_keeps_the_layout_of_text_encoders_alone(style: str, tmp_path: Path) -> None:
    layer = "text_model.encoder.layers.0.self_attn.q_proj"
    module, names = (f"text_encoder_2.{layer}", "lora_A lora_B")
    if style == "kohya":
        module, names = f"lora_te2_{layer.replace('.', '_')}", "lora_down lora_up"
    down, up = names.split()
    file = saved({f"{module}.{down}.weight": torch.randn(4, 8), f"{module}.{up}.weight": torch.randn(8, 4)}, tmp_path)
    out = tmp_path / "out.safetensors"
    assert main(["resize", str(file), "--rank", "2", "--out", str(out)]) == 0
    assert {key.partition(".lora_")[0].removesuffix(".alpha") for key in load_file(out)} == {module}


def test_text_encoders_that_merge_leaves_out_are_said(weights, tmp_path: Path, capsys) -> None:
    layer = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    more = {f"{layer}.lora_down.weight": torch.ones(2, 8), f"{layer}.lora_up.weight": torch.ones(8, 2)}
    file = saved(kohya(weights) | more, tmp_path)
    merged(file, tmp_path / "merged", "--denoiser-only")
    assert "without the updates of CLIP-L: 1 layer (--denoiser-only)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "method"),
    [("diff_b", "with changes of biases"), ("w_norm", "with changes of norms"), ("b_norm", "with changes of norms"),
     ("diff", "full weight differences")],
)  # fmt: skip
def test_norms_and_biases_are_refused_by_their_own_names(end: str, method: str, weights, tmp_path: Path) -> None:
    file = saved(kohya(weights) | {f"lora_unet_{FLAT[Q]}_norm.{end}": torch.ones(8)}, tmp_path)
    with pytest.raises(UserError, match=rf"is {method}.*_norm\.{end}"):
        open_lora(file)


# Forge


PLACES = [  # of attention in SDXL's down_blocks.1
    f"down_blocks.1.attentions.{number}.transformer_blocks.{block}.{attention}.to_{leaf}"
    for number in (0, 1) for block in (0, 1) for attention in ("attn1", "attn2") for leaf in "qk"
]  # fmt: skip


def test_forge_loads_nothing_of_a_file_with_more_than_twelve_strange_keys(weights, tmp_path: Path) -> None:
    """networks.py of b6cfd7fc: more than 12 unmatched keys return the model unchanged."""
    for count, loads in ((6, "partly"), (7, "silently nothing")):
        tensors = {}
        for place in PLACES[-count:]:
            module = f"unet.{place}"
            tensors |= {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)}
        module = "unet.down_blocks.1.attentions.0.proj_in"
        tensors |= {f"{module}.lora_A.weight": torch.ones(2, 8), f"{module}.lora_B.weight": torch.ones(8, 2)}
        file = saved(tensors, tmp_path)
        found, why = verdicts(file)["Forge"]
        assert found == loads and ("above 12 it loads nothing: export to kohya" in why) is (count == 7)
        out = tmp_path / "k.safetensors"
        assert main(["export", str(file), "--format", "kohya", "--out", str(out), "--overwrite"]) == 0
        assert verdicts(out)["Forge"][0] == "yes"
    for count, loads in ((12, "yes"), (13, "silently nothing")):
        tensors = {}
        for place in PLACES[:count]:
            module = "lora_unet_" + place.replace(".", "_")
            tensors |= {f"{module}.lora_down.weight": torch.ones(2, 8), f"{module}.lora_up.weight": torch.ones(8, 2)}
            tensors |= {f"{module}.dora_scale": torch.ones(8, 1), f"{module}.lora_magnitude_vector": torch.ones(8)}
        found, why = verdicts(saved(tensors, tmp_path))["Forge"]
        assert found == loads and ("it does not know 13 keys" in why) is (count == 13), why


def test_what_is_said_of_forge_and_lokr_under_lycoris_names_works(weights, tmp_path: Path) -> None:
    own, delta = update_of("LoKr", weights[f"{K}.weight"], 0)
    file = saved({f"lycoris_{FLAT[K]}.{role}": tensor for role, tensor in own.items()}, tmp_path)
    assert verdicts(file)["Forge"][1].endswith("export to lycoris, which has others")
    out = tmp_path / "out.safetensors"
    assert main(["export", str(file), "--format", "lycoris", "--out", str(out)]) == 0
    assert verdicts(out)["Forge"][0] == verdicts(out)["ComfyUI"][0] == "yes"
    torch.testing.assert_close(read_lora(out)[K].delta(), delta)


def test_the_page_lists_every_layout_and_kind() -> None:
    page = Path("docs/how-to/lora-files.md").read_text(encoding="utf-8")
    table = page.partition("## What is read")[2].partition("\n## ")[0]
    for layouts in LAYOUTS.values():
        for layout in layouts:
            assert f"`{layout.prefix}`" in table if layout.prefix else "without a prefix" in table
    for kind in (LORA, LOKR, LOHA, OFT, *DECOMPOSED.values()):
        assert kind in table
    for word in ("_orig_mod.", "module.", PEFT):
        assert f"`{word}`" in table and plain_key(f"{word}unet.{Q}.lora_A.weight").removed == (word,)
