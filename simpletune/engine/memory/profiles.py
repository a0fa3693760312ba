"""``memory.profile``: presets of options for cards of common sizes; explicit values override them.

The predicted peaks in ``benchmarks/results``, of the training step at 1024 px with batch size 1 and of the other
stages, stay about 1 GiB below the card's memory, which leaves room for the CUDA context, a display and fragmentation.
"""

from __future__ import annotations

import copy
from typing import Literal

from simpletune.system.options import Json

Name = Literal["4gb", "6gb", "8gb", "12gb", "16gb", "24gb"]

_PLAN: Json = {"modulation": "plan"}
_IN_BACKWARD: Json = {
    "precision": {"weights": "bf16"},
    "optimizer": {"name": "adamw8bit"},
    "train": {"clip": "per_parameter", "gradient_accumulation": 1},
}


def _in_backward(**memory: object) -> Json:
    return {**_IN_BACKWARD, "memory": {"optimizer_in_backward": True, **memory}}


LORA: dict[str, Json] = {
    "4gb": {"precision": {"weights": "int8"}, "memory": {**_PLAN, "vae_tile": 512}},
    "6gb": {"precision": {"weights": "int8"}, "memory": _PLAN},
    "8gb": {"precision": {"weights": "bf16"}, "memory": _PLAN},
    "12gb": {"precision": {"weights": "bf16"}, "memory": {**_PLAN, "checkpointing": "none"}},
    "16gb": {"precision": {"weights": "bf16"}, "memory": {"checkpointing": "none"}},
    "24gb": {"precision": {"weights": "bf16"}, "memory": {"checkpointing": "none"}},
}
FULL: dict[str, Json] = {
    "4gb": _in_backward(resident_blocks=0, vae_tile=512),
    "6gb": _in_backward(resident_blocks=10, vae_tile=512),
    "8gb": _in_backward(resident_blocks=14, vae_tile=512),
    "12gb": _in_backward(),
    "16gb": {"precision": {"weights": "bf16"}, "optimizer": {"name": "adamw8bit"}},
    "24gb": {"precision": {"weights": "bf16"}, "optimizer": {"name": "adamw8bit"}, "memory": {"checkpointing": "none"}},
}


def with_profile(data: Json, trains_base: bool) -> Json:
    """Add a profile's values to a configuration, merged with the overrides, that does not set them; ``trains_base``:
    whether the adapter trains base weights. Without a known profile, returns it unchanged."""
    memory = data.get("memory")
    name = memory.get("profile") if isinstance(memory, dict) else None
    preset = (FULL if trains_base else LORA).get(name) if isinstance(name, str) else None
    return data if preset is None else _under(preset, data)


def _under(preset: Json, own: Json) -> Json:
    """Override a preset's values. If they select another member of a union, drop the preset's fields of that union."""
    result = copy.deepcopy(preset)
    for key, value in own.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            other = any(tag in value and value[tag] != below.get(tag) for tag in ("weights", "name"))
            result[key] = value if other else _under(below, value)
        else:
            result[key] = value
    return result
