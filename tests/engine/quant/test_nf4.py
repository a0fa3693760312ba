"""The lean frozen nf4 linear: its arithmetic against bitsandbytes' own layer, gradients, bytes, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from frozen_layers import QUANTILES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.lora_layers import lora_layers
from simpletune.config.load import validate
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import GROUP, Nf4Linear, quantise_scales
from simpletune.engine.quant.precision import FP32, Nf4
from simpletune.models.sd3.sd3_option import SD3
from simpletune.system.options import ConfigError


def linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs, bias=bias)


def by_the_paper(weight: torch.Tensor) -> torch.Tensor:
    """The nearest quantile times the block's largest magnitude."""
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    levels = torch.tensor(QUANTILES)
    nearest = ((blocks / largest)[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * largest).flatten()[: weight.numel()].view_as(weight)


@pytest.mark.parametrize("inputs", [128, 40, 25])
def test_weights_are_the_paper_s(inputs: int) -> None:
    layer = linear(inputs, 48)
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles, for 9 s, what fills no block
        ours = Nf4Linear.from_linear(layer, torch.float32, double=False).dequantise()
    torch.testing.assert_close(ours, by_the_paper(layer.weight.detach()), rtol=1e-6, atol=1e-7)


def test_equals_bitsandbytes_own_layer() -> None:
    from bitsandbytes.nn import Linear4bit

    plain = linear(96, 64)
    theirs = Linear4bit(96, 64, quant_type="nf4", compress_statistics=False, compute_dtype=torch.float32)
    theirs.load_state_dict(plain.state_dict())
    theirs.to("cpu")
    x, ours = torch.randn(3, 96), Nf4Linear.from_linear(plain, torch.float32, double=False)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert not ours(x).requires_grad, "no gradient is computed that nobody needs"


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 700), seed=st.integers(0, 2**31), outlier=st.sampled_from([1.0, 1e3, 0.0]))
def test_the_scales_error_is_at_most_half_a_step(count: int, seed: int, outlier: float) -> None:
    absmax = torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 1
    absmax[0] *= outlier
    q, steps = quantise_scales(absmax)
    assert q.dtype == torch.uint8 and q.shape == (-(-count // GROUP), GROUP)
    back = (q * steps[:, 1:] + steps[:, :1]).flatten()[:count]
    bound = steps[:, 1].repeat_interleave(GROUP)[:count] * 0.501 + 1e-6 * absmax.max()
    assert ((back - absmax).abs() <= bound).all()


def test_equal_scales_and_zeros_stay_so_and_the_meta_device_has_the_shapes_and_types() -> None:
    q, steps = quantise_scales(torch.full((5,), 0.25))
    assert torch.equal((q * steps[:, 1:] + steps[:, :1]).flatten()[:5], torch.full((5,), 0.25))
    layer = linear(64, 8)
    layer.weight.data.zero_()
    assert (Nf4Linear.from_linear(layer, torch.float32, double=True).dequantise() == 0).all()
    for count in (1, GROUP, GROUP + 1):
        absmax = torch.rand(count)
        for twin, real in zip(quantise_scales(absmax.to("meta")), quantise_scales(absmax), strict=True):
            assert twin.is_meta
            assert (twin.shape, twin.stride(), twin.dtype) == (real.shape, real.stride(), real.dtype)
    full, shaped = (
        Nf4Linear.from_linear(nn.Linear(40, 24, device=device), torch.bfloat16, double=True).state_dict()
        for device in ("cpu", "meta")
    )
    assert {name: (t.shape, t.dtype) for name, t in full.items()} == {n: (t.shape, t.dtype) for n, t in shaped.items()}


def test_errors_and_bytes() -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(1024, 512, bias=False)
    layer.weight.data = weight
    sizes, errors = {}, {}
    for double in (False, True):
        twin = Nf4Linear.from_linear(layer, torch.bfloat16, double)
        sizes[double] = sum(t.numel() * t.element_size() for t in twin.state_dict().values())
        errors[double] = ((twin.dequantise() - weight).norm() / weight.norm()).item()
    blocks = weight.numel() // 64
    assert sizes[False] == weight.numel() // 2 + 4 * blocks
    assert sizes[True] == weight.numel() // 2 + blocks + 8 * blocks // 256
    # The mean error of these 16 levels under a normal density, blocks of 64: about 9%.
    assert 0.085 < errors[False] < 0.097
    assert abs(errors[True] / errors[False] - 1) < 1e-3


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_output_and_input_gradient_are_those_of_the_dequantised_layer(
    double: bool, bias: bool, dtype: torch.dtype
) -> None:
    """It keeps references to its own tensors only."""
    layer, kept = Nf4Linear.from_linear(linear(24, 40, bias), dtype, double), []
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    own = [layer.weight, layer.absmax, *([layer.steps] if double else [])]
    assert sorted(tensor.data_ptr() for tensor in kept) == sorted(tensor.data_ptr() for tensor in own)
    y.float().square().sum().backward()
    x_plain = x.detach().float().requires_grad_()
    y_plain = nn.functional.linear(x_plain, layer.dequantise(), layer.bias.float() if bias else None)
    y_plain.square().sum().backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 6e-2}
    torch.testing.assert_close(y.float(), y_plain, **tolerance)
    torch.testing.assert_close(x.grad.float(), x_plain.grad, **tolerance)
    assert layer.weight.grad is None


@pytest.mark.parametrize("modulation", ["int8", "nf4"])
def test_which_layers_are_held_how(modulation: str, tiny_pipeline) -> None:
    """LoRA fits layers whose weight is packed."""
    model = SD3().model_copy(update={"pretrained": str(tiny_pipeline)})
    loaded = model.load_denoiser(Nf4(modulation=modulation), torch.device("cpu"))
    kinds = {name: type(m) for name, m in loaded.named_modules() if isinstance(m, nn.Linear)}
    inside = {name: kind for name, kind in kinds.items() if name.startswith("transformer_blocks.")}
    assert all(kind is nn.Linear for name, kind in kinds.items() if name not in inside)
    ada = {name for name in inside if ".norm1" in name}
    assert ada == {"transformer_blocks.0.norm1.linear", "transformer_blocks.0.norm1_context.linear"}
    assert {inside[name] for name in ada} == {Int8Linear if modulation == "int8" else Nf4Linear}
    assert {kind for name, kind in inside.items() if name not in ada} == {Nf4Linear}
    plain = model.load_denoiser(FP32(), torch.device("cpu"))
    assert model.architecture.parameter_count() == sum(p.numel() for p in plain.parameters())
    for each in (loaded, plain):
        Lora(rank=3, targets="all_linear").attach(each, seed=0)
    ours, theirs = dict(lora_layers(loaded)), dict(lora_layers(plain))
    assert set(ours) == set(theirs) and ours
    for name, layer in ours.items():
        assert layer.lora_A["default"].weight.shape == theirs[name].lora_A["default"].weight.shape
        assert layer.lora_B["default"].weight.shape == theirs[name].lora_B["default"].weight.shape


def test_it_is_refused_as_a_base_that_trains(tiny_config: dict) -> None:
    tiny_config |= {"precision": {"weights": "nf4"}, "adapter": {"method": "full"}}
    with pytest.raises(ConfigError, match="precision.weights: nf4 weights are frozen"):
        validate(tiny_config, "full")
