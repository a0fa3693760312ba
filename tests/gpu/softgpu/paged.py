"""bitsandbytes' managed memory: its kernels that have no PyTorch operator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from softgpu import queues
from softgpu.aliases import alias

DEFAULT_STREAM = 0


def _patch_functional(module: ModuleType) -> None:
    def elementwise(name: str, a: Tensor, b: Tensor | None, value: Any, prefetch: bool = True) -> None:
        target, other = alias(a), None if b is None else alias(b)
        if name == "fill":
            queues.push(DEFAULT_STREAM, lambda: target.fill_(value))
        elif name == "arange":
            queues.push(DEFAULT_STREAM, lambda: target.copy_(torch.arange(target.numel()).view(target.shape)))
        elif name == "_mul" and other is not None:
            queues.push(DEFAULT_STREAM, lambda: target.mul_(other))
        else:
            raise NotImplementedError(f"softgpu: bitsandbytes' {name} has no values here")
        if a.is_paged or (b is not None and b.is_paged):  # type: ignore[attr-defined]
            torch.cuda.synchronize()

    module.elementwise_func = elementwise  # type: ignore[attr-defined]


PATCHES = {"bitsandbytes.functional": _patch_functional}
