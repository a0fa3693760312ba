"""A tiny Z-Image with random weights, and the configuration of a run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_models import tiny_zimage


@pytest.fixture(scope="session")
def zimage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_zimage.build(tmp_path_factory.mktemp("zimage") / "pipeline")


@pytest.fixture
def zimage_config(tiny_config: dict, zimage: Path) -> dict[str, Any]:
    return tiny_config | {
        "model": {"family": "zimage", "pretrained": str(zimage), "text_length": 96},
        "data": tiny_config["data"] | {"resolution": 64},
        "checkpoint": {"every": 2},
    }
