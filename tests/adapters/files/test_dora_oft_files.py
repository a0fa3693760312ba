"""Files with DoRA and OFT: what ComfyUI, Forge and diffusers make of them, and simpletune's reading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lora_readers
import original_layout
import pytest
import torch
from blocks import BLOCKS, DENOISERS, transformer, untouched
from reference import dora_oft
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from simpletune.adapters.files.attach import fold_lora, load_loras
from simpletune.adapters.files.describe import describe
from simpletune.adapters.files.mix import Recipe, mix
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods.dora import Dora, dora_layers
from simpletune.adapters.methods.dora_layers import DoraLayer
from simpletune.adapters.methods.layers import all_layers
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.oft_layer import OftLayer
from simpletune.apps.cli.main import main
from simpletune.engine.quant.precision import FP32
from simpletune.models.shared.lora_layout import DORA_MARK
from simpletune.system.options import UserError

FILE = "pytorch_lora_weights.safetensors"
ADAPTERS: dict[str, Any] = {
    "dora": Dora(rank=3, alpha=6.0, targets="all_linear"),
    "oft": Oft(block_size=8, targets="all_linear"),
}


def shaken(model: nn.Module) -> nn.Module:
    """Give every layer an update of some size."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, layer in all_layers(model):
            if isinstance(layer, DoraLayer):
                layer.lora_B.weight.normal_().mul_(0.1)
                layer.magnitude.mul_(1 + 0.2 * torch.randn_like(layer.magnitude))
            if isinstance(layer, OftLayer):
                layer.oft_triangle.normal_().mul_(0.2)
    return model


@dataclass(frozen=True)
class Trained:
    """The base's weights, the trained ones, what the trained model predicts, and the exported file; only to be read."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    predicted: Tensor
    file: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    def train(method: str) -> Trained:
        model = transformer(FP32())
        ADAPTERS[method].attach(model, 3)
        file = ADAPTERS[method].export(shaken(model), tmp_path_factory.mktemp(method), {})
        predicted = prediction(model)
        fold_lora(model)
        return Trained(untouched("sd3", FP32()).state_dict(), model.state_dict(), predicted, file)

    return functools.cache(train)


def prediction(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    shapes = (2, 4, 8, 8), (2, 6, 24), (2, 16)
    z_t, prompts, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
    with torch.no_grad():
        found: Tensor = model(z_t, prompts, pooled, torch.tensor([100.0, 700.0]), return_dict=False)[0]
    return found


def in_comfyui(state: dict[str, Tensor], file: dict[str, Tensor], strength: float = 1.0) -> dict[str, Tensor]:
    """The original model's weights by ComfyUI's rules; every module of the file is used exactly once."""
    original = {name: tensor.clone() for name, tensor in original_layout.mmdit(state, BLOCKS).items()}
    modules = {key.rpartition(".")[0].removesuffix(".lora_A").removesuffix(".lora_B") for key in file}
    modules = {m.removesuffix(".lora_up").removesuffix(".lora_down") for m in modules}
    known = lora_readers.targets(original, BLOCKS)
    assert modules <= set(known)
    for module in modules:
        weight, third, swapped = known[module]
        part = original[weight] if third is None else original[weight].chunk(3)[third]
        part.copy_(dora_oft.comfy(part, file, module, strength, swapped).float())
    return original


@pytest.mark.parametrize("layout", [None, "diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("method", ADAPTERS)
def test_comfyui_computes_the_trained_weights(
    method: str, layout: str | None, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    """As exported by a run (None), and in every layout that the commands write."""
    run = trained(method)
    file = run.file
    if (method, layout) == ("oft", "diffusers"):
        with pytest.raises(UserError, match="OFT, which ComfyUI reads only under its own names. Use --format kohya"):
            write_lora(read_lora(file), tmp_path / "x.safetensors", layout)
        return
    if layout:
        file = write_lora(read_lora(file), tmp_path / "x.safetensors", layout)
    both = ({n: t.double() for n, t in original_layout.mmdit(s, BLOCKS).items()} for s in (run.before, run.after))
    before, after = both
    for strength in (1.0, 0.6):
        found = in_comfyui(run.before, load_file(file), strength)
        share = strength if method == "dora" else strength**2
        for name, weight in found.items():
            goal = before[name] + share * (after[name] - before[name])
            torch.testing.assert_close(weight.double(), goal, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert any((found[name] != before[name]).any() for name in found)


def test_the_usual_dora_file_is_applied_wrongly_by_comfyui_and_forge(trained: Callable[[str], Trained]) -> None:
    """With m itself as dora_scale, which is what PEFT's norm needs."""
    run = trained("dora")
    tensors, module = load_file(run.file), "transformer.transformer_blocks.1.attn.to_q"
    w, goal = (s["transformer_blocks.1.attn.to_q.weight"].double() for s in (run.before, run.after))
    usual = {k: v for k, v in tensors.items() if k.startswith(f"{module}.")}
    usual[f"{module}.dora_scale"] = usual.pop(f"{module}.lora_magnitude_vector")[:, None]

    def error(found: Tensor) -> float:
        return float((found - goal).norm() / (goal - w).norm())

    difference = (usual[f"{module}.lora_B.weight"] @ usual[f"{module}.lora_A.weight"]).double()
    assert error(dora_oft.comfy(w, tensors, module)) < 1e-5
    assert error(dora_oft.comfy(w, usual, module)) > 0.05
    assert error(dora_oft.forge_dora(w, difference, usual[f"{module}.dora_scale"].double())) > 0.5
    assert error(dora_oft.forge_dora(w, difference, tensors[f"{module}.dora_scale"].double())) > 0.5


def test_diffusers_loads_a_run_s_dora_exactly(tmp_path: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    adapter = Dora(rank=3, alpha=6.0)
    ours = transformer(FP32())
    base = prediction(ours)
    adapter.attach(ours, 3)
    file = adapter.export(shaken(ours), tmp_path, {})
    theirs = transformer(FP32())
    state = StableDiffusion3Pipeline.lora_state_dict(str(file))
    StableDiffusion3Pipeline.load_lora_into_transformer(state, transformer=theirs)
    effect = (prediction(ours) - base).norm()
    assert (prediction(theirs) - prediction(ours)).norm() < 1e-4 * effect


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_file_is_drawn_with_as_it_was_trained(method: str, trained: Callable[[str], Trained], tmp_path: Path) -> None:
    run = trained(method)
    files = [run.file]
    if method == "dora":  # by each of the two keys alone
        kohya = write_lora(read_lora(run.file), tmp_path / "kohya.safetensors", "kohya")
        for name, key in {"magnitude": "lora_magnitude_vector", "relative": "dora_scale"}.items():
            tensors = {k: tensor for k, tensor in load_file(kohya).items() if not k.endswith(key)}
            files.append(tmp_path / f"without-{name}.safetensors")
            save_file(tensors, files[-1], DORA_MARK)
            assert all(getattr(update, name) is None for update in read_lora(files[-1]).values())
    for each in files:
        again = transformer(FP32())
        load_loras(again, [(each, 1.0)])
        torch.testing.assert_close(prediction(again), run.predicted, rtol=1e-4, atol=1e-8)
        half = transformer(FP32())
        load_loras(half, [(each, 0.5)])
        expected = prediction(half)
        fold_lora(half)
        torch.testing.assert_close(prediction(half), expected, rtol=1e-4, atol=1e-8)
        assert (expected - run.predicted).norm() > 0


@pytest.mark.parametrize("method", ADAPTERS)
def test_a_unet_s_file_comes_back_and_comfyui_computes_it(method: str, tmp_path: Path) -> None:
    model = DENOISERS["sd15"].build(FP32(), "cpu")
    state = untouched("sd15", FP32()).state_dict()
    ADAPTERS[method].attach(model, 3)
    file = ADAPTERS[method].export(shaken(model), tmp_path, {})
    again = DENOISERS["sd15"].build(FP32(), "cpu")
    load_loras(again, [(file, 1.0)])
    losses = [DENOISERS["sd15"].loss(each, FP32(), 0, "cpu").item() for each in (model, again)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    fold_lora(model)
    folded, tensors = model.state_dict(), load_file(file)
    rewritten = load_file(write_lora(read_lora(file), tmp_path / "again.safetensors", "kohya"))
    assert {k: tensor.shape for k, tensor in rewritten.items()} == {k: tensor.shape for k, tensor in tensors.items()}
    layers = [name for name, _ in all_layers(again)]
    assert {len(state[f"{name}.weight"].shape) for name in layers} == {2, 4}
    for name in layers:
        w = state[f"{name}.weight"]
        found = dora_oft.comfy(w.flatten(1), tensors, "lora_unet_" + name.replace(".", "_"))
        goal = folded[f"{name}.weight"].flatten(1).double()
        torch.testing.assert_close(found, goal, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_files_of_other_tools_are_read(tmp_path: Path) -> None:
    """dora_scale [o, 1] without our mark is m; OFT's alpha x outputs limits the rotation."""
    torch.manual_seed(0)
    module = "lora_unet_joint_blocks_0_x_block_attn_proj"
    w, a, b = (torch.randn(shape) for shape in ((32, 32), (2, 32), (32, 2)))
    m = torch.rand(32, 1) + 0.5
    file = {f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b, f"{module}.dora_scale": m}
    save_file(file | {f"{module}.alpha": torch.tensor(1.0)}, tmp_path / "dora.safetensors")
    (update,) = read_lora(tmp_path / "dora.safetensors").values()
    expected = dora_oft.dora(w.double(), a.double(), b.double(), 0.5, m[:, 0].double())
    torch.testing.assert_close(w + update.delta_for(w), expected.float())  # type: ignore[union-attr]
    with pytest.raises(UserError, match="no norm of its base's rows"):
        write_lora({"transformer_blocks.0.attn.to_out.0": update}, tmp_path / "x.safetensors", "kohya")

    blocks = torch.randn(4, 8, 8)
    file = {f"{module}.oft_blocks": blocks, f"{module}.alpha": torch.tensor(0.7 / 32)}
    save_file(file, tmp_path / "oft.safetensors")
    file[f"{module}.alpha"] = torch.tensor(0.7)  # which ComfyUI multiplies by nothing
    (update,) = read_lora(tmp_path / "oft.safetensors").values()
    torch.testing.assert_close(w + update.delta_for(w), dora_oft.comfy(w, file, module).float(), rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"lora_down.weight": (2, 32), "lora_up.weight": (32, 2), "dora_scale": (1, 16)}, "which do not match"),
        ({"lora_down.weight": (2, 32), "lora_up.weight": (32, 2), "dora_scale": (31, 1)}, "which do not match"),
        ({"lora_down.weight": (2, 32), "lora_up.weight": (32, 2), "oft_blocks": (4, 8, 8)}, "lacks one of its factors"),
        ({"oft_blocks": (2, 4, 8, 8)}, "is BOFT"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: dict, message: str, tmp_path: Path) -> None:
    module = "lora_unet_joint_blocks_0_x_block_attn_proj"
    save_file({f"{module}.{name}": torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=message):
        read_lora(tmp_path / "x.safetensors")


def test_a_part_of_a_fused_layer_is_refused_where_its_norms_are_unknown(tmp_path: Path) -> None:
    model = transformer(FP32())
    adapter = Dora(rank=2, targets="attention_qv")
    adapter.attach(model, 1)
    updates = read_lora(adapter.export(shaken(model), tmp_path, {}))
    with pytest.raises(UserError, match="has 2 of them; the norms of the others' rows are unknown. Use --format diff"):
        write_lora(updates, tmp_path / "x.safetensors", "kohya")


@pytest.mark.parametrize("method", ADAPTERS)
def test_what_needs_a_matrix_is_refused_with_a_remedy(
    method: str, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    file = trained(method).file
    with pytest.raises(
        UserError, match="depends on the weights that it changes.*simpletune lora merge.*simpletune lora extract"
    ):
        mix([(read_lora(file), 1.0), (read_lora(file), 1.0)], Recipe("cat"))
    assert main(["resize", str(file), "--rank", "2", "--out", str(tmp_path / "x.safetensors")]) == 2


def test_inspect_says_how_each_tool_loads_them(trained: Callable[[str], Trained], tmp_path: Path) -> None:
    def loads(file: Path) -> dict[str, tuple[str, str]]:
        about = describe(file)
        return {tool["tool"]: (tool["loads"], " ".join(tool["notes"])) for tool in about["tools"]}

    file = trained("dora").file
    assert describe(file)["method"] == "DoRA"
    found = loads(file)
    assert found["diffusers"] == ("yes", "") and found["ComfyUI"][1].startswith("exactly")
    assert found["Forge"][0] == "silently nothing" and found["simpletune"] == ("yes", "")
    kohya = write_lora(read_lora(file), tmp_path / "kohya.safetensors", "kohya")
    found = loads(kohya)
    assert found["ComfyUI"][1].startswith("exactly") and found["Forge"][0] == "silently nothing"
    assert "and above 12 it loads nothing: merge it" in found["Forge"][1]
    assert found["diffusers"][1] == "reads DoRA under its own names alone: export to diffusers"
    assert found["diffusers"][0] == "refuses"
    tensors = {key: tensor for key, tensor in load_file(file).items() if "dora_scale" not in key}
    save_file(tensors, tmp_path / "peft.safetensors")
    assert loads(tmp_path / "peft.safetensors")["ComfyUI"][1].startswith("as plain LoRA, which is wrong")
    file = trained("oft").file
    assert describe(file)["method"] == "OFT"
    found = loads(file)
    assert found["ComfyUI"] == ("yes", "exactly at strength 1; strength k changes the weights by k squared")
    assert found["diffusers"][0] == "refuses" and found["Forge"][0] == "silently nothing"


def test_merge_writes_the_trained_weights(tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    model, folder = DENOISERS["sd15"].build(FP32(), "cpu"), tmp_path / "sd15"
    model.save_pretrained(folder / "unet")
    adapter = Dora(rank=2)
    adapter.attach(model, 1)
    assert list(dora_layers(model))
    file = adapter.export(shaken(model), tmp_path, {})
    main(["merge", str(file), "--base", str(folder), "--out", str(tmp_path / "merged")])
    fold_lora(model)
    merged = UNet2DConditionModel.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)
