"""Quantised UNets: which layers are held how, their bytes, the cached base, and how near they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from optimum.quanto import QLinear
from torch import Tensor, nn

from simpletune.adapters.files.base_reader import QuantisedBaseReader
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.quant.precision import FP32, Int8, Int8Quanto, Nf4, WeightPrecision
from simpletune.models.sd3.sd3_architecture import SD3Architecture
from simpletune.models.shared.parts import Part
from simpletune.models.shared.quantised_cache import QuantisedBase
from simpletune.models.shared.weights import fill_model, open_tensors
from simpletune.system.safetensors_file import WeightReader

CPU = torch.device("cpu")
UNITS = ResnetBlock2D, Transformer2DModel, Downsample2D, Upsample2D
TINY: dict[str, Any] = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 32, "attention_head_dim": 4,
}  # fmt: skip


def empty(config: dict[str, Any]) -> Any:
    with init_empty_weights(include_buffers=True):
        model = UNet2DConditionModel(**config)
    model.units = tuple(name for name, module in model.named_modules() if isinstance(module, UNITS))
    model.per_sample = frozenset(name for name, _ in model.named_modules() if name.endswith(".time_emb_proj"))
    model.unquantised = frozenset()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny UNet on disk."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("unet")
        UNet2DConditionModel(**TINY).save_pretrained(path)
    return path


Loaded = Callable[[WeightPrecision], Any]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    """A function that loads the tiny UNet, once in each precision: only read it."""
    known: dict[str, Any] = {}

    def load(precision: WeightPrecision) -> Any:
        if repr(precision) not in known:
            known[repr(precision)] = fill_model(
                empty(TINY), WeightReader([*folder.glob("*.safetensors")]), precision, CPU
            )
        return known[repr(precision)]

    return load


def kinds(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


@pytest.mark.parametrize(
    ("precision", "convolution", "linear", "modulation"),
    [
        (Int8(), Int8Conv2d, Int8Linear, Int8Linear),
        (Nf4(), Int8Conv2d, Nf4Linear, Int8Linear),
        (Nf4(modulation="nf4"), Int8Conv2d, Nf4Linear, Nf4Linear),
        (Int8Quanto(), nn.Conv2d, QLinear, QLinear),
        (FP32(), nn.Conv2d, nn.Linear, nn.Linear),
    ],
)
def test_which_layers_are_held_how(
    precision: WeightPrecision, convolution: type, linear: type, modulation: type, loaded: Loaded
) -> None:
    found, plain = kinds(loaded(precision)), kinds(empty(TINY))
    outside = {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}
    assert set(found) == set(plain) and outside < set(found)
    for name, kind in found.items():
        if name in outside:
            assert kind is plain[name], name
        elif plain[name] is not nn.Linear:
            assert kind is convolution, name
        else:
            assert kind is (modulation if name.endswith("time_emb_proj") else linear), name
    assert {"down_blocks.0.downsamplers.0.conv", "up_blocks.1.attentions.0.proj_in"} < set(found)


def int8_bytes(model: nn.Module) -> int:
    """A byte for every weight of the layers inside the units, 4 for each of their outputs, and bf16 for the rest."""
    total = 2 * sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    for unit in model.units:
        for layer in model.get_submodule(unit).modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                total += 4 * len(layer.weight) - layer.weight.numel()
    return total


def test_int8_weights_take_a_byte_and_the_unet_of_sd15_half(loaded: Loaded) -> None:
    tiny = loaded(Int8())
    assert sum(tensor.nbytes for tensor in (*tiny.parameters(), *tiny.buffers())) == int8_bytes(empty(TINY))
    model = empty({"cross_attention_dim": 768, "attention_head_dim": 8})  # the rest are diffusers' defaults
    assert sum(parameter.numel() for parameter in model.parameters()) == 859_520_964
    assert round(2 * 859_520_964 / 2**20) == 1639 and round(int8_bytes(model) / 2**20) == 823


def noise_predicted(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    z_t, prompts = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 4, 8, 8), (2, 7, 32)))
    with torch.no_grad():
        prediction: Tensor = model(z_t, torch.tensor([10, 900]), prompts).sample
    return prediction.float()


@pytest.mark.parametrize(
    ("precision", "most"),
    [
        (Int8(compute="fp32"), 0.015),
        (Int8(), 0.03),
        (Nf4(compute="fp32"), 0.1),
        pytest.param(Int8(compute="fp32", rotation="hadamard"), 0.015, marks=pytest.mark.slow),
        pytest.param(Nf4(compute="fp32", rotation="hadamard"), 0.1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_predictions_come_near(precision: WeightPrecision, most: float, loaded: Loaded) -> None:
    exact = noise_predicted(loaded(FP32()))
    ours = noise_predicted(loaded(precision), precision.compute_dtype())
    assert 0 < (ours - exact).norm() / exact.norm() < most


@pytest.mark.parametrize("precision", [Int8(), Nf4(), Int8Quanto(), Int8(rotation="hadamard")], ids=str)
def test_a_cached_base_is_the_quantised_one_bit_for_bit(
    precision: WeightPrecision, folder: Path, loaded: Loaded, tmp_path: Path
) -> None:
    fresh = loaded(precision)
    part = Part("unet", folder)
    base = QuantisedBase(tmp_path, TINY, lambda: empty(TINY), part, precision, CPU)
    assert base.load(lambda name: False) is None
    made = base.make(lambda name: False, lambda: open_tensors(part), lambda: pytest.fail("nothing was written"))
    again = made and base.load(lambda name: False)
    assert again is not None and kinds(again) == kinds(fresh)
    state = fresh.state_dict()
    assert list(again.state_dict()) == list(state)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]) and tensor.dtype == state[name].dtype, name
    assert torch.equal(*(noise_predicted(model, precision.compute_dtype()) for model in (again, fresh)))


@pytest.mark.parametrize("precision", [Int8(), Nf4()], ids=lambda option: option.weights)
def test_a_cached_base_is_dequantised_for_tools(
    precision: WeightPrecision, folder: Path, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part("unet", folder)
    base = QuantisedBase(tmp_path, TINY, lambda: empty(TINY), part, precision, CPU)
    assert base.write(open_tensors(part))
    monkeypatch.setattr(SD3Architecture, "empty_model", lambda self, config: empty(config))
    kept, plain = QuantisedBaseReader(base.folder), loaded(FP32()).state_dict()
    assert kept.shapes == {name: tuple(tensor.shape) for name, tensor in plain.items()}
    name = "down_blocks.0.resnets.0.conv1"
    assert kept.kinds[f"{name}.weight"] == "F32"
    assert kept.kinds[f"{name}.bias"] == kept.kinds["conv_in.weight"] == "BF16"
    weight, ours = plain[f"{name}.weight"], kept.get(f"{name}.weight")
    largest = weight.abs().amax((1, 2, 3), keepdim=True)
    assert ours.shape == weight.shape and ((ours - weight).abs() <= largest / 127 * 0.51).all()


@pytest.mark.parametrize(("width", "quantised"), [(16, True), (64, True), (4, False), (24, False), (40, False)])
def test_quanto_leaves_layers_whose_rows_torch_s_kernel_reads_beyond(width: int, quantised: bool) -> None:
    """``_weight_int8pack_mm`` loads 16 columns at a time, and a process dies where the next page is not its own."""
    assert Int8Quanto().quantises(nn.Linear(width, 8)) is quantised
