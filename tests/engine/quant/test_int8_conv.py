"""The frozen int8 convolution: rounding error, values, gradients, bytes, streaming, and LoRA on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocks import LateCopies, shake_updates
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Conv2d as LoraConv2d
from reference import convolution
from torch import Tensor, nn

from simpletune.engine.memory.accounting import Accounting
from simpletune.engine.memory.block_offload import BlockOffload
from simpletune.engine.memory.checkpointing import set_passes
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.system.phases import phase

KIB = 1024
GEOMETRIES = {"3x3": (3, 1, 1), "down": (3, 2, 1), "down-unpadded": (3, 2, 0), "1x1": (1, 1, 0), "5x5": (5, 1, 2)}
"""Kernel, stride and padding; the UNet's downsamplers have stride 2."""


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1, **other: Any) -> nn.Conv2d:
    """A convolution with random weights, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(inputs * 1000 + outputs)
        return nn.Conv2d(inputs, outputs, kernel, stride, padding, **other)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 12)] * 2, *[st.integers(1, 4)] * 2),
    seed=st.integers(0, 2**31),
    outlier=st.sampled_from([1.0, 50.0, 1e6, 1e-20]),
)
def test_rounding_error_is_at_most_half_a_scale(sizes: tuple[int, ...], seed: int, outlier: float) -> None:
    layer = nn.Conv2d(sizes[1], sizes[0], sizes[2:])
    layer.weight.data = noise(*sizes, seed=seed)
    layer.weight.data[0, 0, 0, 0] *= outlier
    twin = Int8Conv2d.from_conv(layer, torch.float32)
    assert twin.weight.dtype == torch.int8 and twin.weight.shape == sizes and twin.scale.shape == sizes[:1]
    scale = twin.scale[:, None, None, None]
    assert ((layer.weight - twin.dequantise()).abs() <= scale * 0.5001).all()
    assert (scale <= layer.weight.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-38) / 127 * (1 + 2**-7)).all()


@pytest.mark.parametrize(
    ("geometry", "dtype", "tolerance"),
    [
        *((geometry, torch.float32, 2e-6) for geometry in GEOMETRIES),
        ("down", torch.bfloat16, 1.5e-2), ("1x1", torch.bfloat16, 1.5e-2), ("3x3", torch.float16, 1.2e-3),
    ],
    ids=str,
)  # fmt: skip
def test_output_and_input_gradient_are_those_of_the_definition(
    geometry: str, dtype: torch.dtype, tolerance: float
) -> None:
    """It keeps references only, where a frozen convolution keeps its input."""
    kernel, stride, padding = GEOMETRIES[geometry]
    layer, kept = Int8Conv2d.from_conv(conv(6, 10, kernel, stride, padding), dtype), []
    weight = layer.weight.double().numpy() * layer.scale.double().numpy()[:, None, None, None]
    x = noise(2, 6, 9, 8).to(dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert sorted(t.data_ptr() for t in kept) == sorted([layer.weight.data_ptr(), layer.scale.data_ptr()])
    assert y.dtype == dtype
    expected = convolution.forward(x.detach().double().numpy(), weight, layer.bias.double().numpy(), stride, padding)
    assert_near(y, expected, tolerance)
    grad_y = noise(*y.shape, seed=1).to(dtype)
    y.backward(grad_y)
    expected = convolution.input_gradient(grad_y.double().numpy(), weight, (9, 8), stride, padding)
    assert_near(x.grad, expected, tolerance)
    assert layer.weight.grad is None and layer.bias.grad is None


def assert_near(ours: Tensor, theirs: Any, tolerance: float) -> None:
    """Within a part of the root mean square."""
    theirs = torch.from_numpy(theirs)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=float(tolerance * 4 * theirs.square().mean().sqrt()))


@pytest.mark.parametrize("other", [{"bias": False}, {"dilation": 2}, {"groups": 2}, {}])
def test_gradcheck_against_numbers(other: dict[str, Any]) -> None:
    layer = Int8Conv2d.from_conv(conv(4, 6, 3, 2, 1, **other), torch.float64)
    assert (layer.bias is None) == ("bias" in other)
    assert torch.autograd.gradcheck(layer, noise(2, 4, 6, 5).double().requires_grad_())


def test_half_precision_takes_small_scales_and_a_wider_input_takes_the_bias_along() -> None:
    """A scale below 2^-14 is subnormal in fp16; the weight it scales is rounded only once."""
    plain = conv(64, 8)
    plain.weight.data *= 1e-3
    layer = Int8Conv2d.from_conv(plain, torch.float16)
    assert layer.scale.max() < 2**-14
    x = noise(1, 64, 6, 6)
    expected = nn.functional.conv2d(x.half().float(), layer.dequantise().half().float(), layer.bias.float(), padding=1)
    y = layer(x.half())
    torch.testing.assert_close(y.float(), expected, rtol=2**-10, atol=1e-6)
    assert not y.requires_grad, "no gradient is computed that nobody needs"
    assert torch.equal(layer(x), nn.functional.conv2d(x, layer.dequantise(), layer.bias.float(), padding=1))


@pytest.mark.parametrize("other", [{"padding_mode": "circular"}, {"padding": "same"}])
def test_other_paddings_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{[*other.values()][0]}.* cannot be quantised: it must be a number of zeros"):
        Int8Conv2d.from_conv(nn.Conv2d(4, 4, 3, **other), torch.float32)


def test_on_the_meta_device_it_gives_shapes_that_a_state_fills() -> None:
    full = Int8Conv2d.from_conv(conv(4, 6), torch.bfloat16)
    empty = Int8Conv2d.from_conv(nn.Conv2d(4, 6, 3, 1, 1, device="meta"), torch.bfloat16)
    shapes = [{name: (t.shape, t.dtype) for name, t in each.state_dict().items()} for each in (full, empty)]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 3
    empty.load_state_dict(full.state_dict(), assign=True)
    x = noise(1, 4, 5, 5).bfloat16()
    assert torch.equal(empty(x), full(x))


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_a_step_holds_one_dequantised_weight_at_a_time(fake: bool) -> None:
    """Two layers in a row on the device: their weights in int8, and in fp32 only that of the layer that computes."""
    with fake_tensors() if fake else nullcontext(), Accounting() as count:
        layers = nn.Sequential(*[Int8Conv2d.from_conv(conv(16, 16, bias=False), torch.float32) for _ in range(2)])
        x = torch.ones(1, 16, 8, 8).requires_grad_()  # 4 KiB
        count.register([*layers.parameters(), *layers.buffers()], "weights")
        count.register([x], "plan")
        assert count.current.bytes == 2 * (2560 + 512) + 4 * KIB  # int8 and scales, rounded up to 512; the input
        with phase("forward"):
            y = layers(x)
            assert count.current.by_kind["activations"] == 4 * KIB  # the output; nothing is kept between the layers
        assert count.peaks["forward"].by_kind["activations"] == (9 + 2 * 4) * KIB  # weight, input, output
        grad = torch.ones_like(y)
        with phase("backward"):
            y.backward(grad)
        assert (
            count.peaks["backward"].by_kind["activations"] - 4 * KIB == (9 + 2 * 4) * KIB + 512
        )  # and 1 number of the input's shape


class Resnet(nn.Module):
    """A residual block of a 3x3 and a 1x1 convolution, both frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = Int8Conv2d.from_conv(conv(4, 6), torch.float32)
        self.narrow = Int8Conv2d.from_conv(conv(6, 4, 1, 1, 0), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[b, 4, h, w] -> [b, 4, h, w]."""
        return x + self.narrow(self.wide(x).sigmoid())


def chain_run(prepare: Callable[[nn.ModuleList], object]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of four blocks with LoRA on every convolution, and its gradients."""
    model = nn.Sequential(*[Resnet() for _ in range(4)])
    for number, block in enumerate(model):
        block.wide.scale.mul_(1 + number / 8)  # no block has another's values
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["wide", "narrow"]), model)
    shake_updates(model)
    prepare(model.train())
    y = model(noise(2, 4, 6, 6))
    y.square().sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_streamed_blocks_give_the_resident_ones_bit_for_bit() -> None:
    def stream(model: nn.Sequential) -> None:
        queues = LateCopies(), LateCopies()
        offload = BlockOffload(list(model), [0, 1, 3], torch.device("cpu"), queues=queues, poison=True)
        # weights, scales and biases, each rounded up
        assert [home.nbytes for home in offload.homes.values()] == [6 * 512] * 3
        set_passes(list(model), 4, weights=offload)

    ours, theirs = chain_run(stream), chain_run(lambda model: None)
    assert torch.equal(ours[0], theirs[0])
    assert len(theirs[1]) == 16
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)


@pytest.mark.parametrize("geometry", ["1x1", "3x3"])
def test_peft_adds_the_update_that_it_adds_to_a_plain_convolution(geometry: str) -> None:
    kernel, stride, padding = GEOMETRIES[geometry]
    plain = conv(6, 8, kernel, stride, padding)
    quantised = Int8Conv2d.from_conv(plain, torch.float32)
    plain.weight.data = quantised.dequantise()
    results = []
    for layer in (quantised, plain):
        torch.manual_seed(0)
        model = inject_adapter_in_model(LoraConfig(r=3, target_modules=["0"]), nn.Sequential(layer))
        shake_updates(model)
        lora: Any = model[0]
        assert isinstance(lora, LoraConv2d) and lora.lora_A["default"].weight.dtype == torch.float32
        x = noise(2, 6, 5, 5).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, lora.lora_A["default"].weight.grad, lora.lora_B["default"].weight.grad])
    assert results[0][2].shape == (3, 6, kernel, kernel) and results[0][3].shape == (8, 3, 1, 1)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert quantised.weight.dtype == torch.int8
