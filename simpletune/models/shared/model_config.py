"""A model's configuration and the shapes of its parameters; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Parameter shapes by name."""
ModelConfig = Mapping[str, Any]
"""A model's ``config.json``."""


def linear(name: str, inputs: int, outputs: int) -> dict[str, Shape]:
    """A linear layer's weight and bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
