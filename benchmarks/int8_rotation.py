"""Errors of int8 and nf4 layers with and without rotated inputs, for the grid ``int8``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.quiet import quiet_config
from simpletune.engine.quant.int8_linear import Int8Linear, Int8Product, shared_rows
from simpletune.engine.quant.nf4_linear import Nf4Linear
from simpletune.engine.quant.rotation import Rotation
from simpletune.runs.attempts import AttemptRecorder
from simpletune.runs.folder import run_folder
from simpletune.training.set_up import set_up

TABLE = "Rotation"
TURNS: dict[Rotation, str] = {"none": "", "hadamard": "_rotated"}
COLUMNS = {
    "what": "[o, i], values", "weights": "weights int8", "weights_rotated": "rotated", "both": "weights and rows int8",
    "both_rotated": "rotated", "nf4": "weights nf4", "nf4_rotated": "rotated", "nf4_both": "product nf4",
    "nf4_both_rotated": "rotated",
}  # fmt: skip
ABOUT = """\
*Rotation*: the same errors with `precision.rotation` none and hadamard; of the weight itself (*weights*) and of the
product. *normal* and *outliers* as above; *heavy tails*: weights and activations follow Student's t with 4 degrees of
freedom. *embedded*: the tiny SD3's own weights and its activations in one micro-batch of the demo's run (8 pictures),
the mean over its layers of a kind, and in brackets the worst layer.

*Layers of other models*: the same at the sizes of their layers, with 64 rows and against fp32."""
GROUPS = {
    "q, k, v": r"attn2?\.(to_[qkv]|add_[qkv]_proj)$", "out": r"attn2?\.(to_out\.0|to_add_out)$",
    "up": r"ff(_context)?\.net\.0\.proj$", "down": r"ff(_context)?\.net\.2$",
    "modulation": r"norm1(_context)?\.linear$",
}  # fmt: skip
OTHERS: dict[str, dict[str, tuple[int, int]]] = {  # kinds of layers of other models, [o, i]
    "SDXL": {
        "q, k, v, out": (1280, 1280), "k, v of the text": (1280, 2048), "up": (10240, 1280), "down": (1280, 5120),
    },
    "klein 4B": {
        "q, k, v, out": (3072, 3072), "up": (18432, 3072), "down": (3072, 9216), "q, k, v, up in one": (27648, 3072),
        "out, down in one": (3072, 12288),
    },
    "Z-Image": {"q, k, v, out": (3840, 3840), "up": (10240, 3840), "down": (3840, 10240), "modulation": (15360, 256)},
}  # fmt: skip
OTHER_TABLE = "Layers of other models"
OTHER_COLUMNS = {
    "what": "[o, i], values", "weights": "weights int8", "weights_rotated": "rotated", "both": "weights and rows int8",
    "both_rotated": "rotated", "gradient": "input gradient, both int8", "gradient_rotated": "rotated",
}  # fmt: skip
OTHER_ROWS = 64
Errors = dict[str, float]


def relative(ours: Tensor, exact: Tensor) -> float:
    """Compute |ours - exact| / |exact|, in percent."""
    return 100 * float((ours.double() - exact).norm() / exact.norm())


def heavy_tailed(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw from Student's t with 4 degrees of freedom."""
    squares = torch.randn(4, *shape, generator=generator).square().mean(0)
    return torch.randn(shape, generator=generator) / squares.sqrt()


@torch.no_grad()
def errors(x: Tensor, weight: Tensor) -> Errors:  # [n, i], [o, i]
    """Measure the errors of one layer with each rotation against float64."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.copy_(weight)
    exact = x.double() @ weight.double().t()
    found: Errors = {}
    for turn, suffix in TURNS.items():
        int8 = Int8Linear.from_linear(linear, torch.float32, turn)
        nf4 = Nf4Linear.from_linear(linear, torch.float32, True, turn)
        product = Int8Product.apply(x, *shared_rows(x, int8.block), int8.weight, int8.scale, None, False, int8.block)
        found |= {
            f"weights{suffix}": relative(int8.dequantise(), weight.double()),
            f"both{suffix}": relative(product, exact),
            f"nf4{suffix}": relative(nf4.dequantise(), weight.double()),
            f"nf4_both{suffix}": relative(nf4(x), exact),
        }
    return found


def drawn_row(shape: tuple[int, int], kind: str, rows: int, outliers: int) -> Errors:
    """Measure a layer of drawn numbers: normal, outliers or heavy tails."""
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    if kind == "heavy tails":
        return errors(heavy_tailed(generator, rows, inputs), heavy_tailed(generator, outputs, inputs))
    x, weight = (torch.randn(count, inputs, generator=generator) for count in (rows, outputs))
    if kind == "outliers":
        x[:, torch.randperm(inputs, generator=generator)[:outliers]] *= 30
    return errors(x, weight)


@torch.no_grad()
def other_row(shape: tuple[int, int], kind: str, outliers: int) -> Errors:
    """Measure the errors of a large layer's int8 product and input gradient with each rotation, normal or outliers."""
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias=False)
    weight = linear.weight.normal_(generator=generator)
    x, grad_y = (torch.randn(OTHER_ROWS, width, generator=generator) for width in (inputs, outputs))
    if kind == "outliers":
        x[:, torch.randperm(inputs, generator=generator)[:outliers]] *= 30
    exact, exact_gradient = x @ weight.t(), grad_y @ weight
    found: Errors = {}
    for turn, suffix in TURNS.items():
        int8 = Int8Linear.from_linear(linear, torch.float32, turn)
        given = x.requires_grad_()
        with torch.enable_grad():
            own = (*shared_rows(given, int8.block), int8.weight, int8.scale, None, True, int8.block)
            product = Int8Product.apply(given, *own)
            (gradient,) = torch.autograd.grad(product, given, grad_y)
        found |= {
            f"weights{suffix}": 100 * float((int8.dequantise() - weight).norm() / weight.norm()),
            f"both{suffix}": relative(product, exact),
            f"gradient{suffix}": relative(gradient, exact_gradient),
        }
    return found


def embedded_row(group: str) -> dict[str, str]:
    """Mean and worst errors of the tiny SD3's layers of a kind."""
    found = [errors(x, weight) for name, x, weight in _embedded() if re.search(GROUPS[group], name)]
    columns = {key: [each[key] for each in found] for key in found[0]}
    return {key: f"{sum(each) / len(each):.2f} ({max(each):.2f})" for key, each in columns.items()}


@lru_cache(maxsize=1)
def _embedded() -> tuple[tuple[str, Tensor, Tensor], ...]:
    """Name, input [n, i] and weight [o, i] of each linear layer in the tiny SD3's blocks, in fp32."""
    with tempfile.TemporaryDirectory(prefix="simpletune-int8-") as scratch:
        config = quiet_config(Path("benchmarks/style.json"), scratch, "activations", ["precision.weights=fp32"])
        run = set_up(config, AttemptRecorder(run_folder(config), 0.0))
        found: list[tuple[str, Tensor, Tensor]] = []

        def keep(name: str, layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
            found.append((name, given[0].detach().flatten(0, -2), layer.weight.detach()))

        for name, layer in _linears(run.core.denoiser):
            layer.register_forward_pre_hook(lambda layer, given, name=name: keep(name, layer, given))
        with torch.no_grad():
            run.core.variant.predict(run.core.denoiser, run.batches.step(0)[0])
    return tuple(found)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The frozen linear layers of the blocks, without LoRA's factors."""
    for name, layer in model.named_modules():
        if name.startswith("transformer_blocks.") and isinstance(layer, nn.Linear) and ".lora_" not in name:
            yield name.removesuffix(".base_layer"), layer
