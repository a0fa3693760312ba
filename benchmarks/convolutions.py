"""``convolutions``: measure what frozen int8 convolutions cost and save in the resnets of SD 1.5's UNet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.roofline import finish
from benchmarks.table import Results, describe_machine
from simpletune.engine.quant.int8_conv import Int8Conv2d
from simpletune.system.devices import choose_device

TIME_WIDTH, ROUNDS, MIB = 1280, 12, 2**20
RESNETS = {"320 channels, 64 x 64": (320, 64), "1280 channels, 16 x 16": (1280, 16)}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCHES = (1, 4)
COLUMNS = {
    "what": "", "plain": "frozen, s", "int8": "int8, s", "ratio": "int8 / frozen", "plain_mib": "saved by frozen, MiB",
    "int8_mib": "saved by int8, MiB", "error": "error of the update, %",
}  # fmt: skip
ABOUT = f"""\
One resnet of SD 1.5's UNet with random weights, at its size for pictures of 512 px: forward pass and gradient of the
input, everything frozen. Both convolutions are torch's, or int8 (dequantised for each pass). Both kinds alternate in
one process; seconds are the minimum of {ROUNDS} rounds. *Saved*: tensors saved for the backward pass,
without weights. *Error*: norm of the difference over norm of what the resnet adds to its input."""


def resnet(channels: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a frozen resnet as in SD 1.5's UNet."""
    from diffusers.models.resnet import ResnetBlock2D

    torch.manual_seed(0)
    block = ResnetBlock2D(in_channels=channels, out_channels=channels, temb_channels=TIME_WIDTH, eps=1e-5)
    return block.to(device, dtype).requires_grad_(False)


def saved_mib(call: Callable[[], Tensor], weights: list[Tensor]) -> float:
    """Sum what a forward pass saves for the backward pass, each storage once."""
    own = {weight.data_ptr() for weight in weights}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = call()  # keeps the saved tensors alive, so that no two have one address
    del output
    return sum(found.values()) / MIB


def seconds_of(block: nn.Module, x: Tensor, time: Tensor) -> float:
    """Time a forward pass and the gradient of the input."""
    x.grad = None
    finish(x.device)
    clock = perf_counter()
    block(x, time).sum().backward()
    finish(x.device)
    return perf_counter() - clock


def measure(channels: int, size: int, batch: int, kind: str) -> dict[str, float]:
    """Measure one resnet with plain and with int8 convolutions."""
    device, dtype = choose_device("auto", kind, is_demo=True)[0], TYPES[kind]
    plain = resnet(channels, dtype, device)
    quantised = copy.deepcopy(plain)
    for name, layer in plain.named_children():
        if isinstance(layer, nn.Conv2d):
            setattr(quantised, name, Int8Conv2d.from_conv(layer, dtype))
    x = torch.randn(batch, channels, size, size, device=device).to(dtype).requires_grad_()
    time = torch.randn(batch, TIME_WIDTH, device=device).to(dtype)

    kinds = {"plain": plain, "int8": quantised}
    seconds = dict.fromkeys(kinds, float("inf"))
    for _ in range(ROUNDS):
        for name, block in kinds.items():
            seconds[name] = min(seconds[name], seconds_of(block, x, time))
    saved = {
        f"{name}_mib": saved_mib(partial(block, x, time), [*block.parameters(), *block.buffers()])
        for name, block in kinds.items()
    }
    with torch.no_grad():
        update, ours = (block(x, time).double() - x.double() for block in kinds.values())
    error = 100 * float((ours - update).norm() / update.norm())
    return {**seconds, "ratio": seconds["int8"] / seconds["plain"], **saved, "error": error}


def run(folder: Path, minutes: float, only: str) -> Path:
    """Measure missing rows and write their table."""
    results = Results(folder / "convolutions", COLUMNS)
    rows = {
        f"{name}, batch {batch}, {kind}": partial(measure, *shape, batch, kind)
        for name, shape in RESNETS.items()
        for kind in TYPES
        for batch in BATCHES
    }
    results.measure(rows, minutes, only)
    return results.write_table("Frozen int8 convolutions: time and memory", ABOUT, describe_machine())
