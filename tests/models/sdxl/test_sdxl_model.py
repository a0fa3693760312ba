"""Stable Diffusion XL: its UNet and what the family tells of it, against diffusers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import UNet2DConditionModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simpletune.engine.quant.precision import FP32
from simpletune.models.sdxl.sdxl_option import SDXL
from simpletune.models.shared.buckets import Framing
from simpletune.models.shared.conditioning import Conditioning
from simpletune.models.shared.flops import trained_of
from simpletune.models.unet.unet_shapes import unet_units

CPU = torch.device("cpu")
SIZE = (128, 64)


@pytest.fixture(scope="module")
def folder(unet_pipeline: Callable[..., Path]) -> Path:
    return unet_pipeline("sdxl", whole=True)


@pytest.fixture(scope="module")
def family(folder: Path) -> SDXL:
    return SDXL(pretrained=str(folder))


def inputs(family: SDXL) -> dict[str, Any]:
    torch.manual_seed(3)
    framings = [Framing((96, 70), (4, 0), SIZE), Framing(SIZE, (0, 0), SIZE)]
    z_t = torch.randn(2, *family.autoencoder.shape(*SIZE))
    embeds = torch.randn(2, family.text.tokens, family.text.width)
    text = Conditioning(embeds, pooled=torch.randn(2, family.text.pooled_width))
    return {
        "z_t": z_t,
        "time": torch.tensor([0.0, 999.0]),
        "conditioning": family.text.framed(text, framings),
    }


def test_prediction_and_gradients_equal_diffusers_to_the_bit(family: SDXL, folder: Path) -> None:
    ours, given = family.load_denoiser(FP32(), CPU), inputs(family)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    theirs = UNet2DConditionModel.from_pretrained(folder, subfolder="unet").requires_grad_(True)
    ours.requires_grad_(True)
    # Height before width, size before scaling, then the crop's top and left, then the target's size.
    sizes = torch.tensor([[70.0, 96.0, 0.0, 4.0, 64.0, 128.0], [64.0, 128.0, 0.0, 0.0, 64.0, 128.0]])
    text = given["conditioning"]
    added = {"text_embeds": text.pooled, "time_ids": sizes}
    expected = theirs(given["z_t"], torch.tensor([0, 999]), text.embeds, added_cond_kwargs=added).sample
    found = family.predict(ours, **given, dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    torch.testing.assert_close(gradients, {n: p.grad for n, p in theirs.named_parameters()}, rtol=0, atol=0)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())  # type: ignore[union-attr]
    other = family.text.framed(text, [Framing((500, 400), (0, 9), SIZE)] * 2)
    assert not torch.equal(family.predict(ours, **given | {"conditioning": other}, dtype=torch.float32), found)


@pytest.mark.slow
def test_operations_are_those_that_torch_counts(family: SDXL) -> None:
    unet = family.load_denoiser(FP32(), CPU)
    for part in ("", "down_blocks.2.attentions.0.transformer_blocks.1.attn2.to_k", "add_embedding.linear_2.bias"):
        chosen = {name: parameter for name, parameter in unet.named_parameters() if part in name}
        unet.requires_grad_(False)
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        expected = family.flops(trained_of({name: tuple(p.shape) for name, p in chosen.items()}), SIZE, 2)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as forward:
                loss = family.predict(unet, **inputs(family), dtype=torch.float32).sum()
            with FlopCounterMode(display=False) as backward:
                loss.backward()
        counted = forward.get_total_flops(), backward.get_total_flops()
        assert counted == (expected.forward, expected.backward), part


def test_parameters_units_and_their_order_are_diffusers() -> None:
    """Of the published UNet, whose shapes need no download."""
    family = SDXL()
    shapes, config = family.architecture.known_shapes(), family.files.known_config()
    with init_empty_weights():
        theirs = UNet2DConditionModel.from_config(config)
    assert shapes == {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    kinds = Counter[str]()
    for name, parameter in theirs.named_parameters():
        kind = re.search(r"attentions|resnets|samplers|time_embedding|add_embedding|conv_in|out", name)
        kinds[kind[0] if kind else name] += parameter.numel()
    assert kinds["resnets"] + kinds["samplers"] == 350_941_760
    assert kinds["attentions"] == 2_209_201_920
    outer = kinds["time_embedding"], kinds["add_embedding"], kinds["conv_in"], kinds["out"]
    assert outer == (2_050_560, 5_245_440, 11_840, 12_164)
    assert family.architecture.parameter_count() == sum(kinds.values()) == 2_567_463_684

    units = family.architecture.units()
    assert Counter(unit.split(".")[-2] for unit in units) == {
        "transformer_blocks": 70,
        "resnets": 17,
        "downsamplers": 2,
        "upsamplers": 2,
    }
    assert Counter(shapes[f"{unit}.norm1.bias"][0] for unit in units if ".transformer_blocks." in unit) == {
        640: 10,
        1280: 60,
    }
    assert sum(unit.kind == "attention" for unit in unet_units(config)) == 11
    widest = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith(f"{units[-20]}."))
    assert widest < 2_209_201_920 / 11, "a unit is one block of an attention, not all ten"


def test_units_run_in_their_order(family: SDXL) -> None:
    model, seen = family.load_denoiser(FP32(), CPU), list[str]()
    for name in model.units:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        family.predict(model, **inputs(family), dtype=torch.float32)
    assert tuple(seen) == model.units == family.architecture.units()


def test_the_hub_name_needs_no_network() -> None:
    family = SDXL()
    assert list(family.files.problems()) == [] and (family.text.width, family.text.pooled_width) == (2048, 1280)
    assert family.files.scheduler_config()["prediction_type"] == "epsilon"
    vae = family.files.known_part("vae").config()
    assert (vae["scaling_factor"], vae["force_upcast"]) == (0.13025, True)
    with_weights = {"unet": True, "vae": True, "text_encoder": True, "text_encoder_2": True}
    parts = {part.part: part.weights for part in family.files.hub_parts()}
    assert parts == {"scheduler": False, "tokenizer": False, "tokenizer_2": False, **with_weights}
    assert family.autoencoder.shape(1216, 832) == (4, 104, 152) and family.architecture.multiple == 64
