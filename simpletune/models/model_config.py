"""Types for a model's configuration and the shapes of its parameters; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Parameter shapes by name."""
ModelConfig = Mapping[str, Any]
"""A model's ``config.json``."""
