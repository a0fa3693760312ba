"""Which layers are quantised: not adaLN, whose errors all tokens share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from tiny_runs import merged
from torch import Tensor, nn

from simpletune.config.load import validate
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.precision import Int8, Nf4, WeightPrecision
from simpletune.models.zimage.zimage_transformer import use_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", [Int8(), Nf4(), Nf4(modulation="nf4")], ids=["int8", "nf4", "nf4 modulation"])
def test_adaln_stays_in_bf16(precision: WeightPrecision, zimage_config: dict[str, Any]) -> None:
    model = validate(merged(zimage_config, precision={"weights": precision.weights}), "kept").model
    layers = dict(model.load_denoiser(precision, CPU).named_modules())
    inside = {name: layer for name, layer in layers.items() if name.startswith(("layers.", "noise_refiner."))}
    modulations = [layer for name, layer in inside.items() if name.endswith("adaLN_modulation.0")]
    assert modulations and all(type(layer) is nn.Linear for layer in modulations)
    assert {layer.weight.dtype for layer in modulations} == {torch.bfloat16}
    assert [name for name, layer in inside.items() if type(layer) is nn.Linear and "adaLN" not in name] == []


@pytest.mark.slow
def test_it_errs_less() -> None:
    """One block of the published width with random weights, modulations of a deviation of 0.25, int8 against fp32."""
    torch.manual_seed(0)
    with torch.device("meta"):
        blocks = nn.ModuleDict({"layers": nn.ModuleList([ZImageTransformerBlock(0, 3840, 30, 30, 1e-5, True)])})
    use_blocks(blocks, ["layers"])
    block = blocks["layers"][0].to_empty(device="cpu").eval().requires_grad_(False)  # type: ignore[index]
    layers = {name: layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear)}
    for name, parameter in block.named_parameters():
        if parameter.dim() == 2:
            spread = 0.25 if "adaLN" in name else 1
            parameter.normal_(0, spread * parameter.shape[1] ** -0.5).copy_(parameter.bfloat16())
        else:
            parameter.fill_(float("norm" in name))
    x, condition, turns = torch.randn(1, 64, 3840), torch.randn(1, 256), torch.rand(1, 64, 64) * 6
    angles = torch.polar(torch.ones_like(turns), turns)

    def output() -> Tensor:
        with torch.no_grad():
            found: Tensor = block(x, None, angles, condition)
        return found

    def quantise(*, modulation: bool) -> None:
        for name, layer in layers.items():
            if ("adaLN" in name) == modulation:
                layer.weight.copy_(Int8Linear.from_linear(layer, torch.float32).dequantise())

    exact, errors = output(), []
    for modulation in (False, True):
        quantise(modulation=modulation)
        errors.append(float((output() - exact).norm() / exact.norm()))
    kept, whole = errors
    assert 0.003 < kept < 0.93 * whole
