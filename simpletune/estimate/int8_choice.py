"""``precision.products: auto``: time one of a run's products of each kind on its card, and take the faster kind."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from simpletune.config.schema import TrainConfig
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.quant.int8_linear import Int8Linear
from simpletune.engine.quant.int8_products import FEW_ROWS, int8_problem, rotation_problem
from simpletune.engine.quant.precision import Int8
from simpletune.estimate.simulate.reports import square_size
from simpletune.stages.load import empty_base
from simpletune.stages.step.synthetic import CPU
from simpletune.system.console import say
from simpletune.system.options import Json

WARM, CALLS, TIMES = 3, 5, 5


class Product(NamedTuple):
    """A linear layer's product."""

    rows: int
    outputs: int
    inputs: int


class Timed(NamedTuple):
    """Seconds of a product, forward and backward."""

    device: float  # until the card has computed it, with calls queued one after the other
    host: float  # to queue it

    @property
    def counts(self) -> float:
        """The larger: the other is hidden behind it."""
        return max(self)


def choose_products(config: TrainConfig, device: torch.device, before: Json | None = None) -> TrainConfig:
    """Replace ``products: auto`` and print why; return any other configuration unchanged.

    Args:
        config: with folders resolved.
        before: configuration of the checkpoint that a run continues from: it keeps how it multiplied.
    """
    precision = config.precision
    if not isinstance(precision, Int8) or precision.products != "auto":
        return config
    saved = (before or {}).get("precision", {})
    if saved.get("products") in ("int8", "dequantised"):
        return with_precision(config, with_products(precision, saved["products"] == "int8"))
    reason = "on the CPU" if device.type == "cpu" else int8_problem(device)
    if reason is None and precision.rotation != "none":
        reason = rotation_problem(device)
    product = None if reason else largest_product(config, precision)
    if product is None:
        say(f"int8    products dequantised (auto: {reason or 'no layer has enough rows'})")
        return with_precision(config, with_products(precision, False))
    plain, int8 = (time_product(with_products(precision, each), product, device) for each in (False, True))
    chosen = int8.counts < plain.counts
    say(
        f"int8    products {'in int8' if chosen else 'dequantised'} (auto: {product.rows} x {product.inputs} to "
        f"{product.outputs}, forward and backward, take {1e6 * int8.device:,.0f} us in int8 and "
        f"{1e6 * plain.device:,.0f} dequantised; the host {1e6 * int8.host:,.0f} and {1e6 * plain.host:,.0f})"
    )
    return with_precision(config, with_products(precision, chosen))


def with_precision(config: TrainConfig, precision: Int8) -> TrainConfig:
    """Replace a configuration's precision."""
    return config.model_copy(update={"precision": precision})


def with_products(precision: Int8, int8: bool) -> Int8:
    """Multiply in int8, or with dequantised weights in both passes."""
    change = {"products": "int8"} if int8 else {"products": "dequantised", "input_gradient": "dequantised"}
    return precision.model_copy(update=change)


def largest_product(config: TrainConfig, precision: Int8) -> Product | None:
    """Return the shape of a run's products that has most of their operations; None if all have too few rows."""
    batch = 1 if config.train.batch_size == "auto" else config.train.micro_batch
    operations: Counter[Product] = Counter()
    with fake_tensors():
        size = square_size(config)
        denoiser = empty_base(config.model, config.memory, with_products(precision, True), CPU, [size])
        rows_of = config.model.architecture.layer_rows(size)
        for name, layer in denoiser.named_modules():
            if isinstance(layer, Int8Linear) and layer.int8_products and (rows := batch * rows_of(name)) > FEW_ROWS:
                product = Product(rows, *layer.weight.shape)
                operations[product] += rows * layer.weight.numel()
    return operations.most_common(1)[0][0] if operations else None


def time_product(precision: Int8, product: Product, device: torch.device) -> Timed:
    """Time a linear layer's product and its input's gradient."""
    dtype = precision.compute_dtype()
    linear = nn.Linear(product.inputs, product.outputs, device=device, dtype=dtype)
    layer = precision.convert(linear.requires_grad_(False))
    x = torch.ones(product.rows, product.inputs, device=device, dtype=dtype)
    grad = torch.ones(product.rows, product.outputs, device=device, dtype=dtype)

    def run(calls: int) -> None:
        for _ in range(calls):
            layer(x.detach().requires_grad_()).backward(grad)  # a new tensor: layers share one's quantised rows

    run(WARM)  # tunes the kernels, which the run needs in any case
    found = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        clock = time.perf_counter()
        run(CALLS)
        host = time.perf_counter() - clock
        end.record()
        torch.cuda.synchronize(device)
        found.append((begin.elapsed_time(end) / 1e3 / CALLS, host / CALLS))
    return Timed(*map(min, zip(*found, strict=True)))  # what disturbs adds
