"""Read configurations stored in runs, checkpoints and LoRA files, possibly by an older version."""

from __future__ import annotations

import json

from simpletune.config.rules.family import with_objective
from simpletune.config.schema import TrainConfig


def read_saved(text: str | bytes) -> TrainConfig:
    """Read a complete configuration. Accepts an ``objective`` without a name, from before there were several.

    Args:
        text: the JSON.

    Raises:
        pydantic.ValidationError: the text is not JSON, or not a configuration of this version.
    """
    try:
        data = json.loads(text)
    except ValueError:
        return TrainConfig.model_validate_json(text)  # validation reports what is wrong
    return TrainConfig.model_validate_json(json.dumps(with_objective(data) if isinstance(data, dict) else data))
