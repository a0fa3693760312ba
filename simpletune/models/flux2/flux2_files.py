"""Where klein's parts come from, and the configurations that ship."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from simpletune.models.shared.family_files import FamilyFiles
from simpletune.models.shared.model_config import ModelConfig

KLEIN = "black-forest-labs/FLUX.2-klein-base-4B"
HUB_NAMES: Mapping[str, str] = {KLEIN: "klein"}
"""Version of each Hub name whose configurations ship with this package."""


@lru_cache(maxsize=1)
def bundled_configs() -> Mapping[str, Mapping[str, ModelConfig]]:
    """Return the configurations by version and part."""
    return {"klein": json.loads((Path(__file__).parent / "klein_parts.json").read_bytes())}


class KleinFiles(FamilyFiles):
    """Where the parts of klein come from."""

    hub_names: ClassVar[Mapping[str, str]] = HUB_NAMES

    bundled_configs: ClassVar = staticmethod(bundled_configs)
