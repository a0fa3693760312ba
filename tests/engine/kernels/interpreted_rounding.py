"""Make Triton's interpreter round as a card does. Import only if TRITON_INTERPRET is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter


@pytest.fixture(autouse=True, scope="module")
def rounding_to_nearest() -> Iterator[None]:
    """The interpreter cuts fp32 off to bf16, where a card rounds to nearest."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original = builder.cast_impl

    def cast(self: Any, src: Any, kind: Any) -> Any:
        if src.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            data = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return handle(data.view(torch.uint16).numpy().reshape(src.data.shape), tl.bfloat16)
        return original(self, src, kind)

    builder.cast_impl = cast
    yield
    builder.cast_impl = original
