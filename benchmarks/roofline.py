"""What a device does at best: products of matrices and copies, measured; and the least time that a step can take."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

BEST_OF = 5
PRODUCTS, INT8, FP32, COPY = "bf16 products", "int8 products", "fp32 products", "copy"


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rates(device: torch.device) -> dict[str, dict[str, Any]]:
    """Each rate with its unit: products in 10^12 operations a second, copies in 10^9 bytes, read and written."""
    n, size = (8192, 2**30) if device.type == "cuda" else (1024, 2**27)
    found: dict[str, dict[str, Any]] = {}
    for name, dtype in ((PRODUCTS, torch.bfloat16), (FP32, torch.float32)):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        found[name] = {"rate": 2 * n**3 / fastest(partial(torch.matmul, a, b), device) / 1e12, "unit": "TFLOP/s"}
    a, b = (torch.randint(-127, 128, (n, n), device=device, dtype=torch.int8) for _ in range(2))
    found[INT8] = {"rate": 2 * n**3 / fastest(lambda: torch._int_mm(a, b.t()), device) / 1e12, "unit": "TOP/s"}
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    found[COPY] = {"rate": 2 * size / fastest(lambda: target.copy_(source), device) / 1e9, "unit": "GB/s"}
    return {name: {**row, "rate": round(row["rate"], 4)} for name, row in found.items()}


def fastest(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of a few calls: other work on the machine can only add time."""
    seconds = []
    for _ in range(BEST_OF + 1):
        finish(device)
        clock = time.perf_counter()
        call()
        finish(device)
        seconds.append(time.perf_counter() - clock)
    return min(seconds[1:])


def least_seconds(
    rates: dict[str, dict[str, Any]], operations: float, traffic: float, int8_operations: float = 0.0
) -> float:
    """The floor of a step.

    Args:
        rates: as measured.
        operations: of all products, recomputation included.
        traffic: bytes that have to be read and written at least.
        int8_operations: so many of the operations are done by int8 products.
    """
    products = (operations - int8_operations) / rates[PRODUCTS]["rate"] / 1e12
    return max(products + int8_operations / rates[INT8]["rate"] / 1e12, traffic / rates[COPY]["rate"] / 1e9)
