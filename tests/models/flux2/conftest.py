"""A tiny klein with random weights, and the configuration of a run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_models import tiny_klein


@pytest.fixture(scope="session")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_klein.build(tmp_path_factory.mktemp("klein") / "pipeline")


@pytest.fixture
def klein_config(tiny_config: dict, klein: Path) -> dict[str, Any]:
    return tiny_config | {
        "model": {"family": "klein", "pretrained": str(klein), "text_length": 64},
        "data": tiny_config["data"] | {"resolution": 64},
        "checkpoint": {"every": 2},
    }
