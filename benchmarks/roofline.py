"""Measure a device's best rates of matrix products and copies, and derive the minimum time of a step."""

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
    """Measure each rate: products in 10^12 operations per second, copies in 10^9 bytes read and written per second."""
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
    """Return the seconds of the fastest of a few calls: other work on the machine can only add time."""
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
    """Compute the minimum time of a step.

    Args:
        rates: measured.
        operations: of all products, including recomputation.
        traffic: minimum of bytes to read and write.
        int8_operations: the part of the operations in int8 products.
    """
    products = (operations - int8_operations) / rates[PRODUCTS]["rate"] / 1e12
    return max(products + int8_operations / rates[INT8]["rate"] / 1e12, traffic / rates[COPY]["rate"] / 1e9)
