"""Training that starts from a file: the first prediction, other ranks, and files that a run cannot start from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import DENOISERS, predict_velocity, untouched
from torch import Tensor, nn

from simpletune.adapters.files.attach import load_loras
from simpletune.adapters.files.read import read_lora
from simpletune.adapters.files.starting_point import require_startable, start_from
from simpletune.adapters.files.updates import Updates
from simpletune.adapters.methods.dora import Dora
from simpletune.adapters.methods.layers import layer_shapes, shape_of
from simpletune.adapters.methods.loha import Loha
from simpletune.adapters.methods.lokr import Lokr
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.methods.oft import Oft
from simpletune.adapters.methods.targets import TargetedMethod
from simpletune.engine.quant.precision import BF16, FP32, Int8, WeightPrecision
from simpletune.system.options import UserError

EXACT = FP32()
LAYER = "transformer_blocks.0.attn.to_q"


def model_with(method: TargetedMethod | None, precision: WeightPrecision = EXACT, family: str = "sd3") -> Any:
    model = DENOISERS[family].build(precision, "cpu")
    if method is not None:
        method.attach(model, 7)
    return model.eval()


@functools.cache
def shapes(family: str = "sd3") -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape for name, shape in layer_shapes(untouched(family, EXACT)).items()}


@pytest.fixture(scope="module")
def trained_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A file as a run of the method exports it, with an update that matters."""
    known: dict[str, Path] = {}

    def export(method: TargetedMethod, family: str = "sd3") -> Path:
        key = f"{family} {method.model_dump_json()}"
        if key not in known:
            model = model_with(method, family=family)
            generator = torch.Generator().manual_seed(5)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1
            known[key] = method.export(model, tmp_path_factory.mktemp("trained"), {})
        return known[key]

    return export


def started(
    file: Path, method: TargetedMethod, scale: float = 1.0, precision: WeightPrecision = EXACT, family: str = "sd3"
) -> tuple[nn.Module, float]:
    model, updates = model_with(method, precision, family), read_lora(file)
    require_startable("start", method, updates, shapes(family), scale)
    return model, start_from(model, updates, scale)


def loss(model: nn.Module, precision: WeightPrecision = EXACT, family: str = "sd3") -> Tensor:
    with torch.no_grad():
        return DENOISERS[family].loss(model, precision, 1, "cpu")


@torch.no_grad()
def prediction(model: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    shapes = (2, 4, 8, 8), (2, 6, 24), (2, 16)
    z_t, prompts, pooled = (torch.randn(shape, generator=draw) for shape in shapes)
    return predict_velocity(model, z_t, torch.tensor([0.3, 0.8]), prompts, pooled, torch.float32)


def assert_same_effect(model: nn.Module, file: Path, scale: float = 1.0) -> None:
    """Up to rounding, a model's updates change its prediction as ``generate --lora`` does."""
    load_loras(other := model_with(None), [(file, scale)])
    base = prediction(untouched("sd3", EXACT))
    effect = prediction(other) - base
    assert (prediction(model) - base - effect).norm() < 1e-3 * effect.norm()


def drawn(file: Path, precision: WeightPrecision = EXACT, family: str = "sd3") -> Tensor:
    """The loss of what ``generate --lora`` draws with."""
    model = model_with(None, precision, family)
    load_loras(model, [(file, 1.0)])
    return loss(model, precision, family)


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *((Lora(rank=2, targets="all_linear"), precision) for precision in (EXACT, BF16(), Int8())),
        (Lora(rank=2, dtype="bf16"), BF16()),
        *((method, EXACT) for method in (Lokr(factor=4, rank=2), Lokr(factor=2, rank=None), Loha(rank=2), Oft())),
    ],
    ids=lambda option: getattr(option, "method", None) or option.weights,
)
def test_the_first_prediction_is_that_of_generate(
    method: TargetedMethod, precision: WeightPrecision, trained_file: Callable[..., Path]
) -> None:
    file = trained_file(method)
    model, error = started(file, method, precision=precision)
    assert error == 0 and torch.equal(loss(model, precision), expected := drawn(file, precision=precision))
    assert not torch.equal(expected, loss(untouched("sd3", precision), precision))


@pytest.mark.parametrize("family", ["sd15", "sd2"])
def test_of_a_unet_too(family: str, trained_file: Callable[..., Path]) -> None:
    method = Lora(rank=2, targets="all_linear")  # with 1x1 convolutions, and in kohya's layout
    file = trained_file(method, family)
    found = loss(started(file, method, family=family)[0], family=family)
    # torch multiplies by the factors of a convolution in another order if they train
    torch.testing.assert_close(found, drawn(file, family=family), rtol=1e-6 if family == "sd15" else 0, atol=0)


def test_a_dora_is_the_same_up_to_the_rounding_of_its_norms(trained_file: Callable[..., Path]) -> None:
    file = trained_file(method := Dora(rank=2, alpha=3.0))
    model, error = started(file, method)
    assert error == 0
    assert_same_effect(model, file)
    relative = {layer: replace(update, magnitude=None) for layer, update in read_lora(file).items()}  # ComfyUI's alone
    start_from(again := model_with(method), relative, 1.0)
    assert_same_effect(again, file)


def products(model: nn.Module) -> dict[str, Tensor]:
    """What each update adds to a weight."""
    found = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A") and shape_of(layer) is None and hasattr(layer, "scaling"):
            a, b = (pair["default"].weight for pair in (layer.lora_A, layer.lora_B))
            found[name] = layer.scaling["default"] * (b @ a)
    return found


@pytest.mark.parametrize(("scale", "alpha"), [(0.5, None), (1.0, 6.0)])
def test_another_rank_strength_and_alpha(scale: float, alpha: float | None, trained_file: Callable[..., Path]) -> None:
    file = trained_file(Lora(rank=4))
    wanted = {layer: scale * update.delta() for layer, update in read_lora(file).items()}
    model, error = started(file, Lora(rank=8, alpha=alpha), scale)
    torch.testing.assert_close(products(model), wanted)
    assert error == 0
    assert_same_effect(model, file, scale)
    a, b = (dict(model.get_submodule(LAYER).named_parameters())[f"lora_{x}.default.weight"] for x in "AB")
    assert a[4:].abs().min() > 0 and not b[:, 4:].any()  # the new ranks add nothing, and can learn

    model, error = started(file, Lora(rank=3, alpha=alpha), scale)
    found, s = products(model), {name: torch.linalg.svdvals(delta) for name, delta in wanted.items()}
    for name, delta in wanted.items():  # Eckart and Young: no update of this rank is nearer
        torch.testing.assert_close((found[name] - delta).norm(), s[name][3], rtol=1e-4, atol=1e-6)
    lost, whole = (sum(float(v[first:].square().sum()) for v in s.values()) for first in (3, 0))
    assert error == pytest.approx((lost / whole) ** 0.5, rel=1e-4) and 0.01 < error < 1


def test_layers_without_an_update_start_from_zero(trained_file: Callable[..., Path]) -> None:
    file = trained_file(Lora(rank=2, targets=["to_q"]))
    model, _ = started(file, Lora(rank=2, targets="attention"))
    assert torch.equal(loss(model), drawn(file))
    assert any(name.endswith("to_k") and not delta.any() for name, delta in products(model).items())


@pytest.mark.parametrize("kind", [Lora, Dora, Loha, Lokr])
def test_ranks_by_layer_start_from_a_file_with_the_same(kind: Any, trained_file: Callable[..., Path]) -> None:
    method = kind(rank=2, layers=[{"pattern": "to_q", "rank": 3}])
    file = trained_file(method)
    model, left_out = started(file, method)
    assert_same_effect(model, file)
    assert left_out == 0


@pytest.mark.parametrize(
    ("saved", "method", "scale", "message"),
    [
        (Lora(rank=2, targets="all_linear"), Lora(), 1,
         r"start: \d+ of \d+ layers are not trained by this run: .*ff.*Use adapter.targets all_linear"),
        (Lora(rank=2), Lora(layers=[{"pattern": "to_v", "rank": 0}]), 1,
         r"layers are not trained by this run: .*to_v.*Use an adapter.layers that does not leave them out"),
        (Loha(rank=2, layers=[{"pattern": "to_q", "rank": 3}]), Loha(rank=2), 1, "has the factors hada_w1_a 32 x 3"),
        (Lora(rank=2, targets=["norm_out.linear"]), Lora(), 1, "Use adapter.targets a list with the endings"),
        (Lora(rank=2), Dora(), 1,
         r"start is LoRA \(.*\), and DoRA starts only from its own kind. Use adapter.method lora"),
        (Lokr(factor=4), Lora(), 1, "start is LoKr .*Use adapter.method lokr, or start from a LoRA"),
        (Lokr(factor=4, rank=2), Lokr(factor=2, rank=2), 1,
         "has the factors lokr_w1 4 x 4, .* and this run trains lokr_w1 2 x 2"),
        (Loha(rank=2), Loha(rank=3), 1, "has the factors hada_w1_a 32 x 2.*Use the adapter settings"),
        (Oft(block_size=4), Oft(block_size=8), 1,
         "has the factors oft_triangle 8 x 6, and this run trains oft_triangle 4 x 28"),
        (Lora(rank=2), Lora(), 0, "the strength 0 must be above 0"),
        (Lora(rank=2), Lora(), float("inf"), "the strength inf must be above 0"),
        (Oft(), Oft(), 0.5, "no OFT equals the multiple of another. Leave out the strength, 0.5"),
        (Dora(rank=2), Dora(rank=2), 0.5, "no DoRA equals"),
    ],
)  # fmt: skip
def test_files_that_a_run_cannot_start_from(
    saved: TargetedMethod, method: TargetedMethod, scale: float, message: str, trained_file: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=message):
        require_startable("start", method, read_lora(trained_file(saved)), shapes(), scale)


def test_a_file_of_another_family_is_named(trained_file: Callable[..., Path]) -> None:
    updates: Updates = read_lora(trained_file(Lora(rank=2), "sd15"))
    with pytest.raises(
        UserError, match="start is for Stable Diffusion 1.5 or 2, and the base is Stable Diffusion 3. Give"
    ):
        require_startable("start", Lora(), updates, shapes(), 1)
