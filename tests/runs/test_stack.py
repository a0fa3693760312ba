"""``model.loras`` over every form of a base: the weights that ``simpletune lora merge`` writes, to the bit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import original_layout
import original_sd15
import pytest
import tiny_sd15
import torch
from random_loras import random_lora
from safetensors.torch import load_file, save_file

from simpletune.adapters.files.write import write_lora
from simpletune.apps.cli.main import main
from simpletune.config.load import validate
from simpletune.config.schema import TrainConfig
from simpletune.engine.quant.precision import FP32, Int8
from simpletune.models.shared.quantised_cache import FILE
from simpletune.runs.stack import read_stack
from simpletune.system.options import UserError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """``model`` of a configuration by the form of the base."""
    folder = tmp_path_factory.mktemp("bases")
    sd3 = original_layout.build(folder / "sd3")
    sd15 = tiny_sd15.build(folder / "sd15", "sd15")
    fp8 = original_layout.write(sd3, folder / "fp8.safetensors", "transformer")
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(fp8).items()}, fp8)
    file = original_layout.write(sd3, folder / "sd3.safetensors")
    return {
        "sd3": {"pretrained": str(sd3)},
        "sd3 file": {"pretrained": str(file), "text_encoders": str(sd3)},
        "sd3 fp8": {"pretrained": str(sd3), "transformer": str(fp8)},
        "sd15": {"family": "sd15", "pretrained": str(sd15)},
        "sd15 file": {
            "family": "sd15", "pretrained": str(original_sd15.write(sd15, folder / "b.safetensors")),
            "text_encoders": str(sd15),
        },
        "sd15 fp16": {"family": "sd15", "pretrained": str(tiny_sd15.build(folder / "16", "sd15", dtype="fp16"))},
    }  # fmt: skip


def with_loras(model: dict[str, str], *loras: str, **more: str) -> TrainConfig:
    return validate({"name": "x", "model": {**model, "loras": list(loras), **more}, "data": {"path": "."}}, "x")


@pytest.mark.parametrize("form", ["sd3", "sd3 file", "sd3 fp8", "sd15", "sd15 file", "sd15 fp16"])
def test_a_base_with_them_has_the_bits_of_the_merged_model(form: str, bases: dict, tmp_path: Path) -> None:
    model, part = bases[form], "unet" if "sd15" in form else "transformer"
    updates = random_lora(model.get(part, model["pretrained"]), 1)
    updates = {name: update for name, update in updates.items() if "attn" in name}
    one, two = (str(write_lora(updates, tmp_path / f"{name}.safetensors", name)) for name in ("diffusers", "kohya"))
    base, out = model.get(part, model["pretrained"]), str(tmp_path / "merged")
    assert main(["merge", f"{one}:0.8", f"{two}:-0.3", "--base", base, "--out", out]) == 0
    config = with_loras(model, f"{one}:0.8", f"{two}:-0.3")
    stacked = config.model.load_denoiser(FP32(), CPU, overlay=read_stack(config)).state_dict()
    merged = with_loras(model, **{part: out}).model.load_denoiser(FP32(), CPU).state_dict()
    torch.testing.assert_close(stacked, merged, rtol=0, atol=0)
    plain = with_loras(model).model.load_denoiser(FP32(), CPU).state_dict()
    changed = {name for name, tensor in plain.items() if not torch.equal(tensor, merged[name])}
    assert changed == {f"{name}.weight" for name in updates}


def test_the_cache_tells_stacks_apart_by_files_and_strengths(bases: dict, tmp_path: Path) -> None:
    model, cache = bases["sd3"], tmp_path / "cache"
    file = str(write_lora(random_lora(model["pretrained"], 1), tmp_path / "a.safetensors", "diffusers"))

    def load(*loras: str) -> dict[str, torch.Tensor]:
        config = with_loras(model, *loras)
        return config.model.load_denoiser(Int8(), CPU, cache=cache, overlay=read_stack(config)).state_dict()

    load()
    first, other = load(file), load(f"{file}:0.5")
    assert len(list(cache.rglob(FILE))) == 3
    renamed = Path(file).rename(tmp_path / "b.safetensors")
    torch.testing.assert_close(load(str(renamed)), first, rtol=0, atol=0)
    assert len(list(cache.rglob(FILE))) == 3
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
    write_lora(random_lora(model["pretrained"], 2), renamed, "diffusers")
    load(str(renamed))
    assert len(list(cache.rglob(FILE))) == 4


def test_a_weight_that_the_bases_fp16_cannot_hold_is_refused(bases: dict, tmp_path: Path) -> None:
    updates = {
        name: update for name, update in random_lora(bases["sd15 fp16"]["pretrained"], 1).items() if "attn" in name
    }
    file = write_lora(updates, tmp_path / "a.safetensors", "diffusers")
    config = with_loras(bases["sd15 fp16"], f"{file}:1e6")
    with pytest.raises(
        UserError, match=r"^model.loras: .* overflows fp16.* Use --dtype bf16 or fp32 in simpletune lora merge"
    ):
        config.model.load_denoiser(FP32(), CPU, overlay=read_stack(config))


def test_a_loaded_base_does_not_hold_their_updates(bases: dict, tmp_path: Path) -> None:
    file = write_lora(random_lora(bases["sd3"]["pretrained"], 1), tmp_path / "a.safetensors", "diffusers")
    config = with_loras(bases["sd3"], str(file))
    stack = read_stack(config)
    model = config.model.load_denoiser(FP32(), CPU, sizes=[(32, 32)], overlay=stack)
    known = weakref.ref(stack)
    del stack
    gc.collect()
    assert known() is None and config.model.architecture.whole_tensors(model)
