"""Read the configurations that runs, checkpoints and LoRA files keep, which an older version may have written."""

from __future__ import annotations

import json

from simpletune.config.rules.family import with_objective
from simpletune.config.schema import TrainConfig


def read_saved(text: str | bytes) -> TrainConfig:
    """Read a complete configuration. Before there were several objectives, ``objective`` had no name.

    Args:
        text: the JSON.

    Raises:
        pydantic.ValidationError: it is no JSON, or no configuration of this version.
    """
    try:
        data = json.loads(text)
    except ValueError:
        return TrainConfig.model_validate_json(text)  # which says what is wrong with it
    return TrainConfig.model_validate_json(json.dumps(with_objective(data) if isinstance(data, dict) else data))
