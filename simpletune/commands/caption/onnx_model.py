"""Open ONNX models: of taggers, and of masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpletune.system.printable import first_line

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def open_onnx(model: Path | bytes, device: str = "auto") -> Any:
    """Load an ONNX model in onnxruntime, on a card if it can use one and ``device`` is not cpu. Raises ValueError if it
    cannot be loaded."""
    import onnxruntime

    has_cuda = CUDA in onnxruntime.get_available_providers()
    providers = [CUDA, CPU] if has_cuda and device != "cpu" else [CPU]
    try:
        return onnxruntime.InferenceSession(model, providers=providers)
    except Exception as error:  # its errors have no base class of their own
        raise ValueError(first_line(error)) from None
