"""``simpletune doctor --calibrate CONFIG``: tune the int8 kernels for a run ahead of its first step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from simpletune.config.compute import settle_compute
from simpletune.config.load import read_config
from simpletune.config.resolve import resolve_model_folder
from simpletune.engine.memory.fake import fake_tensors
from simpletune.engine.quant import int8_tuning
from simpletune.engine.quant.int8_products import int8_problem
from simpletune.estimate.simulate.reports import square_size
from simpletune.stages.load import empty_base
from simpletune.stages.step.synthetic import CPU
from simpletune.system.console import say
from simpletune.system.options import UserError, plural


def tune_ahead(file: Path, overrides: Sequence[str]) -> None:
    """Tune the kernels for every product of a run, in Triton's cache folder. Raises UserError if the run has no int8
    products, or the machine has no card for them."""
    config = resolve_model_folder(read_config(file, list(overrides), needs_data=False)[0])
    if not torch.cuda.is_available():
        raise UserError("CONFIG: kernels are tuned on the card that will run them, and torch finds no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    config = settle_compute(config, torch.cuda.get_device_capability(device))
    with fake_tensors():
        size, batch = square_size(config), config.train.micro_batch
        denoiser = empty_base(config.model, config.memory, config.precision, CPU, [size])
        rows = config.model.architecture.layer_rows(size)
        shapes = int8_tuning.tunings(denoiser, lambda layer: [batch * rows(layer)])
    if not shapes:
        raise UserError(
            f"CONFIG: {config.name} does not multiply in int8, so there is nothing to tune. Use "
            "precision.weights=int8 precision.products=int8, or leave out CONFIG to measure the card"
        )
    reason = int8_problem(device)
    if reason is not None:
        raise UserError(f"CONFIG: int8 products do not run here: {reason}. Use precision.products=dequantised")
    started = time.perf_counter()
    int8_tuning.tune(shapes, device, config.precision.compute_dtype())
    say(f"tuned   {plural(len(shapes), 'product')} of {config.name} in {time.perf_counter() - started:.0f} s")
