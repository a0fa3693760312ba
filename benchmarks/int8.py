"""``int8``: measure the numerical error of int8 products.

Compare the losses of the demo's run in bf16 and with each kind of int8 products on the same steps, and measure the
error of one product at the sizes of SD3 Medium's layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import int8_rotation
from benchmarks.int8_rotation import relative
from benchmarks.quiet import QUIET, quiet_config
from benchmarks.table import Results, describe_machine
from simpletune.engine.quant import int8_products
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.runs.folder import SUMMARY, read_json_or_none, read_metrics
from simpletune.runs.report.charts import image
from simpletune.training.train import train

CONFIG, STEPS, ENDS, SMOOTH = Path("benchmarks/style.json"), 100, 10, 9
INT8 = ["precision.weights=int8", "precision.compute=bf16"]
NF4, ROTATED = ["precision.weights=nf4", "precision.compute=bf16"], "precision.rotation=hadamard"
RUNS = {
    "bf16": ["precision.weights=bf16", "precision.compute=bf16"],
    "int8, dequantised": INT8,
    "int8 products": [*INT8, "precision.products=int8"],
    "int8 products and gradients": [*INT8, "precision.products=int8", "precision.input_gradient=int8"],
    "int8, dequantised, rotated": [*INT8, ROTATED],
    "int8 products, rotated": [*INT8, "precision.products=int8", ROTATED],
    "int8 products and gradients, rotated": [
        *INT8, "precision.products=int8", "precision.input_gradient=int8", ROTATED
    ],
    "nf4": NF4,
    "nf4, rotated": [*NF4, ROTATED],
}  # fmt: skip
COLOURS = ["#222222", "#2a78c8", "#e0823d", "#2e9e6b", "#8fc1ee", "#f2bf94", "#93d6b5", "#8a4fb0", "#ccaee0"]
LAYERS = {"q, k, v, out": (1536, 1536), "up": (6144, 1536), "down": (1536, 6144)}  # [o, i]
ROWS, OUTLIERS = 333, 8
COLUMNS = {
    "what": "", "first": f"mean loss, first {ENDS} steps", "last": f"mean loss, last {ENDS}",
    "eval_loss_before": "fixed noise, before", "eval_loss_after": "fixed noise, after",
    "apart": "mean distance of a step's loss from bf16's",
}  # fmt: skip
ONE = "One product"
ERRORS = {
    "what": "[o, i], rows", "weights": "weights int8", "activations": "rows int8", "both": "both",
    "gradient": "input gradient, weights int8", "int8_gradient": "input gradient, both",
}  # fmt: skip
ABOUT = f"""\
The demo's run on the tiny SD3 for {STEPS} steps; only `precision` differs: pictures, noise levels and noise are
identical in every step. On a CPU, `torch._int_mm` computes the products with the kernel's arithmetic.

*{ONE}*: relative errors in percent (norm of the difference over norm of the exact product, in float64) at the sizes of
SD3 Medium's layers, {ROWS} rows, normally distributed weights; *outliers*: {OUTLIERS} columns of the activations are 30
times as large; *channels*: {OUTLIERS} rows of the weight are, too.

{int8_rotation.ABOUT}"""


def loss_row(options: list[str], overrides: list[str]) -> dict[str, Any]:
    """Run the demo once."""
    with tempfile.TemporaryDirectory(prefix="simpletune-int8-") as scratch:
        settings = [f"train.steps={STEPS}", *options, *overrides]
        run = train(quiet_config(CONFIG, scratch, "int8", settings, (*QUIET, "output.report=false")))
        losses = [float(row["loss"]) for row in read_metrics(run)]
        summary = read_json_or_none(run / SUMMARY) or {}
    figures = {"first": sum(losses[:ENDS]) / ENDS, "last": sum(losses[-ENDS:]) / ENDS}
    figures |= {key: summary[key] for key in ("eval_loss_before", "eval_loss_after")}
    return {**{key: f"{value:.5f}" for key, value in figures.items()}, "losses": losses}


@torch.no_grad()
def error_row(shape: tuple[int, int], outliers: str) -> dict[str, Any]:
    """Measure the errors of one layer's product and of its input gradient against float64."""
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, inputs, generator=generator)
    grad_y = torch.randn(ROWS, outputs, generator=generator)
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight.copy_(torch.randn(outputs, inputs, generator=generator) * inputs**-0.5)
    if outliers == "outliers":
        x[:, torch.randperm(inputs, generator=generator)[:OUTLIERS]] *= 30
    if outliers == "channels":
        linear.weight[torch.randperm(outputs, generator=generator)[:OUTLIERS]] *= 30
    layer, weight = Int8Linear.from_linear(linear, torch.float32), linear.weight.double()
    held = layer.dequantise().double()
    rows, scale = int8_products.int8_rows(x)
    both = int8_products.int8_product(rows, scale, layer.weight, layer.scale, None, torch.float32)
    exact, exact_gradient = x.double() @ weight.t(), grad_y.double() @ weight
    return {
        "table": ONE,
        "weights": relative(x.double() @ held.t(), exact),
        "activations": relative((rows.double() * scale.double()[:, None]) @ weight.t(), exact),
        "both": relative(both, exact),
        "gradient": relative(grad_y.double() @ held, exact_gradient),
        "int8_gradient": relative(int8_products.int8_input_gradient(grad_y, layer.weight, layer.scale), exact_gradient),
    }


def grid(overrides: list[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return every row's name and the function that measures it."""
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        name: partial(loss_row, options, overrides) for name, options in RUNS.items()
    }
    for kind in ("normal", "outliers", "channels"):
        for name, shape in LAYERS.items():
            rows[f"{name} {list(shape)}, {kind}"] = partial(error_row, shape, kind)
    for kind in ("normal", "outliers", "heavy tails"):
        for name, shape in LAYERS.items():
            drawn = partial(int8_rotation.drawn_row, shape, kind, ROWS, OUTLIERS)
            rows[f"rotation: {name} {list(shape)}, {kind}"] = partial(in_table, drawn)
    for group in int8_rotation.GROUPS:
        rows[f"rotation: {group}, embedded"] = partial(in_table, partial(int8_rotation.embedded_row, group))
    for model, layers in int8_rotation.OTHERS.items():
        for name, shape in layers.items():
            for kind in ("normal", "outliers"):
                drawn = partial(int8_rotation.other_row, shape, kind, OUTLIERS)
                rows[f"{model}: {name} {list(shape)}, {kind}"] = partial(in_table, drawn, int8_rotation.OTHER_TABLE)
    return rows


def in_table(measure: Callable[[], Mapping[str, float | str]], table: str = int8_rotation.TABLE) -> dict[str, Any]:
    """Measure a row of a further table."""
    return {"table": table, **measure()}


def smoothed(losses: list[float]) -> list[float]:
    """Average each step with its neighbours."""
    half = SMOOTH // 2
    near = [losses[max(0, step - half) : step + half + 1] for step in range(len(losses))]
    return [sum(some) / len(some) for some in near]


def draw(rows: dict[str, dict[str, Any]], file: Path) -> None:
    """Chart the losses, and their difference from bf16's."""
    runs = {name: rows[name]["losses"] for name in RUNS if name in rows}
    base = runs["bf16"]
    points = [
        {"run": name, "step": step + 1, "loss": curve[step], "apart": losses[step] - base[step]}
        for name, losses in runs.items()
        for curve in [smoothed(losses)]
        for step in range(len(losses))
    ]
    colour = {"field": "run", "type": "nominal", "title": None, "sort": None,
              "scale": {"domain": list(runs), "range": COLOURS}}  # fmt: skip
    x = {"field": "step", "type": "quantitative", "title": "step", "scale": {"domain": [1, len(base)], "nice": False}}
    panels = [
        {"title": title, "width": 720, "height": height, "mark": {"type": "line", "strokeWidth": 1.6},
         "encoding": {"x": x, "color": colour,
                      "y": {"field": field, "type": "quantitative", "title": None, "scale": {"zero": False}}}}
        for field, title, height in (
            ("loss", f"Training loss, mean of {SMOOTH} steps", 260), ("apart", "Loss of each step minus bf16's", 160)
        )
    ]  # fmt: skip
    spec = {"data": {"values": points}, "vconcat": panels, "config": {"title": {"anchor": "start"}}}
    file.write_bytes(image(spec))


def run(folder: Path, minutes: float, only: str, overrides: list[str]) -> Path:
    """Measure missing rows; write their table and a chart of the losses."""
    results = Results(folder / "int8", COLUMNS)
    results.measure(grid(overrides), minutes, only)
    base = results.rows.get("bf16", {}).get("losses", [])
    for name in [name for name in RUNS if name in results.rows and base]:
        losses = results.rows[name]["losses"]
        apart = sum(abs(mine - theirs) for mine, theirs in zip(losses, base, strict=True)) / len(base)
        results.add(name, {**results.rows[name], "apart": f"{apart:.5f}"})
    if base:
        draw(results.rows, results.stem.with_suffix(".png"))
    more = {ONE: ERRORS, int8_rotation.TABLE: int8_rotation.COLUMNS}
    more |= {int8_rotation.OTHER_TABLE: int8_rotation.OTHER_COLUMNS}
    return results.write_table("int8 products: losses and errors", ABOUT, describe_machine(), more)
