"""Names and shapes of every kind of file that is written, against what ComfyUI's and diffusers' loaders expect."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lora_readers
import original_layout
import pytest
import torch
import unet_lora_readers
from blocks import BLOCKS, DENOISERS, untouched
from reference.file_shapes import Shape, problem
from safetensors.torch import load_file
from slow_cases import slow_but
from torch import nn

from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.write import write_lora
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.engine.quant.precision import FP32
from simpletune.system.options import UserError

METHODS: dict[str, tuple[Any, list[str]]] = {
    "lora": (functools.partial(Lora, rank=3), ["run", "diffusers", "kohya", "comfy"]),
    "dora": (functools.partial(Dora, rank=3), ["run", "diffusers", "kohya", "comfy"]),
    "loha": (functools.partial(Loha, rank=3), ["run", "lycoris"]),
    "lokr": (functools.partial(Lokr, rank=3), ["run", "lycoris"]),
    "oft": (functools.partial(Oft, block_size=8), ["run", "kohya"]),
}
TARGETS = {"sd3": ["attention", "attention_qv", "attention_image", "attention_mlp", "all_linear"]}
TARGETS |= dict.fromkeys(("sd15", "sd2"), ["attention", "attention_qv", "attention_mlp", "all_linear"])
CASES = [
    (family, targets, method, layout)
    for family, all_targets in TARGETS.items()
    for targets in all_targets
    for method, (_, layouts) in METHODS.items()
    for layout in layouts
    if (family == "sd3") or layout != "diffusers"  # which ComfyUI does not read of U-Nets
]
FAST = [case for case in CASES if "all_linear" in case or case[0] == "sd3" and case[3] in ("kohya", "comfy")]  # fused
LOADED = [(family, name, method) for family in TARGETS for name in TARGETS[family] for method in ("lora", "dora")]


def denoiser(family: str) -> nn.Module:
    model: nn.Module = DENOISERS[family].build(FP32(), "cpu")
    return model


@functools.cache
def weights_of(family: str) -> dict[str, tuple[Shape, int]]:
    """By every name that ComfyUI looks up: the weight's shape, and of how many parts it is one."""
    state = untouched(family, FP32()).state_dict()
    if family == "sd3":
        original = original_layout.mmdit(state, BLOCKS)
        targets = lora_readers.targets(original, BLOCKS)
        shapes = {
            name: (tuple(original[weight].shape), 1 if third is None else 3)
            for name, (weight, third, _) in targets.items()
            if weight in original
        }
        dotted = {f"lycoris_{n[12:].replace('.', '_')}": s for n, s in shapes.items() if n.startswith("transformer.")}
        return shapes | dotted
    names = unet_lora_readers.comfy_names(state)
    found = {name: (tuple(state[weight].shape), 1) for name, weight in names.items()}
    lycoris = {f"lycoris_{n.removeprefix('lora_unet_')}": s for n, s in found.items() if n.startswith("lora_unet_")}
    return found | lycoris


@functools.cache
def written(family: str, targets: str, method: str, folder: Path) -> Path:
    """The file that a run leaves."""
    model, adapter = denoiser(family), METHODS[method][0](targets=targets)
    adapter.attach(model, 3)
    place = folder / f"{family}-{targets}-{method}"
    place.mkdir()
    file: Path = adapter.export(model, place, {})
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


ROLES = ("lora_up.weight", "lora_down.weight", "lora_A.weight", "lora_B.weight")


def modules_of(file: Path) -> dict[str, dict[str, Shape]]:
    found: dict[str, dict[str, Shape]] = {}
    for key, tensor in load_file(file).items():
        role = next((role for role in ROLES if key.endswith(f".{role}")), key.rpartition(".")[2])
        found.setdefault(key.removesuffix(f".{role}"), {})[role] = tuple(tensor.shape)
    return found


@pytest.mark.parametrize(("family", "targets", "method", "layout"), slow_but(FAST, CASES))
def test_comfyui_finds_a_weight_of_this_shape(
    family: str, targets: str, method: str, layout: str, folder: Path, tmp_path: Path
) -> None:
    file = written(family, targets, method, folder)
    if layout != "run":
        try:
            file = write_lora(read_lora(file), tmp_path / "lora.safetensors", layout)
        except UserError as refusal:
            assert "Use --format" in str(refusal)
            return
    known, wrong = weights_of(family), {}
    for module, parts in modules_of(file).items():
        (outputs, *rest), count = known[module]
        wrong[module] = problem((outputs // count, *rest), parts)
    assert wrong and not {module: why for module, why in wrong.items() if why}


@pytest.mark.parametrize(
    ("family", "targets", "method"),
    slow_but([(f, n, m) for f, n, m in LOADED if n == "all_linear" or (m == "lora") == (n == "attention")], LOADED),
)
def test_diffusers_loads_every_factor(family: str, targets: str, method: str, folder: Path, tmp_path: Path) -> None:
    """Of ``export --format diffusers``, and of the file that a run leaves unless the method says otherwise."""
    from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
    from peft import get_peft_model_state_dict

    run = written(family, targets, method, folder)
    adapter = METHODS[method][0](targets=targets)
    exported = write_lora(read_lora(run), tmp_path / "lora.safetensors", "diffusers")
    for file in (
        [exported] if adapter.before_diffusers("diffusers" if family == "sd3" else "kohya") else [exported, run]
    ):
        model = denoiser(family)
        if family == "sd3":
            state = StableDiffusion3Pipeline.lora_state_dict(str(file))
            StableDiffusion3Pipeline.load_lora_into_transformer(state, transformer=model)
        else:
            state, alphas, metadata = StableDiffusionPipeline.lora_state_dict(str(file), return_lora_metadata=True)
            StableDiffusionPipeline.load_lora_into_unet(state, alphas, model, metadata=metadata)
        loaded = get_peft_model_state_dict(model, adapter_name="default_0")
        stored = {key.rpartition(".lora_")[0].partition(".")[2] for key in load_file(file) if ".lora_A." in key}
        assert loaded and (not stored or stored == {key.rpartition(".lora_")[0] for key in loaded if ".lora_A." in key})
        base = untouched(family, FP32())
        expected = adapter.modules({k: tuple(v.shape) for k, v in base.state_dict().items()})
        assert sum(".lora_A." in key for key in loaded) == len(expected)
        again, before = read_lora(file), read_lora(run)
        for layer, update in before.items():
            weight = base.get_submodule(layer).weight.detach().flatten(1)
            torch.testing.assert_close(again[layer].delta_for(weight), update.delta_for(weight))
