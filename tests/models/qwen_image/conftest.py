"""A tiny Qwen-Image with random weights, and the configuration of a run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_models import tiny_qwen_image


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_image.build(tmp_path_factory.mktemp("qwen") / "pipeline")


@pytest.fixture
def qwen_config(tiny_config: dict, qwen: Path) -> dict[str, Any]:
    return tiny_config | {
        "model": {"family": "qwen_image", "pretrained": str(qwen), "text_length": 64},
        "data": tiny_config["data"] | {"resolution": 64},
        "checkpoint": {"every": 2},
    }
